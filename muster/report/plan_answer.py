"""Answer of `muster plan`, for people and as JSON."""

from typing import Any

from muster.cost.memory.forecast import MEMORY_HEADROOM
from muster.planner.answer import PlanAnswer
from muster.planner.explain import families
from muster.planner.heterogeneous import PlanSearch
from muster.planner.neighbours import NOT_EVALUATED
from muster.planner.search_result import COUNTERS, SearchResult
from muster.report.console import table_console
from muster.report.formatting import format_count, format_seconds
from muster.report.plans import footprint_table, plan_json, plan_names, plan_table
from muster.report.training import price_json, training_lines
from muster.spec.units import pluralize


def print_answer(answer: PlanAnswer, explain: bool) -> None:
    """Print the whole answer."""
    request = answer.request
    result = answer.result
    console = table_console()
    workload = request.workload
    print(f"model     {request.model.name}, {request.model.num_parameters:,} parameters")
    print(f"cluster   {request.cluster.name}, {pluralize(request.cluster.num_devices, 'device')}")
    print(f"step      {pluralize(workload.global_batch_size, 'sequence')} of {pluralize(workload.seq_len, 'token')}")
    for line in request.derived_lines:
        print(f"          {line}")
    print(f"framework {request.framework.label(request.base.compile)}")
    print(f"searched  {_search_text(result)}")
    for line in _node_order_lines(answer.search):
        print(line)
    if not result.leaves_head_room and request.memory_limit_bytes is None:
        print(f"memory    no plan was found that leaves {MEMORY_HEADROOM:.0%} of each device's memory free")
    print()
    print("\n".join(plan_names(result.best)) + "\n")
    console.print(plan_table(result.best))
    if answer.training_costs:
        print()
        console.print(footprint_table(answer.training_costs))
        print("\nThe whole training under the first:")
        print("\n".join(f"  {line}" for line in training_lines(answer.training_costs[0], request.cluster)))
    if any(verdict.unsupported for verdict in result.best):
        print("\n* " + "; ".join(sorted({line for one in result.best for line in one.unsupported})))
    print("\nWhy the first, and the effect of single changes to it:")
    for neighbour in answer.neighbours:
        if not neighbour.timed_out:
            print(f"  {neighbour.sentence}")
    if late := [neighbour.change for neighbour in answer.neighbours if neighbour.timed_out]:
        print(f"  {NOT_EVALUATED}: {', '.join(late)}")
    if explain:
        print("\nThe best plan of every family:")
        for family in families(request, result.best[0], answer.budget):
            print(f"  {family.name}: {family.sentence}")


def _node_order_lines(arranged: PlanSearch) -> list[str]:
    """Return the order of unequal nodes, and the gain from it."""
    if arranged.node_order is None:
        return []
    lines = [f"nodes     order of the listed ones: {' '.join(map(str, arranged.node_order))}"]
    if arranged.naive_step_s is not None:
        best = arranged.result.best[0].prediction
        gain = arranged.naive_step_s / best.step_time_s
        lines.append(f"          {gain:.2f} times as fast as the best plan for nodes as listed and equal stages,")
        lines.append(f"          which takes {format_seconds(arranged.naive_step_s)} a step{_naive_cost(arranged)}")
    return lines


def _naive_cost(arranged: PlanSearch) -> str:
    """Return the cost of the naive plan, where prices are known."""
    price = arranged.request.cluster.usd_per_hour
    tokens = arranged.request.workload.tokens_per_step
    if price is None or arranged.naive_step_s is None:
        return ""
    return f", ${format_count(price * arranged.naive_step_s / 3600 / tokens * 1e9)} for 1B tokens"


def _search_text(result: SearchResult) -> str:
    """Return how much was searched, and how good the answer is known to be."""
    seen = result.counts
    plans = pluralize(seen["drafts"], "plan")
    text = (
        f"{plans} of {pluralize(seen['shapes'], 'shape')} in {result.seconds:.1f} s,"
        f" {seen['simulated']:,} simulated:\n          "
    )
    if result.proven:
        return text + "no other plan can be better than the first"
    if result.has_custom_schedule:
        return text + "the first plan's schedule was searched for its own times: another may be better"
    if result.gave_up_head_room_early:
        return text + f"stopped early: another plan may leave {MEMORY_HEADROOM:.0%} of the memory free"
    if result.gap >= 1:  # nothing is known of what memory the others need
        return text + "stopped early: another plan may be better (raise --effort)"
    return text + f"stopped early: another plan may be better by up to {result.gap:.1%}"


def answer_json(answer: PlanAnswer, explain: bool) -> dict[str, Any]:
    """Return plain data for JSON; null where a value is unknown."""
    request = answer.request
    result = answer.result
    footprints = answer.training_costs or [None] * len(result.best)
    plain = {
        "version": 1,
        "model": request.model.name,
        "cluster": request.cluster.name,
        "devices": request.cluster.num_devices,
        "seq_len": request.workload.seq_len,
        "global_batch_size": request.workload.global_batch_size,
        "objective": request.objective,
        "prices": price_json(request.cluster),
        "framework": request.framework.name,
        "compile": request.base.compile,
        "derived": list(request.derived_lines),
        "plans": [plan_json(number, *both) for number, both in enumerate(zip(result.best, footprints, strict=True), 1)],
        "why": [{"change": one.change, "slower": one.slowdown, "sentence": one.sentence} for one in answer.neighbours],
        "node_order": answer.search.node_order,
        "naive_step_time_s": answer.search.naive_step_s,
        "search": {
            **{name: result.counts[name] for name in COUNTERS},
            "seconds": result.seconds,
            "proven": result.proven,
            "gap": result.gap,
        },
    }
    if explain:
        plain["families"] = [
            {
                "family": one.name,
                "plan": one.best.name if one.best else None,
                "step_time_s": one.best.prediction.step_time_s if one.best else None,
                "sentence": one.sentence,
            }
            for one in families(request, result.best[0], answer.budget)
        ]
    return plain
