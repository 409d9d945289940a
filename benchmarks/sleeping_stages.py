"""Does the executor keep to the schedule? Runs schedules whose passes sleep; compares makespans.

    python benchmarks/sleeping_stages.py [--ranks 4] [--micro-batches 8] [--rounds 5]

Sleeping passes need no core, so the bubbles of 4 ranks show on 2 cores too. How long a pass really sleeps and a hop
takes is measured in the same run, one at a time. Prints, per schedule, simulated and measured makespan (median and
spread over rounds) and their ratio.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from muster.cost.op_times import OpTimes
from muster.parallel.executor import Executor
from muster.parallel.route import direct_routes
from muster.schedule.action import Action
from muster.schedule.lower import Lowering, lower
from muster.schedule.registry import make_schedule
from muster.schedule.setting import Setting
from muster.simulate.simulator import simulate

FORWARD_S, BACKWARD_S = 0.05, 0.1


class SleepingStage:
    """A stage whose passes only take time."""

    result = torch.zeros(4, 256, 256)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        time.sleep(FORWARD_S)
        return self.result

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        time.sleep(BACKWARD_S)
        return self.result

    def receive_buffer(self) -> Tensor:
        return torch.empty_like(self.result)

    def unshard(self) -> None: ...

    def reduce(self) -> None: ...

    def synchronise(self) -> None: ...


def measure_pass(do: Callable[[], object]) -> float:
    """Median seconds of one pass by itself, the mean over ranks."""
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        do()
        times.append(time.perf_counter() - start_s)
    total = torch.tensor([median(times)], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def measure_hop(rank: int, size: int) -> float:
    """Median seconds from the start of a send by rank 0 until rank 1 has it, as in a schedule: after a sleep, with the
    receive posted before. The clock is the machine's, which all its processes share."""
    hops = []
    for _ in range(15):
        dist.barrier()
        if rank == 0:
            time.sleep(FORWARD_S)
            begin = torch.tensor([time.perf_counter()], dtype=torch.float64)
            dist.isend(SleepingStage.result, 1).wait()
            dist.send(begin, 1)
        elif rank == 1:
            begin = torch.empty(1, dtype=torch.float64)
            dist.irecv(torch.empty_like(SleepingStage.result), 0).wait()
            end_s = time.perf_counter()
            dist.recv(begin, 0)
            hops.append(end_s - begin.item())
    hop = torch.tensor([median(hops[3:]) if hops else 0.0], dtype=torch.float64)
    dist.broadcast(hop, 1)
    return hop.item()


def run_rank(rank: int, size: int, port: int, micro_batches: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    handlers: dict[str, Callable[[Action], None]] = {"NORM": lambda _: dist.barrier(), "STEP": lambda _: None}
    hop_s = measure_hop(rank, size)
    stage = SleepingStage()
    forward_s = measure_pass(lambda: stage.forward(0, None))
    backward_s = measure_pass(lambda: stage.backward(0, None))
    if rank == 0:
        passes = f"forward {forward_s * 1e3:.1f} ms, backward {backward_s * 1e3:.1f} ms"
        print(f"{size} ranks, {micro_batches} micro-batches, {passes}, hop {hop_s * 1e3:.2f} ms")
        print(f"{'schedule':12} {'simulated':>10} {'measured':>10} {'spread':>15} {'ratio':>7}")
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, Setting(size, micro_batches))
        program = lower(schedule, Lowering(zero="z1", data_ranks=1, tied=False, train=True))
        times = OpTimes({("F", -1): forward_s, ("B", -1): backward_s}, hop_s=hop_s)
        simulated_s = simulate(program, times).makespan_s
        executor = Executor(program, rank, rank, {rank: stage}, direct_routes(program.placement), handlers)
        spans = []
        for _ in range(rounds):
            dist.barrier()
            events = executor.run()
            ends = torch.tensor([-min(e.start_s for e in events), max(e.end_s for e in events)], dtype=torch.float64)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            spans.append(ends.sum().item())
        if rank == 0:
            spread = f"{min(spans):.3f}–{max(spans):.3f} s"
            ratio = median(spans) / simulated_s
            print(f"{name:12} {simulated_s:8.3f} s {median(spans):8.3f} s {spread:>15} {ratio:7.3f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (args.ranks, store.port, args.micro_batches, args.rounds)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=run_rank, args=(rank, *arguments)) for rank in range(args.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
