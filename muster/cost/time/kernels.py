"""Time of one kernel on a device, from its shapes."""

from bisect import bisect_left
from math import ceil, sqrt

from muster.spec.device import AttentionKernel, AttentionRate, DeviceSpec
from muster.spec.errors import ConfigError
from muster.spec.plan import SCALED_PRECISIONS, Precision

HALF_RATE_INNER_DIM = 128
"""Inner dimension at which a matmul's main loop reaches half of its rate, since its first loads and last stores aren't
hidden (matmuls of 512 … 8192 on A100, github:MooreThreads/SimuMax configs/system/a100_pcie.json)."""
EPILOGUE_SHARE = 0.4
"""Share of the output's memory traffic that isn't hidden: matmuls that accumulate into a float32 tensor are 6 % slower
than others, with 15 % of their time in that traffic (A100 and B200, same source)."""
SMALLER_TILES = ((1.0, 1.0), (0.5, 0.9), (0.25, 0.72))
"""Tile sizes, each (share of the largest tile's area, share of its rate): a kernel library takes smaller tiles where
they fill the device's last wave better, and each operand is then read more often."""
HALF_RATE_SEQ_LEN = 480
"""Sequence length at which causal flash attention reaches half of its rate: the figures in FlashAttention-2
(arXiv:2307.08691, figure 4d), 99, 133, 155, 173, 182 and 189 TFLOP/s at 512 … 16k tokens are within 2 % of
192 · s / (s + 480)."""
WINDOWED_RATE = 0.7
"""Rate of attention within windows relative to that with as many keys: tiles of scores at both ends of a window are
computed whole (cuDNN with windows of 128 positions: 0.6 to 0.8 on H200 and GB300, github:NVIDIA/cudnn-frontend
benchmark/attention_training/results/gpt_oss)."""
FP8_ATTENTION_RATE = 1.2
"""Rate of attention in fp8 relative to bf16 (cuDNN with heads of 128 and 4k to 8k positions: 1.1 to 1.3 on GB200 and
GB300, github:NVIDIA/cudnn-frontend benchmark/sdpa_benchmark_training; heads of 64 gain nothing)."""

NVFP4_RATE = 1.85
"""Rate of large matmuls in nvfp4 relative to fp8 where a device doesn't state it: 1.81 and 1.90 of those with one scale
and with blocks of 32 on B300 (github:NVIDIA/TransformerEngine docs/examples/gemm_profiling, operands cast before), and
at most 2.3 (NVIDIA on cuBLAS 12.9)."""


def matmul_s(
    device: DeviceSpec, m: float, n: float, k: float, precision: Precision, batch: float = 1, out_bytes: float = 0.0
) -> float:
    """Return the seconds of `batch` matmuls of m × k by k × n: the slower of arithmetic and memory (a roofline).

    Arithmetic: 2mnk FLOPs at the sustained rate. The output is divided into tiles, one per compute unit at a time, so
    that the last wave may be partly empty (NVIDIA, "Matrix Multiplication Background User's Guide", §3): 132 units
    need as long for 133 tiles as for 264. Loads and stores at both ends of each tile's loop add to that.
    Memory: both operands are read once, the output is written with `out_bytes` per element (0: those of the operands).
    """
    if min(m, n, k, batch) <= 0:
        return 0.0
    flops = 2.0 * m * n * k * batch
    if (points := _measured_rates(device, precision)) is not None:
        return device.kernel_s + flops / _interpolate(points, flops)
    size = operand_bytes(precision)
    moved = batch * ((m * k + k * n) * size + m * n * (out_bytes or max(size, 2)))
    rate = sustained_flops_per_s(device, precision) * k / (k + HALF_RATE_INNER_DIM)
    ideal_s = flops / rate / _occupancy(device, m, n, batch)
    last_s = EPILOGUE_SHARE * memory_s(device, batch * m * n * (out_bytes or max(size, 2)))
    return device.kernel_s + max(ideal_s + last_s, memory_s(device, moved))


def _occupancy(device: DeviceSpec, m: float, n: float, batch: float) -> float:
    """Return the useful share of the compute units' time, with the best of some tile sizes."""
    rows, columns = device.matmul_tile
    best = 0.0
    for area, rate in SMALLER_TILES:
        side = sqrt(area)
        tile_m, tile_n = max(16.0, rows * side), max(16.0, columns * side)
        tiles = batch * ceil(m / tile_m) * ceil(n / tile_n)
        waves = tiles / device.compute_units
        # Libraries split the inner dimension of the last tiles among idle units; half of the last wave's loss stays.
        used = waves / ceil(waves) if waves > 1 else 0.5 * (1 + waves)
        padded = (m * n * batch) / (tiles * tile_m * tile_n)
        best = max(best, rate * padded * 0.5 * (1 + used))
    return best


def grouped_matmul_s(
    device: DeviceSpec,
    m: float,
    n: float,
    k: float,
    precision: Precision,
    groups: float,
    out_bytes: float = 0.0,
    streams: int = 0,
) -> float:
    """Return the seconds of one grouped matmul: m rows divided among `groups` right operands, such as experts.

    It is one kernel, but every operand is read, and every group's rows fill tiles of their own; or, with `streams`, so
    many kernels at a time.
    """
    return batched_matmul_s(device, m / groups, n, k, precision, groups, out_bytes, streams)


def batched_matmul_s(
    device: DeviceSpec,
    m: float,
    n: float,
    k: float,
    precision: Precision,
    batch: float,
    out_bytes: float = 0.0,
    streams: int = 0,
) -> float:
    """Return the seconds of `batch` matmuls that are one kernel, or with `streams` so many kernels at a time."""
    together = min(batch, streams) if streams else batch
    return batch / together * matmul_s(device, m, n, k, precision, batch=together, out_bytes=out_bytes)


def memory_s(device: DeviceSpec, moved: float) -> float:
    """Return the seconds in which a streaming kernel reads and writes `moved` bytes, without its launch."""
    if device.memory_bandwidth_bytes_per_s is None:
        raise ConfigError(f"device {device.name} has no memory_bandwidth_bytes_per_s, which a prediction needs")
    return moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def stream_s(device: DeviceSpec, moved: float, kernels: float = 1) -> float:
    """Return the seconds of `kernels` elementwise kernels that together move `moved` bytes."""
    return kernels * device.kernel_s + memory_s(device, moved) if moved > 0 else 0.0


def flash_attention_s(
    device: DeviceSpec,
    kernel: AttentionKernel,
    queries: float,
    keys_per_query: float,
    heads: float,
    head_dim: float,
    precision: Precision,
    backward: bool = False,
    windowed: bool = False,
    in_fp8: bool = False,
) -> float:
    """Return the seconds of flash attention, which keeps scores on the chip.

    `queries` positions in all attend to `keys_per_query` positions on average: half of the sequence under a causal
    mask. Forward takes 4, backward 10 FLOPs per pair of positions and element of a head: two and five matmuls
    (arXiv:2205.14135 §3.1). The rate falls with short sequences and narrow heads.
    """
    rates = device.attention.get(kernel)
    flops = (10.0 if backward else 4.0) * queries * keys_per_query * heads * head_dim
    rates = rates or AttentionRate(forward=0.4, backward=0.4)
    share = rates.backward if backward else rates.forward
    if head_dim <= 64:
        share *= rates.narrow_backward if backward else rates.narrow_forward
    elif in_fp8:
        share *= FP8_ATTENTION_RATE
    share *= WINDOWED_RATE if windowed else 1.0
    own = "bf16" if precision in SCALED_PRECISIONS else precision
    peak = device.flops_per_s(own) or _raise_unknown_peak(device, precision)
    saturated = keys_per_query / (keys_per_query + HALF_RATE_SEQ_LEN / 2)
    return device.kernel_s * (2 if backward else 1) + flops / (peak * share * saturated)


def sustained_flops_per_s(device: DeviceSpec, precision: Precision) -> float:
    """Return the rate of large matmuls, in FLOP/s."""
    peak = device.flops_per_s(precision) or _raise_unknown_peak(device, precision)
    if device.peak_precision(precision) == "nvfp4" and "nvfp4" not in device.matmul_efficiency:
        return min(peak, NVFP4_RATE * sustained_flops_per_s(device, "fp8"))
    known = (precision, device.peak_precision(precision), "bf16" if precision == "tf32" else None)
    shares = (device.matmul_efficiency[name] for name in known if name in device.matmul_efficiency)
    share = next(shares, min(device.matmul_efficiency.values(), default=0.7))
    return peak * share


def operand_bytes(precision: Precision) -> float:
    """Return the bytes of an element as matmuls read it."""
    return {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "nvfp4": 0.5, "tf32": 4}[precision]


def _raise_unknown_peak(device: DeviceSpec, precision: Precision) -> float:
    raise ConfigError(f"device {device.name} has no known peak in {precision}: {device.why_unknown}")


def _measured_rates(device: DeviceSpec, precision: Precision) -> tuple[tuple[float, float], ...] | None:
    """Return the measured (FLOPs, FLOP/s) of the precision, or of one that the device computes in the same way."""
    return device.matmul_rates.get(precision) or (
        device.matmul_rates.get("fp32") if precision not in device.matmul_efficiency else None
    )


def _interpolate(points: tuple[tuple[float, float], ...], flops: float) -> float:
    """Return the FLOP/s between measured sizes; beyond them, those of the nearest."""
    at = bisect_left(points, (flops, 0.0))
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (flops - x0) / (x1 - x0)
