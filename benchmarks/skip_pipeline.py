"""Simulated gain of pipelines whose micro-batches skip stages (SkipPipe), on clusters whose links differ.

`python -m benchmarks.skip_pipeline [--only NAME]` prints, for three clusters of single GPUs, the predicted step of

* 1F1B with stages on the nodes in the order in which they are listed;
* the same with nothing skipped and stages placed by the search over the links (skip 0);
* a quarter, a third and a half of the stages skipped by each micro-batch, with the paths and places that were found;

and how much shorter the last are than each of the first two. **They train something else**: see
docs/skipped-stages.md. The paper reports up to 55 % of the iteration time (arXiv:2502.19913, abstract), for models of
500 M to 8 B parameters on up to 20 nodes whose links it doesn't list; these clusters are not the paper's.
"""

import argparse
from random import Random
from time import perf_counter

from muster.config.cluster_files import load_device
from muster.config.named_model import load_model
from muster.planner.skip_paths import resolve_on_cluster
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.errors import MusterError
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

RATIOS = (0.25, 1 / 3, 0.5)


def cluster_of(name: str, gbit_per_s: list[list[float]], latency_s: float) -> ClusterSpec:
    """Nodes of one A100 each, joined by links of these rates."""
    device = load_device("a100-80-sxm")
    assert device.node is not None
    group = NodeGroup(
        num_nodes=len(gbit_per_s), devices_per_node=1, device=device, intra=device.node.intra, nics=device.node.nics
    )
    own = device.node.intra.bandwidth_bytes_per_s
    count = range(len(gbit_per_s))
    rates = tuple(tuple(own if a == b else gbit_per_s[a][b] * 1e9 / 8 for b in count) for a in count)
    latencies = tuple(tuple(1e-6 if a == b else latency_s for b in count) for a in count)
    return ClusterSpec(name=name, groups=(group,), node_bandwidth_bytes_per_s=rates, node_latency_s=latencies)


def regions(count: int, size: int, near: float, far: float) -> list[list[float]]:
    """Rates between nodes in turn in `size` regions: `near` Gbit/s within one, `far` between two."""
    return [[near if a % size == b % size else far for b in range(count)] for a in range(count)]


def drawn(count: int, seed: int, low: float, high: float) -> list[list[float]]:
    """Rates drawn for each pair of nodes, evenly on a logarithmic scale."""
    chance = Random(seed)
    rates = [[0.0] * count for _ in range(count)]
    for one in range(count):
        for other in range(one):
            rates[one][other] = rates[other][one] = low * (high / low) ** chance.random()
    return rates


CASES = (
    ("four regions", regions(8, 4, 10.0, 1.0), 1e-3),
    ("drawn links", drawn(8, 1, 0.5, 10.0), 5e-3),
    ("twelve drawn links", drawn(12, 2, 0.5, 10.0), 5e-3),
)
"""Name, Gbit/s from node to node, and latency of each cluster."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one cluster")
    parser.add_argument("--model", default="llama2-7b")
    args = parser.parse_args()
    model, workload = load_model(args.model), Workload(seq_len=2048, global_batch_size=16)
    print(f"{model.name}, {workload.global_batch_size} micro-batches of a sequence of {workload.seq_len}, bf16")
    print(f"{'cluster':20}{'plan':22}{'step s':>8}{'shorter than 1F1B':>19}{'than skip 0':>13}{'found in s':>12}")
    for name, rates, latency_s in CASES:
        if args.only not in (None, name):
            continue
        cluster = cluster_of(name, rates, latency_s)
        pp = len(rates)
        listed_s = predict(model, parse_plan_name(f"pp{pp}-mb1-bf16"), workload, cluster).step_time_s
        print(f"{name:20}{'1f1b as listed':22}{listed_s:8.2f}")
        placed_s = None
        for ratio in (0.0, *RATIOS):
            start_s = perf_counter()
            try:
                plan = resolve_on_cluster(parse_plan_name(f"pp{pp}-mb1-skip{ratio:.6g}-bf16"), model, workload, cluster)
            except MusterError as error:
                print(f"{name:20}skip {ratio:.2f}: {error}")
                continue
            found_s = perf_counter() - start_s
            step_s = predict(model, plan, workload, cluster).step_time_s
            placed_s = placed_s or step_s
            gains = f"{1 - step_s / listed_s:19.0%}{1 - step_s / placed_s:13.0%}"
            print(f"{name:20}{f'skip {ratio:.2f}':22}{step_s:8.2f}{gains}{found_s:12.1f}", flush=True)


if __name__ == "__main__":
    main()
