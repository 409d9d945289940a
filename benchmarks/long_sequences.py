"""Long sequences: a step of a million tokens on this machine, and plans for lengths up to 4M on H100s.

`--step` runs a tiny model's step over 1,048,576 tokens on four processes, with context parallelism and tiles, and
prints forecast, PyTorch's count, and the largest resident memory of a process. `--plans` asks `muster plan` for
Llama-3-8B at every length on every cluster, and prints a row each.
"""

import argparse
import json
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

MODEL = """vocab_size: 257
hidden_size: 64
num_layers: 1
num_heads: 2
num_kv_heads: 1
intermediate_size: 256
sliding_window: 1024
"""
STEP_PLAN, STEP_LENGTH = "cp4-mb1-fp32-tile16", 1 << 20
LENGTHS = {"32k": 1 << 15, "128k": 1 << 17, "512k": 1 << 19, "1M": 1 << 20, "4M": 1 << 22}
CLUSTERS = ("8xh100", "32xh100", "128xh100")
SEQUENCES = {"8xh100": 4, "32xh100": 4, "128xh100": 16}


def muster(*arguments: str) -> str:
    """Return what a verb prints."""
    found = subprocess.run([sys.executable, "-m", "muster", *arguments], capture_output=True, text=True, check=False)
    return found.stdout or found.stderr.strip().splitlines()[-1]


def run_step() -> None:
    """Print what a step of a million tokens holds."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model.yaml"
        model.write_text(MODEL)
        begin_s = perf_counter()
        plan = ("--plan", STEP_PLAN, "--seq-len", str(STEP_LENGTH), "--micro-batches", "1", "--on-device")
        print(muster("memory-check", "--model", str(model), *plan), end="")
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"largest process: {largest:.2f} GiB resident; {perf_counter() - begin_s:.0f} s with counting")


def plan_row(length: str, cluster: str) -> str:
    """Return a row of the table: the plan, its step, MFU and memory, and the seconds of the whole question."""
    sequences = SEQUENCES[cluster]
    question = ("--seq-len", str(LENGTHS[length]), "--global-batch", str(sequences), "--json")
    begin_s = perf_counter()
    text = muster("plan", "--model", "llama3-8b", "--cluster", cluster, *question)
    seconds = perf_counter() - begin_s
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        return f"| {length} | {cluster} | {sequences} | {text} | | | | {seconds:.0f} s |"
    best = answer["plans"][0]
    memory = best["memory_bytes"] / 2**30
    found = f"`{best['plan']}` | {best['step_time_s']:,.1f} s | {best['mfu']:.1%} | {memory:.1f} GiB"
    return f"| {length} | {cluster} | {sequences} | {found} | {seconds:.0f} s |"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", action="store_true", help="run the step of a million tokens")
    parser.add_argument("--plans", action="store_true", help="print the table of plans")
    args = parser.parse_args()
    if args.step:
        run_step()
    if args.plans:
        print(
            "| length | cluster | sequences | plan | step | MFU | memory | search |\n|---|---|---|---|---|---|---|---|"
        )
        for length, cluster in product(LENGTHS, CLUSTERS):
            print(plan_row(length, cluster), flush=True)


if __name__ == "__main__":
    main()
