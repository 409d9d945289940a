"""Time of moving experts between steps: the exchanges of `muster.train.expert_mover`, tensor by tensor."""

from collections import defaultdict
from collections.abc import Mapping

from muster.config.optimizer_state import optimizer_state
from muster.cost.precision_bytes import master_bytes
from muster.cost.time.collectives import COLLECTIVE_START_S, SIMPLE_PROTOCOL_LATENCY_FACTOR, CommGroup, make_comm_group
from muster.cost.time.kernels import stream_s
from muster.cost.time.rank_placement import PlacedPlan
from muster.layout.expert_moves import Holder, MovedTensor, expert_members, moved_tensors
from muster.layout.mesh import coordinates_of, expert_coordinates
from muster.spec.plan import Plan

COPIES_OF_MOVED = 2
"""Times that either end reads or writes a byte beside the exchange: to gather it, or to put it in its place."""
COPY_KERNELS = 2
"""Kernels of these copies."""


def expert_moves_s(setting: PlacedPlan, after: Plan) -> float:
    """Return the seconds in which experts move from their places in the setting's plan to those in `after`, on the
    pipeline rank that takes longest.

    Master weights and each state of the optimizer travel one after another; each takes as long as its busiest rank,
    which sends and receives at the same time.
    """
    seconds: defaultdict[int, float] = defaultdict(float)
    groups: dict[int, tuple[CommGroup, dict[Holder, int]]] = {}
    own = setting.model, setting.plan
    element = master_bytes(setting.plan.precision)
    for tensor in moved_tensors(*own, after):
        pp_rank = setting.plan.pp_rank(tensor.stage)
        if pp_rank not in groups:
            groups[pp_rank] = _members(setting, tensor.stage)
        states = optimizer_state(setting.optim, tensor.name, tensor.shape)
        for width in (element, *(state.element_bytes(element) for state in states)):
            seconds[pp_rank] += _exchange_s(setting, tensor, width, *groups[pp_rank])
    return max(seconds.values(), default=0.0)


def _members(setting: PlacedPlan, stage: int) -> tuple[CommGroup, dict[Holder, int]]:
    """Return the ranks that exchange a stage's experts, as the network sees them, and the fabric of each."""
    plan, cluster = setting.plan, setting.cluster
    ranks, _ = expert_members(plan, coordinates_of(plan, setting.first_rank(stage)))
    fabrics: dict[Holder, int] = {}
    for rank, at in ranks.items():
        index, node = cluster.locate(rank)
        place = expert_coordinates(plan, at)
        fabrics[place.ep, place.edp] = node // cluster.groups[index].domain_nodes
    return make_comm_group(cluster, sorted(ranks)), fabrics


def _exchange_s(
    setting: PlacedPlan, tensor: MovedTensor, element: float, group: CommGroup, fabrics: Mapping[Holder, int]
) -> float:
    """Return the seconds of the exchange of one tensor whose elements have so many bytes."""
    fabric_rate = group.intra_link.bandwidth_bytes_per_s * group.intra_link.efficiency
    busy_s: defaultdict[tuple[str, Holder], float] = defaultdict(float)
    moved: defaultdict[Holder, float] = defaultdict(float)
    latency_s = group.intra_link.latency_s
    for (sender, receiver), numel in tensor.routes.items():
        rate, message_s = fabric_rate, group.fabric_message_s
        if fabrics[sender] != fabrics[receiver]:
            rate, message_s, latency_s = group.network_bytes_per_s, group.network_message_s, group.network_latency_s
        for way, end in (("out", sender), ("in", receiver)):
            busy_s[way, end] += numel * element / rate + message_s
            moved[end] += numel * element
    start_s = COLLECTIVE_START_S + SIMPLE_PROTOCOL_LATENCY_FACTOR * latency_s
    copied = COPIES_OF_MOVED * max(moved.values())
    return start_s + max(busy_s.values()) + stream_s(setting.device(tensor.stage), copied, COPY_KERNELS)
