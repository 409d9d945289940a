"""What a stage holds in Muster's own storage, `fully_shard` around a plain decoder (`muster.parallel.fsdp`): float32
master weights, gradients and moments, and what each micro-batch keeps.

Follows the runtime buffer by buffer; `muster memory-check` holds it against PyTorch's accounting of that runtime.
"""

from dataclasses import dataclass

from muster.cost.activations import (
    PassSizes,
    layer_activation_bytes,
    loss_saved_bytes,
    mlp_inner_bytes,
    norm_saved_bytes,
    pass_sizes,
)
from muster.cost.memory.param_shards import ParamShard, StageParamShards, stage_param_shards
from muster.cost.precision_bytes import MemoryTerms, compute_bytes, master_bytes
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Recompute
from muster.spec.workload import Workload

ADAMW_STATE_PER_PARAM = 2.0
"""Numbers that AdamW keeps of each parameter (arXiv:1711.05101)."""


class NativeStorage:
    """One stage on its first rank; every quantity in bytes."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, workload: Workload, stage: int, state_numbers: float = ADAMW_STATE_PER_PARAM
    ) -> None:
        """`state_numbers`: what the optimizer keeps of each parameter."""
        self.spec, self.plan, self.index, self.state_numbers = spec, plan, stage, state_numbers
        self.compute_size, self.master_size = compute_bytes(plan.precision), master_bytes(plan.precision)
        self.sizes: PassSizes = pass_sizes(spec, plan, workload, stage)
        self.param_shards: StageParamShards = stage_param_shards(spec, plan, stage)
        self.layers = list(plan.layers(stage, spec.num_layers))
        mesh = plan.mesh(stage)
        self.is_single_rank = mesh.grad_sum_size == 1
        self.is_unsharded = self.is_single_rank and self.compute_size == self.master_size
        """Not sharded at all: gradients are added up where they are made."""
        self.zero = "z2" if self.is_single_rank else plan.strategy(self.layers[0] if self.layers else 0).zero
        self.has_embedding, self.has_head = (
            end and not plan.vocab_parallel for end in (plan.is_first(stage), plan.is_last(stage))
        )
        """Whether it has the whole embedding, and the whole head."""

    @property
    def gathers_in_passes(self) -> bool:
        """Whether passes gather parameters layer by layer, and let go of them."""
        return self.zero == "z3" and not self.is_unsharded

    @property
    def reduces_in_passes(self) -> bool:
        """Whether every backward reduces the gradients that it has made."""
        return self.zero != "z1" and not self.is_unsharded

    @property
    def parameters(self) -> int:
        """The rank's shards."""
        return self.param_shards.total.shard_numel * self.master_size

    @property
    def optimizer(self) -> int:
        """The state of its parameters; none where that lies in the host's memory (arXiv:2101.06840)."""
        offloaded = self.plan.default_strategy.offload in ("optimizer", "all")
        return 0 if offloaded else int(self.parameters * self.state_numbers)

    @property
    def gradients(self) -> int:
        """From a step's first backward on."""
        return self.gradients_of(self.param_shards.total)

    def gradients_of(self, held: ParamShard) -> int:
        """What is summed over micro-batches of some of the stage's parameters: whole under z1."""
        return (held.unsharded_numel if self.zero == "z1" else held.shard_numel) * self.master_size

    def state_bytes(self, held: ParamShard) -> int:
        """Of some of the stage's parameters, what is there while a backward runs: themselves, the optimizer's state,
        gradients, and what passes use of them where that stays."""
        sharded = held.shard_numel * self.master_size * (1 + (self.optimizer > 0) * self.state_numbers)
        gathered = 0 if self.is_unsharded or self.zero == "z3" else held.unsharded_numel * self.compute_size
        return int(sharded) + self.gradients_of(held) + gathered

    # ------------------------------------------------------------------------------------------------------------------
    # Kept by micro-batch

    def layer_activation_bytes(self, layer: int, recompute: Recompute | None = None) -> int:
        """What one layer keeps from F to B; `how`: if it were recomputed so, not as the plan says."""
        strategy = self.plan.strategy(layer)
        return layer_activation_bytes(self.sizes, layer, recompute or strategy.recompute, strategy.attention)

    def saved_per_micro_batch(self) -> MemoryTerms:
        """What the stage keeps from F to B, or to I."""
        total = sum(self.layer_activation_bytes(layer) for layer in self.layers)
        sizes, logits = self.sizes, 0
        if self.has_embedding:
            total += sizes.tokens * (8 + (sizes.mesh.tp > 1))  # tokens, and with tp which words are the rank's
        if self.plan.is_last(self.index):
            total += norm_saved_bytes(self.spec, sizes.hidden_tokens, self.plan.precision)
            if self.has_head:
                logits = loss_saved_bytes(sizes.local_model, sizes.tokens, self.plan.precision) * (
                    1 + self.spec.mtp_layers
                )
                total += self.spec.mtp_layers * (
                    self.layer_activation_bytes(self.spec.num_layers - 1) + 4 * sizes.hidden_bytes
                )
            else:
                total -= sizes.hidden_bytes
        elif self.plan.sends_activations(self.index):
            total += sizes.hidden_bytes  # the output, until it is known to be gone: at the latest with its gradient
        return MemoryTerms(activations=total, logits=logits)

    def deferred(self) -> MemoryTerms:
        """What the stage keeps from I to W: inputs and output gradients of all linear layers."""
        logits = self.saved_per_micro_batch().logits + (self.sizes.full_hidden_bytes if self.has_head else 0)
        return MemoryTerms(activations=sum(map(self.deferred_layer_bytes, self.layers)), logits=logits)

    def deferred_layer_bytes(self, layer: int) -> int:
        """The same of one layer, whatever its backward computes again."""
        own, sizes = self.sizes.local_model, self.sizes
        width = (2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim
        linear = 4 * sizes.full_hidden_bytes + sizes.tokens * width * self.compute_size
        return linear + (2 + own.gated) * mlp_inner_bytes(sizes, layer)


def native_saved_per_micro_batch(spec: ModelSpec, plan: Plan, workload: Workload, stage: int) -> MemoryTerms:
    """What each micro-batch keeps from F to B on one stage."""
    return NativeStorage(spec, plan, workload, stage).saved_per_micro_batch()


@dataclass(frozen=True, slots=True)
class MemoryLowerBound:
    """What a stage holds at some moment of every step, whatever the order of its passes. Bytes."""

    state: int
    """Parameters, the optimizer's state, gradients, and parameters as the passes use them where they stay; when a
    second micro-batch goes backward."""
    single_micro_batch_state: int
    """The same when the only one does: gradients of embedding and head may come after the others were used."""
    resident: int
    """Of the state what is always there: parameters, and the optimizer's state."""
    layer_activations: int
    """What its first layer keeps of a micro-batch beside these, when the micro-batch goes backward."""
    min_layer_state: int
    """Of the state, what belongs to the layer that has least of it."""
    min_layer_deferred: int
    """What a layer keeps of a micro-batch from I to W, whatever it computes again: of the layer that keeps least."""


def memory_lower_bound(spec: ModelSpec, plan: Plan, workload: Workload) -> MemoryLowerBound:
    """Where all layers are on one stage."""
    own = NativeStorage(spec, plan, workload, 0)
    state = own.state_bytes(own.param_shards.total)
    one_of_each = dict(zip(own.param_shards.layers, own.layers, strict=True))
    return MemoryLowerBound(
        state=state,
        single_micro_batch_state=state - own.gradients_of(own.param_shards.root),
        resident=own.parameters + own.optimizer,
        layer_activations=own.layer_activation_bytes(0),
        min_layer_state=min(map(own.state_bytes, one_of_each)),
        min_layer_deferred=min(map(own.deferred_layer_bytes, one_of_each.values())),
    )
