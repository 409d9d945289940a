"""How many weight backwards split schedules put off: memory that neither recompute nor the host's memory frees."""

from functools import lru_cache


@lru_cache(maxsize=4096)
def deferred_micro_batches(schedule: str, pp: int, micro_batches: int) -> tuple[int, ...]:
    """Of each pipeline rank, the micro-batches that are between I and W at once, on each of its stages; 0 where nothing
    is known. From the orders themselves (`muster.schedule.zero_bubble`, `zb_v`), when the first backwards of all stages
    are over."""
    ranks = range(pp)
    match schedule:
        case "zb-h1":
            return tuple(min(rank + 1, micro_batches) for rank in ranks)
        case "zb-h2":
            return tuple(min(2 * rank + 1, micro_batches) for rank in ranks)
        case "zb-v":
            missing = max(0, 2 * pp - 1 - micro_batches)
            return tuple(max(0, rank - missing) for rank in ranks)
        case _:
            return (0,) * pp


def min_fullest_rank_bytes(
    num_layers: int, layer_bytes: float, deferred_bytes: float, deferred: tuple[int, ...]
) -> float:
    """What the fullest rank holds at least, however the layers lie on the ranks: where each layer takes `layer_bytes`,
    and `deferred_bytes` for each micro-batch that its rank has `deferred`, the fullest holds least where all hold
    alike."""
    return num_layers / sum(1 / (layer_bytes + count * deferred_bytes) for count in deferred)
