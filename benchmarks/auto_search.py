"""Search time and results of `auto` on one core.

    python -m benchmarks.auto_search [--large] [--random 1000]

For 8 ranks × 32 micro-batches (--large: 64 × 512 too) under several times, delays and memory limits, with one, two and
four stages per rank and with their number open: CPU seconds, and the ratio of the makespan to the best registered
schedule within the same memory. --random: so many random settings instead, of 2 to 12 ranks with stages of equal and of
unequal times and one or two copies of the model, and how often `auto` is longer than a registered schedule.
"""

import argparse
from collections import Counter
from math import inf
from random import Random
from statistics import mean
from time import process_time

from muster.schedule.compare import CompareRequest, make_and_time, make_with_best_chunks
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.timing import time_schedule
from muster.spec.errors import MusterError
from muster.spec.schedules import SCHEDULES

CASES = (((1, 1, 1), 0.0, inf), ((1, 1, 1), 0.05, 1.0), ((1, 1.2, 0.8), 0.1, 1.0), ((1, 1.2, 0.8), 0.2, 0.625))
"""Times, delay and memory limit, which counts in micro-batches per rank."""


def best_registered_s(request: CompareRequest) -> float:
    found = inf
    for name, entry in SCHEDULES.items():
        if not entry.searched and entry.replicas == 1:
            try:
                found = min(found, make_and_time(name, request.spec(entry))[1].makespan_s)
            except MusterError:
                continue
    return found


def random_setting(chance: Random) -> ScheduleSpec:
    """Draw a setting."""
    ranks = chance.choice((2, 3, 4, 5, 6, 8, 8, 12))
    replicas = chance.choice((1, 1, 2)) if ranks % 2 == 0 else 1
    chunks = replicas * chance.choice((1, 2)) if replicas == 2 else chance.choice((1, 1, 2, 2, 3, 4))
    micro_batches = chance.randint(1, 4 * ranks)
    depth = ranks * chunks // replicas
    if chance.random() < 0.5:
        times = [(chance.choice((0.7, 1.0, 1.2)),) * depth for _ in range(3)]
    else:
        times = [tuple(chance.choice((0.5, 0.7, 1.0, 1.3, 2.0)) for _ in range(depth)) for _ in range(3)]
    return ScheduleSpec(
        ranks,
        micro_batches + micro_batches % replicas,
        chunks,
        *times,
        p2p_s=chance.choice((0.0, 0.05, 0.2, 0.5)),
        memory_limit=chance.choice((0.625 * ranks, ranks, 1.5 * ranks, 2 * ranks, inf)),
        replicas=replicas,
    )


def compare_random(count: int) -> None:
    """Count the settings in which `auto` is longer than a registered schedule, as long, and shorter."""
    chance, found, ratios = Random(22), Counter[str](), list[float]()
    for number in range(1, count + 1):
        setting = random_setting(chance)
        own_s, others_s = makespan_s("auto", setting), inf
        for name, entry in SCHEDULES.items():
            if not entry.searched:
                others_s = min(others_s, makespan_s(name, setting))
        if others_s == inf:
            found["no registered schedule fits"] += 1
        elif abs(own_s - others_s) < 1e-9:
            found["as long"] += 1
        else:
            found["longer" if own_s > others_s else "shorter"] += 1
            ratios.append(own_s / others_s)
        if number % 50 == 0 or number == count:
            print(f"{number}: {dict(found)}, mean ratio where they differ {mean(ratios or [1.0]):.4f}", flush=True)


def makespan_s(name: str, setting: ScheduleSpec) -> float:
    """Return the makespan of a schedule within the setting's memory; infinite where there is none."""
    try:
        timing = time_schedule(make_schedule(name, setting), setting)
    except MusterError:
        return inf
    return timing.makespan_s if max(timing.peak_activation) <= setting.memory_limit + 1e-9 else inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--random", type=int, metavar="N")
    args = parser.parse_args()
    if args.random:
        compare_random(args.random)
        return
    sizes = [(8, 32), (64, 512)] if args.large else [(8, 32)]
    print("ranks  mbs       F,I,W   hop memory chunks      CPU ÷ registered")
    for ranks, micro_batches in sizes:
        for times, p2p_s, share in CASES:
            limit = share * ranks
            for chunks in (1, 2, 4, None) if ranks == 8 else (1, 2, None):
                request = CompareRequest(ranks, micro_batches, chunks, times, p2p_s, limit, None, fill=False)
                begin_s = process_time()
                _, timing = make_with_best_chunks("auto", request)
                cpu_s = process_time() - begin_s
                ratio = timing.makespan_s / best_registered_s(request)
                shown = ",".join(map(str, times))
                print(
                    f"{ranks:5} {micro_batches:4} {shown:>11} {p2p_s:5} {limit:6g} {chunks or 'open':>6} {cpu_s:6.2f} s"
                    f" {ratio:12.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
