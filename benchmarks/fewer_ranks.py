"""Steps after the loss of a rank that nobody replaces, beside the prediction of the plan that fewer ranks go on with.

    python -m benchmarks.fewer_ranks --plans dp4-z1 dp8-z1
    python -m benchmarks.fewer_ranks --plans dp4-mb14-z1 dp8-mb3-z1 --sleep

A rank of a run of the preset `tiny` under `train.elastic` without spares is killed. The processes that would come back
are stopped while they start, so that fewer ranks go on to the end. Prints the steps of the first plan, those since and
their prediction, from passes timed by the ranks that were left. With --sleep layers sleep for most of a pass of short
sequences (`benchmarks.sleeping_plugin`), so that ranks that share cores don't wait for them.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.recovery import ranks_of, wait_for_row
from muster.spec.plan_name import parse_plan_name

BATCH = 168
"""Global batch that 3, 4, 7 and 8 ranks divide."""


def main() -> None:
    """Measure each plan and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=["dp4-z1", "dp8-z1"])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--sleep", action="store_true", help="let layers sleep for most of a pass")
    args = parser.parse_args()
    for plan in args.plans:
        with tempfile.TemporaryDirectory() as folder:
            print(describe(measure(Path(folder) / "run", plan, args.steps, args.sleep), plan), flush=True)


def measure(run: Path, plan: str, steps: int, sleep: bool) -> Path:
    """Run a plan, kill one of its ranks after a few steps, and wait for the end; returns the run's directory."""
    command = [sys.executable, "-m", "muster", "train", "--preset", "tiny", "--run", str(run), "--parallel", plan]
    command += ["--train.steps", str(steps), "--train.global_batch_size", str(BATCH), "--train.elastic", "true"]
    command += ["--train.spares", "0", "--train.seq_len", "8" if sleep else "64"]
    command += ["--eval.batches", "1", "--train.sample_tokens", "0"]
    command += ["--plugins", "benchmarks.sleeping_plugin"] if sleep else []
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(3):
        wait_for_row(process, run, after=time.time())
    ranks = ranks_of(process.pid, "--rank")
    if len(ranks) != parse_plan_name(plan).world_size:
        raise SystemExit(f"{len(ranks)} ranks run, expected those of {plan}")
    os.kill(random.Random(plan).choice(ranks), signal.SIGKILL)
    over = threading.Event()

    def hold_back() -> None:
        held: set[int] = set()
        while not over.wait(0.002):
            with suppress(FileNotFoundError, ProcessLookupError):  # the job has ended meanwhile
                for pid in set(ranks_of(process.pid, "--spare")) - held:
                    os.kill(pid, signal.SIGSTOP)
                    held.add(pid)

    holder = threading.Thread(target=hold_back)
    holder.start()
    process.wait()
    over.set()
    holder.join()
    return run


def describe(run: Path, plan: str) -> str:
    """Return a line about the steps before and after the loss."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = json.loads((run / "recoveries.jsonl").read_text().splitlines()[0])
    before = [row["time/step"] for row in rows if 1 < row["step"] <= loss["step"]]
    since = [row["time/step"] for row in rows if row["step"] > loss["step"] + 2]
    step = json.loads((run / "result.json").read_text())["comparison"]["step"]
    predicted_s = step["predicted"]
    return (
        f"{plan}: step {median(before):.2f} s; {loss['world_size']} ranks since, step {median(since):.2f} s"
        f" ({min(since):.2f} to {max(since):.2f}), predicted {predicted_s:.2f} s:"
        f" {predicted_s / median(since):.2f} of the predicted throughput"
    )


if __name__ == "__main__":
    main()
