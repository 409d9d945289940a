"""Header and lines of a table as people paste them: below a title, in boxes, with two rows of names, from LaTeX."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.validate.cells import clean_cell, is_nothing
from muster.validate.columns import COLUMNS, REQUIRED_COLUMNS, canonical_column, metric_of_column
from muster.validate.combined_cells import combined_column

Line = tuple[int, Sequence[str] | None]
"""Number of a line in the file, and its cells; None where it isn't CSV."""


@dataclass(frozen=True)
class TableText:
    """A table's text, cut into cells."""

    title: str
    """Lines above the header."""
    header: list[str]
    """Names of the columns, as Muster calls them."""
    header_line: int
    lines: list[Line]
    """Lines below the header without empty and ignored ones."""
    delimiter: str = ","
    """Mark between cells."""


_TITLE_LINES = 30
"""Most lines above a header."""
_NAMES_OF_HEADER = 3
"""Fewest names of columns by which a line is known as a header that isn't the first."""
_IGNORED_LINE = re.compile(
    r"\s*#|sep=.\s*$|[\s|:+=-]*(--|==)[\s|:+=-]*$|\s*\\[a-z]+(\{(?:[^{}&]|\{[^{}&]*\})*\})*\s*$|\s*```", re.IGNORECASE
)
"""Comments, rules of Markdown, text and LaTeX tables, and what spreadsheets write of separators."""
_BOX_BORDER = re.compile(r"[\s─━═┄┅┈┉╌╍┌-╬╭-╰▏]+$")
_BOX_BARS = str.maketrans(dict.fromkeys("│┃║┆┊", "|"))
_UNITS = frozenset(("", "tokens", "sequences", "samples", "s", "ms", "sec", "gb", "gib", "pct", "b", "hours", "w"))
"""Units below the names of columns."""


def read_layout(text: str) -> TableText:
    """Return the header and the lines of a table's text."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n").translate(_BOX_BARS)
    if "\\\\" in plain and "&" in plain:
        plain = re.sub(r"(?m)^[ \t]*%.*$|(?<=\\\\)[ \t]*%.*$", "", plain)  # comments of LaTeX
    plain = re.sub(r"[ \t]*\\\\[ \t]*(?=\n|$)", "", plain)  # ends of LaTeX' rows
    raw = ["" if _is_ignored(line) else line for line in plain.split("\n")]
    at, delimiter = _find_header(raw)
    if delimiter == "  ":
        raw = [re.sub(r" {2,}|\t", "\t", line.strip()) for line in raw]
        delimiter = "\t"
    title = "\n".join(line for line in plain.split("\n")[:at] if line.strip())
    body = "\n".join([*[""] * at, *raw[at:]])
    lines = [(at, cells) for at, cells in _split_lines(body, delimiter) if cells is None or any(map(str.strip, cells))]
    if not lines or lines[0][1] is None:
        return TableText(title, [], 1, lines[1:])
    header_line, names = lines[0]
    assert names is not None
    rest = [line for line in lines[1:] if line[1] != names]  # the header again, where pages were joined
    names = [clean_cell(name) for name in names]
    if rest and (joined := _joined_names(names, rest[0][1])):
        names, rest = joined, rest[1:]
    return TableText(title, [canonical_column(name) for name in names], header_line, rest, delimiter)


def _is_ignored(line: str) -> bool:
    """Return True for comments and rules, but not for a header whose first column is called `#` or `#GPUs`."""
    if line.strip() and _BOX_BORDER.match(line):
        return True
    names = {cell.strip().lower() for cell in re.split(r"[,;\t|]", line)}
    if not _IGNORED_LINE.match(line) or names >= set(REQUIRED_COLUMNS[:2]):
        return False
    return _names_known(re.split(r"[,;\t|]", line)) < _NAMES_OF_HEADER


def _find_header(lines: Sequence[str]) -> tuple[int, str]:
    """Return the index of the header and what separates its cells: the first line with several names of columns, else
    the first one that isn't empty."""
    filled = [at for at, line in enumerate(lines) if line.strip()][:_TITLE_LINES]
    for at in filled:
        counts = {mark: _names_known(_split_cells(lines[at], mark)) for mark in (",", ";", "\t", "|", "&", "  ")}
        best = max(counts, key=lambda mark: counts[mark])
        if counts[best] >= _NAMES_OF_HEADER:
            upper = next((one for one in reversed(filled) if one < at), at)
            is_upper = _is_upper_row(_split_cells(lines[upper], best), _split_cells(lines[at], best))
            return (upper if is_upper else at), best
    first = filled[0] if filled else 0
    line = lines[first] if filled else ""
    return first, next((mark for mark in ",;\t|" if mark in line), ",")


def _is_upper_row(upper: Sequence[str], lower: Sequence[str]) -> bool:
    """Return True for a row of groups of columns above their names, such as `Model,GPU,Parallelism,,Throughput`."""
    empty = sum(not cell.strip() for cell in upper)
    return len(upper) == len(lower) > 2 and empty > 0 and not any(map(_is_number, upper)) and any(map(str.strip, upper))


def _split_cells(line: str, mark: str) -> list[str]:
    """Return the cells of a line, roughly: quotes aren't looked at."""
    return re.split(r" {2,}|\t", line.strip()) if mark == "  " else line.split(mark)


def _names_known(cells: Sequence[str]) -> int:
    """Return how many different columns or metrics cells name."""
    return len({canonical_column(clean_cell(cell)) for cell in cells if _is_known(clean_cell(cell))})


def _is_known(name: str) -> bool:
    found = canonical_column(name)
    return found in COLUMNS or bool(combined_column(found)) or metric_of_column(name) is not None


def _is_number(cell: str) -> bool:
    return bool(re.match(r"[~≈$]?\d", clean_cell(cell)))


def _joined_names(upper: Sequence[str], found: Sequence[str] | None) -> list[str] | None:
    """Return the names of a header of two rows; None where the second row is the first of the data."""
    if found is None or len(found) != len(upper):
        return None
    lower = [clean_cell(cell) for cell in found]
    if any(map(_is_number, lower)) or not any(lower):
        return None
    joined = [_joined_name(*pair) for pair in zip(upper, lower, strict=True)]
    return None if None in joined else [name or "" for name in joined]


def _joined_name(upper: str, lower: str) -> str | None:
    """Return one name of two, one below the other; None where the second is no name or unit."""
    if not lower or is_nothing(lower):
        return upper
    if _is_known(f"{upper} {lower}") and not _is_known(lower):
        return f"{upper} {lower}"
    if _is_known(lower):
        return upper if _is_known(upper) and lower.lower() in _UNITS else lower
    return upper if _is_known(upper) and lower.lower().strip("()[]") in _UNITS else None


def _split_lines(text: str, delimiter: str) -> Iterator[Line]:
    """Yield the number and the cells of each line, and for a line that isn't CSV no cells.

    A quoted cell may span lines. Where quotes don't pair, or pair over lines that have other numbers of cells then,
    nothing says which do, so that lines are taken one by one.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    found: list[Line] = []
    line = 1
    try:
        for cells in reader:
            if reader.line_num > line and len(cells) != len(next((one[1] for one in found if one[1]), cells)):
                raise csv.Error
            found.append((line, cells))
            line = reader.line_num + 1
    except csv.Error:
        found = [(number, _cells_of(one, delimiter)) for number, one in enumerate(text.split("\n"), 1)]
    yield from found


def _cells_of(line: str, delimiter: str) -> Sequence[str] | None:
    """Return the cells of one line; None where it isn't CSV."""
    try:
        return next(csv.reader([line], strict=True, delimiter=delimiter), [])
    except csv.Error:
        return None
