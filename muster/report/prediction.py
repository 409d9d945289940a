"""Prediction for people, in the terminal and as a page."""

import re
from collections.abc import Iterator, Sequence

from muster.cost.uncertainty import COVERAGE
from muster.planner.training_cost import TrainingCost, energy_kwh
from muster.report.gantt import draw_timelines
from muster.report.html import Html, element
from muster.report.page import description_list, page, section
from muster.report.terminal import plan_rows
from muster.report.timeline_rows import evenly_spaced
from muster.report.training import format_kwh, price_note, training_lines
from muster.simulate.expert_moves import PredictedMoves
from muster.simulate.predict import Prediction, RankMemory
from muster.spec.formatting import format_bytes, format_count, format_fraction, format_seconds
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize

_SHOWN_RANKS = 8
"""Most pipeline ranks in the table of memory."""
_BAR = 24
"""Width of a bar for the whole step, in characters."""

_TP_OVERLAP = {
    "ring": ("async tp", "chunks travel in a ring"),
    "symmetric_memory": ("async tp", "chunks are copied out of other GPUs' memory (PyTorch's symmetric memory)"),
    "ladder": ("ladder", "the tensor-parallel sum of each attention and MLP travels beside the next one"),
    "kraken": ("sub-layers", "the tensor-parallel sum of all streams travels beside each layer's attention"),
    "pairs": ("pairs", "forwards and backwards as one hide each other's tensor-parallel collectives"),
    "domino": ("domino", "two slices of each micro-batch hide each other's tensor-parallel collectives"),
}
TableRow = tuple[str, ...]
"""Texts of a table row."""


def prediction_lines(prediction: Prediction, training: TrainingCost | None = None) -> list[str]:
    """Return step, breakdown, memory and cost as aligned lines."""
    figures = [f"{name:9} {text}" for name, text in headline_figures(prediction)]
    rows = [("", "time", "of the step"), *time_breakdown_rows(prediction)]
    shares = ["", *(f"{_bar(share)}" for *_, share in _shares(prediction))]
    parts = [f"{line}  {bar}".rstrip() for line, bar in zip(align_columns(rows), shares, strict=True)]
    memory = align_columns(memory_rows(prediction)) if prediction.memory else []
    whole = [] if training is None else ["", "The whole training:", *training_lines(training, prediction.cluster)]
    return [*figures, "", *parts, "", *memory, *whole]


def headline_figures(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the headline figures with their names."""
    per_device = f"{format_count(prediction.tokens_per_s_per_device)} per device"
    yield (
        "step",
        f"{format_seconds(prediction.step_time_s)}, {format_fraction(prediction.bubble_fraction)} of it bubble",
    )
    if (whole := prediction.round) is not None:
        yield (
            "round",
            f"{format_seconds(whole.round_s)} for {pluralize(whole.outer.every, 'step')} ({whole.outer.method}),"
            f" {format_seconds(whole.exposed_s)} of it waiting for other islands; a rank sends"
            f" {format_bytes(whole.sent_bytes)}"
            + (f" at rank {whole.outer.low_rank}, and less once ranks fall" if whole.outer.rank_window else ""),
        )
        if whole.outer.warmup_steps:
            yield "warm-up", f"{pluralize(whole.outer.warmup_steps, 'step')} of {format_seconds(whole.warmup_step_s)}"
        if whole.outer.reshard_at:
            samples, times = pluralize(whole.outer.scored_samples, "sample"), len(whole.outer.reshard_at)
            yield "router", f"learns {pluralize(times, 'time')}; the paths' losses on {samples} then aren't counted"
    yield "range", range_text(prediction)
    yield "framework", prediction.framework.label(prediction.compiled)
    if prediction.tp_overlap is not None:
        yield _TP_OVERLAP[prediction.tp_overlap]
    if (load := prediction.workload.expert_load) is not None:
        ep, copies = prediction.plan.mesh(0).ep, prediction.plan.ep_redundant_experts
        by_rank = f", the fullest of {ep} ranks {load.imbalance(ep):.2f}" if ep > 1 else ""
        if ep > 1 and copies:
            placed = load.of_ranks(ep, prediction.plan.expert_placement, copies)
            by_rank += f", with copies {placed.imbalance:.2f}"
        yield "experts", f"the most chosen one has {load.max_over_mean:.2f} times the mean{by_rank} ({load.source})"
    if (moves := prediction.moves) is not None:
        yield "moves", _moves_text(moves)
    if prediction.not_yet:
        yield "not yet", "; ".join(prediction.not_yet)
    if prediction.substitutions:
        yield "precision", "; ".join(prediction.substitutions)
    yield "tokens/s", f"{format_count(prediction.tokens_per_s)}, {per_device}"
    yield "TFLOP/s", f"{prediction.tflops_per_device:.1f} per device, MFU {_mfu_text(prediction)}"
    if prediction.model.architecture is not None:
        yield "layers", "plugin layers, predicted from the kernels of their forward, unmeasured"
    yield "fits", _fits(prediction)
    yield from _host_tiers(prediction)
    yield from _memory_fixes(prediction)
    yield "cost", _cost(prediction)


def _moves_text(moves: PredictedMoves) -> str:
    """Return which experts move after some steps, how long that takes, and how long a step takes afterwards."""
    fullest = f"the fullest rank has {moves.max_over_mean_before:.2f} times the mean load"
    if not moves.num_experts:
        return f"none after {pluralize(moves.every, 'step')}, as none pays: {fullest}"
    moved = f"{pluralize(moves.num_experts, 'expert')} ({format_bytes(moves.num_bytes)})"
    return (
        f"{moved} in {format_seconds(moves.time_s)} after {pluralize(moves.every, 'step')}: {fullest}, then"
        f" {moves.max_over_mean_after:.2f}, and a step takes {format_seconds(moves.later_step_s)}"
    )


def range_text(prediction: Prediction) -> str:
    """Return the interval of the step time, and the measurements that say so."""
    found = prediction.interval
    if found is None:
        return "n/a (no measurement of such a device; 'muster profile' measures this machine)"
    ends = (format_seconds(factor * prediction.step_time_s) for factor in (found.low, found.high))
    return f"{' to '.join(ends)} in {10 * COVERAGE:.0f} of 10 cases: {found.source}"


def _mfu_text(prediction: Prediction) -> str:
    if prediction.mfu is None:
        return f"n/a ({prediction.cluster.device.why_unknown})"
    causal = prediction.mfu_causal
    without_mask = "" if causal is None else f", {format_fraction(causal)} with causal"
    return f"{format_fraction(prediction.mfu)} with full attention{without_mask}"


def _fits(prediction: Prediction) -> str:
    """Return if the plan fits, and what the fullest rank holds."""
    if not prediction.memory:
        return "n/a (this plan's memory can't be predicted yet)"
    limits = {rank.rank: prediction.cluster.group_of(rank.rank).device.memory_bytes for rank in prediction.memory}
    fullest = max(prediction.memory, key=lambda rank: rank.total / (limits[rank.rank] or 1))
    limit = limits[fullest.rank]
    if limit is None:
        return f"n/a (the device's memory is unknown); the fullest rank, {fullest.rank}, holds {_size(fullest)}"
    answer = "yes" if prediction.fits else "NO"
    disk = next((rank for rank in prediction.forecast.ranks if rank.exceeds_disk), None)
    hosts = (rank for rank in prediction.forecast.ranks if rank.exceeds_host_memory)
    too_much = max(hosts, key=lambda rank: rank.host_bytes, default=None)
    host = ""
    if too_much is not None:
        share = format_bytes(int(too_much.host_capacity_bytes or 0))
        host = f"; rank {too_much.rank} offloads {format_bytes(too_much.host_bytes)}, its share of its host is {share}"
    if disk is not None:
        share = format_bytes(int(disk.disk_capacity_bytes or 0))
        host += f"; rank {disk.rank} keeps {format_bytes(disk.disk_bytes)} on disk, its share of which is {share}"
    reserve = f"the reserve of plans is {format_bytes(prediction.memory_reserve_bytes)}"
    held = f"holds {_size(fullest)} of {format_bytes(limit)} ({reserve})"
    return f"{answer}: the fullest rank, {fullest.rank}, {held}{host}"


def _host_tiers(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield what the fullest rank keeps in host memory and on disk, where it keeps anything there."""
    for name, field in (("host", "host_bytes"), ("disk", "disk_bytes")):
        if held := max((getattr(rank, field) for rank in prediction.forecast.ranks), default=0):
            yield name, f"{format_bytes(held)} of each rank's state and buffers"


def _memory_fixes(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the largest memory terms and possible changes of a plan that doesn't fit."""
    if prediction.fits is not False:
        return
    terms = ", ".join(
        f"{term.replace('_', ' ')} {format_bytes(size)}" for term, size in prediction.forecast.fullest.largest_terms
    )
    yield "largest", f"{terms}; most at {prediction.forecast.fullest.peak_instruction}"
    for change in prediction.memory_fixes:
        slower = change.value / prediction.step_time_s - 1
        name = format_plan_name(change.plan)
        size = format_bytes(change.memory.fullest.terms.total)
        yield "change", f"{', '.join(change.changes)}: {name} holds {size}, step {slower:+.0%}"
    if not prediction.memory_fixes:
        yield "change", "no change that was tried makes it fit on this many devices"


def _cost(prediction: Prediction) -> str:
    """Return dollars and energy per 10⁹ tokens."""
    per_step = 1e9 / prediction.workload.tokens_per_step
    usd = "n/a" if prediction.usd_per_step is None else f"${prediction.usd_per_step * per_step:,.2f}"
    kwh = energy_kwh(prediction, prediction.step_time_s * per_step)
    return f"{usd}{price_note(prediction.cluster)} and {format_kwh(kwh)} for 10⁹ tokens"


def time_breakdown_rows(prediction: Prediction) -> list[TableRow]:
    """Return the parts of a step with their seconds and shares."""
    return [(name, format_seconds(time_s), format_fraction(share)) for name, time_s, share in _shares(prediction)]


def _shares(prediction: Prediction) -> list[tuple[str, float, float]]:
    parts = prediction.parts
    rows = [("compute", parts.compute_s)]
    rows += [(f"waiting for {axis}", time_s) for axis, time_s in parts.communication_s.items()]
    rows += [("bubble", parts.bubble_s), ("optimizer", parts.optimizer_s), ("data", parts.data_s)]
    return [(name, time_s, time_s / prediction.step_time_s) for name, time_s in rows]


def memory_rows(prediction: Prediction) -> list[TableRow]:
    """Return a header and a row for each pipeline rank, or for some of very many."""
    memory = prediction.memory
    shown = [memory[index] for index in evenly_spaced(len(memory), _SHOWN_RANKS)]
    terms = [term for term in memory[0].terms if any(rank.terms[term] for rank in memory)]
    head = ("memory", *(term.replace("_", " ") for term in terms), "total")
    return [
        head,
        *((f"rank {rank.rank}", *(format_bytes(rank.terms[term]) for term in terms), _size(rank)) for rank in shown),
    ]


def _size(rank: RankMemory) -> str:
    return format_bytes(rank.total)


def _bar(share: float) -> str:
    return "▇" * round(share * _BAR)


def align_columns(rows: Sequence[TableRow]) -> list[str]:
    """Return the rows with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def prediction_page(prediction: Prediction, title: str, training: TrainingCost | None = None) -> str:
    """Return the prediction as a self-contained HTML page."""
    plan, workload = prediction.plan, prediction.workload
    what = plan_rows(plan, prediction.model, workload, plan.num_micro_batches(workload))
    what = [("batch" if name == "step" else name, text) for name, text in what]
    what.append(("cluster", prediction.cluster.name or prediction.cluster.device.name))
    name = element("p", "plan ", element("code", format_plan_name(plan)), class_="plan")
    whole = [] if training is None else [line.partition(" ") for line in training_lines(training, prediction.cluster)]
    return page(
        title,
        element("header", element("h1", title), name, description_list(_short_figures(prediction), "figures")),
        section("The step", _text_table([*what, *headline_figures(prediction)])),
        section(
            "The whole training", _text_table([(head, re.sub(" {2,}", ", ", text.strip())) for head, _, text in whole])
        )
        if whole
        else "",
        section("Where the time goes", html_table([("", "time", "of the step"), *time_breakdown_rows(prediction)])),
        section("One step", draw_timelines(prediction.timeline)),
        section("Memory", _scrolling_table(html_table(_by_term(memory_rows(prediction))))) if prediction.memory else "",
    )


def _short_figures(prediction: Prediction) -> dict[str, str | None]:
    """Return the figures that stand large above the page."""
    fits = {True: "yes", False: "no", None: "n/a"}[prediction.fits]
    return {
        "step": format_seconds(prediction.step_time_s),
        "bubble": format_fraction(prediction.bubble_fraction),
        "tokens/s": format_count(prediction.tokens_per_s),
        "MFU, full attention": None if prediction.mfu is None else format_fraction(prediction.mfu),
        "fits in memory": fits,
    }


def _text_table(rows: Sequence[tuple[str, str]]) -> Html:
    """Return names and texts as a table whose texts may have several lines."""
    cells = (element("tr", element("th", name, scope="row"), element("td", text)) for name, text in rows)
    return element("table", element("tbody", *cells), class_="texts")


def _by_term(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return the table of memory with a column for each rank: there are more terms than a window has room for."""
    return [tuple(cells) for cells in zip(*rows, strict=True)]


def html_table(rows: Sequence[TableRow]) -> Html:
    """Return an HTML table from a header row and the rows below it."""
    head = element("tr", *(element("th", word, scope="col") for word in rows[0]))
    body = (
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:]))
        for row in rows[1:]
    )
    return element("table", element("thead", head), element("tbody", *body))


def _scrolling_table(rows: Html) -> Html:
    """Return a table with many columns in a box that scrolls sideways."""
    return element("div", rows, class_="wide", tabindex="0", role="region", aria_label="Memory by rank")
