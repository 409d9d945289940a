"""Weight gradients that split-backward schedules defer: memory that neither recompute nor offload frees."""

from functools import lru_cache

from muster.spec.schedules import SCHEDULES


@lru_cache(maxsize=4096)
def deferred_micro_batches(schedule: str, pp: int, micro_batches: int) -> tuple[int, ...]:
    """Return, for each pipeline rank, the micro-batches between I and W at once on each of its stages; 0 where nothing
    is known."""
    deferred = SCHEDULES[schedule].planner.deferred_weight_grads
    return tuple(deferred(rank, pp, micro_batches) if deferred else 0 for rank in range(pp))


def min_fullest_rank_bytes(
    num_layers: int, layer_bytes: float, deferred_bytes: float, deferred: tuple[int, ...]
) -> float:
    """Return the least memory of the fullest rank over all spreads of layers on the ranks.

    Each layer takes `layer_bytes`, and `deferred_bytes` for each micro-batch that its rank defers. The fullest rank
    holds least where all hold alike: with b_r bytes a layer on rank r, that is num_layers / Σ 1/b_r. A rank whose
    layers hold nothing, as where their parameters are off the device, may have them all.
    """
    each = [layer_bytes + count * deferred_bytes for count in deferred]
    return num_layers / sum(1 / size for size in each) if all(each) else 0.0
