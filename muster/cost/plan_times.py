"""How long every instruction of a plan's Program takes on a cluster."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2, prod
from typing import NamedTuple

from muster.cost.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    broadcasts_s,
    make_group,
    message_s,
    reduce_scatter_s,
)
from muster.cost.kernels import matmul_s, stream_s, sustained_flops_per_s
from muster.cost.layer_time import LayerPasses, LayerSetting, embedding_passes, head_passes, layer_passes
from muster.cost.measured import measured_times
from muster.cost.op_times import Hop, OpTimes
from muster.cost.spent import CONTENTION, Spent
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec, LinkSpec
from muster.spec.errors import InfeasibleError
from muster.spec.mesh import axis_sizes
from muster.spec.model import ModelSpec, layer_parameters, stage_parameters
from muster.spec.plan import Mesh, Plan, Strategy
from muster.spec.software import Software
from muster.spec.workload import Workload

OPTIMIZER_BYTES = 30
"""AdamW reads and writes master weight and two moments in float32, reads the gradient, and writes the weight that the
passes use: 3 · 8 + 4 + 2 for each number (arXiv:1711.05101, algorithm 2)."""
_LARGE_BYTES = 2**26
"""Groups are compared by how long so much takes."""
NORM_BYTES = 4
"""The gradients' norm reads each once."""
WAITING = 0.01
"""Share of the passes that ranks lose for each doubling of nodes because they wait for the slowest: the same plan takes
1.0-1.3 % longer on twice the nodes in Megatron-LM's table 2 (arXiv:2104.04473) and llm-foundry's tables of A100."""
STEP_HOST_S = 5e-3
"""Of the host, once a step: the optimizer's and the loop's own Python, as far as it can't run ahead of the device
because the gradients' norm is waited for."""


def plan_times(
    model: ModelSpec, plan: Plan, workload: Workload, cluster: ClusterSpec, software: Software | None = None
) -> OpTimes:
    """Seconds of each (kind, stage) of the plan's Program, and of each hop between stages.

    Ranks are those of the plan's mesh, laid on the cluster's devices in order. Raises InfeasibleError where the cluster
    has fewer devices, ConfigError where a device's rates are unknown. On a machine that was measured Muster itself
    computes (`measured_times`).
    """
    if cluster.device.rates is not None:
        return measured_times(model, plan, workload, cluster.device.rates)
    if plan.world_size > cluster.num_devices:
        raise InfeasibleError(
            f"the plan needs {plan.world_size} devices, but {cluster.name or 'the cluster'} has {cluster.num_devices}"
        )
    software = software or Software()
    setting = _PlanSetting(model, plan, workload, cluster, software, _known(model, workload.seq_len, cluster, software))
    seconds: dict[tuple[str, int], float] = {}
    exposed_s: dict[tuple[str, int], dict[str, float]] = {}
    held = [0.0] * plan.pp
    alike: dict[tuple, StageTimes] = {}
    for stage in range(plan.num_stages):
        key = setting.signature(stage)
        at = alike.get(key) or alike.setdefault(key, StageTimes(setting, stage))
        for kind, time_s in at.seconds.items():
            seconds[kind, stage] = time_s
        for kind, waits_s in at.waits_s.items():
            exposed_s[kind, stage] = waits_s
        seconds.update({(kind, stage): time_s for kind, time_s in _between_stages(setting, stage, at)})
        held[setting.placement[stage]] += at.owned_numel
    if plan.spread_vocab:
        seconds.update(_word_times(setting))
    world = setting.group(0, ((1, plan.world_size),))
    most, device = max(held), cluster.device
    seconds["NORM", -1] = all_reduce_s(world, 32) + stream_s(device, NORM_BYTES * most)
    seconds["STEP", -1] = STEP_HOST_S + stream_s(device, OPTIMIZER_BYTES * most)
    processes = tuple(plan.mesh(rank).ranks for rank in range(plan.pp)) if device.shared_cores else ()
    return OpTimes(seconds, 0.0, device.shared_cores, processes, hops=dict(_hops(setting)), exposed_s=exposed_s)


@dataclass(frozen=True)
class _PlanSetting:
    """What all stages share."""

    model: ModelSpec
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    software: Software
    known: "_Known"

    @cached_property
    def num_nodes(self) -> int:
        """Nodes that the plan's ranks fill."""
        per_node = self.cluster.groups[0].devices_per_node
        return max(1, min(self.cluster.num_nodes, -(-self.plan.world_size // per_node)))

    @property
    def alone(self) -> Group:
        """A rank by itself."""
        return self.group(0, ())

    @cached_property
    def is_flat(self) -> bool:
        """Whether it doesn't matter which nodes ranks are on: nodes are alike, and so are the links between them."""
        cluster = self.cluster
        return cluster.is_uniform and not cluster.tiers and cluster.node_bandwidth_bytes_per_s is None

    @cached_property
    def _period(self) -> int:
        """Groups that begin so many ranks apart lie alike: the devices of a fabric, where all are alike."""
        return self.cluster.groups[0].domain_devices if self.is_flat else self.cluster.num_devices

    def group(self, first: int, steps: tuple[tuple[int, int], ...]) -> Group:
        """Where the ranks lie that go out from `first` by (stride, number) on some axes."""
        steps = tuple(step for step in steps if step[1] > 1)
        key: tuple = (first % self._period, steps) if steps else ()
        if not steps and not self.known.groups.get(key):
            self.known.groups[key] = Group(1, 1, 1, self.cluster.groups[0].intra, None)
        if key not in self.known.groups:
            ranks = [first % self._period]
            for stride, size in steps:
                ranks = [rank + stride * index for index in range(size) for rank in ranks]
            self.known.groups[key] = make_group(self.cluster, sorted(ranks))
        return self.known.groups[key]

    def pair(self, one: int, other: int) -> Group:
        """Where two ranks lie."""
        low, high = sorted((one, other))
        return self.group(low, ((high - low, 2),)) if low != high else self.alone

    @cached_property
    def _first_ranks(self) -> list[int]:
        if self.plan.is_uniform:
            stride = _strides(axis_sizes(self.plan))["pp"]
            return [pp_rank * stride for pp_rank in range(self.plan.pp)]
        sizes = [self.plan.mesh(pp_rank).ranks for pp_rank in range(self.plan.pp)]
        return [sum(sizes[:pp_rank]) for pp_rank in range(self.plan.pp)]

    @cached_property
    def depth(self) -> int:
        """Stages of one replica."""
        return self.plan.depth

    @cached_property
    def placement(self) -> list[int]:
        """The pipeline rank of each stage."""
        return [self.plan.pp_rank(stage) for stage in range(self.plan.num_stages)]

    def first_rank(self, stage: int) -> int:
        """The first world rank that holds a stage."""
        return self._first_ranks[self.placement[stage]]

    def signature(self, stage: int) -> tuple:
        """Equal for stages whose times are: they lie alike, and have layers alike."""
        plan, pp_rank = self.plan, self.placement[stage]
        place = self._first_ranks[pp_rank] % self._period if plan.is_uniform else pp_rank
        layers = plan.layers(stage, self.model.num_layers)
        kinds = len(layers) if self._layers_alike else tuple(self.layer_kind(layer) for layer in layers)
        return stage % self.depth == 0, (stage + 1) % self.depth == 0, place, kinds

    @cached_property
    def _layers_alike(self) -> bool:
        return self.known.layers_alike and not self.plan.overrides

    def layer_kind(self, layer: int) -> "_Kind":
        """What a layer's times depend on besides where it lies."""
        model = self.model
        return _Kind(
            self.plan.strategy(layer),
            model.has_experts(layer),
            model.has_linear_attention(layer),
            model.window(layer),
        )

    @cached_property
    def _axes(self) -> list[tuple[dict[str, int], dict[str, int]]]:
        """Sizes and strides of the axes, by pipeline rank."""
        plan, found = self.plan, []
        for pp_rank in range(1 if plan.is_uniform else plan.pp):
            sizes = axis_sizes(plan, pp_rank) if plan.is_uniform else axis_sizes(plan, pp_rank) | {"pp": 1}
            found.append((sizes, _strides(sizes)))
        return found * plan.pp if plan.is_uniform else found

    def axis_group(self, stage: int, *axes: str) -> Group:
        """The slowest of the groups of a stage's ranks that differ on these axes alone: the others wait for it."""
        sizes, strides = self._axes[self.placement[stage]]
        steps = tuple((strides[axis], sizes[axis]) for axis in axes)
        first = self.first_rank(stage)
        if self.is_flat:
            return self.group(first, steps)
        key = "slowest", first, steps, tuple(sizes.items())
        if key not in self.known.groups:
            found = [self.group(first + offset, steps) for offset in self._offsets(stage, axes)]
            self.known.groups[key] = max(found, key=lambda group: all_reduce_s(group, _LARGE_BYTES))
        return self.known.groups[key]

    def _offsets(self, stage: int, without: Sequence[str] = ()) -> list[int]:
        """From a stage's first rank to its others that don't differ from it on some axes."""
        sizes, strides = self._axes[self.placement[stage]]
        offsets = [0]
        for axis, size in sizes.items():
            if axis not in without and axis != "pp":
                offsets = [offset + strides[axis] * index for offset in offsets for index in range(size)]
        return offsets

    def device(self, stage: int) -> DeviceSpec:
        """The slowest of a stage's devices."""
        first = self.first_rank(stage)
        if self.cluster.is_uniform:
            return self.cluster.groups[0].device
        sizes, strides = self._axes[self.placement[stage]]
        key = first, tuple(sizes.items()), tuple(strides.items())
        if key not in self.known.devices:
            devices = {id(one): one for one in (self._device_at(first + offset) for offset in self._offsets(stage))}
            self.known.devices[key] = min(
                devices.values(), key=lambda one: sustained_flops_per_s(one, self.plan.precision)
            )
        return self.known.devices[key]

    def _device_at(self, rank: int) -> DeviceSpec:
        return self.cluster.group_of(rank).device

    def between(self, source: int, target: int) -> Group:
        """The slowest pair of ranks of two stages that send to each other."""
        one, other = self.first_rank(source), self.first_rank(target)
        if self.is_flat or not self.plan.is_uniform:
            return self.pair(one, other)
        key = "pair", min(one, other), max(one, other), tuple(self._axes[0][0].items())
        if key not in self.known.groups:
            found = [self.pair(one + offset, other + offset) for offset in self._offsets(source)]
            self.known.groups[key] = max(found, key=lambda pair: message_s(pair, _LARGE_BYTES))
        return self.known.groups[key]

    def expert_group(self, stage: int) -> Group:
        """Expert parallelism folds into the ranks of a stage: neighbours, beyond those that share an expert's
        tensors (arXiv:2504.14960)."""
        mesh = self.plan.mesh(stage)
        return self.group(self.first_rank(stage), ((mesh.etp, mesh.ep),))


@dataclass(frozen=True, slots=True)
class _Known:
    """What many plans for a model on a cluster share."""

    groups: dict[tuple, Group]
    passes: dict[tuple, LayerPasses]
    numels: dict[tuple, float]
    devices: dict[tuple, DeviceSpec]
    layers_alike: bool
    """Of the model, whatever the plan does with single ones."""


_RECENT: deque[tuple[ModelSpec, int, ClusterSpec, Software, _Known]] = deque(maxlen=8)


def _known(model: ModelSpec, seq_len: int, cluster: ClusterSpec, software: Software) -> _Known:
    """What is known from recent calls for the same objects: a search asks for thousands of plans."""
    for its_model, its_len, its_cluster, its_software, known in _RECENT:
        if its_model is model and its_len == seq_len and its_cluster is cluster and its_software == software:
            return known
    layers = range(model.num_layers)
    kinds = {(model.has_experts(one), model.has_linear_attention(one), model.window(one)) for one in layers}
    _RECENT.append((model, seq_len, cluster, software, _Known({}, {}, {}, {}, len(kinds) == 1)))
    return _RECENT[-1][-1]


class _Kind(NamedTuple):
    """What tells layers apart that take different times."""

    strategy: Strategy
    experts: bool
    linear_attention: bool
    window: int | None


def _strides(sizes: dict[str, int]) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in reversed(sizes):
        strides[axis], stride = stride, stride * sizes[axis]
    return strides


class StageTimes:
    """The passes and collectives of one stage."""

    def __init__(self, setting: _PlanSetting, stage: int) -> None:
        plan = setting.plan
        self.setting, self.stage, self.mesh = setting, stage, plan.mesh(stage)
        self.layers = plan.layers(stage, setting.model.num_layers)
        self.device = setting.device(stage)
        self.launch_s = 0.0 if setting.software.graphs else self.device.launch_s
        self.zero = plan.strategy(self.layers.start).zero
        self.data = setting.axis_group(stage, "cp", "dp_shard")
        self.replicas = setting.axis_group(stage, "dp_replicate")
        self.groups = setting.axis_group(stage, "tp"), setting.axis_group(stage, "cp"), setting.expert_group(stage)

    @cached_property
    def at(self) -> LayerSetting:
        """What its layers' times depend on."""
        plan = self.setting.plan
        return LayerSetting(
            self.setting.model,
            self.device,
            self.setting.software,
            plan.strategy(self.layers.start),
            plan.precision,
            plan.rows(self.stage),
            self.setting.workload.seq_len,
            *self.groups,
            self.mesh.etp,
            self.data.size > 1,
        )

    @cached_property
    def _spent(self) -> dict[str, Spent]:
        return dict(self.passes())

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By kind: the passes, and what happens once a step."""
        slower = 1 + WAITING * log2(self.setting.num_nodes)
        found = {kind: slower * spent.seconds(self.launch_s) for kind, spent in self._spent.items()}
        return found | dict(self.step_kinds(found))

    @cached_property
    def waits_s(self) -> dict[str, dict[str, float]]:
        """By pass: axis → what is waited for."""
        return {kind: spent.waits_s for kind, spent in self._spent.items()}

    # -- passes

    def passes(self) -> Iterator[tuple[str, Spent]]:
        """(kind, what it spends) of F, B, I and W."""
        forward, inputs, weights, again = self._whole()
        sharded = self.data.size > 1 and self.zero != "z1"
        gather_s = self._layer_gather_s() * len(self.layers) if sharded and self.zero == "z3" else 0.0
        reduce_s = self._layer_reduce_s() * len(self.layers) if sharded else 0.0
        backward = again + inputs + weights
        yield "F", self._with_traffic(forward, gather_s)
        # A layer that is computed again stays gathered for its backward, unless parts are gathered one by one.
        gathers = 1 + (self.setting.software.gathers_parts and again.compute_s > 0)
        yield "B", self._with_traffic(backward, gathers * gather_s + reduce_s)
        yield "I", self._with_traffic(again + inputs, gathers * gather_s)
        yield "W", self._with_traffic(weights, reduce_s)

    def _whole(self) -> tuple[Spent, Spent, Spent, Spent]:
        """All that the stage computes of one micro-batch: layers that are alike are costed once."""
        model, plan = self.setting.model, self.setting.plan
        parts: list[LayerPasses] = []
        for kind, count in self._counts.items():
            one = self._layer_passes(kind)
            parts.append(LayerPasses(one.forward * count, one.inputs * count, one.weights * count, one.again * count))
        if not plan.spread_vocab:
            if plan.is_first(self.stage):
                parts.append(embedding_passes(self.at))
            if plan.is_last(self.stage):
                head = head_passes(self.at, model.vocab_size / self.mesh.tp)
                parts += [head] * (1 + model.mtp_layers)
        forward, inputs, weights, again = Spent(), Spent(), Spent(), Spent()
        for part in parts:
            forward, inputs = forward + part.forward, inputs + part.inputs
            weights, again = weights + part.weights, again + part.again
        return forward, inputs, weights, again

    @cached_property
    def _counts(self) -> dict["_Kind", int]:
        """The kinds of its layers, and how many there are of each."""
        model, plan = self.setting.model, self.setting.plan
        layers = list(self.layers)
        if plan.is_last(self.stage):
            layers += [model.num_layers - 1] * model.mtp_layers
        counts: dict[_Kind, int] = {}
        for layer in layers:
            kind = self.setting.layer_kind(layer)
            counts[kind] = counts.get(kind, 0) + 1
            self._example.setdefault(kind, layer)
        return counts

    @cached_property
    def _example(self) -> dict["_Kind", int]:
        return {}

    def _layer_passes(self, kind: "_Kind") -> LayerPasses:
        known, plan = self.setting.known.passes, self.setting.plan
        places = tuple(map(id, (self.device, *self.groups)))
        key = kind, plan.precision, plan.rows(self.stage), self.mesh.etp, self.data.size > 1, places
        if key not in known:
            known[key] = layer_passes(replace(self.at, strategy=kind.strategy), self._example[kind])
        return known[key]

    def _with_traffic(self, spent: Spent, travels_s: float) -> Spent:
        """A pass beside which parameters are gathered, or gradients reduced, layer by layer: the first one's, or the
        last one's, is waited for, the others travel beside the compute."""
        if travels_s <= 0:
            return spent
        total = spent + Spent()
        if self.setting.software.gathers_parts:
            total.wait("dp", travels_s)
            return total
        first_s = travels_s / max(1, len(self.layers))
        total.wait("dp", first_s)
        total.beside("dp", travels_s - first_s, spent.seconds(self.launch_s))
        return total

    # -- parameters

    @cached_property
    def numel(self) -> float:
        """Numbers of the stage's parameters on one rank, before data parallelism cuts them."""
        plan, model = self.setting.plan, self.setting.model
        ends = stage_parameters(model, range(0), plan.is_first(self.stage), plan.is_last(self.stage))
        return sum(self._part(name, shape) for name, shape in ends) + sum(map(self._layer_numel, self.layers))

    @property
    def layer_numel(self) -> float:
        """The same of its first layer."""
        return self._layer_numel(self.layers[0]) if len(self.layers) else 0.0

    def _layer_numel(self, layer: int) -> float:
        model, known = self.setting.model, self.setting.known.numels
        mesh = self.mesh
        key = model.has_experts(layer), model.has_linear_attention(layer), mesh.tp, mesh.ep, mesh.etp
        if key not in known:
            known[key] = sum(self._part(name, shape) for name, shape in layer_parameters(model, layer))
        return known[key]

    def _part(self, name: str, shape: Sequence[int]) -> float:
        if len(shape) == 1:
            return prod(shape)
        if ".experts." in name:
            return prod(shape) / (self.mesh.ep * self.mesh.etp)
        words = name in ("embed.weight", "head.weight")
        return prod(shape) / self.mesh.tp / (self.setting.plan.pp if words and self.setting.plan.spread_vocab else 1)

    @property
    def owned_numel(self) -> float:
        """Numbers that the rank's optimizer updates."""
        return self.numel / self.data.size

    def _layer_gather_s(self) -> float:
        """z3: a layer's parameters, in the dtype of the compute."""
        return all_gather_s(self.data, self.layer_numel * self.at.act) + self._parts_s()

    def _parts_s(self) -> float:
        """Where each rank's part of each parameter is copied by itself: the host's time for that, and the latencies of
        a collective for each."""
        if not self.setting.software.gathers_parts:
            return 0.0
        tensors = sum(1 for _ in layer_parameters(self.setting.model, 0))
        return tensors * (self.data.size * self.device.launch_s + all_gather_s(self.data, 1.0))

    def _layer_reduce_s(self) -> float:
        """z2, z3: a layer's gradients, and their sum over replicas."""
        size = self.layer_numel * self.setting.software.gradient_bytes
        return reduce_scatter_s(self.data, size) + all_reduce_s(self.replicas, size / self.data.size) + self._parts_s()

    # -- once a step

    def step_kinds(self, seconds: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """(kind, seconds) of what happens to a stage once a step, beside passes that take `seconds`."""
        software = self.setting.software
        gradients = self.numel * software.gradient_bytes
        reduce_s = reduce_scatter_s(self.data, gradients) + all_reduce_s(self.replicas, gradients / self.data.size)
        gather = broadcasts_s if software.broadcast_updates else all_gather_s
        gather_s = gather(self.data, self.numel * self.at.act)
        buckets = max(1, len(self.layers))
        beside_s = seconds["B"] if software.overlap_reduce else 0.0
        yield "REDUCE", _left_s(reduce_s, beside_s, buckets)
        yield "UNSHARD", _left_s(gather_s, seconds["F"] if software.overlap_gather else 0.0, buckets)
        norms = 2 * self.setting.model.hidden_size * (len(self.layers) + 1)
        yield "SYNC", all_reduce_s(self.at.tp, norms * software.gradient_bytes)


def _between_stages(setting: _PlanSetting, stage: int, at: StageTimes) -> Iterator[tuple[str, float]]:
    """(kind, seconds) of what a stage adds up with another once a step; `at`: a stage whose times are the same."""
    plan, gradient_bytes = setting.plan, setting.software.gradient_bytes
    if stage % setting.depth and (stage + 1) % setting.depth and plan.replicas == 1:
        return
    words = setting.model.vocab_size * setting.model.hidden_size / at.mesh.tp
    other = plan.tied_stage(stage)
    if other is not None:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(other))
        yield "TIE", all_reduce_s(pair, words * gradient_bytes)
    if plan.replicas > 1 and stage < plan.depth:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(stage + plan.depth))
        yield "MERGE", all_reduce_s(pair, at.numel * gradient_bytes)


def _left_s(travels_s: float, beside_s: float, buckets: int) -> float:
    """What is left of something that travels in buckets beside a pass: the last bucket, what the pass doesn't hide, and
    what it slows the pass down."""
    if beside_s <= 0:
        return travels_s
    last_s = travels_s / buckets
    hidden_s = min(travels_s - last_s, beside_s)
    return travels_s - hidden_s + CONTENTION * hidden_s


def _hops(setting: _PlanSetting) -> Iterator[tuple[tuple[int, int], Hop]]:
    """(sender's stage, receiver's stage) → the transfer between them: the hidden state forward, its gradient back."""
    plan, model = setting.plan, setting.model
    known: dict[tuple, Hop] = {}
    for stage in range(len(setting.placement) - 1):
        if (stage + 1) % setting.depth == 0 or setting.placement[stage] == setting.placement[stage + 1]:
            continue
        for source, target in ((stage, stage + 1), (stage + 1, stage)):
            mesh: Mesh = plan.mesh(source)
            sp = plan.strategy(plan.layers(source, model.num_layers).start).sp
            pair = setting.between(source, target)
            key = id(pair), mesh, sp
            if key not in known:
                tokens = plan.rows(source) * setting.workload.seq_len / mesh.cp / (mesh.tp if sp else 1)
                size = tokens * model.hidden_size * max(2, _bytes(plan))
                known[key] = Hop(message_s(pair, size), size / _wire(pair))
            yield (source, target), known[key]


def _bytes(plan: Plan) -> int:
    return {"fp64": 8, "fp32": 4}.get(plan.precision, 2)


def _wire(group: Group) -> float:
    link: LinkSpec = group.intra
    fabric = link.bandwidth_bytes_per_s * link.efficiency
    return fabric if group.domains == 1 else min(fabric, group.network_bytes_per_s)


def _word_times(setting: _PlanSetting) -> Iterator[tuple[tuple[str, int], float]]:
    """Where the vocabulary is spread over the pipeline (arXiv:2411.05288): each rank looks up and scores its part of
    the words; what it gives the others travels beside its passes."""
    plan, model = setting.plan, setting.model
    words = model.vocab_size / plan.pp
    pipeline = setting.axis_group(0, "pp") if plan.is_uniform else setting.alone
    for rank in range(plan.pp):
        stage = next(stage for stage in range(plan.num_stages) if plan.pp_rank(stage) == rank)
        at = StageTimes(setting, stage).at
        hidden, wide = at.hidden_bytes, at.wide
        score_s = matmul_s(at.device, at.tokens, words, model.hidden_size, wide)
        logits_s = stream_s(at.device, 3 * at.act * at.tokens * words, 2)
        yield ("E", stage), stream_s(at.device, 2 * hidden / plan.pp)
        yield ("S", stage), 2 * score_s + logits_s
        yield ("T", stage), score_s + stream_s(at.device, at.act * at.tokens * words)
        yield ("EW", stage), stream_s(at.device, 3 * hidden / plan.pp)
        for kind, size in (("EC", hidden), ("HC", hidden), ("SC", 2 * hidden), ("DC", hidden)):
            yield (kind, stage), all_reduce_s(pipeline, size) / 2
