"""Does `muster predict` know this machine? Predicted against measured steps and memory, for plans of 4 processes.

    .venv/bin/python -m benchmarks.predict_here [--cluster machine.yaml] [--only demo …]

Measures the machine with `muster profile` unless a file is given, then trains each case for some steps and prints the
prediction from the cluster file alone beside the median of what was measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.compare import machine
from muster.config.cluster_files import load_cluster
from muster.config.load_config import load_run_config, write_run_files
from muster.launch.launcher import launch, rank_command
from muster.planner.auto import resolve_plan
from muster.simulate.breakdown import Breakdown, breakdown
from muster.simulate.predict import Prediction, predict
from muster.simulate.timeline import timeline_from_json
from muster.spec.cluster import ClusterSpec

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Case:
    """A run of the demo's data: what is changed of it, and how many steps are measured."""

    name: str
    plan: str
    overrides: tuple[tuple[str, str], ...] = ()
    steps: int = 16


LARGER = (
    ("model.hidden_size", "384"),
    ("model.num_layers", "8"),
    ("model.num_heads", "8"),
    ("model.num_kv_heads", "4"),
    ("model.intermediate_size", "1024"),
    ("model.vocab_size", "2048"),
)
CASES = (
    Case("demo", "dp2-pp2-mb1-z1-fp32"),
    Case("z3", "dp4-mb2-fp32"),
    Case("z2", "dp2-pp2-mb1-z2-fp32"),
    Case("pipeline", "pp4-mb1-fp32"),
    Case("tensor", "tp2-pp2-mb2-fp32"),
    Case("tensor and data", "dp2-tp2-mb2-z1-fp32"),
    Case("full recompute", "dp2-pp2-mb2-z1-rfull-fp32"),
    Case("larger", "dp2-pp2-mb1-z1-fp32", LARGER, steps=8),
    Case("larger z3", "dp4-mb1-fp32", LARGER, steps=8),
)


@dataclass(frozen=True)
class Measured:
    """Results that a run reports of itself."""

    step_s: float
    others: float
    """The part of the cores' time that went to other programs meanwhile."""
    parts: Breakdown
    own_profile: Breakdown
    """Prediction of the run after a short profile of its own stages."""


def measure(case: Case, run_dir: Path, cache: Path) -> Measured:
    """Trains."""
    flags = [*_overrides(case), ("train.steps", str(case.steps)), ("train.sample_tokens", "0")]
    flags += [("eval.batches", "0"), ("data.cache", str(cache)), ("data.max_bytes", "2000000")]
    command = [sys.executable, "-m", "muster", "train", "--preset", "demo", "--run", str(run_dir)]
    command += [word for key, value in flags for word in (f"--{key}", value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before_s, own_before_s, start_s = _busy_s(), _children_s(), perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    passed_s = perf_counter() - start_s
    others = (_busy_s() - before_s - (_children_s() - own_before_s)) / passed_s / len(os.sched_getaffinity(0))
    if done.returncode:
        raise RuntimeError(f"case {case.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times_s = [row["time/step"] for row in rows[WARM_UP_STEPS:]]
    timelines = json.loads((run_dir / "timeline.json").read_text())
    parts, own_profile = (breakdown(timeline_from_json(timelines[side])) for side in ("measured", "predicted"))
    return Measured(median(times_s), others, parts, own_profile)


def _busy_s() -> float:
    """Seconds that the machine's cores have computed, for whomever."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_memory(case: Case, folder: Path, cache: Path) -> list[int]:
    """The peak of each rank's tensors during a step, in bytes."""
    flags = [*_overrides(case), ("data.cache", str(cache)), ("data.max_bytes", "2000000")]
    resolved = load_run_config("demo", None, flags)
    plan = resolve_plan(resolved, None)
    write_run_files(resolved, plan, folder)
    command = rank_command("benchmarks.peak_memory", folder, plan.world_size)
    if launch(command, plan.world_size, folder).report():
        raise RuntimeError(f"case {case.name} failed; see its messages above")
    return [json.loads((folder / f"peak-{rank}.json").read_text()) for rank in range(plan.world_size)]


def predicted(case: Case, cluster: ClusterSpec) -> Prediction:
    """From the cluster file alone."""
    resolved = load_run_config("demo", None, _overrides(case))
    config = resolved.config
    return predict(config.model, resolve_plan(resolved, None), config.workload, cluster)


def _overrides(case: Case) -> list[tuple[str, str]]:
    return [("parallel", case.plan), *case.overrides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="a file of muster profile (default: measure now)")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--parts", action="store_true", help="show where the time goes, too")
    args = parser.parse_args()
    print("on " + ", ".join(f"{key} {value}" for key, value in machine().items() if value))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file = args.cluster
        if file is None:
            file = folder / "machine.yaml"
            subprocess.run([sys.executable, "-m", "muster", "profile", "-o", str(file)], check=True)
        cluster = load_cluster(str(file))
        print(f"{'':46}{'step':>12}{'measured':>12}{'error':>8}{'memory':>13}{'measured':>13}{'error':>8}{'others':>8}")
        for index, case in enumerate(CASES):
            if args.only and case.name not in args.only:
                continue
            one = predicted(case, cluster)
            run = measure(case, folder / f"run-{index}", folder / "data")
            peaks = measure_memory(case, folder / f"memory-{index}", folder / "data")
            fullest = max(one.memory, key=lambda rank: rank.total)
            peak = peaks[fullest.rank]
            print(
                f"{case.name:16} {case.plan:28} {one.step_time_s * 1e3:9.1f} ms{run.step_s * 1e3:9.1f} ms"
                f"{one.step_time_s / run.step_s - 1:+8.1%}{fullest.total / 2**20:9.2f} MiB{peak / 2**20:9.2f} MiB"
                f"{fullest.total / peak - 1:+8.1%}{run.others:8.0%}",
                flush=True,
            )
            if args.parts:
                ours = breakdown(one.timeline)
                for name in ("step", "forward", "backward", "send", "gather", "optimizer", "bubble"):
                    row = (getattr(side, f"{name}_s") * 1e3 for side in (ours, run.own_profile, run.parts))
                    print(f"    {name:12}" + "".join(f" {time_ms:8.2f} ms" for time_ms in row))


if __name__ == "__main__":
    main()
