"""Markdown page of published recipes beside the planner's plans (docs/recipes.md)."""

from collections.abc import Sequence
from pathlib import Path

from muster.report.accuracy_markdown import markdown_section
from muster.report.page import write_page
from muster.report.recipe_rows import recipe_notes, recipe_section
from muster.validate.recipes import RecipeResult

_WORDS = """\
`muster validate --recipes --markdown docs/recipes.md` wrote this page: large runs as published. Each is
checked against the rules of plans, its memory and its step time are predicted for the software that it ran on, and the
planner is asked for the same model, devices and batch. *claims* is by how much more throughput the planner's plan is
predicted to have than the recipe, both in that software; where it had no choice of recompute, the planner has none
either. The planner plans for Muster, which keeps more of a model in float32, so that its choice may be slower than the
recipe in the recipe's software.
"""


def write_recipes(path: Path, found: Sequence[RecipeResult]) -> None:
    """Write the page to `path`, whole or not at all. Raises MusterError where it can't be written."""
    write_page(path, recipes_markdown(found))


def recipes_markdown(found: Sequence[RecipeResult]) -> str:
    """Return the page as text."""
    notes = "".join(f"* **{name}**: {words}\n" for name, words in recipe_notes(found))
    return f"{markdown_section(recipe_section(found), _WORDS, level=1)}\n{notes}"
