"""Hugging Face directories: config.json, safetensors files of one or several shards, tokenizer files."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.formats.mxfp4 import with_unpacked
from muster.checkpoint.formats.safetensors import SafetensorsFiles, write_header
from muster.checkpoint.tensors import TensorMeta, TensorSource, byte_view, split_into_boxes
from muster.data.tokenizer import TOKENIZER_FILES
from muster.data.tokenizer_files import GENERATION_CONFIG_FILE
from muster.spec.errors import ConfigError, MusterError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = WEIGHTS_FILE + ".index.json"

AUXILIARY_FILES = (GENERATION_CONFIG_FILE, *TOKENIZER_FILES)
"""Files of a complete directory other than configuration and weights, as far as its tokenizer has them."""


def open_weights(folder: Path) -> TensorSource:
    """Open the tensors of a directory, by their names in it; matrices in MXFP4 as bfloat16.

    Raises ConfigError if none can be read without running code, MusterError if shards are missing.
    """
    if (folder / INDEX_FILE).exists():
        try:
            names = sorted(set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise MusterError(f"{folder / INDEX_FILE} is damaged: expected a weight_map in JSON") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise MusterError(f"{folder} lacks {len(missing)} of the {len(names)} shards in {INDEX_FILE}: {missing[0]}")
        return with_unpacked(SafetensorsFiles(folder / name for name in names))
    if found := sorted(folder.glob("*.safetensors")):
        return with_unpacked(SafetensorsFiles(found))
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise ConfigError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when opened: expected"
            " *.safetensors (save_pretrained of transformers writes them)"
        )
    raise ConfigError(
        f"{folder} has a {CONFIG_FILE} but no weights: expected {WEIGHTS_FILE}, or shards and {INDEX_FILE}"
    )


def write_weights(
    folder: Path,
    tensors: TensorSource,
    max_shard_bytes: int,
    progress: Callable[[int], None],
    file_name: str = WEIGHTS_FILE,
) -> list[str]:
    """Write all tensors in shards of at most `max_shard_bytes` (at least one tensor each); return the files' names.
    `file_name` is that of a single one.

    Only a few parts of a tensor are in memory at once. `progress` receives the bytes of each part. Raises OSError, or
    what reading a tensor raises.
    """
    shards = list(_plan_shards(tensors.metas, max_shard_bytes))
    names = [file_name]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with open(folder / name, "wb") as out:
            write_header(out, shard.items())
            for tensor_name, meta in shard.items():
                for box in split_into_boxes(meta, buffer_bytes(max_shard_bytes)):
                    found = tensors.read(tensor_name, box).contiguous()
                    out.write(byte_view(found))
                    progress(found.nbytes)
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        total = sum(meta.nbytes for meta in tensors.metas.values())
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return names


def buffer_bytes(max_shard_bytes: int) -> int:
    """Return the largest part of a tensor to hold in memory at once, which is small beside a shard.

    It isn't smaller still because each part of a matrix that is transposed touches all of the stored matrix.
    """
    return min(max(max_shard_bytes // 32, 1 << 20), 64 << 20)


def _plan_shards(metas: Mapping[str, TensorMeta], max_bytes: int) -> Iterator[dict[str, TensorMeta]]:
    shard: dict[str, TensorMeta] = {}
    held = 0
    for name, meta in metas.items():
        if shard and held + meta.nbytes > max_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = meta
        held += meta.nbytes
    yield shard


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as `transformers` does: indented by two, keys sorted, a final newline. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer files for the tokenizer `bytes`

EOS_TOKEN = "<|endoftext|>"


def byte_tokenizer_files(max_positions: int | None) -> dict[str, dict[str, Any]]:
    """Return tokenizer.json and tokenizer_config.json of `muster.data.tokenizer.ByteTokenizer`, by file name.

    They describe a byte-level BPE model without merges, whose vocabulary is the characters that stand for the bytes.
    """
    characters = byte_characters()
    end = {
        "id": 256,
        "content": EOS_TOKEN,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(characters)} | {EOS_TOKEN: 256},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "clean_up_tokenization_spaces": False,
            **({"model_max_length": max_positions} if max_positions else {}),
        },
    }


def byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers use for each byte (GPT-2's table).

    Printable Latin-1 characters stand for their own byte; the other bytes are the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def dominant_dtype(metas: Mapping[str, TensorMeta]) -> str:
    """Return the torch name of the dtype that most elements have."""
    elements: dict[torch.dtype, int] = {}
    for meta in metas.values():
        elements[meta.dtype] = elements.get(meta.dtype, 0) + meta.numel
    return str(max(elements, key=lambda dtype: elements[dtype])).removeprefix("torch.")
