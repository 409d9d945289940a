"""Reader of `torch.distributed.checkpoint` folders: a pickle `.metadata`, and `.distcp` files of `torch.save` parts.

The pickle is read by `formats.safe_unpickle`, so that no code of a foreign folder is run. Fields and names are those of
torch.distributed.checkpoint.metadata and .filesystem in PyTorch 2.1 to 2.13.
"""

import io
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from muster.checkpoint.formats.safe_unpickle import InertRecord, RefusedPickle, read_pickle
from muster.checkpoint.tensors import ArrayFile, TensorMeta, allocate
from muster.layout.tensor_layout import Box, intersect, slices_within
from muster.spec.errors import MusterError

METADATA = ".metadata"

_DTYPES = {name: dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)}


class _Size(tuple):
    """Stand-in for torch.Size, constructed from one sequence of lengths."""

    def __new__(cls, lengths: Any = ()) -> "_Size":
        return super().__new__(cls, (int(length) for length in lengths))


_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = (
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
)


def _record_type(module: str, name: str) -> type[InertRecord]:
    return type(name, (InertRecord,), {"__module__": module})


_METADATA_NAMES: dict[tuple[str, str], Any] = {
    **{key: _record_type(*key) for key in _RECORDS},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): lambda *_: OrderedDict(),
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "set"): set,
    ("builtins", "tuple"): tuple,
}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Box of a tensor, stored as one `torch.save` part of a file."""

    box: Box
    file: str
    offset: int
    length: int
    is_transformed: bool
    """True if the part is compressed or encrypted."""


class DcpTensors:
    """Tensors of a folder (a `TensorSource`); `other_objects` names the objects saved with them.

    Raises MusterError if the metadata is damaged, or can't be read without running code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / METADATA
        try:
            metadata = read_pickle(path.read_bytes(), _METADATA_NAMES)
            metas, self._chunks, self.other_objects = _parse_metadata(metadata)
        except OSError as error:
            raise MusterError(f"could not read {path}: {error.strerror}") from error
        except RefusedPickle as error:
            raise MusterError(f"{path} is not opened: {error}") from None
        except MusterError as error:
            raise MusterError(f"{path}: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise MusterError(f"{path} is damaged: it doesn't describe tensors") from error
        self.metas: Mapping[str, TensorMeta] = metas
        self._offsets: dict[_Chunk, int | None] = {}

    def read(self, name: str, box: Box) -> Tensor:
        meta = self.metas[name]
        out = allocate(box.size, meta.dtype)
        filled = 0
        for chunk in self._chunks[name]:
            if (common := intersect(box, chunk.box)) is not None:
                out[slices_within(common, box)] = self._read_chunk(name, chunk, meta.dtype, common)
                filled += common.numel
        if filled != box.numel:
            raise MusterError(f"{self.folder} holds only {filled} of {box.numel} wanted elements of {name}")
        return out

    def _read_chunk(self, name: str, chunk: _Chunk, dtype: torch.dtype, part: Box) -> Tensor:
        path = self.folder / chunk.file
        if chunk.is_transformed:
            raise MusterError(f"{path}: {name} is compressed or encrypted, which can't be read")
        meta = TensorMeta(chunk.box.size, dtype)
        inner = Box(tuple(a - b for a, b in zip(part.start, chunk.box.start, strict=True)), part.size)
        try:
            if chunk not in self._offsets:
                self._offsets[chunk] = _data_offset(path, chunk.offset, chunk.length, meta)
            if (offset := self._offsets[chunk]) is not None:
                return ArrayFile(path).read_box(offset, meta, inner)
            with open(path, "rb") as file:
                view = io.BufferedReader(_FileSlice(file, chunk.offset, chunk.length))
                whole = torch.load(view, map_location="cpu", weights_only=True)
        except OSError as error:
            raise MusterError(f"could not read {path}: {error.strerror}") from error
        except MusterError:
            raise
        except Exception as error:  # torch.load and zipfile raise many types
            raise MusterError(f"{path} is damaged: {name} can't be read from it") from error
        if not isinstance(whole, Tensor) or tuple(whole.shape) != meta.shape or whole.dtype != dtype:
            raise MusterError(f"{path} is damaged: {name} in it differs from its description in {METADATA}")
        return whole[inner.slices].clone()


def _parse_metadata(metadata: Any) -> tuple[dict[str, TensorMeta], dict[str, list[_Chunk]], list[str]]:
    metas: dict[str, TensorMeta] = {}
    chunks: dict[str, list[_Chunk]] = {}
    others: list[str] = []
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            others.append(name)
            continue
        properties = entry.properties
        dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.dtype
        metas[name], chunks[name] = TensorMeta(tuple(entry.size), dtype), []
    sizes = {
        (name, tuple(chunk.offsets)): tuple(chunk.sizes)
        for name, meta in metas.items()
        for chunk in metadata.state_dict_metadata[name].chunks
    }
    for index, info in metadata.storage_data.items():
        if index.fqn not in metas:
            continue
        start = tuple(getattr(index, "offset", None) or (0,) * len(metas[index.fqn].shape))
        coded = bool(getattr(info, "transform_descriptors", None))
        box = Box(start, sizes[index.fqn, start])
        chunks[index.fqn].append(_Chunk(box, str(info.relative_path), int(info.offset), int(info.length), coded))
    return metas, chunks, others


# ----------------------------------------------------------------------------------------------------------------------
# Parts as torch.save writes them: zip archives with uncompressed records


class _FileSlice(io.RawIOBase):
    """Byte range of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        into = memoryview(into).cast("B")[: max(self._length - self._at, 0)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(into)  # type: ignore[attr-defined]  # every binary file has it
        self._at += count
        return count


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """Tensor as `torch.save` describes it."""

    dtype: torch.dtype
    key: str
    """Key of the record that holds its elements."""
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _storage(pid: Any) -> tuple[torch.dtype, str]:
    """Return dtype and key of a persistent id ("storage", class, key, device, length)."""
    return pid[1], str(pid[2])


def _rebuild(storage: Any, start: int, shape: Any, stride: Any, *_: Any) -> _SavedTensor:
    return _SavedTensor(storage[0], storage[1], int(start), tuple(shape), tuple(stride))


def _rebuild_with_dtype(
    storage: Any, start: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any
) -> _SavedTensor:
    return _SavedTensor(dtype, storage[1], int(start), tuple(shape), tuple(stride))


_TENSOR_NAMES: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_with_dtype,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "UntypedStorage"): None,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{
        ("torch", f"{name}Storage"): dtype
        for name, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "BFloat16": torch.bfloat16,
            "Half": torch.float16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
        }.items()
    },
}


def _data_offset(path: Path, offset: int, length: int, meta: TensorMeta) -> int | None:
    """Return the offset in the file of a part's first element; None unless its elements are contiguous."""
    with open(path, "rb") as file, _FileSlice(file, offset, length) as view, zipfile.ZipFile(view) as archive:
        (described,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        try:
            saved = read_pickle(archive.read(described), _TENSOR_NAMES, _storage)
        except RefusedPickle:
            return None
        strides = tuple(torch.empty(meta.shape, device="meta").stride())
        if not isinstance(saved, _SavedTensor) or (saved.dtype, saved.shape, saved.stride) != (
            meta.dtype,
            meta.shape,
            strides,
        ):
            return None
        record = archive.getinfo(f"{described.removesuffix('data.pkl')}data/{saved.key}")
        first = saved.start * meta.dtype.itemsize
        if record.compress_type != zipfile.ZIP_STORED or record.file_size < first + meta.nbytes:
            return None
        view.seek(record.header_offset)
        header = view.read(30) or b""
        names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return offset + record.header_offset + 30 + names + first
