"""Times of a plan: what a Program has is timed, and the formulas go the way physics goes."""

import pytest

from muster.config.cluster_files import load_cluster, load_device, load_link
from muster.config.named_model import load_model
from muster.cost.comm_volume import tensor_axis_bytes
from muster.cost.time.collectives import all_gather_s, all_reduce_s, all_to_all_s, make_comm_group, reduce_scatter_s
from muster.cost.time.kernels import flash_attention_s, matmul_s
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN, PassCost
from muster.cost.time.plan_times import place_plan, plan_times
from muster.cost.time.rank_placement import PlacedPlan
from muster.cost.time.sublayer import add_in_chunks
from muster.layout.mesh import coordinates_of
from muster.planner.space import PIPELINE_INNER_AXES
from muster.schedule.action import KINDS
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec, NetworkTier, NodeGroup
from muster.spec.device import Nics
from muster.spec.errors import InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MEGATRON, MUSTER
from muster.spec.layer_strategy import LayerStrategy, Recompute
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.model import ModelSpec
from muster.spec.model_components import LinearAttentionSpec, MlaSpec, MoeSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.plans import unequal

LLAMA = ModelSpec(
    vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336
)
WORKLOAD = Workload(seq_len=4096, global_batch_size=128)


@pytest.mark.parametrize(
    "name",
    ["dp8", "dp4-tp2-pp2-z1", "pp8-szbh1-vocab", "pp8v2-sdualpipe", "pp8-oact", "dp2-tp2-cp2-pp2v2-sinterleaved"],
)
def test_every_instruction_of_a_program_is_timed(name):
    plan = parse_plan_name(name)
    model = LLAMA.model_copy(update={"tied_embeddings": True})
    times = plan_times(model, plan, WORKLOAD, load_cluster("16xh100"))
    actions = {
        item.action for lanes in build_program(plan, model, WORKLOAD).ranks for lane in lanes.values() for item in lane
    }
    for action in actions:
        if KINDS[action.kind].lane != "p2p":
            assert (action.kind, action.stage) in times.seconds or (action.kind, -1) in times.seconds, action


def test_a_pass_takes_what_its_products_take_and_more():
    times = plan_times(LLAMA, Plan(), WORKLOAD, load_cluster("1xh100"), MEGATRON)
    numbers = LLAMA.num_parameters - LLAMA.vocab_size * LLAMA.hidden_size
    ideal_s = 2 * numbers * 4096 / 989.4e12
    assert 1.2 < times.seconds["F", 0] / ideal_s < 2.0
    assert 1.8 < times.seconds["B", 0] / times.seconds["F", 0] < 2.4


def test_without_tensor_parallelism_its_overlap_changes_no_recompute() -> None:
    """Frameworks that chunk collectives have none on one tp rank: the last matmul isn't repeated there, either."""
    plan, cluster = parse_plan_name("dp8-rfull-bf16"), load_cluster("8xh100")
    chunked = MEGATRON.model_copy(update={"async_tp": True})
    found = [plan_times(LLAMA, plan, WORKLOAD, cluster, own).seconds for own in (MEGATRON, chunked)]
    assert found[0] == found[1]


@pytest.mark.parametrize("words", ["", "-sp", "-sp-asynctp"])
def test_full_recompute_takes_the_time_of_the_collectives_that_it_repeats(words):
    """Those that a test counts in a run (test_comm_volume.py): all but the one at a layer's end."""
    work, cluster, size = Workload(seq_len=2048, global_batch_size=8), load_cluster("8xh100"), 2048 * 4096 * 2
    group, plain = make_comm_group(cluster, range(8)), parse_plan_name(f"tp8{words}-bf16")
    plans = plain, parse_plan_name(f"tp8{words}-rfull-bf16")
    sent = [tensor_axis_bytes(LLAMA, plan, work, 0, coordinates_of(plan, 0)) for plan in plans]
    exposed = [plan_times(LLAMA, plan, work, cluster).exposed_s["B", 0]["tp"] for plan in plans]
    if words == "-sp-asynctp":  # a ring of chunks repeats as many as the forward has
        forward_s = plan_times(LLAMA, plain, work, cluster).exposed_s["F", 0]["tp"]
        assert 0.9 * forward_s < exposed[1] - exposed[0] < forward_s
        return
    calls = {
        kind: (sent[1][kind] - sent[0][kind]) / (8 * size / (8 if kind == "all_gather" else 1))
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert calls == {"all_gather": 64 * bool(words), "reduce_scatter": 32 * bool(words), "all_reduce": 32 * (not words)}
    seconds = {"all_gather": all_gather_s, "reduce_scatter": reduce_scatter_s, "all_reduce": all_reduce_s}
    expected_s = sum(count * seconds[kind](group, size) for kind, count in calls.items())
    assert exposed[1] - exposed[0] == pytest.approx(expected_s)


@pytest.mark.parametrize(("recompute", "share"), [("full", 1.0), ("elementwise", 0.15), ("every_second_matmul", 0.5)])
def test_recompute_adds_its_share_of_a_forward(recompute, share):
    def backward_s(kind):
        plan = Plan(default_strategy=LayerStrategy(recompute=kind))
        return plan_times(LLAMA, plan, WORKLOAD, load_cluster("1xh100")).seconds

    plain, again = backward_s("none"), backward_s(recompute)
    added = (again["B", 0] - plain["B", 0]) / plain["F", 0]
    assert 0.4 * share < added < 1.1 * share + 0.1


def test_latent_linear_and_expert_layers_are_costed():
    moe = MoeSpec(num_experts=64, top_k=4, expert_size=1024, shared_size=1024, dense_layers=1)
    mla = MlaSpec(q_lora_rank=1024, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    linear = LinearAttentionSpec(
        layers=(0, 2), num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128
    )
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


def test_soft_caps_outside_of_the_kernels_cost_time():
    cluster = load_cluster("1xh100")
    capped = LLAMA.model_copy(update={"attention_softcap": 50.0, "logit_softcap": 30.0})
    plain, muster, fused = (
        plan_times(model, Plan(), WORKLOAD, cluster, framework).seconds
        for model, framework in ((LLAMA, MUSTER), (capped, MUSTER), (capped, FrameworkTraits()))
    )
    assert plain["F", 0] < muster["F", 0] > fused["F", 0]
    assert plain["B", 0] < muster["B", 0]


def test_scores_in_memory_cost_more_than_flash_attention():
    kept = Plan(default_strategy=LayerStrategy(attention="unfused"))
    cluster = load_cluster("1xa100")
    flash, fused = (plan_times(LLAMA, plan, WORKLOAD, cluster).seconds["F", 0] for plan in (Plan(), kept))
    unfused = plan_times(LLAMA, kept, WORKLOAD, cluster, FrameworkTraits(attention="unfused")).seconds["F", 0]
    assert flash < fused < unfused


def test_tokens_that_travel_beside_other_passes_or_once_for_each_node_wait_less():
    spec = LLAMA.model_copy(
        update={"moe": MoeSpec(num_experts=64, top_k=8, expert_size=1024, num_groups=8, top_groups=2)}
    )
    plan, cluster = Plan(dp_shard=64, ep=64), load_cluster("64xh100")

    def waits(**software: bool) -> float:
        times = plan_times(spec, plan, WORKLOAD, cluster, FrameworkTraits.model_validate(software))
        return times.exposed_s["F", 0]["ep"]

    assert waits(dispatch_once_per_node=True) < 0.5 * waits()  # to two nodes, not to eight experts
    assert waits(overlap_expert_comm=True) < waits()
    assert waits(overlap_expert_comm=True, dispatch_once_per_node=True) < 0.3 * waits()


def test_a_row_for_each_rank_is_sent_fewer_times_than_one_for_each_expert():
    """8 of 64 experts on 64 ranks are 8 rows either way; 2 of 4 on 2 ranks are on both in 4 of 6 cases: 5 / 3 rows."""

    def waits(moe: MoeSpec, ep: int, **software: object) -> float:
        spec, plan = LLAMA.model_copy(update={"moe": moe}), Plan(dp_shard=64, ep=ep)
        times = plan_times(spec, plan, WORKLOAD, load_cluster("64xh100"), FrameworkTraits.model_validate(software))
        return times.exposed_s["F", 0]["ep"]

    each = MoeSpec(num_experts=64, top_k=8, expert_size=1024)
    assert waits(each, 64, dispatch_once_per_rank=True) == pytest.approx(waits(each, 64))
    few = MoeSpec(num_experts=4, top_k=2, expert_size=1024)
    once, rows = waits(few, 2, dispatch_once_per_rank=True), waits(few, 2)
    assert once / rows == pytest.approx(5 / 6, rel=0.05)


QWEN = load_model("qwen3-30b-a3b")


def passes_of_experts(sequences: int = 1, recompute: Recompute = "none", **software: object) -> tuple[float, float]:
    """Return forward and backward of a layer of Qwen3 on a B200, without embedding and head, whose device is alone."""
    found = []
    for layers in (16, 17):
        spec = QWEN.model_copy(update={"num_layers": layers})
        workload = Workload(seq_len=4096, global_batch_size=8 * sequences)
        strategy = LayerStrategy(recompute=recompute)
        plan = Plan(dp_shard=8, ep=8, micro_batch_size=sequences, default_strategy=strategy)
        times = plan_times(spec, plan, workload, load_cluster("8xb200"), FrameworkTraits.model_validate(software))
        found.append((times.seconds["F", 0], times.seconds["B", 0]))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def test_the_host_limits_short_micro_batches_of_experts_unless_graphs_replay_them():
    """24 operators of 115 µs and 3 exchanges, 16 experts of 52 µs, and a backward of 1.75 times the forward."""
    alone, host = passes_of_experts(), {"operator_host_s": 115e-6}
    forward, backward = passes_of_experts(**host)
    assert forward == pytest.approx(27 * 115e-6 + 16 * 1.2e-3 / 64, rel=0.02)
    assert backward == pytest.approx(27 * 1.75 * 115e-6 + 16 * 2.1e-3 / 64, rel=0.02)
    assert sum(alone) < 0.5 * (forward + backward)
    assert passes_of_experts(**host, cuda_graphs=True) == pytest.approx(alone)
    assert sum(passes_of_experts(**host, graphed=["attention", "router"])) < 0.7 * (forward + backward)
    repeated = passes_of_experts(recompute="elementwise", **host)
    assert repeated[0] == forward
    assert (repeated[1] - backward) / 115e-6 == pytest.approx(round((repeated[1] - backward) / 115e-6), abs=0.1)
    assert 5 <= (repeated[1] - backward) / 115e-6 <= 20, "norms, rotary positions, activations: an operator each"
    graphed = passes_of_experts(recompute="elementwise", graphed=["attention"], **host)[1]
    assert graphed - passes_of_experts(graphed=["attention"], **host)[1] < repeated[1] - backward
    long = sum(passes_of_experts(16, **host)), sum(passes_of_experts(16))
    assert long[0] == pytest.approx(long[1], rel=0.02)  # the device is the slower one


def test_what_experts_of_other_programs_do_in_passes_of_their_own_takes_time():
    plain = sum(passes_of_experts(8))
    for trait in ({"sorts_received_rows": True}, {"grouped_streams": 1}):
        assert sum(passes_of_experts(8, **trait)) > 1.01 * plain, trait
    assert sum(passes_of_experts(8, fused_expert_epilogues=True)) < plain

    def biased(**software: object) -> float:
        spec = load_model("gpt-oss-20b").model_copy(update={"num_layers": 2})
        workload, plan = Workload(seq_len=4096, global_batch_size=8), Plan(dp_shard=8, ep=8)
        times = plan_times(spec, plan, workload, load_cluster("8xb200"), FrameworkTraits.model_validate(software))
        return times.seconds["F", 0] + times.seconds["B", 0]

    assert biased(expert_bias_apart=True) > 1.02 * biased()
    once = biased(expert_bias_apart=True, dispatch_once_per_rank=True)  # weights in float32
    assert once > biased(expert_bias_apart=True)


def test_attention_is_slower_with_narrow_heads_and_in_windows_and_faster_in_fp8():
    device = load_cluster("8xb200").device
    own = device, "flash3", 8192.0, 2048.0, 32.0
    plain = flash_attention_s(*own, 128, "bf16")
    assert flash_attention_s(*own, 128, "bf16", in_fp8=True) == pytest.approx(plain / 1.2, rel=0.01)
    assert flash_attention_s(*own, 64, "bf16") == pytest.approx(plain / 2 / 0.65, rel=0.01)
    narrow = flash_attention_s(*own, 64, "bf16")
    assert flash_attention_s(*own, 64, "bf16", in_fp8=True) == narrow
    assert flash_attention_s(*own, 64, "bf16", windowed=True) == pytest.approx(narrow / 0.7, rel=0.01)


@pytest.mark.parametrize(
    ("order", "name", "ranks"),
    [
        (MESH_AXES, "dp4-tp2-pp2-ep4", [0, 1, 2, 3]),
        (MESH_AXES, "dp4-tp2-pp2-ep2-etp2", [0, 2]),
        (PIPELINE_INNER_AXES, "dp4-tp2-pp2-ep4", [0, 1, 4, 5]),
        (PIPELINE_INNER_AXES, "dp4-tp2-pp2-ep2-etp2", [0, 4]),
        (MESH_AXES, "dp2-cp2-tp2-pp2-ep8", list(range(8))),
    ],
)
def test_experts_are_exchanged_among_ranks_of_one_stage(order, name, ranks, monkeypatch):
    def spanned(_, first: int, steps: tuple[tuple[int, int], ...]) -> list[int]:
        found = [first]
        for stride, size in steps:
            found = [rank + stride * index for index in range(size) for rank in found]
        return found

    monkeypatch.setattr(PlacedPlan, "group", spanned)
    plan = parse_plan_name(name).model_copy(update={"axis_order": order})
    placed = place_plan(LLAMA, plan, WORKLOAD, load_cluster("16xh100"))
    for stage in range(plan.pp):
        group = placed.expert_group(stage)
        assert group == [placed.first_rank(stage) + rank for rank in ranks]
        assert {coordinates_of(plan, rank).pp for rank in group} == {stage}


def test_a_plan_larger_than_the_cluster_is_refused():
    with pytest.raises(InfeasibleError, match="the plan needs 16 devices, but 8xh100 has 8"):
        plan_times(LLAMA, Plan(dp_shard=16), WORKLOAD, load_cluster("8xh100"))


# --- what a program is made of


def step_parts(software, plan, cluster, model=LLAMA):
    times = plan_times(model, plan, WORKLOAD, load_cluster(cluster), software)
    return times.seconds, times.exposed_s


def test_a_program_that_runs_operation_by_operation_is_slower():
    plan = Plan()
    fused = step_parts(FrameworkTraits(), plan, "1xa100")[0]["B", 0]
    norms = step_parts(FrameworkTraits(fused_elementwise=False, fused_norms=True), plan, "1xa100")[0]["B", 0]
    eager = step_parts(FrameworkTraits(fused_elementwise=False), plan, "1xa100")[0]["B", 0]
    assert fused < norms < eager < 1.5 * fused


def test_gradients_that_are_summed_by_passes_of_their_own_take_longer():
    plan = Plan()
    fused = step_parts(FrameworkTraits(), plan, "1xa100")[0]["W", 0]
    apart = step_parts(FrameworkTraits(fused_grad_accumulation=False), plan, "1xa100")[0]["W", 0]
    moved = 10 * (LLAMA.num_parameters - 2 * LLAMA.vocab_size * LLAMA.hidden_size)
    assert 0.5 < (apart - fused) / (moved / (2039e9 * 0.85)) < 1.0


def test_tensor_parallel_gradients_hide_beside_weights_only_where_the_program_does_so():
    plan = Plan(tp=8)
    hidden = step_parts(FrameworkTraits(), plan, "8xa100")[1]["B", 0]["tp"]
    waited = step_parts(FrameworkTraits(overlap_tp_grad_reduce=False), plan, "8xa100")[1]["B", 0]["tp"]
    assert waited > 2 * hidden


def test_products_apart_add_up_their_input_s_gradient_each():
    plan, apart = Plan(tp=8), FrameworkTraits(overlap_tp_grad_reduce=False, joint_input_grad_reduce=False)
    once = step_parts(FrameworkTraits(overlap_tp_grad_reduce=False), plan, "8xa100")[1]["I", 0]["tp"]
    assert step_parts(apart, plan, "8xa100")[1]["I", 0]["tp"] == pytest.approx(1.5 * once, rel=0.02)


def test_logits_of_all_words_on_every_rank_cost_a_gather_and_a_whole_loss():
    plan = Plan(tp=8)
    own, whole = (
        step_parts(FrameworkTraits(fused_loss=False, gathered_logits=all_), plan, "8xa100") for all_ in (False, True)
    )
    tokens = 4096 * LLAMA.vocab_size
    assert whole[0]["F", 0] - own[0]["F", 0] > 30 * 7 / 8 * tokens / 2039e9
    assert whole[1]["F", 0]["tp"] - own[1]["F", 0]["tp"] > 2 * 7 / 8 * tokens / 300e9


def test_stages_that_cut_a_micro_batch_differently_send_as_much_there_as_back():
    """Halves of sequences and halves of positions: each rank sends a quarter to each of two ranks, in either
    direction."""
    stages = unequal((16, {"dp_shard": 2}), (16, {"cp": 2}))
    plan = Plan.model_validate(parse_plan_name("pp2-mb1-bf16").model_dump() | stages)
    times = plan_times(LLAMA, plan, WORKLOAD, load_cluster("4xh100")).p2p_times
    assert times[0, 1] == times[1, 0]


def test_sends_that_block_hold_up_the_passes_before_them():
    plan = Plan(tp=8, pp=2)
    whole, split = (
        step_parts(FrameworkTraits(overlap_p2p=False, scatter_gather_p2p=cut), plan, "16xa100")[1]
        for cut in (False, True)
    )
    free = step_parts(FrameworkTraits(), plan, "16xa100")[1]
    assert not any("pp" in waits for waits in free.values())
    assert set(whole["F", 0]) - set(whole["F", 1]) == set(whole["B", 1]) - set(whole["B", 0]) == {"pp"}
    assert whole["F", 0]["pp"] > 5 * split["F", 0]["pp"]


def test_collectives_in_parts_wait_less():
    plan = Plan(tp=8, default_strategy=LayerStrategy(sp=True))
    whole = step_parts(FrameworkTraits(), plan, "8xh100")[1]["F", 0]["tp"]
    parts = step_parts(FrameworkTraits(async_tp=True), plan, "8xh100")[1]["F", 0]["tp"]
    assert 0.1 * whole < parts < 0.6 * whole


def test_a_ranks_own_chunk_does_not_travel():
    """Seven of eight parts of a matmul of 8 s have a transfer beside them: of 4 s all are hidden, of 16 s seven."""
    for seconds, hidden_s in ((4.0, 4.0), (7.0, 7.0), (16.0, 7.0)):
        cost = PassCost(8.0)
        add_in_chunks(cost, seconds, 8.0, 8)
        assert cost.exposed_s["tp"] == pytest.approx(seconds - (1 - OVERLAP_SLOWDOWN) * hidden_s)


@pytest.mark.parametrize("buckets", [[1], [1, 1], [1] * 5, [2, 2, 1], [1, 2, 2], [3], [4, 1]])
@pytest.mark.parametrize(
    ("gather_s", "reduce_s"), [(0.3, 0.0), (0.0, 0.4), (3.0, 0.0), (0.2, 0.3), (0.7, 0.8), (3.0, 4.0)]
)
def test_gathers_and_reductions_of_buckets_take_turns_on_a_link(buckets, gather_s, reduce_s):
    """As buckets of layers that each take a second, whose own transfers are followed one by one."""
    time_s = gather_s * buckets[0]
    for before, own, behind in zip([0, *buckets], buckets, [*buckets[1:], 0], strict=False):
        time_s += max(float(own), gather_s * behind + reduce_s * before)
    time_s += reduce_s * buckets[-1]
    layers = sum(buckets)
    cost = PassCost(float(layers))
    cost.add_by_buckets("dp", layers * gather_s, layers * reduce_s, buckets, layers)
    alone_s = layers * (1 + gather_s + reduce_s)
    total_s = layers + cost.exposed_s["dp"]
    assert total_s == pytest.approx((1 - OVERLAP_SLOWDOWN) * time_s + OVERLAP_SLOWDOWN * alone_s)


def test_chunks_out_of_symmetric_memory_are_copied_and_added_on_the_device():
    plan = Plan(tp=8, default_strategy=LayerStrategy(sp=True, tp_overlap="async_tp"))
    (ring, _), (copied, _), (far, _) = (
        step_parts(FrameworkTraits(symmetric_memory=copies), plan, cluster)
        for copies, cluster in ((False, "8xh100"), (True, "8xh100"), (True, "8xa100-80-pcie"))
    )
    assert ring["F", 0] < copied["F", 0] < 1.2 * ring["F", 0]
    assert far == step_parts(FrameworkTraits(), plan, "8xa100-80-pcie")[0]


def test_gathering_rank_by_rank_grows_with_the_ranks():
    plan = Plan(dp_shard=64)
    whole = step_parts(FrameworkTraits(), plan, "64xa100")[1]["F", 0]["dp"]
    parts = step_parts(FrameworkTraits(per_parameter_collectives=True), plan, "64xa100")[1]["F", 0]["dp"]
    copies = 64 * 6e-6 * 9 * LLAMA.num_layers
    assert parts > whole + copies


def test_gradients_that_are_reduced_whole_go_round_the_ring_twice_in_float32():
    plan = Plan(dp_shard=64, default_strategy=LayerStrategy(zero="z1"))
    usual = FrameworkTraits(overlap_grad_reduce=False, grad_bytes=2)
    parts, whole = (
        step_parts(usual.model_copy(update=how), plan, "64xa100")[0]["REDUCE_GRAD", 0]
        for how in ({}, {"all_reduce_grads": True})
    )
    assert 4 * parts < whole < 6 * parts


def test_a_ring_without_balance_waits_for_its_last_rank():
    plan = Plan(cp=4)
    even = step_parts(FrameworkTraits(), plan, "4xh100")[0]["F", 0]
    uneven = step_parts(FrameworkTraits(balanced_cp=False), plan, "4xh100")[0]["F", 0]
    assert even < uneven < 1.75 * even


def test_every_doubling_of_nodes_costs_a_little():
    times = [step_parts(None, Plan(dp_replicate=n), f"{n}xh100")[0]["F", 0] for n in (8, 16, 32)]
    assert times[1] / times[0] == pytest.approx(1.01)
    assert times[2] / times[0] == pytest.approx(1.02)


# --- kernels and collectives


def test_rings_across_host_bridges_share_the_line_between_them():
    cluster = load_cluster("8xa100-80-pcie")
    one_socket, both, two_rings = (make_comm_group(cluster, ranks) for ranks in (range(4), range(8), range(0, 8, 2)))
    rates = [group.ring_bytes_per_s / 1e9 for group in (one_socket, both, two_rings)]
    assert rates == pytest.approx([20.7, 13.2, 7.3], rel=0.12)  # as measured, see the catalogue's links


def test_a_tier_and_a_measured_matrix_limit_a_group():
    cluster = load_cluster("32xh100")
    group = make_comm_group(cluster, range(32))
    half = cluster.model_copy(update={"tiers": (NetworkTier(name="spine", nodes=2, bandwidth_share=0.5),)})
    assert make_comm_group(half, range(32)).network_bytes_per_s == 0.5 * group.network_bytes_per_s
    assert make_comm_group(half, range(16)).network_bytes_per_s == group.network_bytes_per_s
    matrix = cluster.model_copy(update={"node_bandwidth_bytes_per_s": ((4e11,) * 4,) * 4})
    assert make_comm_group(matrix, range(32)).network_bytes_per_s == 4e11 / 8


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
        ("64xh800", 64, all_to_all_s, 2**23, 337.8e-6),
    ],
)
def test_collectives_take_what_was_measured(cluster, ranks, collective, size, measured_s):
    group = make_comm_group(load_cluster(cluster), range(ranks))
    assert collective(group, size) == pytest.approx(measured_s, rel=0.15)


def test_a_group_with_one_rank_per_node_has_one_card():
    cluster = load_cluster("64xh100")
    spread = make_comm_group(cluster, range(0, 64, 8))
    dense = make_comm_group(cluster, range(64))
    assert spread.num_domains == dense.num_domains == 8
    assert all_gather_s(spread, 2**30) > 4 * all_gather_s(dense, 2**30)
    assert all_to_all_s(dense, 2**27) > all_to_all_s(make_comm_group(cluster, range(8)), 2**27)


def test_ranks_that_meet_at_every_layer_wait_more_for_the_slowest():
    """On twice the nodes the passes take longer by half a percent, by one where every layer gathers and reduces."""
    for zero, share in (("z1", 0.005), ("z3", 0.01)):
        plan = Plan(dp_shard=8, default_strategy=LayerStrategy(zero=zero))
        one, four = (
            plan_times(
                LLAMA, plan.model_copy(update={"dp_replicate": nodes}), WORKLOAD, load_cluster(f"{8 * nodes}xh100")
            )
            for nodes in (1, 4)
        )
        assert four.seconds["F", 0] / one.seconds["F", 0] == pytest.approx(1 + 2 * share, rel=1e-6)


def test_what_is_kept_in_fp8_is_widened_again():
    """Up-projections of latent attention are part of the backward then, and of nothing else."""
    mla = MlaSpec(q_lora_rank=1024, kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    spec, plan = LLAMA.model_copy(update={"mla": mla}), Plan(default_strategy=LayerStrategy(recompute="elementwise"))
    usual, compact = (
        plan_times(spec, plan, WORKLOAD, load_cluster("1xh100"), FrameworkTraits(fp8_activations=compact)).seconds
        for compact in (False, True)
    )
    device, heads = load_device("h100-sxm"), spec.num_heads
    wide = sum(matmul_s(device, 4096, heads * n, k, "bf16") for n, k in ((192, 1024), (256, 512)))
    assert compact["B", 0] - usual["B", 0] == pytest.approx(spec.num_layers * wide, rel=0.05)
    assert compact["F", 0] == usual["F", 0]


@pytest.mark.parametrize(("size", "measured_s"), [(2**25, 457.4e-6), (2**27, 1061.1e-6), (2**30, 5516.7e-6)])
def test_all_gathers_across_nodes_take_what_was_measured(size, measured_s):
    """Tensor-parallel ranks on two nodes over GCP's network (nccl-tests of A3 Mega)."""
    cluster = load_cluster("16xh100")
    nics = Nics(link=load_link("tcpxo"), count=8)
    cluster = cluster.model_copy(update={"groups": (cluster.groups[0].model_copy(update={"nics": nics}),)})
    assert all_gather_s(make_comm_group(cluster, range(16)), size) == pytest.approx(measured_s, rel=0.1)


def test_recipes_of_fp8_take_their_casts_and_the_devices_that_have_them():
    def step(device: str, **fields: str) -> float:
        plan = Plan(compile=True, **fields)
        return sum(plan_times(LLAMA, plan, WORKLOAD, load_cluster(f"1x{device}")).seconds[kind, 0] for kind in "FB")

    recipes = ("tensorwise", "rowwise", "mxfp8")
    h100, b200 = (
        {recipe: step(device, precision="fp8", fp8_recipe=recipe) for recipe in recipes} for device in ("h100", "b200")
    )
    assert h100["mxfp8"] == step("h100", precision="bf16"), "which has no scales for blocks"
    assert h100["rowwise"] < h100["tensorwise"] < h100["mxfp8"]
    assert b200["mxfp8"] == b200["rowwise"] < b200["tensorwise"]


def test_a_reduce_scatter_over_gloo_takes_as_long_as_an_all_reduce() -> None:
    device, nics = load_device("cpu"), Nics(link=load_link("eth-25g"))
    memory = device.node.intra  # type: ignore[union-attr]
    nodes = NodeGroup(num_nodes=4, devices_per_node=1, device=device, intra=memory, nics=nics)
    gloo = make_comm_group(ClusterSpec(name="cores", groups=(nodes,)), range(4))
    size = 2.0**27
    assert reduce_scatter_s(gloo, size) == all_reduce_s(gloo, size) > 1.9 * all_gather_s(gloo, size)
    nccl = make_comm_group(load_cluster("32xh100"), range(0, 32, 8))
    assert reduce_scatter_s(nccl, size) == all_gather_s(nccl, size)
