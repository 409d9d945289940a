"""One kind of directory made into another, a chunk of a tensor at a time; it appears as a whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.directory import ABOUT, Directory, Format, open_directory, read_json, state_of, weights_of
from muster.checkpoint.formats.huggingface import (
    CONFIG,
    SIDE_FILES,
    byte_tokenizer,
    chunk_bytes,
    dtype_names,
    write_json,
    write_weights,
)
from muster.checkpoint.formats.stored import write_checkpoint
from muster.checkpoint.linked import RenamedTensors
from muster.checkpoint.mapping import CastTensors, to_hf
from muster.checkpoint.tensors import Tensors
from muster.spec.errors import ConfigError, MusterError
from muster.spec.hf_config import hf_config
from muster.spec.load import load_run
from muster.spec.model import ModelSpec
from muster.spec.write import sync_folder

SIDE_FOLDER = "huggingface"
"""In a Muster checkpoint that came from a Hugging Face directory: what lay there beside the weights."""


@dataclass(frozen=True)
class Conversion:
    """How a directory is to be written."""

    to: Format
    dtype: str | None = None
    """Of the weights, as torch calls it; None: as they are stored."""
    max_shard_bytes: int = 5_000_000_000
    """Of one file; a single tensor may be larger in a Hugging Face directory."""
    tokenizer: Path | None = None
    """A directory with the tokenizer files for a Hugging Face directory; None: the run's own, or what came along."""
    model: ModelSpec | None = None
    """What is in a directory that doesn't say it."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    source: Directory
    tensors: int
    parameters: int
    """Numbers in the model's weights."""
    nbytes: int
    """Of all tensors."""
    dtype: str
    """Of the weights."""
    files: tuple[str, ...]
    tokenizer: str | None
    """Where the tokenizer files came from; None where there are none."""


def convert(
    source: Path, target: Path, how: Conversion, begin: Callable[[int], None], progress: Callable[[int], None]
) -> Converted:
    """Writes what is at `source` as another kind of directory to `target`, which must not be there.

    `begin` receives the bytes that will be written, `progress` those of each chunk that was. Raises ConfigError for a
    wrong request, InfeasibleError for a model that the other kind has no words for, MusterError where a file is damaged
    or can't be written; `target` is then not there.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already: expected a directory that is not, to write a new one")
    directory = open_directory(source, how.model)
    tensors = _tensors(directory, how)
    if not tensors.kinds:
        raise MusterError(f"{source} holds no tensors")
    begin(sum(kind.nbytes for kind in tensors.kinds.values()))
    with _appearing(target) as beside:
        tokenizer = {"hf": _write_hf, "muster": _write_muster, "dcp": _write_dcp}[how.to](
            beside, directory, tensors, how, progress
        )
        files = tuple(sorted(path.relative_to(beside).as_posix() for path in beside.rglob("*") if path.is_file()))
    weights = {n: kind for n, kind in tensors.kinds.items() if how.to == "hf" or n.startswith(("model/", "model."))}
    return Converted(
        source=directory,
        tensors=len(tensors.kinds),
        parameters=sum(kind.numel for kind in weights.values()),
        nbytes=sum(kind.nbytes for kind in tensors.kinds.values()),
        dtype=dtype_names(weights),
        files=files,
        tokenizer=tokenizer,
    )


def _tensors(directory: Directory, how: Conversion) -> Tensors:
    """What will be written, by the names that it will have."""
    dtype = None if how.dtype is None else getattr(torch, how.dtype)
    if how.to == "hf":
        weights = weights_of(directory)
        assert directory.model is not None
        return to_hf(CastTensors(weights, dtype) if dtype else weights, directory.model)
    state = state_of(directory)
    if dtype is not None:
        state = CastTensors(state, dtype, only="model/")
    if how.to == "muster":
        return state
    return RenamedTensors(state, {name.replace("/", ".", 1): name for name in state.kinds})


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside the target, which becomes the target when all went well and is removed otherwise."""
    beside = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        beside.chmod(0o777 & ~_umask())
        yield beside
        sync_folder(beside)
        os.rename(beside, target)
        sync_folder(target.parent)
    except OSError as error:
        where = target if error.filename is None else error.filename
        raise MusterError(f"could not write {where}: {error.strerror or error}") from error
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ----------------------------------------------------------------------------------------------------------------------
# The kinds


def _write_muster(
    folder: Path, source: Directory, tensors: Tensors, how: Conversion, progress: Callable[[int], None]
) -> str | None:
    manifest = source.manifest
    info = {
        "plan": source.plan or {},
        "model": source.model.model_dump(mode="json") if source.model else {},
        "counters": source.counters,
        "run": manifest.run if manifest is not None else {},
    }
    write_checkpoint(folder, tensors, source.step or 0, info, how.max_shard_bytes, progress)
    beside = _side_folder(source, how)
    if beside is not None:
        (folder / SIDE_FOLDER).mkdir()
        _copy_side_files(beside, folder / SIDE_FOLDER, (CONFIG, *SIDE_FILES))
    return None if beside is None else str(beside)


def _write_dcp(
    folder: Path, source: Directory, tensors: Tensors, how: Conversion, progress: Callable[[int], None]
) -> str | None:
    from muster.checkpoint.formats.dcp_write import write_dcp  # torch.distributed.checkpoint takes a second to import

    write_dcp(folder, tensors, chunk_bytes(how.max_shard_bytes), progress)
    about = {"version": 1, "step": source.step or 0, "plan": source.plan, "counters": source.counters}
    model = {"model": source.model.model_dump(mode="json")} if source.model else {}
    write_json(folder / ABOUT, about | model)
    return None


def _write_hf(
    folder: Path, source: Directory, tensors: Tensors, how: Conversion, progress: Callable[[int], None]
) -> str | None:
    assert source.model is not None
    run = _run_of(source)
    context = source.model.max_positions or run.get("train", {}).get("seq_len")
    spec = source.model.model_copy(update={"max_positions": context})
    config = hf_config(spec)
    beside, tokenizer = _side_folder(source, how), None
    if beside is not None:
        tokenizer = str(beside)
        _copy_side_files(beside, folder, SIDE_FILES)
        if (beside / CONFIG).exists() and (theirs := read_json(beside / CONFIG)).get("model_type") == config[
            "model_type"
        ]:
            config = {key: value for key, value in theirs.items() if key not in _OF_SHAPE} | config
    elif run.get("data", {}).get("tokenizer") == "bytes":
        tokenizer = "bytes"
        for name, content in byte_tokenizer(context).items():
            write_json(folder / name, content)
        config |= {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
    config |= {"dtype": dtype_names(tensors.kinds), "torch_dtype": dtype_names(tensors.kinds)}
    write_json(folder / CONFIG, config)
    if not (folder / "generation_config.json").exists():
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(folder / "generation_config.json", {"_from_model_config": True, **special})
    write_weights(folder, tensors, how.max_shard_bytes, progress)
    return tokenizer


_OF_SHAPE = ("rope_parameters", "quantization_config", "transformers_version")
"""Keys of a config.json that is brought along which ours says in other words, or that are no longer true."""


def _run_of(source: Directory) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint; empty where there is none."""
    if source.manifest is not None and source.manifest.run:
        return dict(source.manifest.run)
    if source.run is None:
        return {}
    return load_run(None, source.run / "config.yaml", []).config.model_dump(mode="json")


def _side_folder(source: Directory, how: Conversion) -> Path | None:
    """Where the files of a Hugging Face directory that belong to the weights lie."""
    if how.tokenizer is not None:
        if not any((how.tokenizer / name).exists() for name in SIDE_FILES):
            raise ConfigError(f"there are no tokenizer files in {how.tokenizer}: expected tokenizer.json or the like")
        return how.tokenizer
    if source.format == "hf":
        return source.folder
    return folder if (folder := source.folder / SIDE_FOLDER).is_dir() else None


def _copy_side_files(place: Path, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (place / name).is_file():
            shutil.copyfile(place / name, folder / name)
