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

from muster.checkpoint.formats.huggingface import (
    AUXILIARY_FILES,
    CONFIG_FILE,
    buffer_bytes,
    byte_tokenizer_files,
    dominant_dtype,
    write_json,
    write_weights,
)
from muster.checkpoint.formats.native import write_checkpoint
from muster.checkpoint.hf_mapping import CastTensors, to_hf
from muster.checkpoint.model_directory import (
    DCP_SIDECAR,
    Format,
    ModelDirectory,
    model_weights,
    open_directory,
    read_json,
    state_tensors,
)
from muster.checkpoint.remapped import RenamedTensors
from muster.checkpoint.tensors import TensorSource
from muster.config.load_config import load_run_config
from muster.config.yaml_writer import fsync_directory
from muster.interop.hf_config import hf_config_from_spec
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec

AUXILIARY_FOLDER = "huggingface"
"""In a Muster checkpoint that came from a Hugging Face directory: what lay there beside the weights."""


@dataclass(frozen=True)
class ConversionOptions:
    """How a directory is to be written."""

    target_format: Format
    dtype: str | None = None
    """Of the weights, as torch calls it; None: as they are stored."""
    max_shard_bytes: int = 5_000_000_000
    """Of one file; a single tensor may be larger in a Hugging Face directory."""
    tokenizer: Path | None = None
    """A directory with the tokenizer files for a Hugging Face directory; None: the run's own, or what came along."""
    model: ModelSpec | None = None
    """What is in a directory that doesn't say it."""


@dataclass(frozen=True)
class ConversionResult:
    """What was written."""

    source: ModelDirectory
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
    source: Path,
    target: Path,
    options: ConversionOptions,
    set_total: Callable[[int], None],
    progress: Callable[[int], None],
) -> ConversionResult:
    """Writes what is at `source` as another kind of directory to `target`, which must not be there.

    `begin` receives the bytes that will be written, `progress` those of each chunk that was. Raises ConfigError for a
    wrong request, InfeasibleError for a model that the other kind has no words for, MusterError where a file is damaged
    or can't be written; `target` is then not there.
    """
    if target.exists():
        raise ConfigError(f"{target} is there already: expected a directory that is not, to write a new one")
    directory = open_directory(source, options.model)
    tensors = _tensors_to_write(directory, options)
    if not tensors.metas:
        raise MusterError(f"{source} holds no tensors")
    set_total(sum(meta.nbytes for meta in tensors.metas.values()))
    with _atomic_folder(target) as beside:
        tokenizer = {"hf": _write_hf, "muster": _write_native, "dcp": _write_dcp}[options.target_format](
            beside, directory, tensors, options, progress
        )
        files = tuple(sorted(path.relative_to(beside).as_posix() for path in beside.rglob("*") if path.is_file()))
    weights = {
        n: meta
        for n, meta in tensors.metas.items()
        if options.target_format == "hf" or n.startswith(("model/", "model."))
    }
    return ConversionResult(
        source=directory,
        tensors=len(tensors.metas),
        parameters=sum(meta.numel for meta in weights.values()),
        nbytes=sum(meta.nbytes for meta in tensors.metas.values()),
        dtype=dominant_dtype(weights),
        files=files,
        tokenizer=tokenizer,
    )


def _tensors_to_write(directory: ModelDirectory, options: ConversionOptions) -> TensorSource:
    """What will be written, by the names that it will have."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.target_format == "hf":
        weights = model_weights(directory)
        assert directory.model is not None
        return to_hf(CastTensors(weights, dtype) if dtype else weights, directory.model)
    state = state_tensors(directory)
    if dtype is not None:
        state = CastTensors(state, dtype, prefix="model/")
    if options.target_format == "muster":
        return state
    return RenamedTensors(state, {name.replace("/", ".", 1): name for name in state.metas})


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A folder beside the target, which becomes the target when all went well and is removed otherwise."""
    beside = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        beside.chmod(0o777 & ~_umask())
        yield beside
        fsync_directory(beside)
        os.rename(beside, target)
        fsync_directory(target.parent)
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


def _write_native(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    manifest = source.manifest
    info = {
        "plan": source.plan or {},
        "model": source.model.model_dump(mode="json") if source.model else {},
        "counters": source.counters,
        "run": manifest.run if manifest is not None else {},
    }
    write_checkpoint(folder, tensors, source.step or 0, info, options.max_shard_bytes, progress)
    beside = _auxiliary_folder(source, options)
    if beside is not None:
        (folder / AUXILIARY_FOLDER).mkdir()
        _copy_auxiliary_files(beside, folder / AUXILIARY_FOLDER, (CONFIG_FILE, *AUXILIARY_FILES))
    return None if beside is None else str(beside)


def _write_dcp(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    from muster.checkpoint.formats.dcp_write import write_dcp  # torch.distributed.checkpoint takes a second to import

    write_dcp(folder, tensors, buffer_bytes(options.max_shard_bytes), progress)
    about = {"version": 1, "step": source.step or 0, "plan": source.plan, "counters": source.counters}
    model = {"model": source.model.model_dump(mode="json")} if source.model else {}
    write_json(folder / DCP_SIDECAR, about | model)
    return None


def _write_hf(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    assert source.model is not None
    run = _run_config_of(source)
    context = source.model.max_positions or run.get("train", {}).get("seq_len")
    spec = source.model.model_copy(update={"max_positions": context})
    config = hf_config_from_spec(spec)
    beside, tokenizer = _auxiliary_folder(source, options), None
    if beside is not None:
        tokenizer = str(beside)
        _copy_auxiliary_files(beside, folder, AUXILIARY_FILES)
        if (beside / CONFIG_FILE).exists() and (theirs := read_json(beside / CONFIG_FILE)).get("model_type") == config[
            "model_type"
        ]:
            config = {key: value for key, value in theirs.items() if key not in _REPLACED_CONFIG_KEYS} | config
    elif run.get("data", {}).get("tokenizer") == "bytes":
        tokenizer = "bytes"
        for name, content in byte_tokenizer_files(context).items():
            write_json(folder / name, content)
        config |= {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
    config |= {"dtype": dominant_dtype(tensors.metas), "torch_dtype": dominant_dtype(tensors.metas)}
    write_json(folder / CONFIG_FILE, config)
    if not (folder / "generation_config.json").exists():
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(folder / "generation_config.json", {"_from_model_config": True, **special})
    write_weights(folder, tensors, options.max_shard_bytes, progress)
    return tokenizer


_REPLACED_CONFIG_KEYS = ("rope_parameters", "quantization_config", "transformers_version")
"""Keys of a config.json that is brought along which ours says in other words, or that are no longer true."""


def _run_config_of(source: ModelDirectory) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint; empty where there is none."""
    if source.manifest is not None and source.manifest.run:
        return dict(source.manifest.run)
    if source.run is None:
        return {}
    return load_run_config(None, source.run / "config.yaml", []).config.model_dump(mode="json")


def _auxiliary_folder(source: ModelDirectory, options: ConversionOptions) -> Path | None:
    """Where the files of a Hugging Face directory that belong to the weights lie."""
    if options.tokenizer is not None:
        if not any((options.tokenizer / name).exists() for name in AUXILIARY_FILES):
            raise ConfigError(
                f"there are no tokenizer files in {options.tokenizer}: expected tokenizer.json or the like"
            )
        return options.tokenizer
    if source.format == "hf":
        return source.folder
    return folder if (folder := source.folder / AUXILIARY_FOLDER).is_dir() else None


def _copy_auxiliary_files(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
