"""What `muster plan` and `muster predict` are asked about: a model, a cluster, a step."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, whole_number
from muster.spec.errors import ConfigError

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec

SEQ_LEN = 4096


def add_work(parser: Parser, usual_batch: str) -> None:
    """The flags of a model, a cluster and a step; `usual_batch`: what a step is where nobody says."""
    add = parser.add_argument
    add(
        "--model",
        metavar="M",
        help="a model that comes with Muster, such as llama3-8b, its file or a Hugging Face directory",
    )
    add(
        "--cluster",
        metavar="C",
        help="devices, such as 64xh100, a cluster that comes with Muster, its file, or this (machine, once profiled)",
    )
    add(
        "--seq-len",
        type=whole_number,
        metavar="S",
        help=f"tokens of a sequence (default: {SEQ_LEN}, or the model's most)",
    )
    add("--global-batch", type=whole_number, metavar="B", help=f"sequences of a step (default: {usual_batch})")


def require(args: argparse.Namespace, examples: Mapping[str, str]) -> None:
    """Raises ConfigError for the first flag that is missing, with its example."""
    for flag, example in examples.items():
        if getattr(args, flag) is None:
            raise ConfigError(f"--{flag} is missing: expected for example --{flag} {example}")


def model_of(text: str) -> "ModelSpec":
    """The model of a name, a file or a Hugging Face directory. Raises ConfigError."""
    from muster.spec.named_model import HF_PREFIX, load_model

    return load_model(HF_PREFIX + text if Path(text).is_dir() else text)


def seq_len_of(args: argparse.Namespace, model: "ModelSpec") -> int:
    """Tokens of a sequence, where nobody says otherwise."""
    return args.seq_len or min(SEQ_LEN, model.max_positions or SEQ_LEN)
