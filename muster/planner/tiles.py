"""Choice of tiles for long sequences where a plan doesn't fit."""

from muster.planner.request import PlanRequest
from muster.spec.plan import Plan
from muster.spec.sequence_tiles import tiled


def tiled_plan(request: PlanRequest, plan: Plan) -> Plan | None:
    """Return the plan with tiles; None where tiles are required or ruled out, or it can't have any."""
    if "sequence_tiles" in request.fixed or request.framework.storage == "megatron":
        return None
    return tiled(plan, request.model, request.workload.seq_len)
