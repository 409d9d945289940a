"""Claims of `muster plan`: simple plans first, percentages that other commands repeat, nothing better shown."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import pytest
from plan_claims import assert_claims_hold, assert_nothing_is_better
from test_planner import instance, roomy_instance

import muster.api.verbs
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.alternatives import Alternative, FirstPlan, compare_alternative, find_alternative
from muster.planner.answer import answer_request
from muster.planner.cluster_parts import cluster_parts, least_step_s
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.explain import explain_no_plan
from muster.planner.memory.budget import MemoryBudget
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, build_request, require_more
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget, fit_work, simulation_work
from muster.planner.search_result import SearchResult
from muster.planner.simple_first import find_simplest
from muster.planner.simplicity import PREDICTION_ERROR, Simplicity, mechanisms, simplest, simplicity
from muster.planner.space import draft_plans, is_admitted, mesh_shapes, schedule_choices, schedule_options, used_axes
from muster.planner.what_if import what_if
from muster.planner.word_changes import changed_plans
from muster.report.plan_answer import print_answer
from muster.report.plans import plan_names
from muster.spec.cluster import ClusterSpec, NetworkTier
from muster.spec.device import LinkSpec
from muster.spec.errors import InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import DEEPSPEED, MEGATRON, runs_schedule
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.sampling import quick_sample

PAIRS = (
    ("llama3-8b", "8xh100", 4096, 64),
    ("qwen2.5-7b", "8xa100-40", 4096, 32),
    ("mixtral-8x7b", "32xh100", 4096, 128),
    ("llama3-8b", "64xh100", 8192, 128),
    ("llama2-13b", "16xa100", 4096, 64),
)
"""Models, clusters, sequence lengths and batches of the claims that are checked."""


# ----------------------------------------------------------------------------------------------------------------------
# Simple plans first


def test_the_order_of_simplicity() -> None:
    ordered = ["dp8", "dp8-rfull", "dp4-tp2-sp-rfull", "pp8-l5.3.4.4.4.4.4.4-rfull", "pp8-szbv-l5.3.4.4.4.4.4.4-rfull"]
    places = [simplicity(parse_plan_name(name)) for name in ordered]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    other = LayerOverride(start=3, count=1, strategy=LayerStrategy(recompute="full"))
    assert simplicity(Plan(overrides=(other,))) > places[-1]
    assert mechanisms(parse_plan_name("dp8-z1")) == []
    assert mechanisms(Plan(pp=2, stages=(StageSpec(layers=17), StageSpec(layers=15)))) == [
        "pipeline parallelism",
        "unequal stages",
    ]


def all_plans(evaluator: PlanEvaluator) -> tuple[list[EvaluatedPlan], list[EvaluatedPlan]]:
    """Return every plan that the search looks at, and those with one policy for all layers that make a plan fit."""
    request = evaluator.request
    searched, uniform = [], []
    for shape in mesh_shapes(request):
        for choice in schedule_choices(request, shape):
            for draft in draft_plans(request, choice):
                plan = evaluator.complete_draft(draft, choice)
                fitting = [] if plan is None else evaluator.memory_budget.fit(plan)[0]
                searched += map(evaluator.evaluate, fitting)
                if plan is not None and fitting != [plan]:
                    uniform += map(evaluator.evaluate, evaluator.memory_budget.uniform_fits(plan))
    return searched, uniform


def assert_finds_the_simplest(seed: int) -> bool:
    """Compare with enumeration; return True if the simplest isn't the best by itself."""
    evaluator = PlanEvaluator(instance(seed))
    searched, uniform = all_plans(evaluator)
    best = min(searched, key=lambda one: one.sort_key)
    expected = simplest([*searched, *uniform], best.value)
    assert expected is not None
    found = search(evaluator.request, 3, exact=1)
    chosen = find_simplest(found.best[0], found.best, found.evaluator, SearchBudget())
    assert chosen.proven
    assert chosen.evaluated.sort_key == expected.sort_key, f"seed {seed}"
    return expected.plan != best.plan


def test_the_simplest_plan_is_what_looking_at_everything_finds() -> None:
    assert [assert_finds_the_simplest(seed) for seed in (5, 42)] == [True, True]


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, 50, 100, 150])
def test_the_simplest_plan_is_what_looking_at_everything_finds_in_200_instances(first: int) -> None:
    for seed in range(first, first + 50):
        assert_finds_the_simplest(seed)


def _request(model: str, cluster: str, seq_len: int, batch: int, **asked) -> PlanRequest:
    spec = load_model(model)
    return build_request(spec, load_cluster(cluster), seq_len, batch, runnable=spec.moe is None, **asked)


def test_the_first_is_simpler_than_the_fastest_and_no_more_than_the_error_slower() -> None:
    request = _request("tiny", "4xh100", 256, 16, compile=False)
    answer = answer_request(request, 1, SearchBudget.start(), explained=False)
    assert not answer.first.plan.overrides
    assert simplicity(answer.first.plan) < simplicity(answer.fastest.plan)
    assert answer.fastest.value < answer.first.value <= answer.fastest.value * (1 + PREDICTION_ERROR)
    alone = answer_request(replace(request, tolerance=0.0), 1, SearchBudget.start(), explained=False)
    assert alone.first.plan == alone.fastest.plan == answer.fastest.plan


def test_a_plan_without_mechanisms_is_as_simple_as_can_be() -> None:
    assert simplicity(parse_plan_name("dp8-mb4-z1")) == Simplicity(False, 0)


# ----------------------------------------------------------------------------------------------------------------------
# What the answer says


@pytest.mark.parametrize("effort", [1.0, 0.05])
def test_percentages_are_what_other_commands_say_and_nothing_is_better_than_the_first(effort: float) -> None:
    request = _request("tiny", "4xh100", 256, 16)
    answer = answer_request(request, 5, SearchBudget.start(effort))
    assert len(answer.reasons) > 3
    assert_claims_hold(answer, effort)


def test_a_search_that_stops_early_takes_what_its_alternatives_find() -> None:
    request = _request("llama3-8b", "8xh100", 4096, 64)
    answer = answer_request(request, 5, SearchBudget.start(0.03))
    assert not answer.result.proven
    assert any(reason.comparison.interval for reason in answer.reasons)
    assert_nothing_is_better(answer)


def test_families_are_at_their_best_in_a_search_that_stops_early() -> None:
    request = _request("llama2-7b", "8xrtx4090", 4096, 32)
    answer = answer_request(request, 5, SearchBudget.start(0.1))
    alone = answer.families[0].alternative
    assert alone.name == "data alone"
    assert alone.best is not None
    whole = search(replace(request, axes=frozenset()), 1).best[0]
    assert alone.best.value <= whole.value * (1 + request.tolerance)


def test_explanations_keep_to_their_work() -> None:
    budget = SearchBudget.start(0.1)
    answer = answer_request(_request("mixtral-8x7b", "16xh100", 4096, 16), 3, budget)
    assert answer.budget.spent <= 3 * budget.work


def test_the_cost_of_a_requirement_is_told(capsys) -> None:
    answer = answer_request(_request("tiny", "4xh100", 256, 16, fix="tp4"), 1, SearchBudget.start())
    free = answer_request(_request("tiny", "4xh100", 256, 16), 1, SearchBudget.start(), explained=False).first
    assert answer.unrequired is not None
    assert answer.unrequired.plan == free.plan
    print_answer(answer, explain=False)
    slower = answer.first.prediction.step_time_s / free.prediction.step_time_s - 1
    assert f"required  tp4: {slower:.1%} slower than what is found without it" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# One word of the first plan


@pytest.mark.parametrize(
    ("model", "cluster", "first", "changes"),
    [
        (
            "mixtral-8x7b",
            "32xh100",
            "dp8-pp4-ep8-mb1-z1-bf16",
            {
                "szbh1": "dp8-pp4-ep8-mb1-z1-szbh1-bf16",
                "sinterleaved": "dp8-pp4v8-ep8-mb1-z1-sinterleaved-bf16",
                "dp8-z3": "dp8-pp4-ep8-mb1-bf16",
                "pp2": "dp16-pp2-ep8-mb1-z1-bf16",
            },
        ),
        ("qwen3-30b-a3b", "16xh100", "dp8-pp2-ep8-mb1-z1-bf16", {"ep16": "dp16-ep16-mb1-z1-bf16"}),
    ],
)
def test_searches_for_reasons_begin_with_the_first_plan_with_one_word_changed(
    model: str, cluster: str, first: str, changes: dict[str, str]
) -> None:
    evaluator = PlanEvaluator(_request(model, cluster, 4096, 1024))
    for part, name in changes.items():
        narrow = evaluator.narrowed(require_more(evaluator.request, part))
        begin = changed_plans([parse_plan_name(first)], narrow, SearchBudget())
        assert _choices(parse_plan_name(name)) in map(_choices, begin), part


def _choices(plan: Plan) -> tuple:
    degrees = plan.dp_replicate, plan.dp_shard, plan.tp, plan.pp, plan.vpp, plan.cp, plan.ep
    return *degrees, plan.micro_batch_size, plan.schedule, plan.default_strategy.zero


def test_no_reason_is_worse_than_the_first_plan_with_one_word_changed() -> None:
    """However little work each has."""
    evaluator = PlanEvaluator(_request("tiny", "8xh100", 256, 32))
    first = evaluator.evaluate(parse_plan_name("dp4-pp2-mb2-z1-bf16"))
    for part, name in {"szbh1": "dp4-pp2-mb2-z1-szbh1-bf16", "dp4-z3": "dp4-pp2-mb2-bf16"}.items():
        narrow = evaluator.narrowed(require_more(evaluator.request, part))
        best = find_alternative(part, narrow, SearchBudget(10.0), centres=[first.plan]).best
        assert best is not None, part
        assert best.value <= evaluator.evaluate(parse_plan_name(name)).value, part


def test_what_is_required_is_required_of_all_layers() -> None:
    request = require_more(_request("tiny", "4xh100", 256, 16), "rfull")
    plan = parse_plan_name("dp4-mb4-rfull-bf16")
    run = LayerOverride(start=0, count=1, strategy=plan.default_strategy.model_copy(update={"recompute": "none"}))
    assert is_admitted(request, plan)
    assert not is_admitted(request, plan.model_copy(update={"overrides": (run,)}))


def test_what_was_not_looked_at_is_not_said_not_to_fit() -> None:
    evaluator = PlanEvaluator(_request("tiny", "4xh100", 256, 16))
    first = evaluator.evaluate(parse_plan_name("dp4-mb4-bf16"))
    narrow = evaluator.narrowed(require_more(evaluator.request, "tp2"))
    nothing = find_alternative("tp 2", narrow, SearchBudget(end_s=0.0))
    told = compare_alternative(FirstPlan(first, evaluator, 0.0), nothing)
    assert told.sentence == "not searched (more --effort or --time-limit)"


def test_the_upper_end_of_an_interval_counts_the_best_plan_that_was_found() -> None:
    evaluator = PlanEvaluator(_request("tiny", "4xh100", 256, 16))
    slow, fast = (evaluator.evaluate(parse_plan_name(name)) for name in ("dp4-mb1-bf16", "dp4-mb4-bf16"))
    assert fast.value < slow.value
    unfinished = Alternative("mb", SearchResult(evaluator, [slow], 0.0, None), fast, proven=False)
    assert unfinished.most_value == fast.value * (1 + PREDICTION_ERROR)
    assert unfinished.least_value == 0.0


@pytest.mark.soak
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_percentages_are_what_other_commands_say_for_all_pairs(pair: tuple[str, str, int, int]) -> None:
    answer = answer_request(_request(*pair), 5, SearchBudget.start(0.5))
    assert_claims_hold(answer, 0.5, recompute_all=True)


def test_the_plans_that_are_shown_are_of_different_families_and_data_parallelism_is_among_them() -> None:
    answer = answer_request(_request("tiny", "4xh100", 256, 16), 3, SearchBudget.start())
    families = [used_axes(one.plan) for one in answer.result.best]
    assert len(set(families)) == len(families) == 3
    assert frozenset() in families


# ----------------------------------------------------------------------------------------------------------------------
# Pipelines, eager plans, other frameworks


def test_a_required_schedule_of_pipelines_asks_for_a_pipeline() -> None:
    request = _request("tiny", "4xh100", 256, 16)
    for schedule in ("interleaved", "zb-h1", "gpipe"):
        required = replace(request, fixed={"schedule": schedule})
        assert schedule_options(required, 1) == []
        assert schedule_options(required, 2)
    assert schedule_options(replace(request, fixed={"schedule": "1f1b"}), 1) == [("1f1b", 1)]


@pytest.mark.parametrize("words", ["z1-stepgather", "stepgather", "gbf16"])
def test_what_needs_sharded_state_is_planned_where_replicas_come_first(words: str) -> None:
    """Replicas are the first data sharding that is tried, and share no state that could be gathered or reduced."""
    found = muster.api.verbs.plan("tiny", "2xh100", seq_len=128, global_batch=24, require=words, effort=0.1)
    for prediction in found.predictions:
        request = found.answer.result.evaluator.request
        assert not plan_violations(prediction.plan, request.model, request.workload, 2)
        assert prediction.plan.dp_shard == 2


def test_the_reason_against_gathers_beside_the_step_is_not_a_sharding_level_that_nobody_asked_for() -> None:
    with pytest.raises(InfeasibleError, match="with stepgather, stepgather with experts"):
        muster.api.verbs.plan("tiny-moe", "2xh100", seq_len=128, global_batch=24, require="stepgather", effort=0.1)
    with pytest.raises(
        InfeasibleError, match="with stepgather, stepgather is for parameters whose optimizer state ranks"
    ):
        muster.api.verbs.plan("tiny", "1xh100", seq_len=128, global_batch=24, require="stepgather", effort=0.1)


def test_eager_plans_are_told_from_compiled_ones() -> None:
    evaluator = PlanEvaluator(_request("tiny", "4xh100", 256, 16))
    compiled, eager = (evaluator.evaluate(parse_plan_name(name)) for name in ("dp4-mb4-bf16", "dp2-cp2-mb1-bf16"))
    assert [line.endswith("  eager") for line in plan_names([compiled, eager])] == [False, True]
    assert not any(line.endswith("eager") for line in plan_names([eager]))
    found = Alternative("cp 2", SearchResult(evaluator, [eager], inf, None), eager, proven=True)
    assert compare_alternative(FirstPlan(compiled, evaluator, 0.0), found).sentence.endswith(", not compiled")


@pytest.mark.parametrize("framework", [MEGATRON, DEEPSPEED])
def test_plans_for_another_framework_are_those_that_it_runs(framework: FrameworkTraits) -> None:
    request = replace(roomy_instance(2), framework=framework)
    least = search(replace(request, objective="memory"), 1).best[0].peak_bytes
    found = search(replace(request, memory_limit_bytes=int(1.1 * least)), 3)
    assert found.best
    assert all(runs_schedule(framework, one.plan.schedule) and not one.plan.overrides for one in found.best)
    with_schedule = replace(request, fixed={"schedule": "zb-h1"}, fixed_text="szbh1")
    assert "doesn't run schedule zb-h1" in explain_no_plan(search(with_schedule, 1), SearchBudget(1.0))


# ----------------------------------------------------------------------------------------------------------------------
# Parts of a cluster


def _two_sites(bandwidth: float, latency_s: float = 20e-3) -> ClusterSpec:
    cluster = load_cluster("16xh100")
    link = LinkSpec(name="wan", kind="ethernet", bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    tier = NetworkTier(name="sites", nodes=1, latency_s=latency_s, link=link)
    return cluster.model_copy(update={"tiers": (tier,)})


@pytest.mark.parametrize(("bandwidth", "latency_s", "alone"), [(1e7, 20e-3, True), (400e9, 1e-6, False)])
def test_one_site_alone_is_the_answer_where_it_is_faster(bandwidth: float, latency_s: float, alone: bool) -> None:
    request = PlanRequest(
        load_model("tiny"),
        _two_sites(bandwidth, latency_s),
        Workload(seq_len=256, global_batch_size=64),
        fixed={"cp": 1, "tp": 1},
        runnable=True,
    )
    answer = answer_request(request, 1, SearchBudget.start(0.05), explained=False)
    assert (answer.first.plan.world_size == 8) == alone
    assert (answer.whole is not None) == alone
    if answer.whole is not None:
        assert answer.whole.best.plan.world_size == 16
        assert answer.first.value < answer.whole.best.value
        assert not answer.request.cluster.tiers


def test_parts_of_a_cluster_are_sites_kinds_or_halves() -> None:
    assert [part.num_devices for part in cluster_parts(_two_sites(1e9))] == [8]
    assert [part.device.name for part in cluster_parts(load_cluster("16xh100+8xa100"))] == ["h100-sxm", "a100-80-sxm"]
    assert [part.num_devices for part in cluster_parts(load_cluster("32xh100"))] == [16]
    assert cluster_parts(load_cluster("8xh100")) == []


def test_no_plan_is_faster_than_its_passes_on_all_devices_at_once() -> None:
    random = Random(0)
    for seed in random.sample(range(100), 3):
        request = replace(roomy_instance(seed), cluster=load_cluster("4xh100"))
        assert 0 < least_step_s(request) <= search(request, 1).best[0].prediction.step_time_s


def test_what_a_changed_cluster_finds_is_taken_where_it_is_better() -> None:
    request = _request("tiny", "16xh100", 256, 64)
    base, slower = what_if(request, ["network=/1.01"], SearchBudget.start(0.03))
    assert base.best is not None
    assert slower.best is not None
    assert slower.same_plan_step_s is not None
    assert base.best.prediction.step_time_s <= slower.best.prediction.step_time_s * (1 + PREDICTION_ERROR)
    assert slower.best.prediction.step_time_s <= slower.same_plan_step_s * (1 + PREDICTION_ERROR)


# ----------------------------------------------------------------------------------------------------------------------
# Time limits


SECONDS_PER_UNIT = 2e-3


class LogicalClock:
    """A clock that goes on by the work of each simulation and each weighed plan."""

    def __init__(self, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of the real clock."""
        self.now_s = 100.0
        self.workload = workload
        for owner, name, work in ((PlanEvaluator, "evaluate", simulation_work), (MemoryBudget, "start_fit", fit_work)):
            monkeypatch.setattr(owner, name, self._timed(getattr(owner, name), work))
        monkeypatch.setattr(SearchBudget, "seconds_per_unit", SECONDS_PER_UNIT)
        for module in ("search_budget", "frontier"):
            monkeypatch.setattr(f"muster.planner.{module}.perf_counter", lambda: self.now_s)

    def _timed(self, method: Callable, work: Callable) -> Callable:
        def timed(owner: object, plan: Plan, *more: object) -> object:
            self.now_s += SECONDS_PER_UNIT * work(plan, self.workload)
            return method(owner, plan, *more)

        return timed


@pytest.mark.parametrize(("require", "limit_s"), quick_sample([("tp2", 1.0), ("tp2", 3.0), ("", 1.5)], 0))
def test_an_answer_keeps_to_its_time_by_the_work_that_it_does(
    require: str, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = _request("llama2-7b", "8xrtx4090", 4096, 512, fix=require)
    clock = LogicalClock(request.workload, monkeypatch)
    answer = answer_request(request, 3, SearchBudget.start(limit_s=limit_s))
    assert answer.reasons
    assert clock.now_s - 100 <= 1.1 * limit_s
