"""Files that carry a plan out on a cluster: Slurm, Kubernetes, SkyPilot, or torchrun by hand.

Each but the last starts Muster's launcher on every node, which starts one process for each device and finds the others
at the first node; its exit code says how the job ended, which torchrun's doesn't.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from muster.spec.cluster import ClusterSpec
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan

PORT = 29400
"""Where the first node listens: torchrun's own choice."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is started: a run file under a plan, on so many nodes alike."""

    name: str
    nodes: int
    devices_per_node: int
    device: str
    run_file: str
    plan_file: str

    def train(self) -> str:
        """The command of a node, without its place."""
        return f"muster train {self.run_file} --parallel {self.plan_file} --run runs/{self.name}"

    def launcher(self, first_node: str, node_rank: str) -> str:
        """The command for each node, under Muster's launcher."""
        place = f" --nodes {self.nodes} --node-rank {node_rank} --rendezvous {first_node}:{PORT}"
        return f"{self.train()} --nproc {self.devices_per_node}{place if self.nodes > 1 else ''}"

    def torchrun(self, first_node: str) -> str:
        """The command for each node, under torchrun."""
        rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {first_node}:{PORT} --rdzv-id {self.name}"
        single = "--standalone" if self.nodes == 1 else f"--nnodes {self.nodes} {rendezvous}"
        return f"torchrun {single} --nproc-per-node {self.devices_per_node} -m -- {self.train()}"


def job_of(plan: Plan, cluster: ClusterSpec, name: str, run_file: str, plan_file: str) -> Job:
    """The job of a plan. Raises InfeasibleError where nodes differ in their number of devices."""
    sizes = {group.devices_per_node for group in cluster.groups}
    if len(sizes) > 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise InfeasibleError(
            f"launch files are for nodes with equal numbers of devices, but these have {shown};"
            " start torchrun on each group with its own --nproc-per-node"
        )
    per_node = sizes.pop()
    nodes = -(-plan.world_size // per_node)
    return Job(name, nodes, min(per_node, plan.world_size), cluster.device.name, run_file, plan_file)


def launch_files(kind: str, job: Job) -> dict[str, str]:
    """File name → text, for one of `LAUNCHERS`."""
    return LAUNCHERS[kind](job)


def write_launch_files(kind: str, job: Job, folder: Path) -> list[Path]:
    """Writes them into a folder; returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in launch_files(kind, job).items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def _torchrun(job: Job) -> dict[str, str]:
    lines = ["#!/usr/bin/env bash", f"# Run this on each of {job.nodes} nodes, with the first node's address."]
    if job.nodes == 1:
        lines = lines[:1]
    else:
        lines += ["first_node=${1:?usage: bash start.sh ADDRESS_OF_THE_FIRST_NODE}"]
    command = job.torchrun("$first_node")
    return {"start.sh": "\n".join([*lines, "set -euo pipefail", f"exec {command}", ""])}


def _slurm(job: Job) -> dict[str, str]:
    command = job.launcher("$first_node", "$SLURM_NODEID")
    text = f"""#!/usr/bin/env bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.devices_per_node}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail
# A launcher on each node starts a process for each device. A run that is stopped saves and ends with 75: go on.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export first_node
status=0
srun --kill-on-bad-exit=1 bash -c '{command}' || status=$?
if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
    return {f"{job.name}.sbatch": text}


def _kubernetes(job: Job) -> dict[str, str]:
    first = f"{job.name}-0.{job.name}"
    container = {
        "name": "muster",
        "image": "IMAGE_WITH_MUSTER",
        "workingDir": "/work",
        "command": ["bash", "-c", f"exec {job.launcher(first, '$JOB_COMPLETION_INDEX')}"],
        "resources": {"limits": {"nvidia.com/gpu": job.devices_per_node}},
        "volumeMounts": [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": job.name,
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
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": 3 * job.nodes,
            "template": {"spec": pod},
        },
    }
    return {f"{job.name}.yaml": yaml.safe_dump_all([service, batch], sort_keys=False, width=1000)}


def _skypilot(job: Job) -> dict[str, str]:
    first = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {"accelerators": f"{_SKY_NAMES.get(job.device, job.device.upper())}:{job.devices_per_node}"},
        "workdir": ".",
        "setup": "pip install -c constraints.txt '.[train]'",
        "run": job.launcher(first, "$SKYPILOT_NODE_RANK"),
    }
    return {f"{job.name}.sky.yaml": yaml.safe_dump(task, sort_keys=False, width=1000)}


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
"""Our names of devices → SkyPilot's (its catalogue of accelerators)."""

LAUNCHERS: dict[str, Callable[[Job], dict[str, str]]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}
