"""Check that all nodes see the run directory, in which they read the configuration and write checkpoints."""

import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from muster.spec.errors import MusterError

if TYPE_CHECKING:
    import torch.distributed as dist

VISIBILITY_TIMEOUT_S = 20.0
"""Longest time until a network file system shows a new file on all nodes."""
_MARKER = Path("logs/.shared")


def require_shared_run_dir(
    run_dir: Path, rank: int, store: "dist.Store", timeout_s: float = VISIBILITY_TIMEOUT_S
) -> None:
    """Raise MusterError on a rank that doesn't see rank 0's files in the run directory. All ranks call it."""
    host = socket.gethostname()
    if rank == 0:
        store.set("shared disk", f"{write_marker(run_dir)} {host}")
        return
    word, first = store.get("shared disk").decode().split(" ", 1)
    require_marker(run_dir, word, f"rank {rank} on {host}", f"rank 0 on {first}", timeout_s)


def write_marker(run_dir: Path) -> str:
    """Write a new random word into the run directory, and return it."""
    word = secrets.token_hex(8)
    (run_dir / _MARKER).write_text(word)
    return word


def require_marker(run_dir: Path, word: str, reader: str, writer: str, timeout_s: float = VISIBILITY_TIMEOUT_S) -> None:
    """Raise MusterError where `reader`, a rank or node, doesn't find the word that `writer` has written."""
    limit = time.monotonic() + timeout_s
    while _read(run_dir / _MARKER) != word:
        if time.monotonic() > limit:
            raise MusterError(
                f"{reader} doesn't see what {writer} writes in {run_dir.absolute()}: give a --run on a disk that"
                f" all nodes"
                " share"
            )
        time.sleep(0.1)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
