"""Tables of measurements: a row is one published result with its configuration."""

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean
from muster.validate.cells import (
    MAX_LAYERS,
    parse_inner_widths,
    parse_length,
    parse_measure,
    parse_most_chunks,
    parse_value,
    parse_whole,
)
from muster.validate.columns import (
    COLUMNS,
    ITERATION_MS,
    ITERATIONS_PER_S,
    LAST_METRICS,
    REQUIRED_COLUMNS,
    canonical_column,
    canonical_metric,
    metric_of_column,
)
from muster.validate.combined_cells import combined_column, counts_devices, fill_from_combined

_INTEGERS = (
    *("hidden", "heads", "kv_heads", "vocab", "n_experts", "top_k", "n_gpus", "gpus_per_node"),
    *("tp", "pp", "dp", "cp", "ep", "micro_batch", "global_batch"),
)
"""Columns of whole numbers."""
_FLOATS = ("params_b", "peak_mem_gb")
"""Columns of other numbers."""
_WORDS = (
    *("source", "url_or_repo", "model_name", "gpu", "intra_link", "inter_link", "zero", "etp", "sp"),
    *("recompute", "precision", "schedule", "attn_kernel", "compile", "async_tp", "software", "plan", "notes"),
)
"""Columns of free text."""

_OUT_OF_MEMORY = re.compile(
    r"(?<![a-z])(oom(s|ed)?|outofmemory(error)?|out[\s_-]of[\s_-](\w+ )?memory|(not enough|insufficient) (\w+ )?memory"
    r"|exceed\w* (\w+ )?memory|memory (error|exceeded|exhausted))(?![a-z])|^memory$",
    re.IGNORECASE,
)
_NOT_OUT_OF_MEMORY = re.compile(r"\b(no|not|non|without|never)[\s-]+(an?\s+)?(oom|out)", re.IGNORECASE)
SUCCESS = re.compile(
    r"ok|success(ful|fully|ed)?|succeeded|works?|worked|ran|runs|fits?|fitted|completed?|done|pass(ed)?|yes|true",
    re.IGNORECASE,
)
"""Values of an outcome that mean a run that worked, as a whole."""


def is_out_of_memory(said: str) -> bool:
    """Return True for a value that means an out-of-memory failure, such as `OOM` or `CUDA out of memory`."""
    return bool(_OUT_OF_MEMORY.search(said)) and not _NOT_OUT_OF_MEMORY.search(said)


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
    """Inner width of a dense MLP."""
    expert_hidden: int | None
    """Inner width of an expert."""
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
    etp: str
    """Tensor-parallel ranks of each expert: a number, or `tp`."""
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
    plan: str
    """Short name of a plan, which says what the columns of degrees and settings would."""
    notes: str
    assumed: str = ""
    """Column that the row leaves out, and what it is taken to be."""
    problem: str = ""
    """Cells that can't be read, each with what was found and expected; such a row is not scored."""

    @property
    def location(self) -> str:
        """Location such as `torchtitan.csv:3`."""
        return f"{self.file}:{self.line}"


def read_table(path: Path) -> list[MeasurementRow]:
    """Read the rows of a table. Raises ConfigError with file and line where the file is no such table."""
    return parse_table(read_table_text(path), path.name)


def read_table_text(path: Path) -> str:
    """Read the text of a table. Raises ConfigError where the file can't be read."""
    try:
        return _decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {(error.strerror or str(error)).lower()}") from None


def _decode(data: bytes) -> str:
    """Return a file's text: UTF-16 or UTF-32 where marks or zeros say so, else UTF-8, else what spreadsheets write in
    western Europe."""
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return data.decode("utf-32", errors="replace")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    head = data[:_LOOKED_AT]
    for encoding, zeros in (("utf-16-le", head[1::2]), ("utf-16-be", head[::2])):
        if zeros.count(0) > len(zeros) * 0.8:  # Latin letters without a mark
            return data.decode(encoding, errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


_LOOKED_AT = 512
"""Bytes of a file's head by which its encoding is told."""


def parse_table(text: str, file: str) -> list[MeasurementRow]:
    """Parse the rows of a table; `file` is its name in messages.

    Cells are separated by commas, or by semicolons, tabs or bars if the header is. What can't be read marks its row
    alone. Raises ConfigError for a wrong header.
    """
    header, lines = _header_and_lines(text)
    metrics = _metric_columns(header)
    said = ["n_gpus"] if counts_devices(header, (cells for _, cells in lines)) else []
    _check_header([*header, *said, *(("metric", "value") if metrics else ())], file)
    rows = list(_rows(lines, header, file, metrics))
    if not rows:
        raise ConfigError(f"{file}:1: the table has a header but no rows")
    return rows


def unread_columns(text: str) -> list[str]:
    """Return the columns of a table that say nothing to a prediction, each with the one that it may mean."""
    header, _ = _header_and_lines(text)
    absent = [name for name in COLUMNS if name not in header]
    known = {*COLUMNS, *_metric_columns(header), *filter(combined_column, header), ""}
    hints = {name: did_you_mean(name, absent) if len(name) > _MIN_HINTED else "" for name in header}
    return [name + hints[name].replace(";", ",").rstrip("?") for name in header if name not in known]


_MIN_HINTED = 4
"""Longest name of a column that says too little for a hint: `fsdp` isn't `sp`."""


_IGNORED_LINE = re.compile(r"\s*#|sep=.\s*$|[\s|:-]*--[\s|:-]*$", re.IGNORECASE)
"""Comments, the rule of a Markdown table, and what spreadsheets write of separators."""


def _is_ignored(line: str) -> bool:
    """Return True for comments and rules, but not for a header whose first column is called `#` or `#GPUs`."""
    names = {cell.strip().lower() for cell in re.split(r"[,;\t|]", line)}
    return bool(_IGNORED_LINE.match(line)) and not names >= set(REQUIRED_COLUMNS[:2])


def _header_and_lines(text: str) -> tuple[list[str], list[tuple[int, Sequence[str] | None]]]:
    """Return the names of a table's columns, and the numbered lines below without empty and ignored ones."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    plain = "\n".join("" if _is_ignored(line) else line for line in plain.split("\n"))
    first = next((line for line in plain.split("\n") if line.strip()), "")
    delimiter = next((mark for mark in ",;\t|" if mark in first), ",")
    lines = [(at, cells) for at, cells in _split_lines(plain, delimiter) if cells is None or any(map(str.strip, cells))]
    names = [] if not lines or lines[0][1] is None else lines[0][1]
    return [canonical_column(name) for name in names], lines[1:]


def _metric_columns(header: Sequence[str]) -> list[str]:
    """Return the columns that are called after a metric, where none is called `metric`."""
    found = [] if "metric" in header else [name for name in header if name not in COLUMNS and metric_of_column(name)]
    return sorted(found, key=lambda name: metric_of_column(name) in LAST_METRICS)


def _split_lines(text: str, delimiter: str) -> Iterator[tuple[int, Sequence[str] | None]]:
    """Yield the number and the cells of each line, and for a line that isn't CSV no cells.

    A quoted cell may span lines. Where quotes don't pair, or pair over lines that have other numbers of cells then,
    nothing says which do, so that lines are taken one by one.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    found: list[tuple[int, Sequence[str] | None]] = []
    line = 1
    try:
        for cells in reader:
            if reader.line_num > line and len(cells) != len(found[0][1] or () if found else cells):
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


def _check_header(header: list[str], file: str) -> None:
    """Raise ConfigError for missing or misspelled columns."""
    if not header:
        raise ConfigError(f"{file}:1: the table is empty, expected a header: {', '.join(COLUMNS)}")
    absent = [name for name in COLUMNS if name not in header]
    spare = [name for name in header if name not in COLUMNS]
    missing = [name for name in REQUIRED_COLUMNS if name in absent]
    if missing:
        hint = did_you_mean(missing[0], spare).replace("did you mean", "is it")
        raise ConfigError(f"{file}:1: the header lacks {_listed(missing)}{hint}")


def _rows(
    lines: Sequence[tuple[int, Sequence[str] | None]], header: list[str], file: str, metrics: Sequence[str]
) -> Iterator[MeasurementRow]:
    """Yield the rows below the header. Of the columns `metrics` the first with a value is the row's."""
    for number, (line, found) in enumerate(lines, 1):
        cells = [cell.strip() for cell in found or ()]
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        named, twice = _by_column(header, cells, number)
        named = fill_from_combined(named)
        if metrics:
            metric = next((name for name in metrics if named.get(name)), metrics[0])
            named |= {"metric": metric, "value": named.get(metric, "")}
        row = _row(named, file, line, number)
        if found is None:
            row = replace(row, problem=f"row {number}: not valid CSV, expected quotes in pairs around whole cells")
        elif twice:
            row = replace(row, problem=twice)
        elif len(cells) != len(header):
            problem = f"row {number}: found {len(cells)} cells, expected {len(header)}, as many as the header has"
            row = replace(row, problem=problem)
        yield row


def _by_column(header: Sequence[str], cells: Sequence[str], number: int) -> tuple[dict[str, str], str]:
    """Return the cells by column, and what is wrong where columns that are the same under two names say two things."""
    named: dict[str, str] = {}
    problem = ""
    for name, cell in zip(header, cells, strict=False):
        if name in COLUMNS and cell and named.get(name, cell) != cell:
            problem = f"row {number}, {name}: found '{named[name]}' and '{cell}' in two columns, expected one"
        named[name] = named.get(name) or cell
    return named, problem


_Parsed = TypeVar("_Parsed")


def _row(cells: dict[str, str], file: str, line: int, number: int) -> MeasurementRow:
    """Parse one row; unreadable cells are collected in `problem`."""
    cells = dict.fromkeys(COLUMNS, "") | cells
    problems: list[str] = []

    def parsed(name: str, parse: Callable[[str], _Parsed], otherwise: _Parsed) -> _Parsed:
        try:
            return parse(cells[name])
        except ValueError as error:
            problems.append(f"row {number}, {name}: {error}")
            return otherwise

    fields: dict[str, object] = {name: cells[name] for name in _WORDS}
    fields |= {name: parsed(name, parse_whole, None) for name in _INTEGERS}
    fields |= {name: parsed(name, parse_measure, None) for name in _FLOATS}
    layers = parsed("layers", lambda text: parse_whole(text, MAX_LAYERS), None)
    pp = fields["pp"]
    assert pp is None or isinstance(pp, int)
    fields |= {"layers": layers, "vpp": parsed("vpp", lambda text: parse_most_chunks(text, layers, pp), None)}
    fields["seq_len"] = parsed("seq_len", parse_length, None)
    fields["ffn_hidden"], fields["expert_hidden"] = parsed("ffn_hidden", parse_inner_widths, (None, None))
    fields |= {"source": cells["source"] or file, "assumed": cells.get("assumed", "")}
    metric, said = canonical_metric(cells["metric"]), cells["value"]
    if metric == "outcome" or is_out_of_memory(said):
        fields |= {"metric": "outcome", "value": None, "outcome": said}
        if not (is_out_of_memory(said) or SUCCESS.fullmatch(said)):
            problems.append(f"row {number}, value: found '{said}', expected OOM, or ok for a run that worked")
    else:
        value = parsed("value", lambda text: parse_value(text, metric), None)
        if metric in (ITERATION_MS, ITERATIONS_PER_S):
            time_s = None if value is None else value / 1e3 if metric == ITERATION_MS else 1 / value
            metric, value = "iteration_time_s", time_s
        fields |= {"metric": metric, "value": value, "outcome": ""}
    return MeasurementRow(file=file, line=line, number=number, problem="; ".join(problems), **fields)  # type: ignore[arg-type]


def _listed(names: list[str]) -> str:
    return f"the column{'s' if len(names) > 1 else ''} {', '.join(names)}"
