"""The cluster: groups of nodes, which may differ, and the networks between them."""

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from muster.spec.base import Frozen
from muster.spec.device import DeviceSpec, DiskSpec, LinkSpec, Nics


class NodeGroup(Frozen):
    """Nodes of one kind."""

    num_nodes: PositiveInt
    devices_per_node: PositiveInt
    device: DeviceSpec
    intra: LinkSpec
    """Link between the devices of a node."""
    nics: Nics | None = None
    """Network cards that join nodes; None for a node that stands alone."""
    domain_nodes: PositiveInt = 1
    """Nodes that `intra` joins into one fabric, such as the 18 trays of NVL72."""
    host_memory_bytes: PositiveInt | None = None
    """Host memory of a node, beside the devices' own, for offloading; None where it is unknown."""
    host_update_bytes_per_s: PositiveFloat | None = None
    """Bytes a second that the cores of a node stream in updates of parameters; None: 112 GB/s is assumed."""
    disk: DiskSpec | None = None
    """Disks of a node for offloading; None where nothing is known of them."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def host_memory_per_device_bytes(self) -> float | None:
        """Host memory that each device of a node may offload to; None where it is unknown."""
        return None if self.host_memory_bytes is None else self.host_memory_bytes / self.devices_per_node

    @property
    def disk_per_device_bytes(self) -> float | None:
        """Disk space that each device of a node may offload to; None where it is unknown."""
        size = self.disk and self.disk.capacity_bytes
        return None if size is None else size / self.devices_per_node

    @property
    def domain_devices(self) -> int:
        """Devices that `intra` joins."""
        return self.devices_per_node * min(self.domain_nodes, self.num_nodes)


class NetworkTier(Frozen):
    """One level of the network above the nodes: a rack's switch, a spine, a line between sites."""

    name: str
    """Name shown to people."""
    nodes: PositiveInt
    """Neighbouring nodes joined below this tier: traffic that leaves such a block goes over it."""
    bandwidth_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the nodes' own bandwidth that the tier carries: 0.5 where it is oversubscribed 2:1."""
    latency_s: PositiveFloat = 1e-6
    """Latency added to each message over the tier."""
    link: LinkSpec | None = None
    """Link shared by all nodes of a block, where it rather than the NICs is the limit (a WAN)."""


class ClusterSpec(Frozen):
    """All devices of a run; ranks are numbered group by group, node by node."""

    name: str = ""
    """Name shown to people."""
    groups: tuple[NodeGroup, ...]
    """Groups of nodes, each of one kind."""
    tiers: tuple[NetworkTier, ...] = ()
    """Network tiers, from the nearest to the farthest."""
    node_bandwidth_bytes_per_s: tuple[tuple[PositiveFloat, ...], ...] | None = None
    """Measured bandwidth from node to node, one way; on the diagonal, between the devices of a node."""
    node_latency_s: tuple[tuple[PositiveFloat, ...], ...] | None = None
    """Measured latency from node to node; on the diagonal, between the devices of a node."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterSpec":
        if not self.groups:
            raise ValueError("a cluster has at least one group of nodes")
        if self.num_nodes > 1 and any(group.nics is None and group.domain_nodes == 1 for group in self.groups):
            raise ValueError("a cluster with more than one node needs nics")
        blocks = [tier.nodes for tier in self.tiers]
        if blocks != sorted(blocks):
            raise ValueError("tiers are listed from the nearest to the farthest: their nodes must not decrease")
        for name in ("node_bandwidth_bytes_per_s", "node_latency_s"):
            matrix = getattr(self, name)
            if matrix is not None and any(len(row) != self.num_nodes for row in (matrix, *matrix)):
                wrong = next((row for row in matrix if len(row) != self.num_nodes), matrix[0] if matrix else ())
                raise ValueError(
                    f"{name} must have {self.num_nodes} rows and columns, one per node,"
                    f" got {len(matrix)} rows, one of {len(wrong)} columns"
                )
        return self

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.groups)

    @property
    def device(self) -> DeviceSpec:
        """Device of the first group: the only one in a uniform cluster."""
        return self.groups[0].device

    @property
    def is_uniform(self) -> bool:
        """True if all nodes are of one kind."""
        return len(self.groups) == 1

    def group_of(self, rank: int) -> NodeGroup:
        """Return the group of a rank's node; ranks beyond the last wrap around."""
        return self.groups[self.locate(rank)[0]]

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's group, and its node's number in the cluster."""
        if len(self.groups) == 1:
            return 0, rank % self.groups[0].num_devices // self.groups[0].devices_per_node
        rank, node = rank % self.num_devices, 0
        for index, group in enumerate(self.groups):
            if rank < group.num_devices:
                return index, node + rank // group.devices_per_node
            rank, node = rank - group.num_devices, node + group.num_nodes
        raise AssertionError("a rank below num_devices is in a group")

    @property
    def usd_per_hour(self) -> float | None:
        """Price of all devices; None where one is unknown."""
        return self._sum(lambda device: device.price and device.price.usd_per_hour)

    @property
    def watts(self) -> float | None:
        """Power of all devices at their limit; None where one is unknown."""
        return self._sum(lambda device: device.watts)

    def _sum(self, of: Any) -> float | None:
        total = 0.0
        for group in self.groups:
            value = of(group.device)
            if value is None:
                return None
            total += value * group.num_devices
        return total


def single_node_cluster(device: DeviceSpec, num_devices: int = 1) -> ClusterSpec:
    """Return a machine of `num_devices` such devices, in the node that they usually come in, or joined by shared
    memory."""
    intra = device.node.intra if device.node else SHARED_MEMORY_LINK
    nics = device.node.nics if device.node else None
    names = ("host_memory_bytes", "host_update_bytes_per_s", "disk")
    host = {name: getattr(device.node, name) for name in names} if device.node else {}
    group = NodeGroup(num_nodes=1, devices_per_node=num_devices, device=device, intra=intra, nics=nics, **host)
    return ClusterSpec(name=f"{num_devices}x{device.name}", groups=(group,))


SHARED_MEMORY_LINK = LinkSpec(name="memory", kind="memory", bandwidth_bytes_per_s=5e9, latency_s=50e-6)
"""Link between processes of one machine about which nothing is known: a copy through shared memory."""
