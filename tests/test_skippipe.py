"""Micro-batches that skip stages: their paths, and that they train as a serial emulator with the same paths."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from muster.cli.main import main
from muster.config.cluster_files import load_cluster, load_device
from muster.cost.comm_volume import step_comm_bytes
from muster.cost.flops import plan_flops_per_token
from muster.cost.memory.forecast import forecast_memory
from muster.planner.skip_paths import resolve_on_cluster
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.one_f_one_b import one_f_one_b
from muster.schedule.path_search import PathProblem, TimedPath, find_paths, num_skipped
from muster.schedule.program import ProgramError, parse_program
from muster.schedule.resolve import resolve_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import PathLimits, ScheduleSpec
from muster.schedule.skippipe import hop_weights, place_on_links, skippipe
from muster.schedule.timing import time_schedule
from muster.simulate.breakdown import breakdown
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from tests.ranks import run_ranks

MODEL = ModelSpec(vocab_size=32, hidden_size=8, num_layers=8, num_heads=2, num_kv_heads=2, intermediate_size=16)
WORKLOAD = Workload(seq_len=8, global_batch_size=8)
TOLERANCE = 1e-10


# ----------------------------------------------------------------------------------------------------------------------
# Training


def check_same(num_ranks: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Cases with a fault must differ from the emulator, the others equal it in float64."""
    payload = {"cases": cases, "folder": str(folder)}
    by_rank = run_ranks(num_ranks, "tests.skip_ranks:run_cases", payload)
    (emulated,) = run_ranks(1, "tests.skip_ranks:emulate_cases", payload)
    for index, (case, wanted) in enumerate(zip(cases, emulated, strict=True)):
        errors, compared = [], set()
        for found in (own[index] for own in by_rank):
            for key in ("losses", "norms"):
                errors += [abs(one / other - 1) for one, other in zip(found[key], wanted[key], strict=True)]
            for name, values in found["values"].items():
                compared.add(name)
                pairs = zip(values, wanted["values"][name], strict=True)
                errors.append(max(abs(one - other) for one, other in pairs))
        assert compared == wanted["values"].keys() or case["plan"][:2] in ("dp", "tp"), case
        assert (max(errors) < TOLERANCE) == ("fault" not in case), (case, max(errors))


SWAPPED = {"plan": "pp4-skip0w", "paths": [[0, 2, 1, 3], [0, 1, 2, 3]], "packing": "next_fit"}


def test_gradients_equal_a_serial_emulator_on_two_ranks(tmp_path: Path) -> None:
    """Of four stages on two ranks; unweighted gradients are found out."""
    plan = "pp2v2-skip0.25"
    check_same(
        2,
        [{"plan": f"{plan}-mb2", "packing": "next_fit", "tied": True}, {"plan": plan, "fault": "unweighted"}],
        tmp_path,
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_gradients_equal_a_serial_emulator_on_four_ranks(tmp_path: Path) -> None:
    """Also with stages on other ranks, in another order, and with data parallelism."""
    check_same(2, [{"plan": "pp2v2-skip0.25"}], tmp_path)
    given = {"plan": "pp4-skip0.25", "paths": [[0, 1, 3], [0, 2, 3], [0, 2, 3]], "placement": [3, 0, 1, 2]}
    cases = [{"plan": "pp4-skip0.25"}, given, SWAPPED | {"placement": [2, 0, 3, 1]}, SWAPPED | {"fault": "in turn"}]
    wide = ("dp2-pp2v2-skip0.25-z1", "dp2-pp2v2-skip0.25-z2", "dp2-pp2v2-skip0.25-z3", "tp2-pp2v2-skip0.25")
    check_same(4, [*cases, *({"plan": plan, "packing": "next_fit"} for plan in wide)], tmp_path)


def test_with_nothing_skipped_it_is_the_ordinary_pipeline_to_the_bit(tmp_path: Path) -> None:
    pairs = [("pp2v2-skip0-fp32", "pp2v2-sinterleaved-fp32")]
    check_bits(2, pairs, tmp_path)


@pytest.mark.soak
def test_with_nothing_skipped_it_is_1f1b_to_the_bit(tmp_path: Path) -> None:
    check_bits(4, [("pp4-skip0-fp32", "pp4-fp32"), ("pp4-skip0-bf16", "pp4-bf16")], tmp_path)


def check_bits(num_ranks: int, pairs: list[tuple[str, str]], folder: Path) -> None:
    """Both plans of each pair end with the same bits."""
    payload = {"cases": [{"plan": plan} for pair in pairs for plan in pair], "folder": str(folder)}
    for found in run_ranks(num_ranks, "tests.skip_ranks:run_cases", payload):
        for one, other in zip(found[::2], found[1::2], strict=True):
            assert (one["losses"], one["norms"], one["digests"]) == (other["losses"], other["norms"], other["digests"])


# ----------------------------------------------------------------------------------------------------------------------
# Paths


@st.composite
def problems(draw: st.DrawFn) -> PathProblem:
    stages, count = draw(st.integers(2, 7)), draw(st.integers(1, 8))
    limits = PathLimits(draw(st.floats(0, 0.7)), draw(st.floats(0, 1)), draw(st.booleans()))
    times = st.floats(0.1, 4)
    hop_s = tuple(tuple(draw(times) for _ in range(stages)) for _ in range(stages))
    ranks = draw(st.permutations(range(stages)))
    placement = tuple(ranks) if draw(st.booleans()) else tuple(stage % -(-stages // 2) for stage in range(stages))
    try:
        skipped, visits = num_skipped(limits, stages, count)
    except InfeasibleError:
        inner, wanted = stages - 2, max(1, limits.min_visits * count)
        skipped = int(limits.skip_ratio * stages + 0.5)
        assert skipped > max(inner, 0) or wanted * inner > count * (inner - skipped) - inner
        skipped, visits = 0, count
    forward_s = tuple(draw(times) for _ in range(stages))
    shares = [[draw(st.floats(0, 1)) for _ in row] for row in hop_s]
    busy_s = tuple(
        tuple(0.0 if placement[a] == placement[b] else hop_s[a][b] * shares[a][b] for b in range(stages))
        for a in range(stages)
    )
    most = draw(st.integers(1, 3))
    return PathProblem(forward_s, hop_s, busy_s, placement, count, skipped, visits, most, limits.swaps)


_EQUAL_LINKS = tuple((0.5,) * 8 for _ in range(8))
MANY, FEWER = (
    PathProblem((1.0, 1.1) * 4, _EQUAL_LINKS, _EQUAL_LINKS, tuple(range(8)), count, 2, least, 1, False)
    for count, least in ((512, 100), (128, 25))
)
"""As many micro-batches as real batches have: minutes for a search that doesn't bound its work."""


@settings(deadline=None, max_examples=20)
@given(problems())
@example(FEWER)
def test_no_path_breaks_a_limit(problem: PathProblem) -> None:
    check_limits(problem)


@pytest.mark.soak
@settings(deadline=None, max_examples=200)
@given(problems())
@example(MANY)
def test_no_path_of_more_problems_breaks_a_limit(problem: PathProblem) -> None:
    check_limits(problem)


def check_limits(problem: PathProblem) -> None:
    paths = find_paths(problem)
    assert len(paths) == problem.num_micro_batches
    for number, path in enumerate(paths):
        stages = path.stages
        assert (stages[0], stages[-1]) == (0, problem.num_stages - 1)
        assert len(set(stages)) == len(stages) == problem.num_stages - problem.num_skipped
        back = [one > other for one, other in pairwise(stages)]
        assert problem.swaps or not any(back)
        assert not any(one and other for one, other in pairwise(back)), "only neighbours are swapped"
        assert sorted(stages) == sorted(_unswapped(stages))
        assert path.begin_s[0] == pytest.approx(number * problem.forward_s[0])
        hops = zip(pairwise(stages), pairwise(path.begin_s), path.send_s, strict=True)
        for (one, other), (begin_s, later_s), send_s in hops:
            assert send_s >= begin_s + problem.forward_s[one] - 1e-9
            assert later_s >= send_s + problem.hop_s[one][other] - 1e-9
    for stage in range(problem.num_stages):
        assert sum(stage in path.stages for path in paths) >= problem.min_visits
    assert most_at_once(problem, paths) <= problem.max_at_once
    assert most_on_a_link(problem, paths) <= 1


def _unswapped(stages: tuple[int, ...]) -> list[int]:
    """The stages with each pair in the wrong order turned round, which must then ascend."""
    found = list(stages)
    for place in range(len(found) - 1):
        if found[place] > found[place + 1]:
            found[place], found[place + 1] = found[place + 1], found[place]
    assert found == sorted(found)
    return found


def most_at_once(problem: PathProblem, paths: tuple[TimedPath, ...]) -> int:
    """The most micro-batches on a rank at a time."""
    stays = [
        (problem.placement[stage], begin_s, begin_s + problem.forward_s[stage])
        for path in paths
        for stage, begin_s in zip(path.stages, path.begin_s, strict=True)
    ]
    return _most(problem, stays)


def most_on_a_link(problem: PathProblem, paths: tuple[TimedPath, ...]) -> int:
    """The most transfers on the outgoing link of a rank at a time."""
    transfers = [
        (problem.placement[one], begin_s, begin_s + problem.busy_s[one][other])
        for path in paths
        for (one, other), begin_s in zip(pairwise(path.stages), path.send_s, strict=True)
    ]
    return _most(problem, transfers)


def _most(problem: PathProblem, stays: list[tuple[int, float, float]]) -> int:
    """The most of a rank's stays at a time, looked at in the midst between any two moments."""
    moments = sorted({moment for _, *both in stays for moment in both})
    middles = [(one + other) / 2 for one, other in pairwise(moments) if other - one > 1e-9]
    return max(
        (
            sum(begin_s < middle < end_s for rank, begin_s, end_s in stays if rank == own)
            for middle in middles
            for own in set(problem.placement)
        ),
        default=0,
    )


@settings(deadline=None, max_examples=25)
@given(st.integers(3, 5), st.integers(1, 2), st.integers(2, 9), st.floats(0, 0.4), st.booleans(), st.integers(0, 99))
def test_every_schedule_can_run(ranks: int, chunks: int, count: int, ratio: float, swaps: bool, seed: int) -> None:
    """Its checked Program has each pass of each path once, and its text can be read."""
    link_s = tuple(tuple(0.1 + (7 * seed + 3 * a * b + a + b) % 11 for b in range(ranks)) for a in range(ranks))
    spec = ScheduleSpec(ranks, count, chunks, link_s=link_s, memory_limit=4, paths=PathLimits(ratio, 0.1, swaps))
    try:
        schedule = skippipe(spec)
    except InfeasibleError:
        return
    program = lower(schedule, LoweringOptions(data_ranks=2, zero="z1"))
    check(program)
    assert parse_program(str(program)) == program
    passes = [item.action for lanes in program.ranks for item in lanes["compute"] if item.action.kind == Kind.F]
    assert sorted(passes) == sorted(
        Action(Kind.F, stage, number) for number, path in enumerate(schedule.paths) for stage in path
    )
    assert time_schedule(schedule, spec).makespan_s > 0


@pytest.mark.parametrize(("ranks", "count"), [(2, 3), (3, 5), (4, 8), (8, 16)])
def test_with_nothing_skipped_passes_have_the_order_of_1f1b(ranks: int, count: int) -> None:
    spec = ScheduleSpec(ranks, count, p2p_s=0.05, memory_limit=ranks)
    assert skippipe(spec).ranks == one_f_one_b(spec).ranks


def test_each_limit_that_cannot_be_kept_is_named() -> None:
    with pytest.raises(InfeasibleError, match="only the 2 between the first and the last can be skipped"):
        num_skipped(PathLimits(0.7), 4, 8)
    with pytest.raises(InfeasibleError, match="the 2 inner stages see 0 micro-batches between them, but each needs 2"):
        num_skipped(PathLimits(0.5), 4, 8)
    assert num_skipped(PathLimits(0.25, 0.5), 4, 8) == (1, 4)


def test_a_crowded_stage_is_left_to_some_of_the_micro_batches() -> None:
    """Both inner stages are as fast; while one has a micro-batch, the next takes the other."""
    none = ((0.0,) * 4,) * 4
    problem = PathProblem((1.0, 4.0, 4.0, 1.0), none, none, (0, 1, 2, 3), 4, 1, 1, 1, False)
    paths = [path.stages for path in find_paths(problem)]
    assert [paths.count((0, stage, 3)) for stage in (1, 2)] == [2, 2]


def test_the_faster_link_is_taken_as_often_as_other_stages_allow() -> None:
    hop_s = tuple(tuple(0.0 if 1 not in (a, b) else 50.0 for b in range(4)) for a in range(4))
    problem = PathProblem((1.0,) * 4, hop_s, ((0.0,) * 4,) * 4, (0, 1, 2, 3), 8, 1, 2, 3, False)
    paths = [path.stages for path in find_paths(problem)]
    assert [paths.count((0, stage, 3)) for stage in (1, 2)] == [2, 6]


def test_a_link_in_use_is_left_for_a_slower_one() -> None:
    """The way by stage 1 is faster alone, but its link takes one micro-batch at a time, for three passes' time; where
    links were free, all but those that stage 2 needs would take it."""
    hop_s = ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 3.0), (0.0, 0.0, 0.0, 3.5), (0.0,) * 4)
    for busy_s, wanted in ((((0.0,) * 4,) * 4, [7, 1]), (hop_s, [4, 4])):
        problem = PathProblem((1.0,) * 4, hop_s, busy_s, (0, 1, 2, 3), 8, 1, 1, 3, False)
        paths = [path.stages for path in find_paths(problem)]
        assert [paths.count((0, stage, 3)) for stage in (1, 2)] == wanted


@settings(deadline=None, max_examples=4)
@given(st.integers(4, 5), st.sampled_from([0.25, 0.4]), st.integers(0, 999))
def test_no_step_is_longer_than_with_nothing_skipped(ranks: int, ratio: float, seed: int) -> None:
    check_never_longer(ranks, ratio, seed)


@pytest.mark.soak
@settings(deadline=None, max_examples=60)
@given(st.integers(4, 8), st.integers(10, 50), st.integers(0, 9999))
def test_no_step_is_longer_on_many_clusters(ranks: int, percent: int, seed: int) -> None:
    check_never_longer(ranks, percent / 100, seed)


def check_never_longer(ranks: int, ratio: float, seed: int) -> None:
    """On nodes whose links are drawn, or of which each has fast ones to two others alone, the planner's answer takes no
    longer than its best plan that skips nothing."""
    assume(int(ratio * ranks + 0.5) < ranks - 2)  # else some inner stage would see no micro-batch
    chance = Random(seed)
    rates = [[1e12 if a == b else 1e6 * 100 ** chance.random() for b in range(ranks)] for a in range(ranks)]
    if seed % 2:
        line = chance.sample(range(ranks), ranks)
        rates = [[1e8 if abs(line[a] - line[b]) < 2 else 1e5 for b in range(ranks)] for a in range(ranks)]
    device = load_device("a100-80-sxm")
    assert device.node is not None
    group = NodeGroup(
        num_nodes=ranks, devices_per_node=1, device=device, intra=device.node.intra, nics=device.node.nics
    )
    latencies = ((1e-5,) * ranks,) * ranks
    cluster = ClusterSpec(
        name="drawn", groups=(group,), node_bandwidth_bytes_per_s=tuple(map(tuple, rates)), node_latency_s=latencies
    )
    step_s = []
    for own, is_late in ((0, False), (ratio, False), (ratio, True)):
        plan = parse_plan_name(f"pp{ranks}-mb1-skip{own}m0.1")
        plan = resolve_on_cluster(plan, MODEL, WORKLOAD, cluster, is_late=lambda late=is_late: late)
        assert plan.skip_ratio in ({own} if is_late else {0, own})
        step_s.append(predict(MODEL, plan, WORKLOAD, cluster).step_time_s)
    assert step_s[1] <= min(step_s)


JOB = ["--model", "llama3-8b", "--cluster", "8xh100", "--seq-len", "4096", "--global-batch", "32"]


def answer(capsys: pytest.CaptureFixture[str], require: str, found: str, ordinary: str = "1F1B") -> tuple[Plan, float]:
    """The best plan and the seconds of its step; the answer says that `found` are found for a plan of `ordinary`."""
    assert main(["plan", *JOB, "--require", require, "--effort", "0.05", "--top", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert any(f"the best plan of {ordinary}, with {found} found for its times" in line for line in data["derived"])
    first = data["plans"][0]
    return Plan.model_validate(first["fields"]), first["step_time_s"]


def test_stages_that_fewer_micro_batches_see_get_more_layers(capsys: pytest.CaptureFixture[str]) -> None:
    plan, step_s = answer(capsys, "dp2-pp4-mb1-z1-skip0.25", "paths, places and layers")
    layers = plan.layer_counts(32)
    assert min(layers[1:3]) > max(layers[0], layers[3])
    given, given_s = answer(capsys, "dp2-pp4-mb1-z1-skip0.25-l8.9.9.6", "paths and places")
    assert list(given.layer_counts(32)) == [8, 9, 9, 6]
    assert step_s < 0.9 * given_s


@pytest.mark.soak
def test_stages_two_a_rank_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = answer(capsys, "dp2-pp4v2-mb1-z1-skip0.25", "paths and places", "interleaved 1F1B")
    assert (plan.schedule, plan.num_stages) == ("skippipe", 8)


def test_micro_batches_are_halved_until_there_are_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """The best ordinary pipeline has a single micro-batch, which can't leave out one of four stages for the others."""
    job = ["--model", "tiny", "--cluster", "4xa100", "--seq-len", "256", "--global-batch", "16", "--effort", "0.1"]

    def answer(require: str) -> dict[str, Any]:
        assert main(["plan", *job, "--require", require, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    fields = answer("pp4-skip0.25")["plans"][0]["fields"]
    assert (fields["skip_ratio"], fields["micro_batch_size"]) == (0.25, 8)
    for word in ("pp4-mb1-skip0", "pp4-mb1-sskippipe"):
        assert any("no stage is skipped: the best plan of 1F1B" in line for line in answer(word)["derived"])
    assert main(["plan", *job, "--require", "pp4-mb1-skip0.25", "--pareto"]) == 2
    assert "--pareto weighs plans in which no stage is skipped" in capsys.readouterr().err


def test_stages_lie_where_links_are_fast() -> None:
    """Ranks along a line in another order are found again, in either direction."""
    line = [2, 0, 3, 1, 4]
    link_s = [[float(abs(line.index(a) - line.index(b))) ** 2 for b in range(5)] for a in range(5)]
    assert list(place_on_links(link_s, range(5), 0)) in (line, line[::-1])
    assert hop_weights(4, 1) == {(0, 1): 0.5, (0, 2): 0.5, (1, 3): 0.5, (2, 3): 0.5}


# ----------------------------------------------------------------------------------------------------------------------
# Plans and programs


def resolved(name: str) -> Plan:
    return resolve_schedule(parse_plan_name(name), MODEL, WORKLOAD)


def test_a_plan_carries_the_paths() -> None:
    plan = resolved("pp4-mb1-skip0.25-fp32")
    assert plan.pinned_schedule is not None
    assert len(plan.paths) == 8
    assert set(plan.paths) == {(0, 1, 3), (0, 2, 3)}
    assert [plan.num_stage_micro_batches(stage, WORKLOAD) for stage in range(4)] == [8, 4, 4, 8]
    program = build_program(plan, MODEL, WORKLOAD)
    assert program.paths == plan.paths
    assert "paths=0.1.3,0.2.3" in str(program).splitlines()[0]
    assert build_program(plan, MODEL, WORKLOAD, train=False).paths == (), "validation takes all stages"
    cluster = load_cluster("4xa100")
    prediction = predict(MODEL, plan, WORKLOAD, cluster)
    shares = breakdown(prediction.timeline)
    assert shares.send_s > 0
    assert shares.step_s == pytest.approx(prediction.step_time_s, rel=0.2)
    sent = [step_comm_bytes(MODEL, plan, WORKLOAD, rank)["pp"] for rank in range(4)]
    hidden = 8 * 8 * 4
    assert sent == [{"SEND_F": 8 * hidden}, *[{"SEND_F": 4 * hidden, "SEND_B": 4 * hidden}] * 2, {"SEND_B": 8 * hidden}]
    whole = resolve_schedule(parse_plan_name("pp4-mb1-skip0-fp32"), MODEL, WORKLOAD)
    ordinary = parse_plan_name("pp4-mb1-fp32")

    def held(one: Plan) -> list[float]:
        program = build_program(one, MODEL, WORKLOAD)
        return [rank.terms.total for rank in forecast_memory(MODEL, one, WORKLOAD, cluster, program).ranks]

    assert plan_flops_per_token(whole, MODEL, 8) == plan_flops_per_token(ordinary, MODEL, 8)
    two_layers_fewer = MODEL.model_copy(update={"num_layers": 6})
    assert plan_flops_per_token(plan, MODEL, 8) == plan_flops_per_token(ordinary, two_layers_fewer, 8)
    assert held(whole) == held(ordinary)
    assert held(plan)[1] < held(ordinary)[1]


def test_the_checker_holds_passes_to_their_paths() -> None:
    program = build_program(resolved("pp4-mb1-skip0.25-fp32"), MODEL, WORKLOAD)
    text = str(program)
    skipped = next(stage for stage in (1, 2) if stage not in program.paths[0])

    def fault(old: str, new: str) -> str:
        assert old in text
        with pytest.raises(ProgramError) as caught:
            check(parse_program(text.replace(old, new, 1)))
        return str(caught.value)

    assert f"{skipped}F0 is on rank {skipped}, but micro-batch 0 skips its stage" in fault(
        f"rank {skipped} compute: ", f"rank {skipped} compute: {skipped}F0 "
    )
    own = ".".join(map(str, program.paths[0]))
    other = own.replace(str(3 - skipped), str(skipped))
    assert "0 skips its stage" in fault(f"paths={own}", f"paths={other}")
    assert "doesn't lead from stage 0 to stage 3" in fault(f"paths={own}", "paths=0.1")
    assert "has a stage twice" in fault(f"paths={own}", "paths=0.1.1.3")
    spec = ScheduleSpec(3, 1)
    lonely = Schedule("skippipe", (0, 1, 2), 1, one_f_one_b(spec).ranks, paths=((0, 2),))
    with pytest.raises(ProgramError, match="no micro-batch passes through stage 1, which would not be trained"):
        time_schedule(lonely, spec)


def test_words_and_rules() -> None:
    for name in ("pp4-mb1-skip0.25-fp32", "pp4-mb1-skip0-fp32", "pp4v2-mb2-skip0.3m0.5w-bf16"):
        assert format_plan_name(parse_plan_name(name)) == name
    for name in ("skip1", "skip1.5", "skip0.5m2"):
        with pytest.raises(ConfigError, match="is no share of the"):
            parse_plan_name(f"pp4-{name}")

    def said(name: str, **changes: Any) -> str:
        plan = parse_plan_name(name).model_copy(update=changes)
        return " ".join([*plan_violations(plan, MODEL, WORKLOAD, plan.world_size), *unsupported_features(plan, MODEL)])

    assert said("pp4-mb1-skip0.25") == said("dp2-tp2-pp2v2-mb1-skip0.25") == ""
    assert "skip_ratio is of schedule skippipe, not of 1f1b" in said("pp4-mb1", skip_ratio=0.25)
    assert "lets micro-batches take paths through a pipeline, but pp is 1" in said("dp4-skip0.25")
    assert "take different paths, but vocab_parallel needs" in said("pp4-mb1-skip0.25-vocab")
    assert "with context parallelism" in said("cp2-pp2v2-mb1-skip0.25")
    assert "with offload" in said("pp4-mb1-skip0.25-oopt")
    pinned = resolved("pp4-mb1-skip0.25")
    assert plan_violations(pinned, MODEL, WORKLOAD, 4) == []
    again = pinned.model_copy(update={"skip_ratio": 0.0})
    assert "has a path of 3 stages, but skip_ratio 0 skips 0 of 4" in " ".join(
        plan_violations(again, MODEL, WORKLOAD, 4)
    )
