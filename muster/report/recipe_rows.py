"""Table cells of published recipes, their predictions and the planner's plans."""

from collections.abc import Sequence

from muster.report.accuracy_rows import Cells, Section, format_percent, short_plan_name
from muster.report.formatting import NOT_AVAILABLE, format_seconds
from muster.validate.recipes import MAX_UNEXPLAINED_GAIN, SPEED_TOLERANCE, RecipeResult

TITLE = "Published recipes"
_HEAD = ("run", "devices", "legal", "memory", "published", "predicted", "error", "claims")


def recipe_section(results: Sequence[RecipeResult]) -> Section:
    """Return the table with a summary sentence."""
    return Section(TITLE, [_HEAD, *map(_row, results)], _sentence(results))


def _row(one: RecipeResult) -> Cells:
    job = one.job
    share = NOT_AVAILABLE if one.peak_share is None else format_percent(100 * one.peak_share)
    return (
        job.recipe.name,
        f"{job.cluster.num_devices:,} × {job.cluster.device.name}",
        "no" if one.illegal else "yes",
        share,
        *(
            format_seconds(time_s) if time_s is not None else NOT_AVAILABLE
            for time_s in (job.published_s, one.step_time_s)
        ),
        format_percent(None if one.error is None else 100 * one.error, sign=True),
        format_percent(None if one.claimed_gain is None else 100 * one.claimed_gain, sign=True),
    )


def _sentence(found: Sequence[RecipeResult]) -> str:
    legal = sum(not one.illegal for one in found)
    fitting = sum(one.fits for one in found)
    errors = [one.error for one in found if one.error is not None]
    near = sum(abs(error) <= SPEED_TOLERANCE for error in errors)
    gains = [one.claimed_gain for one in found if one.claimed_gain is not None]
    modest = sum(gain <= MAX_UNEXPLAINED_GAIN for gain in gains)
    sentence = (
        f"{legal} of {len(found)} recipes are legal, and {fitting} are predicted to fit; {near} of {len(errors)} with a"
        f" known speed are predicted within {100 * SPEED_TOLERANCE:.0f} %"
    )
    if gains:
        sentence += (
            f"; for {modest} of {len(gains)} the planner's plan claims at most {100 * MAX_UNEXPLAINED_GAIN:.0f} % more"
        )
    return sentence + "."


def recipe_notes(found: Sequence[RecipeResult]) -> list[tuple[str, str]]:
    """Return for each recipe its name and a note: plans, source, illegality, open choices, reason of differences."""
    notes = []
    for one in found:
        recipe = one.job.recipe
        plans = (
            f"{recipe.plan}; the planner's: {short_plan_name(one.planner_plan)}" if one.planner_plan else recipe.plan
        )
        words = (plans, recipe.source, one.illegal, recipe.note, recipe.gap)
        notes.append((recipe.name, " ".join(f"{word.rstrip('.')}." for word in words if word)))
    return notes


def recipes_json(found: Sequence[RecipeResult]) -> list[dict[str, object]]:
    """Return plain data for JSON: seconds, fractions of memory, errors and gains in per cent; null where unknown."""
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
            "preferred": None if one.planner_plan is None else short_plan_name(one.planner_plan),
            "preferred_step_time_s": one.planner_step_time_s,
            "claim": None if one.claimed_gain is None else 100 * one.claimed_gain,
            "note": one.job.recipe.note,
            "gap": one.job.recipe.gap,
        }
        for one in found
    ]
