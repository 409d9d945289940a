"""Header of a table: which of its columns say what, which aren't read, which are missing."""

from collections.abc import Sequence

from muster.spec.errors import ConfigError
from muster.validate.columns import (
    COLUMNS,
    LAST_METRICS,
    MEMORY_MB,
    REQUIRED_COLUMNS,
    THROUGHPUT,
    closest_name,
    metric_of_column,
)
from muster.validate.combined_cells import OTHER_COLUMNS, combined_column, device_in_words
from muster.validate.table_layout import TableText, read_layout


def with_devices(found: TableText) -> list[str]:
    """Return the header, in which a column of numbers of devices whose cells name devices is one of devices."""
    header = list(found.header)
    if "gpu" not in header and "n_gpus" in header:
        at = header.index("n_gpus")
        named = [cells[at] for _, cells in found.lines if cells and len(cells) > at and cells[at].strip()]
        if named and sum(bool(device_in_words(cell)) for cell in named) * 2 > len(named):
            header[at] = "gpu"
    return header


def unread_columns(text: str) -> list[str]:
    """Return the columns of a table that say nothing to a prediction, each with the one that it may mean."""
    header = with_devices(read_layout(text))
    metrics = metric_columns(header)
    said = {*header, *(("metric", "value") if metrics else ())}
    absent = [name for name in (*COLUMNS, *OTHER_COLUMNS) if name not in said]
    known = {*COLUMNS, *metrics, *memory_columns(header), *filter(combined_column, header), ""}
    unread = [name for name in header if name not in known]
    hints = {name: closest_name(name, absent) if len(name) > _MIN_HINTED else None for name in unread}
    return [f"{name}, did you mean '{hints[name]}'" if hints[name] else name for name in unread]


_MIN_HINTED = 4
"""Longest name of a column that says too little for a hint: `fsdp` isn't `sp`."""


def metric_columns(header: Sequence[str]) -> list[str]:
    """Return the columns that are called after a metric, where none is called `metric`."""
    if "metric" in header:
        return []
    found = [name for name in header if name not in COLUMNS and metric_of_column(name)]
    if not found and "value" not in header:
        found = [name for name in header if name in ("peak_mem_gb", THROUGHPUT)]
    return sorted(found, key=lambda name: metric_of_column(name) in LAST_METRICS)


def memory_columns(header: Sequence[str]) -> list[str]:
    """Return the columns of peak memory that have another name than `peak_mem_gb`, such as `memory_mib`."""
    of_memory = ("peak_memory_gb", MEMORY_MB)
    return [name for name in header if name not in COLUMNS and metric_of_column(name) in of_memory]


def check_header(header: list[str], file: str, line: int) -> None:
    """Raise ConfigError for missing or misspelled columns."""
    if not header:
        raise ConfigError(f"{file}:{line}: the table is empty, expected a header: {', '.join(COLUMNS)}")
    absent = [name for name in COLUMNS if name not in header]
    spare = [name for name in header if name not in COLUMNS]
    missing = [name for name in REQUIRED_COLUMNS if name in absent]
    if missing:
        meant = next((name for name in spare if len(name) > _MIN_HINTED and closest_name(name, missing)), None)
        hint = f"; is it '{meant}'?" if meant else ""
        raise ConfigError(f"{file}:{line}: the header lacks {_listed(missing)}{hint}")


def _listed(names: list[str]) -> str:
    return f"the column{'s' if len(names) > 1 else ''} {', '.join(names)}"
