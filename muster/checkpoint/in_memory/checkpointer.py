"""Checkpoints in memory: a run's newest state in the memory of its nodes, from which a restart resumes in seconds.

Each rank's part is kept on its own node and on the next one, so the state survives the loss of any single node
(compare Wang et al. 2023, "Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints"). On a
single node it survives its processes, but not the node. Parts are sent to the next node over connections of their own,
not through the training's communication. Free of torch.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from muster.checkpoint.checkpoint_dir import remove_incomplete
from muster.checkpoint.in_memory import transport
from muster.checkpoint.in_memory.directory import InMemoryDirectory, StepHeader
from muster.checkpoint.in_memory.node_groups import NodeGroups
from muster.checkpoint.rank_file import rank_file_name, rank_index_path
from muster.launch.network import local_address_for
from muster.spec.errors import InfeasibleError, MusterError, UnreachableError
from muster.spec.units import numbered

T = TypeVar("T")
AllGather = Callable[[T], Sequence[T]]
"""Function that takes this rank's small value and returns those of all ranks, by rank."""

NUM_VERSIONS = 2
"""Number of in-memory checkpoints that exist at once: one is removed when the next is complete on all nodes."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN)
"""Errors of a message to a machine that is down, or whose network is."""


class InMemoryCheckpointer:
    """One rank's part in the in-memory checkpoints of its run. All ranks construct it and call its methods together."""

    def __init__(
        self, rank: int, directory: InMemoryDirectory, store_host: str, attempt: str, all_gather: AllGather[Any]
    ) -> None:
        """Open the directory and a file server for the other nodes.

        `store_host` is the host of the launcher's store, `attempt` a word that is unique to this launch. Raises
        MusterError on all ranks if one can't write to its memory or can't be reached.
        """
        self.rank = rank
        self.directory = directory
        self.attempt = attempt
        mark = ""
        address: tuple[str, int, str] = ("", 0, "")
        problem = None
        try:
            mark = directory.open()
            self._server = transport.FileServer(directory.path, local_address_for(store_host))
            address = self._server.address
        except OSError as error:
            path = error.filename or directory.path
            problem = (
                f"in-memory checkpoints can't be written to {path}: {error.strerror or error} (rank {rank}):"
                " see train.in_memory_checkpoint_dir"
            )
        except MusterError as error:
            problem = f"in-memory checkpoints can't be written: {error} (rank {rank})"
        try:
            gathered = all_gather((mark, tuple(address), problem))
        except Exception:  # another rank is lost: nobody else knows of the server
            if problem is None:
                self._server.close()
            raise
        if problems := [text for _, _, text in gathered if text]:
            raise MusterError(problems[0])
        self.addresses = [transport.PeerAddress(*peer) for _, peer, _ in gathered]
        self.node_groups = NodeGroups([mark for mark, _, _ in gathered])
        self.is_node_leader = self.node_groups.ranks_on_node_of(rank)[0] == rank
        """True if this rank does what is done once per node."""

    def require_capacity(self, local_bytes: int, all_gather: AllGather[Any], key: str, remedy: str) -> None:
        """Raise InfeasibleError on all ranks if a node has too little memory for in-memory checkpoints.

        `local_bytes` is the size of this rank's part; `key` asks for these checkpoints, `remedy` does without.
        """
        usage = shutil.disk_usage(self.directory.path)
        used = sum(path.stat().st_size for path in self.directory.path.rglob("*") if path.is_file())
        gathered = all_gather((local_bytes, usage.free + used, os.uname().nodename, str(self.directory.path.parent)))
        for ranks in self.node_groups.groups:
            leader = ranks[0]
            stored = (*ranks, *self.node_groups.received_ranks(leader))
            needed_bytes = NUM_VERSIONS * sum(gathered[rank][0] for rank in stored)
            _, free_bytes, host, parent = gathered[leader]
            if needed_bytes > free_bytes:
                raise InfeasibleError(
                    f"{key}: the parts of {format_ranks(ranks)} on {host} and of the node"
                    f" before need {needed_bytes / 1e9:.2f} GB in {parent}, which has {free_bytes / 1e9:.2f}: give more"
                    f" nodes or another train.in_memory_checkpoint_dir, or {remedy}"
                )

    def save(
        self,
        step: int,
        header: dict[str, Any],
        world_size: int,
        write: Callable[[Path], None],
        exchange: Callable[[str | None], Sequence[str | None]],
    ) -> None:
        """Save the in-memory checkpoint of one step.

        `write` writes this rank's part into the folder that it receives, and sends it to the next node. Raises
        MusterError on all ranks if one fails; the checkpoint before is then untouched.
        """

        def together(action: Callable[[], None], wanted: bool = True) -> None:
            problem = None
            try:
                if wanted:
                    action()
            except Exception as error:  # any error: the other ranks must learn of it, or they wait in vain
                words = error if isinstance(error, MusterError) else getattr(error, "strerror", None) or repr(error)
                problem = f"{words} (rank {self.rank})"
            if problems := [text for text in exchange(problem) if text]:
                raise MusterError(f"the in-memory checkpoint of step {step} was not saved: {problems[0]}")

        head = StepHeader(attempt=self.attempt, world_size=world_size, about=header)
        try:
            together(lambda: self.directory.begin(step, head), self.is_node_leader)
            together(lambda: write(self.directory.tmp_dir(step)))
            together(lambda: self.directory.commit(step), self.is_node_leader)
        except MusterError:
            if self.is_node_leader:
                self.directory.discard(step)
            raise
        if self.is_node_leader:
            self.directory.keep_only(step)

    def save_part(
        self, step: int, header: Callable[[], dict[str, Any]], world_size: int, write: Callable[[Path], None]
    ) -> None:
        """Save this rank's part of one step here and on the next node, without a word to the other ranks.

        To be called after every step, and before this rank lets the others finish the next one. So when a rank has
        finished a step, all have saved the one before, and older ones can go.
        """
        if self.is_node_leader:
            self.directory.remove_steps(lambda other: other < step - 1)
            head = StepHeader(attempt=self.attempt, world_size=world_size, about=header())
            self.directory.begin_parts(step, head)
        write(folder := self.directory.step_dir(step))
        if self.partner_address is not None:
            send_to_partner(folder, self.rank, self.partner_address, transport.PART_TIMEOUT_S)

    def begin_after(self, step: int, all_gather: AllGather[Any]) -> None:
        """Remove what parts other attempts have left of steps but `step`, from which all ranks go on, and what a leader
        that was lost was about to remove; all call it."""
        if self.is_node_leader:
            remove_incomplete(self.directory.path)
            self.directory.remove_steps(lambda other: other != step)
        all_gather(None)

    @property
    def partner_address(self) -> transport.PeerAddress | None:
        """Address of the rank that receives the second copy of this rank's part; None on a single node."""
        other = self.node_groups.partner(self.rank)
        return None if other is None else self.addresses[other]

    def describe_location(self) -> str:
        """Return the location of in-memory checkpoints, in words."""
        count = len(self.node_groups.groups)
        if count == 1:
            return f"in {self.directory.path} of this node alone: it survives its processes, not the node"
        return f"in the memory of {count} nodes, each with the part of the one before"

    def close(self, delete: bool) -> None:
        """Stop the file server; with `delete`, remove the in-memory checkpoints."""
        self._server.close()
        if delete and self.is_node_leader:
            self.directory.delete()
        self.directory.release()


def send_to_partner(
    folder: Path, rank: int, address: transport.PeerAddress, timeout_s: float = transport.TIMEOUT_S
) -> None:
    """Send a rank's files in a folder to the node that keeps the second copy. Raises MusterError, UnreachableError
    where the node can't be reached."""
    for path in (folder / rank_file_name(rank), rank_index_path(folder, rank)):
        if not path.exists():  # the rank has nothing to write
            continue
        try:
            transport.put(address, f"{folder.name}/{path.name}", path, timeout_s)
        except OSError as error:
            words = error.strerror or str(error)
            is_away = isinstance(error, TimeoutError) or error.errno in _UNREACHABLE
            kind = UnreachableError if is_away else MusterError
            raise kind(f"rank {rank}'s part could not be copied to {address.host}: {words}") from error


def format_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0 to 7` or `ranks 0, 2 and 5`."""
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return numbered("rank", ranks)
