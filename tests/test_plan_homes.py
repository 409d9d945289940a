"""Legality against an independent search for the homes of all parameters, for random plans."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.spec.legality import plan_violations
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload
from tests.plan_homes import STAGES_PER_RANK, THERE_AND_BACK, home_problem

MODELS = (
    *("tiny", "demo", "gpt2", "gpt2-xl", "llama3.2-1b", "llama3-8b", "llama2-13b", "llama3-70b", "llama3.1-405b"),
    *("qwen2.5-0.5b", "qwen2.5-7b", "qwen3-32b", "mistral-7b", "megatron-22b", "gpt-oss-20b", "gpt-oss-120b"),
    *("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"),
)
CLUSTERS = "8xh100", "24xa100", "64xh100"
PAIRS = [(load_model(model), load_cluster(cluster).num_devices) for model in MODELS for cluster in CLUSTERS]


def divisor(draw: Random, number: int) -> int:
    """Return a divisor, or now and then another small number."""
    if draw.random() < 0.02:
        return draw.randint(1, 8)
    return draw.choice([n for n in range(1, number + 1) if number % n == 0])


def random_mesh(draw: Random, model: ModelSpec, ranks: int) -> dict[str, int]:
    tp = divisor(draw, min(ranks, draw.choice([1, 2, 4, 8, 16])))
    cp = divisor(draw, max(1, ranks // tp)) if draw.random() < 0.3 else 1
    data = max(1, ranks // (tp * cp))
    shard = divisor(draw, data)
    mesh = {"dp_replicate": max(1, data // shard), "dp_shard": shard, "cp": cp, "tp": tp, "ep": 1, "etp": 1}
    if model.moe is not None and draw.random() < 0.8:
        mesh["ep"] = divisor(draw, model.moe.num_experts if draw.random() < 0.5 else shard * cp * tp)
        mesh["etp"] = draw.choice([1, 1, 1, 2, 3, 4])
    elif draw.random() < 0.02:
        mesh["ep"] = 2
    return mesh


def narrowed(draw: Random, mesh: dict[str, int]) -> dict[str, int]:
    """Return a mesh of as many ranks with another tensor-parallel degree, or the same one."""
    ranks = mesh["dp_shard"] * mesh["tp"]
    tp = draw.choice([mesh["tp"], 1, 2, 4])
    return mesh | ({"tp": tp, "dp_shard": ranks // tp} if ranks % tp == 0 else {})


def random_layers(draw: Random, num_layers: int, stages: int) -> list[int]:
    cuts = sorted(draw.choices(range(num_layers + 1), k=stages - 1))
    counts = [end - start for start, end in zip([0, *cuts], [*cuts, num_layers], strict=True)]
    if draw.random() < 0.05:
        counts[draw.randrange(stages)] += 1
    return counts


def random_plan(draw: Random, model: ModelSpec, world: int) -> tuple[Plan, int, int]:
    """Return a plan, most often nearly legal, with a sequence length and a global batch size."""
    pp = draw.choice([1, 2, 2, 3, 4, 8])
    schedule = draw.choice(list(STAGES_PER_RANK)) if pp > 1 or draw.random() < 0.1 else "1f1b"
    vpp = draw.choice(sorted(STAGES_PER_RANK[schedule])[:3]) if draw.random() < 0.95 else draw.randint(1, 4)
    copies = 2 if schedule in ("dualpipe", "bitpipe") else 1
    mesh = random_mesh(draw, model, max(1, world // pp))
    given: dict[str, Any] = {**mesh, "pp": pp, "vpp": vpp, "schedule": schedule}
    given["micro_batch_size"] = draw.choice([1, 1, 2, 3])
    stages = max(1, pp * vpp // copies)
    if draw.random() < 0.3:
        given["stages"] = [{"layers": n} for n in random_layers(draw, model.num_layers, stages)]
        if draw.random() < 0.4:
            own = [narrowed(draw, mesh) for _ in range(pp)]
            for index, stage in enumerate(given["stages"]):
                round_, at = divmod(index, pp)
                if draw.random() < 0.98:
                    stage["mesh"] = own[pp - 1 - at if schedule in THERE_AND_BACK and round_ % 2 else at]
            if draw.random() < 0.8:
                given |= dict.fromkeys(mesh, 1)
    strategy = {
        "zero": draw.choice(["z1", "z1", "z2", "z3"]),
        "sp": draw.random() < (0.5 if mesh["tp"] > 1 else 0.02),
        "tp_overlap": draw.choice(["none"] * 9 + ["async_tp"]),
        "offload": draw.choice(["none"] * 9 + ["activations"]),
    }
    given["default_strategy"] = strategy
    if draw.random() < 0.15:
        start = draw.randrange(model.num_layers)
        changed = {"zero": draw.choice(["z1", "z3"]), "sp": draw.random() < 0.3, "tp_overlap": "none"}
        count = draw.choice([1, 1, model.num_layers - start, model.num_layers])
        given["overrides"] = [{"start": start, "count": count, "strategy": changed}]
    given["vocab_parallel"] = draw.random() < 0.1
    given["post_validation"] = draw.random() < 0.05
    if draw.random() < 0.1:
        given["axis_order"] = tuple(draw.sample(MESH_AXES, len(MESH_AXES)))
    first = (given.get("stages") or [{}])[0].get("mesh") or given
    ranks = first["dp_replicate"] * first["dp_shard"]
    shares = [1]
    if draw.random() < 0.1:
        shares = draw.choices([1, 2, 3], k=divisor(draw, ranks))
        given["uneven_micro_batches"] = shares
    batch = ranks * sum(shares) * given["micro_batch_size"] * draw.choice([1, 2, 3, 4, 8])
    if draw.random() < 0.05:
        batch = max(1, batch + draw.randint(-2, 2))
    return Plan.model_validate(given), draw.choice([1024, 1024, 1536, 1000, 96, 8192]), batch


def compare(seed: int, count: int) -> Counter[str]:
    """Compare both judges on random plans, pair by pair. Returns the numbers of accepted and of refused plans."""
    draw = Random(seed)
    judged: Counter[str] = Counter()
    for number in range(count):
        model, world = PAIRS[number % len(PAIRS)]
        plan, seq_len, batch = random_plan(draw, model, world)
        said = plan_violations(plan, model, Workload(seq_len=seq_len, global_batch_size=batch), world)
        found = home_problem(plan, model, seq_len, batch, world)
        assert bool(said) == bool(found), (model.name, world, seq_len, batch, plan, said, found)
        judged["refused" if said else "accepted"] += 1
        judged["with experts"] += not said and plan.uses_axis("ep")
        judged["unequal"] += not said and not plan.is_uniform
    return judged


def test_every_accepted_plan_has_homes_and_every_refused_one_has_not() -> None:
    judged = compare(seed=15, count=1800)
    assert min(judged["accepted"], judged["refused"]) > 300
    assert min(judged["with experts"], judged["unequal"]) > 5


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_plans(seed: int) -> None:
    assert compare(seed, 25_000)["accepted"] > 3000
