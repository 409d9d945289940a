"""The section `optim` of a run file: the optimizer and its learning rate."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from muster.config.optimizers import OPTIMIZERS
from muster.plugins.registry import require_component
from muster.spec.base import Fraction, Frozen, NonNegative, Portion, Positive

UpdateTime = Literal["after_passes", "delayed", "in_backward"]
"""Time at which the host updates parameters: after a step's passes, beside those of the next step with the gradients of
this one, or within the step's last backward."""

_SCHEDULE_KEYS = {"decay_fraction": ("wsd",), "decay_shape": ("wsd",)}
"""Keys that only some learning-rate schedules read, with these schedules."""


def _joined(names: tuple[str, ...]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


class OptimConfig(Frozen):
    """The optimizer and its learning rate. What an optimizer doesn't use can't be given another value."""

    name: str = "adamw"
    """adamw, sgd or lion; mezo, whose steps have no backward; muon, galore, natural_galore, apollo, apollo_mini,
    adafactor or adamw_8bit, which are for the matrices of the layers (the embedding, the head and all vectors then get
    AdamW); or one that a plugin registers."""
    options: dict[str, bool | int | float | str] = {}
    """A plugin's optimizer: its own arguments."""
    lr: Positive
    """The highest learning rate, reached after the warm-up."""
    beta1: Fraction = 0.9
    """AdamW, also that of muon and others: decay of the mean gradient. lion: its share in the update's direction."""
    beta2: Fraction = 0.95
    """AdamW, also that of muon and others: decay of the mean square. lion, 0.99 if not given: decay of the mean
    gradient."""
    eps: Positive = 1e-8
    """AdamW, also that of muon and others."""
    momentum: Fraction = 0.0
    """sgd, 0.9 if not given; muon, 0.95 if not given."""
    nesterov: bool = False
    """Look one step ahead along the momentum. sgd; muon, true if not given; adamw, which then is NAdam with decoupled
    weight decay."""
    delay_compensation: Literal["none", "spike", "predict"] = "none"
    """Compensation for gradients of older weights, under an asynchronous schedule. predict (sgd, adamw, lion):
    passes whose gradients come D steps late use the weights as D more updates like the last one would leave them.
    spike (sgd with momentum): a gradient that comes D steps late adds at once what momentum would have made of it by
    then (both of Kosson et al., arXiv:2003.11666)."""
    muon_scale: Literal["match_rms", "original"] = "match_rms"
    """match_rms makes updates as large as AdamW's, so that its learning rate and weight decay hold; original is
    meant for learning rates of about 0.02."""
    muon_lr_ratio: Positive = 1.0
    """The learning rate of muon's matrices as a multiple of that of all else."""
    muon_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which Muon sends and orthogonalizes matrices; fp32 means that of the master weights."""
    rank: PositiveInt = 128
    """galore, natural_galore, apollo; apollo_mini, 1 if not given: elements to which the shorter side of a gradient is
    projected, in which the optimizer keeps its moments."""
    update_proj_gap: PositiveInt = 200
    """galore, natural_galore, apollo, apollo_mini: steps after which the projection is made anew."""
    scale: Positive = 0.25
    """galore, natural_galore: factor of its updates. apollo, 1 if not given; apollo_mini, 128: updates are multiplied
    by its root."""
    gradient_history: PositiveInt = 20
    """natural_galore: last projected gradients whose products stand for the Fisher information."""
    damping: Positive = 1e-3
    """natural_galore: what is added to the Fisher information's diagonal before it is inverted."""
    zo_eps: Positive = 1e-3
    """mezo: length of the perturbations at which losses are compared, for each parameter's random number of variance
    1."""
    perturbation_parallel: bool = False
    """mezo: pairs of neighbouring data-parallel ranks share the samples of both, and each computes one of the two
    perturbations (DistZO2)."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices: each step subtracts learning rate · weight_decay · weight. Norms, biases and
    embeddings have none. mezo: 0 if not given."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises to its highest."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    """Decay of the learning rate; wsd keeps it at its peak until near the end (warmup, stable, decay)."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: the part of all steps in which it falls."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """wsd: how it falls; sqrt is 1 − √(the part of the fall that has passed)."""
    min_lr_ratio: Portion = 0.1
    """The last learning rate as a part of the highest."""
    clip_norm: NonNegative = 1.0
    """The gradients' global norm is cut down to this; 0: never. mezo, 0 if not given: so is the slope along the
    perturbation."""
    clip_by_previous_norm: bool = False
    """Clip by the gradient norm of the last step that was applied, which is known before this step's gradients are; a
    first step by its own."""
    ema_decay: Fraction = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999, which is kept beside them and used as
    `RUN@ema`; 0: none."""
    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are left as they are (`embed.*`, `layers.[0-3].*`, `*.attn.*`): they have
    neither gradients nor optimizer state. One text holds several, with commas between them."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return name if name in OPTIMIZERS else require_component("optimizer", name, tuple(OPTIMIZERS))

    @field_validator("freeze", mode="before")
    @classmethod
    def _split_patterns(cls, patterns: object) -> object:
        """Read one text as a list, which a command line can then give: `embed.*,layers.[0-3].*`."""
        return tuple(filter(None, patterns.split(","))) if isinstance(patterns, str) else patterns

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(name := data.get("name"), str):
            defaults = OPTIMIZERS[name].defaults if name in OPTIMIZERS else {}
            data = {**defaults, **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> "OptimConfig":
        if self.options and self.name in OPTIMIZERS:
            raise ValueError(f"options are for an optimizer that a plugin registers, but {self.name} is chosen")
        for key, model_field in type(self).model_fields.items():
            optimizers = tuple(name for name, entry in OPTIMIZERS.items() if key in entry.keys)
            users = optimizers or _SCHEDULE_KEYS.get(key, ())
            chosen = self.name if optimizers else self.schedule
            value = getattr(self, key)
            if users and chosen not in users and value != model_field.default:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{key} {shown} is for {_joined(users)}, but {chosen} is chosen; leave it out")
        if self.nesterov and not self.momentum and self.name != "adamw":
            raise ValueError("nesterov needs momentum, which is 0; set momentum or leave nesterov out")
        if self.clip_by_previous_norm and not self.clip_norm:
            raise ValueError("clip_by_previous_norm clips to clip_norm, which is 0: leave one of them out")
        if self.delay_compensation == "spike" and (self.name != "sgd" or self.nesterov or not self.momentum):
            raise ValueError(
                "delay_compensation spike needs sgd with momentum above 0, and nesterov to be false: take predict"
            )
        return self
