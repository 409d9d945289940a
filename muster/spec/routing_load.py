"""Share of the tokens' choices that each expert gets: measured, or by Zipf's law."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.spec.redundant_experts import copy_experts

ExpertPlacement = tuple[tuple[int, ...], ...]
"""Layers with experts → their experts in the order of the ranks that have them; empty: in the experts' own order."""


_SHARES_SCALE = 10**6
"""Rows by which shares are told to the choice of copies, which counts rows."""


class LoadOfRanks(NamedTuple):
    """Work of the ranks that share a layer's experts, on average over layers."""

    imbalance: float
    """Load of the fullest rank relative to the mean."""
    copies: float = 0.0
    """Copies of experts that a rank gets, on average over the ranks."""
    most_copies: float = 0.0
    """Most copies that a rank gets or gives."""
    own_share: float = 1.0
    """Least part of the mean load that a rank computes of its own experts."""


@dataclass(frozen=True, eq=False)
class RoutingLoad:
    """Load of the experts of a model. Two loads are the same only as one object, which makes them quick to compare."""

    shares: tuple[tuple[float, ...], ...]
    """Layers with experts → share of the choices of each expert."""
    source: str
    """Place that it comes from."""
    is_placed: bool = False
    """True if plans without a placement are taken to have `placement`."""
    _known: dict[tuple[int, ExpertPlacement, int], "LoadOfRanks"] = field(default_factory=dict, repr=False)
    _placements: dict[int, ExpertPlacement] = field(default_factory=dict, repr=False)

    def imbalance(self, ep: int, placement: ExpertPlacement = (), redundant: int = 0) -> float:
        """Return the load of the fullest of `ep` ranks relative to the mean, on average over the layers, at each of
        which all ranks wait for it.

        Example: experts with 4, 2, 1 and 1 of 8 choices, on 2 ranks: 6 / 4 = 1.5.
        """
        return self.of_ranks(ep, placement, redundant).imbalance

    def of_ranks(self, ep: int, placement: ExpertPlacement = (), redundant: int = 0) -> "LoadOfRanks":
        """Return what `ep` ranks have to do, each of which may have copies of `redundant` experts of others."""
        key = ep, placement, redundant
        if key not in self._known:
            if self.is_placed and not placement:
                placement = self.placement(ep)
            self._known[key] = _mean_of_layers(
                [
                    _load_of_ranks(shares, ep, placement[layer] if placement else (), redundant)
                    for layer, shares in enumerate(self.shares)
                ]
            )
        return self._known[key]

    def placement(self, ep: int) -> ExpertPlacement:
        """Return each layer's experts in an order in which `ep` ranks have about the same load."""
        if ep not in self._placements:
            self._placements[ep] = tuple(balanced_order(shares, ep) for shares in self.shares)
        return self._placements[ep]

    def placed(self) -> "RoutingLoad":
        """Return the load of experts that plans place by it."""
        return RoutingLoad(self.shares, self.source, is_placed=True)

    @property
    def max_over_mean(self) -> float:
        """Load of the most chosen expert relative to the mean, on average over the layers."""
        return sum(max(shares) * len(shares) for shares in self.shares) / len(self.shares)


def _load_of_ranks(shares: Sequence[float], ep: int, order: Sequence[int], redundant: int) -> LoadOfRanks:
    if not redundant or ep == 1:
        return LoadOfRanks(max(rank_shares(shares, ep, order)) * ep)
    ordered = [shares[expert] for expert in order] if order else shares
    found = copy_experts([round(share * _SHARES_SCALE) for share in ordered], ep, redundant)
    each = len(shares) // ep
    copies = sum(map(len, found.copies)) / ep
    return LoadOfRanks(found.imbalance, copies, found.most_moved(each), found.own_share(each))


def _mean_of_layers(loads: Sequence[LoadOfRanks]) -> LoadOfRanks:
    return LoadOfRanks(*(sum(values) / len(loads) for values in zip(*loads, strict=True)))


def rank_shares(shares: Sequence[float], ep: int, order: Sequence[int] = ()) -> list[float]:
    """Return the share of the choices that each of `ep` ranks gets, which have equally many experts in `order`."""
    each = len(shares) // ep
    ordered = [shares[expert] for expert in order] if order else shares
    return [sum(ordered[rank * each : (rank + 1) * each]) for rank in range(ep)]


def balanced_order(shares: Sequence[float], ep: int) -> tuple[int, ...]:
    """Return the experts by place so that `ep` ranks with equally many have about equal loads.

    Each expert, the most chosen first, goes to the rank with the least load that has room (Graham's rule); then experts
    of the fullest rank change places with those of others while that lowers the larger load of the two.
    """
    each = len(shares) // ep
    ranks: list[list[int]] = [[] for _ in range(ep)]
    loads = [0.0] * ep
    for expert in sorted(range(len(shares)), key=lambda one: -shares[one]):
        rank = min((rank for rank in range(ep) if len(ranks[rank]) < each), key=loads.__getitem__)
        ranks[rank].append(expert)
        loads[rank] += shares[expert]
    for _ in _exchanges(shares, ranks, loads):
        pass
    return tuple(expert for own in ranks for expert in sorted(own))


def rebalanced_order(
    loads_E: Sequence[float], ep: int, order: Sequence[int] = (), exchange_cost: float = 0.0
) -> tuple[int, ...]:
    """Return the experts by place after those exchanges of two experts between `ep` ranks that save most, from `order`
    on: each costs as much as so much load of the fullest rank. Those that pay back nothing are left out.
    """
    order = tuple(order or range(len(loads_E)))
    each = len(order) // ep
    ranks = [list(order[rank * each : (rank + 1) * each]) for rank in range(ep)]
    loads = rank_shares(loads_E, ep, order)
    found, least, mean = order, max(loads), sum(loads) / ep
    exchanges = _exchanges(loads_E, ranks, loads)
    cost = exchange_cost
    while mean + cost < least and next(exchanges, False):
        if max(loads) + cost < least:
            found, least = tuple(expert for own in ranks for expert in own), max(loads) + cost
        cost += exchange_cost
    return found


def _exchanges(shares: Sequence[float], ranks: Sequence[list[int]], loads: list[float]) -> Iterator[bool]:
    """Let experts of the fullest rank change places with those of others while that lowers the larger load of the two;
    yields True after each exchange."""
    while (swap := _best_swap(shares, ranks, loads)) is not None:
        fullest, mine, other, its = swap
        moved = shares[ranks[fullest][mine]] - shares[ranks[other][its]]
        ranks[fullest][mine], ranks[other][its] = ranks[other][its], ranks[fullest][mine]
        loads[fullest] -= moved
        loads[other] += moved
        yield True


def _best_swap(
    shares: Sequence[float], ranks: Sequence[Sequence[int]], loads: Sequence[float]
) -> tuple[int, int, int, int] | None:
    """Return (fullest rank, its expert's place, other rank, its expert's place) of the swap that lowers the larger of
    both loads most; None where none does."""
    fullest = max(range(len(ranks)), key=loads.__getitem__)
    best, found = loads[fullest] * (1 - 1e-9), None
    for other in range(len(ranks)):
        for mine, expert in enumerate(ranks[fullest]):
            for its, another in enumerate(ranks[other]):
                moved = shares[expert] - shares[another]
                larger = max(loads[fullest] - moved, loads[other] + moved)
                if other != fullest and larger < best:
                    best, found = larger, (fullest, mine, other, its)
    return found


def zipf_load(exponent: float, num_layers: int, num_experts: int, top_k: int) -> RoutingLoad:
    """Return shares in proportion to 1 / place^exponent, in an order drawn for each layer.

    A token chooses an expert once, so that none gets more than 1 / k of the choices; what is above goes to the others.
    """
    weights = [1 / place**exponent for place in range(1, num_experts + 1)]
    most, capped = 1 / top_k, 0
    while capped < num_experts - 1:
        scale = (1 - capped * most) / sum(weights[capped:])
        if scale * weights[capped] <= most:
            break
        capped += 1
    shares = [most] * capped + [scale * weight for weight in weights[capped:]]
    layers = []
    for layer in range(num_layers):
        random.Random(layer).shuffle(order := list(range(num_experts)))
        layers.append(tuple(shares[place] for place in order))
    return RoutingLoad(tuple(layers), f"Zipf's law, exponent {exponent:g}")
