"""What a run does: the typed content of a run file."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator, model_validator

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import OPTIMIZERS
from muster.plugins.loader import PluginFile
from muster.plugins.registry import ComponentKind, component_names, require_component
from muster.spec.base import Fraction, Frozen, NonNegative, Positive
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

BYTE_VOCAB_SIZE = 257
"""Ids of the tokenizer `bytes`: the 256 bytes and the end of a document."""


class BlendSource(Frozen):
    """One source of a mixture."""

    name: str
    """By which weights and losses are said of it."""
    source: str
    """As `data.source`."""
    weight: NonNegative = 1.0
    """Its part of the samples is its weight among all weights."""


class WeightChange(Frozen):
    """Other weights from some point on. One of the two says from where."""

    from_step: PositiveInt | None = None
    """Steps made before; counted in today's global_batch_size."""
    from_sample: PositiveInt | None = None
    """Samples read before."""
    weights: dict[str, NonNegative]
    """By source; those left out get none."""


class DataConfig(Frozen):
    """What is read: one source, or a mixture of several."""

    source: str | None = None
    """`python-stdlib` (the standard library's own source files), a file, a directory, a prepared token store, or a
    data set that a plugin registers."""
    blend: tuple[BlendSource, ...] = ()
    """Several sources instead, each with a weight."""
    weight_schedule: tuple[WeightChange, ...] = ()
    """Of the mixture's weights, in order."""
    packing: Literal["concatenate", "document_mask", "next_fit", "none"] = "concatenate"
    """concatenate: a sample is seq_len tokens of the stream, read as one. documents: each document in it sees itself
    alone, and its positions begin at 0. whole: likewise, and documents are cut only where they are longer than a
    sample, which is filled up. none: a sample is one document, padded to the longest of its micro-batch."""
    tokenizer: str = "bytes"
    """`bytes`, a tokenizer.json or a directory that has one, or a SentencePiece model."""
    eos_token: str | None = None
    """The token that ends a document; None: what the tokenizer's own files say."""
    chat_template: str | None = None
    """A file with the Jinja template of dialogues; None: the tokenizer's own, or ChatML where it has none."""
    text_key: str | None = None
    """The key of a row's text; None: `messages`, `prompt` with `completion`, or `text`, the first that a row has."""
    on_invalid_row: Literal["stop", "skip"] = "stop"
    """What happens where a row can't be used: stop at the first, or skip and count them."""
    max_bytes: PositiveInt | None = None
    """Of text and JSON lines that are read at most; None: all of it."""
    validation_split: Fraction = 0.01
    """Fraction of the windows that is never trained on and gives the validation loss."""
    cache: str | None = None
    """Directory of the token store; None: `.data` beside the run directory."""
    hash_samples: bool = False
    """Write the hash of the stream of samples to samples.sha256."""

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        names = [part.name for part in self.blend]
        if (self.source is None) == (not names):
            raise ValueError(
                "source: missing, expected text or python-stdlib; or give several in mix"
                if self.source is None
                else f"source {self.source} and mix are given, expected one of them"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"mix has two sources of one name among {', '.join(names)}")
        if names and not any(part.weight for part in self.blend):
            raise ValueError("mix: all weights are 0, expected one that is more")
        for change in self.weight_schedule:
            if (change.from_step is None) == (change.from_sample is None):
                raise ValueError("changes: expected either from_step or from_sample in each")
            if unknown := [name for name in change.weights if name not in names]:
                raise ValueError(f"changes: mix has no source {unknown[0]!r}, expected one of {', '.join(names)}")
            if not any(change.weights.values()):
                raise ValueError("changes: all weights are 0, expected one that is more")
        return self

    @property
    def sources(self) -> list[str]:
        """All that is read."""
        return [part.source for part in self.blend] if self.source is None else [self.source]


class TrainConfig(Frozen):
    """How long, how much at once, and what is kept."""

    steps: PositiveInt | None = None
    """Optimizer steps; None: as many as `epochs` comes to, which is known when the data are there."""
    tokens: PositiveInt | None = None
    """Instead of steps: as many as it takes to train on so many tokens."""
    epochs: Positive | None = None
    """Instead of steps: as many as it takes to go through the training samples so often; 0.5 is half of them. An epoch
    of a mixture is as many samples as all its sources have together."""
    seq_len: PositiveInt
    """Tokens per sequence."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""
    init_from: str | None = None
    """Directory whose weights the training begins with: a run, a checkpoint, a Hugging Face directory or a folder of
    torch.distributed.checkpoint; None: the model's initial values."""
    log_every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Checkpoints that are kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are multiples of it are kept for good, beside the last ones; 0: none is."""
    ephemeral_every: NonNegativeInt = 0
    """Steps between checkpoints that stay only until the next one of any kind is complete; 0: there are none."""
    remote_checkpoint_dir: str | None = None
    """URL below which copies of the checkpoints lie, of any kind that fsspec knows (`s3://bucket/run`): a run directory
    that has none, or older ones, gets the newest from there."""
    in_memory_checkpoint_every: NonNegativeInt = 0
    """Steps between copies of the state in the memory of the nodes, each of which also keeps those of the one before: a
    run that is started again goes on from them if they are newer than its checkpoints; 0: there are none."""
    in_memory_checkpoint_dir: str = "/dev/shm"
    """Directory of in-memory checkpoints: in memory, or on a local disk; {rank} stands for a rank's number."""
    async_save: bool = True
    """Save beside the training, from a copy in host memory; false: train on when all of it is on disk."""
    max_minutes: Positive | None = None
    """After so long the run saves and stops, as if asked to; the same command goes on."""
    sample_tokens: NonNegativeInt = 200
    """Tokens of text that the trained model writes at the end; 0: none."""
    max_consecutive_skips: PositiveInt = 10
    """A step whose loss or gradient norm is not finite, or a spike, is skipped with its samples; so many in a row end
    the run."""
    spike_sigmas: NonNegative = 0.0
    """A loss or gradient norm so many standard deviations above its mean over the last steps is a spike; 0: none is.
    OLMo used 6."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Steps in that mean."""
    hang_timeout_s: Positive = 180.0
    """Seconds in which no rank begins anything; after that the run ends, and the rank that the others wait for is
    named."""
    deterministic: bool = False
    """Only those algorithms of PyTorch that give the same bits every time."""
    z_loss: NonNegative = 0.0
    """Times log²(Z) of each counted token: added to the loss that is made small, not to the one that is reported.
    PaLM used 1e-4."""
    loss: str | None = None
    """A loss that a plugin registers; None: cross-entropy."""
    training_step: str | None = None
    """A training step that a plugin registers; None: clip the gradients and let the optimizer step."""

    @field_validator("loss", "training_step")
    @classmethod
    def _check_parts(cls, name: str | None, info: ValidationInfo) -> str | None:
        kind: ComponentKind = "loss" if info.field_name == "loss" else "step"
        return None if name is None else require_component(kind, name)

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.steps is None and self.epochs is None:
            raise ValueError("steps: missing, expected a whole number >= 1; or say how long with tokens or epochs")
        if self.loss is not None and self.z_loss:
            raise ValueError(f"z_loss is added to cross-entropy, but loss is {self.loss}: leave z_loss out")
        return self

    @property
    def num_steps(self) -> int:
        """Steps of the whole run. Raises ValueError where it isn't known yet how many `epochs` comes to."""
        if self.steps is None:
            raise ValueError("train.epochs is a number of steps only when the data are there")
        return self.steps


class EvalConfig(Frozen):
    """Validation: the loss on held-out samples."""

    every: NonNegativeInt = 0
    """Steps between validation losses; 0: only at the end."""
    batches: NonNegativeInt = 8
    """Global batches of held-out samples that the loss is taken over; 0: none."""


class TrackingConfig(Frozen):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool | None = None
    """Write event files to `tensorboard` in the run directory; None: where TensorBoard is installed."""
    wandb: bool = False
    """Keep a run of Weights & Biases, in `wandb` in the run directory."""
    wandb_project: str = "muster"
    """The project of Weights & Biases that runs are put in."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """offline: nothing leaves this machine until `wandb sync`."""


class RunConfig(Frozen):
    """Everything that decides what a run computes."""

    version: Literal[2] = 2
    plugins: tuple[PluginFile, ...] = ()
    """Python files, or modules, that register parts of one's own; those of all layers together."""
    seed: NonNegativeInt = 0
    model: ModelSpec
    parallel: Plan = Plan()
    data: DataConfig
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    optim: OptimConfig

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.data.tokenizer == "bytes" and self.model.vocab_size < BYTE_VOCAB_SIZE:
            raise ValueError(
                f"model.vocab_size {self.model.vocab_size} is smaller than"
                f" the {BYTE_VOCAB_SIZE} ids of data.tokenizer bytes"
            )
        if self.model.architecture is not None:
            require_component("model", self.model.architecture)
        if self.data.packing == "none" and self.train.tokens is not None:
            raise ValueError(
                "train.tokens can't be turned into steps with data.packing none, whose samples have unequal lengths;"
                " say train.steps or train.epochs"
            )
        firsts = self.weight_change_samples
        if firsts != sorted(set(firsts)):
            raise ValueError(
                f"data.weight_schedule: each begins after the one before, but they begin at samples {firsts}"
            )
        return self

    @property
    def plugin_components(self) -> list[tuple[ComponentKind, str]]:
        """Kind and name of each part that a plugin must have registered."""
        wanted: list[tuple[ComponentKind, str | None]] = [
            ("model", self.model.architecture),
            ("optimizer", None if self.optim.name in OPTIMIZERS else self.optim.name),
            ("loss", self.train.loss),
            ("step", self.train.training_step),
        ]
        found: list[tuple[ComponentKind, str]] = [(kind, name) for kind, name in wanted if name is not None]
        datasets, schedules = component_names("dataset"), component_names("schedule")
        used: tuple[tuple[ComponentKind, list[str]], ...] = (
            ("dataset", [name for name in self.data.sources if name in datasets]),
            ("schedule", [name for name in schedules if name == self.parallel.schedule]),
        )
        return found + [(kind, name) for kind, names in used for name in names]

    @property
    def weight_change_samples(self) -> list[int]:
        """The global sample with which each of data.weight_schedule begins."""
        batch = self.train.global_batch_size
        return [change.from_sample or (change.from_step or 0) * batch for change in self.data.weight_schedule]

    @property
    def workload(self) -> Workload:
        """The sequences of one step."""
        return Workload(seq_len=self.train.seq_len, global_batch_size=self.train.global_batch_size)
