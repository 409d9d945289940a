"""Our decoder and `transformers` compute the same from the same weights, for dense families and gpt-oss, both ways."""

import copy

import pytest
import torch
from torch import Tensor, nn

from muster.interop.hf_config import hf_config_from_spec, spec_from_hf_config
from muster.interop.weight_map import hf_shapes, weight_map
from muster.model.decoder import Decoder
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.spec.model import ModelSpec
from tests.hf_models import CONFIGS, DENSE, random_model

TOLERANCE = 1e-5


def decoder_of(spec: ModelSpec) -> Decoder:
    return Decoder(spec, range(spec.num_layers), first=True, last=True)


@torch.no_grad()
def imported(spec: ModelSpec, hf: dict[str, Tensor], model_type: str | None = None) -> Decoder:
    model = decoder_of(spec)
    hf |= {"embed_out.weight": hf["lm_head.weight"]} if "lm_head.weight" in hf else {}  # as GPT-NeoX stores its head
    for link in weight_map(spec, model_type):
        part = hf[link.hf_name][link.hf_slices]
        part = part.mT if link.transposed else part
        model.get_parameter(link.name)[link.box.slices] = part.reshape(link.box.size)
    return model


@torch.no_grad()
def exported(spec: ModelSpec, model: nn.Module, model_type: str | None = None) -> dict[str, Tensor]:
    links = weight_map(spec, model_type)
    tensors = {name: torch.full(shape, torch.nan) for name, shape in hf_shapes(links).items()}
    for link in links:
        part = model.get_parameter(link.name)[link.box.slices]
        part = part.mT if link.transposed else part
        tensors[link.hf_name][link.hf_slices] = part.reshape(link.hf_box.size)
    return {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}


def tokens_for(spec: ModelSpec, seq: int = 33) -> Tensor:
    return torch.randint(spec.vocab_size, (2, seq), generator=torch.Generator().manual_seed(0))


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", [*DENSE, "gpt_oss"])
@torch.no_grad()
def test_their_weights_give_their_logits(name):
    spec, theirs = spec_from_hf_config(CONFIGS[name]), random_model(name)
    ours, tokens = imported(spec, theirs.state_dict(), CONFIGS[name]["model_type"]), tokens_for(spec)
    expected = theirs(tokens).logits
    assert difference(ours(tokens), expected) < TOLERANCE
    with KvCache(ours, torch.zeros(2, dtype=torch.int64), tokens.shape[1]) as cache:
        cache.read(tokens[:, :20])
        cache.read(tokens[:, 20:21])
        assert difference(cache.read(tokens[:, 21:]), expected[:, -1]) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama-biased", "mistral", "qwen3-yarn", "phi3", "smollm3", "olmo2", "gpt_neox", "gemma2", "gemma3_text"]
    + ["gpt_oss", "deepseek_v3-dense"],
)
def test_their_weights_give_their_gradients(name):
    spec, theirs = spec_from_hf_config(CONFIGS[name]), copy.deepcopy(random_model(name))
    ours, tokens = imported(spec, theirs.state_dict(), CONFIGS[name]["model_type"]), tokens_for(spec)
    for model, logits in ((ours, ours(tokens)), (theirs, theirs(tokens).logits)):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    hf = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    hf |= {"embed_out.weight": hf["lm_head.weight"]} if "lm_head.weight" in hf else {}
    size = max(float(grad.abs().max()) for grad in hf.values())
    for link in weight_map(spec, CONFIGS[name]["model_type"]):
        expected = hf[link.hf_name][link.hf_slices]
        expected = (expected.mT if link.transposed else expected).reshape(link.box.size)
        found = ours.get_parameter(link.name).grad[link.box.slices]
        assert float((found - expected).abs().max()) < TOLERANCE * size, link.name


@pytest.mark.parametrize("name", [*DENSE, "gpt_oss"])
@torch.no_grad()
def test_our_weights_give_our_logits(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = spec_from_hf_config(CONFIGS[name])
    ours, tokens = decoder_of(spec), tokens_for(spec)
    init_stage(ours, spec, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in ours.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    config = AutoConfig.for_model(**hf_config_from_spec(spec, CONFIGS[name]["model_type"]), pad_token_id=None)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = theirs.load_state_dict(exported(spec, ours, CONFIGS[name]["model_type"]), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if spec.tied_embeddings else set())
    theirs.tie_weights()
    assert difference(ours(tokens), theirs(tokens).logits) < TOLERANCE


@torch.no_grad()
def test_a_wrong_map_is_seen():
    """The comparison would see two tensors that change places."""
    spec, theirs = spec_from_hf_config(CONFIGS["gpt2"]), random_model("gpt2")
    ours, tokens = imported(spec, theirs.state_dict()), tokens_for(spec)
    q, k = (ours.get_parameter(f"layers.1.attn.{kind}.weight") for kind in "qk")
    q.data, k.data = k.data, q.data
    assert difference(ours(tokens), theirs(tokens).logits) > 100 * TOLERANCE
