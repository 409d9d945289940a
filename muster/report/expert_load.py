"""Load of experts by layer, on the page of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

from muster.report.html import Html, element
from muster.spec.formatting import format_bytes

PREFIX = "experts/max_over_mean/"
"""Beginning of the metrics that say how uneven the load of a layer is; the layer's number follows."""
MAX_LAYERS_IN_LINE = 8


def layers_with_load(row: Mapping[str, Any]) -> list[str]:
    """Return the layers whose load a row of metrics.jsonl has, in their order."""
    return [key.removeprefix(PREFIX) for key in row if key.startswith(PREFIX)]


def draw_expert_load(metrics: Sequence[Mapping[str, Any]]) -> Html | None:
    """Return the table of each layer's load in the first and the last step that was logged; None without experts."""
    rows = [row for row in metrics if layers_with_load(row)]
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    columns = ("layer", f"max/mean, step {first['step']}", f"max/mean, step {last['step']}", "entropy", "dropped")
    head = element("tr", *(element("th", word, scope="col") for word in columns))
    body = [
        element(
            "tr",
            element("th", layer, scope="row"),
            element("td", f"{first.get(PREFIX + layer, float('nan')):.2f}"),
            element("td", f"{last[PREFIX + layer]:.2f}"),
            element("td", f"{last[f'experts/entropy/{layer}']:.3f}"),
            element("td", f"{last.get(f'experts/dropped/{layer}', 0.0):.1%}"),
        )
        for layer in layers_with_load(last)
    ]
    return element("table", element("thead", head), element("tbody", *body))


def draw_expert_moves(metrics: Sequence[Mapping[str, Any]]) -> Html | None:
    """Return the table of the steps after which experts moved to other ranks; None where none did."""
    rows = [row for row in metrics if row.get("experts/moved")]
    if not rows:
        return None
    columns = ("step", "experts moved", "sent", "time", "predicted", "max/mean of ranks", "the same, moved")
    head = element("tr", *(element("th", word, scope="col") for word in columns))
    body = [
        element(
            "tr",
            element("th", str(row["step"]), scope="row"),
            element("td", str(row["experts/moved"])),
            element("td", format_bytes(row["experts/moved_bytes"])),
            element("td", f"{row['experts/moved_s']:.2f} s"),
            element("td", "–" if (s := row.get("experts/moved_predicted_s")) is None else f"{s:.2f} s"),
            element("td", f"{row['experts/ranks_max_over_mean']:.2f}"),
            element("td", f"{row['experts/ranks_max_over_mean_moved']:.2f}"),
        )
        for row in rows
    ]
    return element("table", element("thead", head), element("tbody", *body))


def load_in_words(row: Mapping[str, Any]) -> str:
    """Return the load of a row of metrics.jsonl for a line of text: of up to 8 layers each, else the range; empty
    without experts."""
    loads = {layer: row[PREFIX + layer] for layer in layers_with_load(row)}
    if not loads:
        return ""
    shown = " ".join(f"{load:.2f}" for load in loads.values())
    if len(loads) > MAX_LAYERS_IN_LINE:
        worst = max(loads, key=loads.__getitem__)
        shown = f"{min(loads.values()):.2f}–{loads[worst]:.2f} (layer {worst})"
    dropped = [row[key] for key in row if key.startswith("experts/dropped/")]
    lost = f" dropped {sum(dropped) / len(loads):.1%}" if dropped else ""
    return f" experts max/mean {shown}{lost}"
