"""Number of tiles: the parts of a long sequence that pass MLPs and loss one after another."""

from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model

MIN_TILE_POSITIONS = 8192
"""Fewest positions of a tile: with so many its matmuls are as fast as longer ones, and the weights' gradients, which
are added up tile by tile, take a small part of their time."""
MIN_TILES = 4
"""Fewest tiles that are tried: two would leave half of the memory that they are to free."""


def tiled(plan: Plan, model: ModelSpec, seq_len: int) -> Plan | None:
    """Return the plan with as many tiles, a power of two, as leave enough positions to each; None where it has tiles,
    can't have any, or sequences are too short on a rank."""
    if plan.sequence_tiles > 1 or plan.split_backward or plan.vocab_parallel or plan.compile:
        return None
    if model.moe is not None or plugin_model(model):
        return None
    sp_shards = max(mesh.tp for mesh in plan.distinct_meshes) if plan.default_strategy.sp else 1
    positions = seq_len // (max(mesh.sequence_shards for mesh in plan.distinct_meshes) * sp_shards)
    if positions < MIN_TILES * MIN_TILE_POSITIONS:
        return None
    tiles = 1 << (positions // MIN_TILE_POSITIONS).bit_length() - 1
    return plan.model_copy(update={"sequence_tiles": tiles})
