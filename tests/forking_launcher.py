"""`muster train` whose ranks are forked from the launcher, which costs nothing beside an interpreter that imports
PyTorch: `python -m tests.forking_launcher … train …`. Its ranks raise an error when they get `FAIL`."""

import os
import runpy
import signal
import subprocess
import sys
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as launchers set it for ranks, before PyTorch is imported

from muster.cli.main import main
from muster.launch import recovery
from tests.forks import ForkingPopen, import_all

FAIL = signal.SIGUSR2
LONGEST_WAIT_S = 0.5
"""Limit of the wait before lost ranks are started again, which grows with each loss."""


def fail(*_: object) -> None:
    raise ValueError("a fault of the test")


def run_module(name: str, **more: Any) -> dict[str, Any]:
    """`runpy.run_module`, in a process that raises an error, wherever it is, when it gets `FAIL`."""
    signal.signal(FAIL, fail)
    return _run_module(name, **more)


if __name__ == "__main__":
    _run_module, _wait_before = runpy.run_module, recovery.wait_before
    import_all()
    runpy.run_module = run_module
    recovery.wait_before = lambda attempt: min(LONGEST_WAIT_S, _wait_before(attempt))
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    sys.exit(main(sys.argv[sys.argv.index("train") :]))
