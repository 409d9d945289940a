"""Time from the death of a rank to the next finished step: in the same processes, by a restart of all, by torchrun, and
of replicas under torchft.

    python benchmarks/recovery.py --plan dp4 --losses 4

Kills ranks of a run of the preset `tiny`, one after the other: under `train.elastic`; under `train.restarts` with an
in-memory checkpoint of each step; and under torchrun, which starts all ranks again, with a checkpoint of each step on
disk. Prints seconds from the kill to the next step that is logged, as medians. Where torchft is installed, as many
replicas of a plain loop go on without the one that is killed (`torchft_replicas.py`), with a smaller batch.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.torchft_replicas import kill_replicas
from muster.report.run_files import read_metrics
from muster.spec.plan_name import parse_plan_name

ELASTIC = ("--train.elastic", "true")
RESTARTS = ("--train.restarts", "3", "--train.in_memory_checkpoint_every", "1")
TORCHRUN = ("--train.save_every", "1")
PAUSE_S = 6.0
"""Time between a recovery and the next loss, in which spares start."""


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="dp4")
    parser.add_argument(
        "--losses", type=int, default=4, help="ranks to kill, one after another: at most as many as the plan has"
    )
    args = parser.parse_args()
    ranks = parse_plan_name(args.plan).world_size
    if not 0 < args.losses <= ranks:
        parser.error(f"--losses: expected 1 to {ranks}, as {args.plan} has ranks, got {args.losses}")
    ways = {"same processes": (ELASTIC, 0), "restart of all": (RESTARTS, 0), "torchrun's restart": (TORCHRUN, ranks)}
    first: float | None = None
    for name, (how, torchrun_ranks) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(run := Path(folder) / "run", args.plan, args.losses, how, torchrun_ranks)
            rows = read_metrics(run / "recoveries.jsonl")
        wait_s = median(found.waits_s)
        first = first or wait_s
        told = f"{args.plan}, {name}: next step logged after {wait_s:.2f} s ({spread(found.waits_s)})"
        print(f"{told}, {wait_s / first:.1f} times; a step takes {median(found.steps_s):.2f} s", flush=True)
        if joined := [row["joined_s"] for row in rows if row["joined_s"] is not None]:
            print(f"  all ranks together again after {median(joined):.2f} s ({spread(joined)})", flush=True)
    if find_spec("torchft") is not None:
        with tempfile.TemporaryDirectory() as folder:
            waits_s = kill_replicas(Path(folder), ranks, args.losses, PAUSE_S)
        print(f"{ranks} replicas, torchft: next step after {median(waits_s):.2f} s ({spread(waits_s)})")


class Measured:
    """Seconds of the losses of one run, and of its steps."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []
        self.steps_s: list[float] = []


def measure(run: Path, plan: str, losses: int, how: tuple[str, ...], torchrun_ranks: int = 0) -> Measured:
    """Run, kill a rank at random moments, and return how long each loss took; under torchrun with its ranks."""
    python = [sys.executable, "-m"]
    if torchrun_ranks:
        python += ["torch.distributed.run", "--standalone", "--max-restarts", str(losses)]
        python += ["--nproc-per-node", str(torchrun_ranks), "-m", "--"]
    command = [*python, "muster", "train", "--preset", "tiny", "--run", str(run), "--parallel", plan]
    command += ["--train.steps", "100000", "--eval.batches", "1", "--train.sample_tokens", "0", *how]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found, chance = Measured(), random.Random(0)
    try:
        for _ in range(losses):
            wait_for_row(process, run, after=time.time())
            time.sleep(PAUSE_S + chance.uniform(0, 1))
            victim = chance.choice(ranks_of(process.pid, "train" if torchrun_ranks else "--rank"))
            os.kill(victim, signal.SIGKILL)
            killed = time.time()
            time.sleep(0.1)  # rows that were under way
            found.waits_s.append(wait_for_row(process, run, after=killed + 0.1) - killed)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found.steps_s = [row["time/step"] for row in rows]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return found


def ranks_of(launcher: int, word: str) -> list[int]:
    """Return the processes of a launcher that have this word in their command, as those do that train, and others don't
    that wait for a rank's place."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if word in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            found.append(int(child))
    return found


def wait_for_row(process: subprocess.Popen[bytes], run: Path, after: float) -> float:
    """Wait until metrics.jsonl has grown after a time; returns when it had."""
    path = run / "metrics.jsonl"
    rows = count_rows(path)
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode}")
        now = count_rows(path)
        if now > rows and path.stat().st_mtime > after:
            return path.stat().st_mtime
        rows = min(now, rows)
        time.sleep(0.005)


def count_rows(path: Path) -> int:
    """Return the number of complete lines of a file; 0 while there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def spread(values: list[float]) -> str:
    """Return the range of values."""
    return f"{min(values):.2f} to {max(values):.2f}"


if __name__ == "__main__":
    main()
