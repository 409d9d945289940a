"""Recovery from in-memory checkpoints: the newest one that all nodes together hold, and reading from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from muster.checkpoint.in_memory import transport
from muster.checkpoint.in_memory.checkpointer import AllGather, InMemoryCheckpointer, send_to_partner
from muster.checkpoint.in_memory.directory import InMemoryDirectory, StepHeader, is_intact, stored_ranks
from muster.checkpoint.load import CheckpointFiles, fill_shards
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest, TensorIndex, merge_indexes
from muster.checkpoint.rank_file import rank_file_name, rank_index_path
from muster.spec.errors import MusterError

AttemptStep = tuple[int, str]
"""Key of parts that belong together: their step, and the launch that wrote them."""


@dataclass(frozen=True)
class RecoveredCheckpoint:
    """Complete in-memory checkpoint, spread over the nodes."""

    step: int
    folder: Path
    """Folder of the parts on this node, if there are any."""
    header: StepHeader
    manifest: Manifest
    files: "PeerFiles"
    only_here: tuple[int, ...]
    """Ranks whose part no other node holds, and which this rank has found intact."""

    def copy_to_other_nodes(self, checkpointer: InMemoryCheckpointer, all_gather: AllGather[Any]) -> None:
        """Send the parts that one node alone holds to the next node, so that the state survives the loss of any node
        before it is saved again; all ranks call it. Raises MusterError, as `send_to_partner` does."""
        if checkpointer.partner_address is None:
            return
        directory = checkpointer.directory
        if checkpointer.is_node_leader and (self.step, self.header.attempt) not in attempt_steps(directory):
            directory.remove_steps(lambda other: other == self.step)  # of another launch, whose parts must not mix
            directory.begin_parts(self.step, self.header)
        all_gather(None)
        for writer in self.only_here:
            send_to_partner(self.folder, writer, checkpointer.partner_address, transport.PART_TIMEOUT_S)

    def load(self, shards: Sequence[LocalShard]) -> None:
        """Fill this rank's shards. Raises MusterError."""
        fill_shards(self.folder, self.manifest, shards, files=self.files)


@dataclass(frozen=True)
class RecoverySearch:
    """Result of a search for in-memory checkpoints; the same on all ranks, apart from paths."""

    newest: RecoveredCheckpoint | None
    """Newest complete checkpoint."""
    incomplete: tuple[tuple[int, list[int]], ...]
    """Later checkpoints that are incomplete, as (step, ranks whose part is lost)."""


def find_newest(checkpointer: InMemoryCheckpointer, all_gather: AllGather[Any], max_step: int) -> RecoverySearch:
    """Find the newest complete in-memory checkpoint up to `max_step`.

    All ranks call it together; each verifies the checksums of some of its node's parts.
    """
    intact_by_rank: list[dict[AttemptStep, tuple[int, list[int]]]] = [
        dict(found) for found in all_gather(_intact_on_node(checkpointer))
    ]
    keys = sorted({key for found in intact_by_rank for key in found if key[0] <= max_step}, reverse=True)
    incomplete = []
    for key in keys:
        world_size = max(found[key][0] for found in intact_by_rank if key in found)
        holders: dict[int, list[int]] = {}
        """Ranks that found the part of each writing rank intact."""
        for rank, found in enumerate(intact_by_rank):
            for writer in found.get(key, (world_size, []))[1]:
                holders.setdefault(writer, []).append(rank)
        if missing := [rank for rank in range(world_size) if rank not in holders]:
            incomplete.append((key[0], missing))
            continue
        newest = _assemble(checkpointer, all_gather, key, world_size, holders)
        return RecoverySearch(newest, tuple(incomplete))
    return RecoverySearch(None, tuple(incomplete))


def _intact_on_node(checkpointer: InMemoryCheckpointer) -> list[tuple[AttemptStep, tuple[int, list[int]]]]:
    """Return, by step and launch, the number of ranks that wrote, and those whose parts this rank found intact.

    The ranks of a node divide its parts among themselves.
    """
    neighbours = checkpointer.node_groups.ranks_on_node_of(checkpointer.rank)
    index = neighbours.index(checkpointer.rank)
    found = []
    for folder, header in checkpointer.directory.step_headers():
        share = stored_ranks(folder)[index :: len(neighbours)]
        intact = [rank for rank in share if is_intact(folder, rank)]
        found.append(((header.about["step"], header.attempt), (header.world_size, intact)))
    return found


def _assemble(
    checkpointer: InMemoryCheckpointer,
    all_gather: AllGather[Any],
    key: AttemptStep,
    world_size: int,
    holders: dict[int, list[int]],
) -> RecoveredCheckpoint:
    """Merge the indexes of all parts into a manifest; each part's is sent by the first rank that found it intact."""
    local = attempt_steps(checkpointer.directory)
    folder, own_header = local.get(key, (checkpointer.directory.tmp_dir(key[0]), None))
    to_send = [writer for writer, ranks in holders.items() if ranks[0] == checkpointer.rank]
    indexes = {writer: rank_index_path(folder, writer).read_text() for writer in to_send}
    gathered = all_gather((own_header and own_header.about, indexes))
    about = next(fields for fields, _ in gathered if fields is not None)
    header = StepHeader(attempt=key[1], world_size=world_size, about=about)
    texts = {writer: text for _, sent in gathered for writer, text in sent.items()}
    merged = merge_indexes([TensorIndex.model_validate_json(texts[rank]) for rank in range(world_size)])
    manifest = Manifest(**about, files=merged.files, tensors=merged.tensors)
    neighbours = checkpointer.node_groups.ranks_on_node_of(checkpointer.rank)
    remote = {}
    for writer, ranks in holders.items():
        if not set(ranks) & set(neighbours):
            # Spread requests over the ranks of that node.
            servers = checkpointer.node_groups.ranks_on_node_of(ranks[0])
            remote[rank_file_name(writer)] = checkpointer.addresses[servers[checkpointer.rank % len(servers)]]
    files = PeerFiles(folder, manifest, remote, f"step-{key[0]:08}")
    only_here = tuple(writer for writer, ranks in holders.items() if ranks == [checkpointer.rank])
    return RecoveredCheckpoint(key[0], folder, header, manifest, files, only_here)


def attempt_steps(directory: InMemoryDirectory) -> dict[AttemptStep, tuple[Path, StepHeader]]:
    """Return folder and header of each step that is stored on this node."""
    return {(header.about["step"], header.attempt): (folder, header) for folder, header in directory.step_headers()}


class PeerFiles(CheckpointFiles):
    """Files of a checkpoint, some of which are in the memory of other nodes."""

    def __init__(self, folder: Path, manifest: Manifest, remote: dict[str, transport.PeerAddress], name: str) -> None:
        super().__init__(folder, manifest)
        self._remote, self._name = remote, name
        self.received_bytes = 0
        """Bytes that came from other nodes."""
        self._lock = Lock()

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
        with self._lock:
            self.received_bytes += sum(len(buffer) for buffer in buffers)
