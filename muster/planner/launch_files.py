"""Files that start a run under a plan on a cluster: Slurm, Kubernetes, SkyPilot, or torchrun by hand.

Each but the last starts Muster's launcher on every node. It starts one process per device and finds the other nodes at
the first one; unlike torchrun's, its exit code says how the run ended. `slurm_file.py` and `kubernetes_file.py` write
theirs.
"""

from collections.abc import Callable
from pathlib import Path

import yaml

from muster.planner.kubernetes_file import kubernetes_files
from muster.planner.launch_spec import LaunchSpec, check_equal_nodes
from muster.planner.slurm_file import slurm_files
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError


def check_launch(kind: str, cluster: ClusterSpec) -> None:
    """Raise InfeasibleError where files of this kind can't start a run on these nodes."""
    check_equal_nodes(cluster)
    devices = sorted({group.device.name for group in cluster.groups})
    if kind == "skypilot" and len(devices) > 1:
        raise InfeasibleError(
            f"SkyPilot gives all nodes of a task the same devices, but these have {' and '.join(devices)};"
            " expected --launch slurm, kubernetes or torchrun"
        )


def render_launch_files(kind: str, spec: LaunchSpec) -> dict[str, str]:
    """Return the files, name → text, of one of `LAUNCHERS`.

    Files for Slurm and Kubernetes give each kind of node its ranks. The others don't choose which node comes first, so
    that they only state the order.
    """
    files = LAUNCHERS[kind](spec)
    if spec.node_order and kind in ("torchrun", "skypilot"):
        order = " ".join(map(str, spec.node_order))
        note = f"# The plan is for the nodes in this order of those listed: {order}. They must get their ranks so.\n"
        files = {name: _after_shebang(text, note) for name, text in files.items()}
    return files


def _after_shebang(text: str, note: str) -> str:
    first, rest = text.split("\n", 1)
    return f"{first}\n{note}{rest}" if first.startswith("#!") else note + text


def write_launch_files(kind: str, spec: LaunchSpec, folder: Path) -> list[Path]:
    """Write the files into a folder, and return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in render_launch_files(kind, spec).items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def _torchrun(spec: LaunchSpec) -> dict[str, str]:
    rank = " and its own rank" if spec.node_order else ""
    lines = [
        "#!/usr/bin/env bash",
        f"# Run this on each of {spec.num_nodes} nodes, with the first node's address{rank}.",
    ]
    if spec.num_nodes == 1:
        lines = lines[:1]
    else:
        words = "ADDRESS_OF_THE_FIRST_NODE" + (" RANK_OF_THIS_NODE" if spec.node_order else "")
        needed = 2 if spec.node_order else 1
        lines += [f': "${{{needed}:?usage: bash start.sh {words}}}"', "first_node=$1"]
    command = spec.torchrun('"$first_node"')
    return {"start.sh": "\n".join([*lines, "set -euo pipefail", f"exec {command}", ""])}


def _skypilot(spec: LaunchSpec) -> dict[str, str]:
    first = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    kind = spec.node_kinds[0]
    accelerator = _SKY_NAMES.get(kind.device, kind.device.upper())
    task = {
        "name": spec.name,
        "num_nodes": spec.num_nodes,
        **({"resources": {"accelerators": f"{accelerator}:{spec.devices_per_node}"}} if kind.has_gpus else {}),
        "workdir": ".",
        "setup": "pip install -c constraints.txt '.[train]'",
        "run": spec.launcher(first, '"$SKYPILOT_NODE_RANK"'),
    }
    return {f"{spec.name}.sky.yaml": yaml.safe_dump(task, sort_keys=False, width=1000)}


_SKY_NAMES = {
    "h100-sxm": "H100",
    "h100-pcie": "H100",
    "h200": "H200",
    "b200": "B200",
    "a100-80-sxm": "A100-80GB",
    "a100-80-pcie": "A100-80GB",
    "a100-40-sxm": "A100",
    "a100-40-pcie": "A100",
    "v100-16-sxm": "V100",
    "v100-32-sxm": "V100-32GB",
    "l40s": "L40S",
    "rtx4090": "RTX4090",
}
"""Muster's device name → SkyPilot's (its catalogue of accelerators)."""

LAUNCHERS: dict[str, Callable[[LaunchSpec], dict[str, str]]] = {
    "torchrun": _torchrun,
    "slurm": slurm_files,
    "kubernetes": kubernetes_files,
    "skypilot": _skypilot,
}
