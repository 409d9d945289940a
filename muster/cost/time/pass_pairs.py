"""Times of a forward and a backward that run as one: each computes while what the other communicates is under way.

The executor lets the two passes take turns (`muster.parallel.turns`): a turn ends where a pass has started an exchange
of rows with the experts' ranks, or a tensor-parallel collective, and its next one begins with the wait for it. Both
passes communicate over the same links, one exchange after another.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN


class Turn(NamedTuple):
    """Turn of a layer's pass: it computes, and ends with an exchange."""

    computed_s: float
    exchanged_s: float
    beside_s: float = 0.0
    """Seconds at the end of the computation beside which the exchange is under way already: of gradients of weights."""

    @property
    def exposed_s(self) -> float:
        """Seconds by which the exchange makes a pass by itself longer."""
        return self.exchanged_s - (1 - OVERLAP_SLOWDOWN) * min(self.beside_s, self.exchanged_s)

    def slower(self, factor: float) -> "Turn":
        """Return the turn with an exchange that takes `factor` as long."""
        return self._replace(exchanged_s=factor * self.exchanged_s, beside_s=factor * self.beside_s)


def turns_of_rows(exchanges_s: Sequence[float], experts_s: float) -> tuple[Turn, ...]:
    """Return the turns of a layer whose rows go to the experts' ranks in the first half of the exchanges, and back in
    the second one; between the two are the experts' matmuls."""
    half = len(exchanges_s) // 2
    return tuple(Turn(experts_s if place == half else 0.0, time_s) for place, time_s in enumerate(exchanges_s))


@dataclass(frozen=True, slots=True)
class Turns:
    """A pass in turns: computation i, then exchange i while the other pass computes; the last computation has none."""

    computed_s: tuple[float, ...]
    exchanged_s: tuple[float, ...] = ()
    beside_s: tuple[float, ...] = ()
    """Seconds at the end of computation i beside which exchange i is under way already (empty: none)."""

    @property
    def alone_s(self) -> float:
        """Seconds of computations and exchanges one after another."""
        return sum(self.computed_s) + sum(self.exchanged_s)


def turns_of_pass(total_s: float, layers: Iterable[tuple[float, Sequence[Turn]]], is_backward: bool) -> Turns:
    """Return the turns of a pass that takes `total_s` by itself.

    `layers` in the order of the pass, each with its computation and its turns (empty: it exchanges nothing). What isn't
    computation of these (the head, exposed collectives, launches) is spread over the turns in proportion. What a layer
    computes beside its turns comes before the first one, in the backward after the last one: between one layer's
    experts and those of the next it makes no difference.
    """
    computed, turns = [0.0], list[Turn]()
    for compute_s, own in layers:
        left_s = max(0.0, compute_s - sum(turn.computed_s for turn in own))
        computed[-1] += 0.0 if is_backward else left_s
        for turn in own:
            computed[-1] += turn.computed_s
            computed.append(0.0)
        computed[-1] += left_s if is_backward else 0.0
        turns += own
    left_s, known_s = max(0.0, total_s - sum(turn.exposed_s for turn in turns)), sum(computed)
    scaled = [left_s * part_s / known_s for part_s in computed] if known_s else [left_s / len(computed)] * len(computed)
    return Turns(tuple(scaled), tuple(turn.exchanged_s for turn in turns), tuple(turn.beside_s for turn in turns))


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
            beside_s = passes[own].beside_s[turn] if passes[own].beside_s else 0.0
            links_free_s = max(now_s - beside_s, links_free_s) + passes[own].exchanged_s[turn]
            arrival_s[own] = links_free_s
    return now_s + OVERLAP_SLOWDOWN * (forward.alone_s + backward.alone_s - now_s)
