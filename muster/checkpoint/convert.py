"""Conversion of one format of model directory to another, a part of a tensor at a time.

The new directory appears as a whole or not at all.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from muster.checkpoint.adapters import merged_model, merged_weights
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
from muster.checkpoint.formats.peft import ADAPTER_WEIGHTS, adapter_config, peft_names, write_adapter_config
from muster.checkpoint.hf_mapping import CastTensors, to_hf
from muster.checkpoint.initial_weights import function_note
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.model_directory import (
    AUXILIARY_FOLDER,
    DCP_SIDECAR,
    Format,
    ModelDirectory,
    auxiliary_folder,
    model_weights,
    open_directory,
    read_json,
    state_tensors,
)
from muster.checkpoint.remapped import RenamedTensors
from muster.checkpoint.tensors import TensorSource
from muster.config.file_writer import fsync_directory
from muster.config.freezing import matches_pattern
from muster.config.load_config import load_run_config
from muster.config.migrations import migrate
from muster.data.tokenizer import Tokenizer, load_tokenizer
from muster.data.tokenizer_files import (
    GENERATION_CONFIG_FILE,
    copy_files,
    read_object,
    settle_exported_tokenizer,
    special_token_ids,
)
from muster.interop.hf_config import hf_config_from_spec
from muster.spec.adapters import ADAPTER_FREEZE, is_adapter
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec, parameter_shapes


@dataclass(frozen=True)
class ConversionOptions:
    """Format and options of the directory to write."""

    target_format: Format
    dtype: str | None = None
    """Torch name of the weights' dtype; None: as they are stored."""
    max_shard_bytes: int = 5_000_000_000
    """Largest file; in a Hugging Face directory a single larger tensor still goes into one file."""
    tokenizer: Path | None = None
    """Directory with tokenizer files for a Hugging Face directory; None: those of the run or of the source."""
    model: ModelSpec | None = None
    """Model in a source directory that doesn't describe it."""
    residual: Literal["standard", "ladder"] | None = None
    """Residual stream of the model that is written; None: that of the source."""


@dataclass(frozen=True)
class ConversionResult:
    """Facts of the directory that was written."""

    source: ModelDirectory
    tensors: int
    parameters: int
    """Number of the model's parameters."""
    nbytes: int
    """Bytes of all tensors."""
    dtype: str
    """Torch name of the weights' dtype."""
    files: tuple[str, ...]
    tokenizer: str | None
    """Origin of the tokenizer files; None if there are none."""
    note: str | None = None
    """Sentence where the model that was written is another function of the same weights."""


def convert(
    source: Path,
    target: Path,
    options: ConversionOptions,
    set_total: Callable[[int], None],
    progress: Callable[[int], None],
    report: Callable[[str], None] | None = None,
) -> ConversionResult:
    """Write the directory at `source` in another format to `target`, which must not exist.

    `set_total` receives the bytes to write, `progress` those of each part as it is written, `report` what
    `open_directory` reports. Raises ConfigError for a wrong request, InfeasibleError for a model that the other format
    can't express, MusterError if a file is damaged or can't be written; then `target` doesn't exist.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: give a directory that doesn't")
    directory = open_directory(source, options.model, report)
    found = directory.model
    if options.residual is not None:
        directory = _with_residual(directory, options.residual)
    tensors = _tensors_to_write(directory, options)
    if not tensors.metas:
        raise MusterError(f"{source} holds no tensors")
    set_total(sum(meta.nbytes for meta in tensors.metas.values()))
    with _atomic_folder(target) as tmp_dir:
        writers = {"hf": _write_hf, "muster": _write_native, "dcp": _write_dcp, "peft": partial(_write_peft, target)}
        tokenizer = writers[options.target_format](tmp_dir, directory, tensors, options, progress)
        files = tuple(sorted(path.relative_to(tmp_dir).as_posix() for path in tmp_dir.rglob("*") if path.is_file()))
    weights = {
        n: meta
        for n, meta in tensors.metas.items()
        if options.target_format in ("hf", "peft") or n.startswith(("model/", "model."))
    }
    return ConversionResult(
        source=directory,
        tensors=len(tensors.metas),
        parameters=sum(meta.numel for meta in weights.values()),
        nbytes=sum(meta.nbytes for meta in tensors.metas.values()),
        dtype=dominant_dtype(weights),
        files=files,
        tokenizer=tokenizer,
        note=None if directory.model is None else function_note(found, directory.model),
    )


def _with_residual(directory: ModelDirectory, residual: str) -> ModelDirectory:
    """Return the directory as one of a model with another residual stream, whose weights have the same names and
    shapes. Raises ConfigError where there is no such model."""
    if directory.model is None:
        raise ConfigError(f"{directory.folder} doesn't describe its model: give --model, such as --model tiny")
    try:
        model = ModelSpec.model_validate(directory.model.model_dump() | {"residual": residual})
    except ValidationError as error:
        raise ConfigError(f"--residual {residual}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    return replace(directory, model=model)


def _tensors_to_write(directory: ModelDirectory, options: ConversionOptions) -> TensorSource:
    """Return the tensors to write, by their new names."""
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    if options.target_format in ("hf", "peft"):
        is_adapter = options.target_format == "peft"
        weights = model_weights(directory) if is_adapter else merged_weights(directory)
        assert directory.model is not None
        kind = _model_type(_auxiliary_folder(directory, options))
        weights = CastTensors(weights, dtype) if dtype else weights
        if is_adapter:
            return RenamedTensors(weights, {theirs: own for own, theirs in _names_in_peft(directory, kind).items()})
        return to_hf(weights, merged_model(directory.model), kind)
    state = state_tensors(directory)
    if dtype is not None:
        state = CastTensors(state, dtype, prefix="model/")
    if options.target_format == "muster":
        return state
    return RenamedTensors(state, {name.replace("/", ".", 1): name for name in state.metas})


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside the target, which becomes the target on success and is removed on failure."""
    tmp_dir = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        tmp_dir = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        tmp_dir.chmod(0o777 & ~_umask())
        yield tmp_dir
        fsync_directory(tmp_dir)
        os.rename(tmp_dir, target)
        fsync_directory(target.parent)
    except OSError as error:
        where = target if error.filename is None else error.filename
        raise MusterError(f"could not write {where}: {error.strerror or error}") from error
    finally:
        if tmp_dir is not None:
            shutil.rmtree(tmp_dir, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ----------------------------------------------------------------------------------------------------------------------
# Formats


def _write_native(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    info = {
        "plan": source.plan or {},
        "model": source.model.model_dump(mode="json") if source.model else {},
        "counters": source.counters,
        "run": _stored_run_config_of_model(source),
    }
    write_checkpoint(folder, tensors, source.step or 0, info, options.max_shard_bytes, progress)
    auxiliary = _auxiliary_folder(source, options)
    if auxiliary is not None:
        (folder / AUXILIARY_FOLDER).mkdir()
        copy_files(auxiliary, folder / AUXILIARY_FOLDER, (CONFIG_FILE, *AUXILIARY_FILES))
    return None if auxiliary is None else str(auxiliary)


def _write_dcp(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    from muster.checkpoint.formats.dcp_write import write_dcp  # torch.distributed.checkpoint takes a second to import

    write_dcp(folder, tensors, buffer_bytes(options.max_shard_bytes), progress)
    sidecar = {"version": 1, "step": source.step or 0, "plan": source.plan, "counters": source.counters}
    model = {"model": _with_context(source, source.model).model_dump(mode="json")} if source.model else {}
    write_json(folder / DCP_SIDECAR, sidecar | model)
    return None


def _with_context(source: ModelDirectory, model: ModelSpec) -> ModelSpec:
    """Return the model with the length of its context, which for a run is that of its samples."""
    context = model.max_positions or _run_config_of(source).get("train", {}).get("seq_len")
    return model.model_copy(update={"max_positions": context})


def _write_hf(
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    assert source.model is not None
    run = _run_config_of(source)
    spec = _with_context(source, merged_model(source.model))
    auxiliary = _auxiliary_folder(source, options)
    config = hf_config_from_spec(spec, _model_type(auxiliary))
    tokenizer = None
    generation = {}
    if auxiliary is not None:
        tokenizer = str(auxiliary)
        copy_files(auxiliary, folder, AUXILIARY_FILES)
        if (auxiliary / CONFIG_FILE).exists() and (theirs := read_json(auxiliary / CONFIG_FILE)).get(
            "model_type"
        ) == config["model_type"]:
            config = {key: value for key, value in theirs.items() if key not in _REPLACED_CONFIG_KEYS} | config
        if run or options.tokenizer is not None:  # else it is what came with the weights, and stays so
            found = _load_tokenizer(auxiliary, run if options.tokenizer is None else {})
            generation = _special_token_ids(found, {**config, **read_object(folder / GENERATION_CONFIG_FILE)})
            config |= _special_token_ids(found, config)
            if found is not None:
                settle_exported_tokenizer(folder, found, config)
    elif run.get("data", {}).get("tokenizer") == "bytes":
        tokenizer = "bytes"
        for name, content in byte_tokenizer_files(spec.max_positions).items():
            write_json(folder / name, content)
        config |= {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
    else:
        config |= dict.fromkeys(_SPECIAL_IDS)
    config |= {"dtype": dominant_dtype(tensors.metas), "torch_dtype": dominant_dtype(tensors.metas)}
    write_json(folder / CONFIG_FILE, config)
    if present := read_object(folder / GENERATION_CONFIG_FILE):
        if generation:
            write_json(folder / GENERATION_CONFIG_FILE, present | generation)
    else:
        special = {key: config[key] for key in _SPECIAL_IDS if key in config}
        write_json(folder / GENERATION_CONFIG_FILE, {"_from_model_config": True, **special})
    write_weights(folder, tensors, options.max_shard_bytes, progress)
    return tokenizer


def _names_in_peft(source: ModelDirectory, kind: str | None) -> dict[str, str]:
    """Return the names of a model's adapters in PEFT. Raises ConfigError where it has none."""
    assert source.model is not None
    if source.model.adapter is None:
        raise ConfigError(f"{source.folder} holds no adapters, which a PEFT directory is made of: give --to hf")
    if source.model.adapter.changes_weights:
        raise ConfigError(
            f"{source.folder} holds adapters of kind {source.model.adapter.kind}, which have changed the model's own"
            " weights: give --to hf"
        )
    return peft_names(source.model, kind)


def _write_peft(
    target: Path,
    folder: Path,
    source: ModelDirectory,
    tensors: TensorSource,
    options: ConversionOptions,
    progress: Callable[[int], None],
) -> str | None:
    """Write adapters; their base model is the Hugging Face directory that the run began with, or written beside them,
    into `base`: where there is none, or where the run changed it."""
    assert source.model is not None
    kind = _model_type(_auxiliary_folder(source, options))
    began = _run_config_of(source).get("train", {}).get("init_from")
    base = began if source.base is None else str(source.base.folder)
    tokenizer = None
    is_changed = source.base is None and _changes_base(source)
    if base is None or is_changed or not (Path(base) / CONFIG_FILE).exists():
        base = str(target.resolve() / "base")
        plain = merged_model(source.model)
        weights = to_hf(RenamedTensors(model_weights(source), {n: n for n, _ in parameter_shapes(plain)}), plain, kind)
        (folder / "base").mkdir()
        tokenizer = _write_hf(folder / "base", replace(source, model=plain), weights, options, lambda _: None)
    write_adapter_config(folder, adapter_config(source.model, base, kind))
    write_weights(folder, tensors, options.max_shard_bytes, progress, ADAPTER_WEIGHTS)
    return tokenizer


def _changes_base(source: ModelDirectory) -> bool:
    """Return True if the run's base model isn't the one that it began with: adapters took over a part of it, or
    patterns of `optim.freeze` let it train others of its parameters beside the adapters."""
    assert source.model is not None
    if source.model.adapter is not None and source.model.adapter.kind == "pissa":
        return True
    patterns = tuple(_run_config_of(source).get("optim", {}).get("freeze", ADAPTER_FREEZE))
    names = (name for name, _ in parameter_shapes(source.model))
    return not all(is_adapter(name) or matches_pattern(patterns, name) for name in names)


def _model_type(folder: Path | None) -> str | None:
    """Return the model_type of the model that came with other files; None where they don't tell."""
    return None if folder is None else read_object(folder / CONFIG_FILE).get("model_type")


_REPLACED_CONFIG_KEYS = ("rope_parameters", "quantization_config", "transformers_version")
"""Keys of the source's config.json that aren't kept: ours expresses them otherwise, or they no longer hold."""


def _load_tokenizer(folder: Path, run: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer in a folder, as the run used it; None if it or its end-of-document token is unknown."""
    data = run.get("data", {})
    main = folder / Path(data.get("tokenizer", "")).name
    try:
        return load_tokenizer(str(main if main.is_file() else folder), data.get("eos_token"), data.get("add_bos"))
    except MusterError:
        return None


def _special_token_ids(tokenizer: Tokenizer | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special ids to write, for a tokenizer that came with the configuration `given`.

    Where they are unknown they are null, since `transformers` fills in others for those that are missing.
    """
    if tokenizer is None:
        return {key: given.get(key) for key in _SPECIAL_IDS}
    return special_token_ids(tokenizer, given)


_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _run_config_of(source: ModelDirectory) -> dict[str, Any]:
    """Return the configuration of the run that wrote a checkpoint; empty if there is none."""
    if run := _stored_run_config(source):
        return run
    if source.run is None:
        return {}
    return load_run_config(None, source.run / "config.yaml", []).config.model_dump(mode="json")


def _stored_run_config(source: ModelDirectory) -> dict[str, Any]:
    """Return the run configuration in a checkpoint's manifest, in today's names; empty if there is none."""
    if source.manifest is None or not source.manifest.run:
        return {}
    return migrate("run", source.manifest.run, str(source.folder / MANIFEST))


def _stored_run_config_of_model(source: ModelDirectory) -> dict[str, Any]:
    """Return the same, with the residual stream of the model that is written."""
    run = _stored_run_config(source)
    if source.model is None or not isinstance(run.get("model"), dict):
        return run
    return run | {"model": run["model"] | {"residual": source.model.residual}}


def _auxiliary_folder(source: ModelDirectory, options: ConversionOptions) -> Path | None:
    """Return the folder with the tokenizer and other files for a Hugging Face directory; None if there is none."""
    if options.tokenizer is not None:
        if not any((options.tokenizer / name).exists() for name in AUXILIARY_FILES):
            raise ConfigError(f"{options.tokenizer} has no tokenizer files: expected tokenizer.json or the like")
        return options.tokenizer
    if (found := auxiliary_folder(source)) is not None or source.run is None:
        return found
    named = Path(load_run_config(None, source.run / "config.yaml", []).config.data.tokenizer)
    place = named if named.is_dir() else named.parent
    return place if named.is_dir() or (named.is_file() and named.name in AUXILIARY_FILES) else None
