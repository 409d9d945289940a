"""Search behind `auto`: a portfolio of rules, then small changes to the best, within a budget counted in passes.

1. *Explore*: list scheduling (`greedy`) under the first rules of a portfolio, and known schedules with their weight
backwards placed anew. 2. *Improve*: repeating blocks (`block_pattern`), then random changes to the best rules, then
swaps of neighbouring passes on the critical path of the best order.

All randomness comes from one seed, and all limits are counts of passes, so that a spec always has the same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from muster.schedule.block_pattern import initial_patterns, mutate_pattern, pattern_orders
from muster.schedule.critical_path import critical_pairs
from muster.schedule.greedy import PriorityRule, greedy
from muster.schedule.makespan_bound import lower_bound_s
from muster.schedule.place_weight_grads import place_weight_grads
from muster.schedule.search_problem import SearchProblem, TimedPasses, min_in_flight, rank_orders

_NO_LIMIT = 1 << 40
"""Larger than any count: no limit."""
_EPSILON = 1e-9
_MIN_RULES = 4
"""Rules that any search tries."""
_ALWAYS_FIRST = 1e9
"""`backward_priority_s` that puts every I before every F."""

_PORTFOLIO = (
    ("steady", False, 1, -_ALWAYS_FIRST, 2),
    ("free", False, 0, -_ALWAYS_FIRST, 2),
    ("free", False, 1, 0, _NO_LIMIT),
    ("free", False, 1, -_ALWAYS_FIRST, _NO_LIMIT),
    ("steady", False, 1, 0, 1),
    ("wide", False, 1, -_ALWAYS_FIRST, _NO_LIMIT),
    ("free", False, 0, 0, _NO_LIMIT),
    ("wide", False, 1, 0, _NO_LIMIT),
    ("free", False, 1, 0, 2),
    ("wide", True, 4, -_ALWAYS_FIRST, 2),
    ("free", False, 0, -_ALWAYS_FIRST, _NO_LIMIT),
    ("steady", False, 0, 0, 1),
    ("free", False, 0, _ALWAYS_FIRST, 2),
    ("wide", False, 0, 0, 3),
    ("steady", True, 0, 0, 2),
    ("free", False, 4, 0, _NO_LIMIT),
    ("slow", True, 1, _ALWAYS_FIRST, 1),
    ("wide", False, 0, -_ALWAYS_FIRST, _NO_LIMIT),
    ("free", False, 1, _ALWAYS_FIRST, _NO_LIMIT),
    ("steady", False, 4, -_ALWAYS_FIRST, _NO_LIMIT),
    ("free", False, 0, _ALWAYS_FIRST, _NO_LIMIT),
    ("free", False, 1, -_ALWAYS_FIRST, 2),
    ("free", True, 1, 0, 3),
    ("free", False, 4, -_ALWAYS_FIRST, _NO_LIMIT),
)
"""Rules as (width, lag, patience, backward_priority_s, lead): `width` sets the micro-batches in flight (see
`_make_rule`), `lag` lets later ranks defer more W, `lead` is added to the forward's length in periods. Chosen one by
one, each as the one that added most to those before it over 500 specs."""
NUM_RULES = len(_PORTFOLIO)


@dataclass(slots=True)
class OrderSearch:
    """State of the search of one problem: the best run so far and the budget."""

    problem: SearchProblem
    bound_s: float
    """Lower bound of the makespan: the search ends there."""
    incumbent_s: float = inf
    """Makespan reached by another search."""
    best: TimedPasses | None = None
    budget: int = 1 << 60
    """Passes that may be scheduled in all."""
    spent: int = 0
    rules: list[tuple[float, int, PriorityRule]] = field(default_factory=list)
    """(makespan, number, rule) of each rule tried from the portfolio."""

    @property
    def finished(self) -> bool:
        return self.spent >= self.budget or self.best_s <= self.bound_s + _EPSILON

    def limit_s(self, slack: float) -> float:
        """Return the latest useful end of a run: that of the best so far, plus `slack` as a fraction of it."""
        return self.best_s * (1 + slack) if self.best_s < self.incumbent_s else self.incumbent_s * (1 + slack)

    @property
    def best_s(self) -> float:
        return inf if self.best is None else self.best.makespan_s

    def record(self, run: TimedPasses | None) -> float:
        """Charge a run to the budget, keep it if it is the best, and return its makespan."""
        if run is None:
            self.spent += self.problem.num_passes // 2  # given up on the way
            return inf
        self.spent += self.problem.num_passes
        if run.makespan_s < self.best_s - _EPSILON:
            self.best = run
        return run.makespan_s


def explore(search: OrderSearch, seed_orders: Sequence[list[int]], budget: int) -> None:
    """Try the portfolio's first rules, as many as `budget` passes allow, and known orders (codes of passes).

    Known orders get their W placed anew. For long runs all rules are tried with fewer micro-batches, and only the best
    two on the whole.
    """
    problem = search.problem
    fewer = 2 * problem.num_ranks
    shorter = replace(problem, num_micro_batches=min(fewer, problem.num_micro_batches))
    short = OrderSearch(shorter, lower_bound_s(shorter))
    num_rules = max(_MIN_RULES, min(NUM_RULES, budget // short.problem.num_passes))
    if problem.num_micro_batches > fewer:
        _portfolio(short, num_rules)
        search.spent += short.spent
        for _, number, rule in sorted(short.rules)[:2]:
            search.rules.append((search.record(greedy(problem, rule, search.limit_s(0.1))), number, rule))
    else:
        _portfolio(search, num_rules)
    for passes in seed_orders:
        _replace_weight_grads(search, passes)


def improve(search: OrderSearch) -> None:
    """Spend the rest of the budget on repeating patterns, on changed rules, and on swaps in the best order."""
    random = Random(0)
    tries = (search.budget - search.spent) // search.problem.num_passes
    _vary_patterns(search, random, tries // 2)
    _vary_rules(search, random, tries // 4)
    if search.best is not None and not search.finished:
        _replace_weight_grads(search, search.best.passes)
        _swap_critical_pairs(search, search.best, random)


def _vary_patterns(search: OrderSearch, random: Random, tries: int) -> None:
    """Try the initial patterns, then mutations of the best."""
    stop = search.spent + tries * search.problem.num_passes
    plain, best, best_s, attempt = initial_patterns(search.problem), None, inf, 0
    while search.spent < stop and not search.finished and attempt < 4 * tries:
        if attempt < len(plain):
            pattern = plain[attempt]
        else:
            pattern = mutate_pattern(best if best and random.random() < 0.8 else random.choice(plain), random)
        attempt += 1
        orders = pattern_orders(search.problem, pattern)
        if orders is None:
            continue
        limit_s = search.limit_s(0.1)
        makespan_s = search.record(
            place_weight_grads(search.problem, orders, pattern.patience, pattern.overtake, limit_s)
        )
        if makespan_s <= best_s:
            best, best_s = pattern, makespan_s


def _portfolio(search: OrderSearch, num_rules: int) -> None:
    for number, parameters in enumerate(_PORTFOLIO[:num_rules]):
        rule = _make_rule(search.problem, *parameters)
        search.rules.append((search.record(greedy(search.problem, rule, search.limit_s(0.1))), number, rule))
        if search.finished:
            return


def _make_rule(
    problem: SearchProblem, width: str, lag: bool, patience: float, backward_first_s: float, ahead: int
) -> PriorityRule:
    stages = range(problem.num_stages)
    period_s = problem.period_s
    depth = problem.depth
    forward_s = sum(problem.times_s[0][:depth]) + sum(problem.p2p_s[: depth - 1])
    # A pipeline that fills up admits a micro-batch per F and I, later one per F, I and W.
    per_turn_s = period_s if width == "slow" else period_s * 2 / 3
    in_flight = tuple(
        _NO_LIMIT if width == "free" else min_in_flight(problem, stage, per_turn_s) + (width == "wide")
        for stage in stages
    )
    backlog = tuple(
        _NO_LIMIT if not lag else level if level < problem.num_ranks else 2 * problem.num_ranks
        for level in (stage % depth for stage in stages)
    )
    under_way = int(forward_s / period_s) if period_s > 0 else 0
    return PriorityRule(in_flight, backlog, max(1, under_way + ahead), backward_first_s, patience)


def _vary_rules(search: OrderSearch, random: Random, tries: int) -> None:
    """Mutate one limit or the whole rule, starting from the portfolio's best."""
    starts = sorted(search.rules)[:4]
    makespan_s, _, rule = starts[0]
    for _ in range(tries):
        if search.finished:
            return
        if random.random() < 0.1:
            makespan_s, _, rule = random.choice(starts)
        other = _mutate_rule(search.problem, rule, random)
        other_s = search.record(greedy(search.problem, other, search.limit_s(0.03)))
        if other_s <= makespan_s + _EPSILON:
            makespan_s, rule = other_s, other


def _mutate_rule(problem: SearchProblem, rule: PriorityRule, random: Random) -> PriorityRule:
    for _ in range(random.choice((1, 1, 2, 3))):
        stage = random.randrange(problem.num_stages)
        step = random.choice((-1, 1))
        draw = random.random()
        if draw < 0.4:
            rule = replace(rule, max_in_flight=_step_limit(rule.max_in_flight, stage, step, 1, problem.capacity + 1))
        elif draw < 0.65:
            rule = replace(
                rule, max_pending_weights=_step_limit(rule.max_pending_weights, stage, step, 0, problem.capacity + 1)
            )
        elif draw < 0.8:
            rule = replace(rule, max_forward_lead=max(1, min(rule.max_forward_lead, problem.num_micro_batches) + step))
        elif draw < 0.9:
            rule = replace(rule, patience=random.choice((0, 0.5, 1, 2, 4)))
        else:
            share = random.choice((-_ALWAYS_FIRST, -1, -0.5, 0, 0.5, 1, _ALWAYS_FIRST))
            rule = replace(rule, backward_priority_s=share * problem.period_s)
    return rule


def _step_limit(limits: tuple[int, ...], stage: int, step: int, low: int, high: int) -> tuple[int, ...]:
    return (*limits[:stage], max(low, min(limits[stage], high) + step), *limits[stage + 1 :])


_PLACEMENT_OPTIONS = ((1, 0), (0, 0), (0.5, 3), (4, 0))
"""(patience, overtake) of `place_weight_grads` that a known order is tried with."""


def _replace_weight_grads(search: OrderSearch, passes: list[int]) -> None:
    """Place the W of a known order anew, for the given times and memory."""
    orders = rank_orders(search.problem, passes)
    for patience, overtake in _PLACEMENT_OPTIONS:
        if search.finished:
            return
        search.record(place_weight_grads(search.problem, orders, patience, overtake, search.limit_s(0)))


def _swap_critical_pairs(search: OrderSearch, current: TimedPasses, random: Random) -> None:
    """Swap neighbours on the critical path, one pair at a time; equal results are followed too."""
    problem = search.problem
    pairs = []
    attempt = 0
    orders: list[list[int]] = []
    while not search.finished:
        attempt += 1
        if attempt % 40 == 0 and search.best is not None:
            current = search.best
            pairs = []
        if not pairs:
            orders = rank_orders(problem, current.passes)
            pairs = critical_pairs(problem, current)
            search.spent += problem.num_passes
            if not pairs:
                return
        earlier, later = random.choice(pairs)
        order = orders[problem.placement[earlier // problem.num_micro_batches % problem.num_stages]]
        index = order.index(earlier)
        order[index : index + 2] = later, earlier
        patience = random.choice((0, 0.5, 1, 1, 2, 4))
        overtake = random.choice((0, 0, 0, 1, 3))
        run = place_weight_grads(problem, orders, patience, overtake, search.limit_s(0.002))
        order[index : index + 2] = earlier, later
        if search.record(run) <= current.makespan_s + _EPSILON and run is not None:
            current = run
            pairs = []
