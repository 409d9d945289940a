"""Checks of a request before a run writes anything: the same ones for `muster train` and for its `--dry-run`."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from muster.checkpoint.checkpoint_dir import find_latest, step_of
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.remote import RemoteCheckpoints
from muster.config.attempt_files import TOKENIZER_FOLDER
from muster.config.file_writer import write_atomically
from muster.config.freezing import frozen_numel
from muster.config.load_config import ResolvedConfig, derived_value_lines, with_steps_from_epochs
from muster.config.optimizer_state import is_zeroth_order
from muster.config.outer_config import OuterConfig
from muster.config.outer_rules import require_plan_with_outer_steps
from muster.config.run_config import RunConfig
from muster.config.yaml_writer import yaml_text
from muster.data.dataset import SampleStream
from muster.data.dp_slice import parts_of_micro_batches
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.peers.channel import load_secret
from muster.layout.mesh import coordinates_of, dp_index_of
from muster.planner.auto import ChosenPlan, choose_plan
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import stage_parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize
from muster.train.best_checkpoint import stops_early
from muster.train.config_consistency import ranks_per_node
from muster.train.data import (
    describe_data,
    describe_epochs,
    describe_missing_validation,
    open_dataset,
    trial_dataset,
)
from muster.train.memory_preflight import require_memory
from muster.train.resume_check import (
    changed_delays_note,
    check_config_unchanged,
    check_data_unchanged,
    require_same_islands,
)
from muster.train.resume_point import ResumePoint, find_resume_point
from muster.train.run_directory import explain_write_errors, require_unlocked
from muster.train.run_tokenizer import with_settled_bos
from muster.train.schedule_refinement import with_resolved_schedule
from muster.train.swarm_check import require_swarm
from muster.train.tracking import require_trackers


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
    ignore_memory: bool = False
    """Run the plan even if its forecast exceeds the memory of this machine."""


@dataclass(frozen=True)
class Preflight:
    """A request that has passed all checks."""

    resolved: ResolvedConfig
    """The configuration, with the steps that its epochs make."""
    plan: Plan
    """The plan, with the order of a searched schedule."""
    remote: RemoteCheckpoints | None
    resume_point: ResumePoint | None
    """Step to resume after, as far as this machine knows; None at the beginning."""
    is_finished: bool
    """True when all steps of the run are done; the checks that follow from them are left out."""
    initial_model: Path | None
    """Folder with the configuration files of the model that the run began with, if it has any."""
    dataset: SampleStream | None
    """The run's data; None where a trial has read only the beginning of it."""


def dry_run(resolved: ResolvedConfig, options: TrainOptions) -> tuple[ChosenPlan, Preflight]:
    """Check everything that a run checks before it starts ranks, and write nothing. Raises as a run does."""
    check_launcher_environment(options.nodes)
    require_launcher(resolved.config)
    if options.nodes is None:
        chosen = choose_plan(resolved, options.nproc)
    else:
        count = options.nodes.num_nodes
        chosen = choose_plan(resolved, ranks_per_node(resolved, options.nproc, count) * count, count)
    require_unlocked(options.run_dir)
    if (url := resolved.config.train.remote_checkpoint_dir) is not None:
        RemoteCheckpoints(url)  # whose lock a run takes next
    return chosen, preflight(resolved, chosen, options, is_trial=True)


def preflight(resolved: ResolvedConfig, chosen: ChosenPlan, options: TrainOptions, is_trial: bool = False) -> Preflight:
    """Check a request, cheap checks first, and print what the run begins with; the data is built where it is missing.

    A trial writes nothing: of data that isn't built it reads the beginning. Raises MusterError.
    """
    plan = chosen.plan
    require_device(plan)
    require_unequal_lengths(resolved.config, plan)
    require_settings_of_islands(resolved.config, plan)
    on_several_launchers = options.nodes is not None or "TORCHELASTIC_RUN_ID" in os.environ
    require_elastic(resolved.config, plan)
    require_swarm(resolved.config, plan, on_several_launchers)
    require_trackers(resolved.config.tracking)
    resolved = with_settled_bos(resolved)
    run_dir = options.run_dir
    dataset = None
    if resolved.config.train.epochs is not None:
        dataset = _open_data(resolved.config, run_dir, is_trial)
        if dataset is not None:
            resolved = with_steps_from_epochs(resolved, dataset.num_train_samples)
    config = resolved.config
    remote_dir = config.train.remote_checkpoint_dir
    remote = None if remote_dir is None else RemoteCheckpoints(remote_dir)
    if remote is not None and not options.fresh and not is_trial:
        _download_newer_checkpoint(remote, run_dir)
    # A trial of epochs over data that isn't built doesn't know how many steps they are, nor so if they are all done.
    resumes = not options.fresh and (config.train.steps is not None or find_latest(run_dir / "checkpoints") is None)
    resume_point = find_resume_point(run_dir, config.train) if resumes and config.train.steps is not None else None
    initial_model = run_dir / TOKENIZER_FOLDER if resume_point is not None else None
    if resume_point is not None:
        require_same_islands(run_dir, resume_point.plan.get("islands", 1), plan.islands)
        _require_delayed_update_goes_on(resume_point, config)
        check_config_unchanged(run_dir, config, resume_point.step, options.allow_changes)
        if note := changed_delays_note(resume_point.plan, plan, resume_point.step):
            print(note)
        is_early = stops_early(resume_point.counters.get("validation", {}), config.train)
        if (is_early or resume_point.step == config.train.num_steps) and (run_dir / "report.html").exists():
            steps = f"all of its {resume_point.step} steps are done"
            steps = f"it stopped early, after step {resume_point.step}" if is_early else steps
            print(f"{run_dir} is finished: {steps} (--fresh starts anew)")
            print(f"report: {run_dir / 'report.html'}")
            return Preflight(resolved, plan, remote, resume_point, True, None, None)
    elif config.train.init_from is not None and (options.fresh or resumes):
        initial_model = _check_initial_weights(config.train.init_from, config)
    plan = with_resolved_schedule(plan, config, run_dir if resume_point is not None else None)
    _check_adapter_parts(config, plan)
    if not options.ignore_memory and config.swarm is None:  # whose passes run elsewhere
        require_memory(config, plan, chosen.num_nodes)
    if dataset is None:
        dataset = _open_data(config, run_dir, is_trial)
    if dataset is None:
        print("data: not built yet; its beginning is sound")
    else:
        for line in describe_data(config, dataset):
            print(f"data: {line}")
        if config.train.epochs is not None:
            print(describe_epochs(config, dataset))
        for line in describe_missing_validation(config, dataset):
            if config.train.keep_best or config.train.early_stopping_patience:
                raise ConfigError(f"train.keep_best and early stopping go by the validation loss: {line}")
            print(line)
    if not is_trial:
        for line in (*derived_value_lines(resolved), *chosen.lines):
            print(line)
    for line in notes(config):
        print(line)
    if resume_point is not None:
        if dataset is not None:
            check_data_unchanged(run_dir, dataset, resume_point.counters, options.allow_changes)
        # With in-memory checkpoints only the ranks know from which step they can resume: they report it.
        if not config.train.keeps_state_in_memory:
            print(f"resuming {run_dir} {resume_point.describe(plan)}")
    return Preflight(resolved, plan, remote, resume_point, False, initial_model, dataset)


# ----------------------------------------------------------------------------------------------------------------------
# Single checks


def check_launcher_environment(nodes: RendezvousConfig | None = None) -> None:
    """Raise ConfigError where srun, mpirun or the like has started more copies of this command than --nodes says.

    Each copy would train a world of its own, or wait for ranks that nobody starts.
    """
    for variable, launcher in _PROCESS_COUNT_VARIABLES.items():
        text = os.environ.get(variable, "1")
        count = int(text) if text.isdecimal() else 1
        expected = nodes.num_nodes if nodes else 1
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
"""Environment variables with the number of processes that other launchers than torchrun have started."""


def require_device(plan: Plan) -> None:
    """Raise InfeasibleError when this machine has no device for the plan's precision."""
    if plan.precision != "fp16":
        return
    import torch

    if not torch.cuda.is_available():
        raise InfeasibleError("fp16 needs a GPU, and there is none here: bf16 is as fast, and has the range of fp32")


def _require_delayed_update_goes_on(resume_point: ResumePoint, config: RunConfig) -> None:
    """Raise ConfigError where the gradients of a delayed update, which a checkpoint has, would be lost."""
    if "delayed_update" in resume_point.counters and not config.train.delayed_update:
        raise ConfigError(
            "the checkpoint has gradients whose update is delayed: go on with train.delayed_update, and with the"
            " optimizer state of the same layers in host memory or on disk, or begin another --run with --init-from"
            " this one, which takes the weights alone"
        )


def _check_adapter_parts(config: RunConfig, plan: Plan) -> None:
    """Raise InfeasibleError where a rank's micro-batch has samples of several of an adapter's parts."""
    adapter, count = config.model.adapter, config.train.global_batch_size
    for rank in range(plan.world_size if adapter is not None and adapter.changes_weights else 0):
        at = coordinates_of(plan, rank)
        size = plan.num_micro_batches(config.workload, dp_index_of(plan, at))
        parts_of_micro_batches(plan, at, size, count, adapter.parts if adapter else 1)


def notes(config: RunConfig) -> Iterator[str]:
    """Yield notes on spares that don't wait, on frozen parameters, on delays that don't begin, and on plugin parts that
    the prediction leaves out."""
    train = config.train
    if train.spares > 1 and not train.elastic:
        yield f"spares: none of the {train.spares} (train.spares) waits for lost ranks, since train.elastic is false"
    if train.delayed_update and train.delayed_update_warmup_steps >= train.num_steps:
        yield (
            f"delayed update: none of the {train.num_steps} steps is delayed, since the first"
            f" {train.delayed_update_warmup_steps} (train.delayed_update_warmup_steps) update at once"
        )
    outer = config.outer if config.parallel.islands > 1 else None
    if outer is not None and outer.warmup_steps >= train.num_steps:
        yield (
            f"islands: none of the {train.num_steps} steps is in a round, since parameters are averaged after each of"
            f" the first {outer.warmup_steps} (outer.warmup_steps)"
        )
    late = [step for step in outer.reshard_at if step > train.num_steps] if outer is not None else []
    if outer is not None and late:
        yield (
            f"router: it doesn't learn at outer.reshard_at {', '.join(map(str, late))}, which the {train.num_steps}"
            " steps don't reach"
        )
    if config.optim.freeze:
        count = frozen_numel(config.optim, config.model)
        stay = "stay as they are"
        if config.model.adapter is not None and config.model.adapter.changes_weights:
            stay = "have no gradients; in each step the adapters' updates are added to the weights beside them"
        yield f"frozen: {count:,} of {config.model.num_parameters:,} parameters {stay}"
    if config.train.loss is not None:
        yield f"loss: {config.train.loss} of a plugin; its memory is not in the forecast"
    if config.train.training_step is not None:
        name = config.train.training_step
        yield f"step: {name} of a plugin; only one forward and backward of each micro-batch is predicted"


def _check_initial_weights(place: str, config: RunConfig) -> Path | None:
    """Check that the initial weights fit the model, and print where they come from.

    Returns the folder with the files of a Hugging Face directory that came with them, if there is one.
    """
    from muster.checkpoint.initial_weights import check_initial_weights, function_note  # imports torch
    from muster.checkpoint.model_directory import auxiliary_folder

    directory = check_initial_weights(Path(place), config.model)
    step = "" if directory.step is None else f" of step {directory.step}"
    print(f"weights: from {directory.folder}{step}")
    if (note := function_note(directory.model, config.model)) is not None:
        print(f"weights: {note}")
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


def _open_data(config: RunConfig, run_dir: Path, is_trial: bool) -> SampleStream | None:
    """Open the run's data. A trial returns None where only the beginning of a source was read."""
    if not is_trial:
        return open_dataset(config, run_dir)
    with TemporaryDirectory(prefix="muster-dry-run-") as place:
        return trial_dataset(config, run_dir, Path(place))


def require_settings_of_islands(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError where outer steps and islands don't go together, InfeasibleError where a key doesn't go with
    islands."""
    require_plan_with_outer_steps(config.outer, plan)
    if config.outer is not None and config.outer.coordinator is not None:
        load_secret(Path(config.outer.secret_file or ""))
    elif plan.islands == 1:
        return
    paths = prod((config.outer or OuterConfig()).modules)
    if plan.islands % paths:
        raise ConfigError(
            f"outer.modules {list((config.outer or OuterConfig()).modules)} make {pluralize(paths, 'path')}, but"
            f" {format_plan_name(plan)} has {plan.islands} islands: expected a multiple"
        )
    for key, value in (
        ("train.training_step", config.train.training_step),
        ("train.in_memory_checkpoint_every", config.train.in_memory_checkpoint_every),
    ):
        if value:
            raise InfeasibleError(
                f"{key} {value} doesn't go with islands yet: leave it out, or take a plan without islands"
            )


def require_launcher(config: RunConfig) -> None:
    """Raise ConfigError where `train.elastic` is on under torchrun, whose agent ends all ranks when one is lost."""
    if config.train.elastic and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "train.elastic needs Muster's launchers, as torchrun's ends all ranks when one is lost: leave out torchrun"
            " (--nodes starts ranks on several nodes), or take train.restarts, which starts all ranks again"
        )


def require_elastic(config: RunConfig, plan: Plan) -> None:
    """Raise InfeasibleError where `train.elastic` doesn't go with the plan, or would run on GPUs."""
    if not config.train.elastic:
        return
    import torch

    if torch.cuda.is_available():
        raise InfeasibleError(
            "train.elastic needs ranks on CPUs, whose communication can be left while it is under way: take"
            " train.restarts, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    reason = None
    if plan.world_size == 1:
        reason = "a single rank leaves none that could go on: expected a plan with several, or train.restarts"
    elif plan.islands > 1:
        reason = "islands are steps apart: expected a plan without islands, or train.restarts"
    elif plan.post_validation:
        reason = "post_validation updates before all ranks have agreed on a step: expected a plan without it"
    elif is_zeroth_order(config.optim):
        reason = "zeroth-order steps aren't recovered yet: expected another optimizer, or train.restarts"
    elif config.train.training_step is not None:
        reason = "a plugin's training step may keep a state of its own: leave out train.training_step"
    elif any(
        "disk" in (own.offload_param, own.offload_optimizer) or own.offload == "activations_on_disk"
        for own in plan.strategies
    ):
        reason = "a lost rank's files on disk can't be taken over: expected a plan that offloads to host memory only"
    if reason is not None:
        raise InfeasibleError(f"train.elastic doesn't go with {format_plan_name(plan)} here: {reason}")
    if config.train.recovery == "checkfree" and (reason := why_not_checkfree(config, plan)) is not None:
        raise InfeasibleError(f"train.recovery checkfree doesn't go with {format_plan_name(plan)} here: {reason}")


def why_not_checkfree(config: RunConfig, plan: Plan) -> str | None:
    """Return why lost stages of a plan can't be rebuilt from those beside them; None where inner ones can."""
    model, mesh = config.model, plan.mesh(0)
    if plan.num_stages < 3 or plan.num_stages != plan.pp or plan.vocab_parallel:
        return "a lost stage needs one before it and one after it: expected pp3 or more, with one stage a rank"
    if not plan.is_uniform or mesh.num_ranks != mesh.dp_replicate:
        return "each rank has to hold its stage whole: expected data-parallel replicas (dp2x1) at most beside pp"
    keeps_ends = plan.schedule_entry.swaps_end_stages
    if plan.schedule_entry.searched and not keeps_ends:
        return f"schedule {plan.schedule} may lay stages on ranks in any order: expected one that isn't searched for"
    layers = [plan.layers(stage, model.num_layers) for stage in range(plan.num_stages)]
    layers = layers[1:-1] if keeps_ends else layers
    if len({len(own) for own in layers}) > 1:
        counts = ", ".join(str(len(own)) for own in layers)
        return f"layers are averaged by their places in the stages, which have {counts}: expected as many in each"
    shapes = [
        [(name.split(".", 2)[2], shape) for name, shape in stage_parameter_shapes(model, own, False, False)]
        for own in layers
    ]
    if any(own != shapes[0] for own in shapes):
        return "layers are averaged by their places in the stages: expected parameters of the same shapes in each"
    if plan.offloads_params or any(strategy.offload_optimizer != "none" for strategy in plan.strategies):
        return "state in host memory isn't sent yet: expected a plan without oopt and oparam"
    if model.adapter is not None or config.optim.freeze:
        return "means of frozen weights would never be trained: expected neither model.adapter nor optim.freeze"
    if config.optim.ema_decay:
        return "the lost average of weights can't be rebuilt: expected optim.ema_decay 0"
    return None


def require_unequal_lengths(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError where the samples that a `cpdyn` plan would assign to groups are all of one length."""
    if plan.dynamic_context_parallel and config.data.packing != "none":
        raise ConfigError(
            f"cpdyn assigns samples of unequal lengths to groups of ranks, but data.packing {config.data.packing} makes"
            f" all of them {config.train.seq_len} positions long: expected data.packing none, or cp{plan.cp} without"
            " cpdyn"
        )
