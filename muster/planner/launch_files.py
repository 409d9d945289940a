"""Files that start a run under a plan on a cluster: Slurm, Kubernetes, SkyPilot, or torchrun by hand.

Each but the last starts Muster's launcher on every node. It starts one process per device and finds the other nodes at
the first one; unlike torchrun's, its exit code says how the run ended.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan

PORT = 29400
"""Port of the first node: torchrun's default."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A run file under a plan, to be started on so many nodes alike."""

    name: str
    nodes: int
    devices_per_node: int
    device: str
    run_file: str
    plan_file: str
    node_order: tuple[int, ...] = ()
    """Listed nodes in the order of their ranks; empty where all are alike."""
    has_gpus: bool = True

    def train(self) -> str:
        """Return the command of a node without its rank."""
        run_file, plan_file = shlex.quote(self.run_file), shlex.quote(self.plan_file)
        return f"muster train {run_file} --parallel {plan_file} --run runs/{self.name}"

    def launcher(self, first_node: str, node_rank: str) -> str:
        """Return the command for each node under Muster's launcher."""
        place = f" --nodes {self.nodes} --node-rank {node_rank} --rendezvous {first_node}:{PORT}"
        return f"{self.train()} --nproc {self.devices_per_node}{place if self.nodes > 1 else ''}"

    def torchrun(self, first_node: str) -> str:
        """Return the command for each node under torchrun."""
        rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {first_node}:{PORT} --rdzv-id {self.name}"
        if self.node_order:  # who comes first gets rank 0 there, whichever node it is
            rendezvous = f'--node-rank "$2" --master-addr {first_node} --master-port {PORT}'
        single = "--standalone" if self.nodes == 1 else f"--nnodes {self.nodes} {rendezvous}"
        return f"torchrun {single} --nproc-per-node {self.devices_per_node} -m -- {self.train()}"


def launch_spec_of(
    plan: Plan,
    cluster: ClusterSpec,
    name: str,
    run_file: str,
    plan_file: str,
    node_order: Sequence[int] | None = None,
) -> LaunchSpec:
    """Return what to start for a plan; `node_order`: listed nodes in the order of their ranks, where they differ.

    The job's name becomes a host name, so that other characters of `name` are replaced. Raises InfeasibleError as
    `check_launch`.
    """
    check_launch("", cluster)
    per_node = cluster.groups[0].devices_per_node
    return LaunchSpec(
        re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME_LENGTH].rstrip("-"),
        -(-plan.world_size // per_node),
        min(per_node, plan.world_size),
        cluster.device.name,
        run_file,
        plan_file,
        tuple(node_order or ()),
        cluster.device.kind != "cpu",
    )


MAX_NAME_LENGTH = 50
"""Longest name of a job: with a pod's number it must be a host name of at most 63 characters."""


def check_launch(kind: str, cluster: ClusterSpec) -> None:
    """Raise InfeasibleError where files of this kind can't start a run on these nodes."""
    sizes = {group.devices_per_node for group in cluster.groups}
    if len(sizes) > 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise InfeasibleError(
            f"launch files are for nodes with equal numbers of devices, but these have {shown};"
            " start torchrun on each group with its own --nproc-per-node"
        )
    devices = sorted({group.device.name for group in cluster.groups})
    if kind == "skypilot" and len(devices) > 1:
        raise InfeasibleError(
            f"SkyPilot gives all nodes of a task the same devices, but these have {' and '.join(devices)};"
            " expected --launch slurm, kubernetes or torchrun"
        )


def render_launch_files(kind: str, spec: LaunchSpec) -> dict[str, str]:
    """Return the files, name → text, of one of `LAUNCHERS`.

    Slurm gives nodes their ranks by the order of their names, which is taken for that of the list. Other launchers
    don't say which node comes first, so that their files only state the order.
    """
    files = LAUNCHERS[kind](spec)
    if spec.node_order and kind != "slurm":
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
    lines = ["#!/usr/bin/env bash", f"# Run this on each of {spec.nodes} nodes, with the first node's address{rank}."]
    if spec.nodes == 1:
        lines = lines[:1]
    else:
        words = "ADDRESS_OF_THE_FIRST_NODE" + (" RANK_OF_THIS_NODE" if spec.node_order else "")
        needed = 2 if spec.node_order else 1
        lines += [f': "${{{needed}:?usage: bash start.sh {words}}}"', "first_node=$1"]
    command = spec.torchrun('"$first_node"')
    return {"start.sh": "\n".join([*lines, "set -euo pipefail", f"exec {command}", ""])}


def _slurm(spec: LaunchSpec) -> dict[str, str]:
    order = spec.node_order
    rank = "$SLURM_NODEID"
    if list(order) != sorted(order):
        ranks = " ".join(str(order.index(node)) for node in range(len(order)))
        rank = f'$(echo {ranks} | cut -d " " -f $(($SLURM_NODEID + 1)))'
    command = spec.launcher("$first_node", rank)
    number = order[0] + 1 if order else 1
    gpus = f"#SBATCH --gpus-per-node={spec.devices_per_node}\n" if spec.has_gpus else ""
    text = f"""#!/usr/bin/env bash
#SBATCH --job-name={spec.name}
#SBATCH --nodes={spec.nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
# A launcher on each node starts a process for each device. A run that is stopped saves and ends with 75: resume it.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n {number}p)
export first_node
status=0
srun --kill-on-bad-exit=1 bash -c {shlex.quote(command)} || status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
    return {f"{spec.name}.sbatch": text}


def _kubernetes(spec: LaunchSpec) -> dict[str, str]:
    first = f"{spec.name}-0.{spec.name}"
    container = {
        "name": "muster",
        "image": "IMAGE_WITH_MUSTER",
        "workingDir": "/work",
        "command": ["bash", "-c", f"exec {spec.launcher(first, '$JOB_COMPLETION_INDEX')}"],
        **({"resources": {"limits": {_kubernetes_resource(spec): spec.devices_per_node}}} if spec.has_gpus else {}),
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": spec.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": "muster-work"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": spec.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": spec.name},
        },
    }
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": spec.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": spec.nodes,
            "parallelism": spec.nodes,
            "backoffLimit": 3 * spec.nodes,
            "template": {"spec": pod},
        },
    }
    return {f"{spec.name}.yaml": yaml.safe_dump_all([service, batch], sort_keys=False, width=1000)}


def _kubernetes_resource(spec: LaunchSpec) -> str:
    """Return the name of the resource that the vendor's device plugin offers."""
    return (
        "google.com/tpu"
        if spec.device.startswith("tpu")
        else f"{'amd' if spec.device[:2] == 'mi' else 'nvidia'}.com/gpu"
    )


def _skypilot(spec: LaunchSpec) -> dict[str, str]:
    first = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    accelerator = _SKY_NAMES.get(spec.device, spec.device.upper())
    task = {
        "name": spec.name,
        "num_nodes": spec.nodes,
        **({"resources": {"accelerators": f"{accelerator}:{spec.devices_per_node}"}} if spec.has_gpus else {}),
        "workdir": ".",
        "setup": "pip install -c constraints.txt '.[train]'",
        "run": spec.launcher(first, "$SKYPILOT_NODE_RANK"),
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
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}
