"""Copies of experts: how they are chosen, what they send and take, and what they gain."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from muster.api.verbs import predict
from muster.config.named_model import load_model
from muster.cost.activations import expert_parameter_bytes
from muster.cost.expert_traffic import RoutedShape, copy_calls, dispatch_calls
from muster.model.decoder import recomputable
from muster.model.experts import Experts
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis, PendingTensor
from muster.parallel.ep_all_to_all import AllToAll
from muster.parallel.expert_copies import CopiedExperts, with_copies
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.legality import plan_violations
from muster.spec.nearest_plans import nearest_plans
from muster.spec.plan_name import parse_plan_name
from muster.spec.redundant_experts import copy_experts, rows_from
from muster.spec.routing_load import zipf_load
from muster.spec.workload import Workload
from tests.ranks import run_ranks

SPEC = load_model("tiny-moe").model_copy(update={"hidden_size": 16})
RANKS, MOST = 4, 2


def test_the_fullest_rank_s_rows_go_to_the_emptiest() -> None:
    found = copy_experts([60, 20, 10, 10], 4, 1)
    assert found.copies == ((), (0,), (0,), (0,))
    assert found.rows == {0: {0: 25, 2: 15, 3: 15, 1: 5}}
    assert found.loads == (25, 25, 25, 25)
    assert not copy_experts([26, 25, 25, 24], 4, 1).width, "about even loads stay where they are"
    assert copy_experts([0, 0, 0, 0], 4, 1).imbalance == 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_row_is_lost_and_no_rank_has_more_than_before(data: st.DataObject) -> None:
    ranks, each, most = (data.draw(st.integers(1, top)) for top in (6, 4, 3))
    counts = torch.tensor(
        [data.draw(st.lists(st.integers(0, 50), min_size=ranks * each, max_size=ranks * each)) for _ in range(ranks)]
    )
    rows_E = counts.sum(0).tolist()
    found = copy_experts(rows_E, ranks, most)
    assert sum(found.loads) == sum(rows_E)
    assert max(found.loads) <= max(sum(rows_E[rank * each : (rank + 1) * each]) for rank in range(ranks))
    for rank, own in enumerate(found.copies):
        assert len(set(own)) == len(own) <= most
        assert all(expert // each != rank for expert in own)
    for expert, computed in found.rows.items():
        assert sum(computed.values()) == rows_E[expert]
        wanted = counts[:, expert].tolist()
        sent = [rows_from(source, wanted, computed) for source in range(ranks)]
        assert [sum(one.values()) for one in sent] == wanted
        for rank, count in computed.items():
            assert sum(one.get(rank, 0) for one in sent) == count
            assert sent[rank].get(rank, 0) == min(count, wanted[rank]), "a rank's own tokens stay"


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_copies_make_a_step_faster_by_half_under_zipf_s_law(exponent: float) -> None:
    """Mixtral on 32 H100, 8 ranks with an expert each."""
    load = f"zipf:{exponent}"
    plain, copied = (
        predict("mixtral-8x7b", "32xh100", f"dp32-{word}-mb1-rfull", global_batch=64, expert_load=load).step_time_s
        for word in ("ep8", "ep8x1")
    )
    print(f"Zipf {exponent}: {plain:.2f} s, with copies {copied:.2f} s: {plain / copied:.2f} times as fast")
    assert plain / copied >= 1.5


def test_an_even_load_copies_nothing() -> None:
    even = [predict("mixtral-8x7b", "32xh100", f"dp32-{word}-rfull").step_time_s for word in ("ep8", "ep8x2")]
    assert even[1] == pytest.approx(even[0], rel=5e-3), "numbers of rows are gathered"
    load = zipf_load(1.0, 4, 128, 8)
    assert load.imbalance(8, (), 2) < 1.15 < load.imbalance(8)


def test_sparse_gather_and_reduce_are_adjoint_and_send_what_is_predicted() -> None:
    found = run_ranks(RANKS, "tests.test_redundant_experts:exchange_copies")
    gathered, reduced = (sum(one[key] for one in found) for key in ("gathered", "reduced"))
    assert gathered == pytest.approx(reduced, rel=1e-12)
    assert abs(gathered) > 1
    for kind in ("all_gather", "all_to_all"):
        for key in ("forward", "backward"):
            counted, predicted = (sum(one[f"{what} {key}"].get(kind, 0) for one in found) for what in ("sent", "made"))
            assert counted == predicted, (kind, key)
    assert sum(one["sent backward"]["all_to_all"] for one in found) > 0


class CountingAxis(ExpertAxis):
    """Expert-parallel ranks whose collectives count the bytes that they are given."""

    given: ClassVar[Counter[str]] = Counter()

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        self.given["all_to_all"] += x.nbytes
        return super().start_all_to_all(x, sent, received)

    def all_gather(self, x: Tensor) -> Tensor:
        self.given["all_gather"] += x.nbytes
        return super().all_gather(x)


def exchange_copies(rank: int, world_size: int, store: dist.Store, payload: Any) -> dict[str, Any]:
    """Inner products over this rank's part of ⟨gather(w), c⟩ and ⟨w, reduce(c)⟩, and bytes, counted and predicted."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert SPEC.moe is not None
    assert dist.group.WORLD is not None
    axis, num_experts = CountingAxis(dist.group.WORLD, world_size, rank), SPEC.moe.num_experts
    each = num_experts // world_size
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)
    local = SPEC.model_copy(update={"moe": SPEC.moe.model_copy(update={"num_experts": each})})
    experts = Experts(local, recomputable)
    rows_E = [70, 20, 5, 5, 30, 0, 0, 10]
    copies = copy_experts(rows_E, world_size, MOST)
    copied = CopiedExperts(experts, axis, copies)
    weight = experts.up.weight
    arrived = copied._arrive(*copied._depart(weight))
    cotangent = torch.randn_like(arrived)
    (home,) = torch.autograd.grad(arrived, weight, cotangent)
    products: dict[str, Any] = {"gathered": float((arrived * cotangent).sum()), "reduced": float((weight * home).sum())}

    expert = torch.arange(num_experts).repeat_interleave(torch.tensor(rows_E)).view(-1, 1)
    x = torch.randn(1, len(expert), SPEC.hidden_size, requires_grad=True)
    row_bytes, places = x.shape[-1] * x.element_size(), world_size * (each + copies.width)
    shape = RoutedShape(len(expert), len(expert), row_bytes, x.element_size(), places)
    given_away = sum(map(len, copies.sent_by(rank, each)))
    matrices = expert_parameter_bytes(SPEC, 1, x.element_size())
    made = (
        dispatch_calls(ExpertDispatch(size=world_size), shape),
        copy_calls(ExpertDispatch(size=world_size, redundant=MOST), num_experts, matrices, given_away),
    )
    dispatch = with_copies(AllToAll(axis, ExpertDispatch()), axis, MOST)
    axis.given.clear()
    y = dispatch(experts, x, Routing(torch.ones(len(expert), 1), expert, num_experts))
    products["sent forward"] = dict(axis.given)
    axis.given.clear()
    y.sum().backward()
    products["sent backward"] = dict(axis.given)
    for key, calls in (("forward", [one.forward for one in made]), ("backward", [one.backward for one in made])):
        products[f"made {key}"] = {
            kind: sum(call.nbytes for some in calls for call in some if call.kind == kind)
            for kind in ("all_gather", "all_to_all")
        }
    dist.destroy_process_group()
    return products


def test_more_copies_than_other_ranks_have_experts_are_refused() -> None:
    model, workload = load_model("mixtral-8x7b"), Workload(seq_len=64, global_batch_size=8)
    assert not plan_violations(parse_plan_name("dp2-ep2x4"), model, workload, 2)
    (found,) = plan_violations(parse_plan_name("dp2-ep2x5"), model, workload, 2)
    assert found == "ep_redundant_experts 5 are more than the 4 experts of other ranks: legal are 0 to 4"
    assert nearest_plans(parse_plan_name("dp2-ep2x5"), model, workload, 2)[0] == parse_plan_name("dp2-ep2x4")
