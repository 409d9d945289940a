"""Slices of a micro-batch whose collectives travel beside each other's compute (`tp_overlap: domino`)."""

from pathlib import Path
from typing import Any

import pytest

from tests.plans import unequal
from tests.test_parity import by_layer, check_parity

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "tp2-domino-mb2", "profile": True},
        {"plan": "tp2-sp-domino-mb2-rfull", "tied": True},
        {"plan": "tp2-domino-mb8", "family": "gpt2"},
        {"plan": "tp2-domino-mb2-relem", "family": "gemma2", "packing": "document_mask"},
        {"plan": "tp2-domino-mb4-rfull", "family": "qwen3", "packing": "none"},
        {"plan": "tp2-sp-domino-mb2", "family": "olmo2"},
        {"plan": "tp2-domino-mb2", "family": "gpt_neox"},
        {"plan": "tp2-sp-domino-mb2", "family": "latent"},
        {"plan": "tp2-domino-mb2-rfull", "family": "dropout"},
        {"plan": "tp2-sp-domino-mb4", "family": "hidden dropout", "packing": "next_fit"},
    ],
    4: [
        {"plan": "tp2-domino-dp2-mb2-z3", "family": "gpt2", "profile": True},
        {"plan": "tp2-domino-pp2-mb2", "tied": True},
        {"plan": "tp2-sp-domino-dp2-mb2-z3-rfull"},
        {"plan": "tp2-domino-dp2-mb2-z2", "family": "olmo2"},
        {"plan": "tp2-domino-dp2-mb2-z1", "tied": True, "overlaps": True},
        {"plan": "tp2-domino-dp2-mb2-z3", "family": "gemma2", "changes": {"bucket_layers": 2}},
        {"plan": "tp2-domino-dp2-mb2-z3", "changes": {"prefetch_buckets": 2}},
        {"plan": "tp2-sp-domino-pp2-mb2-szbh1-relem", "family": "gpt2"},
        {"plan": "tp2-domino-cp2-mb2"},
        {"plan": "tp4-domino-mb2-rfull"},
        {"plan": "tp2-domino-pp2-mb2", "changes": by_layer("none", "full", "elementwise", "full", tp_overlap="domino")},
        {"plan": "pp2-domino-mb2-z1", "tied": True, "changes": unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))},
    ],
}
SAMPLE = {2: [CASES[2][1], CASES[2][-2]], 4: CASES[4][:1]}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_slices_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, [case | {"precision": "fp64", "steps": 1} for case in SAMPLE[num_ranks]], cache)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_more_slices_equal_one_process(num_ranks: int, cache: Path) -> None:
    check_parity(num_ranks, [case | {"precision": "fp64", "steps": 1} for case in CASES[num_ranks]], cache)
