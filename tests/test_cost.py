"""Cost formulas against what PyTorch really does."""

import re
from itertools import pairwise
from math import prod

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from muster.config.freezing import frozen_prefix, matches_pattern
from muster.config.named_model import load_model
from muster.cost.flops import forward_flops_per_token, train_flops_per_token
from muster.cost.memory.kernel_workspace import DEFAULT_KERNEL_WORKSPACE
from muster.cost.memory.native_memory import native_stage_memory
from muster.cost.memory.rank_memory import activation_bytes, rank_memory, stage_terms
from muster.cost.memory.terms import MemoryTerms
from muster.layout.mesh import MeshCoordinates
from muster.model.decoder import Decoder
from muster.model.init import init_stage
from muster.model.loss import cross_entropy_sum
from muster.model.recompute import apply_recompute
from muster.model.saved_tensors import count_saved_bytes
from muster.spec.adapters import ADAPTER_FREEZE, AdapterSpec
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan, StageSpec
from muster.spec.workload import Workload

SMALL = ModelSpec(vocab_size=97, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=48)
WIDE = ModelSpec(vocab_size=500, hidden_size=64, num_layers=3, num_heads=2, head_dim=16, intermediate_size=40)
TIED = SMALL.model_copy(update={"tied_embeddings": True})
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


# ----------------------------------------------------------------------------------------------------------------------
# Activations


def run_stage(spec: ModelSpec, plan: Plan, stage: int, workload: Workload) -> int:
    """The bytes that autograd really keeps of one micro-batch."""
    first, last = stage == 0, stage == plan.num_stages - 1
    module = Decoder(spec, plan.layers(stage, spec.num_layers), first, last)
    init_stage(module, spec, seed=0)
    for layer, block in zip(plan.layers(stage, spec.num_layers), module.blocks(), strict=True):
        apply_recompute(block, plan.strategy(layer).recompute)
    dtype = DTYPES[plan.precision]
    module.to(dtype)
    shape = (plan.micro_batch_size, workload.seq_len)
    tokens, labels = (torch.randint(spec.vocab_size, shape) for _ in range(2))
    x = tokens if first else torch.randn(*shape, spec.hidden_size, dtype=dtype, requires_grad=True)

    def forward() -> torch.Tensor:
        y = module(x)
        return cross_entropy_sum(y, labels) / labels.numel() if last else y

    return count_saved_bytes(forward, module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("spec", [SMALL, WIDE, TIED])
@pytest.mark.parametrize(("batch", "seq"), [(1, 16), (3, 40)])
def test_activations_are_what_autograd_saves(spec, precision, batch, seq):
    workload = Workload(seq_len=seq, global_batch_size=6)
    for pp in (1, 3):
        plan = Plan(pp=pp, micro_batch_size=batch, precision=precision)
        for stage in range(pp):
            counted = run_stage(spec, plan, stage, workload)
            assert activation_bytes(spec, plan, workload, stage) == counted, f"stage {stage} of {pp}"


@pytest.mark.parametrize("recompute", ["elementwise", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_with_recompute(recompute, precision):
    """The same in all layers, and in those of the middle only."""
    workload, strategy = Workload(seq_len=40, global_batch_size=6), LayerStrategy(recompute=recompute)
    for strategies in (
        {"default_strategy": strategy},
        {"overrides": (LayerOverride(start=1, count=2, strategy=strategy),)},
    ):
        for pp in (1, 3):
            plan = Plan(pp=pp, micro_batch_size=3, precision=precision, **strategies)
            for stage in range(pp):
                assert activation_bytes(SMALL, plan, workload, stage) == run_stage(SMALL, plan, stage, workload)


def test_recompute_keeps_less():
    """A layer keeps its input, then also what costs a matrix product or attention, then all."""
    one = Workload(seq_len=8, global_batch_size=1)
    keeps = [
        activation_bytes(SMALL, Plan(precision="fp32", default_strategy=LayerStrategy(recompute=how)), one, 0)
        for how in ("full", "elementwise", "none")
    ]
    layer = [8 * 4 * 32, 8 * 4 * (2 * 32 + 2 + 2 * 6 * 8 + 4 + 2 * 48), 8 * 4 * (4 * 32 + 2 + 2 * 6 * 8 + 4 + 3 * 48)]
    assert [b - a for a, b in pairwise(keeps)] == [4 * (b - a) for a, b in pairwise(layer)]


def test_activations_of_stages_without_layers():
    plan = Plan(pp=3, precision="fp32", stages=(StageSpec(layers=0), StageSpec(layers=4), StageSpec(layers=0)))
    workload = Workload(seq_len=24, global_batch_size=2)
    for stage in range(3):
        assert activation_bytes(SMALL, plan, workload, stage) == run_stage(SMALL, plan, stage, workload)


def test_count_saved_bytes_counts_storages_once_and_leaves_parameters_out():
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    assert count_saved_bytes(lambda: x @ w, [x, w]) == 0
    assert count_saved_bytes(lambda: x @ w, [w]) == 8 * 4 * 4
    assert count_saved_bytes(lambda: (x @ w) + (x[:2] @ w).sum(), [w]) == 8 * 4 * 4
    assert count_saved_bytes(lambda: torch.exp(x @ w).sum(), [x, w]) == 8 * 4 * 4

    def freed() -> torch.Tensor:
        y = x * 2
        z = y * y
        y.untyped_storage().resize_(0)
        return z

    assert count_saved_bytes(freed, [x]) == 0
    with torch.no_grad():
        assert count_saved_bytes(lambda: torch.exp(x @ w), []) == 0


# ----------------------------------------------------------------------------------------------------------------------
# Parameters, gradients, optimizer state


def terms(plan: Plan, dp_shard: int = 0) -> MemoryTerms:
    """What the first stage of the small model takes, without activations."""
    at = MeshCoordinates(pp=0, dp_replicate=0, dp_shard=dp_shard, cp=0, tp=0)
    return stage_terms(SMALL, plan, Workload(seq_len=8, global_batch_size=8), 0, at, live_micro_batches=0)


def gathered(plan: Plan, stage: int = 0) -> int:
    """Most bytes of gathered parameters that a stage of the small model has within a forward."""
    held = native_stage_memory(SMALL, plan, Workload(seq_len=8, global_batch_size=8), stage, DEFAULT_KERNEL_WORKSPACE)
    return held.gathered_params + max(moment.extra.gathered_parameters for moment in held.peak_candidates["F"])


def test_one_rank_holds_everything_once():
    count = SMALL.num_parameters
    found = terms(Plan(precision="fp32"))
    assert found == MemoryTerms(4 * count, 0, 4 * count, 8 * count, 0)
    assert found.total == 16 * count
    assert terms(Plan(precision="fp64")).total == 32 * count
    assert terms(Plan(precision="bf16")) == MemoryTerms(4 * count, 0, 4 * count, 8 * count, 0)
    assert (gathered(Plan(precision="fp32")), gathered(Plan(precision="bf16"))) == (0, 2 * count)


@pytest.mark.parametrize("zero", ["z1", "z2", "z3"])
@pytest.mark.parametrize("replicate", [1, 2])
def test_sharding_by_level(zero, replicate):
    plan = Plan(dp_shard=4, dp_replicate=replicate, precision="bf16", default_strategy=LayerStrategy(zero=zero))
    ranks = [terms(plan, shard) for shard in range(4)]
    count = SMALL.num_parameters
    assert sum(rank.parameters for rank in ranks) == 4 * count
    assert sum(rank.optimizer for rank in ranks) == 8 * count
    assert sum(rank.gradients for rank in ranks) == 4 * count * (4 if zero == "z1" else 1)
    layer = (count - 2 * 97 * 32 - 32) // 4
    assert gathered(plan) == 2 * (count - (2 * layer if zero == "z3" else 0))
    # 97 rows in 4 parts: the last has 22, the others 25.
    assert ranks[0].parameters - ranks[3].parameters == 4 * 2 * 3 * 32


def test_z3_gathers_the_two_largest_neighbours():
    plan = Plan(pp=2, dp_shard=2, precision="fp32", stages=(StageSpec(layers=1), StageSpec(layers=3)))
    layer = (SMALL.num_parameters - 2 * 97 * 32 - 32) // 4
    assert gathered(plan) == 4 * (97 * 32 + layer)
    assert gathered(plan, 1) == 4 * (97 * 32 + 32 + 2 * layer)


def test_z3_gathers_buckets_and_those_ahead():
    layer, rest = (SMALL.num_parameters - 2 * 97 * 32 - 32) // 4, 2 * 97 * 32 + 32
    for bucket, ahead, layers in ((1, 1, 2), (1, 2, 3), (2, 1, 4), (3, 1, 4)):
        plan = Plan(dp_shard=2, precision="fp32", bucket_layers=bucket, prefetch_buckets=ahead)
        assert gathered(plan) == 4 * (rest + layers * layer)


def test_replicas_keep_whole_gradients_and_a_gathered_copy():
    found = terms(Plan(dp_replicate=2, precision="fp32"))
    assert found.gradients == found.parameters == 4 * SMALL.num_parameters
    assert (
        gathered(Plan(dp_replicate=2, precision="fp32", default_strategy=LayerStrategy(zero="z1")))
        == 4 * SMALL.num_parameters
    )


def test_stages_add_up_and_a_tied_embedding_counts_on_both_ends():
    workload = Workload(seq_len=8, global_batch_size=8)
    for spec, extra in ((SMALL, 0), (TIED, 97 * 32)):
        plan = Plan(pp=2, precision="fp32")
        ranks = [rank_memory(spec, plan, workload, rank, {0: 2, 1: 1}) for rank in range(2)]
        assert sum(rank.parameters for rank in ranks) == 4 * (spec.num_parameters + extra)
        assert ranks[0].activations == 2 * activation_bytes(spec, plan, workload, 0)
        assert ranks[1].activations == activation_bytes(spec, plan, workload, 1)


def test_a_rank_holds_all_its_stages():
    workload = Workload(seq_len=8, global_batch_size=8)
    plan = Plan(pp=2, vpp=2, precision="fp32")
    at = MeshCoordinates(1, 0, 0, 0, 0)
    parts = [stage_terms(SMALL, plan, workload, stage, at, 3) for stage in (1, 3)]
    assert rank_memory(SMALL, plan, workload, 1, 3) == parts[0] + parts[1]
    assert rank_memory(SMALL, plan, workload, 1, {1: 3, 3: 3}).total == parts[0].total + parts[1].total


def test_state_in_host_memory_is_none_of_the_device():
    assert terms(Plan(default_strategy=LayerStrategy(offload_optimizer="host"))).optimizer == 0


# ----------------------------------------------------------------------------------------------------------------------
# FLOPs


@pytest.mark.parametrize("spec", [SMALL, WIDE, TIED])
def test_flops_are_those_of_the_matrix_products(spec):
    seq = 24
    module = Decoder(spec, range(spec.num_layers), first=True, last=True)
    tokens = torch.randint(spec.vocab_size, (2, seq))
    # PyTorch's counter doesn't know the CPU's fused attention, only the products it stands for.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        logits = module(tokens)
    assert forward_flops_per_token(spec, seq) * tokens.numel() == forward.get_total_flops()
    assert train_flops_per_token(spec, seq) == 3 * forward_flops_per_token(spec, seq)
    assert logits.shape == (2, seq, spec.vocab_size)


@pytest.mark.parametrize(
    ("freeze", "adapter"),
    [
        (("layers.[02].mlp.*", "norm.weight"), None),  # all layers have a backward
        (("embed.*", "layers.0.*", "layers.2.attn.*"), None),
        (("*", "!head.weight"), None),
        (ADAPTER_FREEZE, AdapterSpec(r=4, target_modules=("q", "k", "v"))),
    ],
)
def test_flops_of_frozen_parameters_are_those_of_the_products_that_autograd_makes(freeze, adapter):
    """But that the lowest layer with a backward counts whole: what reads its input needs no gradient of
    that where its first norm is frozen."""
    spec, seq = SMALL.model_copy(update={"num_layers": 3, "adapter": adapter}), 24
    module = Decoder(spec, range(spec.num_layers), first=True, last=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not matches_pattern(freeze, name))
    tokens = torch.randint(spec.vocab_size, (2, seq))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counted:
        module(tokens).sum().backward()
    first = frozen_prefix(freeze, spec)
    reads_input = re.compile(rf"layers\.{first}\.attn\.[qkv]\.(weight|lora_A)")
    needs_none = matches_pattern(freeze, f"layers.{first}.attn_norm.weight")
    whole = sum(needs_none * prod(shape) for name, shape in parameter_shapes(spec) if reads_input.match(name))
    expected = train_flops_per_token(spec, seq, freeze=freeze) - 2 * whole
    assert expected * tokens.numel() == counted.get_total_flops()
    assert expected < 3 * forward_flops_per_token(spec, seq)


def test_flops_count_the_experts_that_a_token_goes_to():
    """6 per active parameter (all but the embedding, biases and norms), and the scores."""
    spec = load_model("mixtral-8x22b")
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    active = spec.num_active_parameters - spec.vocab_size * spec.hidden_size - norms
    scores = 12 * 4096 * spec.num_heads * spec.head_dim * spec.num_layers
    assert train_flops_per_token(spec, 4096) == 6 * active + scores


def test_causal_flops_count_the_scores_that_masks_leave():
    spec = ModelSpec(vocab_size=64, hidden_size=32, num_layers=3, num_heads=4, intermediate_size=64)
    seq = 24
    score = 4 * spec.num_heads * spec.head_dim
    masked = spec.num_layers * score * sum(min(i, seq) for i in range(1, seq + 1))
    unmasked = spec.num_layers * score * seq * seq
    difference = seq * (forward_flops_per_token(spec, seq) - forward_flops_per_token(spec, seq, causal=True))
    assert difference == unmasked - masked
    windowed = spec.model_copy(update={"sliding_window": 5, "window_layers": (1,)})
    less = sum(i - min(i, 5) for i in range(1, seq + 1))
    fewer = forward_flops_per_token(spec, seq, causal=True) - forward_flops_per_token(windowed, seq, causal=True)
    assert fewer == pytest.approx(score * less / seq, abs=1)


def test_flops_of_a_published_model():
    """Llama 2 7B: 6 FLOPs per non-embedding parameter and 12 · layers · hidden · seq_len (PaLM, appendix B)."""
    spec = ModelSpec(vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=11008)
    expected = 6 * (6_738_415_616 - 32000 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 4096
    assert train_flops_per_token(spec, 4096) == expected
