"""Times of one stage's passes, and of its communication once per step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import log2

from muster.cost.expert_traffic import load_of_ranks
from muster.cost.time.collectives import CommGroup, all_gather_s, p2p_s
from muster.cost.time.cost_cache import LayerKind
from muster.cost.time.layer import embedding_passes, further_token_passes, head_passes, layer_passes
from muster.cost.time.param_communication import ParamCommunication
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.pass_pairs import Turns, pair_s, turns_of_pass
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.sublayer import LayerContext, LayerPasses
from muster.cost.time.trained_parts import trained_parts
from muster.spec.routing_load import LoadOfRanks

STRAGGLER_SHARE = 0.005
"""Share of the passes' time that ranks lose to the slowest of them per doubling of nodes, where data-parallel ranks
meet once per step. Besides its collectives, the same plan takes 0 to 0.4 % longer on twice the nodes in bf16 and 0.5 to
1 % in fp8 (Llama 3 on 8 to 256 nodes of H100, github:NVIDIA/dgxc-benchmarking), and 1 % with float16 (530B on 35 to 280
nodes, arXiv:2205.05198 §6.3)."""
STRAGGLER_SHARE_PER_LAYER_SYNC = 0.01
"""The same share under z2 and z3, where ranks meet at every layer, so that random delays don't even out over a step:
0.7 to 2.5 % (llm-foundry's tables of A100 and H100, torchtitan's of H100 and H200)."""


class StageTimes:
    """Times of the passes of one stage, and of its collectives, on the slowest of its ranks.

    The time of a stage's passes depends on its layers, on how they are stored and computed, and on the groups that its
    ranks communicate in, but not on which stage of which plan it is. The cost cache holds one result for all stages of
    all plans that agree in these.
    """

    def __init__(self, placed: PlacedPlan, stage: int) -> None:
        self.placed = placed
        self.stage = stage
        self.trained = trained_parts(placed.optim, placed.model, placed.plan, stage)
        self.mesh = placed.mesh(stage)
        self.layers = placed.layers[stage % placed.stages_per_replica]
        self.groups = placed.stage_groups(stage)
        self.device = self.groups.device
        self.launch_s = 0.0 if placed.framework.cuda_graphs else self.device.launch_s
        self.strategy = placed.plan.pass_strategy(self.layers.start)
        self.zero = self.strategy.zero

    @cached_property
    def layer_context(self) -> LayerContext:
        """Everything that the times of its layers depend on."""
        placed = self.placed
        return LayerContext(
            placed.model,
            self.device,
            placed.framework,
            self.strategy,
            placed.plan.precision,
            placed.plan.local_micro_batch_size(self.stage),
            placed.workload.seq_len,
            self.groups.tp,
            self.groups.cp,
            self.groups.ep,
            self.mesh.etp,
            placed.plan.context_ranks(self.mesh),
            placed.plan.sequence_tiles,
            self._is_data_parallel,
            placed.plan.expert_dispatch(self.mesh),
            self.groups.ep_levels,
            placed.workload.earlier_positions,
            placed.plan.sequence_slices > 1,
            placed.plan.fp8_recipe,
            self._expert_load,
        )

    @property
    def _expert_load(self) -> LoadOfRanks:
        return load_of_ranks(self.placed.workload, self.placed.plan, self.mesh)

    @property
    def _is_data_parallel(self) -> bool:
        return self.groups.data_parallel.size > 1

    @cached_property
    def param_communication(self) -> ParamCommunication:
        """Its parameters on one rank, and the times in which they and their gradients are communicated."""
        return ParamCommunication(self.placed, self.stage)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind of instruction: the passes, and what happens once per step."""
        per_step = dict(self.param_communication.per_step_times(self.passes_s, self._gradient_share))
        return self.passes_s | per_step

    @property
    def _gradient_share(self) -> float:
        """Share of the parameters' elements that have gradients."""
        return 1.0 if self.trained is None else self.trained.gradient_share

    @property
    def passes_s(self) -> dict[str, float]:
        """Seconds of the passes by kind, F, B, I and W."""
        return self._passes[0]

    @property
    def exposed_s(self) -> dict[str, dict[str, float]]:
        """Kind of pass → axis → seconds of communication that nothing hides."""
        return self._passes[1]

    @property
    def recompute_is_additive(self) -> bool:
        """True where every further recomputed layer makes the backward longer by the same time.

        This holds where all layers are of one kind, no communication overlaps with them, and the host launches kernels
        faster than they run.
        """
        return self._passes[2]

    @cached_property
    def _passes(self) -> tuple[dict[str, float], dict[str, dict[str, float]], bool]:
        key = self._key if self.zero == "z1" else self._data_parallel_key
        known = self.placed.cache.stage_times
        if key not in known:
            known[key] = self._make_passes()
        return known[key]

    @property
    def _data_parallel_key(self) -> tuple:
        found = self.param_communication
        levels = found.gathering, found.reducing, found.between_reducing
        own = *levels, found.backwards_per_replica_reduction, found.forwards_per_ends_gather
        own = *own, self.placed.plan.bucket_layers
        return *self._key, found.data, found.replicas, *own

    @property
    def _slowdown(self) -> float:
        """Factor by which passes take longer where many ranks wait for the slowest of them."""
        share = STRAGGLER_SHARE if self.zero == "z1" else STRAGGLER_SHARE_PER_LAYER_SYNC
        return 1 + share * log2(self.placed.num_nodes)

    @cached_property
    def _pass_parts(self) -> list[LayerPasses]:
        """Costs of its layers, and of embedding and head where these have turns, in order."""
        before, behind = ([part for part in ends if any(part.turns)] for ends in self._ends)
        return [*before, *self._pass_layers, *behind]

    @property
    def _pass_layers(self) -> list[LayerPasses]:
        """Costs of its layers in order."""
        layers = [self._layer_passes(self.placed.layer_kind(layer)) for layer in self._all_layers if self._layer_counts]
        if self.trained is None:
            return layers
        extra = self.trained.layers[-1:] * (len(layers) - len(self.layers))
        shares = zip(layers, (*self.trained.layers, *extra), strict=True)
        return [layer.scaled(has_backward, share * has_backward) for layer, (has_backward, share) in shares]

    @cached_property
    def turns(self) -> tuple[Turns, Turns]:
        """Turns of a forward and a full backward that run as one with a pass of another stage."""
        slower, parts = self._slowdown, self._pass_parts
        forward, backward = (
            turns_of_pass(
                self.passes_s[kind],
                (
                    (one.compute_s[number], [turn.slower(slower) for turn in one.turns[number]])
                    for one in (reversed(parts) if number else parts)
                ),
                is_backward=bool(number),
            )
            for number, kind in enumerate(("F", "B"))
        )
        return forward, backward

    @property
    def hidden_s(self) -> tuple[float, float]:
        """Seconds of a forward and of a backward that a pair hides at most: all that isn't computation."""
        forward, backward = (sum(turns.computed_s) for turns in self.turns)
        return self.passes_s["F"] - forward, self.passes_s["B"] - backward

    @cached_property
    def host_s(self) -> tuple[float, float]:
        """Seconds of the host for a forward and for a full backward, which nothing shortens."""
        costs = dict(self._pass_costs())
        return self._slowdown * costs["F"].host_s, self._slowdown * costs["B"].host_s

    def _make_passes(self) -> tuple[dict[str, float], dict[str, dict[str, float]], bool]:
        slowdown = self._slowdown
        costs = dict(self._pass_costs())
        seconds = {
            kind: slowdown * cost.total_s(self.launch_s, self.placed.framework.blocking_launches)
            for kind, cost in costs.items()
        }
        exposed_s = {kind: (cost * slowdown).exposed_s for kind, cost in costs.items()}
        is_alike = self.param_communication.per_micro_batch_s(self.layers) == (0, 0) and len(self._layer_counts) == 1
        has_mtp = self.placed.plan.is_last(self.stage) and self.placed.model.mtp_layers > 0
        is_device_bound = all(
            costs[kind].compute_s >= max(costs[kind].kernels * self.launch_s, costs[kind].host_s) for kind in ("B", "I")
        )
        return seconds, exposed_s, is_alike and is_device_bound and not has_mtp and self.trained is None

    @cached_property
    def _key(self) -> tuple:
        """Cache key of the stage's compute: equal for all stages of all plans that compute the same."""
        placed = self.placed
        p2p_groups = () if placed.framework.overlap_p2p else (self._p2p_group(-1), self._p2p_group(1))
        own = self.mesh.etp, self.mesh.ep, placed.micro_batch_size(self.stage), self.strategy, self._is_data_parallel
        own_key = *own, *self.groups.layer_key, *p2p_groups, self.trained, self._expert_load
        return *placed.shared_key, *placed.stage_key(self.stage)[1:], *own_key

    def _p2p_group(self, step: int) -> CommGroup | None:
        """Return the pair of ranks between this stage and the next (`step` 1) or the one before (−1), if there is."""
        placed, stage = self.placed, self.stage
        at_end = placed.plan.is_last(stage) if step > 0 else placed.plan.is_first(stage)
        if at_end or placed.placement[stage] == placed.placement[stage + step]:
            return None
        return placed.p2p_group(stage, stage + step)

    def _pass_costs(self) -> Iterator[tuple[str, PassCost]]:
        """Yield (kind, cost) of F, B, I and W."""
        forward, input_grads, weight_grads, recompute = self._compute()
        gather_s, reduce_s = self.param_communication.per_micro_batch_s(self.layers)
        ends_gather_s, ends_reduce_s = self.param_communication.ends_per_micro_batch_s
        if self.trained is not None:
            reduce_s, ends_reduce_s = reduce_s * self.trained.layers_share, ends_reduce_s * self.trained.ends_share
        # Embedding and head are gathered before the first layer, and reduced after all others: nothing hides it.
        ends_gather, ends_reduce = (PassCost(exposed_s={"dp": one_s}) for one_s in (ends_gather_s, ends_reduce_s))
        if not self.placed.framework.overlap_p2p:
            forward = self._with_blocking_p2p(forward, 1)
            recompute = self._with_blocking_p2p(recompute, -1)
        backward = recompute + input_grads + weight_grads
        yield "F", self._with_data_parallel(forward, gather_s, 0.0, is_forward=True) + ends_gather
        # A recomputed layer stays gathered for its backward, unless each parameter is gathered by itself.
        gathers: float = 1 + (self.placed.framework.per_parameter_collectives and recompute.compute_s > 0)
        gathers *= 1.0 if self.trained is None else self.trained.backward_share
        yield "B", self._with_data_parallel(backward, gathers * gather_s, reduce_s) + ends_reduce
        yield "I", self._with_data_parallel(recompute + input_grads, gathers * gather_s, 0.0)
        if self.placed.framework.overlaps_whole_passes_only:
            # W reduces once all weights have their gradients, and the next pass waits for the end (`finish_backward`).
            yield "W", weight_grads + PassCost(exposed_s={"dp": reduce_s}) + ends_reduce
        else:
            yield "W", self._with_data_parallel(weight_grads, 0.0, reduce_s) + ends_reduce

    def _compute(self) -> tuple[PassCost, PassCost, PassCost, PassCost]:
        """Return the cost of forward, input gradients, weight gradients and recompute of one micro-batch."""
        known = self.placed.cache.stage_compute
        if self._key not in known:
            known[self._key] = self._make_compute()
        return known[self._key]

    def _make_compute(self) -> tuple[PassCost, PassCost, PassCost, PassCost]:
        """Sum the layers, each kind costed once, with embedding and head where the stage has them."""
        trained = self.trained
        before, behind = self._ends
        parts = [*self._parts_of_layers(), *before, *behind]
        forward, input_grads, weight_grads, recompute = PassCost(), PassCost(), PassCost(), PassCost()
        if self._layer_counts:  # the last turns of a run of layers
            ends = self._layer_passes(next(iter(self._layer_counts))).ends_s
            forward.add_exposed("tp", ends[0])
            input_grads.add_exposed("tp", ends[1] * (trained is None or trained.layers[0][0]))
        for part in parts:
            forward += part.forward
            input_grads += part.input_grads
            weight_grads += part.weight_grads
            recompute += part.recompute
        return forward, input_grads, weight_grads, recompute

    @property
    def _ends(self) -> tuple[list[LayerPasses], list[LayerPasses]]:
        """Costs of what the stage has before and behind its layers: embedding, head and loss."""
        model, plan, trained = self.placed.model, self.placed.plan, self.trained
        before, behind = list[LayerPasses](), list[LayerPasses]()
        if plan.vocab_parallel:
            return before, behind
        if plan.is_first(self.stage):
            embedding = embedding_passes(self.layer_context)
            before = [embedding if trained is None else embedding.scaled(trained.embedding, trained.embedding)]
        if plan.is_last(self.stage):
            head = head_passes(self.layer_context, model.vocab_size / self.mesh.tp)
            head = head if trained is None else head.scaled(trained.head_input, trained.head)
            behind = [head] * (1 + model.mtp_layers)
            if model.mtp_layers:
                strategy = plan.strategy(model.num_layers - 1)
                further = further_token_passes(replace(self.layer_context, strategy=strategy))
                further = further if trained is None else further.scaled(trained.head_input, trained.head)
                behind += [further] * model.mtp_layers
        return before, behind

    def _parts_of_layers(self) -> Iterator[LayerPasses]:
        """Yield the costs of its layers, of those of a kind together where nothing is frozen."""
        if self.trained is None:
            for kind, count in self._layer_counts.items():
                layer = self._layer_passes(kind)
                yield LayerPasses(
                    layer.forward * count,
                    layer.input_grads * count,
                    layer.weight_grads * count,
                    layer.recompute * count,
                )
            return
        assert self._layer_counts  # which finds an example of each kind
        extra = self.trained.layers[-1:] * (len(self._all_layers) - len(self.layers))
        for layer, (has_backward, share) in zip(self._all_layers, (*self.trained.layers, *extra), strict=True):
            passes = self._layer_passes(self.placed.layer_kind(layer))
            yield passes.scaled(has_backward, share * has_backward)

    @property
    def _all_layers(self) -> list[int]:
        """Its layers, the last one again for each layer that predicts further tokens."""
        model, plan = self.placed.model, self.placed.plan
        return [*self.layers, *([model.num_layers - 1] * model.mtp_layers if plan.is_last(self.stage) else ())]

    @cached_property
    def _layer_counts(self) -> dict[LayerKind, int]:
        """Number of its layers of each kind."""
        plan, layers = self.placed.plan, self._all_layers
        if layers and self.placed.cache.layers_are_alike and not plan.overrides:
            kind = self.placed.layer_kind(layers[0])
            self._example_layers[kind] = layers[0]
            return {kind: len(layers)}
        counts: dict[LayerKind, int] = {}
        for layer in layers:
            kind = self.placed.layer_kind(layer)
            counts[kind] = counts.get(kind, 0) + 1
            self._example_layers.setdefault(kind, layer)
        return counts

    @cached_property
    def _example_layers(self) -> dict[LayerKind, int]:
        """A layer of each kind."""
        return {}

    def _layer_passes(self, kind: LayerKind) -> LayerPasses:
        plan = self.placed.plan
        known = self.placed.cache.layer_passes
        own = plan.precision, plan.local_micro_batch_size(self.stage), self.mesh.etp, self._is_data_parallel
        own = *own, plan.context_ranks(self.mesh), plan.sequence_tiles, plan.expert_dispatch(self.mesh)
        own = *own, plan.sequence_slices > 1, self._expert_load, plan.fp8_recipe
        key = kind, *own, self.groups.layer_key
        if key not in known:
            known[key] = layer_passes(replace(self.layer_context, strategy=kind.strategy), self._example_layers[kind])
        return known[key]

    def _with_data_parallel(
        self, cost: PassCost, gather_s: float, reduce_s: float, is_forward: bool = False
    ) -> PassCost:
        """Add the gathers of parameters and the reductions of gradients of all layers to a pass.

        They overlap with the compute of the bucket of layers before or behind where the framework's do
        (`PassCost.add_by_buckets`).
        """
        if gather_s + reduce_s <= 0:
            return cost
        total = cost + PassCost()
        if self.placed.framework.per_parameter_collectives or not self.placed.framework.overlap_fsdp:
            total.add_exposed("dp", gather_s + reduce_s)
            return total
        compute_s = cost.total_s(self.launch_s, self.placed.framework.blocking_launches)
        buckets = [len(bucket) for bucket in self.param_communication.buckets(self.layers)] or [1]
        total.add_by_buckets("dp", gather_s, reduce_s, buckets if is_forward else buckets[::-1], compute_s)
        return total

    def _with_blocking_p2p(self, cost: PassCost, step: int) -> PassCost:
        """Add the exposed transfer of a pass's result to the next stage (`step` 1) or the one before (−1)."""
        total = cost + PassCost()
        pair = self._p2p_group(step)
        if pair is None:
            return total
        size, tp = self.layer_context.hidden_bytes, self.layer_context.tp
        split = tp.size if self.strategy.sp or self.placed.framework.scatter_gather_p2p else 1
        total.add_exposed("pp", p2p_s(pair, size / split))
        if split > 1 and not self.strategy.sp:
            total.add_exposed("tp", all_gather_s(tp, size))
        return total


def pair_of_stages_s(forward: StageTimes, backward: StageTimes) -> float:
    """Return the seconds of a forward of one stage and a backward of another on the same ranks that run as one."""
    return max(pair_s(forward.turns[0], backward.turns[1]), forward.host_s[0] + backward.host_s[1])


def stage_times(placed: PlacedPlan) -> list[StageTimes]:
    """Return the times of every stage of the plan, one object for all stages that are alike."""
    examples = example_stage_times(placed)
    return [examples[kind] for kind in placed.stage_kinds.kind_by_stage.tolist()]


def example_stage_times(placed: PlacedPlan) -> list[StageTimes]:
    """Return the times of one stage of each kind (`PlacedPlan.stage_kinds`)."""
    return [StageTimes(placed, stage) for stage in placed.stage_kinds.examples]
