"""Training frameworks by name: what each overlaps and fuses, for `--framework` of `muster plan` and `muster predict`.

Traits are facts about a program's code, named in the comments. What a plan decides (compile, overlap of
tensor-parallel collectives) is left to the plan. Measured tables state the traits of their programs' versions
themselves (`muster/catalog/measurements/sources.yaml`).
"""

from muster.spec.errors import ConfigError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.suggest import did_you_mean

# parallel/: on GPUs z1's gather is waited for bucket by bucket in a stage's first pass, and each bucket of gradients is
# reduced in its last backward once it is complete (fsdp.py, stage.py); gradients of micro-batches are added by
# fully_shard, in float32; tensor-parallel sums of input gradients run beside the
# weights' (tensor_parallel.py); chunks of async_tp are copied out of symmetric memory where GPUs of a node reach each
# other's (symmetric_memory.py). model/: torch's fused RMSNorm and scaled_dot_product_attention, whose kernel for bf16
# is FlashAttention-2, for documents and windows by its variable-length interface (varlen_attention.py), with values
# padded to the width of keys (latent_attention.py); operators one by one, or compiled block by block (compile.py),
# never the loss, which keeps its gradient (loss.py). Blocks of a ring are merged in float32, operator by operator
# (model/block_attention.py, parallel/cp_ring.py).
# A test counts each of these traits in a step (tests/test_framework_traits.py).
MUSTER = FrameworkTraits(
    name="muster",
    attention="flash2",
    fused_soft_cap=False,
    padded_values=True,
    fused_swiglu_clamp=False,
    counted_dropout=True,
    compiles_by_default=True,
    fused_elementwise=None,
    fused_norms=True,
    norm_casts=False,
    fused_loss=False,
    loss_keeps_gradient=True,
    replica_reduce_once=True,
    fused_grad_accumulation=False,
    overlaps_whole_passes_only=True,
    joint_ends=True,
    fused_cp_merge=False,
    cp_grad_bytes=4,
    recasts_fp8=True,
    experts_in_tp_region=True,
    repeats_last_tp_matmul=True,
    overlap_pairs=True,
    symmetric_memory=True,
)

# Megatron-Core with the flags of NVIDIA's published runs: --use-distributed-optimizer, --overlap-grad-reduce and
# --overlap-param-gather (core/distributed/distributed_data_parallel_config.py), Transformer Engine's layers, whose
# attention is the device's fastest, fused SwiGLU, rotary embedding, cross-entropy and accumulation of weight gradients
# (core/fusions/, --gradient-accumulation-fusion), p2p beside passes (--overlap-p2p-communication). A module's forward
# takes the host 115 µs (github:NVIDIA/TransformerEngine pull 1191). Experts' matmuls are kernels on 4 streams
# (multi_stream_cublas_gemm of Transformer Engine); the all-to-all dispatcher sorts the rows that arrive by expert
# (sort_chunks_by_idxs in moe/token_dispatcher.py); clamps and experts' biases are operations of their own
# (fusions/fused_bias_geglu.py, moe/experts.py), and the router's weights multiply experts' inner activations. DeepEP,
# HybridEP and CUDA graphs are options, and left out.
MEGATRON = FrameworkTraits(
    name="megatron",
    storage="megatron",
    scatter_gather_p2p=True,
    operator_host_s=115e-6,
    grouped_streams=4,
    sorts_received_rows=True,
    expert_bias_apart=True,
    weights_inside_experts=True,
)

# torchtitan: fully_shard (distributed/fsdp), scaled_dot_product_attention; torch.compile of blocks and of the loss is
# an option (compile.enable, compile.components), operators are eager without it; torchao's float8 keeps inputs and
# weights as they are and casts them anew in the backward (float8/float8_linear.py); DTensor's tensor parallelism sums
# an input's gradient after both matmuls of a linear layer's backward, since they are one autograd node; its
# asynchronous tensor parallelism is torch.compile's, which puts the operators of symmetric memory into the graph.
TORCHTITAN = FrameworkTraits(
    name="torchtitan",
    attention="flash2",
    fused_elementwise=None,
    fused_norms=True,
    norm_casts=False,
    fused_loss=None,
    fused_grad_accumulation=False,
    overlap_tp_grad_reduce=False,
    recasts_fp8=True,
    symmetric_memory=True,
)

# DeepSpeed with Hugging Face Transformers' layers and FlashAttention-2: eager operators, RMSNorm and loss in float32
# (modeling_llama.py, loss_utils.py); bf16 gradients (bf16.enabled, communication_data_type); stages 1 and 2 reduce and
# gather at the step's end (overlap_comm is true for stage 3 only, zero/config.py); the pipeline's sends block
# (runtime/pipe/engine.py).
DEEPSPEED = FrameworkTraits(
    name="deepspeed",
    storage="megatron",
    attention="flash2",
    fused_elementwise=None,
    fused_loss=False,
    fused_grad_accumulation=False,
    grad_bytes=2,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
    overlap_tp_grad_reduce=False,
    overlap_p2p=False,
)

FRAMEWORKS = {framework.name: framework for framework in (MUSTER, MEGATRON, TORCHTITAN, DEEPSPEED)}
"""Frameworks by name."""

FRAMEWORK_SCHEDULES: dict[str, frozenset[str]] = {
    "megatron": frozenset({"1f1b", "interleaved"}),  # core/pipeline_parallel/schedules.py
    "torchtitan": frozenset({"1f1b", "interleaved", "gpipe", "zb-v", "dualpipe-v"}),  # torch.distributed.pipelining
    "deepspeed": frozenset({"1f1b"}),  # runtime/pipe/schedule.py
}
"""Pipeline schedules that each other framework runs, as far as they are registered here."""


def runs_schedule(framework: FrameworkTraits, schedule: str) -> bool:
    """Return True if a framework runs a pipeline schedule; Muster and those described by their traits alone run all."""
    return schedule in FRAMEWORK_SCHEDULES.get(framework.name, (schedule,))


def treats_layers_alike(framework: FrameworkTraits) -> bool:
    """Return True if a framework recomputes and offloads all layers alike, as its flags state it once for the model."""
    return framework.name in FRAMEWORK_SCHEDULES


def framework_named(name: str | FrameworkTraits) -> FrameworkTraits:
    """Return a framework's traits, which may be given themselves. Raises ConfigError with the nearest name."""
    if isinstance(name, FrameworkTraits):
        return name
    if name not in FRAMEWORKS:
        hint = did_you_mean(str(name).lower(), FRAMEWORKS)
        raise ConfigError(f"--framework {name}: expected one of {', '.join(FRAMEWORKS)}{hint}")
    return FRAMEWORKS[name]
