"""Replicas of the preset `tiny` under torchft, of which one is killed now and then: what Muster's recovery is compared
with.

torchft is installed by hand (`pip install torchft`); its packages don't agree with those of other extras. The replicas
train the model of `plain_llama.py` on random tokens. Where one is gone, the others go on with a smaller batch at their
next quorum; it is started again, and gets its state from another.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.plain_llama import PlainLlama, init_weights
from muster.config.load_config import load_run_config

MOMENT_MS = 1000
"""Time after which torchft's lighthouse goes on without replicas that don't come, or are silent; its defaults are 60
and 5 s."""
LIMIT = timedelta(seconds=20)


def train_replica(replica: int, replicas: int, folder: Path) -> None:
    """Train as one replica until killed, and note the time of each step that is committed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo

    config = load_run_config("tiny", None, []).config
    model = PlainLlama(config.model, config.train.seq_len)
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica-{replica}-",
        hostname="127.0.0.1",
    )
    steps = Optimizer(manager, optimizer)
    sequences = config.train.global_batch_size // replicas
    while True:
        steps.zero_grad()
        tokens = torch.randint(config.model.vocab_size, (sequences, config.train.seq_len + 1))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        manager.allreduce(flat).wait()
        for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
        before = manager.current_step()
        steps.step()
        if manager.current_step() > before:
            with (folder / f"steps-{replica}").open("a") as file:
                file.write(f"{time.time()} {manager.num_participants()}\n")


def kill_replicas(folder: Path, replicas: int, losses: int, pause_s: float) -> list[float]:
    """Kill a replica now and then, and start it again; returns the seconds from each loss until another has finished a
    step that began after it."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=MOMENT_MS, heartbeat_timeout_ms=MOMENT_MS
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "benchmarks.torchft_replicas"]
    chance, waits_s = random.Random(0), []

    def start(replica: int) -> subprocess.Popen[bytes]:
        own = [*command, "--replica", str(replica), "--replicas", str(replicas), "--folder", str(folder)]
        return subprocess.Popen(own, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    processes = [start(replica) for replica in range(replicas)]
    try:
        for _ in range(losses):
            wait_for_step(folder, time.time(), replicas)
            time.sleep(pause_s + chance.uniform(0, 1))
            victim = chance.randrange(replicas)
            processes[victim].send_signal(signal.SIGKILL)
            processes[victim].wait()
            killed = time.time()
            waits_s.append(wait_for_step(folder, killed + 0.1, replicas - 1, without=victim) - killed)
            processes[victim] = start(victim)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        lighthouse.shutdown()
    return waits_s


def wait_for_step(folder: Path, after: float, participants: int, without: int | None = None) -> float:
    """Wait until a replica has finished a step after a time, of at least so many; returns when it had."""
    limit = time.time() + 300
    while time.time() < limit:
        for path in folder.glob("steps-*"):
            lines = path.read_text().splitlines()
            if path.name != f"steps-{without}" and lines:
                ended, count = lines[-1].split()
                if float(ended) > after and int(count) >= participants:
                    return float(ended)
        time.sleep(0.005)
    raise SystemExit(f"torchft: no step of {participants} replicas within 300 s")


def main() -> None:
    """Run one replica."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    socket.setdefaulttimeout(LIMIT.total_seconds())
    train_replica(args.replica, args.replicas, args.folder)


if __name__ == "__main__":
    main()
