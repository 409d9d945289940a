"""Words of a launcher to a rank that runs: its place in the next generation of ranks, once one was lost or came back.

The launcher holds the other end of each rank's standard input. A line there is a word; its end means that the launcher
is gone. Free of torch.
"""

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

WORD_TIMEOUT_S = 30.0
"""Longest time for which a rank whose connections broke waits for its launcher to say what follows."""


@dataclass(frozen=True)
class Membership:
    """Place of a process among the ranks of one generation. A job begins with generation 0."""

    generation: int
    rank: int
    """Number of the rank; -1: none, as a spare that waits for one."""
    world_size: int
    at_step_end: bool = False
    """True where no rank was lost: the ranks of the generation before finish a step first, all the same one."""
    local_rank: int | None = None
    """Number of the rank on its node; None: `rank`."""
    local_world_size: int | None = None
    """Ranks that its node has at the start; None: `world_size`."""

    @property
    def is_spare(self) -> bool:
        """True for a process without a place among the ranks."""
        return self.rank < 0


class LauncherWords:
    """The words that this process has heard from its launcher; several threads may ask."""

    def __init__(self, first: Membership | None = None) -> None:
        """`first` is the place that the command line gives; a spare has none."""
        self._heard = threading.Condition()
        self._latest = first
        self._is_over = False
        self._on_next: tuple[int, Callable[[], None]] | None = None

    def listen(self) -> None:
        """Begin to read standard input; at its end, this process and its children end at once.

        Only for processes that `launch` started, which call it first.
        """

        def read() -> None:
            rest = b""
            while data := os.read(0, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.hear(line)
            os.killpg(os.getpgrp(), signal.SIGKILL)

        threading.Thread(target=read, name="launcher-words", daemon=True).start()

    def hear(self, line: bytes | str) -> None:
        """Take a word."""
        word = json.loads(line)
        with self._heard:
            if word is None:
                self._is_over = True
            else:
                self._latest = Membership(**word)
            self._heard.notify_all()
            waiting = self._pop_on_next()
        waiting()

    def current(self) -> Membership:
        """Return this process's place in the newest generation; a spare waits until it has one."""
        with self._heard:
            self._heard.wait_for(lambda: self._latest is not None and not self._latest.is_spare)
            assert self._latest is not None
            return self._latest

    def next_after(self, generation: int, limit_s: float = WORD_TIMEOUT_S) -> Membership | None:
        """Wait for a place in a later generation; None when the job is over, or no word comes within `limit_s`."""
        with self._heard:
            self._heard.wait_for(lambda: self._is_over or self._has_next(generation), limit_s)
            return self._latest if self._has_next(generation) else None

    def is_lost_after(self, generation: int, limit_s: float) -> bool:
        """Wait until another generation begins at once, as after the loss of a rank; False when the job is over, or no
        such word comes within `limit_s`."""
        with self._heard:
            self._heard.wait_for(lambda: self._is_over or self._begins_next(generation), limit_s)
            return self._begins_next(generation)

    def has_next(self, generation: int) -> bool:
        """Return whether there is a later generation."""
        with self._heard:
            return self._has_next(generation)

    def when_next(self, generation: int, do: Callable[[], None]) -> None:
        """Call `do` in a thread of its own once there is a later generation that begins at once, or now if there is; it
        replaces what was to be called before."""
        with self._heard:
            self._on_next = generation, do
            waiting = self._pop_on_next()
        waiting()

    def _has_next(self, generation: int) -> bool:
        return self._latest is not None and self._latest.generation > generation

    def _begins_next(self, generation: int) -> bool:
        return self._latest is not None and self._latest.generation > generation and not self._latest.at_step_end

    def _pop_on_next(self) -> Callable[[], None]:
        if self._on_next is None or not self._begins_next(self._on_next[0]):
            return lambda: None
        (_, do), self._on_next = self._on_next, None
        return threading.Thread(target=do, name="next-generation", daemon=True).start


def word_of(membership: Membership | None) -> bytes:
    """Return the line that tells a rank its place; None: that nothing follows."""
    return json.dumps(None if membership is None else asdict(membership)).encode() + b"\n"
