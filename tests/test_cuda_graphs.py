"""CUDA graphs of passes: replays on a device in name only give the bits of steps without graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from muster.api.verbs import predict
from muster.parallel.cuda_graphs import graphs_note
from muster.spec.cuda_graphs import require_static_shapes
from muster.spec.errors import InfeasibleError
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.rules import repaired
from muster.spec.supported import RUNTIME_RULES, unsupported_features
from tests.parity import small_run
from tests.ranks import run_ranks

GRAPHS = {"cuda_graphs": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def parameters(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> list[list[str]]:
    """Return the digest of each rank's parameters after the steps of each case."""
    given = [{"steps": 4, "layers": 4, **case} for case in cases]
    ranks = run_ranks(num_ranks, "tests.parity:run_cases", {"cases": given, "cache": str(cache)})
    return [[found["parameters"] for found in case] for case in zip(*ranks, strict=True)]


def check_replays(num_ranks: int, cases: list[dict[str, Any]], cache: Path) -> None:
    replayed = [case | {"changes": GRAPHS, "fault": "recorded graphs"} for case in cases]
    found = parameters(num_ranks, [*cases, *replayed], cache)
    for case, one, other in zip(cases, found, found[len(cases) :], strict=False):
        assert one == other, case


FAULTS = ("one pair of graphs for all", "stale inputs of graphs")


def test_replayed_passes_give_the_bits_of_others_and_a_faulty_capture_is_found(cache: Path) -> None:
    plain = [
        {"plan": "pp2", "precision": "bf16", "layers": 2, "steps": 3},
        {"plan": "pp2v2-sinterleaved-rfull", "precision": "fp64", "tied": True, "steps": 2},
    ]
    replayed = [case | {"changes": GRAPHS, "fault": "recorded graphs"} for case in plain]
    faulty = [plain[0] | {"changes": GRAPHS, "fault": fault} for fault in FAULTS]
    one, other, *found = parameters(2, [*plain, *replayed, *faulty], cache)
    assert found[:2] == [one, other]
    assert all(bad != one for bad in found[2:])


WIDE = {
    1: [
        *({"plan": "dp1-mb2", "family": name, "precision": "fp64"} for name in ("gpt2", "qwen3", "gemma2", "gemma3")),
        *({"plan": "dp1", "family": name, "precision": "bf16"} for name in ("gpt_neox", "latent", "sinks")),
        {"plan": "dp1-relem", "precision": "fp8", "z_loss": 0.1},
        {"plan": "dp1", "precision": "fp32", "optim": "muon", "tied": True},
    ],
    2: [
        {"plan": f"pp2{schedule}", "precision": precision, "tied": True}
        for schedule in ("-sgpipe", "v2-sbreadthfirst", "-relem-mb2", "v2-shanayo", "v2-sgis")
        for precision in ("bf16", "fp64")
    ],
}


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", WIDE)
def test_replayed_passes_of_more_plans_give_the_bits_of_others(num_ranks: int, cache: Path) -> None:
    check_replays(num_ranks, WIDE[num_ranks], cache)


@pytest.mark.parametrize("name", ["dp2", "tp2", "cp2", "pp2-szbh1", "dp1-oact", "pp2-vocab", "tile4"])
def test_a_plan_that_cant_be_captured_is_refused_with_one_sentence(name: str) -> None:
    plan = parse_plan_name(name).model_copy(update=GRAPHS)
    (sentence,) = unsupported_features(plan)
    assert sentence.startswith("cuda_graphs with ")
    assert not unsupported_features(repaired(RUNTIME_RULES, plan))


def test_a_refusal_names_the_same_plan_without_graphs() -> None:
    plan = parse_plan_name("dp2-z1", Plan(micro_batch_size=1)).model_copy(update=GRAPHS)
    config = small_run()
    with pytest.raises(InfeasibleError, match=r"nearest: dp2-mb1-z1-bf16 \(without cuda_graphs\)"):
        require_runnable(plan, config.model, config.workload, 2)


def test_lengths_that_change_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="take data.packing concatenate"):
        require_static_shapes("document_mask")
    require_static_shapes("concatenate")


def test_predictions_count_no_launches_and_what_graphs_keep() -> None:
    eager, replayed = (
        predict("tiny", "4xh100", Plan(pp=4, compile=False, cuda_graphs=graphs), seq_len=128, global_batch=16)
        for graphs in (False, True)
    )
    assert replayed.step_time_s < 0.8 * eager.step_time_s
    first, *_, last = (
        sum(b.terms.values()) - sum(a.terms.values()) for a, b in zip(eager.memory, replayed.memory, strict=True)
    )
    assert first > 0
    assert last > 0


def test_what_a_cpu_does_without_them_is_said() -> None:
    assert "without CUDA graphs" in (graphs_note(Plan(cuda_graphs=True), torch.device("cpu")) or "")
    assert graphs_note(Plan(), torch.device("cpu")) is None
