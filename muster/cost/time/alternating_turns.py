"""Seconds of two chains of work that take turns, each of which computes while the other's collective travels."""

from collections.abc import Sequence

from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN

_LAYERS = 4
"""Layers after which further ones take equally long each."""


def alternating_s(turns: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the seconds that one layer of many takes, and those that a run of layers takes beyond that.

    `turns` are a layer's, of either chain in turns: seconds of compute; of the collective that follows, which has to
    arrive before the next but one begins; and of the end of the compute beside which that collective travels already.
    All share links. What overlaps computes slower (`OVERLAP_SLOWDOWN`).
    """

    def run_s(layers: int) -> float:
        now_s = links_free_s = 0.0
        arrival_s = [0.0, 0.0]
        for place, (turn_s, message_s, end_s) in enumerate([*turns] * layers):
            now_s = max(now_s, arrival_s[place % 2]) + turn_s
            arrival_s[place % 2] = links_free_s = max(now_s - end_s, links_free_s) + message_s
        total_s = max(now_s, *arrival_s)
        alone_s = layers * sum(turn_s + message_s for turn_s, message_s, _ in turns)
        return total_s + OVERLAP_SLOWDOWN * (alone_s - total_s)

    few_s = run_s(_LAYERS)
    each_s = (run_s(2 * _LAYERS) - few_s) / _LAYERS
    return each_s, few_s - _LAYERS * each_s
