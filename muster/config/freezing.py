"""Frozen parameters: those whose names match a pattern of `optim.freeze`, which no step changes."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod

from muster.config.optim_config import OptimConfig
from muster.spec.adapters import ADAPTER_FREEZE
from muster.spec.four_bit import has_four_bits
from muster.spec.model import ModelSpec, parameter_shapes, stage_parameter_shapes


def is_frozen(optim: OptimConfig | None, name: str) -> bool:
    """Return True for a parameter without a gradient, which the optimizer leaves as it is."""
    return name.endswith(".router.expert_bias") or matches_freeze(optim, name)


def matches_freeze(optim: OptimConfig | None, name: str) -> bool:
    """Return True for a parameter that the run is told to leave as it is."""
    return optim is not None and matches_pattern(optim.freeze, name)


@lru_cache(maxsize=1 << 16)
def matches_pattern(patterns: tuple[str, ...], name: str) -> bool:
    """Return True for a name whose last matching pattern doesn't begin with `!`."""
    found = False
    for pattern in patterns:
        if fnmatchcase(name, pattern.removeprefix("!")):
            found = not pattern.startswith("!")
    return found


def is_frozen_up_to(optim: OptimConfig | None, spec: ModelSpec, num_layers: int) -> bool:
    """Return True where the embedding and the first `num_layers` layers are frozen: no gradient is needed in them."""
    if optim is None or not optim.freeze:
        return False
    return num_layers <= frozen_prefix(optim.freeze, spec)


@lru_cache(maxsize=256)
def frozen_prefix(patterns: tuple[str, ...], spec: ModelSpec) -> int:
    """Return how many first layers are frozen along with the embedding; −1 where the embedding is trained."""

    def all_frozen(names: Iterable[tuple[str, tuple[int, ...]]]) -> bool:
        return all(matches_pattern(patterns, name) for name, _ in names)

    if not all_frozen(stage_parameter_shapes(spec, range(0), first=True, last=False)):
        return -1
    count = 0
    while count < spec.num_layers and all_frozen(
        stage_parameter_shapes(spec, range(count, count + 1), first=False, last=False)
    ):
        count += 1
    return count


def freeze_for_adapter(optim: OptimConfig) -> OptimConfig:
    """Return the section with patterns that leave adapters alone trained before its own."""
    if optim.freeze[: len(ADAPTER_FREEZE)] == ADAPTER_FREEZE:
        return optim
    return optim.model_copy(update={"freeze": (*ADAPTER_FREEZE, *optim.freeze)})


def check_four_bits(optim: OptimConfig, spec: ModelSpec) -> None:
    """Raise ValueError where a pattern trains a weight that is held in 4 bits."""
    for name, _ in parameter_shapes(spec):
        if has_four_bits(spec, name) and not is_frozen(optim, name):
            raise ValueError(
                f"optim.freeze trains {name}, which adapter.load_in_4bit holds in 4 bits: take back fewer, such as"
                " '!*norm.weight', or leave load_in_4bit out"
            )


def check_weight_changes(optim: OptimConfig, kind: str) -> None:
    """Raise ValueError where adapters that are added to the weights in each step can't be trained so."""
    if optim.name != "adamw":
        raise ValueError(f"adapter.kind {kind} has AdamW's updates, but optim.name is {optim.name}: take adamw")
    if optim.ema_decay:
        raise ValueError(
            f"adapter.kind {kind} changes frozen weights, which have no average: leave optim.ema_decay out"
        )
    if not set(optim.freeze) <= set(ADAPTER_FREEZE):
        raise ValueError(f"adapter.kind {kind} trains adapters alone: leave optim.freeze out")


def frozen_numel(optim: OptimConfig, spec: ModelSpec) -> int:
    """Return the number of the model's elements that are frozen."""
    return sum(prod(shape) for name, shape in parameter_shapes(spec) if is_frozen(optim, name))


def newly_trained(before: Iterable[str], optim: OptimConfig, spec: ModelSpec) -> list[str]:
    """Return the parameters that the run trains and that the patterns `before` froze."""
    patterns = tuple(before)
    names = (name for name, _ in parameter_shapes(spec))
    return [name for name in names if matches_pattern(patterns, name) and not is_frozen(optim, name)]


def check_patterns(optim: OptimConfig, spec: ModelSpec) -> None:
    """Raise ValueError where a pattern matches no parameter, or where nothing is left to train."""
    names = [name for name, _ in parameter_shapes(spec)]
    for pattern in optim.freeze:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            raise ValueError(
                f"optim.freeze: no parameter is called {pattern!r}; expected names or patterns such as 'embed.*' or"
                f" 'layers.[0-3].*' (this model has {', '.join(dict.fromkeys((*names[:3], names[-1])))}, …)"
            )
    if names and all(is_frozen(optim, name) for name in names):
        raise ValueError("optim.freeze: all parameters are frozen, expected at least one that is trained")
