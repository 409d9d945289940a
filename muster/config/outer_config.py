"""The section `outer` of a run file: how and how often the islands of a plan meet."""

from typing import Any, Literal, get_args

from pydantic import NonNegativeInt, PositiveInt, model_validator

from muster.spec.base import Fraction, Frozen, Positive
from muster.spec.units import pluralize

OuterMethodName = Literal["diloco", "streaming"]
OUTER_METHODS: tuple[OuterMethodName, ...] = get_args(OuterMethodName)
Compression = Literal["none", "bf16", "int8"]

_STREAMING_ONLY = {"fragments": 1, "delay": 0, "mixing": 0.0}
"""Keys that only streaming reads, with the values that stand for DiLoCo."""


class OuterConfig(Frozen):
    """Outer steps of islands. What a method doesn't use can't be given another value."""

    method: OuterMethodName = "diloco"
    """diloco: all parameters are exchanged after the last step of a round, and islands wait for them
    (arXiv:2311.08105). streaming: fragments of the layers are exchanged one after another, beside later steps
    (arXiv:2501.18512)."""
    every: PositiveInt = 100
    """Steps of a round, in which each parameter is exchanged once. The last step of the training ends a round, too."""
    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """Outer optimizer: SGD with Nesterov momentum, or plain SGD (with heavy-ball momentum where that is given)."""
    learning_rate: Positive = 0.7
    """Outer learning rate, by which the mean of the islands' parameter changes is multiplied. 1 with plain sgd averages
    parameters."""
    momentum: Fraction = 0.9
    """Momentum of the outer optimizer; sgd: 0 if not given."""
    compression: Compression = "none"
    """Precision in which parameter changes travel. none: that of the parameters. bf16. int8: with one scale for each
    1024 elements. Sums are always in the parameters' precision."""
    fragments: PositiveInt = 1
    """streaming, 2 if not given: parts of the layers that are exchanged at different steps of a round."""
    delay: NonNegativeInt = 0
    """streaming, 1 if not given: steps beside which an exchange runs before its result is used."""
    mixing: Fraction = 0.0
    """streaming, 0.5 if not given: share of an island's own parameters in what it continues with."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own = {"momentum": 0.0} if data.get("optimizer") == "sgd" else {}
        if data.get("method") == "streaming":
            own |= {"fragments": 2, "delay": 1, "mixing": 0.5}
        return {**own, **data}

    @model_validator(mode="after")
    def _check(self) -> "OuterConfig":
        if self.method != "streaming":
            for key, none in _STREAMING_ONLY.items():
                if getattr(self, key) != none:
                    raise ValueError(f"{key} {getattr(self, key)} is for method streaming, not for {self.method}")
        if self.every % self.fragments:
            raise ValueError(
                f"every {self.every} is not a multiple of fragments {self.fragments}: fragments meet at equal distances"
            )
        if self.delay >= self.steps_between:
            raise ValueError(
                f"delay {self.delay} is not shorter than the {pluralize(self.steps_between, 'step')} from one fragment"
                f" to the next (every {self.every} / fragments {self.fragments})"
            )
        return self

    @property
    def steps_between(self) -> int:
        """Steps from the exchange of one fragment to that of the next."""
        return self.every // self.fragments
