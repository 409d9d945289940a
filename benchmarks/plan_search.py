"""Time of the search for a plan, and proof of its result if it finished: `python -m benchmarks.plan_search`.

One process, one core. It prints wall-clock and CPU seconds: equal on an idle machine, and the latter nearly the
same on a busy one.
"""

import argparse
from time import process_time

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.planner.heterogeneous import find_best_plans
from muster.planner.request import PlanRequest
from muster.spec.workload import Workload

CASES = (
    ("llama3.1-405b", "16384xh100", 8192, 2048, "bf16"),
    ("megatron-1t", "3072xa100", 2048, 3072, "bf16"),
    ("tiny", "4xcpu", 256, 24, "fp32"),
    ("llama3-8b", "8xh100", 8192, 512, "bf16"),
    ("llama3-8b", "64xh100", 8192, 512, "bf16"),
    ("llama2-13b", "32xa100", 4096, 1024, "bf16"),
    ("qwen2.5-7b", "16xl40s", 4096, 256, "bf16"),
    ("llama3-70b", "512xh100", 8192, 512, "bf16"),
    ("gpt3-175b", "1024xa100", 2048, 1536, "bf16"),
    ("megatron-530b", "2240xa100", 2048, 2520, "bf16"),
    ("mixtral-8x7b", "64xh100", 4096, 1024, "bf16"),
    ("mixtral-8x22b", "256xh100", 4096, 1024, "bf16"),
    ("qwen3-235b-a22b", "1024xh100", 4096, 4096, "bf16"),
    ("deepseek-v3", "2048xh100", 4096, 15360, "bf16"),
)
"""Model, cluster, tokens of a sequence, sequences of a step, precision."""


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of search at most")
    parser.add_argument("--top", type=int, default=1, help="plans that are wanted")
    parser.add_argument("--only", default="", help="a part of the model's name")
    args = parser.parse_args()
    for model, cluster, seq_len, batch, precision in CASES:
        if args.only not in model:
            continue
        workload = Workload(seq_len=seq_len, global_batch_size=batch)
        request = PlanRequest(load_model(model), load_cluster(cluster), workload, precision=precision)
        begin_s = process_time()
        found = find_best_plans(request, args.top, args.limit).result
        used_s = process_time() - begin_s
        end = "proven" if found.proven else f"may be better by {found.gap:.1%}"
        best = f"{found.best[0].name}, {found.best[0].prediction.step_time_s:.3f} s" if found.best else "nothing found"
        print(f"{model} on {cluster}: {found.seconds:.2f} s, {used_s:.2f} s of a processor, {end}; {best}", flush=True)
        print("    " + ", ".join(f"{count:,} {kind}" for kind, count in found.counts.items()), flush=True)


if __name__ == "__main__":
    main()
