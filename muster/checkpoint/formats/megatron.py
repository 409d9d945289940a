"""Megatron-LM checkpoints of the format `torch_dist`.

A torch.distributed.checkpoint folder with the names and shapes of Megatron-Core's GPTModel, and `common.pt`, a pickle
with the training's arguments. Layouts as of Megatron-LM in August 2026 (megatron/core/dist_checkpointing,
transformer/attention.py and mlp.py):

* layers are stacked in a leading dimension, or numbered in the names;
* linear_qkv has, for each group of heads, the rows of its queries, then its key, then its value;
* linear_fc1 has the gate's rows before the up matrix's;
* norms are named after the matrix that follows them.
"""

import json
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.checkpoint.formats.safe_unpickle import InertRecord, read_pickle
from muster.interop.families.weight_link import WeightLink
from muster.layout.tensor_layout import Box
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec, parameter_shapes

TRACKER_FILE = "latest_checkpointed_iteration.txt"
_METADATA_FILE, _COMMON_FILE = "metadata.json", "common.pt"


def is_torch_dist(folder: Path) -> bool:
    """Return True if a torch.distributed.checkpoint folder is one of Megatron-LM."""
    try:
        return json.loads((folder / _METADATA_FILE).read_bytes())["sharded_backend"] == "torch_dist"
    except (OSError, ValueError, LookupError, TypeError):
        return False


def latest_iteration(path: Path) -> Path:
    """Return the checkpoint that the tracker file of a directory names. Raises ConfigError if it can't be read."""
    word = (path / TRACKER_FILE).read_text().strip()
    folder = path / (f"iter_{int(word):07d}" if word.isdecimal() else word)
    if not is_torch_dist(folder):
        raise ConfigError(f"{path / TRACKER_FILE} names {folder.name}, but only torch_dist checkpoints can be read")
    return folder


class _InertObject(InertRecord):
    """Object that accepts anything a pickle does with it, without effect."""

    def __call__(self, *args: object) -> "_InertObject":
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass


class _AnyName(Mapping[tuple[str, str], Any]):
    """Mapping of every name in a pickle to an inert record, except for plain containers."""

    def __getitem__(self, key: tuple[str, str]) -> Any:
        known = {("collections", "OrderedDict"): OrderedDict, ("builtins", "dict"): dict, ("builtins", "set"): set}
        return known.get(key) or type(key[1], (_InertObject,), {})

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def __len__(self) -> int:
        return 0


def read_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments of the training that wrote a checkpoint, and its `iteration`; empty if there are none.

    Raises MusterError if the file is damaged.
    """
    path = folder / _COMMON_FILE
    if not path.exists():
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            (described,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            common = read_pickle(archive.read(described), _AnyName(), lambda _: None)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise MusterError(f"{path} is damaged: expected a file of torch.save") from error
    except MusterError as error:
        raise MusterError(f"{path}: {error}") from error
    arguments = vars(common["args"]) if isinstance(common, dict) and isinstance(common.get("args"), InertRecord) else {}
    return arguments | ({"iteration": common["iteration"]} if "iteration" in common else {})


_SUPPORTED_ARGUMENTS: dict[str, Any] = {
    "num_experts": None,
    "multi_latent_attention": False,
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "squared_relu": False,
    "apply_query_key_layer_scaling": False,
    "mtp_num_layers": None,
    "hybrid_override_pattern": None,
}
"""Arguments of which only this value, or None for one that isn't set, is supported."""


def spec_from_arguments(arguments: Mapping[str, Any], folder: Path) -> ModelSpec:
    """Return the model that a training's arguments describe. Raises ConfigError if it isn't supported."""
    for key, known in _SUPPORTED_ARGUMENTS.items():
        if (value := arguments.get(key, known)) not in (known, None, 0):
            raise ConfigError(f"{folder} was trained with {key} {value}, expected {known}: nothing else is known")
    try:
        return ModelSpec.model_validate(_spec_fields(arguments) | {"name": folder.resolve().parent.name})
    except KeyError as error:
        raise ConfigError(f"{folder / _COMMON_FILE} lacks the argument {error.args[0]}: give --model") from None
    except ValidationError as error:
        raise ConfigError(
            f"{folder / _COMMON_FILE} describes no model that is known: {error.errors()[0]['msg']}"
        ) from None


def _spec_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelSpec."""
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    swiglu, bias = bool(arguments.get("swiglu")), bool(arguments.get("add_bias_linear", True))
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention", True) else None
    position = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
    # GELU in Megatron-LM is exact without bias fusion, and the tanh approximation with it (bias_gelu_fusion).
    tanh = arguments.get("openai_gelu") or (arguments.get("bias_gelu_fusion") and bias)
    return {
        "vocab_size": arguments["padded_vocab_size"],
        "hidden_size": hidden,
        "num_layers": arguments["num_layers"],
        "num_heads": heads,
        "num_kv_heads": groups or heads,
        "head_dim": arguments.get("kv_channels") or hidden // heads,
        "intermediate_size": arguments["ffn_hidden_size"],
        "norm": "rms" if arguments.get("normalization") == "RMSNorm" else "layer",
        "norm_eps": arguments.get("norm_epsilon") or arguments.get("layernorm_epsilon") or 1e-5,
        "position": position.get(arguments["position_embedding_type"], arguments["position_embedding_type"]),
        "max_positions": arguments.get("max_position_embeddings"),
        "rope_theta": float(arguments.get("rotary_base") or 10_000),
        "activation": "silu" if swiglu else "gelu_tanh" if tanh else "gelu",
        "gated": swiglu,
        "qkv_bias": bias or bool(arguments.get("add_qkv_bias")),
        "out_bias": bias,
        "mlp_bias": bias,
        "qk_norm": bool(arguments.get("qk_layernorm")),
        "tied_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Names

_OUTER_NAMES = {
    "embed.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}
_LAYER_NAMES = {
    "attn_norm.": "self_attention.linear_qkv.layer_norm_",
    "mlp_norm.": "mlp.linear_fc1.layer_norm_",
    "attn.q_norm.": "self_attention.q_layernorm.",
    "attn.k_norm.": "self_attention.k_layernorm.",
    "attn.o.": "self_attention.linear_proj.",
    "mlp.down.": "mlp.linear_fc2.",
}


def megatron_weight_map(spec: ModelSpec, stacked: bool) -> Iterator[WeightLink]:
    """Yield the tensor and box of each part of each parameter; `stacked`: one tensor holds all layers of a matrix."""
    for name, shape in parameter_shapes(spec):
        if name in _OUTER_NAMES:
            yield WeightLink(name, _whole(shape), _OUTER_NAMES[name], _whole(shape))
            continue
        _, layer, part = name.split(".", 2)
        for box, theirs, first in _layer_boxes(spec, part, shape):
            rest = (0,) * (len(shape) - 1)
            if stacked:
                start, size = (int(layer), first, *rest), (1, *box.size)
                yield WeightLink(name, box, f"decoder.layers.{theirs}", Box(start, size))
            else:
                yield WeightLink(name, box, f"decoder.layers.{layer}.{theirs}", Box((first, *rest), box.size))


def _layer_boxes(spec: ModelSpec, part: str, shape: tuple[int, ...]) -> Iterator[tuple[Box, str, int]]:
    """Yield the boxes of a layer's parameter, each with its tensor in the checkpoint and its first row there."""
    module, _, leaf = part.rpartition(".")
    if module in ("attn.q", "attn.k", "attn.v"):
        per_group = spec.num_heads // spec.num_kv_heads
        rows = spec.head_dim * (per_group if module == "attn.q" else 1)
        within = {"attn.q": 0, "attn.k": per_group, "attn.v": per_group + 1}[module] * spec.head_dim
        for group in range(spec.num_kv_heads):
            box = Box((group * rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:]))
            yield box, f"self_attention.linear_qkv.{leaf}", group * (per_group + 2) * spec.head_dim + within
    elif module in ("mlp.gate", "mlp.up"):
        first = spec.intermediate_size if module == "mlp.up" and spec.gated else 0
        yield _whole(shape), f"mlp.linear_fc1.{leaf}", first
    else:
        start = next(known for known in _LAYER_NAMES if part.startswith(known))
        yield _whole(shape), _LAYER_NAMES[start] + part.removeprefix(start), 0


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)
