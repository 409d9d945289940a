"""Times of a forward and a backward that run as one: each computes while the exchange of the other's rows is under way.

The executor lets the two passes take turns (`muster.parallel.turns`): a turn ends where a pass has started an exchange
of rows with the experts' ranks, and its next one begins with the wait for it. Both passes exchange over the same links,
one exchange after another.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN


class RowExchange(NamedTuple):
    """Exchange of a layer's rows with the experts' ranks and back in one pass."""

    exchanges_s: tuple[float, ...] = ()
    """Seconds of each exchange that ends a turn, in order: a half before the experts, a half behind."""
    experts_s: float = 0.0
    """Seconds of the experts' matmuls between the two halves."""

    def scaled(self, factor: float) -> "RowExchange":
        """Return an exchange that takes `factor` as long."""
        return self._replace(exchanges_s=tuple(factor * time_s for time_s in self.exchanges_s))


@dataclass(frozen=True, slots=True)
class Turns:
    """A pass in turns: computation i, then exchange i while the other pass computes; the last computation has none."""

    computed_s: tuple[float, ...]
    exchanged_s: tuple[float, ...] = ()

    @property
    def alone_s(self) -> float:
        """Seconds of the pass by itself."""
        return sum(self.computed_s) + sum(self.exchanged_s)


def turns_of_pass(total_s: float, layers: Iterable[tuple[float, RowExchange]], is_backward: bool) -> Turns:
    """Return the turns of a pass that takes `total_s` by itself.

    `layers` in the order of the pass, each with its computation and its exchange (empty: it has none). What isn't
    computation of layers (the head, exposed collectives, launches) is spread over the turns in proportion. A layer's
    computation but for its experts comes before its rows set out, in the backward after their gradients are back:
    between one layer's experts and those of the next it makes no difference.
    """
    computed, exchanged = [0.0], list[float]()
    for compute_s, rows in layers:
        dense_s = compute_s - rows.experts_s
        computed[-1] += 0.0 if is_backward else dense_s
        half = len(rows.exchanges_s) // 2
        for place, exchange_s in enumerate(rows.exchanges_s):
            exchanged.append(exchange_s)
            computed.append(rows.experts_s if place == half - 1 else 0.0)
        computed[-1] += (dense_s if is_backward else 0.0) + (0.0 if rows.exchanges_s else rows.experts_s)
    left_s, known_s = max(0.0, total_s - sum(exchanged)), sum(computed)
    scaled = [left_s * part_s / known_s for part_s in computed] if known_s else [left_s / len(computed)] * len(computed)
    return Turns(tuple(scaled), tuple(exchanged))


def order_of_turns(*counts: int) -> Iterator[tuple[int, int]]:
    """Yield (pass, its turn) of two passes with so many turns: one after the other's, then those that one has left.

    Example: 2 and 3 turns give (0, 0), (1, 0), (0, 1), (1, 1), (1, 2).
    """
    for turn in range(max(counts)):
        yield from ((own, turn) for own, count in enumerate(counts) if turn < count)


def pair_s(forward: Turns, backward: Turns) -> float:
    """Return the seconds of two passes that take turns, the forward first.

    What overlaps makes the computation slower (`OVERLAP_SLOWDOWN`).

    Example: a forward of 1 s, an exchange of 2 s and 1 s, a backward of 2 s, an exchange of 2 s and 2 s: the forward's
    exchange ends as the backward hands over, whose own lies beside the forward's last turn for 1 s and is exposed for
    another. That is 1 + 2 + 1 + 1 + 2 = 7 s instead of 10 s, and the slowdown by 3 s that overlap.
    """
    passes = forward, backward
    arrival_s = [0.0, 0.0]
    now_s = links_free_s = 0.0
    for own, turn in order_of_turns(len(forward.computed_s), len(backward.computed_s)):
        now_s = max(now_s, arrival_s[own]) + passes[own].computed_s[turn]
        if turn < len(passes[own].exchanged_s):
            links_free_s = max(now_s, links_free_s) + passes[own].exchanged_s[turn]
            arrival_s[own] = links_free_s
    return now_s + OVERLAP_SLOWDOWN * (forward.alone_s + backward.alone_s - now_s)
