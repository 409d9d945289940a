"""What a run computes on: one kind of device, and how many of them."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from muster.spec.base import Frozen
from muster.spec.plan import Precision


class DeviceSpec(Frozen):
    """What one rank computes on."""

    name: str
    kind: Literal["cpu", "gpu"]
    peak_flops_per_s: dict[Precision, PositiveFloat] = {}
    """Of dense matrix products, by precision; a precision that is left out is unknown."""
    why_unknown: str = "no published or measured peak"
    """Why the peak of the precisions left out is unknown: shown where a number would stand."""
    memory_bytes: PositiveInt | None = None
    """Of one device; None where ranks have no memory of their own."""
    shared_cores: PositiveInt | None = None
    """CPU cores that all ranks of the machine share; None where each rank has a device of its own."""


class ClusterSpec(Frozen):
    """All devices of a run, which are alike."""

    device: DeviceSpec
    num_devices: PositiveInt
