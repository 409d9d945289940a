"""Completion of sends: never before the receiver has the message, and soon after."""

from dataclasses import replace

import pytest

from muster.schedule.dry_run import dry_run
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.message_liveness import program_message_counts, schedule_message_counts
from muster.schedule.program import Instruction, Program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import PathLimits, ScheduleSpec
from muster.schedule.send_completion import completed_sends
from muster.spec.schedules import SCHEDULES

NAMES = [name for name, entry in SCHEDULES.items() if not entry.searched or entry.has_paths]
PATHS = PathLimits(skip_ratio=0.25)


def program(name: str, ranks: int, micro_batches: int) -> Program:
    entry = SCHEDULES[name]
    setting = ScheduleSpec(ranks, micro_batches, entry.default_chunks, replicas=entry.default_replicas, paths=PATHS)
    return lower(make_schedule(name, setting), LoweringOptions())


@pytest.mark.parametrize("name", NAMES)
def test_completed_sends_have_been_read(name: str) -> None:
    lowered = program(name, 4, 8)
    completed = [completed_sends(lowered, rank) for rank in range(4)]
    begun: set[tuple[int, str, int, int]] = set()

    def observe(rank: int, instruction: Instruction, over: bool) -> None:
        action, p2p = instruction.action, lowered.ranks[rank].get("p2p", ())
        if over and action.kind[0] == "R":
            for place in completed[rank].get(p2p.index(instruction), ()):
                read, peer = lowered.other_end(p2p[place].action), p2p[place].peer
                assert peer is not None
                kinds = ("F",) if read.kind == "RECV_F" else ("B", "I")
                assert any((peer, kind, read.stage, read.micro_batch) in begun for kind in kinds), (action, read)
        elif not over:
            begun.add((rank, *action[:3]))

    dry_run(lowered, observe)


def test_a_long_round_holds_few_messages() -> None:
    for rank in range(4):
        lowered = program("1f1b", 4, 64)
        held = most = 0
        completed = completed_sends(lowered, rank)
        for place, item in enumerate(lowered.ranks[rank]["p2p"]):
            held += 1 if item.action.kind[0] == "S" else -len(completed.get(place, ()))
            most = max(most, held)
        assert most <= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_holds_the_messages_of_its_program(name: str) -> None:
    entry = SCHEDULES[name]
    spec = ScheduleSpec(4, 8, entry.default_chunks, replicas=entry.default_replicas, paths=PATHS)
    schedule = make_schedule(name, spec)
    lowered = lower(schedule, LoweringOptions())
    by_lanes = program_message_counts(replace(lowered, transfers=None))
    for found, expected in zip(program_message_counts(lowered), by_lanes, strict=True):
        assert {stage: held.tolist() for stage, held in found.items()} == {
            stage: held.tolist() for stage, held in expected.items()
        }
    for found, expected in zip(schedule_message_counts(schedule), by_lanes, strict=True):
        passes = len(next(iter(found.values())))  # a Program computes the optimizer step, too
        assert {stage: held.tolist() for stage, held in found.items()} == {
            stage: held[:passes].tolist() for stage, held in expected.items()
        }


def test_messages_of_a_second_rank_of_two() -> None:
    """Its input of micro-batch 1 is under way during B0; no later message proves that its gradients were read."""
    schedule = make_schedule("1f1b", ScheduleSpec(2, 2))
    assert [str(action) for action in schedule.ranks[1]] == ["1F0", "1B0", "1F1", "1B1"]
    (held,) = schedule_message_counts(schedule)[1].values()
    assert held[1::2].tolist() == [0, 1, 1, 1]
    assert held[::2].tolist() == [1, 1, 2, 1, 2]
