"""Choice of the tier of optimizer state, device, host memory or disk, and of the share of layers that it is for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_tier
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.smallest_plan import describe_need, smallest_plan
from muster.spec.errors import InfeasibleError
from muster.spec.formatting import format_fraction

HOST_WORDS = ("oopt", "oopt0.5", "oopt0.25", "oopt0.75", "oopt-oparam")
"""Words of plans with optimizer state in host memory, the simplest first, and last with parameters there, too."""

DISK_WORDS = ("ooptd", "oopt0.5d", "oopt0.25d", "oopt0.75d", "ooptd-oparam", "ooptd-oparamd")
"""The same with state on disk; of parameters in host memory, and on disk."""

_ALL_ALIKE = ("oopt-oparam", "ooptd-oparamd")
"""Words with both in the same place."""

_ANY_VALUE = 1e300
"""Ceiling that no plan exceeds, with which a search is content to find nothing that leaves head-room."""


@dataclass(frozen=True, slots=True)
class TierChoice:
    """A request whose plans have the tier that was chosen."""

    request: PlanRequest
    fits: bool
    """True if some plan was found."""


def tier_words(request: PlanRequest) -> tuple[str, ...]:
    """Return the words of plans with tiers that the cluster is known to have, none ("") first; none alone where a tier
    is required, or the framework has no such plans."""
    if request.fixed.get("offload_optimizer") or request.base.default_strategy.offload_optimizer != "none":
        return ("",)
    if request.framework.storage != "muster":
        return ("",)
    groups = request.cluster.groups
    host = HOST_WORDS if all(group.host_memory_bytes for group in groups) else ()
    disk = DISK_WORDS if all(group.disk and group.disk.capacity_bytes for group in groups) else ()
    return ("", *host, *disk)


def choose_tier(request: PlanRequest, budget: SearchBudget, words: Sequence[str] | None = None) -> TierChoice:
    """Return the request with the word of the best plans, each word's found by a search of its own.

    A word is only taken where it is better by more than the request's tolerance than simpler ones before it. Plans that
    leave head-room on the devices go before all others, as in `search`.
    """
    words = tier_words(request) if words is None else words
    evaluators = [PlanEvaluator(with_tier(request, word)) for word in words]
    has_second = bool(evaluators[0].memory_budget.head_room)
    for attempt in (evaluators, [one.without_head_room() for one in evaluators]) if has_second else (evaluators,):
        values = best_values(attempt, budget.share(0.5 if attempt is evaluators and has_second else 1.0))
        found = [number for number, value in enumerate(values) if value is not None]
        if found:
            chosen = found[-1]
            line = _describe(words, values, chosen, request)
            return TierChoice(
                replace(
                    evaluators[chosen].request,
                    derived_lines=(*request.derived_lines, *([line] if len(words) > 1 else ())),
                ),
                True,
            )
    return TierChoice(request, False)


def best_values(evaluators: Sequence[PlanEvaluator], budget: SearchBudget) -> list[float | None]:
    """Return the best value of each evaluator's plans that is lower by more than the tolerance than all before; else
    None."""
    ceiling = _ANY_VALUE
    values: list[float | None] = []
    for number, evaluator in enumerate(evaluators):
        own = budget.share(1 / (len(evaluators) - number))
        best = search(evaluator.request, 1, own, evaluator, ceiling=ceiling).best
        value = best[0].value if best and best[0].value <= ceiling else None
        values.append(value)
        if value is not None:
            ceiling = min(ceiling, value / (1 + evaluator.request.tolerance))
    return values


def _describe(words: Sequence[str], values: Sequence[float | None], chosen: int, request: PlanRequest) -> str:
    """Return where the optimizer's state lies and how the other words compare."""
    value = values[chosen]
    assert value is not None
    simpler = list(zip(words[:chosen], values, strict=False))
    without = [word for word, other in simpler if other is None]
    places = ["on the device"] if "" in without else []
    if tiers := [word for word in without if word]:
        places.append(f"with {_any_of(tiers)}")
    parts = [f"no plan fits {' or '.join(places)}"] if places else []
    parts += [
        f"{_place(word)} {format_fraction(other / value - 1)} more" for word, other in simpler if other is not None
    ]
    later = list(words[chosen + 1 :])
    if later:
        gain = f"more than {request.tolerance:.0%} " if request.tolerance else ""
        parts.append(f"with {_any_of(later)} none is {gain}better")
    what = "optimizer state and parameters" if words[chosen].endswith(_ALL_ALIKE) else "optimizer state"
    return f"{what} {_place(words[chosen])}: {'; '.join(parts)}"


def _any_of(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _place(word: str) -> str:
    if not word:
        return "on the device"
    places = {"ooptd-oparam": "on disk, parameters in host memory"}
    place = places.get(word, "on disk" if word.endswith("d") else "in host memory")
    return f"{place} ({word})"


def explain_no_tier(request: PlanRequest) -> InfeasibleError:
    """Return the error that says by how much the plans of a request miss with all optimizer state off the device, and
    what would fit."""
    words = [word for word in ("oopt-oparam", "ooptd-oparamd") if word in tier_words(request)]
    asked = [with_tier(request, word) for word in words] or [request]
    smallest = [smallest_plan(one) for one in asked]
    known = [(one, found) for one, found in zip(asked, smallest, strict=True) if found is not None]
    held = [one for one, found in known if not found.full_tiers] or [one for one, found in known if found.fits_device]
    needs = [need for one in (held[-1:] or asked) if (need := describe_need(one))]
    return InfeasibleError("; ".join(["no plan fits", *needs]))
