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

from muster.checkpoint.memory.copies import send
from muster.checkpoint.memory.wire import Address
from muster.checkpoint.write import Part, write_file
from muster.spec.errors import MusterError
from muster.spec.layout import Box


class Job(NamedTuple):
    """One file to write: the parts in its order, whose bytes lie one after the other in the buffer."""

    folder: str
    handle: int
    """Of the buffer, as this process inherited it."""
    buffer_bytes: int
    parts: list[tuple[str, str, list[int], str, list[int], list[int]]]
    """Name, key, shape, dtype, start and size of each."""
    send_to: tuple[str, int, str] | None = None
    """The address of the node that gets a copy."""


def job_of(folder: Path, handle: int, buffer_bytes: int, parts: list[Part], send_to: Address | None = None) -> Job:
    """The job that writes `parts`, and sends the file on."""
    rows = [(p.name, p.key, list(p.shape), p.dtype, list(p.box.start), list(p.box.size)) for p in parts]
    return Job(str(folder), handle, buffer_bytes, rows, send_to)


def do(job: Job, rank: int) -> str:
    """Writes; an empty string, or one sentence that says why not."""
    parts = [
        Part(name, key, tuple(shape), dtype, Box(tuple(start), tuple(size)))
        for name, key, shape, dtype, start, size in job.parts
    ]
    try:
        write_file(Path(job.folder), rank, parts, _data(job, parts) if parts else [])
        if job.send_to is not None:
            send(Path(job.folder), rank, Address(*job.send_to))
    except OSError as error:
        return f"could not write {error.filename or job.folder}: {error.strerror or error}"
    except MusterError as error:
        return str(error)
    except Exception as error:  # the rank must have an answer, and the next save a writer
        return f"{type(error).__name__}: {error}"
    return ""


def _data(job: Job, parts: list[Part]) -> list[memoryview]:
    """The bytes of each part, where they lie in the rank's buffer."""
    view = _mapped(job.handle, job.buffer_bytes)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.nbytes)
    return [view[a:b] for a, b in zip(ends, ends[1:], strict=False)]


@cache
def _mapped(handle: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(handle, nbytes, prot=mmap.PROT_READ))


def main() -> None:
    """Reads jobs until the rank is gone."""
    rank, jobs = int(sys.argv[1]), queue.SimpleQueue[Job]()
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the rank, which may want one more save
        signal.signal(number, signal.SIG_IGN)

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(Job(*json.loads(line)))
        os._exit(0)  # whatever it is doing: nobody would commit it, and a later attempt may write in the same place

    threading.Thread(target=listen, daemon=True).start()
    while True:
        print(json.dumps(do(jobs.get(), rank)), flush=True)


if __name__ == "__main__":
    main()
