"""A training rank that goes wrong as asked: `python -m tests.hung_rank FAULT STEP RANK` and a worker's arguments, or,
under torchrun, `train` and its arguments."""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from muster.cli import main as cli
from muster.data.dataset import Dataset
from muster.launch.launcher_words import LauncherWords
from muster.launch.rank_process import Body, exit_process, member_main
from muster.parallel.stage import DecoderStage
from muster.train import worker
from muster.train.step_state import StepState
from muster.train.trainer import Trainer
from tests import nccl_like


def main() -> int:
    """Trains, and after `STEP` steps does on one rank what `FAULT` says."""
    fault, step, faulty = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    del sys.argv[1:4]
    under_torchrun = sys.argv[1] == "train"
    rank = int(os.environ["RANK"] if under_torchrun else sys.argv[sys.argv.index("--rank") + 1])
    stream = nccl_like.install(step) if "NCCL_LIKE" in os.environ else None
    if rank == faulty:
        seed_fault(fault, step, stream)
    if under_torchrun:
        return cli.main(sys.argv[1:])
    return member_main(far_away if fault == "network" else worker.prepare_rank)


def far_away(run_dir: Path) -> Body:
    """Trains in a network namespace of its own, from which only the launcher's store can still be reached."""

    def train(store: dist.Store, words: LauncherWords) -> int:
        port = int(sys.argv[sys.argv.index("--store") + 1].rpartition(":")[2])
        listeners: queue.Queue[socket.socket] = queue.Queue()
        threading.Thread(target=pass_on, args=(listeners, port), daemon=True).start()  # and stays outside
        rank = words.current().rank
        with open(f"/run/netns/{os.environ['TEST_NAMESPACES']}-{rank}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        listeners.put(socket.create_server(("127.0.0.1", port)))
        os.environ["GLOO_SOCKET_IFNAME"] = f"veth{rank}"
        return worker.prepare_rank(run_dir)(store, words)

    return train


def pass_on(listeners: "queue.Queue[socket.socket]", port: int) -> None:
    """Connects what comes to a listener with the store outside."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)

    listener = listeners.get()
    while True:
        inside, _ = listener.accept()
        outside = socket.create_connection(("127.0.0.1", port))
        for ends in ((inside, outside), (outside, inside)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def seed_fault(fault: str, step: int, stream: nccl_like.Stream | None) -> None:
    """Makes this process misbehave in the step after `step`."""
    made = [0]
    feed_step, batch, forward = Trainer.load_batch, Dataset.rows, DecoderStage.forward

    def fed(self: Trainer) -> StepState:
        made[0] = self.step_count
        if made[0] == step and fault in ("stopped", "dead"):
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        if made[0] == step and fault == "network":
            cable = os.environ.get("CUT", f"veth{self.world.rank}")
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
        return feed_step(self)

    def read_forever(self: Dataset, *args: Any) -> Any:
        while made[0] >= step and fault == "data":
            time.sleep(1)
        return batch(self, *args)

    def compute_forever(self: DecoderStage, *args: Any) -> Any:
        while made[0] == step and fault == "compute":
            torch.ones(8).sum()
        if made[0] == step and fault == "kernel":
            assert stream is not None
            nccl_like.hang(stream)
        return forward(self, *args)

    if fault == "plan":
        load_plan = worker.load_plan
        worker.load_plan = lambda path: load_plan(path).model_copy(update={"micro_batch_size": 6})
    Trainer.load_batch, Dataset.rows, DecoderStage.forward = fed, read_forever, compute_forever


if __name__ == "__main__":
    exit_process(main())
