"""Parameters in host memory and on disk: elements by place, and what passes and updates move (ZeRO-Infinity,
Rajbhandari et al. 2021, arXiv:2104.07857)."""

from dataclasses import dataclass

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizer_state import is_zeroth_order
from muster.cost.memory.param_shards import ParamShard, StageParamShards, stage_param_shards
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.spec.layer_strategy import Tier
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


@dataclass(frozen=True, slots=True)
class OffloadedParams:
    """Elements of one stage's parameters off the device, on its first rank."""

    layers: tuple[tuple[Tier, ParamShard], ...] = ()
    """Place and elements of each layer, "none" for the device."""
    root: tuple[Tier, ParamShard] = ("none", ParamShard(0, 0))
    """The same of parameters outside layers."""
    compute_size: int = 0
    """Bytes of an element that passes read."""
    master_size: int = 0
    """Bytes of an element of master weights and gradients."""
    has_gradients: bool = True
    """False where a step has no backward."""
    sums_stay: bool = False
    """True if the sums that a step's last backward completes stay in host memory for its updates, which are beside
    it."""

    @property
    def groups(self) -> tuple[tuple[Tier, ParamShard], ...]:
        """All groups off the device."""
        return tuple(group for group in (self.root, *self.layers) if group[0] != "none")

    def numel(self, *tiers: Tier, layers_only: bool = False) -> int:
        """Return the elements of the rank's shards in some tiers."""
        groups = self.layers if layers_only else (self.root, *self.layers)
        return sum(held.shard_numel for tier, held in groups if tier in tiers)

    def host_link_bytes(self, backward: bool) -> int:
        """Return the bytes between host memory and the device for a pass: copies in the compute dtype, of what lies
        outside of layers in forwards alone; and the gradients of a backward."""
        moved = self.numel("host", "disk", layers_only=backward) * self.compute_size
        return moved + self.numel("host", "disk") * self.master_size * backward

    def disk_bytes_of_pass(self, backward: bool, num_micro_batches: int) -> tuple[float, float]:
        """Return the bytes that a pass reads and writes on disk; of a backward the mean, since a step's first has no
        sums of gradients to read, and its last none to write where they stay in host memory."""
        read: float = self.numel("disk", layers_only=backward) * self.compute_size
        gradients = self._disk_gradients * self.master_size
        if not backward:
            return read, 0
        but_one = gradients * (1 - 1 / num_micro_batches)
        return read + but_one, but_one if self.sums_stay else gradients

    @property
    def _disk_gradients(self) -> int:
        """Elements of the gradients on disk, which are those of layers."""
        return self.numel("disk", layers_only=True) * self.has_gradients

    @property
    def host_gradients(self) -> int:
        """Elements of the gradients that are summed in host memory: of what is on disk those outside of layers."""
        return (self.numel("host") + self.numel("disk") - self.numel("disk", layers_only=True)) * self.has_gradients

    @property
    def disk_bytes_per_update(self) -> tuple[int, int]:
        """Bytes that the update of all parts on disk reads and writes beside the optimizer's state."""
        masters, gradients = self.numel("disk"), self._disk_gradients
        copies = masters * self.compute_size * self.has_copies
        return (masters + gradients * (not self.sums_stay)) * self.master_size, masters * self.master_size + copies

    @property
    def has_copies(self) -> bool:
        """True if passes read another dtype than that of the master weights."""
        return self.compute_size != self.master_size

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory throughout a step: master weights, copies for passes and gradients; of what is on disk
        the gradients outside of layers."""
        each = (1 + self.has_gradients) * self.master_size + self.compute_size * self.has_copies
        on_disk = self.root[1].shard_numel * self.master_size * (self.root[0] == "disk") * self.has_gradients
        return self.numel("host") * each + on_disk

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk: master weights, copies for passes and gradients of layers."""
        masters, gradients = self.numel("disk"), self._disk_gradients
        return (masters + gradients) * self.master_size + masters * self.compute_size * self.has_copies

    @property
    def host_buffers(self) -> int:
        """Bytes of buffers in host memory for what is on its way, in passes or in the updates after them."""
        passes, update = self._buffers
        return max(passes, update)

    @property
    def host_buffers_in_backward(self) -> int:
        """The same where the host updates layers within the last backward: both at once."""
        return sum(self._buffers)

    @property
    def _buffers(self) -> tuple[int, int]:
        """Bytes of the buffers for passes and for updates.

        In passes: gradients of one group as they arrive and, on disk, those of another with their sums, and copies of
        two; in updates on disk: master weights and gradients of three parts.
        """
        if not self.groups:
            return 0, 0
        largest = max(held.shard_numel for _, held in self.groups)
        on_disk = max((held.shard_numel for tier, held in self.groups if tier == "disk"), default=0)
        gradients = self.master_size * self.has_gradients
        passes = largest * gradients + on_disk * (2 * gradients + 2 * self.compute_size)
        update = on_disk * (3 * (self.master_size + gradients) + self.compute_size)
        return passes, update


def offloaded_params(
    spec: ModelSpec,
    plan: Plan,
    stage: int,
    optim: OptimConfig | None = None,
    update_time: UpdateTime = "after_passes",
) -> OffloadedParams:
    """Return the parameters of a stage that are off the device."""
    if not plan.offloads_params:
        return OffloadedParams()
    held = stage_param_shards(spec, plan, stage, optim)
    layers = zip(plan.layers(stage, spec.num_layers), held.layers, strict=False)
    return OffloadedParams(
        tuple((plan.param_tier(layer), one) for layer, one in layers),
        (plan.param_tier(None), held.root),
        compute_bytes(plan.precision),
        master_bytes(plan.precision),
        not is_zeroth_order(optim),
        update_time == "in_backward",
    )


def on_device(held: StageParamShards, away: OffloadedParams) -> StageParamShards:
    """Return a stage's parameters with no shards of those off the device, where only passes have them."""
    if not away.groups:
        return held
    layers = tuple(
        one if tier == "none" else _without_shard(one) for one, (tier, _) in zip(held.layers, away.layers, strict=True)
    )
    if away.root[0] == "none":
        return StageParamShards(layers, held.vocab, held.other, held.last_root_numel, held.experts)
    root = _without_shard(held.vocab), _without_shard(held.other)
    return StageParamShards(layers, *root, held.last_root_numel, held.experts)


def _without_shard(held: ParamShard) -> ParamShard:
    return ParamShard(held.unsharded_numel, 0, held.last_param_numel, held.frozen_unsharded_numel, 0)
