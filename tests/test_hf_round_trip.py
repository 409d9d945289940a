"""Hugging Face directories: `transformers` and Muster compute the same, both ways, and every bit comes back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.checkpoint.formats.huggingface import byte_characters
from muster.checkpoint.model_directory import open_directory
from muster.cli.main import main
from muster.data.tokenizer import ByteTokenizer
from muster.interop.hf_config import load_hf_model, spec_from_hf_config
from muster.layout.tensor_layout import Box
from muster.model.decoder import Decoder
from muster.spec.model import ModelSpec
from tests.hf_models import CONFIGS, DENSE, EXPERTS, random_model
from tests.weights import make_run, read_weights, save_weights

TOLERANCE = 1e-5


def our_logits(spec: ModelSpec, weights: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    model = Decoder(spec, range(spec.num_layers), first=True, last=True).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return model(tokens_BS)


def their_logits(model: Any, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens_BS).logits


def opened(folder: Path) -> Any:
    """Open a directory as a user would; eager attention has the windows of all families."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def convert(source: Path, target: Path, kind: str, *more: str) -> Path:
    assert main(["checkpoint", "convert", str(source), str(target), "--to", kind, *more]) == 0
    return target


def some_tokens(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_in_and_out_again(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours = convert(tmp_path / "theirs", tmp_path / "ours", "muster")
    spec, weights = open_directory(ours).model, read_weights(ours)
    assert spec is not None
    tokens = some_tokens(spec.vocab_size)
    expected = their_logits(theirs, tokens)
    torch.testing.assert_close(our_logits(spec, weights, tokens), expected, rtol=TOLERANCE, atol=TOLERANCE)
    again = convert(ours, tmp_path / "again", "hf", "--max-shard-size", "30KB")
    assert len(list(again.glob("*.safetensors"))) > 1
    assert torch.equal(their_logits(opened(again), tokens), expected)
    back = read_weights(convert(again, tmp_path / "back", "muster"))
    assert list(back) == list(weights)
    assert all(torch.equal(back[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_out_and_in_again(name: str, tmp_path: Path) -> None:
    spec = spec_from_hf_config(CONFIGS[name], "test")
    step = save_weights(tmp_path / "checkpoints", spec)
    theirs = opened(convert(step, tmp_path / "hf", "hf"))
    tokens, weights = some_tokens(spec.vocab_size), read_weights(step)
    expected = our_logits(spec, weights, tokens)
    torch.testing.assert_close(their_logits(theirs, tokens), expected, rtol=TOLERANCE, atol=TOLERANCE)
    back = read_weights(convert(tmp_path / "hf", tmp_path / "back", "muster"))
    assert all(torch.equal(back[key], tensor) for key, tensor in weights.items())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in (*DENSE, *EXPERTS)])
def test_weights_that_do_not_run_yet_come_back_too(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    again = opened(convert(convert(tmp_path / "theirs", tmp_path / "ours", "muster"), tmp_path / "again", "hf"))
    tokens = some_tokens(CONFIGS[name]["vocab_size"])
    assert torch.equal(their_logits(again, tokens), their_logits(theirs, tokens))


def test_swapped_weights_would_be_noticed(tmp_path: Path) -> None:
    spec = spec_from_hf_config(CONFIGS["llama"], "test")
    weights = read_weights(save_weights(tmp_path / "checkpoints", spec))
    tokens = some_tokens(spec.vocab_size)
    expected = our_logits(spec, weights, tokens)
    k, v = "layers.1.attn.k.weight", "layers.1.attn.v.weight"
    swapped = our_logits(spec, weights | {k: weights[v], v: weights[k]}, tokens)
    assert not torch.allclose(swapped, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_tokenizer_of_a_run_that_reads_bytes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    hf = convert(make_run(tmp_path / "run"), tmp_path / "hf", "hf")
    theirs, ours = AutoTokenizer.from_pretrained(hf), ByteTokenizer()
    for text in ("def f(x):\n\treturn  x", "naïve — “quotes” 你好 🎉\r\n\0", "".join(map(chr, range(1, 400))), ""):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert theirs("a<|endoftext|>b")["input_ids"] == [97, ours.eos_id, 98]
    assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (ours.vocab_size, ours.eos_id, 64)
    assert len(set(byte_characters())) == 256
    model = opened(hf)
    assert model.generation_config.eos_token_id == ours.eos_id
    text = model.generate(**theirs("def ", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert text.shape == (1, 7)
    assert json.loads((hf / "config.json").read_text())["vocab_size"] == ours.vocab_size


def packed(weight_EIO: Tensor) -> dict[str, Tensor]:
    """Blocks and scales of numbers that MXFP4 has, by outputs."""
    grouped = weight_EIO.transpose(1, 2).unflatten(-1, (-1, 32))
    exponent = (grouped.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / torch.exp2(exponent)
    code = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1).to(torch.uint8) + 8 * (scaled < 0).to(torch.uint8)
    blocks = code[..., 0::2] | code[..., 1::2] << 4
    return {"_blocks": blocks, "_scales": (exponent.squeeze(-1) + 127).to(torch.uint8)}


def test_published_experts_in_mxfp4_are_read(tmp_path: Path) -> None:
    """Blocks and scales, and what `transformers` makes of them, are the same parameters; any part can be read."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    config = CONFIGS["gpt_oss"] | {"intermediate_size": 64, "num_hidden_layers": 1}
    spec = spec_from_hf_config(config, "test")
    folder = convert(save_weights(tmp_path / "checkpoints", spec), tmp_path / "plain", "hf")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        pair = packed(tensors.pop(name))
        tensors |= {name + suffix: tensor.contiguous() for suffix, tensor in pair.items()}
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    found = read_weights(convert(tmp_path / "packed", tmp_path / "ours", "muster"))
    for matrix, columns in {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}.items():
        name = f"model.layers.0.mlp.experts.{'down' if matrix == 'down' else 'gate_up'}_proj"
        whole = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        ours = found[f"layers.0.mlp.experts.{matrix}.weight"]
        assert torch.equal(ours, whole[..., columns].transpose(1, 2).to(ours.dtype)), matrix
    source = open_directory(tmp_path / "packed").stored
    part = source.read(f"{name}", Box((1, 33, 5), (2, 20, 9)))
    assert torch.equal(part, whole[1:3, 33:53, 5:14])


@pytest.mark.parametrize("max_shard_size", ["20KB", "1GB"])
def test_layers_for_further_tokens_that_were_not_saved_are_left_out(max_shard_size: str, tmp_path: Path) -> None:
    """transformers writes how many of them DeepSeek-V3 has, and never their weights."""
    theirs = random_model("deepseek_v3")
    theirs.config.num_nextn_predict_layers = 1
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    assert json.loads((tmp_path / "theirs/config.json").read_text())["num_nextn_predict_layers"] == 1
    spec = open_directory(convert(tmp_path / "theirs", tmp_path / "ours", "muster")).model
    assert spec is not None
    assert spec.mtp_layers == 0
    assert load_hf_model(tmp_path / "theirs") == spec
