"""A run under a plan, to be started on the nodes of a cluster."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from muster.spec.cluster import ClusterSpec
from muster.spec.device import Nics
from muster.spec.errors import InfeasibleError
from muster.spec.plan import Plan

PORT = 29400
"""Port of the first node: torchrun's default."""

MAX_NAME_LENGTH = 50
"""Longest name of a job: with a pod's number it must be a host name of at most 63 characters."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes alike, which a scheduler may swap: a component of a Slurm job, a Job of Kubernetes."""

    device: str
    devices_per_node: int
    has_gpus: bool = True
    nics: Nics | None = None
    node_ranks: tuple[int, ...] = (0,)
    """Node ranks under the plan, in the order in which the cluster lists these nodes."""

    @property
    def num_nodes(self) -> int:
        return len(self.node_ranks)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A run file under a plan, and the nodes that start it."""

    name: str
    run_file: str
    plan_file: str
    node_kinds: tuple[NodeKind, ...]
    node_order: tuple[int, ...] = ()
    """Listed nodes in the order of their ranks; empty where all are alike."""

    @property
    def num_nodes(self) -> int:
        return sum(kind.num_nodes for kind in self.node_kinds)

    @property
    def devices_per_node(self) -> int:
        """Ranks that each node starts; the same on all."""
        return self.node_kinds[0].devices_per_node

    @property
    def ranks_as_listed(self) -> bool:
        """True if the nodes have their ranks in the order in which the cluster lists them."""
        return len(self.node_kinds) == 1 and self.node_kinds[0].node_ranks == tuple(range(self.num_nodes))

    def train(self) -> str:
        """Return the command of a node without its rank."""
        run_file, plan_file = shlex.quote(self.run_file), shlex.quote(self.plan_file)
        return f"muster train {run_file} --parallel {plan_file} --run runs/{self.name}"

    def launcher(self, first_node: str, node_rank: str) -> str:
        """Return the command for each node under Muster's launcher; the arguments are words of a shell."""
        place = f" --nodes {self.num_nodes} --node-rank {node_rank} --rendezvous {first_node}:{PORT}"
        return f"{self.train()} --nproc {self.devices_per_node}{place if self.num_nodes > 1 else ''}"

    def torchrun(self, first_node: str) -> str:
        """Return the command for each node under torchrun."""
        rendezvous = f"--rdzv-backend c10d --rdzv-endpoint {first_node}:{PORT} --rdzv-id {self.name}"
        if self.node_order:  # who comes first gets rank 0 there, whichever node it is
            rendezvous = f'--node-rank "$2" --master-addr {first_node} --master-port {PORT}'
        single = "--standalone" if self.num_nodes == 1 else f"--nnodes {self.num_nodes} {rendezvous}"
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

    The job's name becomes a host name, so that other characters of `name` are replaced. Raises InfeasibleError where
    nodes have unequal numbers of devices.
    """
    check_equal_nodes(cluster)
    per_node = cluster.groups[0].devices_per_node
    num_nodes = -(-plan.world_size // per_node)
    order = list(node_order or range(cluster.num_nodes))[:num_nodes]
    return LaunchSpec(
        re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME_LENGTH].rstrip("-"),
        run_file,
        plan_file,
        _node_kinds(cluster, order, min(per_node, plan.world_size)),
        tuple(order) if node_order else (),
    )


def check_equal_nodes(cluster: ClusterSpec) -> None:
    """Raise InfeasibleError where nodes have unequal numbers of devices: each launcher starts as many ranks."""
    sizes = sorted({group.devices_per_node for group in cluster.groups})
    if len(sizes) > 1:
        raise InfeasibleError(
            f"launch files are for nodes with equal numbers of devices, but these have {' and '.join(map(str, sizes))};"
            " start torchrun on each group with its own --nproc-per-node"
        )


def _node_kinds(cluster: ClusterSpec, order: Sequence[int], devices_per_node: int) -> tuple[NodeKind, ...]:
    """Return the kinds of the nodes that have a rank, in the order in which the cluster lists them."""
    rank_of_node = {node: rank for rank, node in enumerate(order)}
    kinds: list[NodeKind] = []
    nodes = iter(range(cluster.num_nodes))
    for group in cluster.groups:
        ranks = tuple(rank_of_node[node] for node in islice(nodes, group.num_nodes) if node in rank_of_node)
        kind = NodeKind(group.device.name, devices_per_node, group.device.kind != "cpu", group.nics, ranks)
        twin = next((each for each in kinds if replace(each, node_ranks=ranks) == kind), None)
        if twin is not None:
            kinds[kinds.index(twin)] = replace(twin, node_ranks=twin.node_ranks + ranks)
        elif ranks:
            kinds.append(kind)
    return tuple(kinds)
