"""Do host and device update side by side behind one link, as predicted? Runs updates whose work sleeps.

    python -m benchmarks.shared_updates [--shares 0 0.25 0.5 0.75 1] [--link 0.1 0.25] [--rounds 5]

Real steps of one rank of 16 layers whose updates and copies take time: those of the host, of the device and of the link
sleep at a rate of their own, the link's in a thread. --link is the time of all copies for updates by the host alone, 12
bytes of a parameter, over that of these updates; where the device updates, AdamW's state takes 16. Printed is the time
from the clipping to the last copy, measured (median and spread) and predicted from the same rates, and how much faster
that is than all updates by the host.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.host_updates import host_part_copies, shared_update_numels
from muster.cost.time.op_times import OpTimes
from muster.data.dataset import SampleStream
from muster.layout.host_updates import part_sizes_of
from muster.optim.host_optimizer import HostOptimizer, HostPart
from muster.parallel.offload import HostLink
from muster.parallel.world import open_world
from muster.probe.contention import RandomDataset
from muster.schedule.action import HOST_UPDATE_KINDS, Action, Kind
from muster.schedule.build import build_program
from muster.simulate.simulator import simulate
from muster.simulate.timeline import Event
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer

MODEL = ModelSpec(vocab_size=257, hidden_size=32, num_layers=16, num_heads=2, intermediate_size=64)
SEQ_LEN = 32
HOST_S = 2.4
"""Seconds in which the host updates all parameters."""
DEVICE_S = 0.05
"""Seconds in which the device would."""
COPIED_BYTES, STATE_BYTES = 12, 8
"""Bytes of a parameter's copies for an update by the host, and of AdamW's state."""
_generations = count()


class Rates:
    """Seconds of an element in an update by the host and by the device, and of a byte on the link."""

    def __init__(self, numel: int, link_share: float) -> None:
        """`link_share`: time of all copies for updates by the host, as a share of these updates'."""
        self.host_s, self.device_s = HOST_S / numel, DEVICE_S / numel
        self.link_s = link_share * HOST_S / (COPIED_BYTES * numel)


def sleep_beside(seconds: float, work: Callable[[], Any]) -> Any:
    """Do some work, which takes so many seconds."""
    end_s = time.perf_counter() + seconds
    found = work()
    time.sleep(max(0.0, end_s - time.perf_counter()))
    return found


@contextmanager
def limited(rates: Rates) -> Iterator[None]:
    """Let updates and copies take their times."""
    update, copy, on_device = HostPart.update, HostLink.copy, HostOptimizer.update_on_device
    link = ThreadPoolExecutor(1)

    def slow_update(self: HostPart, lr: float) -> None:
        sleep_beside(rates.host_s * numel_of(self.params), lambda: update(self, lr))

    def slow_device(self: HostOptimizer, key: tuple[int, int], lr: float) -> None:
        numel = numel_of(self.fetched[key].optimizer.params)
        sleep_beside(rates.device_s * numel, lambda: on_device(self, key, lr))

    def slow_copy(self: HostLink, pairs: list[tuple[Tensor, Tensor]], **more: Any) -> Callable[[], None]:
        size = sum(source.nbytes for _, source in pairs)
        return link.submit(sleep_beside, rates.link_s * size, lambda: copy(self, pairs, **more)).result

    with (
        patch.object(HostPart, "update", slow_update),
        patch.object(HostOptimizer, "update_on_device", slow_device),
        patch.object(HostLink, "copy", slow_copy),
    ):
        yield


def numel_of(params: dict[str, Tensor] | Any) -> int:
    """Return the elements of some parameters."""
    return sum(param.numel() for param in params.values())


def config_of(share: float) -> RunConfig:
    """Return a run of one rank of which the device updates a share of the layers."""
    words = f"-devupdate{share:g}" if share else ""
    return RunConfig(
        model=MODEL,
        parallel=parse_plan_name(f"dp1-mb1-fp32-oopt{words}"),
        data=DataConfig(source="none"),
        train=TrainConfig(steps=1, seq_len=SEQ_LEN, global_batch_size=1),
        optim=OptimConfig(lr=1e-3),
    )


def predict_s(config: RunConfig, rates: Rates) -> float:
    """Return the seconds of the updates that the simulator predicts from the rates."""
    plan = config.parallel
    by_host, by_device = shared_update_numels(MODEL, plan, 0)
    sent, returned = host_part_copies(MODEL, plan, 0)
    mean_host, mean_device = (sum(own) / max(1, len(own)) for own in (by_host, by_device))
    seconds: dict[tuple[str, int], float] = {
        (Kind.OFFLOAD_GRAD, 0): rates.link_s * sent,
        (Kind.RELOAD_PARAM, 0): rates.link_s * returned,
        (Kind.UPDATE, 0): rates.host_s * mean_host,
        (Kind.DEVICE_UPDATE, 0): rates.device_s * mean_device,
        (Kind.RELOAD_STATE, 0): rates.link_s * STATE_BYTES * mean_device,
        (Kind.OFFLOAD_STATE, 0): rates.link_s * STATE_BYTES * mean_device,
    }
    program = build_program(plan, MODEL, config.workload)
    return simulate(program, OpTimes(seconds, part_sizes=part_sizes_of(MODEL, plan))).makespan_s


def measure_s(config: RunConfig, rates: Rates, rounds: int) -> list[float]:
    """Return the seconds of the updates of some steps."""
    data = cast(SampleStream, RandomDataset(MODEL.vocab_size, SEQ_LEN))
    with limited(rates), open_world(dist.HashStore(), 0, 1, config.parallel, next(_generations)) as world:
        trainer = Trainer(config, config.parallel, world, data)
        for _ in range(rounds + 1):
            trainer.step()
        return [seconds_of_updates(events) for events in list(trainer.step_events().values())[-rounds:]]


def seconds_of_updates(events: list[Event]) -> float:
    """Return the seconds from the end of clipping to that of the last update or copy."""
    clipped_s = next(event.end_s for event in events if event.action == Action(Kind.CLIP))
    return max(event.end_s for event in events if event.action.kind in HOST_UPDATE_KINDS) - clipped_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1])
    parser.add_argument("--link", type=float, nargs="+", default=[0.1, 0.25])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{'link':>5} {'share':>6} {'measured':>9} {'spread':>13} {'predicted':>10} {'error':>6} {'speed-up':>9}")
    for link in args.link:
        rates = Rates(MODEL.num_parameters, link)
        alone_s = 0.0
        for share in args.shares:
            config = config_of(share)
            found = measure_s(config, rates, args.rounds)
            middle, predicted_s = median(found), predict_s(config, rates)
            alone_s = alone_s or middle
            spread = f"{min(found):.3f}–{max(found):.3f}"
            print(
                f"{link:5.2f} {share:6.2f} {middle:8.3f}s {spread:>13} {predicted_s:9.3f}s"
                f" {predicted_s / middle - 1:+6.1%} {alone_s / middle:8.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
