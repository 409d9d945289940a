"""Standard output and error of processes whose work matters more than their messages."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

TERMINAL_FDS_VARIABLE = "MUSTER_TERMINAL_FDS"
"""Variable with the numbers of the outputs of the launcher, `OUT,ERR`, for a rank that becomes rank 0."""


@contextmanager
def ignore_output_errors() -> Iterator[None]:
    """Drop what can't be written to this process's standard output or error, and go on.

    Their reader may have gone (`muster train … | head`), or their disk be full (`> log`). Each write is tried anew, so
    that messages appear again once there is space. Streams that aren't the process's own, such as a notebook's, and
    closed ones stay as they are.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _forgiving(sys.stdout, 1), _forgiving(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


class _ForgivingFile(io.FileIO):
    """File that takes what it can't write for written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _forgiving(stream: Any, descriptor: int) -> Any:
    """Return a stream that never raises OSError over a standard descriptor; `stream` itself if it is over another.

    It writes line by line, since several processes write to one descriptor.
    """
    try:
        if stream.fileno() != descriptor:
            return stream
    except (AttributeError, OSError, ValueError):  # None, without a descriptor, or closed
        return stream
    with suppress(OSError):
        stream.flush()
    file = io.BufferedWriter(_ForgivingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
