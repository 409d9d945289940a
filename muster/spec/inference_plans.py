"""Plans under which a trained model is run without training it: to generate text, or to compute its loss."""

from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, settings_beyond_name
from muster.spec.supported import require_supported_model, unsupported_features
from muster.spec.workload import Workload


def require_generation_supported(plan: Plan, model: ModelSpec) -> None:
    """Raise InfeasibleError unless the plan, which may set tp, a precision, and parameters in host memory or on disk,
    can generate text with the model."""
    strategy = plan.default_strategy
    away = {}
    if strategy.offload_param != "none":
        away = {"offload_param": strategy.offload_param, "offload_param_ratio": strategy.offload_param_ratio}
    can = Plan(tp=plan.tp, precision=plan.precision, micro_batch_size=plan.micro_batch_size)
    can = can.model_copy(update={"default_strategy": can.default_strategy.model_copy(update=away)})
    _require(
        plan, can, model, "generate text", "only tp can distribute it, and oparam or oparamd keep layers off the device"
    )


def require_evaluation_supported(plan: Plan, model: ModelSpec) -> None:
    """Raise InfeasibleError unless the plan, which may set dp, tp and a precision, can compute the model's loss."""
    can = Plan(
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        tp=plan.tp,
        precision=plan.precision,
        micro_batch_size=plan.micro_batch_size,
    )
    _require(plan, can, model, "evaluate", "only dp and tp can distribute it so far")


def _with_experts(plan: Plan, can: Plan) -> tuple[Plan, Plan]:
    """Return what can be run of a plan, and the plan as it is meant. Whole experts lie on the tensor-parallel ranks,
    which all have the same tokens; without ep each rank gets a slice of every expert, said or not."""
    if plan.ep == 1:
        meant = plan.model_copy(update={"etp": plan.tp}) if plan.etp == 1 else plan
        return can.model_copy(update={"etp": plan.tp}), meant
    ranks = plan.tp if plan.tp > 1 else plan.ep
    return can.model_copy(update={"tp": ranks, "ep": ranks, "ep_dispatcher": "slicing"}), plan


def _require(plan: Plan, can: Plan, model: ModelSpec, task: str, reason: str) -> None:
    require_supported_model(model)
    name = format_plan_name(plan)
    if model.moe is not None:
        can, plan, reason = (
            *_with_experts(plan, can),
            f"{reason}, with slices of every expert (etp) or whole ones (epNs)",
        )
    if plan != can:
        nearest = format_plan_name(can)
        kept = nearest.split("-")
        beyond = [part for part in name.partition("+")[0].split("-") if part not in kept] + settings_beyond_name(plan)
        raise InfeasibleError(f"plan {name} can't {task} with {', '.join(beyond)}: {reason}; nearest: {nearest}")
    workload = Workload(seq_len=1, global_batch_size=plan.micro_batch_size * plan.mesh(0).dp_size)
    trained = plan.default_strategy.model_copy(update={"offload_param": "none", "offload_param_ratio": 1.0})
    plain = plan.model_copy(update={"default_strategy": trained})  # what training needs beside oparam isn't needed here
    if found := plan_violations(plain, model, workload, plain.world_size) or unsupported_features(plain, model):
        raise InfeasibleError(f"plan {name} can't {task}: {'; '.join(found)}")
