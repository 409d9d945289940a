"""Writer process, which writes a rank's part of a checkpoint while the rank trains; free of torch.

    python -m muster.checkpoint.writer_process RANK

It inherits the rank's staging buffer as an open file. Each line on its standard input is a `WriteJob`; for each it
prints a line with an empty JSON string, or an error message. It ends at once when the rank does.
"""

import json
import mmap
import os
import queue
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

from muster.checkpoint.in_memory.checkpointer import send_to_partner
from muster.checkpoint.in_memory.transport import PeerAddress
from muster.checkpoint.rank_file import WriteItem, write_rank_file
from muster.layout.tensor_layout import Box
from muster.spec.errors import MusterError


class WriteJob(NamedTuple):
    """File to write. The bytes of its items are contiguous in the buffer, in order."""

    folder: str
    fd: int
    """File descriptor of the buffer, as this process inherited it."""
    buffer_bytes: int
    items: list[tuple[str, str, list[int], str, list[int], list[int]]]
    """Name, key, shape, dtype, start and size of each item."""
    send_to: tuple[str, int, str] | None = None
    """Address of the node that receives a copy."""


def make_job(
    folder: Path, fd: int, buffer_bytes: int, items: list[WriteItem], send_to: PeerAddress | None = None
) -> WriteJob:
    """Return the job that writes `items` and sends the file to `send_to`."""
    rows = [(p.name, p.key, list(p.shape), p.dtype, list(p.box.start), list(p.box.size)) for p in items]
    return WriteJob(str(folder), fd, buffer_bytes, rows, send_to)


def run_job(job: WriteJob, rank: int) -> str:
    """Write the file; return an empty string, or an error message."""
    items = [
        WriteItem(name, key, tuple(shape), dtype, Box(tuple(start), tuple(size)))
        for name, key, shape, dtype, start, size in job.items
    ]
    try:
        write_rank_file(Path(job.folder), rank, items, _item_buffers(job, items) if items else [])
        if job.send_to is not None:
            send_to_partner(Path(job.folder), rank, PeerAddress(*job.send_to))
    except OSError as error:
        return f"could not write {error.filename or job.folder}: {error.strerror or error}"
    except MusterError as error:
        return str(error)
    except Exception as error:  # any error: the rank must have an answer, and the next save a writer
        return f"{type(error).__name__}: {error}"
    return ""


def _item_buffers(job: WriteJob, items: list[WriteItem]) -> list[memoryview]:
    """Return the bytes of each item in the rank's buffer."""
    view = _map_buffer(job.fd, job.buffer_bytes)
    ends = [0]
    for item in items:
        ends.append(ends[-1] + item.nbytes)
    return [view[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@cache
def _map_buffer(fd: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))


def main() -> None:
    """Run jobs until the rank ends."""
    rank, jobs = int(sys.argv[1]), queue.SimpleQueue[WriteJob]()
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the rank, which may want one more save
        signal.signal(number, signal.SIG_IGN)

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(WriteJob(*json.loads(line)))
        # Even in the middle of a job: nobody would commit it, and a later attempt may write to the same path.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(json.dumps(run_job(jobs.get(), rank)), flush=True)


if __name__ == "__main__":
    main()
