"""How long the passes of one stage take, and what it does once a step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import log2

from muster.cost.time.collectives import CommGroup, all_gather_s, p2p_s
from muster.cost.time.cost_cache import LayerKind
from muster.cost.time.layer import embedding_passes, head_passes, layer_passes
from muster.cost.time.param_communication import ParamCommunication
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.sublayer import LayerContext, LayerPasses

STRAGGLER_SHARE = 0.005
"""Share of the passes that ranks lose for each doubling of nodes because they wait for the slowest, where data-parallel
ranks meet once a step: beside what the collectives take, the same plan takes 0 to 0.4 % longer on twice the nodes in
bf16 and 0.5 to 1 % in fp8 (Llama 3 on 8 to 256 nodes of H100, github:NVIDIA/dgxc-benchmarking), and 1 % with float16
(530B on 35 to 280 nodes, arXiv:2205.05198 §6.3)."""
STRAGGLER_SHARE_PER_LAYER_SYNC = 0.01
"""The same where they meet at every layer, under z2 and z3, so that what is slow by chance doesn't even out over a
step: 0.7 to 2.5 % (llm-foundry's tables of A100 and H100, torchtitan's of H100 and H200)."""


class StageTimes:
    """The passes of one stage, and its collectives.

    A search asks for thousands of plans that differ in little. What a stage's passes take depends on its layers, how
    they are stored and computed, and how far apart the ranks lie that it communicates with, but not on which stage of
    which plan it is: they are worked out once for all that are alike.
    """

    def __init__(self, setting: PlacedPlan, stage: int) -> None:
        plan = setting.plan
        self.setting, self.stage, self.mesh = setting, stage, setting.mesh(stage)
        self.layers = setting.layers[stage % setting.stages_per_replica]
        self.groups = place = setting.stage_groups(stage)
        self.device, self.data, self.replicas = place.device, place.data_parallel, place.replicas
        self.launch_s = 0.0 if setting.framework.cuda_graphs else self.device.launch_s
        self.strategy = plan.strategy(self.layers.start)
        self.zero = self.strategy.zero

    @cached_property
    def p2p_groups(self) -> tuple[CommGroup | None, ...]:
        """The pairs over which it receives its input and sends its output, where its passes wait for that."""
        if self.setting.framework.overlap_p2p:
            return ()
        return self._pair(-1), self._pair(1)

    def _pair(self, step: int) -> CommGroup | None:
        setting, stage = self.setting, self.stage
        at_end = setting.plan.is_last(stage) if step > 0 else setting.plan.is_first(stage)
        if at_end or setting.placement[stage] == setting.placement[stage + step]:
            return None
        return setting.p2p_group(stage, stage + step)

    @cached_property
    def layer_context(self) -> LayerContext:
        """What its layers' times depend on."""
        plan = self.setting.plan
        return LayerContext(
            self.setting.model,
            self.device,
            self.setting.framework,
            self.strategy,
            plan.precision,
            plan.local_micro_batch_size(self.stage),
            self.setting.workload.seq_len,
            self.groups.tp,
            self.groups.cp,
            self.groups.ep,
            self.mesh.etp,
            self.data.size > 1,
        )

    @cached_property
    def param_communication(self) -> ParamCommunication:
        """What it has of the model, and how that travels."""
        return ParamCommunication(self.setting, self.stage)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """By kind: the passes, and what happens once a step."""
        return self.passes_s | dict(self.param_communication.per_step_times(self.passes_s))

    @property
    def passes_s(self) -> dict[str, float]:
        """By kind: the passes alone."""
        return self._passes[0]

    @property
    def exposed_s(self) -> dict[str, dict[str, float]]:
        """By pass: axis → what is waited for."""
        return self._passes[1]

    @property
    def recompute_is_additive(self) -> bool:
        """Whether backwards take as much longer for each layer that is computed again, however many are: all are of one
        kind, nothing travels beside them, and the host launches kernels faster than they run."""
        return self._passes[2]

    @cached_property
    def _passes(self) -> tuple[dict[str, float], dict[str, dict[str, float]], bool]:
        key = self._key if self.zero == "z1" else (*self._key, id(self.data), id(self.replicas))
        known = self.setting.cache.stage_times
        if key not in known:
            waiting = STRAGGLER_SHARE if self.zero == "z1" else STRAGGLER_SHARE_PER_LAYER_SYNC
            slower, spent = 1 + waiting * log2(self.setting.num_nodes), dict(self.passes())
            seconds = {kind: slower * one.total_s(self.launch_s) for kind, one in spent.items()}
            alike = self.param_communication.per_micro_batch_s(self.layers) == (0, 0) and len(self._counts) == 1
            later = self.setting.plan.is_last(self.stage) and self.setting.model.mtp_layers > 0
            launched = all(spent[kind].compute_s >= spent[kind].kernels * self.launch_s for kind in ("B", "I"))
            waits_s = {kind: one.exposed_s for kind, one in spent.items()}
            known[key] = seconds, waits_s, alike and launched and not later
        return known[key]

    @cached_property
    def _key(self) -> tuple:
        """Equal for stages of any plans that compute the same; objects that are equal are the same here."""
        setting = self.setting
        places = map(id, (self.device, *self.groups[-3:], *self.p2p_groups))
        own = self.mesh.etp, self.mesh.ep, setting.rows(self.stage), self.strategy, self.data.size > 1
        return *setting.shared_key, *setting.stage_key(self.stage)[1:], *own, *places

    def passes(self) -> Iterator[tuple[str, PassCost]]:
        """(kind, what it spends) of F, B, I and W."""
        forward, inputs, weights, again = self._compute()
        gather_s, reduce_s = self.param_communication.per_micro_batch_s(self.layers)
        backward = again + inputs + weights
        if not self.setting.framework.overlap_p2p:
            forward, again = self._with_blocking_p2p(forward, 1), self._with_blocking_p2p(again, -1)
            backward = again + inputs + weights
        yield "F", self._with_data_parallel(forward, gather_s)
        # A layer that is computed again stays gathered for its backward, unless parts are gathered one by one.
        gathers = 1 + (self.setting.framework.per_parameter_collectives and again.compute_s > 0)
        yield "B", self._with_data_parallel(backward, gathers * gather_s + reduce_s)
        yield "I", self._with_data_parallel(again + inputs, gathers * gather_s)
        yield "W", self._with_data_parallel(weights, reduce_s)

    def _compute(self) -> tuple[PassCost, PassCost, PassCost, PassCost]:
        """All that the stage computes of one micro-batch."""
        known = self.setting.cache.stage_compute
        if self._key not in known:
            known[self._key] = self._make_compute()
        return known[self._key]

    def _make_compute(self) -> tuple[PassCost, PassCost, PassCost, PassCost]:
        """Layers that are alike are costed once."""
        model, plan = self.setting.model, self.setting.plan
        parts: list[LayerPasses] = []
        for kind, count in self._counts.items():
            one = self._layer_passes(kind)
            parts.append(
                LayerPasses(
                    one.forward * count, one.input_grads * count, one.weight_grads * count, one.recompute * count
                )
            )
        if not plan.vocab_parallel:
            if plan.is_first(self.stage):
                parts.append(embedding_passes(self.layer_context))
            if plan.is_last(self.stage):
                head = head_passes(self.layer_context, model.vocab_size / self.mesh.tp)
                parts += [head] * (1 + model.mtp_layers)
        forward, inputs, weights, again = PassCost(), PassCost(), PassCost(), PassCost()
        for part in parts:
            forward, inputs = forward + part.forward, inputs + part.input_grads
            weights, again = weights + part.weight_grads, again + part.recompute
        return forward, inputs, weights, again

    @cached_property
    def _counts(self) -> dict[LayerKind, int]:
        """The kinds of its layers, and how many there are of each."""
        model, plan = self.setting.model, self.setting.plan
        layers = list(self.layers)
        if plan.is_last(self.stage):
            layers += [model.num_layers - 1] * model.mtp_layers
        if layers and self.setting.cache.layers_are_alike and not plan.overrides:
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
        known, plan = self.setting.cache.layer_passes, self.setting.plan
        places = tuple(map(id, (self.device, *self.groups[-3:])))
        key = kind, plan.precision, plan.local_micro_batch_size(self.stage), self.mesh.etp, self.data.size > 1, places
        if key not in known:
            known[key] = layer_passes(replace(self.layer_context, strategy=kind.strategy), self._example[kind])
        return known[key]

    def _with_data_parallel(self, spent: PassCost, travels_s: float) -> PassCost:
        """A pass beside which parameters are gathered, or gradients reduced, layer by layer: the first one's, or the
        last one's, is waited for, the others travel beside the compute."""
        if travels_s <= 0:
            return spent
        total = spent + PassCost()
        if self.setting.framework.per_parameter_collectives:
            total.add_exposed("dp", travels_s)
            return total
        first_s = travels_s / max(1, len(self.layers))
        total.add_exposed("dp", first_s)
        total.add_overlapped("dp", travels_s - first_s, spent.total_s(self.launch_s))
        return total

    def _with_blocking_p2p(self, spent: PassCost, step: int) -> PassCost:
        """A pass that waits until what it made has come to the next stage, or to the one before."""
        total, pair = spent + PassCost(), self._pair(step)
        if pair is None:
            return total
        size, tp = self.layer_context.hidden_bytes, self.layer_context.tp
        split = tp.size if self.layer_context.strategy.sp or self.setting.framework.scatter_gather_p2p else 1
        total.add_exposed("pp", p2p_s(pair, size / split))
        if split > 1 and not self.layer_context.strategy.sp:
            total.add_exposed("tp", all_gather_s(tp, size))
        return total


def stage_times(setting: PlacedPlan) -> list[StageTimes]:
    """Of every stage of the plan; the same object where stages are alike."""
    examples = example_stage_times(setting)
    return [examples[kind] for kind in setting.stage_kinds.kind_by_stage.tolist()]


def example_stage_times(setting: PlacedPlan) -> list[StageTimes]:
    """Of a stage of each kind (`PlanSetting.alike`)."""
    return [StageTimes(setting, stage) for stage in setting.stage_kinds.examples]
