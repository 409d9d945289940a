"""Files of a tokenizer, copied from directory to directory, and the special ids that they give a model."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from muster.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_FILES,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

GENERATION_CONFIG_FILE = "generation_config.json"
_CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE_FILE)


def copy_tokenizer(tokenizer: JsonTokenizer | SentencePieceTokenizer, folder: Path) -> Path:
    """Copy a tokenizer's files into `folder`, and return its main file there.

    With a `tokenizer.json` or `tokenizer.model` come all tokenizer files beside it; a file of another name gets that
    name, and only its configuration comes with it. Raises OSError.
    """
    main = tokenizer.path
    name = "tokenizer.model" if main.suffix == ".model" else "tokenizer.json"
    copy_files(
        main.parent, folder, (*TOKENIZER_FILES, GENERATION_CONFIG_FILE) if main.name == name else _CONFIGURATIONS
    )
    shutil.copyfile(main, folder / name)
    return folder / name


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy those of the files that exist. Raises OSError."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


# ----------------------------------------------------------------------------------------------------------------------
# Special ids


def special_token_ids(tokenizer: Tokenizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `eos_token_id`, `bos_token_id` and `pad_token_id` of a model that was trained with the tokenizer.

    `given` are those of a configuration that came with it, such as a generation_config.json, and hold if the token that
    ends documents is one of theirs: a dialogue model stops at several. Otherwise they are another tokenizer's.
    """
    own = {f"{name}_token_id": number for name, number in tokenizer.special_ids.items()}
    if tokenizer.eos_id not in _as_list(given.get("eos_token_id")):
        return own
    return own | {key: given[key] for key in own if given.get(key) is not None}


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a text: the tokenizer's, with those in the generation_config.json beside it."""
    given = {}
    if isinstance(tokenizer, JsonTokenizer | SentencePieceTokenizer):
        given = read_object(tokenizer.path.parent / GENERATION_CONFIG_FILE)
    return tuple(_as_list(special_token_ids(tokenizer, given)["eos_token_id"]))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# ----------------------------------------------------------------------------------------------------------------------
# For transformers


def settle_exported_tokenizer(folder: Path, tokenizer: Tokenizer, ids: Mapping[str, Any]) -> None:
    """Make the tokenizer files in `folder` say to `transformers` what the model was trained with.

    These are the special tokens, which a bare tokenizer.json lacks and a run may have chosen, and the token that begins
    each document, which is for the post-processor to add. Raises OSError.
    """
    path = folder / "tokenizer.json"
    if not isinstance(tokenizer, JsonTokenizer) or not path.is_file():
        return
    config = read_object(folder / "tokenizer_config.json")
    settled = config or {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    numbers = {"bos_token": ids["bos_token_id"], "pad_token": ids["pad_token_id"], "eos_token": tokenizer.eos_id}
    for key, number in numbers.items():
        named = settled.get(key)
        text = None if number is None else tokenizer.token_text(number)
        if text is not None and (named.get("content") if isinstance(named, dict) else named) != text:
            settled = {**settled, key: text}
    if settled != config:
        write_object(folder / "tokenizer_config.json", settled)
    if JsonTokenizer(path, tokenizer.token_text(tokenizer.eos_id)).bos_id != tokenizer.bos_id:
        content = read_object(path)
        text = None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
        bos = None if tokenizer.bos_id is None or text is None else (text, tokenizer.bos_id)
        content["post_processor"] = _post_processor(content.get("post_processor"), bos)
        write_object(path, content, indent=None)


def _post_processor(present: dict[str, Any] | None, bos: tuple[str, int] | None) -> dict[str, Any] | None:
    """Return a post-processor that puts the token before each text, or none; what else the present one does stays."""
    parts = present["processors"] if present and present["type"] == "Sequence" else [present] if present else []
    kept = [part for part in parts if part["type"] == "ByteLevel"]
    if bos is not None:
        token, number = bos
        special = {"SpecialToken": {"id": token, "type_id": 0}}
        first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        kept.append(
            {
                "type": "TemplateProcessing",
                "single": [special, first],
                "pair": [special, first, special, second],
                "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
            }
        )
    if len(kept) > 1:
        return {"type": "Sequence", "processors": kept}
    return kept[0] if kept else None


def write_object(path: Path, content: Mapping[str, Any], indent: int | None = 2) -> None:
    """Write an object as JSON. Raises OSError."""
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
