"""Native storage of a stage: state and saved activations under `fully_shard` around a plain decoder.

Master weights, gradients and moments are float32 and sharded as `muster.parallel.fsdp` does. It follows the runtime
buffer by buffer; `muster memory-check` compares it with PyTorch's accounting of that runtime.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from muster.config.freezing import is_frozen, is_frozen_up_to
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order, mean_state_bytes
from muster.cost.activations import (
    PassSizes,
    boundary_saved_bytes,
    conjunction_saved_bytes,
    further_activation_bytes,
    layer_activation_bytes,
    loss_saved_bytes,
    mlp_inner_bytes,
    norm_saved_bytes,
    pass_sizes,
)
from muster.cost.host_updates import host_updated_numels, shared_update_numels
from muster.cost.memory.kernel_workspace import KernelWorkspace
from muster.cost.memory.linear_attention import deferred_width
from muster.cost.memory.param_shards import (
    ParamShard,
    StageParamShards,
    layer_type,
    stage_param_shards,
    summed_gradient_share,
)
from muster.cost.memory.terms import MemoryTerms
from muster.cost.param_offload import offloaded_params, on_device
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.layout.tensor_layout import computed_layers, tp_shard
from muster.schedule.host_update import PARTS_AHEAD
from muster.spec.four_bit import BLOCK
from muster.spec.layer_strategy import Recompute, Tier
from muster.spec.model import ModelSpec, layer_parameter_shapes, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.workload import Workload

ADAMW_STATE_PER_PARAM = 2.0
"""Elements of AdamW's state per parameter: two moments (arXiv:1711.05101)."""

DEQUANTIZED_BYTES = 6 + 12 / BLOCK
"""Temporary bytes for each element that is made of a code of 4 bits: a number in float32, of every two elements an
index, and of every block its group's index and its absolute maximum (`muster.model.four_bit`)."""

OUTER_STATE_PER_PARAM = 2
"""Elements per parameter that each island has of what all share: outer parameters and momentum (arXiv:2311.08105)."""


class NativeStorage:
    """One stage on its first rank; all quantities in bytes."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, workload: Workload, stage: int, optim: OptimConfig | None = None
    ) -> None:
        """Compute the sizes of a stage. The optimizer is AdamW if `optim` is None."""
        self.spec = spec
        self.plan = plan
        self.index = stage
        self.compute_size, self.master_size = compute_bytes(plan.precision), master_bytes(plan.precision)
        self.state_per_param = ADAMW_STATE_PER_PARAM
        if optim is not None:
            state_bytes = mean_state_bytes(_without_freezing(optim), dict(parameter_shapes(spec)), self.master_size)
            self.state_per_param = state_bytes / self.master_size
        if plan.islands > 1:
            self.state_per_param += OUTER_STATE_PER_PARAM
        self._optim = optim
        self.has_backward = not is_zeroth_order(optim)
        """False where passes are forwards alone, which save nothing and make no gradients."""
        self._layer_bytes: dict[Hashable, int] = {}
        self.sizes: PassSizes = pass_sizes(spec, plan, workload, stage)
        self.param_shards: StageParamShards = stage_param_shards(spec, plan, stage, optim)
        self.layers = computed_layers(spec, plan, stage)
        self.mtp_layers = len(spec.last_layers(plan.is_last(stage)))
        """Number of its layers, the last ones, that predict further tokens."""
        self.host_updated = host_updated_numels(spec, plan, stage, optim)
        """Elements of each part whose optimizer state is off the device."""
        self.by_host, self.by_device = shared_update_numels(spec, plan, stage, optim)
        self.offloaded_params = offloaded_params(spec, plan, stage, optim)
        self.held_shards = on_device(self.param_shards, self.offloaded_params)
        """Parameters with the shards that are on the device between passes."""
        mesh = plan.mesh(stage)
        self.is_alone = mesh.grad_sum_size == 1 or plan.schedule_entry.is_asynchronous
        """True if no other rank computes gradients of the same parameters, or those are summed where they are."""
        self.is_single_rank = self.is_alone and not plan.offloads_params
        self.is_single_shard = mesh.state_shards == 1
        """True if no other rank holds a part of the same parameters: reductions over the shards are copies."""
        self.is_unsharded = self.is_single_rank and self.compute_size == self.master_size
        """True if nothing is sharded: gradients are accumulated where they are computed."""
        self.has_master_copies = self.is_single_rank and not self.is_unsharded
        """True if passes compute with copies in the compute dtype, whose gradients are added to sums one by one."""
        self.copied_share = 0.0
        """Elements, as a multiple of the rank's shards, of its part of neighbours' copies of the parameters."""
        if plan.copies_params(mesh):
            self.copied_share = mesh.state_shards / plan.gather_ranks(mesh)
        self.reduced_share = 0.0
        """Elements, as the same multiple, that a backward reduces gradients to where the step's last completes this."""
        if (ranks := plan.reduce_ranks(mesh)) < mesh.state_shards:
            self.reduced_share = mesh.state_shards / ranks
        self.summed_share = summed_gradient_share(plan, workload, stage)
        """Elements, as the same multiple, of gradients that wait for their reduction to all ranks' shards."""
        self.zero = "z2" if self.is_single_rank else plan.pass_strategy(self.layers[0] if self.layers else 0).zero
        self.has_embedding = plan.is_first(stage) and not plan.vocab_parallel
        """True if the stage has the whole embedding."""
        self.has_head = plan.is_last(stage) and not plan.vocab_parallel
        """True if the stage has the whole head."""

    def copies_reduced(self, is_single: bool, kernels: KernelWorkspace) -> bool:
        """Return True if gradients on their way take as much as their buffer once more: a copy that the transport makes
        of them, or what is sent and received in bf16. `is_single`: a single rank holds these parameters."""
        if self.plan.grad_reduce_dtype == "bf16":
            return not is_single
        return kernels.stages_collectives and not self.is_single_rank

    @property
    def gathers_in_passes(self) -> bool:
        """True if passes gather parameters layer by layer, and free them."""
        return self.zero == "z3" and not self.is_unsharded

    @property
    def reduces_in_passes(self) -> bool:
        """True if every backward reduces its gradients."""
        return self.zero != "z1" and not self.is_single_rank

    @property
    def parameters(self) -> int:
        """Bytes of the rank's shards of the parameters."""
        return self.held_shards.total.shard_numel * self.master_size

    @property
    def copied_parameters(self) -> int:
        """Bytes of its part of neighbours' copies of the parameters, from which passes gather."""
        return int(self.param_shards.total.shard_numel * self.copied_share * self.compute_size)

    def dense_bytes(self, at_once: int) -> tuple[int, int]:
        """Return the bytes of the largest matrix that a pass makes of codes of 4 bits, and of the temporary tensors for
        elements that are made at once."""
        if self.spec.adapter is None or not self.spec.adapter.load_in_4bit or not self.layers:
            return 0, 0
        shapes = layer_parameter_shapes(self.spec, 0)
        cut = (tp_shard(self.spec, name, shape, self.sizes.mesh.tp, 0)[0] for name, shape in shapes)
        numel = max(box.numel for box in cut if len(box.size) > 1)
        return numel * self.compute_size, int(min(numel, at_once) * DEQUANTIZED_BYTES)

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state on the device."""
        return self._all_optimizer_state - self.host_optimizer

    @property
    def _all_optimizer_state(self) -> int:
        return int((self.trained_shard_numel - self._tied_numel) * self.master_size * self.state_per_param)

    @property
    def _tied_numel(self) -> int:
        """Elements of a tied weight whose state the first stage's copy on this rank has."""
        if self.spec.tied_embeddings and self.has_head and not self.has_embedding and self._first_stage_is_here:
            return _trained_numel(self.param_shards.vocab)
        return 0

    @property
    def host_optimizer(self) -> int:
        """Bytes of the optimizer's state that isn't on the device (arXiv:2101.06840)."""
        return int(sum(self.host_updated) * self.master_size * self.state_per_param)

    @property
    def disk_optimizer(self) -> int:
        """Part of `host_optimizer` on disk (arXiv:2104.07857)."""
        return int(sum(self._on_disk) * self.master_size * self.state_per_param)

    @property
    def _on_disk(self) -> list[int]:
        """Elements of each part that the host updates, of those whose state is on disk."""
        if not self.host_updated:
            return []
        tiers = self.plan.host_update_tiers(self.index, self.spec.num_layers)
        return [numel for numel, tier in zip(self.host_updated, tiers, strict=True) if tier == "disk"]

    @property
    def host_update_buffers(self) -> int:
        """Bytes of the buffers in host memory through which gradients and parameters pass: those of neighbouring parts,
        one of which is updated while another is copied, and of the state on disk those that are read, updated and
        written."""
        return self._own_update_buffers + self.offloaded_params.host_buffers

    @property
    def backward_update_buffers(self) -> int:
        """Bytes of the same buffers where layers are updated within the last backward."""
        return self._own_update_buffers + self.offloaded_params.host_buffers_in_backward

    @property
    def _own_update_buffers(self) -> int:
        """Bytes of the buffers of gradients and parameters on the device, and of state on disk."""
        parts = self._copied_for_update
        pairs = [sum(parts[place : place + PARTS_AHEAD + 1]) for place in range(len(parts))]
        return int((2 * max(pairs, default=0) + self._disk_buffers) * self.master_size)

    @property
    def delayed_update_buffers(self) -> int:
        """Bytes of the same buffers where updates are delayed: those of all parts, from one step to the next, and of
        the state on disk as many."""
        return int((2 * sum(self.host_updated) + self._disk_buffers) * self.master_size)

    @property
    def fetched_state(self) -> int:
        """Bytes of the state that is on the device at a time for updates there: that of neighbouring parts, one of
        which is updated while another is copied."""
        parts = self.by_device
        if len(parts) == 1 and self.plan.num_stages > self.plan.pp:
            parts = parts * 2  # beside one of another stage
        pairs = [sum(parts[place : place + PARTS_AHEAD + 1]) for place in range(len(parts))]
        return int(max(pairs, default=0) * self.master_size * self.state_per_param)

    @property
    def _disk_buffers(self) -> float:
        """Elements of state on disk that are read, updated and written at a time."""
        states = [sum(self._on_disk[place : place + PARTS_AHEAD + 2]) for place in range(len(self._on_disk))]
        return max(states, default=0) * self.state_per_param

    @property
    def _copied_for_update(self) -> list[int]:
        """Elements of each part that the host updates and whose parameters are on the device."""
        tiers = self.plan.param_tiers(self.spec.num_layers)
        if not tiers:
            return self.by_host
        return [numel for numel, tier in zip(self.host_updated, tiers[self.index], strict=True) if tier == "none"]

    @property
    def _first_stage_is_here(self) -> bool:
        """True if the rank has the first stage of the same copy of the model, too."""
        first = self.index - self.index % self.plan.stages_per_replica
        return self.plan.pp_rank(first) == self.plan.pp_rank(self.index)

    @property
    def trained_shard_numel(self) -> int:
        """Elements of the rank's shards of parameters that aren't frozen."""
        return self.param_shards.total.shard_numel - self.param_shards.total.frozen_shard_numel

    @property
    def gradients(self) -> int:
        """Bytes of gradients, from a step's first backward on."""
        return self.gradients_of(self.held_shards.total)

    @property
    def waiting_gradients(self) -> int:
        """Part of `gradients` that waits for its reduction to all ranks' shards, which a step's only backward completes
        at once; without that of parameters outside layers."""
        held = self.held_shards.total.trained.shard_numel - self.held_shards.root.trained.shard_numel
        return int(held * self.summed_share) * self.master_size

    def gradients_of(self, held: ParamShard) -> int:
        """Return the bytes of accumulated gradients of some parameters: whole under z1, else sharded."""
        if not self.has_backward:
            return 0
        unsharded = held.unsharded_numel - held.frozen_unsharded_numel
        shards = int((held.shard_numel - held.frozen_shard_numel) * (1 + self.summed_share))
        return (unsharded if self.zero == "z1" else shards) * self.master_size

    def state_bytes(self, held: ParamShard) -> int:
        """Return the bytes held for some parameters during a backward.

        Parameters, gradients, gathered parameters if these are kept between passes, and optimizer state unless some of
        that isn't on the device.
        """
        state = (held.shard_numel - held.frozen_shard_numel) * (not self.host_updated) * self.state_per_param
        sharded = (held.shard_numel + state) * self.master_size
        gathered = 0 if self.is_unsharded or self.zero == "z3" else held.unsharded_numel * self.compute_size
        copied = held.shard_numel * self.copied_share * self.compute_size
        return int(sharded + copied) + self.gradients_of(held) + gathered

    # ------------------------------------------------------------------------------------------------------------------
    # Saved per micro-batch

    def leaving_bytes(self, tier: Tier) -> list[int]:
        """Return the bytes that each layer that keeps its activations on a tier, layer by layer, has there of a
        micro-batch between passes."""
        if tier == "host" and not self.plan.offloads_by_layer:
            return []
        return list(map(self.layer_activation_bytes, self._leaving_layers(tier, len(self.layers))))

    def left_bytes(self, count: int) -> int:
        """Return the bytes that have left of the first `count` layers of a micro-batch while later ones run: those of
        all that leave layer by layer but the last of these, which is on its way."""
        tiers: tuple[Tier, ...] = ("host", "disk") if self.plan.offloads_by_layer else ("disk",)
        away = (self._leaving_layers(tier, count)[:-1] for tier in tiers)
        return sum(self.layer_activation_bytes(layer) for layers in away for layer in layers)

    def _leaving_layers(self, tier: Tier, count: int) -> list[int]:
        wanted = self.plan.offloaded_layers(self.index, self.spec.num_layers, tier)
        return [layer for layer in self.layers[:count] if layer in wanted]

    @property
    def activation_buffers(self) -> int:
        """Bytes of the buffers in host memory for activations of two layers on their way to the disk, or back, and of
        those that are written late."""
        sizes = self.leaving_bytes("disk")
        count = 2 + len(self.plan.late_written_layers(self.index, self.spec.num_layers))
        return max((sum(sizes[first : first + count]) for first in range(len(sizes))), default=0)

    def layer_activation_bytes(self, layer: int, recompute: Recompute | None = None) -> int:
        """Return the bytes that a layer saves from F to B, with the plan's recompute unless another is given.

        A layer saves nothing if all up to it is frozen. Any other is taken to save all, though a frozen matrix of it
        wouldn't need its input.
        """
        if self._optim is not None and is_frozen_up_to(self._optim, self.spec, layer + 1):
            return 0
        strategy = self.plan.strategy(layer)
        how = recompute or strategy.recompute
        key = layer_type(self.spec, layer), how, strategy.attention
        if key not in self._layer_bytes:
            self._layer_bytes[key] = layer_activation_bytes(self.sizes, layer, how, strategy.attention)
        return self._layer_bytes[key]

    def saved_per_micro_batch(self) -> MemoryTerms:
        """Return the bytes that the stage saves from F to B, or to I."""
        if not self.has_backward:
            return MemoryTerms()
        total = sum(self.layer_activation_bytes(layer) for layer in self.layers)
        total += boundary_saved_bytes(self.spec, self.plan, self.index, self.sizes)
        sizes = self.sizes
        logits = 0
        if self.has_embedding:
            total += sizes.tokens * (8 + (sizes.mesh.tp > 1))  # tokens, and with tp a mask of the rank's vocabulary
        if self.plan.is_last(self.index):
            total += self.last_norm_bytes
            if self.has_head and sizes.sequence_tiles == 1:
                logits = loss_saved_bytes(sizes.local_model, sizes.tokens, self.plan.precision) * (
                    1 + self.spec.mtp_layers
                )
            total += self.mtp_layers * self.further_bytes if self.mtp_layers else 0
        return MemoryTerms(activations=total, logits=logits)

    @property
    def further_bytes(self) -> int:
        """Bytes that a layer for multi-token prediction saves beside what another layer does."""
        return further_activation_bytes(self.sizes, self.plan.strategy(self.spec.num_layers - 1).recompute)

    @property
    def rotary_bytes(self) -> int:
        """Bytes of cos and sin of the rotary angles, of the rank's positions of one sequence, for each kind of angle;
        all ranks of tensor parallelism have those of the positions that their attention computes."""
        spec = self.spec
        if spec.position != "rope" or not self.layers:
            return 0
        positions = self.sizes.seq_len // self.sizes.mesh.sequence_shards
        kinds = 1 + (spec.window_rope_theta is not None)
        return 2 * kinds * positions * spec.rotary_width * self.compute_size

    @property
    def last_norm_bytes(self) -> int:
        """Bytes that the last norm saves, and the linear layer that makes its input of streams; its output only under a
        head of this stage. 0 on other stages."""
        if not self.plan.is_last(self.index):
            return 0
        saved = norm_saved_bytes(self.spec, self.sizes.hidden_tokens, self.plan.precision)
        saved += conjunction_saved_bytes(self.sizes)
        return saved if self.has_head else saved - self.sizes.hidden_bytes

    def freezes(self, name: str) -> bool:
        """Return True if a parameter isn't trained."""
        return is_frozen(self._optim, name)

    def deferred(self) -> MemoryTerms:
        """Return the bytes that the stage saves from I to W: inputs and output gradients of all linear layers."""
        heads = 1 + self.mtp_layers
        logits = self.saved_per_micro_batch().logits + (heads * self.sizes.full_hidden_bytes if self.has_head else 0)
        gradient = self.sizes.message_bytes * (not self.plan.is_first(self.index))  # of the stage's input
        projected = 3 * self.mtp_layers * self.sizes.hidden_bytes  # inputs and output gradients of `eh_proj`
        layers = sum(map(self.deferred_layer_bytes, self.layers))
        if conjunction := conjunction_saved_bytes(self.sizes) * self.plan.is_last(self.index):
            projected += conjunction + self.sizes.full_hidden_bytes
        return MemoryTerms(activations=layers + projected + gradient, logits=logits)

    def deferred_layer_bytes(self, layer: int) -> int:
        """Return the bytes that one layer saves from I to W, whatever its recompute."""
        own, sizes = self.sizes.local_model, self.sizes
        width = (2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim
        if (mla := own.mla) is not None:  # latent vectors, which two kinds of linear layers read and make; heads
            narrow, values = 2 * mla.latent_width, mla.nope_head_dim + 2 * mla.v_head_dim
            width = narrow + own.num_heads * (mla.qk_head_dim + values)
        if own.has_linear_attention(layer):
            width = deferred_width(sizes)
        ends = 4 * max(sizes.full_hidden_bytes, sizes.hidden_bytes)
        if (moe := own.moe) is not None and own.has_experts(layer):  # rows of experts, and those of shared ones
            ends = (2 + 2 * bool(moe.shared_size)) * sizes.full_hidden_bytes + 2 * sizes.routed_row_bytes
        linear = ends + sizes.tokens * width * self.compute_size
        return linear + (2 + own.gated) * mlp_inner_bytes(sizes, layer)


def _trained_numel(held: ParamShard) -> int:
    return held.shard_numel - held.frozen_shard_numel


def _without_freezing(optim: OptimConfig) -> OptimConfig:
    """Return the optimizer as if it updated all parameters, for the state of each element that it does update."""
    return optim.model_copy(update={"freeze": ()}) if optim.freeze else optim


def native_saved_per_micro_batch(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, optim: OptimConfig | None = None
) -> MemoryTerms:
    """Return the bytes that each micro-batch saves from F to B on one stage."""
    return NativeStorage(spec, plan, workload, stage, optim).saved_per_micro_batch()


@dataclass(frozen=True, slots=True)
class MemoryLowerBound:
    """Bytes that a stage holds at some moment of every step, whatever the order of its passes."""

    state: int
    """Parameters, optimizer state, gradients, and gathered parameters if kept, in a second micro-batch's backward."""
    single_micro_batch_state: int
    """State in the backward of the only micro-batch, when gradients of embedding and head may not exist yet."""
    resident: int
    """State that is always held: parameters and optimizer state."""
    layer_activations: int
    """Activations that the first layer saves of a micro-batch, held in addition during its backward."""
    min_layer_state: int
    """Smallest state of a layer."""
    min_layer_deferred: int
    """Smallest number of bytes that a layer saves of a micro-batch from I to W, whatever its recompute."""


def memory_lower_bound(
    spec: ModelSpec, plan: Plan, workload: Workload, optim: OptimConfig | None = None
) -> MemoryLowerBound:
    """Return the lower bound for a plan with all layers on one stage."""
    plan = plan.model_copy(update={"max_active_stages": None})  # at some moments no stage is gathered
    own = NativeStorage(spec, plan, workload, 0, optim)
    state = own.state_bytes(own.held_shards.total) + (own.optimizer if own.host_updated else 0)
    freezes = optim is not None and bool(optim.freeze)  # whose gradients need no operands
    one_of_each = dict(zip(own.param_shards.layers, own.layers, strict=True))
    return MemoryLowerBound(
        state=state,
        single_micro_batch_state=state - own.gradients_of(own.held_shards.root) - own.waiting_gradients,
        resident=own.parameters + own.copied_parameters + own.optimizer,
        layer_activations=own.layer_activation_bytes(0),
        min_layer_state=min(map(own.state_bytes, own.held_shards.layers)),
        min_layer_deferred=0 if freezes else min(map(own.deferred_layer_bytes, one_of_each.values())),
    )
