"""Consoles for standard output: tables of any width, and the width of prose and pictures."""

import shutil
import sys
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_WIDTH = 80
"""Columns of prose and pictures where standard output is no terminal."""
_UNBOUNDED_WIDTH = 10_000
"""Width that no table reaches, in columns."""


def table_console() -> "Console":
    """Return a console for tables: as wide as the terminal; elsewhere each table row stays on one line.

    A table that is piped into a file or another program is read line by line, so its rows must not be folded.
    """
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNBOUNDED_WIDTH)


def wrap_text(text: str, width: int) -> str:
    """Return a paragraph in lines of at most `width` columns; only a longer word makes a longer line."""
    return fill(text, width, break_long_words=False, break_on_hyphens=False)


def text_width() -> int:
    """Return the columns for prose and pictures: those of the terminal, of $COLUMNS, or 80."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
