"""Storage and computation of a layer."""

from math import floor
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from muster.spec.base import Frozen

ZeroLevel = Literal["z1", "z2", "z3"]
Recompute = Literal["none", "elementwise", "core_attention", "every_second_matmul", "full"]
"""Part of a layer that its backward computes again. none: nothing. elementwise: norms and the product of the gated
linear unit, one pass over memory each. core_attention: scores, softmax and weighted values (Megatron-LM's selective,
arXiv:2205.05198 §5). every_second_matmul: every second matmul and everything cheap (torchtitan's selective activation
checkpointing by operation). full: the whole layer."""
Offload = Literal["none", "activations", "activations_on_disk"]
"""Place of the activations that a layer saves for its backward. activations: host memory, in a pipeline where enough
other passes run between forward and backward (arXiv:2503.01328), else layer by layer within a pass (arXiv:2506.13996
§3.3). activations_on_disk: disk, layer by layer (arXiv:2408.10013)."""
Tier = Literal["none", "host", "disk"]
"""Place of a state that leaves the device."""


class LayerStrategy(Frozen):
    """Storage and computation of one layer."""

    zero: ZeroLevel = "z3"
    """ZeRO level. z1: optimizer state sharded, gradients reduced once per step; z2: gradients kept sharded across
    micro-batches too; z3: parameters too. Without sharded ranks (dp_shard 1) all three are the same."""
    sp: bool = False
    """Sequence parallelism: between sublayers the sequence is sharded over the tp ranks."""
    tp_overlap: Literal["none", "async_tp", "domino", "pairs"] = "none"
    """Overlap of tensor-parallel collectives with compute. none: all-gather, then matmul, and matmul, then all-reduce
    or reduce-scatter; only weight gradients are computed meanwhile. async_tp, under sp: cut into chunks, each
    multiplied while the next one travels. domino: the sequences of a micro-batch are cut into two slices, whose
    collectives travel beside each other's compute (arXiv:2409.15241). pairs: those of a forward and of a backward that
    a schedule lets run as one do (dualpipe, dualpipe-v)."""
    recompute: Recompute = "none"
    """Part of the layer that the backward computes again."""
    attention: Literal["flash", "unfused"] = "flash"
    """Attention kernel. flash: scores stay within one kernel (arXiv:2205.14135). unfused: they are written to memory,
    and saved."""
    offload: Offload = "none"
    """State of passes kept in host memory or on disk: activations from forward to backward."""
    offload_optimizer: Tier = "none"
    """Place of the optimizer's state where that isn't the device. host: it stays in host memory, and the host's cores
    update the parameters (ZeRO-Offload, arXiv:2101.06840). disk: beside that, it is on disk between updates
    (ZeRO-Infinity, arXiv:2104.07857)."""
    offload_optimizer_ratio: float = Field(default=1.0, gt=0, le=1)
    """Share of the layers whose optimizer state leaves the device, spread evenly over the model; parameters outside
    layers are among them."""
    device_update_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the layers with optimizer state in host memory, spread evenly over these, that the device updates: after
    the passes their state comes to the device, layer by layer, and returns (Deep Optimizer States, arXiv:2410.21316).
    The host updates the others meanwhile, and parameters outside layers."""

    offload_param: Tier = "none"
    """Place of the master weights where that isn't the device. host: they stay in host memory, from which each pass
    copies the weights of a layer, in the compute dtype, ahead of their use; gradients go there as they are reduced.
    disk: copies for passes, master weights and gradients are on disk (ZeRO-Infinity, arXiv:2104.07857)."""
    offload_param_ratio: float = Field(default=1.0, gt=0, le=1)
    """Share of the layers whose parameters leave the device, as `offload_optimizer_ratio`."""

    @model_validator(mode="before")
    @classmethod
    def _take_older(cls, content: Any) -> Any:
        # `offload` said where the optimizer's state is, too, before it had a field of its own.
        if isinstance(content, dict) and content.get("offload") in ("optimizer", "all"):
            kept = "activations" if content["offload"] == "all" else "none"
            return content | {"offload": kept, "offload_optimizer": content.get("offload_optimizer", "host")}
        return content


class LayerOverride(Frozen):
    """A strategy for `count` layers from `start` on. Fields left out in a file are those of `default_strategy`."""

    start: int = Field(ge=0)
    count: PositiveInt
    strategy: LayerStrategy


def is_in_share(layer: int | None, ratio: float) -> bool:
    """Return True if a layer is among a share of all layers that is spread evenly over the model; None, which stands
    for parameters outside layers, always is."""
    return layer is None or floor(round((layer + 1) * ratio, 6)) > floor(round(layer * ratio, 6))


def is_updated_on_device(layer: int, strategy: LayerStrategy) -> bool:
    """Return True if the device updates a layer whose optimizer state its strategy keeps in host memory."""
    number = floor(round(layer * strategy.offload_optimizer_ratio, 6))  # of layers before it with state there
    return is_in_share(number, strategy.device_update_ratio)


def complete_override(run: object, default: object) -> object:
    """Return an override as a file has it, on top of the default strategy as the file has that."""
    if isinstance(run, dict) and isinstance(strategy := run.get("strategy"), dict) and isinstance(default, dict):
        return run | {"strategy": default | strategy}
    return run


_ADDED_LATER = (
    *("offload_optimizer", "offload_optimizer_ratio", "offload_param", "offload_param_ratio"),
    "device_update_ratio",
)
"""Fields of a strategy that are younger than the hashes in files."""


def drop_later_defaults(values: dict[str, Any]) -> None:
    """Remove from a strategy's values the fields of `_ADDED_LATER` that have their defaults, so that its plan keeps its
    hash."""
    for key in _ADDED_LATER:
        if values[key] == LayerStrategy.model_fields[key].default:
            del values[key]
