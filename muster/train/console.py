"""Console output of a run: a progress bar in a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from muster.report.expert_load import load_in_words
from muster.spec.formatting import format_count, format_seconds


class TrainingDisplay:
    """Shows training step by step; as a context manager it restores the terminal whatever happens."""

    def __init__(self, total_steps: int, done_steps: int, visible: bool, lines_every: int = 10) -> None:
        self.console = Console(highlight=False)
        self.total_steps, self.lines_every = total_steps, lines_every
        self._progress: Progress | None = None
        if visible and sys.stdout.isatty():
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=done_steps, text="")

    def __enter__(self) -> "TrainingDisplay":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def print_line(self, sentence: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self.console.print(sentence, markup=False, soft_wrap=True)

    def step(self, row: dict[str, Any]) -> None:
        """Show one row of metrics."""
        number, speed = row["step"], row["perf/tokens_per_s"]
        mfu = f"{row['perf/mfu']:.1%}" if row["perf/mfu"] is not None else "n/a"
        loss, norm = (f"{row[key]:.4f}" if row[key] is not None else "nan" for key in ("train/loss", "train/grad_norm"))
        if self._progress:
            text = f"loss {loss}  {format_count(speed)} tok/s  mfu {mfu}"
            self._progress.update(self._task, completed=number, text=text)
        elif number % self.lines_every == 0 or number in (1, self.total_steps):
            eta = format_seconds((self.total_steps - number) * row["time/step"])
            self.console.print(
                f"step {number}/{self.total_steps} loss {loss} gnorm {norm} lr {row['train/lr']:.2e} "
                f"tok/s {format_count(speed)} mfu {mfu} step {format_seconds(row['time/step'])} eta {eta}"
                f"{load_in_words(row)}",
                soft_wrap=True,
            )
