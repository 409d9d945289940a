"""The single-device model, its initial values and its loss."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from muster.config.named_model import load_model
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import Box, TensorLayout, stage_layouts
from muster.model import init
from muster.model import piecewise_attention as soft_capped
from muster.model.attention import core_attention
from muster.model.decoder import Decoder
from muster.model.init import draw, fill_initial_parts, init_stage, initial_value, keyed_generator
from muster.model.kernels import activate, apply_rotary, clamped_swiglu, gated_activation, rms_norm, soft_cap
from muster.model.loss import cross_entropy_sum, loss_sums
from muster.model.mersenne_twister import generators_at
from muster.model.positions import rotary_tables
from muster.model.saved_tensors import count_saved_bytes
from muster.spec.model import ModelSpec, parameter_shapes, stage_parameter_shapes
from muster.spec.model_components import Activation
from muster.spec.plan_name import parse_plan_name

SMALL = ModelSpec(
    vocab_size=61, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40
)
TIED = SMALL.model_copy(update={"tied_embeddings": True})


def build(
    spec: ModelSpec, layers: range | None = None, first: bool = True, last: bool = True, seed: int = 5
) -> Decoder:
    with torch.device("meta"):
        stage = Decoder(spec, range(spec.num_layers) if layers is None else layers, first, last)
    init_stage(stage, spec, seed)
    return stage


def tokens_for(spec: ModelSpec, batch: int = 2, seq: int = 11) -> Tensor:
    return torch.randint(spec.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0))


# ----------------------------------------------------------------------------------------------------------------------
# The decoder


def plain_logits(spec: ModelSpec, weights: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """The decoder once more, from its formulas alone: no kernels, explicit heads, explicit mask."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turned(x_SD: Tensor) -> Tensor:
        half = spec.head_dim // 2
        angle = torch.tensor(
            [[t * spec.rope_theta ** (-i / half) for i in range(half)] for t in range(len(x_SD))], dtype=x_SD.dtype
        )
        a, b = x_SD[:, :half], x_SD[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)

    def attend(x_SD: Tensor, name: str) -> Tensor:
        q, k, v = (x_SD @ weights[f"{name}.{part}.weight"].T for part in "qkv")
        heads, d = [], spec.head_dim
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            q_h, k_h, v_h = q[:, head * d :][:, :d], k[:, group * d :][:, :d], v[:, group * d :][:, :d]
            scores = turned(q_h) @ turned(k_h).T / math.sqrt(d)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(torch.softmax(scores, -1) @ v_h)
        return torch.cat(heads, 1) @ weights[f"{name}.o.weight"].T

    def mlp(x: Tensor, name: str) -> Tensor:
        gate, up = (x @ weights[f"{name}.{part}.weight"].T for part in ("gate", "up"))
        return (gate / (1 + torch.exp(-gate)) * up) @ weights[f"{name}.down.weight"].T

    rows = []
    for tokens_S in tokens_BS:
        x_SD = weights["embed.weight"][tokens_S]
        for layer in (f"layers.{i}" for i in range(spec.num_layers)):
            x_SD = x_SD + attend(norm(x_SD, f"{layer}.attn_norm"), f"{layer}.attn")
            x_SD = x_SD + mlp(norm(x_SD, f"{layer}.mlp_norm"), f"{layer}.mlp")
        rows.append(norm(x_SD, "norm") @ weights["embed.weight" if spec.tied_embeddings else "head.weight"].T)
    return torch.stack(rows)


@pytest.mark.parametrize("spec", [SMALL, TIED, SMALL.model_copy(update={"num_kv_heads": 4})])
def test_decoder_equals_its_formulas(spec):
    model, tokens = build(spec).double(), tokens_for(spec)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide a norm that forgets its weight
            parameter.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, expected = model(tokens), plain_logits(spec, weights, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    pull = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits.backward(pull)
    expected.backward(pull)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [SMALL, TIED])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_stages_hold_the_listed_parameters_and_chain_to_the_whole_model(spec, cut):
    parts = [(range(cut), True, False), (range(cut, spec.num_layers), False, True)]
    stages = [build(spec, *part) for part in parts]
    for stage, part in zip(stages, parts, strict=True):
        found = [(name, tuple(p.shape)) for name, p in stage.named_parameters()]
        assert found == list(stage_parameter_shapes(spec, *part))
        assert len(stage.blocks()) == len(part[0])
    whole, tokens = build(spec), tokens_for(spec)
    assert [(n, tuple(p.shape)) for n, p in whole.named_parameters()] == list(parameter_shapes(spec))

    hidden = stages[0](tokens).detach().requires_grad_()
    logits, expected = stages[1](hidden), whole(tokens)
    assert torch.equal(logits, expected)
    cross_entropy_sum(logits, tokens).backward()
    cross_entropy_sum(expected, tokens).backward()
    for name, parameter in stages[1].named_parameters():
        if name != "embed.weight":  # tied: the other half of its gradient lies on the first stage
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_heads_follow_from_the_weights():
    """A tensor-parallel rank holds some of the heads: the module must not look them up elsewhere."""
    model, tokens = build(SMALL).double(), tokens_for(SMALL)
    attn, x = model.layers["0"].attn, torch.randn(1, 5, SMALL.hidden_size, dtype=torch.float64)
    tables = rotary_tables(5, SMALL.head_dim, SMALL.rope_theta, x.dtype, x.device)
    whole = attn(x, nn.Identity(), *tables)
    parts = []
    for half in range(2):
        part = build(SMALL).double().layers["0"].attn
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            weight = getattr(attn, name).weight
            getattr(part, name).weight = nn.Parameter(weight[half * rows :][:rows].detach())
        part.o.weight = nn.Parameter(attn.o.weight[:, half * 16 :][:, :16].detach())
        parts.append(part(x, nn.Identity(), *tables))
    torch.testing.assert_close(parts[0] + parts[1], whole)
    assert model(tokens).shape == (2, 11, SMALL.vocab_size)


def test_rotary_tables_follow_length_and_dtype():
    model, tokens = build(SMALL), tokens_for(SMALL, seq=16)
    long = model(tokens)
    torch.testing.assert_close(model(tokens[:, :4]), long[:, :4])
    fresh = build(SMALL)
    fresh(tokens[:, :4])
    assert torch.equal(fresh(tokens), long)
    doubled = fresh.double()(tokens)
    assert doubled.dtype == torch.float64
    torch.testing.assert_close(doubled.float(), long)
    cos = rotary_tables(300, 8, 1e4, torch.bfloat16, torch.device("cpu"))[0]
    exact = rotary_tables(300, 8, 1e4, torch.float32, torch.device("cpu"))[0]
    assert torch.equal(cos, exact.bfloat16())
    assert not list(model.buffers())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**16))
def test_hand_written_derivatives(rows, pairs, seed):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    x, weight = numbers(2, rows, 2 * pairs), numbers(2 * pairs)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (2 * pairs,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5, offset=1.0), (x, weight))
    for kind in get_args(Activation):
        assert torch.autograd.gradcheck(
            lambda x, up, kind=kind: gated_activation(x, up, kind), (x, numbers(2, rows, 2 * pairs))
        )
        assert torch.equal(gated_activation(x, torch.ones_like(x), kind), activate(x, kind))
    up = numbers(2, rows, 2 * pairs)
    gate = x.clamp(max=0.8)
    expected = (up.clamp(-0.8, 0.8) + 1) * gate * (1.7 * gate).sigmoid()
    torch.testing.assert_close(clamped_swiglu(x, up, 1.7, 0.8), expected)
    assert torch.autograd.gradcheck(lambda x, up: clamped_swiglu(x, up, 1.7, 0.8), (x, up))
    cos, sin = rotary_tables(rows, 2 * pairs, 1e4, torch.float64, torch.device("cpu"))
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x.unsqueeze(2), cos, sin), (x,))


def test_bf16_stays_near_fp32():
    model, tokens = build(SMALL), tokens_for(SMALL)
    exact = model(tokens)
    rough = build(SMALL).bfloat16()(tokens)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.02 * exact.norm()
    x, ones = torch.randn(64, 512).bfloat16(), torch.ones(512)
    error = rms_norm(x, ones.bfloat16(), 1e-5).double() - rms_norm(x.double(), ones.double(), 1e-5)
    assert error.abs().max() <= 2**-8 * 4  # half a unit in the last place of numbers below 4: sums are not in bf16


# ----------------------------------------------------------------------------------------------------------------------
# Initial values


def test_initial_values_depend_on_seed_and_name_only():
    whole = dict(build(TIED, seed=7).named_parameters())
    for stage in (build(TIED, range(1), True, False, 7), build(TIED, range(1, 3), False, True, 7)):
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, whole[name]), name
    for name, parameter in build(TIED, seed=8).named_parameters():
        assert torch.equal(parameter, whole[name]) == name.endswith("norm.weight")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    doubled = Decoder(SMALL, range(3), True, True).double()
    torch.random.set_rng_state(before)
    init_stage(doubled, SMALL, 5)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator must not be drawn from"
    for name, parameter in build(SMALL).named_parameters():
        assert torch.equal(doubled.get_parameter(name), parameter.double())


def test_initial_values_have_their_scale():
    spec = SMALL.model_copy(update={"num_layers": 8})
    for name, std in (("embed.weight", 0.02), ("layers.3.attn.q.weight", 0.02), ("layers.3.mlp.down.weight", 0.005)):
        value = initial_value(spec, name, (300, 200), seed=1)
        assert value.std().item() == pytest.approx(std, rel=0.02)
        assert value.mean().item() == pytest.approx(0, abs=std * 0.02)
    assert torch.equal(initial_value(spec, "layers.3.mlp_norm.weight", (5,), 1), torch.ones(5))
    assert torch.equal(draw("a", (4, 4), 1, 0.02, torch.float64), draw("a", (4, 4), 1, 0.02).double())
    assert not torch.equal(draw("a", (4, 4), 1, 0.02), draw("b", (4, 4), 1, 0.02))


PARTS = [
    ((4096, 100), Box((700, 0), (31, 100))),
    ((1013, 211), Box((1000, 0), (13, 211))),  # with the end, which isn't a whole block
    ((1013, 211), Box((1012, 206), (1, 5))),
    ((1013, 211), Box((333, 7), (222, 100))),
    ((3, 5), Box((1, 0), (2, 5))),  # fewer elements than a block
    ((5, 700, 40), Box((4, 0, 0), (1, 700, 40))),
]


@pytest.mark.parametrize("few", [0, 1 << 16])
@pytest.mark.parametrize(("shape", "box"), PARTS, ids=str)
def test_a_part_of_a_tensor_has_the_values_of_the_whole(monkeypatch, shape, box, few):
    monkeypatch.setattr(init, "FEW_WORDS", few)
    name = "layers.0.attn.o.weight"
    part = torch.empty(box.size)
    fill_initial_parts(SMALL, {name: TensorLayout(name, shape, (box,))}, {name: part}, 3)
    assert torch.equal(part, initial_value(SMALL, name, shape, 3)[box.slices])


def test_initial_values_are_those_of_earlier_versions():
    """The words of the generator, not the floats, which differ in their last bits between kinds of CPUs."""
    generator = keyed_generator(5, "init/layers.0.attn.q.weight")
    generators_at([generator], 10**9)
    words = torch.empty(4, dtype=torch.int64).random_(0, 1 << 31, generator=generator)
    assert words.tolist() == WORDS_AFTER_A_BILLION
    value = initial_value(SMALL, "layers.0.attn.q.weight", (24, 24), 5)
    torch.testing.assert_close(value[-1, -4:], torch.tensor(LAST_VALUES), rtol=1e-5, atol=0)


def test_little_more_is_drawn_than_a_rank_holds(monkeypatch):
    """The elements of the kernel's calls, for the shapes of an 8 B model on 64 ranks."""
    spec = load_model("llama3-8b")
    plan = parse_plan_name("dp64-z3")
    layouts = {one.name: one for one in stage_layouts(spec, plan, 0, coordinates_of(plan, 63))}
    drawn: list[int] = []

    def note(name: str, rows: init._Rows, *rest: object) -> Tensor:
        drawn.append(rows.stop - rows.first_word)
        return torch.zeros(1).expand(rows.stop - rows.start).contiguous()

    monkeypatch.setattr(init, "_draw_rows", note)
    parameters = {name: torch.empty(one.boxes[0].size, device="meta") for name, one in layouts.items()}
    fill_initial_parts(spec, layouts, parameters, 0)
    held = sum(one.numel for one in layouts.values())
    assert held <= sum(drawn) + spec.num_layers * 2 * spec.hidden_size
    assert sum(drawn) < 1.01 * held


LAST_VALUES = [0.011850436218082905, 0.04320429638028145, 0.010791116394102573, 0.021040603518486023]
WORDS_AFTER_A_BILLION = [1286264536, 598174210, 1277034671, 830289516]


# ----------------------------------------------------------------------------------------------------------------------
# Loss


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 400), st.sampled_from([2, 61, 3000]), st.integers(0, 2**16))
def test_loss_is_the_sum_over_labels_that_count(batch, seq, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, seq, vocab, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (batch, seq), generator=generator)
    labels[torch.rand(batch, seq, generator=generator) < 0.3] = -100
    ours = cross_entropy_sum(logits, labels)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(theirs / 7, logits)
    (found,) = torch.autograd.grad(ours / 7, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(cross_entropy_sum(logits, labels), ours)


@pytest.mark.parametrize("vocab", [3, 61, 3000])
def test_z_loss_is_the_squared_log_of_the_sum_of_exponentials(vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(2, 130, vocab, dtype=torch.float64, generator=generator).add_(3).requires_grad_()
    labels = torch.randint(vocab, (2, 130), generator=generator)
    labels[0, 40:90] = -100
    ours = loss_sums(logits, labels, z_loss_coefficient=0.2)
    expected_z = 0.2 * logits.logsumexp(-1)[labels >= 0].square().sum()
    expected = cross_entropy_sum(logits, labels) + expected_z
    torch.testing.assert_close(ours.total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.z_loss, expected_z.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.cross_entropy, cross_entropy_sum(logits, labels).detach(), rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(expected / 7, logits)
    (found,) = torch.autograd.grad(ours.total / 7, logits)
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 5])
def test_soft_capped_attention_is_the_formula_in_any_pieces(window, monkeypatch):
    """Pieces of two rows; six query heads share two key/value heads."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 6, 11, 4), (2, 2, 11, 4), (2, 2, 11, 4))
    q, k, v = (3 * torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    for x in (q, k, v):
        x.requires_grad_()
    scores = 0.3 * q @ k.repeat_interleave(3, 1).mT
    behind = torch.arange(11).unsqueeze(1) - torch.arange(11)
    hidden = (behind < 0) | (behind >= (window or 11))
    p = (1.5 * torch.tanh(scores / 1.5)).masked_fill(hidden, -torch.inf).softmax(-1)
    expected = p @ v.repeat_interleave(3, 1)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    monkeypatch.setattr(soft_capped, "chunk_elements", lambda *_: 2 * 2 * 6 * 11)
    ours = core_attention(q, k, v, None, window, 0.3, 1.5)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(ours.square().sum(), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    whole = soft_capped.whole_scores_attention(q, k, v, ~hidden.expand(2, 1, 11, 11), 0.3, 1.5, None)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def test_a_loss_that_caps_is_one_of_capped_logits():
    logits = torch.randn(2, 130, 3000, dtype=torch.float64).mul_(4).requires_grad_()
    labels = torch.randint(3000, (2, 130))
    labels[0, 40:90] = -100
    expected = loss_sums(soft_cap(logits, 2.0), labels, 0.2)
    ours = loss_sums(logits, labels, 0.2, softcap=2.0)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(expected.total / 7, logits)
    (found,) = torch.autograd.grad(ours.total / 7, logits)
    torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-12)


def test_loss_is_fp32_and_saves_one_tensor():
    logits = torch.randn(2, 300, 1000).bfloat16().requires_grad_()
    labels = torch.randint(1000, (2, 300))
    assert count_saved_bytes(lambda: cross_entropy_sum(logits, labels), []) == 2 * 300 * 1000 * 2
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    exact = cross_entropy_sum(logits.double(), labels)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
