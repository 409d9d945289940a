"""Search time and results of `auto` on one core.

    python -m benchmarks.auto_search [--large]

For 8 ranks × 32 micro-batches (--large: 64 × 512 too) under several times, delays and memory limits, with one, two and
four stages per rank and with their number open: CPU seconds, and the ratio of the makespan to the best registered
schedule within the same memory.
"""

import argparse
from math import inf
from time import process_time

from muster.schedule.compare import CompareRequest, make_and_time, make_with_best_chunks
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true")
    sizes = [(8, 32), (64, 512)] if parser.parse_args().large else [(8, 32)]
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
