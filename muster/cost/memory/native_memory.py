"""Peaks of a stage in native storage: the moments within its passes and collectives that may need most memory.

For each kind of instruction a few moments are candidates for the peak. In a backward they are, from the last layer to
the first: the gated unit's backward, when recomputed tensors and gradients of activations coexist; the layer's end,
when its parameters' gradients are complete; and their reduction, when they are copied into the buffer of the
reduce-scatter. Only the last, the second to last and the first layer need be looked at: from there on each further
layer frees as much as the one before. Follows the runtime buffer by buffer, as `muster.cost.memory.native_storage`.
"""

from dataclasses import dataclass

from muster.config.optim_config import OptimConfig
from muster.cost.activations import (
    mlp_activation_bytes,
    mlp_inner_bytes,
    offloaded_activation_bytes,
    vocab_parallel_bytes,
)
from muster.cost.memory.native_storage import NativeStorage
from muster.cost.memory.param_shards import NO_PARAMS, ParamShard
from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.layout.tensor_layout import chunk_bounds, has_vocab_shard
from muster.schedule.action import Kind
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

_GATHERING = "gathering embedding and head"


@dataclass(frozen=True, slots=True)
class KernelWorkspace:
    """Temporary memory of the runtime's kernels on a kind of device."""

    fused_norm: bool
    """True if norms make no float32 copies of their input."""
    loss_chunk_logits: int
    """Logits that the loss processes at once (`muster.model.loss`)."""
    attention_chunk_scores: int = 1 << 25
    """Scores that soft-capped attention processes at once (`muster.model.soft_capped_attention`)."""
    stages_collectives: bool = False
    """True if collectives copy their data to one more buffer, as gloo does."""


GPU_LOSS_CHUNK_LOGITS = 1 << 26
CPU_LOSS_CHUNK_LOGITS = 1 << 17
KERNEL_WORKSPACES = {
    "cpu": KernelWorkspace(
        fused_norm=False,
        loss_chunk_logits=CPU_LOSS_CHUNK_LOGITS,
        attention_chunk_scores=1 << 20,
        stages_collectives=True,
    )
}
DEFAULT_KERNEL_WORKSPACE = KernelWorkspace(fused_norm=True, loss_chunk_logits=GPU_LOSS_CHUNK_LOGITS)


def native_stage_memory(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    kernel_workspace: KernelWorkspace,
    optim: OptimConfig | None = None,
) -> StageMemory:
    """Return the memory of a stage in native storage. The optimizer is AdamW if `optim` is None."""
    own = NativeStorage(spec, plan, workload, stage, optim)
    moments = _StagePeaks(own, kernel_workspace)
    # Each receive is posted ahead of its use, and one gradient is being sent to the stage before.
    buffers = 2 * plan.receives_activations(stage) + plan.sends_activations(stage)
    gathered = own.param_shards.root if own.zero == "z3" else own.param_shards.total
    words = vocab_parallel_bytes(spec, plan, workload, plan.pp_rank(stage)) if has_vocab_shard(plan, stage) else 0
    return StageMemory(
        resident=MemoryTerms(
            parameters=own.parameters, optimizer=own.optimizer, communication=buffers * own.sizes.hidden_bytes
        ),
        gathered_params=0 if own.is_unsharded else gathered.unsharded_numel * own.compute_size,
        keeps_gathered=own.zero != "z3",
        gradients=own.gradients,
        saved=moments.saved,
        offloaded=MemoryTerms(activations=offloaded_activation_bytes(spec, plan, workload, stage)),
        deferred=own.deferred(),
        vocab_parallel=MemoryTerms(logits=words),
        peak_candidates={
            Kind.F: tuple(moments.forward()),
            Kind.B: tuple(moments.backward(weights=True)),
            Kind.I: tuple(moments.backward(weights=False)),
            Kind.W: (moments.weights(),),
            **moments.vocab_parallel_peaks(),
            "gather F": (moments.gather_before_forward(),),
            "gather B": (moments.gather_before_backward(),),
            Kind.UNSHARD: (moments.unshard(),),
            Kind.REDUCE_GRAD: (moments.reduce(),),
            Kind.ALL_REDUCE_REPLICAS: (PeakCandidate("copies swapped", MemoryTerms(communication=2 * own.parameters)),),
        },
        freed_by_reduction=own.gradients - own.trained_shard_numel * own.master_size,
    )


class _StagePeaks:
    """Moments of one stage's passes and collectives; all quantities in bytes."""

    def __init__(self, stage: NativeStorage, kernels: KernelWorkspace) -> None:
        self.stage, self.kernel_workspace, self.plan, self.sizes = stage, kernels, stage.plan, stage.sizes
        self.param_shards, self.layers, self.compute_size, self.master_size = (
            stage.param_shards,
            stage.layers,
            stage.compute_size,
            stage.master_size,
        )
        self.saved = stage.saved_per_micro_batch()
        self.holds_replica_sums = stage.reduces_in_passes and stage.plan.mesh(stage.index).dp_replicate > 1
        """True if sums over replicas live until a backward ends; in a step's first backward they are the gradients."""

    def _bucket_bytes(self, count: int) -> int:
        """Return the bytes of `count` buckets of layers, gathered within a pass."""
        if not self.stage.gathers_in_passes:
            return 0
        largest = sorted((held.unsharded_numel for held in self.param_shards.layers), reverse=True)
        return sum(largest[: count * self.plan.bucket_layers]) * self.compute_size

    def _prefetched_bucket_bytes(self) -> int:
        """Return the bytes of a layer's bucket and of those that are prefetched meanwhile."""
        current = self._bucket_bytes(1)
        with_prefetched = self._bucket_bytes(1 + self.plan.prefetch_buckets)
        return with_prefetched + (with_prefetched - current) * self.kernel_workspace.stages_collectives

    def forward(self) -> list[PeakCandidate]:
        moments = []
        if self.layers:
            last = self.stage.layer_activation_bytes(self.layers[-1])
            work, logits = self._forward_workspace(self.layers[-1]), -self.saved.logits
            after = MemoryTerms(gathered_parameters=self._bucket_bytes(1), workspace=work, logits=logits)
            before = MemoryTerms(
                gathered_parameters=self._prefetched_bucket_bytes(), activations=-last, workspace=work, logits=logits
            )
            moments += [PeakCandidate("last layer", after), PeakCandidate("layer before the last", before)]
        if self.stage.has_head:
            moments.append(PeakCandidate("loss", self._loss_workspace()))
        return moments

    def _forward_workspace(self, layer: int) -> int:
        """Return the temporary bytes at the end of a layer: results that aren't saved, and its output."""
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = mlp_inner_bytes(sizes, layer)
        made = {"none": 0, "core_attention": 0, "elementwise": product}.get(
            how, (2 + sizes.local_model.gated) * product
        )
        moved = sizes.hidden_bytes if sizes.mesh.tp > 1 else 0
        attention = self._attention_workspace(backward=False) - mlp_activation_bytes(sizes, layer)
        return max(made + sizes.full_hidden_bytes + moved, attention)

    def _attention_workspace(self, backward: bool) -> int:
        """Return the temporary bytes of soft-capped attention: of a piece of the scores, the capped ones and their
        copies in the compute dtype; in the backward also their softmax and its gradient, and the gradients of keys and
        values in the master dtype."""
        own, sizes = self.sizes.local_model, self.sizes
        if own.attention_softcap is None:
            return 0
        scores = min(self.kernel_workspace.attention_chunk_scores, sizes.tokens * own.num_heads * sizes.seq_len)
        converted = self.compute_size * (self.compute_size != self.master_size)
        if not backward:
            return scores * (self.master_size + converted)
        width = own.num_heads * self.compute_size + 2 * own.num_kv_heads * (self.master_size + converted)
        return scores * (3 * self.master_size + converted) + sizes.tokens * own.head_dim * width

    def _loss_workspace(self) -> MemoryTerms:
        """Return the bytes of the loss: logits in addition to their gradient, which is saved, and float32 copies.

        The copies are of one chunk, or under tp two of all logits.
        """
        sizes = self.sizes
        num_logits = sizes.tokens * sizes.local_model.vocab_size
        # A softmax reads the logits as they are, unless they are of another dtype or have to be capped.
        converted = self.compute_size != self.master_size or self.stage.spec.logit_softcap is not None
        if sizes.mesh.tp > 1:
            copies = (1 + converted) * self.master_size
            return MemoryTerms(logits=num_logits * (self.compute_size + copies) - self.saved.logits)
        rows = max(1, self.kernel_workspace.loss_chunk_logits // sizes.local_model.vocab_size)
        first, second = min(sizes.tokens, rows), min(max(sizes.tokens - rows, 0), rows)
        # The converted logits of a chunk, their softmax, and beside a later chunk the softmax of the one before.
        copies = max((1 + converted) * first, first + (1 + converted) * second) * sizes.local_model.vocab_size
        return MemoryTerms(logits=num_logits * self.compute_size, workspace=copies * self.master_size)

    def backward(self, weights: bool) -> list[PeakCandidate]:
        """Return the moments of a backward; `weights`: it computes weight gradients, which are not left to W."""
        sizes, size = self.sizes, self.compute_size
        head = self.param_shards.vocab.unsharded_numel * size if self.stage.has_head and weights else 0
        if self.stage.has_head and self.stage.has_embedding and not self.stage.spec.tied_embeddings:
            head //= 2
        moments = []
        if self.stage.has_head:
            extra = MemoryTerms(
                gathered_parameters=self._bucket_bytes(1),
                workspace=head + (1 + self._gathered_hidden_states) * sizes.full_hidden_bytes,
            )
            moments.append(PeakCandidate("head", extra))
        head = 0 if self.stage.is_unsharded else head
        # The gradient of the stage's output has come, so the output's send has completed.
        sent = sizes.hidden_bytes if self.plan.sends_activations(self.stage.index) else 0
        base = MemoryTerms(activations=-sent, logits=-self.saved.logits, workspace=head)
        for index in self._indices_of_interest():
            moments += self._layer_backward(index, base, weights)
        if weights:
            moments += [self._embedding_gradient(), self._tied_exchange(), self._root_reduction()]
        else:
            words = (
                self.param_shards.vocab.unsharded_numel * size // (1 + self.stage.has_head)
                if self.stage.has_embedding
                else 0
            )
            left = self.stage.deferred() + self.saved.scaled(-1) + MemoryTerms(workspace=sizes.hidden_bytes + words)
            moments.append(PeakCandidate("inputs", left))
        return moments

    def _indices_of_interest(self) -> list[int]:
        """Return the layers, counted from the end, whose backward may need most: those of the last bucket, the first of
        the bucket before, and those of the first bucket."""
        count, size = len(self.layers), self.plan.bucket_layers
        first, last = min(size, count), (count - 1) % size + 1 if count else 0
        return sorted({*range(min(last + 1, count)), *range(count - first, count)})

    def _layer_backward(self, index: int, base: MemoryTerms, weights: bool) -> list[PeakCandidate]:
        """Return the moments of the backward of the `index`-th layer from the end.

        They are in its MLP, at its end, and for the first layer of a bucket, when the bucket's gradients are copied to
        the buffer of their reduction. `base`: change by the stage's head, which comes before.
        """
        position, shards = len(self.layers) - 1 - index, self.param_shards.layers
        layer, held = self.layers[position], shards[position]
        begin = position - position % self.plan.bucket_layers
        end = min(begin + self.plan.bucket_layers, len(shards))
        done = sum(map(self.stage.layer_activation_bytes, self.layers[position + 1 :]))
        made = sum(map(self.stage.gradients_of, shards[end:]))
        waiting = sum(one.unsharded_numel for one in shards[position + 1 : end])
        pending = sum(one.unsharded_numel for one in shards[end : end + self.plan.bucket_layers])
        reducing = pending * self.master_size * (weights and self.stage.reduces_in_passes)
        summing, first = (made, 0) if weights and self.holds_replica_sums else (0, made)
        if not self.stage.reduces_in_passes:
            first += sum(map(self.stage.gradients_of, shards[position + 1 : end]))
            waiting = 0
        waiting *= weights * self.compute_size
        base += MemoryTerms(communication=summing, activations=-done)
        gathered = self._bucket_bytes(1) if begin == 0 else self._prefetched_bucket_bytes()
        inside = MemoryTerms(gathered_parameters=gathered, communication=reducing, workspace=waiting)
        work = MemoryTerms(workspace=self._backward_workspace(layer, weights))
        moments = [PeakCandidate(_layer_position(index), base + inside + work, first)]
        if not weights:
            return moments
        base += MemoryTerms(activations=-self.stage.layer_activation_bytes(layer))
        adds_in_place = not self.stage.reduces_in_passes and self.compute_size == self.master_size
        gradients = (held.last_param_numel if adds_in_place else held.unsharded_numel) * self.compute_size
        complete = MemoryTerms(workspace=self._norm_workspace + gradients * (not self.stage.is_unsharded))
        first_own = self.stage.gradients_of(held) if adds_in_place and not self.stage.is_unsharded else 0
        moments.append(PeakCandidate("end of a layer", base + inside + complete, first + first_own))
        if position == begin:
            buffers, gradients = self._reduction_bytes(sum(shards[begin:end], start=NO_PARAMS))
            reduced = MemoryTerms(
                gathered_parameters=self._bucket_bytes(1),
                communication=buffers,
                workspace=gradients + self.sizes.hidden_bytes,
            )
            moments.append(PeakCandidate("gradients of a layer", base + reduced, first))
        return moments

    @property
    def _gathered_hidden_states(self) -> int:
        """Number of whole hidden states that sequence parallelism gathers within a backward."""
        return 1 if self.sizes.hidden_tokens < self.sizes.tokens else 0

    def _backward_workspace(self, layer: int, weights: bool) -> int:
        """Return the temporary bytes in the backward of a layer's gated unit.

        Gradients of the output, of the product, of gate and up, one more of the same size, the gradient of the last
        matrix; and recomputed tensors.
        """
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = mlp_inner_bytes(sizes, layer)
        again = {"none": 0, "core_attention": 0, "elementwise": product}.get(how, -1)
        if again < 0:
            again = self.stage.layer_activation_bytes(layer, "none") - self.stage.layer_activation_bytes(layer)
        inner = 3 * product if sizes.local_model.gated else 2 * product
        matrix = (
            sizes.local_model.intermediate_size * sizes.local_model.hidden_size * self.compute_size if weights else 0
        )
        mlp = again + inner + matrix + sizes.hidden_bytes
        before = max(self._norm_workspace, self._attention_workspace(backward=True))
        return max(mlp, before - mlp_activation_bytes(sizes, layer))

    @property
    def _norm_workspace(self) -> int:
        """Temporary bytes of a norm's backward: gradients of its output and input, and float32 copies if not fused."""
        sizes = self.sizes
        copies = (
            0
            if self.kernel_workspace.fused_norm and not sizes.local_model.norm_unit_offset
            else 4 * sizes.hidden_tokens * sizes.local_model.hidden_size * self.master_size
        )
        return copies + 2 * sizes.hidden_bytes

    def _reduction_bytes(self, held: ParamShard) -> tuple[int, int]:
        """Return (buffers, gradients) at the time when complete gradients are reduced.

        They are copied into one buffer and then freed, except the last, which a loop variable in torch's
        `foreach_reduce` keeps alive; the result has another buffer. Where a single rank holds them, there is no such
        loop, and it divides by 1 meanwhile, which takes a third buffer.
        """
        gradients = 0 if self.stage.is_unsharded else held.unsharded_numel * self.compute_size
        if not self.stage.reduces_in_passes:
            return 0, gradients
        source, result = (
            held.unsharded_numel * self.master_size,
            held.shard_numel * self.master_size * (1 + self.stage.is_single_shard),
        )
        source += source * (self.kernel_workspace.stages_collectives and not self.stage.is_single_rank)
        dropped = gradients if self.stage.is_single_shard else gradients - held.last_param_numel * self.compute_size
        return source + max(0, result - dropped), gradients

    def _embedding_gradient(self) -> PeakCandidate:
        """Return the moment when the embedding's gradient is computed. That of a tied head waits for it, and autograd
        makes a third tensor of both."""
        stage = self.stage
        embedding = self.param_shards.vocab.unsharded_numel * stage.has_embedding
        if stage.has_head:
            embedding = 3 * embedding if stage.spec.tied_embeddings else embedding // 2
        layers = sum(map(stage.gradients_of, self.param_shards.layers))
        # The buffer of the last reduction, of the first layers' bucket, lives until the next one.
        first = sum(self.param_shards.layers[: self.plan.bucket_layers], start=NO_PARAMS)
        reducing = first.unsharded_numel * self.master_size * (stage.has_embedding and stage.reduces_in_passes)
        extra = MemoryTerms(
            activations=-self.saved.activations,
            logits=-self.saved.logits,
            communication=layers * self.holds_replica_sums + reducing,
            workspace=embedding * self.compute_size + self.sizes.hidden_bytes,
        )
        return PeakCandidate("embedding", extra, 0 if self.holds_replica_sums else layers)

    def _tied_exchange(self) -> PeakCandidate:
        """Return the moment after a step's last backward when the gradients of a tied embedding's copies are exchanged.

        Sharded gradients are small beside the buffers of their reduction.
        """
        stage = self.stage
        is_one_of_two = stage.spec.tied_embeddings and stage.has_embedding != stage.has_head
        copies = 2 * stage.gradients_of(self.param_shards.vocab) * (is_one_of_two and stage.is_unsharded)
        extra = MemoryTerms(activations=-self.saved.activations, logits=-self.saved.logits, communication=copies)
        return PeakCandidate("tied gradients", extra, stage.gradients)

    def _root_reduction(self) -> PeakCandidate:
        """Return the moment of the last reduction, of embedding and head; under z3 these are not gathered any more."""
        root = self.param_shards.root
        layers = sum(map(self.stage.gradients_of, self.param_shards.layers))
        communication, gradients = self._reduction_bytes(root)
        extra = MemoryTerms(
            gathered_parameters=-self._root_bytes(),
            activations=-self.saved.activations,
            logits=-self.saved.logits,
            communication=communication + layers * self.holds_replica_sums,
            workspace=gradients + self.sizes.hidden_bytes,
        )
        return PeakCandidate("embedding and head", extra, 0 if self.holds_replica_sums else layers)

    def vocab_parallel_peaks(self) -> dict[str, tuple[PeakCandidate, ...]]:
        """Return the moments of vocabulary parallelism.

        S: logits, and two float32 copies of them, one of which is saved. T: the softmax in the compute dtype, and the
        head's gradient.
        """
        if not has_vocab_shard(self.plan, self.stage.index):
            return {}
        rows = chunk_bounds(self.stage.spec.vocab_size, self.plan.pp, self.plan.pp_rank(self.stage.index))[1]
        num_logits = rows * self.sizes.tokens
        head = rows * self.stage.spec.hidden_size * self.compute_size
        return {
            Kind.S: (PeakCandidate("scores", MemoryTerms(logits=num_logits * (self.compute_size + self.master_size))),),
            Kind.T: (PeakCandidate("head", MemoryTerms(logits=num_logits * self.compute_size, workspace=head)),),
        }

    def weights(self) -> PeakCandidate:
        """Return the moment of W: gradients of all the stage's layers, before they are reduced one by one."""
        layers = sum(held.unsharded_numel for held in self.param_shards.layers)
        reducing = (
            max((held.unsharded_numel for held in self.param_shards.layers), default=0) * self.stage.reduces_in_passes
        )
        made = MemoryTerms(
            communication=reducing * self.master_size,
            workspace=0 if self.stage.is_unsharded else layers * self.compute_size,
        )
        return PeakCandidate("weights", made)

    def gather_before_forward(self) -> PeakCandidate:
        """Return the moment under z3, before a forward, when embedding and head are copied out of the gather buffer."""
        extra = MemoryTerms(
            gathered_parameters=self._root_bytes(),
            activations=-self.saved.activations,
            logits=-self.saved.logits,
        )
        return PeakCandidate(_GATHERING, extra)

    def gather_before_backward(self) -> PeakCandidate:
        """Return the moment when embedding and head are gathered before a backward, after the last layers."""
        return PeakCandidate(
            _GATHERING, MemoryTerms(gathered_parameters=self._root_bytes() + self._prefetched_bucket_bytes())
        )

    def _root_bytes(self) -> int:
        """Return the bytes of embedding and head, gathered."""
        return self.param_shards.root.unsharded_numel * self.compute_size if self.stage.gathers_in_passes else 0

    def unshard(self) -> PeakCandidate:
        """Return the moment when all groups' gathers are under way, and the first one is copied out."""
        buffers = self._largest_unit_numel() * self.compute_size * (1 + self.kernel_workspace.stages_collectives)
        return PeakCandidate("gathering", MemoryTerms(gathered_parameters=buffers))

    def reduce(self) -> PeakCandidate:
        """Return the fullest moment of the reductions under z1, which run one group after another: embedding and head,
        then the layers' buckets.

        Complete gradients of a group are copied into a buffer and then freed, except the last, which a loop variable in
        torch's `foreach_reduce` keeps alive; the result is the sharded gradient, which stays (see `_reduction_bytes`).
        """
        is_single = self.stage.is_single_shard
        largest, change = 0, 0
        for held in (self.param_shards.root, *self.param_shards.buckets(self.plan.bucket_layers)):
            source = held.unsharded_numel * (1 + self.kernel_workspace.stages_collectives)
            dropped = held.unsharded_numel if is_single else held.unsharded_numel - held.last_param_numel
            result = max(0, held.shard_numel * (1 + is_single) - dropped)
            largest = max(largest, change + source + result)
            change -= held.unsharded_numel - held.shard_numel
        return PeakCandidate("reducing", MemoryTerms(communication=largest * self.master_size))

    def _largest_unit_numel(self) -> int:
        """Return the elements of the largest group that is gathered at once."""
        units = self.param_shards.root, *self.param_shards.buckets(self.plan.bucket_layers)
        return max(held.unsharded_numel for held in units)


def _layer_position(index: int) -> str:
    return ("last layer", "layer before the last")[index] if index < 2 else "first layer"
