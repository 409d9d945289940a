"""Memory of a stage in native storage, and the moments of its passes and collectives that may need most.

Follows the runtime buffer by buffer, as `muster.cost.memory.native_storage`; `native_backward` has the backwards.
"""

from dataclasses import replace

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order
from muster.cost.activations import (
    dispatched_bytes,
    mlp_inner_bytes,
    offloaded_activation_bytes,
    saved_mlp_bytes,
    vocab_parallel_bytes,
)
from muster.cost.memory.kernel_workspace import KernelWorkspace
from muster.cost.memory.native_backward import BackwardPeaks
from muster.cost.memory.native_storage import NativeStorage
from muster.cost.memory.param_shards import ParamShard
from muster.cost.memory.perturbed_memory import PerturbedPeaks
from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.cost.perturbation import POINTS, as_one_forward
from muster.cost.sequence_slices import kept_bytes, slice_workloads
from muster.layout.tensor_layout import chunk_bounds, has_vocab_shard
from muster.schedule.action import Kind
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

_GATHERING = "gathering embedding and head"


def native_stage_memory(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    kernel_workspace: KernelWorkspace,
    optim: OptimConfig | None = None,
) -> StageMemory:
    """Return the memory of a stage in native storage. The optimizer is AdamW if `optim` is None."""
    if plan.sequence_slices == 1:
        return _pass_memory(spec, plan, workload, stage, kernel_workspace, optim)
    parts = slice_workloads(spec, plan, workload)
    slices = [_pass_memory(spec, plan, part, stage, kernel_workspace, optim) for part in parts]
    own = NativeStorage(spec, plan, workload, stage, optim)
    kept = kept_bytes(own.sizes, len(own.layers), workload.seq_len)
    gradients = kept // own.compute_size * own.master_size
    slices = [
        replace(
            one,
            saved=one.saved + MemoryTerms(activations=kept * (part == 0)),
            kept_gradients=gradients,
            makes_kept_gradients=part == len(slices) - 1,
            frees_kept_gradients=part == 0,
        )
        for part, one in enumerate(slices)
    ]
    return replace(slices[0], resident=_resident(own), slices=tuple(slices))


def _resident(own: NativeStorage) -> MemoryTerms:
    return MemoryTerms(
        parameters=own.parameters,
        gathered_parameters=own.copied_parameters,
        optimizer=own.optimizer,
        workspace=own.rotary_bytes,
    )


def _pass_memory(
    spec: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    kernel_workspace: KernelWorkspace,
    optim: OptimConfig | None,
) -> StageMemory:
    """Return the memory of a stage whose passes take the whole of a workload's sequences."""
    if is_zeroth_order(optim):
        points = POINTS
        if optim.perturbation_parallel:  # one point of twice as many sequences
            (plan, workload), points = as_one_forward(plan, workload), 1
        return _perturbed_pass_memory(NativeStorage(spec, plan, workload, stage, optim), kernel_workspace, points)
    own = NativeStorage(spec, plan, workload, stage, optim)
    moments = _StagePeaks(own, kernel_workspace, workload)
    gathered = own.param_shards.root if own.zero == "z3" else own.param_shards.total
    vocab_gradients = own.gradients_of(own.param_shards.vocab) if plan.vocab_parallel else 0
    embedding_gradients = 0 if spec.tied_embeddings else vocab_gradients // 2
    head_gradients = vocab_gradients - embedding_gradients
    return StageMemory(
        resident=_resident(own),
        gathered_params=0 if own.is_unsharded else gathered.unsharded_numel * own.compute_size,
        keeps_gathered=own.zero != "z3",
        gradients=own.gradients - head_gradients - embedding_gradients,
        saved=moments.saved,
        offloaded=MemoryTerms(activations=offloaded_activation_bytes(spec, plan, workload, stage)),
        host_activations=sum(own.leaving_bytes("host")),
        disk_activations=sum(own.leaving_bytes("disk")),
        activation_buffers=own.activation_buffers,
        host_state=own.host_optimizer - own.disk_optimizer + own.offloaded_params.host_bytes,
        disk_state=own.disk_optimizer + own.offloaded_params.disk_bytes,
        host_buffers=own.host_update_buffers,
        delayed_buffers=own.delayed_update_buffers,
        backward_buffers=own.backward_update_buffers,
        deferred=own.deferred(),
        vocab_parallel=MemoryTerms(logits=moments.vocab_saved_bytes),
        peak_candidates={
            Kind.F: _beside_fp8(moments.forward(), own),
            Kind.B: _beside_fp8(moments.backward(), own),
            "last B": tuple(moments.last_backward()),
            "later last B": tuple(moments.last_backward(is_first=False)),
            **moments.split_backward(),
            **moments.vocab_parallel_peaks(),
            "gather F": (moments.gather_before_forward(),),
            "gather B": (moments.gather_before_backward(),),
            Kind.UNSHARD: (moments.unshard(),),
            Kind.REDUCE_GRAD: (moments.reduce(),),
            Kind.DEVICE_UPDATE: (PeakCandidate("updating a layer", MemoryTerms(optimizer=own.fetched_state)),),
            "later REDUCE_GRAD": (moments.reduce(is_first=False),),
            Kind.ALL_REDUCE_TIED: (moments.tied_exchange(),),
            Kind.ALL_REDUCE_REPLICAS: (PeakCandidate("copies summed", MemoryTerms()),),
        },
        freed_by_reduction=0 if own.zero == "z3" else own.gradients - own.trained_shard_numel * own.master_size,
        pending_gradients=moments.pending_gradients,
        accumulates_gradients=not own.reduces_in_passes,
        head_gradients=head_gradients,
        embedding_gradients=embedding_gradients,
        message_bytes=own.sizes.message_bytes,
    )


def _perturbed_pass_memory(own: NativeStorage, kernel_workspace: KernelWorkspace, points: int) -> StageMemory:
    """Return the memory of a stage whose passes are forwards at so many points of a zeroth-order step."""
    moments, nothing = PerturbedPeaks(own, kernel_workspace, points), MemoryTerms()
    gathered = own.param_shards.root if own.zero == "z3" else own.param_shards.total
    return StageMemory(
        resident=_resident(own),
        gathered_params=0 if own.is_unsharded else gathered.unsharded_numel * own.compute_size,
        keeps_gathered=own.zero != "z3",
        gradients=0,
        saved=nothing,
        offloaded=nothing,
        deferred=nothing,
        vocab_parallel=nothing,
        host_state=own.offloaded_params.host_bytes,
        disk_state=own.offloaded_params.disk_bytes,
        host_buffers=own.offloaded_params.host_buffers,
        peak_candidates={
            Kind.F: tuple(moments.forward()),
            "gather F": (moments.gather(),),
            Kind.UNSHARD: (moments.unshard(),),
        },
        message_bytes=moments.hidden_bytes,
    )


def _beside_fp8(moments: list[PeakCandidate], stage: NativeStorage) -> tuple[PeakCandidate, ...]:
    """Return the moments with what a linear layer in fp8 holds beside them: its operands in fp8, two of them in another
    layout, too (`muster.model.float8`)."""
    if stage.plan.precision != "fp8":
        return tuple(moments)
    own, tokens = stage.sizes.local_model, stage.sizes.tokens
    widest = max(own.intermediate_size, own.num_heads * own.head_dim)
    held = MemoryTerms(workspace=2 * (tokens * (own.hidden_size + widest) + own.hidden_size * widest))
    return tuple(replace(moment, extra=moment.extra + held) for moment in moments)


class _StagePeaks(BackwardPeaks):
    """Moments of one stage's passes and collectives; all quantities in bytes."""

    def __init__(self, stage: NativeStorage, kernels: KernelWorkspace, workload: Workload) -> None:
        super().__init__(stage, kernels)
        self.workload = workload

    def forward(self) -> list[PeakCandidate]:
        moments = []
        if self.layers:
            last = self.stage.layer_activation_bytes(self.layers[-1])
            work, logits = self._forward_workspace(self.layers[-1]), -self.saved.logits
            after = MemoryTerms(gathered_parameters=self._bucket_bytes(1), workspace=work, logits=logits)
            before = MemoryTerms(
                gathered_parameters=self._prefetched_bucket_bytes(), activations=-last, workspace=work, logits=logits
            )
            count = len(self.layers)  # a layer's activations leave during the next layer
            after, before = after + self._left(count - 1), before + self._left(count - 2)
            moments += [PeakCandidate("last layer", after), PeakCandidate("layer before the last", before)]
        left = self._left(len(self.layers))
        if self.stage.has_head:
            moments.append(PeakCandidate("loss", self._loss_workspace(gradient=not self._is_tiled) + left))
        elif self.plan.is_last(self.stage.index):
            copies = 2 * self.sizes.hidden_tokens * self.stage.spec.hidden_size * self.master_size
            converted = self.compute_size != self.master_size and not self.kernel_workspace.fused_norm
            moments.append(PeakCandidate("last norm", MemoryTerms(workspace=copies * converted) + left))
        return moments

    def _forward_workspace(self, layer: int) -> int:
        """Return the temporary bytes at the end of a layer: results that aren't saved, and its output."""
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = mlp_inner_bytes(sizes, layer)
        made = {"none": 0, "core_attention": 0, "elementwise": product}.get(
            how, (2 + sizes.local_model.gated) * product
        )
        if sizes.local_model.has_experts(layer):  # the experts' results beside those in the tokens' order
            rows, sent = sizes.routed_row_bytes, dispatched_bytes(sizes)
            made = max(made, rows) if how != "full" else max(rows + made, 3 * rows)
            made += sent
        # Of sub-layers side by side, attention's output is apart from the sum that the MLP reads.
        moved = sizes.hidden_bytes if sizes.mesh.tp > 1 or sizes.model.parallel_sublayers > 1 else 0
        if sizes.hidden_tokens < sizes.tokens and sizes.tokens > sizes.seq_len:
            moved += sizes.full_hidden_bytes  # a reduce-scatter gathers each rank's part of several sequences
        attention = self._attention_workspace(layer, backward=False) - saved_mlp_bytes(sizes, layer)
        if self._is_tiled:  # the whole output, and all that one tile makes
            made = (2 + sizes.local_model.gated) * product
            tile = self._of_tile(made + 2 * sizes.full_hidden_bytes + moved)
            return max(tile + sizes.hidden_bytes - self.stage.last_norm_bytes, attention)
        return max(made + max(sizes.full_hidden_bytes, sizes.hidden_bytes) + moved, attention)

    def last_backward(self, is_first: bool = True) -> list[PeakCandidate]:
        """Return the further moments of a step's last B where it reduces under z1: a bucket's gradients are copied to a
        buffer, after which they are freed, beside the activations of the layers before.

        While the layer before runs, the buffer lives in place of the gradients, so that only the reduced shard comes
        on top of what `backward` says, which is left out. A step's only B needs no more than `backward` and `reduce`
        say. `is_first`: shards of gradients come into being, to which later units of passes add theirs.
        """
        if not self._reduces_beside or self.stage.zero != "z1" or self.stage.is_single_rank:
            return []
        copies = 1 + self.stage.copies_reduced(self.stage.is_single_shard, self.kernel_workspace)
        buckets, size, change = self.trained.buckets(self.plan.bucket_layers), self.plan.bucket_layers, 0
        moments = []
        for index, held in reversed([*enumerate(buckets)]):
            done = sum(map(self.stage.layer_activation_bytes, self.layers[index * size :]))
            result = max(0, held.shard_numel - held.unsharded_numel + held.last_param_numel)
            made = change + held.unsharded_numel * copies + result
            extra = MemoryTerms(
                activations=-done,
                logits=-self.saved.logits,
                communication=made * self.master_size,
                workspace=self.sizes.hidden_bytes,
            )
            moments.append(PeakCandidate("reducing a layer", extra + self._left(index * size)))
            change -= held.unsharded_numel - held.shard_numel * is_first
        return moments

    def reduce(self, is_first: bool = True) -> PeakCandidate:
        """Return the fullest moment of the reductions under z1, one group after another: buckets of layers from the
        last to the first, then embedding and head. `is_first`: shards come into being, to which later ones are added;
        of these layers' aren't counted where they are reduced beside the backward (`last_backward`).

        Complete gradients of a group are copied into a buffer and then freed, except the last, which a loop variable in
        torch's `foreach_reduce` keeps alive; the result is the sharded gradient, which stays (see `_reduction_bytes`).
        """
        is_single = self.stage.is_single_shard
        moments, change = [0], 0
        for held in (*reversed(self.trained.buckets(self.plan.bucket_layers)), self.trained.root):
            source = held.unsharded_numel * (1 + self.stage.copies_reduced(is_single, self.kernel_workspace))
            dropped = held.unsharded_numel if is_single else held.unsharded_numel - held.last_param_numel
            result = max(0, held.shard_numel * (1 + (is_single and not self.stage.is_alone)) - dropped)
            moments.append(change + source + result)
            change -= held.unsharded_numel - held.shard_numel * is_first
        largest = max(moments) if is_first or not self._reduces_beside else moments[-1]
        return PeakCandidate("reducing", MemoryTerms(communication=largest * self.master_size))

    @property
    def _reduces_beside(self) -> bool:
        """True if a step's last backward, or that of a unit, reduces its gradients layer by layer."""
        return self.kernel_workspace.overlaps_data_parallel and self.plan.overlaps_data_parallel

    def split_backward(self) -> dict[str, tuple[PeakCandidate, ...]]:
        """Return the moments of I and W; none where backwards are whole."""
        if not self.plan.split_backward:
            return {}
        inputs = tuple(self.backward_input())
        return {Kind.I: inputs, "pending": tuple(self.pending(inputs[-1])), Kind.W: tuple(self.weights())}

    def vocab_parallel_peaks(self) -> dict[str, tuple[PeakCandidate, ...]]:
        """Return the moments of vocabulary parallelism.

        S: logits and the softmax, which is saved, in the master dtype, and the softmax in the compute dtype beside its
        product with the head and the labels' rows, or both of these twice as they are put together. T: the
        last of these, and the head's gradient; then its reduction, or in a step's first T its sum. EMB_W: the
        embedding's gradient, and its reduction.
        """
        if not has_vocab_shard(self.plan, self.stage.index):
            return {}
        rows = chunk_bounds(self.stage.spec.vocab_size, self.plan.pp, self.plan.pp_rank(self.stage.index))[1]
        num_logits = rows * self.sizes.tokens
        converted = num_logits * self.compute_size * (self.compute_size != self.master_size)
        terms = max(converted + 2 * self.sizes.full_hidden_bytes, 4 * self.sizes.full_hidden_bytes)
        matrix = rows * self.stage.spec.hidden_size
        shard = self.param_shards.vocab.shard_numel // (1 if self.stage.spec.tied_embeddings else 2)
        buffers, gradients = self._reduction_bytes(ParamShard(matrix, shard, matrix), self.master_size)
        reduced = MemoryTerms(communication=buffers, workspace=gradients) if self.stage.reduces_in_passes else None
        head = MemoryTerms(logits=converted, workspace=matrix * self.compute_size)
        has_copies = self.compute_size != self.master_size  # whose gradients are added to sums
        embedding = MemoryTerms(
            workspace=self.sizes.full_hidden_bytes
            + matrix * self.compute_size * (self.stage.reduces_in_passes or has_copies)
        )
        vocab_gradients = self.stage.gradients_of(self.param_shards.vocab)
        summed = MemoryTerms(
            logits=-self.vocab_saved_bytes,
            gradients=vocab_gradients // (1 if self.stage.spec.tied_embeddings else 2),
            workspace=matrix * self.compute_size * has_copies,
        )
        after = reduced and reduced + MemoryTerms(logits=-self.vocab_saved_bytes)
        return {
            Kind.S: (PeakCandidate("scores", MemoryTerms(logits=num_logits * self.master_size, workspace=terms)),),
            Kind.T: _moments(("head", head), ("reducing the head", after)),
            "first T": _moments(("sum of the head's", None if self.stage.reduces_in_passes else summed)),
            Kind.EMB_W: _moments(("embedding", embedding), ("reducing the embedding", reduced)),
        }

    @property
    def vocab_saved_bytes(self) -> int:
        """Bytes that a vocabulary shard saves from S to T; 0 without one."""
        if not has_vocab_shard(self.plan, self.stage.index):
            return 0
        pp_rank = self.plan.pp_rank(self.stage.index)
        return vocab_parallel_bytes(self.stage.spec, self.plan, self.workload, pp_rank)

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
        gathered = MemoryTerms(gathered_parameters=self._root_bytes() + self._prefetched_bucket_bytes())
        return PeakCandidate(_GATHERING, gathered + self._left(len(self.layers)))

    def unshard(self) -> PeakCandidate:
        """Return the moment when all groups' gathers are under way, and the first one is copied out."""
        # Of copies of neighbours one group after another is gathered, and freed.
        copied_out = self.stage.zero == "z3"
        buffers = self._largest_unit_numel() * self.compute_size
        buffers *= 1 + copied_out + self.kernel_workspace.stages_collectives
        return PeakCandidate("gathering", MemoryTerms(gathered_parameters=buffers))


def _moments(*named: tuple[str, MemoryTerms | None]) -> tuple[PeakCandidate, ...]:
    """Return the moments that there are."""
    return tuple(PeakCandidate(name, extra) for name, extra in named if extra is not None)
