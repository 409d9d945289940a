"""The search for a plan: its time, what it proves, and what load, processes and effort change.

`python -m benchmarks.plan_search` prints a line for each pair of model and cluster: the seconds, on the clock and of
processors, the work, and the plan with its proof.

`--final E` also searches with effort E, and says by how much that answer is better.

`--same` answers each pair on the machine as it is, beside eight busy loops, on one process, and with twice and four
times the effort: the first three should be identical, the others never worse.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.heterogeneous import PlanSearch, find_best_plans
from muster.planner.request import PlanRequest
from muster.planner.search_budget import SearchBudget
from muster.spec.plan import Precision
from muster.spec.workload import Workload

BUSY_LOOPS = 8
"""Processes of the load that `--same` searches beside."""


class Pair(NamedTuple):
    """A question: tokens of a sequence, and sequences of a step."""

    model: str
    cluster: str
    seq_len: int
    global_batch: int
    precision: Precision = "bf16"


PAIRS = (
    Pair("llama3.1-405b", "16384xh100", 8192, 2048),
    Pair("megatron-1t", "3072xa100", 2048, 3072),
    Pair("tiny", "4xcpu", 256, 24, "fp32"),
    Pair("llama3-8b", "8xh100", 8192, 512),
    Pair("llama3-8b", "64xh100", 8192, 512),
    Pair("llama2-13b", "32xa100", 4096, 1024),
    Pair("qwen2.5-7b", "16xl40s", 4096, 256),
    Pair("llama3-70b", "512xh100", 8192, 512),
    Pair("gpt3-175b", "1024xa100", 2048, 1536),
    Pair("megatron-530b", "2240xa100", 2048, 2520),
    Pair("mixtral-8x7b", "64xh100", 4096, 1024),
    Pair("mixtral-8x22b", "256xh100", 4096, 1024),
    Pair("qwen3-235b-a22b", "1024xh100", 4096, 4096),
    Pair("deepseek-v3", "2048xh100", 4096, 15360),
    Pair("llama3-70b", "64xh100", 8192, 512),
    Pair("llama2-7b", "8xrtx4090", 4096, 256),
    Pair("deepseek-v3", "h800-2048", 4096, 15360, "fp8"),
    Pair("llama3-8b", "8xmi300x", 8192, 256),
    Pair("llama3-70b", "128xh100", 131072, 32),
    Pair("llama3.1-405b", "1024xh200", 8192, 1024),
    Pair("qwen3-30b-a3b", "16xh100", 4096, 512),
    Pair("llama3-8b", "8xh100+8xa100", 4096, 256),
    Pair("llama3-8b", "two-sites", 4096, 256),
    Pair("llama2-13b", "mixed-h100-a100", 4096, 512),
)


def main() -> None:
    """Print a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", type=float, default=1.0, help="work of each search, as in muster plan")
    parser.add_argument("--top", type=int, default=1, help="plans that are wanted")
    parser.add_argument("--only", default="", help="a part of model and cluster")
    parser.add_argument("--processes", type=int, help="processes of a search (default: as many as cores)")
    parser.add_argument("--final", type=float, metavar="E", help="compare with the answer of effort E")
    parser.add_argument("--same", action="store_true", help="compare answers under load, and with more effort")
    args = parser.parse_args()
    for pair in PAIRS:
        if args.only in f"{pair.model} on {pair.cluster}":
            _print_pair(pair, args)


def _print_pair(pair: Pair, args: argparse.Namespace) -> None:
    begin_s, begin_cpu_s = perf_counter(), _cpu_s()
    found, spent = _search(pair, args.effort, args.top, args.processes)
    result = found.result
    used_s, cpu_s = perf_counter() - begin_s, _cpu_s() - begin_cpu_s
    end = "proven" if result.proven else f"may be better by {result.gap:.1%}"
    print(f"{pair.model} on {pair.cluster}: {used_s:.2f} s, {cpu_s:.2f} s of processors, work {spent:,.0f}, {end};")
    print(f"    {_answer(found)}", flush=True)
    if args.final:
        longer, _ = _search(pair, args.final, args.top, args.processes)
        lost = _step_s(found) / _step_s(longer) - 1
        print(f"    effort {args.final:g}: {_answer(longer)}, {lost:.1%} better", flush=True)
    if args.same:
        with _busy_loops(BUSY_LOOPS):
            loaded, _ = _search(pair, args.effort, args.top, args.processes)
        alone, _ = _search(pair, args.effort, args.top, 1)
        same = _answer(found) == _answer(loaded) == _answer(alone)
        steps_s = [
            _step_s(found),
            *(_step_s(_search(pair, times * args.effort, args.top, None)[0]) for times in (2, 4)),
        ]
        worse = any(more > less for less, more in zip(steps_s, steps_s[1:], strict=False))
        shown = ", ".join(f"{step_s:.4f}" for step_s in steps_s)
        print(
            f"    {'identical' if same else 'DIFFERENT'} under load and on one process;"
            f" effort ×1, ×2, ×4: {shown} s{', WORSE' if worse else ''}",
            flush=True,
        )


def _search(pair: Pair, effort: float, top: int, processes: int | None) -> tuple[PlanSearch, float]:
    """Return the answer, and the work that it took."""
    workload = Workload(seq_len=pair.seq_len, global_batch_size=pair.global_batch)
    request = PlanRequest(load_model(pair.model), load_cluster(pair.cluster), workload, precision=pair.precision)
    budget = SearchBudget.start(effort)
    budget.processes = processes or budget.processes
    return find_best_plans(request, top, budget), budget.spent


def _answer(found: PlanSearch) -> str:
    best = found.result.best
    return f"{best[0].name}, {best[0].prediction.step_time_s:.4f} s" if best else "nothing found"


def _step_s(found: PlanSearch) -> float:
    best = found.result.best
    return best[0].prediction.step_time_s if best else float("inf")


def _cpu_s() -> float:
    """Return the seconds of processors that this process and its finished children used."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Keep so many processes busy."""
    loops = [get_context("fork").Process(target=_spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
            loop.join()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
