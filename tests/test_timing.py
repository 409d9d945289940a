"""Timing a schedule without lowering: the definitions of bubble and memory, and what a wrong schedule is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cost.time.op_times import OpTimes
from muster.schedule.action import parse_action
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import ProgramError
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import Timing, time_schedule
from muster.simulate.simulator import simulate


def time_of(name: str, setting: ScheduleSpec) -> Timing:
    return time_schedule(make_schedule(name, setting), setting)


@pytest.mark.parametrize(
    ("name", "p2p_s", "bubble_s"),
    [("gpipe", 0.0, 9.0), ("gpipe", 0.3, 10.8), ("1f1b", 0.0, 9.0), ("1f1b", 0.1, 11.8), ("1f1b", 0.3, 17.4)],
)
def test_the_bubble_is_that_of_the_closed_form_and_of_independent_simulations(
    name: str, p2p_s: float, bubble_s: float
) -> None:
    timing = time_of(name, ScheduleSpec.uniform(4, 16, p2p_s=p2p_s))
    assert timing.bubble_s == pytest.approx(bubble_s)
    assert timing.work_s == pytest.approx((48.0,) * 4)
    assert timing.span_bubble_s[0] == pytest.approx(bubble_s)  # rank 0 begins first and ends last
    assert timing.peak_activation == ((16.0,) * 4 if name == "gpipe" else (4.0, 3.0, 2.0, 1.0))


@settings(deadline=None)
@given(
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 9),
    p2p_s=st.floats(0, 2),
    data=st.data(),
    name=st.sampled_from(("gpipe", "1f1b")),
)
def test_the_timing_is_what_the_simulator_says_of_the_lowered_program(
    ranks: int, micro_batches: int, p2p_s: float, data: st.DataObject, name: str
) -> None:
    forward_s, input_s, weight_s = (
        tuple(data.draw(st.lists(st.floats(0, 3), min_size=ranks, max_size=ranks))) for _ in range(3)
    )
    setting = ScheduleSpec(ranks, micro_batches, 1, forward_s, input_s, weight_s, p2p_s)
    schedule = make_schedule(name, setting)
    seconds = {("F", stage): time_s for stage, time_s in enumerate(forward_s)}
    seconds |= {("B", stage): i_s + w_s for stage, (i_s, w_s) in enumerate(zip(input_s, weight_s, strict=True))}
    timeline = simulate(lower(schedule, LoweringOptions(train=False)), OpTimes(seconds, p2p_s))
    timing = time_schedule(schedule, setting)
    for rank, order in enumerate(schedule.ranks):
        rows = zip(order, timing.begin_s[rank], timing.end_s[rank], strict=True)
        events = [event for event in timeline.events if event.rank == rank and event.lane == "compute"]
        assert list(rows) == [event[2:] for event in events]


def test_a_split_backward_keeps_its_activation_until_w() -> None:
    schedule = Schedule("own", (0,), 2, (tuple(map(parse_action, ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"])),))
    timing = time_schedule(schedule, ScheduleSpec.uniform(1, 2, (3.0, 2.0, 1.0)))
    assert timing.begin_s == ([0.0, 3.0, 5.0, 8.0, 10.0, 11.0],)
    assert (timing.makespan_s, timing.bubble_s, timing.peak_activation) == (12.0, 0.0, (2.0,))


def test_two_replicas_share_the_ranks_in_opposite_directions() -> None:
    orders = ("0F0 3F1 3B1 0B0", "2F1 1F0 1B0 2B1")
    ranks = tuple(tuple(map(parse_action, order.split())) for order in orders)
    setting = ScheduleSpec.uniform(2, 2, chunks=2, replicas=2, p2p_s=0.5)
    timing = time_schedule(Schedule("own", (0, 1, 1, 0), 2, ranks, replicas=2), setting)
    assert timing.begin_s == ([0.0, 1.5, 2.5, 5.0], [0.0, 1.5, 2.5, 5.0])
    assert (timing.makespan_s, timing.bubble_s, timing.span_bubble_s) == (7.0, 1.0, (1.0, 1.0))


REFUSALS = {
    "0B0 is missing on rank 0": "0F0 | 1F0 1B0",
    "1B0 is missing on rank 1; 0B0 on rank 0 waits for it": "0F0 0B0 | 1F0",
    "1B0 on rank 1 has no 1F0 before it": "0F0 0B0 | 1B0",
    "0F0 is on rank 0 twice": "0F0 0F0 0B0 | 1F0 1B0",
    "0W0 is missing on rank 0": "0F0 0I0 | 1F0 1B0",
    "0W0 on rank 0 has no 0I0 before it": "0F0 0W0 0I0 | 1F0 1B0",
    "rank 1 has both 1B0 and 1I0": "0F0 0B0 | 1F0 1I0 1B0 1W0",
    "0STEP on rank 0 is no pass; a schedule has F, B, I and W": "0F0 0STEP | 1F0",
    "1B0 is on rank 0, but stage 1 lies on rank 1": "0F0 1B0 | 1F0 1B0",
    "0F4 on rank 0 is outside of 2 stages and 1 micro-batches": "0F4 | 1F0 1B0",
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_a_wrong_schedule_is_refused_by_the_name_of_its_action(sentence: str) -> None:
    ranks = tuple(tuple(map(parse_action, order.split())) for order in REFUSALS[sentence].split("|"))
    with pytest.raises(ProgramError) as caught:
        time_schedule(Schedule("own", (0, 1), 1, ranks), ScheduleSpec.uniform(2, 1))
    assert str(caught.value) == sentence


def test_a_circle_says_who_waits_for_whom() -> None:
    ranks = tuple(tuple(map(parse_action, order.split())) for order in ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    with pytest.raises(ProgramError, match="0B0 on rank 0 waits for 1B0 on rank 1, 1F1 on rank 1 waits for 0F1 on "):
        time_schedule(Schedule("own", (0, 1), 2, ranks), ScheduleSpec.uniform(2, 2))


def test_a_micro_batch_runs_through_one_replica() -> None:
    orders = ("0F0 0B0 3F0 3B0", "1F0 1B0 2F0 2B0")
    ranks = tuple(tuple(map(parse_action, order.split())) for order in orders)
    setting = ScheduleSpec.uniform(2, 1, chunks=2, replicas=2)
    with pytest.raises(ProgramError, match="micro-batch 0 runs through two replicas: 0F0 on rank 0, 2F0 on rank 1"):
        time_schedule(Schedule("own", (0, 1, 1, 0), 1, ranks, replicas=2), setting)


def test_a_setting_of_another_size_is_refused() -> None:
    with pytest.raises(ProgramError, match="has 2 stages, 1 replicas and 1 micro-batches, its setting 4, 1 and 3"):
        time_schedule(make_schedule("1f1b", ScheduleSpec(2, 1)), ScheduleSpec(4, 3))
