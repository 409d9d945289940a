"""Whether all nodes see the run directory: they read the configuration from it, and write checkpoints into it."""

import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from muster.spec.errors import MusterError

if TYPE_CHECKING:
    import torch.distributed as dist

WAIT_S = 20.0
"""How long a network's file system may take to show a new file on all nodes."""
_MARK = Path("logs/.shared")


def require_shared(run_dir: Path, rank: int, store: "dist.Store", wait_s: float = WAIT_S) -> None:
    """Raises MusterError on a rank that doesn't see what rank 0 writes in the run directory. All ranks call it."""
    host = socket.gethostname()
    if rank == 0:
        store.set("shared disk", f"{leave_mark(run_dir)} {host}")
        return
    word, first = store.get("shared disk").decode().split(" ", 1)
    find_mark(run_dir, word, f"rank {rank} on {host}", f"rank 0 on {first}", wait_s)


def leave_mark(run_dir: Path) -> str:
    """Writes a new word in the run directory, and returns it."""
    word = secrets.token_hex(8)
    (run_dir / _MARK).write_text(word)
    return word


def find_mark(run_dir: Path, word: str, own: str, first: str, wait_s: float = WAIT_S) -> None:
    """Raises MusterError where `own`, a rank or node, doesn't find the word that `first` has left."""
    limit = time.monotonic() + wait_s
    while _read(run_dir / _MARK) != word:
        if time.monotonic() > limit:
            raise MusterError(
                f"{own} doesn't see what {first} writes in {run_dir.absolute()}: give a --run on a disk that all nodes"
                " share"
            )
        time.sleep(0.1)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
