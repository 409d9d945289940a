"""The Pareto front over time, memory, cost and devices, and the effects of another cluster."""

import json
from dataclasses import replace
from itertools import product

import pytest
from test_planner import TINIER, TINY, roomy_instance

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.planner.answer import answer_request
from muster.planner.pareto import non_dominated, pareto_front, sub_clusters, thin_front
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search import exhaustive_search
from muster.planner.search_budget import SearchBudget
from muster.planner.simplicity import PREDICTION_ERROR
from muster.planner.what_if import apply_changes, what_if
from muster.simulate.predict import predict
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan_name import parse_plan_name


def test_no_plan_of_the_front_is_beaten_and_the_fastest_are_those_of_all_plans() -> None:
    request = replace(roomy_instance(3), cluster=load_cluster("2xh100"))
    found = pareto_front(request, SearchBudget())
    assert found.proven
    for cluster in sub_clusters(request.cluster):
        own = replace(request, cluster=cluster)
        fastest_s = min(verdict.prediction.step_time_s for verdict in exhaustive_search(PlanEvaluator(own)))
        points = [point for point in found.points if point.devices <= cluster.num_devices]
        assert min(point.step_time_s for point in points) <= fastest_s * (1 + PREDICTION_ERROR)
        points = [point for point in found.points if point.devices == cluster.num_devices]
        dollars = [point.usd_per_step or 0.0 for point in points]
        assert dollars == sorted(dollars), "the faster, the cheaper, on the same devices"
        for point in points:
            asked = replace(own, memory_limit_bytes=point.memory_limit_bytes)
            answer = answer_request(asked, 1, SearchBudget(), explained=False)
            assert answer.first.value == pytest.approx(point.evaluated.value, rel=1e-9)
    shown = thin_front(found.points)
    assert shown
    assert len(shown) <= len(found.points)
    assert non_dominated(found.points) == found.points


def test_no_point_is_beaten_by_data_parallelism_alone_however_little_was_searched() -> None:
    request = replace(roomy_instance(3), cluster=load_cluster("2xh100"))
    found = pareto_front(request, SearchBudget(30.0))
    for point in found.points:
        for size, level in product((1, 2, 4), ("z1", "z2", "z3")):
            data = f"dp{point.devices}-" if point.devices > 1 else ""
            plan = parse_plan_name(f"{data}mb{size}-{level}-{request.precision}")
            if plan_violations(plan, request.model, request.workload, point.devices):
                continue
            other = predict(request.model, plan, request.workload, point.cluster)
            memory = max(rank.total for rank in other.memory)
            is_clearly_faster = other.step_time_s * (1 + PREDICTION_ERROR) < point.step_time_s
            assert not (is_clearly_faster and memory <= point.evaluated.peak_bytes), (point.evaluated.name, plan)


def test_the_front_says_what_binds() -> None:
    with pytest.raises(InfeasibleError, match="no plan fits"):
        pareto_front(replace(roomy_instance(3), cluster=load_cluster("2xh100"), memory_limit_bytes=10), SearchBudget())


def test_the_front_is_printed_drawn_and_written(tmp_path, capsys) -> None:
    page = tmp_path / "front.html"
    ask = [*TINY, *TINIER, "--pareto", "--effort", "1000"]
    assert main([*ask, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "memory of the fullest device over step time" in shown
    assert "<svg" in page.read_text()
    assert main([*ask, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["front"]
    assert {"plan", "devices", "step_time_s", "memory_bytes", "usd_per_step", "usd_per_billion_tokens"} <= set(
        points[0]
    )
    assert min(point["devices"] for point in points) == 1


def test_a_front_that_was_cut_short_says_so_within_80_columns(capsys) -> None:
    assert main([*TINY[:4], "4xh100", *TINY[5:], "--pareto", "--effort", "0.001"]) == 0
    shown = capsys.readouterr().out
    assert "more --effort settles it" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_changes_make_other_clusters() -> None:
    cluster = load_cluster("16xh100")
    assert [apply_changes(cluster, text).num_devices for text in ("nodes=x2", "nodes=/2", "nodes=12")] == [32, 8, 96]
    assert apply_changes(cluster, "failed=1").num_devices == 8
    assert apply_changes(cluster, "cluster=4xa100").name == "4xa100"
    both = apply_changes(cluster, "nodes=x2,network=/4")
    slow, fast = both.groups[0].nics, cluster.groups[0].nics
    assert both.num_devices == 32
    assert slow is not None
    assert fast is not None
    assert slow.link.bandwidth_bytes_per_s == fast.link.bandwidth_bytes_per_s / 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nods=x2", "did you mean 'nodes'"),
        ("nodes=/3", "expected a whole number of nodes"),
        ("network=fast", "expected a factor"),
        ("failed=2", "expected a number of nodes from 1 to 1"),
        ("failed", "expected changes such as"),
    ],
)
def test_what_is_no_change_is_said(change: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        apply_changes(load_cluster("16xh100"), change)


def test_a_slower_network_is_never_faster_and_a_failed_node_leaves_a_plan() -> None:
    request = replace(
        roomy_instance(3),
        cluster=load_cluster("24xa100"),
        fixed={"cp": 1, "pp": 1},
    )
    batch = request.workload.model_copy(update={"global_batch_size": 24})
    base, slow, failed, other = what_if(
        replace(request, workload=batch), ["network=/8", "failed=1", "cluster=5xa100"], SearchBudget()
    )
    assert base.best is not None
    assert slow.best is not None
    assert slow.same_plan_step_s is not None
    error = 1 + PREDICTION_ERROR
    slow_s = slow.best.prediction.step_time_s
    assert base.best.prediction.step_time_s <= slow_s * error <= slow.same_plan_step_s * error**2
    assert failed.best is not None
    assert failed.best.plan.world_size in (8, 16)
    assert other.best is None
    assert other.reason


def test_what_there_was_no_time_to_look_at_is_said(capsys) -> None:
    words = "plan --model llama3-8b --cluster 16xh100 --require cp1-tp1 --effort 0.01 --what-if nodes=x2"
    assert main(words.split()) == 0
    assert "less: more --effort or --time-limit)" in capsys.readouterr().out


def test_the_table_of_what_if(capsys) -> None:
    ask = [*TINY[:4], "16xa100", *TINY[5:], "--require", "cp1-tp1-mb1-z1"]
    ask += ["--what-if", "nodes=x2", "--what-if", "network=/2"]
    assert main(ask) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:5])) <= 80
    assert main([*ask, "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [case["change"] for case in cases] == ["", "nodes=x2", "network=/2"]
    assert cases[1]["devices"] == 32
    assert [case["gap"] for case in cases] == [0, 0, 0]
    assert main([*TINY, "--pareto", "--what-if", "nodes=x2"]) == 2
    assert main([*TINY, "--html", "x.html"]) == 2
