"""Progress bars on the standard error of a terminal."""

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import ProgressColumn


LINE_INTERVAL_S = 10.0
"""Seconds between lines that tell progress where there is no terminal."""


class _Progress:
    """Bar that is shown while the context lasts, where standard error is a terminal."""

    def __init__(self, label: str, auto_refresh: bool = True) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), self._count_column())
            console = Console(stderr=True)
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=auto_refresh
            )
            self._task = self._bar.add_task(label, total=None)

    def _count_column(self) -> "ProgressColumn":
        raise NotImplementedError

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()


class ByteProgress(_Progress):
    """Progress over the announced bytes; a context manager."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._total = 0

    def _count_column(self) -> "ProgressColumn":
        from rich.progress import DownloadColumn

        return DownloadColumn(binary_units=True)

    def add_total(self, nbytes: int) -> None:
        """Announce further bytes."""
        if self._bar:
            self._total += nbytes
            self._bar.update(self._task, total=self._total)

    def advance(self, nbytes: int) -> None:
        """Report bytes as done."""
        if self._bar:
            self._bar.advance(self._task, nbytes)


class RowProgress(_Progress):
    """Progress over the rows of a table; a context manager. Where standard error is no terminal, a line every 10 s."""

    def __init__(self, label: str) -> None:
        # Rows are predicted by forked processes; a thread that redraws the bar would make forks unsafe.
        super().__init__(label, auto_refresh=False)
        self._label = label
        self._told_s = monotonic()

    def _count_column(self) -> "ProgressColumn":
        from rich.progress import MofNCompleteColumn

        return MofNCompleteColumn()

    def update(self, done: int, total: int) -> None:
        """Report rows as done."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total, refresh=True)
        elif monotonic() - self._told_s >= LINE_INTERVAL_S:
            self._told_s = monotonic()
            print(f"{self._label}: {done} of {total}", file=sys.stderr, flush=True)
