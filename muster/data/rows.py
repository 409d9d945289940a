"""Rows of a data set as text segments: plain text, prompt and completion, instruction and output, or a dialogue.

Only completions and the assistant's answers contribute to the loss; prompts are read as context.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from muster.data.chat import ASSISTANT, ChatTemplate
from muster.data.invalid_rows import InvalidRow

Segment = tuple[str, bool]
"""A piece of text, and True if its tokens contribute to the loss."""


class Row(NamedTuple):
    """A row as text segments in order."""

    segments: list[Segment]
    is_dialogue: bool = False
    """True if a chat template rendered it: then the template decides about the begin-of-document token."""


_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
"""Speakers of ShareGPT's dialogues → today's roles; others keep their name."""
_DIALOGUE_KEYS = ("messages", "conversations")
_EXPECTED = "messages or conversations, prompt and completion, instruction and output, or text"


@dataclass(frozen=True)
class RowReader:
    """Converter of rows to text segments.

    Without `text_key` a row is read by the first that it has of `messages` or `conversations`, `prompt` with
    `completion`, `instruction` with `output` (Alpaca), and `text`.
    """

    template: ChatTemplate
    text_key: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a row that are read."""
        if self.text_key:
            return (self.text_key,)
        return (*_DIALOGUE_KEYS, "system", "tools", "prompt", "completion", "instruction", "input", "output", "text")

    def row(self, row: object) -> Row:
        """Return a row as segments in order. Raises InvalidRow."""
        if not isinstance(row, Mapping):
            raise InvalidRow("fields", f"expected an object with {self._expected()}, got {_abbreviate(row)}")
        found = None if self.text_key else self._dialogue(row) or self._prompt(row)
        found = found or Row(self._text(row))
        kept = [segment for segment in found.segments if segment[0]]
        if not any(counted for _, counted in kept):
            problem = "no part of it contributes to the loss" if kept else "the document is empty"
            raise InvalidRow("empty", problem)
        return Row(kept, found.is_dialogue)

    def _dialogue(self, row: Mapping[str, Any]) -> Row | None:
        key = next((key for key in _DIALOGUE_KEYS if row.get(key) is not None), None)
        if key is not None:
            messages = _read_messages(key, row[key])
        elif row.get("instruction") is not None and row.get("output") is not None:
            question = [_require_text(row, name) for name in ("instruction", "input") if row.get(name)]
            messages = [
                {"role": "user", "content": "\n\n".join(question)},
                {"role": ASSISTANT, "content": _require_text(row, "output")},
            ]
        else:
            return None
        if row.get("system") and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": _require_text(row, "system")}, *messages]
        return Row(self.template.segments(messages, _read_tools(row.get("tools"))), is_dialogue=True)

    def _prompt(self, row: Mapping[str, Any]) -> Row | None:
        if row.get("prompt") is None or row.get("completion") is None:
            return None
        return Row([(_require_text(row, "prompt"), False), (_require_text(row, "completion"), True)])

    def _text(self, row: Mapping[str, Any]) -> list[Segment]:
        key = self.text_key or "text"
        if row.get(key) is None:
            raise InvalidRow(
                "fields", f"expected {self._expected()}, the row has {', '.join(map(str, row)) or 'nothing'}"
            )
        return [(_require_text(row, key), True)]

    def _expected(self) -> str:
        return self.text_key or _EXPECTED


def _require_text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InvalidRow("fields", f"{key} should be text, got {_abbreviate(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRow("encoding", f"{key} has an unpaired surrogate, which UTF-8 can't encode") from None
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Dialogues


def _read_messages(key: str, value: object) -> list[dict[str, Any]]:
    """Return messages with `role` and `content`; ShareGPT calls them `from` and `value`. Raises InvalidRow."""
    if not isinstance(value, list) or not value:
        raise InvalidRow("fields", f"{key} should be a list of messages, got {_abbreviate(value)}")
    return [_read_message(message) for message in value]


def _read_message(message: object) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" not in message and isinstance(speaker := message.get("from"), str):
        message = {"role": _SHAREGPT_ROLES.get(speaker, speaker), "content": message.get("value")}
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRow("fields", f"each message should have a role and content, got {_abbreviate(message)}")
    # Arrow fills the keys that a message lacks with nulls, which templates would take for values.
    found = {name: value for name, value in message.items() if value is not None}
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_read_tool_call(call) for call in calls] if isinstance(calls, list) else calls
    if isinstance(parts := found.get("content"), list):
        found["content"] = "".join(_text_part(part) for part in parts)
    _require_text({"content": found.setdefault("content", "")}, "content")
    return found


def _read_tool_call(call: object) -> object:
    """Return a tool call with its arguments as an object, which templates expect; OpenAI's are a text in JSON."""
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    if not isinstance(text := function.get("arguments"), str):
        return dict(call)
    return {**call, "function": {**function, "arguments": _parse("the arguments of a tool call", text)}}


def _read_tools(tools: object) -> list[Any] | None:
    """Return a row's tools, a list or a text in JSON; None where it has none. Raises InvalidRow."""
    if isinstance(tools, str):
        tools = _parse("tools", tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InvalidRow("fields", f"tools should be a list, got {_abbreviate(tools)}")
    return tools


def _parse(noun: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRow("fields", f"{noun} should be JSON, got {_abbreviate(text)}") from None


def _text_part(part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidRow("fields", f"content should be text, got {_abbreviate(part)}")
    return part["text"]


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
