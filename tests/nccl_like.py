"""Communication as NCCL has it, over gloo: waiting returns at once, and the host blocks where it reads a result.

A thread stands for the device's stream: it works off, one after another, what the host has launched. From step `after`
on the host runs ahead of it; before, it waits for each transfer, so that numbers are right. What is computed later is
not, so this is for steps that never end.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from muster.parallel import axis, p2p
from muster.parallel.device_clock import HostRecord, TimedInstruction
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.train import trainer
from muster.train.parameter_updater import ParameterUpdater
from muster.train.trainer import Trainer


class Stream:
    """Launched work in order, and the thread that works it off."""

    def __init__(self) -> None:
        self._launched: queue.Queue[tuple[Callable[[], Any], threading.Event]] = queue.Queue()
        self.runs_ahead = False
        self._last = threading.Event()
        self._last.set()
        threading.Thread(target=self._run, daemon=True, name="stream").start()

    def _run(self) -> None:
        while True:
            work, done = self._launched.get()
            work()
            done.set()

    def launch(self, work: Callable[[], Any]) -> None:
        self._last = threading.Event()
        self._launched.put((work, self._last))
        if not self.runs_ahead:
            self._last.wait()

    def mark(self) -> threading.Event:
        return self._last

    def synchronize(self) -> None:
        self._last.wait()


@dataclass
class StreamClock:
    """A clock whose device is the stream."""

    stream: Stream

    def mark(self) -> Any:
        return self.stream.mark()

    def mark_idle(self) -> None:
        pass

    def take_record(self, rank: int, instructions: Sequence[TimedInstruction]) -> HostRecord:
        return HostRecord([])

    def device_action(self, instructions: Sequence[TimedInstruction]) -> Action | None:
        return next((action for _, action, _, end in tuple(instructions) if not end.is_set()), None)


def install(after: int) -> Stream:
    """Let this process communicate so."""
    stream = Stream()
    start_send = p2p.P2PRoute.send
    read_sums, load_batch = ParameterUpdater._read_sums, Trainer.load_batch

    def receive_wait(self: p2p.PendingReceive) -> None:
        for work, buffer, target in self.parts:
            stream.launch(work.wait)
            if buffer is not target:
                target.copy_(buffer)

    def tensor_wait(self: axis.PendingTensor) -> torch.Tensor:
        for work in self.works:
            if work is not None:
                stream.launch(work.wait)
        return self.result()

    def send(self: p2p.P2PRoute, tensor: torch.Tensor, tag: int = 0) -> list[Any]:
        if not stream.runs_ahead:
            return start_send(self, tensor, tag)
        stream.launch(lambda: [work.wait() for work, _ in start_send(self, tensor, tag)])
        return []

    def all_reduce(self: World, values: torch.Tensor) -> torch.Tensor:
        stream.launch(lambda: self.all_reduce_async(values).wait())
        return values

    def read(self: ParameterUpdater, state: Any, sums: torch.Tensor) -> None:
        self.world.heartbeat.wait()
        stream.synchronize()
        read_sums(self, state, sums)

    def load(self: Trainer) -> Any:
        stream.runs_ahead = self.step_count >= after
        return load_batch(self)

    p2p.PendingReceive.wait = receive_wait
    axis.PendingTensor.wait = tensor_wait
    p2p.P2PRoute.send = send
    World.all_reduce = all_reduce
    ParameterUpdater._read_sums = read
    Trainer.load_batch = load
    trainer.step_clock = lambda device: StreamClock(stream)
    return stream


def hang(stream: Stream) -> None:
    """Launch a kernel that never ends."""
    stream.launch(threading.Event().wait)
