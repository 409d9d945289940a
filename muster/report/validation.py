"""Predictions against published measurements in the terminal."""

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from muster.report.validation_rows import (
    Cells,
    error_rows,
    outcome_rows,
    specified_rows,
    sweep_rows,
    unread_rows,
    worst_rows,
)
from muster.validate.summary import Summary


def validation_text(summary: Summary) -> Lines:
    """All scores, the worst rows, and what couldn't be predicted."""
    parts = [
        (f"{summary.overall.every.rows} rows, {summary.overall.every.predicted} predicted", error_rows(summary)),
        ("Rows that leave nothing open, and rows with an interval over what they do", specified_rows(summary)),
        ("Does it fit?", outcome_rows(summary)),
        ("Sweeps: is the order of layouts right?", sweep_rows(summary)),
        ("The worst rows", worst_rows(summary)),
        ("Not predicted", unread_rows(summary)),
    ]
    shown: list[Text | Table] = []
    for title, rows in parts:
        if len(rows) > 1:
            shown += [Text(("\n" if shown else "") + title, "bold"), _table(rows)]
    return Lines(*shown)


def _table(rows: Sequence[Cells]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table
