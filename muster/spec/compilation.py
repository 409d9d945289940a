"""Compilation of a plan's blocks by torch.compile: where it is the default, and what stands against it."""

from collections.abc import Callable

from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

AGAINST_COMPILE: tuple[tuple[Callable[[Plan], bool], str], ...] = (
    (
        lambda plan: plan.split_backward,
        "compile with a schedule whose backward is split (the compiler can't see what waits for W)",
    ),
    (
        lambda plan: plan.uses_axis("cp"),
        "compile with context parallelism (attention communicates in the middle of a block)",
    ),
    (lambda plan: plan.schedule_entry.is_asynchronous, "an asynchronous schedule with compile (not tested yet)"),
    (lambda plan: plan.sequence_tiles > 1, "sequence_tiles with compile (not tested yet)"),
    (lambda plan: plan.sequence_slices > 1, "sequence_slices with compile (not tested yet)"),
    (lambda plan: plan.vocab_parallel, "vocab_parallel with compile (not tested yet)"),
    (
        lambda plan: any(strategy.recompute == "elementwise" for strategy in plan.strategies),
        "elementwise recompute with compile (the compiler itself chooses cheap things to recompute)",
    ),
)
"""Properties of a plan that the runtime can't compile, each with a sentence; parity tests run the other plans."""


def compiles(plan: Plan, model: ModelSpec, device_kind: str, framework: FrameworkTraits = MUSTER) -> bool:
    """Return True if a framework compiles a model's blocks on devices of a kind (`DeviceSpec.kind`): as the plan says,
    or where it doesn't, on GPUs if that is the framework's default and nothing in plan or model stands against it."""
    if plan.compile is not None:
        return plan.compile
    has_opaque_parts = model.moe is not None or model.linear_attention is not None or model.has_dropout
    has_opaque_parts = has_opaque_parts or model.adapter is not None or model.low_rank is not None
    has_opaque_parts = has_opaque_parts or model.attention_sinks or model.mtp_layers > 0
    has_opaque_parts = has_opaque_parts or model.other_stream is not None
    is_default = framework.compiles_by_default and device_kind == "gpu" and not has_opaque_parts
    return is_default and not any(has(plan) for has, _ in AGAINST_COMPILE)
