"""Terminal output: plan, predicted beside measured values, timeline as a grid of letters."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from muster.layout.tensor_layout import has_vocab_shard
from muster.report.palette import paint_of
from muster.report.report_data import PredictedVsMeasured
from muster.report.timeline_rows import TimelineRows, timeline_rows
from muster.schedule.action import Kind
from muster.schedule.checkfree_plus import swapped_stages
from muster.simulate.timeline import Event, Timeline
from muster.spec.formatting import (
    format_count,
    format_error,
    format_fraction,
    format_seconds,
    format_value,
    is_large_error,
)
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.workload import Workload

_STAGES_IN_FULL = 8
"""Most stages listed one by one."""
_FILLINGS = {Kind.F: "-", Kind.B: "=", Kind.I: "~", Kind.W: "_"}
"""Filling of a box after its name, which distinguishes kinds without colour."""


def comparison_table(rows: Sequence[PredictedVsMeasured]) -> Table:
    """Return a table of predicted and measured values with relative errors; large errors are bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        error = format_error(row.predicted, row.measured, row.unit)
        style = "bold" if is_large_error(row.predicted, row.measured, row.unit) else ""
        values = (format_value(value, row.unit) for value in (row.predicted, row.measured))
        table.add_row(Text(row.label), *values, Text(error, style))
    return table


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def plan_lines(plan: Plan, model: ModelSpec, workload: Workload, n_micro_batches: int) -> str:
    """Return the plan in a few aligned lines."""
    return "\n".join(f"{name:9} {text}" for name, text in plan_rows(plan, model, workload, n_micro_batches))


def plan_rows(plan: Plan, model: ModelSpec, workload: Workload, n_micro_batches: int) -> list[tuple[str, str]]:
    """Return the plan in rows: name and hash, ranks, stages with their layers, micro-batches, storage, batch."""
    size = format_count(model.num_parameters)
    batch = _plural(workload.global_batch_size, "sequence", "s")
    return [
        ("plan", f"{format_plan_name(plan)}  ({plan.hash})"),
        ("model", f"{model.name}, {model.num_layers} layers, {size} parameters"),
        ("ranks", _degrees(plan)),
        *(("stages" if i == 0 else "", line) for i, line in enumerate(_stages(plan, model))),
        ("schedule", f"{plan.schedule}, {_plural(n_micro_batches, 'micro-batch', 'es')} of {plan.micro_batch_size}"),
        *([("paths", paths_text(plan))] if plan.schedule_entry.has_paths else []),
        *([("shares", _micro_batch_groups(plan, n_micro_batches))] if plan.uneven_micro_batches else []),
        ("storage", _storage(plan, model.num_layers)),
        ("step", f"{batch} × {workload.seq_len:,} = {workload.tokens_per_step:,} tokens"),
    ]


def _degrees(plan: Plan) -> str:
    """Return the world size as a product of degrees."""
    if not plan.is_uniform:
        return f"{plan.world_size}, unequal stages"
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in ("islands", *MESH_AXES) if getattr(plan, axis) > 1]
    return f"{plan.world_size}" + (f" = {' × '.join(degrees)}" if degrees else "")


def paths_text(plan: Plan) -> str:
    """Return which stages micro-batches skip or swap, and what that does."""
    if plan.schedule_entry.swaps_end_stages:
        num, count = sum(list(path) != sorted(path) for path in plan.paths), len(plan.paths)
        swapped = ", and ".join(f"{one} and {other}" for one, other in swapped_stages(plan.num_stages))
        return f"{num} of {count} micro-batches have stages {swapped} swapped, which changes what is trained"
    skipped = int(plan.skip_ratio * plan.num_stages + 0.5)
    seen = [f"{sum(stage in path for path in plan.paths)}" for stage in range(plan.num_stages)]
    visits = f"; stages see {', '.join(seen)} of them" if plan.paths and skipped else ""
    swapped = ", some see stages in another order" if any(list(path) != sorted(path) for path in plan.paths) else ""
    changes = ", which changes what is trained" if skipped or swapped else ""
    return f"each micro-batch skips {skipped} of {plan.num_stages} stages{swapped}{changes}{visits}"


def _micro_batch_groups(plan: Plan, most: int) -> str:
    """Return the numbers of micro-batches of all data-parallel ranks, by groups with equal numbers."""
    ranks = plan.mesh(0).dp_size
    part = most // max(plan.uneven_micro_batches)
    width = ranks // len(plan.uneven_micro_batches)
    counts = ", ".join(str(part * n) for n in plan.uneven_micro_batches)
    return f"micro-batches of {width} data-parallel ranks each: {counts}"


def _stages(plan: Plan, model: ModelSpec) -> list[str]:
    """Return a line for each stage; of very many the first and last ones."""
    lines = [_stage(plan, stage, model) for stage in range(plan.num_stages)]
    if len(lines) <= _STAGES_IN_FULL:
        return lines
    half = _STAGES_IN_FULL // 2
    return [*lines[:half], f"… {len(lines) - 2 * half} more", *lines[-half:]]


def _stage(plan: Plan, stage: int, model: ModelSpec) -> str:
    """Return a stage with its layers, embedding, head and vocabulary shard."""
    layers, further = plan.layers(stage, model.num_layers), model.last_layers(plan.is_last(stage))
    parts = ["embedding"] if plan.is_first(stage) and not plan.vocab_parallel else []
    if len(layers) == 1:
        parts.append(f"layer {layers[0]}")
    elif layers:
        parts.append(f"layers {layers[0]}–{layers[-1]}")
    if further:
        parts.append(f"{_plural(len(further), 'layer', 's')} for multi-token prediction")
    if plan.is_last(stage) and not plan.vocab_parallel:
        parts.append("head")
    if has_vocab_shard(plan, stage):
        parts.append(f"1/{plan.pp} of the vocabulary")
    mesh = plan.mesh(stage)
    degrees = " × ".join(f"{axis} {n}" for axis in MESH_AXES if (n := getattr(mesh, axis, 1)) > 1) or "1 rank"
    return f"{stage}: {', '.join(parts) or 'nothing'}" + ("" if plan.is_uniform else f" on {degrees}")


def _storage(plan: Plan, num_layers: int) -> str:
    """Return storage and recompute of the layers, in the terms of plan names."""
    is_sharded = any(plan.mesh(stage).state_shards > 1 for stage in range(plan.num_stages))
    ways = sorted({_strategy(plan.strategy(layer), is_sharded) for layer in range(num_layers)})
    levels = ""
    if plan.has_shard_levels:
        ranks = plan.gather_ranks(plan.mesh(0)), plan.reduce_ranks(plan.mesh(0))
        levels = ", parameters over {} and gradients over {} neighbouring ranks".format(*ranks)
    if plan.max_active_stages is not None:
        levels = f", parameters of {plan.max_active_stages} of {plan.vpp} stages of a rank gathered at a time"
    return f"{plan.precision} compute; " + " or, by layer, ".join(ways) + levels


def _strategy(strategy: LayerStrategy, is_sharded: bool) -> str:
    tiers = {"optimizer state": strategy.offload_optimizer, "parameters": strategy.offload_param}
    places = {"host": "in host memory", "disk": "on disk"}
    away = "".join(f", {what} {places[tier]}" for what, tier in tiers.items() if tier != "none")
    if strategy.device_update_ratio:
        away += f", {strategy.device_update_ratio:.0%} of its layers updated by the device"
    offload = _mode_text(strategy.offload, "offload").replace("activations_on_disk offload", "activations on disk")
    if away and strategy.offload == "none":
        offload = "activations on the device"
    sharding = strategy.zero if is_sharded else "no ZeRO"
    return f"{sharding}, {_mode_text(strategy.recompute, 'recompute')}, {offload}{away}"


def _mode_text(choice: str, what: str) -> str:
    return f"no {what}" if choice == "none" else f"{choice} {what}"


def _plural(count: int, word: str, ending: str) -> str:
    return f"{count} {word}{'' if count == 1 else ending}"


# ----------------------------------------------------------------------------------------------------------------------
# The timeline


def gantt_text(timeline: Timeline, width: int = 80) -> Text:
    """Return the compute lanes as a grid at most `width` columns wide, a row for each rank; readable without colour.

    A box has its kind and micro-batch as far as they fit (`F0--`, `B0====`). Dots are idle time, lower-case letters a
    collective that the rank waits for.
    """
    rows = timeline_rows(timeline)
    if not rows.length_s:
        return Text("no timeline was recorded")
    names = [str(rank) for rank in rows.ranks]
    indent = max(map(len, names)) + 1
    columns = max(8, width - indent)
    shown = f", {len(rows.ranks)} of {rows.num_ranks} shown" if len(rows.ranks) < rows.num_ranks else ""
    text = Text(f"{rows.source}: {rows.length_text}, {format_fraction(rows.bubble)} of it bubble")
    text.append(f"\n{'':{indent}}a row for each {rows.row_name}{shown}", "dim")
    for name, rank in zip(names, rows.ranks, strict=True):
        text.append(f"\n{name:>{indent - 1}} ")
        text.append_text(_grid_row(rows, rank, columns))
    ends = ("0 s", format_seconds(rows.length_s / 2), format_seconds(rows.length_s))
    text.append(f"\n{'':{indent}}{ends[0]}{ends[1]:^{columns - len(ends[0]) - len(ends[2])}}{ends[2]}", "dim")
    return text


def _grid_row(rows: TimelineRows, rank: int, columns: int) -> Text:
    """Return one row of the grid: stretches of columns that belong to the same event."""
    compute = _column_events(rows.events.get((rank, "compute"), []), rows, columns)
    waiting_for = _column_events(rows.events.get((rank, "collective"), []), rows, columns)
    text = Text()
    column = 0
    while column < columns:
        event = compute[column]
        other = waiting_for[column]
        end = column + 1
        while end < columns and compute[end] is event and (event is not None or waiting_for[end] is other):
            end += 1
        text.append_text(_box(event, other, end - column))
        column = end
    return text


def _column_events(events: Sequence[Event], rows: TimelineRows, columns: int) -> list[Event | None]:
    """Return for each column the event that fills most of it; None where less than half is filled."""
    owners: list[Event | None] = [None] * columns
    largest = [0.0] * columns
    taken = [0.0] * columns
    scale = columns / rows.length_s
    for event in events:
        start, end = (event.start_s - rows.start_s) * scale, (event.end_s - rows.start_s) * scale
        for column in range(int(start), min(columns, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            taken[column] += part
            if part > largest[column]:
                owners[column] = event
                largest[column] = part
    return [owner if part >= 0.5 else None for owner, part in zip(owners, taken, strict=True)]


def _box(event: Event | None, other: Event | None, length: int) -> Text:
    """Return a box of an event, of a collective that is waited for, or of idle time."""
    if event is not None:
        kind = event.action.kind
        paint = paint_of(event.action.kind)
        name = f"{kind}{event.action.micro_batch}" if event.action.micro_batch >= 0 else kind
        name = name if len(name) <= length else kind[:length]  # half a number would be another number
        return Text(name.ljust(length, _FILLINGS.get(kind, " ")), f"{paint.light_text} on {paint.light}")
    if other is not None:
        return Text(other.action.kind.lower()[:length].ljust(length, "."), paint_of(other.action.kind).light)
    return Text("." * length, "dim")
