"""Published recipes: legal, fitting, and as fast as their teams said."""

import json

import pytest

from muster.report.recipe_markdown import recipes_markdown
from muster.spec.plan_name import parse_plan_name
from muster.validate.recipes import (
    MAX_UNEXPLAINED_GAIN,
    SPEED_TOLERANCE,
    RecipeResult,
    evaluate_recipe,
    evaluate_recipes,
    job_of,
    recipes,
)

BY_NAME = {recipe.name: recipe for recipe in recipes()}


def test_every_recipe_is_legal_and_says_why_it_differs():
    """The planner is left out; a soak test asks it."""
    assert len(BY_NAME) >= 8
    small = [recipe for name, recipe in BY_NAME.items() if "530B" not in name and "1T" not in name]
    for one in evaluate_recipes(chosen=small):
        recipe = one.job.recipe
        assert not one.illegal
        assert recipe.source
        assert one.job.plan.world_size == one.job.cluster.num_devices
        assert (one.fits and abs(one.error or 0.0) <= SPEED_TOLERANCE) or recipe.gap, recipe.name


def test_deepseek_fits_only_as_it_stores_what_it_computes():
    recipe = BY_NAME["DeepSeek-V3"]
    assert evaluate_recipe(recipe).fits
    for usual in ({"fp8_activations": False}, {"moment_bytes": 4, "fp8_activations": False}):
        assert not evaluate_recipe(
            recipe.model_copy(update={"software": recipe.software.model_copy(update=usual)})
        ).fits


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("Llama 3 8B", 12.91),
        ("DeepSeek-V3", 15360 * 4096 / (1543.2 * 2048)),
        # 12·B·s·l·h²·((1 + g/a + s/h) + 3f/2h + V/2lh), FLOP/s by Megatron-LM's count
        ("Llama 3.1 405B, 16,384 GPUs", 6.72),
    ],
)
def test_published_speeds_become_step_times(name, seconds):
    assert job_of(BY_NAME[name]).published_s == pytest.approx(seconds, rel=1e-3)


def test_a_plan_of_the_planner_is_compared_in_the_recipe_s_software():
    recipe = BY_NAME["Llama 3 8B"]
    one = evaluate_recipe(recipe, lambda job: parse_plan_name("dp8-mb1-z1-rfull-bf16"))
    assert one.claimed_gain is not None
    assert one.claimed_gain == pytest.approx((one.step_time_s or 0) / (one.planner_step_time_s or 1) - 1)
    assert one.claimed_gain < -0.1  # full recompute is no gain
    text = recipes_markdown([one])
    assert "dp8-mb1-z1-rfull-bf16" in text
    assert "1 of 1 recipes are legal, and 1 are predicted to fit" in text


def test_a_recipe_that_cannot_hold_says_why():
    broken = BY_NAME["Llama 3 8B"].model_copy(update={"plan": "dp4-cp2-mb3-z1-bf16"})
    one = evaluate_recipe(broken)
    assert one.illegal
    assert one.step_time_s is None
    assert not one.fits
    assert one.illegal in recipes_markdown([one])


def test_the_command_refuses_a_table_of_measurements_beside_recipes(capsys):
    from muster.cli.main import main

    assert main(["validate", "--recipes", "--csv", "x.csv"]) == 2
    assert "--recipes takes no --csv, --csv-out, --html or --errors" in capsys.readouterr().err


@pytest.mark.soak
def test_recipes_are_met_and_the_planner_claims_little_more(capsys):
    from muster.cli.main import main

    assert main(["validate", "--recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert len(found) == len(BY_NAME)
    for one in found:
        near = one["error"] is None or abs(one["error"]) <= 100 * SPEED_TOLERANCE
        modest = one["claim"] is not None and one["claim"] <= 100 * MAX_UNEXPLAINED_GAIN
        assert (one["legal"] and one["fits"] and near and modest) or one["gap"], one["name"]


def test_unknown_values_are_shown_as_such():
    one = RecipeResult(job_of(BY_NAME["Mixtral 8x22B"]))
    assert one.error is None
    assert "n/a" in recipes_markdown([one])
