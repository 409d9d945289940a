"""Parameters of a stage on one rank, and times to communicate them and their gradients."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from operator import mul

from muster.config.optimizer_state import is_zeroth_order
from muster.cost.precision_bytes import compute_bytes, grad_reduce_bytes
from muster.cost.time.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
    sequential_broadcasts_s,
)
from muster.cost.time.kernels import stream_s
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.cost.time.rank_placement import PlacedPlan
from muster.layout.island_bytes import encoded_element_bytes
from muster.layout.tensor_layout import VOCAB_PARAMETERS
from muster.schedule.action import Kind
from muster.spec.four_bit import stored_element_bytes
from muster.spec.model import layer_parameter_shapes, stage_parameter_shapes

_FP32_BYTES = 4
"""Bytes of a float32 element."""
ROUNDED_SUM_BYTES = _FP32_BYTES + 2 + 2
"""Bytes that moves per element which rounds gradients to bf16 and sums those of all ranks: it is read in float32, and
written and read in bf16."""


class ParamCommunication:
    """Sizes and times of a stage's parameters and gradients on the slowest of its ranks."""

    def __init__(self, setting: PlacedPlan, stage: int) -> None:
        self.plan, self.model, self.framework, self.cache = (
            setting.plan,
            setting.model,
            setting.framework,
            setting.cache,
        )
        self.stage, self.mesh, self.groups = stage, setting.mesh(stage), setting.stage_groups(stage)
        self.data, self.replicas = self.groups.data_parallel, self.groups.replicas
        levels = self.groups.shard_levels
        self.gathering, self.reducing = (self.data, self.data) if levels is None else levels[:2]
        self.between_reducing = None if levels is None or self.reducing.size == self.data.size else levels[2]
        self.layers = setting.layers[stage % setting.stages_per_replica]
        self.zero = self.plan.pass_strategy(self.layers.start).zero
        once = self.framework.replica_reduce_once and self.plan.reduces_replicas_once
        self.backwards_per_replica_reduction = (
            self.plan.num_stage_micro_batches(stage, setting.workload)
            if once and (self.replicas.size > 1 or self.between_reducing is not None)
            else 1
        )
        self.forwards_per_ends_gather = (
            self.plan.num_stage_micro_batches(stage, setting.workload) if is_zeroth_order(setting.optim) else 1
        )
        """Forwards of a gather of what is outside of layers: under z3 a backward drops it, a forward doesn't."""
        self.element_bytes = compute_bytes(self.plan.precision)
        """Bytes of an element in the dtype of the passes."""

    @cached_property
    def numel(self) -> float:
        """Elements of the stage's parameters on one rank, before sharding over data-parallel ranks."""
        return self._ends_numel + self.layers_numel

    @property
    def _ends_numel(self) -> float:
        """Elements of embedding, last norm and head, as far as the stage has them."""
        plan, known, mesh = self.plan, self.cache.param_numels, self.mesh
        first, last = plan.is_first(self.stage), plan.is_last(self.stage)
        key = "ends", first, last, mesh.tp, mesh.ep, mesh.etp, plan.vocab_parallel and plan.pp
        if key not in known:
            ends = stage_parameter_shapes(self.model, range(0), first, last)
            known[key] = sum(self._local_numel(name, shape) for name, shape in ends)
        return known[key]

    @property
    def layers_numel(self) -> float:
        """Elements of its layers' parameters on one rank, before sharding."""
        layers = self.layers[:1] if self.cache.layers_are_alike else self.layers
        return sum(map(self._layer_numel, layers)) * len(self.layers) / max(1, len(layers))

    def _layer_numel(self, layer: int) -> float:
        model, known, mesh = self.model, self.cache.param_numels, self.mesh
        key = model.has_experts(layer), model.has_linear_attention(layer), mesh.tp, mesh.ep, mesh.etp
        if key not in known:
            known[key] = sum(self._local_numel(name, shape) for name, shape in layer_parameter_shapes(model, layer))
        return known[key]

    def _layer_bytes(self, layer: int) -> float:
        """Return the bytes of a layer's parameters on one rank in passes."""
        if self.model.adapter is None or not self.model.adapter.load_in_4bit:
            return self._layer_numel(layer) * self.element_bytes
        shapes = layer_parameter_shapes(self.model, layer)
        sizes = (stored_element_bytes(self.model, name, self.element_bytes) for name, _ in shapes)
        numels = (self._local_numel(*one) for one in layer_parameter_shapes(self.model, layer))
        return sum(map(mul, numels, sizes))

    def _local_numel(self, name: str, shape: Sequence[int]) -> float:
        """Return the elements of one parameter on one rank."""
        if len(shape) == 1:
            is_shared = self.model.parallel_sublayers > 1 and name.startswith("layers.")
            return prod(shape) / (self.mesh.tp if is_shared else 1)
        if ".experts." in name:
            return prod(shape) / (self.mesh.ep * self.mesh.etp)
        words = name in VOCAB_PARAMETERS
        return prod(shape) / self.mesh.tp / (self.plan.pp if words and self.plan.vocab_parallel else 1)

    @property
    def shard_numel(self) -> float:
        """Elements that the rank's optimizer updates."""
        return self.numel / self.data.size

    def buckets(self, layers: range) -> list[range]:
        """Return the runs of layers that passes gather, and whose gradients they reduce, in one collective; those of
        experts on several ranks count as layer by layer, as the collectives of the experts themselves are."""
        size = self.plan.bucket_layers if self.mesh.ep == 1 else 1
        return [layers[start : start + size] for start in range(0, len(layers), size)]

    def per_micro_batch_s(self, layers: range) -> tuple[float, float]:
        """Return the seconds (gather, reduce) of the parameters of some layers in each micro-batch, one collective for
        each bucket of them; `ends_per_micro_batch_s` are those of a stage's other parameters.

        z3 gathers parameters, in the dtype of the compute; z2 and z3 reduce gradients, and all-reduce them over
        replicas, or reduce them further where they are sharded over fewer ranks than optimizer state. Where that is
        done once a step, each micro-batch counts its share.
        """
        gather_s = reduce_s = 0.0
        if self.zero == "z1":
            return gather_s, reduce_s
        # The kind of a layer is the index of the first layer of that kind.
        kinds = self.cache.layer_types
        for bucket, count in Counter(kinds[run.start : run.stop] for run in self.buckets(layers)).items():
            per_tensor_s = len(bucket) * self._per_tensor_s()
            if self.zero == "z3":
                gathered = sum(map(self._layer_bytes, bucket))
                gather_s += count * (all_gather_s(self.gathering, gathered) + per_tensor_s)
            reduce_s += count * (self.backward_reduction_s(sum(map(self._layer_numel, bucket))) + per_tensor_s)
        return gather_s, reduce_s

    @property
    def ends_per_micro_batch_s(self) -> tuple[float, float]:
        """Seconds (gather, reduce) of embedding, last norm and head in each micro-batch, where they are one bucket.

        Every backward reduces it. Under z3 it drops it as well, and the next pass gathers it: as often as there are
        backwards, all counted as parts of forwards.
        """
        if self.zero == "z1" or not self.framework.joint_ends or not (numel := self._ends_of_passes_numel):
            return 0.0, 0.0
        gather_s = 0.0
        if self.zero == "z3":
            gather_s = all_gather_s(self.gathering, numel * self.element_bytes) / self.forwards_per_ends_gather
        return gather_s, self.backward_reduction_s(numel)

    @property
    def words_reduction_s(self) -> float:
        """Seconds in which a pass over a pipeline rank's words reduces the gradients of their rows."""
        if self.zero == "z1" or not self.framework.joint_ends:
            return 0.0
        return self.backward_reduction_s(self.model.vocab_size * self.model.hidden_size / self.plan.pp)

    @property
    def _ends_of_passes_numel(self) -> float:
        """Elements of embedding, last norm and head that passes reduce: without layers for multi-token prediction,
        which are buckets of layers, and without words that are spread over pipeline ranks."""
        first, last = self.plan.is_first(self.stage), self.plan.is_last(self.stage)
        return sum(
            self._local_numel(name, shape)
            for name, shape in stage_parameter_shapes(self.model, range(0), first, last)
            if not name.startswith("mtp.") and not (self.plan.vocab_parallel and name in VOCAB_PARAMETERS)
        )

    def backward_reduction_s(self, numel: float) -> float:
        """Return the seconds in which a backward reduces the gradients of so many elements."""
        size = numel * self.framework.grad_bytes
        return self._first_reduction_s(size) + self._further_reduction_s(size) / self.backwards_per_replica_reduction

    def _first_reduction_s(self, size: float) -> float:
        """Return the seconds to reduce so many bytes of gradients; over fewer ranks than share optimizer state they
        are copied before, in the order of these ranks, and added to their sums behind. Where they travel in bf16, by an
        all-to-all, they are rounded before and summed behind."""
        copies = 0.0
        if self.between_reducing is not None:
            copies = stream_s(self.groups.device, 2 * size + 3 * size / self.reducing.size)
        if self.plan.grad_reduce_dtype == "fp32" or self.reducing.size == 1:
            return reduce_scatter_s(self.reducing, size) + copies
        numel = size / self.framework.grad_bytes
        passes_s = stream_s(self.groups.device, numel * ROUNDED_SUM_BYTES, kernels=2)
        return all_to_all_s(self.reducing, numel * grad_reduce_bytes(self.plan)) + passes_s

    def _further_reduction_s(self, size: float) -> float:
        """Return the seconds to complete the reduction of so many bytes of gradients."""
        if self.between_reducing is not None:
            each, share = size / self.reducing.size, encoded_element_bytes(self.plan.quantized_gradients)
            if share is None:
                return reduce_scatter_s(self.between_reducing, each)
            size = each * share / self.framework.grad_bytes
            return all_to_all_s(self.between_reducing, size) + stream_s(self.groups.device, 2 * (each + size))
        return all_reduce_s(self.replicas, size / self.data.size)

    def _per_tensor_s(self) -> float:
        """Return the seconds per layer of frameworks that communicate each parameter by itself: the host's time for
        the copies, and the latency of a collective for each."""
        if not self.framework.per_parameter_collectives:
            return 0.0
        tensors = sum(1 for _ in layer_parameter_shapes(self.model, 0))
        return tensors * (self.data.size * self.groups.device.launch_s + all_gather_s(self.data, 1.0))

    def per_step_times(self, passes_s: Mapping[str, float], gradient_share: float = 1.0) -> Iterator[tuple[str, float]]:
        """Yield (kind, seconds) of the exposed communication once a step, which overlaps with passes of `passes_s`.

        `gradient_share` is the share of the parameters' elements that have gradients.
        """
        software = self.framework
        shares, reduce_s = self._group_shares(), 0.0
        for share, count in shares.items():
            gradients = self.numel * share * gradient_share * software.grad_bytes
            each_s = self._first_reduction_s(gradients) + all_reduce_s(self.replicas, gradients / self.data.size)
            reduce_s += count * each_s
        if software.all_reduce_grads:
            reduce_s = self._unsharded_reduce_s() * gradient_share
        gather = sequential_broadcasts_s if software.broadcast_updates else all_gather_s
        layers = self.layers[:1] if self.cache.layers_are_alike else self.layers
        held = sum(self._layer_bytes(layer) - self._layer_numel(layer) * self.element_bytes for layer in layers)
        smaller = held * len(self.layers) / max(1, len(layers))
        gathered = self.numel * self.element_bytes + smaller
        travelling = gathered
        if (element_bytes := encoded_element_bytes(self.plan.quantized_weights)) is not None:
            travelling = self.numel * element_bytes
        gather_s = sum(count * gather(self.data, travelling * share) for share, count in shares.items())
        if element_bytes is not None:
            gather_s += stream_s(self.groups.device, travelling + gathered)
        bucket_layers = self.plan.bucket_layers if software.joint_ends else 1
        bucket = first = min(1.0, bucket_layers / max(1, len(self.layers)))
        if software.joint_ends:
            first = min(1.0, self._ends_numel / self.numel + (1 - self._ends_numel / self.numel) * bucket)
        # Ranks on a CPU share its cores, and gloo's reductions return when they are over.
        overlaps = self.groups.device.kind != "cpu"
        overlaps &= not software.overlaps_whole_passes_only or self.plan.overlaps_data_parallel
        forward_s = passes_s[Kind.F] if overlaps and software.overlap_param_gather else 0.0
        backward_s = passes_s[Kind.B] if overlaps and software.overlap_grad_reduce else 0.0
        yield Kind.REDUCE_GRAD, exposed_beside_pass_s(reduce_s, backward_s, first, bucket)
        yield Kind.UNSHARD, exposed_beside_pass_s(gather_s, forward_s, first, bucket)
        whole = 2 * self.model.hidden_size * (len(self.layers) + 1)  # norms, and one factor of each low-rank layer
        whole += sum(self.model.low_rank_ranks.values()) * self.model.hidden_size * len(self.layers)
        yield Kind.ALL_REDUCE_TP, all_reduce_s(self.groups.tp, whole * software.grad_bytes)

    def _group_shares(self) -> Mapping[float, int]:
        """Return the number of collectives that gather or reduce such a share of the stage's parameters once a step:
        those of embedding and head, and one for each bucket of layers; or one for all."""
        if not self.framework.joint_ends or self.numel <= 0:
            return {1.0: 1}
        sizes = [self._ends_numel, *(sum(map(self._layer_numel, run)) for run in self.buckets(self.layers))]
        return Counter(size / self.numel for size in sizes if size)

    def _unsharded_reduce_s(self) -> float:
        """Return the seconds of an unsharded reduction of gradients: concatenate, divide, cast to float32, all-reduce,
        cast back, copy back."""
        if self.data.size * self.replicas.size == 1:
            return 0.0
        numel, size = self.numel, self.framework.grad_bytes
        copies_s = stream_s(self.groups.device, numel * (6 * size + 2 * (size + _FP32_BYTES)))
        return (
            copies_s + all_reduce_s(self.data, numel * _FP32_BYTES) + all_reduce_s(self.replicas, numel * _FP32_BYTES)
        )


def exposed_beside_pass_s(travels_s: float, beside_s: float, waited_for: float, alone: float) -> float:
    """Return the exposed seconds of communication in buckets that overlaps with a pass.

    They are the bucket before or after the pass, a part `waited_for` of all, what takes longer than the pass does but
    for its last or first bucket, a part `alone` of it, and the slowdown of the pass.
    """
    if beside_s <= 0:
        return travels_s
    hidden_s = min(travels_s * (1 - waited_for), beside_s * (1 - alone))
    return travels_s - hidden_s + OVERLAP_SLOWDOWN * hidden_s
