"""Schedules, lowering and the checker."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.migrations import INSTRUCTIONS
from muster.cost.time.op_times import OpTimes
from muster.schedule.action import KINDS, Action, Kind, parse_action
from muster.schedule.check import ProgramError, check
from muster.schedule.forward_only import forward_only
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, format_program, parse_program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import PassTimes, time_passes
from muster.simulate.breakdown import breakdown
from muster.simulate.simulator import simulate
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.schedules import SCHEDULES

many = settings(max_examples=60, deadline=None)

PLAIN = ("gpipe", "1f1b")
"""Schedules of one stage per rank with whole backwards."""

LOWERINGS = st.builds(LoweringOptions, st.sampled_from(["z1", "z2", "z3"]), st.integers(1, 4), st.booleans())


def program(name: str = "1f1b", ranks: int = 2, micro_batches: int = 3, **lowering) -> Program:
    lowering = {"zero": "z1", "data_ranks": 2, "tied_embeddings": True} | lowering
    return lower(make_schedule(name, ScheduleSpec(ranks, micro_batches)), LoweringOptions(**lowering))


def edited(text: str, *edits: tuple[str, str]) -> Program:
    """The program after each edit, which must change something."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return parse_program(text)


def words(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, order)) for order in schedule.ranks]


# ----------------------------------------------------------------------------------------------------------------------
# Schedules


def test_orders():
    assert words(make_schedule("1f1b", ScheduleSpec(2, 3))) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    assert words(make_schedule("gpipe", ScheduleSpec(2, 2))) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert words(make_schedule("1f1b", ScheduleSpec(1, 2))) == ["0F0 0B0 0F1 0B1"]
    assert words(forward_only((0, 1, 0), 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1"]
    assert words(forward_only((0, 1, 0, 1), 3))[1] == "1F0 1F1 3F0 3F1 1F2 3F2"


def test_registry_refuses_in_one_sentence():
    with pytest.raises(ConfigError, match=r"unknown schedule 'gpip'; known: gpipe, 1f1b, .*; did you mean 'gpipe'\?"):
        make_schedule("gpip", ScheduleSpec(2, 4))
    with pytest.raises(InfeasibleError, match="one stage per pipeline rank, got 2; the nearest that runs has vpp 1"):
        make_schedule("1f1b", ScheduleSpec(2, 4, 2))
    with pytest.raises(InfeasibleError, match="num_micro_batches of at least 1, got 0"):
        make_schedule("1f1b", ScheduleSpec(2, 0))
    with pytest.raises(InfeasibleError, match="chunks. is 3, which 2 replicas can't share: expected a multiple of 2"):
        ScheduleSpec(2, 4, 3, replicas=2)
    with pytest.raises(InfeasibleError, match="memory_limit is 0, expected more than 0"):
        ScheduleSpec(2, 4, memory_limit=0)
    assert all(entry.explanation for entry in SCHEDULES.values())


# ----------------------------------------------------------------------------------------------------------------------
# Lowering


@many
@given(st.sampled_from(PLAIN), st.integers(1, 8), st.integers(1, 16), LOWERINGS)
def test_every_lowered_program_is_sound(name: str, ranks: int, micro_batches: int, lowering: LoweringOptions):
    lowered = lower(make_schedule(name, ScheduleSpec(ranks, micro_batches)), lowering)
    assert parse_program(format_program(lowered)) == lowered
    peaks = check(lowered).peak_activations
    kept = {"gpipe": lambda rank: micro_batches, "1f1b": lambda rank: min(ranks - rank, micro_batches)}[name]
    assert peaks == tuple(map(kept, range(ranks)))
    with pytest.raises(ProgramError, match=f"more than the limit of {max(peaks) - 1}"):
        check(lowered, max_activations=max(peaks) - 1)


@many
@given(st.data(), st.integers(1, 4), st.integers(1, 7), st.integers(1, 8), LOWERINGS)
def test_forwards_run_under_any_placement(data, ranks: int, stages: int, micro_batches: int, lowering: LoweringOptions):
    placement = [*range(ranks), *data.draw(st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages))]
    placement = data.draw(st.permutations(placement))
    lowered = lower(forward_only(placement, micro_batches), replace(lowering, train=False))
    assert set(check(lowered).peak_activations) == {0}
    assert {item.action.kind for lanes in lowered.ranks for lane in lanes.values() for item in lane} <= {
        *("F", "SEND_F", "RECV_F", "UNSHARD")
    }


def random_schedule(draw, ranks: int, stages: int, micro_batches: int, split: bool, replicas: int = 1) -> Schedule:
    """Any order of work that can be followed: ready passes are taken at random, backwards whole or split; with more
    stages than ranks in every replica, each replica anywhere."""
    depth, places = ranks + stages, st.lists(st.integers(0, ranks - 1), min_size=stages, max_size=stages)
    placement = [rank for _ in range(replicas) for rank in draw(st.permutations([*range(ranks), *draw(places)]))]
    orders: list[list] = [[] for _ in range(ranks)]
    backward = "I" if split else "B"
    routes = draw(st.lists(st.integers(0, replicas - 1), min_size=micro_batches, max_size=micro_batches))
    ready = [parse_action(f"{replica * depth}F{index}") for index, replica in enumerate(routes)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        orders[placement[action.stage]].append(action)
        if action.kind == "F":
            last = action.stage % depth == depth - 1
            ready.append(action._replace(kind=backward) if last else action._replace(stage=action.stage + 1))
        elif action.kind == backward:
            ready += [action._replace(stage=action.stage - 1)] if action.stage % depth else []
            ready += [action._replace(kind="W")] if split else []
    return Schedule("random", tuple(placement), micro_batches, tuple(map(tuple, orders)), replicas)


@many
@given(st.data(), *[st.integers(low, 4) for low in (1, 0, 1)], st.booleans(), st.integers(1, 2), LOWERINGS)
def test_any_followable_order_is_lowered_soundly(data, ranks, stages, micro_batches, split, replicas, lowering):
    """Several stages per rank anywhere, split backwards, two replicas: no order of compute can deadlock, and the
    simulated program begins each pass when the schedule's own timing says."""
    schedule = random_schedule(data.draw, ranks, stages, micro_batches, split, replicas)
    lowered = lower(schedule, lowering)
    check(lowered)
    assert parse_program(format_program(lowered)) == lowered
    unit_s = [1.0] * schedule.depth
    timing = time_passes(schedule, PassTimes(unit_s, unit_s, unit_s, p2p_s=0.25))
    timeline = simulate(lowered, OpTimes({("F", -1): 1.0, ("B", -1): 2.0, ("I", -1): 1.0, ("W", -1): 1.0}, 0.25))
    for rank, order in enumerate(schedule.ranks):
        events = [event for event in timeline.events if event.rank == rank and event.action.kind in "FBIW"]
        assert [event[2:4] for event in events] == list(zip(order, timing.begin_s[rank], strict=True))


BIDIRECTIONAL = Schedule(
    "own",
    (0, 1, 1, 0),
    2,
    tuple(tuple(map(parse_action, order.split())) for order in ("0F0 3F1 3B1 0B0", "2F1 1F0 1B0 2B1")),
    replicas=2,
)


def test_two_replicas_add_up_their_gradients():
    lowered = lower(BIDIRECTIONAL, LoweringOptions("z1", 2, tied_embeddings=True))
    assert (
        str(lowered)
        == """\
program 2 schedule=own ranks=2 micro_batches=2 placement=0,1,1,0 replicas=2
rank 0 compute: 0F0@collective:0 3F1@p2p:1,collective:1 3B1 0B0@p2p:2 STEP@collective:8
rank 0 p2p: 0SEND_F0>1@compute:0 3RECV_F1<1 0RECV_B0<1@compute:1 3SEND_B1>1@compute:2
rank 0 collective: 0UNSHARD 3UNSHARD 3REDUCE_GRAD@compute:2 0REDUCE_GRAD@compute:3\
 1ALL_REDUCE_REPLICAS<1@compute:3,collective:2,collective:3 0ALL_REDUCE_REPLICAS<1@compute:3,collective:2,collective:3\
 0ALL_REDUCE_TIED<1@compute:3,collective:2,collective:3,collective:4,collective:5\
 3ALL_REDUCE_TIED<1@compute:3,collective:2,collective:3,collective:4,collective:5\
 GRAD_NORM@compute:3,collective:2,collective:3,collective:4,collective:5,collective:6,collective:7
rank 1 compute: 2F1@collective:0 1F0@p2p:0,collective:1 1B0 2B1@p2p:3 STEP@collective:8
rank 1 p2p: 1RECV_F0<0 2SEND_F1>0@compute:0 1SEND_B0>0@compute:2 2RECV_B1<0@compute:1
rank 1 collective: 2UNSHARD 1UNSHARD 1REDUCE_GRAD@compute:2 2REDUCE_GRAD@compute:3\
 1ALL_REDUCE_REPLICAS<0@compute:3,collective:2,collective:3 0ALL_REDUCE_REPLICAS<0@compute:3,collective:2,collective:3\
 1ALL_REDUCE_TIED<0@compute:3,collective:2,collective:3,collective:4,collective:5\
 2ALL_REDUCE_TIED<0@compute:3,collective:2,collective:3,collective:4,collective:5\
 GRAD_NORM@compute:3,collective:2,collective:3,collective:4,collective:5,collective:6,collective:7
"""
    )
    assert check(lowered).peak_activations == (2, 2)
    parts = breakdown(
        simulate(
            lowered,
            OpTimes({("F", -1): 1.0, ("B", -1): 2.0, ("ALL_REDUCE_REPLICAS", -1): 0.5, ("ALL_REDUCE_TIED", -1): 0.25}),
        )
    )
    assert (parts.step_s, parts.gather_s, parts.bubble_s) == (7.5, 1.5, 0.0)


def test_a_copy_of_a_stage_on_the_same_rank_is_merged_there():
    ranks = (tuple(map(parse_action, ["0F0", "1F1", "0B0", "1B1"])),)
    lowered = lower(Schedule("own", (0, 0), 2, ranks, replicas=2), LoweringOptions())
    assert "\nrank 0 collective: 0ALL_REDUCE_REPLICAS@compute:3 GRAD_NORM@compute:3,collective:0\n" in str(lowered)
    check(lowered)


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        (
            [
                (" 0ALL_REDUCE_REPLICAS<0@compute:3", ""),
                ("2B1@p2p:3 STEP@collective:4", "2B1@p2p:3 STEP@collective:3"),
            ],
            "0ALL_REDUCE_REPLICAS on rank 0 has no ALL_REDUCE_REPLICAS on its partner, rank 1",
        ),
        (
            [("1ALL_REDUCE_REPLICAS<1", "1ALL_REDUCE_REPLICAS")],
            "1ALL_REDUCE_REPLICAS on rank 0 has no rank as its partner, not rank 1",
        ),
        (
            [
                (
                    "1ALL_REDUCE_REPLICAS<1@compute:2 0ALL_REDUCE_REPLICAS<1@compute:3",
                    "0ALL_REDUCE_REPLICAS<1@compute:3 1ALL_REDUCE_REPLICAS<1@compute:3",
                )
            ],
            "where rank 0 has 0ALL_REDUCE_REPLICAS, its partner, rank 1, has 1ALL_REDUCE_REPLICAS",
        ),
        ([("3ALL_REDUCE_TIED<1", "2ALL_REDUCE_TIED<1")], "2ALL_REDUCE_TIED is on rank 0, but stage 2 lies on rank 1"),
        (
            [("0ALL_REDUCE_REPLICAS<1@compute:3", "0ALL_REDUCE_REPLICAS<1@compute:2")],
            "0ALL_REDUCE_REPLICAS on rank 0 begins before 0B0 is known to be over",
        ),
        ([("2F1 ", "2F0 ")], "micro-batch 0 runs through two replicas: stage 0 on rank 0, stage 2 on rank 1"),
        ([("0SEND_F0>1", "3SEND_F0>1")], "3SEND_F0 on rank 0 has no other rank to pass anything to or from"),
        ([("2RECV_B1<0", "2RECV_F1<0")], "2RECV_F1 on rank 1 has no other rank to pass anything to or from"),
    ],
)
def test_faults_of_two_replicas_are_refused(edits, sentence):
    with pytest.raises(ProgramError) as refusal:
        check(edited(str(lower(BIDIRECTIONAL, LoweringOptions(tied_embeddings=True))), *edits))
    assert sentence in str(refusal.value)


def test_replicas_must_divide_the_stages():
    with pytest.raises(ValueError, match="3 stages don't spread over 2 replicas"):
        parse_program("program 2 schedule=own ranks=1 micro_batches=1 placement=0,0,0 replicas=2")


def test_parameters_and_gradients():
    def collectives(**lowering) -> str:
        lines = str(program(ranks=3, micro_batches=2, **lowering)).splitlines()
        return " ".join(line.partition(": ")[2] for line in lines if line.startswith("rank 2 collective"))

    assert collectives(zero="z1") == (
        "2UNSHARD 2REDUCE_GRAD@compute:3 2ALL_REDUCE_TIED<0@compute:3,collective:1"
        " GRAD_NORM@compute:3,collective:1,collective:2"
    )
    assert collectives(zero="z2") == "2UNSHARD 2ALL_REDUCE_TIED<0@compute:3 GRAD_NORM@compute:3,collective:1"
    assert collectives(zero="z3", tied_embeddings=False) == "GRAD_NORM@compute:3"
    assert collectives(zero="z1", data_ranks=1, tied_embeddings=False) == "GRAD_NORM@compute:3"
    assert "UNSHARD" in collectives(train=False)
    assert "GRAD_NORM" not in collectives(train=False)
    assert "ALL_REDUCE_TIED" not in str(program(ranks=1))


def test_receives_are_posted_ahead_and_hold_up_no_send():
    for name in PLAIN:
        for lanes in program(name, ranks=4, micro_batches=8).ranks:
            made = {item.action: index for index, item in enumerate(lanes["compute"])}
            begins = -1
            for item in lanes["p2p"]:
                waits = [wait.index for wait in item.waits]
                if item.action.kind[0] == "R":
                    reader = item.action._replace(kind=item.action.kind[-1])
                    assert max(waits, default=-1) <= max(made[reader] - 2, -1)
                else:
                    assert max(waits) >= begins  # what stands before a send waits for nothing later
                begins = max([begins, *waits])


def test_lowering_refuses_an_order_that_cannot_be_followed():
    def schedule(*orders: str) -> Schedule:
        ranks = tuple(tuple(map(parse_action, order.split())) for order in orders)
        return Schedule("own", tuple(range(len(orders))), 2, ranks)

    with pytest.raises(ProgramError, match="0F1 is missing on rank 0; 1F1 on rank 1 waits for it"):
        lower(schedule("0F0", "1F0 1F1"), LoweringOptions())
    with pytest.raises(
        ProgramError, match="0B1 on rank 0 waits for 1B1 on rank 1, 1F0 on rank 1 waits for 0F0 on rank 0"
    ):
        lower(schedule("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1"), LoweringOptions())


# ----------------------------------------------------------------------------------------------------------------------
# The checker: each seeded fault and its sentence

TWO_RANKS = """\
program 2 schedule=own ranks=2 micro_batches=2 placement=0,1
rank 0 compute: 0F0@collective:0 0F1 0B0@p2p:2 0B1@p2p:3 STEP@collective:3
rank 0 p2p: 0SEND_F0>1@compute:0 0SEND_F1>1@compute:1 0RECV_B0<1 0RECV_B1<1
rank 0 collective: 0UNSHARD 0REDUCE_GRAD@compute:3 0ALL_REDUCE_TIED<1@collective:1 GRAD_NORM@collective:2
rank 1 compute: 1F0@p2p:0,collective:0 1B0 1F1@p2p:1 1B1 STEP@collective:3
rank 1 p2p: 1RECV_F0<0 1RECV_F1<0 1SEND_B0>0@compute:1 1SEND_B1>0@compute:3
rank 1 collective: 1UNSHARD 1REDUCE_GRAD@compute:3 1ALL_REDUCE_TIED<0@collective:1 GRAD_NORM@collective:2
"""

FAULTS = {
    "missing forward": ([("1F1@p2p:1 ", ""), ("compute:3", "compute:2")], "1F1 is missing on rank 1"),
    "missing backward": ([("1B1 STEP", "STEP"), ("compute:3", "compute:2")], "1B1 is missing on rank 1"),
    "done twice": ([("0F1 0B0", "0F1 0F1 0B0")], "0F1 is on rank 0 twice"),
    "whole and split": ([("0B1@p2p:3", "0B1@p2p:3 0W1")], "rank 0 has both 0B1 and 0W1"),
    "half of a split": ([("1B0", "1I0")], "1W0 is missing on rank 1"),
    "stage on no rank": ([("placement=0,1", "placement=0,2")], "stage 1 lies on rank 2, but the ranks are 0 to 1"),
    "wrong rank": ([("0F1 0B0", "1F1 0B0")], "1F1 is on rank 0, but stage 1 lies on rank 1"),
    "no such micro-batch": ([("0F1 0B0", "0F7 0B0")], "0F7 on rank 0 is outside of 2 stages and 2 micro-batches"),
    "no micro-batches": ([("micro_batches=2", "micro_batches=0")], "at least one micro-batch, this one has none"),
    "wrong lane": (
        [("0F1 0B0", "0F1 0RECV_B0<1 0B0")],
        "0RECV_B0 on rank 0 is in lane compute, but belongs in lane p2p",
    ),
    "wait for nothing": ([("1F1@p2p:1", "1F1@p2p:9")], "1F1 on rank 1 waits for p2p:9, but its p2p lane has 4"),
    "missing receive": ([("1RECV_F1<0 ", ""), ("p2p:1", "p2p:0")], "0SEND_F1 on rank 0 has no 1RECV_F1 on rank 1"),
    "missing send": (
        [("0SEND_F1>1@compute:1 ", ""), ("p2p:3", "p2p:2")],
        "1RECV_F1 on rank 1 has no 0SEND_F1 on rank 0",
    ),
    "wrong peer": (
        [("0SEND_F1>1", "0SEND_F1>0")],
        "0SEND_F1 on rank 0 has rank 0 as its other end, but stage 1 lies on rank 1",
    ),
    "send out of the pipeline": (
        [("1SEND_B1>0", "1SEND_F1>0")],
        "1SEND_F1 on rank 1 has no other rank to pass anything",
    ),
    "swapped sends": (
        [("0SEND_F0>1@compute:0 0SEND_F1>1@compute:1", "0SEND_F1>1@compute:1 0SEND_F0>1@compute:0")],
        "ranks 0 and 1 order their transfers differently:"
        " where rank 0 has 0SEND_F1 → 1RECV_F1, rank 1 has 0SEND_F0 → 1RECV_F0",
    ),
    "no partner": (
        [("1ALL_REDUCE_TIED<0@collective:1 ", ""), ("collective:3", "collective:2")],
        "0ALL_REDUCE_TIED on rank 0 has no ALL_REDUCE_TIED",
    ),
    "no norm": (
        [("GRAD_NORM@collective:2\nrank 1", "\nrank 1"), (" STEP@collective:3", "")],
        "GRAD_NORM is missing on rank 0",
    ),
    "backward first": ([("1F0@p2p:0,collective:0 1B0", "1B0 1F0@p2p:0,collective:0")], "1B0 on rank 1 reads its saved"),
    "input not awaited": ([("1F1@p2p:1", "1F1")], "1F1 on rank 1 reads its input before 1RECV_F1 is known to be over"),
    "gradient not awaited": ([("0B1@p2p:3", "0B1")], "0B1 on rank 0 reads the gradient of its output before 0RECV_B1"),
    "sent too early": (
        [("0SEND_F1>1@compute:1", "0SEND_F1>1")],
        "0SEND_F1 on rank 0 reads the output before 0F1 is known",
    ),
    "parameters not awaited": (
        [("0F0@collective:0", "0F0")],
        "0F0 on rank 0 reads the gathered parameters before 0UNSHARD is known to be over",
    ),
    "reduced too early": (
        [("0REDUCE_GRAD@compute:3", "0REDUCE_GRAD")],
        "0REDUCE_GRAD on rank 0 begins before 0B0 is known to be",
    ),
    "tied before reduced": (
        [
            (
                "0REDUCE_GRAD@compute:3 0ALL_REDUCE_TIED<1@collective:1",
                "0ALL_REDUCE_TIED<1@compute:3 0REDUCE_GRAD@compute:3",
            )
        ],
        "0ALL_REDUCE_TIED on rank 0 begins before 0REDUCE_GRAD is known to be over",
    ),
    "step before norm": ([("1B1 STEP@collective:3\nrank 1 p2p", "STEP 1B1\nrank 1 p2p")], "STEP on rank 1 begins"),
    "waits for itself": ([("0F1 0B0", "0F1@compute:1 0B0")], "on rank 0, 0F1 waits for 0F1"),
    "waits for the future": ([("0F1 0B0", "0F1@compute:3 0B0")], "0F1 waits for 0B1, which comes after 0F1"),
    "own circle": (
        [("0SEND_F0>1@compute:0", "0SEND_F0>1@compute:2")],
        "deadlock: on rank 0, 0B0 waits for 0SEND_F0>1, 0SEND_F0>1 waits for 0B0",
    ),
}


def test_the_faultless_program_passes():
    assert check(parse_program(TWO_RANKS)).peak_activations == (2, 1)
    assert check(parse_program(TWO_RANKS), max_activations=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused(fault: str):
    edits, sentence = FAULTS[fault]
    with pytest.raises(ProgramError) as refusal:
        check(edited(TWO_RANKS, *edits))
    assert sentence in str(refusal.value), str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_deadlock_names_who_waits_for_whom():
    """Three ranks that a transport which ends a rank's transfers one after another would leave standing."""
    circle = """\
program 2 schedule=own ranks=3 micro_batches=2 placement=0,1,2,0
rank 0 compute: 0F0 3F0@p2p:1 0F1 3F1@p2p:3
rank 0 p2p: 0SEND_F0>1@compute:0 3RECV_F0<2 0SEND_F1>1@compute:2 3RECV_F1<2
rank 1 compute: 1F0@p2p:0 1F1@p2p:1
rank 1 p2p: 1RECV_F0<0 1RECV_F1<0 1SEND_F0>2@compute:0 1SEND_F1>2@compute:1
rank 2 compute: 2F0@p2p:0 2F1@p2p:2
rank 2 p2p: 2RECV_F0<1 2SEND_F0>0@compute:0 2RECV_F1<1 2SEND_F1>0@compute:1
"""
    with pytest.raises(ProgramError) as refusal:
        check(parse_program(circle))
    assert str(refusal.value) == (
        "deadlock: rank 0 stalls at 3F0, which waits for 3RECV_F0<2, held up by rank 2;"
        " rank 2 stalls at 2F0, which waits for 2RECV_F0<1, held up by rank 1;"
        " rank 1 stalls at 1F1, which waits for 1RECV_F1<0, held up by rank 0"
    )
    check(
        edited(
            circle, ("1RECV_F1<0 1SEND_F0>2@compute:0", "1SEND_F0>2@compute:0 1RECV_F1<0"), ("1F1@p2p:1", "1F1@p2p:2")
        )
    )


def test_buffers_are_freed_once_and_not_read_after():
    sound = """\
program 2 schedule=own ranks=1 micro_batches=2 placement=0
rank 0 compute: 0F0 0F1 0B1@host_copy:0 0B0@host_copy:1
rank 0 host_copy: 0OFFLOAD0@compute:0 0RELOAD0@compute:2
"""
    assert check(parse_program(sound)).peak_activations == (2,)
    with pytest.raises(ProgramError, match="0B0 on rank 0 reads its saved activations, already freed"):
        check(edited(sound, ("0B0@host_copy:1", "0B0")))
    with pytest.raises(ProgramError, match="0OFFLOAD0 on rank 0 reads its saved activations before 0F0 is known"):
        check(edited(sound, ("@compute:0", "")))
    with pytest.raises(ProgramError, match="0RELOAD0 on rank 0 reads its saved activations in host memory before"):
        check(edited(sound, ("0RELOAD0@compute:2", "0RELOAD0@compute:1")))
    with pytest.raises(ProgramError, match="0OFFLOAD1 on rank 0 reads its saved activations, already freed"):
        check(edited(sound, ("0RELOAD0@compute:2", "0RELOAD0@compute:2 0OFFLOAD1@compute:2")))


@many
@given(st.data(), st.sampled_from(PLAIN), st.integers(2, 4), st.integers(1, 5), LOWERINGS)
def test_no_instruction_can_be_dropped(data, name: str, ranks: int, micro_batches: int, lowering: LoweringOptions):
    """Whatever is taken out, with the waits for it, is missed."""
    lowered = lower(make_schedule(name, ScheduleSpec(ranks, micro_batches)), lowering)
    rank = data.draw(st.integers(0, ranks - 1))
    lane = data.draw(st.sampled_from(sorted(lowered.ranks[rank])))
    index = data.draw(st.integers(0, len(lowered.ranks[rank][lane]) - 1))
    ranks_after = list(lowered.ranks)
    ranks_after[rank] = {
        other: tuple(
            item._replace(
                waits=tuple(
                    wait._replace(index=wait.index - (wait.lane == lane and wait.index > index))
                    for wait in item.waits
                    if wait != (lane, index)
                ),
            )
            for at, item in enumerate(items)
            if (other, at) != (lane, index)
        )
        for other, items in lowered.ranks[rank].items()
    }
    if lowered.ranks[rank][lane][index].action.kind in ("UNSHARD", "REDUCE_GRAD"):
        return  # how parameters are stored is not the program's to know
    with pytest.raises(ProgramError):
        check(replace(lowered, ranks=tuple(ranks_after)))


# ----------------------------------------------------------------------------------------------------------------------
# Former texts

FORMER = Path(__file__).parent / "data" / "written_before" / "b48f258" / "programs"


@pytest.mark.parametrize("name", sorted(path.name for path in FORMER.glob("*.txt")))
def test_programs_of_version_1_are_read_with_todays_names(name: str):
    read = parse_program((FORMER / name).read_text())
    check(read)
    kinds = {item.action.kind for lanes in read.ranks for lane in lanes.values() for item in lane}
    assert not {str(kind) for kind in kinds}.intersection(INSTRUCTIONS)
    assert str(read).startswith("program 2 ")
    assert parse_program(str(read)) == read


def test_texts_of_a_newer_muster_are_refused():
    with pytest.raises(ValueError, match="version 9, of a newer Muster; this one reads up to 2"):
        parse_program("program 9 schedule=own ranks=1 micro_batches=1 placement=0")


def test_every_former_kind_is_called_by_one_of_todays():
    assert set(INSTRUCTIONS.values()) <= set(Kind) == set(KINDS)
    assert {Kind.F} == {"F"}
    assert parse_action("1SF2", INSTRUCTIONS) == Action(Kind.SEND_F, 1, 2)
