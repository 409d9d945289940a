"""The glossary: every plan word, instruction, flag and run-file key with the words of other programs for it.

Meanings come from the code (docstrings, `--help`) or from glossary.yaml, which also has the words of Megatron-LM,
torchtitan and DeepSpeed. `python docs/glossary.py` writes glossary.md anew.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import yaml
from pydantic import BaseModel

from muster.cli.main import VERBS
from muster.cli.parser import Parser
from muster.config.run_config import RunConfig
from muster.schedule.action import KINDS
from muster.spec.plan_name import name_parts

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
from tables import docstrings  # noqa: E402

PROGRAMS = ("megatron", "torchtitan", "deepspeed")
_NONE = "–"
_INTRODUCTION = """\
# Glossary

Each word that Muster uses in plans, programs, flags and files, once, with the word that Megatron-LM, torchtitan and
DeepSpeed have for the same ("–": none, or nothing of the kind). `python docs/glossary.py` writes this page from the
code and from `docs/glossary.yaml`; [Concepts](concepts.md) explains the ideas. Former names are still read and say
their new name: `muster/config/migrations.py` has them all.
"""


class Entry(NamedTuple):
    """A line of the glossary."""

    term: str
    meaning: str
    peers: Mapping[str, str]


def page() -> str:
    """Return the whole page. Raises ValueError where glossary.yaml names what doesn't exist."""
    table = yaml.safe_load((FOLDER / "glossary.yaml").read_text(encoding="utf-8"))
    sections = {
        "Words": ("word", _words(table["words"])),
        "Plan names": ("part", _entries(dict.fromkeys(name_parts(), ""), table["plan_names"])),
        "Instructions": ("kind", _entries({n: k.explanation for n, k in KINDS.items()}, table["instructions"])),
        "Flags": ("flag", _entries(flags(), table["flags"])),
        "Keys of a run file": ("key", _entries(keys(), table["keys"])),
    }
    return "\n".join([_INTRODUCTION, *(_section(title, *both) for title, both in sections.items())])


def _words(table: Mapping[str, Mapping[str, str]]) -> list[Entry]:
    return [Entry(term, row["meaning"], row) for term, row in sorted(table.items(), key=lambda item: item[0].lower())]


def _entries(meanings: Mapping[str, str], table: Mapping[str, Mapping[str, str]]) -> list[Entry]:
    """Return a line for each term, its meaning from the table where the code has none."""
    if unknown := sorted(set(table) - set(meanings)):
        raise ValueError(f"glossary.yaml has {', '.join(unknown)}, which Muster doesn't have")
    found = []
    for term, meaning in meanings.items():
        row = table.get(term) or {}
        meaning = row.get("meaning", meaning)
        if not meaning:
            raise ValueError(f"glossary.yaml has no meaning of {term}")
        found.append(Entry(f"`{term}`", meaning, row))
    return found


def flags() -> dict[str, str]:
    """Return the help of each flag of all verbs, by flag; with the verbs where it means several things."""
    found: dict[str, dict[str, list[str]]] = {}
    for words in _commands():
        for action in _parser(words)._actions:
            for flag in action.option_strings:
                if flag.startswith("--"):
                    text = " ".join(str(action.help).split()) % {"default": action.default}
                    found.setdefault(flag, {}).setdefault(text, []).append(" ".join(words))
    return {
        flag: "; ".join(f"{text} ({', '.join(verbs)})" if len(texts) > 1 else text for text, verbs in texts.items())
        for flag, texts in sorted(found.items())
    }


def _commands() -> list[tuple[str, ...]]:
    """Return every command that takes flags, such as ("train",) and ("data", "prepare")."""
    found: list[tuple[str, ...]] = []
    for verb in VERBS:
        module = import_module(f"muster.cli.{verb.replace('-', '_')}")
        subcommands = getattr(module, "VERBS", None)
        found += [(verb, name) for name in subcommands] if subcommands else [(verb,)]
    return found


class _ParserBuiltError(Exception):
    """The parser of a command, ready to parse."""


def _parser(words: tuple[str, ...]) -> Parser:
    def stop(parser: Parser, *_: Any) -> None:
        raise _ParserBuiltError(parser)

    run: Callable[[list[str]], int] = import_module(f"muster.cli.{words[0].replace('-', '_')}").run
    with patch.object(Parser, "parse", stop):
        try:
            run(list(words[1:]))
        except _ParserBuiltError as built:
            return built.args[0]
    raise AssertionError(f"{words} parses nothing")


def keys() -> dict[str, str]:
    """Return the meaning of each key of a run file, by dotted key."""
    return dict(_keys(RunConfig, "", set()))


def _keys(type_: type[BaseModel], prefix: str, seen: set[type[BaseModel]]) -> Iterable[tuple[str, str]]:
    """Yield each key with its meaning; a section whose keys are already there is one key."""
    meanings = docstrings(type_)
    for key, field in type_.model_fields.items():
        new = [model for model in _models_in(field.annotation) if model not in seen]
        seen.update(new)
        if not new:
            yield f"{prefix}{key}", meanings.get(key, "")
        for model in new:
            yield from _keys(model, f"{prefix}{key}.", seen)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation such as `tuple[StageSpec, ...] | None` is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


def _section(title: str, head: str, entries: Iterable[Entry]) -> str:
    rows = [f"| {head} | meaning | Megatron-LM | torchtitan | DeepSpeed |", "|---|---|---|---|---|"]
    for entry in entries:
        cells = (entry.term, entry.meaning, *(_peer(entry.peers.get(name)) for name in PROGRAMS))
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return f"## {title}\n\n" + "\n".join(rows) + "\n"


def _peer(text: str | None) -> str:
    return text or _NONE


def main() -> None:
    (FOLDER / "glossary.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
