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
from pathlib import Path
from typing import NamedTuple

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


def job_of(folder: Path, handle: int, buffer_bytes: int, parts: list[Part]) -> Job:
    """The job that writes `parts`."""
    rows = [(p.name, p.key, list(p.shape), p.dtype, list(p.box.start), list(p.box.size)) for p in parts]
    return Job(str(folder), handle, buffer_bytes, rows)


def do(job: Job, rank: int) -> str:
    """Writes; an empty string, or one sentence that says why not."""
    try:
        parts = [
            Part(name, key, tuple(shape), dtype, Box(tuple(start), tuple(size)))
            for name, key, shape, dtype, start, size in job.parts
        ]
        if not parts:
            write_file(Path(job.folder), rank, [], [])
            return ""
        with mmap.mmap(job.handle, job.buffer_bytes, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
            ends = [0]
            for part in parts:
                ends.append(ends[-1] + part.nbytes)
            data = [view[a:b] for a, b in zip(ends, ends[1:], strict=False)]
            try:
                write_file(Path(job.folder), rank, parts, data)
            finally:
                for one in data:
                    one.release()
    except OSError as error:
        return f"could not write {error.filename or job.folder}: {error.strerror or error}"
    except MusterError as error:
        return str(error)
    return ""


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
