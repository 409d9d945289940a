"""Which copies the memories of all nodes hold together, and how a rank reads from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.checkpoint.load import Files, fill
from muster.checkpoint.manifest import Manifest, RankList, merge
from muster.checkpoint.memory import wire
from muster.checkpoint.memory.copies import Copies, Gather
from muster.checkpoint.memory.folder import copied_ranks, is_whole
from muster.checkpoint.piece import Piece
from muster.checkpoint.write import file_name, list_path
from muster.spec.errors import MusterError

Key = tuple[int, str]
"""Copies that belong together: the step, and the launch that made them."""


@dataclass(frozen=True)
class Recalled:
    """Copies that make up a whole checkpoint."""

    step: int
    folder: Path
    """Where some of them lie, if there are any on this node."""
    manifest: Manifest
    files: Files

    def load(self, wanted: Sequence[Piece]) -> None:
        """Fills the wanted pieces. Raises MusterError."""
        fill(self.folder, self.manifest, wanted, files=self.files)


@dataclass(frozen=True)
class Survey:
    """What was found of copies; the same on all ranks but for where they lie."""

    newest: Recalled | None
    gaps: tuple[tuple[int, list[int]], ...]
    """Of later copies that aren't whole: the step, and the ranks whose part is lost."""


def survey(copies: Copies, gather: Gather[Any], most: int) -> Survey:
    """What there is of copies of steps up to `most`. All ranks call it; each checks some of its node's copies."""
    told: list[dict[Key, tuple[int, list[int]]]] = [dict(found) for found in gather(_whole_here(copies))]
    keys = sorted({key for found in told for key in found if key[0] <= most}, reverse=True)
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
        return Survey(_recalled(copies, gather, key, size, holders), tuple(gaps))
    return Survey(None, tuple(gaps))


def _whole_here(copies: Copies) -> list[tuple[Key, tuple[int, list[int]]]]:
    """By step and launch: how many ranks wrote, and those whose copies this rank has found whole."""
    neighbours = copies.nodes.own(copies.rank)
    index, count = neighbours.index(copies.rank), len(neighbours)
    found = []
    for folder, head in copies.folder.heads():
        own_share = copied_ranks(folder)[index::count]
        whole = [rank for rank in own_share if is_whole(folder, rank)]
        found.append(((head.about["step"], head.attempt), (head.world_size, whole)))
    return found


def _recalled(copies: Copies, gather: Gather[Any], key: Key, size: int, holders: dict[int, list[int]]) -> Recalled:
    """Makes a manifest of what the ranks that found copies whole read in them."""
    here = {head.attempt: (folder, head) for folder, head in copies.folder.heads() if head.about["step"] == key[0]}
    folder, head = here.get(key[1], (copies.folder.beside(key[0]), None))
    own = [rank for rank, found in holders.items() if found[0] == copies.rank]
    told = gather((head and head.about, {rank: list_path(folder, rank).read_text() for rank in own}))
    about = next(said for said, _ in told if said is not None)
    texts = {rank: text for _, lists in told for rank, text in lists.items()}
    listed = merge([RankList.model_validate_json(texts[rank]) for rank in range(size)])
    manifest = Manifest(**about, files=listed.files, tensors=listed.tensors)
    neighbours = copies.nodes.own(copies.rank)
    remote = {}
    for rank, found in holders.items():
        if not set(found) & set(neighbours):
            # Of the ranks on that node each serves some of those that ask.
            servers = copies.nodes.own(found[0])
            remote[file_name(rank)] = copies.addresses[servers[copies.rank % len(servers)]]
    return Recalled(key[0], folder, manifest, CopiedFiles(folder, manifest, remote, f"step-{key[0]:08}"))


class CopiedFiles(Files):
    """The files of a checkpoint some of which lie in other nodes' memory."""

    def __init__(self, folder: Path, manifest: Manifest, remote: dict[str, wire.Address], name: str) -> None:
        super().__init__(folder, manifest)
        self._remote, self._name = remote, name

    def read(self, number: int, offset: int, buffers: list[memoryview], name: str) -> None:
        file = self.path(number).name
        address = self._remote.get(file)
        if address is None:
            super().read(number, offset, buffers, name)
            return
        try:
            wire.get(address, f"{self._name}/{file}", offset, buffers)
        except OSError as error:
            raise MusterError(f"could not get {name} from {address.host}: {error.strerror or error}") from error
