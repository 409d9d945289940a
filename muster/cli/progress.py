"""Progress bar for work counted in bytes, on the standard error of a terminal."""

import sys
from types import TracebackType


class ByteProgress:
    """Progress over the announced bytes; a context manager."""

    def __init__(self, label: str) -> None:
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(binary_units=True))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=0)
            self._total = 0

    def __enter__(self) -> "ByteProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def add_total(self, nbytes: int) -> None:
        """Announce further bytes."""
        if self._bar:
            self._total += nbytes
            self._bar.update(self._task, total=self._total)

    def advance(self, nbytes: int) -> None:
        """Report bytes as done."""
        if self._bar:
            self._bar.advance(self._task, nbytes)
