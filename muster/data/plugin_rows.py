"""Rows of a data set that a plugin registers."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muster.data.invalid_rows import InvalidRow, InvalidRowLog
from muster.data.rows import Row, RowReader
from muster.plugins.loader import error_location
from muster.plugins.registry import get_component
from muster.spec.errors import ConfigError, MusterError


def plugin_rows(
    name: str, file: Path, reader: RowReader, invalid: InvalidRowLog, max_bytes: int = 0
) -> Iterator[tuple[Row, int]]:
    """Yield (row, bytes of text) for each row of the registered data set `name`, whose code is in `file`.

    Stops after `max_bytes` of text (0: no limit). Raises ConfigError with the line where the plugin's function fails.
    """
    read_bytes = 0
    for number, row in enumerate(_iterate_plugin(name, file, get_component("dataset", name)), 1):
        try:
            found = reader.row({reader.text_key or "text": row} if isinstance(row, str) else row)
        except InvalidRow as problem:
            invalid.record(f"{name}: row {number}", problem)
            continue
        size_bytes = sum(len(text.encode()) for text, _ in found.segments)
        yield found, size_bytes
        read_bytes += size_bytes
        if max_bytes and read_bytes >= max_bytes:
            return


def _iterate_plugin(name: str, file: Path, make: Callable[[], Any]) -> Iterator[Any]:
    try:
        rows = make()
        if isinstance(rows, str | bytes | Mapping):
            raise ConfigError(f"data set {name}: expected documents one by one, got one {type(rows).__name__}")
        yield from rows
    except (MusterError, OSError):
        raise
    except Exception as error:
        raise ConfigError(f"data set {name}: {error_location(file, error)}: {type(error).__name__}: {error}") from error
