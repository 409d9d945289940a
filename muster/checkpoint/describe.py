"""Description and verification of directories with a model's weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from muster.checkpoint.checkpoint_dir import list_checkpoints
from muster.checkpoint.formats.native import NativeTensors
from muster.checkpoint.model_directory import ModelDirectory, model_weights, open_directory
from muster.checkpoint.statistics import statistics
from muster.checkpoint.tensors import TensorMeta, split_into_boxes
from muster.config.load_config import plan_from_tree
from muster.spec.errors import ConfigError, InfeasibleError, MusterError
from muster.spec.plan_name import format_plan_name
from muster.spec.suggest import did_you_mean


def describe(
    path: Path,
    with_tensors: bool = False,
    names: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the facts of the directory at `path` as JSON, optionally with every tensor, or statistics of some.

    `report` and errors are those of `open_directory`; raises ConfigError for a tensor that doesn't exist, too.
    """
    directory = open_directory(path, report=report)
    metas = directory.stored.metas
    for name in names:
        if name not in metas:
            raise ConfigError(f"{directory.folder} holds no tensor {name}{did_you_mean(name, metas)}")
    manifest, model = directory.manifest, directory.model
    facts: dict[str, Any] = {
        "version": 1,
        "path": str(directory.folder),
        "format": directory.format,
        "step": directory.step,
        "plan": _plan_name(directory.plan),
        "model": None if model is None else {"name": model.name, "parameters": model.num_parameters},
        "written_by": None if manifest is None else {"muster": manifest.muster, "torch": manifest.torch},
        "counters": dict(directory.counters),
        "files": _files(directory),
        "groups": _groups(metas),
    }
    if with_tensors:
        facts["tensors"] = {name: _tensor_facts(meta) for name, meta in metas.items()}
    if names:
        facts["statistics"] = {
            name: _tensor_facts(metas[name]) | asdict(statistics(directory.stored, name)) for name in names
        }
    return facts


def _plan_name(plan: Mapping[str, Any] | None) -> str | None:
    return None if not plan else format_plan_name(plan_from_tree(plan, "the checkpoint's plan"))


def _files(directory: ModelDirectory) -> dict[str, int]:
    if directory.manifest is not None:
        return dict(directory.manifest.files)
    files = sorted(path for path in directory.folder.rglob("*") if path.is_file())
    return {path.relative_to(directory.folder).as_posix(): path.stat().st_size for path in files}


def _groups(metas: Mapping[str, TensorMeta]) -> dict[str, dict[str, Any]]:
    """Return tensors, elements and bytes by the first part of the name (`model`, `optim`), and by dtype within it."""
    groups: dict[str, dict[str, Any]] = {}
    for name, meta in metas.items():
        first = name.replace(".", "/").partition("/")[0]
        key = first if first in ("model", "optim") and "/" in name else "all"
        group = groups.setdefault(key, {"tensors": 0, "bytes": 0, "numbers": {}})
        dtype = str(meta.dtype).removeprefix("torch.")
        group["tensors"] += 1
        group["bytes"] += meta.nbytes
        group["numbers"][dtype] = group["numbers"].get(dtype, 0) + meta.numel
    return groups


def _tensor_facts(meta: TensorMeta) -> dict[str, Any]:
    return {"shape": list(meta.shape), "dtype": str(meta.dtype).removeprefix("torch."), "bytes": meta.nbytes}


# ----------------------------------------------------------------------------------------------------------------------
# Verification


@dataclass
class VerifiedDirectory:
    """Result of reading all of a directory."""

    path: str
    format: str = "unknown"
    tensors: int = 0
    pieces: int = 0
    """Number of chunks with a checksum; in a format without checksums, of tensors that could be read."""
    bytes: int = 0
    checksums: bool = False
    problems: list[str] = field(default_factory=list)


def verify(path: Path, set_total: Callable[[int], None], progress: Callable[[int], None]) -> list[VerifiedDirectory]:
    """Read all tensors of the directory at `path`, or of each checkpoint of a run.

    `set_total` receives the bytes of each directory before it is read, `progress` those of each part. Raises
    ConfigError if there is nothing to verify.
    """
    folders = list_checkpoints(path / "checkpoints") or list_checkpoints(path) or [path]
    return [_verify_one(folder, set_total, progress) for folder in folders]


def _verify_one(folder: Path, set_total: Callable[[int], None], progress: Callable[[int], None]) -> VerifiedDirectory:
    checked = VerifiedDirectory(str(folder))
    try:
        directory = open_directory(folder)
        checked.format, checked.tensors = directory.format, len(directory.stored.metas)
        set_total(sum(meta.nbytes for meta in directory.stored.metas.values()))
        if isinstance(directory.stored, NativeTensors):
            _check_chunks(directory.stored, checked, progress)
        else:
            _check_readable(directory, checked, progress)
        if directory.model is not None:
            model_weights(directory)
    except (ConfigError, InfeasibleError):
        raise
    except MusterError as error:
        checked.problems.append(str(error))
    return checked


def _check_chunks(stored: NativeTensors, checked: VerifiedDirectory, progress: Callable[[int], None]) -> None:
    checked.checksums = True
    damage: dict[str, dict[str, str]] = {}
    """Damaged tensors of each file, with a message about one of their chunks."""
    for name in stored.metas:
        for chunk in stored.manifest.chunks(name):
            if problem := stored.find_chunk_damage(name, chunk):
                damage.setdefault(chunk.file, {})[name] = problem
            checked.pieces += 1
            checked.bytes += chunk.nbytes
            progress(chunk.nbytes)
    for problems in damage.values():
        first_problem = next(iter(problems.values()))
        others = len(problems) - 1
        more = f"; {others} more of its tensors can't be read" if others else ""
        checked.problems.append(f"{first_problem}{more}")


def _check_readable(directory: ModelDirectory, checked: VerifiedDirectory, progress: Callable[[int], None]) -> None:
    for name, meta in directory.stored.metas.items():
        try:
            for box in split_into_boxes(meta):
                progress(directory.stored.read(name, box).nbytes)
        except MusterError as error:
            checked.problems.append(str(error))
        checked.pieces += 1
        checked.bytes += meta.nbytes
