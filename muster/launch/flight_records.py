"""Collectives that each rank has entered, from PyTorch's flight recorder: which rank the others of a group wait for.
Free of torch.

NCCL's collectives run on the device, so that a host goes on after it has launched one. The flight recorder
(`torch/csrc/distributed/c10d/FlightRecorder.hpp`) keeps the last ones of every group with a number and a state:
scheduled (launched by the host), started (on the device) or completed. A collective that some ranks have started and
another hasn't is what they wait for.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

_MARK = "Flight recorder:"


@dataclass(frozen=True)
class GroupRecord:
    """Collectives of one group, as one of its ranks has recorded them."""

    group: str
    """Name of the group, the same on all of its ranks."""
    kind: str
    """Purpose of the group; empty where nothing says."""
    entered: int
    """Number of the last collective that the host has launched."""
    pending: int | None
    """Number of the first one that isn't completed; None where all are."""
    operation: str = ""
    """Name and shape of the pending one."""
    started: bool = False
    """The pending one runs on the device, where it waits for the other ranks."""

    def waits_in(self, number: int) -> bool:
        """Return True if the rank waits for others in a collective."""
        return self.pending == number and self.started

    def is_behind(self, number: int) -> bool:
        """Return True if the rank has not begun a collective that another waits in."""
        if self.entered < number:
            return True
        return self.pending is not None and (self.pending < number or (self.pending == number and not self.started))


@dataclass(frozen=True)
class LateRank:
    """Rank that others wait for in a collective."""

    rank: int
    record: GroupRecord
    """A waiting rank's record of the group."""
    waiting: tuple[int, ...]

    def describe(self) -> str:
        """Return what the rank missed, as a clause."""
        name = f" of the group {self.record.kind}" if self.record.kind else ""
        ranks = ", ".join(map(str, self.waiting))
        who = f"rank {ranks} waits" if len(self.waiting) == 1 else f"ranks {ranks} wait"
        return f"never began {self.record.operation}, collective {self.record.pending}{name}, where {who}"


def parse_dump(dump: Mapping[str, Any]) -> list[GroupRecord]:
    """Return the records of each group, from a flight recorder's dump (version 2), read from JSON."""
    by_group: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in dump.get("entries", ()):
        if not entry.get("is_p2p"):
            name, kind, *_ = *entry["process_group"], ""
            by_group.setdefault((name, kind), []).append(entry)
    found = []
    for (name, kind), entries in by_group.items():
        entries.sort(key=lambda entry: entry["collective_seq_id"])
        pending = next((one for one in entries if one["state"] != "completed" and not one.get("retired")), None)
        more = {} if pending is None else {"operation": _operation(pending), "started": pending["state"] == "started"}
        number = None if pending is None else pending["collective_seq_id"]
        found.append(GroupRecord(name, kind, entries[-1]["collective_seq_id"], number, **more))
    return found


def _operation(entry: Mapping[str, Any]) -> str:
    shape = " and ".join("×".join(map(str, size)) for size in entry.get("input_sizes", ()))
    name = entry.get("profiling_name", "").rpartition(":")[2] or "a collective"
    return f"{name} of {shape}" if shape else name


def format_records(records: list[GroupRecord]) -> str:
    """Return records as lines behind a rank's stacks, which `read_records` reads."""
    return "\n".join(["", _MARK, *(json.dumps(asdict(one), ensure_ascii=False) for one in records), ""])


def read_records(stacks: str) -> Iterator[GroupRecord]:
    """Yield the records behind a rank's stacks; none where they are missing."""
    for line in stacks.rpartition(f"{_MARK}\n")[2].splitlines():
        if line.startswith('{"group"'):
            with suppress(ValueError, TypeError):  # cut off
                yield GroupRecord(**json.loads(line))


def find_late_rank(stacks_by_rank: Mapping[int, str]) -> LateRank | None:
    """Return the rank that others wait for and that itself waits for none; None where records don't tell."""
    records = {
        rank: {one.group: one for one in read_records(stacks)} for rank, stacks in sorted(stacks_by_rank.items())
    }
    late: dict[int, LateRank] = {}
    for groups in records.values():
        for name, record in groups.items():
            if record.pending is None or not record.started:
                continue
            members = {rank: theirs[name] for rank, theirs in records.items() if name in theirs}
            waiting = tuple(rank for rank, theirs in members.items() if theirs.waits_in(record.pending))
            for rank, theirs in members.items():
                if theirs.is_behind(record.pending):
                    late.setdefault(rank, LateRank(rank, record, waiting))
    waiting_ranks = {rank for one in late.values() for rank in one.waiting}
    return next((one for rank, one in late.items() if rank not in waiting_ranks), None)
