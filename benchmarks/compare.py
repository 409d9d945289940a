"""Compares things that take turns in one run: interleaved rounds, medians with their spread, and ratios."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Spread:
    """Location of a list of values: median and quartiles."""

    median: float
    min: float
    max: float
    q1: float
    q3: float


def spread(samples: list[float]) -> Spread:
    """Median, extremes and quartiles. Raises ValueError without samples."""
    if not samples:
        raise ValueError("spread wants one sample at least")
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
    return Spread(median, min(samples), max(samples), q1, q3)


def interleave(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs A B C A B C …: what slows the machine for a while slows everyone. Returns each one's number by round."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            samples[name].append(run())
    return samples


@dataclass(frozen=True)
class Comparison:
    """One contest: by contestant, a number per round, of which more is better."""

    title: str
    unit: str
    subject: str
    """The contestant whose ratio to each other one is wanted."""
    samples: dict[str, list[float]]
    bars: dict[str, float]
    """Ratio that the subject should reach, by other contestant."""

    @property
    def peers(self) -> list[str]:
        return [name for name in self.samples if name != self.subject]

    def ratio_of_medians(self, peer: str) -> float:
        """Subject's median over the peer's."""
        return spread(self.samples[self.subject]).median / spread(self.samples[peer]).median

    def ratios_by_round(self, peer: str) -> Spread:
        """Ratio of the subject's value to the peer's in the same round."""
        pairs = zip(self.samples[self.subject], self.samples[peer], strict=True)
        return spread([ours / theirs for ours, theirs in pairs])


def print_comparison(comparison: Comparison) -> None:
    """A table: each contestant's median and spread, and the subject's ratio to it."""
    table = Table(title=comparison.title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in (comparison.unit, "min … max", "quartiles", f"{comparison.subject} ÷ it", "by round", "bar"):
        table.add_column(heading, justify="right")
    for name, samples in comparison.samples.items():
        at = spread(samples)
        cells = [f"{at.median:,.0f}", f"{at.min:,.0f} … {at.max:,.0f}", f"{at.q1:,.0f} … {at.q3:,.0f}"]
        if name != comparison.subject and comparison.subject in comparison.samples:
            ratio, rounds = comparison.ratio_of_medians(name), comparison.ratios_by_round(name)
            cells += [f"{ratio:.3f}", f"{rounds.median:.3f} ({rounds.q1:.3f} … {rounds.q3:.3f})"]
            if name in comparison.bars:
                bar = comparison.bars[name]
                cells.append(f"≥ {bar:.2f} {'met' if ratio >= bar else 'missed'}")
        table.add_row(name, *cells)
    console = Console()
    console.width = max(console.width, 118)
    console.print(table)


def machine() -> dict[str, Any]:
    """Return the machine's processor, cores, memory, load and versions."""
    return {
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "load average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")},
    }


def write_results(path: Path, comparisons: list[Comparison]) -> None:
    """Everything as JSON, with the date and the machine."""
    rows = []
    for comparison in comparisons:
        peers = comparison.peers if comparison.subject in comparison.samples else []
        ratios = {
            peer: {
                "of_medians": comparison.ratio_of_medians(peer),
                "by_round": asdict(comparison.ratios_by_round(peer)),
            }
            for peer in peers
        }
        spreads = {name: asdict(spread(samples)) for name, samples in comparison.samples.items()}
        rows.append({**asdict(comparison), "spread": spreads, "ratios": ratios})
    result = {"date": date.today().isoformat(), "machine": machine(), "comparisons": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


def _first_value(path: str, key: str) -> str | None:
    """The value of the first line 'key : value' of a file under /proc; None where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
