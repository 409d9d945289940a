"""A run's newest state in the memory of its nodes: each rank's part on its own node and on the next; free of torch.

The next node is another one only where there are several: on a single node the copies outlive its processes, not its
memory. What goes to the next node takes connections of its own, and none of the training's communication.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from muster.checkpoint.in_memory import transport
from muster.checkpoint.in_memory.directory import InMemoryDirectory, StepHeader
from muster.checkpoint.in_memory.node_groups import NodeGroups
from muster.checkpoint.rank_file import rank_file_name, rank_index_path
from muster.launch.network import local_address_for
from muster.spec.errors import InfeasibleError, MusterError

T = TypeVar("T")
AllGather = Callable[[T], Sequence[T]]
"""Hands a small value to every rank and returns those of all, by rank."""

NUM_VERSIONS = 2
"""Copies that lie in a memory at once: one is removed when the next is whole on all nodes."""


class InMemoryCheckpointer:
    """One rank's part in the copies of its run. All ranks make one together, and call everything but `send` so."""

    def __init__(
        self, rank: int, directory: InMemoryDirectory, store_host: str, attempt: str, all_gather: AllGather[Any]
    ) -> None:
        """`towards` is the host of the launcher's store, `attempt` a word of this launch's own.

        Raises MusterError on all ranks when one has no memory to write to or can't be reached.
        """
        self.rank, self.directory, self.attempt = rank, directory, attempt
        mark, address, problem = "", ("", 0, ""), None
        try:
            mark = directory.open()
            self._server = transport.FileServer(directory.path, local_address_for(store_host))
            address = self._server.address
        except OSError as error:
            place = error.filename or directory.path
            problem = (
                f"no copies can be made in {place}: {error.strerror or error} (rank {rank}):"
                " see train.in_memory_checkpoint_dir"
            )
        except MusterError as error:
            problem = f"no copies can be made: {error} (rank {rank})"
        told = all_gather((mark, tuple(address), problem))
        if problems := [text for _, _, text in told if text]:
            raise MusterError(problems[0])
        self.addresses = [transport.PeerAddress(*where) for _, where, _ in told]
        self.node_groups = NodeGroups([mark for mark, _, _ in told])
        self.is_node_leader = self.node_groups.ranks_on_node_of(rank)[0] == rank
        """Whether this rank does what is done once on a node."""

    def require_capacity(self, local_bytes: int, all_gather: AllGather[Any]) -> None:
        """Raises InfeasibleError on all ranks when a node has too little memory for the copies, of which this rank's
        have `own_bytes`."""
        usage = shutil.disk_usage(self.directory.path)
        used = sum(path.stat().st_size for path in self.directory.path.rglob("*") if path.is_file())
        told = all_gather((local_bytes, usage.free + used, os.uname().nodename, str(self.directory.path.parent)))
        for ranks in self.node_groups.groups:
            first = ranks[0]
            need = NUM_VERSIONS * sum(told[rank][0] for rank in (*ranks, *self.node_groups.received_ranks(first)))
            _, free, host, place = told[first]
            if need > free:
                raise InfeasibleError(
                    f"train.in_memory_checkpoint_every: the copies of {format_ranks(ranks)} on {host} and of those"
                    f" before them need {need / 1e9:.2f} GB in {place}, and there are {free / 1e9:.2f}: give more nodes"
                    " or another train.in_memory_checkpoint_dir, or set it to 0"
                )

    def save(
        self,
        step: int,
        header: dict[str, Any],
        world_size: int,
        write: Callable[[Path], None],
        exchange: Callable[[str | None], Sequence[str | None]],
    ) -> None:
        """Makes the copies of one step; `write` writes this rank's part into the folder that it is given, and sends it
        on. Raises MusterError on all ranks when one fails: the copies before are then untouched."""

        def together(action: Callable[[], None], wanted: bool = True) -> None:
            problem = None
            try:
                if wanted:
                    action()
            except Exception as error:  # whatever it is, the others must hear of it or they wait in vain
                words = error if isinstance(error, MusterError) else getattr(error, "strerror", None) or repr(error)
                problem = f"{words} (rank {self.rank})"
            if problems := [text for text in exchange(problem) if text]:
                raise MusterError(f"the copies of step {step} in memory were not made: {problems[0]}")

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

    @property
    def partner_address(self) -> transport.PeerAddress | None:
        """Who gets the second copy of this rank's part."""
        other = self.node_groups.partner(self.rank)
        return None if other is None else self.addresses[other]

    def describe_location(self) -> str:
        """What copies there will be, in words."""
        count = len(self.node_groups.groups)
        if count == 1:
            return f"in {self.directory.path} of this node alone: they outlive its processes, not its memory"
        return f"in the memory of {count} nodes, each with those of the one before"

    def close(self, delete: bool) -> None:
        """Takes and gives no more; with `clear`, nothing is left."""
        self._server.close()
        if delete and self.is_node_leader:
            self.directory.delete()
        self.directory.release()


def send_to_partner(folder: Path, rank: int, address: transport.PeerAddress) -> None:
    """Sends what a rank has written into a folder to the node that keeps its second copy. Raises MusterError."""
    for path in (folder / rank_file_name(rank), rank_index_path(folder, rank)):
        if not path.exists():  # a rank that has nothing to write
            continue
        try:
            transport.put(address, f"{folder.name}/{path.name}", path)
        except OSError as error:
            words = error.strerror or str(error)
            raise MusterError(f"no copy of rank {rank}'s part was made at {address.host}: {words}") from error


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7` or `ranks 0, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
