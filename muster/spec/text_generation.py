"""Text generation: sampling parameters, and the plans that can generate."""

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
    """Parameters for drawing the next token."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """Divisor of the logits; 0: the likeliest token is taken."""
    top_k: NonNegativeInt = 40
    """Number of the likeliest tokens to draw from; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the likeliest tokens to draw from."""
    seed: NonNegativeInt = 0


def require_generation_supported(plan: Plan, model: ModelSpec) -> None:
    """Raise InfeasibleError unless the plan, which may set tp and a precision, can generate text with the model."""
    require_supported_model(model)
    name = format_plan_name(plan)
    can = Plan(tp=plan.tp, precision=plan.precision, micro_batch_size=plan.micro_batch_size)
    if plan != can:
        near = format_plan_name(can)
        raise InfeasibleError(f"plan {name} can't generate text: only tp can distribute it so far; nearest: {near}")
    workload = Workload(seq_len=1, global_batch_size=plan.micro_batch_size)
    if found := plan_violations(plan, model, workload, plan.world_size) or unsupported_features(plan):
        raise InfeasibleError(f"plan {name} can't generate text: {'; '.join(found)}")
