"""Published recipes beside their predictions and the planner's own plans, for the terminal and as a page."""

from collections.abc import Sequence

from muster.report.numbers import NOTHING, format_seconds
from muster.report.validation_rows import Cells, Section, percent, plan_words
from muster.validate.recipes import ENOUGH, MOST_CLAIMED, Judged

TITLE = "Published recipes"
_HEAD = ("run", "devices", "legal", "memory", "published", "predicted", "error", "claims")


def recipe_section(found: Sequence[Judged]) -> Section:
    """The table, and a sentence that sums it up."""
    return Section(TITLE, [_HEAD, *map(_row, found)], _sentence(found))


def _row(one: Judged) -> Cells:
    job = one.job
    share = NOTHING if one.peak_share is None else percent(100 * one.peak_share)
    return (
        job.recipe.name,
        f"{job.cluster.num_devices:,} × {job.cluster.device.name}",
        "no" if one.illegal else "yes",
        share,
        *(format_seconds(time_s) if time_s is not None else NOTHING for time_s in (job.published_s, one.step_time_s)),
        percent(None if one.error is None else 100 * one.error, sign=True),
        percent(None if one.claim is None else 100 * one.claim, sign=True),
    )


def _sentence(found: Sequence[Judged]) -> str:
    known = [one for one in found if one.error is not None]
    near = sum(abs(one.error or 0.0) <= ENOUGH for one in known)
    fit = sum(one.fits for one in found)
    claims = [one.claim for one in found if one.claim is not None]
    modest = sum(claim <= MOST_CLAIMED for claim in claims)
    words = f"Of {len(found)} recipes {sum(not one.illegal for one in found)} are legal and {fit} are predicted to fit;"
    words += f" {near} of {len(known)} with a known speed are predicted within {100 * ENOUGH:.0f} %"
    if claims:
        words += f", and of {modest} of {len(claims)} the planner's plan claims at most {100 * MOST_CLAIMED:.0f} % more"
    return words + "."


def recipe_notes(found: Sequence[Judged]) -> list[tuple[str, str]]:
    """(name, its plan and the planner's, its source, what that leaves open, why they differ) of each recipe."""
    notes = []
    for one in found:
        recipe = one.job.recipe
        plans = f"{recipe.plan}; the planner's: {plan_words(one.preferred)}" if one.preferred else recipe.plan
        words = (plans, recipe.source, one.illegal, recipe.note, recipe.gap)
        notes.append((recipe.name, " ".join(f"{word.rstrip('.')}." for word in words if word)))
    return notes


def recipes_json(found: Sequence[Judged]) -> list[dict[str, object]]:
    """Plain data: seconds, shares of the memory, errors and claims in percent; null where nothing is known."""
    return [
        {
            "name": one.job.recipe.name,
            "source": one.job.recipe.source,
            "legal": not one.illegal,
            "why_illegal": one.illegal,
            "fits": one.fits,
            "peak_share": one.peak_share,
            "published_step_time_s": one.job.published_s,
            "step_time_s": one.step_time_s,
            "error": None if one.error is None else 100 * one.error,
            "preferred": None if one.preferred is None else plan_words(one.preferred),
            "preferred_step_time_s": one.preferred_s,
            "claim": None if one.claim is None else 100 * one.claim,
            "note": one.job.recipe.note,
            "gap": one.job.recipe.gap,
        }
        for one in found
    ]
