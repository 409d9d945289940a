"""Writing folders of `torch.distributed.checkpoint` through its own writer, chunk by chunk."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from muster.checkpoint.tensors import Tensors, chunks
from muster.spec.layout import Box


def write_dcp(folder: Path, tensors: Tensors, progress: Callable[[int], None]) -> None:
    """Makes `folder` one that `torch.distributed.checkpoint.load` opens, with all the tensors under their names.

    `progress` receives the bytes of each chunk that is written. Raises OSError, or what reading a tensor raises.
    """
    # One process and one thread: the writer then asks for one chunk at a time.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, overwrite=True)
    try:
        with warnings.catch_warnings():  # that one process alone saves is meant
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({}, storage_writer=writer, planner=_ChunkPlanner(tensors, progress), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


class _ChunkPlanner(SavePlanner):
    """Presents tensors on disk as the chunks of a state dict, each read when the writer wants its numbers."""

    def __init__(self, tensors: Tensors, progress: Callable[[int], None]) -> None:
        self._tensors, self._progress = tensors, progress
        self._boxes: dict[tuple[str, torch.Size], Box] = {}

    def set_up_planner(self, state_dict: dict, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, kind in self._tensors.kinds.items():
            for box in chunks(kind):
                start, size = torch.Size(box.start), torch.Size(box.size)
                self._boxes[name, start] = box
                chunk = ChunkStorageMetadata(start, size)
                data = TensorWriteData(chunk, TensorProperties(dtype=kind.dtype), torch.Size(kind.shape))
                items.append(WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data={name: (name,) for name in self._tensors.kinds})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name, start = write_item.index.fqn, write_item.index.offset
        assert start is not None
        tensor = self._tensors.read(name, self._boxes[name, start])
        self._progress(tensor.nbytes)
        return tensor
