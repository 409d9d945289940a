"""A run from its request to its end: prepares the run directory, starts the ranks, says how it went.

Torch takes seconds to import: what is refused or finished already is said before.
"""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from muster.checkpoint.checkpoint_dir import find_latest, step_of
from muster.checkpoint.in_memory.directory import IDENTITY_FILE
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.remote import RemoteCheckpoints
from muster.checkpoint.remote_lock import hold_remote_lock
from muster.config.load_config import ResolvedConfig, derived_value_lines, with_steps_from_epochs, write_run_files
from muster.config.run_config import RunConfig
from muster.config.yaml_writer import write_atomically, yaml_text
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.rank_errors import EXIT_STOPPED, error_path
from muster.planner.auto import ChosenPlan, choose_plan
from muster.report.run_files import report_path
from muster.spec.errors import ConfigError, InfeasibleError, MusterError
from muster.spec.plan import Plan
from muster.train.data import describe_data, describe_epochs, describe_missing_validation, open_dataset
from muster.train.resume_check import check_config_unchanged, check_data_unchanged
from muster.train.resume_point import find_resume_point, record_in_memory_identity
from muster.train.schedule_refinement import with_resolved_schedule
from muster.train.tracking import TENSORBOARD, WANDB, require_trackers

if find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

WORKER = "muster.train.worker"
"""The module of a rank that trains."""
PREPARE_TIMEOUT = timedelta(days=1)
"""How long rank 0 may build the token store; when it fails, torchrun ends the ranks that wait."""


@dataclass(frozen=True)
class TrainOptions:
    """What the command line says beside the configuration."""

    run_dir: Path
    nproc: int | None = None
    """Local processes; None: as many as the plan wants."""
    fresh: bool = False
    """Start anew, whatever the run directory holds."""
    allow_changes: bool = False
    """Go on with another configuration or other data than the run began with."""
    nodes: RendezvousConfig | None = None
    """This launcher's place among several; None: there is no other."""


def train(resolved: ResolvedConfig, options: TrainOptions) -> int:
    """Trains, or goes on with, the run in `options.run_dir`. Returns the exit code.

    Under torchrun this process becomes one of the ranks; otherwise it starts them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from muster.train.torchrun import train_under_torchrun

        return train_under_torchrun(resolved, options)
    check_launcher_environment(options.nodes)
    if options.nodes is not None:
        from muster.train.multi_node import train_on_nodes

        return train_on_nodes(resolved, options, options.nodes)
    chosen = choose_plan(resolved, options.nproc)
    plan = chosen.plan
    # Until there are ranks, nothing has to be saved before stopping.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
    with locked_run_dir(options.run_dir, resolved.config.train.remote_checkpoint_dir):
        if not prepare(resolved, chosen, options):
            return 0
        from muster.launch.launcher import launch, rank_command

        command = rank_command(WORKER, options.run_dir, plan.world_size)
        return launch(
            command, plan.world_size, options.run_dir, hang_timeout_s=resolved.config.train.hang_timeout_s
        ).report()


def check_launcher_environment(nodes: RendezvousConfig | None = None) -> None:
    """Raises ConfigError where a launcher has started other copies of this command than --nodes says: each would train
    a world of its own, or wait for ranks that are none."""
    for variable, launcher in _PROCESS_COUNT_VARIABLES.items():
        text = os.environ.get(variable, "1")
        count, expected = int(text) if text.isdecimal() else 1, nodes.num_nodes if nodes else 1
        if count > 1 and nodes is None:
            raise ConfigError(
                f"{launcher} started {count} copies of this command ({variable}), and each would train a world of its"
                f" own: one copy on each node is made one job by --nodes {count} --node-rank R --rendezvous HOST"
            )
        if count not in (1, expected):
            raise ConfigError(
                f"{launcher} started {count} copies of this command ({variable}), but --nodes is {expected}: start one"
                " on each node, whose launcher starts the node's ranks (srun --ntasks-per-node=1)"
            )


_PROCESS_COUNT_VARIABLES = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "the process manager",
    "SKYPILOT_NUM_NODES": "SkyPilot",
    "WORLD_SIZE": "a launcher",
}
"""What launchers that aren't torchrun say of the number of processes that they started."""


def require_device(plan: Plan) -> None:
    """Raises InfeasibleError when this machine has no device that the plan's precision needs."""
    if plan.precision != "fp16":
        return
    import torch

    if not torch.cuda.is_available():
        raise InfeasibleError("fp16 needs a GPU, and there is none here: bf16 is as fast, and has the range of fp32")


# ----------------------------------------------------------------------------------------------------------------------
# Preparing


def prepare(resolved: ResolvedConfig, chosen: ChosenPlan, options: TrainOptions) -> bool:
    """Builds the data and writes the run directory; False when there is nothing left to do.

    Changes nothing in the run directory before all that can be checked is.
    """
    plan = chosen.plan
    require_device(plan)
    require_trackers(resolved.config.tracking)
    run_dir, config = options.run_dir, resolved.config
    if config.train.epochs is not None:
        resolved = with_steps_from_epochs(resolved, open_dataset(config, run_dir).num_train_samples)
        config = resolved.config
    mirror = (
        None if config.train.remote_checkpoint_dir is None else RemoteCheckpoints(config.train.remote_checkpoint_dir)
    )
    if mirror is not None and not options.fresh:
        _fetch_newer_from_mirror(mirror, run_dir)
    position = None if options.fresh else find_resume_point(run_dir, config.train)
    if position is not None:
        check_config_unchanged(run_dir, config, position.step, options.allow_changes)
        if position.step == config.train.num_steps and (run_dir / "report.html").exists():
            print(f"{run_dir} is finished: all of its {position.step} steps are done (--fresh starts anew)")
            print(f"report: {report_path(run_dir)}")
            return False
    if position is None and config.train.init_from is not None:
        _check_initial_weights(config.train.init_from, config)
    dataset = open_dataset(config, run_dir)
    for line in describe_data(config, dataset):
        print(f"data: {line}")
    if config.train.epochs is not None:
        print(describe_epochs(config, dataset))
    for line in (
        *describe_missing_validation(config, dataset),
        *derived_value_lines(resolved),
        *chosen.lines,
        *_plugin_notes(config),
    ):
        print(line)
    if position is not None:
        check_data_unchanged(run_dir, dataset, position.counters, options.allow_changes)
        if (
            not config.train.in_memory_checkpoint_every
        ):  # else the ranks say it, when they know what is in their memories
            print(f"resuming {run_dir} after step {position.step}")
    plan = with_resolved_schedule(plan, config, run_dir if position is not None else None)
    if mirror is not None and options.fresh:
        mirror.delete_all()
    with _write_errors(run_dir):
        _remove_previous_results(run_dir, all_of_it=options.fresh)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_run_files(resolved, plan, run_dir)
        record_in_memory_identity(run_dir, config, dataset, resumes=position is not None)
    return True


def _plugin_notes(config: RunConfig) -> Iterator[str]:
    """What of plugins no prediction knows of."""
    if config.train.loss is not None:
        yield f"loss: {config.train.loss} of a plugin; what it keeps is not in the memory forecast"
    if config.train.training_step is not None:
        name = config.train.training_step
        yield f"step: {name} of a plugin; what it does beside one round of passes is not predicted"


def _check_initial_weights(place: str, config: RunConfig) -> None:
    """Says which weights the run begins with, once they fit the model."""
    from muster.checkpoint.initial_weights import check_initial_weights  # imports torch

    directory = check_initial_weights(Path(place), config.model)
    step = "" if directory.step is None else f" of step {directory.step}"
    print(f"weights: from {directory.folder}{step}")


def _fetch_newer_from_mirror(mirror: RemoteCheckpoints, run_dir: Path) -> None:
    """Brings the mirror's last checkpoint into the run directory when that has none as new."""
    own = find_latest(run_dir / "checkpoints")
    steps = mirror.steps()
    if not steps or (own is not None and step_of(own) >= steps[-1]):
        return
    with _write_errors(run_dir):
        folder = mirror.download(steps[-1], run_dir / "checkpoints")
        if not (run_dir / "config.yaml").exists():
            write_atomically(run_dir / "config.yaml", yaml_text(read_manifest(folder).run))
    print(f"fetched the checkpoint of step {steps[-1]} from {mirror.url}")


def _remove_previous_results(run_dir: Path, all_of_it: bool) -> None:
    """Removes what a former attempt said about its end, or all that a former run left; nothing else that lies there."""
    doomed = [run_dir / name for name in ("exit.json", "report.html", "result.json", "timeline.json")]
    doomed += error_path(run_dir, 0).parent.glob("rank-*.error.json")
    if all_of_it:
        doomed += [run_dir / name for name in ("metrics.jsonl", "samples.sha256", IDENTITY_FILE)]
        for folder in ("checkpoints", "failed", "logs", TENSORBOARD, WANDB):
            if (run_dir / folder).exists():
                shutil.rmtree(run_dir / folder)
    for path in doomed:
        path.unlink(missing_ok=True)


@contextmanager
def locked_run_dir(run_dir: Path, mirror: str | None = None) -> Iterator[None]:
    """Holds the run directory, and the mirror if there is one, for one job at a time. Raises MusterError when another
    one has them."""
    with _write_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MusterError(f"another job is running in {run_dir}: wait for it or choose another --run") from None
        with hold_remote_lock(mirror, run_dir):
            yield


@contextmanager
def _write_errors(run_dir: Path) -> Iterator[None]:
    """Says in one sentence that the run directory can't be written."""
    try:
        yield
    except OSError as error:
        raise MusterError(
            f"can't write the run directory {run_dir}: {error.strerror}; choose another with --run"
        ) from error
