"""Validation loss of islands beside that of synchronous training, at equal tokens.

`python -m benchmarks.island_losses [--preset demo] [--seeds 3] [--every 20] [--islands 2] [--warmup 80] [--only NAME]`.
Each way of training has all steps of the preset, or `--steps`, once for each seed, as `muster train` runs it; a line
says the loss over that of data parallelism with the same seed. `--warmup 80` of 300 steps is DiLoCo's share, 24,000 of
88,000 (arXiv:2311.08105 §3); 0 parts islands at once. Runs that `--folder` holds already aren't repeated, so that a
benchmark that was stopped goes on.
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
    "average": {"method": "diloco", "optimizer": "sgd", "learning_rate": "1"},
    "diloco 0.9 0.3": {"method": "diloco", "learning_rate": "0.9", "momentum": "0.3"},
    "streaming": {"method": "streaming"},
    "streaming 0.9 0.3": {"method": "streaming", "learning_rate": "0.9", "momentum": "0.3"},
    "diloco int8": {"method": "diloco", "compression": "int8"},
    "diloco int4": {"method": "diloco", "compression": "int4"},
    "diloco int4 0.9 0.3": {"method": "diloco", "compression": "int4", "learning_rate": "0.9", "momentum": "0.3"},
    "dilocox int8": {"method": "dilocox", "compression": "int8"},
    "dilocox int8 0.5 0": {"method": "dilocox", "compression": "int8", "learning_rate": "0.5", "momentum": "0"},
    "co2": {"method": "co2"},
    "co2 0.5 0": {"method": "co2", "learning_rate": "0.5", "momentum": "0"},
}
"""Keys of section `outer`, by what a row of the table is called; numbers are outer learning rate and momentum."""


def validation_loss(name: str, args: argparse.Namespace, seed: int) -> float:
    """Train one way, unless its run is there, and return its last validation loss."""
    is_whole = name == "synchronous"
    warmup = f"-warmup{args.warmup}" if args.warmup and not is_whole else ""
    run = args.folder / f"{name.replace(' ', '-')}{warmup}-{seed}"
    result = run / "result.json"
    if not result.exists():
        # Hashes of samples would make islands meet in every step.
        keys = {"seed": str(seed), "eval.batches": str(EVAL_BATCHES), "data.hash_samples": "false"}
        keys |= {"train.steps": str(args.steps), "optim.warmup_steps": "20"} if args.steps else {}
        parallel = f"dp{args.islands}-fp32" if is_whole else f"isl{args.islands}-fp32"
        if not is_whole:
            own = METHODS[name] | {"every": str(args.every), "warmup_steps": str(args.warmup)}
            keys |= {f"outer.{key}": value for key, value in own.items()}
        flags = [word for key, value in keys.items() for word in (f"--{key}", value)]
        command = [sys.executable, "-m", "muster", "train", "--preset", args.preset, "--parallel", parallel]
        command += ["--nproc", str(args.islands), "--run", str(run), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(result.read_text())["metrics"]["eval/loss"])


def main(argv: Sequence[str] | None = None) -> None:
    """Train every way with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=80)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--folder", type=Path, default=Path("runs/island-losses"))
    args = parser.parse_args(argv)
    losses: dict[str, list[float]] = {name: [] for name in ("synchronous", *args.only)}
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
