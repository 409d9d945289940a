"""What one rank computes on, what it costs, and the links it talks over."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from muster.spec.base import Frozen
from muster.spec.machine_rates import MachineRates
from muster.spec.plan import Precision

AttentionKernel = Literal["flash3", "flash2", "flash1", "fused", "unfused"]
"""flash1 … flash3: FlashAttention's generations and their equals; no scores in memory. fused: scores in memory, but
scale, mask and softmax in one kernel (Megatron-LM). unfused: each of them a kernel."""


class Price(Frozen):
    """What a device costs to rent."""

    usd_per_hour: PositiveFloat
    date: str
    """ISO date on which the source said so."""
    source: str


class AttentionRate(Frozen):
    """Share of the peak that an attention kernel reaches with long sequences and a head of 128 numbers."""

    forward: PositiveFloat
    backward: PositiveFloat


class DeviceSpec(Frozen):
    """What one rank computes on. Rates are of one device; efficiencies are shares of the rate beside them."""

    name: str
    """In short."""
    title: str = ""
    """As its maker calls it."""
    aliases: tuple[str, ...] = ()
    """Other names for it."""
    kind: Literal["cpu", "gpu", "tpu"]
    """What it is."""
    peak_flops_per_s: dict[Precision, PositiveFloat] = {}
    """Of dense matrix products, by precision; a precision that is left out is unknown."""
    why_unknown: str = "no published or measured peak"
    """Why the peak of the precisions left out is unknown: shown where a number would stand."""
    memory_bytes: PositiveInt | None = None
    """Of one device; None where ranks have no memory of their own."""
    shared_cores: PositiveInt | None = None
    """CPU cores that all ranks of the machine share; None where each rank has a device of its own."""
    memory_bandwidth_bytes_per_s: PositiveFloat | None = None
    """As the maker says."""
    memory_efficiency: PositiveFloat = 0.85
    """Share of the memory's bandwidth that a long streaming kernel reaches."""
    host_bandwidth_bytes_per_s: PositiveFloat | None = None
    """To the host's memory, one way; None where it is unknown, and of a CPU, whose ranks lie in that memory."""
    compute_units: PositiveInt = 1
    """Streaming multiprocessors, compute units or cores: tiles of a matrix product are dealt to them in waves."""
    matmul_efficiency: dict[Precision, PositiveFloat] = {}
    """Share of the peak that large matrix products sustain in training: clocks, power and the pipeline's ends."""
    matmul_tile: tuple[PositiveInt, PositiveInt] = (128, 256)
    """Rows and columns of the result that one compute unit works on at a time."""
    attention: dict[AttentionKernel, AttentionRate] = {}
    """By kernel, what share of the peak it reaches."""
    kernel_s: NonNegativeFloat = 3e-6
    """What a kernel takes however small it is: start, first loads, last stores."""
    launch_s: NonNegativeFloat = 6e-6
    """Host time to issue one kernel from an eager framework."""
    matmul_rates: dict[Precision, tuple[tuple[PositiveFloat, PositiveFloat], ...]] = {}
    """Measured: (FLOPs of a product, FLOP/s), by FLOPs. Where given it stands for peak × efficiency × waves."""
    rates: MachineRates | None = None
    """What `muster profile` measured: where given it stands for all formulas, for the models that Muster runs."""
    watts: PositiveFloat | None = None
    """Board power limit."""
    price: Price | None = None
    """To rent one."""
    node: "NodeShape | None" = None
    """The node that the device usually comes in: what short names such as `64xh100` are made of."""
    sources: dict[str, str] = {}
    """Where each number comes from, or what it was calibrated on."""

    def flops_per_s(self, precision: Precision) -> float | None:
        """The peak for matrix products in a precision; None where it is unknown. fp8 falls back to bf16 where the
        device has no fp8, and fp16 and bf16 stand for each other."""
        name = self.peak_precision(precision)
        return None if name is None else self.peak_flops_per_s[name]

    def peak_precision(self, precision: Precision) -> Precision | None:
        """The precision whose peak is taken for one: itself where it is known."""
        names = (precision, *_FALLBACK.get(precision, ()))
        return next((name for name in names if name in self.peak_flops_per_s), None)


_FALLBACK: dict[Precision, tuple[Precision, ...]] = {
    "fp8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp64": ("fp32",),
}


class LinkSpec(Frozen):
    """What joins devices of a node, or nodes: rates are one way, of one device or of one NIC."""

    name: str
    """In short."""
    kind: Literal["nvlink", "xgmi", "ici", "pcie", "infiniband", "roce", "ethernet", "wan", "memory"]
    """What it is."""
    bandwidth_bytes_per_s: PositiveFloat
    """As the maker says."""
    latency_s: PositiveFloat
    """Of one step of a collective, or of one message."""
    efficiency: PositiveFloat = Field(default=0.8, le=1.0)
    """Share of the bandwidth that long ring collectives reach (busbw of nccl-tests over the line rate)."""
    in_network: PositiveFloat | None = None
    """Share of the bandwidth (as busbw) that all-reduces reach where switches add up (NVLS); None where they can't."""
    bridge_devices: PositiveInt | None = None
    """Devices below one host bridge, where what passes between bridges shares a line; None where nothing is shared."""
    bridge_bytes_per_s: PositiveFloat | None = None
    """What that line carries, one way."""
    curves: dict[str, tuple[tuple[PositiveInt, PositiveFloat, PositiveFloat], ...]] = {}
    """Measured: collective → (ranks, bytes, seconds), by ranks and bytes. Where given it stands for the formulas."""
    sources: dict[str, str] = {}
    """Where each number comes from."""


class Nics(Frozen):
    """The network cards of a node."""

    link: LinkSpec
    """A name of the catalogue, or a link written out."""
    count: PositiveInt = 1
    """In each node."""


class NodeShape(Frozen):
    """A node: so many devices, joined by `intra`; `domain_nodes` nodes are joined by the same fabric (NVL72: 18 trays
    of 4)."""

    devices: PositiveInt
    intra: LinkSpec
    nics: Nics | None = None
    domain_nodes: PositiveInt = 1
    host_memory_bytes: PositiveInt | None = None


DeviceSpec.model_rebuild()
