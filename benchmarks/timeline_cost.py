"""Cost of recording the measured Timeline, relative to a training step.

    python -m benchmarks.timeline_cost [PLAN] [--preset tiny] [--rounds 40]

One process trains a preset; a second executor that records nothing takes turns with the real one on a program of passes
that do nothing, which gives the cost of one recorded instruction. Prints that cost, the instructions of a training
step, and their share of the step's median time. The smaller the micro-batches, the larger the share.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.load_config import load_run_config
from muster.parallel.executor import Executor
from muster.parallel.world import open_world
from muster.planner.auto import resolve_plan
from muster.schedule.action import Action, Lane
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Wait
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.plan_name import format_plan_name
from muster.train.data import open_dataset
from muster.train.trainer import Trainer


class IdleStage:
    """Stage whose passes do nothing."""

    nothing = torch.zeros(())

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        return self.nothing

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        return None

    backward_input = backward

    def backward_weight(self, micro_batch: int) -> None: ...

    def receive_buffer(self, micro_batch: int) -> Tensor:
        return self.nothing

    def unshard(self) -> None: ...

    def reduce_gradients(self) -> None: ...

    def all_reduce_replicated_grads(self) -> None: ...


class SilentExecutor(Executor):
    """Executor without the two clock readings and the event of each instruction."""

    def _start_next(self, lane: Lane) -> None:
        index = self._cursor[lane]
        instruction = self.lanes[lane][index]
        for wait in instruction.waits:
            self._wait_for(wait)
        self._cursor[lane] = index + 1
        self._handlers[instruction.action.kind](instruction)

    def _complete(self, wait: Wait) -> None:
        self._pending.pop(wait).wait()


def cost_of_one(rounds: int) -> tuple[float, float]:
    """Return the extra seconds of one recorded instruction, and their interquartile range over the rounds."""
    program = lower(make_schedule("1f1b", ScheduleSpec(1, 500)), LoweringOptions())
    handlers: dict[str, Callable[[Action], None]] = dict.fromkeys(("GRAD_NORM", "STEP"), lambda _: None)
    both = [kind(program, 0, 0, {0: IdleStage()}, {}, handlers) for kind in (SilentExecutor, Executor)]
    count = len(both[1].run())
    differences = []
    for _ in range(rounds):
        times = []
        for executor in both:
            start_s = time.perf_counter()
            executor.run()
            times.append(time.perf_counter() - start_s)
        differences.append((times[1] - times[0]) / count)
    ordered = sorted(differences)
    return median(ordered), ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="dp1-mb1")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    resolved = load_run_config(args.preset, None, [("parallel", args.plan)])
    config, plan = resolved.config, resolve_plan(resolved, 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, open_world(store, 0, 1, plan) as world:
        trainer = Trainer(config, plan, world, open_dataset(config, Path(folder) / "run"))
        times = [trainer.step().time_s for _ in range(8)][2:]
        instructions = len(trainer.step_events[-1][1])
        one_s, spread_s = cost_of_one(args.rounds)
    share = one_s * instructions / median(times)
    print(f"recording one instruction: {one_s * 1e6:.2f} µs (quartiles {spread_s * 1e6:.2f} µs apart)")
    spread = f"{min(times) * 1e3:.1f}–{max(times) * 1e3:.1f}"
    print(f"{args.preset}, {format_plan_name(plan)}: {instructions} instructions a step")
    print(f"step: {median(times) * 1e3:.1f} ms ({spread})")
    print(f"share of the step: {share:.4%}")


if __name__ == "__main__":
    main()
