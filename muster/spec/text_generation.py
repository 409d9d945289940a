"""How text is made: how tokens are drawn, and which plans can spread the work."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from muster.spec.base import Frozen
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import require_supported_model, unsupported_features
from muster.spec.workload import Workload


class SamplingParams(Frozen):
    """How the next token is drawn."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """What logits are divided by; 0: the likeliest token is taken."""
    top_k: NonNegativeInt = 40
    """Drawn from so many of the likeliest tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Drawn from the likeliest tokens that together have this probability."""
    seed: NonNegativeInt = 0


def require_generation_supported(plan: Plan, model: ModelSpec) -> None:
    """Raises InfeasibleError unless text of the model can be made under the plan, which may name tp and a precision."""
    require_supported_model(model)
    name = format_plan_name(plan)
    can = Plan(tp=plan.tp, precision=plan.precision, micro_batch_size=plan.micro_batch_size)
    if plan != can:
        near = format_plan_name(can)
        raise InfeasibleError(f"plan {name} can't generate text: only tp spreads that work so far; nearest: {near}")
    workload = Workload(seq_len=1, global_batch_size=plan.micro_batch_size)
    if found := plan_violations(plan, model, workload, plan.world_size) or unsupported_features(plan):
        raise InfeasibleError(f"plan {name} can't generate text: {'; '.join(found)}")
