"""A run goes on under any other plan: every tensor to the bit, and the losses of the run that nobody interrupted."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from tests.parity import FAMILIES, open_data, small_run
from tests.ranks import run_ranks
from tests.resume_ranks import draw_plan

STEPS = 5
"""Steps after loading whose losses are compared."""
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
LADDER = (
    *("dp1", "cp2", "cp2a", "cp2u", "cp2b", "cp2t", "cp2s", "cp4", "cp4a", "cp4u2", "cp4w2", "cp4b", "cp4t"),
    *("cp2-tp2-sp", "cp2-pp2", "cp2-pp2v2-szbv", "dp2-cp2-z3", "cp2-tile4", "slice4-pp2", "dp4-z3", "tp2-sp-pp2"),
)
"""Words of context parallelism, and plans without it."""


def chain(draw: random.Random, optim: str, precision: str, pairs: int, most: int, family: str = "llama") -> dict:
    """A chain of random plans for one run; here and there a plan is followed by itself."""
    config = small_run(
        tied=draw.random() < 0.5,
        steps=500,
        layers=draw.choice([4, 4, 4, 8] if most > 4 else [4]),
        optim=optim,
        family=family,
    )
    plans: list[Plan] = [draw_plan(draw, config, precision, most)]
    while len(plans) <= pairs:
        plans.append(plans[-1] if draw.random() < 0.2 else draw_plan(draw, config, precision, most))
    return {
        "config": config.model_dump(mode="json"),
        "plans": [plan.model_dump(mode="json") for plan in plans],
    }


def run(tmp_path: Path, chains: list[dict], most: int, steps: int = STEPS) -> list[list[dict]]:
    cache = str(tmp_path / "cache")
    open_data(small_run(), cache)
    payload = {"chains": chains, "cache": cache, "root": str(tmp_path / "checkpoints"), "steps": steps}
    return run_ranks(most, "tests.resume_ranks:chains", payload)[0]


def check(chains: list[dict], found: list[list[dict]]) -> int:
    """Holds what was found to the bar; how many pairs there were."""
    count = 0
    for one, results in zip(chains, found, strict=True):
        plans = [Plan.model_validate(plan) for plan in one["plans"]]
        for before, after, result in zip(plans[:-1], plans[1:], results[1:], strict=True):
            what = f"{before} → {after}: {result}"
            assert result["tensors"] == [], what
            tolerance = 0.0 if before == after else TOLERANCE[after.precision]
            assert result["error"] <= tolerance, what
            count += 1
    return count


def test_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    draw = random.Random(5)
    chains = [chain(draw, "adamw", "fp64", 1, most=3, family="gpt2"), chain(draw, "muon", "fp32", 1, most=3)]
    config, base = small_run(steps=500).model_dump(mode="json"), Plan(precision="fp64", micro_batch_size=2)
    shares = ("dp2-z1-uneven3.1", "pp2", "dp2-z1-uneven1.3")
    plans = [parse_plan_name(name, base).model_dump(mode="json") for name in shares]
    chains.append({"config": config, "plans": plans, "fault": None})
    chains.append(ladder_chain(["cp2t", "cp2u", "dp2-ooptd-oparamd", "pp2-oopt-oparam"], micro_batch_size=2))
    chains.append(optim_chain(2, ema_decay=0.9, freeze=("embed.*", "layers.[01].*", "layers.2.mlp.*")))
    found = run(tmp_path, chains, most=3, steps=2)
    assert check(chains, found) == 9
    assert all(result["average"] < 1e-12 for result in found[-1][1:])


def ladder_chain(words: list[str], micro_batch_size: int = 1) -> dict:
    """A chain of plans by their words."""
    base = Plan(precision="fp64", micro_batch_size=micro_batch_size)
    plans = [parse_plan_name(word, base).model_dump(mode="json") for word in words]
    return {"config": small_run(steps=500).model_dump(mode="json"), "plans": plans}


def all_pairs(words: Sequence[str]) -> list[str]:
    """A walk that goes from each word to each other one once (Hierholzer's algorithm)."""
    left = {word: [other for other in words if other != word] for word in words}
    walk, stack = [], [words[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def optim_chain(micro_batch_size: int, **optim: Any) -> dict:
    """A chain of plans that shard the weights, cut them, and place them on stages."""
    config = small_run(steps=500)
    config = config.model_copy(update={"optim": config.optim.model_copy(update=optim)})
    base = Plan(precision="fp64", micro_batch_size=micro_batch_size)
    plans = [parse_plan_name(name, base).model_dump(mode="json") for name in ("dp2", "tp2-sp", "pp2-vocab-szbh1")]
    return {"config": config.model_dump(mode="json"), "plans": plans}


def test_what_goes_wrong_when_going_on_is_noticed(tmp_path: Path) -> None:
    faults = ("other position", "other step", "no optimizer", "swapped pieces")
    config = small_run(steps=500).model_dump(mode="json")
    base = Plan(precision="fp64", micro_batch_size=4)
    plans = [parse_plan_name(name, base).model_dump(mode="json") for name in ("dp2", "dp1")]
    found = run(tmp_path, [{"config": config, "plans": plans, "fault": fault} for fault in faults], most=2, steps=2)
    for fault, results in zip(faults, found, strict=True):
        assert results[1]["tensors"] or results[1]["error"] > TOLERANCE["fp64"], fault
        assert bool(results[1]["tensors"]) == (fault in ("no optimizer", "swapped pieces")), fault


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_a_run_goes_on_under_any_other_plan(part: int, tmp_path: Path) -> None:
    """60 random pairs of plans in four launches; every family of models in fp32 and in fp64."""
    draw = random.Random()
    kinds = [("adamw", "fp64"), ("adamw", "fp32"), ("muon", "fp64"), ("lion", "fp64"), ("sgd", "fp32")]
    draw.shuffle(kinds)
    families = {"fp32": ["gpt2", "qwen3"], "fp64": ["llama", *draw.sample(list(FAMILIES), 2)]}
    if part == 0:
        families["fp32"][0] = "llama"
    chains = [chain(draw, optim, precision, 3, 8, families[precision].pop()) for optim, precision in kinds]
    assert check(chains, run(tmp_path, chains, most=8)) == 15


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(24))
def test_each_word_of_context_parallelism_goes_on_under_each_other_one(part: int, tmp_path: Path) -> None:
    walk = all_pairs(LADDER)
    count = len(LADDER) * (len(LADDER) - 1)
    assert len(set(pairwise(walk))) == len(walk) - 1 == count
    own = walk[count * part // 24 : count * (part + 1) // 24 + 1]
    assert check([ladder_chain(own)], run(tmp_path, [ladder_chain(own)], most=4)) == len(own) - 1
