"""Removal of offload that saves no time from the best plan, and the share of its updates that the device makes.

A search makes a plan fit by the choice that takes the least time, and of several such by the one that leaves the most
memory: so layers are offloaded that need not be, as long as no pass waits for the copies. Of plans that take equally
long, people want the one that copies least.
"""

from dataclasses import replace
from math import ceil, inf
from operator import attrgetter

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.memory.fitter import ROUNDING_TOLERANCE
from muster.planner.search_budget import SearchBudget, simulation_work
from muster.planner.search_result import SearchResult
from muster.spec.layer_strategy import Tier
from muster.spec.plan import Plan
from muster.spec.rules import in_every_layer


def trim_offload(result: SearchResult, budget: SearchBudget) -> SearchResult:
    """Return the result with as little offload in its first plan as makes it no slower, where there is time for it: of
    activations, then of optimizer state, whose updates host and device then share where that is faster."""
    return _share_updates(_trim_optimizer_state(_trim_activations(result, budget), budget), budget)


def _trim_activations(result: SearchResult, budget: SearchBudget) -> SearchResult:
    if not result.best or all(strategy.offload == "none" for strategy in result.best[0].plan.strategies):
        return result
    evaluator = result.evaluator
    first = result.best[0]
    if not budget.has_time_for(simulation_work(first.plan, evaluator.request.workload)):
        return result
    plan = evaluator.memory_budget.with_less_offload(first.plan)
    trimmed = next((one for one in result.best if one.plan == plan), None) or evaluator.evaluate(plan)
    return result if trimmed.value > first.value * (1 + ROUNDING_TOLERANCE) else _with_first(result, trimmed)


def _trim_optimizer_state(result: SearchResult, budget: SearchBudget) -> SearchResult:
    """Return the result with the smallest share of layers in its first plan whose optimizer state leaves the device.

    With a share f of Ψ parameters on the host, updates take f Ψ · max(b / U, c / B) + (1 − f) Ψ · b / M for b bytes of
    an update and c of a parameter's copies, at the rates U of the host's cores, B of its link and M of the device's
    memory: less, the smaller f is, as long as M is the fastest of these. So the device's memory decides.

    A plan whose name has no fraction keeps its simpler name unless a fraction is faster by more than the request's
    tolerance.
    """
    if not _chooses_updates(result, "host", "disk"):
        return result
    evaluator, first = result.evaluator, result.best[0]
    strategy, layers = first.plan.default_strategy, evaluator.request.model.num_layers
    fitting = _smallest_fitting(result, first.plan, layers)
    work = simulation_work(first.plan, evaluator.request.workload)
    if fitting is None or not budget.has_time_for(work):
        return result
    trimmed = evaluator.evaluate(fitting)
    gain = evaluator.request.tolerance if strategy.offload_optimizer_ratio == 1 else 0.0
    return _with_first(result, trimmed) if trimmed.value * (1 + gain) < first.value else result


def _share_updates(result: SearchResult, budget: SearchBudget) -> SearchResult:
    """Return the result with the share of updates in its first plan that the device makes, with state that comes from
    host memory: the one that is the fastest in simulation, if that saves more than the request's tolerance.

    With a share f of the Ψ parameters off the device, the host needs (1 − f) Ψ · b / U at the rate U of its cores, the
    link (1 − f) Ψ · c / B + f Ψ · s / B for c bytes of a parameter's copies and s of its state, there and back, and the
    device f Ψ · b / M, side by side: with a slow host the optimum is where it takes as long as the link (Deep Optimizer
    States, arXiv:2410.21316). A CPU has no cores beside its host's.
    """
    if not _chooses_updates(result, "host") or result.best[0].plan.default_strategy.device_update_ratio > 0:
        return result
    evaluator, first = result.evaluator, result.best[0]
    if any(group.device.kind == "cpu" for group in evaluator.request.cluster.groups):
        return result
    work = simulation_work(first.plan, evaluator.request.workload)
    known = {0.0: first}

    def value(share: float) -> float:
        if not 0 < share <= 1 or (share not in known and not budget.has_time_for(work)):
            return inf
        if share not in known:
            plan = in_every_layer(lambda own: own.model_copy(update={"device_update_ratio": share}))(first.plan)
            if max(evaluator.memory_budget.excess_bytes(plan)) > 0:
                return inf
            known[share] = evaluator.evaluate(plan)
        return known[share].value

    best = min((0.25, 0.5, 0.75, 1.0), key=value)
    for step in (0.1, 0.05):
        best = min((best, round(best - step, 2), round(best + step, 2)), key=value)
    gains = value(best) * (1 + evaluator.request.tolerance) < first.value
    return _with_first(result, known[best]) if gains else result


def _chooses_updates(result: SearchResult, *tiers: Tier) -> bool:
    """Return True if the first plan has optimizer state alone on one of these tiers, and the request leaves open how
    much of it."""
    if not result.best:
        return False
    strategy, request = result.best[0].plan.default_strategy, result.evaluator.request
    is_asked = request.objective == "memory" or bool(request.fixed.get("offload_optimizer"))
    return strategy.offload_optimizer in tiers and strategy.offload_param == "none" and not is_asked


def _smallest_fitting(result: SearchResult, plan: Plan, layers: int) -> Plan | None:
    """Return the plan with the fewest layers off the device that fits; None where that is the plan itself."""
    memory = result.evaluator.memory_budget
    fewest, enough = 0, ceil(plan.default_strategy.offload_optimizer_ratio * layers - 1e-6)
    found = None
    while enough - fewest > 1:
        count = (fewest + enough) // 2
        share = ceil(count / layers * 1e6) / 1e6  # as a plan's name has it, and enough for so many layers
        smaller = in_every_layer(lambda own, share=share: own.model_copy(update={"offload_optimizer_ratio": share}))(
            plan
        )
        if max(memory.excess_bytes(smaller)) <= 0:
            found, enough = smaller, count
        else:
            fewest = count
    return found


def _with_first(result: SearchResult, first: EvaluatedPlan) -> SearchResult:
    """Return the result with another plan in the place of the first."""
    kept = [one for one in result.best[1:] if one.plan != first.plan]
    return replace(result, best=sorted([first, *kept], key=attrgetter("sort_key")))
