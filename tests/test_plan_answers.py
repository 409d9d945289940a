"""Answers of `muster plan` where constraints bind, and the values that it fills in."""

import json
import re
from dataclasses import replace

import pytest

from muster.api.verbs import plan
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.config.yaml_writer import yaml_text
from muster.planner.answer import answer_request
from muster.planner.explain import explain_no_plan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import build_request, round_batch
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.planner.smallest_plan import describe_need, helpful_changes, smallest_plan
from muster.planner.space import MeshShape, data_shardings, make_plan, mesh_shapes
from muster.report.plan_answer import print_answer
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.formatting import format_seconds
from muster.spec.legality import plan_violations
from muster.spec.plan_name import format_plan_name
from muster.spec.supported import unsupported_features
from tests.sampling import quick_sample


def test_what_binds_is_the_smallest_plan_where_all_devices_together_have_room(capsys) -> None:
    asked = ["plan", "--model", "llama2-13b", "--cluster", "8xh100", "--require", "z1-tp1-pp1-cp1"]
    assert main(asked) == 3
    message = capsys.readouterr().err
    least, limit = map(float, re.findall(r"([\d.]+) GiB", message)[:2])
    assert least > limit == pytest.approx((load_cluster("8xh100").device.memory_bytes or 0) / 2**30, abs=0.1)
    assert "dp8" in message


def test_a_search_that_ends_before_it_finds_a_plan_does_not_say_that_there_is_none(monkeypatch) -> None:
    asked = build_request(load_model("llama3-70b"), load_cluster("8xh200"), 4096, 64)
    evaluator = PlanEvaluator(asked)
    closest = make_plan(asked, MeshShape(1, 8, 1, 1, 1, 1), (1, 1, "z3"))
    stopped = SearchResult(evaluator, [], 1.0, closest)
    assert not stopped.proven
    assert "not all were looked at" in explain_no_plan(stopped, SearchBudget())


REFUSED = [
    "plan",
    "--model",
    "tiny",
    "--cluster",
    "4xa100",
    "--seq-len",
    "4096",
    "--global-batch",
    "16",
    "--require",
    "dp4-rcore",
    "--effort",
    "0.1",
]
HOW = ["--cluster", "16xh100", "--effort", "0.01", "--require", "tp1-pp2-mb1-ep8-rfull-z1", "--global-batch", "64"]


def test_plans_that_can_not_run_yet_are_shown_where_they_are_asked_for(capsys) -> None:
    assert main([*REFUSED, "--anticipate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert all("recompute of attention alone" in one["not_yet"][0] for one in found)
    assert main(REFUSED) == 3
    said = capsys.readouterr().err
    assert f"; {found[0]['plan']} is predicted to fit, but can't be run yet: --anticipate shows such plans" in said


def test_a_model_that_can_not_be_trained_yet_is_planned_on_request(capsys, tmp_path) -> None:
    fields = {**load_model("tiny-moe").model_dump(exclude_defaults=True), "parallel_residual": True}
    (tmp_path / "odd.yaml").write_text(yaml_text({"version": 1, **fields}))
    asked = ["plan", "--model", str(tmp_path / "odd.yaml"), "--cluster", "4xh100", "--effort", "0.01"]
    asked += ["--seq-len", "256", "--global-batch", "16", "--require", "tp1-pp2-mb1-ep2-rfull-z1"]
    assert main(asked) == 3
    assert "can't be trained yet: it has experts beside attention (parallel_residual); --anticipate shows" in (
        capsys.readouterr().err
    )
    assert main([*asked, "--anticipate"]) == 0
    assert "tiny-moe" in capsys.readouterr().out
    assert main([*asked, "--anticipate", "-o", "plan.yaml"]) == 3
    said = capsys.readouterr()
    assert not said.out, "what can't be written is refused before a search"


@pytest.mark.parametrize("model", quick_sample(["mixtral-8x7b", "gpt-oss-20b"], 1))
def test_plans_of_experts_run(model, capsys) -> None:
    assert main(["plan", "--model", model, *HOW, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans
    assert not any(one["not_yet"] for one in plans)


@pytest.mark.parametrize("asked", [["-o", "best.yaml"], ["--launch", "slurm"], ["-o", "best.yaml", "--json"]])
def test_what_train_refuses_is_not_written(asked, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*REFUSED, "--anticipate", *asked]) == 3
    said = capsys.readouterr()
    assert "nothing is written: plan dp4-mb" in said.err
    assert "without --anticipate, the best plan that can run is written" in said.err
    assert "-rcore" in said.out
    assert not list(tmp_path.iterdir())


def test_only_plans_that_train_takes_are_found_unless_more_is_asked_for() -> None:
    assert not any(map(unsupported_features, plan("tiny", "4xh100", seq_len=4096, global_batch=2).plans))
    asked = {"seq_len": 4096, "global_batch": 2, "require": "tp1-pp1-rcore"}
    assert all(map(unsupported_features, plan("tiny", "4xh100", **asked, anticipate=True).plans))
    with pytest.raises(InfeasibleError, match="--anticipate shows such plans"):
        plan("tiny", "4xh100", **asked)


def test_sequences_are_cut_where_there_are_fewer_of_them_than_devices() -> None:
    found = plan("tiny", "4xh100", seq_len=4096, global_batch=2, require="tp1-pp1").plans
    assert {one.cp for one in found} <= {2, 4}


def test_parts_that_are_not_searched_can_be_asked_for_too() -> None:
    asked = build_request(load_model("tiny"), load_cluster("2xh100"), 256, 8, fix="vocab-pp2-oact-pv")
    best = search(asked, 1).best[0].plan
    assert best.vocab_parallel
    assert best.post_validation
    assert best.default_strategy.offload == "activations"
    one_copy = build_request(load_model("tiny"), load_cluster("4xh100"), 256, 8, fix="dp2")
    assert {plan.plan.dp_replicate for plan in search(one_copy, 5).best} == {1}
    copies = build_request(load_model("tiny"), load_cluster("8xh100"), 256, 8, fix="dp4x2-z2")
    assert format_plan_name(search(copies, 1).best[0].plan).startswith("dp4x2-mb1-z2")


@pytest.mark.parametrize(
    ("devices", "wanted", "batch"),
    [(8, 1024, 1024), (7, 1024, 896), (24, 1024, 768), (1000, 1024, 1000), (4480, 1024, 1120), (16381, 1024, 1024)],
)
def test_a_usual_step_spreads_over_the_devices(devices: int, wanted: float, batch: int) -> None:
    assert round_batch(wanted, devices) == batch


def test_an_interrupted_search_says_so(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("muster.planner.answer.answer_request", interrupted)
    assert main(["plan", "--model", "tiny", "--cluster", "2xh100"]) == 130
    assert capsys.readouterr().err.startswith("muster: interrupted before an answer")


@pytest.mark.parametrize(("memory", "said"), [("20GB", True), ("25340307046B", False)])
def test_more_of_each_device_is_advised_only_where_there_is_more(capsys, memory: str, said: bool) -> None:
    assert main(f"plan --model llama2-13b --cluster 2xrtx4090 --memory-limit {memory}".split()) == 3
    message = capsys.readouterr().err
    assert ("all memory of the devices (" in message) == ("may be used" in message) == said


def need_of(model: str, cluster: str, seq_len: int, **others) -> str:
    request = build_request(load_model(model), load_cluster(cluster), seq_len, 64, **others)
    return describe_need(request)


def test_the_smallest_plan_is_one_that_recomputes_and_all_that_would_help_is_computed():
    """70B on 8 devices: twice as many and the optimizer's state in host memory suffice, shorter sequences don't."""
    request = build_request(load_model("llama3-70b"), load_cluster("8xh100"), 4096, 64)
    smallest = smallest_plan(request)
    assert smallest is not None
    assert smallest.plan.default_strategy.recompute == "full"
    assert smallest.peak_bytes > smallest.limit_bytes == request.cluster.device.memory_bytes
    helps = list(helpful_changes(request))
    assert [(one.change.split(",")[0], one.smallest.fits) for one in helps] == [
        ("16 such devices", True),
        ("sequences of 256", False),
        ("the optimizer's state in host memory", True),
    ]
    text = describe_need(request)
    assert re.search(r"needs 1\d\d\.\d GiB on a device that has 79\.1 GiB", text)
    assert "it would fit with 16 such devices (" in text
    assert "; not enough: sequences of 256 (" in text
    # What is said to fit does: the same plans, predicted by themselves.
    more = predict(request.model, helps[0].smallest.plan, request.workload, load_cluster("16xh100"))
    assert more.fits
    assert max(rank.total for rank in more.memory) == pytest.approx(helps[0].smallest.peak_bytes, rel=0.01)


def test_no_recomputed_plan_is_smaller_than_the_smallest():
    request = build_request(load_model("llama2-7b"), load_cluster("4xrtx4090"), 2048, 8)
    smallest = smallest_plan(request)
    assert smallest is not None
    for shape in mesh_shapes(request):
        for sharding in data_shardings(request, shape):
            plan = make_plan(request, shape, sharding, recompute="full")
            if not plan_violations(plan, request.model, request.workload, 4):
                one = predict(request.model, plan, request.workload, request.cluster)
                assert smallest.peak_bytes <= 1.01 * max(rank.total for rank in one.memory)


def test_shorter_sequences_are_as_long_as_they_can_be():
    text = need_of("llama3-8b", "4xa100-40", 131072, fix="cp1-tp1")
    length = int(re.search(r"sequences of ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
    assert "sequences of" in text.split("not enough")[0]
    assert "would fit: it needs" in need_of("llama3-8b", "4xa100-40", length, fix="cp1-tp1")
    assert "would fit: it needs" not in need_of("llama3-8b", "4xa100-40", 2 * length, fix="cp1-tp1")


def test_logits_are_named_where_a_loss_in_chunks_would_help():
    text = need_of("llama3.2-1b", "1xrtx4090", 4096)
    assert "a loss in chunks (at most 2.0 GiB of logits less)" in text


def test_a_number_and_a_device_without_an_x_are_named_with_it(capsys):
    assert main(["plan", "--model", "tiny", "--cluster", "64h100"]) == 2
    assert "did you mean '64xh100'?" in capsys.readouterr().err


def test_what_pareto_does_not_go_with_is_named(capsys):
    assert main(["plan", "--model", "tiny", "--cluster", "4xh100", "--pareto", "--explain"]) == 2
    assert "--pareto compares plans and can't be combined with --explain: leave that out" in capsys.readouterr().err
    assert main(["plan", "--model", "tiny", "--cluster", "4xh100", "--pareto", "--what-if", "nodes=x2"]) == 2
    assert "--pareto compares plans and can't be combined with --what-if: leave that out" in capsys.readouterr().err


def test_a_precision_that_devices_lack_is_said() -> None:
    asked = build_request(load_model("tiny"), load_cluster("8xv100"), 256, 8)
    assert asked.derived_lines[-1] == "v100-32-sxm is not known to compute in bf16: times are those of fp16"
    assert not any(
        "known to compute" in line
        for line in build_request(load_model("tiny"), load_cluster("8xh100"), 256, 8).derived_lines
    )


def test_the_line_of_each_reason_is_one_of_the_answers_and_names_its_plan(capsys) -> None:
    asked = build_request(load_model("tiny"), load_cluster("4xh100"), 256, 16, runnable=True, compile=False)
    answer = answer_request(asked, 2, SearchBudget.start(0.2))
    print_answer(answer, explain=True)
    shown = capsys.readouterr().out
    assert answer.reasons
    assert all(reason.sentence in shown for reason in answer.reasons)
    assert shown.count("is the best of all") == 1
    assert "The best by itself (--fastest)" in shown
    assert answer.fastest.name in shown
    interval = answer.first.prediction.interval_json()
    assert interval is not None
    low, high = (format_seconds(interval[end]) for end in ("low_s", "high_s"))
    assert f"The step of the first: {low} to {high} in 9 of 10 cases: {interval['source']}" in shown


def test_what_is_proven_names_the_head_room_where_a_fuller_plan_may_be_better(capsys) -> None:
    asked = build_request(load_model("tiny"), load_cluster("4xcpu"), 256, 16)
    answer = answer_request(asked, 1, SearchBudget.start(1.0))
    print_answer(answer, False)
    assert "no other plan can be better than the first" in capsys.readouterr().out
    reason = next(one for one in answer.reasons if one.alternative is not None)
    found = reason.alternative.result
    fuller = replace(found, evaluator=found.evaluator.without_head_room(), open_bound=answer.first.value / 2)
    left_open = replace(reason, alternative=replace(reason.alternative, result=fuller))
    print_answer(replace(answer, known_reasons=[left_open]), False)
    assert "no other plan that leaves 12% of the memory free can be better" in capsys.readouterr().out
