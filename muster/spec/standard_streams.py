"""Standard output and error that take any text, even where a terminal knows few letters or nobody listens."""

import io
import os
import sys


def forgive_standard_streams() -> None:
    """Open streams that were closed, so that no other file gets their numbers, and print `?` for letters that they
    don't know, instead of ending a run for a sentence."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
