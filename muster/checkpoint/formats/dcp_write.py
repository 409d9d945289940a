"""Writer of `torch.distributed.checkpoint` folders, a part of a tensor at a time.

The folders are those of torch's FileSystemWriter, which however keeps everything it writes in memory until the end
(PyTorch 2.13).
"""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from muster.checkpoint.formats.dcp import METADATA
from muster.checkpoint.tensors import TensorSource, split_into_boxes

_FILE = "__0_0.distcp"


def write_dcp(folder: Path, tensors: TensorSource, max_box_bytes: int, progress: Callable[[int], None]) -> None:
    """Write all tensors under their names into `folder`, for `torch.distributed.checkpoint.load`.

    The index of this format is a pickle. At most `max_box_bytes` of a tensor are in memory at once; `progress` receives
    the bytes of each part that is written. Raises OSError, or what reading a tensor raises.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    with open(folder / _FILE, "wb") as out:
        for name, meta in tensors.metas.items():
            boxes = list(split_into_boxes(meta, max_box_bytes)) or [meta.whole]
            parts = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in boxes]
            described[name] = TensorStorageMetadata(TensorProperties(meta.dtype), torch.Size(meta.shape), parts)
            for index, (box, part) in enumerate(zip(boxes, parts, strict=True)):
                start, data = out.tell(), io.BytesIO()
                tensor = tensors.read(name, box).contiguous()
                torch.save(tensor, data)
                out.write(data.getbuffer())
                places[MetadataIndex(name, part.offsets, index)] = _StorageInfo(_FILE, start, out.tell() - start)
                progress(tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())
    # torch.distributed.checkpoint unflattens by these paths: {"model": {name: …}, "optim": {…}}.
    paths = {name: tuple(name.split(".", 1)) for name in described}
    with open(folder / METADATA, "wb") as out:
        pickle.dump(Metadata(described, planner_data=paths, storage_data=places), out)
        out.flush()
        os.fsync(out.fileno())
