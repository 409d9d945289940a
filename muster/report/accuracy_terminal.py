"""Terminal tables of predictions against published measurements."""

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from muster.report.accuracy_rows import Cells, Section, sections
from muster.report.console import DEFAULT_WIDTH, wrap_text
from muster.validate.summary import Summary


def accuracy_text(summary: Summary, width: int = DEFAULT_WIDTH) -> Lines:
    """Return all scores, the worst rows, and the rows that weren't predicted; sentences are wrapped at `width`."""
    return section_text(sections(summary), width)


def section_text(shown: Sequence[Section], width: int = DEFAULT_WIDTH) -> Lines:
    """Return tables with their titles and summary sentences, which are wrapped at `width`."""
    lines: list[Text | Table] = []
    for title, rows, sentence in shown:
        lines += [Text(("\n" if lines else "") + title, "bold"), _table(rows)]
        if sentence:
            lines.append(Text(wrap_text(sentence, width), "dim"))
    return Lines(*lines)


def _table(rows: Sequence[Cells]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table
