"""Loss of asynchronous pipelines over that of synchronous training at equal tokens, with and without compensation.

`python -m benchmarks.pipeline_staleness [--preset demo] [--steps 60] [--pp 6] [--lr 0.1] [--momentum 0.9]`. Each way
of training has the preset's model, data and batch, and SGD with momentum, at a constant learning rate after 5 steps of
warm-up and without clipping, which ranks that step alone can't do; those with adamw have the section `optim` of the
preset but for `--adamw-lr` and `--adamw-warmup`, and those with nesterov for `optim.nesterov` and `--beta1`. PipeDream
steps after each micro-batch, which is the whole batch: rank r of p uses weights that are p − 1 − r steps old. The ways
run on one process by the serial emulator that `muster verify` holds pipelines to, so that the number of ranks is free.
There are no flushes but one after the first step and, in longer ways, after 256 more.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from muster.config.load_config import load_run_config
from muster.config.run_config import RunConfig
from muster.spec.plan import Plan
from muster.train.data import open_dataset
from muster.train.verify.padded import PaddedDataset
from muster.train.verify.reference import Reference

LAST = 10
"""Last steps whose training losses are averaged."""


class Way(NamedTuple):
    """One way of training."""

    schedule: str
    compensation: str = "none"
    is_own: bool = False
    """True if the optimizer is the preset's own."""
    nesterov: bool = False


WAYS = {
    "synchronous": Way("1f1b"),
    "pipedream": Way("pipedream"),
    "pipedream, spike": Way("pipedream", "spike"),
    "pipedream, predict": Way("pipedream", "predict"),
    "backprop": Way("pipelined-backprop"),
    "backprop, spike": Way("pipelined-backprop", "spike"),
    "2bw": Way("pipedream-2bw"),
    "2bw, spike": Way("pipedream-2bw", "spike"),
    "2bw, predict": Way("pipedream-2bw", "predict"),
    "synchronous adamw": Way("1f1b", is_own=True),
    "synchronous adamw, nesterov": Way("1f1b", is_own=True, nesterov=True),
    "2bw adamw": Way("pipedream-2bw", is_own=True),
    "2bw adamw, predict": Way("pipedream-2bw", "predict", is_own=True),
    "2bw adamw, predict, nesterov": Way("pipedream-2bw", "predict", is_own=True, nesterov=True),
}


def losses_of(name: str, args: argparse.Namespace) -> list[float]:
    """Train one way and return the training loss of each step."""
    schedule, compensation, is_own, nesterov = WAYS[name]
    keys: dict[str, object] = {"train.steps": args.steps, "optim.delay_compensation": compensation}
    if nesterov:
        keys |= {"optim.nesterov": True, "optim.beta1": args.beta1}
    if is_own and args.adamw_lr is not None:
        keys["optim.lr"] = args.adamw_lr
    if is_own and args.adamw_warmup is not None:
        keys["optim.warmup_steps"] = args.adamw_warmup
    if not is_own:
        keys |= {"optim.warmup_steps": 5, "optim.min_lr_ratio": 1.0}
        keys |= {"optim.name": "sgd", "optim.lr": args.lr, "optim.momentum": args.momentum, "optim.clip_norm": 0.0}
        keys["optim.weight_decay"] = 0.0
    config = _config(args.preset, keys)
    batch = config.train.global_batch_size
    size = batch if schedule in ("pipedream", "pipelined-backprop") else max(1, batch // args.pp)
    while batch % size:
        size -= 1
    plan = Plan(
        pp=args.pp, schedule=schedule, precision="fp32", micro_batch_size=size, flush_every=min(args.steps, 256)
    )
    dataset = PaddedDataset(open_dataset(config, args.folder))
    stale = plan if plan.schedule_entry.is_asynchronous else None
    return Reference(config, "fp32", "tensorwise", size, dataset, stale).trace.losses


def _config(preset: str, keys: Mapping[str, object]) -> RunConfig:
    return load_run_config(preset, None, list(keys.items())).config


def main(argv: Sequence[str] | None = None) -> None:
    """Train every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pp", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--adamw-lr", type=float, help="in place of the preset's")
    parser.add_argument("--adamw-warmup", type=int, help="steps of warm-up, in place of the preset's")
    parser.add_argument("--beta1", type=float, default=0.95, help="of the ways with nesterov")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-staleness"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    print(f"{'':<28}  {'loss':>7}  over synchronous")
    for name in args.only:
        found[name] = mean(losses_of(name, args)[-LAST:])
        base = found.get("synchronous adamw" if WAYS[name].is_own else "synchronous")
        ratio = "" if base is None else f"{found[name] / base - 1:+.1%}"
        print(f"{name:<28}  {found[name]:7.4f}  {ratio}", flush=True)


if __name__ == "__main__":
    main()
