"""List scheduling of one pipeline under a priority rule: a free rank runs its most urgent pass that is ready."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf

from muster.schedule.search_problem import SearchProblem, TimedPasses

_EPSILON_S = 1e-9
"""Tolerance: times nearer than this (in the unit of the spec) are equal."""


@dataclass(frozen=True, slots=True)
class PriorityRule:
    """Preferences of a rank. The family contains 1F1B and the zero-bubble schedules.

    These differ in how many micro-batches are in flight and where W goes (Qi et al. 2023, arXiv:2401.10241, §3; Qi et
    al. 2024, arXiv:2405.15362, §3).
    """

    max_in_flight: tuple[int, ...]
    """Per stage, the most micro-batches whose F has begun and whose I has not."""
    max_pending_weights: tuple[int, ...]
    """Per stage, the number of deferred W above which one precedes everything else."""
    max_forward_lead: int
    """Most micro-batches that have begun on the first stage and not on the last. It keeps a tight memory from filling
    up with activations whose backwards are far away."""
    backward_priority_s: float
    """Seconds by which an I is wanted before its place in a steady rhythm: a large value puts I first, a large negative
    one F."""
    patience: float
    """Readiness to wait for a more urgent pass instead of starting another: a rank waits if that costs less than this
    times the delay of the urgent one."""


def greedy(problem: SearchProblem, rule: PriorityRule, deadline_s: float = inf) -> TimedPasses | None:
    """Return the schedule of a rule, or None once it can't end by `deadline_s` or gets stuck.

    Each pass has a target time: where it would begin if the first micro-batch met no obstacle, one period later for
    each micro-batch. A free rank takes the ready pass with the earliest target. W has no target: it fills idle time.

    Memory is never exceeded, and with one replica no rank gets stuck: an F begins only in a *safe* state, in which the
    micro-batches in flight on the rank can still be finished, oldest first. This is the banker's algorithm (Dijkstra
    1965, EWD123). Example with a capacity of 2 and stages 0 and 3 on a rank: after 0F0 and 0F1 neither micro-batch
    could run its F on stage 3, so that 0F1 has to wait until 3F0 is done and freed.
    """
    placement, p2p_s, count, times_s = problem.placement, problem.p2p_s, problem.num_micro_batches, problem.times_s
    num_stages, depth = problem.num_stages, problem.depth
    num_passes = num_stages * count
    # Per stage: arrival of the inputs of F and I, as far as known, and the number of F, I and W begun.
    come_f: list[list[float]] = [[0.0] * count if problem.is_first(stage) else [] for stage in range(num_stages)]
    come_i: list[list[float]] = [[] for _ in range(num_stages)]
    done = done_f, done_i, done_w = [0] * num_stages, [0] * num_stages, [0] * num_stages
    kept = [0] * problem.num_ranks
    free_s = [0.0] * problem.num_ranks
    passes = []
    left_s = [count * sum(kind[stage] for kind in times_s for stage in held) for held in problem.stages]
    state = (
        problem,
        rule,
        problem.period_s,
        rule.max_in_flight,
        rule.max_pending_weights,
        *_target_times_s(problem, rule),
        come_f,
        come_i,
        *done,
        kept,
    )
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    while events:
        now_s, rank = heappop(events)
        if free_s[rank] > now_s + _EPSILON_S:
            continue
        kind, stage = _choose(state, rank, now_s)
        if kind < 0:
            continue
        index, time_s = done[kind][stage], times_s[kind][stage]
        done[kind][stage] = index + 1
        end_s = come_s = now_s + time_s
        to = -1
        if kind == 0:
            kept[rank] += 1
            if (stage + 1) % depth == 0:
                come_i[stage].append(end_s)
                to = placement[stage + 1 - depth]
            else:
                come_s += p2p_s[stage]
                come_f[stage + 1].append(come_s)
                to = placement[stage + 1]
        elif kind == 2:
            kept[rank] -= 1
        elif stage % depth:
            come_s += p2p_s[stage - 1]
            come_i[stage - 1].append(come_s)
            to = placement[stage - 1]
        left_s[rank] -= time_s
        if end_s + left_s[rank] > deadline_s:
            return None
        free_s[rank] = end_s
        passes.append(kind * num_passes + stage * count + index)
        heappush(events, (end_s, rank))
        if to >= 0 and to != rank and free_s[to] <= come_s:
            heappush(events, (come_s, to))
    return TimedPasses(max(free_s), passes) if len(passes) == problem.num_passes else None


def _target_times_s(problem: SearchProblem, rule: PriorityRule) -> tuple[list[float], list[float]]:
    """Return when the first micro-batch's F and I are wanted on each stage; later ones add a period each."""
    forward_s, input_s, _ = problem.times_s
    begins_f: list[float] = []
    begins_i: list[float] = []
    for first in problem.first_stages:
        last = first + problem.depth - 1
        hops = zip(forward_s[first:last], problem.p2p_s[first:last], strict=True)
        begins_f += accumulate((one + hop for one, hop in hops), initial=0.0)
        begin_i = [begins_f[-1] + forward_s[last] - rule.backward_priority_s]
        for stage in range(last, first, -1):
            begin_i.append(begin_i[-1] + input_s[stage] + problem.p2p_s[stage - 1])
        begins_i += begin_i[::-1]
    return begins_f, begins_i


def _choose(state: tuple, rank: int, now_s: float) -> tuple[int, int]:
    """Return the kind and stage of the pass that the rank begins now; kind −1: it waits.

    W fills idle time: it goes first only if too many are deferred, or if the preferred pass needs the memory that W
    frees.
    """
    problem, rule, period_s, in_flight, backlog, wanted_f, wanted_i, come_f, come_i, done_f, done_i, done_w, kept = (
        state
    )
    soon_s = now_s + _EPSILON_S
    depth = problem.depth
    held = problem.stages[rank]
    spare = problem.capacity - kept[rank] - 1
    best = next_best = blocked = next_s = inf
    kind = stage = weight = -1
    for held_stage in held:
        index, come_s = done_i[held_stage], come_i[held_stage]
        if index < len(come_s):
            want = wanted_i[held_stage] + index * period_s
            if come_s[index] <= soon_s:
                if want < best:
                    best, kind, stage = want, 1, held_stage
            elif want < next_best:
                next_best, next_s = want, come_s[index]
        if index > done_w[held_stage]:
            if index - done_w[held_stage] > backlog[held_stage]:
                weight = held_stage
                blocked = -inf
            elif weight < 0:
                weight = held_stage
        begun, come_s = done_f[held_stage], come_f[held_stage]
        if (
            begun < len(come_s)
            and begun - index < in_flight[held_stage]
            and (held_stage % depth or begun - done_f[held_stage + depth - 1] < rule.max_forward_lead)
        ):
            want = wanted_f[held_stage] + begun * period_s
            if spare < len(held) and (spare < 0 or not _is_safe(held, done_f, done_w, begun, spare)):
                if come_s[begun] <= soon_s and want < blocked:
                    blocked = want
            elif come_s[begun] <= soon_s:
                if want < best:
                    best, kind, stage = want, 0, held_stage
            elif want < next_best:
                next_best, next_s = want, come_s[begun]
    if weight >= 0 and (kind < 0 or blocked < best):
        best, kind, stage = blocked, 2, weight
    if next_best < best and kind >= 0:
        held_up_s = now_s + problem.times_s[kind][stage] - next_s
        return (-1, -1) if next_s - now_s < rule.patience * held_up_s else (kind, stage)
    return kind, stage


def _is_safe(held: tuple[int, ...], done_f: list[int], done_w: list[int], index: int, spare: int) -> bool:
    """Return True if, after the F of micro-batch `index`, those in flight on the rank can be finished one after
    another.

    Going from the oldest unfinished micro-batch on, each must find the activations it still needs, and then frees all
    it holds.
    """
    first = done_w[held[-1]]
    last = done_w[held[0]]
    for held_stage in held:  # plain loops: this is where most of a search's time goes
        if done_w[held_stage] < first:
            first = done_w[held_stage]
        elif done_w[held_stage] > last:
            last = done_w[held_stage]
    for oldest in range(first, last + 1):
        needed = -(index == oldest)
        freed = 0
        for held_stage in held:
            if done_f[held_stage] <= oldest:
                needed += 1
            if done_w[held_stage] <= oldest:
                freed += 1
        if needed > spare:
            return False
        spare += freed - needed
    return True
