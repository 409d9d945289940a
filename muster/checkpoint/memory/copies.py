"""A run's newest state in the memory of its nodes: each rank's part on its own node and on the next; free of torch.

The next node is another one only where there are several: on a single node the copies outlive its processes, not its
memory. What goes to the next node takes connections of its own, and none of the training's communication.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from muster.checkpoint.memory import wire
from muster.checkpoint.memory.folder import CopyFolder, Head
from muster.checkpoint.memory.nodes import Nodes
from muster.checkpoint.write import file_name, list_path
from muster.parallel.network import own_host
from muster.spec.errors import InfeasibleError, MusterError

T = TypeVar("T")
Gather = Callable[[T], Sequence[T]]
"""Hands a small value to every rank and returns those of all, by rank."""

GENERATIONS = 2
"""Copies that lie in a memory at once: one is removed when the next is whole on all nodes."""


class Copies:
    """One rank's part in the copies of its run. All ranks make one together, and call everything but `send` so."""

    def __init__(self, rank: int, folder: CopyFolder, towards: str, attempt: str, gather: Gather[Any]) -> None:
        """`towards` is the host of the launcher's store, `attempt` a word of this launch's own.

        Raises MusterError on all ranks when one has no memory to write to or can't be reached.
        """
        self.rank, self.folder, self.attempt = rank, folder, attempt
        mark, address, problem = "", ("", 0, ""), None
        try:
            mark = folder.open()
            self._server = wire.Server(folder.path, own_host(towards))
            address = self._server.address
        except OSError as error:
            place = error.filename or folder.path
            problem = f"no copies can be made in {place}: {error.strerror or error} (rank {rank}): see train.copies_dir"
        except MusterError as error:
            problem = f"no copies can be made: {error} (rank {rank})"
        told = gather((mark, tuple(address), problem))
        if problems := [text for _, _, text in told if text]:
            raise MusterError(problems[0])
        self.addresses = [wire.Address(*where) for _, where, _ in told]
        self.nodes = Nodes([mark for mark, _, _ in told])
        self.is_keeper = self.nodes.own(rank)[0] == rank
        """Whether this rank does what is done once on a node."""

    def require_room(self, own_bytes: int, gather: Gather[Any]) -> None:
        """Raises InfeasibleError on all ranks when a node has too little memory for the copies, of which this rank's
        have `own_bytes`."""
        usage = shutil.disk_usage(self.folder.path)
        used = sum(path.stat().st_size for path in self.folder.path.rglob("*") if path.is_file())
        told = gather((own_bytes, usage.free + used, os.uname().nodename, str(self.folder.path.parent)))
        for ranks in self.nodes.groups:
            first = ranks[0]
            need = GENERATIONS * sum(told[rank][0] for rank in (*ranks, *self.nodes.received(first)))
            _, free, host, place = told[first]
            if need > free:
                raise InfeasibleError(
                    f"train.copies_every: the copies of {ranks_in_words(ranks)} on {host} and of those before them need"
                    f" {need / 1e9:.2f} GB in {place}, and there are {free / 1e9:.2f}: give more nodes or another"
                    " train.copies_dir, or set it to 0"
                )

    def save(
        self,
        step: int,
        about: dict[str, Any],
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

        head = Head(attempt=self.attempt, world_size=world_size, about=about)
        try:
            together(lambda: self.folder.begin(step, head), self.is_keeper)
            together(lambda: write(self.folder.beside(step)))
            together(lambda: self.folder.commit(step), self.is_keeper)
        except MusterError:
            if self.is_keeper:
                self.folder.drop(step)
            raise
        if self.is_keeper:
            self.folder.keep_only(step)

    @property
    def partner(self) -> wire.Address | None:
        """Who gets the second copy of this rank's part."""
        other = self.nodes.partner(self.rank)
        return None if other is None else self.addresses[other]

    def where(self) -> str:
        """What copies there will be, in words."""
        count = len(self.nodes.groups)
        if count == 1:
            return f"in {self.folder.path} of this node alone: they outlive its processes, not its memory"
        return f"in the memory of {count} nodes, each with those of the one before"

    def close(self, clear: bool) -> None:
        """Takes and gives no more; with `clear`, nothing is left."""
        self._server.close()
        if clear and self.is_keeper:
            self.folder.clear()
        self.folder.release()


def send(folder: Path, rank: int, address: wire.Address) -> None:
    """Sends what a rank has written into a folder to the node that keeps its second copy. Raises MusterError."""
    for path in (folder / file_name(rank), list_path(folder, rank)):
        if not path.exists():  # a rank that has nothing to write
            continue
        try:
            wire.put(address, f"{folder.name}/{path.name}", path)
        except OSError as error:
            words = error.strerror or str(error)
            raise MusterError(f"no copy of rank {rank}'s part was made at {address.host}: {words}") from error


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 7` or `ranks 0, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
