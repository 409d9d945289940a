"""The planner's choice between keeping, recomputing and offloading activations, layer by layer."""

import json
from dataclasses import replace
from itertools import chain, combinations_with_replacement, product
from math import ceil
from typing import Any

import pytest

from muster.api import verbs
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.cost.activations import offloaded_activation_bytes
from muster.cost.memory.forecast import forecast_memory, host_shares_bytes
from muster.cost.memory.liveness import allocation_orders
from muster.planner.alternatives import FirstPlan
from muster.planner.families import explain_family, search_families
from muster.planner.memory.budget import PendingFit
from muster.planner.memory.fitter import RECOMPUTE_MODES, LayerPolicy, with_layer_policies, with_policy
from muster.planner.memory.trim_offload import trim_offload
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.reasons import find_reasons
from muster.planner.request import PlanRequest
from muster.planner.search import exhaustive_search, search
from muster.planner.search_budget import SearchBudget
from muster.report.prediction import prediction_lines
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.sampling import quick_sample

MODEL = ModelSpec(vocab_size=4096, hidden_size=1024, num_layers=4, num_heads=8, intermediate_size=2816, name="small")
WORK = Workload(seq_len=4096, global_batch_size=12)
WAYS = [LayerPolicy(*pair) for pair in product(RECOMPUTE_MODES, ("none", "activations"))]


def cluster(devices: int, host_bytes_per_s: float | None, host_memory_bytes: int | None) -> ClusterSpec:
    """H100s of a node, whose host is so fast and large."""
    found = load_cluster(f"{devices}xh100")
    device = found.device.model_copy(update={"host_bandwidth_bytes_per_s": host_bytes_per_s})
    changed = {"device": device, "host_memory_bytes": host_memory_bytes}
    return found.model_copy(update={"groups": (found.groups[0].model_copy(update=changed),)})


def pipeline(host_bytes_per_s: float = 63e9, host_memory_bytes: int | None = None, **fixed) -> PlanRequest:
    """One micro-batch is a sequence, and every device a pipeline rank."""
    own = {"pp": 2, "schedule": "gpipe", "micro_batch_size": 1, "tp": 1, "cp": 1, **fixed}
    return PlanRequest(MODEL, cluster(own["pp"], host_bytes_per_s, host_memory_bytes), WORK, fixed=own)


def choices(plan: Plan) -> list[Plan]:
    """Each of the ways for each layer; layers of one stage are alike."""
    of_stage = [list(combinations_with_replacement(WAYS, MODEL.num_layers // plan.pp))] * plan.pp
    chosen = (dict(enumerate(chain.from_iterable(stages))) for stages in product(*of_stage))
    plans = [with_layer_policies(plan, ways, WAYS, MODEL.num_layers) for ways in chosen]
    return [one for one in plans if plan.pp == 2 or moves(one, 0) or moves(one, 1) or not offloads(one)]


def moves(plan: Plan, layer: int) -> bool:
    return plan.strategy(layer).offload != "none"


def offloads(plan: Plan) -> bool:
    return any(moves(plan, layer) for layer in range(MODEL.num_layers))


@pytest.mark.parametrize(
    ("host_bytes_per_s", "schedule"), quick_sample([(63e9, "gpipe"), (12e9, "gpipe"), (20e9, "1f1b")], 0, 1)
)
def test_the_choice_is_that_of_trying_all(host_bytes_per_s, schedule) -> None:
    """For falling limits of memory, what the search finds is no slower than the best of all plans that fit and differ
    in nothing else."""
    request = pipeline(host_bytes_per_s, schedule=schedule, pp=2 if schedule == "gpipe" else 4)
    evaluator = PlanEvaluator(request)
    plain = search(request, 1, evaluator=evaluator).best[0].plan
    over = {plan: max(evaluator.memory_budget.excess_bytes(plan)) for plan in choices(plain)}
    least, most = min(over.values()), over[plain]
    chosen = []
    for part in (0.9, 0.6, 0.3, 0.1, 0.0):
        limit = least + part * (most - least) + 1 + (evaluator.memory_budget.limit_bytes(0) or 0)
        own = PlanEvaluator(replace(request, memory_limit_bytes=int(limit)))
        found = search(own.request, 1, evaluator=own).best[0]
        for plan, its_over in over.items():
            if its_over <= least + part * (most - least) and own.bounds.of_plan(plan) < found.value:
                assert own.evaluate(plan).value >= found.value * (1 - 1e-9), (part, plan, found.plan)
        chosen.append(found.plan)
    assert any(map(offloads, chosen))


def tight(request: PlanRequest, part: float) -> PlanRequest:
    """With so little memory that a plan without recompute lacks this part of what the smallest of all plans saves."""
    evaluator = PlanEvaluator(request)
    plain = search(request, 1, evaluator=evaluator).best[0].plan
    over = {plan: max(evaluator.memory_budget.excess_bytes(plan)) for plan in choices(plain)}
    limit = over[plain] - part * (over[plain] - min(over.values())) + 1 + (evaluator.memory_budget.limit_bytes(0) or 0)
    return replace(request, memory_limit_bytes=int(limit))


def without(request: PlanRequest) -> PlanRequest:
    return replace(request, fixed={**request.fixed, "offload": "none"})


def test_a_plan_that_nothing_else_makes_fit_offloads() -> None:
    request = tight(pipeline(12e9), 1.0)
    found = search(request, 1).best[0]
    assert offloads(found.plan)
    assert not search(without(request), 1).best
    for other, said in (
        (without(request), "if that was allowed: pp2-mb1-sgpipe-"),
        (replace(request, cluster=cluster(2, 12e9, 2**20)), "if nodes had more memory than 1 MiB: pp2-mb1-sgpipe-"),
        (replace(request, cluster=cluster(2, None, None)), "if h100-sxm reached its host with 31.5 GB/s, which is un"),
    ):
        evaluator = PlanEvaluator(other)
        family = next(one for one in search_families(evaluator, [], SearchBudget()) if one.name == "data × pp")
        sentence = explain_family(family, FirstPlan(found, evaluator, 0.0), SearchBudget())
        assert "doesn't fit" in sentence
        assert f"; offload would make it fit {said}" in sentence


@pytest.mark.parametrize("hidden_size", [1024, 4096])
def test_without_a_pipeline_layers_offload_where_nothing_else_fits(hidden_size: int) -> None:
    """Each beside the next one: all that a limit leaves no room for, and no more than the host holds."""
    model = MODEL.model_copy(update={"hidden_size": hidden_size, "num_layers": 16})
    fixed = {"pp": 1, "tp": 1, "cp": 2, "micro_batch_size": 1}
    request = PlanRequest(model, cluster(2, 63e9, None), WORK, fixed=fixed)
    evaluator = PlanEvaluator(request)
    limit = evaluator.memory_budget.limit_bytes(0) or 0
    full = evaluator.memory_budget.excess_bytes(parse_plan_name("cp2u-mb1-tile4-rfull-bf16"))[0] + limit
    away = evaluator.memory_budget.excess_bytes(parse_plan_name("cp2u-mb1-tile4-rfull-oact-bf16"))[0] + limit
    assert away < full
    tight = replace(request, memory_limit_bytes=int((full + away) / 2))
    found = search(tight, 1).best[0]
    assert any(strategy.offload == "activations" for strategy in found.plan.strategies)
    assert not search(without(tight), 1).best
    assert not search(replace(tight, cluster=cluster(2, 63e9, 2**20)), 1).best


def test_offload_is_chosen_where_it_takes_less_than_recompute() -> None:
    """A wide model computes long for each byte that a layer saves, so that copies are hidden."""
    request = tight(replace(pipeline(), model=MODEL.model_copy(update={"hidden_size": 4096, "num_heads": 32})), 0.5)
    found, other = search(request, 1).best[0], search(without(request), 1).best[0]
    assert offloads(found.plan)
    assert found.value < other.value
    reasons = find_reasons(FirstPlan(found, PlanEvaluator(request), 0.0), [], SearchBudget())
    said = next(reason.sentence for reason in reasons if reason.comparison.name == "the same plan without offload")
    assert "slower" in said or "doesn't fit" in said


def test_elementwise_recompute_is_weighed_with_the_time_of_eager_blocks() -> None:
    """Full recompute of a few layers leaves the others compiled: faster than elementwise recompute of more of them."""
    request = without(tight(replace(pipeline(), model=MODEL.model_copy(update={"hidden_size": 4096})), 0.4))
    found, evaluator = search(request, 1).best[0], PlanEvaluator(request)
    assert found.prediction.compiled
    plain = with_policy(found.plan, LayerPolicy("none"))
    fitting = {one.prediction.compiled: one for one in map(evaluator.evaluate, evaluator.memory_budget.fit(plain)[0])}
    assert fitting[True].value == found.value < fitting[False].value
    assert {strategy.recompute for strategy in fitting[True].plan.strategies} == {"none", "full"}
    assert "elementwise" in {strategy.recompute for strategy in fitting[False].plan.strategies}


@pytest.mark.parametrize("part", quick_sample([0.1, 0.3], 0))
def test_of_plans_that_take_as_long_the_one_that_copies_least_is_answered(part) -> None:
    """Copies that nothing waits for leave more room than is needed; of all choices by layer none that fits and is no
    slower copies less, and what is answered simulates like what was found."""
    wide = MODEL.model_copy(update={"hidden_size": 4096, "num_heads": 32})
    request = tight(replace(pipeline(900e9), model=wide), part)
    evaluator = PlanEvaluator(request)
    found = search(request, 1, evaluator=evaluator)
    plan, value = found.best[0].plan, found.best[0].value
    (lean,) = trim_offload(found, SearchBudget()).best
    assert copied(wide, lean.plan) < copied(wide, plan)
    assert lean.value == pytest.approx(value, rel=1e-9)
    assert evaluator.memory_budget.fits(lean.plan)
    assert trim_offload(replace(found, best=[lean]), SearchBudget()).best == [lean]
    for other in choices(with_policy(plan, LayerPolicy("none"))):
        if copied(wide, other) < copied(wide, lean.plan) and evaluator.memory_budget.fits(other):
            assert evaluator.evaluate(other).value > value * (1 + 1e-9), other
    for same in (replace(request, objective="memory"), replace(request, fixed={**request.fixed, "offload": "none"})):
        own = PlanEvaluator(same)
        before = search(same, 1, evaluator=own)
        assert trim_offload(before, SearchBudget()).best == before.best


def copied(model: ModelSpec, plan: Plan) -> int:
    """In a step's micro-batch, by all stages."""
    return sum(offloaded_activation_bytes(model, plan, WORK, stage) for stage in range(plan.num_stages))


def test_no_more_is_offloaded_than_the_host_holds() -> None:
    request = tight(pipeline(), 0.9)
    found = search(request, 1).best[0].plan
    assert offloads(found)
    sizes = {stage: (offloaded_activation_bytes(MODEL, found, WORK, stage),) for stage in (0, 1)}
    program = build_program(found, MODEL, WORK)
    held = max(order.max_host_bytes(sizes) for order in allocation_orders(program))
    assert held == max(peak_away(program, rank, sizes) for rank in (0, 1))
    for part, fits in ((1.01, True), (0.99, False)):
        host = cluster(2, 63e9, int(2 * held * part))
        assert ("its share of its host" in prediction_lines_of(request, host, found)) == (not fits)
        evaluator = PlanEvaluator(replace(request, cluster=host))
        assert evaluator.memory_budget.fits(found) == fits
        assert evaluator.evaluate(found).prediction.fits == fits
        again = search(evaluator.request, 1).best
        assert [one.plan for one in again] == [found] if fits else found not in [one.plan for one in again]


def test_each_node_s_memory_limits_what_its_own_ranks_offload() -> None:
    """Two nodes of one device each, of which one has next to no memory beside it."""
    request = tight(pipeline(), 0.9)
    plan = with_layer_policies(
        search(request, 1).best[0].plan, {0: LayerPolicy("none", "activations")}, WAYS, MODEL.num_layers
    )
    wide = cluster(2, 63e9, None)
    own = wide.groups[0].model_copy(update={"devices_per_node": 1, "host_memory_bytes": 2**40})
    small = own.model_copy(update={"host_memory_bytes": 2**20})
    for groups, fits in (((own, small), True), ((small, own), False)):
        mixed = wide.model_copy(update={"groups": groups})
        room = PlanEvaluator(replace(request, cluster=mixed, memory_limit_bytes=None)).memory_budget
        assert (room.host_excess_bytes(plan) <= 0) == fits
        found = forecast_memory(MODEL, plan, WORK, mixed, build_program(plan, MODEL, WORK))
        assert found.fits == fits
    both = parse_plan_name("dp2-pp1-mb1-z1").model_copy(update={"axis_order": plan.axis_order})
    assert host_shares_bytes(both, mixed) == [2**20], "of ranks on both nodes the least"
    again = search(replace(request, cluster=wide.model_copy(update={"groups": (own, small)})), 1).best[0].plan
    assert moves(again, 0)
    assert not moves(again, 3)


def prediction_lines_of(request: PlanRequest, host: ClusterSpec, plan: Plan) -> str:
    return "\n".join(prediction_lines(predict(MODEL, plan, request.workload, host)))


def peak_away(program: Program, rank: int, sizes: dict[int, tuple[int, ...]]) -> int:
    """Followed pass by pass."""
    copied = {item.action[1:3] for item in program.ranks[rank].get("host_copy", ())}
    away, most = set(), 0
    for item in program.ranks[rank]["compute"]:
        pair = item.action[1:3]
        if pair in copied and item.action.kind in ("F", "B"):
            away ^= {pair}
            most = max(most, sum(sizes[stage][0] for stage, _ in away))
    return most


@pytest.mark.parametrize(
    "name",
    ["pp4-oact", "pp4v2-sinterleaved-oact-relem", "dp2-pp2v2-szbv-oact-z1", "pp2-sgpipe-oact", "dp2-oact", "cp2u-oact"],
)
def test_what_offloading_plans_hold_is_known_without_a_program(name) -> None:
    """And no bound is above the simulated time, however slow the link."""
    plan = parse_plan_name(name).model_copy(update={"precision": "bf16"})
    model = MODEL.model_copy(update={"num_layers": 8})
    run = LayerOverride(start=0, count=1, strategy=LayerStrategy(zero=plan.default_strategy.zero))
    for own, host_bytes_per_s in product((plan, plan.model_copy(update={"overrides": (run,)})), (63e9, 5e9)):
        evaluator = PlanEvaluator(
            PlanRequest(model, cluster(plan.world_size, host_bytes_per_s, None), WORK, memory_limit_bytes=2**33)
        )
        program = build_program(own, model, WORK)
        found = forecast_memory(model, own, WORK, evaluator.request.cluster, program)
        assert evaluator.memory_budget.excess_bytes(own) == [rank.terms.total - 2**33 for rank in found.ranks]
        verdict = evaluator.evaluate(own)
        assert evaluator.bounds.of_plan(own) <= verdict.value * (1 + 1e-9)
        assert (
            evaluator.memory_budget.offload_bound_s(own, evaluator.costs.pass_times(own)) > 0.4 * verdict.value
            or host_bytes_per_s > 5e9
        )


def test_offload_that_is_asked_for_is_in_every_plan(capsys) -> None:
    arguments = "plan --model tiny --cluster 2xh100 --seq-len 256 --global-batch 16 --require oact --json"
    assert main(arguments.split()) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans
    assert all("-oact" in one["plan"] for one in plans)


def test_search_and_enumeration_agree_where_plans_offload() -> None:
    request = tight(pipeline(), 0.5)
    request = replace(request, fixed={"cp": 1, "tp": 1, "pp": 2, "schedule": "gpipe"})
    expected = sorted({verdict.sort_key for verdict in exhaustive_search(PlanEvaluator(request))})[:3]
    found = search(request, 3)
    assert [verdict.sort_key for verdict in found.best] == expected
    assert any(offloads(one.plan) for one in found.best)


def test_a_rank_with_too_few_micro_batches_to_offload_keeps_them() -> None:
    """Its share of the data is so small that nothing lies long enough; the ranks with more offload all the same."""
    host, work = cluster(4, 12e9, None), Workload(seq_len=4096, global_batch_size=8)
    plan = parse_plan_name("dp2-pp2-sgpipe-oact-z1-bf16").model_copy(update={"uneven_micro_batches": (7, 1)})
    most, least = (build_program(plan, MODEL, work, data_rank=data) for data in (0, 1))
    assert any(lanes.get("host_copy") for lanes in most.ranks)
    assert not any(lanes.get("host_copy") for lanes in least.ranks)
    plain = plan.model_copy(update={"default_strategy": LayerStrategy(zero="z1")})
    assert predict(MODEL, plan, work, host).step_time_s >= predict(MODEL, plain, work, host).step_time_s


def lacking(model: ModelSpec, plan: Plan, host: ClusterSpec, work: Workload) -> None:
    """For falling limits, the bound of a plan that doesn't fit is above nothing that is made of it."""
    request = PlanRequest(model, host, work, memory_limit_bytes=2**36)
    over = [
        max(PlanEvaluator(request).memory_budget.excess_bytes(with_policy(plan, LayerPolicy(mode))))
        for mode in ("full", "none")
    ]
    seen = 0
    for part in (-0.2, -0.06, 0.1, 0.4, 0.8):
        evaluator = PlanEvaluator(
            replace(request, memory_limit_bytes=int(2**36 + over[0] + part * (over[1] - over[0])) + 1)
        )
        begun, _ = evaluator.memory_budget.start_fit(plan)
        if not isinstance(begun, PendingFit):
            continue
        for fitting in evaluator.memory_budget.finish_fit(begun):
            assert evaluator.bounds.with_added(plan, begun.added_s) <= evaluator.evaluate(fitting).value * (1 + 1e-9), (
                part,
                fitting,
            )
            seen += 1
    assert seen


def test_the_bound_of_what_lacks_room_holds_where_copies_are_waited_for() -> None:
    model = MODEL.model_copy(update={"hidden_size": 4096, "num_layers": 5, "intermediate_size": 11264})
    plan = parse_plan_name("pp4-sgpipe-bf16")
    lacking(model, plan, cluster(4, 5e9, None), Workload(seq_len=4096, global_batch_size=32))


def test_the_bound_of_what_lacks_room_holds_where_data_lie_unevenly() -> None:
    kinds = [load_cluster(name).groups[0].model_copy(update={"devices_per_node": 2}) for name in ("8xh100", "8xa100")]
    host = load_cluster("8xh100").model_copy(update={"groups": tuple(kinds)})
    plan = parse_plan_name("dp2-pp2-z1-bf16").model_copy(
        update={"uneven_micro_batches": (3, 1), "axis_order": ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    )
    lacking(MODEL, plan, host, Workload(seq_len=4096, global_batch_size=8))


def test_a_host_is_filled_where_head_room_is_given_up() -> None:
    evaluator = PlanEvaluator(replace(pipeline(host_memory_bytes=10**9), memory_limit_bytes=None))
    plan = parse_plan_name("pp2-sgpipe-oact-bf16")
    kept = evaluator.memory_budget.host_excess_bytes(plan)
    evaluator = evaluator.without_head_room()
    assert evaluator.memory_budget.host_excess_bytes(plan) < kept


def test_recompute_of_attention_alone_may_be_asked_for_where_it_does_not_fit():
    request = pipeline(recompute="core_attention")
    fits = search(request, 1).best[0]
    most = max(rank.total for rank in fits.prediction.memory)
    found = search(replace(request, memory_limit_bytes=int(0.9 * most)), 1).best[0].plan
    assert all(found.strategy(layer).recompute == "core_attention" for layer in range(MODEL.num_layers))
    assert offloads(found)


@pytest.mark.parametrize("name", ["dp2-mb1-z1-bf16", "pp4-mb2-bf16", "dp2-pp2v2-mb1-z1-sinterleaved-bf16"])
@pytest.mark.parametrize("host_bytes_per_s", [None, 63e9])
def test_a_plan_is_made_to_fit_wherever_recomputing_all_does(name: str, host_bytes_per_s: float | None) -> None:
    """With logits as most of a pass's memory, layers free less of its peak than they save."""
    model, plan = MODEL.model_copy(update={"vocab_size": 32000, "hidden_size": 2048}), parse_plan_name(name)
    work = Workload(seq_len=2048, global_batch_size=48)
    request = PlanRequest(model, cluster(plan.world_size, host_bytes_per_s, None), work, memory_limit_bytes=2**36)
    over = [
        max(PlanEvaluator(request).memory_budget.excess_bytes(with_policy(plan, LayerPolicy(mode))))
        for mode in ("full", "none")
    ]
    assert over[0] < over[1]
    room = PlanEvaluator(replace(request, memory_limit_bytes=int(2**36 + over[0]) + 1)).memory_budget
    found, _ = room.fit(plan)
    assert found
    assert all(map(room.fits, found))


def test_the_share_of_optimizer_state_in_host_memory_is_the_least_that_fits() -> None:
    """Its time is that of the plan by itself, with as many updates as it has; one layer less doesn't fit."""
    asked: dict[str, Any] = {"seq_len": 1024, "global_batch": 4}
    found = verbs.plan("llama3.2-3b", "1xl40s", host_memory="256G", **asked)
    best, layers = found.predictions[0], 28
    strategy = best.plan.default_strategy
    away = sum(best.plan.offloads_optimizer(layer) for layer in range(layers))
    assert strategy.offload_optimizer == "host"
    assert away not in (layers // 4, layers // 2, 3 * layers // 4, layers)
    alone = verbs.predict("llama3.2-3b", "1xl40s", format_plan_name(best.plan), **asked)
    assert alone.step_time_s == best.step_time_s
    limit = found.answer.search.evaluator.memory_budget
    for count, fits in ((away, True), (away - 1, False)):
        share = ceil(count / layers * 1e6) / 1e6
        own = best.plan.default_strategy.model_copy(update={"offload_optimizer_ratio": share})
        excess = limit.excess_bytes(best.plan.model_copy(update={"default_strategy": own}))
        assert (max(excess) <= 0) == fits
