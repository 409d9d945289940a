"""How long the passes of one stage take, and what it does once a step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import log2

from muster.cost.collectives import Group, all_gather_s, message_s
from muster.cost.known import LayerKind
from muster.cost.layer_parts import LayerPasses, LayerSetting
from muster.cost.layer_time import embedding_passes, head_passes, layer_passes
from muster.cost.places import PlanSetting
from muster.cost.spent import Spent
from muster.cost.stage_parameters import StageParameters

WAITING = 0.005
"""Share of the passes that ranks lose for each doubling of nodes because they wait for the slowest, where data-parallel
ranks meet once a step: beside what the collectives take, the same plan takes 0 to 0.4 % longer on twice the nodes in
bf16 and 0.5 to 1 % in fp8 (Llama 3 on 8 to 256 nodes of H100, github:NVIDIA/dgxc-benchmarking), and 1 % with float16
(530B on 35 to 280 nodes, arXiv:2205.05198 §6.3)."""
WAITING_BY_LAYER = 0.01
"""The same where they meet at every layer, under z2 and z3, so that what is slow by chance doesn't even out over a
step: 0.7 to 2.5 % (llm-foundry's tables of A100 and H100, torchtitan's of H100 and H200)."""


class StageTimes:
    """The passes of one stage, and its collectives.

    A search asks for thousands of plans that differ in little. What a stage's passes take depends on its layers, how
    they are stored and computed, and how far apart the ranks lie that it communicates with, but not on which stage of
    which plan it is: they are worked out once for all that are alike.
    """

    def __init__(self, setting: PlanSetting, stage: int) -> None:
        plan = setting.plan
        self.setting, self.stage, self.mesh = setting, stage, setting.mesh(stage)
        self.layers = setting.layers[stage % setting.depth]
        self.place = place = setting.place(stage)
        self.device, self.data, self.replicas = place.device, place.data, place.replicas
        self.launch_s = 0.0 if setting.software.graphs else self.device.launch_s
        self.strategy = plan.strategy(self.layers.start)
        self.zero = self.strategy.zero

    @cached_property
    def neighbours(self) -> tuple[Group | None, ...]:
        """The pairs over which it receives its input and sends its output, where its passes wait for that."""
        if self.setting.software.overlap_p2p:
            return ()
        return self._pair(-1), self._pair(1)

    def _pair(self, step: int) -> Group | None:
        setting, stage = self.setting, self.stage
        at_end = setting.plan.is_last(stage) if step > 0 else setting.plan.is_first(stage)
        if at_end or setting.placement[stage] == setting.placement[stage + step]:
            return None
        return setting.between(stage, stage + step)

    @cached_property
    def at(self) -> LayerSetting:
        """What its layers' times depend on."""
        plan = self.setting.plan
        return LayerSetting(
            self.setting.model,
            self.device,
            self.setting.software,
            self.strategy,
            plan.precision,
            plan.rows(self.stage),
            self.setting.workload.seq_len,
            self.place.tp,
            self.place.cp,
            self.place.ep,
            self.mesh.etp,
            self.data.size > 1,
        )

    @cached_property
    def parameters(self) -> StageParameters:
        """What it has of the model, and how that travels."""
        return StageParameters(self.setting, self.stage)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By kind: the passes, and what happens once a step."""
        return self.passes_s | dict(self.parameters.step_kinds(self.passes_s))

    @property
    def passes_s(self) -> dict[str, float]:
        """By kind: the passes alone."""
        return self._passes[0]

    @property
    def waits_s(self) -> dict[str, dict[str, float]]:
        """By pass: axis → what is waited for."""
        return self._passes[1]

    @property
    def adds_up(self) -> bool:
        """Whether backwards take as much longer for each layer that is computed again, however many are: all are of one
        kind, nothing travels beside them, and the host launches kernels faster than they run."""
        return self._passes[2]

    @cached_property
    def _passes(self) -> tuple[dict[str, float], dict[str, dict[str, float]], bool]:
        key = self._key if self.zero == "z1" else (*self._key, id(self.data), id(self.replicas))
        known = self.setting.known.stages
        if key not in known:
            waiting = WAITING if self.zero == "z1" else WAITING_BY_LAYER
            slower, spent = 1 + waiting * log2(self.setting.num_nodes), dict(self.passes())
            seconds = {kind: slower * one.seconds(self.launch_s) for kind, one in spent.items()}
            alike = self.parameters.travel_s(self.layers) == (0, 0) and len(self._counts) == 1
            later = self.setting.plan.is_last(self.stage) and self.setting.model.mtp_layers > 0
            launched = all(spent[kind].compute_s >= spent[kind].kernels * self.launch_s for kind in ("B", "I"))
            waits_s = {kind: one.waits_s for kind, one in spent.items()}
            known[key] = seconds, waits_s, alike and launched and not later
        return known[key]

    @cached_property
    def _key(self) -> tuple:
        """Equal for stages of any plans that compute the same; objects that are equal are the same here."""
        setting = self.setting
        places = map(id, (self.device, *self.place[-3:], *self.neighbours))
        own = self.mesh.etp, self.mesh.ep, setting.rows(self.stage), self.strategy, self.data.size > 1
        return *setting.shared, *setting.signature(self.stage)[1:], *own, *places

    def passes(self) -> Iterator[tuple[str, Spent]]:
        """(kind, what it spends) of F, B, I and W."""
        forward, inputs, weights, again = self._whole()
        gather_s, reduce_s = self.parameters.travel_s(self.layers)
        backward = again + inputs + weights
        if not self.setting.software.overlap_p2p:
            forward, again = self._sent(forward, 1), self._sent(again, -1)
            backward = again + inputs + weights
        yield "F", self._with_traffic(forward, gather_s)
        # A layer that is computed again stays gathered for its backward, unless parts are gathered one by one.
        gathers = 1 + (self.setting.software.gathers_parts and again.compute_s > 0)
        yield "B", self._with_traffic(backward, gathers * gather_s + reduce_s)
        yield "I", self._with_traffic(again + inputs, gathers * gather_s)
        yield "W", self._with_traffic(weights, reduce_s)

    def _whole(self) -> tuple[Spent, Spent, Spent, Spent]:
        """All that the stage computes of one micro-batch."""
        known = self.setting.known.wholes
        if self._key not in known:
            known[self._key] = self._make_whole()
        return known[self._key]

    def _make_whole(self) -> tuple[Spent, Spent, Spent, Spent]:
        """Layers that are alike are costed once."""
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
    def _counts(self) -> dict[LayerKind, int]:
        """The kinds of its layers, and how many there are of each."""
        model, plan = self.setting.model, self.setting.plan
        layers = list(self.layers)
        if plan.is_last(self.stage):
            layers += [model.num_layers - 1] * model.mtp_layers
        if layers and self.setting.known.layers_alike and not plan.overrides:
            kind = self.setting.layer_kind(layers[0])
            self._example[kind] = layers[0]
            return {kind: len(layers)}
        counts: dict[LayerKind, int] = {}
        for layer in layers:
            kind = self.setting.layer_kind(layer)
            counts[kind] = counts.get(kind, 0) + 1
            self._example.setdefault(kind, layer)
        return counts

    @cached_property
    def _example(self) -> dict[LayerKind, int]:
        return {}

    def _layer_passes(self, kind: LayerKind) -> LayerPasses:
        known, plan = self.setting.known.passes, self.setting.plan
        places = tuple(map(id, (self.device, *self.place[-3:])))
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

    def _sent(self, spent: Spent, step: int) -> Spent:
        """A pass that waits until what it made has come to the next stage, or to the one before."""
        total, pair = spent + Spent(), self._pair(step)
        if pair is None:
            return total
        size, tp = self.at.hidden_bytes, self.at.tp
        split = tp.size if self.at.strategy.sp or self.setting.software.split_p2p else 1
        total.wait("pp", message_s(pair, size / split))
        if split > 1 and not self.at.strategy.sp:
            total.wait("tp", all_gather_s(tp, size))
        return total


def stage_times(setting: PlanSetting) -> list[StageTimes]:
    """Of every stage of the plan; the same object where stages are alike."""
    examples = example_times(setting)
    return [examples[kind] for kind in setting.alike.which.tolist()]


def example_times(setting: PlanSetting) -> list[StageTimes]:
    """Of a stage of each kind (`PlanSetting.alike`)."""
    return [StageTimes(setting, stage) for stage in setting.alike.examples]
