"""Does the executor keep to the schedule? Runs schedules whose passes sleep; compares makespans.

    python -m benchmarks.sleeping_stages [SCHEDULE …] [--ranks 4] [--micro-batches 8] [--rounds 3] [--no-wait | --pairs]

Sleeping passes need no core, so the bubbles of 4 ranks show on 2 cores too. How long a pass really sleeps and a p2p
transfer takes is measured in the same run, one at a time. Prints, per schedule, simulated and measured makespan
(median and spread over rounds) and their ratio. With --no-wait instead: six steps of each schedule with
a norm of all ranks before each, and with that norm all-reduced during the next step (post-validation), in turn. With
--pairs: DualPipe and DualPipe-V with two exchanges in each forward and backward, which take time on links alone, run
one after another and as pairs; the overlap efficiency η of a pair is the time that it saves over the most that it
could, the smaller of what it computes and what it exchanges.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from itertools import pairwise, zip_longest
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from muster.cost.time.op_times import OpTimes
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.cost.time.pass_pairs import Turns as PassTurns
from muster.cost.time.pass_pairs import pair_s
from muster.parallel.executor import Executor
from muster.parallel.p2p import direct_routes
from muster.parallel.turns import Turns
from muster.schedule.action import Action
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.simulate.simulator import simulate
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES

SLEEP_S = {"F": 0.05, "I": 0.06, "W": 0.05, "B": 0.11}
"""Duration of each stage's passes."""
EXCHANGE_S = 0.02
"""With --pairs, of each of the two exchanges of a forward or a backward."""
STEPS = 6
"""With --no-wait, in a row."""


class SleepingStage:
    """A stage whose passes only take time."""

    result = torch.zeros(4, 256, 256)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        return self._sleep("F")

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        return self._sleep("B")

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor:
        return self._sleep("I")

    def backward_weight(self, micro_batch: int) -> None:
        self._sleep("W")

    def _sleep(self, kind: str) -> Tensor:
        time.sleep(SLEEP_S[kind])
        return self.result

    def receive_buffer(self, micro_batch: int) -> Tensor:
        return torch.empty_like(self.result)

    def unshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def all_reduce_replicated_grads(self) -> None: ...


def measure_passes() -> dict[str, float]:
    """Median seconds of each pass by itself, the mean over ranks."""
    stage, found = SleepingStage(), {}
    for kind in SLEEP_S:
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            stage._sleep(kind)
            times.append(time.perf_counter() - start_s)
        total = torch.tensor([median(times)], dtype=torch.float64)
        dist.all_reduce(total)
        found[kind] = total.item() / dist.get_world_size()
    return found


def measure_p2p(rank: int) -> float:
    """Median seconds from the start of a send by rank 0 until rank 1 has it, as in a schedule: after a sleep, with the
    receive posted before. The clock is the machine's, which all its processes share."""
    times_s = []
    for _ in range(15):
        dist.barrier()
        if rank == 0:
            time.sleep(SLEEP_S["F"])
            begin = torch.tensor([time.perf_counter()], dtype=torch.float64)
            dist.isend(SleepingStage.result, 1).wait()
            dist.send(begin, 1)
        elif rank == 1:
            begin = torch.empty(1, dtype=torch.float64)
            dist.irecv(torch.empty_like(SleepingStage.result), 0).wait()
            end_s = time.perf_counter()
            dist.recv(begin, 0)
            times_s.append(end_s - begin.item())
    p2p_s = torch.tensor([median(times_s[3:]) if times_s else 0.0], dtype=torch.float64)
    dist.broadcast(p2p_s, 1)
    return p2p_s.item()


def schedules(args: argparse.Namespace) -> list[Schedule]:
    """Return the schedules asked for, or all that support so many ranks and micro-batches, each with its default stages
    per rank."""
    made = []
    for name in args.schedules or [name for name, entry in SCHEDULES.items() if not entry.slow]:
        entry = SCHEDULES[name]
        setting = ScheduleSpec(args.ranks, args.micro_batches, entry.default_chunks, replicas=entry.default_replicas)
        try:
            made.append(make_schedule(name, setting))
        except InfeasibleError as error:
            if args.schedules:
                raise SystemExit(str(error)) from None
    return made


def executor_of(schedule: Schedule, rank: int, handlers: dict[str, Callable[[Action], None]], ahead: bool) -> Executor:
    program = lower(schedule, LoweringOptions(post_validation=ahead))
    stages = {index: SleepingStage() for index, place in enumerate(program.placement) if place == rank}
    return Executor(program, rank, rank, stages, direct_routes(program.placement), handlers)


def span_s(executor: Executor, steps: int) -> float:
    """Seconds from the first begin to the last end on any rank."""
    dist.barrier()
    events = [event for _ in range(steps) for event in executor.run().events()]
    ends = torch.tensor([-min(e.start_s for e in events), max(e.end_s for e in events)], dtype=torch.float64)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return ends.sum().item()


def compare_simulated(rank: int, args: argparse.Namespace, passes: dict[str, float], p2p_s: float) -> None:
    if rank == 0:
        print(f"{'schedule':14} {'simulated':>10} {'measured':>10} {'spread':>15} {'ratio':>7}", flush=True)
    handlers: dict[str, Callable[[Action], None]] = {"GRAD_NORM": lambda _: dist.barrier()}
    handlers |= dict.fromkeys(("ALL_REDUCE_REPLICAS", "STEP"), lambda _: None)
    for schedule in schedules(args):
        executor = executor_of(schedule, rank, handlers, ahead=False)
        times = OpTimes({(kind, -1): seconds for kind, seconds in passes.items()}, p2p_s=p2p_s)
        simulated_s = simulate(executor.program, times).makespan_s
        spans = [span_s(executor, 1) for _ in range(args.rounds)]
        if rank == 0:
            spread = f"{min(spans):.3f}–{max(spans):.3f} s"
            ratio = median(spans) / simulated_s
            print(
                f"{schedule.name:14} {simulated_s:8.3f} s {median(spans):8.3f} s {spread:>15} {ratio:7.3f}", flush=True
            )


def compare_waiting(rank: int, args: argparse.Namespace) -> None:
    """A vote reads the sum of the step before, as the trainer does."""
    if rank == 0:
        print(f"{STEPS} steps      {'waiting':>10} {'ahead':>10} {'ratio':>7}", flush=True)
    votes: list[dist.Work] = []

    def vote(_: Action) -> None:
        if votes:
            votes.pop().wait()
        work = dist.all_reduce(torch.zeros(4, dtype=torch.float64), async_op=True)
        assert work is not None
        votes.append(work)

    handlers: dict[str, Callable[[Action], None]] = {"GRAD_NORM": lambda _: dist.barrier(), "GRAD_NORM_ASYNC": vote}
    handlers |= dict.fromkeys(("ALL_REDUCE_REPLICAS", "STEP"), lambda _: None)
    for schedule in schedules(args):
        both = [executor_of(schedule, rank, handlers, ahead) for ahead in (False, True)]
        spans: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            for executor, own in zip(both, spans, strict=True):
                own.append(span_s(executor, STEPS))
                if votes:
                    votes.pop().wait()
        if rank == 0:
            waiting_s, ahead_s = map(median, spans)
            print(f"{schedule.name:14} {waiting_s:8.3f} s {ahead_s:8.3f} s {ahead_s / waiting_s:7.3f}", flush=True)


class ExchangingStage(SleepingStage):
    """A stage whose forwards and backwards exchange twice."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.links_free_s = 0.0

    def _sleep(self, kind: str) -> Tensor:
        turns = turns_of(kind)
        for computed_s, exchanged_s in zip_longest(turns.computed_s, turns.exchanged_s, fillvalue=0.0):
            time.sleep(computed_s)
            if exchanged_s:
                self.links_free_s = arrival_s = max(time.perf_counter(), self.links_free_s) + exchanged_s
                self.turns.hand_over()
                time.sleep(max(0.0, arrival_s - time.perf_counter()))
        return self.result


def turns_of(kind: str) -> PassTurns:
    if kind == "W":
        return PassTurns((SLEEP_S[kind],))
    return PassTurns(tuple(part * SLEEP_S[kind] for part in (0.25, 0.5, 0.25)), (EXCHANGE_S, EXCHANGE_S))


def compare_pairs(rank: int, args: argparse.Namespace, p2p_s: float) -> None:
    handlers: dict[str, Callable[[Action], None]] = {"GRAD_NORM": lambda _: dist.barrier()}
    handlers |= dict.fromkeys(("ALL_REDUCE_REPLICAS", "STEP"), lambda _: None)
    one, other = turns_of("F"), turns_of("B")
    alone_s, most_s = one.alone_s + other.alone_s, min(sum(one.computed_s + other.computed_s), 4 * EXCHANGE_S)
    # Sleeping passes aren't slower beside an exchange.
    together_s = (pair_s(one, other) - OVERLAP_SLOWDOWN * alone_s) / (1 - OVERLAP_SLOWDOWN)
    if rank == 0:
        print(f"{'schedule':12} {'apart':>9} {'pairs':>9} {'simulated':>10} {'η of pairs':>11} {'predicted':>10}")
    for name in args.schedules or ["dualpipe", "dualpipe-v"]:
        entry, spans, efficiency = SCHEDULES[name], list[float](), 0.0
        for share in (None, 1.0):
            spec = ScheduleSpec(args.ranks, args.micro_batches, 2, replicas=entry.default_replicas, pair_share=share)
            program = lower(make_schedule(name, spec), LoweringOptions())
            turns = Turns(torch.device("cpu"))
            stages = {index: ExchangingStage(turns) for index, place in enumerate(program.placement) if place == rank}
            routes = direct_routes(program.placement)
            executor = Executor(program, rank, rank, stages, routes, handlers, turns=turns)
            spans.append(median(span_s(executor, 1) for _ in range(args.rounds)))
            passes = [event for event in executor.run().events() if event.lane == "compute"]
            took_s = [after.end_s - event.start_s for event, after in pairwise(passes) if event.action in program.pairs]
            if took_s:
                means = torch.tensor([sum(took_s), len(took_s)], dtype=torch.float64)
                dist.all_reduce(means)
                efficiency = (alone_s - means[0].item() / means[1].item()) / most_s
        numbers = range(len(program.placement))
        known = {(kind, -1): turns_of(kind).alone_s for kind in SLEEP_S}
        times = OpTimes(known, p2p_s, pairs_s={(f, b): together_s for f in numbers for b in numbers})
        simulated_s = simulate(program, times).makespan_s
        if rank == 0:
            print(
                f"{name:12} {spans[0]:7.3f} s {spans[1]:7.3f} s {simulated_s:8.3f} s {efficiency:11.2f}"
                f" {(alone_s - together_s) / most_s:10.2f}",
                flush=True,
            )


def run_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    passes, p2p_s = measure_passes(), measure_p2p(rank)
    if rank == 0:
        shown = ", ".join(f"{kind} {seconds * 1e3:.1f} ms" for kind, seconds in passes.items())
        print(f"{args.ranks} ranks, {args.micro_batches} micro-batches, {shown}, p2p {p2p_s * 1e3:.2f} ms", flush=True)
    if args.pairs:
        compare_pairs(rank, args, p2p_s)
    elif args.no_wait:
        compare_waiting(rank, args)
    else:
        compare_simulated(rank, args, passes, p2p_s)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", choices=[*SCHEDULES, []], metavar="SCHEDULE")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-wait", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=run_rank, args=(rank, store.port, args)) for rank in range(args.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
