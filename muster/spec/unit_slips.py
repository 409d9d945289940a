"""Likely slips in a cluster's description: values that are legal but mean something absurd, or nothing."""

from collections.abc import Iterator

from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec, LinkSpec


class UnitWarning(UserWarning):
    """Value of a question that is likely a slip, of units or others."""


_LEAST_BYTES_PER_S = 1e6
"""Slower links join no training run: 400 was meant in Gbit/s."""
_FASTEST_NIC_BYTES_PER_S = 1.1e11
"""Rate of one network card of 800 Gbit/s, with a margin: 400e9 was meant in bits."""
_FASTEST_FABRIC_BYTES_PER_S = 2.5e12
"""Rate of one device's fabric, above that of the fastest that is announced."""
_LEAST_MEMORY_BYTES_PER_S = 5e10
"""Rate of a device's memory below that of the slowest GPU that trains: 3.35e9 was meant in TB/s."""
_LONGEST_LATENCY_S = {"wan": 1.0}
_LONGEST_LOCAL_LATENCY_S = 5e-3
"""Longest plausible latency: half of the way around the world, or within a site."""
_NETWORKS = ("infiniband", "roce", "ethernet")


def unit_slips(cluster: ClusterSpec) -> list[str]:
    """Return a sentence for each value that is likely a slip of units: the value, its meaning, the likely intention."""
    found = []
    for index, group in enumerate(cluster.groups):
        place = f"groups.{index}"
        found += [*_device_slips(group.device, f"{place}.device"), *_link_slips(group.intra, f"{place}.intra")]
        if group.nics is not None:
            found += _link_slips(group.nics.link, f"{place}.nics.link", is_card=True)
        found += _small_bytes(group.host_memory_bytes, f"{place}.host_memory_bytes", 1e9)
    for index, tier in enumerate(cluster.tiers):
        if tier.nodes >= cluster.num_nodes:
            found.append(
                f"tiers.{index}.nodes {tier.nodes} are all of the cluster's {cluster.num_nodes}: nothing crosses tier"
                f" '{tier.name}'"
            )
        if tier.latency_s > _LONGEST_LATENCY_S["wan"]:
            found.append(_latency(tier.latency_s, f"tiers.{index}.latency_s"))
        if tier.link is not None:
            found += _link_slips(tier.link, f"tiers.{index}.link")
    return found


def _link_slips(link: LinkSpec, place: str, is_card: bool = False) -> Iterator[str]:
    """Yield the slips of a link; `is_card`: a network card of a node."""
    rate, where = link.bandwidth_bytes_per_s, f"{place}.bandwidth_bytes_per_s"
    fastest = _FASTEST_NIC_BYTES_PER_S if is_card and link.kind in _NETWORKS else _FASTEST_FABRIC_BYTES_PER_S
    if rate < _LEAST_BYTES_PER_S:
        yield f"{where} {rate:g} means {rate:g} bytes a second; {rate:g} Gbit/s is {_short(rate * 1e9 / 8)}"
    elif rate > fastest:
        yield (
            f"{where} {_short(rate)} means {rate * 8 / 1e9:,.0f} Gbit/s;"
            f" if it counts bits, it is {_short(rate / 8)} in bytes"
        )
    if link.latency_s > _LONGEST_LATENCY_S.get(link.kind, _LONGEST_LOCAL_LATENCY_S):
        yield _latency(link.latency_s, f"{place}.latency_s")


def _latency(seconds: float, where: str) -> str:
    return f"{where} {seconds:g} means {seconds:g} seconds; {seconds:g} µs is {_short(seconds * 1e-6)}"


def _device_slips(device: DeviceSpec, place: str) -> Iterator[str]:
    """Yield the slips of a device; a CPU's rates are its own."""
    yield from _sustained_slips(device, place)
    if device.kind == "cpu":
        return
    for precision, peak in device.peak_flops_per_s.items():
        if peak < 1e11:
            intention = f"{peak:g} TFLOP/s is {_short(peak * 1e12)}"
            yield f"{place}.peak_flops_per_s.{precision} {peak:g} means {peak:g} FLOP/s; {intention}"
    yield from _small_bytes(device.memory_bytes, f"{place}.memory_bytes", 1e9)
    for name in ("memory_bandwidth_bytes_per_s", "host_bandwidth_bytes_per_s"):
        yield from _small_bytes(getattr(device, name), f"{place}.{name}", 1e8, " a second")
    moved = device.memory_bandwidth_bytes_per_s
    if moved is not None and 1e8 <= moved < _LEAST_MEMORY_BYTES_PER_S:
        yield (
            f"{place}.memory_bandwidth_bytes_per_s {_short(moved)} means {moved / 1e9:g} GB/s, less than any GPU's;"
            f" {moved / 1e9:g} TB/s is {_short(moved * 1e3)}"
        )
    if moved is not None and moved > 2.5e13:
        yield (
            f"{place}.memory_bandwidth_bytes_per_s {_short(moved)} means {moved / 1e12:g} TB/s;"
            f" if it counts bits, it is {_short(moved / 8)} in bytes"
        )
    if device.watts is not None and device.watts < 10:
        yield f"{place}.watts {device.watts:g} means {device.watts:g} W; {device.watts:g} kW is {device.watts * 1e3:g}"


def _sustained_slips(device: DeviceSpec, place: str) -> Iterator[str]:
    """Yield sustained or measured rates above the peak."""
    for precision, share in device.matmul_efficiency.items():
        if share > 1:
            yield (
                f"{place}.matmul_efficiency.{precision} {share:g} means {share:g} times the peak; a share is at most 1:"
                f" if it is in percent, the share is {share / 100:g}"
            )
    for precision, points in device.matmul_rates.items():
        peak = device.peak_flops_per_s.get(precision)
        most = max((rate for _, rate in points), default=0.0)
        if peak is not None and most > peak:
            yield (
                f"{place}.peak_flops_per_s.{precision} {_short(peak)} is below the measured {_short(most)} of"
                " matmul_rates: the peak is likely that of another precision or unit"
            )


def _small_bytes(size: float | None, where: str, least: float, unit: str = "") -> Iterator[str]:
    """Yield a size that was likely meant in GB."""
    if size is not None and size < least:
        yield f"{where} {size:g} means {size:g} bytes{unit}; {size:g} GB{'/s' if unit else ''} is {_short(size * 1e9)}"


def _short(value: float) -> str:
    """Return a number as a file has it, such as 50e9 or 3e-06."""
    if value < 1e3:
        return f"{value:g}"
    for exponent in (15, 12, 9, 6, 3):
        if value >= 10**exponent:
            return f"{value / 10**exponent:g}e{exponent}"
    raise AssertionError("a value of at least 1000 has an exponent")
