"""Megatron-LM's torch_dist checkpoints: names, stacked layers, fused matrices; nothing in them is run."""

import argparse
import enum
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from muster.checkpoint.model_directory import open_directory
from muster.cli.main import main
from muster.spec.model import ModelSpec
from tests.weights import expected_weights, read_weights

SPEC = ModelSpec(
    vocab_size=19,
    hidden_size=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=10,
    qkv_bias=True,
    max_positions=32,
    norm_eps=1e-6,
)


class Backend(enum.Enum):
    AUTO = 5


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("bomb"), "boom"))


ARGUMENTS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 10,
    "padded_vocab_size": 19,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "max_position_embeddings": 32,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": torch.float32,
    "attention_backend": Backend.AUTO,
    "callback": Bomb(),
}


def fused_qkv(weights: dict[str, Tensor], layer: int, leaf: str) -> Tensor:
    """The queries of a group of heads, its key and its value, group by group."""
    q, k, v = (weights[f"layers.{layer}.attn.{part}.{leaf}"] for part in "qkv")
    rows = []
    for group in range(2):
        rows += [q[group * 12 : (group + 1) * 12], k[group * 4 : (group + 1) * 4], v[group * 4 : (group + 1) * 4]]
    return torch.cat(rows)


def layer_tensors(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    own = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items()}
    return {
        "self_attention.linear_qkv.layer_norm_weight": own["attn_norm.weight"],
        "self_attention.linear_qkv.weight": fused_qkv(weights, layer, "weight"),
        "self_attention.linear_qkv.bias": fused_qkv(weights, layer, "bias"),
        "self_attention.linear_proj.weight": own["attn.o.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["mlp_norm.weight"],
        "mlp.linear_fc1.weight": torch.cat((own["mlp.gate.weight"], own["mlp.up.weight"])),
        "mlp.linear_fc2.weight": own["mlp.down.weight"],
    }


def write_torch_dist(folder: Path, stacked: bool = True, **changed: Any) -> Path:
    weights = expected_weights(SPEC)
    state = {
        "embedding.word_embeddings.weight": weights["embed.weight"],
        "decoder.final_layernorm.weight": weights["norm.weight"],
        "output_layer.weight": weights["head.weight"],
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(19, 12),
    }
    layers = [layer_tensors(weights, layer) for layer in range(2)]
    for name in layers[0]:
        if stacked:
            state[f"decoder.layers.{name}"] = torch.stack([layer[name] for layer in layers])
        else:
            state |= {f"decoder.layers.{index}.{name}": layer[name] for index, layer in enumerate(layers)}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    common = {"args": argparse.Namespace(**ARGUMENTS | changed), "iteration": 40, "checkpoint_version": 3.0}
    torch.save(common, folder / "common.pt")
    return folder


@pytest.mark.parametrize("stacked", [True, False])
def test_weights_and_model_are_read(stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_torch_dist(tmp_path / "run" / "iter_0000040", stacked)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("40")
    directory = open_directory(tmp_path / "run")
    assert (directory.format, directory.step) == ("megatron", 40)
    assert directory.model is not None
    assert directory.model.model_copy(update={"name": "custom"}) == SPEC
    wanted = expected_weights(SPEC)
    found = read_weights(tmp_path / "run")
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert main(["checkpoint", "convert", "run", "ours", "--to", "muster"]) == 0
    again = read_weights(tmp_path / "ours")
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())
    assert not (tmp_path / "bomb").exists(), "nothing in a pickle may be run"


def error_message(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["checkpoint", *arguments]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), (out, err)
    return err


def test_what_is_not_known_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = write_torch_dist(tmp_path / "experts", num_experts=8)
    assert "trained with num_experts 8, expected None" in error_message(capsys, 2, "inspect", str(experts))
    plain = write_torch_dist(tmp_path / "plain")
    (plain / "common.pt").unlink()
    said = error_message(capsys, 2, "convert", str(plain), str(tmp_path / "out"), "--to", "hf")
    assert "doesn't describe its model: give --model" in said
    (plain / "common.pt").write_bytes(b"nonsense")
    assert "common.pt is damaged" in error_message(capsys, 1, "inspect", str(plain))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert "names iter_0000007, but only torch_dist" in error_message(capsys, 2, "inspect", str(tmp_path))
