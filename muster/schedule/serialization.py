"""Schedules as plain data: the output of `muster schedule --json`, and its reader."""

from itertools import chain
from math import inf, log10
from typing import Any

from muster.schedule.action import parse_action
from muster.schedule.makespan_bound import OptimalityGap
from muster.schedule.paths import wrong_path
from muster.schedule.program import PAIRED
from muster.schedule.schedule import Schedule
from muster.schedule.timing import Timing
from muster.spec.schedules import SCHEDULES


def schedule_to_json(
    schedule: Schedule, timing: Timing, gap: OptimalityGap | None = None, pair_share: float | None = None
) -> dict[str, Any]:
    """Return a schedule with its timing as plain data.

    `stages[i].index` is the number in an action, `depth` the stage's place in its copy of the model; `ranks` holds each
    rank's passes in order, with `&` behind a forward that runs as one with the backward after it; `paths`, where there
    are any, each micro-batch's stages in the order of its forwards; `pair_share`, where there are pairs, the time of
    one as a share of that of both passes after each other. Times are in the unit of the spec, to 12 significant digits
    of the makespan; `peak_activation` counts one micro-batch's activations of one rank's share of a copy of the model
    as 1. With a `gap`: `proven` (no schedule takes less), the `bound`, and the `gap` to it as a fraction.
    """
    digits = 12 - round(log10(timing.makespan_s)) if timing.makespan_s else 12
    return {
        "name": schedule.name,
        "n_ranks": len(schedule.ranks),
        "n_microbatches": schedule.num_micro_batches,
        **({"n_slices": schedule.num_slices} if schedule.num_slices > 1 else {}),
        **({"n_steps": schedule.num_steps} if schedule.num_steps > 1 else {}),
        "stages": [
            {"index": index, "depth": index % schedule.depth, "rank": rank, "replica": index // schedule.depth}
            for index, rank in enumerate(schedule.placement)
        ],
        "ranks": [[str(one) + PAIRED * (one in schedule.pairs) for one in order] for order in schedule.ranks],
        **({"paths": [list(path) for path in schedule.paths]} if schedule.paths else {}),
        **({"pair_share": pair_share} if schedule.pairs and pair_share is not None else {}),
        "makespan": round(timing.makespan_s, digits),
        "bubble": round(timing.bubble_s, digits),
        "span_bubble": [round(bubble_s, digits) for bubble_s in timing.span_bubble_s],
        "peak_activation": [round(peak, 9) for peak in timing.peak_activation],
    } | ({} if gap is None else {"proven": gap.proven, "bound": round(gap.bound_s, digits), "gap": round(gap.share, 9)})


def schedule_from_json(data: Any) -> Schedule:
    """Return the schedule in such data; its times are not read.

    Raises ValueError with the fault of the data; the order itself is checked elsewhere.
    """
    try:
        stages = sorted(data["stages"], key=lambda stage: stage["index"])
        places = [(stage["index"], stage["replica"], stage["depth"]) for stage in stages]
        replicas = 1 + max((replica for _, replica, _ in places), default=0)
        depth = len(places) // replicas
        ranks = tuple(tuple(parse_action(text.removesuffix(PAIRED)) for text in order) for order in data["ranks"])
        words = zip(chain.from_iterable(data["ranks"]), chain.from_iterable(ranks), strict=True)
        pairs = frozenset(action for text, action in words if text.endswith(PAIRED))
        placement = tuple(_whole("rank of a stage", stage["rank"]) for stage in stages)
        name = str(data["name"])
        count, slices, steps = data["n_microbatches"], data.get("n_slices", 1), data.get("n_steps", 1)
        for key, number in (("n_microbatches", count), ("n_slices", slices), ("n_steps", steps)):
            _whole(key, number)
        paths = tuple(tuple(_whole("stage of a path", stage) for stage in path) for path in data.get("paths", ()))
    except KeyError as error:
        raise ValueError(f"key {error} is missing") from None
    except (TypeError, AttributeError):
        raise ValueError("expected one object as 'muster schedule NAME --json' prints it") from None
    if not stages:
        raise ValueError("it has no stages")
    if places != [(index, *divmod(index, depth)) for index in range(replicas * depth)]:
        raise ValueError("stages are numbered replica by replica, in each by depth: index = replica × depths + depth")
    if data.get("n_ranks", len(ranks)) != len(ranks):
        raise ValueError(f"n_ranks is {data['n_ranks']!r}, but 'ranks' has {len(ranks)} orders of passes")
    if steps < 1 or count % steps:
        raise ValueError(f"{count} micro-batches don't spread over {steps} steps")
    if steps > 1 and (entry := SCHEDULES.get(name)) is not None and not entry.is_asynchronous:
        raise ValueError(f"n_steps is {steps}, but schedule {name} has one step")
    if paths and replicas > 1:
        raise ValueError(f"paths are those of one replica, but there are {replicas}")
    if (fault := wrong_path(paths, len(placement), count)) is not None:
        raise ValueError(fault)
    return Schedule(name, placement, count, ranks, replicas, slices, pairs, steps, paths)


def _whole(key: str, number: Any) -> int:
    if type(number) is not int:
        raise ValueError(f"{key} is {number!r}, expected a whole number")
    return number


def pair_share_from_json(data: Any) -> float | None:
    """Return the time of a pair in such data as a share of that of both passes after each other; None: not said.

    Raises ValueError where it isn't a number of at least 0.
    """
    share = data.get("pair_share")
    if share is not None and not (isinstance(share, int | float) and 0 <= share < inf):
        raise ValueError(f"pair_share is {share!r}, expected a number >= 0")
    return share
