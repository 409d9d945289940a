"""`muster data`: make, inspect and check token stores."""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from muster.cli.parser import Parser, find_subcommand, positive_int
from muster.cli.progress import ByteProgress
from muster.report.token_stores import check_lines, marked_document, store_lines
from muster.spec.errors import ConfigError

SubcommandOutput = tuple[dict[str, Any], list[str], int]
"""JSON object, lines for people, exit code."""


def run(arguments: list[str]) -> int:
    """Run one of the subcommands below. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0
    (_, parse, act), rest = find_subcommand("data", VERBS, arguments)
    args = parse(rest)
    try:
        facts, lines, code = act(args)
    except ConfigError as error:
        raise ConfigError(keys_as_flags(str(error), _FLAGS)) from None
    print(json.dumps(facts) if args.json else "\n".join(lines))
    return code


def keys_as_flags(sentence: str, flags: Mapping[str, str]) -> str:
    """Return an error sentence with run-file keys below `data` replaced by a verb's flags."""
    return re.sub(r"(?<![\w/.-])data\.(\w+)", lambda key: flags.get(key[1], key[0]), sentence)


_FLAGS = {
    key: f"--{key.replace('_', '-')}" for key in ("tokenizer", "eos_token", "add_bos", "text_key", "chat_template")
}
"""Run-file keys below `data` → flags."""
_FLAGS |= {"source": "SOURCE", "on_invalid_row": "--on-invalid-row", "max_bytes": "--max-bytes"}

# ----------------------------------------------------------------------------------------------------------------------
# What the verbs do


def _prepare(args: argparse.Namespace) -> SubcommandOutput:
    """Make a token store, and an indexed data set of Megatron-LM where one is wanted."""
    from muster.api.data import prepare_data
    from muster.data.sources import source_files

    with ByteProgress("preparing") as bar:
        bar.add_total(min(args.max_bytes or 1 << 62, sum(file.size_bytes for file in source_files(args.source))))
        seen = 0

        def progress(done: int) -> None:
            nonlocal seen
            bar.advance(done - seen)
            seen = done

        facts = prepare_data(
            args.source,
            args.out,
            **_reading_arguments(args),
            on_invalid_row=args.on_invalid_row,
            max_bytes=args.max_bytes,
            workers=args.workers,
            megatron=args.megatron,
            progress=progress,
        )
    return facts, store_lines(facts), 0


def _inspect(args: argparse.Namespace) -> SubcommandOutput:
    """Describe a token store."""
    from muster.api.data import inspect_data

    facts = inspect_data(
        args.store,
        documents=args.documents,
        show=args.show,
        tokenizer=args.tokenizer,
        eos_token=args.eos_token,
        add_bos=args.add_bos,
    )
    lines = store_lines(facts)
    lines += [marked_document(number, parts) for number, parts in enumerate(facts.get("learned", ()), 1)]
    lines += [f"document {number}: {text!r}" for number, text in enumerate(facts.get("texts", ()), 1)]
    return facts, lines, 0


def _check(args: argparse.Namespace) -> SubcommandOutput:
    """Check a token store, or a source of one."""
    from muster.api.data import check_data

    facts = check_data(args.source, **_reading_arguments(args))
    return facts, check_lines(facts), 2 if facts.get("bad") else 0


def _tokenizer(args: argparse.Namespace) -> SubcommandOutput:
    """Train a tokenizer."""
    from muster.api.data import train_tokenizer

    facts = train_tokenizer(
        args.sources,
        args.out,
        vocab_size=args.vocab_size,
        max_bytes=args.max_bytes,
        on_invalid_row=args.on_invalid_row,
    )
    size = f"{facts['ids']:,} ids from {facts['bytes']:,} bytes, {facts['bytes_per_token']:.2f} bytes a token"
    return facts, [f"{facts['tokenizer']}: {size}"], 0


def _reading_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `_add_reading_flags`."""
    return {key: getattr(args, key) for key in ("tokenizer", "eos_token", "add_bos", "chat_template", "text_key")}


# ----------------------------------------------------------------------------------------------------------------------
# Arguments


def _parse_prepare(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        "data prepare",
        "Make a token store, which training reads directly. The same command resumes an interrupted one.",
    )
    parser.add_argument("source", metavar="SOURCE", help="a file, a directory, or python-stdlib")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="token store to write")
    _add_reading_flags(parser)
    _add_invalid_row_flag(parser)
    parser.add_argument("--max-bytes", type=positive_int, metavar="N", help="read at most N bytes of text and JSON")
    parser.add_argument("--workers", type=positive_int, metavar="N", help="processes (default: one per core)")
    parser.add_argument("--megatron", type=Path, metavar="PREFIX", help="also write PREFIX.bin and PREFIX.idx")
    return parser.parse(arguments)


def _parse_inspect(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("data inspect", "Show the contents of a token store.")
    parser.add_argument("store", type=Path, metavar="STORE", help="a token store made by prepare")
    parser.add_argument(
        "--documents", type=positive_int, metavar="N", help="show the beginnings of the first N documents"
    )
    parser.add_argument(
        "--show",
        type=positive_int,
        metavar="N",
        help="show the first N documents with all special tokens, and the tokens that are learned within «»",
    )
    parser.add_argument("--tokenizer", default="bytes", metavar="T", help="the store's tokenizer (default: bytes)")
    parser.add_argument("--eos-token", metavar="TOKEN", help="end-of-document token")
    _add_bos_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse(arguments)


def _parse_check(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("data check", "Read a whole token store or source, and report its errors.")
    parser.add_argument("source", metavar="STORE|SOURCE", help="a token store, or a source for prepare")
    _add_reading_flags(parser)
    return parser.parse(arguments)


def _parse_tokenizer(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("data tokenizer", "Train a byte-level BPE tokenizer on texts.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="files, directories, or python-stdlib")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--vocab-size", type=positive_int, required=True, metavar="N", help="largest number of ids, special tokens too"
    )
    parser.add_argument("--max-bytes", type=positive_int, metavar="N", help="read at most N bytes of each source")
    _add_invalid_row_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse(arguments)


def _add_invalid_row_flag(parser: Parser) -> None:
    parser.add_argument(
        "--on-invalid-row",
        choices=("stop", "skip"),
        default="stop",
        help="stop at an invalid row, or skip it (default: stop)",
    )


def _add_reading_flags(parser: Parser) -> None:
    """Add the flags that say how a source is read."""
    parser.add_argument(
        "--tokenizer", metavar="T", help="bytes (default), a tokenizer.json, its directory, or a *.model"
    )
    parser.add_argument(
        "--eos-token", metavar="TOKEN", help="end-of-document token, if the tokenizer's files don't name it"
    )
    _add_bos_flag(parser)
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template for dialogues")
    parser.add_argument("--text-key", metavar="KEY", help="key of a row's text")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bos_flag(parser: Parser) -> None:
    parser.add_argument(
        "--add-bos",
        type=_true_or_false,
        metavar="true|false",
        help="begin each document with the begin-of-document token (default: as the tokenizer does)",
    )


def _true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text == "true"


VERBS = {
    "prepare": ("make a token store from texts and tables", _parse_prepare, _prepare),
    "inspect": ("show the contents of a token store", _parse_inspect, _inspect),
    "tokenizer": ("train a tokenizer on texts", _parse_tokenizer, _tokenizer),
    "check": ("read a whole store or source, and report its errors", _parse_check, _check),
}
"""Subcommand → summary, parser of its arguments, action."""


def _help() -> str:
    verbs = "".join(f"  {verb:<10} {explanation}\n" for verb, (explanation, _, _) in VERBS.items())
    return f"usage: muster data VERB …\n\n{verbs}\n'muster data VERB --help' explains a verb.\n"
