"""Stragglers: what is slow is named by three checks in a row, and noise isn't."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from muster.config.load_config import load_run_config
from muster.cost.time.op_times import OpTimes
from muster.data.dataset import SampleStream
from muster.launch.rank_errors import StragglerError, make_rank_error
from muster.parallel import rank_probes
from muster.parallel.rank_probes import MOST_RANKS_IN_PAIRS
from muster.parallel.world import open_world
from muster.probe.contention import RandomDataset
from muster.probe.doctor_ranks import check_rank_probes
from muster.report.stragglers import draw_stragglers, straggler_note
from muster.schedule.action import Action, Kind
from muster.simulate.stragglers import (
    CONFIRMING_CHECKS,
    CONFIRMING_CHECKS_OF_WAITS,
    SLOW_ON_SHARED_CORES,
    Comparable,
    RankTimes,
    Straggler,
    StragglerDetector,
    find_stragglers,
    shorter_links,
)
from muster.spec.plan_name import parse_plan_name
from muster.train.straggler_monitor import (
    StragglerCheck,
    StragglerMonitor,
    comparable_units,
    end_if_replaceable,
    is_replaceable,
)
from muster.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.sampling import quick_sample

NUM_RANKS, EVERY = 8, 5
QUIET = RankTimes(0.2, 0.25, 0.002, 1e-3, 5e-3, (None,) * NUM_RANKS)


def noisy_check(random: Random, slow: dict, noise: float = 0.15) -> list[RankTimes]:
    """Return all ranks' times of a check: of each step, noise that only adds, of tails as long as those of a shared
    machine; `slow` multiplies, by rank, a field, or by (sender, receiver) a message."""

    def steps_s(usual_s: float, repeats: int = EVERY) -> list[float]:
        return [usual_s * (1 + noise * random.lognormvariate(0, 1)) for _ in range(repeats)]

    def measured(usual_s: float, repeats: int) -> float:
        return min(steps_s(usual_s, repeats))

    return [
        RankTimes(
            min(passes_s := steps_s(0.2)) * slow.get(("compute_s", rank), 1),
            0.25,
            measured(0.002, EVERY) * slow.get(("data_s", rank), 1),
            measured(1e-3, 8) * slow.get(("product_s", rank), 1),
            measured(5e-3, 1) * slow.get(("disk_s", rank), 1),
            tuple(
                None if other == rank else measured(8e-4, 8) * slow.get((rank, other), 1) for other in range(NUM_RANKS)
            ),
            median_compute_s=median(passes_s) * slow.get(("compute_s", rank), 1),
        )
        for rank in range(NUM_RANKS)
    ]


class Checks:
    """Comparisons of one run, one after another."""

    def __init__(self, plan: str, seed: int) -> None:
        self.random, self.detector, self.units = Random(seed), StragglerDetector(), units_of(plan)
        self.links = [one.link_s for one in noisy_check(self.random, {})]

    def next(self, slow: dict) -> tuple[list[Straggler], list[Straggler]]:
        """Return the new and the former stragglers of the next comparison."""
        times = noisy_check(self.random, slow)
        links, self.links = self.links, [one.link_s for one in times]
        both = [replace(one, link_s=shorter_links(one.link_s, links[rank])) for rank, one in enumerate(times)]
        return self.detector.update(find_stragglers(both, [0.2] * NUM_RANKS, self.units, noise=self.detector.noise))


def units_of(plan: str) -> list[Comparable]:
    return comparable_units(parse_plan_name(plan), [0.2] * NUM_RANKS, shares_cores=False)


def everyone_but(rank: int) -> list[int]:
    return [other for other in range(NUM_RANKS) if other != rank]


SLOWNESSES = {
    "a replica": ("dp8-z1", {("compute_s", 3): 1.3}, "compute", (3,)),
    "a stage": ("pp8", {("compute_s", 5): 1.3}, "compute", (5,)),
    "a tensor-parallel pair": ("dp4-tp2-z1", {("compute_s", 2): 1.3, ("compute_s", 3): 1.3}, "compute", (2, 3)),
    "a device under z3": ("dp8-z3", {("product_s", 6): 1.3}, "compute", (6,)),
    "the first rank": ("dp2-pp4-z1", {("compute_s", 0): 1.35}, "compute", (0,)),
    "a link": ("dp8-z1", {(2, 5): 2.5}, "link", (2, 5)),
    "a link from the last rank": ("pp8", {(7, 0): 3.0}, "link", (7, 0)),
    "a sender": ("dp8-z1", {(4, other): 2.5 for other in everyone_but(4)}, "sender", (4,)),
    "a receiver": ("dp8-z1", {(other, 1): 2.5 for other in everyone_but(1)}, "receiver", (1,)),
    "data": ("dp8-z1", {("data_s", 2): 40.0}, "data", (2,)),
    "a disk": ("dp8-z1", {("disk_s", 7): 20.0}, "disk", (7,)),
}


@pytest.mark.parametrize("name", SLOWNESSES)
@pytest.mark.parametrize("seed", range(5))
def test_what_is_slow_is_named_within_20_steps(name, seed):
    plan, slow, kind, ranks = SLOWNESSES[name]
    checks = Checks(plan, seed)
    for _ in range(3):
        assert checks.next({}) == ([], [])
    named: list[Straggler] = []
    begun = {key: factor for key, factor in slow.items() if key[0] not in ("compute_s", "data_s", "product_s")}
    for seen in (begun, slow, slow, slow)[: 20 // EVERY]:  # most steps of the first one were before the slowness
        named += checks.next(seen)[0]
    assert [(one.kind, one.ranks) for one in named] == [(kind, ranks)]
    over: list[Straggler] = []
    for _ in range(6):  # noise may find it once more
        over += checks.next({})[1]
    assert [(one.kind, one.ranks) for one in over] == [(kind, ranks)]


@pytest.mark.parametrize("begin", [1, 2, 3, 7, 8, 9, 30])
def test_one_of_two_ranks_is_named_however_early_it_is_slow(begin: int) -> None:
    """Its slowness is the only change of the ratio between both, and no noise."""
    random, detector = Random(begin), StragglerDetector()
    units = comparable_units(parse_plan_name("dp2-z1"), [0.2, 0.2], shares_cores=False)
    named: list[tuple[int, ...]] = []
    for check in range(begin + 20 // EVERY):
        slow = 1.5 if check >= begin else 1.0
        passes_s = [0.2 * random.lognormvariate(0, 0.02) * factor for factor in (1.0, slow)]
        times = [replace(QUIET, compute_s=one, median_compute_s=one, link_s=()) for one in passes_s]
        found = find_stragglers(times, [0.2, 0.2], units, noise=detector.noise)
        named += [one.ranks for one in detector.update(found)[0]]
    assert named == [(1,)]


@pytest.mark.parametrize(
    ("ratio", "waits_s", "checks"),
    [
        (1.3, (0.0, 0.0), CONFIRMING_CHECKS),
        (2.5, (0.0, 0.3), CONFIRMING_CHECKS_OF_WAITS),
        (2.5, (0.3, 0.3), CONFIRMING_CHECKS),
        (2.5, (0.3, 0.0), CONFIRMING_CHECKS),
        (2.5, (0.0, 0.1), CONFIRMING_CHECKS),
        (1.5, (0.3, 0.0), CONFIRMING_CHECKS),
    ],
)
@pytest.mark.parametrize("which", ["compute_s", "product_s"])
def test_a_rank_whose_core_others_use_is_named_after_more_checks(
    which: str, ratio: float, waits_s: tuple[float, float], checks: int
) -> None:
    """Passes that waiting for a core explains, and products below twice the others' while anybody waits for one."""
    if which == "product_s":
        is_chance = max(waits_s) and ratio < SLOW_ON_SHARED_CORES
        checks = CONFIRMING_CHECKS_OF_WAITS if is_chance else CONFIRMING_CHECKS
    detector, units = StragglerDetector(), comparable_units(parse_plan_name("dp2-z1"), [0.2, 0.2], shares_cores=False)
    quiet = [replace(QUIET, median_compute_s=0.2, step_s=0.4, link_s=(), core_wait_s=one) for one in waits_s]
    slow = [quiet[0], replace(quiet[1], **{which: getattr(QUIET, which) * ratio})]
    comparable = units if which == "compute_s" else []
    named = [detector.update(find_stragglers(slow, [0.2, 0.2], comparable))[0] for _ in range(checks)]
    assert [[one.ranks for one in new] for new in named] == [*[[]] * (checks - 1), [(1,)]]
    waits = checks == CONFIRMING_CHECKS_OF_WAITS
    assert str(named[-1][0]).endswith("while cores are short" if waits else "to compute")


def test_a_rank_that_is_slow_without_a_wait_is_named_again_and_replaced() -> None:
    """One comparison without a wait doesn't say so, whichever it is; three in a row do, and stay right."""
    detector = StragglerDetector()
    waits, alone = (Straggler("compute", (1,), 2.5, waits_for_core=one) for one in (True, False))
    checks = [waits] * (CONFIRMING_CHECKS_OF_WAITS - 1) + [alone, waits, alone, alone, alone, waits]
    named = [(check, one) for check, found in enumerate(checks, 1) for one in detector.update([found])[0]]
    assert named == [(CONFIRMING_CHECKS_OF_WAITS, waits), (len(checks) - 1, alone)]
    assert [is_replaceable(one, []) for _, one in named] == [False, True]
    assert detector.confirmed == {alone.key: alone}


@pytest.mark.skipif(rank_probes.waited_for_core_s() == 0.0, reason="this kernel doesn't count the wait for a core")
def test_the_kernel_counts_the_wait_for_a_core() -> None:
    """Two processes on one core: each waits while the other runs."""
    cores = os.sched_getaffinity(0)
    core = {min(cores)}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            os.sched_setaffinity(other.pid, core)
            os.sched_setaffinity(0, core)
            begin_s, first_s = time.perf_counter(), rank_probes.waited_for_core_s()
            while (waited_s := rank_probes.waited_for_core_s() - first_s) < 0.05:
                pass
            assert waited_s <= time.perf_counter() - begin_s
        finally:
            os.sched_setaffinity(0, cores)
            other.kill()


def test_a_step_says_for_how_long_its_rank_had_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [("parallel", "dp1-mb1-fp32"), ("train.seq_len", "32"), ("train.global_batch_size", "1")]
    config = load_run_config("tiny", None, small).config
    data = cast(SampleStream, RandomDataset(config.model.vocab_size, 32))
    with open_world(dist.HashStore(), 0, 1, config.parallel, 1) as world:
        own = Trainer(config, config.parallel, world, data)
        monkeypatch.setattr("muster.train.trainer.waited_for_core_s", iter([2.0, 2.5]).__next__)
        assert own.step().core_wait_s == 0.5


def test_noise_in_a_product_does_not_hide_a_slow_group() -> None:
    """The product of one of its ranks takes longer than the others', by chance, in one comparison or another."""
    group = {("compute_s", rank): 1.5 for rank in (2, 3)}
    for products in ((2, None, None), (None, 3, None), (2, 3, 2)):
        checks = Checks("dp4-tp2-z1", 1)
        named = [checks.next(group | {("product_s", rank): 1.4})[0] for rank in products]
        assert [[one.ranks for one in new] for new in named] == [[], [], [(2, 3)]]
    checks = Checks("dp4-tp2-z1", 1)
    named = [[one.ranks for one in checks.next(group | {("product_s", 3): 1.4})[0]] for _ in range(4)]
    assert named == [[], [], [(3,)], []], "the rank whose product is slow is the cause"


def test_each_time_of_a_slowness_has_its_steps() -> None:
    one = {"kind": "compute", "ranks": [1], "text": "rank 1 is slow"}
    rows = [{"step": step, "ranks": [{}], "stragglers": [one] * (step in (4, 6, 12))} for step in range(2, 16, 2)]
    rows.insert(2, {"step": 5, "ranks": [], "stragglers": []})  # a comparison of gradients says nothing about times
    assert straggler_note(rows) == "stragglers: rank 1 is slow (steps 4 to 6, step 12)"
    rows[6]["stragglers"] = [one | {"ratio": 2.0, "text": "rank 1 is slower"}]
    assert "rank 1 is slower (" in (straggler_note(rows) or ""), "the largest ratio"
    often = [{"step": step, "ranks": [{}], "stragglers": [one] * (step % 2)} for step in range(1, 20)]
    assert straggler_note(often) == "stragglers: rank 1 is slow (10 times, steps 1 to 19)"


NOISY = [("dp8-z1", 1), ("dp8-z1", 3), ("dp8-z1", 6), ("pp8", 4), ("dp4-tp2-z1", 1)]


@pytest.mark.parametrize(("plan", "seed"), quick_sample(NOISY, 0, 3, 4))
def test_noise_gives_no_alarm_in_5000_steps(plan, seed):
    checks = Checks(plan, seed)
    for _ in range(5000 // EVERY):
        assert checks.next({}) == ([], [])


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_jitters_is_no_alarm(seed):
    """One rank reads each time up to a tenth too short or too long, and is as fast as the others."""
    random, checks = Random(seed), Checks("dp8-z1", seed)
    names = ["compute_s", "data_s", "product_s", "disk_s"]
    for _ in range(1000 // EVERY):
        jitter: dict = {(name, 3): random.uniform(0.9, 1.1) for name in names}
        jitter |= {(3, other): random.uniform(0.9, 1.1) for other in everyone_but(3)}
        assert checks.next(jitter) == ([], [])


def test_times_that_change_as_much_from_check_to_check_are_noise():
    """Each rank is twice as slow for four comparisons, now and then, as on cores that other programs use, too."""
    random, detector, units = Random(2), StragglerDetector(), units_of("dp8-z1")
    factors = [1.0] * NUM_RANKS
    named = 0
    for _ in range(400):
        factors = [random.choice((1.0, 1.0, 2.0)) if random.random() < 0.25 else one for one in factors]
        times = [replace(QUIET, compute_s=0.2 * one * random.lognormvariate(0, 0.2)) for one in factors]
        found = find_stragglers(times, [0.2] * NUM_RANKS, units, noise=detector.noise)
        named += len(detector.update(found)[0])
    assert named < 60, "100 are named where all that is above 1.2 counts"


def test_a_rank_that_is_slow_for_long_does_not_count_as_noise():
    detector, units, random = StragglerDetector(), units_of("dp8-z1"), Random(0)
    for _ in range(60):
        times = noisy_check(random, {("compute_s", 3): 1.5})
        detector.update(find_stragglers(times, [0.2] * NUM_RANKS, units, noise=detector.noise))
    assert [one.ranks for one in detector.confirmed.values()] == [(3,)]


def test_a_stage_with_more_layers_is_not_slow():
    times = [replace(QUIET, compute_s=0.2 * (1 + (rank == 7))) for rank in range(NUM_RANKS)]
    assert not find_stragglers(times, [0.2 * (1 + (rank == 7)) for rank in range(NUM_RANKS)], units_of("pp8"))
    assert find_stragglers(times, [0.2] * NUM_RANKS, units_of("pp8"))


def test_ranks_that_share_cores_are_compared_within_their_stage_first():
    plan = parse_plan_name("dp2-pp2-z1")
    everyone = [(0,), (1,), (2,), (3,)]
    stages = [Comparable([(0,), (1,)]), Comparable([(2,), (3,)])]
    shared = comparable_units(plan, [0.1] * 4, shares_cores=True)
    assert shared == [*stages, Comparable(everyone, SLOW_ON_SHARED_CORES)]
    assert comparable_units(plan, [0.1] * 4, shares_cores=False) == [Comparable(everyone)]
    for name, field in (("pp4", "compute_s"), ("tp2-pp2", "product_s")):
        pipeline = comparable_units(parse_plan_name(name), [0.1] * 4, shares_cores=True)
        for ratio, slow in ((1.5, []), (2.5, [(3,)])):  # of passes of a stage with a single rank, and of a product
            times = [replace(one, link_s=()) for one in [QUIET] * 4]
            times[3] = replace(times[3], **{field: ratio * getattr(QUIET, field)})
            found = find_stragglers(times, [0.1] * 4, pipeline, SLOW_ON_SHARED_CORES)
            assert [one.ranks for one in found] == slow


def test_a_product_says_nothing_about_a_rank_whose_passes_are_compared() -> None:
    """Of two ranks one always has the longer product by chance, while the passes of the other are slow."""
    times = [replace(QUIET, product_s=1.4 * QUIET.product_s), replace(QUIET, compute_s=2 * QUIET.compute_s)]
    times = [replace(one, link_s=()) for one in times]
    units = comparable_units(parse_plan_name("dp2-z1"), [0.2] * 2, shares_cores=False)
    assert [one.ranks for one in find_stragglers(times, [0.2] * 2, units)] == [(1,)]


@pytest.mark.parametrize("sizes", [(16, 16), (8, 8, 8), (8,) * 4, (16,) * 4, (6, 2), (12, 4), (4, 1), (2, 2), (8, 8)])
def test_links_between_machines_may_be_slower_than_those_within(sizes: tuple[int, ...]) -> None:
    """A message takes four times as long between machines. Only what is slow beside its like is named."""
    random, machines = Random(0), [number for number, size in enumerate(sizes) for _ in range(size)]
    count = len(machines)

    def message_s(sender: int, receiver: int) -> float | None:
        if sender == receiver or (count > MOST_RANKS_IN_PAIRS and (sender ^ receiver).bit_count() > 1):
            return None
        return (3e-4 if machines[sender] == machines[receiver] else 1.2e-3) * random.lognormvariate(0, 0.05)

    links = [[message_s(sender, receiver) for receiver in range(count)] for sender in range(count)]

    def found() -> list[tuple[str, tuple[int, ...]]]:
        times = [replace(QUIET, link_s=tuple(row)) for row in links]
        return [(one.kind, one.ranks) for one in find_stragglers(times, [], [], machines=machines)]

    assert found() == []
    links[0][1] *= 4  # type: ignore[operator]
    if sizes[0] > 2:
        assert found() == [("link", (0, 1))]
        rows = [asdict(replace(QUIET, link_s=tuple(row))) for row in links]
        check = {"step": 5, "expected_s": [0.2] * count, "ranks": rows, "machines": machines, "stragglers": []}
        assert str(draw_stragglers([check])).count("color-mix(in srgb, var(--alarm) 60%") == (count <= 32)


def test_a_link_is_named_among_two_and_a_network_card_among_four() -> None:
    quiet, slow = 1e-3, 1e-1
    two = [replace(QUIET, link_s=(None, slow)), replace(QUIET, link_s=(quiet, None))]
    assert [one.ranks for one in find_stragglers(two, [], [], machines=[0, 1])] == [(0, 1)]
    four = [
        replace(QUIET, link_s=tuple(None if a == b else slow if 3 in (a, b) else quiet for b in range(4)))
        for a in range(4)
    ]
    found = find_stragglers(four, [], [], machines=range(4))
    assert [(one.kind, one.ranks) for one in found] == [("sender", (3,)), ("receiver", (3,))]


def test_a_rank_that_cannot_write_is_no_faster_than_the_others() -> None:
    times = [replace(QUIET, disk_s=None if rank < 5 else 0.1) for rank in range(NUM_RANKS)]
    assert find_stragglers(times, [], []) == []
    assert draw_stragglers([{"step": 5, "expected_s": [0.2] * 8, "ranks": list(map(asdict, times)), "stragglers": []}])


def test_a_rank_is_planned_around_by_the_time_that_shows_how_slow_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped now and then, which its median shows; a comparison that doesn't find it says nothing."""
    monitor = monitor_of("pp2", [1.0, 1.0], monkeypatch)
    measured = []
    for median_s in (4.0, 4.0, 4.0, 4.0, 2.0, 4.0):
        shown = [replace(QUIET, compute_s=2.0, median_compute_s=one, step_s=10.0, link_s=()) for one in (2.0, median_s)]
        measured.append(compare(monitor, shown, monkeypatch).measured)
    assert measured[0].slowness == [1, 1]
    assert measured[3].slowness == [1, 2]
    assert measured[3].measured_s == [2, 4]
    assert measured[4] is None
    assert measured[5].measured_s == [2, 4]
    disk = [replace(one, disk_s=seconds) for one, seconds in zip(shown, (1.0, 0.01), strict=True)]
    for times in (disk, disk, disk, shown):
        check = compare(monitor, times, monkeypatch)
    assert ("disk", (0,)) in monitor.detector.confirmed, "missed once"
    assert check.measured is not None, "another kind of straggler, on which no passes depend"


def test_rows_are_json_where_predicted_times_are_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = monitor_of("pp2", list(np.array([1.0, 1.0])), monkeypatch)
    slow = [replace(QUIET, compute_s=one, median_compute_s=one, step_s=10.0, link_s=()) for one in (2.0, 6.0)]
    slow[1] = replace(slow[1], core_wait_s=4.0)
    rows = [compare(monitor, slow, monkeypatch).row for _ in range(CONFIRMING_CHECKS_OF_WAITS)]
    (found,) = json.loads(json.dumps(rows[-1]))["stragglers"]
    assert (found["kind"], found["ranks"], found["waits_for_core"]) == ("compute", [1], True)


def test_a_change_of_the_plan_waits_until_slow_ranks_are_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the next generation compare anew; before three comparisons they take all ranks for fast."""
    monitor = monitor_of("pp2", [1.0, 1.0], monkeypatch)
    slow = [replace(QUIET, compute_s=one, median_compute_s=one, step_s=10.0, link_s=()) for one in (2.0, 4.0)]
    for check in range(1, 5):
        compare(monitor, slow, monkeypatch)
        assert monitor.metrics() == {"perf/stragglers": int(check >= CONFIRMING_CHECKS)}
        assert monitor.may_replan(1) == (check >= CONFIRMING_CHECKS)
    assert [monitor.may_replan(changes) for changes in range(4)] == [True, True, True, False]


def test_plans_do_not_change_back_before_a_rank_that_waits_for_a_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = monitor_of("pp2", [1.0, 1.0], monkeypatch)
    slow = [replace(QUIET, compute_s=one, median_compute_s=one, step_s=10.0, link_s=()) for one in (2.0, 4.0)]
    slow[1] = replace(slow[1], core_wait_s=2.0)
    may = [compare(monitor, slow, monkeypatch) and monitor.may_replan(1) for _ in range(CONFIRMING_CHECKS_OF_WAITS)]
    assert may == [False] * (CONFIRMING_CHECKS_OF_WAITS - 1) + [True]
    for _ in range(2):
        compare(monitor, [slow[0], slow[0]], monkeypatch)
    assert not monitor.detector.confirmed
    assert monitor.may_replan(1), "all are as fast again"


def monitor_of(plan: str, expected_s: list[float], monkeypatch: pytest.MonkeyPatch) -> StragglerMonitor:
    """Return the monitor of rank 0 of ranks whose passes, a forward and a backward, should take so long each."""
    world = SimpleNamespace(
        rank=0,
        size=len(expected_s),
        at=SimpleNamespace(pp=0),
        device=torch.device("cpu"),
        all_gather_object=lambda own: [own for _ in expected_s],
    )
    actions = {"compute": [SimpleNamespace(action=Action(kind, 0, 0)) for kind in (Kind.F, Kind.B)]}
    trainer = SimpleNamespace(world=world, plan=parse_plan_name(plan), program=SimpleNamespace(ranks=[actions, {}]))
    seconds = {(kind, stage): own_s for kind in (Kind.F, Kind.B) for stage, own_s in enumerate(expected_s)}
    monitor = StragglerMonitor(cast("Any", trainer), OpTimes(seconds), 1, Path())
    monkeypatch.setattr(monitor, "_own_times", lambda: None)
    return monitor


def compare(monitor: StragglerMonitor, shown: list[RankTimes], monkeypatch: pytest.MonkeyPatch) -> StragglerCheck:
    monkeypatch.setattr(monitor.world, "all_gather_object", lambda own: shown)
    check = monitor.after_step(cast("Any", SimpleNamespace(step=1)))
    assert check is not None
    return check


def test_what_a_stage_needs_at_least_is_expected_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 was slow in the profile, and until the third comparison; then nobody is."""
    plan = parse_plan_name("pp2")
    world = SimpleNamespace(
        rank=0,
        size=2,
        at=SimpleNamespace(pp=0),
        device=torch.device("cpu"),
        all_gather_object=lambda own: [own, 3 * own],
    )
    actions = {"compute": [SimpleNamespace(action=Action(kind, 0, 0)) for kind in (Kind.F, Kind.B)]}
    trainer = SimpleNamespace(world=world, plan=plan, program=SimpleNamespace(ranks=[actions, {}]))
    times = OpTimes({(kind, stage): s for kind in (Kind.F, Kind.B) for stage, s in ((0, 1.0), (1, 3.0))})
    monitor = StragglerMonitor(cast("Any", trainer), times, 1, Path())
    said = []
    for step, slow in enumerate((3.0, 3.0, 1.0, 1.0, 1.0)):
        shown = [replace(QUIET, compute_s=factor * 2.0, step_s=10.0, link_s=()) for factor in (1.0, slow)]
        monkeypatch.setattr(world, "all_gather_object", lambda own, shown=shown: shown)
        monkeypatch.setattr(monitor, "_own_times", lambda: None)
        check = monitor.after_step(cast("Any", SimpleNamespace(step=step)))
        assert check is not None
        said += check.sentences
    assert said == [], "rank 0 isn't slow because rank 1 is faster than it was"
    assert monitor.usual_times().seconds == {(kind, stage): 1.0 for kind in (Kind.F, Kind.B) for stage in (0, 1)}


def test_ranks_name_the_same_stragglers():
    told = run_ranks(4, "tests.straggler_ranks:compare", {"slow_rank": 2, "every": 3})
    assert all(one == told[0] for one in told)
    compute = [one for row in told[0] for one in row["stragglers"] if one["kind"] == "compute"]
    assert [2] in [one["ranks"] for one in compute]
    assert told[0][0]["stragglers"] == [], "one check alone is no evidence"
    waits_s = [[one["core_wait_s"] for one in row["ranks"]] for row in told[0]]
    assert waits_s == [[0, 1, 0, 0]] * 3, "the median of 1, 2 and 0 s"
    assert "rank 2 takes" in straggler_note(told[0])
    page = draw_stragglers(told[0])
    assert "from 3" in page
    assert "color-mix" in page
    assert draw_stragglers([]) is None
    longer_stage = [replace(QUIET, compute_s=one, median_compute_s=two) for one, two in ((1, 1), (3, 3), (1, 2))]
    rows = [{"step": 5, "expected_s": [1, 3, 1], "ranks": list(map(asdict, longer_stage)), "stragglers": []}]
    assert str(draw_stragglers(rows)).count("color-mix") == 1, "the median of rank 2 alone is slow"
    assert straggler_note(told[0][:1]) is None
    json.dumps(told, allow_nan=False)


def test_a_device_that_computes_wrongly_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = rank_probes.probe_product(torch.device("cpu"))
    assert (sound.wrong_share, sound.seconds > 0) == (0, True)
    multiply = torch.mm

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = multiply(left, right)
        product[3, 5] += 1
        return product

    monkeypatch.setattr(torch, "mm", wrong)
    share = rank_probes.probe_product(torch.device("cpu")).wrong_share
    assert share == 1 / rank_probes.PRODUCT_SIZE**2
    detector = StragglerDetector()
    times = [replace(QUIET, wrong_share=share if rank == 6 else 0.0) for rank in range(NUM_RANKS)]
    new, _ = detector.update(find_stragglers(times, [0.2] * NUM_RANKS, units_of("dp8-z1")))
    assert [(one.kind, one.ranks) for one in new] == [("result", (6,))]
    assert str(new[0]) == "rank 6 computes 6.8e-06 of a product of matrices wrongly: take its device out of service"
    found = list(check_rank_probes([asdict(one) for one in times], [""] * 6 + [" of node 1 on b", ""], [0] * 8, True))
    assert [(one.check, one.level) for one in found] == [("devices", "problem")]
    assert found[0].sentence.endswith("out of service (rank 6 of node 1 on b)")


def test_doctor_notes_a_slow_device_and_a_slow_link() -> None:
    times = [asdict(one) for one in noisy_check(Random(0), {("product_s", 1): 2.0, (2, 5): 4.0})]
    told = {one.check: one for one in check_rank_probes(times, [""] * NUM_RANKS, [0] * NUM_RANKS)}
    assert (told["devices"].level, told["links"].level) == ("note", "note")
    assert told["devices"].sentence.startswith("rank 1 takes ")
    assert told["links"].sentence.startswith("the link from rank 2 to rank 5 takes ")
    sound = [asdict(one) for one in noisy_check(Random(0), {})]
    assert [one.level for one in check_rank_probes(sound, [""] * NUM_RANKS, [0] * NUM_RANKS)] == ["ok", "ok"]


def test_a_slow_rank_leaves_its_place_once() -> None:
    slow = [Straggler("compute", (2,), 1.4), Straggler("sender", (3,), 2.0), Straggler("compute", (4, 5), 1.4)]
    with pytest.raises(StragglerError, match="^takes 1.40 times as long as the others to compute$") as caught:
        end_if_replaceable(
            2, slow, [{"ranks": [1], "reason": ""}, {"ranks": [2], "reason": "rank 2 on a was killed by signal 9"}]
        )
    assert not make_rank_error(caught.value, 2).is_lasting, "another attempt may go on"
    with pytest.raises(StragglerError):
        end_if_replaceable(6, [Straggler("result", (6,), 1e-5)], [])
    before = [{"ranks": [1, 2], "reason": str(Straggler("compute", (2,), 1.3))}]  # so an earlier version wrote it
    end_if_replaceable(2, slow, before)
    end_if_replaceable(2, slow, [{"ranks": [1, 2], "causes": ["dead", "slow"], "reason": ""}])
    wrong = Straggler("result", (2,), 1e-5)
    with pytest.raises(StragglerError):
        end_if_replaceable(2, [wrong], before)
    end_if_replaceable(2, [wrong], [{"ranks": [2], "causes": ["wrong results"], "reason": ""}])
    for causes in (["slow", "dead"], ["dead", "wrong results"]):
        with pytest.raises(StragglerError) as caught:
            end_if_replaceable(2, slow, [{"ranks": [1, 2], "causes": causes, "reason": ""}])
        assert make_rank_error(caught.value, 2).cause == "slow"
    for rank in (0, 3, 4, 5):
        end_if_replaceable(rank, slow, [])
