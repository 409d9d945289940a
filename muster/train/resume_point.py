"""Resume point of a run, as its launcher sees it before there are ranks: from checkpoints on disk or in memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints, step_of
from muster.checkpoint.in_memory.directory import (
    IDENTITY_FILE,
    InMemoryDirectory,
    candidate_directories,
    claim_run_id,
    read_identity,
    remove_stale,
)
from muster.checkpoint.manifest import read_manifest
from muster.config.load_config import plan_from_tree
from muster.config.run_config import RunConfig, TrainConfig
from muster.data.dataset import SampleStream
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.train.resume_check import settings_digest


class ResumePoint(NamedTuple):
    """Step, counters and plan of a checkpoint."""

    step: int
    counters: dict[str, Any]
    plan: Mapping[str, Any] = MappingProxyType({})
    """Fields of the plan; empty where they aren't known."""

    def describe(self, plan: Plan) -> str:
        """Return the step in words, with the checkpoint's plan where `plan` is another."""
        former = _name_of(self.plan)
        under = "" if former in ("", _name_of(plan.model_dump())) else f", saved under {former}"
        return f"after step {self.step}{under}"


def _name_of(fields: Mapping[str, Any]) -> str:
    """Return the name of the plan with such fields, wherever its experts are by now; empty where it isn't known, or is
    no plan here, as one with a schedule of another attempt's plugin."""
    try:
        return format_plan_name(plan_from_tree({**fields, "expert_placement": ()}, "the checkpoint")) if fields else ""
    except ValidationError:
        return ""


def find_resume_point(run_dir: Path, train: TrainConfig) -> ResumePoint | None:
    """Find the point to resume from; None where nothing was saved. Raises MusterError when all checkpoints are damaged
    and memory holds none.

    This machine has only a part of an in-memory checkpoint: the ranks may find that too much of it is lost.
    """
    copied = _in_memory_resume_point(run_dir, train)
    names = list_checkpoints(run_dir / "checkpoints")
    if copied is not None and (not names or copied.step >= step_of(names[-1])):
        return copied
    latest = _last_checkpoint(run_dir, copied is not None)
    if latest is None or (copied is not None and copied.step >= step_of(latest)):
        return copied
    manifest = read_manifest(latest)
    return ResumePoint(manifest.step, manifest.counters, manifest.plan)


def _in_memory_resume_point(run_dir: Path, train: TrainConfig) -> ResumePoint | None:
    """Return the last step that an in-memory checkpoint on this machine holds."""
    identity = read_identity(run_dir)
    if not train.keeps_state_in_memory or identity is None:
        return None
    folders = [
        InMemoryDirectory(place, run_dir, identity.id)
        for place in candidate_directories(train.in_memory_checkpoint_dir)
    ]
    heads = [head for folder in folders for _, head in folder.step_headers()]
    found = [ResumePoint(head.about["step"], head.about["counters"]) for head in heads]
    return max((one for one in found if one.step <= train.num_steps), key=lambda one: one.step, default=None)


def _last_checkpoint(run_dir: Path, is_copied: bool) -> Path | None:
    """Return the checkpoint to resume from; None without any. Raises MusterError when all are damaged, unless memory
    holds one."""
    problems: list[str] = []
    latest = find_latest(run_dir / "checkpoints", problems.append)
    if problems and latest is None and not is_copied:
        raise MusterError(no_checkpoint_sentence(run_dir, problems))
    for problem in problems:
        print(problem)
    return latest


def no_checkpoint_sentence(run_dir: Path, problems: Sequence[str]) -> str:
    """Return the error of a run whose checkpoints are all damaged."""
    return f"{run_dir} has no checkpoint to resume from ({'; '.join(problems)}): --fresh starts anew"


def record_in_memory_identity(run_dir: Path, config: RunConfig, dataset: SampleStream, resumes: bool) -> None:
    """Record which in-memory checkpoints this attempt may resume from: those of the same run, unless it starts anew."""
    if config.train.keeps_state_in_memory:
        claim_run_id(run_dir, settings_digest(config, dataset), resumes)
    elif (run_dir / IDENTITY_FILE).exists():  # copies that are no longer made grow old: nobody must go on from them
        (run_dir / IDENTITY_FILE).unlink()
        for place in candidate_directories(config.train.in_memory_checkpoint_dir):
            remove_stale(place)
