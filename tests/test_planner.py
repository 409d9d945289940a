"""The search for plans: it finds what looking at everything finds, and its bounds hold."""

import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby, permutations, product, takewhile
from math import inf
from operator import add
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import muster.planner.search as planner_search
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.load_config import load_plan
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.cost.memory.forecast import MEMORY_HEADROOM, forecast_memory
from muster.planner.alternatives import FirstPlan
from muster.planner.balance import RankLoad, balance_layers, min_busiest_rank_s, rank_loads
from muster.planner.bounds.lower_bounds import LowerBounds
from muster.planner.bounds.step_bound import max_warmup_forwards
from muster.planner.frontier import _evenly_spread
from muster.planner.heterogeneous import find_best_plans
from muster.planner.memory.budget import PendingFit
from muster.planner.memory.deferred_weight_grads import deferred_micro_batches, min_fullest_rank_bytes
from muster.planner.memory.fitter import LayerPolicy, with_policy
from muster.planner.memory.knapsack import Option, cheapest_choice
from muster.planner.node_order import anneal, block_orders, reorder_nodes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.reasons import find_reasons
from muster.planner.request import PlanRequest
from muster.planner.search import exhaustive_search, search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.space import draft_plans, mesh_shapes, schedule_choices
from muster.schedule.build import build_program, schedule_for_plan
from muster.schedule.one_f_one_b import one_f_one_b
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.frameworks import MEGATRON
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import plan_violations
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES, PlannerTraits, ScheduleEntry
from muster.spec.workload import Workload
from tests.sampling import quick_sample

SMALL = ModelSpec(vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=256, name="small")
WORK = Workload(seq_len=512, global_batch_size=8)
CLUSTERS = ("2xh100", "4xa100", "8xh100", "2xh100+2xa100", "4xv100", "4xl40s")


def instance(seed: int) -> PlanRequest:
    """A small model on a small cluster, its memory often too small."""
    random = Random(seed)
    request = _open_request(seed, random)
    if random.random() < 0.6:
        least = search(replace(request, objective="memory", fixed={"cp": 1}), 1).best[0].peak_bytes
        request = replace(request, memory_limit_bytes=int(least * random.choice((1.01, 1.1, 1.3))))
    return replace(request, objective=random.choice(("time", "time", "time", "memory")), fixed={"cp": 1})


def roomy_instance(seed: int) -> PlanRequest:
    """The same, to be as fast as can be, with all memory: nothing is searched for to make it."""
    return replace(_open_request(seed, Random(seed)), fixed={"cp": 1})


def _open_request(seed: int, random: Random) -> PlanRequest:
    heads = random.choice((2, 4))
    model = ModelSpec(
        name=f"random-{seed}",
        vocab_size=random.choice((512, 4099)),
        hidden_size=64 * heads,
        num_layers=random.choice((2, 3, 4, 6)),
        num_heads=heads,
        num_kv_heads=random.choice((1, heads)),
        intermediate_size=random.choice((256, 768)),
    )
    workload = Workload(seq_len=random.choice((512, 2048)), global_batch_size=random.choice((4, 8, 12)))
    return PlanRequest(model, load_cluster(random.choice(CLUSTERS)), workload)


def assert_search_finds_the_best(seed: int) -> None:
    assert_finds_the_best(instance(seed), f"seed {seed}")


def assert_finds_the_best(request: PlanRequest, name: str) -> None:
    evaluator = PlanEvaluator(request)
    expected = sorted({verdict.sort_key for verdict in exhaustive_search(evaluator)})[:3]  # some ways lead to one plan
    found = search(request, 3)
    assert [verdict.sort_key for verdict in found.best] == expected, name
    quick = search(request, 3, exact=1)
    assert [verdict.sort_key for verdict in quick.best[:1]] == expected[:1], name
    assert len(quick.best) == len(expected), name
    assert found.proven


@pytest.mark.parametrize("seed", [4, 5])
def test_the_search_finds_what_simulating_everything_finds(seed: int) -> None:
    assert_search_finds_the_best(seed)


def with_experts(moe: MoeSpec) -> ModelSpec:
    return ModelSpec(vocab_size=512, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=512, moe=moe)


@pytest.mark.parametrize("devices", quick_sample([2, 4], 0))
def test_the_search_finds_what_simulating_everything_finds_with_experts(devices: int) -> None:
    few = with_experts(MoeSpec(num_experts=4, top_k=2, expert_size=512))
    workload = Workload(seq_len=512, global_batch_size=8)
    cluster, limit = load_cluster(f"{devices}xa100"), int(4.8e9 / devices)
    request = PlanRequest(few, cluster, workload, fixed={"cp": 1}, memory_limit_bytes=limit)
    assert_finds_the_best(request, "experts")


def test_experts_are_sliced_where_tensor_parallel_ranks_share_them() -> None:
    few = with_experts(MoeSpec(num_experts=4, top_k=2, expert_size=512))
    workload = Workload(seq_len=512, global_batch_size=4)
    fixed = {"cp": 1, "tp": 2, "pp": 1, "ep": 1, "schedule": "1f1b"}
    request = PlanRequest(few, load_cluster("4xa100"), workload, fixed=fixed, runnable=True)
    assert_finds_the_best(request, "sliced experts")
    assert {(one.plan.tp, one.plan.etp) for one in search(request, 3).best} == {(2, 2)}
    both = search(replace(request, fixed={**fixed, "ep": 2}), 3).best
    assert {one.plan.etp for one in both} == {1}, "whole experts lie on different ranks where ep is a multiple of tp"
    required = search(replace(request, fixed={**fixed, "ep": 2, "etp": 2}), 3).best
    assert {one.plan.etp for one in required} == {2}


def test_plans_leave_head_room_where_any_does() -> None:
    fixed = {"cp": 1, "tp": 1}
    request = replace(roomy_instance(3), cluster=load_cluster("2xh100"), objective="memory", fixed=fixed)
    least = search(request, 1).best[0].peak_bytes
    for part, room in ((0.8, MEMORY_HEADROOM), (0.95, 0.0)):
        device = request.cluster.device.model_copy(update={"memory_bytes": int(least / part)})
        groups = tuple(group.model_copy(update={"device": device}) for group in request.cluster.groups)
        own = replace(request, cluster=request.cluster.model_copy(update={"groups": groups}), objective="time")
        evaluator = PlanEvaluator(own)
        found = search(own, 5, evaluator=evaluator)
        assert found.evaluator.memory_budget.head_room == room
        assert evaluator.memory_budget.head_room == MEMORY_HEADROOM, "the caller's evaluator stays as it is"
        assert found.best
        assert all(one.peak_bytes <= (1 - room) * least / part for one in found.best)


def test_a_search_whose_time_ends_before_head_room_is_given_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PlanRequest(SMALL, load_cluster("2xh100"), WORK, fixed={"cp": 1, "tp": 1, "pp": 1})
    real: Any = planner_search._search

    def in_time(evaluator, *arguments) -> SearchResult:
        """The first search finds nothing with its budget, the second has all that it wants."""
        if evaluator.memory_budget.head_room:
            return SearchResult(evaluator, [], 0.0, None)
        return real(evaluator, *arguments)

    monkeypatch.setattr(planner_search, "_search", in_time)
    found = search(request, 1)
    assert found.best
    assert not found.proven
    assert found.gap == 0


def test_what_is_tried_before_the_search_counts_as_searched() -> None:
    """On unequal nodes, in a search that ends at once."""
    request = PlanRequest(SMALL, load_cluster("2xh100+2xa100"), WORK, fixed={"cp": 1, "tp": 1, "pp": 2})
    found = search(request, 1, SearchBudget(0.0))
    assert found.counts["drafts"] >= found.counts["simulated"] > 0


def test_a_search_that_gives_up_head_room_counts_both_times() -> None:
    request = PlanRequest(SMALL, load_cluster("2xh100"), WORK, fixed={"cp": 1, "tp": 1})
    least = search(replace(request, objective="memory"), 1).best[0].peak_bytes
    device = request.cluster.device.model_copy(update={"memory_bytes": int(least / 0.95)})
    groups = tuple(group.model_copy(update={"device": device}) for group in request.cluster.groups)
    tight = replace(request, cluster=request.cluster.model_copy(update={"groups": groups}))
    both, alone = search(tight, 1), []
    for evaluator in (PlanEvaluator(tight), PlanEvaluator(tight).without_head_room()):
        alone.append(planner_search._search(evaluator, planner_search._Wishes(1, 1, inf, ()), SearchBudget(), 1.0))
    assert not alone[0].best
    assert both.counts["simulated"] == sum(one.counts["simulated"] for one in alone)
    assert both.counts["drafts"] == sum(one.counts["drafts"] for one in alone)
    assert both.counts["shapes"] == alone[1].counts["shapes"]


def test_plans_without_time_to_offload_are_passed_over() -> None:
    plain = Plan(pp=2, default_strategy=LayerStrategy(offload="activations"))
    with pytest.raises(InfeasibleError, match="nothing to move"):
        build_program(plain, SMALL, WORK)
    fixed = {"cp": 1, "tp": 1, "pp": 2}
    best = search(PlanRequest(SMALL, load_cluster("2xh100"), WORK, fixed=fixed, template=plain), 1).best[0].plan
    assert best.default_strategy.offload == "activations"
    assert best.vpp > 1


def test_plans_that_have_nothing_to_offload_recompute_instead() -> None:
    """With zb-h1 on two ranks nothing lies for long, so that offloading it is neither cheaper nor dearer than not."""
    fixed = {"pp": 2, "schedule": "zb-h1", "cp": 1}
    workload = Workload(seq_len=8192, global_batch_size=512)
    found = search(PlanRequest(load_model("llama3-8b"), load_cluster("8xh100"), workload, fixed=fixed), 3)
    assert found.proven
    assert found.best
    assert all(strategy.offload == "none" for one in found.best for strategy in one.plan.strategies)


@pytest.mark.parametrize("fixed", quick_sample([{"tp": 1, "micro_batch_size": 1}, {"tp": 1}], 0))
def test_plans_that_look_hopeless_fit_with_no_recompute_and_no_offload(fixed: dict[str, int]) -> None:
    workload = Workload(seq_len=1 << 18, global_batch_size=8)
    asked = PlanRequest(load_model("llama3-8b"), load_cluster("8xh100"), workload, fixed=fixed, runnable=True)
    evaluator = PlanEvaluator(asked)
    drafts = [
        draft
        for shape in mesh_shapes(asked)
        for choice in schedule_choices(asked, shape)
        if choice.schedule in ("1f1b", "interleaved", "zb-h1", "gpipe") and choice.vpp < 4
        for draft in draft_plans(asked, choice)
    ]
    hopeless = [plan for plan in drafts if evaluator.memory_budget._hopeless_bytes(plan) is not None]
    assert len(drafts) // 4 < len(hopeless) < len(drafts)
    for plan in hopeless:
        fit, excess = evaluator.memory_budget._start_fit(plan)
        assert fit == [], plan
        assert excess >= (evaluator.memory_budget._hopeless_bytes(plan) or inf), plan


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_the_search_finds_what_simulating_everything_finds_in_200_instances(first: int) -> None:
    for seed in range(first, first + 25):
        assert_search_finds_the_best(seed)


@pytest.mark.parametrize("seed", [100, 101, pytest.param(102, marks=pytest.mark.soak)])
def test_no_bound_is_above_a_simulated_time(seed: int) -> None:
    assert_bounds_hold(roomy_instance(seed))


def test_no_bound_is_above_a_simulated_time_where_layers_differ() -> None:
    """Most of a layer's time is in attention, which all but the last layer have a window for."""
    few = ModelSpec(
        vocab_size=512,
        hidden_size=128,
        num_layers=5,
        num_heads=4,
        intermediate_size=256,
        sliding_window=64,
        window_layers=(0, 1, 2, 3),
    )
    workload = Workload(seq_len=32768, global_batch_size=8)
    assert_bounds_hold(PlanRequest(few, load_cluster("4xh100"), workload, fixed={"cp": 1, "zero": "z1"}))


def test_no_bound_is_above_a_simulated_time_where_some_layers_have_experts() -> None:
    few = with_experts(MoeSpec(num_experts=8, top_k=2, expert_size=512, dense_layers=1))
    workload = Workload(seq_len=512, global_batch_size=8)
    assert_bounds_hold(PlanRequest(few, load_cluster("4xa100"), workload, fixed={"cp": 1, "tp": 1}))


@pytest.mark.parametrize("cluster", quick_sample(["2xh100", "4xh100"], 0))
def test_no_bound_is_above_a_simulated_time_where_layers_are_frozen(cluster: str) -> None:
    """Two of four layers have no backward; and the search finds the best by the times of what is trained."""
    optim = OptimConfig(lr=1e-3, freeze=("embed.*", "layers.[01].*", "*.mlp.*"), ema_decay=0.99)
    request = PlanRequest(SMALL, load_cluster(cluster), WORK, fixed={"cp": 1, "tp": 1}, optim=optim)
    assert_bounds_hold(request)
    assert_finds_the_best(request, "frozen")
    plan = search(request, 1).best[0]
    assert plan.prediction.step_time_s == predict(SMALL, plan.plan, WORK, request.cluster, optim=optim).step_time_s
    assert plan.prediction.step_time_s < predict(SMALL, plan.plan, WORK, request.cluster).step_time_s


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_no_bound_is_above_a_simulated_time_of_several_steps_without_a_flush(schedule: str) -> None:
    """The pipeline fills and drains once in sixteen steps."""
    assert_bounds_hold(PlanRequest(SMALL, load_cluster("4xh100"), WORK, fixed={"cp": 1, "schedule": schedule}))


def assert_bounds_hold(request: PlanRequest) -> None:
    evaluator, looked = PlanEvaluator(request), 0
    for shape in mesh_shapes(request):
        for order in schedule_choices(request, shape):
            for draft in draft_plans(request, order):
                plan = evaluator.complete_draft(draft, order)
                if plan is not None:
                    time_s = evaluator.evaluate(plan).prediction.step_time_s * (1 + 1e-9)
                    split = plan.dp_replicate, plan.dp_shard, plan.default_strategy.zero
                    bounds = [
                        evaluator.bounds.of_choice(order),
                        evaluator.bounds.unsharded(order),
                        evaluator.bounds.of_plan(plan),
                    ]
                    bounds.append(evaluator.bounds.communication(shape, split))
                    assert max(bounds) <= time_s, (plan, bounds, time_s)
                    looked += 1
    assert looked > 10


def test_no_bound_of_what_makes_plans_fit_is_above_a_simulated_time() -> None:
    """A 7B model whose pipelines recompute and offload on four devices: what ranks take more for that is known before
    it is chosen."""
    model, workload = load_model("qwen2.5-7b"), Workload(seq_len=4096, global_batch_size=32)
    for schedule, size, limit in (("1f1b", 2, 52e9), ("interleaved", 2, 52e9), ("zb-v", 1, 58e9)):
        fixed = {"cp": 1, "pp": 4, "micro_batch_size": size, "schedule": schedule}
        request = PlanRequest(model, load_cluster("4xh100"), workload, fixed=fixed)
        evaluator, known = PlanEvaluator(replace(request, memory_limit_bytes=int(limit))), 0
        for order in (
            order for shape in mesh_shapes(evaluator.request) for order in schedule_choices(evaluator.request, shape)
        ):
            for plan in filter(
                None, (evaluator.complete_draft(draft, order) for draft in draft_plans(evaluator.request, order))
            ):
                begun, _ = evaluator.memory_budget.start_fit(plan)
                if isinstance(begun, PendingFit):
                    least_s = evaluator.bounds.with_added(plan, begun.added_s)
                    for fitting in evaluator.memory_budget.finish_fit(begun):
                        known += any(begun.added_s)
                        assert least_s <= evaluator.evaluate(fitting).prediction.step_time_s * (1 + 1e-9), plan
        assert known, schedule


@pytest.mark.parametrize("global_batch", quick_sample([8, 16], 0))
def test_memory_is_weighed_without_a_program_as_with_it(global_batch: int) -> None:
    """And the least that plans may hold is no more than that."""
    model = roomy_instance(3).model.model_copy(update={"num_layers": 8})
    workload = Workload(seq_len=512, global_batch_size=global_batch)
    request = PlanRequest(model, load_cluster("4xh100"), workload, fixed={"cp": 1, "tp": 1})
    room, schedules = PlanEvaluator(request).memory_budget, set()
    for shape in mesh_shapes(request):
        for order in schedule_choices(request, shape):
            for plan in draft_plans(request, order):
                found = forecast_memory(model, plan, workload, request.cluster, build_program(plan, model, workload))
                limits = [room.limit_bytes(rank.rank) or 0 for rank in found.ranks]
                peaks = [rank.terms.total for rank in found.ranks]
                assert room.excess_bytes(plan) == [peak - limit for peak, limit in zip(peaks, limits, strict=True)], (
                    plan
                )
                split = plan.dp_replicate, plan.dp_shard, plan.default_strategy.zero
                assert room.min_bytes(shape, split, order) <= max(peaks), plan
                again = room.excess_bytes(with_policy(plan, LayerPolicy("full")))
                assert room.min_bytes(shape, split, order) <= max(map(add, again, limits)), plan
                schedules.add(plan.schedule)
    assert schedules == {"1f1b", "zb-h1", "interleaved", "zb-v", "v-half"}


def declaring(trait: str) -> list[tuple[str, int]]:
    """Schedules, with numbers of chunks, that declare a trait of the planner."""
    return [
        (name, chunks)
        for name, entry in SCHEDULES.items()
        if getattr(entry.planner, trait) is not None
        for chunks in ((entry.chunks,) if entry.chunks else (2, 3))
    ]


@pytest.mark.parametrize(("schedule", "chunks"), declaring("deferred_weight_grads"))
def test_ranks_put_off_as_many_weight_backwards_as_the_floor_of_memory_counts(schedule: str, chunks: int) -> None:
    for pp, count in product((2, 3, 4, 7), (1, 2, 3, 5, 8, 13, 20)):
        plan = Plan(pp=pp, vpp=chunks, schedule=schedule)
        most = []
        for order in schedule_for_plan(plan, count).ranks:
            waiting = Counter({stage: 0 for _, stage, *_ in order})
            at_once = 0
            for kind, stage, *_ in order:
                waiting[stage] += {"I": 1, "W": -1}.get(kind, 0)
                at_once = max(at_once, min(waiting.values()))
            most.append(at_once)
        counted = deferred_micro_batches(schedule, pp, count)
        assert all(one <= at_once for one, at_once in zip(counted, most, strict=True)), (pp, count)
        assert counted == tuple(most) or (schedule == "zb-v" and counted[-1] == max(0, most[-1] - 1)), (pp, count)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_no_spread_of_layers_holds_less_than_the_least(counts: list[int], data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.integers(0, 9), min_size=len(counts), max_size=len(counts)))
    fullest = max(held * (3.0 + count * 2.0) for held, count in zip(layers, counts, strict=True))
    assert min_fullest_rank_bytes(sum(layers), 3.0, 2.0, tuple(counts)) <= fullest + 1e-9


@pytest.mark.parametrize(("schedule", "chunks"), declaring("warmup_forwards"))
def test_no_rank_does_more_forwards_of_its_first_stage_at_once_than_bounds_assume(schedule, chunks) -> None:
    for pp, count in product((2, 3, 4, 7, 8), (1, 2, 3, 5, 8, 12, 23)):
        plan = Plan(pp=pp, vpp=chunks, schedule=schedule)
        runs = []
        for order in schedule_for_plan(plan, count).ranks:
            forwards = takewhile(lambda action, own=order[0].stage: action[:2] == ("F", own), order)
            runs.append(sum(1 for _ in forwards))
        assert all(run <= most for run, most in zip(runs, max_warmup_forwards(schedule, pp, count), strict=True)), (
            pp,
            count,
        )


def test_a_new_schedule_is_searched_and_bounded_by_its_registry_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule with fewer warm-up forwards than it could have: nothing but its file and this line names it."""
    traits = PlannerTraits(searchable=True, compared_with_chunks=1, max_in_flight=(1, 0))
    entry = ScheduleEntry(one_f_one_b, "1F1B under another name", 1, planner=traits)
    monkeypatch.setitem(SCHEDULES, "toy", entry)
    request = replace(roomy_instance(2), fixed={"cp": 1, "tp": 1, "pp": 2})
    found = search(request, 20)
    value_of = {(one.plan.schedule, one.plan.hash): one.value for one in found.best}
    assert {"toy", "1f1b"} <= {schedule for schedule, _ in value_of}
    assert_bounds_hold(replace(request, fixed={**request.fixed, "schedule": "toy"}))
    first = FirstPlan(found.best[0], PlanEvaluator(request), 0.0)
    named = {reason.comparison.name for reason in find_reasons(first, [], SearchBudget())}
    assert found.best[0].plan.schedule == "toy" or "schedule toy" in named


def test_schedules_that_are_tried_late_are_taken_where_they_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all but 1F1B are tried late: the search alone ends with that, and the best of the others for its shape is
    the answer."""
    for name, entry in SCHEDULES.items():
        if name != "1f1b" and not (entry.searched or entry.is_asynchronous):
            assert entry.planner.searchable, name
            monkeypatch.setitem(SCHEDULES, name, replace(entry, planner=replace(entry.planner, tried_late=True)))
    model = SMALL.model_copy(update={"num_layers": 8})
    request = PlanRequest(model, load_cluster("2xh100"), WORK, fixed={"cp": 1, "pp": 2, "micro_batch_size": 1})
    first = search(request, 1).best[0]
    assert first.plan.schedule == "1f1b"
    evaluator, values = PlanEvaluator(request), {}
    (shape,) = mesh_shapes(request)
    for choice in schedule_choices(request, shape, tried_late=True):
        for draft in draft_plans(request, choice):
            if (plan := evaluator.complete_draft(draft, choice)) is not None:
                values[plan] = evaluator.evaluate(plan).value
    tried = {name for name, one in SCHEDULES.items() if not (one.searched or one.is_asynchronous)}
    assert {plan.schedule for plan in values} | {"1f1b"} == tried
    best = find_best_plans(request, 1).result.best[0]
    assert best.value == min(values.values()) < first.value


def test_a_bound_that_is_too_high_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LowerBounds.of_plan
    monkeypatch.setattr(LowerBounds, "of_plan", lambda self, plan: real(self, plan) * (1.5 if plan.pp > 1 else 1))

    def check_all() -> None:
        for seed in (100, 101):
            test_no_bound_is_above_a_simulated_time(seed)

    with pytest.raises(AssertionError):
        check_all()


def test_every_plan_of_the_space_is_legal() -> None:
    request = roomy_instance(7)
    found = [
        plan
        for shape in mesh_shapes(request)
        for order in schedule_choices(request, shape)
        for plan in draft_plans(request, order)
    ]
    assert found
    for plan in found:
        assert not plan_violations(plan, request.model, request.workload, request.cluster.num_devices)


# ----------------------------------------------------------------------------------------------------------------------
# Layers


numbers = st.integers(0, 12).map(float)
options = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3)


@settings(max_examples=150)
@given(st.lists(options, min_size=1, max_size=5), st.integers(0, 40))
def test_recompute_by_layer_is_what_trying_all_gives(layers, capacity):
    table = [[Option(str(index), *pair) for index, pair in enumerate(layer)] for layer in layers]
    totals = [
        (sum(one.time_s for one in chosen), sum(one.memory_bytes for one in chosen)) for chosen in product(*table)
    ]
    fitting = [(time_s, memory) for time_s, memory in totals if memory <= capacity]
    choice = cheapest_choice(table, capacity)
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert (choice.time_s, choice.memory_bytes) == min(fitting)
        assert choice.memory_bytes == sum(
            next(one for one in layer if one.label == name).memory_bytes
            for layer, name in zip(table, choice.labels, strict=True)
        )


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 2)), min_size=2, max_size=4), st.integers(4, 9))
def test_no_split_of_layers_has_a_lower_busiest_rank(pairs, num_layers):
    ranks = [RankLoad(*pair) for pair in pairs]
    best = min(
        max(load.seconds_with(count) for load, count in zip(ranks, counts, strict=True))
        for counts in product(range(num_layers + 1), repeat=len(ranks))
        if sum(counts) == num_layers
    )
    assert min_busiest_rank_s(ranks, num_layers) <= best * (1 + 1e-9)


def test_layers_go_to_the_faster_devices() -> None:
    request = PlanRequest(
        roomy_instance(1).model.model_copy(update={"num_layers": 12}),
        load_cluster("8xh100+8xv100"),
        Workload(seq_len=2048, global_batch_size=16),
        fixed={"cp": 1, "tp": 1, "pp": 2, "schedule": "1f1b"},
        framework=MEGATRON.model_copy(update={"operator_host_s": 0.0}),  # whose host is never the slower one
    )
    evaluator = PlanEvaluator(request)
    order = next(
        order for shape in mesh_shapes(request) for order in schedule_choices(request, shape) if order.balances_layers
    )
    plan = next(draft_plans(request, order))
    moved = balance_layers(plan, 12, evaluator.costs.pass_times)
    assert moved is not None
    assert moved.stages[0].layers > moved.stages[1].layers
    assert (
        max(load.layer_s for load in rank_loads(plan, 12, evaluator.costs.pass_times))
        > 2 * rank_loads(plan, 12, evaluator.costs.pass_times)[0].layer_s
    )


# ----------------------------------------------------------------------------------------------------------------------
# Unequal clusters


def mixed(order: str, fast: float = 20e9, slow: float = 1e9) -> dict:
    rates = [[fast if one == other else slow for other in order] for one in order]
    group = {"num_nodes": len(order), "device": "a100"}
    return {"name": "mixed", "groups": [group], "node_bandwidth_bytes_per_s": rates}


def test_nodes_with_fast_links_are_put_together(tmp_path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(mixed("ABAB")))
    cluster = load_cluster(str(path))
    assert (0, 2, 1, 3) in set(block_orders(cluster))
    model = roomy_instance(3).model.model_copy(
        update={"num_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 4096}
    )
    fixed = {"cp": 1, "pp": 2, "tp": 1, "axis_order": MESH_AXES}
    found = find_best_plans(PlanRequest(model, cluster, Workload(seq_len=2048, global_batch_size=16), fixed=fixed), 1)
    assert found.node_order is not None
    assert set(found.node_order[:2]) in ({0, 2}, {1, 3})
    assert found.naive_step_s is not None
    assert found.result.best[0].prediction.step_time_s < found.naive_step_s


def test_annealing_finds_the_best_order_of_few_nodes() -> None:
    random = Random(5)
    cost_of = {pair: random.random() for pair in permutations(range(6), 2)}

    def cost(order) -> float:
        return sum(cost_of[pair] for pair in zip(order, order[1:], strict=False))

    best = min(cost(order) for order in permutations(range(6)))
    assert anneal(range(6), cost, 4000)[1] == pytest.approx(best, rel=0.1)


def test_reordering_keeps_the_nodes_and_their_links(tmp_path) -> None:
    cluster = load_cluster("16xh100+8xa100")
    changed = reorder_nodes(cluster, (2, 0, 1))
    assert [group.device.name for group in changed.groups] == ["a100-80-sxm", "h100-sxm"]
    assert reorder_nodes(changed, (1, 2, 0)) == cluster


# ----------------------------------------------------------------------------------------------------------------------
# The verb


TINY = ["plan", "--model", "tiny", "--cluster", "4xa100", "--seq-len", "1024", "--global-batch", "64"]
TINIER = ["--cluster", "2xa100", "--global-batch", "4"]


def test_the_best_plan_is_written_and_trains(tmp_path, capsys) -> None:
    path = tmp_path / "plan.yaml"
    assert main([*TINY, "--json", "--tokens", "1B", "--explain", "-o", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    first = answer["plans"][0]
    assert first["hash"] == load_plan(path).hash
    assert {"step_time_s", "tokens_per_s_per_device", "mfu", "memory_bytes", "headroom", "bubble_fraction"} <= set(
        first
    )
    assert {"days", "usd", "kwh", "co2_kg", "exposed_communication_s", "not_yet"} <= set(first)
    assert [one["rank"] for one in answer["plans"]] == list(range(1, len(answer["plans"]) + 1))
    assert len(answer["plans"]) > 1
    assert [one["step_time_s"] for one in answer["plans"]] == sorted(one["step_time_s"] for one in answer["plans"])
    assert answer["why"]
    assert {one["family"] for one in answer["families"]} >= {"data alone", "data × tp", "data × tp × pp"}
    run = ["train", "--preset", "tiny", "--parallel", str(path), "--train.global_batch_size", "64", "--dry-run"]
    assert main(run) == 0
    assert load_plan(path).hash in capsys.readouterr().out


def test_no_path_of_calls_from_plan_to_the_answer_enters_a_module_more_than_three_times(capsys) -> None:
    """Somebody who follows the calls down meets a module once and goes on, but for callbacks."""
    stack: list[str] = []
    most: Counter[str] = Counter()

    def follow(frame, event, _) -> None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("muster."):
            if event == "call":
                stack.append(module)
                most[module] = max(most[module], sum(name == module for name, _ in groupby(stack)))
            elif event == "return" and stack:
                stack.pop()

    sys.setprofile(follow)
    try:
        words = "plan --model tiny --cluster 2xh100 --seq-len 256 --global-batch 4 --require cp1-tp1-mb1"
        assert main(words.split()) == 0
    finally:
        sys.setprofile(None)
    assert "Why the first" in capsys.readouterr().out
    assert most["muster.planner.frontier"], "the search is followed"
    assert max(most.values()) <= 3, most.most_common(5)


def test_the_table_fits_80_columns(capsys) -> None:
    assert main([*TINY, "--tokens", "300M"]) == 0
    shown = capsys.readouterr().out
    table = shown.split("The step of the first")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "no other plan can be better" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--require", "tp 3"], 3, "4 devices are not a multiple of 3; there are plans without tp3"),
        (["--require", "pp64"], 3, "pp 64"),
        (["--memory-limit", "1M"], 3, "all of it that may be used is 3.81 MiB"),
        (["--cluster", "0xh100"], 2, "at least one device"),
        (["--model", "llama3-8c"], 2, "llama3-8b"),
        (["--tokens", "many"], 2, "expected a number"),
        (["--global-batch", "3", "--require", "dp4"], 3, "3"),
        (["--precision", "bf61"], 2, "bf16"),
        (["--cluster", "this"], 2, "muster profile"),
        (["--cluster", "-1xh100"], 2, "at least one device, got -1xh100"),
        (["--tokens", "-1T"], 2, "--tokens: expected a number above 0"),
        (["--model", "/tmp"], 2, "expected a Hugging Face directory"),
        (["--run-file", "run.yaml"], 2, "files of --launch"),
        (["--require", "tp4", "--require", "tp2"], 2, "'tp2' sets again what 'tp4' sets"),
        (["--require", "szbv-pp1"], 3, "needs a pipeline of 2 ranks or more"),
        (
            ["--require", "dp4", "--global-batch", "2"],
            3,
            "ranks 4 × micro_batch_size 1); there are plans without dp4, the",
        ),
        (["--require", "l3.3.3.1", "--global-batch", "4"], 3, "its stages hold 10 layers"),
        (
            ["--require", "sp-tp1", *TINIER],
            3,
            "tp is 1; there are plans without sp",
        ),
        (
            ["--require", "rcore", *TINIER],
            3,
            "can't be run yet; there are plans without rcore",
        ),
        (["--require", "sauto"], 2, "--parallel.schedule auto"),
        (["--require", "z4"], 2, "did you mean 'z3'?"),
        (["--objective", "speed"], 2, "expected one of time, cost, energy, memory; did you mean 'time'?"),
        (["--launch", "slrum"], 2, "did you mean 'slurm'?"),
        (["--tokens", "1B", "--batch-ramp", "7,8,1M"], 2, "did you mean 8,8,1000000?"),
        (["--memory-limit", "500G"], 2, "GiB; give no more, or leave it out"),
        (["--what-if", "network=/2,network=/4"], 2, "network is changed twice"),
        (["--model", "gpt2", "--seq-len", "8192"], 2, "gpt2 has vectors for 1,024 positions"),
        (["--cluster", "11xcpu"], 3, "there are plans for 66 sequences a step (--global-batch 66)"),
    ],
)
def test_what_can_not_be_is_said_in_a_sentence(arguments, code, said, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == code
    message = capsys.readouterr().err
    assert said in message
    assert message.startswith("muster: ")


def test_a_search_ends_with_its_time_before_all_orders_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cluster = load_model("llama3-8b"), load_cluster("32xh100")
    request = PlanRequest(model, cluster, Workload(seq_len=4096, global_batch_size=256))
    every = set(mesh_shapes(request))
    assert set(_evenly_spread(list(every))) == every
    seconds = iter(range(10**6))
    monkeypatch.setattr("muster.planner.search_budget.perf_counter", lambda: float(next(seconds)))
    found = search(request, 2, SearchBudget(end_s=8.0))
    assert 0 < found.counts["shapes"] < len(every)
    assert not found.proven
    shapes = search(request, 2, SearchBudget(end_s=0.0)).counts["shapes"]
    assert shapes == 0, "a search whose time is over before it begins looks at nothing"
    nothing = search(replace(request, memory_limit_bytes=2**20), 2, SearchBudget(0.0))
    assert nothing.best == []
    assert nothing.counts["shapes"] == len(every)


def test_an_unproven_search_says_what_may_be_missed() -> None:
    found = search(roomy_instance(2), 3, SearchBudget(0.0))
    assert not found.proven
    assert found.open_bound < inf
