"""The simulator and the breakdown."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cost.time.op_times import OpTimes, P2PTime
from muster.schedule.action import Kind, parse_action
from muster.schedule.build import build_program
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, ProgramError, parse_program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.breakdown import breakdown, spans_of
from muster.simulate.shared_cores import simulate_on_shared_cores
from muster.simulate.simulator import simulate, simulate_step
from muster.simulate.spans import BUBBLE, RankSpans, time_by_part
from muster.simulate.timeline import Event, Timeline, timeline_from_json, timeline_to_json
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

MODEL = ModelSpec(vocab_size=32, hidden_size=8, num_layers=8, num_heads=2, num_kv_heads=2, intermediate_size=16)
many = settings(max_examples=60, deadline=None)

SECONDS = st.floats(0.1, 10)
LOWERINGS = st.builds(
    LoweringOptions,
    st.sampled_from(["z1", "z2", "z3"]),
    st.integers(1, 4),
    st.booleans(),
    offload=st.frozensets(st.integers(0, 3), max_size=3),
)


def program(name: str, ranks: int, micro_batches: int, lowering: LoweringOptions | None = None) -> Program:
    return lower(make_schedule(name, ScheduleSpec(ranks, micro_batches)), lowering or LoweringOptions())


def times(p2p_s: float = 0.0, cores: int | None = None, processes: tuple[int, ...] = (), **seconds) -> OpTimes:
    """Seconds by kind, equal on all stages."""
    return OpTimes({(kind, -1): value for kind, value in seconds.items()}, p2p_s, cores, processes)


def spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """rank/action → start and end."""
    return {f"{e.rank}/{e.action}": (e.start_s, e.end_s) for e in timeline.events}


# ----------------------------------------------------------------------------------------------------------------------
# Closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@many
@given(p=st.integers(1, 8), m=st.integers(1, 16), forward_s=SECONDS, backward_s=SECONDS)
def test_bubble_of_p_minus_1_passes(name: str, p: int, m: int, forward_s: float, backward_s: float):
    """(p − 1)(tF + tB) for both, whatever the times; 1F1B needs m ≥ p only for its memory."""
    parts = breakdown(simulate(program(name, p, m), times(F=forward_s, B=backward_s)))
    assert parts.bubble_s == pytest.approx((p - 1) * (forward_s + backward_s))
    assert parts.step_s == pytest.approx((m + p - 1) * (forward_s + backward_s))
    assert (parts.forward_s, parts.backward_s) == pytest.approx((m * forward_s, m * backward_s))
    assert parts.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


def test_hops_lengthen_the_step():
    """GPipe's hops add up on the way down and up: 2(p − 1)c. In 1F1B every micro-batch of the steady state waits for
    the last stage's answer: with p = 4, m = 16 a hop of 0.1 costs 2.8."""

    def step_s(name: str, p2p_s: float) -> float:
        return simulate(program(name, 4, 16), times(p2p_s, F=1, B=2)).makespan_s

    assert step_s("gpipe", 0.1) - step_s("gpipe", 0.0) == pytest.approx(0.6)
    assert step_s("1f1b", 0.1) - step_s("1f1b", 0.0) == pytest.approx(2.8)
    assert step_s("1f1b", 0.3) - step_s("1f1b", 0.0) == pytest.approx(8.4)


def test_each_boundary_has_a_hop_of_its_own():
    own = OpTimes({("F", -1): 1, ("B", -1): 2}, p2p_s=0.5, p2p_times={(0, 1): P2PTime(3), (2, 1): P2PTime(5)})
    at = spans(simulate(program("gpipe", 3, 1), own))
    assert at["1/1F0"][0] == 1 + 3
    assert at["2/2F0"][0] == 4 + 1 + 0.5
    assert at["1/1B0"][0] == 5.5 + 1 + 2 + 5
    assert at["0/0B0"][0] == 13.5 + 2 + 0.5


@pytest.mark.parametrize("shared", [False, True])
def test_transfers_of_a_rank_share_its_way_out(shared: bool):
    """Three micro-batches of 1 s each, of which each keeps the wire for 2 s: the last is sent at 1 + 2 + 2."""
    own = OpTimes({("F", -1): 1, ("B", -1): 2}, p2p_times={(0, 1): P2PTime(2.5, 2.0)})
    lowered = program("gpipe", 2, 3)
    at = spans(simulate_on_shared_cores(lowered, own) if shared else simulate(lowered, own))
    assert [at[f"1/1RECV_F{i}"] for i in range(3)] == [(1, 3.5), (3, 5.5), (5, 7.5)]
    assert at["1/1F2"][0] == 7.5


# ----------------------------------------------------------------------------------------------------------------------
# Any program


@many
@given(st.data(), st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 8), LOWERINGS, st.floats(0, 3))
def test_any_timeline_is_possible(
    data, name: str, ranks: int, micro_batches: int, lowering: LoweringOptions, p2p_s: float
):
    """No less than its lower bounds, in the order of its waits, and the same by both ways of simulating."""
    keys = [
        (kind, stage)
        for kind in ("F", "B", "UNSHARD", "REDUCE_GRAD", "ALL_REDUCE_TIED", "OFFLOAD", "RELOAD")
        for stage in range(ranks)
    ]
    seconds = {key: data.draw(SECONDS) for key in [*keys, ("GRAD_NORM", -1), ("STEP", -1)]}
    own = OpTimes(
        seconds, p2p_s, p2p_times={(stage, stage + 1): P2PTime(p2p_s, p2p_s / 2) for stage in range(1, ranks)}
    )
    lowered = program(name, ranks, micro_batches, lowering)
    timeline = simulate(lowered, own)
    step = simulate_step(lowered, own)
    assert step.timeline() == timeline
    assert step.duration_s == timeline.makespan_s
    assert step.time_by_part() == pytest.approx(time_by_part(spans_of(timeline), 0.0, timeline.makespan_s))
    assert timeline.source == "predicted"
    for event, other in zip(timeline.events, simulate_on_shared_cores(lowered, own).events, strict=True):
        assert event[:3] == other[:3]
        assert event[3:] == pytest.approx(other[3:])

    busy_s = [micro_batches * (seconds["F", rank] + seconds["B", rank]) for rank in range(ranks)]
    through_s = sum(seconds[kind, stage] for kind in "FB" for stage in range(ranks)) + 2 * (ranks - 1) * p2p_s
    end_s = seconds["GRAD_NORM", -1] + seconds["STEP", -1]
    assert timeline.makespan_s >= max(*busy_s, through_s) + end_s - 1e-9
    parts = breakdown(timeline)
    assert parts.bubble_s >= 0
    assert sum(
        (parts.forward_s, parts.backward_s, parts.send_s, parts.gather_s, parts.optimizer_s, parts.bubble_s)
    ) == pytest.approx(parts.step_s)

    at = iter(timeline.events)
    for rank, lanes in enumerate(lowered.ranks):
        events = {lane: [next(at) for _ in items] for lane, items in lanes.items()}
        for lane, items in lanes.items():
            for before, event in zip(events[lane], events[lane][1:], strict=False):
                assert event.start_s >= (before.end_s if lane != "p2p" else 0)
            for item, event in zip(items, events[lane], strict=True):
                assert (event.rank, event.lane, event.action) == (rank, lane, item.action)
                if item.action.kind[0] != "R" or lane != "p2p":
                    assert all(event.start_s >= events[wait.lane][wait.index].end_s for wait in item.waits)


def test_every_rank_is_in_the_norm_together():
    timeline = simulate(
        program("1f1b", 3, 4, LoweringOptions("z1", 2, tied_embeddings=True)),
        times(F=1, B=2, REDUCE_GRAD=3, ALL_REDUCE_TIED=4, GRAD_NORM=5),
    )
    at = spans(timeline)
    assert (
        at["2/2ALL_REDUCE_TIED"][1]
        == at["0/0ALL_REDUCE_TIED"][1]
        == max(at["0/0ALL_REDUCE_TIED"][0], at["2/2ALL_REDUCE_TIED"][0]) + 4
    )
    assert {at[f"{rank}/GRAD_NORM"][1] for rank in range(3)} == {at["0/0ALL_REDUCE_TIED"][1] + 5}
    assert at["1/GRAD_NORM"][0] < at["0/GRAD_NORM"][0]


def test_a_program_that_never_ends_is_refused():
    text = """\
program 2 schedule=own ranks=2 micro_batches=1 placement=0,1
rank 0 compute: 0F0
rank 1 compute: 1F0@p2p:0
rank 1 p2p: 1RECV_F0<0
"""
    for cores in (None, 1):
        with pytest.raises(ProgramError, match="check says why"):
            simulate(parse_program(text), times(cores=cores, F=1))


# ----------------------------------------------------------------------------------------------------------------------
# Shared cores


def independent(ranks: int, passes: int) -> Program:
    """Ranks that have nothing to do with each other."""
    placement = ",".join(map(str, range(ranks)))
    lines = [f"program 2 schedule=own ranks={ranks} micro_batches={passes} placement={placement}"]
    lines += [f"rank {rank} compute: " + " ".join(f"{rank}F{i}" for i in range(passes)) for rank in range(ranks)]
    return parse_program("\n".join(lines))


@pytest.mark.parametrize(
    ("ranks", "cores", "each", "stretch"), [(4, 2, 1, 2), (2, 2, 1, 1), (1, 2, 4, 2), (3, 2, 1, 1.5), (2, 8, 8, 2)]
)
def test_ranks_share_cores(ranks: int, cores: int, each: int, stretch: float):
    timeline = simulate(independent(ranks, 3), times(cores=cores, processes=(each,) * ranks, F=2))
    assert timeline.makespan_s == pytest.approx(6 * stretch)


def test_the_share_changes_when_others_end():
    """Three ranks with 1, 2 and 3 s of work on one core end after 3, 5 and 6 s."""
    seconds: Mapping = {("F", 0): 1.0, ("F", 1): 2.0, ("F", 2): 3.0}
    at = spans(simulate(independent(3, 1), OpTimes(seconds, cores=1)))
    assert at == {"0/0F0": (0, 3), "1/1F0": (0, 5), "2/2F0": (0, 6)}


def test_idle_ranks_leave_their_cores_to_others():
    """One core and no hops: the bubbles fill with the others' work, so the step takes the sum of all work."""
    timeline = simulate(program("1f1b", 4, 8), times(cores=1, F=1, B=2, STEP=1, GRAD_NORM=0.5))
    assert timeline.makespan_s == pytest.approx(4 * 8 * 3 + 0.5 + 4)


def test_simulation_is_deterministic():
    lowered = program("1f1b", 4, 8, LoweringOptions("z1", 2, True))
    own = times(
        0.1, 2, (2, 2, 2, 2), F=1, B=2, UNSHARD=0.3, REDUCE_GRAD=0.4, ALL_REDUCE_TIED=0.2, GRAD_NORM=0.1, STEP=0.5
    )
    assert simulate(lowered, own) == simulate(lowered, own)


# ----------------------------------------------------------------------------------------------------------------------
# Breakdown


def timeline(source, num_ranks: int, text: str) -> Timeline:
    """One event a word: rank lane action start end."""
    rows = [row.split() for row in text.split(",")]
    events = [Event(int(rank), lane, parse_action(action), float(a), float(b)) for rank, lane, action, a, b in rows]
    return Timeline(source, num_ranks, tuple(events))


@pytest.mark.parametrize(
    "name", ["dp2-pp2v4-sinterleaved-active2", "dp2-pp2v2-sinterleaved-z1", "dp2-z1-stepgather", "dp2-pp2-z1"]
)
def test_compute_beside_parameters_and_gradients_is_slower(name: str) -> None:
    """By a fifth of what the same step has beside each instruction without that; nothing else is."""
    plan = parse_plan_name(name)
    program = build_program(plan, MODEL, Workload(seq_len=8, global_batch_size=8))
    seconds = {("F", -1): 1.0, ("B", -1): 2.0, ("UNSHARD", -1): 0.7, ("REDUCE_GRAD", -1): 1.3, ("STEP_BUCKET", -1): 0.5}
    times = OpTimes(seconds | {("UNSHARD_BUCKET", -1): 0.6})
    plain, slower = simulate(program, times), simulate_step(program, replace(times, overlap_slowdown=0.2))
    travels = ("UNSHARD", "REDUCE_GRAD", "UNSHARD_BUCKET")
    hidden_s = 0.0
    for before, after in zip(plain.events, slower.timeline().events, strict=True):
        beside_s = sum(
            max(0.0, min(before.end_s, one.end_s) - max(before.start_s, one.start_s))
            for one in plain.events
            if one.rank == before.rank and one.action.kind in travels and before.lane == "compute"
        )
        hidden_s += beside_s
        expected_s = before.end_s - before.start_s + 0.2 * beside_s
        assert before.lane != "compute" or after.end_s - after.start_s == pytest.approx(expected_s)
    assert (hidden_s > 0) == (name != "dp2-pp2-z1")
    assert sum(slower.time_by_part().values()) == pytest.approx(slower.duration_s)


def test_breakdown_of_a_step():
    """Two stages, one micro-batch, a hop of 1: each rank's 20 s are told apart."""
    own = times(1.0, F=2, B=3, UNSHARD=1, REDUCE_GRAD=2, GRAD_NORM=1, STEP=1.5)
    parts = breakdown(simulate(program("1f1b", 2, 1, LoweringOptions("z1", 2)), own))
    # rank 0: UNSHARD 0–1, F 1–3, hop 3–4, (rank 1: F 4–6, B 6–9), hop 9–10, B 10–13, REDUCE_GRAD 13–15,
    # GRAD_NORM 15–16, STEP
    assert parts.step_s == 17.5
    assert (parts.forward_s, parts.backward_s, parts.optimizer_s) == (2, 3, 2.5)
    assert parts.send_s == 1.0  # 9–10 on rank 0, 3–4 on rank 1
    assert parts.gather_s == (1 + 2 + 1 + 2) / 2
    assert parts.bubble_s == (6 + 6) / 2


def test_a_measured_timeline_is_broken_down_alike():
    """Two data-parallel ranks per stage; a receive is recorded from when the rank stood still for it."""
    predicted = breakdown(
        simulate(program("1f1b", 2, 1, LoweringOptions("z1", 2)), times(1.0, F=2, B=3, UNSHARD=1, REDUCE_GRAD=2))
    )
    rows = []
    for rank in (0, 1):
        rows += [f"{rank} {word}" for word in (
            "collective 0UNSHARD 100 101", "compute 0F0 101 103", "p2p 0SEND_F0 103 103.001", "p2p 0RECV_B0 103 110",
            "compute 0B0 110 113", "collective 0REDUCE_GRAD 113 115", "collective GRAD_NORM 115 115",
            "compute STEP 115 115",
        )]  # fmt: skip
    for rank in (2, 3):
        rows += [f"{rank} {word}" for word in (
            "collective 1UNSHARD 100 101", "p2p 1RECV_F0 101 104", "compute 1F0 104 106", "compute 1B0 106 109",
            "p2p 1SEND_B0 109 109.001", "collective 1REDUCE_GRAD 109 111", "collective GRAD_NORM 111 115",
            "compute STEP 115 115",
        )]  # fmt: skip
    assert breakdown(timeline("measured", 4, ",".join(rows))) == predicted


def test_rounding_is_no_bubble() -> None:
    """A rank that is always busy, or waits for one of two copies, has none, though the second begins an ulp late."""
    times_s = np.cumsum(np.random.default_rng(0).random(31))
    begin_s, end_s = times_s[1:-1:2], times_s[2::2]
    middle_s = (begin_s + end_s) / 2
    waits = [(Kind.LOAD_F, begin_s, middle_s), (Kind.LOAD_B, np.nextafter(middle_s, end_s), end_s)]
    parts_s = time_by_part(
        [RankSpans({Kind.F: 1.0}, times_s[:-1:2], times_s[1::2], waits)], float(times_s[0]), float(times_s[-1])
    )
    assert parts_s[BUBBLE] == 0.0
    assert parts_s[Kind.LOAD_F] + parts_s[Kind.LOAD_B] == pytest.approx((end_s - begin_s).sum())


def test_waiting_for_another_rank_is_bubble_not_communication():
    """A collective counts from when its last rank came, a transfer from when it was sent, and only for its reader."""
    late = timeline(
        "measured", 2,
        "0 collective 0REDUCE_GRAD 0 5,1 collective 0REDUCE_GRAD 4 5,0 compute STEP 5 6,1 compute STEP 5 6,"
        "1 compute 0F0 0 4",
    )  # fmt: skip
    assert breakdown(late).gather_s == 1.0
    assert breakdown(late).bubble_s == 4 / 2
    early = timeline(
        "measured", 2,
        "0 compute 0F0 0 1,0 compute 0F1 1 2,0 p2p 0SEND_F0 1 1,0 p2p 0SEND_F1 2 2,1 p2p 1RECV_F0 0 2,"
        "1 compute 1F0 2 3,"
        "0 compute 0B0 7 9,1 compute 1B0 5 6,1 compute 1F1 8 9,1 p2p 1RECV_F1 6 8",
    )  # fmt: skip
    assert breakdown(early).send_s == ((2 - 1) + (8 - 6)) / 2
    assert breakdown(Timeline("measured", 2, ())).bubble_fraction == 0.0


def test_timelines_survive_json():
    predicted = simulate(program("gpipe", 2, 2, LoweringOptions("z1", 2, True)), times(0.25, F=1, B=2, GRAD_NORM=0.5))
    assert timeline_from_json(timeline_to_json(predicted)) == predicted
