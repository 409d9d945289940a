"""Pictures of docs/concepts.md, drawn from the code's results. `python docs/pictures.py` writes them anew."""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import rank_layouts
from muster.report.html import Html, element, join
from muster.report.palette import PAINTS, Paint
from muster.report.scales import fit_scale
from muster.report.schedule_svg import schedule_svg
from muster.report.standalone_svg import fill_attributes, standalone_svg, text_attributes
from muster.schedule.compare import CompareRequest, make_with_best_chunks
from muster.simulate.predict import Prediction, predict
from muster.spec.formatting import format_bytes, format_seconds
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

FOLDER = Path(__file__).parent / "pictures"
_COLOURS = {paint.key: paint for paint in PAINTS}
_HUES = [_COLOURS[key] for key in ("forward", "backward", "weights", "inputs")]
"""Colours of the ranks of a pipeline."""


def words(text: str, x: float, y: float, style: str = "") -> Html:
    return element("text", text, x=x, y=y, class_=style or None)


def box(x: float, y: float, width: float, height: float, paint: Paint, pale: bool = False, text: str = "") -> Html:
    """Return a rectangle with text in its middle."""
    inside = element("text", text, x=x + width / 2, y=y + height / 2 + 4, **text_attributes(paint, pale, "middle"))
    rect = element("rect", x=x, y=y, width=max(0.0, width - 1.5), height=height - 1.5, **fill_attributes(paint, pale))
    return join(rect, inside if text else "")


def plans() -> str:
    """Return the layers of an eight-layer model on pipeline ranks, under three plans."""
    model, rows, y = load_model("tiny"), [], 52
    for name in ("pp2", "pp4", "pp2v2-sinterleaved"):
        plan = parse_plan_name(name)
        parts = [words(name, 16, y + 20)]
        for stage in range(plan.num_stages):
            rank, layers = plan.pp_rank(stage), plan.layers(stage, model.num_layers)
            paint = _HUES[rank]
            parts += [box(160 + 54 * layer, y, 54, 30, paint, text=str(layer)) for layer in layers]
            parts.append(words(f"rank {rank}", 160 + 54 * layers.start, y + 46, "quiet"))
        rows.append(join(*parts))
        y += 70
    title = "Layers of a model and the pipeline ranks that hold them"
    head = words("layers", 160, 34, "quiet")
    return standalone_svg(title, "eight layers under pp2, pp4 and pp2v2-sinterleaved", join(head, *rows), 610, y + 4)


def ranks() -> str:
    """Return the ranks of dp2-tp2-pp2 by their coordinates on the axes."""
    plan = parse_plan_name("dp2-tp2-pp2")
    parts = []
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        x, y = 110 + 250 * at.pp + 100 * at.tp, 76 + 56 * at.dp_shard
        parts.append(box(x, y, 100, 56, _HUES[at.pp], pale=at.tp == 1, text=f"rank {rank}"))
    for pp in range(plan.pp):
        parts.append(words(f"stage {pp} (pp)", 210 + 250 * pp, 34, "middle"))
        parts += [words(f"tp {tp}", 160 + 250 * pp + 100 * tp, 64, "middle quiet") for tp in range(plan.tp)]
    parts += [words(f"dp {dp}", 24, 108 + 56 * dp, "quiet") for dp in range(plan.dp_shard)]
    title = "Eight ranks on the axes of dp2-tp2-pp2"
    facts = "neighbours on tp are neighbouring ranks, dp comes next, then pp"
    return standalone_svg(title, facts, join(*parts), 580, 206)


def boxes() -> str:
    """Return the boxes of one weight on each rank, under two plans."""
    model, parts = load_model("tiny"), []
    name, scale = "layers.0.mlp.up.weight", 1.0
    for index, (plan_name, verb) in enumerate((("dp2-tp2", "written under"), ("dp3", "read under"))):
        plan, left = parse_plan_name(plan_name), 24 + 300 * index
        parts.append(words(f"{verb} {plan_name}", left, 34))
        for rank in range(plan.world_size):
            for layout in rank_layouts(model, plan, rank):
                for part in layout.boxes if layout.name == name else ():
                    (row, column), (height, width) = part.start, part.size
                    at = (left + 3 * scale * column, 52 + scale * row, 3 * scale * width, scale * height)
                    parts.append(box(*at, _HUES[rank], text=f"rank {rank}: {height} × {width}"))
    parts.append(words(f"{name}, 192 × 64", 24, 270, "quiet"))
    title = "The boxes of one weight under two plans"
    facts = "each number is written once; a rank reads the boxes that overlap its own"
    return standalone_svg(title, facts, join(*parts), 540, 286)


def pipeline(name: str) -> Callable[[], str]:
    """Return a function that draws a schedule of four ranks and eight micro-batches."""

    def draw() -> str:
        schedule, timing = make_with_best_chunks(
            name, CompareRequest(4, 8, None, (1.0, 1.0, 1.0), 0.0, inf, None, False)
        )
        return schedule_svg(schedule, timing)

    return draw


def slices() -> str:
    """Return the picture of two micro-batches in four slices each on four ranks."""
    request = CompareRequest(4, 2, None, (1.0, 1.0, 1.0), 0.0, inf, None, False, num_slices=4)
    return schedule_svg(*make_with_best_chunks("1f1b", request))


def bars(
    title: str,
    facts: str,
    rows: Mapping[str, Mapping[str, float]],
    paints: Mapping[str, Paint],
    shown: Callable[[float], str],
) -> str:
    """Return a bar for each row, made of coloured parts, with its total at the end."""
    parts, x = [], 24.0
    for key, paint in paints.items():
        parts += [
            element("rect", x=x, y=44, width=14, height=12, **fill_attributes(paint)),
            words(key, x + 20, 54, "quiet"),
        ]
        x += 42 + 6.6 * len(key)
    longest, y = max(sum(row.values()) for row in rows.values()), 74.0
    for name, row in rows.items():
        parts.append(words(name, 24, y + 19))
        at = 170.0
        for key, value in row.items():
            parts.append(box(at, y, 380 * value / longest, 28, paints[key]))
            at += 380 * value / longest
        parts.append(words(shown(sum(row.values())), at + 8, y + 19))
        y += 38
    return standalone_svg(title, facts, join(words(title, 24, 26, "title"), *parts), 640, y + 12)


def _llama(plan: str, devices: int = 16) -> Prediction:
    workload = Workload(seq_len=8192, global_batch_size=64)
    return predict(load_model("llama3-8b"), parse_plan_name(plan), workload, load_cluster(f"{devices}xh100"))


def memory() -> str:
    """Return the peak memory of the ranks of a pipeline."""
    paints = dict(zip(("parameters", "gradients", "optimizer", "activations", "all else"), _hues(5), strict=True))
    rows = {}
    for rank in _llama("dp4-pp4-mb1-z1").memory:
        row = {key: float(rank.terms.get(key, 0)) for key in paints if key != "all else"}
        rows[f"pipeline rank {rank.pp_rank}"] = row | {"all else": rank.total - sum(row.values())}
    title = "Memory of Llama 3 8B on 16 H100 under dp4-pp4-z1"
    return bars(title, "the first ranks of 1F1B keep the activations of more micro-batches", rows, paints, format_bytes)


def step() -> str:
    """Return the breakdown of a step under four plans."""
    keys = ("computing", "waiting for tp", "waiting for dp", "other waiting", "bubble")
    rows = {}
    for name in ("dp16-relem", "dp8-tp2-z1-relem", "dp4-pp4-z1", "dp4-pp4-z1-szbh1"):
        parts = _llama(name).parts
        travel = parts.communication_s
        other = sum(travel.values()) - travel.get("tp", 0) - travel.get("dp", 0) + parts.data_s
        seconds = (parts.compute_s + parts.optimizer_s, travel.get("tp", 0), travel.get("dp", 0), other, parts.bubble_s)
        rows[name] = dict(zip(keys, seconds, strict=True))
    title = "One step of Llama 3 8B on 16 H100, predicted"
    return bars(title, "the same work under four plans", rows, dict(zip(keys, _hues(5), strict=True)), format_seconds)


def _hues(count: int) -> list[Paint]:
    return [_COLOURS[key] for key in ("forward", "backward", "weights", "gather", "other")][:count]


def search() -> str:
    """Return every plan for a small cluster, step time against memory, with the search's answer."""
    from muster.planner.plan_evaluator import PlanEvaluator
    from muster.planner.request import build_request
    from muster.planner.search import exhaustive_search
    from muster.planner.search import search as best_of

    model, cluster = load_model("gpt2-xl"), load_cluster("4xh100")
    request = build_request(model, cluster, 1024, 16, fix="cp1-ep1", runnable=True)
    found = list(exhaustive_search(PlanEvaluator(request)))
    best = best_of(request).best[0]
    dots = [(one.prediction.step_time_s, one.peak_bytes / 2**30) for one in found]
    dots = [dot for dot in dots if dot[0] <= 2.5 * min(dots)[0]]
    x, y = fit_scale([t for t, _ in dots]), fit_scale([b for _, b in dots], from_zero=True)

    def place(time_s: float, gib: float) -> tuple[float, float]:
        return 70 + 480 * x.fraction(time_s), 330 - 250 * y.fraction(gib)

    parts = [words("Every plan of GPT-2 XL for 4 H100", 24, 26, "title")]
    parts.append(words("GiB on the fullest device, over the time of a step", 24, 48, "quiet"))
    parts.append(element("circle", cx=30, cy=66, r=6, **fill_attributes(_COLOURS["gather"])))
    parts.append(words(f"the fastest: {best.name.partition('+')[0]}", 44, 70, "quiet"))
    for tick, label in zip(x.ticks, x.labels, strict=True):
        at, _ = place(tick, 0)
        parts.append(element("line", x1=at, x2=at, y1=80, y2=334, class_="grid"))
        parts.append(words(f"{label} s", at, 352, "quiet middle"))
    for tick, label in zip(y.ticks, y.labels, strict=True):
        _, at = place(x.low, tick)
        parts.append(element("line", x1=66, x2=550, y1=at, y2=at, class_="grid"))
        parts.append(words(label, 60, at + 4, "quiet end"))
    for time_s, gib in sorted(dots):
        at_x, at_y = place(time_s, gib)
        parts.append(element("circle", cx=at_x, cy=at_y, r=3.5, **fill_attributes(_COLOURS["forward"], pale=True)))
    at_x, at_y = place(best.prediction.step_time_s, best.peak_bytes / 2**30)
    parts.append(element("circle", cx=at_x, cy=at_y, r=6, **fill_attributes(_COLOURS["gather"])))
    facts = f"{len(found)} plans that fit; the search finds {best.name} without simulating them all"
    return standalone_svg("Every plan for a cluster, and the best", facts, join(*parts), 580, 366)


PICTURES: dict[str, Callable[[], str]] = {
    "plans": plans,
    "ranks": ranks,
    "boxes": boxes,
    "1f1b": pipeline("1f1b"),
    "zb-h1": pipeline("zb-h1"),
    "slices": slices,
    "memory": memory,
    "step": step,
    "search": search,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
