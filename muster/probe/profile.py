"""Measurement of this machine, written as a cluster file."""

import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from muster.config.file_writer import write_output
from muster.config.local_machine import cluster_text
from muster.cost.time.plan_times import HOST_LINK_EFFICIENCY
from muster.launch.launcher import launch, rank_command
from muster.launch.rank_errors import EXIT_STOPPED
from muster.probe.profile_worker import QUICK_FILE, RATES_FILE
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.device import DeviceSpec, DiskSpec, LinkSpec
from muster.spec.errors import MusterError
from muster.spec.machine_rates import GroupedKernel, GroupedMatmuls, MachineRates
from muster.spec.plan import Precision

_MOST_RANKS = 8


def profile(output: Path, num_ranks: int | None, quick: bool = False) -> ClusterSpec:
    """Measure for a minute or two (`quick`: for some seconds with few sizes), write a cluster file and return the
    cluster.

    Prints its progress. Raises MusterError if a rank fails or the file can't be written.
    """
    _require_writable(output)
    ranks = num_ranks or default_num_ranks()
    with tempfile.TemporaryDirectory(prefix=".muster-profile-", dir=output.absolute().parent) as place:
        folder = Path(place)
        if quick:
            (folder / QUICK_FILE).touch()
        command = rank_command("muster.probe.profile_worker", folder, ranks)
        if (code := launch(command, ranks, folder).report()) == EXIT_STOPPED:
            raise KeyboardInterrupt
        if code:
            raise MusterError(f"the profile failed: its ranks ended with exit code {code}")
        machine = MachineRates.model_validate_json((folder / RATES_FILE).read_text(encoding="utf-8"))
    cluster = cluster_from_rates(machine)
    write_output(output, cluster_text(cluster), "the profile")
    return cluster


def _require_writable(output: Path) -> None:
    """Raise MusterError where the file can't be written, before minutes of measuring."""
    place = output.absolute().parent
    if output.is_dir():
        raise MusterError(f"can't write the profile to {output}: it is a directory")
    if not place.is_dir():
        raise MusterError(f"can't write the profile to {output}: there is no directory {place}")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise MusterError(f"can't write the profile to {output}: {error.strerror}") from None


def default_num_ranks() -> int:
    """Return one rank for each GPU; on a CPU one for each core, but at least 4, since groups of 2 and of 4 are
    measured, and at most 8."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(_MOST_RANKS, max(4, len(os.sched_getaffinity(0))))


def cluster_from_rates(machine: MachineRates) -> ClusterSpec:
    """Return this machine as a cluster of one node: its devices, or its cores, with their measured rates."""
    device = _device(machine)
    largest = max((point for point in machine.collectives.get("send", ())), key=lambda point: point[1], default=None)
    smallest = min((point for point in machine.collectives.get("send", ())), key=lambda point: point[1], default=None)
    link = LinkSpec(
        name="measured",
        kind="memory" if machine.cores else "nvlink",
        bandwidth_bytes_per_s=largest[1] / largest[2] if largest else 1e9,
        latency_s=smallest[2] if smallest else 1e-5,
        efficiency=1.0,
    )
    disk = None
    if machine.disk_read_bytes_per_s is not None:
        disk = DiskSpec(
            read_bytes_per_s=machine.disk_read_bytes_per_s, write_bytes_per_s=machine.disk_write_bytes_per_s
        )
    devices = machine.cores or machine.ranks
    group = NodeGroup(num_nodes=1, devices_per_node=devices, device=device, intra=link, disk=disk)
    return ClusterSpec(name=f"{device.name} measured {datetime.now(UTC):%Y-%m-%d}", groups=(group,))


def _device(machine: MachineRates) -> DeviceSpec:
    peaks: dict[Precision, float] = {}
    for precision, kernels in machine.kernels.items():
        peaks[precision] = max(2 * m * k * n / time_s for m, k, n, time_s in kernels.matmuls["forward"])
    copies = next(iter(machine.kernels.values())).curves["copy"]
    elements, time_s = copies[-1]
    found: dict[str, Any] = {
        "peak_flops_per_s": peaks,
        "memory_bandwidth_bytes_per_s": 8 * elements / time_s,
        "memory_efficiency": 1.0,
        "rates": machine,
        "sources": {"peak_flops_per_s": "the fastest matmul that muster profile timed"},
    }
    if machine.cores:
        return DeviceSpec(name=_cpu_name(), kind="cpu", shared_cores=machine.cores, **found)
    if machine.host_bytes_per_s is not None:
        found["host_bandwidth_bytes_per_s"] = machine.host_bytes_per_s / HOST_LINK_EFFICIENCY
    properties = torch.cuda.get_device_properties(0)
    return DeviceSpec(name=properties.name, kind="gpu", memory_bytes=properties.total_memory, **found)


def _cpu_name() -> str:
    return f"{platform.machine()} CPU"


def summary(cluster: ClusterSpec) -> str:
    """Return a summary of the machine's rates, as lines."""
    device = cluster.device
    assert device.rates is not None
    lines = [f"device       {device.name}" + (f", {device.shared_cores} cores" if device.shared_cores else "")]
    for precision, peak in device.peak_flops_per_s.items():
        lines.append(f"{precision:12} {peak / 1e9:,.0f} GFLOP/s in the fastest matmul")
    lines.append(f"memory       {(device.memory_bandwidth_bytes_per_s or 0) / 1e9:,.1f} GB/s copied, read and written")
    if device.rates.host_bytes_per_s is not None:
        lines.append(f"host link    {device.rates.host_bytes_per_s / 1e9:,.1f} GB/s to pinned memory and back")
    if device.rates.disk_read_bytes_per_s is not None and device.rates.disk_write_bytes_per_s is not None:
        reads, writes = device.rates.disk_read_bytes_per_s / 1e9, device.rates.disk_write_bytes_per_s / 1e9
        lines.append(f"disk         {reads:,.2f} GB/s read and {writes:,.2f} GB/s written, past the page cache")
    for precision, kernels in device.rates.kernels.items():
        if kernels.grouped_matmuls:
            lines.append(f"experts      {precision}: {_kernels_by_rows(kernels.grouped_matmuls)}")
    for name, points in device.rates.collectives.items():
        ranks, count, time_s = max(points, key=lambda point: point[:2])
        lines.append(f"{name:12} {count / time_s / 1e9:,.2f} GB/s over {ranks} ranks with {count >> 20} MiB each")
    return "\n".join(lines)


def _kernels_by_rows(grouped: GroupedMatmuls) -> str:
    """Return which kernel took the least time for all widths and passes, by rows of each expert."""
    seconds: dict[int, dict[GroupedKernel, float]] = {}
    for kernel, passes in grouped.items():
        for points in passes.values():
            for rows, _, _, time_s in points:
                by_kernel = seconds.setdefault(rows, {})
                by_kernel[kernel] = by_kernel.get(kernel, 0.0) + time_s
    fastest = [(rows, min(by_kernel, key=by_kernel.__getitem__)) for rows, by_kernel in sorted(seconds.items())]
    return ", ".join(f"{kernel} for {rows} rows each" for rows, kernel in fastest)
