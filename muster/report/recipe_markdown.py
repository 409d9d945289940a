"""Markdown page of published recipes beside the planner's plans (docs/recipes.md)."""

from collections.abc import Sequence
from pathlib import Path

from muster.report.accuracy_markdown import markdown_section
from muster.report.page import write_page
from muster.report.recipe_rows import recipe_notes, recipe_section
from muster.validate.recipes import RecipeResult

_INTRODUCTION = """\
`muster validate --recipes --markdown docs/recipes.md` wrote this page on large published runs. Each plan is checked
for legality, its memory and step time are predicted for the framework that it ran on, and the planner is asked for the
same model, devices and batch. *claims* is the predicted gain in throughput of the planner's plan over the recipe, both
in the recipe's framework; where the recipe had no choice of recompute, the planner has none either. The planner
plans for a program with fused kernels and overlap in Muster's storage, which keeps more of a model in float32, so its
plan may be slower than the recipe in the recipe's framework.
"""


def write_recipes(path: Path, found: Sequence[RecipeResult]) -> None:
    """Write the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, recipes_markdown(found))


def recipes_markdown(found: Sequence[RecipeResult]) -> str:
    """Return the page as text."""
    notes = "".join(f"* **{name}**: {words}\n" for name, words in recipe_notes(found))
    return f"{markdown_section(recipe_section(found), _INTRODUCTION, level=1)}\n{notes}"
