"""The shapes of decoders: what each has, what of it can't be run, what is refused."""

from math import prod

import pytest

from muster.config.load_config import load_run_config
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.model_components import LinearAttentionSpec, MlaSpec, MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.workload import Workload

SMALL = ModelSpec(vocab_size=61, hidden_size=24, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=40)
EXPERTS = MoeSpec(num_experts=8, top_k=2, expert_size=10, shared_size=6, dense_layers=1)


def changed(**fields) -> ModelSpec:
    return ModelSpec.model_validate(SMALL.model_dump() | fields)


def test_each_field_adds_its_numbers():
    """The difference that one field makes to Llama's layers, counted by hand."""
    layers, hidden, head, q, kv, inner = 4, 24, 6, 24, 12, 40
    added = {
        "norm": ("layer", (2 * layers + 1) * hidden),
        "qkv_bias": (True, layers * (q + 2 * kv)),
        "out_bias": (True, layers * hidden),
        "mlp_bias": (True, layers * (2 * inner + hidden)),
        "qk_norm": (True, layers * 2 * head),
        "norm_placement": ("both", layers * 2 * hidden),
        "attention_sinks": (True, layers * 4),
        "gated": (False, -layers * hidden * inner),
        "tied_embeddings": (True, -61 * hidden),
    }
    for field, (value, count) in added.items():
        assert changed(**{field: value}).num_parameters == SMALL.num_parameters + count, field
    assert changed(norm_placement="post").num_parameters == SMALL.num_parameters
    wide = changed(qk_norm=True, qk_norm_width="projection")
    assert wide.num_parameters == SMALL.num_parameters + layers * (q + kv)
    learned = changed(position="learned", max_positions=50)
    assert learned.num_parameters == SMALL.num_parameters + 50 * hidden


def test_experts_count_as_far_as_a_token_meets_them():
    spec = changed(moe=EXPERTS)
    assert [spec.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    other = changed(moe=EXPERTS.model_copy(update={"dense_layers": 0, "every": 2}))
    assert [other.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    one, dense = 3 * 24 * 10, 3 * 24 * 40
    layer = 8 * 24 + 3 * 24 * 6 + 8 * one  # the router, the shared part, the experts
    assert spec.num_parameters == SMALL.num_parameters + 3 * (layer - dense)
    assert spec.num_parameters - spec.num_active_parameters == 3 * 6 * one
    assert SMALL.num_active_parameters == SMALL.num_parameters
    shapes = dict(parameter_shapes(spec))
    assert shapes["layers.1.mlp.experts.down.weight"] == (8, 24, 10)
    assert "layers.0.mlp.router.weight" not in shapes


def test_latent_and_linear_attention_and_further_heads():
    mla = MlaSpec(q_lora_rank=9, kv_lora_rank=7, nope_head_dim=4, rope_head_dim=2, v_head_dim=3)
    linear = LinearAttentionSpec(layers=(0, 2), num_key_heads=2, num_value_heads=4, key_head_dim=3, value_head_dim=5)
    shapes = dict(parameter_shapes(changed(mla=mla, num_kv_heads=4, linear_attention=linear, mtp_layers=1)))
    assert shapes["layers.1.attn.kv_down.weight"] == (9, 24)
    assert shapes["layers.1.attn.kv_up.weight"] == (4 * 7, 7)
    assert shapes["layers.1.attn.o.weight"] == (24, 12)
    assert shapes["layers.2.attn.conv.weight"] == (2 * 6 + 20, 4)
    assert shapes["mtp.0.eh_proj.weight"] == (24, 48)
    assert shapes["mtp.0.attn.q_up.weight"] == (4 * 6, 9)
    spec = changed(mtp_layers=1)
    assert spec.num_active_parameters == SMALL.num_parameters
    own = sum(prod(shape) for name, shape in parameter_shapes(spec) if name.startswith("mtp."))
    assert spec.num_parameters == SMALL.num_parameters + own


def test_windows_are_for_the_layers_that_are_named():
    assert [changed(sliding_window=8).attention_window(layer) for layer in range(4)] == [8] * 4
    assert [changed(sliding_window=8, window_layers=(0, 2)).attention_window(i) for i in range(4)] == [8, None, 8, None]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model.position": "learned"}, "learned positions need max_positions"),
        ({"model.window_layers": "[0]"}, "there is none"),
        ({"model.rotary_dim": "7"}, "rotary_dim 7 must be even"),
        ({"model.parallel_residual": "true", "model.norm_placement": "both"}, "parallel_residual needs norm_placement"),
        ({"model.window_rope_theta": "100"}, "there are none"),
        ({"model.norm_unit_offset": "true", "model.norm": "layer"}, "norm_unit_offset is for RMSNorms"),
        ({"model.qk_norm_width": "projection"}, "the model has no qk_norm"),
        ({"model.moe.num_experts": "4", "model.moe.top_k": "5", "model.moe.expert_size": "8"}, "top_k 5 is more"),
        ({"model.moe.num_expert": "4"}, "did you mean 'num_experts'"),
        ({"model.rope_scaling.kind": "yarn", "model.rope_scaling.factor": "4"}, "needs original_positions"),
        ({"model.activation": "gelutanh"}, "gelu_tanh"),
    ],
)
def test_impossible_models_are_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_run_config("tiny", None, list(fields.items()))


LINEAR_HEADS = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5}


LATENT = {"model.mla.kv_lora_rank": "8", "model.mla.nope_head_dim": "4", "model.mla.rope_head_dim": "2"}


def test_latent_attention_has_heads_of_its_own():
    fields = LATENT | {"model.mla.v_head_dim": "3", "model.num_kv_heads": "4"}
    model = load_run_config("tiny", None, list(fields.items())).config.model
    assert (model.head_dim, model.num_kv_heads, model.rotary_width) == (6, 4, 2)
    for changes, sentence in (
        ({"model.mla.v_head_dim": "7"}, "v_head_dim 7 is more than the 6 elements of a key"),
        ({"model.mla.rope_head_dim": "3"}, "rope_head_dim 3 is odd"),
        ({"model.num_kv_heads": "2"}, "got num_kv_heads 2 of 4"),
        ({"model.head_dim": "16"}, "head_dim 16: leave num_kv_heads and head_dim out"),
        ({"model.qk_norm": "true"}, "is without qk_norm: leave"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_run_config("tiny", None, list((fields | changes).items()))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"moe": EXPERTS, "mlp_bias": True, "parallel_residual": True},
            "biases of shared experts .* and experts beside attention",
        ),
        (
            {"mtp_layers": 1, "linear_attention": LinearAttentionSpec(layers=(0,), **LINEAR_HEADS)},
            "multi-token prediction .* linear attention",
        ),
    ],
)
def test_unsupported_parts_of_a_model_are_named_in_one_sentence(fields, sentence):
    with pytest.raises(InfeasibleError, match=f"can be planned and predicted, but not run yet.*{sentence}") as refusal:
        require_runnable(Plan(), changed(**fields), Workload(seq_len=8, global_batch_size=1), 1)
    assert "\n" not in str(refusal.value)
