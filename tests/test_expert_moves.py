"""Moves of experts between steps: what they change, what they cost, and when they pay."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.expert_moves import trial_placements
from muster.cost.time.collectives import COLLECTIVE_START_S, SIMPLE_PROTOCOL_LATENCY_FACTOR
from muster.cost.time.expert_moves import expert_moves_s
from muster.cost.time.kernels import memory_s
from muster.cost.time.plan_times import place_plan
from muster.layout.expert_moves import moved_tensors
from muster.layout.tensor_layout import state_shard_dim
from muster.report.expert_load import draw_expert_moves
from muster.simulate.expert_moves import PredictedMoves
from muster.simulate.predict import predict
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.routing_load import RoutingLoad, rank_shares, rebalanced_order, zipf_load
from muster.spec.workload import Workload
from muster.train.step_result import ExpertMoves
from tests.ranks import run_ranks
from tests.sampling import quick_sample

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "dp2-ep2-z1", "later": "dp2-z3", "ema": True},
        {"plan": "dp2-ep2", "fault": True},
    ],
    4: [
        {"plan": "dp2-pp2-ep2", "family": "deepseek mtp", "later": "dp2-tp2-ep4"},
    ],
}
SOAK: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "dp2-ep2", "is_free": False},
        {"plan": "dp2-ep2-z2-oopth", "family": "grouped"},
        {"plan": "tp2-ep2-sp", "family": "gpt_oss"},
        {"plan": "cp2-ep2"},
        {"plan": "tp2-ep2s", "family": "grouped"},
        {"plan": "dp2-ep2x1", "family": "grouped"},
        {"plan": "dp2-ep2", "family": "shortcut"},
        {"plan": "dp2-ep2-epover2", "family": "balanced"},
        {"plan": "dp2-ep2", "optim": "muon"},
        {"plan": "dp2-ep2-ooptd", "later": "tp2-etp2"},
    ],
    4: [
        {"plan": "dp2-tp2-ep2-etp2-z2", "family": "gpt_oss"},
        {"plan": "dp4-ep2-z3-rfull", "later": "dp4-ep4"},
        {"plan": "dp4-ep4h", "later": "dp2-pp2-ep2"},
        {"plan": "dp2x2-ep2-z2"},
        {"plan": "dp4-ep2g-z1", "family": "capacity"},
        {"plan": "dp2-pp2v2-ep2-sdualpipe", "family": "balanced"},
        {"plan": "dp4-ep2-z3", "family": "switch"},
    ],
}
LOAD = zipf_load(1.2, 7, 8, 2)
"""Load of tiny-moe."""


@pytest.mark.parametrize("ranks", quick_sample(list(CASES), 0))
def test_experts_that_move_train_as_those_that_stay(ranks: int, tmp_path: Path) -> None:
    check_moves(ranks, CASES[ranks], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", SOAK)
def test_experts_move_under_more_plans(ranks: int, tmp_path: Path) -> None:
    check_moves(ranks, SOAK[ranks], tmp_path)


def check_moves(ranks: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    """Losses to 1e-12 in float64, resumed ones to the bit; bytes as the formula has them."""
    results = run_ranks(ranks, "tests.expert_move_ranks:run_moves", {"cases": cases, "cache": str(tmp_path)})
    for case, found in zip(cases, zip(*results, strict=True), strict=True):
        one = found[0]
        assert all(other["moves"] == one["moves"] and other["placement"] == one["placement"] for other in found), case
        assert one["moves"][0][0] > 0, case
        assert all(after <= before for _, before, after in one["moves"]), case
        assert one["instructions"] == len(one["moves"]) == 3
        assert one["predicted"] == one["executed"], case
        assert one["programs"], case
        assert [time_s > 0 for time_s in one["predicted_s"]] == [moved > 0 for moved, *_ in one["moves"]], case
        error = max(abs(a - b) / b for a, b in zip(one["moved"], one["stayed"], strict=True))
        if "fault" in case:
            assert error > 1e-7, case
            continue
        assert sum(other["bytes"][0] for other in found) == one["bytes"][1] > 0, case
        assert error < 1e-12, (case, error)
        assert one["resumed"] == one["moved"][-len(one["resumed"]) :], case
        if "later" in case:
            assert one["later"] == pytest.approx(one["moved"][-len(one["later"]) :], rel=1e-11), case


@given(st.lists(st.integers(0, 1000), min_size=8, max_size=8), st.permutations(range(8)), st.integers(0, 400))
def test_moves_pay_and_leave_each_expert_once(counts: list[int], order: list[int], cost: int) -> None:
    """What the fullest rank saves is more than the exchanges cost."""
    found = rebalanced_order(counts, 4, order, cost)
    assert sorted(found) == list(range(8))
    moved = sum(a != b for a, b in zip(order, found, strict=True))
    saved = max(rank_shares(counts, 4, order)) - max(rank_shares(counts, 4, found))
    assert (found == tuple(order) and not moved) or saved > cost * moved / 2
    dearer = rebalanced_order(counts, 4, order, cost + 50)
    assert max(rank_shares(counts, 4, dearer)) >= max(rank_shares(counts, 4, found)), "dearer exchanges save no more"


def test_only_exchanges_that_pay_are_made() -> None:
    counts = [40, 30, 20, 10, 5, 5]
    assert rebalanced_order(counts, 2, range(6)) != tuple(range(6))
    assert max(rank_shares(counts, 2, rebalanced_order(counts, 2))) == 55
    assert rebalanced_order(counts, 2, range(6), 35) == tuple(range(6)), "the most that exchanges save is 35"
    assert rebalanced_order([9, 1, 9, 1], 2, (0, 2, 1, 3)) in ((0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 0, 3), (3, 2, 1, 0))


def test_a_prediction_adds_the_exchanges_to_the_step_before_them() -> None:
    """Of two ranks, each of which sends a tensor's parts and gets as much: for each tensor the start, the bytes over
    the link, and the copies of what is sent and received."""
    model, plan, cluster = load_model("tiny-moe"), parse_plan_name("dp2-ep2-mb1"), load_cluster("2xh100")
    moves = moves_of(model, plan, LOAD)
    tensors = list(moved_tensors(model, plan, moves.plan))
    device, link = cluster.device, cluster.groups[0].intra
    assert link.latency_s > 0
    expected = 0.0
    for tensor in tensors:
        sent = tensor.routes[(0, 0), (1, 0)] * 4
        assert sent == tensor.routes[(1, 0), (0, 0)] * 4 == tensor.numel * 2
        on_link = sent / (link.bandwidth_bytes_per_s * link.efficiency) + (link.message_s or link.latency_s)
        copies = 2 * device.kernel_s + memory_s(device, 2 * 2 * sent)
        expected += 3 * (COLLECTIVE_START_S + SIMPLE_PROTOCOL_LATENCY_FACTOR * link.latency_s + on_link + copies)
    assert moves.time_s == pytest.approx(expected)
    assert moves.num_bytes == sum(3 * 4 * one.numel for one in tensors)
    step_s = predict(model, plan, Workload(seq_len=64, global_batch_size=24, expert_load=LOAD), cluster).step_time_s
    assert moves.moving_step_s == pytest.approx(step_s + moves.time_s)
    assert moves.max_over_mean_after < moves.max_over_mean_before


def moves_of(model: ModelSpec, plan: Plan, load: RoutingLoad | None, every: int = 20) -> PredictedMoves:
    """The moves predicted on H100s after some steps."""
    workload, cluster = Workload(seq_len=64, global_batch_size=24, expert_load=load), load_cluster("2xh100")
    found = predict(model, plan, workload, cluster, rebalance_experts_every=every).moves
    assert found is not None
    return found


def test_nothing_moves_where_that_would_not_pay() -> None:
    model, plan = load_model("tiny-moe"), parse_plan_name("dp2-ep2-mb1")
    even, short, long = (moves_of(model, plan, load, every) for load, every in ((None, 20), (LOAD, 1), (LOAD, 20)))
    assert (even.num_experts, even.num_bytes, even.time_s, even.plan.expert_placement) == (0, 0, 0.0, ())
    assert 0 < short.num_experts < long.num_experts
    assert short.time_s < long.time_s


@pytest.mark.parametrize("name", ["dp4-ep2-z3", "dp4-ep4-z1", "dp2-tp2-ep2-etp2", "dp2x2-ep2", "dp2-pp2-ep2"])
def test_routes_are_what_all_ranks_send(name: str) -> None:
    model, plan = load_model("tiny-moe"), parse_plan_name(name)
    for placed in trial_placements(model, plan):
        after, mesh = plan.model_copy(update={"expert_placement": placed}), plan.mesh(0)
        for one in moved_tensors(model, plan, after):
            parts = mesh.expert_state_shards if state_shard_dim(one.name, one.shape, mesh.expert_state_shards) else 1
            assert sum(one.routes.values()) * parts * mesh.etp * mesh.dp_replicate == one.numel > 0


def test_moves_between_nodes_take_longer() -> None:
    model, plan = load_model("tiny-moe"), parse_plan_name("dp8-ep8-mb1")
    cluster = load_cluster("16xh100")
    apart = cluster.groups[0].model_copy(update={"devices_per_node": 1, "num_nodes": 16})
    near, far = (
        expert_moves_s(place_plan(model, plan, Workload(seq_len=64, global_batch_size=24), where), after)
        for where in (cluster, cluster.model_copy(update={"groups": (apart,)}))
        for after in [plan.model_copy(update={"expert_placement": trial_placements(model, plan)[1]})]
    )
    assert far > near > 0


def test_the_page_shows_the_predicted_time_beside_the_measured_one() -> None:
    row = {"step": 20, "experts/moved": 18, "experts/moved_bytes": 4 << 20, "experts/moved_s": 0.14}
    row |= {"experts/ranks_max_over_mean": 1.2, "experts/ranks_max_over_mean_moved": 1.0}
    cells = str(draw_expert_moves([row | {"experts/moved_predicted_s": 0.05}, row, {"step": 21}]))
    assert re.findall(r"<td>(0\.\d\d s|–)</td>", cells) == ["0.14 s", "0.05 s", "0.14 s", "–"]
    moves = ExpertMoves(18, 4 << 20, 0.14, 1.2, 1.0, 0.05)
    assert str(moves).startswith("18 experts moved (4.00 MiB in 0.14 s, predicted 0.05 s): the fullest rank had 1.20")
    assert "predicted" not in str(replace(moves, predicted_s=None))


def test_a_prediction_says_what_moves(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    run = tmp_path / "moving.yaml"
    run.write_text("extends: tiny-moe\nparallel: dp2-ep2-mb1\ntrain: {rebalance_experts_every: 20}\n")
    command = ["predict", "--cluster", "2xh100", "--plan", str(run)]
    assert main(command) == 0
    assert "moves     none after 20 steps, as none pays: the fullest rank has 1.00" in capsys.readouterr().out
    assert main([*command, "--expert-load", "zipf:1.2", "--json"]) == 0
    said, moves = (
        json.loads(capsys.readouterr().out)["moves"],
        moves_of(load_model("tiny-moe"), parse_plan_name("dp2-ep2-mb1-fp32"), LOAD),
    )
    assert said == moves.to_json()
    assert said["time_s"] > 0
