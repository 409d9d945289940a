"""Preparation of a run: checks the request, builds the data and writes the run directory. Torch is imported late.

Torch takes seconds to import, so a request that is refused, or a run that is finished, is reported before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from muster.checkpoint.checkpoint_dir import TOKENIZER_FOLDER, find_latest, step_of
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.remote import RemoteCheckpoints
from muster.config.load_config import ResolvedConfig, derived_value_lines, with_steps_from_epochs, write_run_files
from muster.config.run_config import RunConfig
from muster.config.yaml_writer import write_atomically, yaml_text
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.planner.auto import ChosenPlan
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan
from muster.train.data import describe_data, describe_epochs, describe_missing_validation, open_dataset
from muster.train.resume_check import check_config_unchanged, check_data_unchanged
from muster.train.resume_point import find_resume_point, record_in_memory_identity
from muster.train.run_directory import explain_write_errors, remove_previous_results
from muster.train.run_tokenizer import keep_tokenizer, with_settled_bos
from muster.train.schedule_refinement import with_resolved_schedule
from muster.train.tracking import require_trackers

WORKER = "muster.train.worker"
"""Module of a rank that trains."""
PREPARE_TIMEOUT = timedelta(days=1)
"""Longest wait of the other ranks or nodes while rank 0 prepares the run, which may include tokenizing the data."""


@dataclass(frozen=True)
class TrainOptions:
    """Command-line options of `muster train` that are not part of the configuration."""

    run_dir: Path
    nproc: int | None = None
    """Processes on this machine; None: as many as the plan has ranks."""
    fresh: bool = False
    """Start from step 0, whatever the run directory holds."""
    allow_changes: bool = False
    """Resume even if the configuration or the data differ from those at the run's beginning."""
    nodes: RendezvousConfig | None = None
    """Rendezvous of several launchers; None: a single node."""


def prepare(resolved: ResolvedConfig, chosen: ChosenPlan, options: TrainOptions) -> bool:
    """Check the request, build the data and write the run directory; False when the run is finished already.

    Changes nothing in the run directory before all checks have passed.
    """
    plan = chosen.plan
    require_device(plan)
    require_trackers(resolved.config.tracking)
    resolved = with_settled_bos(resolved)
    run_dir = options.run_dir
    if resolved.config.train.epochs is not None:
        resolved = with_steps_from_epochs(resolved, open_dataset(resolved.config, run_dir).num_train_samples)
    config = resolved.config
    remote_dir = config.train.remote_checkpoint_dir
    remote = None if remote_dir is None else RemoteCheckpoints(remote_dir)
    if remote is not None and not options.fresh:
        _download_newer_checkpoint(remote, run_dir)
    resume_point = None if options.fresh else find_resume_point(run_dir, config.train)
    if resume_point is not None:
        check_config_unchanged(run_dir, config, resume_point.step, options.allow_changes)
        if resume_point.step == config.train.num_steps and (run_dir / "report.html").exists():
            print(f"{run_dir} is finished: all of its {resume_point.step} steps are done (--fresh starts anew)")
            print(f"report: {run_dir / 'report.html'}")
            return False
    initial_model = run_dir / TOKENIZER_FOLDER if resume_point is not None else None
    if resume_point is None and config.train.init_from is not None:
        initial_model = _check_initial_weights(config.train.init_from, config)
    dataset = open_dataset(config, run_dir)
    for line in describe_data(config, dataset):
        print(f"data: {line}")
    if config.train.epochs is not None:
        print(describe_epochs(config, dataset))
    for line in describe_missing_validation(config, dataset):
        print(line)
    for line in (*derived_value_lines(resolved), *chosen.lines, *_plugin_notes(config)):
        print(line)
    if resume_point is not None:
        check_data_unchanged(run_dir, dataset, resume_point.counters, options.allow_changes)
        # With in-memory checkpoints only the ranks know from which step they can resume: they report it.
        if not config.train.in_memory_checkpoint_every:
            print(f"resuming {run_dir} after step {resume_point.step}")
    plan = with_resolved_schedule(plan, config, run_dir if resume_point is not None else None)
    if remote is not None and options.fresh:
        remote.delete_all()
    with explain_write_errors(run_dir):
        remove_previous_results(run_dir, everything=options.fresh)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        write_run_files(keep_tokenizer(resolved, run_dir, initial_model), plan, run_dir)
        record_in_memory_identity(run_dir, config, dataset, resumes=resume_point is not None)
    return True


def require_device(plan: Plan) -> None:
    """Raise InfeasibleError when this machine has no device for the plan's precision."""
    if plan.precision != "fp16":
        return
    import torch

    if not torch.cuda.is_available():
        raise InfeasibleError("fp16 needs a GPU, and there is none here: bf16 is as fast, and has the range of fp32")


def _plugin_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes on plugin parts that the prediction leaves out."""
    if config.train.loss is not None:
        yield f"loss: {config.train.loss} of a plugin; its memory is not in the forecast"
    if config.train.training_step is not None:
        name = config.train.training_step
        yield f"step: {name} of a plugin; only one forward and backward of each micro-batch is predicted"


def _check_initial_weights(place: str, config: RunConfig) -> Path | None:
    """Check that the initial weights fit the model, and print where they come from.

    Returns the folder with the files of a Hugging Face directory that came with them, if there is one.
    """
    from muster.checkpoint.initial_weights import check_initial_weights  # imports torch
    from muster.checkpoint.model_directory import auxiliary_folder

    directory = check_initial_weights(Path(place), config.model)
    step = "" if directory.step is None else f" of step {directory.step}"
    print(f"weights: from {directory.folder}{step}")
    return auxiliary_folder(directory)


def _download_newer_checkpoint(remote: RemoteCheckpoints, run_dir: Path) -> None:
    """Download the last remote checkpoint when it is newer than those of the run directory."""
    latest = find_latest(run_dir / "checkpoints")
    steps = remote.steps()
    if not steps or (latest is not None and step_of(latest) >= steps[-1]):
        return
    with explain_write_errors(run_dir):
        folder = remote.download(steps[-1], run_dir / "checkpoints")
        if not (run_dir / "config.yaml").exists():
            write_atomically(run_dir / "config.yaml", yaml_text(read_manifest(folder).run))
    print(f"fetched the checkpoint of step {steps[-1]} from {remote.url}")
