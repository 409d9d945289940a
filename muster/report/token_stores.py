"""Token stores as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def store_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines printed by `muster data inspect` and `prepare`."""
    lengths = facts["document_tokens"]
    tokens = facts["tokens"]
    lines = [
        f"store       {facts['store']}",
        f"source      {facts['source']}",
        f"tokenizer   {facts['tokenizer']}" + (f", {facts['vocab_size']:,} ids" if facts["vocab_size"] else ""),
        f"tokens      {tokens:,} ({facts['dtype']}, {_counted(facts['shards'], 'shard')})",
        f"documents   {facts['documents']:,}; tokens each: mean {lengths['mean']:,.1f},"
        f" median {lengths['median']:,.0f}, 90 % up to {lengths['p90']:,.0f}, longest {lengths['max']:,}",
    ]
    if facts["counted_tokens"] != tokens:
        share = facts["counted_tokens"] / tokens
        lines.append(f"learned     {facts['counted_tokens']:,} tokens ({share:.1%}); the loss ignores the others")
    if facts["skipped"]:
        lines.append(f"skipped     {skipped_rows_text(facts['skipped'])}")
    return lines


def marked_document(number: int, parts: Sequence[Mapping[str, Any]]) -> str:
    """Return a document's text with what is learned within «»; `parts` are the texts of the facts `learned`."""
    marked = (f"«{part['text']}»" if part["learned"] else part["text"] for part in parts)
    return f"document {number}: {''.join(marked)}"


def skipped_rows_text(skipped: Mapping[str, int]) -> str:
    """Format skipped rows as `3 invalid rows (2 json, 1 empty)`."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(skipped.items()))
    return f"{_counted(sum(skipped.values()), 'invalid row')} ({kinds})"


def check_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the lines printed by `muster data check`."""
    what = facts.get("store") or facts["source"]
    size = f"{_counted(facts['documents'], 'document')}, {facts['tokens']:,} tokens"
    if not facts.get("bad"):
        return [f"{what} is sound: {size}"]
    shown = list(facts["examples"])
    if (hidden := sum(facts["bad"].values()) - len(shown)) > 0:
        shown.append(f"… and {hidden:,} more")
    return [*shown, f"{what} has {skipped_rows_text(facts['bad'])}; the rest: {size}"]


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
