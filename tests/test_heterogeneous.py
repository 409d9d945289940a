"""Unlike devices and links: uneven batches, pipelines over slow links, and the search for both."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.cluster_files import load_cluster, load_device
from muster.config.named_model import load_model
from muster.cost.comm_volume import pipeline_bytes
from muster.cost.time.collectives import all_reduce_s
from muster.cost.time.plan_times import place_plan, plan_times
from muster.layout.mesh import coordinates_of
from muster.planner.bounds.latency_bound import latency_bound_s
from muster.planner.bounds.step_bound import step_bound_s
from muster.planner.heterogeneous import find_best_plans
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import exhaustive_search, search
from muster.planner.search_budget import SearchBudget
from muster.planner.space import draft_plans, mesh_shapes, schedule_choices
from muster.planner.uneven_batch import fastest_split
from muster.schedule.action import Kind
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.framework_traits import FrameworkTraits, StateStorage
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.schedules import SCHEDULES
from muster.spec.workload import Workload
from tests.sampling import quick_sample

MODEL = ModelSpec(
    vocab_size=512, hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=8, intermediate_size=4096, name="small"
)
INSIDE = ("dp_replicate", "dp_shard", "pp", "cp", "tp")


def mixed(*devices: str) -> ClusterSpec:
    """A node of two devices of each kind."""
    groups = []
    for name in devices:
        device = load_device(name)
        assert device.node is not None
        nics = device.node.nics
        groups.append(NodeGroup(num_nodes=1, devices_per_node=2, device=device, intra=device.node.intra, nics=nics))
    return ClusterSpec(name="mixed", groups=tuple(groups))


def step_s(plan: Plan, cluster: ClusterSpec, global_batch: int) -> float:
    return predict(MODEL, plan, Workload(seq_len=4096, global_batch_size=global_batch), cluster).step_time_s


@pytest.mark.parametrize("name", ["dp4-z1", "dp2-pp2-z1", "dp2x1-pp2-z1-szbh1", "dp2-pp2v2-z1-szbv"])
def test_on_equal_devices_all_wait_for_the_largest_share(name: str) -> None:
    cluster = load_cluster("4xh100")
    equal = parse_plan_name(name)
    unequal = parse_plan_name(f"{name}-uneven3.1")
    assert step_s(unequal, cluster, 32) == pytest.approx(step_s(equal, cluster, 48), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_rank_is_as_fast_as_its_own_devices(schedule: str) -> None:
    """Pipelines within a node: the fast one may do more micro-batches while the slow one does its own."""
    plan = parse_plan_name("dp2-pp2-z1").model_copy(update={"axis_order": INSIDE, "schedule": schedule})
    both = mixed("h100-sxm", "a100-80-sxm")
    fast, slow = (mixed(name, name) for name in ("h100-sxm", "a100-80-sxm"))
    for shares in ((3, 1), (2, 1), (1, 3)):
        unequal = plan.model_copy(update={"uneven_micro_batches": shares})
        count = 24 // sum(shares)
        alone = max(step_s(plan, fast, 2 * count * shares[0]), step_s(plan, slow, 2 * count * shares[1]))
        # The groups of both kinds meet over the slower network, and step when the slower ones do.
        assert step_s(unequal, both, 24) == pytest.approx(alone, rel=0.03)
    equal = step_s(plan, both, 24)
    assert step_s(plan.model_copy(update={"uneven_micro_batches": (2, 1)}), both, 24) < 0.8 * equal


# --- which ones are chosen ---


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_no_other_shares_are_done_sooner(ranks: list[tuple[int, int, int]], more: int) -> None:
    """Against all ways to give whole micro-batches, for times that rise from a begin, at first not at all."""
    total = len(ranks) + more

    def rising(begin: int, each: int, flat: int) -> Callable[[int], float]:
        return lambda count: begin + each * max(count, flat)

    times = [rising(*rank) for rank in ranks]
    counts = fastest_split(times, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    ways = (way for way in product(range(1, total + 1), repeat=len(ranks)) if sum(way) == total)
    least = min(max(time(count) for time, count in zip(times, way, strict=True)) for way in ways)
    assert max(time(count) for time, count in zip(times, counts, strict=True)) == least


REQUEST = PlanRequest(
    MODEL, mixed("h100-sxm", "a100-80-sxm"), Workload(seq_len=2048, global_batch_size=24), fixed={"cp": 1}
)


def test_bounds_of_plans_with_shares_hold() -> None:
    evaluator, shared = PlanEvaluator(REQUEST), 0
    for shape in mesh_shapes(REQUEST):
        for order in schedule_choices(REQUEST, shape):
            for draft in draft_plans(REQUEST, order) if order.uneven_batch else ():
                if (plan := evaluator.complete_draft(draft, order)) is not None:
                    time_s = evaluator.evaluate(plan).prediction.step_time_s * (1 + 1e-9)
                    assert max(evaluator.bounds.of_choice(order), evaluator.bounds.of_plan(plan)) <= time_s, plan
                    shared += bool(plan.uneven_micro_batches)
    assert shared > 10


def test_the_search_finds_the_best_shares() -> None:
    """The search finds the same as simulating everything; pipelines on one kind of device get data by its speed."""
    request = replace(REQUEST, fixed={"cp": 1, "pp": 1, "tp": 1})
    expected = sorted({verdict.sort_key for verdict in exhaustive_search(PlanEvaluator(request))})[:3]
    found = search(request, 3)
    assert [verdict.sort_key for verdict in found.best] == expected
    best = found.best[0].plan
    assert best.uneven_micro_batches
    assert best.uneven_micro_batches[0] > best.uneven_micro_batches[-1]
    asked = search(replace(request, fixed={"cp": 1, "zero": "z1", "uneven_micro_batches": (3, 1)}), 1).best[0]
    assert asked.plan.uneven_micro_batches == (3, 1)


# --- slow links ---


def slow_links(global_batch: int = 16) -> PlanRequest:
    """Two sites of two nodes, over a link on which a hop takes as long as several passes."""
    node = load_cluster("2xh100").groups[0]
    group = node.model_copy(update={"num_nodes": 4, "nics": load_device("h100-sxm").node.nics})  # type: ignore[union-attr]
    matrix = tuple(tuple(9e11 if a == b else 4e10 if a // 2 == b // 2 else 1e9 for b in range(4)) for a in range(4))
    cluster = ClusterSpec(name="sites", groups=(group,), node_bandwidth_bytes_per_s=matrix)
    return PlanRequest(
        MODEL, cluster, Workload(seq_len=2048, global_batch_size=global_batch), fixed={"cp": 1, "tp": 1, "zero": "z1"}
    )


def test_no_more_trips_are_under_way_than_the_bound_counts() -> None:
    for name, entry in SCHEDULES.items():
        if entry.planner.max_in_flight is None:
            continue
        most, more = entry.planner.max_in_flight
        delay = entry.planner.weight_grad_delay
        for pp, count in product((2, 3, 5, 8), (1, 3, 7, 24)):
            chunks = SCHEDULES[name].chunks or 1
            schedule = make_schedule(name, ScheduleSpec(pp, count, chunks))
            for stage, rank in enumerate(schedule.placement):
                passes = [action for action in schedule.ranks[rank] if action.stage == stage]
                changes = [{"F": 1, "B": -1, "I": -1}.get(action.kind, 0) for action in passes]
                under_way = most * (pp * chunks - stage) + more
                assert max(accumulate(changes)) <= under_way, (name, pp, count, stage)
                begun = {action[:3:2]: index for index, action in enumerate(passes)}
                for trip in range(count - under_way if delay else 0):
                    delayed = trip - delay * stage
                    follows = begun[Kind.F, trip + under_way]
                    assert begun[Kind.I, trip] < follows
                    assert delayed < 0 or begun[Kind.W, delayed] < follows, (name, pp, count, stage, trip)


def test_bounds_over_slow_links_hold_and_bind() -> None:
    request, binding = slow_links(), 0
    evaluator = PlanEvaluator(request)
    for shape in mesh_shapes(request):
        for order in schedule_choices(request, shape):
            for draft in draft_plans(request, order):
                if (plan := evaluator.complete_draft(draft, order)) is not None:
                    time_s = evaluator.evaluate(plan).prediction.step_time_s * (1 + 1e-9)
                    count = plan.num_micro_batches(request.workload)
                    trips_s = latency_bound_s(plan, evaluator.costs.pass_times(plan), count)
                    passes_s = step_bound_s(plan, evaluator.costs.pass_times(plan), [count])
                    assert (
                        max(trips_s, passes_s, evaluator.bounds.of_choice(order), evaluator.bounds.unsharded(order))
                        <= time_s
                    ), plan
                    binding += trips_s > passes_s
    assert binding > 5


@pytest.mark.parametrize("global_batch", quick_sample([8, 16], 0))
def test_what_is_tried_first_over_slow_links_does_not_hide_the_best(global_batch: int) -> None:
    request = slow_links(global_batch)
    expected = sorted({verdict.sort_key for verdict in exhaustive_search(PlanEvaluator(request))})[:2]
    assert [verdict.sort_key for verdict in search(request, 2).best] == expected


# --- what lies across kinds of devices ---


def test_a_stage_across_unlike_devices_must_fit_the_smallest() -> None:
    cluster = mixed("h100-sxm", "a100-80-sxm")
    small = cluster.groups[1].device.model_copy(update={"memory_bytes": 2 * 2**30})
    groups = cluster.groups[0], cluster.groups[1].model_copy(update={"device": small})
    cluster = cluster.model_copy(update={"groups": groups})
    workload = Workload(seq_len=2048, global_batch_size=24)
    for plan, ranks in (
        (parse_plan_name("dp4-z1"), [2]),
        (parse_plan_name("dp2-pp2-z1"), [0, 2]),
        (parse_plan_name("dp2-pp2-z1").model_copy(update={"axis_order": INSIDE}), [2, 3]),
    ):
        found = predict(MODEL, plan, workload, cluster)
        assert [one.rank for one in found.memory] == ranks
        assert found.fits is False
        room = PlanEvaluator(PlanRequest(MODEL, cluster, workload)).memory_budget
        limits = [room.limit_bytes(rank) or 0 for rank in ranks]
        assert room.excess_bytes(plan) == [one.total - limit for one, limit in zip(found.memory, limits, strict=True)]


def test_plans_with_shares_are_as_asked() -> None:
    asked = {"cp": 1, "tp": 1, "pp": 1, "dp_replicate": 4}
    best = search(replace(REQUEST, fixed=asked), 5).best
    assert any(one.plan.uneven_micro_batches for one in best)
    assert {one.plan.dp_replicate for one in best} == {4}


def test_bounds_of_shares_hold_where_links_differ() -> None:
    """The rank over slow links has the smaller share."""
    cluster = slow_links().cluster
    slow = {(2, 3), (3, 2)}
    matrix = tuple(tuple(9e11 if a == b else 1e9 if (a, b) in slow else 4e11 for b in range(4)) for a in range(4))
    cluster = cluster.model_copy(update={"node_bandwidth_bytes_per_s": matrix})
    plan = parse_plan_name("dp2-pp4-z1-uneven15.1").model_copy(update={"axis_order": INSIDE})
    evaluator = PlanEvaluator(PlanRequest(MODEL, cluster, Workload(seq_len=2048, global_batch_size=64)))
    assert evaluator.bounds.of_plan(plan) <= evaluator.evaluate(plan).prediction.step_time_s * (1 + 1e-12)


def test_bounds_of_shares_hold_for_devices_of_one_name() -> None:
    cluster = mixed("a100-80-sxm", "h100-sxm")
    fast = cluster.groups[1].device.model_copy(update={"name": "a100-80-sxm"})
    groups = cluster.groups[0], cluster.groups[1].model_copy(update={"device": fast})
    evaluator = PlanEvaluator(replace(REQUEST, cluster=cluster.model_copy(update={"groups": groups})))
    plan = parse_plan_name("dp4-z1-uneven1.3")
    bound = max(
        evaluator.bounds.of_plan(plan), evaluator.batch_splitter.shape_bound_s(next(mesh_shapes(evaluator.request)))
    )
    assert bound <= evaluator.evaluate(plan).prediction.step_time_s


def test_which_device_is_slowest_depends_on_the_precision() -> None:
    cluster = mixed("l40s", "a100-80-sxm")
    workload = Workload(seq_len=512, global_batch_size=4)
    for precision, name in (("bf16", "l40s"), ("fp8", "a100-80-sxm")):
        setting = place_plan(MODEL, Plan(dp_shard=4, precision=precision), workload, cluster)
        assert setting.device(0).name == name


@pytest.mark.parametrize(("first", "last", "factor"), [(4, 4, 1), (4, 2, 2), (2, 4, 1), (4, 1, 4)])
def test_a_rank_that_receives_from_several_waits_for_all(first: int, last: int, factor: int) -> None:
    """Beside a hop between equal ranks of which each has what a rank of the first stage has."""
    stages = tuple(StageSpec(layers=4, mesh=Mesh(dp_shard=ranks)) for ranks in (first, last))
    plan = Plan(pp=2, stages=stages, micro_batch_size=2)
    even = Plan(pp=2, dp_shard=first, micro_batch_size=2)
    workload, cluster = Workload(seq_len=4096, global_batch_size=32), load_cluster("8xh100")
    hops, alike = (plan_times(MODEL, one, workload, cluster).p2p_times for one in (plan, even))
    for pair in ((0, 1), (1, 0)):
        assert hops[pair].send_busy_s == pytest.approx(factor * alike[pair].send_busy_s)
        assert hops[pair].total_s - hops[pair].send_busy_s == pytest.approx(
            alike[pair].total_s - alike[pair].send_busy_s
        )


@pytest.mark.parametrize(("storage", "shards"), [("muster", 4), ("megatron", 1)])
def test_tied_gradients_that_are_reduced_before_are_added_up_in_parts(storage: StateStorage, shards: int) -> None:
    """The bytes are those that a rank of the runtime sends."""
    model, cluster = MODEL.model_copy(update={"tied_embeddings": True, "vocab_size": 2**17}), load_cluster("32xa100")
    workload = Workload(seq_len=512, global_batch_size=32)
    plan = Plan(pp=2, dp_shard=4, tp=4, default_strategy=LayerStrategy(zero="z1"))
    sent = pipeline_bytes(model, plan, workload, 0, coordinates_of(plan, 0))["ALL_REDUCE_TIED"] * 4 / shards
    setting = place_plan(model, plan, workload, cluster)
    tie_s = plan_times(model, plan, workload, cluster, FrameworkTraits(storage=storage)).seconds["ALL_REDUCE_TIED", 0]
    assert tie_s == all_reduce_s(setting.pair(0, setting.first_rank(1)), sent)


# --- from plan to run ---


def test_sites_that_share_a_line_are_planned_for_from_the_first() -> None:
    """In a short search, seeds send over the slow link no more than each stage's ends and gradients."""
    model, cluster = load_model("llama3-8b"), load_cluster("two-sites")
    request = PlanRequest(model, cluster, Workload(seq_len=4096, global_batch_size=256), fixed={"cp": 1, "tp": 8})
    found = find_best_plans(request, 1, SearchBudget(0.0)).result
    line = next(tier.link for tier in cluster.tiers if tier.link is not None)
    once_s = 256 * 4096 * model.hidden_size * 2 / line.bandwidth_bytes_per_s
    assert found.best[0].prediction.step_time_s < 2 * once_s
