"""Which copies the memories of all nodes hold together, and how a rank reads from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.checkpoint.in_memory import transport
from muster.checkpoint.in_memory.checkpointer import AllGather, InMemoryCheckpointer
from muster.checkpoint.in_memory.directory import is_intact, stored_ranks
from muster.checkpoint.load import CheckpointFiles, fill_shards
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest, TensorIndex, merge_indexes
from muster.checkpoint.rank_file import rank_file_name, rank_index_path
from muster.spec.errors import MusterError

AttemptStep = tuple[int, str]
"""Copies that belong together: the step, and the launch that made them."""


@dataclass(frozen=True)
class RecoveredCheckpoint:
    """Copies that make up a whole checkpoint."""

    step: int
    folder: Path
    """Where some of them lie, if there are any on this node."""
    manifest: Manifest
    files: CheckpointFiles

    def load(self, shards: Sequence[LocalShard]) -> None:
        """Fills the wanted pieces. Raises MusterError."""
        fill_shards(self.folder, self.manifest, shards, files=self.files)


@dataclass(frozen=True)
class RecoverySearch:
    """What was found of copies; the same on all ranks but for where they lie."""

    newest: RecoveredCheckpoint | None
    incomplete: tuple[tuple[int, list[int]], ...]
    """Of later copies that aren't whole: the step, and the ranks whose part is lost."""


def find_newest(checkpointer: InMemoryCheckpointer, all_gather: AllGather[Any], max_step: int) -> RecoverySearch:
    """What there is of copies of steps up to `most`. All ranks call it; each checks some of its node's copies."""
    told: list[dict[AttemptStep, tuple[int, list[int]]]] = [
        dict(found) for found in all_gather(_intact_on_node(checkpointer))
    ]
    keys = sorted({key for found in told for key in found if key[0] <= max_step}, reverse=True)
    gaps = []
    for key in keys:
        holders: dict[int, list[int]] = {}
        size = max(found[key][0] for found in told if key in found)
        for rank, found in enumerate(told):
            for copied in found.get(key, (size, []))[1]:
                holders.setdefault(copied, []).append(rank)
        if missing := [rank for rank in range(size) if rank not in holders]:
            gaps.append((key[0], missing))
            continue
        return RecoverySearch(_assemble(checkpointer, all_gather, key, size, holders), tuple(gaps))
    return RecoverySearch(None, tuple(gaps))


def _intact_on_node(checkpointer: InMemoryCheckpointer) -> list[tuple[AttemptStep, tuple[int, list[int]]]]:
    """By step and launch: how many ranks wrote, and those whose copies this rank has found whole."""
    neighbours = checkpointer.node_groups.ranks_on_node_of(checkpointer.rank)
    index, count = neighbours.index(checkpointer.rank), len(neighbours)
    found = []
    for folder, head in checkpointer.directory.step_headers():
        own_share = stored_ranks(folder)[index::count]
        whole = [rank for rank in own_share if is_intact(folder, rank)]
        found.append(((head.about["step"], head.attempt), (head.world_size, whole)))
    return found


def _assemble(
    checkpointer: InMemoryCheckpointer,
    all_gather: AllGather[Any],
    key: AttemptStep,
    size: int,
    holders: dict[int, list[int]],
) -> RecoveredCheckpoint:
    """Makes a manifest of what the ranks that found copies whole read in them."""
    here = {
        head.attempt: (folder, head)
        for folder, head in checkpointer.directory.step_headers()
        if head.about["step"] == key[0]
    }
    folder, head = here.get(key[1], (checkpointer.directory.tmp_dir(key[0]), None))
    own = [rank for rank, found in holders.items() if found[0] == checkpointer.rank]
    told = all_gather((head and head.about, {rank: rank_index_path(folder, rank).read_text() for rank in own}))
    about = next(said for said, _ in told if said is not None)
    texts = {rank: text for _, lists in told for rank, text in lists.items()}
    listed = merge_indexes([TensorIndex.model_validate_json(texts[rank]) for rank in range(size)])
    manifest = Manifest(**about, files=listed.files, tensors=listed.tensors)
    neighbours = checkpointer.node_groups.ranks_on_node_of(checkpointer.rank)
    remote = {}
    for rank, found in holders.items():
        if not set(found) & set(neighbours):
            # Of the ranks on that node each serves some of those that ask.
            servers = checkpointer.node_groups.ranks_on_node_of(found[0])
            remote[rank_file_name(rank)] = checkpointer.addresses[servers[checkpointer.rank % len(servers)]]
    return RecoveredCheckpoint(key[0], folder, manifest, PeerFiles(folder, manifest, remote, f"step-{key[0]:08}"))


class PeerFiles(CheckpointFiles):
    """The files of a checkpoint some of which lie in other nodes' memory."""

    def __init__(self, folder: Path, manifest: Manifest, remote: dict[str, transport.PeerAddress], name: str) -> None:
        super().__init__(folder, manifest)
        self._remote, self._name = remote, name

    def read(self, number: int, offset: int, buffers: list[memoryview], name: str) -> None:
        file = self.path(number).name
        address = self._remote.get(file)
        if address is None:
            super().read(number, offset, buffers, name)
            return
        try:
            transport.get(address, f"{self._name}/{file}", offset, buffers)
        except OSError as error:
            raise MusterError(f"could not get {name} from {address.host}: {error.strerror or error}") from error
