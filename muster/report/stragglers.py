"""Stragglers of a run and the times that tell them, on its page and in a line."""

from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from muster.report.html import Html, element, join
from muster.simulate.stragglers import StragglerKey
from muster.spec.formatting import format_seconds
from muster.spec.units import pluralize

MOST_RANKS = 32
"""Most ranks in a table: more are unreadable, and are in stragglers.jsonl."""

MOST_SPANS = 4
"""Most times that something was slow which are named one by one."""

Row = Mapping[str, Any]


def draw_stragglers(checks: Sequence[Row]) -> Html | None:
    """Return the stragglers, and the times of the last check with any, else of the last one, as tables whose slow cells
    are coloured, by rows of stragglers.jsonl; None without any."""
    if not checks:
        return None
    told = straggler_note(checks) or f"no stragglers in {pluralize(len(checks), 'comparison')}"
    parts = [element("p", f"{told[0].upper()}{told[1:]}.")]
    if not (timed := [row for row in checks if row["ranks"]]):  # comparisons of gradients have no times
        return join(*parts)
    shown = next((row for row in reversed(timed) if row["stragglers"]), timed[-1])
    parts.append(element("p", f"Times up to step {shown['step']}:"))
    if len(shown["ranks"]) > MOST_RANKS:
        parts.append(element("p", f"{len(shown['ranks'])} ranks, whose times are in stragglers.jsonl."))
        return join(*parts)
    parts.append(_times_table(shown))
    links = [[None if one is None else float(one) for one in rank["link_s"]] for rank in shown["ranks"]]
    if any(one is not None for row in links for one in row):
        parts.append(element("p", "Messages, a row for each sender and a column for each receiver:"))
        parts.append(_links_table(links, shown.get("machines") or [0] * len(links)))
    return join(*parts)


def straggler_note(checks: Sequence[Row]) -> str | None:
    """Return a sentence about the stragglers of a run, each with the steps of the comparisons from the one that named
    it to the last that did, for each time that it was slow; None without any."""
    spans: dict[StragglerKey, list[list[int]]] = {}
    ratios: dict[StragglerKey, float] = {}
    texts: dict[StragglerKey, str] = {}
    last: dict[bool, set[StragglerKey]] = {}  # of the comparisons of times, and of those of gradients
    for row in checks:
        has_times = bool(row["ranks"])
        before, current = last.get(has_times, set()), set[StragglerKey]()
        last[has_times] = current
        for one in row["stragglers"]:
            key = one["kind"], tuple(one["ranks"])
            current.add(key)
            if one.get("ratio", 0.0) >= ratios.get(key, 0.0):
                ratios[key], texts[key] = one.get("ratio", 0.0), one["text"]
            if key in before:
                spans[key][-1][1] = row["step"]
            else:
                spans.setdefault(key, []).append([row["step"], row["step"]])
    told = (f"{text} ({_name_spans(spans[key])})" for key, text in texts.items())
    return f"stragglers: {'; '.join(told)}" if texts else None


def _name_spans(spans: Sequence[Sequence[int]]) -> str:
    """Name the steps of spans: `steps 10 to 20, step 40`."""
    if len(spans) > MOST_SPANS:
        return f"{len(spans)} times, steps {spans[0][0]} to {spans[-1][1]}"
    return ", ".join(f"step {first}" if first == last else f"steps {first} to {last}" for first, last in spans)


def _times_table(row: Row) -> Html:
    """Return a row for each rank; its passes are coloured by how much longer they take than expected, beside the other
    ranks, and all else by how much longer it takes than theirs."""
    columns = ("rank", "passes", "in the median step", "expected", "wait for samples", "product of matrices", "file")
    head = element("tr", *(element("th", word, scope="col") for word in columns))
    passes = {key: _usual_passes_s(row, key) for key in ("compute_s", "median_compute_s")}
    usual = {key: _usual_s(row, key) for key in ("data_s", "product_s", "disk_s")}
    body = []
    for number, rank in enumerate(row["ranks"]):
        expected_s = row["expected_s"][number]
        cells = [element("th", str(number), scope="row")]
        cells += [_cell(rank.get(key), usual_s[number]) for key, usual_s in passes.items()]
        cells += [_cell(expected_s, expected_s), _cell(rank["data_s"], max(usual["data_s"], rank["step_s"] / 20))]
        cells += [_cell(rank[key], usual[key]) for key in ("product_s", "disk_s")]
        body.append(element("tr", *cells))
    return element("table", element("thead", head), element("tbody", *body))


def _usual_passes_s(row: Row, key: str) -> list[float]:
    """Return the time of each rank's passes if they took as much longer than expected as the median rank's."""
    expected_s = row["expected_s"]
    ratios = (rank.get(key, 0.0) / own_s for rank, own_s in zip(row["ranks"], expected_s, strict=True) if own_s)
    usual = median_low([*ratios] or [0.0])
    return [own_s * usual for own_s in expected_s]


def _usual_s(row: Row, key: str) -> float:
    """Return the median of the ranks' times; 0 without any."""
    return median_low([rank[key] for rank in row["ranks"] if rank[key] is not None] or [0.0])


def _links_table(links: Sequence[Sequence[float | None]], machines: Sequence[int]) -> Html:
    """Return the times of messages, coloured by how much longer they take than others within machines, or between."""
    between = [[one != other for other in machines] for one in machines]
    usual_s = {
        kind: median_low(
            [
                one
                for a, row in enumerate(links)
                for b, one in enumerate(row)
                if one is not None and between[a][b] == kind
            ]
            or [0.0]
        )
        for kind in (False, True)
    }
    head = element("tr", element("th", ""), *(element("th", f"to {rank}", scope="col") for rank in range(len(links))))
    body = [
        element(
            "tr",
            element("th", f"from {rank}", scope="row"),
            *(_cell(one, usual_s[between[rank][to]]) for to, one in enumerate(row)),
        )
        for rank, row in enumerate(links)
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def _cell(seconds: float | None, usual_s: float) -> Html:
    """Return a time, the redder the longer it is than usual: from none at 1.1 times to most at twice."""
    if seconds is None:
        return element("td", "–")
    share = min(1.0, max(0.0, (seconds / usual_s - 1.1) / 0.9)) if usual_s else 0.0
    style = f"background:color-mix(in srgb, var(--alarm) {round(60 * share)}%, transparent)" if share else None
    return element("td", format_seconds(seconds), style=style)
