"""Choice of tiles: the parts of a long sequence that pass MLPs and loss one after another where a plan doesn't fit."""

from muster.planner.request import PlanRequest
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model

MIN_TILE_POSITIONS = 8192
"""Fewest positions of a tile: with so many its matmuls are as fast as longer ones, and the weights' gradients, which
are added up tile by tile, take a small part of their time."""
MIN_TILES = 4
"""Fewest tiles that are tried: two would leave half of the memory that they are to free."""


def tiled_plan(request: PlanRequest, plan: Plan) -> Plan | None:
    """Return the plan with as many tiles, a power of two, as leave enough positions to each; None where tiles are
    required or ruled out, or sequences are too short on a rank."""
    model = request.model
    if "sequence_tiles" in request.fixed or plan.sequence_tiles > 1 or request.framework.storage == "megatron":
        return None
    if plan.split_backward or plan.vocab_parallel or plan.compile or model.moe is not None or plugin_model(model):
        return None
    sp_shards = max(mesh.tp for mesh in plan.distinct_meshes) if plan.default_strategy.sp else 1
    positions = request.workload.seq_len // (max(mesh.sequence_shards for mesh in plan.distinct_meshes) * sp_shards)
    if positions < MIN_TILES * MIN_TILE_POSITIONS:
        return None
    tiles = 1 << (positions // MIN_TILE_POSITIONS).bit_length() - 1
    return plan.model_copy(update={"sequence_tiles": tiles})
