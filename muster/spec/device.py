"""Devices, their prices, and the links between them."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from muster.spec.base import Frozen
from muster.spec.machine_rates import MachineRates
from muster.spec.plan import Precision

AttentionKernel = Literal["flash3", "flash2", "flash1", "fused", "unfused"]
"""Kinds of attention kernel. flash1 … flash3: FlashAttention's generations and their equals; scores are never in
memory. fused: scores in memory, but scale, mask and softmax in one kernel (Megatron-LM). unfused: each of them a
kernel."""


class Price(Frozen):
    """Rent of a device."""

    usd_per_hour: PositiveFloat
    date: str
    """ISO date of the source's statement."""
    source: str


class AttentionRate(Frozen):
    """Share of the peak that an attention kernel reaches on long sequences with heads of 128 elements."""

    forward: PositiveFloat
    backward: PositiveFloat
    narrow_forward: PositiveFloat = 0.9
    """Rate with heads of 64 elements relative to that with 128 (FlashAttention-2, arXiv:2307.08691, figure 4c)."""
    narrow_backward: PositiveFloat = 0.9


class DeviceSpec(Frozen):
    """The device of one rank. Rates are those of one device; efficiencies are shares of the rate beside them."""

    name: str
    """Short name."""
    title: str = ""
    """Vendor's name."""
    aliases: tuple[str, ...] = ()
    """Other short names."""
    kind: Literal["cpu", "gpu", "tpu"]
    """Kind of device."""
    peak_flops_per_s: dict[Precision, PositiveFloat] = {}
    """Peak of dense matmuls by precision; a precision that is left out is unknown."""
    why_unknown: str = "no published or measured peak"
    """Reason why the peak of the precisions left out is unknown, shown in place of a number."""
    memory_bytes: PositiveInt | None = None
    """Memory of one device; None where ranks have no memory of their own."""
    shared_cores: PositiveInt | None = None
    """CPU cores that all ranks of the machine share; None where each rank has a device of its own."""
    memory_bandwidth_bytes_per_s: PositiveFloat | None = None
    """Memory bandwidth by the vendor."""
    memory_efficiency: PositiveFloat = 0.85
    """Share of the memory bandwidth that a long streaming kernel reaches."""
    host_bandwidth_bytes_per_s: PositiveFloat | None = None
    """Bandwidth to host memory, one way; None where it is unknown, and for a CPU, whose ranks use that memory."""
    compute_units: PositiveInt = 1
    """Streaming multiprocessors, compute units or cores: tiles of a matmul are distributed over them in waves."""
    matmul_efficiency: dict[Precision, PositiveFloat] = {}
    """Share of the peak that large matmuls sustain in training, under the limits of clocks and power."""
    block_scaled_fp8: bool = False
    """Its fp8 matmuls read a scale for each block of 32 elements (recipe mxfp8)."""
    matmul_tile: tuple[PositiveInt, PositiveInt] = (128, 256)
    """Rows and columns of the result that one compute unit works on at a time."""
    attention: dict[AttentionKernel, AttentionRate] = {}
    """Share of the peak by attention kernel."""
    kernel_s: NonNegativeFloat = 3e-6
    """Minimum duration of a kernel: start, first loads, last stores."""
    launch_s: NonNegativeFloat = 6e-6
    """Host time to launch one kernel from an eager framework."""
    matmul_rates: dict[Precision, tuple[tuple[PositiveFloat, PositiveFloat], ...]] = {}
    """Measured rates of matmuls, (FLOPs, FLOP/s) by FLOPs. They replace peak × efficiency × waves."""
    rates: MachineRates | None = None
    """Profile by `muster profile`. It replaces all formulas for the models that Muster runs."""
    watts: PositiveFloat | None = None
    """Board power limit."""
    price: Price | None = None
    """Rent of one device."""
    node: "NodeShape | None" = None
    """Node that the device usually comes in; short names such as `64xh100` stand for such nodes."""
    sources: dict[str, str] = {}
    """Source of each number, or the measurements that it was calibrated on."""

    def flops_per_s(self, precision: Precision) -> float | None:
        """Return the peak of matmuls in a precision; None where it is unknown. fp8 falls back to bf16 where the device
        has no fp8, and fp16 and bf16 stand for each other."""
        name = self.peak_precision(precision)
        return None if name is None else self.peak_flops_per_s[name]

    def peak_precision(self, precision: Precision) -> Precision | None:
        """Return the precision whose peak stands for a precision: itself where it is known."""
        names = (precision, *_FALLBACK.get(precision, ()))
        return next((name for name in names if name in self.peak_flops_per_s), None)


_FALLBACK: dict[Precision, tuple[Precision, ...]] = {
    "nvfp4": ("fp8", "bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp64": ("fp32",),
    "tf32": ("fp32",),
}


class LinkSpec(Frozen):
    """A link between devices of a node, or between nodes. Rates are one way, of one device or of one NIC."""

    name: str
    """Short name."""
    kind: Literal["nvlink", "xgmi", "ici", "pcie", "infiniband", "roce", "ethernet", "wan", "memory"]
    """Kind of link."""
    bandwidth_bytes_per_s: PositiveFloat
    """Bandwidth by the vendor."""
    latency_s: PositiveFloat
    """Latency of one step of a collective, or of one message."""
    message_s: PositiveFloat | None = None
    """Time that each message takes besides its bytes where many are on their way; left out: the latency, 20 µs at
    most, since longer latencies are distance."""
    efficiency: PositiveFloat = Field(default=0.8, le=1.0)
    """Share of the bandwidth that long ring collectives reach (busbw of nccl-tests over the line rate)."""
    in_network: PositiveFloat | None = None
    """Share of the bandwidth (as busbw) that all-reduces reach where switches reduce (NVLS); None where they can't."""
    bridge_devices: PositiveInt | None = None
    """Devices below one host bridge, where traffic between bridges shares a line; None where nothing is shared."""
    bridge_bytes_per_s: PositiveFloat | None = None
    """Bandwidth of that line, one way."""
    curves: dict[str, tuple[tuple[PositiveInt, PositiveFloat, PositiveFloat], ...]] = {}
    """Measured times: collective → (ranks, bytes, seconds), by ranks and bytes. They replace the formulas."""
    sources: dict[str, str] = {}
    """Source of each number."""


class Nics(Frozen):
    """Network cards of a node."""

    link: LinkSpec
    """Name in the catalogue, or a link written out."""
    count: PositiveInt = 1
    """Cards per node."""


class DiskSpec(Frozen):
    """The disks of a node for optimizer state, all together."""

    capacity_bytes: PositiveInt | None = None
    """Bytes that they hold; None where that is unknown, which is no limit."""
    read_bytes_per_s: PositiveFloat | None = None
    """Bytes a second of long reads; None: 3 GB/s is assumed."""
    write_bytes_per_s: PositiveFloat | None = None
    """Bytes a second of long writes; None: 3 GB/s is assumed."""


class NodeShape(Frozen):
    """A node: its devices, joined by `intra`; `domain_nodes` nodes share that fabric (NVL72: 18 trays of 4)."""

    devices: PositiveInt
    intra: LinkSpec
    nics: Nics | None = None
    domain_nodes: PositiveInt = 1
    host_memory_bytes: PositiveInt | None = None
    host_update_bytes_per_s: PositiveFloat | None = None
    disk: DiskSpec | None = None


DeviceSpec.model_rebuild()
