"""How many parameters a stage has on a rank, and how long they and their gradients travel between ranks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

from muster.cost.collectives import all_gather_s, all_reduce_s, broadcasts_s, reduce_scatter_s
from muster.cost.kernels import stream_s
from muster.cost.memory import compute_bytes
from muster.cost.places import PlanSetting
from muster.cost.spent import CONTENTION
from muster.spec.model import layer_parameters, stage_parameters

_WIDE = 4
"""Bytes of a number in float32."""


class StageParameters:
    """Of the slowest of a stage's ranks."""

    def __init__(self, setting: PlanSetting, stage: int) -> None:
        self.plan, self.model, self.software, self.known = setting.plan, setting.model, setting.software, setting.known
        self.stage, self.mesh, self.place = stage, setting.mesh(stage), setting.place(stage)
        self.data, self.replicas = self.place.data, self.place.replicas
        self.layers = setting.layers[stage % setting.depth]
        self.zero = self.plan.strategy(self.layers.start).zero
        self.number_bytes = compute_bytes(self.plan.precision)
        """As the passes use them."""

    @cached_property
    def numel(self) -> float:
        """Numbers of the stage's parameters on one rank, before data parallelism cuts them."""
        plan, known, mesh = self.plan, self.known, self.mesh
        first, last = plan.is_first(self.stage), plan.is_last(self.stage)
        key = "ends", first, last, mesh.tp, mesh.ep, mesh.etp, plan.spread_vocab and plan.pp
        if key not in known.numels:
            ends = stage_parameters(self.model, range(0), first, last)
            known.numels[key] = sum(self._part(name, shape) for name, shape in ends)
        layers = self.layers[:1] if known.layers_alike else self.layers
        return known.numels[key] + sum(map(self._layer_numel, layers)) * len(self.layers) / max(1, len(layers))

    def _layer_numel(self, layer: int) -> float:
        model, known, mesh = self.model, self.known.numels, self.mesh
        key = model.has_experts(layer), model.has_linear_attention(layer), mesh.tp, mesh.ep, mesh.etp
        if key not in known:
            known[key] = sum(self._part(name, shape) for name, shape in layer_parameters(model, layer))
        return known[key]

    def _part(self, name: str, shape: Sequence[int]) -> float:
        """Of one parameter, the rank's share."""
        if len(shape) == 1:
            return prod(shape)
        if ".experts." in name:
            return prod(shape) / (self.mesh.ep * self.mesh.etp)
        words = name in ("embed.weight", "head.weight")
        return prod(shape) / self.mesh.tp / (self.plan.pp if words and self.plan.spread_vocab else 1)

    @property
    def owned_numel(self) -> float:
        """Numbers that the rank's optimizer updates."""
        return self.numel / self.data.size

    def travel_s(self, layers: range) -> tuple[float, float]:
        """Of one micro-batch, beside the passes of some layers: z3 gathers their parameters, in the dtype of the
        compute; z2 and z3 reduce their gradients, and add these up over replicas."""
        gather_s = reduce_s = 0.0
        if self.zero == "z1":
            return gather_s, reduce_s
        # A kind of layer is told by the first layer that is of it.
        for kind, count in Counter(self.known.layers[layers.start : layers.stop]).items():
            numel = self._layer_numel(kind)
            if self.zero == "z3":
                gather_s += count * (all_gather_s(self.data, numel * self.number_bytes) + self._parts_s())
            size = numel * self.software.gradient_bytes
            replicas_s = all_reduce_s(self.replicas, size / self.data.size)
            reduce_s += count * (reduce_scatter_s(self.data, size) + replicas_s + self._parts_s())
        return gather_s, reduce_s

    def _parts_s(self) -> float:
        """Where each rank's part of each parameter is copied by itself: the host's time for that, and the latencies of
        a collective for each."""
        if not self.software.gathers_parts:
            return 0.0
        tensors = sum(1 for _ in layer_parameters(self.model, 0))
        return tensors * (self.data.size * self.place.device.launch_s + all_gather_s(self.data, 1.0))

    def step_kinds(self, passes_s: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """(kind, seconds) of what travels once a step, beside passes that take `passes_s`."""
        software = self.software
        gradients = self.numel * software.gradient_bytes
        reduce_s = reduce_scatter_s(self.data, gradients) + all_reduce_s(self.replicas, gradients / self.data.size)
        if software.reduces_whole:
            reduce_s = self._whole_reduce_s()
        gather = broadcasts_s if software.broadcast_updates else all_gather_s
        gather_s = gather(self.data, self.numel * self.number_bytes)
        buckets = max(1, len(self.layers))
        beside_s = passes_s["B"] if software.overlap_reduce else 0.0
        yield "REDUCE", _left_s(reduce_s, beside_s, buckets)
        yield "UNSHARD", _left_s(gather_s, passes_s["F"] if software.overlap_gather else 0.0, buckets)
        norms = 2 * self.model.hidden_size * (len(self.layers) + 1)
        yield "SYNC", all_reduce_s(self.place.tp, norms * software.gradient_bytes)

    def _whole_reduce_s(self) -> float:
        """Of gradients that are put together (read and written), divided, cast to float32, all-reduced, cast back and
        copied to where they came from."""
        if self.data.size * self.replicas.size == 1:
            return 0.0
        numel, size = self.numel, self.software.gradient_bytes
        copies_s = stream_s(self.place.device, numel * (6 * size + 2 * (size + _WIDE)))
        return copies_s + all_reduce_s(self.data, numel * _WIDE) + all_reduce_s(self.replicas, numel * _WIDE)


def _left_s(travels_s: float, beside_s: float, buckets: int) -> float:
    """What is left of something that travels in buckets beside a pass: the last bucket, what the pass doesn't hide, and
    what it slows the pass down."""
    if beside_s <= 0:
        return travels_s
    last_s = travels_s / buckets
    hidden_s = min(travels_s - last_s, beside_s)
    return travels_s - hidden_s + CONTENTION * hidden_s
