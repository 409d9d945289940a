"""Do a slow disk and the passes overlap? Steps with activations or parameters on a rate-limited store.

    python -m benchmarks.disk_passes [--disk 0.5 1.0 2.0] [--rounds 5] [--micro-batches 2] [--plans WORDS …]

Real steps of one rank, whose model is so small that sleeps make up their time: each layer sleeps in its passes, and
the store lets through so many bytes a second, read or written, that a step's bytes take so many times as long as its
passes. The prediction has the parts of a step without tiers as they were measured, and the cost model's bytes. Printed
is the step (median and spread) over the longer of what the step takes without tiers and what the bytes take. Words with
`:5` leave the activations of the last five layers on the device, with `:5h` in host memory; with `:in-backward` the
host updates layers within the last backward.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf
from statistics import median
from threading import Lock
from typing import cast
from unittest.mock import patch

import torch.distributed as dist

from benchmarks.sleeping_layers import sleeping_layers
from muster.config.cluster_files import load_cluster
from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.time.op_times import OpTimes
from muster.data.dataset import SampleStream
from muster.parallel.file_store import FileStore
from muster.parallel.world import open_world
from muster.probe.contention import RandomDataset
from muster.schedule.action import KINDS, Kind
from muster.schedule.build import build_program
from muster.simulate.predict import predict
from muster.simulate.simulator import simulate
from muster.spec.device import DiskSpec
from muster.spec.layer_strategy import LayerOverride
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer

FORWARD_S = 0.05
"""Seconds that a layer sleeps in a forward; twice as many in a backward."""
MODEL = ModelSpec(vocab_size=257, hidden_size=32, num_layers=16, num_heads=2, intermediate_size=64)
SEQ_LEN = 32
PLANS = (
    *("oactd", "oactd:5", "oactd:5h", "rfull-oactd", "rfull-oactd:6"),
    *("ooptd-oparamd", "ooptd-oparamd:in-backward"),
)
_generations = count()


class RateLimit:
    """Bytes a second that pass through all stores."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_s, self._lock = bytes_per_s, 0.0, Lock()
        self.busy_s = 0.0
        """Seconds that all bytes so far take."""

    def let_through(self, num_bytes: int, begin_s: float) -> None:
        """Return once so many more bytes, which began at a moment, have had their time."""
        with self._lock:
            taken_s = num_bytes / self._bytes_per_s
            self.busy_s += taken_s
            self._free_s = max(self._free_s, begin_s) + taken_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


@contextmanager
def limited_store(limit: RateLimit) -> Iterator[None]:
    """Let files take the time of a limit."""
    transfer = FileStore.transfer

    def slow(self: FileStore, views: Sequence[memoryview], start: int, writes: bool) -> list[int]:
        begin_s = time.perf_counter()
        found = transfer(self, views, start, writes)
        limit.let_through(sum(map(len, views)), begin_s)
        return found

    with patch.object(FileStore, "transfer", slow):
        yield


def config_of(words: str, micro_batches: int) -> RunConfig:
    """Return a run of one rank under `dp1-mb1-fp32` and further words."""
    words, _, more = words.partition(":")
    in_backward = more == "in-backward"
    plan = parse_plan_name("-".join(filter(None, ("dp1-mb1-fp32", words))))
    if more and not in_backward:
        count, place = int(more.removesuffix("h")), "activations" if more.endswith("h") else "none"
        stays = plan.default_strategy.model_copy(update={"offload": place})
        last = LayerOverride(start=MODEL.num_layers - count, count=count, strategy=stays)
        plan = plan.model_copy(update={"overrides": (last,)})
    return RunConfig(
        model=MODEL,
        parallel=plan,
        data=DataConfig(source="none"),
        train=TrainConfig(steps=1, seq_len=SEQ_LEN, global_batch_size=micro_batches, update_in_backward=in_backward),
        optim=OptimConfig(lr=1e-3, clip_by_previous_norm=in_backward),
    )


def measure_steps(
    config: RunConfig, rounds: int, limit: RateLimit, profiles: bool = False
) -> tuple[list[float], OpTimes, float]:
    """Return the seconds of steps, the times of their parts if it `profiles`, and the seconds a step that all bytes
    take."""
    data = cast(SampleStream, RandomDataset(MODEL.vocab_size, SEQ_LEN))
    with (
        sleeping_layers(FORWARD_S),
        limited_store(limit),
        open_world(dist.HashStore(), 0, 1, config.parallel, next(_generations)) as world,
    ):
        trainer = Trainer(config, config.parallel, world, data)
        parts = trainer.profile().times if profiles else OpTimes({})
        trainer.step()
        busy_s = limit.busy_s
        found = [trainer.step().time_s for _ in range(rounds)]
        return found, parts, (limit.busy_s - busy_s) / rounds


def disk_times(config: RunConfig, bytes_per_s: float) -> dict[tuple[str, int], float]:
    """Return the cost model's times of reads and writes."""
    cluster = load_cluster("1xrtx4090")
    disk = DiskSpec(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    cluster = cluster.model_copy(update={"groups": (cluster.groups[0].model_copy(update={"disk": disk}),)})
    found = predict(MODEL, config.parallel, config.workload, cluster, update_time=config.train.update_time)
    return {key: time_s for key, time_s in found.times.seconds.items() if KINDS[Kind(key[0])].lane == "disk"}


def predict_step(config: RunConfig, parts: OpTimes, bytes_per_s: float) -> tuple[float, float]:
    """Return the predicted seconds of a step, and those that its bytes take on the disk."""
    program = build_program(config.parallel, MODEL, config.workload, update_time=config.train.update_time)
    times = OpTimes({**parts.seconds, **disk_times(config, bytes_per_s)})
    busy_s = sum(times.duration_s(item.action) for item in program.ranks[0]["disk"])
    return simulate(program, times).makespan_s, busy_s


def without_disk(words: str) -> str:
    """Return the words of the plan that moves the same over the link to the host, and nothing to the disk."""
    near = words.partition(":")[0].replace("ooptd", "oopt").replace("oparamd", "oparam")
    return "-".join(word for word in near.split("-") if word != "oactd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    args = parser.parse_args()
    head = f"{'plan':25} {'disk/step':>9} {'measured':>9} {'spread':>13} {'predicted':>10} {'error':>6}"
    print(f"{head} {'over longest':>12}")
    for words in args.plans:
        config, near = (config_of(own, args.micro_batches) for own in (words, without_disk(words)))
        steps_s, parts, _ = measure_steps(near, args.rounds, RateLimit(inf), profiles=True)
        compute_s = median(steps_s)
        for share in args.disk:
            bytes_per_s = predict_step(config, parts, 1.0)[1] / (share * compute_s)
            predicted_s, _ = predict_step(config, parts, bytes_per_s)
            found, _, disk_s = measure_steps(config, args.rounds, RateLimit(bytes_per_s))
            spread = f"{min(found):.3f}–{max(found):.3f}"
            error, over = predicted_s / median(found) - 1, median(found) / max(compute_s, disk_s)
            print(
                f"{words:25} {disk_s / compute_s:9.2f} {median(found):8.3f}s {spread:>13} {predicted_s:9.3f}s"
                f" {error:+6.1%} {over:12.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
