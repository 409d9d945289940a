"""Where a run stands, as its launcher sees it before there are ranks: from checkpoints, or from copies in memory."""

from pathlib import Path
from typing import Any, NamedTuple

from muster.checkpoint.folder import checkpoints, find_latest, step_of
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.memory.folder import IDENTITY, CopyFolder, clear_stale, identify, places, read_identity
from muster.data.dataset import Samples
from muster.spec.errors import MusterError
from muster.spec.run import RunConfig, TrainConfig
from muster.train.drift import settings_digest


class Position(NamedTuple):
    """What a run has done."""

    step: int
    counters: dict[str, Any]


def last_position(run_dir: Path, train: TrainConfig) -> Position | None:
    """Where the run goes on; None where nothing was ever saved. Raises MusterError when all that was is damaged.

    The ranks may find that of the copies in memory, of which this machine has but a part, too much is lost.
    """
    copied = _copied(run_dir, train)
    names = checkpoints(run_dir / "checkpoints")
    if copied is not None and (not names or copied.step >= step_of(names[-1])):
        return copied
    latest = _last_checkpoint(run_dir)
    if latest is None:
        return copied
    manifest = read_manifest(latest)
    return Position(manifest.step, manifest.counters)


def _copied(run_dir: Path, train: TrainConfig) -> Position | None:
    """The last step of which this machine has copies."""
    identity = read_identity(run_dir)
    if not train.copies_every or identity is None:
        return None
    folders = [CopyFolder(place, run_dir, identity.id) for place in places(train.copies_dir)]
    heads = [head for folder in folders for _, head in folder.heads()]
    found = [Position(head.about["step"], head.about["counters"]) for head in heads]
    return max((one for one in found if one.step <= train.num_steps), key=lambda one: one.step, default=None)


def _last_checkpoint(run_dir: Path) -> Path | None:
    """The one to go on from; None where none was ever saved. Raises MusterError when all there are are damaged."""
    problems: list[str] = []
    latest = find_latest(run_dir / "checkpoints", problems.append)
    if problems and latest is None:
        raise MusterError(f"{run_dir} has no checkpoint to go on from ({'; '.join(problems)}): --fresh starts anew")
    for problem in problems:
        print(problem)
    return latest


def own_copies(run_dir: Path, config: RunConfig, dataset: Samples, goes_on: bool) -> None:
    """Writes down which copies in memory this attempt may go on from: those of the same run, unless it begins anew."""
    if config.train.copies_every:
        identify(run_dir, settings_digest(config, dataset), goes_on)
    elif (run_dir / IDENTITY).exists():  # copies that are no longer made grow old: nobody must go on from them
        (run_dir / IDENTITY).unlink()
        for place in places(config.train.copies_dir):
            clear_stale(place)
