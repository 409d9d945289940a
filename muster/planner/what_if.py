"""Effects of another cluster, or of a change to this one: twice the nodes, a slower network, a failed node."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from muster.config.local_machine import cluster_by_name
from muster.planner.answer import answer_request
from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.node_order import nodes_of, reorder_nodes
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import MAX_DEVICES, PlanRequest
from muster.planner.search_budget import SearchBudget
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.suggest import did_you_mean

EXAMPLES = "nodes=x2, nodes=/2, nodes=12, network=/2, failed=1, cluster=64xa100"


@dataclass(frozen=True)
class WhatIfCase:
    """A cluster, and the best plan on it: the answer of `muster plan`."""

    change: str
    """Change as it was given; empty for the cluster as it is."""
    cluster: ClusterSpec
    """Devices that the plan uses."""
    best: EvaluatedPlan | None
    same_plan_step_s: float | None
    """Step time of the plan that is best without the change; None where it is not possible, or nothing is changed."""
    reason: str = ""
    """Reason why there is no plan."""
    gap: float = 0.0
    """Largest relative improvement of the best plan that the search didn't exclude."""
    whole: ClusterSpec | None = None
    """All devices of the case, of which the plan may use a part that is faster alone; None where there is no plan."""


def what_if(request: PlanRequest, changes: Sequence[str], budget: SearchBudget) -> list[WhatIfCase]:
    """Return the best plan for the cluster as it is, then with each of the changes alone.

    Several changes in one text, with commas between them, are made together. Each search has the work of the whole
    budget. A plan that one of them finds is tried in all cases. Raises ConfigError for unknown changes, and those that
    can't be made to this cluster.
    """
    clusters = [request.cluster, *(apply_changes(request.cluster, text) for text in changes)]
    cases: list[WhatIfCase] = []
    for number, (text, cluster) in enumerate(zip(("", *changes), clusters, strict=True)):
        own = budget.renew(time_part=1 / (len(clusters) - number))
        cases.append(_search_case(replace(request, cluster=cluster), text, own, "failed" in text))
    cases = [_with_better_plan(case, cases, request) for case in cases]
    base, *changed = cases
    same_s = (_step_of_plan(base.best, replace(request, cluster=case.whole or case.cluster)) for case in changed)
    return [base, *(replace(case, same_plan_step_s=step_s) for case, step_s in zip(changed, same_s, strict=True))]


def _search_case(request: PlanRequest, change: str, budget: SearchBudget, may_drop_nodes: bool) -> WhatIfCase:
    """Search one cluster. With `may_drop_nodes` and no plan for all nodes that are left, use the largest number of
    nodes that has one."""
    try:
        answer = answer_request(request, 1, budget.share(1.0), explained=False)
    except InfeasibleError as error:
        if may_drop_nodes and request.cluster.num_nodes > 1:
            fewer = replace(request, cluster=_first_nodes(request.cluster, request.cluster.num_nodes - 1))
            return _search_case(fewer, change, budget, may_drop_nodes)
        return WhatIfCase(change, request.cluster, None, None, str(error))
    whole = answer.request.cluster if answer.whole is None else answer.whole.cluster
    return WhatIfCase(change, answer.request.cluster, answer.first, None, "", answer.result.gap, whole)


def _with_better_plan(case: WhatIfCase, cases: Sequence[WhatIfCase], request: PlanRequest) -> WhatIfCase:
    """Return a case whose search was stopped with the best plan of the others where that is better there too."""
    if case.best is None or not case.gap:
        return case
    evaluator = PlanEvaluator(replace(request, cluster=case.cluster))
    found = (_fitting(other.best.plan, evaluator) for other in cases if other.best is not None)
    best = min([case.best, *filter(None, found)], key=attrgetter("sort_key"))
    ahead = 1 - best.value / case.best.value
    return replace(case, best=best, gap=max(0.0, 1 - (1 - case.gap) / (1 - ahead))) if ahead > 0 else case


def _fitting(plan: Plan, evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """Return a plan with its figures; None where it is illegal, doesn't fit or can't be timed."""
    request = evaluator.request
    if plan_violations(plan, request.model, request.workload, request.cluster.num_devices):
        return None
    try:
        return evaluator.evaluate(plan) if evaluator.memory_budget.fits(plan) else None
    except InfeasibleError:
        return None


def _step_of_plan(base: EvaluatedPlan | None, request: PlanRequest) -> float | None:
    """Return the step time of that very plan; None where there is none, or it can't run there."""
    found = base and _fitting(base.plan, PlanEvaluator(request).without_head_room())
    return found.prediction.step_time_s if found else None


# ----------------------------------------------------------------------------------------------------------------------
# Changes


def apply_changes(cluster: ClusterSpec, text: str) -> ClusterSpec:
    """Return the cluster with the changes in `text` made from left to right. Raises ConfigError."""
    names = [part.partition("=")[0].strip() for part in text.split(",")]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"--what-if {text}: {twice[0]} is changed twice; give each change a --what-if of its own to compare them"
        )
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _CHANGES:
            hint = "" if name in _CHANGES else did_you_mean(name, _CHANGES)
            raise ConfigError(f"--what-if {text}: expected changes such as {EXAMPLES}{hint}")
        cluster = _CHANGES[name](cluster, value, part.strip())
        if cluster.num_devices > MAX_DEVICES:
            raise ConfigError(f"--what-if {text}: expected at most {MAX_DEVICES:,} devices")
    return cluster


def _nodes(cluster: ClusterSpec, value: str, text: str) -> ClusterSpec:
    if not cluster.is_uniform or cluster.node_bandwidth_bytes_per_s is not None:
        raise ConfigError(f"--what-if {text}: which nodes, where they differ? Give cluster=FILE")
    group = cluster.groups[0]
    count = _amount(cluster.num_nodes, value, text)
    if group.nics is None and count > 1 and group.domain_nodes == 1:
        raise ConfigError(f"--what-if {text}: {cluster.name} has no network to join more nodes; give cluster=C")
    return _with_name(cluster.model_copy(update={"groups": (group.model_copy(update={"num_nodes": count}),)}), text)


def _network(cluster: ClusterSpec, value: str, text: str) -> ClusterSpec:
    """Change the rate of all links between nodes: network cards, links between sites, measured rates."""
    factor = _factor(value, text)
    if cluster.num_nodes == 1:
        raise ConfigError(f"--what-if {text}: {cluster.name} is one node, which no network joins to another")
    groups = []
    for group in cluster.groups:
        if group.nics is not None:
            link = group.nics.link
            link = link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * factor})
            group = group.model_copy(update={"nics": group.nics.model_copy(update={"link": link})})
        groups.append(group)
    tiers = tuple(
        tier
        if tier.link is None
        else tier.model_copy(
            update={
                "link": tier.link.model_copy(update={"bandwidth_bytes_per_s": tier.link.bandwidth_bytes_per_s * factor})
            }
        )
        for tier in cluster.tiers
    )
    matrix = cluster.node_bandwidth_bytes_per_s
    if matrix is not None:
        matrix = tuple(
            tuple(rate if one == other else rate * factor for other, rate in enumerate(row))
            for one, row in enumerate(matrix)
        )
    update = {"groups": tuple(groups), "tiers": tiers, "node_bandwidth_bytes_per_s": matrix}
    return _with_name(cluster.model_copy(update=update), text)


def _failed(cluster: ClusterSpec, value: str, text: str) -> ClusterSpec:
    """Remove the last nodes of the list."""
    if not value.isdecimal() or not 0 < int(value) < cluster.num_nodes:
        raise ConfigError(
            f"--what-if {text}: expected a number of nodes from 1 to {cluster.num_nodes - 1}, got '{value}'"
            if cluster.num_nodes > 1
            else f"--what-if {text}: {cluster.name} is one node, and nothing is left without it"
        )
    return _with_name(_first_nodes(cluster, cluster.num_nodes - int(value)), text)


def _cluster(cluster: ClusterSpec, value: str, text: str) -> ClusterSpec:
    return cluster_by_name(value)


_CHANGES: dict[str, Callable[[ClusterSpec, str, str], ClusterSpec]] = {
    "nodes": _nodes,
    "network": _network,
    "failed": _failed,
    "cluster": _cluster,
}


def _first_nodes(cluster: ClusterSpec, count: int) -> ClusterSpec:
    assert count <= len(nodes_of(cluster))
    return reorder_nodes(cluster, range(count))


def _with_name(cluster: ClusterSpec, text: str) -> ClusterSpec:
    return cluster.model_copy(update={"name": f"{cluster.name}, {text}"})


def _factor(value: str, text: str) -> float:
    """`x2`, `/4`, `x0.5`."""
    match = re.fullmatch(r"([x×*/])(\d+(?:\.\d+)?)", value)
    if match is None or not float(match[2]):
        raise ConfigError(f"--what-if {text}: expected a factor such as x2 or /2, got '{value}'")
    return float(match[2]) if match[1] != "/" else 1 / float(match[2])


def _amount(now: int, value: str, text: str) -> int:
    """Return a number of nodes, given directly or as a factor of the present one."""
    count = float(value) if value.isdecimal() else now * _factor(value, text)
    if not 1 <= count <= MAX_DEVICES or count != int(count):
        raise ConfigError(
            f"--what-if {text}: expected a whole number of nodes from 1 to {MAX_DEVICES:,}, got {count:g} of {now}"
        )
    return int(count)
