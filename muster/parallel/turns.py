"""Two passes that take turns: each computes while the other's communication with other ranks is under way.

A backward is one call of autograd, which nothing can suspend but a wait within it; so the second pass has a thread of
its own. Only one of the two runs at any time: a pass hands over where it would wait for its communication, and goes on
when it is handed back to. The order of all work is that of the program alone, the same on every rank, and so is the
order of the collectives of a group.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Semaphore
from typing import Any, TypeVar

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

First = TypeVar("First")
Second = TypeVar("Second")


def _ignore(index: int) -> None:
    pass


class Turns:
    """Turns of two passes on one rank; while there aren't two, `hand_over` does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._may_run = (Semaphore(0), Semaphore(0))
        self._running: int | None = None
        """Pass whose turn it is; None where there aren't two."""
        self._is_over = [False, False]
        self._on_turn: Callable[[int], None] = _ignore

    def run(
        self, first: Callable[[], First], second: Callable[[], Second], on_turn: Callable[[int], None] | None = None
    ) -> tuple[First, Second]:
        """Run two passes, the first one until it hands over, then the second one until it does, and so on; return their
        results. What either raises is raised once both are over, the first one's before the second one's.

        `on_turn` is called with the number of a pass, 0 or 1, as its turn ends.
        """
        self._on_turn = on_turn or _ignore
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pass", self._enter_thread)
        modes, hooks = _get_current_dispatch_mode_stack(), _top_saved_tensors_default_hooks(False)
        self._is_over = [False, False]
        self._running = 0
        other = self._thread.submit(self._run_second, second, modes, hooks)
        try:
            made = first()
        finally:
            self._finish(0)
            other.exception()  # waits
            self._running = None
        return made, other.result()

    def hand_over(self) -> None:
        """Let the other pass run until it hands over or is over."""
        if self._running is None:
            return
        own = self._running
        if self._is_over[1 - own]:
            return
        self._on_turn(own)
        self._running = 1 - own
        self._may_run[1 - own].release()
        self._may_run[own].acquire()

    def _finish(self, own: int) -> None:
        self._on_turn(own)
        self._is_over[own] = True
        if not self._is_over[1 - own]:
            self._running = 1 - own
            self._may_run[1 - own].release()

    def _run_second(
        self, second: Callable[[], Second], modes: Sequence[TorchDispatchMode], hooks: tuple[Any, Any] | None
    ) -> Second:
        self._may_run[1].acquire()
        for mode in modes:  # which belong to a thread, as hooks do
            _push_mode(mode)
        try:
            with nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks):
                return second()
        finally:
            for mode in reversed(modes):
                _pop_mode(getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None))
            self._finish(1)

    def _enter_thread(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)  # which belongs to a thread
