"""Flags that `muster plan` and `muster predict` share: model, cluster and step."""

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muster.api.defaults import FRAMEWORK_NAMES, SEQ_LEN
from muster.cli.parser import Override, Parser, number, positive_int, sequence_length, whole_number
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.config.outer_config import OuterConfig
    from muster.planner.training_cost import TrainingConditions

TRAINING_FLAGS = ("tokens", "mtbf", "batch_ramp", "recovery", "restart_time", "spares", "repair_time")
"""Attributes of the flags that `add_training_flags` adds; None where a flag isn't given."""


def outer_steps_of(overrides: list[Override]) -> "OuterConfig | None":
    """Return the outer steps that flags such as `--outer.every 50` give. Raises ConfigError for other sections."""
    if not overrides:
        return None
    from muster.config.load_config import load_outer_config

    return load_outer_config(overrides)


def add_planning_flags(parser: Parser, default_batch: str) -> None:
    """Add the flags of model, cluster and step; `default_batch` describes the step if none is given."""
    add = parser.add_argument
    add(
        "--model",
        metavar="M",
        help="model: a name such as llama3-8b, a file or a Hugging Face directory",
    )
    add(
        "--cluster",
        metavar="C",
        help="cluster: devices such as 64xh100, a name, a file, or 'this' (this machine, profiled)",
    )
    add(
        "--seq-len",
        type=sequence_length,
        metavar="S",
        help=f"tokens per sequence, such as 8192, 128k or 1M (default: {SEQ_LEN}, or the model's maximum)",
    )
    add("--global-batch", type=positive_int, metavar="B", help=f"sequences per step (default: {default_batch})")
    add(
        "--framework",
        metavar="F",
        default=FRAMEWORK_NAMES[0],
        help=f"program that trains, {', '.join(FRAMEWORK_NAMES)}: what it overlaps and fuses (default: %(default)s)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile each decoder block, or none (default: on GPUs, where the plan can be compiled)",
    )
    add(
        "--expert-load",
        metavar="L",
        help="load of the experts: a run's directory, its expert-load.json, or Zipf's law such as zipf:1.0"
        " (default: even)",
    )
    add(
        "--adapter",
        metavar="A",
        help="train adapters alone: lora, pissa or dora, with keys of a run file's adapter as in"
        " lora:r=16,target_modules=q+v,load_in_4bit=true",
    )


def add_training_flags(parser: Parser) -> None:
    """Add the flags of a whole training."""
    add = parser.add_argument
    add("--tokens", metavar="T", help="tokens of the whole training, such as 15T; shows its days, cost, energy and CO₂")
    add(
        "--mtbf",
        type=number,
        metavar="HOURS",
        help="with --tokens: mean time between failures of one device, its share of node and network included"
        " (default: 50,000, that of Llama 3's H100)",
    )
    add(
        "--batch-ramp",
        metavar="START,STEP,SAMPLES",
        help="with --tokens: grow the batch from START sequences by STEP over the first SAMPLES sequences",
    )
    add(
        "--recovery",
        metavar="PLACE",
        help="with --tokens: place that a restart loads the state from, disk or (other nodes') memory (default: disk)",
    )
    add(
        "--restart-time",
        type=number,
        metavar="SECONDS",
        help="with --tokens: time from a failure until ranks run again, without loading (default: 600, MegaScale's)",
    )
    add(
        "--spares",
        type=whole_number,
        metavar="NODES",
        help="with --tokens and --repair-time: nodes that stand by for failed ones (default: 0)",
    )
    add(
        "--repair-time",
        type=number,
        metavar="HOURS",
        help="with --tokens: time for which a failed node is away (default: another takes its place at once)",
    )


def conditions_of(args: argparse.Namespace) -> "TrainingConditions":
    """Return the conditions of the whole training that the flags give. Raises ConfigError."""
    from muster.api.verbs import training_conditions

    return training_conditions(
        args.tokens,
        mtbf_hours=args.mtbf,
        batch_ramp=args.batch_ramp,
        recovery=args.recovery,
        restart_s=args.restart_time,
        spares=args.spares,
        repair_hours=args.repair_time,
    )


@contextmanager
def unit_warnings_shown() -> Iterator[None]:
    """Print the values of a cluster that are likely slips of units, a line each."""
    from muster.spec.unit_slips import UnitWarning

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UnitWarning)
        try:
            yield
        finally:
            for one in found:
                print(f"muster: warning: {one.message}", file=sys.stderr)


def require_flags(args: argparse.Namespace, examples: Mapping[str, str]) -> None:
    """Raise ConfigError for the first missing flag, with its example."""
    for flag, example in examples.items():
        if getattr(args, flag) is None:
            raise ConfigError(f"--{flag} is missing: expected for example --{flag} {example}")
