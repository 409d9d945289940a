"""Published recipes of large runs: are they legal, do they fit, how fast are they, and does the planner know better?"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from muster.catalog import names, read
from muster.simulate.predict import Prediction, predict
from muster.spec.base import Frozen
from muster.spec.cluster import ClusterSpec
from muster.spec.legal import problems
from muster.spec.load_cluster import load_cluster
from muster.spec.model import ModelSpec
from muster.spec.named_model import load_model
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name, said_by
from muster.spec.software import Software
from muster.spec.workload import Workload
from muster.validate.formulas import FORMULAS

ENOUGH = 0.1
"""How far a prediction may be from the published speed."""
MOST_CLAIMED = 0.15
"""By how much faster the planner's plan may be predicted than the recipe without a word on why."""


class Published(Frozen):
    """The speed that a source states; one of the first three."""

    step_time_s: float | None = None
    tokens_per_s_per_device: float | None = None
    tflops_per_device: float | None = None
    formula: str | None = None
    """By which `tflops_per_device` counts FLOPs."""


class Recipe(Frozen):
    """One run as its source describes it; the file's first lines say what each key means."""

    name: str
    model: str
    cluster: str
    seq_len: int
    global_batch: int
    plan: str
    attention: str = "flash"
    held: str = ""
    software: Software = Software()
    published: Published | None = None
    source: str
    note: str = ""
    gap: str = ""


@dataclass(frozen=True)
class Job:
    """A recipe as values."""

    recipe: Recipe
    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    plan: Plan

    @cached_property
    def held(self) -> dict[str, Any]:
        """Fields of a plan, or of its default strategy, that the planner keeps too."""
        said = said_by(self.recipe.held) if self.recipe.held else {}
        if "recompute" in said:
            said["offload"] = "none"  # the software of its time had neither
        return {**said, "precision": self.plan.precision}

    @cached_property
    def published_s(self) -> float | None:
        """The published step time, where a speed is known."""
        said, devices = self.recipe.published, self.cluster.num_devices
        if said is None:
            return None
        if said.step_time_s is not None:
            return said.step_time_s
        if said.tokens_per_s_per_device is not None:
            return self.workload.tokens_per_step / (said.tokens_per_s_per_device * devices)
        assert said.tflops_per_device is not None
        assert said.formula is not None
        return FORMULAS[said.formula](self.model, self.workload) / (said.tflops_per_device * 1e12 * devices)

    def predicted(self, plan: Plan) -> Prediction:
        """What a plan takes in the recipe's software and attention. Raises InfeasibleError where it can't hold."""
        computed = {"attention": self.plan.default_strategy.attention}
        plan = plan.model_copy(update={"default_strategy": plan.default_strategy.model_copy(update=computed)})
        return predict(self.model, plan, self.workload, self.cluster, software=self.recipe.software)


@dataclass(frozen=True)
class Judged:
    """What is thought of a recipe."""

    job: Job
    illegal: str = ""
    """Why the plan can't hold; empty where it can."""
    step_time_s: float | None = None
    peak_share: float | None = None
    """Of the fullest device's memory."""
    preferred: Plan | None = None
    """The planner's choice for the same job; None where it wasn't asked or found none."""
    preferred_s: float | None = None

    @property
    def fits(self) -> bool:
        return self.peak_share is not None and self.peak_share <= 1

    @property
    def error(self) -> float | None:
        """(predicted − published) / published step time."""
        if self.step_time_s is None or self.job.published_s is None:
            return None
        return self.step_time_s / self.job.published_s - 1

    @property
    def claim(self) -> float | None:
        """By how much more throughput the planner's plan is predicted to have than the recipe."""
        if self.step_time_s is None or self.preferred_s is None:
            return None
        return self.step_time_s / self.preferred_s - 1


Prefer = Callable[[Job], Plan | None]


def recipes() -> list[Recipe]:
    """All that the catalogue knows."""
    return [
        Recipe.model_validate(entry)
        for name in names("recipes")
        for entry in yaml.safe_load(read("recipes", name))["recipes"]
    ]


def job_of(recipe: Recipe) -> Job:
    """A recipe as values. Raises ConfigError where it names what isn't known."""
    plan = parse_plan_name(_spelled_out(recipe.plan))
    strategy = plan.default_strategy.model_copy(
        update={
            "attention": recipe.attention,
            "tp_overlap": "chunked" if recipe.software.overlap_tensor and plan.default_strategy.sp else "none",
        }
    )
    return Job(
        recipe,
        load_model(recipe.model),
        load_cluster(recipe.cluster),
        Workload(seq_len=recipe.seq_len, global_batch_size=recipe.global_batch),
        plan.model_copy(update={"default_strategy": strategy}),
    )


def _spelled_out(name: str) -> str:
    """A plan's name in which `1x3` among the layers stands for `1.1.1`."""
    return re.sub(r"(\d+)x(\d+)(?=\.|$)", lambda run: ".".join([run[1]] * int(run[2])), name)


def judge(recipe: Recipe, prefer: Prefer | None = None) -> Judged:
    """A recipe beside its prediction, and beside the plan that `prefer` chooses."""
    job = job_of(recipe)
    for problem in problems(job.plan, job.model, job.workload, job.cluster.num_devices):
        return Judged(job, problem)
    found = job.predicted(job.plan)
    capacity = job.cluster.device.memory_bytes
    share = max(rank.total for rank in found.memory) / capacity if capacity else None
    judged = Judged(job, "", found.step_time_s, share)
    plan = prefer(job) if prefer else None
    return replace(judged, preferred=plan, preferred_s=job.predicted(plan).step_time_s) if plan else judged


def judged(prefer: Prefer | None = None, chosen: Iterable[Recipe] | None = None) -> list[Judged]:
    """All recipes, or those that were chosen."""
    return [judge(recipe, prefer) for recipe in (recipes() if chosen is None else chosen)]
