"""What the runtime can't do yet of plans and models that can be planned and predicted."""

from collections.abc import Callable

from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

SUPPORTED_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
SUPPORTED_PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
SUPPORTED_RECOMPUTE = ("none", "elementwise", "full")

_UNSUPPORTED_PLANS: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("context parallelism (cp > 1)", lambda plan: plan.uses_axis("cp")),
    ("expert parallelism (ep > 1)", lambda plan: plan.uses_axis("ep")),
    ("tensor parallelism of experts (etp > 1)", lambda plan: plan.uses_axis("etp")),
    (
        "offload of the optimizer's state (it stays on the device, which makes the step)",
        lambda plan: any(s.offload in ("optimizer", "all") for s in plan.strategies),
    ),
    (
        "recompute of attention alone or of every second product (the runtime knows none, elementwise and full)",
        lambda plan: any(s.recompute not in SUPPORTED_RECOMPUTE for s in plan.strategies),
    ),
    (
        "unfused attention (the runtime's scores stay within one kernel)",
        lambda plan: any(s.attention != "flash" for s in plan.strategies),
    ),
    (
        "a sharding level of its own for some layers (a stage is gathered and reduced as a whole)",
        lambda plan: len({s.zero for s in plan.strategies}) > 1,
    ),
    (
        "an sp or tp_overlap of its own for some layers (all layers of a stage hand on the same part of the sequence)",
        lambda plan: len({(s.sp, s.tp_overlap) for s in plan.strategies}) > 1,
    ),
    ("a stage with a list of its own ranks", lambda plan: any(stage.ranks is not None for stage in plan.stages)),
    (
        "compile with a schedule whose backward is split (what waits for W is not the compiler's to see)",
        lambda plan: plan.compile and plan.split_backward,
    ),
    ("fp8 (it wants torchao's scaled products and a GPU that has them)", lambda plan: plan.precision == "fp8"),
    (
        "vocab_parallel with tensor parallelism (the words are cut over the pipeline ranks alone)",
        lambda plan: plan.vocab_parallel and plan.uses_axis("tp"),
    ),
    (
        "vocab_parallel with stages of their own kind (each word's rows have one holder on every pipeline rank)",
        lambda plan: plan.vocab_parallel and not plan.is_uniform,
    ),
    (
        "vocab_parallel under z3 (each rank's words would be gathered for every single pass of theirs)",
        lambda plan: plan.vocab_parallel and plan.mesh(0).dp_size > 1 and plan.default_strategy.zero == "z3",
    ),
    (
        "vocab_parallel with compile (it has not been held to one process)",
        lambda plan: plan.vocab_parallel and plan.compile,
    ),
    (
        "post_validation with fp16 (a step's loss scale follows from the norm of the one before)",
        lambda plan: plan.post_validation and plan.precision == "fp16",
    ),
    (
        "post_validation with vocab_parallel (all ranks look up words together when a step begins)",
        lambda plan: plan.post_validation and plan.vocab_parallel,
    ),
    (
        "post_validation with uneven_micro_batches (it has not been held to one process)",
        lambda plan: plan.post_validation and bool(plan.uneven_micro_batches),
    ),
    (
        "elementwise recompute with compile (the compiler chooses itself what is cheap to make again)",
        lambda plan: plan.compile and any(s.recompute == "elementwise" for s in plan.strategies),
    ),
)
"""What the runtime can't do: a line goes when the work behind it is done."""

_UNSUPPORTED_MODELS: tuple[tuple[str, Callable[[ModelSpec], bool]], ...] = (
    ("a mixture of experts", lambda model: model.moe is not None),
    ("latent attention (mla)", lambda model: model.mla is not None),
    ("linear attention", lambda model: model.linear_attention is not None),
    ("heads that predict further tokens (mtp_layers)", lambda model: model.mtp_layers > 0),
    ("attention sinks", lambda model: model.attention_sinks),
)
"""What of a model the runtime can't do; such a model can be planned and predicted."""


def unsupported_features(plan: Plan) -> list[str]:
    """One sentence for each thing in the plan that the runtime can't do yet."""
    return [f"{what} can't be run yet" for what, wanted in _UNSUPPORTED_PLANS if wanted(plan)]


def require_supported_model(model: ModelSpec) -> None:
    """Raises InfeasibleError where the runtime can't do something that the model has."""
    if found := [what for what, wanted in _UNSUPPORTED_MODELS if wanted(model)]:
        raise InfeasibleError(
            f"model {model.name} can be planned and predicted, but not run yet: it has {' and '.join(found)}"
        )
