"""Steps that don't wait for the norm of all ranks end as those that do, to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint.checkpoint_dir import find_latest
from muster.config.cluster_files import load_cluster
from muster.cost.memory.forecast import forecast_memory
from muster.cost.time.update_bytes import update_bytes_per_element
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import ProgramError, parse_program
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from tests.ranks import run_ranks

ROUGH = {"5": 1e4, "6": 1e4, "11": float("nan")}
"""Clipped when steps are taken at once, after 3 calm ones; clipped when they wait; skipped when taken at once again."""
MODEL = ModelSpec(vocab_size=32, hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=16)
WORKLOAD = Workload(seq_len=8, global_batch_size=8)


def run(num_ranks: int, cases: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """Per case, what each rank found."""
    payload = {"cases": cases, "folder": str(folder)}
    by_rank = run_ranks(num_ranks, "tests.post_validation_ranks:run_cases", payload)
    return [[found[index] for found in by_rank] for index in range(len(cases))]


def check_same(num_ranks: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Cases with a fault must end otherwise than without post-validation, the others the same."""
    both = [case | {"plan": case["plan"] + pv, "factors": ROUGH} for case in cases for pv in ("", "-pv")]
    found = run(num_ranks, both, folder)
    for case, waiting, ahead in zip(cases, found[::2], found[1::2], strict=True):
        for one, other in zip(waiting, ahead, strict=True):
            same = (other["digest"], other["told"]) == (one["digest"], one["told"])
            assert same == ("fault" not in case), case
            assert other["steps"] == list(range(1, 14)), case
            assert other["taken_back"] == 2, case
            assert other["finite"] or "fault" in case
        assert [step for step, told in enumerate(waiting[0]["told"], 1) if told[3]] == [11]


def test_to_the_bit_as_with_waiting(tmp_path: Path) -> None:
    """And one that can't take its steps back is found out."""
    check_same(2, [{"plan": "pp2v2-szbv", "tied": True}, {"plan": "pp2", "fault": "not restored"}], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_to_the_bit_as_with_waiting_under_more_plans(tmp_path: Path) -> None:
    cases = [{"plan": "pp2v2-sdualpipe", "tied": True}, {"plan": "pp2", "optim": "muon"}, {"plan": "pp2-szbh2"}]
    check_same(2, cases, tmp_path)
    plans = ("pp4-szbh2", "dp2-pp2v2-z1-szbv", "dp2-pp2-z2", "dp2-pp2-z3-szbh1", "tp2-sp-pp2-szbh2")
    check_same(4, [{"plan": plan} for plan in plans], tmp_path)


def rows_of(run: Path) -> list[dict[str, Any]]:
    keys = ("step", "train/loss", "train/grad_norm", "train/lr", "train/skipped")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: row.get(key) for key in keys} for row in rows]


def test_a_run_saves_stops_and_gives_up_as_with_waiting(tmp_path: Path) -> None:
    """Stopped in the middle, gone on, and ended by a step that is skipped."""
    common = {"layers": 2, "save_every": 4, "max_consecutive_skips": 1, "factors": {"5": 1e4, "11": float("nan")}}
    attempts = [
        common | {"plan": "pp2" + pv, "run": name, "stop_at": stop}
        for pv, name in (("", "waiting"), ("-pv", "ahead"))
        for stop in (7, 0)
    ]
    stopped, given_up, other_stopped, other_given_up = run(2, attempts, tmp_path)
    assert stopped[0]["code"] == other_stopped[0]["code"] == 75
    assert "step 11 was skipped, as many in a row as train.max_consecutive_skips allows" in given_up[0]["said"]
    assert other_given_up[0]["said"] == given_up[0]["said"].replace("waiting", "ahead")
    rows = rows_of(tmp_path / "ahead")
    assert rows == rows_of(tmp_path / "waiting")
    assert [row["step"] for row in rows] == list(range(1, 12))
    for folder in ("checkpoints", "failed"):
        one, other = (find_latest(tmp_path / name / folder) for name in ("waiting", "ahead"))
        assert one is not None
        assert other is not None
        files = sorted(path.name for path in one.glob("*.safetensors"))
        assert files
        assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


# ----------------------------------------------------------------------------------------------------------------------
# The plan and its program


def test_the_program_votes_and_steps_at_once() -> None:
    plan = parse_plan_name("dp2-pp2-z1-pv")
    assert "-pv-" in format_plan_name(plan)
    program = build_program(plan, MODEL, WORKLOAD)
    check(program)
    assert "0REDUCE_GRAD@compute:7 GRAD_NORM_ASYNC@compute:7,collective:1\n" in str(program)
    for wrong, said in (("@collective:2", "STEP on rank 0 begins before GRAD_NORM_ASYNC is known to be over"),):
        with pytest.raises(ProgramError, match=said):
            check(parse_program(str(program).replace(f"STEP{wrong}", "STEP", 1)))


def test_memory_has_the_state_before_a_step_twice() -> None:
    """`PostValidation` copies parameters and moments, and keeps the gradients that they were updated with."""
    plain, ahead = (
        forecast_memory(MODEL, plan, WORKLOAD, load_cluster("8xh100"), build_program(plan, MODEL, WORKLOAD))
        for plan in map(parse_plan_name, ("pp2-fp32", "pp2-pv-fp32"))
    )
    for one, other in zip(plain.ranks, ahead.ranks, strict=True):
        held, twice = one.terms.by_name(), other.terms.by_name()
        wanted = held | {name: 2 * held[name] for name in ("parameters", "optimizer", "gradients")}
        assert twice | {"fragmentation": 0} == wanted | {"fragmentation": 0}


def test_a_step_that_can_be_taken_back_takes_longer() -> None:
    plan = parse_plan_name("pp2-pv")
    kept = update_bytes_per_element(plan, MODEL, None) - update_bytes_per_element(parse_plan_name("pp2"), MODEL, None)
    assert kept == 2 * (4 + 8), "parameters and two moments, read and written"


def test_where_it_is_refused() -> None:
    def said(name: str) -> str:
        plan = parse_plan_name(name, Plan(precision="fp32"))
        return "; ".join(plan_violations(plan, MODEL, WORKLOAD, plan.world_size) or unsupported_features(plan))

    assert "post_validation lets pipeline ranks step without waiting for each other, but pp is 1" in said("dp2-pv")
    assert "post_validation with fp16" in said("pp2-pv-fp16")
    assert "post_validation with vocab_parallel" in said("pp2-pv-vocab")
    assert said("pp2-pv") == ""
