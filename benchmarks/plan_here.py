"""Is the plan that Muster chooses for this machine the fastest one? It and others of 2 and 4 processes, measured.

    .venv/bin/python -m benchmarks.plan_here [--cluster machine.yaml] [--model demo …] [--ranks 4] [--rounds 5]

For each model and number of processes: the plan that `parallel: auto` takes on this machine as `muster profile`
measured it, the next best by prediction, and the best of others with other degrees. Each is trained for some steps in
every round; the plans of a round take turns. As many plans are measured as there is time for (`--minutes`), four at
least.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from benchmarks.compare import machine, spread
from benchmarks.predict_here import LARGER
from muster.config.cluster_files import load_cluster
from muster.config.load_config import ResolvedConfig, load_run_config
from muster.config.local_machine import with_num_ranks
from muster.config.run_config import RunConfig
from muster.launch.launcher import launch, rank_command
from muster.launch.rank_process import exit_process
from muster.launch.rank_process import rank_main as join
from muster.planner.auto import request_of_config
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.probe.contention import time_steps
from muster.spec.cluster import ClusterSpec
from muster.spec.plan_name import format_plan_name

MODELS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "tiny": ("tiny", ()),
    "demo": ("demo", ()),
    "larger": ("demo", LARGER),
}
"""Name → preset and what is changed of it."""
WARM_UP_STEPS, STEPS = 2, 4
SEARCH_EFFORT, RANKED = 0.6, 150
START_S = 1.5
"""To begin with a plan: ranks meet, and make their model."""
FEWEST = 4
"""Plans that are measured, however slow they are."""


def candidates(resolved: ResolvedConfig, cluster: ClusterSpec, most: int) -> list[EvaluatedPlan]:
    """The chosen plan, first; then half of the others as they are ranked, and half the best of other degrees."""
    request = request_of_config(resolved, cluster)
    ranked = search(request, RANKED, SearchBudget.start(SEARCH_EFFORT)).best
    runners_up = ranked[1 : 1 + (most - 1) // 2]
    taken, found = {_degrees(one) for one in [ranked[0], *runners_up]}, [ranked[0], *runners_up]
    for one in ranked:
        if len(found) < most and _degrees(one) not in taken:
            taken.add(_degrees(one))
            found.append(one)
    return found


def in_time(found: list[EvaluatedPlan], rounds: int, seconds: float) -> list[EvaluatedPlan]:
    """The first of the plans, as many as can be measured in so many seconds if they take what is predicted."""
    left_s, chosen = seconds, []
    for one in found:
        left_s -= rounds * (START_S + (WARM_UP_STEPS + STEPS) * one.prediction.step_time_s)
        if left_s < 0 and len(chosen) >= FEWEST:
            break
        chosen.append(one)
    return chosen


def _degrees(one: EvaluatedPlan) -> tuple[int, int, bool]:
    return one.plan.tp, one.plan.pp, one.plan.default_strategy.zero == "z3"


def measure(configs: list[RunConfig], rounds: int, folder: Path) -> list[list[float]]:
    """Return the seconds of a step in each round, by plan."""
    ranks = configs[0].parallel.world_size
    (folder / "work.json").write_text(json.dumps([rounds, [config.model_dump(mode="json") for config in configs]]))
    command = rank_command("benchmarks.plan_here", folder, ranks)
    if launch(command, ranks, folder).report():
        raise RuntimeError(f"{ranks} ranks did not finish; see their messages above")
    return json.loads((folder / "times.json").read_text())


def run_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """One rank of `measure`. Returns 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rounds, work = json.loads((folder / "work.json").read_text())
    configs = [RunConfig.model_validate(one) for one in work]
    times_s: list[list[float]] = [[] for _ in configs]
    for number in range(rounds):
        for index, config in enumerate(configs):
            generation = 1 + number * len(configs) + index
            times_s[index].append(time_steps(config, store, rank, generation, WARM_UP_STEPS, STEPS))
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times_s))
    return 0


def report(name: str, ranks: int, found: list[EvaluatedPlan], times_s: list[list[float]]) -> float:
    """A line for each plan, and how the chosen one compares with the fastest, which is returned."""
    best_s = min(map(median, times_s))
    print(f"\n{name} on {ranks} processes")
    for one, own_s in zip(found, times_s, strict=True):
        range_ = spread(own_s)
        print(
            f"  {format_plan_name(one.plan):34} predicted {one.prediction.step_time_s * 1e3:8.1f} ms"
            f"  measured {range_.median * 1e3:8.1f} ms ({range_.min * 1e3:.1f} … {range_.max * 1e3:.1f})"
            f"  {range_.median / best_s:5.2f} of the fastest" + ("  chosen" if one is found[0] else "")
        )
    print(f"  the chosen plan takes {median(times_s[0]) / best_s:.3f} of the fastest one's time (bar 1.10)", flush=True)
    return median(times_s[0]) / best_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a file of muster profile (default: measure now)")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plans", type=int, default=7, help="that are measured for each model, at most")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it")
    args = parser.parse_args()
    end_s, ratios = perf_counter() + 60 * args.minutes, []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("on " + ", ".join(f"{key} {value}" for key, value in machine().items() if value))
    with tempfile.TemporaryDirectory() as place:
        file = args.cluster or Path(place) / "machine.yaml"
        if args.cluster is None:
            subprocess.run([sys.executable, "-m", "muster", "profile", "-o", str(file)], check=True)
        profiled = load_cluster(str(file))
        pairs = list(product(args.model, args.ranks))
        for number, (name, ranks) in enumerate(pairs):
            preset, changes = MODELS[name]
            resolved = load_run_config(preset, None, [("parallel", "auto"), ("parallel.precision", "fp32"), *changes])
            found = candidates(resolved, with_num_ranks(profiled, ranks), args.plans)
            found = in_time(found, args.rounds, (end_s - perf_counter()) / (len(pairs) - number))
            folder = Path(place) / f"{name}-{ranks}"
            folder.mkdir()
            configs = [resolved.config.model_copy(update={"parallel": one.plan}) for one in found]
            ratios.append(report(name, ranks, found, measure(configs, args.rounds, folder)))
    within = sum(ratio <= 1.10 for ratio in ratios)
    print(f"\n{within} of {len(ratios)} chosen plans are within 10 % of the fastest that was measured")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        exit_process(join(run_rank))
    main()
