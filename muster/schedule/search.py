"""The search behind `auto`: a portfolio of rules, then small changes to the best, within a counted budget.

All randomness comes from one seed and all limits are counts of passes, so that a setting has one result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from random import Random

from muster.schedule.bound import lower_bound_s
from muster.schedule.critical import critical_pairs
from muster.schedule.follow import follow
from muster.schedule.greedy import Rule, greedy
from muster.schedule.pattern import first_patterns, pattern_orders, varied
from muster.schedule.pipe import Pipe, Run, orders_of, turns

_ANY = 1 << 40
"""More than there ever are: no limit."""
_JUST = 1e-9
_FEWEST = 4
"""Rules that are tried in any case."""
_FIRST = 1e9
"""`backward_first_s` that puts every I before every F."""

_PORTFOLIO = (
    ("steady", False, 1, -_FIRST, 2),
    ("free", False, 0, -_FIRST, 2),
    ("free", False, 1, 0, _ANY),
    ("free", False, 1, -_FIRST, _ANY),
    ("steady", False, 1, 0, 1),
    ("wide", False, 1, -_FIRST, _ANY),
    ("free", False, 0, 0, _ANY),
    ("wide", False, 1, 0, _ANY),
    ("free", False, 1, 0, 2),
    ("wide", True, 4, -_FIRST, 2),
    ("free", False, 0, -_FIRST, _ANY),
    ("steady", False, 0, 0, 1),
    ("free", False, 0, _FIRST, 2),
    ("wide", False, 0, 0, 3),
    ("steady", True, 0, 0, 2),
    ("free", False, 4, 0, _ANY),
    ("slow", True, 1, _FIRST, 1),
    ("wide", False, 0, -_FIRST, _ANY),
    ("free", False, 1, _FIRST, _ANY),
    ("steady", False, 4, -_FIRST, _ANY),
    ("free", False, 0, _FIRST, _ANY),
    ("free", False, 1, -_FIRST, 2),
    ("free", True, 1, 0, 3),
    ("free", False, 4, -_FIRST, _ANY),
)
"""(in_flight, whether W lag by rank, patience, backward_first_s, ahead beyond the forward's length in periods): chosen
one by one, each as the one that added most to those before it over 500 settings."""
NUM_RULES = len(_PORTFOLIO)


@dataclass(slots=True)
class Search:
    """The best run so far on one pipe."""

    pipe: Pipe
    bound_s: float
    """No schedule is faster: the search ends there."""
    known_s: float = inf
    """What is already reached elsewhere."""
    best: Run | None = None
    budget: int = 1 << 60
    """Passes that may still be scheduled."""
    spent: int = 0
    rules: list[tuple[float, int, Rule]] = field(default_factory=list)
    """Makespan, number and rule of those tried from the portfolio."""

    @property
    def over(self) -> bool:
        return self.spent >= self.budget or self.best_s <= self.bound_s + _JUST

    def limit_s(self, slack: float) -> float:
        """What a run must end by to be of use: the best so far, and `slack` as a share of it."""
        return self.best_s * (1 + slack) if self.best_s < self.known_s else self.known_s * (1 + slack)

    @property
    def best_s(self) -> float:
        return inf if self.best is None else self.best.makespan_s

    def note(self, run: Run | None) -> float:
        """Pays for a run and keeps it if it is the best; its makespan."""
        if run is None:
            self.spent += self.pipe.size // 2  # given up on the way
            return inf
        self.spent += self.pipe.size
        if run.makespan_s < self.best_s - _JUST:
            self.best = run
        return run.makespan_s


def explore(search: Search, bases: Sequence[list[int]], budget: int) -> None:
    """Tries the portfolio's first rules, as many as `budget` passes allow, and known schedules (lists of passes) with
    their W placed anew.

    Of long runs all rules are tried with fewer micro-batches, and only those that do best there on the whole.
    """
    pipe = search.pipe
    fewer = 2 * pipe.num_ranks
    shorter = replace(pipe, num_micro_batches=min(fewer, pipe.num_micro_batches))
    short = Search(shorter, lower_bound_s(shorter))
    num_rules = max(_FEWEST, min(NUM_RULES, budget // short.pipe.size))
    if pipe.num_micro_batches > fewer:
        _portfolio(short, num_rules)
        search.spent += short.spent
        for _, number, rule in sorted(short.rules)[:2]:
            search.rules.append((search.note(greedy(pipe, rule, search.limit_s(0.1))), number, rule))
    else:
        _portfolio(search, num_rules)
    for passes in bases:
        _refit(search, passes)


def improve(search: Search) -> None:
    """Spends what is left of the budget: on repeating patterns, on changes to the best rules and to the best order."""
    random = Random(0)
    tries = (search.budget - search.spent) // search.pipe.size
    _vary_patterns(search, random, tries // 2)
    _vary_rules(search, random, tries // 4)
    if search.best is not None and not search.over:
        _refit(search, search.best.passes)
        _swap(search, search.best, random)


def _vary_patterns(search: Search, random: Random, tries: int) -> None:
    """Tries the plain patterns, then goes on from the best."""
    stop = search.spent + tries * search.pipe.size
    plain, best, best_s, attempt = first_patterns(search.pipe), None, inf, 0
    while search.spent < stop and not search.over and attempt < 4 * tries:
        if attempt < len(plain):
            pattern = plain[attempt]
        else:
            pattern = varied(best if best and random.random() < 0.8 else random.choice(plain), random)
        attempt += 1
        orders = pattern_orders(search.pipe, pattern)
        if orders is None:
            continue
        limit_s = search.limit_s(0.1)
        makespan_s = search.note(follow(search.pipe, orders, pattern.patience, pattern.overtake, limit_s))
        if makespan_s <= best_s:
            best, best_s = pattern, makespan_s


def _portfolio(search: Search, num_rules: int) -> None:
    for number, words in enumerate(_PORTFOLIO[:num_rules]):
        rule = _rule(search.pipe, *words)
        search.rules.append((search.note(greedy(search.pipe, rule, search.limit_s(0.1))), number, rule))
        if search.over:
            return


def _rule(pipe: Pipe, width: str, lag: bool, patience: float, backward_first_s: float, ahead: int) -> Rule:
    stages, period_s = range(pipe.num_stages), pipe.period_s
    forward_s = sum(pipe.times_s[0]) + sum(pipe.hops_s)
    # While a pipeline fills up it takes in a micro-batch per F and I, later one per F, I and W.
    per_turn_s = period_s if width == "slow" else period_s * 2 / 3
    in_flight = tuple(
        _ANY if width == "free" else turns(pipe, stage, per_turn_s) + (width == "wide") for stage in stages
    )
    backlog = tuple(_ANY if not lag else stage if stage < pipe.num_ranks else 2 * pipe.num_ranks for stage in stages)
    under_way = int(forward_s / period_s) if period_s > 0 else 0
    return Rule(in_flight, backlog, max(1, under_way + ahead), backward_first_s, patience)


def _vary_rules(search: Search, random: Random, tries: int) -> None:
    """Changes a limit of one stage or the whole rule, starting from the portfolio's best."""
    starts = sorted(search.rules)[:4]
    makespan_s, _, rule = starts[0]
    for _ in range(tries):
        if search.over:
            return
        if random.random() < 0.1:
            makespan_s, _, rule = random.choice(starts)
        other = _changed(search.pipe, rule, random)
        other_s = search.note(greedy(search.pipe, other, search.limit_s(0.03)))
        if other_s <= makespan_s + _JUST:
            makespan_s, rule = other_s, other


def _changed(pipe: Pipe, rule: Rule, random: Random) -> Rule:
    for _ in range(random.choice((1, 1, 2, 3))):
        stage, step, what = random.randrange(pipe.num_stages), random.choice((-1, 1)), random.random()
        if what < 0.4:
            rule = replace(rule, in_flight=_stepped(rule.in_flight, stage, step, 1, pipe.capacity + 1))
        elif what < 0.65:
            rule = replace(rule, backlog=_stepped(rule.backlog, stage, step, 0, pipe.capacity + 1))
        elif what < 0.8:
            rule = replace(rule, ahead=max(1, min(rule.ahead, pipe.num_micro_batches) + step))
        elif what < 0.9:
            rule = replace(rule, patience=random.choice((0, 0.5, 1, 2, 4)))
        else:
            share = random.choice((-_FIRST, -1, -0.5, 0, 0.5, 1, _FIRST))
            rule = replace(rule, backward_first_s=share * pipe.period_s)
    return rule


def _stepped(limits: tuple[int, ...], stage: int, step: int, low: int, high: int) -> tuple[int, ...]:
    return (*limits[:stage], max(low, min(limits[stage], high) + step), *limits[stage + 1 :])


_REFITS = ((1, 0), (0, 0), (0.5, 3), (4, 0))
"""(patience, overtake) that a known order is tried with."""


def _refit(search: Search, passes: list[int]) -> None:
    """Places the W of a known schedule anew, for the times and the memory that there are."""
    orders = orders_of(search.pipe, passes)
    for patience, overtake in _REFITS:
        if search.over:
            return
        search.note(follow(search.pipe, orders, patience, overtake, search.limit_s(0)))


def _swap(search: Search, current: Run, random: Random) -> None:
    """Exchanges neighbours that the makespan hangs on, one pair at a time; ways that don't gain are followed too."""
    pipe, pairs, attempt = search.pipe, [], 0
    orders: list[list[int]] = []
    while not search.over:
        attempt += 1
        if attempt % 40 == 0 and search.best is not None:
            current, pairs = search.best, []
        if not pairs:
            orders, pairs = orders_of(pipe, current.passes), critical_pairs(pipe, current)
            search.spent += pipe.size
            if not pairs:
                return
        one, other = random.choice(pairs)
        order = orders[pipe.placement[one // pipe.num_micro_batches % pipe.num_stages]]
        index = order.index(one)
        order[index : index + 2] = other, one
        patience, overtake = random.choice((0, 0.5, 1, 1, 2, 4)), random.choice((0, 0, 0, 1, 3))
        run = follow(pipe, orders, patience, overtake, search.limit_s(0.002))
        order[index : index + 2] = one, other
        if search.note(run) <= current.makespan_s + _JUST and run is not None:
            current, pairs = run, []
