"""Rows of a data set as text segments: plain text, prompt and completion, or a dialogue.

Only completions and the assistant's answers contribute to the loss; prompts are read as context.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.data.chat import ChatTemplate
from muster.data.invalid_rows import InvalidRow

Segment = tuple[str, bool]
"""A piece of text, and True if its tokens contribute to the loss."""


@dataclass(frozen=True)
class RowReader:
    """Converter of rows to text segments.

    Without `text_key` a row is read by the first that it has of `messages`, `prompt` with `completion`, and `text`.
    """

    template: ChatTemplate
    text_key: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a row that are read."""
        return (self.text_key,) if self.text_key else ("messages", "prompt", "completion", "text")

    def segments(self, row: object) -> list[Segment]:
        """Return the segments of a row in order. Raises InvalidRow."""
        if not isinstance(row, Mapping):
            raise InvalidRow("fields", f"expected an object with {self._expected()}, got {_abbreviate(row)}")
        if self.text_key is None and row.get("messages") is not None:
            segments = self.template.segments(_require_messages(row["messages"]))
        elif self.text_key is None and row.get("prompt") is not None and row.get("completion") is not None:
            segments = [(_require_text(row, "prompt"), False), (_require_text(row, "completion"), True)]
        else:
            key = self.text_key or "text"
            if row.get(key) is None:
                raise InvalidRow(
                    "fields", f"expected {self._expected()}, the row has {', '.join(map(str, row)) or 'nothing'}"
                )
            segments = [(_require_text(row, key), True)]
        kept = [segment for segment in segments if segment[0]]
        if not any(counted for _, counted in kept):
            problem = "no part of it contributes to the loss" if kept else "the document is empty"
            raise InvalidRow("empty", problem)
        return kept

    def _expected(self) -> str:
        return self.text_key or "messages, prompt and completion, or text"


def _require_text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise InvalidRow("fields", f"{key} should be text, got {_abbreviate(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRow("encoding", f"{key} has an unpaired surrogate, which UTF-8 can't encode") from None
    return value


def _require_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRow("fields", f"messages should be a list of messages, got {_abbreviate(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRow("fields", f"each message should have a role and content, got {_abbreviate(message)}")
        _require_text({"content": message.get("content", "")}, "content")
    return value


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
