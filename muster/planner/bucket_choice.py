"""Choice of the number of layers that the best plan's ranks gather and reduce as one (`bucket_layers`)."""

from dataclasses import replace
from itertools import takewhile
from operator import attrgetter

from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.search_budget import SearchBudget, fit_work, simulation_work
from muster.planner.search_result import SearchResult
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan


def choose_buckets(result: SearchResult, budget: SearchBudget) -> SearchResult:
    """Return the result with larger buckets in its first plan where these make it better by more than the request's
    tolerance, and fit.

    With b layers a bucket, a stage of L layers pays the latency of L / b collectives, but waits for b layers' gather
    before its first layer, and for their reduction behind its last: many ranks and slow links want a large b, long
    passes a small one.
    """
    if not result.best or not _is_open(result.best[0].plan, result.evaluator):
        return result
    evaluator, first = result.evaluator, result.best[0]
    request, enough = evaluator.request, first.value / (1 + evaluator.request.tolerance)
    work = simulation_work(first.plan, request.workload)
    least, chosen = evaluator.bounds.of_plan(first.plan), first.plan
    for plan in takewhile(evaluator.memory_budget.fits, _with_larger_buckets(first.plan, evaluator)):
        budget.spend(fit_work(plan, request.workload))
        if (bound := evaluator.bounds.of_plan(plan)) < least:
            least, chosen = bound, plan
    if chosen == first.plan or least >= enough or not budget.has_time_for(work):
        return result
    budget.spend(work)
    larger = evaluator.evaluate(chosen)
    if larger.value >= enough:
        return result
    kept = [one for one in result.best if one.plan != first.plan]
    return replace(result, best=sorted([larger, *kept], key=attrgetter("sort_key")))


def _is_open(plan: Plan, evaluator: PlanEvaluator) -> bool:
    """Return True if the request leaves the size of buckets open, and ranks share state in buckets: experts on several
    ranks have collectives of their own, and other runtimes buckets of other sizes."""
    request = evaluator.request
    is_open = "bucket_layers" not in request.fixed and request.base.bucket_layers == plan.bucket_layers == 1
    has_buckets = plan.mesh(0).state_shards > 1 and plan.ep == 1 and request.framework.joint_ends
    return is_open and has_buckets and request.objective != "memory"


def _with_larger_buckets(plan: Plan, evaluator: PlanEvaluator) -> list[Plan]:
    """Return the plan with 2, 4, 8 … layers a bucket, as far as stages have so many and it stays legal."""
    request = evaluator.request
    most = max(len(plan.layers(stage, request.model.num_layers)) for stage in range(plan.num_stages))
    sizes = (2**power for power in range(1, most.bit_length()))
    plans = [plan.model_copy(update={"bucket_layers": size}) for size in sizes]
    own = request.model, request.workload, request.cluster.num_devices
    return [one for one in plans if not plan_violations(one, *own)]
