"""Ranked plans, for people and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from muster.planner.evaluated_plan import EvaluatedPlan
from muster.planner.training_cost import TrainingCost
from muster.report.training import format_days, training_json
from muster.simulate.predict import Prediction
from muster.spec.formatting import format_bytes, format_count, format_fraction, format_seconds
from muster.spec.plan import Plan
from muster.spec.plan_name import settings_beyond_name


def plan_table(plans: Sequence[EvaluatedPlan]) -> Table:
    """Return a table with the figures of each plan, best first. Names stand above it (`plan_names`): a row of 80
    columns has no room for them."""
    table = _table("step", "tokens/s/device", "MFU", "memory", "left", "bubble", "waiting")
    for number, verdict in enumerate(plans, 1):
        one = verdict.prediction
        table.add_row(
            str(number),
            format_seconds(one.step_time_s),
            format_count(one.tokens_per_s_per_device),
            format_fraction(one.mfu),
            format_bytes(verdict.peak_bytes),
            format_fraction(memory_headroom(one)),
            format_fraction(one.bubble_fraction),
            format_fraction(exposed_communication_s(one) / one.step_time_s),
        )
    return table


def plan_names(plans: Sequence[EvaluatedPlan]) -> list[str]:
    """Return a line for each plan; `*` marks plans that can't be run yet, `eager` those that aren't compiled beside
    compiled ones."""
    some_compiled = any(one.prediction.compiled for one in plans)
    lines: list[str] = []
    for number, one in enumerate(plans, 1):
        marks = " *" * bool(one.unsupported) + "  eager" * (some_compiled and not one.prediction.compiled)
        settings = unnamed_settings(one.plan, " " * (2 + len(str(number))))
        lines.append(f"{number}  {one.name}{marks}{settings}")
    return lines


def unnamed_settings(plan: Plan, indent: str = "   ") -> str:
    """Return the settings behind the hash in a plan's name, on a line of their own; empty where the name says all."""
    said = settings_beyond_name(plan)
    return f"\n{indent}+ {'; '.join(said)}" if said else ""


def footprint_table(footprints: Sequence[TrainingCost]) -> Table:
    """Return a table with steps, days, cost, energy and CO₂ of the whole training under each plan."""
    table = _table("steps", "days", "cost", "energy", "CO₂")
    for number, whole in enumerate(footprints, 1):
        table.add_row(
            str(number),
            f"{whole.steps:,}",
            format_days(whole.days),
            "n/a" if whole.usd is None else f"${format_count(whole.usd)}",
            "n/a" if whole.kwh is None else f"{format_count(whole.kwh)} kWh",
            "n/a" if whole.co2_kg is None else f"{format_count(whole.co2_kg / 1000)} t",
        )
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("", *heads):
        table.add_column(head, justify="right", no_wrap=True)
    return table


def memory_headroom(prediction: Prediction) -> float | None:
    """Return the free fraction of the fullest device's memory; None where a device's memory is unknown."""
    rooms = []
    for rank in prediction.memory:
        limit = prediction.cluster.group_of(rank.rank).device.memory_bytes
        if limit is None:
            return None
        rooms.append(1 - rank.total / limit)
    return min(rooms)


def exposed_communication_s(prediction: Prediction) -> float:
    """Return the seconds of a step in which ranks stall for communication."""
    return sum(prediction.parts.communication_s.values())


def plan_json(number: int, verdict: EvaluatedPlan, footprint: TrainingCost | None) -> dict[str, Any]:
    """Return plain data for JSON; null where a value is unknown."""
    one = verdict.prediction
    training = None if footprint is None else training_json(footprint)
    whole: Mapping[str, Any] = (
        {}
        if training is None
        else {name: training[name] for name in ("steps", "days", "usd", "kwh", "co2_kg")} | {"training": training}
    )
    return {
        "rank": number,
        "plan": verdict.name,
        "hash": verdict.plan.hash,
        "value": verdict.value,
        "step_time_s": one.step_time_s,
        "step_time_interval": one.interval_json(),
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_s_per_device": one.tokens_per_s_per_device,
        "tflops_per_device": one.tflops_per_device,
        "mfu": one.mfu,
        "mfu_causal": one.mfu_causal,
        "bubble_fraction": one.bubble_fraction,
        "exposed_communication_s": dict(one.parts.communication_s),
        "memory_bytes": verdict.peak_bytes,
        "headroom": memory_headroom(one),
        "devices": verdict.plan.world_size,
        "not_yet": verdict.unsupported,
        **whole,
        "fields": verdict.plan.model_dump(mode="json"),
    }
