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


def require_shared(run_dir: Path, rank: int, store: "dist.Store", wait_s: float = WAIT_S) -> None:
    """Raises MusterError on a rank that doesn't see what rank 0 writes in the run directory. All ranks call it."""
    mark = run_dir / "logs" / ".shared"
    if rank == 0:
        word = secrets.token_hex(8)
        mark.write_text(word)
        store.set("shared disk", f"{word} {socket.gethostname()}")
        return
    word, host = store.get("shared disk").decode().split(" ", 1)
    limit = time.monotonic() + wait_s
    while _read(mark) != word:
        if time.monotonic() > limit:
            raise MusterError(
                f"rank {rank} on {socket.gethostname()} doesn't see what rank 0 on {host} writes in"
                f" {run_dir.absolute()}: give a --run on a disk that all nodes share"
            )
        time.sleep(0.1)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
