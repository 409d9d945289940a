"""What a training program is made of, where that is not the plan's to say: kernels, fusion, and what overlaps."""

from typing import Literal

from pydantic import PositiveInt

from muster.spec.base import Frozen
from muster.spec.device import AttentionKernel

StateStorage = Literal["muster", "megatron"]
"""muster: float32 weights, gradients and moments, all sharded alike by `fully_shard`, and a gathered copy in the
compute dtype. megatron: weights in the compute dtype, whole gradients in one buffer, and float32 master weights and
moments that data-parallel ranks share (Megatron-LM's distributed optimizer, DeepSpeed's ZeRO-1)."""


class FrameworkTraits(Frozen):
    """Stated properties of a training program. The defaults are those of a current one on GPUs."""

    storage: StateStorage = "muster"
    """How a rank keeps its part of the model."""
    attention: AttentionKernel | None = None
    """None: the fastest that the device has a rate for."""
    fused_elementwise: bool = True
    """Activations, rotary positions and norms are one pass over memory each, as with torch.compile or hand-written
    kernels; else each of their operations is one."""
    fused_norms: bool | None = None
    """Whether norms are, where that is another question; None: as `fused` says."""
    fused_loss: bool = True
    """The cross-entropy reads the logits and writes their gradient, without float32 copies of them."""
    early_stop_recompute: bool = True
    """Full recompute ends where the backward has all that it needs: a layer's last product isn't repeated, as with
    torch's checkpoint without reentry; else the whole layer is."""
    gathered_logits: bool = False
    """The loss is composed of the framework's own functions, in float32, on the logits of all words, which every
    tensor-parallel rank gathers (Aleph Alpha's scaling: lm_head.py, cross_entropy.py)."""
    dropout: bool = False
    """After attention and MLP, and on attention's probabilities."""
    fused_grad_accumulation: bool = True
    """A weight's gradient is added to the sum over micro-batches by the product that makes it; else by a pass of its
    own."""
    grad_bytes: PositiveInt = 4
    """Of one number of a gradient that is summed over micro-batches and reduced."""
    moment_bytes: PositiveInt = 4
    """Of one number of each of AdamW's moments, beside master weights in float32, in Megatron's storage."""
    fp8_activations: bool = False
    """Under selective recompute: inputs of products are kept in fp8, and up-projections of latent attention are made
    again, too (arXiv:2412.19437 §3.2.3, §3.3.3; `muster.cost.memory.fp8_activations`)."""
    all_reduce_grads: bool = False
    """Under z1 each rank's gradients are put together, cast to float32, all-reduced and copied back, as if every rank
    updated all parameters (Aleph Alpha's scaling: allreduce.py, optimizer.py); else each rank gets the sum of its part
    alone, in the dtype of the sum."""
    overlap_grad_reduce: bool = True
    """Gradients are reduced while the last micro-batch's backward runs."""
    overlap_param_gather: bool = True
    """Parameters that the step updated are gathered while the first forward runs."""
    per_parameter_collectives: bool = False
    """Under z3 every parameter is gathered, and its gradient reduced, by a collective of its own that nothing hides,
    and each rank's part is copied by a kernel of its own (lists of tensors, as DeepSpeed's first ZeRO-3)."""
    balanced_cp: bool = True
    """Context-parallel ranks have equal shares of what the causal mask leaves; else the last has most."""
    broadcast_updates: bool = False
    """Each rank hands its updated parameters to the others in a broadcast of its own, one after another, instead of one
    all-gather."""
    overlap_expert_comm: bool = False
    """Tokens travel to and from experts beside the passes of another micro-batch (DualPipe)."""
    dispatch_once_per_node: bool = False
    """A token crosses the network once for each node that holds experts of it; else once for each expert."""
    overlap_p2p: bool = True
    """Sends between stages run beside the passes; else each is waited for."""
    scatter_gather_p2p: bool = False
    """Of a hidden state that tensor-parallel ranks all have, each sends its part, and the receivers gather it
    (arXiv:2104.04473 §4.1)."""
    joint_input_grad_reduce: bool = True
    """Products that share an input, as gate and up, add up its gradient once over tensor-parallel ranks; else each
    does."""
    overlap_tp_grad_reduce: bool = True
    """The gradients of what enters column-parallel products are added up while the weights' gradients are computed."""
    async_tp: bool = False
    """Tensor-parallel collectives are split and run beside the products (asynchronous tensor parallelism)."""
    cuda_graphs: bool = False
    """Kernels are replayed from graphs, so that no host time stands between them."""
