"""What a layer's times are put together from: linear layers, passes over memory, tensor-parallel seams."""

from dataclasses import dataclass
from functools import cached_property

from muster.cost.collectives import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from muster.cost.kernels import grouped_matmul_s, matmul_s, stream_s
from muster.cost.memory import compute_bytes
from muster.cost.spent import Spent
from muster.spec.device import DeviceSpec
from muster.spec.model import ModelSpec
from muster.spec.plan import Precision, Strategy
from muster.spec.software import Software

CAST_NORM = (20, 32)
"""Bytes that a norm's kernel moves for each number, forward and backward, with casts to float32 and back around it, as
eager programs have them."""
EAGER_NORM = (45, 115)
"""Bytes that an RMSNorm moves for each number, forward and backward, when each of its operations is a kernel, in
float32: cast, square, mean, product, cast, product with the weight; Llama's published code, and autograd's for it."""


@dataclass(frozen=True)
class LayerSetting:
    """What a layer's times depend on, as one rank sees it."""

    model: ModelSpec
    device: DeviceSpec
    software: Software
    strategy: Strategy
    precision: Precision
    sequences: float
    """Of a micro-batch, that the rank works on."""
    seq_len: int
    tp: Group
    cp: Group
    ep: Group
    etp: int = 1
    is_sharded: bool = False
    """Whether there are data-parallel ranks, which z2 and z3 reduce gradients over in every backward."""

    @property
    def tokens(self) -> float:
        """Positions that the rank's products work on."""
        return self.sequences * self.seq_len / self.cp.size

    @property
    def norm_tokens(self) -> float:
        """Positions of the hidden state between them: cut under sequence parallelism."""
        return self.tokens / self.tp.size if self.strategy.sp else self.tokens

    @cached_property
    def act(self) -> int:
        """Bytes of a number of the hidden state."""
        return compute_bytes(self.precision)

    @cached_property
    def linear_precision(self) -> Precision:
        """Of the layers' products."""
        return self.precision

    @cached_property
    def wide(self) -> Precision:
        """Of attention, head and all else that fp8 leaves as it is."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def hidden_bytes(self) -> float:
        """The hidden state of a micro-batch, over all tensor-parallel ranks."""
        return self.tokens * self.model.hidden_size * self.act


@dataclass(slots=True)
class LayerPasses:
    """What the passes of a layer spend. A full backward is `again`, `inputs` and `weights`."""

    forward: Spent
    inputs: Spent
    weights: Spent
    again: Spent
    """What recompute repeats."""


class Part:
    """Attention or MLP of a layer in the making."""

    def __init__(self) -> None:
        self.forward, self.inputs, self.weights = Spent(), Spent(), Spent()
        self.last = Spent()
        """Of the forward, its last product."""
        self.core, self.products, self.cheap = Spent(), Spent(), Spent()
        """Of the forward: attention on its scores, matrix products, single passes over memory."""
        self.latent = Spent()
        """Of the products, those that widen narrow vectors to queries, keys and values."""

    def stream(self, at: LayerSetting, forward: float, backward: float, kernels: float = 1) -> None:
        """Bytes that elementwise kernels move."""
        self.forward.add(seconds := stream_s(at.device, forward, kernels), kernels)
        self.cheap.add(seconds, kernels)
        self.inputs.add(stream_s(at.device, backward, kernels), kernels)

    def linear(self, at: LayerSetting, tokens: float, wide: float, inner: float, experts: float = 1) -> None:
        """A linear layer from `inner` to `wide` numbers, for `tokens` rows in all, that `experts` share: one product
        forward, two backward. fp8 casts what it multiplies, also transposed for the weights' gradients."""
        device, precision, groups = at.device, at.linear_precision, max(1.0, experts)
        forward_s = grouped_matmul_s(device, tokens, wide, inner, precision, groups)
        self.forward.add(forward_s)
        self.products.add(forward_s)
        self.last = Spent(forward_s, 1)
        self.inputs.add(grouped_matmul_s(device, tokens, inner, wide, precision, groups))
        summed, once = 2 * at.software.gradient_bytes, at.strategy.zero != "z1" and at.is_sharded
        into_sum = at.software.fused_gradients and not once
        out_bytes = float(summed if into_sum else at.act)
        self.weights.add(matmul_s(device, wide, inner, tokens / groups, precision, batch=groups, out_bytes=out_bytes))
        if not into_sum:
            # Added to the sum; or cast into the buffer that is reduced, and divided by the ranks' number.
            moved = wide * inner * groups * (at.act + (1.5 if once else 1.0) * summed)
            self.weights.add(stream_s(device, moved))
        if precision == "fp8":
            self.forward.add(stream_s(device, 4 * tokens * inner))
            self.inputs.add(stream_s(device, 4 * tokens * wide))
            self.weights.add(stream_s(device, 4 * wide * inner * groups))


# ----------------------------------------------------------------------------------------------------------------------
# Tensor parallelism, norms and residuals


def enter(at: LayerSetting, part: Part, products: int = 1) -> None:
    """A hidden state comes to column-parallel products (arXiv:2205.05198 §4.2.2). Forward: gathered, under sequence
    parallelism. Backward: its gradient is added up (or added up and cut) while the weights' gradients are computed, for
    which the hidden state is gathered again. `products` that aren't made as one each do so."""
    if at.tp.size == 1:
        return
    size = at.hidden_bytes
    hides_s = _beside_weights_s(at) if at.software.overlap_tensor_gradients else 0.0
    if at.strategy.sp:
        gather_s, scatter_s = all_gather_s(at.tp, size), reduce_scatter_s(at.tp, size)
        _travel(at, part.forward, gather_s)
        part.inputs.beside("tp", gather_s + scatter_s, 2 * hides_s)
    else:
        times = 1 if at.software.joint_inputs else products
        part.inputs.beside("tp", times * all_reduce_s(at.tp, size), hides_s)


def leave(at: LayerSetting, part: Part) -> None:
    """Partial sums leave row-parallel products: added up forward (and cut, under sequence parallelism, whose backward
    gathers)."""
    if at.tp.size == 1:
        return
    size = at.hidden_bytes
    if at.strategy.sp:
        _travel(at, part.forward, reduce_scatter_s(at.tp, size))
        _travel(at, part.inputs, all_gather_s(at.tp, size))
    else:
        part.forward.wait("tp", all_reduce_s(at.tp, size))


def _travel(at: LayerSetting, spent: Spent, seconds: float) -> None:
    """A collective before or after a product: in parts beside it where the plan or the software does so, all but the
    first."""
    if at.software.overlap_tensor or at.strategy.tp_overlap == "chunked":
        first_s = seconds / at.tp.size
        spent.wait("tp", first_s)
        spent.beside("tp", seconds - first_s, _beside_weights_s(at))
    else:
        spent.wait("tp", seconds)


def _beside_weights_s(at: LayerSetting) -> float:
    """The least of the products that a collective runs beside: one of hidden × hidden / tp."""
    hidden = at.model.hidden_size
    width = min(4 * hidden, at.model.intermediate_size) if at.model.moe is None else hidden
    return matmul_s(at.device, at.tokens, width / at.tp.size, hidden, at.linear_precision)


def around(at: LayerSetting, part: Part) -> None:
    """The norm before, and the residual sum after: a read and a write, two reads and a write; backward three and three.
    Dropout keeps a byte for each number."""
    numbers = at.norm_tokens * at.model.hidden_size
    forward, backward = norm_bytes(at, at.model.norm)
    kept = numbers * (1 if at.software.fused else 6) if at.software.dropout else 0.0
    part.stream(at, forward * numbers, backward * numbers, 1 if forward < EAGER_NORM[0] else 8)
    part.stream(at, 3 * numbers * at.act + kept, 3 * numbers * at.act + kept)


def norm_bytes(at: LayerSetting, norm: str) -> tuple[int, int]:
    """Bytes for each number, forward and backward: read and written; its gradient and itself read, and written, and
    both read once more for the weight's gradient. torch has a kernel for LayerNorm, not for RMSNorm."""
    software = at.software
    fused = software.fused if software.fused_norms is None else software.fused_norms
    if norm == "rms" and not software.fused:
        return CAST_NORM if fused else EAGER_NORM
    return (2 * at.act, 5 * at.act)
