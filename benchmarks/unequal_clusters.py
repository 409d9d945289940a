"""Gains of the planner on clusters whose nodes or links differ: the cases of unequal_clusters.yaml.

`python -m benchmarks.unequal_clusters [--effort E] [--only NAME]` prints for each the simulated steps of

* the best plan with nodes as they are listed, layers and data evenly on them, and the mesh's axes in the usual order
  (pipeline outermost, tensor parallelism innermost): the best of all degrees, micro-batches, schedules and shards;
* the same with the axes in any order, which may already lay pipelines across slow links;
* the best of both with an order of passes that was found for its own times and hops, as the plan that was found may
  have: what is left of the gain is the layout's alone;
* the plan and order of nodes that was found;

and how many times as fast the last is as each of the others. All are simulated with the links as they are.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from muster.config.cluster_files import load_device
from muster.config.named_model import load_model
from muster.planner.custom_schedules import find_custom_schedules
from muster.planner.heterogeneous import CUSTOM_SCHEDULE_SHARE, find_best_plans
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.plan import MESH_AXES
from muster.spec.workload import Workload

CASES = Path(__file__).with_suffix(".yaml")


def cluster_of(case: dict[str, Any]) -> ClusterSpec:
    """The cluster that a case describes."""
    kinds = {letter: load_device(name) for letter, name in case["kinds"].items()}
    groups = []
    for letter in case["nodes"]:
        device = kinds[letter]
        assert device.node is not None
        groups.append(
            NodeGroup(
                num_nodes=1,
                devices_per_node=device.node.devices,
                device=device,
                intra=device.node.intra,
                nics=device.node.nics,
            )
        )
    slow = {tuple(map(int, pair.split("-"))): share for pair, share in case.get("slow_pairs", {}).items()}

    def rate(one: int, other: int) -> float:
        first, second = case["nodes"][one], case["nodes"][other]
        if one == other:
            intra = groups[one].intra
            return intra.bandwidth_bytes_per_s * intra.efficiency
        listed = case["links"].get(first + second) or case["links"][second + first]
        return listed * 1e9 * slow.get((min(one, other), max(one, other)), 1.0)

    count = range(len(groups))
    matrix = tuple(tuple(rate(one, other) for other in count) for one in count)
    return ClusterSpec(name=case["name"], groups=tuple(groups), node_bandwidth_bytes_per_s=matrix)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=float, default=7.0, help="work of each search, of three for a case")
    parser.add_argument("--only", help="one case")
    args = parser.parse_args()
    gains, over_any, over_timed = [], [], []
    print(f"{'case':24}{'as listed':>11}{'any axes':>11}{'own order':>11}{'found':>11}{'gains':>18}  order and plan")
    for case in yaml.safe_load(CASES.read_text()):
        if args.only not in (None, case["name"]):
            continue
        workload = Workload(seq_len=case["seq_len"], global_batch_size=case["global_batch"])
        precision = "fp16" if "v100" in str(case["kinds"]) else "bf16"
        request = PlanRequest(load_model(case["model"]), cluster_of(case), workload, precision=precision)
        even = {"stages": (), "uneven_micro_batches": ()}
        listed, equal = (
            search(replace(request, fixed=fixed), 1, SearchBudget.start(args.effort)).best
            for fixed in (even | {"axis_order": MESH_AXES}, even)
        )
        found = find_best_plans(request, 1, SearchBudget.start(args.effort))
        if not equal or not listed or not found.result.best:
            print(f"{case['name']:24}{'nothing fits':>24}")
            continue
        best = found.result.best[0]
        listed_s = listed[0].prediction.step_time_s
        any_s = min(listed_s, equal[0].prediction.step_time_s)
        evaluator = PlanEvaluator(replace(request, fixed=even))
        ordered = find_custom_schedules(
            [listed[0].plan, equal[0].plan], evaluator, SearchBudget.start(CUSTOM_SCHEDULE_SHARE * args.effort)
        )
        timed_s = min([any_s, *(one.prediction.step_time_s for one in ordered)])
        gains.append(listed_s / best.prediction.step_time_s)
        over_any.append(any_s / best.prediction.step_time_s)
        over_timed.append(timed_s / best.prediction.step_time_s)
        order = "".join(case["nodes"][node] for node in found.node_order or ())
        print(
            f"{case['name']:24}{listed_s:>9.3f} s{any_s:>9.3f} s{timed_s:>9.3f} s"
            f"{best.prediction.step_time_s:>9.3f} s{gains[-1]:>6.2f}{over_any[-1]:>6.2f}{over_timed[-1]:>6.2f}"
            f"  {order} {best.name}",
            flush=True,
        )
    if gains:
        print(
            f"median gain {median(gains):.2f}, over any order of axes {median(over_any):.2f}, with orders of their own"
            f" {median(over_timed):.2f}, of {len(gains)} cases"
        )


if __name__ == "__main__":
    main()
