"""Tables of measurements: a row is one published result with its configuration."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

_INTEGERS = (
    *("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len", "n_experts", "top_k", "n_gpus", "gpus_per_node"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "micro_batch", "global_batch"),
)
"""Columns of whole numbers."""
_FLOATS = ("params_b", "peak_mem_gb")
"""Columns of other numbers."""
_WORDS = (
    *("source", "url_or_repo", "model_name", "ffn_hidden", "gpu", "intra_link", "inter_link", "zero", "sp"),
    *("recompute", "precision", "schedule", "attn_kernel", "compile", "async_tp", "software", "metric", "notes"),
)
"""Columns of free text."""
REQUIRED_COLUMNS = ("model_name", "seq_len", "gpu", "n_gpus", "tp", "pp", "global_batch", "metric", "value")
"""Columns that a table must have. A missing optional column counts as empty in every row."""
COLUMNS = (
    *("source", "url_or_repo", "model_name", "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads"),
    *("vocab", "seq_len", "n_experts", "top_k", "gpu", "n_gpus", "gpus_per_node", "intra_link", "inter_link"),
    *("tp", "pp", "vpp", "dp", "zero", "cp", "ep", "sp", "micro_batch", "global_batch", "recompute", "precision"),
    *("schedule", "attn_kernel", "compile", "async_tp", "software", "metric", "value", "peak_mem_gb", "notes"),
)
"""Columns that a header may have, in their usual order; others are ignored."""

OUT_OF_MEMORY = re.compile(r"oom|out.?of.?memory|memory", re.IGNORECASE)
"""Values that mean an out-of-memory failure."""
SUCCESS = re.compile(
    r"ok|success(ful|fully|ed)?|succeeded|works?|worked|ran|runs|fits?|fitted|completed?|done|pass(ed)?|yes|true",
    re.IGNORECASE,
)
"""Values of an outcome that mean a run that worked, as a whole."""

MAX_VALUE = 10**9
"""Largest degree, width or batch in a table."""
MAX_LAYERS = 10_000
"""Largest number of layers in a table."""


@dataclass(frozen=True)
class MeasurementRow:
    """One line of a table. Where the source states nothing, numbers are None and texts empty."""

    file: str
    line: int
    """Line in the file, counted from 1 with the header."""
    number: int
    """Number of the row, counted from 1 without the header."""
    source: str
    url_or_repo: str
    model_name: str
    params_b: float | None
    layers: int | None
    hidden: int | None
    ffn_hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    n_experts: int | None
    top_k: int | None
    gpu: str
    n_gpus: int | None
    gpus_per_node: int | None
    intra_link: str
    inter_link: str
    tp: int | None
    pp: int | None
    vpp: int | None
    dp: int | None
    zero: str
    cp: int | None
    ep: int | None
    sp: str
    micro_batch: int | None
    global_batch: int | None
    recompute: str
    precision: str
    schedule: str
    attn_kernel: str
    compile: str
    async_tp: str
    software: str
    metric: str
    value: float | None
    """Measured value; None for an outcome, which is a text."""
    outcome: str
    peak_mem_gb: float | None
    notes: str
    problem: str = ""
    """Cells that can't be read, each with what was found and expected; such a row is not scored."""

    @property
    def location(self) -> str:
        """Location such as `torchtitan.csv:3`."""
        return f"{self.file}:{self.line}"


def read_table(path: Path) -> list[MeasurementRow]:
    """Read the rows of a table. Raises ConfigError with file and line where the file is no such table."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a CSV table in UTF-8") from None
    return parse_table(text, path.name)


def parse_table(text: str, file: str) -> list[MeasurementRow]:
    """Parse the rows of a table; `file` is its name in messages.

    Cells are separated by commas, or by semicolons or tabs if the header is. A cell that can't be read marks its row
    alone. Raises ConfigError for a wrong header.
    """
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        _check_header(header, file)
        rows = list(_rows(reader, header, file))
    except csv.Error as error:
        raise ConfigError(f"{file}:{reader.line_num}: not valid CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{file}:1: the table has a header but no rows")
    return rows


def _check_header(header: list[str], file: str) -> None:
    """Raise ConfigError for missing, repeated or misspelled columns."""
    if not header:
        raise ConfigError(f"{file}:1: the table is empty, expected a header: {', '.join(COLUMNS)}")
    absent = [name for name in COLUMNS if name not in header]
    spare = [name for name in header if name not in COLUMNS]
    missing = [name for name in REQUIRED_COLUMNS if name in absent]
    if missing:
        hint = did_you_mean(missing[0], spare).replace("did you mean", "is it")
        raise ConfigError(f"{file}:1: the header lacks {_listed(missing)}{hint}")
    for name in spare:
        if hint := did_you_mean(name, absent):
            raise ConfigError(f"{file}:1: no column is called '{name}'{hint}")
    twice = [name for name in COLUMNS if header.count(name) > 1]
    if twice:
        raise ConfigError(f"{file}:1: the header names {_listed(twice)} twice")


def _rows(reader: Iterator[list[str]], header: list[str], file: str) -> Iterator[MeasurementRow]:
    """Yield the rows below the header; empty lines are skipped."""
    number = 0
    line = 1
    for cells in reader:
        first, line = line + 1, reader.line_num  # type: ignore[attr-defined]  # a quoted cell may span lines
        if not any(cell.strip() for cell in cells):
            continue
        number += 1
        cells = [cell.strip() for cell in cells]
        row = _row(dict(zip(header, cells, strict=False)), file, first, number)
        if len(cells) != len(header):
            problem = f"row {number}: found {len(cells)} cells, expected {len(header)}, as many as the header has"
            row = replace(row, problem=problem)
        yield row


def _row(cells: dict[str, str], file: str, line: int, number: int) -> MeasurementRow:
    """Parse one row; unreadable cells are collected in `problem`."""
    cells = dict.fromkeys(COLUMNS, "") | cells
    problems: list[str] = []

    def number_in(name: str, text: str, parse: Callable[[str, str], float | None] = _real) -> float | None:
        try:
            return parse(text, name)
        except ValueError as error:
            problems.append(f"row {number}, {name}: {error}")
            return None

    fields: dict[str, object] = {name: cells[name] for name in _WORDS}
    fields |= {name: number_in(name, cells[name], _whole) for name in _INTEGERS}
    fields |= {name: number_in(name, cells[name]) for name in _FLOATS}
    # "768 per expert": the number alone is the width.
    fields["ffn_hidden"] = number_in("ffn_hidden", cells["ffn_hidden"].split(" per ")[0], _whole)
    fields["source"] = cells["source"] or file
    said = cells["value"]
    if cells["metric"] == "outcome" or OUT_OF_MEMORY.search(said):
        fields |= {"metric": "outcome", "value": None, "outcome": said}
        if not (OUT_OF_MEMORY.search(said) or SUCCESS.fullmatch(said)):
            problems.append(f"row {number}, value: found '{said}', expected OOM, or ok for a run that worked")
    else:
        fields |= {"value": number_in("value", said), "outcome": ""}
    return MeasurementRow(file=file, line=line, number=number, problem="; ".join(problems), **fields)  # type: ignore[arg-type]


def _whole(text: str, name: str) -> int | None:
    """Parse a whole number; None for an empty cell. Raises ValueError with what was found and expected."""
    value = _real(text, name)
    if value is None:
        return None
    most = MAX_LAYERS if name == "layers" else MAX_VALUE
    if value != int(value) or not 1 <= value <= most:
        raise ValueError(f"found '{text}', expected a whole number from 1 to {most:,}")
    return int(value)


def _real(text: str, name: str) -> float | None:
    """Parse a number above 0; None for an empty cell. Raises ValueError with what was found and expected."""
    if not text:
        return None
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"found '{text}', expected a number above 0 without a unit")
    return value


def _listed(names: list[str]) -> str:
    return f"the column{'s' if len(names) > 1 else ''} {', '.join(names)}"
