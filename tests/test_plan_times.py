"""Times of a plan: what a Program has is timed, and the formulas go the way physics goes."""

import pytest

from muster.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, make_group
from muster.cost.kernels import matmul_s
from muster.cost.plan_times import plan_times
from muster.schedule.action import KINDS
from muster.schedule.build import program_of
from muster.spec.errors import InfeasibleError
from muster.spec.load_cluster import load_cluster, load_device
from muster.spec.model import ModelSpec
from muster.spec.model_parts import LinearAttention, MlaSpec, MoeSpec
from muster.spec.plan import Plan, Strategy
from muster.spec.plan_name import parse_plan_name
from muster.spec.software import Software
from muster.spec.workload import Workload

LLAMA = ModelSpec(
    vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336
)
WORKLOAD = Workload(seq_len=4096, global_batch_size=128)


@pytest.mark.parametrize(
    "name", ["dp8", "dp4-tp2-pp2-z1", "pp8-szbh1-vocab", "pp8v2-sdualpipe", "dp2-tp2-cp2-pp2v2-sinterleaved"]
)
def test_every_instruction_of_a_program_is_timed(name):
    plan = parse_plan_name(name)
    model = LLAMA.model_copy(update={"tied_embeddings": True})
    times = plan_times(model, plan, WORKLOAD, load_cluster("16xh100"))
    actions = {
        item.action for lanes in program_of(plan, model, WORKLOAD).ranks for lane in lanes.values() for item in lane
    }
    for action in actions:
        if KINDS[action.kind].lane != "p2p" and action.kind != "RESHARD":
            assert (action.kind, action.stage) in times.seconds or (action.kind, -1) in times.seconds, action


def test_a_pass_takes_what_its_products_take_and_more():
    times = plan_times(LLAMA, Plan(), WORKLOAD, load_cluster("1xh100"))
    numbers = LLAMA.num_parameters - LLAMA.vocab_size * LLAMA.hidden_size
    ideal_s = 2 * numbers * 4096 / 989.4e12
    assert 1.2 < times.seconds["F", 0] / ideal_s < 2.0
    assert 1.8 < times.seconds["B", 0] / times.seconds["F", 0] < 2.4


@pytest.mark.parametrize(("recompute", "share"), [("full", 1.0), ("selective", 0.15), ("alternate", 0.5)])
def test_recompute_adds_its_share_of_a_forward(recompute, share):
    def backward_s(kind):
        plan = Plan(default_strategy=Strategy(recompute=kind))
        return plan_times(LLAMA, plan, WORKLOAD, load_cluster("1xh100")).seconds

    plain, again = backward_s("none"), backward_s(recompute)
    added = (again["B", 0] - plain["B", 0]) / plain["F", 0]
    assert 0.4 * share < added < 1.1 * share + 0.1


def test_latent_linear_and_expert_layers_are_costed():
    moe = MoeSpec(num_experts=64, top_k=4, expert_size=1024, shared_size=1024, dense_layers=1)
    mla = MlaSpec(q_lora_rank=1024, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    linear = LinearAttention(layers=(0, 2), num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
    dense = ModelSpec(vocab_size=32000, hidden_size=2048, num_layers=4, num_heads=16, intermediate_size=8192)
    cluster, plan = load_cluster("8xh100"), Plan(dp_shard=8, ep=8, precision="fp8")
    seconds = {}
    for part in ({}, {"moe": moe}, {"mla": mla}, {"linear_attention": linear}, {"sliding_window": 128}):
        model = dense.model_copy(update=part)
        times = plan_times(model, plan, WORKLOAD, cluster)
        seconds[next(iter(part), "")] = times.seconds["F", 0]
        assert ("ep" in times.exposed_s["F", 0]) == ("moe" in part)
    assert len(set(seconds.values())) == 5
    assert seconds["sliding_window"] < seconds[""]


def test_scores_in_memory_cost_more_than_flash_attention():
    kept = Plan(default_strategy=Strategy(attention="unfused"))
    cluster = load_cluster("1xa100")
    flash, fused = (plan_times(LLAMA, plan, WORKLOAD, cluster).seconds["F", 0] for plan in (Plan(), kept))
    unfused = plan_times(LLAMA, kept, WORKLOAD, cluster, Software(attention="unfused")).seconds["F", 0]
    assert flash < fused < unfused


def test_a_plan_larger_than_the_cluster_is_refused():
    with pytest.raises(InfeasibleError, match="the plan needs 16 devices, but 8xh100 has 8"):
        plan_times(LLAMA, Plan(dp_shard=16), WORKLOAD, load_cluster("8xh100"))


# --- kernels and collectives


def test_a_tile_more_costs_a_wave():
    device = load_device("a100")
    full = matmul_s(device, 128 * 12, 256 * 9, 8192, "bf16")
    one_more = matmul_s(device, 128 * 12 + 1, 256 * 9, 8192, "bf16")
    assert full < one_more


@pytest.mark.parametrize(
    ("cluster", "ranks", "collective", "size", "measured_s"),
    [
        # nccl-tests, as the catalogue's links cite them
        ("8xh100", 8, all_reduce_s, 2**20, 27.37e-6),
        ("8xh100", 8, all_reduce_s, 2**24, 123.8e-6),
        ("8xh100", 8, all_reduce_s, 2**33, 31307e-6),
        ("64xh100", 64, all_reduce_s, 2**29, 2984.6e-6),
        ("64xh100", 64, all_reduce_s, 2**33, 43980e-6),
        ("16xa100-40", 16, all_reduce_s, 2**30, 11774e-6),
        ("8xa100-40", 8, all_reduce_s, 10 * 2**30, 80978e-6),
        ("72xgb200", 72, all_reduce_s, 2**33, 20299e-6),
    ],
)
def test_collectives_take_what_was_measured(cluster, ranks, collective, size, measured_s):
    group = make_group(load_cluster(cluster), range(ranks))
    assert collective(group, size) == pytest.approx(measured_s, rel=0.15)


def test_a_group_with_one_rank_per_node_has_one_card():
    cluster = load_cluster("64xh100")
    spread = make_group(cluster, range(0, 64, 8))
    dense = make_group(cluster, range(64))
    assert spread.domains == dense.domains == 8
    assert all_gather_s(spread, 2**30) > 4 * all_gather_s(dense, 2**30)
    assert all_to_all_s(dense, 2**27) > all_to_all_s(make_group(cluster, range(8)), 2**27)
