"""Hugging Face's configurations and weights: what is read is what `transformers` makes of the same files."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from muster.checkpoint.model_directory import model_weights, open_directory
from muster.config.load_config import load_run_config
from muster.config.named_model import load_model
from muster.interop.families import FAMILIES, ModelFamily
from muster.interop.families.family import SHARED_KEYS, Config
from muster.interop.families.llama import read_llama, write_llama
from muster.interop.families.unsupported import NEAREST_FAMILY
from muster.interop.families.weight_link import WeightLink, link_whole
from muster.interop.hf_config import hf_config_from_spec, spec_from_hf_config
from muster.interop.weight_map import hf_shapes, is_derived_tensor, weight_map
from muster.layout.tensor_layout import Box
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.model import ModelSpec, parameter_shapes
from tests.hf_models import CONFIGS, READ_ONLY, SIZES, random_model


@pytest.mark.parametrize("name", CONFIGS)
def test_maps_cover_every_parameter_and_every_tensor_of_a_directory_once(name, tmp_path):
    random_model(name).save_pretrained(tmp_path)
    spec = load_model(f"hf:{tmp_path}")
    links, found = weight_map(spec, CONFIGS[name]["model_type"]), {}
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as tensors:
            found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    assert hf_shapes(links) == {key: shape for key, shape in found.items() if not is_derived_tensor(spec, key)}
    assert sum(link.hf_box.numel for link in links) == sum(map(size, hf_shapes(links).values()))
    for parameter, shape in parameter_shapes(spec):
        assert sum(link.box.numel for link in links if link.name == parameter) == size(shape), parameter


def size(shape: tuple[int, ...]) -> int:
    return Box((0,) * len(shape), shape).numel


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back_as_it_was(name):
    spec = spec_from_hf_config(CONFIGS[name])
    written = json.loads(json.dumps(hf_config_from_spec(spec, CONFIGS[name]["model_type"])))
    assert written["model_type"] == CONFIGS[name]["model_type"]
    assert spec_from_hf_config(written) == spec


def test_fused_and_stacked_tensors_are_boxes():
    links = {link.hf_name + link.name: link for link in weight_map(spec_from_hf_config(CONFIGS["gpt2"]))}
    fused = "transformer.h.1.attn.c_attn."
    k, bias = (links[f"{fused}{leaf}layers.1.attn.k.{leaf}"] for leaf in ("weight", "bias"))
    assert (k.box, k.hf_box, k.transposed) == (Box((0, 0), (32, 32)), Box((0, 32), (32, 32)), True)
    assert (bias.box, bias.hf_box, bias.transposed) == (Box((0,), (32,)), Box((32,), (32,)), False)
    expert = next(
        link for link in weight_map(spec_from_hf_config(CONFIGS["mixtral"])) if "experts.3.w2" in link.hf_name
    )
    assert expert.box == Box((3, 0, 0), (1, 32, 48))
    assert expert.hf_box == Box((0, 0), (32, 48))


# A toy family. In the product it is one file (all of the next lines, down to TOY) and one line of the registry.


def read_toy(config: Config) -> dict[str, object]:
    return read_llama({**config, "intermediate_size": config["ffn_dim"]}) | {"gated": False}


def write_toy(spec: ModelSpec) -> dict[str, object]:
    config = write_llama(spec)
    return config | {"ffn_dim": config.pop("intermediate_size")}


def toy_links(spec: ModelSpec) -> Iterator[WeightLink]:
    for name, shape in parameter_shapes(spec):
        yield link_whole(name, f"toy.{name}", shape)


TOY = ModelFamily("ToyForCausalLM", read_toy, write_toy, toy_links, SHARED_KEYS | {"intermediate_size": "ffn_dim"})


def test_a_dense_family_is_one_file_and_one_line_of_the_registry(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    config = {key: value for key, value in CONFIGS["llama"].items() if key != "intermediate_size"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "toy", "ffn_dim": 48}))
    spec = load_model(f"hf:{tmp_path}")
    assert (spec.gated, spec.intermediate_size) == (False, 48)
    assert hf_config_from_spec(spec)["model_type"] == "toy"
    assert hf_shapes(weight_map(spec)) == {f"toy.{name}": shape for name, shape in parameter_shapes(spec)}
    weights = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in parameter_shapes(spec)}
    safetensors.numpy.save_file(
        {f"toy.{name}": value for name, value in weights.items()}, tmp_path / "model.safetensors"
    )
    opened = model_weights(open_directory(tmp_path))
    assert {name: meta.shape for name, meta in opened.metas.items()} == {name: w.shape for name, w in weights.items()}
    with pytest.raises(ConfigError, match="ffn_dim: expected a whole number >= 1, got 0"):
        spec_from_hf_config(config | {"model_type": "toy", "ffn_dim": 0})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not a supported family; did you mean 'llama'"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is unknown, expected one of silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is unknown"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: expected one mapping for all"),
        ({"model_type": "gpt2", "n_embd": None}, "n_embd: expected a whole number, got None"),
        (
            {"model_type": "gpt2", "n_embd": 30, "n_head": 4, "n_layer": "x"},
            "n_layer: expected a whole number >= 1, got 'x'",
        ),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is more"),
        ({"model_type": "gpt_oss", "num_local_experts": 0, "num_experts_per_tok": 3}, "num_local_experts: expected a"),
        ({"model_type": "ministral", "sliding_window": 8, "layer_types": ["chunked"] * 3}, "got a layer of chunked"),
        ({"model_type": "ministral", "sliding_window": 8, "layer_types": []} | {"num_hidden_layers": "3"}, "whole"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.rope_type is 'linear', expected default",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "only causal attention is supported"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping: expected a number"),
        ({"model_type": "gpt_neox", "rotary_pct": 2}, "rotary_pct: expected a share of a head"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.4}, "must be even"),
        ({"model_type": "glm4_moe"}, "partial rotary embeddings; nearest is 'dots1'"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, "of model_type 'mistral', as a conf"),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            "'llama4_text' is not supported: it has",
        ),
        (CONFIGS["deepseek_v3"] | {"rope_interleave": False}, "rope_interleave is False, expected True"),
        (CONFIGS["deepseek_v3"] | {"attention_bias": True}, "is without attention_bias: leave"),
        (CONFIGS["deepseek_v3"] | {"v_head_dim": 13}, "v_head_dim 13 is more than the 12 elements of a key"),
        ({"vocab_size": "many"}, "vocab_size: "),
        ({"hidden_size": None}, "hidden_size: expected a whole number >= 1, got None"),
        ({"hidden_size": "big"}, "hidden_size: expected a whole number >= 1, got 'big'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a whole number >= 1, got 0"),
    ],
)
def test_errors_in_a_configuration(changes, sentence, tmp_path):
    config = CONFIGS["llama"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=sentence) as refusal:
        load_model(f"hf:{tmp_path}")
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", READ_ONLY)
def test_a_family_that_is_only_read_has_all_its_parameters(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = READ_ONLY[name]
    theirs = config | {"model_type": "deepseek_v3" if name == "kimi_k2" else name}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs))
    biases = [one for key, one in model.named_buffers() if key.endswith(".e_score_correction_bias")]
    assert spec_from_hf_config(config).num_parameters == sum(one.numel() for one in [*model.parameters(), *biases])


GPT_OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""What the config.json of openai/gpt-oss-20b and of -120b both say."""


@pytest.mark.parametrize(("name", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
@pytest.mark.parametrize("listed", [True, False])
def test_gpt_oss_is_the_catalogue_s(name, layers, experts, listed, tmp_path):
    types = {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2)} if listed else {}
    config = GPT_OSS | {"num_hidden_layers": layers, "num_local_experts": experts} | types
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert load_model(f"hf:{tmp_path / name}") == load_model(name)


def test_windows_are_those_that_are_listed():
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert spec_from_hf_config(READ_ONLY["ministral"] | {"layer_types": kinds}).window_layers == (1,)
    assert spec_from_hf_config(READ_ONLY["ministral"]).window_layers is None
    assert spec_from_hf_config(READ_ONLY["dots1"] | {"sliding_window": 5, "max_window_layers": 2}).window_layers == (2,)


def test_every_family_that_is_refused_names_one_that_is_read():
    assert not FAMILIES.keys() & NEAREST_FAMILY.keys()
    for kind, (nearest, _) in NEAREST_FAMILY.items():
        assert nearest in FAMILIES
        with pytest.raises(ConfigError, match=f"'{kind}' is not supported: it has .*; nearest is '{nearest}'"):
            spec_from_hf_config(SIZES | {"model_type": kind})


def test_a_directory_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="expected a Hugging Face directory with its config.json"):
        load_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        load_model(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="vocab_size: missing"):
        load_model(f"hf:{tmp_path}")


def test_a_model_of_no_family_names_the_nearest():
    spec = spec_from_hf_config(CONFIGS["qwen3"]).model_copy(update={"gated": False, "name": "odd"})
    with pytest.raises(InfeasibleError, match="model odd fits no Hugging Face family .*nearest is qwen3.* gated"):
        hf_config_from_spec(spec)
    with pytest.raises(InfeasibleError, match="nearest is mixtral, which can't express its .*moe.dense_layers"):
        hf_config_from_spec(load_model("tiny-moe"))


def test_a_run_file_takes_a_directory(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": 300}))
    (tmp_path / "run.yaml").write_text("extends: tiny\nmodel: {preset: hf:llama, num_layers: 1}\n")
    resolved = load_run_config(None, tmp_path / "run.yaml", [])
    assert resolved.config.model == load_model("hf:llama", tmp_path).model_copy(update={"num_layers": 1})
    assert resolved.origins["model.hidden_size"] == "model hf:llama"
    by_flag = load_run_config("tiny", None, [("model", f"hf:{folder}")]).config.model
    assert by_flag == load_model(f"hf:{folder}")
    assert isinstance(by_flag, ModelSpec)
