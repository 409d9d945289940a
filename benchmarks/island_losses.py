"""Validation loss of islands beside that of synchronous training, at equal tokens.

`python -m benchmarks.island_losses [--preset demo] [--seeds 3] [--every 20] [--islands 2]`. Each way of training has
all steps of the preset, once for each seed, as `muster train` runs it; a line says the loss over that of data
parallelism with the same seed. Runs that `--folder` holds already aren't repeated, so that a benchmark that was
stopped goes on.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

EVAL_BATCHES = 64
"""Global batches of the validation split that a loss is averaged over."""

METHODS: dict[str, dict[str, str]] = {
    "diloco": {"method": "diloco"},
    "diloco average": {"method": "diloco", "optimizer": "sgd", "learning_rate": "1"},
    "diloco int8": {"method": "diloco", "compression": "int8"},
    "streaming": {"method": "streaming"},
    "dilocox int8": {"method": "dilocox", "compression": "int8"},
    "co2": {"method": "co2"},
    "diloco int4": {"method": "diloco", "compression": "int4"},
}
"""Keys of section `outer`, by what a row of the table is called."""


def validation_loss(name: str, args: argparse.Namespace, seed: int) -> float:
    """Train one way, unless its run is there, and return its last validation loss."""
    run = args.folder / f"{name.replace(' ', '-')}-{seed}"
    result = run / "result.json"
    if not result.exists():
        keys = {"seed": str(seed), "eval.batches": str(EVAL_BATCHES)}
        parallel = f"dp{args.islands}-fp32" if name == "synchronous" else f"isl{args.islands}-fp32"
        if name != "synchronous":
            keys |= {f"outer.{key}": value for key, value in METHODS[name].items()} | {"outer.every": str(args.every)}
        flags = [word for key, value in keys.items() for word in (f"--{key}", value)]
        command = [sys.executable, "-m", "muster", "train", "--preset", args.preset, "--parallel", parallel]
        command += ["--nproc", str(args.islands), "--run", str(run), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(result.read_text())["metrics"]["eval/loss"])


def main(argv: Sequence[str] | None = None) -> None:
    """Train every way with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/island-losses"))
    args = parser.parse_args(argv)
    losses: dict[str, list[float]] = {name: [] for name in ("synchronous", *METHODS)}
    for seed in range(args.seeds):
        for name, found in losses.items():
            found.append(validation_loss(name, args, seed))
            print(f"seed {seed}: {name} {found[-1]:.4f}", flush=True)
    print(f"{'':<14}  {'loss':>7}  over synchronous, by seed")
    for name, found in losses.items():
        ratios = [loss / whole - 1 for loss, whole in zip(found, losses["synchronous"], strict=True)]
        print(f"{name:<14}  {mean(found):7.4f}  {mean(ratios):+.1%} ({', '.join(f'{one:+.1%}' for one in ratios)})")


if __name__ == "__main__":
    main()
