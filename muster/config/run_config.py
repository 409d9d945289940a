"""The typed content of a run file."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from muster.config.freezing import check_four_bits, check_patterns, check_weight_changes, freeze_for_adapter
from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizers import OPTIMIZERS
from muster.config.outer_config import OuterConfig
from muster.config.swarm_config import SwarmConfig
from muster.plugins.loader import PluginFile
from muster.plugins.registry import ComponentKind, component_names, require_component
from muster.spec.adapters import AdapterSpec
from muster.spec.base import Fraction, Frozen, NonNegative, Positive
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

BYTE_VOCAB_SIZE = 257
"""Ids of the tokenizer `bytes`: the 256 bytes and the end of a document."""


class BlendSource(Frozen):
    """One source of a blend."""

    name: str
    """Name in weight schedules and in per-source losses."""
    source: str
    """Source, as `data.source`."""
    weight: NonNegative = 1.0
    """Relative weight: the source's share of the samples is its weight divided by the sum of all."""


class WeightChange(Frozen):
    """Other blend weights from some point on, given by exactly one of the two keys."""

    from_step: PositiveInt | None = None
    """Steps made before; converted with today's global_batch_size."""
    from_sample: PositiveInt | None = None
    """Samples read before."""
    weights: dict[str, NonNegative]
    """Weights by source; those left out get none."""


class DataConfig(Frozen):
    """Training data: one source, or a blend of several."""

    source: str | None = None
    """Source of the data: `python-stdlib` (the standard library's own source files), a file, a directory, a prepared
    token store, or a dataset that a plugin registers."""
    blend: tuple[BlendSource, ...] = ()
    """Several sources instead, each with a weight."""
    weight_schedule: tuple[WeightChange, ...] = ()
    """Changes of the blend's weights, in order."""
    packing: Literal["concatenate", "document_mask", "next_fit", "none"] = "concatenate"
    """Packing of documents into samples. concatenate: a sample is seq_len tokens of the stream, read as one.
    document_mask: each document attends to itself alone, and its positions begin at 0. next_fit: likewise, and
    documents are cut only where they are longer than a sample, which is padded. none: a sample is one document, padded
    to the longest of its micro-batch."""
    tokenizer: str = "bytes"
    """Tokenizer: `bytes`, a tokenizer.json or a directory that has one, or a SentencePiece model."""
    eos_token: str | None = None
    """Token that ends a document; None: as the tokenizer's own files say."""
    add_bos: bool | None = None
    """Begin each document with the tokenizer's begin-of-document token; None: as the tokenizer does (Llama 3, Mistral).
    Dialogues begin as their template says."""
    chat_template: str | None = None
    """File with the Jinja template of dialogues; None: the tokenizer's own, or ChatML where it has none."""
    text_key: str | None = None
    """Key of a row's text; None: `messages`, `prompt` with `completion`, or `text`, the first that a row has."""
    on_invalid_row: Literal["stop", "skip"] = "stop"
    """Response to an invalid row: stop at the first, or skip and count them."""
    max_bytes: PositiveInt | None = None
    """Limit on the bytes of text and JSON lines that are read; None: no limit."""
    validation_split: Fraction = 0.01
    """Fraction of the windows that is never trained on and gives the validation loss."""
    cache: str | None = None
    """Directory of the token store; None: `.data` beside the run directory."""
    hash_samples: bool = False
    """Write the hash of the sample stream to samples.sha256."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        names = [part.name for part in self.blend]
        if (self.source is None) == (not names):
            raise ValueError(
                "source: missing, expected text or python-stdlib; or several in blend"
                if self.source is None
                else f"source {self.source} and blend are given, expected one of them"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"blend has two sources of one name among {', '.join(names)}")
        if names and not any(part.weight for part in self.blend):
            raise ValueError("blend: all weights are 0, expected at least one above 0")
        for change in self.weight_schedule:
            if (change.from_step is None) == (change.from_sample is None):
                raise ValueError("weight_schedule: expected either from_step or from_sample in each")
            if unknown := [name for name in change.weights if name not in names]:
                raise ValueError(
                    f"weight_schedule: blend has no source {unknown[0]!r}, expected one of {', '.join(names)}"
                )
            if not any(change.weights.values()):
                raise ValueError("weight_schedule: all weights are 0, expected at least one above 0")
        return self

    @property
    def sources(self) -> list[str]:
        """All sources that are read."""
        return [part.source for part in self.blend] if self.source is None else [self.source]


class TrainConfig(Frozen):
    """Length, batch size, and checkpoints of the training."""

    steps: PositiveInt | None = None
    """Optimizer steps; None: as many as `epochs` comes to, which is known once the data are there."""
    tokens: PositiveInt | None = None
    """Instead of steps: train on so many tokens."""
    epochs: Positive | None = None
    """Instead of steps: passes over the training samples; 0.5 is half of them. An epoch of a blend has as many samples
    as all its sources together."""
    seq_len: PositiveInt
    """Tokens per sequence."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""
    init_from: str | None = None
    """Directory with the initial weights: a run, a checkpoint, a Hugging Face directory or a folder of
    torch.distributed.checkpoint; None: the model's own initialisation."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Number of latest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Interval of steps whose checkpoints are kept permanently, beside the latest ones; 0: none."""
    keep_best: bool = False
    """Save the checkpoint with the lowest validation loss (of every `eval.every` steps), and keep it as
    `checkpoints/best`."""
    early_stopping_patience: NonNegativeInt = 0
    """Validations in a row without improvement, after which the run ends; 0: never."""
    early_stopping_min_delta: NonNegative = 0.0
    """Smallest decrease of the validation loss that is an improvement."""
    ephemeral_every: NonNegativeInt = 0
    """Steps between checkpoints that are deleted when the next one of any kind is complete; 0: none."""
    remote_checkpoint_dir: str | None = None
    """URL of remote copies of the checkpoints, of any kind that fsspec knows (`s3://bucket/run`): a run directory with
    no checkpoints, or older ones, fetches the newest from there."""
    in_memory_checkpoint_every: NonNegativeInt = 0
    """Steps between in-memory checkpoints on the nodes, each of which also holds its predecessor's: a restarted run
    resumes from them if they are newer than its checkpoints; 0: none."""
    in_memory_checkpoint_dir: str = "/dev/shm"
    """Directory of in-memory checkpoints: in memory, or on a local disk; {rank} stands for a rank's number."""
    async_save: bool = True
    """Save in the background, from a copy in host memory; false: resume training when all of it is on disk."""
    max_minutes: Positive | None = None
    """Time limit, after which the run saves and stops as if asked to; the same command resumes it."""
    sample_tokens: NonNegativeInt = 200
    """Tokens of text that the trained model generates at the end; 0: none."""
    max_consecutive_skips: PositiveInt = 10
    """Limit on consecutive skipped steps, after which the run ends. A step whose loss or gradient norm is not finite,
    or a spike, is skipped with its samples."""
    spike_sigmas: NonNegative = 0.0
    """Standard deviations above the mean over the last steps beyond which a loss or gradient norm is a spike; 0: never.
    OLMo used 6."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Steps in that mean."""
    hang_timeout_s: Positive = 180.0
    """Seconds without progress of any rank, after which the run ends and names the rank that the others wait for."""
    restarts: NonNegativeInt = 0
    """Most times in a row, without a new step between, that the launcher starts all ranks again from the newest state
    after one was lost or hung; 0: never. Under torchrun its own --max-restarts counts."""
    memory_limit_bytes: PositiveInt | None = None
    """Most memory of each device that the run may take; `muster train --memory-limit 20GB` sets it. `parallel: auto`
    plans within it, with state in host memory and on disk where nothing else fits. None: all of it."""
    elastic: bool = False
    """Go on in the same processes when a rank is lost: a spare takes its place, and all redo the step under way, from
    the state after the step before, of which each rank keeps a copy in its node's memory and, with several nodes, in
    that of the next. On CPUs."""
    spares: NonNegativeInt = 1
    """Processes that wait to take the place of lost ranks, under `train.elastic`. 0: the ranks that are left go on
    under a plan with fewer, where there is one for the batch, until new processes are ready."""
    recovery: Literal["copy", "checkfree"] = "copy"
    """State from which ranks go on under `train.elastic` when one is lost. copy: that after the last step, of which
    each rank keeps a copy in memory. checkfree: nobody keeps copies; a lost inner stage of the pipeline becomes the
    weighted mean of the two stages beside it, and under schedule checkfree-plus an end stage a copy of the next one,
    which is approximate (CheckFree and CheckFree+, arXiv:2506.15461)."""
    checkfree_weights: Literal["squared_norm", "clipped_norm"] = "squared_norm"
    """Weights of that mean, from the last step's gradients of both stages. squared_norm: their squared norms, as in the
    paper; clipped_norm: their norms, 1 at most, and 1e-4, as in its authors' program."""
    checkfree_lr_scale: Positive = 1.2
    """Factor of the learning rate of stages that were lost and rebuilt so, from then on."""
    rebalance_experts_every: NonNegativeInt = 0
    """Steps after which experts move to other ranks of `ep`, with their optimizer state, where their load of these
    steps makes that pay before the next time; 0: they stay."""
    straggler_check_every: NonNegativeInt = 0
    """Steps between comparisons of the ranks' times, which name slow ranks, links, data and disks that three of them in
    a row have found, or twelve where cores are short; 0: none."""
    straggler_action: Literal["tell", "replace", "replan"] = "tell"
    """Action for a rank that is slow to compute, or computes wrongly. tell: it is named. replace: under
    `train.elastic` its process ends, and a spare takes its place, once for each place and not for want of a core.
    replan: under `train.elastic` all ranks go on under a plan with fewer layers, or a smaller share of the batch, for
    one that is slow to compute."""
    gradient_check_every: NonNegativeInt = 0
    """Steps between comparisons of gradients that all data-parallel ranks compute of one micro-batch, to the bit, which
    name ranks that compute wrongly; 0: none."""
    delayed_update: bool = False
    """Update the parameters whose optimizer state is off the device beside the passes of the next step, which are
    computed with the parameters before the update (arXiv:2101.06840 §5.2)."""
    delayed_update_warmup_steps: NonNegativeInt = 40
    """First steps, whose updates aren't delayed."""
    update_in_backward: bool = False
    """Update the layers whose optimizer state is off the device within a step's last backward, each as soon as its
    gradients are complete (Fuyou, arXiv:2403.06504): gradients are clipped by the norm of the step before
    (`optim.clip_by_previous_norm: true`), or never (`optim.clip_norm: 0`)."""
    deterministic: bool = False
    """Use only PyTorch algorithms that give the same bits every time."""
    z_loss: NonNegative = 0.0
    """Factor of log²(Z) of each non-ignored token, added to the loss that is minimized, not to the one that is
    reported. PaLM used 1e-4."""
    loss: str | None = None
    """Loss that a plugin registers; None: cross-entropy."""
    training_step: str | None = None
    """Training step that a plugin registers; None: clip the gradients and step the optimizer."""

    callbacks: tuple[str, ...] = ()
    """Callbacks that plugins register, which are told of steps, validations and saves."""

    @field_validator("callbacks")
    @classmethod
    def _check_callbacks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(require_component("callback", name) for name in names)

    @field_validator("loss", "training_step")
    @classmethod
    def _check_parts(cls, name: str | None, info: ValidationInfo) -> str | None:
        kind: ComponentKind = "loss" if info.field_name == "loss" else "step"
        return None if name is None else require_component(kind, name)

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.steps is None and self.epochs is None:
            raise ValueError("steps: missing, expected a whole number >= 1; or give tokens or epochs")
        if self.elastic and self.in_memory_checkpoint_every:
            raise ValueError("elastic keeps the state of every step in memory: leave in_memory_checkpoint_every out")
        if self.delayed_update and self.update_in_backward:
            raise ValueError("delayed_update and update_in_backward are given, expected one of them")
        if self.recovery != "copy" and not self.elastic:
            raise ValueError(f"recovery {self.recovery} says how ranks go on when one is lost: set elastic true, too")
        if self.loss is not None and self.z_loss:
            raise ValueError(f"z_loss is added to cross-entropy, but loss is {self.loss}: leave z_loss out")
        return self

    @property
    def update_time(self) -> UpdateTime:
        """Time at which the host updates parameters, but for the first steps."""
        if self.update_in_backward:
            return "in_backward"
        return "delayed" if self.delayed_update else "after_passes"

    @property
    def keeps_state_in_memory(self) -> bool:
        """True if the state of some steps is kept in the nodes' memory."""
        return self.keeps_every_step or self.in_memory_checkpoint_every > 0

    @property
    def keeps_every_step(self) -> bool:
        """True if each rank keeps a copy of its state after every step."""
        return self.elastic and self.recovery == "copy"

    @property
    def num_steps(self) -> int:
        """Steps of the whole run. Raises ValueError while the number of steps in `epochs` is unknown."""
        if self.steps is None:
            raise ValueError("train.epochs becomes a number of steps only once the data are there")
        return self.steps


class EvalConfig(Frozen):
    """Validation: the loss on the validation split."""

    every: NonNegativeInt = 0
    """Steps between validation losses; 0: only at the end."""
    batches: NonNegativeInt = 8
    """Global batches of the validation split that the loss is averaged over; 0: none."""


class TrackingConfig(Frozen):
    """Destinations of metrics beside metrics.jsonl."""

    tensorboard: bool | None = None
    """Write event files to `tensorboard` in the run directory; None: where TensorBoard is installed."""
    wandb: bool = False
    """Log to Weights & Biases, in `wandb` in the run directory."""
    wandb_project: str = "muster"
    """Project of Weights & Biases."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Mode of Weights & Biases. offline: nothing leaves this machine until `wandb sync`."""


class RunConfig(Frozen):
    """Everything that determines the computation of a run."""

    version: Literal[3] = 3
    plugins: tuple[PluginFile, ...] = ()
    """Python files, or modules, that register plugin components; those of all layers together."""
    seed: NonNegativeInt = 0
    adapter: AdapterSpec | None = None
    model: ModelSpec
    parallel: Plan = Plan()
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    optim: OptimConfig
    outer: OuterConfig | None = None
    """Outer steps of a plan with islands; left out: those of DiLoCo."""
    swarm: SwarmConfig | None = None
    """Peers that serve the stages of the model, in the place of this machine's ranks."""

    @model_validator(mode="after")
    def _join_adapter(self) -> "RunConfig":
        """Put the adapter into the model, whose parameters are then frozen."""
        adapter = self.adapter or self.model.adapter
        if adapter is not None:
            if adapter.kind in ("pissa", "hd_pissa") and self.train.init_from is None:
                raise ValueError(
                    f"adapter.kind {adapter.kind} decomposes given weights: give train.init_from, or take kind lora"
                )
            if adapter.changes_weights:
                check_weight_changes(self.optim, adapter.kind)
            model = ModelSpec.model_validate({**self.model.model_dump(), "adapter": adapter})
            check_four_bits(freeze_for_adapter(self.optim), model)
            for name, value in {"adapter": adapter, "model": model, "optim": freeze_for_adapter(self.optim)}.items():
                object.__setattr__(self, name, value)
        return self

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.data.tokenizer == "bytes" and self.model.vocab_size < BYTE_VOCAB_SIZE:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is smaller than"
                f" the {BYTE_VOCAB_SIZE} ids of data.tokenizer bytes"
            )
        if self.model.architecture is not None:
            require_component("model", self.model.architecture)
        if self.outer is not None and self.outer.fragments > self.model.num_layers:
            raise ValueError(
                f"outer.fragments {self.outer.fragments} are more than the model's {self.model.num_layers} layers, of"
                " which each has some"
            )
        if self.outer is not None and self.outer.method == "dipaco":
            self._check_paths(self.outer)
        if self.optim.freeze:
            check_patterns(self.optim, self.model)
        if self.data.packing == "none" and self.train.tokens is not None:
            raise ValueError(
                "train.tokens can't be turned into steps with data.packing none, whose samples have unequal lengths;"
                " give train.steps or train.epochs"
            )
        self._check_validation()
        firsts = self.weight_change_samples
        if firsts != sorted(set(firsts)):
            raise ValueError(
                f"data.weight_schedule: entries must begin one after the other, but they begin at samples {firsts}"
            )
        return self

    def _check_paths(self, outer: OuterConfig) -> None:
        """Raise ValueError where samples can't be sent to paths through modules of this model."""
        if len(outer.modules) > self.model.num_layers:
            raise ValueError(
                f"outer.modules has {len(outer.modules)} levels, more than the model's {self.model.num_layers} layers"
            )
        if self.train.seq_len <= outer.route_tokens:
            raise ValueError(
                f"outer.route_tokens {outer.route_tokens} leave nothing of samples of train.seq_len"
                f" {self.train.seq_len}: give fewer"
            )
        if self.data.source is None or self.data.packing == "none":
            found = "data.blend" if self.data.source is None else "data.packing none"
            raise ValueError(f"the router of outer.method dipaco isn't built for {found}: give one source, packed")

    def _check_validation(self) -> None:
        """Raise ValueError where validation losses decide something, and there are none."""
        used = ["train.keep_best"] * self.train.keep_best
        used += ["train.early_stopping_patience"] * (self.train.early_stopping_patience > 0)
        missing = {
            "eval.every": not self.eval.every,
            "eval.batches": not self.eval.batches,
            "data.validation_split": not self.data.validation_split,
        }
        if used and any(missing.values()):
            key = next(key for key, is_missing in missing.items() if is_missing)
            raise ValueError(f"{used[0]} goes by the validation loss, but {key} is 0: give {key}")
        if self.train.early_stopping_min_delta and not self.train.early_stopping_patience:
            raise ValueError(
                "train.early_stopping_min_delta is for train.early_stopping_patience, which is 0: give both"
            )

    @property
    def plugin_components(self) -> list[tuple[ComponentKind, str]]:
        """Kind and name of each component that a plugin must have registered."""
        wanted: list[tuple[ComponentKind, str | None]] = [
            ("model", self.model.architecture),
            ("optimizer", None if self.optim.name in OPTIMIZERS else self.optim.name),
            ("loss", self.train.loss),
            ("step", self.train.training_step),
            *(("callback", name) for name in self.train.callbacks),
        ]
        found: list[tuple[ComponentKind, str]] = [(kind, name) for kind, name in wanted if name is not None]
        datasets = component_names("dataset")
        schedules = component_names("schedule")
        used: tuple[tuple[ComponentKind, list[str]], ...] = (
            ("dataset", [name for name in self.data.sources if name in datasets]),
            ("schedule", [name for name in schedules if name == self.parallel.schedule]),
        )
        return found + [(kind, name) for kind, names in used for name in names]

    @property
    def weight_change_samples(self) -> list[int]:
        """The global sample at which each change of data.weight_schedule begins."""
        batch = self.train.global_batch_size
        return [change.from_sample or (change.from_step or 0) * batch for change in self.data.weight_schedule]

    @property
    def workload(self) -> Workload:
        """The sequences of one step."""
        return Workload(seq_len=self.train.seq_len, global_batch_size=self.train.global_batch_size)
