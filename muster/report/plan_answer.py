"""Answer of `muster plan`, for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf
from typing import Any

from muster.cost.island_loss import LOSS_SOURCE, TOKENS_SOURCE
from muster.cost.memory.forecast import MEMORY_HEADROOM
from muster.planner.alternatives import LESS_AND_MORE, describe_difference, describe_relation
from muster.planner.answer import PlanAnswer
from muster.planner.families import OFFLOAD_EFFORT, explain_family
from muster.planner.heterogeneous import PlanSearch
from muster.planner.islands import IslandComparison, outer_flags
from muster.planner.reasons import Reason
from muster.planner.search_result import COUNTERS, ROUNDING_TOLERANCE
from muster.report.console import table_console
from muster.report.plans import footprint_table, plan_json, plan_names, plan_table, unnamed_settings
from muster.report.prediction import range_text
from muster.report.training import price_json, training_lines
from muster.simulate.resource_load import busy_seconds
from muster.spec.formatting import format_count, format_fraction, format_seconds
from muster.spec.units import pluralize


def print_answer(answer: PlanAnswer, explain: bool) -> None:
    """Print the whole answer."""
    request = answer.request
    result = answer.result
    console = table_console()
    workload = request.workload
    print(f"model     {request.model.name}, {request.model.num_parameters:,} parameters")
    print(f"cluster   {request.cluster.name}, {pluralize(request.cluster.num_devices, 'device')}")
    for line in _part_lines(answer):
        print(line)
    print(f"step      {pluralize(workload.global_batch_size, 'sequence')} of {pluralize(workload.seq_len, 'token')}")
    for line in request.derived_lines:
        print(f"          {line}")
    print(f"framework {request.framework.label(answer.first.prediction.compiled)}")
    for line in _required_lines(answer):
        print(line)
    for line in _island_lines(answer):
        print(line)
    print(f"searched  {_search_text(answer)}")
    for line in _node_order_lines(answer.search):
        print(line)
    if not result.leaves_head_room and request.memory_limit_bytes is None:
        print(f"memory    no plan was found that leaves {MEMORY_HEADROOM:.0%} of each device's memory free")
    print()
    print("\n".join(plan_names(result.best)) + "\n")
    console.print(plan_table(result.best))
    print(f"\nThe step of the first: {range_text(answer.first.prediction)}.")
    for line in _tier_lines(answer):
        print(line)
    if answer.training_costs:
        print()
        console.print(footprint_table(answer.training_costs))
        print("\nThe whole training under the first:")
        print("\n".join(f"  {line}" for line in training_lines(answer.training_costs[0], request.cluster)))
    if any(verdict.unsupported for verdict in result.best):
        print("\n* " + "; ".join(sorted({line for one in result.best for line in one.unsupported})))
    for line in _fastest_lines(answer):
        print(line)
    if answer.reasons:
        print("\nWhy the first, and the best plan with each other choice (--require):")
    for reason in answer.reasons:
        print(f"  {reason.sentence}")
    if explain:
        print("\nThe best plan of every family:")
        for name, sentence in _family_sentences(answer):
            print(f"  {name}: {sentence}")


def _required_lines(answer: PlanAnswer) -> list[str]:
    """Return what is required of all plans, and what the first loses by it."""
    request, without = answer.request, answer.unrequired
    if not request.fixed_text:
        return []
    required = f"required  {request.fixed_text}"
    if without is None:
        return [required]
    more = answer.first.value / without.value - 1
    if more <= 0:
        return [f"{required}: no better plan was found without it"]
    words = describe_relation(more, *LESS_AND_MORE[request.objective])
    return [
        f"{required}: {words} than what is found without it,",
        f"          {without.name}, {format_seconds(without.prediction.step_time_s)} a step",
    ]


def _island_lines(answer: PlanAnswer) -> list[str]:
    """Return how islands compare with plans that communicate in every step, in speed and in loss."""
    found = answer.islands
    if found is None:
        return []
    best, exact = found.best.prediction, found.exact.prediction
    is_first = answer.first.plan.islands > 1
    speed = f"{found.speedup:.2f} times as many tokens a second"
    whole = best.round
    waits = (
        "" if whole is None else f", {format_fraction(whole.exposed_s / whole.round_s)} of it waiting for other islands"
    )
    step = f"{format_seconds(best.mean_step_s)} a step{waits}"
    if is_first:
        lines = [f"islands   {speed} as without, {found.exact.name}, {format_seconds(exact.step_time_s)} a step"]
    else:
        lines = [f"islands   {found.best.name}: {speed}, {step}"]
    lines.append(f"with {outer_flags(found.outer)}")
    order = found.search.node_order
    if not is_first and order is not None and not _is_as_listed(order):
        lines.append(f"on the listed nodes in the order {' '.join(map(str, order))}")
    lines.append(_loss_text(found))
    lines.append(f"(published losses: {LOSS_SOURCE}{_of_tokens(found)})")
    if found.notes:
        lines.append(f"({'; '.join(found.notes)})")
    if not is_first:
        count = found.best.plan.islands
        why = "they change what is trained" if found.pays else "they don't pay here"
        lines.append(f"not the first plan, since {why}: --require isl{count}{' or --allow islands' * found.pays}")
    return [lines[0], *(f"          {line}" for line in lines[1:])]


def _loss_text(found: IslandComparison) -> str:
    """Return what islands cost in loss, and how fast they are to the loss without."""
    if not found.loss_increase:
        return "the loss at equal tokens is no higher: as much faster to the same loss"
    higher = f"the loss at equal tokens is {found.loss_increase:.1%} higher"
    if isinf(found.tokens_factor):
        return f"{higher}; no number of tokens makes up for it"
    faster = f"{found.speedup_to_same_loss:.2f} times as fast to the same loss"
    return f"{higher}; {found.tokens_factor - 1:.0%} more tokens make up for it: {faster}"


def _of_tokens(found: IslandComparison) -> str:
    return f"; of tokens: {TOKENS_SOURCE}" if found.loss_increase else ""


def _islands_json(answer: PlanAnswer) -> dict[str, Any] | None:
    """Return the best plan with islands against the best without; null figures where no number of tokens reaches the
    loss."""
    found = answer.islands
    if found is None:
        return None
    best, exact = found.best, found.exact
    reaches = not isinf(found.tokens_factor)
    return {
        "plan": best.name,
        "step_time_s": best.prediction.step_time_s,
        "mean_step_s": best.prediction.mean_step_s,
        "outer": found.outer.model_dump(mode="json"),
        "round": None if best.prediction.round is None else best.prediction.round.to_json(),
        "exact_plan": exact.name,
        "exact_step_time_s": exact.prediction.step_time_s,
        "speedup": found.speedup,
        "loss_increase": found.loss_increase,
        "tokens_factor": found.tokens_factor if reaches else None,
        "speedup_to_same_loss": found.speedup_to_same_loss if reaches else None,
        "pays": found.pays,
        "sources": [LOSS_SOURCE, TOKENS_SOURCE],
        "assumed": list(found.notes),
        "node_order": found.search.node_order,
        "fields": best.plan.model_dump(mode="json"),
    }


def _tier_lines(answer: PlanAnswer) -> list[str]:
    """Return the rate of the first plan and what binds it, where it keeps optimizer state off its device."""
    load = tier_load(answer)
    if load is None:
        return []
    shares = ", ".join(f"{name} {share:.0%}" for name, share in load.shares.items())
    return [f"\nA token takes {format_seconds(load.s_per_token)}; {load.binds} binds. At work in a step: {shares}."]


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Work of compute, host and links under a plan."""

    s_per_token: float
    binds: str
    """Resource with the most work."""
    shares: dict[str, float]
    """Resource → share of the step in which it works, on the rank where that is largest."""


def tier_load(answer: PlanAnswer) -> TierLoad | None:
    """Return the work of compute, host and links under the first plan; None where nothing leaves its device."""
    first = answer.first.prediction
    if not answer.request.tier_word and all(one.offload_optimizer == "none" for one in first.plan.strategies):
        return None
    shares = {name: time_s / first.step_time_s for name, time_s in busy_seconds(first.timeline).items()}
    binds = max(shares, key=lambda name: shares[name])
    return TierLoad(1 / first.tokens_per_s, binds, shares)


def _part_lines(answer: PlanAnswer) -> list[str]:
    """Return that a part of the cluster is faster alone, with the best plan for all of it."""
    whole = answer.whole
    if whole is None:
        return []
    step_s = answer.first.prediction.step_time_s
    at_best = f" (or less, but at least {1 - whole.gap:.0%} of that)" if whole.gap > 0 else ""
    return [
        f"          faster alone: {format_seconds(step_s)} a step; all {whole.cluster.num_devices:,} devices take"
        f" {format_seconds(whole.best.prediction.step_time_s)}{at_best}",
        f"          with {whole.best.name}",
    ]


def _fastest_lines(answer: PlanAnswer) -> list[str]:
    """Return the fastest plan, where the first is a simpler one about as good, with what it gains and takes."""
    first, fastest = answer.first, answer.fastest
    if fastest.plan == first.plan or fastest.value >= first.value:
        return []
    words = describe_difference(first, fastest, answer.request.objective)
    return [f"\nThe best by itself (--fastest): {words}:", f"  {fastest.name}{unnamed_settings(fastest.plan, '  ')}"]


def _family_sentences(answer: PlanAnswer) -> list[tuple[str, str]]:
    """Return the name of each family, and its best plan or why there is none."""
    offload_budget = answer.budget.renew(OFFLOAD_EFFORT)
    return [(one.name, explain_family(one, answer.against, offload_budget.share(1.0))) for one in answer.families]


def _node_order_lines(arranged: PlanSearch) -> list[str]:
    """Return the order of unequal nodes, and the gain from it."""
    if arranged.node_order is None:
        return []
    lines = [f"nodes     order of the listed ones: {' '.join(map(str, arranged.node_order))}"]
    if not _is_as_listed(arranged.node_order):
        order = ",".join(map(str, arranged.node_order))
        lines.append(f"          (to predict the plan in it: muster predict … --node-order {order})")
    if arranged.naive_step_s is not None:
        best = arranged.result.best[0].prediction
        gain = arranged.naive_step_s / best.step_time_s
        lines.append(f"          {gain:.2f} times as fast as the best plan for nodes as listed and equal stages,")
        lines.append(f"          which takes {format_seconds(arranged.naive_step_s)} a step{_naive_cost(arranged)}")
    return lines


def _is_as_listed(node_order: Sequence[int]) -> bool:
    return list(node_order) == sorted(node_order)


def _naive_cost(arranged: PlanSearch) -> str:
    """Return the cost of the naive plan, where prices are known."""
    price = arranged.request.cluster.usd_per_hour
    tokens = arranged.request.workload.tokens_per_step
    if price is None or arranged.naive_step_s is None:
        return ""
    return f", ${format_count(price * arranged.naive_step_s / 3600 / tokens * 1e9)} for 1B tokens"


def _search_text(answer: PlanAnswer) -> str:
    """Return how much was searched, and how good the answer is known to be."""
    result = answer.result
    seen = result.counts
    plans = pluralize(seen["drafts"], "plan")
    text = (
        f"{plans} of {pluralize(seen['shapes'], 'shape')} in {result.seconds:.1f} s,"
        f" {seen['simulated']:,} simulated:\n          "
    )
    if answer.fastest.plan.pinned_schedule is not None:
        return text + "the best plan's schedule was searched for its own times: another may be better"
    if result.proven:
        return text + _proof_text(answer)
    if result.gave_up_head_room_early:
        return text + f"stopped early: another plan may leave {MEMORY_HEADROOM:.0%} of the memory free"
    if result.gap >= 1:  # nothing is known of what memory the others need
        return text + "stopped early: another plan may be better (more --effort or --time-limit)"
    return text + f"stopped early: another plan may be better by up to {result.gap:.1%}"


def _proof_text(answer: PlanAnswer) -> str:
    """Return what is proven of the first plan."""
    within = ""
    if answer.result.leaves_head_room and any(_is_fuller_and_better(one, answer) for one in answer.reasons):
        within = f" that leaves {MEMORY_HEADROOM:.0%} of the memory free"
    if answer.fastest.value >= answer.first.value * (1 - ROUNDING_TOLERANCE):
        return f"no other plan{within} can be better than the first"
    ahead = 1 - answer.fastest.value / answer.first.value
    text = f"no plan{within} can be better than the first by more than {ahead:.1%}"
    if not answer.simplicity_proven:
        return text
    return text + f",\n          and none within {answer.request.tolerance:.0%} of the best is simpler"


def _is_fuller_and_better(reason: Reason, answer: PlanAnswer) -> bool:
    """Return True if a reason's plan, or one that its search left open, is better and leaves less memory free than the
    first."""
    best, found = reason.comparison.best, reason.alternative
    if found is None or found.result.leaves_head_room:
        return False
    return min(found.least_value, inf if best is None else best.value) < answer.first.value


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
        "compile": answer.first.prediction.compiled,
        "derived": list(request.derived_lines),
        "tiers": asdict(load) if (load := tier_load(answer)) else None,
        "plans": [plan_json(number, *both) for number, both in enumerate(zip(result.best, footprints, strict=True), 1)],
        "fastest": plan_json(0, answer.fastest, None) if answer.fastest.plan != answer.first.plan else None,
        "why": [_reason_json(one) for one in answer.reasons],
        "whole_cluster": _whole_json(answer),
        "unrequired": _unrequired_json(answer),
        "islands": _islands_json(answer),
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
                "family": family.name,
                "plan": family.alternative.best.name if family.alternative.best else None,
                "step_time_s": family.alternative.best.prediction.step_time_s if family.alternative.best else None,
                "proven": family.alternative.proven,
                "sentence": sentence,
            }
            for family, (_, sentence) in zip(answer.families, _family_sentences(answer), strict=True)
        ]
    return plain


def _reason_json(reason: Reason) -> dict[str, Any]:
    """Return an alternative to the first plan; `interval` where its search wasn't finished."""
    compared = reason.comparison
    best = compared.best
    return {
        "change": compared.name,
        "require": reason.part or None,
        "slower": compared.slower,
        "interval": compared.interval,
        "plan": best.name if best else None,
        "step_time_s": best.prediction.step_time_s if best else None,
        "sentence": reason.sentence,
        "fields": best.plan.model_dump(mode="json") if best else None,
    }


def _unrequired_json(answer: PlanAnswer) -> dict[str, Any] | None:
    """Return the answer without what is required, and the relative increase of the objective's value by that."""
    without = answer.unrequired
    if without is None:
        return None
    return {
        "plan": without.name,
        "step_time_s": without.prediction.step_time_s,
        "more": answer.first.value / without.value - 1,
    }


def _whole_json(answer: PlanAnswer) -> dict[str, Any] | None:
    """Return the best plan for all devices, where the plans are for a part of them that is faster alone."""
    whole = answer.whole
    if whole is None:
        return None
    return {
        "cluster": whole.cluster.name,
        "devices": whole.cluster.num_devices,
        "plan": whole.best.name,
        "step_time_s": whole.best.prediction.step_time_s,
    }
