"""This machine as a cluster: from its profile, or as detected from the operating system."""

import os
import re
from pathlib import Path

from muster.config.cluster_files import load_cluster, load_device
from muster.config.yaml_writer import yaml_text
from muster.spec.cluster import ClusterSpec, NodeGroup, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError

PROFILE_FILE = "machine.yaml"
"""Default output of `muster profile`."""

_GPUS = Path("/proc/driver/nvidia/gpus")

_NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gb300",), "gb300"),
    (("gb200",), "gb200"),
    (("b300",), "b300"),
    (("b200",), "b200"),
    (("gh200",), "gh200"),
    (("h200",), "h200"),
    (("h800",), "h800"),
    (("h20",), "h20"),
    (("h100", "pcie"), "h100-pcie"),
    (("h100", "nvl"), "h100-pcie"),
    (("h100", "96gb"), "h100-96-hbm2e"),
    (("h100",), "h100-sxm"),
    (("a800",), "a800"),
    (("a100", "pcie", "80"), "a100-80-pcie"),
    (("a100", "pcie"), "a100-40-pcie"),
    (("a100", "80"), "a100-80-sxm"),
    (("a100",), "a100-40-sxm"),
    (("v100", "pcie"), "v100-32-pcie"),
    (("v100", "32"), "v100-32-sxm"),
    (("v100",), "v100-16-sxm"),
    (("l40s",), "l40s"),
    (("l4",), "l4"),
    (("rtx a6000",), "a6000"),
    (("rtx 3090",), "rtx3090"),
    (("rtx 4090",), "rtx4090"),
    (("rtx 5090",), "rtx5090"),
)
"""Words that all occur in a driver's device name → the catalogue's name; the first match counts."""


def cluster_by_name(text: str) -> ClusterSpec:
    """Load the cluster that `text` names (`load_cluster`), where `this` is the machine that `muster profile` measured,
    with one rank for each core or device, and `4xthis` the same with 4. Raises ConfigError."""
    match = _THIS.fullmatch(text.strip())
    return load_cluster(text) if match is None else with_num_ranks(profiled_machine(), int(match[1] or 0))


_THIS = re.compile(r"(?:(\d{1,6})\s*[x×*]\s*)?this")


def profiled_machine(profile: Path = Path(PROFILE_FILE)) -> ClusterSpec:
    """Return the machine that `muster profile` measured here. Raises ConfigError where it was not measured."""
    if not profile.exists():
        raise ConfigError(
            f"--cluster this needs a profile of this machine: run 'muster profile' here first, it writes {profile}"
        )
    return load_cluster(str(profile))


def with_num_ranks(measured: ClusterSpec, processes: int = 0) -> ClusterSpec:
    """Return a measured machine with so many ranks (0: as many as in its file), which share its memory on a CPU."""
    group = measured.groups[0]
    count = processes or group.num_devices
    memory = group.device.memory_bytes or (system_memory_bytes() // count if group.device.shared_cores else None)
    device = group.device.model_copy(update={"memory_bytes": memory})
    group = group.model_copy(update={"devices_per_node": count, "device": device})
    return measured.model_copy(update={"groups": (group,)})


def cluster_text(cluster: ClusterSpec) -> str:
    """Return the text of a cluster file, which `load_cluster` reads."""
    group = cluster.groups[0].model_dump(mode="json", exclude_defaults=True)
    # Groups stay on one line: the measured rates are for programs, only the names above them are for people.
    lines = yaml_text({"name": cluster.name, "groups": [group]})
    return f"# Written by muster profile. 'muster predict --cluster FILE' takes it.\n{lines}"


def detect_machine(processes: int, nodes: int = 1) -> ClusterSpec:
    """Return the devices that the operating system reports, as the catalogue knows them: one for each of the
    `processes`, on nodes that are all like this one.

    With fewer devices than processes per node, the processes compute on its cores, as in training.
    """
    local = processes // nodes
    gpus = nvidia_gpu_names()
    if gpus and len(gpus) >= local:
        device = _gpu(gpus[0])
    else:
        cores = usable_cores()
        device = load_device("cpu").model_copy(
            update={"shared_cores": cores, "memory_bytes": system_memory_bytes() // local}
        )
    if nodes == 1:
        cluster = single_node_cluster(device, local)
        return cluster.model_copy(update={"name": f"{local}x{device.name}"})
    assert device.node is not None
    nics = device.node.nics or load_device("cpu").node.nics  # type: ignore[union-attr]
    group = NodeGroup(
        num_nodes=nodes, devices_per_node=local, device=device, intra=device.node.intra, nics=nics, domain_nodes=1
    )
    return ClusterSpec(name=f"{processes}x{device.name}", groups=(group,))


def nvidia_gpu_names() -> list[str]:
    """Return the NVIDIA driver's names of the devices that this process may use; none where there is no such driver."""
    names = []
    for place in sorted(_GPUS.glob("*/information")) if _GPUS.is_dir() else []:
        lines = place.read_text(encoding="utf-8", errors="replace").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    return names[: len([one for one in visible.split(",") if one.strip() not in ("", "-1")])]


def catalog_device_name(driver_name: str) -> str | None:
    """Return the catalogue's name of a device, from the driver's: `NVIDIA H100 80GB HBM3` is h100-sxm."""
    text = driver_name.lower()
    return next((name for words, name in _NAMES if all(word in text for word in words)), None)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def system_memory_bytes() -> int:
    """Return the memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or no limit in it
            continue
    return total


def _gpu(driver_name: str) -> DeviceSpec:
    """Return a catalogue device; an unknown one is treated as an A100 of unknown memory, since plans are only
    compared."""
    name = catalog_device_name(driver_name)
    if name is not None:
        return load_device(name)
    unknown = {"name": driver_name.lower().replace(" ", "-"), "memory_bytes": None, "price": None, "watts": None}
    return load_device("a100-40-sxm").model_copy(update=unknown)
