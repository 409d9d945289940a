"""Traits of a training framework beyond the plan: kernels, fusion, storage, and overlap."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from muster.spec.base import Frozen
from muster.spec.device import AttentionKernel

StateStorage = Literal["muster", "megatron"]
"""Storage of the model's state. muster: float32 weights, gradients and moments, all sharded alike by `fully_shard`, and
a gathered copy in the compute dtype. megatron: weights in the compute dtype, complete gradients in one buffer, and
float32 master weights and moments sharded over data-parallel ranks (Megatron-LM's distributed optimizer, DeepSpeed's
ZeRO-1)."""


class FrameworkTraits(Frozen):
    """Stated traits of a training framework. The defaults are those of a current one on GPUs; `muster.spec.frameworks`
    has those of named frameworks."""

    name: str = ""
    """Name shown to people; empty for one described by its traits alone."""
    storage: StateStorage = "muster"
    """Storage of a rank's part of the model."""
    attention: AttentionKernel | None = None
    """Attention kernel; None: the fastest that the device has a rate for."""
    fp8_attention: bool = False
    """Matmuls of attention are in fp8, too, where others are."""
    fused_soft_cap: bool = True
    """The attention kernel caps scores itself, in models that cap them; otherwise pieces of the scores are in memory,
    and each operation on them is a pass."""
    padded_values: bool = False
    """Values of latent attention that are narrower than keys are padded to their width; otherwise kernels take both."""
    fused_swiglu_clamp: bool = True
    """A clamped SwiGLU is one kernel, and biases of experts and attention sinks are parts of others; otherwise each of
    their operations is a pass over memory."""
    compiles_by_default: bool = False
    """A plan that doesn't say whether it is compiled is, on GPUs, where nothing in it stands against that."""
    fused_elementwise: bool | None = True
    """Activations, rotary positions and norms take one pass over memory each, as with torch.compile or hand-written
    kernels; otherwise each of their operations is a pass. None: as the plan's `compile` says."""
    fused_norms: bool | None = None
    """The same for norms alone, where it differs; None: as `fused_elementwise`."""
    norm_casts: bool = True
    """In eager code the fused norm stands between casts to float32 and back; otherwise it casts in its registers."""
    fused_loss: bool | None = True
    """The cross-entropy reads logits and writes their gradient, without float32 copies of them. None: as the plan's
    `compile` says."""
    loss_keeps_gradient: bool = False
    """An unfused loss makes the gradient of the logits in the forward, in place of the copies that it no longer needs,
    and the backward only scales it; otherwise each pass makes its own."""
    early_stop_recompute: bool = True
    """Full recompute stops once the backward has all that it needs: a layer's last matmul isn't repeated, as with
    torch's non-reentrant checkpoint; otherwise the whole layer is."""
    repeats_last_tp_matmul: bool = False
    """With tensor parallelism it is repeated even so: an autograd function around the matmul saves its input behind it.
    The collective after it isn't."""
    gathered_logits: bool = False
    """The loss is composed of framework functions, in float32, on the logits of the complete vocabulary, which every
    tensor-parallel rank gathers (Aleph Alpha's scaling: lm_head.py, cross_entropy.py)."""
    dropout: bool = False
    """Dropout after attention and MLP, and on attention's probabilities, whatever the model says."""
    counted_dropout: bool = False
    """A model's dropout computes its masks from counters, in kernels of its own, again in the backward; otherwise they
    are drawn in the kernels of what is dropped, and stored."""
    fused_grad_accumulation: bool = True
    """The matmul that makes a weight gradient accumulates it over micro-batches; otherwise a separate pass does."""
    grad_bytes: PositiveInt = 4
    """Bytes per element of a gradient that is accumulated over micro-batches and reduced."""
    moment_bytes: PositiveInt = 4
    """Bytes per element of each of AdamW's moments, beside master weights in float32, in Megatron's storage."""
    fp8_activations: bool = False
    """Under elementwise recompute: matmul inputs are saved in fp8, and up-projections of latent attention are
    recomputed, too (arXiv:2412.19437 §3.2.3, §3.3.3; `muster.cost.memory.fp8_activations`)."""
    recasts_fp8: bool = False
    """Each pass casts what its fp8 matmuls read anew: passes for the largest value, for the scale and for the cast, and
    one for another memory layout. Otherwise an operand is cast once, for both matmuls that read it, and weights once a
    step, as Transformer Engine does (`muster.cost.time.scaled_casts`)."""
    all_reduce_grads: bool = False
    """Under z1 each rank's complete gradients are cast to float32, all-reduced and copied back, as if every rank
    updated all parameters (Aleph Alpha's scaling: allreduce.py, optimizer.py); otherwise they are reduce-scattered in
    the accumulation dtype."""
    replica_reduce_once: bool = False
    """Under z2 and z3 shards of gradients are added up over the micro-batches, and all-reduced over replicas in the
    last one's backward; otherwise in each."""
    overlap_grad_reduce: bool = True
    """Gradient reduction overlaps the last micro-batch's backward."""
    overlap_param_gather: bool = True
    """The all-gather of updated parameters overlaps the first forward."""
    overlaps_whole_passes_only: bool = False
    """Neither overlaps passes that are split, replayed from graphs, or leave out the vocabulary's layers
    (`Plan.overlaps_data_parallel`); nor do the reductions of z2 and z3 overlap the half of a split backward that
    computes weights' gradients."""
    joint_ends: bool = False
    """Embedding and head are gathered and reduced as one bucket, before the first layer and after all others: no pass
    hides it, once a step under z1, in each micro-batch under z2 and z3, which otherwise count layers alone. Under z1
    each bucket of layers is a collective of its own; otherwise all parameters count as one."""
    overlap_fsdp: bool = True
    """Under z2 and z3 the all-gathers and reduce-scatters of all layers but one overlap with the passes."""
    per_parameter_collectives: bool = False
    """Under z3 every parameter has its own, exposed all-gather and reduce-scatter, and each rank's part is copied by a
    kernel of its own (lists of tensors, as in DeepSpeed's first ZeRO-3)."""
    balanced_cp: bool = True
    """Context-parallel ranks have equal shares of the causal mask; otherwise the last has most."""
    fused_cp_merge: bool = True
    """Results of a ring's blocks are merged by a kernel of their own; otherwise operator by operator, in float32."""
    cp_grad_bytes: PositiveInt | None = None
    """Bytes per element of the key/value gradients that travel around the ring of p2p, cp hops; None: those of the
    compute dtype, cp − 1 hops."""
    broadcast_updates: bool = False
    """Each rank broadcasts its updated parameters, one rank after another, instead of one all-gather."""
    overlap_expert_comm: bool = False
    """The experts' all-to-alls overlap the passes of another micro-batch (DualPipe)."""
    overlap_pairs: bool = False
    """A forward and a backward that a schedule lets run as one take turns: each computes while the other's rows travel
    to experts or back, or its tensor-parallel collectives (`muster.spec.pass_pairs`)."""
    dispatch_once_per_node: bool = False
    """A token crosses the network once per node that holds experts of it; otherwise once per expert."""
    dispatch_once_per_rank: bool = False
    """A token travels once to each rank that holds experts of it, with weights in float32 (DeepEP, HybridEP); otherwise
    once per expert."""
    sorts_received_rows: bool = False
    """Rows that arrive from other ranks are copied into the order of their experts, and back before they return;
    otherwise the exchange delivers them so, or each rank has one expert."""
    expert_bias_apart: bool = False
    """A clamped SwiGLU is clamped by operations of its own before its fused kernel, and experts' output biases are
    weighted and added expert by expert."""
    weights_inside_experts: bool = False
    """The router's weights multiply experts' inner activations, so that the rows which experts return aren't saved for
    the weights' gradient (Megatron-Core, moe/experts.py: weighted_bias_swiglu_impl)."""
    grouped_streams: NonNegativeInt = 0
    """Matmuls of a rank's experts are kernels of their own, so many at a time; 0: one grouped kernel."""
    fused_expert_epilogues: bool = False
    """Activations of experts, their weights and casts to fp8 are parts of the grouped matmuls."""
    experts_in_tp_region: bool = False
    """The hidden state is gathered before it is routed, as for an MLP, where tensor-parallel ranks share each expert;
    otherwise the rows of experts are."""
    overlap_p2p: bool = True
    """P2p transfers between stages overlap the passes; otherwise each is exposed."""
    scatter_gather_p2p: bool = False
    """Tensor-parallel ranks, which all have the same hidden state, each send a part, and the receivers all-gather it
    (arXiv:2104.04473 §4.1)."""
    joint_input_grad_reduce: bool = True
    """Matmuls that share an input, such as gate and up, all-reduce its gradient once over tensor-parallel ranks;
    otherwise each does."""
    overlap_tp_grad_reduce: bool = True
    """The all-reduce of a column-parallel input's gradient overlaps the weight gradients."""
    async_tp: bool = False
    """Tensor-parallel collectives are split and overlap the matmuls (asynchronous tensor parallelism)."""
    symmetric_memory: bool = False
    """Asynchronous tensor parallelism copies chunks out of other GPUs' memory, over NVLink within a node, and adds up
    their partial sums in one pass (PyTorch's symmetric memory); otherwise they travel in a ring."""
    blocking_launches: bool = False
    """The host waits for each kernel before it launches the next (CUDA_LAUNCH_BLOCKING=1)."""
    cuda_graphs: bool = False
    """Kernels are replayed from graphs, without host time between them."""
    operator_host_s: NonNegativeFloat = 0.0
    """Seconds of the host for an operator's forward where layers are Python modules of their own, beside which kernels
    run; 0: launches alone."""
    graphed: frozenset[Literal["attention", "router"]] = frozenset()
    """Parts of a layer that are replayed from graphs while the rest of it isn't."""

    def label(self, compiled: bool) -> str:
        """Return its name for people, and `compiled` or `eager` where that makes a difference."""
        name = self.name or "custom"
        return name if self.for_plan(compiled) is self else f"{name}, {'compiled' if compiled else 'eager'}"

    def for_plan(self, compiled: bool, cuda_graphs: bool = False) -> "FrameworkTraits":
        """Return the traits of a plan's passes: what is left to the plan's `compile` is decided, and `cuda_graphs`
        holds beside the program's own."""
        open_fields = {name: compiled for name in ("fused_elementwise", "fused_loss") if getattr(self, name) is None}
        if cuda_graphs and not self.cuda_graphs:
            open_fields["cuda_graphs"] = True
        return self.model_copy(update=open_fields) if open_fields else self
