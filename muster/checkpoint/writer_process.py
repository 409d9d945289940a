"""The process that writes a rank's part of a checkpoint while the rank trains; free of torch.

    python -m muster.checkpoint.writer_process RANK

It inherits the rank's buffers as open files. Each line on its standard input is a Job; each line that it prints is the
answer: an empty string, or why it could not write. It ends at once when the rank does.
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
    """One file to write: the parts in its order, whose bytes lie one after the other in the buffer."""

    folder: str
    fd: int
    """Of the buffer, as this process inherited it."""
    buffer_bytes: int
    items: list[tuple[str, str, list[int], str, list[int], list[int]]]
    """Name, key, shape, dtype, start and size of each."""
    send_to: tuple[str, int, str] | None = None
    """The address of the node that gets a copy."""


def make_job(
    folder: Path, fd: int, buffer_bytes: int, items: list[WriteItem], send_to: PeerAddress | None = None
) -> WriteJob:
    """The job that writes `parts`, and sends the file on."""
    rows = [(p.name, p.key, list(p.shape), p.dtype, list(p.box.start), list(p.box.size)) for p in items]
    return WriteJob(str(folder), fd, buffer_bytes, rows, send_to)


def run_job(job: WriteJob, rank: int) -> str:
    """Writes; an empty string, or one sentence that says why not."""
    parts = [
        WriteItem(name, key, tuple(shape), dtype, Box(tuple(start), tuple(size)))
        for name, key, shape, dtype, start, size in job.items
    ]
    try:
        write_rank_file(Path(job.folder), rank, parts, _item_buffers(job, parts) if parts else [])
        if job.send_to is not None:
            send_to_partner(Path(job.folder), rank, PeerAddress(*job.send_to))
    except OSError as error:
        return f"could not write {error.filename or job.folder}: {error.strerror or error}"
    except MusterError as error:
        return str(error)
    except Exception as error:  # the rank must have an answer, and the next save a writer
        return f"{type(error).__name__}: {error}"
    return ""


def _item_buffers(job: WriteJob, items: list[WriteItem]) -> list[memoryview]:
    """The bytes of each part, where they lie in the rank's buffer."""
    view = _map_buffer(job.fd, job.buffer_bytes)
    ends = [0]
    for part in items:
        ends.append(ends[-1] + part.nbytes)
    return [view[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@cache
def _map_buffer(fd: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))


def main() -> None:
    """Reads jobs until the rank is gone."""
    rank, jobs = int(sys.argv[1]), queue.SimpleQueue[WriteJob]()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the rank, which may want one more save
        signal.signal(number, signal.SIG_IGN)

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(WriteJob(*json.loads(line)))
        os._exit(0)  # whatever it is doing: nobody would commit it, and a later attempt may write in the same place

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(json.dumps(run_job(jobs.get(), rank)), flush=True)


if __name__ == "__main__":
    main()
