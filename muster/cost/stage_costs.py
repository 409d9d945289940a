"""What each stage of a plan costs, worked out once for all stages and plans in which it is the same.

A search asks for thousands of plans that differ in little: how layers are dealt to stages, how data is sharded. Of a
stage it matters what its layers are, how they are stored and computed, and how far apart the ranks lie that it
communicates with, but not which stage of which plan it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.cost.places import PlanSetting
from muster.cost.stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class StageCost:
    """The times of a stage, and what it holds of the model."""

    seconds: Mapping[str, float]
    """By kind: its passes, and what happens once a step."""
    waits_s: Mapping[str, Mapping[str, float]]
    """By pass: axis → what is waited for within it."""
    numel: float
    """Numbers of its parameters on one rank, before data parallelism cuts them."""
    owned_numel: float
    """Numbers that a rank's optimizer updates."""
    tp: int


def stage_costs(setting: PlanSetting) -> list[StageCost]:
    """Of every stage of the plan."""
    alike: dict[tuple, StageCost] = {}
    found = []
    for stage in range(len(setting.placement)):
        signature = setting.signature(stage)
        if signature not in alike:
            alike[signature] = _known(setting, stage, signature)
        found.append(alike[signature])
    return found


def _known(setting: PlanSetting, stage: int, signature: tuple) -> StageCost:
    plan, known = setting.plan, setting.known
    at = StageTimes(setting, stage)
    first = plan.overrides and plan.strategy(at.layers.start)
    own = at.mesh.etp, at.mesh.ep, plan.rows(stage), first or plan.default_strategy
    key = *setting.shared, *signature[1:], *own, *at.places, id(at.data), id(at.replicas)
    if key not in known.stages:
        known.stages[key] = StageCost(at.seconds, at.waits_s, at.numel, at.owned_numel, at.mesh.tp)
    return known.stages[key]
