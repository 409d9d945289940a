"""Time of a prediction: large clusters, and from the shell.

    .venv/bin/python -m benchmarks.predict_scale

Prints the seconds of `predict` (legality, lowering, times, simulation, memory), of its parts, and of `muster predict`
from shell to answer, each the best of several: wall time, and CPU time, which other work on the machine doesn't change.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, process_time
from typing import TypeVar

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time.plan_times import plan_times
from muster.schedule.build import build_program
from muster.simulate.predict import predict
from muster.simulate.simulator import simulate_step
from muster.spec.cluster import ClusterSpec
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

T = TypeVar("T")
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A prediction, and how long it may take."""

    name: str
    model: ModelSpec
    plan: Plan
    workload: Workload
    cluster: ClusterSpec
    bar_s: float | None = None


def unequal_plan() -> tuple[Plan, int]:
    """80 stages, of which every fifth is cut otherwise and has a layer less; and how many layers they hold."""
    kinds = [StageSpec(layers=2, mesh=Mesh(dp_shard=157, tp=8)), StageSpec(layers=1, mesh=Mesh(dp_shard=314, tp=4))]
    stages = tuple(kinds[index % 5 == 4] for index in range(80))
    plan = parse_plan_name("pp80-mb2-z1-rfull").model_copy(update={"stages": stages})
    return plan, sum(stage.layers for stage in stages)


def cases() -> list[Case]:
    """The bars' sizes."""
    trillion = load_model("megatron-1t")
    unequal, num_layers = unequal_plan()
    return [
        Case(
            "1 T parameters on 3,072 devices",
            trillion,
            parse_plan_name("dp6-tp8-pp64-z1-rfull"),
            Workload(seq_len=2048, global_batch_size=3072),
            load_cluster("3072xa100"),
            1.0,
        ),
        Case(
            "the same, interleaved",
            trillion,
            parse_plan_name("dp6-tp8-pp64v2-z1-sinterleaved-rfull"),
            Workload(seq_len=2048, global_batch_size=3072),
            load_cluster("3072xa100"),
        ),
        Case(
            f"{unequal.world_size:,} devices, unequal pipeline",
            trillion.model_copy(update={"num_layers": num_layers}),
            unequal,
            Workload(seq_len=2048, global_batch_size=157 * 2 * 320),
            load_cluster(f"{unequal.world_size}xh100"),
            5.0,
        ),
    ]


def best_of(function: Callable[[], T]) -> tuple[T, float, float]:
    """Return the function's result, and the wall and CPU seconds of the best of several calls."""
    walls_s, cpus_s = [], []
    for _ in range(REPEATS):
        start_s, start_cpu_s = perf_counter(), process_time()
        result = function()
        walls_s.append(perf_counter() - start_s)
        cpus_s.append(process_time() - start_cpu_s)
    return result, min(walls_s), min(cpus_s)


def show(case: Case) -> None:
    one, wall_s, cpu_s = best_of(lambda: predict(case.model, case.plan, case.workload, case.cluster))
    program, lower_s, _ = best_of(lambda: build_program(one.plan, case.model, case.workload))
    times, times_s, _ = best_of(lambda: plan_times(case.model, one.plan, case.workload, case.cluster))
    _, simulate_s, _ = best_of(lambda: simulate_step(program, times))
    count = sum(len(lane) for lanes in program.ranks for lane in lanes.values())
    print(f"{case.name}: {count:,} instructions; predicted step {one.step_time_s:.1f} s")
    bar = f" (bar {case.bar_s:g} s)" if case.bar_s else ""
    print(f"  predict {wall_s:.2f} s wall, {cpu_s:.2f} s CPU{bar}")
    print(f"  of it lowering {lower_s:.2f} s, times {times_s:.2f} s, simulation {simulate_s:.2f} s")


def show_shell() -> None:
    words = "predict --model llama3-8b --cluster 64xh100 --plan dp8-tp2-pp4-z1-relem"
    for flags in ("--json", ""):
        command = [sys.executable, "-m", "muster", *words.split(), *flags.split()]
        _, wall_s, _ = best_of(partial(subprocess.run, command, capture_output=True, check=True))
        print(f"muster {words} {flags}: {wall_s:.2f} s wall from shell to answer (bar 0.6 s)")


def main() -> None:
    for case in cases():
        show(case)
    show_shell()


if __name__ == "__main__":
    main()
