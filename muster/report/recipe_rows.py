"""Table cells of published recipes, their predictions and the planner's plans."""

from collections.abc import Sequence

from muster.report.accuracy_rows import Cells, Section, format_percent, short_plan_name
from muster.spec.formatting import NOT_AVAILABLE, format_seconds
from muster.validate.recipes import MAX_UNEXPLAINED_GAIN, SPEED_TOLERANCE, RecipeResult

TITLE = "Published recipes"
_HEAD = ("run", "devices", "legal", "memory", "published", "predicted", "error", "claims")
"""Column heads."""


def recipe_section(results: Sequence[RecipeResult]) -> Section:
    """Return the table with a summary sentence."""
    return Section(TITLE, [_HEAD, *map(_row, results)], _sentence(results))


def _row(result: RecipeResult) -> Cells:
    job = result.job
    share = NOT_AVAILABLE if result.peak_share is None else format_percent(100 * result.peak_share)
    return (
        job.recipe.name,
        f"{job.cluster.num_devices:,} × {job.cluster.device.name}",
        "no" if result.illegal else "yes",
        share,
        *(
            format_seconds(time_s) if time_s is not None else NOT_AVAILABLE
            for time_s in (job.published_s, result.step_time_s)
        ),
        format_percent(None if result.error is None else 100 * result.error, sign=True),
        format_percent(None if result.claimed_gain is None else 100 * result.claimed_gain, sign=True),
    )


def _sentence(results: Sequence[RecipeResult]) -> str:
    legal = sum(not result.illegal for result in results)
    fitting = sum(result.fits for result in results)
    errors = [result.error for result in results if result.error is not None]
    near = sum(abs(error) <= SPEED_TOLERANCE for error in errors)
    gains = [result.claimed_gain for result in results if result.claimed_gain is not None]
    modest = sum(gain <= MAX_UNEXPLAINED_GAIN for gain in gains)
    sentence = (
        f"{legal} of {len(results)} recipes are legal, and {fitting} are predicted to fit; {near} of {len(errors)} with"
        f" a known speed are predicted within {100 * SPEED_TOLERANCE:.0f} %"
    )
    if gains:
        sentence += (
            f"; for {modest} of {len(gains)} the planner's plan claims at most {100 * MAX_UNEXPLAINED_GAIN:.0f} % more"
        )
    return sentence + "."


def recipe_notes(results: Sequence[RecipeResult]) -> list[tuple[str, str]]:
    """Return for each recipe its name and a note: plans, source, illegality, open choices, reason of differences."""
    notes = []
    for result in results:
        recipe = result.job.recipe
        plans = (
            f"{recipe.plan}; the planner's: {short_plan_name(result.planner_plan)}"
            if result.planner_plan
            else recipe.plan
        )
        words = (plans, recipe.source, result.illegal, recipe.note, recipe.gap)
        notes.append((recipe.name, " ".join(f"{word.rstrip('.')}." for word in words if word)))
    return notes


def recipes_json(results: Sequence[RecipeResult]) -> list[dict[str, object]]:
    """Return plain data for JSON: seconds, fractions of memory, errors and gains in per cent; null where unknown."""
    return [
        {
            "name": result.job.recipe.name,
            "source": result.job.recipe.source,
            "legal": not result.illegal,
            "why_illegal": result.illegal,
            "fits": result.fits,
            "peak_share": result.peak_share,
            "published_step_time_s": result.job.published_s,
            "step_time_s": result.step_time_s,
            "error": None if result.error is None else 100 * result.error,
            "preferred": None if result.planner_plan is None else short_plan_name(result.planner_plan),
            "preferred_step_time_s": result.planner_step_time_s,
            "claim": None if result.claimed_gain is None else 100 * result.claimed_gain,
            "note": result.job.recipe.note,
            "gap": result.job.recipe.gap,
        }
        for result in results
    ]
