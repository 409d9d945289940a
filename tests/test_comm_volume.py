"""The bytes that ranks give to their collectives and sends are those of the formula."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.parallel.axis import TensorAxis
from tests.plans import unequal
from tests.ranks import run_ranks
from tests.sampling import quick_sample

CHUNKED = {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}}

CASES: dict[int, list[tuple[Any, ...]]] = {
    2: [
        ("tp2", False),
        ("tp2-sp", False),
        ("tp2-sp-rfull", False),
        ("tp2-rfull", True),
        ("tp2", True, {"default_strategy": CHUNKED["default_strategy"] | {"recompute": "full"}}),
        ("dp2-rfull", False),
        ("tp2-sp-mb2-bf16", True),
        ("tp2-mb2-bf16", True, CHUNKED),
        *((f"tp2-{words}-domino-mb2", False) for words in ("rfull", "sp-rfull")),
        ("tp2-rfull", True, {"family": "llama ladder"}),
        ("tp2-rfull", True, {"family": "qwen3 kraken2"}),
        ("pp2-mb2", False, {"family": "gpt2 kraken2"}),
        ("dp2-z1", True),
        ("dp2-z2-bf16", False),
        ("dp2-mb2", False),
        ("dp2x1", False),
        ("pp2-l3.1", False),
        ("pp2-bf16-sgpipe", True),
        ("pp2-mb2-vocab", True),
        ("pp2-bf16-sgpipe-oact", True),
        ("cp2u-rfull-oact", True),
        ("tp2-sp-rfull", True, {"family": "gpt2"}),
        ("tp2-rfull", False, {"family": "gpt2"}),
        ("dp2", False, {"family": "gpt2"}),
        ("tp2", False, {"family": "qwen3"}),
        ("tp2-sp-rfull", False, {"family": "olmo2"}),
        ("tp2-sp-rfull", False, {"family": "gla"}),
        ("tp2", False, {"family": "simple_gla"}),
        ("tp2-sp-rfull", False, {"family": "latent"}),
        ("tp2-rfull-bf16", False, {"family": "direct latent"}),
        *(("tp2", True, {"family": family}, CHUNKED) for family in ("latent", "direct latent")),
        ("cp2a", False, {"family": "latent"}),
        *((f"cp2{kind}-rfull-z1", False) for kind in ("", "a", "u")),
        *((f"cp2{kind}-bf16-mb2", True, {"family": "qwen3"}) for kind in ("", "a", "u")),
    ],
    4: [
        ("tp2-dp2", False, {"optim": "mezo"}),
        ("tp2-sp-pp2-mb2-bf16", True, {"optim": "mezo"}),
        ("dp2-cp2a-z1", False, {"optim": "mezo", "family": "gpt2"}),
        ("tp4", False),
        ("tp2-pp2", True, {"family": "gpt2 ladder"}),
        ("tp2-pp2", True, {"family": "gpt2 kraken4"}),
        ("pp2-mb2-z1", False, {"family": "llama kraken2"}, unequal((3, {"tp": 2}), (1, {"dp_shard": 2}))),
        ("tp4-sp", False),
        ("tp2-sp-pp2", True),
        ("tp2-sp-dp2-z1", False),
        ("tp4", False, CHUNKED),
        ("tp2-pp2", True, CHUNKED),
        ("tp2-dp2-bf16", True),
        ("tp2-dp2", True, {"optim": "muon"}),
        ("dp2-pp2-z1", False, {"optim": "muon"}),
        ("dp2x2-z1", False),
        ("dp2x2-z2-mb2", False),
        ("dp2x2-z3-bf16", False),
        ("dp4-z3", True),
        ("dp2-pp2-z3", True),
        ("dp2-pp2-z3-sgpipe", False),
        ("pp2v2-dp2-z1-sinterleaved", True),
        ("dp2-pp2-z1-vocab-bf16", False),
        ("dp2-pp2-z2-vocab", True),
        ("dp2-pp2-z2-vocab", True, {"family": "gpt2"}),
        ("tp4-sp", False, {"family": "qwen3"}),
        ("tp4", False, {"family": "olmo2"}),
        *((f"cp4{kind}", False, {"family": "gemma3"}) for kind in ("", "a", "u", "u2", "w2", "t", "s")),
        *((plan, False, {"family": "gla"}) for plan in ("cp4l", "cp4z-rfull", "dp2-cp2l-bf16", "tp2-sp-cp2z-bf16")),
        *((plan, False, {"kv_heads": 4}) for plan in ("cp4b", "dp2-cp2b-bf16", "dp2-cp2t-bf16")),
        *((f"tp2-sp-cp2{kind}-bf16", True) for kind in ("", "a", "u")),
        ("dp2-cp2-z3", False),
        ("dp4-zp2g4", True),
        ("dp2-pp2v2-sbreadthfirst-active1", True),
        ("dp2-pp2v2-szeropp-active1-bf16", False),
        ("dp2-pp2v4-sinterleaved-active2", False, {"layers": 8}),
        ("dp2x1-pp2v2-sinterleaved-active1", True),
        ("dp4-bf16-zp1g2", False),
        ("dp4-mb2-zp4g2", False),
        ("dp2-cp2-zp2g1", False),
        ("dp4-zp2g2", False, {"family": "gpt2"}),
        ("dp2-tp2-zp1g1", False),
        ("dp4-zp2g2-qwint8-qgint4", False),
        ("dp4-bf16-zp1g2-qwint8-qgint8", True, {"bucket_layers": 3}),
        ("dp2-cp2a-z1", False, {"optim": "muon"}),
        ("dp2x1-cp2u-z2", True),
        ("pp2-cp2a-z2-vocab", True),
        ("pp2-cp2u-rfull", False),
        ("pp2-sp-mb2-z1", True, unequal((1, {"dp_shard": 2}), (3, {"tp": 2}))),
        ("pp2-z2-mb2", True, unequal((3, {"tp": 2}), (1, {"dp_replicate": 2}))),
    ],
}


OFFLOADED_PARAMS: list[tuple[Any, ...]] = [("pp2-oopt-oparam", False), ("dp2-bf16-ooptd-oparamd", False)]
SAMPLE = {2: random.Random(2).sample(CASES[2], 2) + OFFLOADED_PARAMS[1:], 4: random.Random(4).sample(CASES[4], 3)}


@pytest.mark.parametrize("num_ranks", SAMPLE)
def test_step_bytes_equal_the_formula(num_ranks: int, tmp_path: Path) -> None:
    assert_bytes_equal(num_ranks, SAMPLE[num_ranks], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", CASES)
def test_step_bytes_of_every_plan_equal_the_formula(num_ranks: int, tmp_path: Path) -> None:
    assert_bytes_equal(num_ranks, CASES[num_ranks] + OFFLOADED_PARAMS * (num_ranks == 2), tmp_path)


def assert_bytes_equal(num_ranks: int, cases: list[tuple[Any, ...]], tmp_path: Path) -> None:
    payload = {"cases": cases, "cache": str(tmp_path)}
    for rank in run_ranks(num_ranks, "tests.comm_volume_ranks:count", payload):
        for case in rank:
            assert case["counted"] == case["predicted"], case["plan"]
            assert sum(case["counted"].get("world", {}).values()) > 0


FROZEN: tuple[tuple[Any, ...], ...] = (
    ("tp2-sp",),
    ("tp2",),
    ("tp2-sp", CHUNKED),
    ("tp2", {"family": "qwen3 kraken2"}),
)


@pytest.mark.parametrize(("plans", "layers"), quick_sample([(FROZEN[:2], 1), (FROZEN, 4)], 0), ids=["two", "all"])
def test_a_frozen_embedding_has_no_gradient_to_sum(
    plans: tuple[tuple[Any, ...], ...], layers: int, tmp_path: Path
) -> None:
    frozen = {"freeze": ("embed.weight",), "layers": layers}
    assert_bytes_equal(2, [(plan, False, *more, frozen) for plan, *more in plans], tmp_path)


BUCKETS = {1: 4, 3: 2, 4: 1}
"""Buckets of four layers, by the layers of a bucket."""


@pytest.mark.parametrize("sizes", quick_sample([[3], list(BUCKETS)], 0), ids=str)
def test_buckets_gather_and_reduce_layers_together(sizes: list[int], tmp_path: Path) -> None:
    """Four layers and what belongs to none, four micro-batches: fewer collectives with the same bytes."""
    cases = [(plan, False, {"bucket_layers": size}) for size in sizes for plan in ("dp2", "dp2-z2", "dp2-z1")]
    (found, _) = run_ranks(2, "tests.comm_volume_ranks:count", {"cases": cases, "cache": str(tmp_path)})
    calls = [(case["calls"]["all_gather"], case["calls"]["reduce_scatter"]) for case in found]
    for size, *ours in zip(sizes, calls[::3], calls[1::3], calls[2::3], strict=True):
        buckets = BUCKETS[size]
        in_passes, at_the_end = (4 * (2 * buckets + 1), 4 * (buckets + 1)), (buckets + 1, buckets + 1)
        assert ours == [in_passes, (buckets + 1, 4 * (buckets + 1)), at_the_end]
    assert all(case["counted"] == case["predicted"] for case in found)


def test_buckets_are_gathered_ahead(tmp_path: Path) -> None:
    """When a layer begins, what belongs to no layer, its own bucket and those ahead have been asked for."""
    cases = [("dp2", False, {"bucket_layers": size, "prefetch_buckets": n}) for size, n in ((1, 1), (1, 2), (2, 1))]
    (found, _) = run_ranks(2, "tests.comm_volume_ranks:count", {"cases": cases, "cache": str(tmp_path)})
    assert [case["begun"][:4] for case in found] == [[3, 4, 5, 5], [4, 5, 5, 5], [3, 3, 3, 3]]


def test_no_collective_of_tensor_parallelism_warns() -> None:
    """A warning of PyTorch's would stand in the terminal of every run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        axis, x_BSD = TensorAxis(dist.distributed_c10d._get_default_group(), 1, 0, True), torch.ones(2, 3, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(axis.all_gather(x_BSD).wait(), x_BSD)
            assert torch.equal(axis.reduce_scatter(x_BSD).wait(), x_BSD)
            assert torch.equal(axis.all_reduce(x_BSD.clone()).wait(), x_BSD)
    finally:
        dist.destroy_process_group()
