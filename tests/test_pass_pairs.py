"""Forwards and backwards that run as one: the published bubbles, their turns, and parity on real ranks."""

import json
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.api.verbs import plan as best_plans
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time.op_times import OpTimes
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.cost.time.pass_pairs import Turn, Turns, order_of_turns, pair_s, turns_of_pass, turns_of_rows
from muster.cost.time.plan_times import place_plan
from muster.cost.time.stage_times import stage_times
from muster.parallel import turns as parallel_turns
from muster.parallel.device_clock import join_turns
from muster.planner.bounds.pass_times import pass_times_of_placed
from muster.planner.bounds.step_bound import step_bound_s
from muster.planner.dispatch_choice import dispatch_fields
from muster.planner.request import PlanRequest, with_overlap_word
from muster.planner.space import is_tried_late, schedule_options
from muster.schedule.action import parse_action
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import ProgramError, format_program, parse_program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.serialization import schedule_from_json, schedule_to_json
from muster.schedule.timing import time_schedule
from muster.simulate.breakdown import spans_of
from muster.simulate.predict import predict
from muster.simulate.shared_cores import simulate_on_shared_cores
from muster.simulate.simulator import simulate, simulate_step
from muster.simulate.spans import time_by_part
from muster.simulate.timeline import Event, timeline_from_json, timeline_to_json
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from tests.parity import config_of
from tests.ranks import run_ranks
from tests.test_schedules import setting_of

NAMES = ("dualpipe", "dualpipe-v")


def setting(name: str, ranks: int, micro_batches: int, pair: float, p2p_s: float = 0.0) -> ScheduleSpec:
    """Passes of 1 each; a forward and a backward take `pair` together."""
    replicas = 2 if name == "dualpipe" else 1
    return ScheduleSpec.uniform(ranks, micro_batches, chunks=2, replicas=replicas, p2p_s=p2p_s, pair_share=pair / 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_the_idlest_rank_has_the_published_bubble(name: str, ranks: int) -> None:
    """(p/2 − 1)(tFB + tB − 3 tW), and (p − 1)/2 of it for the V, in units of a rank's share (README of
    github.com/deepseek-ai/DualPipe; its chunks are half of a rank's share for the V)."""
    factor = ranks / 2 - 1 if name == "dualpipe" else (ranks - 1) / 2
    for micro_batches in (2 * ranks, 4 * ranks):
        for pair in (3.0, 2.5, 2.0):
            spec = setting(name, ranks, micro_batches, pair)
            timing = time_schedule(make_schedule(name, spec), spec)
            assert timing.makespan_s - min(timing.work_s) == pytest.approx(factor * (pair + 2 - 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("micro_batches", [2, 3, 8, 19])
@pytest.mark.parametrize("p2p_s", [0.0, 0.3])
def test_a_program_with_pairs_takes_what_its_schedule_takes(name: str, micro_batches: int, p2p_s: float) -> None:
    spec = setting(name, 4, micro_batches, 2.4, p2p_s)
    schedule = make_schedule(name, spec)
    timing = time_schedule(schedule, spec)
    program = lower(schedule, LoweringOptions(train=False))
    check(program)
    assert parse_program(format_program(program)) == program
    assert schedule_from_json(schedule_to_json(schedule, timing)) == schedule
    stages = range(schedule.num_stages)
    share = spec.stage_activation
    seconds = {(kind, -1): time_s * share for kind, time_s in (("F", 1.0), ("B", 2.0), ("I", 1.0), ("W", 1.0))}
    times = OpTimes(seconds, p2p_s, pairs_s={(one, other): 2.4 * share for one in stages for other in stages})
    for timeline in (simulate(program, times), simulate_on_shared_cores(program, times)):
        for rank, order in enumerate(schedule.ranks):
            rows = zip(order, timing.begin_s[rank], timing.end_s[rank], strict=True)
            events = [event for event in timeline.events if event.rank == rank and event.lane == "compute"]
            assert [one for row in rows for one in row[1:]] == pytest.approx([t for one in events for t in one[3:]])
            assert list(order) == [event.action for event in events]
        assert timeline_from_json(timeline_to_json(timeline)).pairs == program.pairs
    step = simulate_step(program, times)
    spans = spans_of(step.timeline())
    assert step.time_by_part() == pytest.approx(time_by_part(spans, 0.0, timing.makespan_s))


def test_without_a_time_for_pairs_passes_run_one_after_another() -> None:
    assert not make_schedule("dualpipe-v", setting_of("dualpipe-v", 4, 8)).pairs


WRONG = {
    "0F1 on rank 0 runs as one with the pass after it, which is 0B0: expected a forward and, after it, a backward B of"
    " another stage": "0F0 0F1& 0B0 0B1",
    "0B0 on rank 0 runs as one with the pass after it, which is 0F1: expected a forward and, after it, a backward B of"
    " another stage": "0F0 0B0& 0F1 0B1",
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_pair_is_refused_by_the_name_of_its_action(sentence: str) -> None:
    text = f"program 2 schedule=own ranks=1 micro_batches=2 placement=0\nrank 0 compute: {WRONG[sentence]}\n"
    with pytest.raises(ProgramError) as caught:
        check(parse_program(text))
    assert str(caught.value) == sentence


def test_the_parts_of_a_pair_wait_together_and_are_over_together() -> None:
    program = lower(make_schedule("dualpipe-v", setting("dualpipe-v", 2, 4, 2.0)), LoweringOptions(train=False))
    text = format_program(program)
    late = text.replace("0F3&@p2p:", "0F3&@p2p:9,p2p:", 1) if "0F3&@p2p:" in text else text
    assert "0F3& 3B1@" not in late  # the wait stands at the forward
    word = next(word for word in text.splitlines()[1].split() if word.endswith("&"))
    place = text.splitlines()[1].split().index(word) - 3
    early = text.replace(f"@compute:{place + 1}", f"@compute:{place}", 1)
    with pytest.raises(ProgramError, match="which is over with"):
        check(parse_program(early))


# ----------------------------------------------------------------------------------------------------------------------
# Turns


def test_turns_alternate_and_the_rest_of_the_longer_pass_follows() -> None:
    log: list[str] = []
    turns = parallel_turns.Turns(torch.device("cpu"))

    def work(name: str, count: int) -> str:
        for index in range(count):
            log.append(f"{name}{index}")
            if index < count - 1:
                turns.hand_over()
        return name

    for counts in ((2, 3), (3, 1), (1, 2), (1, 1)):
        log.clear()
        assert turns.run(partial(work, "F", counts[0]), partial(work, "B", counts[1])) == ("F", "B")
        assert log == [f"{'FB'[own]}{turn}" for own, turn in order_of_turns(*counts)]
    turns.hand_over()  # outside of a pair it returns at once


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_a_pass_is_raised_once_the_other_is_over(failing: int) -> None:
    turns = parallel_turns.Turns(torch.device("cpu"))
    ended: list[int] = []

    def work(own: int) -> None:
        turns.hand_over()
        if own == failing:
            raise ValueError("a lost peer")
        turns.hand_over()
        ended.append(own)

    with pytest.raises(ValueError, match="a lost peer"):
        turns.run(lambda: work(0), lambda: work(1))
    assert ended == [1 - failing]
    assert turns.run(lambda: 1, lambda: 2) == (1, 2)


def test_a_pair_takes_the_longer_of_what_overlaps() -> None:
    one, other = Turns((1.0, 1.0), (2.0,)), Turns((2.0, 2.0), (2.0,))
    assert pair_s(one, other) == pytest.approx(7 + OVERLAP_SLOWDOWN * 3)
    assert pair_s(Turns((3.0,)), Turns((2.0,))) == 5.0  # nothing to hide
    rows = turns_of_rows((0.5, 0.5), experts_s=1.0)
    exchanged = (0.5, 0.5), (0.0, 0.0)
    assert turns_of_pass(7.0, [(2.0, ()), (3.0, rows)], is_backward=False) == Turns((4.8, 1.2, 0.0), *exchanged)
    assert turns_of_pass(7.0, [(3.0, rows), (2.0, ())], is_backward=True) == Turns((0.0, 1.2, 4.8), *exchanged)


def test_a_collective_beside_its_own_pass_adds_what_is_left_of_it() -> None:
    """Gradients of weights hide 1 s of a sum of 2 s in a pass by itself; in a pair it begins as much earlier."""
    sums = Turn(2.0, 2.0, beside_s=1.0)
    assert sums.exposed_s == pytest.approx(1 + OVERLAP_SLOWDOWN)
    alone_s = 2 + sums.exposed_s
    backward = turns_of_pass(alone_s, [(2.0, [sums])], is_backward=True)
    assert backward == Turns((2.0, 0.0), (2.0,), (1.0,))
    assert pair_s(Turns((0.0,)), backward) == pytest.approx(alone_s)
    assert pair_s(Turns((0.5, 0.5), (0.25,)), backward) == pytest.approx(3.5 + OVERLAP_SLOWDOWN * 1.75)


def test_the_turns_of_a_pass_are_one_event() -> None:
    forward, backward, before = (parse_action(text) for text in ("0F1", "1B0", "0F0"))
    rows = [(before, 0, 1), (forward, 1, 2), (backward, 2, 4), (forward, 4, 5), (backward, 5, 7), (before, 7, 8)]
    joined = join_turns([Event(0, "compute", action, float(begin), float(end)) for action, begin, end in rows])
    assert [event[2:] for event in joined] == [(before, 0, 1), (forward, 1, 3), (backward, 3, 7), (before, 7, 8)]


# ----------------------------------------------------------------------------------------------------------------------
# On real ranks

CASES: list[dict[str, Any]] = [
    {"plan": "dp2-pp2v2-ep2-sdualpipe-z1", "family": "experts", "profile": True},
    {"plan": "dp2-pp2v2-ep2-sdualpipev-relem", "family": "grouped"},
    {"plan": "dp2-pp2v2-ep2-sdualpipev-z2", "family": "experts", "fault": "waits at once"},
    {"plan": "dp2-pp2v2-ep2-sdualpipev-z2", "family": "experts", "fault": "forwards alone hand over"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipe", "family": "llama", "profile": True},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "llama", "fault": "sums at once"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "llama", "fault": "loses sums"},
]
OTHER_ORDERS = "forwards alone hand over", "sums hand over in forwards alone"
"""Bugs by which turns come in another order than is predicted."""
MORE: list[dict[str, Any]] = [
    {"plan": "tp2-sp-pp2v2-ep2-sdualpipev", "family": "experts"},
    {"plan": "tp2-pp2v2-ep2-sdualpipe", "family": "balanced"},
    {"plan": "cp2-pp2v2-ep2-sdualpipev", "family": "gpt_oss"},
    {"plan": "dp2-pp2v2-ep2-sdualpipe-z3", "family": "capacity"},
    {"plan": "dp2-pp2v2-ep2-epfp8-sdualpipev", "family": "experts", "inexact": True},
    {"plan": "tp2-pp2v2-etp2-sdualpipev", "family": "experts", "pairs": False},
    {"plan": "dp2-pp2v2-ep2-sdualpipev-rfull", "family": "experts", "pairs": False},
    {"plan": "dp2-pp2v2-ep2-epover2-sdualpipe", "family": "grouped", "pairs": False},
    {"plan": "dp2-pp2v2-sdualpipev", "family": "llama", "pairs": False},
    {"plan": "tp2-pp2v2-sdualpipev", "family": "llama", "pairs": False},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "llama", "fault": "sums hand over in forwards alone"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev-relem", "family": "gpt2", "tied": True},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev-rfull", "family": "gemma2", "packing": "document_mask"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipe-rfull", "family": "llama", "profile": True},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "gpt_neox"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipe", "family": "olmo2"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "latent"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipev", "family": "dropout"},
    {"plan": "tp2-tppairs-pp2v2-sdualpipe", "family": "qwen3", "tied": True},
]
MORE_ON_8: list[dict[str, Any]] = [
    {"plan": "dp2-tp2-pp2v2-ep4h-sdualpipev", "family": "experts"},
    {"plan": "tp2-sp-pp4v2-ep2-sdualpipe", "family": "grouped", "layers": 8},
    {"plan": "dp2-cp2-pp2v2-ep4-sdualpipe", "family": "experts"},
    {"plan": "tp2-tppairs-pp4v2-sdualpipe", "family": "llama", "layers": 8},
    {"plan": "tp4-tppairs-pp2v2-sdualpipev", "family": "llama"},
    {"plan": "tp2-tppairs-dp2-pp2v2-z3-sdualpipev", "family": "gpt2"},
    {"plan": "tp2-tppairs-dp2-pp2v2-z2-sdualpipe-relem", "family": "llama"},
    {"plan": "tp2-tppairs-dp2-pp2v2-z1-sdualpipe", "family": "llama", "tied": True, "overlaps": True},
    {"plan": "tp2-tppairs-cp2-pp2v2-sdualpipev", "family": "llama"},
]


def test_pairs_train_as_one_process_does_and_exchange_beside_each_other(tmp_path: Path) -> None:
    check_cases(4, [CASES[at] for at in (1, 3, 4, 6)], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "cases"), [(4, CASES + MORE), (8, MORE_ON_8)])
def test_more_plans_train_in_pairs(ranks: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    check_cases(ranks, cases, tmp_path)


def check_cases(ranks: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Losses and gradients are those of one process, to 1e-10 in float64; each exchange in a pair is under way while
    the other pass has its turn; turns come as predicted, and sown bugs are found."""
    own = ("pairs", "inexact")
    given = [{key: value for key, value in case.items() if key not in own} for case in cases]
    payload = {"cases": [one | {"precision": "fp64", "steps": 1} for one in given], "cache": str(tmp_path)}
    results = run_ranks(ranks, "tests.pair_ranks:run_pairs", payload)
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        if not case.get("inexact"):
            error = max(max(one["loss_error"], one["gradient_error"]) for one in found)
            assert (error < 1e-10) == (case.get("fault") != "loses sums"), case
        assert not any(one["untimed"] for one in found), case
        pairs = [pair for one in found for pair in one["pairs"]]
        assert bool(pairs) == case.get("pairs", True), case
        assert all(is_beside(log) for _, _, log in pairs) != ("fault" in case), case
        as_predicted = all(order_in(log) == predicted_order(case, *ends) for *ends, log in pairs)
        assert as_predicted != (case.get("fault") in OTHER_ORDERS), case


def is_beside(log: list[tuple[str, int]]) -> bool:
    """True if between the start of each exchange and the wait for it the other pass has had a turn, unless it is
    over."""
    for place, (event, own) in enumerate(log):
        if event == "start":
            wait = next(at for at in range(place, len(log)) if log[at] == ["wait", own])
            beside, after = (["turn", 1 - own] in part for part in (log[place:wait], log[wait:]))
            if after and not beside:
                return False
    return True


def order_in(log: list[tuple[str, int]]) -> list[int]:
    """Passes in the order of their turns; those of a pass whose partner is over are one."""
    return [own for event, own in log if event == "turn"]


def predicted_order(case: dict[str, Any], forward: str, backward: str) -> list[int]:
    model = config_of(**case).model
    plan = parse_plan_name(case["plan"], Plan(micro_batch_size=1))
    workload = config_of(**case).workload
    stages = stage_times(place_plan(model, plan, workload, load_cluster(f"{plan.world_size}xh100")))
    counts = [
        len(stages[parse_action(text).stage].turns[own].computed_s) for own, text in enumerate((forward, backward))
    ]
    return [own for own, _ in groupby(own for own, _ in order_of_turns(*counts))]


def test_executed_pairs_take_what_is_predicted() -> None:
    """By a logical clock, over real messages: the turns of every pair, and all that waits for it."""
    texts = []
    for name in NAMES:
        spec = setting(name, 4, 8, 2.0)
        schedule = make_schedule(name, spec)
        texts.append(json.dumps(schedule_to_json(schedule, time_schedule(schedule, spec))))
    for found in run_ranks(4, "tests.pair_ranks:run_by_clock", texts):
        for case in found:
            assert any(" " in actions for actions, _, _ in case["executed"])
            assert case["executed"] == case["simulated"]


def test_what_stands_against_pairs_is_told_by_plan_and_model() -> None:
    experts, dense = (config_of(family=family).model for family in ("experts", "llama"))
    assert pairs_passes(parse_plan_name("dp2-pp2v2-ep2-sdualpipe"), experts)
    for plan, model in (
        ("dp2-pp2v2-ep2-sdualpipe", dense),
        ("dp2-pp2v2-sdualpipe", experts),
        ("dp2-pp2v2-ep2-szbv", experts),
        ("dp2-pp2v2-ep2-epover2-sdualpipe", experts),
        ("dp2-pp2v2-ep2g-sdualpipe", experts),
        ("dp2-pp2v2-ep2-rfull-sdualpipe", experts),
    ):
        assert not pairs_passes(parse_plan_name(plan), model), plan


def test_what_stands_against_pairs_that_hide_collectives_is_said() -> None:
    plan = parse_plan_name("tp2-tppairs-pp2v2-sdualpipev")
    experts, dense, mtp = (config_of(family=family).model for family in ("experts", "llama", "llama mtp"))
    ladder = dense.model_copy(update={"residual": "ladder"})
    assert pairs_passes(plan, dense)
    assert not unsupported_features(plan, dense)
    for model, sentence in (
        (experts, "tp_overlap pairs with experts (in whose pairs rows travel"),
        (mtp, "tp_overlap pairs with multi-token prediction"),
        (ladder, "tp_overlap pairs of a model with residual ladder"),
    ):
        assert any(found.startswith(sentence) for found in unsupported_features(plan, model)), sentence


def test_the_planner_searches_pairs_of_collectives_where_schedules_have_them() -> None:
    model, cluster = load_model("llama3-70b"), load_cluster("64xh100")
    request = PlanRequest(model, cluster, Workload(seq_len=4096, global_batch_size=128))
    paired = with_overlap_word(request, "tppairs")
    assert (request.shards_positions(8, 1), paired.shards_positions(8, 1)) == (True, False)
    assert {name for name, _ in schedule_options(paired, 4)} == set(NAMES)
    assert not schedule_options(paired, 1)
    assert (is_tried_late(request, "dualpipe"), is_tried_late(paired, "dualpipe")) == (True, False)


@pytest.mark.soak
def test_the_planner_takes_pairs_of_collectives_where_they_pay() -> None:
    asked: dict[str, Any] = {"global_batch": 128, "require": "tp8-pp4v2-mb1", "top": 1}
    plain, either = (best_plans("llama3-70b", "64xh100", **asked, allow=allow) for allow in ("", "tppairs"))
    assert [found.best.default_strategy.tp_overlap for found in (plain, either)] == ["none", "pairs"]
    assert either.predictions[0].step_time_s < 0.97 * plain.predictions[0].step_time_s


ACROSS_NODES = ("dp16-pp4v2-ep16-mb1-z1-sdualpipe", "dp16-pp4v2-ep16-mb1-z1-sdualpipev")
OF_COLLECTIVES = ("dp2-tp8-tppairs-pp4v2-mb1-z1-sdualpipev", "tp8-tppairs-pp8v2-mb1-rfull-sdualpipe")


@pytest.mark.parametrize(
    ("model_name", "batch", "name", "axis", "share_of_step", "share_of_waits"),
    [("qwen3-30b-a3b", 256, name, "ep", 0.9, 0.7) for name in ACROSS_NODES]
    + [("llama3-70b", 128, name, "tp", 0.97, 0.5) for name in OF_COLLECTIVES],
)
def test_bounds_of_the_planner_hold_for_what_pairs_hide(
    model_name: str, batch: int, name: str, axis: str, share_of_step: float, share_of_waits: float
) -> None:
    """Without pairs' turns the same passes take longer; with experts on two nodes a fifth."""
    model, plan, cluster = load_model(model_name), parse_plan_name(name), load_cluster("64xh100")
    workload = Workload(seq_len=4096, global_batch_size=batch)
    found = predict(model, plan, workload, cluster)
    apart = predict(model, plan, workload, cluster, times=replace(found.times, pairs_s={}))
    assert found.step_time_s < share_of_step * apart.step_time_s
    assert 0 < found.parts.communication_s[axis] < share_of_waits * apart.parts.communication_s[axis]
    assert found.parts.compute_s == pytest.approx(apart.parts.compute_s)
    times = pass_times_of_placed(place_plan(model, plan, workload, cluster))
    counts = [plan.num_micro_batches(workload) // plan.pipeline_replicas] * plan.pipeline_replicas
    assert step_bound_s(plan, times, counts) <= found.step_time_s


def test_the_planner_sends_rows_whole_where_pairs_hide_them() -> None:
    """An all-gather, which alone is faster than an exchange of rows, can't hide as they do."""
    model, cluster = load_model("qwen3-30b-a3b"), load_cluster("64xh100")
    request = PlanRequest(model, cluster, Workload(seq_len=4096, global_batch_size=256))
    assert dispatch_fields(request, 1, 1, 16, False)["ep_dispatcher"] == "all_gather"
    for schedule in NAMES:
        fields = dispatch_fields(request, 1, 1, 16, False, schedule=schedule)
        assert (fields["ep_dispatcher"], fields["ep_chunks"]) == ("all_to_all", 1)
