"""Share of matrix multiplications in a training step of one process, and what takes the rest.

    OMP_NUM_THREADS=1 python -m benchmarks.matmul_share --size 30m

Steps of Muster's own trainer, of the models of `train_step.py`, are timed without a profiler and with one in turns; the
table has the operators that take the most time of their own. Bar: 0.85 of a step of the 31.6 M model on one core.
"""

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import machine
from benchmarks.contestant import muster, open_store
from benchmarks.train_step import SEQ_LEN, SIZES, WARM_UP_STEPS
from muster.data.dataset import Dataset

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_linear_pointwise", "mkldnn_linear")
"""Operators that multiply matrices, without their namespaces."""
ATTENTION = "_scaled_dot_product"
"""Beginning of the names of fused attention, which multiplies matrices and takes the softmax between."""


class ProfiledPace:
    """The turns of a contestant: after warm-up, steps without and with a profiler alternate."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.plain_s: list[float] = []
        self.profiled_s: list[float] = []
        self.operators: Counter[str] = Counter()
        """Seconds of their own, of all profiled steps."""
        self._done = -WARM_UP_STEPS
        self._profile: profile | None = None
        self._begin_s = 0.0

    def wait(self) -> bool:
        """Begin the first step."""
        self._begin_s = perf_counter()
        return True

    def step_done(self, _loss: float) -> bool:
        """Note a step, and begin the next; returns False when all are done."""
        seconds = perf_counter() - self._begin_s
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.profiled_s.append(seconds)
            for event in self._profile.key_averages():
                self.operators[event.key] += event.self_cpu_time_total * 1e-6
        elif self._done >= 0:
            self.plain_s.append(seconds)
        self._done += 1
        is_profiled = self._done >= 0 and self._done % 2 == 1
        self._profile = profile(activities=[ProfilerActivity.CPU]) if is_profiled else None
        if self._profile is not None:
            self._profile.__enter__()
        self._begin_s = perf_counter()
        return self._done < 2 * self.steps


def main() -> None:
    """Measure and print the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="30m")
    parser.add_argument("--steps", type=int, default=8, help="steps of each kind")
    args = parser.parse_args()
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    torch.set_num_threads(1)
    pace = ProfiledPace(args.steps)
    with tempfile.TemporaryDirectory() as folder:
        muster(SIZES[args.size], Dataset(open_store(Path(folder)), SEQ_LEN), 0, 1, pace)  # type: ignore[arg-type]
    step_s = median(pace.plain_s)
    total_s = sum(pace.profiled_s)
    own_s = {name.split("::")[-1]: seconds for name, seconds in pace.operators.items()}
    matmul_s = sum(own_s.get(name, 0.0) for name in MATMULS)
    attention_s = sum(seconds for name, seconds in own_s.items() if name.startswith(ATTENTION))
    print(json.dumps(machine()))
    shortest_s, longest_s = min(pace.plain_s), max(pace.plain_s)
    print(f"step: {step_s:.3f} s ({shortest_s:.3f}-{longest_s:.3f}), profiled {median(pace.profiled_s):.3f} s")
    print(f"matrix multiplications: {matmul_s / total_s:.3f} of a profiled step")
    print(f"with fused attention:   {(matmul_s + attention_s) / total_s:.3f}")
    for name, seconds in pace.operators.most_common(14):
        print(f"{seconds / total_s:6.1%}  {name}")


if __name__ == "__main__":
    main()
