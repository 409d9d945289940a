"""The memory forecast against PyTorch's own accounting of the trainer, on fake devices."""

import json
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.memory.device_overhead import device_overhead
from muster.cost.memory.forecast import forecast_memory
from muster.cost.memory.liveness import allocation_orders, peak_terms
from muster.cost.memory.megatron_memory import megatron_stage_memory
from muster.cost.memory.native_memory import native_stage_memory
from muster.cost.memory.param_shards import stage_param_shards
from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.layout.tensor_layout import stages_on
from muster.report.prediction import prediction_lines
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.simulate.predict import predict
from muster.spec.cluster import single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.errors import InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.layer_strategy import LayerStrategy, Recompute
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.schedules import SCHEDULES
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank, measure_real_ranks
from tests.random_plans import random_case
from tests.sampling import quick_sample

TOLERANCE = 0.03
SHORT_LLAMA = ModelSpec(
    vocab_size=128256, hidden_size=4096, num_layers=4, num_heads=32, num_kv_heads=8, intermediate_size=14336
)
FAKE_CPU = single_node_cluster(DeviceSpec(name="fake", kind="cpu"))


def assert_forecast_is_accounting(
    spec: ModelSpec, name: str, seq_len: int, micro_batches: int, only_ends: bool = False
) -> None:
    plan = parse_plan_name(name)
    batch = plan.mesh(0).dp_size * plan.micro_batch_size * micro_batches
    assert_ranks_are_forecast(spec, plan, Workload(seq_len=seq_len, global_batch_size=batch), only_ends)


def assert_ranks_are_forecast(spec: ModelSpec, plan: Plan, workload: Workload, only_ends: bool = False) -> None:
    found = forecast_memory(
        spec, plan, workload, FAKE_CPU, build_program(plan, spec, workload), kernel_workspace=FAKE_KERNELS
    )
    for rank in found.ranks if not only_ends else dict.fromkeys((found.ranks[0], found.ranks[-1])):
        real = measure_fake_rank(spec, plan, workload, rank.rank)
        assert rank.terms.total == pytest.approx(real.peak_bytes, rel=TOLERANCE), (
            f"{format_plan_name(plan)}, {rank.peak_instruction}"
        )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "seq_len", "micro_batches"),
    [
        ("tp8", 8192, 1),
        ("tp8-rfull", 8192, 2),
        ("tp8-relem", 8192, 2),
        ("tp4", 8192, 1),
        ("tp8-fp32", 4096, 1),
        ("dp2-tp4-z1-rfull", 8192, 2),
        ("dp2-tp8-z2", 8192, 1),
        ("tp8-pp2", 8192, 2),
        ("tp8", 4096, 1),
    ],
)
def test_norms_of_all_positions_are_forecast(name: str, seq_len: int, micro_batches: int) -> None:
    """Without sequence parallelism and with few words the norm before an MLP is the fullest moment."""
    spec = SHORT_LLAMA.model_copy(update={"vocab_size": 1024})
    assert_forecast_is_accounting(spec, name, seq_len, micro_batches, only_ends=True)


PLANS = [
    ("dp4-tp2-sp-pp2-relem", 2048, 3),
    ("dp2x4-rfull", 1024, 2),
    ("pp4-oact-sgpipe", 512, 6),
    ("pp2v2-szbv", 256, 2),
    ("pp2-oactd", 1024, 3),
    ("dp2-oact", 8192, 2),
    # Nothing but two layers' inputs.
    ("cp4u-tile4-rfull-oact", 1 << 17, 1),
    ("tp4-sp-tile32-rfull-oact", 1 << 17, 1),  # attention's gathered input, beside sum and term of its gradient
    ("dp2-z2-oopt", 256, 2),  # no state in the device's memory
    ("pp2-oopt-oparam", 512, 2),  # nor parameters
    ("dp2-pp2-szbh1", 256, 2),  # z3 drops embedding and head after I
    ("dp8-zp2g4", 256, 3),  # copies of parameters, and sums of gradients, of neighbours
    ("cp4a-rfull", 4096, 2),
    ("cp2-pp2", 2048, 2),
    ("cp2u-tp2-sp-relem", 2048, 2),
    ("cp4u2", 2048, 2),
    ("cp8t-rfull", 65536, 1),
    ("cp8w4-tile8-rfull", 65536, 1),  # attention beside the gradients of the MLP's tiles
    ("pp2-szbh1", 256, 3),  # sums of gradients beside those of the copies in bf16
    ("tp2-sp-pp2", 256, 1),  # sums of a first backward, embedding and head's among them
    ("pp2-vocab", 256, 2),  # their gradients are reduced after T
    ("pp4-mb2-vocab-rfull-fp32", 2048, 4),  # hidden states of the vocabulary's collectives
    ("dp2-pp2v2-sinterleaved-active1", 256, 4),  # gathered, and reduced, for units of passes
    ("dp4-pp2v2-szeropp-active1", 256, 4),
    ("dp2x1-pp2v2-z1-szbv-fp32", 256, 2),  # added in place, reduced beside the last passes
]
QUICK = [3, 5, 8, 9, 10, 11, 12, 14, 19, 20, 22]
"""Places of plans in `make test`, of which each has something that no other has."""


@pytest.mark.parametrize(("name", "seq_len", "micro_batches"), quick_sample(PLANS, *QUICK))
def test_forecast_is_what_pytorch_counts(name, seq_len, micro_batches):
    assert_forecast_is_accounting(SHORT_LLAMA, name, seq_len, micro_batches)


def test_forecast_of_gemma_2_is_what_pytorch_counts():
    """Soft caps in attention and loss, norms with an offset around each part, a tied head of 256,000 words; layers so
    large that the first one's reduction still counts when the embedding's gradient is made."""
    spec = load_model("gemma-2-9b").model_copy(update={"num_layers": 2})
    for name, seq_len in (("dp8", 1024), ("tp8-sp-rfull", 8192), ("tp4-fp32", 2048)):
        assert_forecast_is_accounting(spec, name, seq_len, 1)


@pytest.mark.parametrize("seed", [20, 28])
def test_forecast_holds_with_large_vocabularies(seed):
    """Two of the random plans: the largest tensors are embedding, head, their gradients and the logits."""
    assert_ranks_are_forecast(*random_case(seed), only_ends=True)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_forecast_of_random_plans_is_what_pytorch_counts(seed):
    assert_ranks_are_forecast(*random_case(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_forecast_of_random_split_backwards_of_wide_models_is_what_pytorch_counts(seed):
    assert_ranks_are_forecast(*random_case(seed, wide=True, schedules=("zb-h1", "zb-v")))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_forecast_of_random_vocabulary_shards_of_wide_models_is_what_pytorch_counts(seed):
    assert_ranks_are_forecast(*random_case(seed, wide=True, vocab_parallel=True))


# ----------------------------------------------------------------------------------------------------------------------
# Moment by moment


@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if not entry.searched])
def test_live_micro_batches_are_those_of_the_checker(schedule):
    """With nothing else to hold, the peak is the checker's count of activations."""
    entry = SCHEDULES[schedule]
    if entry.slow:
        return
    plan = Plan(pp=4, vpp=entry.default_chunks, schedule=schedule, default_strategy=LayerStrategy(zero="z1"))
    model = SHORT_LLAMA.model_copy(update={"num_layers": 16})
    program = build_program(plan, model, Workload(seq_len=64, global_batch_size=8))
    one = MemoryTerms(activations=1)
    moments = {kind: (PeakCandidate("", MemoryTerms()),) for kind in ("F", "B", "I", "W")}
    stage = StageMemory(MemoryTerms(), 0, True, 0, one, one, one, MemoryTerms(), moments)
    stages = [dict.fromkeys(stages_on(plan, rank), stage) for rank in range(4)]
    peaks = [peak_terms(order, own)[1].total for order, own in zip(allocation_orders(program), stages, strict=True)]
    assert peaks == list(check(program).peak_activations)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "seq_len", "micro_batches"),
    [
        ("dp64", 8192, 1),
        ("dp64-rfull", 8192, 2),
        ("dp8x8-relem", 4096, 2),
        ("dp8-tp8-sp", 8192, 2),
        ("dp16-tp4", 4096, 2),
        ("dp16-pp4", 4096, 8),
        ("dp16-pp4-z1-rfull", 8192, 8),
        ("dp2-pp16-z1-rfull", 512, 32),
        ("dp8-tp4-sp-pp2-relem", 8192, 4),
        ("dp32-pp2-z2", 2048, 4),
        ("dp8-pp4v2-sinterleaved-z1", 2048, 8),
        ("tp8-sp-pp8-rfull", 8192, 16),
        ("dp4-pp4-fp32-rfull", 2048, 4),
        ("pp8-oact", 2048, 16),
        ("dp2-pp4-z1-oact-sgpipe-relem", 2048, 8),
        ("pp4v2-sinterleaved-oact-rfull", 2048, 8),
        ("pp4v2-szbv-oact", 2048, 8),
        ("pp4v2-szbv-oactd", 2048, 8),
        ("dp2-pp2-z3-oactd-rfull", 2048, 8),
        ("tp2-sp-oactd-relem-fp32", 512, 3),
        ("dp8-pp2-z1-rfull-oopt", 2048, 8),
        ("dp16-zp8g8-rfull", 512, 4),
        ("dp16-zp2g8-rfull", 512, 1),
        ("dp8-pp2-zp8g2", 1024, 8),
    ],
)
def test_forecast_of_llama_is_what_pytorch_counts(name, seq_len, micro_batches):
    """Llama-3-8B whole, on up to 64 fake ranks; of pipelines the first and the last rank."""
    assert_forecast_is_accounting(load_model("llama3-8b"), name, seq_len, micro_batches, only_ends=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["dp2-pp2-fp32", "tp2-sp-dp2", "pp4-rfull", "dp4-z1-fp32-relem"])
def test_forecast_is_what_real_processes_hold(name):
    plan, model = parse_plan_name(name), load_model("tiny")
    workload = Workload(seq_len=512, global_batch_size=plan.mesh(0).dp_size * 4)
    found = forecast_memory(model, plan, workload, FAKE_CPU, build_program(plan, model, workload))
    counted = measure_real_ranks(model, plan, workload)
    for rank in found.ranks:
        assert rank.terms.total == pytest.approx(counted[rank.rank].peak_bytes, rel=0.1), rank.peak_instruction


# ----------------------------------------------------------------------------------------------------------------------
# Published figures


def gpt(hidden: int, layers: int, heads: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=51200,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=4 * hidden,
        norm="layer",
        position="learned",
        max_positions=2048,
        activation="gelu",
        gated=False,
        tied_embeddings=True,
    )


MEGATRON = FrameworkTraits(storage="megatron", attention="fused", dropout=True, grad_bytes=4)
SIZES = {"22B": (6144, 48, 64, 4), "175B": (12288, 96, 96, 1), "530B": (20480, 105, 128, 1), "1T": (25600, 128, 160, 1)}


def layer_numbers(size: str, **strategy: Any) -> float:
    """What a layer keeps of a micro-batch under tp 8, in units of sequence · batch · hidden."""
    hidden, layers, heads, batch = SIZES[size]
    plan = Plan(
        tp=8, pp=3, micro_batch_size=batch, default_strategy=LayerStrategy(zero="z1", attention="unfused", **strategy)
    )
    spec, workload = gpt(hidden, layers, heads), Workload(seq_len=2048, global_batch_size=4 * batch)
    kept = megatron_stage_memory(spec, plan, workload, 1, MEGATRON).saved.activations
    return kept / len(plan.layers(1, layers)) / (2048 * batch * hidden)


@pytest.mark.parametrize("size", SIZES)
def test_layers_keep_what_korthikanti_counts(size):
    """arXiv:2205.05198, table 2, and what it makes of figure 7."""
    hidden, _, heads, _ = SIZES[size]
    scores = 5 * heads * 2048 / hidden
    whole = layer_numbers(size)
    assert whole == pytest.approx(10 + 24 / 8 + scores / 8)
    assert layer_numbers(size, sp=True) == pytest.approx(34 / 8 + scores / 8)
    assert layer_numbers(size, recompute="core_attention") == pytest.approx(10 + 24 / 8)
    assert layer_numbers(size, sp=True, recompute="core_attention") == pytest.approx(34 / 8)
    assert layer_numbers(size, recompute="full") == pytest.approx(2)


@pytest.mark.parametrize(
    ("size", "sp", "recompute", "percent"),
    [
        ("22B", True, "none", 66.84),
        ("22B", False, "core_attention", 49.42),
        ("22B", True, "core_attention", 16.18),
        ("22B", False, "full", 7.64),
        ("175B", True, "none", 62.04),
        ("175B", False, "core_attention", 56.53),
        ("175B", True, "core_attention", 18.49),
        ("175B", False, "full", 8.71),
        ("530B", True, "none", 58.31),
        ("530B", False, "core_attention", 62.04),
        ("1T", True, "core_attention", 20.27),
        ("1T", False, "full", 9.42),
    ],
)
def test_shares_of_activations_are_those_of_the_figure(size, sp, recompute, percent):
    share = layer_numbers(size, sp=sp, recompute=recompute) / layer_numbers(size)
    assert 100 * share == pytest.approx(percent, rel=0.015)  # read off a figure


@pytest.mark.parametrize(
    ("kernel", "dropout", "kept", "most"),
    [("fused", False, 2, 6), ("fused", True, 5, 7), ("unfused", False, 6, 12), ("unfused", True, 7, 12)],
)
def test_bytes_of_a_score(kernel, dropout, kept, most):
    """Kept of each score from forward to backward, and held at most while a recomputed layer's backward runs, where
    autograd drops what an operation kept once it has run."""
    spec, workload = gpt(1024, 4, 16), Workload(seq_len=8192, global_batch_size=2)
    scores = 16 * 8192**2

    def stage(recompute: Recompute, attention: str, dropout: bool) -> StageMemory:
        plan = Plan(pp=2, default_strategy=LayerStrategy(zero="z1", attention=attention, recompute=recompute))  # type: ignore[arg-type]
        software = FrameworkTraits(storage="megatron", attention=kernel, dropout=dropout)  # type: ignore[arg-type]
        return megatron_stage_memory(spec, plan, workload, 0, software)

    def peak(one: StageMemory) -> int:
        return max(moment.extra.total for kind in "FB" for moment in one.peak_candidates[kind])

    by_layer = stage("none", "unfused", dropout).saved.total - stage("core_attention", "unfused", dropout).saved.total
    assert by_layer / 2 / scores == kept
    written, flash = peak(stage("full", "unfused", dropout)), peak(stage("full", "flash", dropout))
    assert (written - flash) / scores == pytest.approx(most, rel=0.1)


def test_deepseek_s_layers_keep_what_its_report_lists():
    """arXiv:2412.19437 §3.2.3, §3.3.3: of a token two hidden states, the narrow vectors, attention's output in 12 bits
    and a statistic for each head; the router's probabilities; inputs and gate and up of nine experts in fp8."""
    spec, workload = load_model("deepseek-v3"), Workload(seq_len=4096, global_batch_size=64)
    plan = Plan(
        dp_shard=64, ep=64, pp=4, precision="fp8", default_strategy=LayerStrategy(zero="z1", recompute="elementwise")
    )
    software = FrameworkTraits(storage="megatron", fp8_activations=True, moment_bytes=2)
    stage, usual = (
        megatron_stage_memory(spec, plan, workload, 1, one)
        for one in (software, software.model_copy(update={"fp8_activations": False, "moment_bytes": 4}))
    )
    each = 2 * 7168 * 2 + (1536 + 512 + 64) * 2 + 128 * (128 * 1.5 + 4) + 256 * 4
    each += (8 * (7168 + 2 * 2048) + 2 * 2048) * (1 + 4 / 128)
    assert stage.saved.activations == pytest.approx(len(plan.layers(1, 61)) * 4096 * each, rel=1e-6)
    assert stage.saved.activations < 0.4 * usual.saved.activations
    assert 2 * stage.resident.optimizer == usual.resident.optimizer


def test_unfused_attention_keeps_what_autograd_does():
    """Softmax in float32 and its cast, which multiplies the values: counted at autograd's own hooks."""
    found: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.numel() * tensor.element_size())
        return tensor

    scores = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    values = torch.randn(2, 64, 8, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        probabilities = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(torch.bfloat16)
        (probabilities @ values.requires_grad_()).sum()
    written = sum(size for size in found if size >= 2 * scores.numel())
    assert written == 6 * scores.numel()


def test_megatron_stores_eighteen_bytes_for_each_parameter():
    """Figure 1 of arXiv:2205.05198: 45.56 GiB of parameters and optimizer state for the layers of 22B on 8 ranks."""
    plan = Plan(tp=8, pp=3, default_strategy=LayerStrategy(zero="z1"))
    stage = megatron_stage_memory(
        gpt(*SIZES["22B"][:3]), plan, Workload(seq_len=2048, global_batch_size=4), 1, MEGATRON
    )
    held = stage.resident.parameters + stage.resident.gradients + stage.resident.optimizer
    assert 3 * held / 2**30 == pytest.approx(45.5625, rel=0.002)


def test_simumax_measured_what_is_forecast():
    """Llama-3-70B of 12 layers on B200: torch's own maximum is 66.55 GiB with tp1-pp2, 39.07 with tp4, 147.99 with cp8
    (SimuMax, docs/b200/b200_release_v1.2_summary.json). The forecast leaves out what the allocator doesn't count."""
    spec = load_model("llama3-70b").model_copy(update={"num_layers": 12})
    for name, seq_len, micro_batches, gib in (
        ("dp4-pp2-z1", 4096, 4, 66.55),
        ("dp2-tp4-sp-z1", 4096, 4, 39.07),
        ("cp8-z1", 131072, 4, 147.99),
    ):
        plan = parse_plan_name(name)
        workload = Workload(seq_len=seq_len, global_batch_size=plan.mesh(0).dp_size * micro_batches)
        cluster = load_cluster(f"{plan.world_size}xb200")
        software = FrameworkTraits(storage="megatron")
        terms = forecast_memory(
            spec, plan, workload, cluster, build_program(plan, spec, workload), software
        ).fullest.terms
        outside = device_overhead(cluster.device, plan, 0, 0)
        counted = terms.total - terms.fragmentation - outside.communication - outside.context
        assert counted / 2**30 == pytest.approx(gib, rel=0.04)


# ----------------------------------------------------------------------------------------------------------------------
# What must hold of any plan


@given(
    recompute=st.sampled_from(["none", "elementwise"]),
    zero=st.sampled_from(["z1", "z2", "z3"]),
    size=st.sampled_from([2, 4, 8]),
    shard=st.sampled_from([2, 8]),
    tp=st.sampled_from([1, 4]),
    storage=st.sampled_from(["muster", "megatron"]),
)
def test_what_saves_memory_never_costs_any(recompute, zero, size, shard, tp, storage):
    plan = Plan(
        dp_shard=shard,
        tp=tp,
        pp=2,
        micro_batch_size=size,
        default_strategy=LayerStrategy(recompute=recompute, zero=zero, sp=tp > 1),
    )
    model, workload = SHORT_LLAMA, Workload(seq_len=512, global_batch_size=8 * shard * 4)

    def peak(changed: Plan) -> int:
        cluster = load_cluster(f"{changed.world_size}xh100")
        program = build_program(changed, model, workload)
        return forecast_memory(
            model, changed, workload, cluster, program, FrameworkTraits(storage=storage)
        ).fullest.terms.total

    strategy = plan.default_strategy
    held = peak(plan)
    for update in (
        {"micro_batch_size": size // 2},
        {"default_strategy": strategy.model_copy(update={"recompute": "full"})},
        {"default_strategy": strategy.model_copy(update={"zero": "z3"})},
        {"tp": 2 * tp, "default_strategy": strategy.model_copy(update={"sp": True})},
    ):
        assert peak(plan.model_copy(update=update)) <= held * 1.02, update


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_what_the_runtime_refuses_has_a_forecast(name):
    """Experts of a rank are those that expert parallelism leaves it; cutting sequences halves what is kept."""
    spec, workload = load_model(name), Workload(seq_len=4096, global_batch_size=8)
    experts = sum(prod(shape) for name, shape in parameter_shapes(spec) if ".experts." in name)
    assert stage_param_shards(spec, Plan(), 0).total.unsharded_numel == spec.num_parameters
    assert (
        stage_param_shards(spec, Plan(ep=4, dp_shard=4), 0).total.unsharded_numel
        == spec.num_parameters - experts * 3 // 4
    )

    def kept(plan: Plan) -> MemoryTerms:
        return native_stage_memory(spec, plan, workload, 0, FAKE_KERNELS).saved

    assert kept(Plan(cp=2)).total * 2 == kept(Plan()).total
    plan = Plan(ep=4, dp_shard=4, tp=2, micro_batch_size=2, default_strategy=LayerStrategy(sp=True, recompute="full"))
    terms = forecast_memory(spec, plan, workload, FAKE_CPU, build_program(plan, spec, workload)).fullest.terms
    assert min(terms.parameters, terms.gradients, terms.optimizer) > 0


# ----------------------------------------------------------------------------------------------------------------------
# What to change


def test_a_copy_of_the_model_without_micro_batches_is_refused():
    plan, workload = parse_plan_name("dp2-pp2v2-z3-sdualpipe"), Workload(seq_len=64, global_batch_size=2)
    with pytest.raises(InfeasibleError, match="2 replicas of the model, each of which needs a micro-batch"):
        predict(load_model("tiny"), plan, workload, load_cluster("4xh100"))


@pytest.mark.parametrize(
    ("plan", "cluster"), [("tp2-mb4-domino", "2xh100"), ("dp2x1-pp2-mb1-spipedream2bw", "4xh100"), ("pp4-pv", "4xa100")]
)
def test_changes_make_a_plan_fit_that_can_be_run(plan: str, cluster: str) -> None:
    model, workload = load_model("llama3-8b"), Workload(seq_len=4096, global_batch_size=16)
    one = predict(model, parse_plan_name(plan), workload, load_cluster(cluster))
    assert one.fits is False
    assert [gap for change in one.memory_fixes for gap in unsupported_features(change.plan, model)] == []


def test_changes_make_a_plan_fit():
    model, plan, cluster = load_model("llama3-70b"), parse_plan_name("dp64-z1"), load_cluster("64xh100")
    workload = Workload(seq_len=8192, global_batch_size=512)
    one = predict(model, plan, workload, cluster)
    assert one.fits is False
    assert one.forecast.fullest.largest_terms[0][0] == "gradients"
    assert len(one.memory_fixes) == 3
    assert [change.value for change in one.memory_fixes] == sorted(change.value for change in one.memory_fixes)
    for change in one.memory_fixes:
        again = predict(model, parse_plan_name(format_plan_name(change.plan)), workload, cluster)
        assert again.fits
        assert again.step_time_s == pytest.approx(change.value)
    shown = "\n".join(prediction_lines(one))
    assert "largest   gradients" in shown
    assert format_plan_name(one.memory_fixes[0].plan) in shown
    assert one.to_json()["changes"][0]["plan"] == format_plan_name(one.memory_fixes[0].plan)


def test_memory_check_says_how_far_they_are_apart(capsys):
    flags = ["--model", "tiny", "--plan", "dp2-tp2-sp", "--seq-len", "256", "--json"]
    assert main(["memory-check", *flags]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert rank["difference"] == pytest.approx(rank["forecast_bytes"] / rank["counted_bytes"] - 1)
    assert main(["memory-check", *flags[:3], "dp2-rcore"]) == 3
    assert main(["memory-check", "--plan", "dp2"]) == 2
