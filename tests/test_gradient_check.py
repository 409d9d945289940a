"""Gradients of one micro-batch, compared among data-parallel ranks, name the rank that gets others."""

from pathlib import Path

import pytest

from muster.report.stragglers import draw_stragglers, straggler_note
from muster.simulate.stragglers import Straggler
from muster.spec.plan_name import parse_plan_name
from muster.train.gradient_check import find_wrong_gradients, ranks_with_the_same_layers
from muster.train.straggler_monitor import is_replaceable
from tests.ranks import run_ranks
from tests.sampling import quick_sample
from tests.train_runs import assert_one_sentence, train

CASES = [
    [("dp4-z1", [2]), ("dp2-pp2-z1", [1]), ("dp4x1", [])],
    [("tp2-dp2x1", [3]), ("dp2-cp2-z1", [0]), ("dp2x1-pp2", [3]), ("dp4-z1", []), ("dp4x1", [0])],
]


@pytest.mark.parametrize("cases", quick_sample(CASES, 0))
def test_a_wrong_bit_of_a_gradient_is_named_at_once(cases: list, tmp_path: Path) -> None:
    by_rank = run_ranks(4, "tests.gradient_check_ranks:check", {"cases": cases, "cache": str(tmp_path)})
    assert all(told == by_rank[0] for told in by_rank)
    for (name, wrong), (checks, is_same) in zip(cases, by_rank[0], strict=True):
        assert is_same, f"{name}: comparisons leave no trace in the training"
        ((row, sentences),) = checks
        groups = ranks_with_the_same_layers(parse_plan_name(name))
        expected = [[rank] for rank in wrong] if len(groups) == 1 else [list(g) for g in groups if {*g} & {*wrong}]
        assert [one["ranks"] for one in row["stragglers"]] == expected, name
        assert all(one["kind"] == "gradient" for one in row["stragglers"])
        assert len(sentences) == len(expected)
        assert row["step"] == 2
        assert all(told.startswith("step 2: rank") for told in sentences)
    rows = [row for checks, _ in by_rank[0] for row, _ in checks]
    assert "gets other gradients from a micro-batch than the others" in (straggler_note(rows) or "")
    assert draw_stragglers(rows) is not None, "comparisons of gradients have no times"


def test_the_ranks_that_most_others_contradict_are_wrong() -> None:
    checksums = [[1, 2], [1, 2], [1, 3], [1, 2], [5], [6]]
    found = find_wrong_gradients(checksums, [(0, 1, 2, 3), (4, 5)])
    assert [(one.kind, one.ranks) for one in found] == [("gradient", (2,)), ("gradient", (4, 5))]
    assert find_wrong_gradients([[1], [1]], [(0, 1)]) == []
    assert [one.ranks for one in find_wrong_gradients([[1], [1], [2], [2]], [range(4)])] == [(0, 1, 2, 3)]
    assert is_replaceable(found[0], [])
    assert not is_replaceable(found[0], [{"ranks": [2], "causes": ["wrong results"], "reason": ""}])
    assert not is_replaceable(Straggler("gradient", (4, 5), 1.0), []), "nobody knows which of them"


@pytest.mark.parametrize(
    ("plan", "words"),
    [("pp2", "expected dp2 or more"), ("dp2", "expected z1"), ("dp2-pp2-z1-vocab", "without vocab")],
)
def test_what_comparisons_of_gradients_do_not_go_with(plan: str, words: str, tmp_path: Path) -> None:
    run = ["--run", tmp_path / "run", "--parallel", plan, "--train.gradient_check_every", "5"]
    assert_one_sentence(train("--preset", "tiny", "--dry-run", *run), 3, words)
