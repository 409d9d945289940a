"""Temporary bytes of attention over a ring of ranks: those of the formula are those that the runtime allocates."""

import pytest
import torch

from muster.cost.context_traffic import AttentionShape, attention_workspace
from muster.layout.context_parallel import attention_blocks, kept_positions
from muster.model.block_attention import ScoreRule
from muster.parallel.cp_ring import RingAttention
from muster.spec.plan_name import parse_plan_name
from muster.train.memory_check import FAKE_MODE, _fake_group, _make_tracker, _total

BATCH, TOKENS, HEADS, WIDTH = 1, 4096, 8, 64


def counted_bytes(name: str, kv_heads: int, dtype: torch.dtype, rank: int) -> tuple[int, int]:
    """The most that the forward allocates, and the most of the backward, of one rank."""
    with _fake_group(parse_plan_name(name), rank) as world, FAKE_MODE:
        axis = world.context_axis()
        assert axis is not None
        q_BHsd, k_BKsd, v_BKsd, grad_BHsd = (
            torch.empty(BATCH, TOKENS, heads, WIDTH, dtype=dtype).transpose(1, 2)
            for heads in (HEADS, kv_heads, kv_heads, HEADS)
        )
        length = TOKENS * axis.size
        kept = [kept_positions(length, axis.size, other) for other in range(axis.size)]
        blocks = tuple(attention_blocks(length, kept[rank], keys, None, None) for keys in kept)
        found = []
        qkv = tuple(x.requires_grad_() for x in (q_BHsd, k_BKsd, v_BKsd))
        out_BHsd = None
        for is_backward in (False, True):
            tracker = _make_tracker()
            saved = () if out_BHsd is None else out_BHsd.grad_fn.saved_tensors
            tracker.track_external(*qkv, grad_BHsd, *(x for x in saved if x is not None))
            with tracker:
                before = _total(tracker, "current")
                if is_backward:
                    assert out_BHsd is not None
                    out_BHsd.backward(grad_BHsd)
                else:
                    out_BHsd = RingAttention.function.apply(axis, *qkv, blocks, ScoreRule(WIDTH**-0.5), None)
                found.append(_total(tracker, "peak") - before)
        return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "dtype", "kv_heads"),
    [("cp2", torch.bfloat16, 8), ("cp2", torch.float32, 2), ("cp4", torch.bfloat16, 2), ("cp4w2", torch.bfloat16, 8)],
    ids=str,
)
def test_workspace_is_what_a_ring_allocates(name: str, dtype: torch.dtype, kv_heads: int) -> None:
    check_workspace(name, dtype, kv_heads)


RINGS = ["cp2", "cp3", "cp4", "cp5"]
DOUBLE_RINGS = ["cp4w2", "cp6w2", "cp6w3", "cp8w2", "cp8w4", "cp9w3", "cp12w2", "cp12w3", "cp12w4"]


@pytest.mark.soak
@pytest.mark.parametrize("name", RINGS + DOUBLE_RINGS)
def test_workspace_of_every_ring_is_what_it_allocates(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for kv_heads in (8, 2):
            check_workspace(name, dtype, kv_heads)


def check_workspace(name: str, dtype: torch.dtype, kv_heads: int) -> None:
    plan = parse_plan_name(name)
    ranks = plan.context_ranks(plan.mesh(0))
    shape = AttentionShape(BATCH * TOKENS, HEADS, kv_heads, WIDTH, TOKENS * ranks.size)
    counted = [counted_bytes(name, kv_heads, dtype, rank) for rank in {0, ranks.size // 2, ranks.size - 1}]
    for direction, is_backward in enumerate((False, True)):
        planned = attention_workspace(ranks, shape, dtype.itemsize, 4, is_backward)
        planned += TOKENS * HEADS * 4 * (not is_backward)  # the log-sum-exp, which is saved
        most = max(one[direction] for one in counted)
        assert most == pytest.approx(planned, rel=0.01 if is_backward else 0.15), is_backward
        assert most <= planned * 1.01, is_backward
