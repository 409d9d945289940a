"""Tables of measurements: a row is one published result with its configuration."""

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from muster.spec.errors import ConfigError
from muster.validate.cells import (
    MAX_LAYERS,
    clean_cell,
    has_decimal_commas,
    in_megabytes,
    is_dotted,
    is_nothing,
    parse_inner_widths,
    parse_length,
    parse_memory,
    parse_most_chunks,
    parse_parameters,
    parse_value,
    parse_whole,
    with_decimal_point,
)
from muster.validate.columns import (
    COLUMNS,
    ITERATION_MS,
    ITERATIONS_PER_S,
    MEMORY_MB,
    canonical_metric,
    metric_of_column,
    metric_with_unit,
)
from muster.validate.combined_cells import (
    counts_devices,
    device_in_words,
    fill_from_combined,
)
from muster.validate.table_header import check_header, memory_columns, metric_columns, with_devices
from muster.validate.table_layout import TableText, read_layout

_INTEGERS = (
    *("hidden", "heads", "kv_heads", "vocab", "n_experts", "top_k", "n_gpus", "gpus_per_node"),
    *("tp", "pp", "dp", "cp", "ep", "micro_batch"),
)
"""Columns of whole numbers."""
_WHOLE = (*_INTEGERS, "layers", "ffn_hidden", "seq_len", "global_batch")
"""Columns whose numbers are whole, whatever else their cells may say."""
_WORDS = (
    *("source", "url_or_repo", "model_name", "gpu", "intra_link", "inter_link", "zero", "etp", "sp"),
    *("recompute", "precision", "schedule", "attn_kernel", "compile", "async_tp", "software", "plan", "notes"),
)
"""Columns of free text."""

_OUT_OF_MEMORY = re.compile(
    r"(?<![a-z])(oom(s|ed)?|o\.o\.m\.?|out[\s_-]?of[\s_-]?mem(ory(error)?)?|out[\s_-]of[\s_-](\w+ )?memory"
    r"|(not enough|insufficient) (\w+ )?memory|exceed\w* (\w+ )?memory|memory (error|exceeded|exhausted))(?![a-z])"
    r"|^memory$",
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
    open_degrees: bool = False
    """True where the table has no columns for tp and pp."""
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

    Cells are separated by commas, semicolons, tabs, bars, `&` or several spaces, as the header's are; a title may stand
    above it, and its names may take two rows. What can't be read marks its row alone. Raises ConfigError for a wrong
    header.
    """
    found = read_layout(text)
    header, lines = with_devices(found), found.lines
    metrics = metric_columns(header)
    said = ["n_gpus"] if counts_devices(header, (cells for _, cells in lines)) else []
    device = "" if "gpu" in header else device_in_words(found.title)
    said += ["gpu"] if device else []
    at = found.header_line
    check_header([*header, *said, *(("metric", "value") if metrics else ())], file, at)
    rows = list(_rows(found, header, file, metrics, device))
    if not rows:
        raise ConfigError(f"{file}:{at}: the table has a header but no rows")
    return rows


_MERGED = ("model_name", "params_b", "gpu", "n_gpus", "nodes", "gpus_per_node", "seq_len", "global_batch")
"""Columns whose cells often span rows."""


def _rows(
    found: TableText, header: list[str], file: str, metrics: Sequence[str], device: str
) -> Iterator[MeasurementRow]:
    """Yield the rows below the header. Of the columns `metrics` the first with a value is the row's; `device` is what
    the title says where no column does."""
    above: dict[str, str] = {}
    in_commas = found.delimiter == ";" and has_decimal_commas(_numbers(found, header))
    of_memory = memory_columns(header)
    for number, (line, read) in enumerate(found.lines, 1):
        cells = [clean_cell(cell) for cell in read or ()]
        while len(cells) > len(header) and not cells[-1]:
            cells.pop()
        named, twice = _by_column(header, cells, number)
        if in_commas:
            named = {name: text if name in _WORDS else with_decimal_point(text) for name, text in named.items()}
        if device:
            named |= {"gpu": device}
        if len(cells) == len(header):
            named = _unmerged(named, above)
            above = named
        named = fill_from_combined(named)
        for name in of_memory:
            if named.get(name) and not named.get("peak_mem_gb"):
                in_mb = metric_of_column(name) == MEMORY_MB
                named["peak_mem_gb"] = in_megabytes(named[name]) if in_mb else named[name]
        if metrics:
            filled = (name for name in metrics if named.get(name) and not is_nothing(named[name]))
            metric = next(filled, metrics[0])
            named |= {"metric": metric, "value": named.get(metric, "")}
            if metric == "peak_mem_gb" or metric in of_memory:
                named["peak_mem_gb"] = ""
        if device:
            named["assumed"] = "; ".join(filter(None, (named.get("assumed"), f"gpu {device}, from above the table")))
        row = _row(named, file, line, number)
        if read is None:
            row = replace(row, problem=f"row {number}: not valid CSV, expected quotes in pairs around whole cells")
        elif twice:
            row = replace(row, problem=twice)
        elif len(cells) != len(header):
            problem = f"row {number}: found {len(cells)} cells, expected {len(header)}, as many as the header has"
            row = replace(row, problem=problem)
        elif sum(map(bool, cells)) == 1 < len(cells) - 1:
            alone = next(filter(None, cells))
            row = replace(row, problem=f"row {number}: '{alone}' stands alone, expected a cell for each column")
        yield row


def _numbers(found: TableText, header: Sequence[str]) -> Iterator[str]:
    """Yield the cells of columns that aren't free text; dots between thousands of whole numbers count as commas do."""
    for _, cells in found.lines:
        for name, cell in zip(header, cells or (), strict=False):
            if name not in _WORDS:
                plain = clean_cell(cell)
                yield plain.replace(".", "") + ",0" if name in _WHOLE and is_dotted(plain) else plain


def _unmerged(named: dict[str, str], above: dict[str, str]) -> dict[str, str]:
    """Return a row's cells with those of the row above where a cell spans both: a row without a model or a device, of
    which more than a title is left, goes on with what stands above."""
    spans = [name for name in ("model_name", "gpu") if name in named and not named[name] and above.get(name)]
    if not spans or sum(bool(text) for text in named.values()) < _FEWEST_CELLS:
        return named
    taken = [name for name in _MERGED if name in named and not named[name] and above.get(name)]
    if "model_name" not in spans:
        taken = [name for name in taken if name in ("gpu", "n_gpus", "nodes", "gpus_per_node")]
    said = f"{', '.join(taken)} as in the row above"
    return named | {name: above[name] for name in taken} | {"assumed": said}


_FEWEST_CELLS = 2
"""Fewest cells of a row that goes on with cells above it; a row with one is a title."""


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
    fields["params_b"] = parsed("params_b", parse_parameters, None)
    ran_out = is_out_of_memory(cells["peak_mem_gb"])
    fields["peak_mem_gb"] = None if ran_out else parsed("peak_mem_gb", parse_memory, None)
    layers = parsed("layers", lambda text: parse_whole(text, MAX_LAYERS), None)
    pp = fields["pp"]
    assert pp is None or isinstance(pp, int)
    fields |= {"layers": layers, "vpp": parsed("vpp", lambda text: parse_most_chunks(text, layers, pp), None)}
    fields["seq_len"] = parsed("seq_len", parse_length, None)
    fields["global_batch"] = parsed("global_batch", parse_length, None)
    fields["ffn_hidden"], fields["expert_hidden"] = parsed("ffn_hidden", parse_inner_widths, (None, None))
    fields |= {"source": cells["source"] or file, "assumed": cells.get("assumed", "")}
    fields["open_degrees"] = bool(cells.get("open_degrees"))
    metric, said = metric_with_unit(canonical_metric(cells["metric"]), cells["value"])
    if metric == MEMORY_MB:
        metric, said = "peak_memory_gb", in_megabytes(said)
    if ran_out and (not said or is_nothing(said)):
        said = cells["peak_mem_gb"]
    elif ran_out and not is_out_of_memory(said):
        problems.append(f"row {number}, peak_mem_gb: found '{cells['peak_mem_gb']}' beside '{said}', expected one")
    if metric == "outcome" or is_out_of_memory(said):
        fields |= {"metric": "outcome", "value": None, "outcome": said}
        if not (is_out_of_memory(said) or SUCCESS.fullmatch(said)):
            problems.append(f"row {number}, value: found '{said}', expected OOM, or ok for a run that worked")
    else:
        value = parsed("value", lambda _: parse_value(said, metric), None)
        if metric in (ITERATION_MS, ITERATIONS_PER_S):
            time_s = None if value is None else value / 1e3 if metric == ITERATION_MS else 1 / value
            metric, value = "iteration_time_s", time_s
        fields |= {"metric": metric, "value": value, "outcome": ""}
    return MeasurementRow(file=file, line=line, number=number, problem="; ".join(problems), **fields)  # type: ignore[arg-type]
