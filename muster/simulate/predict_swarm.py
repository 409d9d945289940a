"""Prediction of a step of a swarm: each device of a cluster is a peer, and the trainer is on the first node."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

from muster.config.optim_config import OptimConfig
from muster.config.swarm_config import SwarmConfig
from muster.config.swarm_rules import cut_into_stages
from muster.cost.memory.forecast import forecast_memory
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.cost.time.collectives import CommGroup, all_reduce_s, make_comm_group, p2p_s
from muster.cost.time.plan_times import plan_times
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import stage_layouts
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.swarm.step_passes import pass_order
from muster.schedule.swarm.wiring import PeerTimes, StageWiring, choose_move, stage_for
from muster.simulate.swarm import SimulatedPeer, SwarmSimulator, settled_step, stage_rate
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.units import pluralize
from muster.spec.workload import Workload

_PROBE_BYTES = 1 << 20
_TOKEN_BYTES = 8
_KEPT_GRADIENTS = 2
"""Copies of its gradients that a peer keeps beside those of a backward: of the micro-batch before, which may not count
yet, and the step's sum."""


@dataclass(frozen=True)
class PredictedPeer:
    """A peer in a step."""

    device: str
    stage: int
    micro_batches: int
    forward_s: float
    backward_s: float
    pass_bytes: int
    """Bytes of hidden states, gradients and inputs that pass its line, both ways together."""
    sum_bytes: int
    """Bytes that it sends in the sum of its stage's gradients."""
    memory_bytes: int
    """Parameters, optimizer state, gradients of the step and of micro-batches apart, and the activations of the
    micro-batches that it keeps at once."""
    capacity_bytes: int | None
    """Memory of its device; None where it is unknown."""

    @property
    def fits(self) -> bool | None:
        """True where its memory is enough; None where that of the device is unknown."""
        return None if self.capacity_bytes is None else self.memory_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class SwarmPrediction:
    """A step of a swarm whose peers all stay."""

    model: ModelSpec
    plan: Plan
    """The trainer's plan, cut into the swarm's stages."""
    workload: Workload
    cluster: ClusterSpec
    step_time_s: float
    passes_s: float
    """Seconds until all gradients of the last stage to end count."""
    sums_s: float
    """Seconds after that until all stages have their sums."""
    update_s: float
    peers: tuple[PredictedPeer, ...]
    bounds_s: Mapping[str, float]
    """Least time of a part of the step by what limits it: passes by each stage's peers without ever waiting, and by the
    trainer's line; sums by the slowest link of a stage."""

    @property
    def binding(self) -> str:
        """The part of `bounds_s` that takes longest."""
        return max(self.bounds_s, key=self.bounds_s.__getitem__)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all peers."""
        return self.workload.tokens_per_step / self.step_time_s

    @property
    def fits(self) -> bool | None:
        """True if every peer's memory is enough; None if that of a device is unknown."""
        found = [peer.fits for peer in self.peers]
        return False if False in found else None if None in found else True

    def to_json(self) -> dict[str, Any]:
        """Return plain data with every key."""
        return {
            "step_time_s": self.step_time_s,
            "passes_s": self.passes_s,
            "sums_s": self.sums_s,
            "update_s": self.update_s,
            "tokens_per_s": self.tokens_per_s,
            "binding": self.binding,
            "bounds_s": dict(self.bounds_s),
            "fits": self.fits,
            "peers": [vars(peer) | {"fits": peer.fits} for peer in self.peers],
        }


def predict_swarm(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    swarm: SwarmConfig,
    optim: OptimConfig | None = None,
) -> SwarmPrediction:
    """Predict a step of a swarm whose trainer has a plan of one rank, and whose peers are the cluster's devices.

    The passes are simulated with the trainer's own wiring (`SwarmSimulator`); peers join in the order of the cluster
    and have moved as rebalancing lets them. Raises InfeasibleError where there are fewer devices than stages, or where
    they share the cores of a machine.
    """
    stages = swarm.stages
    if cluster.num_devices < stages:
        raise InfeasibleError(
            f"the cluster has {pluralize(cluster.num_devices, 'device')}, fewer than the {stages} stages that swarms"
            " serve: expected a device for each, or a lower swarm.stages"
        )
    if cluster.device.shared_cores:
        raise InfeasibleError(
            "peers of a swarm that share the cores of a machine aren't predicted: give a cluster of devices"
        )
    plan = cut_into_stages(plan, stages)
    program = build_program(plan, model, workload, optim=optim)
    kinds = {index: _StageTimes(model, plan, workload, group, optim) for index, group in enumerate(cluster.groups)}
    places = [cluster.locate(rank) for rank in range(cluster.num_devices)]
    costs = [[kinds[group].micro_batch_s(stage) for stage in range(stages)] for group, _ in places]
    served = assign_stages(costs, stages, moves=swarm.rebalance_every > 0)
    lines = [_line(cluster, rank, places[rank][1] != places[0][1]) for rank in range(cluster.num_devices)]
    peers = [
        SimulatedPeer(str(rank), stage, *kinds[places[rank][0]].passes_s(stage), *lines[rank])
        for rank, stage in enumerate(served)
    ]
    carried = _carried_bytes(model, plan, workload)
    found = settled_step(SwarmSimulator(pass_order(program), peers, carried, swarm.in_flight, swarm.wiring))
    gradients = _gradient_bytes(model, plan)
    sums_s = {}
    for stage in range(stages):
        group = make_comm_group(cluster, [rank for rank, own in enumerate(served) if own == stage])
        sums_s[stage] = all_reduce_s(group, gradients[stage])
    passes_s = max(found.stage_s.values())
    after_s = max(found.stage_s[stage] + sums_s[stage] for stage in range(stages)) - passes_s
    update_s = max(kinds[places[rank][0]].update_s(stage) for rank, stage in enumerate(served))
    num_micro_batches = plan.num_micro_batches(workload)
    bounds_s = {
        f"the peers of stage {stage}": num_micro_batches / stage_rate([peer for peer in peers if peer.stage == stage])
        for stage in range(stages)
    }
    if rates := [peer.bytes_per_s for peer in peers if peer.uses_trainer_line]:
        bounds_s["the trainer's line"] = max(found.trainer_bytes.values()) / max(rates)
    bounds_s["the sums of gradients"] = max(sums_s.values())
    members = Counter(served)
    own = [
        PredictedPeer(
            device=cluster.groups[places[rank][0]].device.name,
            stage=stage,
            micro_batches=found.done[peer.name]["B"],
            forward_s=peer.forward_s,
            backward_s=peer.backward_s,
            pass_bytes=found.peer_bytes[peer.name],
            sum_bytes=2 * (members[stage] - 1) * gradients[stage] // members[stage],
            memory_bytes=kinds[places[rank][0]].memory_bytes(stage, found.most_kept[peer.name])
            + _KEPT_GRADIENTS * gradients[stage],
            capacity_bytes=cluster.groups[places[rank][0]].device.memory_bytes,
        )
        for rank, (peer, stage) in enumerate(zip(peers, served, strict=True))
    ]
    step_s = passes_s + after_s + update_s
    return SwarmPrediction(model, plan, workload, cluster, step_s, passes_s, after_s, update_s, tuple(own), bounds_s)


def assign_stages(costs_s: Sequence[Sequence[float]], stages: int, moves: bool) -> list[int]:
    """Return the stage that each peer serves; `costs_s`: seconds of a micro-batch by peer and stage.

    Peers join one after another before any is measured, and then move, one at a time, from the fastest stage to the
    slowest while that pays, as those with the shortest and the longest queue (SWARM, arXiv:2301.11913 §3.2).
    """
    served: list[int] = []
    for _ in costs_s:
        counts = {stage: served.count(stage) for stage in range(stages)}
        served.append(stage_for(counts, {stage: float(count) for stage, count in counts.items()}))
    for _ in costs_s if moves else ():
        wirings = {stage: StageWiring("throughput", Random(0)) for stage in range(stages)}
        for peer, stage in enumerate(served):
            wirings[stage].add(str(peer))
            wirings[stage].times[str(peer)] = PeerTimes({"F": costs_s[peer][stage], "B": 0.0})
        queues = {stage: -wiring.rate for stage, wiring in wirings.items()}
        if (move := choose_move(wirings, queues, lambda name: True)) is None:
            break
        name, served[int(name)] = move[0], move[1]
    return served


class _StageTimes:
    """Times and memory of the stages on a device of one group of the cluster."""

    def __init__(
        self, model: ModelSpec, plan: Plan, workload: Workload, group: NodeGroup, optim: OptimConfig | None
    ) -> None:
        alone = group.model_copy(update={"num_nodes": 1, "domain_nodes": 1, "devices_per_node": plan.pp})
        cluster = ClusterSpec(groups=(alone,))
        program = build_program(plan, model, workload, optim=optim)
        self._times = plan_times(model, plan, workload, cluster, optim=optim)
        self._forecast = forecast_memory(model, plan, workload, cluster, program, optim=optim).ranks
        self._held = [min(plan.pp - stage, plan.num_micro_batches(workload)) for stage in range(plan.pp)]
        """Micro-batches whose activations the forecast has: those of 1f1b, the schedule of every trainer's plan."""

    def passes_s(self, stage: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward."""
        forward, backward = (self._times.duration_s(Action(kind, stage, 0)) for kind in (Kind.F, Kind.B))
        return forward, backward

    def micro_batch_s(self, stage: int) -> float:
        """Return the seconds of both."""
        return sum(self.passes_s(stage))

    def update_s(self, stage: int) -> float:
        """Return the seconds of the optimizer's update."""
        return self._times.duration_s(Action(Kind.STEP))

    def memory_bytes(self, stage: int, kept: int) -> int:
        """Return the peak where activations of so many micro-batches are kept."""
        terms = self._forecast[stage].terms
        return terms.total + terms.activations * (max(kept, 1) - self._held[stage]) // self._held[stage]


def _line(cluster: ClusterSpec, rank: int, leaves: bool) -> tuple[float, float, bool]:
    """Return bandwidth and latency of a peer's line to the trainer on the first node, and whether that leaves it."""
    group: CommGroup = make_comm_group(cluster, [0, rank] if rank else [0])
    if not rank:
        return inf, 0.0, False
    start_s, probe_s = p2p_s(group, 1), p2p_s(group, _PROBE_BYTES)
    return _PROBE_BYTES / max(probe_s - start_s, 1e-12), start_s, leaves


def _carried_bytes(model: ModelSpec, plan: Plan, workload: Workload) -> dict[tuple[str, int], tuple[int, int]]:
    """Return the bytes to a peer and back of each pass, by kind and stage: hidden states and tokens with a forward,
    gradients of hidden states with a backward (`launch/swarm/driver.py`)."""
    tokens = plan.micro_batch_size * workload.seq_len
    hidden = tokens * model.boundary_size(1) * compute_bytes(plan.precision)
    last = plan.pp - 1
    found = {}
    for stage in range(plan.pp):
        inputs = tokens * _TOKEN_BYTES * ((stage == 0) + (stage == last))
        found["F", stage] = inputs + hidden * (stage > 0), hidden * (stage < last)
        found["B", stage] = hidden * (stage < last), hidden * (stage > 0)
    return found


def _gradient_bytes(model: ModelSpec, plan: Plan) -> list[int]:
    """Return the bytes of the gradients of each stage."""
    layouts = [stage_layouts(model, plan, stage, coordinates_of(plan, stage)) for stage in range(plan.pp)]
    return [master_bytes(plan.precision) * sum(layout.numel for layout in each) for each in layouts]
