"""Published recipes of large runs: legality, memory, speed, and comparison with the planner's own plans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from muster.catalog import names, read
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.simulate.predict import Prediction, predict
from muster.spec.base import Frozen
from muster.spec.cluster import ClusterSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_name_parts, parse_plan_name
from muster.spec.workload import Workload
from muster.validate.formulas import FORMULAS

SPEED_TOLERANCE = 0.1
"""Relative error of the speed that counts as correct."""
MAX_UNEXPLAINED_GAIN = 0.15
"""Gain of the planner's plan over a recipe from which the recipe's `gap` must give a reason."""


class PublishedSpeed(Frozen):
    """Speed as the source states it: one of the first three fields."""

    step_time_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None
    formula: str | None = None
    """Formula by which `tflops_per_device` counts FLOPs."""


class Recipe(Frozen):
    """Recipe as its source describes it; the first lines of the catalogue's file explain each key."""

    name: str
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    plan: str
    attention: str = "flash"
    held: str = ""
    software: FrameworkTraits = FrameworkTraits()
    published: PublishedSpeed | None = None
    source: str
    note: str = ""
    gap: str = ""


@dataclass(frozen=True)
class RecipeJob:
    """Typed inputs of a recipe."""

    recipe: Recipe
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan

    @cached_property
    def fixed_fields(self) -> dict[str, Any]:
        """Fields of the plan or its default strategy that the planner keeps as well."""
        said = parse_name_parts(self.recipe.held) if self.recipe.held else {}
        if "recompute" in said:
            said["offload"] = "none"  # the software of its time had neither
        return {**said, "precision": self.plan.precision}

    @cached_property
    def published_s(self) -> float | None:
        """Published step time; None where no speed is known."""
        said = self.recipe.published
        devices = self.cluster.num_devices
        if said is None:
            return None
        if said.step_time_s is not None:
            return said.step_time_s
        if said.tokens_per_s_per_device is not None:
            return self.workload.tokens_per_step / (said.tokens_per_s_per_device * devices)
        assert said.tflops_per_device is not None
        assert said.formula is not None
        return FORMULAS[said.formula](self.model, self.workload) / (said.tflops_per_device * 1e12 * devices)

    def predict(self, plan: Plan) -> Prediction:
        """Predict a plan in the recipe's framework and attention. Raises InfeasibleError where the plan is illegal."""
        computed = {"attention": self.plan.default_strategy.attention}
        plan = plan.model_copy(update={"default_strategy": plan.default_strategy.model_copy(update=computed)})
        return predict(self.model, plan, self.workload, self.cluster, framework=self.recipe.software)


@dataclass(frozen=True)
class RecipeResult:
    """Evaluation of a recipe."""

    job: RecipeJob
    illegal: str = ""
    """Reason why the plan is illegal; empty where it is legal."""
    step_time_s: float | None = None
    peak_share: float | None = None
    """Peak memory as a fraction of the fullest device's capacity."""
    planner_plan: Plan | None = None
    """Plan of the planner for the same job; None where it wasn't asked or found none."""
    planner_step_time_s: float | None = None

    @property
    def fits(self) -> bool:
        """True where the fullest device's memory suffices."""
        return self.peak_share is not None and self.peak_share <= 1

    @property
    def error(self) -> float | None:
        """(predicted − published) / published step time."""
        if self.step_time_s is None or self.job.published_s is None:
            return None
        return self.step_time_s / self.job.published_s - 1

    @property
    def claimed_gain(self) -> float | None:
        """Predicted gain in throughput of the planner's plan over the recipe."""
        if self.step_time_s is None or self.planner_step_time_s is None:
            return None
        return self.step_time_s / self.planner_step_time_s - 1


PlanChooser = Callable[[RecipeJob], Plan | None]
"""Function that chooses a plan for a recipe."""


def recipes() -> list[Recipe]:
    """Return all recipes of the catalogue."""
    return [
        Recipe.model_validate(entry)
        for name in names("recipes")
        for entry in yaml.safe_load(read("recipes", name))["recipes"]
    ]


def job_of(recipe: Recipe) -> RecipeJob:
    """Return the typed inputs of a recipe. Raises ConfigError for an unknown model, cluster or plan."""
    plan = parse_plan_name(recipe.plan)
    strategy = plan.default_strategy.model_copy(
        update={
            "attention": recipe.attention,
            "tp_overlap": "async_tp" if recipe.software.async_tp and plan.default_strategy.sp else "none",
        }
    )
    return RecipeJob(
        recipe,
        load_model(recipe.model),
        load_cluster(recipe.cluster),
        Workload(seq_len=recipe.seq_len, global_batch_size=recipe.global_batch),
        plan.model_copy(update={"default_strategy": strategy}),
    )


def evaluate_recipe(recipe: Recipe, choose_plan: PlanChooser | None = None) -> RecipeResult:
    """Evaluate a recipe: its prediction, and the plan chosen by `choose_plan`."""
    job = job_of(recipe)
    for problem in plan_violations(job.plan, job.model, job.workload, job.cluster.num_devices):
        return RecipeResult(job, problem)
    found = job.predict(job.plan)
    capacity = job.cluster.device.memory_bytes
    share = max(rank.total for rank in found.memory) / capacity if capacity else None
    judged = RecipeResult(job, "", found.step_time_s, share)
    plan = choose_plan(job) if choose_plan else None
    return replace(judged, planner_plan=plan, planner_step_time_s=job.predict(plan).step_time_s) if plan else judged


def evaluate_recipes(
    choose_plan: PlanChooser | None = None, chosen: Iterable[Recipe] | None = None
) -> list[RecipeResult]:
    """Evaluate all recipes, or the chosen ones."""
    return [evaluate_recipe(recipe, choose_plan) for recipe in (recipes() if chosen is None else chosen)]
