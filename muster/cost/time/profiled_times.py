"""Times of a plan on a machine that `muster profile` has measured: Muster's own passes, kernel by kernel.

The kernels and collectives are those of `muster.model` and `muster.parallel`, in their order. The runtime's work beside
them (hooks of sharding, lists of gradients) is an overhead with a constant part and a part per layer; `overhead_name`
gives the keys of `MachineRates.overheads`. Within a step everything takes longer than alone, by the factor
`MachineRates.contention`.
"""

from collections.abc import Iterator
from math import prod

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizer_state import is_zeroth_order
from muster.config.optimizers import ADAMW_UPDATE
from muster.cost.activations import late_written_bytes, offloaded_activation_bytes, pass_sizes
from muster.cost.comm_volume import step_report_bytes
from muster.cost.context_traffic import AttentionShape, attention_transfers, state_transfers
from muster.cost.host_updates import DISK_BYTES_PER_S, host_updated_numels
from muster.cost.param_offload import offloaded_params
from muster.cost.precision_bytes import compute_bytes, grad_reduce_bytes, master_bytes
from muster.cost.time.attention import SOFT_CAP_BYTES
from muster.cost.time.op_times import OpTimes, P2PTime
from muster.cost.time.profiled_cost import ProfiledCost
from muster.cost.time.profiled_experts import add_experts
from muster.cost.time.profiled_slices import layer_of_slices, matrix_of_sublayer
from muster.cost.time.profiled_updates import adamw_numel, host_update_times
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.cost.time.trained_parts import trained_parts
from muster.layout.host_updates import part_sizes_of
from muster.layout.island_bytes import encoded_element_bytes
from muster.layout.tensor_layout import chunk_bounds, is_expert, stage_shards, stages_on, state_shard_ranks
from muster.schedule.action import Kind
from muster.schedule.offload import LAYER_COPIES
from muster.spec.context_kinds import CONTEXT_KINDS
from muster.spec.errors import InfeasibleError
from muster.spec.four_bit import cut_weights, has_four_bits
from muster.spec.machine_rates import MachineRates
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

RSA_PASSES = 3
"""Sums of two tensors that take as long as the passes over all scores which ring self-attention makes: a fill, a
softmax of two passes, and copies of blocks; in the backward a product, a difference and another product."""
DEQUANTIZATION_SUMS = 5
"""Sums of an element in the time of which a CPU core makes a number of its code of 4 bits: it looks up pairs of
numbers, multiplies and converts them (1.4 ns beside 0.15 ns in a cache and 0.36 ns in memory)."""
DROPOUT_SUMS = 20
"""Sums of an element in the time of which a CPU core drops or keeps one: multiplications of 64 bits have no vector form
there (`muster.model.dropout`, 3.7 ns beside 0.17 ns)."""

_UP_PROJECTIONS = ("mlp.up", "mlp.shared.up")
"""Up projections of an MLP that all tokens pass."""


def profiled_times(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    machine: MachineRates,
    optim: OptimConfig | None = None,
    update_time: UpdateTime = "after_passes",
) -> OpTimes:
    """Return the seconds of every instruction of the plan, on the busiest rank of each stage.

    An optimizer other than AdamW (None) takes AdamW's profiled time, scaled by the bytes that it declares per element.

    Raises InfeasibleError for plans whose kernels a profile doesn't have, ConfigError for a precision without
    measurements.
    """
    _reject_unsupported(model, plan, machine)
    rates = RateInterpolator(machine, plan.precision)
    seconds: dict[tuple[str, int], float] = {}
    exposed_s: dict[tuple[str, int], dict[str, float]] = {}
    for stage in range(plan.num_stages):
        passes = _StagePasses(rates, model, plan, workload, stage, optim, update_time)
        contention = rates.contention(storage_level(plan, stage))
        for kind, time_s, within_s in passes.times():
            seconds[kind, stage] = contention * (time_s + sum(within_s.values()))
            if within_s:
                exposed_s[kind, stage] = {axis: contention * axis_s for axis, axis_s in within_s.items()}
    per_step = [_per_step_times(rates, model, plan, pp_rank, optim) for pp_rank in range(plan.pp)]
    for kind in per_step[0]:
        seconds[kind, -1] = max(times_s[kind] for times_s in per_step)
    processes = tuple(plan.mesh(pp_rank).num_ranks for pp_rank in range(plan.pp))
    return OpTimes(
        seconds,
        cores=machine.cores or None,
        processes_per_rank=processes,
        p2p_times=_p2p_times(rates, model, plan, workload),
        exposed_s=exposed_s,
        part_sizes=part_sizes_of(model, plan),
    )


def _reject_unsupported(model: ModelSpec, plan: Plan, machine: MachineRates) -> None:
    refused = {
        "offload to another memory": not machine.cores
        and (bool(_offloaded_layers(plan, model)) or any(s.offload_optimizer != "none" for s in plan.strategies)),
        "a vocabulary that is spread": plan.vocab_parallel,
        "experts, which a profile of an earlier version has not measured": model.moe is not None
        and not any(kernels.grouped_matmuls for kernels in machine.kernels.values()),
        "experts that read the input of their layer (shortcut)": model.moe is not None and model.moe.shortcut,
        "latent attention": model.mla is not None,
        "the gated delta rule": model.linear_attention is not None and model.linear_attention.kind == "gated_deltanet",
        "layers of a plugin, which it has not measured": model.architecture is not None,
    }
    if found := [what for what, wanted in refused.items() if wanted]:
        raise InfeasibleError(f"a measured machine has no times for {' and '.join(found)}")


def _offloaded_layers(plan: Plan, model: ModelSpec) -> list[int]:
    """Return the layers whose activations are offloaded."""
    return [
        n
        for stage in range(plan.num_stages)
        for tier in ("host", "disk")
        for n in plan.offloaded_layers(stage, model.num_layers, tier)
    ]


def overhead_name(level: str, kind: str, part: str) -> str:
    """Return the key of a runtime overhead: `part` is `base`, or `layer` for the part per layer."""
    return f"{level} {kind} {part}"


def storage_level(plan: Plan, stage: int) -> str:
    """Return how the runtime stores a stage: `whole`, z1, z2 or z3, after `tensor` under tensor parallelism."""
    mesh = plan.mesh(stage)
    is_single = (mesh.grad_sum_size == 1 or plan.schedule_entry.is_asynchronous) and not plan.offloads_params
    whole = is_single and compute_bytes(plan.precision) == master_bytes(plan.precision)
    level = "whole" if whole else "z2" if is_single else plan.pass_strategy(0).zero
    return f"tensor {level}" if mesh.tp > 1 else level


# ----------------------------------------------------------------------------------------------------------------------
# Passes


class _StagePasses:
    """Passes of one stage over one micro-batch."""

    def __init__(
        self,
        rates: RateInterpolator,
        model: ModelSpec,
        plan: Plan,
        workload: Workload,
        stage: int,
        optim: OptimConfig | None = None,
        update_time: UpdateTime = "after_passes",
        rows: int | None = None,
    ) -> None:
        self.rates, self.model, self.plan, self.workload, self.stage = rates, model, plan, workload, stage
        self.optim, self.away = optim, offloaded_params(model, plan, stage, optim, update_time)
        self.trained = trained_parts(optim, model, plan, stage)
        self.mesh, self.layers = plan.mesh(stage), plan.layers(stage, model.num_layers)
        self.strategy = plan.strategy(self.layers.start)
        self.rows, self.seq_len = rows or plan.local_micro_batch_size(stage), workload.seq_len
        self.tokens = self.rows * self.seq_len // self.mesh.cp
        self.sequence_shards = self.mesh.tp if self.strategy.sp else 1
        self.streams = model.local_sublayers(self.mesh.tp)
        """Residual streams on this rank."""
        self.hidden_elements = self.tokens // self.sequence_shards * model.hidden_size
        """Elements of a stream of the hidden state on this rank."""
        self.size = compute_bytes(plan.precision)
        self.param_shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        """Layer (or "" for parameters of none) → name within it → shape."""
        for name, size in cut_weights((name, part.size) for name, _, part, *_ in stage_shards(model, plan, stage)):
            head, _, rest = name.partition(".")
            layer, _, own = rest.partition(".") if head == "layers" else ("", "", name)
            self.param_shapes.setdefault(layer, {})[own] = size

    def times(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Yield (kind, seconds of local work, axis → seconds of exposed communication)."""
        cost, known = ProfiledCost(), {}
        for index, layer in enumerate(self.layers):
            has_experts = self.model.has_experts(layer)
            sums = self.mesh.tp > 1 and self.model.parallel_sublayers > 1 and layer > 0
            key = self.plan.strategy(layer).recompute, self.model.has_linear_attention(layer), has_experts, sums
            if key not in known:
                known[key] = layer_of_slices(self, self.param_shapes[str(layer)], *key)
            has_backward, share = (True, 1.0) if self.trained is None else self.trained.layers[index]
            cost.add(known[key].with_backward(has_backward, share * has_backward))
        if known:
            cost.add_end_of_run(next(iter(known.values())), self.trained is None or self.trained.layers[0][0])
        cost.add(self._embedding_and_head(self.param_shapes.get("", {})))
        reductions_s = self._add_sharding(cost)
        forward_s, backward_s = self._overhead(Kind.F), self._overhead(Kind.B)
        yield Kind.F, cost.forward_s + forward_s, dict(cost.forward_exposed_s)
        yield Kind.I, cost.input_grad_s + backward_s / 2, dict(cost.backward_exposed_s)
        yield Kind.W, cost.weight_grad_s + backward_s / 2, reductions_s
        for axis, time_s in reductions_s.items():
            cost.backward_exposed_s[axis] += time_s
        yield Kind.B, cost.input_grad_s + cost.weight_grad_s + backward_s, dict(cost.backward_exposed_s)
        gathered_s = sum(map(self._gather, self._buckets()))
        yield Kind.UNSHARD, gathered_s + self._overhead(Kind.UNSHARD), {}
        yield Kind.REDUCE_GRAD, self._reduce_all() + self._overhead(Kind.REDUCE_GRAD), {}
        moved = offloaded_activation_bytes(self.model, self.plan, self.workload, self.stage)
        copy_s = self.rates.kernel("copy", moved // master_bytes(self.plan.precision))
        for kind in LAYER_COPIES["host_copy"] if self.plan.offloads_by_layer else (Kind.OFFLOAD, Kind.RELOAD):
            yield kind, copy_s, {}
        written = offloaded_activation_bytes(self.model, self.plan, self.workload, self.stage, "disk")
        read_bytes_per_s, write_bytes_per_s = self._disk_rates()
        late = late_written_bytes(self.model, self.plan, self.workload, self.stage)
        yield Kind.WRITE_ACT, (written - late) * self.plan.world_size / write_bytes_per_s, {}
        yield Kind.WRITE_ACT_LATE, late * self.plan.world_size / write_bytes_per_s, {}
        yield Kind.READ_ACT, written * self.plan.world_size / read_bytes_per_s, {}
        own = self.rates, self.model, self.plan, self.stage, self.optim
        yield from ((kind, time_s, {}) for kind, time_s in host_update_times(*own, self.away, self._disk_rates()))
        yield from self._param_loads()
        copied = sum(prod(shape) for parts in self.param_shapes.values() for shape in parts.values() if len(shape) == 1)
        copied += sum(self.model.low_rank_ranks.values()) * self.model.hidden_size * len(self.layers)
        copies_s = self.rates.collective("all_reduce", self.mesh.tp, copied * master_bytes(self.plan.precision))
        yield Kind.ALL_REDUCE_TP, copies_s, {}

    def _param_loads(self) -> Iterator[tuple[str, float, dict[str, float]]]:
        """Yield the times of the copies of parameters and gradients beside passes."""
        away = self.away
        if not away.groups:
            return
        count, wide = self.plan.num_stage_micro_batches(self.stage, self.workload), master_bytes(self.plan.precision)
        reads, writes = self._disk_rates()
        for backward, load, read in ((False, Kind.LOAD_F, Kind.READ_F), (True, Kind.LOAD_B, Kind.READ_B)):
            yield load, self.rates.kernel("copy", away.host_link_bytes(backward) // wide), {}
            was_read, was_written = away.disk_bytes_of_pass(backward, count)
            yield read, self.plan.world_size * (was_read / reads + was_written / writes), {}

    def _disk_rates(self) -> tuple[float, float]:
        """Return the bytes per second that all ranks together read and write on disk."""
        machine = self.rates.machine
        return machine.disk_read_bytes_per_s or DISK_BYTES_PER_S, machine.disk_write_bytes_per_s or DISK_BYTES_PER_S

    def _overhead(self, kind: str) -> float:
        level = storage_level(self.plan, self.stage)
        base, layer = (self.rates.overhead(overhead_name(level, kind, part)) for part in ("base", "layer"))
        return max(0.0, base + layer * len(self.layers))

    def of_rows(self, rows: int) -> "_StagePasses":
        return _StagePasses(self.rates, self.model, self.plan, self.workload, self.stage, self.optim, rows=rows)

    def layer(
        self, parts: dict[str, tuple[int, ...]], recompute: str, is_linear: bool, has_experts: bool
    ) -> ProfiledCost:
        rates, cost, d = self.rates, ProfiledCost(), self.model.head_dim
        for name, shape in parts.items():
            if len(shape) == 2 and not is_expert(name):
                for _ in range(self.streams):
                    self._add_linear(cost, matrix_of_sublayer(name, shape, self.streams))
        self._add_dequantization(cost, parts)
        norms = sum(name.endswith("norm.weight") for name in parts)
        heads, kv_heads = (_outputs(parts, f"attn.{one}") // d for one in ("q", "k"))
        inner = next((found for name in _UP_PROJECTIONS if (found := _outputs(parts, name))), 0)
        turned = (heads, kv_heads) if self.model.position == "rope" and not is_linear else ()
        for direction in ("forward", "backward"):
            cheap_s = norms * self.streams * rates.kernel(f"norm {direction}", self.hidden_elements)
            # An activation without a gate moves about half of the bytes of one with a gate.
            cheap_s += rates.kernel(f"gated {direction}", self.tokens * inner) / (1 if self.model.gated else 2)
            added = (2 + (self.model.parallel_sublayers > 1)) * self.streams
            time_s = cheap_s + added * rates.kernel("add", self.hidden_elements)
            time_s += sum(rates.kernel(f"rotary {direction}", self.tokens * count * d) for count in turned)
            time_s += self._recurrence_s(direction) if is_linear else self._attention_s(direction, heads, d)
            is_piecewise = self.model.attention_softcap is not None or self.model.attention_dropout
            if is_piecewise and not is_linear:
                # Passes over the visible scores, by the rate of a sum, which moves three elements for each.
                moved = SOFT_CAP_BYTES[direction == "backward"] / (3 * master_bytes(self.plan.precision))
                time_s += moved * rates.kernel(
                    "add", self.tokens * heads * (self.seq_len // 2 + self.workload.earlier_positions)
                )
            time_s += self._dropout_s(2 * self.hidden_elements, direction, self.model.hidden_dropout)
            scores = 0 if is_linear else self.tokens * heads * self.seq_len // 2
            time_s += self._dropout_s(scores, direction, self.model.attention_dropout)
            if self.model.adapter is not None:
                read = sum(shape[1] for name, shape in parts.items() if name.endswith(".lora_A.weight"))
                time_s += self._dropout_s(self.tokens * read, direction, self.model.adapter.lora_dropout)
            if direction == "forward":
                cost.forward_s += time_s
                if has_experts:
                    where = self.rates, self.model, self.plan, self.workload, self.stage
                    cheap_s += add_experts(cost, *where, parts, recompute == "full")
                again_s = cheap_s if recompute == "elementwise" else cost.forward_s if recompute == "full" else 0.0
                again_s += self._tiles_again_s(parts, recompute)
            else:
                cost.input_grad_s += time_s + again_s
        self._add_tensor(cost, recompute == "full", has_experts and self.plan.routes_own_tokens(self.mesh))
        if self.plan.sequence_tiles > 1:
            matrices = [shape for name, shape in parts.items() if name.startswith("mlp.") and len(shape) == 2]
            cost.weight_grad_s += self._summed_tiles_s(sum(map(prod, matrices)))
        shape = AttentionShape(self.tokens, heads, kv_heads, d)
        self._add_context(cost, None if is_linear else shape, recompute == "full")
        return cost

    def _attention_s(self, direction: str, heads: int, head_dim: int) -> float:
        """Return the seconds of attention with a softmax; of consecutive positions the last rank's see most."""
        is_contiguous = self.mesh.cp > 1 and self.plan.context_ranks(self.mesh).is_contiguous
        share = (2 - 1 / self.mesh.cp if is_contiguous else 1) / self.mesh.cp
        time_s = self.rows * heads * self._scores_s(direction, head_dim) * share
        if self.mesh.cp > 1 and CONTEXT_KINDS[self.plan.cp_comm_type].saves_scores:
            time_s += RSA_PASSES * self.rates.kernel("add", self.tokens * heads * self.seq_len)
        return time_s

    def _recurrence_s(self, direction: str) -> float:
        """Return the seconds of linear attention: within chunks scores and outputs, and states; and the passes over its
        operands. The backward makes chunks and states again, and has two matmuls for each of these."""
        linear, rates, tokens = self.model.linear_attention, self.rates, self.tokens
        assert linear is not None
        heads, chunk = linear.num_value_heads // self.mesh.tp, linear.chunk
        d, e = linear.key_head_dim, linear.value_head_dim
        products_s = sum(
            rates.matmul("forward", tokens, inner, outer) for inner, outer in ((d, chunk), (chunk, e), (d, e), (e, d))
        )
        passes_s = 6 * rates.kernel("add", tokens * heads * (2 * d + e))
        return (heads * products_s + passes_s) * (1 if direction == "forward" else 3)

    def _dropout_s(self, numbers: int, direction: str, rate: float) -> float:
        """Return the seconds to drop some of so many elements."""
        sums = DROPOUT_SUMS + (direction == "backward")  # which copies the gradient
        return self.rates.kernel("add", numbers) * sums if rate else 0.0

    def _scores_s(self, direction: str, head_dim: int) -> float:
        """Return the seconds of one head's attention in one sequence: among its own positions, and to those of the
        slices before it, at the rate of all of them."""
        earlier, time_s = self.workload.earlier_positions, self.rates.attention(direction, self.seq_len, head_dim)
        if not earlier:
            return time_s
        whole = earlier + self.seq_len
        return time_s + 2 * earlier * self.seq_len / whole**2 * self.rates.attention(direction, whole, head_dim)

    def _tiles_again_s(self, parts: dict[str, tuple[int, ...]], recompute: str) -> float:
        """Return the seconds in which a backward repeats the MLP's tiles; 0 without any.

        What recompute repeats besides is in the time of recompute: of the MLP all, or its norm and activation.
        """
        is_repeated = recompute == "full" and not self.model.has_post_norms
        if self.plan.sequence_tiles == 1 or is_repeated:
            return 0.0
        matrices = [shape for name, shape in parts.items() if name.startswith("mlp.") and len(shape) == 2]
        repeated_s = sum(self.rates.matmul("forward", self.tokens, inner, outer) for outer, inner in matrices)
        if recompute == "elementwise":
            return repeated_s
        cheap_s = self.rates.kernel("gated forward", self.tokens * _outputs(parts, "mlp.up"))
        norm_s = self.rates.kernel("norm forward", self.hidden_elements) * self.model.has_pre_norms
        return repeated_s + cheap_s / (1 if self.model.gated else 2) + norm_s

    def _summed_tiles_s(self, numbers: int) -> float:
        """Return the seconds in which the gradients of matrices are added up over tiles."""
        return (self.plan.sequence_tiles - 1) * self.rates.kernel("add", numbers)

    def _add_context(self, cost: ProfiledCost, shape: AttentionShape | None, again: bool) -> None:
        """Add the transfers of context-parallel attention, or of the states of linear attention (None). On a CPU those
        of a ring take the cores that compute, so none is hidden; an all-to-all takes as long as a reduce-scatter, which
        sends as many bytes."""
        plan, context = self.plan, self.plan.context_ranks(self.mesh)
        if shape is not None:
            found = attention_transfers(context, shape)
        else:
            states = pass_sizes(self.model, plan, self.workload, self.stage).states
            assert states is not None
            found = state_transfers(context, states, 1)
        for own, exposed in ((found.forward, cost.forward_exposed_s), (found.backward, cost.backward_exposed_s)):
            for one in own:
                size = master_bytes(plan.precision) if one.in_master_dtype else self.size
                kind = "reduce_scatter" if one.kind == "all_to_all" else one.kind
                ranks = 2 if kind == "send" else context.ulysses if one.among == "ulysses" else context.ring
                # A block that is handed on reaches the last rank after a hop for each.
                calls = one.calls + (context.size - 2) * (shape is None and kind == "send")
                exposed["cp"] += calls * self.rates.collective(kind, ranks, one.numel * size)
        if again:
            cost.backward_exposed_s["cp"] += cost.forward_exposed_s["cp"]

    def _add_dequantization(self, cost: ProfiledCost, parts: dict[str, tuple[int, ...]]) -> None:
        """Add the passes over weights in 4 bits that make numbers of their codes."""
        numel = sum(prod(shape) for name, shape in parts.items() if has_four_bits(self.model, f"layers.0.{name}"))
        time_s = DEQUANTIZATION_SUMS * self.rates.kernel("add", numel) if numel else 0.0
        cost.forward_s += time_s
        cost.input_grad_s += time_s

    def _add_linear(self, cost: ProfiledCost, shape: tuple[int, ...]) -> None:
        outer, inner = shape
        cost.forward_s += self.rates.matmul("forward", self.tokens, inner, outer)
        cost.input_grad_s += self.rates.matmul("input", self.tokens, inner, outer)
        cost.weight_grad_s += self.rates.matmul("weight", self.tokens, inner, outer)

    def sum_of_streams_s(self) -> float:
        """Return the seconds in which tensor-parallel ranks sum something as large as a stream."""
        return self.rates.collective("all_reduce", self.mesh.tp, self.tokens * self.model.hidden_size * self.size)

    def _add_tensor(self, cost: ProfiledCost, again: bool, routes_own_tokens: bool) -> None:
        """Add the tensor-parallel collectives of a layer's two sublayers (see `comm_volume.tensor_axis_bytes`). Where
        each rank routes its own tokens, experts have none under sequence parallelism, else a gather of results and one
        of gradients."""
        tp, whole = self.mesh.tp, self.tokens * self.model.hidden_size * self.size
        if tp == 1 or self.model.parallel_sublayers > 1:
            return
        collective, forward, backward = self.rates.collective, cost.forward_exposed_s, cost.backward_exposed_s
        if self.sequence_shards > 1:
            gather_s, scatter_s = collective("all_gather", tp, whole // tp), collective("reduce_scatter", tp, whole)
            sublayers, last_s = 2 - routes_own_tokens, scatter_s * (not routes_own_tokens)
            forward["tp"] += sublayers * (gather_s + scatter_s)
            backward["tp"] += sublayers * (2 * gather_s + scatter_s)
        else:
            sum_s = collective("all_reduce", tp, whole)
            second_s = collective("all_gather", tp, whole // tp) if routes_own_tokens else sum_s
            last_s = second_s
            forward["tp"] += sum_s + second_s
            backward["tp"] += sum_s + second_s
        if self.model.qk_norm and self.model.qk_norm_width == "projection":
            sum_s = collective("all_reduce", tp, 2 * self.tokens * master_bytes(self.plan.precision))
            forward["tp"] += sum_s
            backward["tp"] += sum_s
        if again and self.model.residual != "ladder":  # which repeats no sums
            ends_early = not self.model.has_post_norms and self.strategy.tp_overlap != "async_tp"
            backward["tp"] += forward["tp"] - ends_early * last_s
        elif self.plan.sequence_tiles > 1:
            backward["tp"] += forward["tp"] / 2

    def _embedding_and_head(self, parts: dict[str, tuple[int, ...]]) -> ProfiledCost:
        """Return the cost of embedding, last norm, head and loss, where the stage has them."""
        rates, cost, tp = self.rates, ProfiledCost(), self.mesh.tp
        if self.plan.is_first(self.stage):
            numbers = prod(parts.get("embed.weight", ()))
            cost.forward_s += rates.kernel("embedding forward", self.tokens * self.model.hidden_size)
            for direction in ("forward", "backward"):
                dropped_s = self._dropout_s(self.hidden_elements, direction, self.model.embedding_dropout)
                if direction == "forward":
                    cost.forward_s += dropped_s
                else:
                    cost.input_grad_s += dropped_s
            if self.trained is None or self.trained.embedding:
                cost.weight_grad_s += rates.kernel("embedding backward", numbers)
            cost.forward_exposed_s["tp"] += rates.collective(
                "all_reduce", tp, self.hidden_elements * self.sequence_shards * self.size
            )
            if self.model.parallel_sublayers > 1 and tp > 1:
                cost.backward_exposed_s["tp"] += self.sum_of_streams_s()
        if self.plan.is_last(self.stage):
            if (conjunction := parts.get("conjunction.weight")) is not None:
                self._add_linear(cost, conjunction)
                cost.forward_exposed_s["tp"] += self.sum_of_streams_s() if tp > 1 else 0.0
            cost.forward_s += rates.kernel("norm forward", self.hidden_elements)
            cost.input_grad_s += rates.kernel("norm backward", self.hidden_elements)
            head = parts["head.weight" if "head.weight" in parts else "embed.weight"]
            linear = ProfiledCost()
            self._add_linear(linear, head)
            if self.trained is not None:
                linear = linear.with_backward(self.trained.head_input, self.trained.head)
            cost.add(linear)
            loss_s = rates.kernel("loss forward", self.tokens * head[0])
            cost.forward_s += loss_s
            if self.plan.sequence_tiles > 1:
                cost.input_grad_s += linear.forward_s + loss_s
                cost.weight_grad_s += self._summed_tiles_s(prod(head))
            cost.input_grad_s += rates.kernel("loss backward", self.tokens * head[0])
            cost.forward_exposed_s["tp"] += 2 * rates.collective("all_reduce", tp, 8 * self.tokens)
            cost.backward_exposed_s["tp"] += rates.collective(
                "all_reduce", tp, self.hidden_elements * self.sequence_shards * self.size
            )
        return cost

    # ------------------------------------------------------------------------------------------------------------------
    # Sharding

    def _buckets(self) -> list[tuple[int, int]]:
        """Return (elements, ranks) of each bucket that is gathered or reduced as one; with expert parallelism each
        layer's experts are one, over the ranks that have the same ones."""
        shards, apart = self.mesh.state_shards, self.mesh.ep > 1
        own = [self.param_shapes[str(layer)] for layer in self.layers]
        experts = [sum(prod(size) for name, size in parts.items() if is_expert(name)) * apart for parts in own]
        layers = [sum(map(prod, parts.values())) - less for parts, less in zip(own, experts, strict=True)]
        size = self.plan.bucket_layers
        buckets = [(sum(layers[start : start + size]), shards) for start in range(0, len(layers), size)]
        buckets += [(numbers, self.mesh.expert_state_shards) for numbers in experts if numbers]
        rest = sum(map(prod, self.param_shapes.get("", {}).values()))
        return buckets + [(rest, shards)] if rest else buckets

    def _gather(self, bucket: tuple[int, int], in_pass: bool = False) -> float:
        """Return the seconds to all-gather one bucket, within a pass from the ranks that share a copy, and to copy it
        out of the common buffer."""
        numbers, ranks = bucket
        if in_pass and self.plan.has_shard_levels:
            ranks = self.plan.gather_ranks(self.mesh)
        own = chunk_bounds(numbers, ranks, 0)[1]
        copies_s = (
            self.rates.kernel("copy", numbers) if bucket[1] > 1 or self.size < master_bytes(self.plan.precision) else 0
        )
        share = None if in_pass else encoded_element_bytes(self.plan.quantized_weights)
        if share is not None:  # integers, made of the parameters and made parameters of again
            return self.rates.collective("all_gather", ranks, round(own * share)) + 2 * copies_s
        return self.rates.collective("all_gather", ranks, own * self.size) + copies_s

    def _reduce(self, bucket: tuple[int, int]) -> float:
        """Return the seconds to copy one bucket's gradients, reduce-scatter them, and all-reduce over replicas, or
        reduce them further where they are sharded over fewer ranks than optimizer state. An all-to-all in bf16 takes as
        long as a reduce-scatter of as many bytes; before it they are rounded, and summed after it."""
        wide, (numbers, ranks) = master_bytes(self.plan.precision), bucket
        others = 1
        if self.plan.has_shard_levels:
            ranks = self.plan.reduce_ranks(self.mesh)
            others = self.mesh.state_shards // ranks
        if self.mesh.grad_sum_size == 1 and not self.plan.offloads_params:
            return 0.0
        if self.plan.schedule_entry.is_asynchronous:  # whole weights, whose gradients are summed where they are
            return self.rates.collective("all_reduce", self.mesh.dp_replicate, numbers * wide)
        own = chunk_bounds(numbers, ranks, 0)[1]
        sent = numbers * grad_reduce_bytes(self.plan)
        time_s = self.rates.collective("reduce_scatter", ranks, sent) + self.rates.kernel("copy", numbers)
        if others > 1:
            once = self.plan.reduces_replicas_once
            count = self.plan.num_stage_micro_batches(self.stage, self.workload) if once else 1
            share = encoded_element_bytes(self.plan.quantized_gradients)
            further_s = self.rates.collective("reduce_scatter", others, round(own * (share or wide)))
            further_s = (further_s + (share is not None) * self.rates.kernel("copy", 2 * own)) / count
            return time_s + further_s + self.rates.kernel("copy", numbers)
        if self.plan.grad_reduce_dtype == "bf16" and ranks > 1:
            time_s += self.rates.kernel("copy", numbers) + self.rates.kernel("add", numbers)
        return time_s + self.rates.collective("all_reduce", self.mesh.dp_replicate, own * wide)

    def _reduce_all(self) -> float:
        """Return the seconds to reduce the gradients of all buckets, as far as these are trained."""
        return sum(map(self._reduce, self._buckets())) * (1.0 if self.trained is None else self.trained.gradient_share)

    def _add_sharding(self, cost: ProfiledCost) -> dict[str, float]:
        """Add the gathers within passes, and return by axis the seconds of the reductions that end a backward."""
        if self.mesh.grad_sum_size == 1 and not self.plan.offloads_params:
            return {}
        buckets, zero = self._buckets(), self.plan.pass_strategy(0).zero
        if zero == "z3":
            layers = buckets[: len(buckets) - bool(self.param_shapes.get(""))]
            cost.forward_exposed_s["dp"] += sum(self._gather(bucket, in_pass=True) for bucket in buckets)
            cost.backward_exposed_s["dp"] += sum(self._gather(bucket, in_pass=True) for bucket in layers)
        return {} if zero == "z1" else {"dp": self._reduce_all()}


# ----------------------------------------------------------------------------------------------------------------------
# Between passes


def _outputs(parts: dict[str, tuple[int, ...]], module: str) -> int:
    """Return the outputs of a linear layer on the rank; 0 where the layer has none of this name."""
    shape = parts.get(f"{module}.weight") or parts.get(f"{module}.low_rank_B.weight")
    return shape[0] if shape else 0


def _p2p_times(
    rates: RateInterpolator, model: ModelSpec, plan: Plan, workload: Workload
) -> dict[tuple[int, int], P2PTime]:
    found = {}
    for stage, other in plan.hops:
        cut = plan.mesh(stage).tp if plan.default_strategy.sp else 1
        positions = plan.local_micro_batch_size(stage) * workload.seq_len // plan.mesh(stage).cp // cut
        count = positions * model.boundary_size(plan.mesh(stage).tp) * compute_bytes(plan.precision)
        hop = P2PTime(rates.contention(storage_level(plan, stage)) * rates.collective("send", 2, count))
        found[stage, other] = found[other, stage] = hop
    return found


def streamed_s(machine: MachineRates, plan: Plan, stage: int, num_bytes: float) -> float:
    """Return the seconds in which a rank of a stage reads and writes so many bytes, at the rate of AdamW's update."""
    rates = RateInterpolator(machine, plan.precision)
    numel = round(num_bytes / ADAMW_UPDATE.bytes_per_element(2 * 4, 4, 2))
    return rates.contention(storage_level(plan, stage)) * rates.kernel("adamw", numel)


def _per_step_times(
    rates: RateInterpolator, model: ModelSpec, plan: Plan, pp_rank: int, optim: OptimConfig | None
) -> dict[str, float]:
    """Return the seconds of gradient norm, clipping and optimizer step on one pipeline rank.

    Where the host updates parameters, gradients are clipped before it takes them, else as the optimizer steps.
    """
    stages = stages_on(plan, pp_rank)
    mesh, level = plan.mesh(pp_rank), storage_level(plan, stages[0])
    numbers = [
        -(-part.numel // state_shard_ranks(mesh, name))
        for stage in stages
        for name, _, part, *_ in stage_shards(model, plan, stage)
    ]
    layers = sum(len(plan.layers(stage, model.num_layers)) for stage in stages)
    total = sum(numbers)

    def overhead(kind: str) -> float:
        base, layer = (rates.overhead(overhead_name(level, kind, part)) for part in ("base", "layer"))
        return max(0.0, base + layer * layers)

    hosted = sum(sum(host_updated_numels(model, plan, stage, optim)) for stage in stages)
    updated = adamw_numel(max(0, total - hosted), model, optim)
    all_reduce_s = rates.collective("all_reduce", plan.island_size, step_report_bytes(model))
    contention = rates.contention(level)
    read = 0 if is_zeroth_order(optim) else total  # gradients
    clip_s = contention * rates.kernel("scale", read)
    step_s = contention * (rates.kernel("adamw", updated) + overhead(Kind.STEP))
    is_hosted = any(strategy.offload_optimizer != "none" for strategy in plan.strategies)
    return {
        Kind.GRAD_NORM: contention * (all_reduce_s + rates.kernel("gradient norm", read) + overhead(Kind.GRAD_NORM)),
        Kind.CLIP: clip_s * is_hosted,
        Kind.STEP: step_s + clip_s * (not is_hosted),
    }
