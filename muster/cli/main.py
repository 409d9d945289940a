"""The `muster` command: dispatch to verbs; errors become sentences and exit codes.

Imports nothing heavy, so that --help answers at once; a verb imports what it needs when it runs.
"""

import errno
import os
import sys
from importlib import import_module

from muster.spec.errors import ConfigError, MusterError
from muster.spec.standard_streams import forgive_standard_streams
from muster.spec.suggest import did_you_mean
from muster.version import __version__

VERBS = {
    "plan": "find the best plans for a model on a cluster",
    "data": "make, inspect and check token stores of texts and tables",
    "train": "train a model, or resume an interrupted run",
    "coordinator": "bring together runs that come and go, each an island of one training",
    "swarm": "serve pipeline stages of a training on another machine, and come and go",
    "program": "print the program of a plan: each pipeline rank's instructions in order",
    "schedule": "draw a pipeline schedule, or compare them all",
    "verify": "compare plans with training on one process, and name the first layer that differs",
    "eval": "compute a trained model's loss and perplexity on validation or other data",
    "generate": "generate text with a trained model",
    "predict": "predict step time and memory of a plan on a cluster",
    "memory-check": "compare the memory forecast of a plan with PyTorch's accounting",
    "checkpoint": "inspect, verify, compare, prune and convert checkpoints",
    "validate": "compare predictions with published measurements",
    "profile": "measure this machine, and write a cluster file for predict",
    "doctor": "check this machine before training, and suggest remedies",
    "import-config": "turn a configuration of Megatron-LM, torchtitan, nanotron or DeepSpeed into a run file",
    "report": "show the report of a run, or compare several",
}
"""Verbs and their summaries. Each has a module of its name here (_ for -) with `run(arguments) -> exit code`."""

_FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, or full for this user."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line (None: this process's own) and return the exit code.

    0: done; 1: failed; 2: wrong request; 3: can't be run as asked; 130: interrupted.
    """
    if argv is None:
        forgive_standard_streams()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except MusterError as error:
        for sentence in str(error).splitlines():
            print(f"muster: {sentence}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough, as in `muster program … | head`
        _drop_output()
        return 1
    except OSError as error:  # of stdout or another open file; of those that can't be opened, verbs tell
        if error.filename is not None or error.errno not in _FAILED_WRITES:
            raise
        _drop_output()
        print(f"muster: writing failed: {error.strerror}", file=sys.stderr)
        return 1
    except SystemExit as end:  # how argparse ends after --help
        return int(end.code or 0)


def _drop_output() -> None:
    """Let output that can't be written go nowhere, so that the interpreter's own flush at the end doesn't fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    """Run the verb of a command line."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if arguments[0] == "--version":
        print(f"muster {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        what = "flag" if verb.startswith("-") else "verb"
        known = [*VERBS, "--help", "--version"]
        raise ConfigError(f"unknown {what} '{verb}'{did_you_mean(verb, known)} (there are {', '.join(known)})")
    return import_module(f"muster.cli.{verb.replace('-', '_')}").run(rest)


def _help() -> str:
    verbs = "".join(f"  {verb:<10} {explanation}\n" for verb, explanation in VERBS.items())
    return (
        "usage: muster VERB …\n\n"
        "Plan, predict and run the training of large language models on whatever machines you have.\n\n"
        f"{verbs}\n'muster VERB --help' explains a verb; 'muster --version' prints the version.\n"
    )
