"""CUDA graphs of a stage's passes: what stands against them."""

from collections.abc import Callable

from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

AGAINST_CUDA_GRAPHS: tuple[tuple[Callable[[Plan], bool], str], ...] = (
    (
        lambda plan: any(mesh.dp_size > 1 for mesh in plan.distinct_meshes),
        "cuda_graphs with data parallelism (fully_shard gathers parameters into other memory in every step)",
    ),
    (
        lambda plan: any(plan.uses_axis(axis) for axis in ("tp", "cp", "ep")),
        "cuda_graphs with tensor, context or expert parallelism (collectives within a pass aren't captured)",
    ),
    (
        lambda plan: plan.split_backward,
        "cuda_graphs with a schedule whose backward is split (the host keeps what waits for W)",
    ),
    (
        lambda plan: any(strategy.offload != "none" for strategy in plan.strategies),
        "cuda_graphs with offload of activations (their memory would be in use by the graph)",
    ),
    (
        lambda plan: plan.offloads_params,
        "cuda_graphs with offload of parameters (which come to other memory in every pass)",
    ),
    (
        lambda plan: plan.pipeline_replicas > 1,
        "cuda_graphs with two replicas in a pipeline (not tested yet)",
    ),
    (lambda plan: plan.vocab_parallel, "cuda_graphs with vocab_parallel (not tested yet)"),
    (lambda plan: plan.sequence_slices > 1, "cuda_graphs with sequence_slices (not tested yet)"),
    (lambda plan: plan.sequence_tiles > 1, "cuda_graphs with sequence_tiles (not tested yet)"),
    (lambda plan: plan.post_validation, "cuda_graphs with post_validation (not tested yet)"),
)
"""Properties of a plan whose passes can't be captured, each with a sentence; parity tests replay the other plans."""

_AGAINST_IN_MODELS: tuple[tuple[Callable[[ModelSpec], bool], str], ...] = (
    (lambda model: model.moe is not None, "cuda_graphs of experts (the rows of each change from batch to batch)"),
    (lambda model: model.linear_attention is not None, "cuda_graphs of linear attention (not tested yet)"),
    (lambda model: model.has_dropout, "cuda_graphs of a model with dropout (not tested yet)"),
    (lambda model: model.mtp_layers > 0, "cuda_graphs with multi-token prediction (not tested yet)"),
    (lambda model: model.architecture is not None, "cuda_graphs of a plugin's model (which may read values)"),
)


def replays_graphs(plan: Plan, device_kind: str) -> bool:
    """Return True if the passes of a plan are replayed from graphs on devices of a kind (`DeviceSpec.kind`)."""
    return plan.cuda_graphs and device_kind == "gpu"


def against_cuda_graphs(model: ModelSpec) -> list[str]:
    """Return a sentence for each part of a model whose passes can't be captured."""
    return [sentence for has, sentence in _AGAINST_IN_MODELS if has(model)]


def require_static_shapes(packing: str) -> None:
    """Raise InfeasibleError where the lengths of documents or samples change from batch to batch."""
    if packing != "concatenate":
        raise InfeasibleError(
            f"cuda_graphs can't be run with data.packing {packing}, whose lengths of documents change from batch to"
            " batch and would stay those of the captured one: leave cuda_graphs out, or take data.packing concatenate"
        )
