"""Building blocks of a layer's times: linear layers, elementwise operators, tensor-parallel collectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

from muster.cost.precision_bytes import compute_bytes
from muster.cost.time.collectives import CommGroup, all_gather_s, all_reduce_s, reduce_scatter_s
from muster.cost.time.kernels import batched_matmul_s, grouped_matmul_s, matmul_s, stream_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.pass_pairs import Turn
from muster.cost.time.scaled_casts import matmul_rate, operand_cast_bytes
from muster.spec.adapters import ROW_PARALLEL
from muster.spec.context_kinds import ContextRanks
from muster.spec.device import DeviceSpec
from muster.spec.device_precision import matmul_precision
from muster.spec.expert_kinds import DISPATCHERS, ExpertDispatch
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Float8Recipe, Precision
from muster.spec.routing_load import LoadOfRanks

CAST_NORM_BYTES = (20, 32)
"""Bytes per element (forward, backward) of a norm's kernel between casts to float32 and back, as in eager programs."""
DROPOUT_BYTES = 58
"""Bytes per element that dropout moves to find the elements that stay (`muster.model.dropout`): 13 operations on a
quarter of a 64-bit number, a comparison, a negation and a fill."""
DROPOUT_KERNELS = 17
FOUR_BIT_BYTES = 0.516
"""Bytes of an element of a weight in 4 bits, with its share of absolute maxima (arXiv:2305.14314 §3)."""
FOUR_BIT_KERNELS = 10
"""Kernels that make a weight of its codes, of which all but one are for absolute maxima (`muster.model.four_bit`)."""
EAGER_NORM_BYTES = (45, 115)
"""Bytes per element (forward, backward) of an RMSNorm whose operators are kernels of their own in float32: cast,
square, mean, multiplication, cast, multiplication by the weight (Llama's published code, and autograd's for it)."""


FP8_CAST_BYTES = {False: 9, True: 5}
"""Bytes that an eager, or a compiled, cast of an element of 2 bytes to fp8 moves: read for the largest value, scaled,
cast."""
FUSED_PART_CAST_BYTES = 3
"""The same of a compiled cast by rows or blocks, which reads each once and keeps it in registers."""
FP8_LAYOUT_BYTES = 2
"""Bytes that another memory layout of an fp8 element moves."""


def fp8_cast_bytes(recipe: Float8Recipe, fused: bool) -> int:
    """Return the bytes that the cast of an element of 2 bytes to fp8 moves."""
    return FUSED_PART_CAST_BYTES if fused and recipe != "tensorwise" else FP8_CAST_BYTES[fused]


@dataclass(frozen=True)
class LayerContext:
    """Everything that a layer's times depend on, as one rank sees it."""

    model: ModelSpec
    device: DeviceSpec
    framework: FrameworkTraits
    strategy: LayerStrategy
    precision: Precision
    sequences: float
    """Sequences of a micro-batch that the rank computes."""
    seq_len: int
    tp: CommGroup
    cp: CommGroup
    ep: CommGroup
    etp: int = 1
    context: ContextRanks = ContextRanks()
    sequence_tiles: int = 1
    is_data_parallel: bool = False
    """True if there are data-parallel ranks, over which z2 and z3 reduce gradients in every backward."""
    dispatch: ExpertDispatch = ExpertDispatch()
    ep_levels: tuple[CommGroup, CommGroup] | None = None
    """Groups of the two steps of a hierarchical exchange of tokens."""
    earlier_positions: int = 0
    """Positions of the sequence before these whose keys attention sees, too: of the slices before this one."""
    is_sliced: bool = False
    """True for a slice of sequences."""
    fp8_recipe: Float8Recipe = "tensorwise"
    expert_load: LoadOfRanks = LoadOfRanks(1.0)
    """Work of the ranks that share experts, and copies of experts between them."""

    @property
    def expert_imbalance(self) -> float:
        """Load of the fullest of the ranks that share experts, relative to the mean."""
        return self.expert_load.imbalance

    @property
    def tokens(self) -> float:
        """Positions in the rank's matmuls."""
        return self.sequences * self.seq_len / self.cp.size

    @property
    def norm_tokens(self) -> float:
        """Positions of the hidden state between matmuls: divided by tp under sequence parallelism."""
        return self.tokens / self.tp.size if self.strategy.sp else self.tokens

    @property
    def routed_tokens(self) -> float:
        """Positions that the rank sends to experts: a part where tensor-parallel ranks send different ones."""
        return self.norm_tokens if self.strategy.sp else self.tokens / self.tp.size

    @property
    def experts_like_mlp(self) -> bool:
        """True where the whole hidden state enters and leaves experts as it does an MLP."""
        shares = self.etp > 1 or DISPATCHERS[self.dispatch.kind].shares_tokens
        return self.framework.experts_in_tp_region and shares and self.tp.size > 1

    @property
    def has_tp_pairs(self) -> bool:
        """True where passes of a pair hide each other's tensor-parallel collectives."""
        return self.strategy.tp_overlap == "pairs" and self.tp.size > 1

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an element of the hidden state."""
        return compute_bytes(self.precision)

    @cached_property
    def matmul_precision(self) -> Precision:
        """Precision of the layers' matmuls."""
        return matmul_precision(self.device, self.precision, self.fp8_recipe, self.framework.recasts_fp8)

    @cached_property
    def matmul_device(self) -> DeviceSpec:
        """The device, with the rate of matmuls in fp8 by the recipe."""
        rate, shares = matmul_rate(self.fp8_recipe, self.device), self.device.matmul_efficiency
        if rate == 1.0 or self.matmul_precision != "fp8" or "fp8" not in shares:
            return self.device
        return self.device.model_copy(update={"matmul_efficiency": {**shares, "fp8": rate * shares["fp8"]}})

    @cached_property
    def high_precision(self) -> Precision:
        """Precision of attention, head and everything else that fp8 and nvfp4 leave in bf16."""
        return "bf16" if self.precision in SCALED_PRECISIONS else self.precision

    @property
    def tile(self) -> "LayerContext":
        """The same for one tile of a micro-batch."""
        return replace(self, sequences=self.sequences / self.sequence_tiles) if self.sequence_tiles > 1 else self

    @property
    def one_slice(self) -> "LayerContext":
        """The same for one of two slices of a micro-batch, without the other one beside it."""
        strategy = self.strategy.model_copy(update={"tp_overlap": "none"})
        return replace(self, sequences=self.sequences / 2, strategy=strategy)

    @property
    def streams(self) -> int:
        """Residual streams on the rank."""
        return self.model.local_sublayers(self.tp.size)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden state of a micro-batch, over all tensor-parallel ranks; of one stream."""
        return self.tokens * self.model.hidden_size * self.element_bytes


@dataclass(slots=True)
class LayerPasses:
    """Costs of the passes of a layer. A full backward is `recompute`, `input_grads` and `weight_grads`."""

    forward: PassCost
    input_grads: PassCost
    weight_grads: PassCost
    recompute: PassCost
    """Forward operators that the backward repeats."""
    turns: tuple[tuple[Turn, ...], tuple[Turn, ...]] = ((), ())
    """Turns of forward and backward that end with what travels beside the other pass of a pair."""
    ends_s: tuple[float, float] = (0.0, 0.0)
    """Seconds of collectives at the end of a stage's forward and backward beside which no slice computes (domino)."""

    @property
    def compute_s(self) -> tuple[float, float]:
        """Seconds of kernels of forward and full backward."""
        return self.forward.compute_s, (self.recompute + self.input_grads + self.weight_grads).compute_s

    def scaled(self, input_grads: float, weight_grads: float) -> "LayerPasses":
        """Return the costs with shares of the input gradients, and of what they repeat, and of the weight gradients."""
        inputs, weights = self.input_grads * input_grads, self.weight_grads * weight_grads
        turns = self.turns if input_grads else (self.turns[0], ())
        ends_s = self.ends_s[0], self.ends_s[1] * input_grads
        return LayerPasses(self.forward, inputs, weights, self.recompute * input_grads, turns, ends_s)


class TpMessage(NamedTuple):
    """Tensor-parallel collectives at one place of a sub-layer."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    beside_s: float = 0.0
    """Seconds of the backward's own compute beside which they travel."""


class SublayerCost:
    """Costs of attention, or of the MLP, to which operators are added one by one."""

    def __init__(self) -> None:
        self.forward, self.input_grads, self.weight_grads = PassCost(), PassCost(), PassCost()
        self.last_matmul = PassCost()
        """Last matmul of the forward."""
        self.exit_s = 0.0
        """Seconds of the collective behind that matmul, which recompute doesn't repeat."""
        self.attention_core, self.matmuls, self.elementwise = PassCost(), PassCost(), PassCost()
        """Parts of the forward: the core attention, the matmuls, the elementwise operators."""
        self.latent_up_projections = PassCost()
        """Matmuls that project latent vectors up to queries, keys and values."""
        self.turns: tuple[tuple[Turn, ...], tuple[Turn, ...]] = ((), ())
        """Turns of exchanges with experts (`LayerPasses.turns`)."""
        self.tp_messages: list[TpMessage] = []
        """Tensor-parallel collectives in the order of the forward; with sequence parallelism, under which
        no pair hides them, not all of them."""
        self.tp_hidden_s = 0.0
        """Seconds of the tensor-parallel collectives of the backward that gradients of weights hide."""

    def repeat_for_tiles(self, at: LayerContext, matrix_elements: float) -> None:
        """Do all of it once for each tile, and add the gradients of the matrices up."""
        count = at.sequence_tiles
        if count == 1:
            return
        self.forward, self.input_grads, self.weight_grads = (
            self.forward * count,
            self.input_grads * count,
            self.weight_grads * count,
        )
        self.matmuls, self.elementwise = self.matmuls * count, self.elementwise * count
        summed = 3 * matrix_elements * at.element_bytes
        self.weight_grads = self.weight_grads + PassCost(stream_s(at.device, summed), 1) * (count - 1)

    def add_parts(self, part: "SublayerCost", count: int) -> None:
        """Add operators once for each of `count` equal parts of the rows."""
        self.forward += part.forward * count
        self.input_grads += part.input_grads * count
        self.weight_grads += part.weight_grads * count
        self.matmuls, self.elementwise = (
            self.matmuls + part.matmuls * count,
            self.elementwise + part.elementwise * count,
        )
        self.last_matmul = part.last_matmul

    def add_elementwise(self, at: LayerContext, forward: float, backward: float, kernels: float = 1) -> None:
        """Add elementwise kernels that move so many bytes."""
        self.forward.add(seconds := stream_s(at.device, forward, kernels), kernels)
        self.elementwise.add(seconds, kernels)
        self.input_grads.add(stream_s(at.device, backward, kernels), kernels)

    def add_linear(
        self,
        at: LayerContext,
        tokens: float,
        out_features: float,
        in_features: float,
        num_experts: float = 1,
        num_linears: int = 1,
        cast_by_others: Literal["", "input", "output"] = "",
        follows_norm: bool = False,
    ) -> None:
        """Add a linear layer, or `num_linears` that share their input: one matmul forward, two backward.

        `tokens` rows are shared by `num_experts` weights. fp8 and nvfp4 cast the operands, and their transposes for the
        weights' gradients; where matmuls before or after it cast its input or its output's gradient, those are spared.
        `follows_norm`: a norm makes its input, and nothing lies between.
        """
        device, precision, groups = at.matmul_device, at.matmul_precision, max(1.0, num_experts)
        streams = at.framework.grouped_streams
        forward_s = grouped_matmul_s(device, tokens, out_features, in_features, precision, groups, streams=streams)
        self.forward.add(forward_s)
        self.matmuls.add(forward_s)
        self.last_matmul = PassCost(forward_s, 1)
        self.input_grads.add(
            grouped_matmul_s(device, tokens, in_features, out_features, precision, groups, streams=streams)
        )
        summed, once = 2 * at.framework.grad_bytes, at.strategy.zero != "z1" and at.is_data_parallel
        into_sum = at.framework.fused_grad_accumulation and not once
        out_bytes = float(summed if into_sum else at.element_bytes)
        self.weight_grads.add(
            batched_matmul_s(device, out_features, in_features, tokens / groups, precision, groups, out_bytes, streams)
        )
        if not into_sum:
            # Either added to the sum, or cast into the buffer that is reduced and divided by the number of ranks.
            moved = out_features * in_features * groups * (at.element_bytes + (1.5 if once else 1.0) * summed)
            self.weight_grads.add(stream_s(device, moved))
        if precision == "fp8" and at.framework.recasts_fp8:
            self._add_fp8_casts(
                at, tokens * in_features, tokens * out_features, out_features * in_features, num_linears
            )
        elif precision in SCALED_PRECISIONS:
            kind = precision, at.fp8_recipe, device
            inputs = tokens * in_features * (cast_by_others != "input")
            outputs = tokens * out_features * (cast_by_others != "output")
            self.forward.add(stream_s(device, operand_cast_bytes(*kind, follows_norm) * inputs))
            self.input_grads.add(stream_s(device, operand_cast_bytes(*kind) * outputs))

    def add_linears(
        self, at: LayerContext, tokens: float, widths: dict[str, tuple[float, float]], follows_norm: bool = False
    ) -> None:
        """Add linear layers of a decoder layer that share their input of `tokens` rows, by name with their output and
        input widths on the rank; those of low rank as two narrow ones each, of sub-layers side by side one each."""
        ranks = at.model.low_rank_ranks
        whole = [width for name, width in widths.items() if name not in ranks]
        if at.streams > 1:
            for name, (outputs, inputs) in widths.items():
                narrow = (outputs, inputs / at.streams) if name in ROW_PARALLEL else (outputs / at.streams, inputs)
                for _ in range(at.streams):
                    self.add_linear(at, tokens, *narrow)
        elif whole:
            outputs, inputs = sum(width for width, _ in whole), whole[0][1]
            self.add_linear(at, tokens, outputs, inputs, num_linears=len(whole), follows_norm=follows_norm)
        for name in (name for name in widths if name in ranks):
            outputs, inputs = widths[name]
            self.add_linear(at, tokens, ranks[name], inputs)
            self.add_linear(at, tokens, outputs, ranks[name])

    def _add_fp8_casts(self, at: LayerContext, inputs: float, outputs: float, weights: float, num_linears: int) -> None:
        """Add the casts of linear layers' inputs, output gradients and weights, of so many elements, in every pass that
        reads them (`muster.model.float8`). A compiler casts an input that several layers share once.

        The gradients' transpose has the scale of the gradients as a whole, but other scales of rows and blocks: it is
        cast again.
        """
        fused, is_whole = at.framework.fused_elementwise, at.fp8_recipe == "tensorwise"
        cast, inputs = fp8_cast_bytes(at.fp8_recipe, bool(fused)), inputs * (1 if fused else num_linears)
        kernels = (2 if is_whole else 1) if fused else 4
        again = 0.0 if is_whole else cast * outputs
        moved = (
            (self.forward, cast * (inputs + weights), 2),
            (self.input_grads, cast * (outputs + weights) + FP8_LAYOUT_BYTES * weights, 2),
            (self.weight_grads, cast * inputs + again + FP8_LAYOUT_BYTES * (inputs + outputs), 1 if is_whole else 2),
        )
        for spent, num_bytes, operands in moved:
            count = kernels * operands * num_linears
            spent.add(stream_s(at.device, num_bytes, count), count)


# ----------------------------------------------------------------------------------------------------------------------
# Tensor parallelism, norms and residuals


def add_tp_entry(at: LayerContext, part: SublayerCost, num_matmuls: int = 1) -> None:
    """Add the collectives where a hidden state enters column-parallel matmuls (arXiv:2205.05198 §4.2.2).

    Forward: an all-gather under sequence parallelism. Backward: the gradient is all-reduced (or reduce-scattered) while
    the weights' gradients are computed, for which the hidden state is gathered again. Each of `num_matmuls` that aren't
    fused into one does so.
    """
    if at.tp.size == 1:
        return
    size = at.hidden_bytes
    # In a ladder the gradient travels behind a sub-layer's backward, its gradients of weights among that.
    is_beside = at.framework.overlap_tp_grad_reduce and at.model.residual != "ladder"
    hides_s = _overlapping_matmul_s(at) if is_beside else 0.0
    if at.strategy.sp:
        gather_s, scatter_s = all_gather_s(at.tp, size), reduce_scatter_s(at.tp, size)
        _add_tp_collective(at, part.forward, gather_s, partial(gather_copies, num_matmuls=num_matmuls))
        seconds, hides_s = gather_s + scatter_s, 2 * hides_s
    else:
        seconds = (1 if at.framework.joint_input_grad_reduce else num_matmuls) * all_reduce_s(at.tp, size)
    part.input_grads.add_overlapped("tp", seconds, hides_s)
    part.tp_hidden_s += min(seconds, hides_s)
    part.tp_messages.append(TpMessage(0.0, seconds, hides_s))


def add_latent_entry(at: LayerContext, part: SublayerCost, width: int) -> None:
    """Add the collectives where latent vectors of so many elements together meet the heads of a rank: under sequence
    parallelism an all-gather, whose backward is a reduce-scatter; else the gradient is all-reduced."""
    if at.tp.size == 1:
        return
    size = at.tokens * width * at.element_bytes
    if at.strategy.sp:
        add_exposed_tp(part, all_gather_s(at.tp, size), reduce_scatter_s(at.tp, size))
    else:
        add_exposed_tp(part, 0.0, all_reduce_s(at.tp, size))


def add_exposed_tp(part: SublayerCost, forward_s: float, backward_s: float) -> None:
    """Add tensor-parallel collectives at one place of forward and backward, which hide behind nothing of their pass."""
    part.forward.add_exposed("tp", forward_s)
    part.input_grads.add_exposed("tp", backward_s)
    part.tp_messages.append(TpMessage(forward_s, backward_s))


def add_tp_exit(at: LayerContext, part: SublayerCost) -> None:
    """Add the collectives where partial sums leave a row-parallel matmul.

    Forward: an all-reduce, or a reduce-scatter under sequence parallelism, whose backward is an all-gather.
    """
    if at.tp.size == 1:
        return
    size, before_s = at.hidden_bytes, part.forward.exposed_s.get("tp", 0.0)
    if at.strategy.sp:
        _add_tp_collective(at, part.forward, reduce_scatter_s(at.tp, size), scatter_copies)
        _add_tp_collective(at, part.input_grads, all_gather_s(at.tp, size), partial(gather_copies, keeps_whole=True))
    else:
        add_exposed_tp(part, all_reduce_s(at.tp, size), 0.0)
    part.exit_s = part.forward.exposed_s.get("tp", 0.0) - before_s


def _add_tp_collective(
    at: LayerContext, spent: PassCost, seconds: float, copies: Callable[[int], tuple[int, int]]
) -> None:
    """Add a collective before or after a matmul.

    With asynchronous tensor parallelism it is divided into chunks, which overlap with the matmul (`add_in_chunks`).
    `copies` gives what symmetric memory adds on so many ranks (`gather_copies`).
    """
    if at.framework.async_tp or at.strategy.tp_overlap == "async_tp":
        own_chunk_travels = at.framework.async_tp and not at.framework.symmetric_memory
        add_in_chunks(spent, seconds, _overlapping_matmul_s(at), at.tp.size, own_chunk_travels)
        if copies_chunks(at.framework, at.tp):
            shards, kernels = copies(at.tp.size)
            spent.add(stream_s(at.device, shards * at.hidden_bytes / at.tp.size), kernels)
    else:
        spent.add_exposed("tp", seconds)


def add_in_chunks(
    spent: PassCost, seconds: float, matmul_s: float, ranks: int, own_chunk_travels: bool = False
) -> None:
    """Add a collective of asynchronous tensor parallelism beside its matmul.

    A rank's own chunk doesn't travel: a gather begins beside the matmul of this rank's shard, and a reduce-scatter ends
    beside that of its own term. So `ranks` − 1 of as many parts of the matmul have a transfer beside them. Where it
    does travel (`own_chunk_travels`: Transformer Engine reduce-scatters the result of a matmul part by part, the last
    part behind all), one of `ranks` transfers has nothing beside it.
    """
    if own_chunk_travels:
        spent.add_exposed("tp", seconds / ranks)
        spent.add_overlapped("tp", seconds * (ranks - 1) / ranks, matmul_s)
    else:
        spent.add_overlapped("tp", seconds, matmul_s * (ranks - 1) / ranks)


def copies_chunks(framework: FrameworkTraits, tp: CommGroup) -> bool:
    """Return True if asynchronous tensor parallelism copies chunks out of symmetric memory: over NVLink."""
    return framework.symmetric_memory and tp.num_domains == 1 and tp.intra_link.kind == "nvlink"


def gather_copies(ranks: int, num_matmuls: int = 1, keeps_whole: bool = False) -> tuple[int, int]:
    """Return the shards that a gather out of symmetric memory moves on the device itself, and the kernels that it adds:
    a shard is copied to where others read it, and into the whole where that is kept; a matmul, a copy and three
    barriers stand around each chunk or all of them (PyTorch, _pipelined_multi_all_gather_and_consume)."""
    return 2 + 2 * keeps_whole, num_matmuls * (ranks - 1) + ranks + keeps_whole + 3


def scatter_copies(ranks: int) -> tuple[int, int]:
    """Return the same for a reduce-scatter, which adds up all ranks' partial sums in one pass; a copy and two barriers
    follow each chunk but the rank's own (PyTorch, _pipelined_produce_and_all2all)."""
    return ranks + 1, 4 * (ranks - 1) + 3


def _overlapping_matmul_s(at: LayerContext) -> float:
    """Return the seconds of the smallest matmul that a collective overlaps with."""
    hidden = at.model.hidden_size
    width = min(4 * hidden, at.model.intermediate_size) if at.model.moe is None else hidden
    return matmul_s(at.device, at.tokens, width / at.tp.size, hidden, at.matmul_precision)


def add_norm_and_residual(at: LayerContext, part: SublayerCost) -> None:
    """Add a sublayer's norms (each a read and a write) and the residual sum after it (two reads and a write).

    Norms of the output aren't recomputed. The backward moves three times an element for each. Dropout stores a byte per
    element.
    """
    numbers = at.norm_tokens * at.model.hidden_size * at.streams
    forward, backward = norm_bytes(at, at.model.norm)
    if at.streams > 1:  # norms of several streams are put side by side
        forward, backward = forward + 2 * at.element_bytes, backward + 2 * at.element_bytes
    kept = numbers * (1 if at.framework.fused_elementwise else 6) if at.framework.dropout else 0.0
    kernels = 1 if forward < EAGER_NORM_BYTES[0] else 8
    if at.model.has_pre_norms:
        part.add_elementwise(at, forward * numbers, backward * numbers, kernels)
    if at.model.has_post_norms:
        part.forward.add(stream_s(at.device, forward * numbers, kernels), kernels)
        part.input_grads.add(stream_s(at.device, backward * numbers, kernels), kernels)
    part.add_elementwise(at, 3 * numbers * at.element_bytes + kept, 3 * numbers * at.element_bytes + kept)
    add_dropout(at, part, numbers, at.model.hidden_dropout)


def add_adapters(at: LayerContext, part: SublayerCost, widths: dict[str, tuple[float, float]]) -> None:
    """Add the adapters of linear layers, given by name with their output and input widths on the rank: two narrow
    matmuls each, and a sum of their output to that of the layer. HD-PiSSA's are four narrow matmuls of the backward.
    Weights in 4 bits, with adapters or not, are made anew in each pass: a kernel reads codes and writes numbers, beside
    those for the absolute maxima."""
    adapter = at.model.adapter
    for name, (out_features, in_features) in widths.items():
        if adapter is not None and adapter.load_in_4bit and (name != "gate" or at.model.gated):
            moved = out_features * in_features * (FOUR_BIT_BYTES + at.element_bytes)
            for spent in (part.forward, part.input_grads):
                spent.add(stream_s(at.device, moved, FOUR_BIT_KERNELS), FOUR_BIT_KERNELS)
        if adapter is None or name not in adapter.target_modules:
            continue
        if adapter.changes_weights:
            for inner, outer in ((adapter.r, out_features), (adapter.r, in_features)):
                one_s = matmul_s(at.device, at.tokens, inner, outer, at.matmul_precision)
                part.weight_grads.add(2 * one_s, 2)
            scaled = at.tokens * out_features * at.element_bytes
            whole = adapter.width * (in_features + out_features) * at.element_bytes
            part.weight_grads.add(stream_s(at.device, 2 * scaled + 2 * whole, 3), 3)
            continue
        last = part.last_matmul
        part.add_linear(at, at.tokens, adapter.r, in_features)
        part.add_linear(at, at.tokens, out_features, adapter.r)
        part.last_matmul = last
        moved = at.tokens * out_features * at.element_bytes
        part.add_elementwise(at, 3 * moved, 2 * moved)
        add_dropout(at, part, at.tokens * in_features, adapter.lora_dropout)
        if adapter.kind == "dora":  # lengths of the rows of W + B A, and a product with every output
            rows = out_features * in_features * at.element_bytes
            part.forward.add(matmul_s(at.device, out_features, in_features, adapter.r, at.matmul_precision), 1)
            part.forward.add(stream_s(at.device, 3 * rows, 2), 2)
            part.add_elementwise(at, 2 * moved, 5 * moved)


def add_dropout(at: LayerContext, part: SublayerCost, numbers: float, rate: float) -> None:
    """Add dropout of so many elements, which elementwise recompute doesn't repeat: counted, each pass finds the mask
    and changes the elements in place, the backward in a copy; otherwise a byte per element is stored and read."""
    if not rate:
        return
    if not at.framework.counted_dropout:
        part.add_elementwise(at, numbers, numbers, 0)
        return
    for spent, moved in ((part.forward, 4), (part.input_grads, 6)):
        spent.add(stream_s(at.device, numbers * (DROPOUT_BYTES + moved * at.element_bytes)), DROPOUT_KERNELS)


def norm_bytes(at: LayerContext, norm: str) -> tuple[int, int]:
    """Return the bytes that a norm moves per element, forward and backward.

    Forward reads and writes; backward reads the input and the gradient, writes, and reads both once more for the
    weight's gradient. LayerNorm has a fused kernel in every program, RMSNorm not, and one with an offset in none.
    """
    software = at.framework
    if norm == "rms" and not software.fused_elementwise:
        if not software.fused_norms or at.model.norm_unit_offset:
            return EAGER_NORM_BYTES
        if software.norm_casts:
            return CAST_NORM_BYTES
    return (2 * at.element_bytes, 5 * at.element_bytes)
