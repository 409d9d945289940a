"""Plans with islands beside those that communicate in every step: how many islands, which outer steps, and what they
gain until the same loss."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from muster.config.optim_config import OptimConfig
from muster.config.outer_config import OuterConfig
from muster.cost.island_loss import (
    LONGEST_EVERY,
    TABLE_EVERY,
    TOKENS_PER_PARAMETER,
    loss_increase,
    loss_notes,
    tokens_factor,
)
from muster.cost.time.island_round import IslandRound, island_round
from muster.layout.island_bytes import Compression
from muster.planner.cluster_parts import fast_blocks, least_step_s
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.node_order import reorder_nodes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_islands
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.simple_first import find_simplest
from muster.planner.simplicity import PREDICTION_ERROR
from muster.planner.space import is_admitted
from muster.simulate.predict import Prediction
from muster.spec.cluster import ClusterSpec
from muster.spec.frameworks import MUSTER
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

QUICK_EFFORT = 0.05
"""Work for the plan by which outer steps are chosen, as a part of that of the search."""
SEARCH_EFFORT = 0.3
"""The same for the plan with islands itself."""
SIMPLE_SHARE = 0.4
"""Share of that for a simpler plan about as good."""

_EXCHANGES: tuple[tuple[bool, Compression], ...] = (
    (False, "none"),
    (False, "bf16"),
    (True, "none"),
    (True, "bf16"),
    (True, "int8"),
    (True, "int4"),
)
"""Outer steps that are tried, the simplest first: True where fragments travel beside steps (streaming), and the
precision in which they do."""
_FRAGMENTS = (10, 5, 2)
"""Fragments that are tried: the most whose parts have 3 layers, as published (arXiv:2501.18512 §3.4)."""
_LAYERS_PER_FRAGMENT = 3
_LONGEST_DELAY = 4
"""Most steps of a delay: from 5 on losses grow (arXiv:2501.18512 figure 10)."""


@dataclass(frozen=True)
class IslandComparison:
    """The best plan with islands against the best without; both process the same sequences in a step."""

    best: EvaluatedPlan
    """Plan with islands."""
    exact: EvaluatedPlan
    """Plan that communicates in every step."""
    search: PlanSearch
    """Search that found the plan with islands."""
    loss_increase: float
    """Relative increase of the loss at equal tokens, by published trainings."""
    tokens_factor: float
    """Tokens until the same loss, relative to training without islands."""
    notes: tuple[str, ...]
    """Assumptions about the loss."""

    @property
    def outer(self) -> OuterConfig:
        """Outer steps of the plan with islands."""
        return self.best.prediction.outer or OuterConfig()

    @property
    def speedup(self) -> float:
        """Tokens a second, relative to the plan without islands."""
        return self.best.prediction.tokens_per_s / self.exact.prediction.tokens_per_s

    @property
    def speedup_to_same_loss(self) -> float:
        """Speed until the same loss, relative to the plan without islands."""
        return self.speedup / self.tokens_factor

    @property
    def pays(self) -> bool:
        """True if islands reach the same loss sooner by more than a prediction's error."""
        return self.speedup_to_same_loss > 1 + PREDICTION_ERROR


def island_counts(cluster: ClusterSpec) -> list[int]:
    """Return the numbers of islands that have nodes of slow links each: one for each site, or each block of nodes that
    measured links join, where these are of one size."""
    counts = [
        cluster.num_nodes // tier.nodes
        for tier in cluster.tiers
        if tier.link is not None and cluster.num_nodes % tier.nodes == 0
    ]
    blocks = fast_blocks(cluster) if cluster.node_bandwidth_bytes_per_s is not None else []
    if len({len(block) for block in blocks}) == 1:
        counts.append(len(blocks))
    return [count for count in dict.fromkeys(counts) if count > 1]


def weighs_islands(request: PlanRequest) -> bool:
    """Return True if a request leaves it open whether plans have islands, and Muster trains."""
    is_open = request.base.islands == 1 and "islands" not in request.fixed
    return is_open and request.objective != "memory" and request.framework.name == MUSTER.name


def search_islands(request: PlanRequest, exact: EvaluatedPlan, budget: SearchBudget) -> IslandComparison | None:
    """Return the best plan with islands against the best without; None where no links are slow, where none fits, or
    where `exact` is about as fast as the devices."""
    best: IslandComparison | None = None
    for count in island_counts(request.cluster):
        asked = with_islands(request, count)
        if exact.prediction.step_time_s < least_step_s(asked) * (1 + PREDICTION_ERROR):
            continue
        found = _search(asked, exact, budget)
        if found is not None and (best is None or found.speedup_to_same_loss > best.speedup_to_same_loss):
            best = found
    return best


def _search(asked: PlanRequest, exact: EvaluatedPlan, budget: SearchBudget) -> IslandComparison | None:
    """Return the comparison with plans of one number of islands."""
    asked, order = with_island_order(asked)
    asked, known = with_outer_steps(asked, budget, exact.plan)
    own = budget.renew(SEARCH_EFFORT, SEARCH_EFFORT)
    found = find_best_plans(asked, 2, own.share(1 - SIMPLE_SHARE, 1 - SIMPLE_SHARE), known)
    if not found.result.best:
        return None
    seen = [*found.result.best, *found.result.notable]
    best = find_simplest(found.result.best[0], seen, found.evaluator, own.share(1.0)).evaluated
    return compare_islands(best, exact, in_listed_nodes(found, order))


def with_island_order(request: PlanRequest) -> tuple[PlanRequest, tuple[int, ...] | None]:
    """Return the request with the nodes of each island, which fast links join, next to each other, and their order
    among the listed ones; None where they stand so already, or links aren't measured."""
    cluster = request.cluster
    blocks = fast_blocks(cluster) if cluster.node_bandwidth_bytes_per_s is not None else []
    order = tuple(node for block in blocks for node in block)
    if len(blocks) != request.base.islands or len(set(map(len, blocks))) != 1 or order == tuple(sorted(order)):
        return request, None
    return replace(request, cluster=reorder_nodes(cluster, order)), order


def in_listed_nodes(found: PlanSearch, order: tuple[int, ...] | None) -> PlanSearch:
    """Return a search among nodes in an `order` of the listed ones with the order that it found among these."""
    if order is None:
        return found
    own = found.node_order or range(len(order))
    return replace(found, node_order=tuple(order[node] for node in own))


def compare_islands(best: EvaluatedPlan, exact: EvaluatedPlan, search: PlanSearch) -> IslandComparison:
    """Return the comparison of a plan with islands and one without."""
    model, outer = best.prediction.model, best.prediction.outer or OuterConfig()
    increase, factor = _loss(model, best.plan.islands, outer, search.request.tokens)
    notes = loss_notes(model.num_active_parameters, best.plan.islands, outer)
    return IslandComparison(best, exact, search, increase, factor, tuple(notes))


# ----------------------------------------------------------------------------------------------------------------------
# Outer steps


def with_outer_steps(
    request: PlanRequest, budget: SearchBudget, like: Plan | None = None
) -> tuple[PlanRequest, list[EvaluatedPlan]]:
    """Return the request for plans with islands with the outer steps by which they reach the same loss first, and the
    plan that was found by the way; the request as it is where it has outer steps, or no plan fits.

    `like`: a plan for one island, or for other devices.
    """
    evaluator = PlanEvaluator(request)
    seeds = [plan for plan in _like_plans(like, request) if evaluator.memory_budget.fits(plan)]
    quick = search(request, 1, budget.renew(QUICK_EFFORT, QUICK_EFFORT), evaluator, seeds=seeds, climbs=True)
    if not quick.best:
        return request, []
    plan = quick.best[0].plan
    if request.outer is None:
        outer = choose_outer_steps(quick.best[0].prediction, request.tokens, request.optim)
        request = replace(request, outer=outer)
    if not quick.leaves_head_room:
        return request, []
    return request, [PlanEvaluator(request).evaluate(plan)]


def _like_plans(like: Plan | None, request: PlanRequest) -> Iterator[Plan]:
    """Yield a plan with the islands of a request and with as much inside of each, if that is legal."""
    if like is None or like.island_size != request.island_devices:
        return
    plan = like.model_copy(update={"islands": request.base.islands})
    own = request.model, request.workload, request.cluster.num_devices
    if is_admitted(request, plan) and not plan_violations(plan, *own):
        yield plan


def choose_outer_steps(prediction: Prediction, tokens: float | None, optim: OptimConfig | None = None) -> OuterConfig:
    """Return the simplest outer steps by which a plan is within a prediction's error of the shortest time to the same
    loss. `tokens`: those of the whole training; None: 20 for each parameter."""
    found: list[tuple[float, OuterConfig]] = []
    for streams, compression in _EXCHANGES:
        each = [
            _with_delay(prediction, _outer_steps(streams, compression, every, prediction.model.num_layers), optim)
            for every in (TABLE_EVERY, LONGEST_EVERY)
        ]
        found.append(min(((_time_to_loss(one, prediction, tokens), one.outer) for one in each), key=lambda row: row[0]))
    least = min(time for time, _ in found)
    if least == inf:
        return OuterConfig()
    return next(outer for time, outer in found if time <= least * (1 + PREDICTION_ERROR))


def _outer_steps(streams: bool, compression: Compression, every: int, layers: int) -> OuterConfig:
    if not streams:
        return OuterConfig(method="diloco", every=every, compression=compression)
    fragments = next((count for count in _FRAGMENTS if layers // count >= _LAYERS_PER_FRAGMENT), _FRAGMENTS[-1])
    return OuterConfig(method="streaming", every=every, compression=compression, fragments=fragments)


def _with_delay(prediction: Prediction, outer: OuterConfig, optim: OptimConfig | None) -> IslandRound:
    """Return the round of a plan under outer steps whose delay is the least that hides all, or the longest."""
    own = prediction.model, prediction.plan, prediction.workload, prediction.cluster
    found = island_round(*own, outer, prediction.step_time_s, optim)
    if outer.method != "streaming":
        return found
    most = min(_LONGEST_DELAY, outer.steps_between - 1)
    wanted = next((d for d in range(1, most) if d * found.step_s >= max(found.transfers_s)), most)
    fields: dict[str, Any] = outer.model_dump() | {"delay": wanted}
    return replace(found, outer=OuterConfig(**fields))


def _time_to_loss(whole: IslandRound, prediction: Prediction, tokens: float | None) -> float:
    """Return the seconds of a step with its share of exchanges, times the tokens until the same loss."""
    _, factor = _loss(prediction.model, prediction.plan.islands, whole.outer, tokens)
    return whole.round_s / whole.outer.every * factor


def _loss(model: ModelSpec, islands: int, outer: OuterConfig, tokens: float | None) -> tuple[float, float]:
    """Return the relative increase of the loss and the factor of tokens that makes up for it."""
    parameters = model.num_active_parameters
    increase = loss_increase(parameters, islands, outer.every)
    return increase, tokens_factor(parameters, tokens or TOKENS_PER_PARAMETER * parameters, increase)


def outer_flags(outer: OuterConfig) -> str:
    """Return the flags that give outer steps, without those that their method has by itself."""
    usual = OuterConfig(method=outer.method, every=outer.every).model_dump()
    given = {"method": outer.method, "every": outer.every}
    given |= {key: value for key, value in outer.model_dump().items() if value != usual[key]}
    return " ".join(f"--outer.{key} {_flag_value(value)}" for key, value in given.items())


def _flag_value(value: object) -> str:
    """Return a value as a command line has it: a list without spaces."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()
