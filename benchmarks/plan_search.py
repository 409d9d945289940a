"""How long the search for a plan takes, and whether it came to its end: `python -m benchmarks.plan_search`."""

import argparse

from muster.planner.request import Request
from muster.planner.search import search
from muster.spec.load_cluster import load_cluster
from muster.spec.named_model import load_model
from muster.spec.workload import Workload

CASES = (
    ("llama3.1-405b", "16384xh100", 8192, 2048, "bf16"),
    ("megatron-1t", "3072xa100", 2048, 3072, "bf16"),
    ("llama3-8b", "64xh100", 8192, 512, "bf16"),
    ("tiny", "4xcpu", 256, 24, "fp32"),
)


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of search at most")
    args = parser.parse_args()
    for model, cluster, seq_len, batch, precision in CASES:
        workload = Workload(seq_len=seq_len, global_batch_size=batch)
        request = Request(load_model(model), load_cluster(cluster), workload, precision=precision)
        found = search(request, 1, args.limit)
        end = "proven" if found.proven else f"may be better by {found.gap:.1%}"
        best = f"{found.best[0].name}, {found.best[0].prediction.step_time_s:.3f} s" if found.best else "nothing found"
        print(f"{model} on {cluster}: {found.seconds:.2f} s, {end}; {best}; {dict(found.seen)}", flush=True)


if __name__ == "__main__":
    main()
