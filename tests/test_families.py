"""Hugging Face's configurations and weights: what is read is what `transformers` makes of the same files."""

import json

import pytest
import safetensors

from muster.checkpoint.families import hf_shapes, is_derived, links_of
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.hf_config import hf_config, spec_from_hf
from muster.spec.layout import Box
from muster.spec.load import load_run
from muster.spec.model import ModelSpec, parameters
from muster.spec.named_model import load_model
from tests.hf_models import CONFIGS, random_model


@pytest.mark.parametrize("name", CONFIGS)
def test_maps_cover_every_parameter_and_every_tensor_of_a_directory_once(name, tmp_path):
    random_model(name).save_pretrained(tmp_path)
    spec = load_model(f"hf:{tmp_path}")
    links, found = links_of(spec), {}
    for file in tmp_path.glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as tensors:
            found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
    assert hf_shapes(links) == {key: shape for key, shape in found.items() if not is_derived(spec, key)}
    assert sum(link.hf_box.numel for link in links) == sum(map(size, hf_shapes(links).values()))
    for parameter, shape in parameters(spec):
        assert sum(link.box.numel for link in links if link.name == parameter) == size(shape), parameter


def size(shape: tuple[int, ...]) -> int:
    return Box((0,) * len(shape), shape).numel


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_comes_back_as_it_was(name):
    spec = spec_from_hf(CONFIGS[name])
    written = json.loads(json.dumps(hf_config(spec)))
    assert written["model_type"] == CONFIGS[name]["model_type"]
    assert spec_from_hf(written) == spec


def test_fused_and_stacked_tensors_are_boxes():
    links = {link.hf_name + link.name: link for link in links_of(spec_from_hf(CONFIGS["gpt2"]))}
    fused = "transformer.h.1.attn.c_attn."
    k, bias = (links[f"{fused}{leaf}layers.1.attn.k.{leaf}"] for leaf in ("weight", "bias"))
    assert (k.box, k.hf_box, k.transposed) == (Box((0, 0), (32, 32)), Box((0, 32), (32, 32)), True)
    assert (bias.box, bias.hf_box, bias.transposed) == (Box((0,), (32,)), Box((32,), (32,)), False)
    expert = next(link for link in links_of(spec_from_hf(CONFIGS["mixtral"])) if "experts.3.w2" in link.hf_name)
    assert expert.box == Box((3, 0, 0), (1, 32, 48))
    assert expert.hf_box == Box((0, 0), (32, 48))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is no family that is known; did you mean 'llama'"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is unknown, expected one of silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is unknown"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"vocab_size": "many"}, "vocab_size: "),
        ({"hidden_size": None}, "hidden_size: expected a whole number >= 1, got None"),
        ({"hidden_size": "big"}, "hidden_size: expected a whole number >= 1, got 'big'"),
        ({"num_attention_heads": 0}, "num_heads: expected a whole number >= 1, got 0"),
    ],
)
def test_what_is_wrong_with_a_configuration(changes, sentence, tmp_path):
    config = CONFIGS["llama"] | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=sentence) as refusal:
        load_model(f"hf:{tmp_path}")
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


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
    spec = spec_from_hf(CONFIGS["qwen3"]).model_copy(update={"gated": False, "name": "odd"})
    with pytest.raises(InfeasibleError, match="model odd is of no Hugging Face family .*nearest is qwen3.* gated"):
        hf_config(spec)


def test_a_run_file_takes_a_directory(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": 300}))
    (tmp_path / "run.yaml").write_text("extends: tiny\nmodel: {preset: hf:llama, num_layers: 1}\n")
    resolved = load_run(None, tmp_path / "run.yaml", [])
    assert resolved.config.model == load_model("hf:llama", tmp_path).model_copy(update={"num_layers": 1})
    assert resolved.origins["model.hidden_size"] == "model hf:llama"
    by_flag = load_run("tiny", None, [("model", f"hf:{folder}")]).config.model
    assert by_flag == load_model(f"hf:{folder}")
    assert isinstance(by_flag, ModelSpec)
