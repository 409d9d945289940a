"""Schedules for a plan's own times, and the plans that are found with them where links differ."""

from dataclasses import replace

import pytest

from muster.config.cluster_files import load_cluster, load_device
from muster.config.named_model import load_model
from muster.planner.alternatives import FirstPlan
from muster.planner.custom_schedules import find_custom_schedules
from muster.planner.heterogeneous import find_best_plans
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.reasons import find_reasons
from muster.planner.request import PlanRequest, build_request
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.searched_orders import try_searched_orders
from muster.schedule.check import check
from muster.schedule.custom_search import search_custom_orders, sort_final_weight_grads
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

SETTING = ScheduleSpec(2, 12, 3, placement=(0, 0, 0, 1, 1, 1), p2p_s=2, memory_limit=6)
HOPS_S = (0.0, 0.0, 2.0, 0.0, 0.0)


def makespan_s(schedule: Schedule, setting: ScheduleSpec = SETTING) -> float:
    return time_schedule(schedule, setting).makespan_s


def test_an_order_hides_slow_hops_within_its_memory() -> None:
    """No later than the work of the second rank, the first forward and a hop; ZB-H2 and a smaller memory wait."""
    found = list(search_custom_orders(SETTING, HOPS_S))
    assert [schedule.placement for schedule in found] == [SETTING.placement] * 2
    for schedule in found:
        timing = time_schedule(schedule, SETTING)
        assert max(timing.peak_activation) <= SETTING.memory_limit + 1e-9
        assert timing.makespan_s == pytest.approx(1 + 2 + 12 * 3)
    whole = replace(SETTING, chunks=1, placement=(), forward_s=(), input_backward_s=(), weight_backward_s=())
    assert makespan_s(make_schedule("zb-h2", whole), whole) > 1.02 * makespan_s(found[0])
    small = replace(SETTING, memory_limit=2)
    tight, _ = search_custom_orders(small, HOPS_S)
    assert max(time_schedule(tight, small).peak_activation) <= 2 + 1e-9
    assert makespan_s(tight) > 1.1 * makespan_s(found[0])


def test_what_ends_an_order_is_sorted_by_stage() -> None:
    found, _ = search_custom_orders(SETTING, HOPS_S)
    ordered = sort_final_weight_grads(found)
    for before, after in zip(found.ranks, ordered.ranks, strict=True):
        assert sorted(before) == sorted(after)
        end = [action.stage for action in after[-4:]]
        assert all(action.kind == "W" for action in after[-4:])
        assert end == sorted(end, reverse=True)


def two_sites() -> PlanRequest:
    """Two nodes on each of two sites, listed in turn."""
    device = load_device("a100-80-sxm")
    assert device.node is not None
    group = NodeGroup(num_nodes=1, devices_per_node=2, device=device, intra=device.node.intra, nics=device.node.nics)
    inside, near, far = 250e9, 22e9, 0.5e9
    matrix = tuple(
        tuple(inside if one == other else near if one % 2 == other % 2 else far for other in range(4))
        for one in range(4)
    )
    cluster = ClusterSpec(name="two-sites", groups=(group,) * 4, node_bandwidth_bytes_per_s=matrix)
    model = ModelSpec(
        vocab_size=8192, hidden_size=2048, num_layers=12, num_heads=16, num_kv_heads=16, intermediate_size=8192
    )
    return PlanRequest(
        model,
        cluster,
        Workload(seq_len=2048, global_batch_size=32),
        fixed={"tp": 1, "cp": 1, "pp": 2, "dp_replicate": 1},
    )


@pytest.fixture(scope="module")
def request_of_sites() -> PlanRequest:
    return two_sites()


def test_sites_gain_by_an_order_for_their_own_times(request_of_sites: PlanRequest) -> None:
    """The plan that is found beats the best with a schedule out of a book, fits, and is kept whole."""
    found = find_best_plans(request_of_sites, 2)
    best = found.result.best[0]
    plain = [one.value for one in found.result.best if one.plan.pinned_schedule is None]
    assert best.plan.pinned_schedule is not None
    assert not plain or best.value < 0.95 * min(plain)
    assert best.plan.pinned_schedule.times == "predicted"
    assert found.evaluator.memory_budget.fits(best.plan)
    assert not best.unsupported
    check(best.prediction.program)
    assert Plan.model_validate(best.plan.model_dump(mode="json")) == best.plan
    again = PlanEvaluator(found.request).evaluate(best.plan)
    assert again.prediction.step_time_s == pytest.approx(best.value, rel=1e-12)
    assert not found.result.proven
    reasons = find_reasons(FirstPlan(best, found.evaluator, 0.0), [], SearchBudget(2000.0))
    zb_h1 = next(reason.comparison for reason in reasons if reason.comparison.name == "schedule zb-h1")
    assert (zb_h1.slower or zb_h1.interval[1]) > 0


def test_what_is_asked_for_keeps_its_order(request_of_sites: PlanRequest) -> None:
    plan = parse_plan_name("dp4-pp2-z1-szbh2")

    def orders(**changes) -> list[Plan]:
        request = replace(request_of_sites, **changes)
        return [one.plan for one in find_custom_schedules([plan], PlanEvaluator(request), SearchBudget(500.0))]

    assert [one.mesh(0) for one in orders()] == [plan.mesh(0)]
    assert not orders(fixed={"schedule": "zb-h2"})
    assert not orders(fixed={"vpp": 1})
    assert not orders(objective="memory")
    (even,) = orders(fixed={"stages": ()})
    assert not even.stages
    assert not find_custom_schedules([parse_plan_name("dp8-z1")], PlanEvaluator(request_of_sites), SearchBudget(500.0))


def test_an_order_for_its_times_beats_registered_schedules_where_nodes_are_alike() -> None:
    """Eight micro-batches on eight ranks, in memory that holds more of them than ZB-V does."""
    own = load_model("llama2-13b"), load_cluster("8xa100"), 4096, 8
    request = build_request(*own, fix="pp8", runnable=True)
    named = search(request, 2, SearchBudget(6000.0), exact=1)
    found = try_searched_orders(named, 2, SearchBudget(1200.0))
    best, registered = found.best
    assert registered == named.best[0], "the simpler one, for whom that decides"
    assert registered.plan.pinned_schedule is None
    assert best.plan.schedule == "auto"
    assert best.value < 0.99 * registered.value
    assert found.evaluator.memory_budget.fits(best.plan)
    assert not plan_violations(best.plan, request.model, request.workload, 8)
    again = PlanEvaluator(request).evaluate(best.plan)
    assert again.prediction.step_time_s == pytest.approx(best.value, rel=1e-12)
    assert not found.proven
    assert try_searched_orders(named, 2, SearchBudget(0.0)) == named
    for changes in ({"fixed": {"schedule": "zb-v"}}, {"objective": "memory"}):
        other = replace(named, evaluator=PlanEvaluator(replace(request, **changes)))
        assert try_searched_orders(other, 2, SearchBudget(1200.0)) == other, changes
