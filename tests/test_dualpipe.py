"""DualPipe's orders are the published ones: with each forward and the backward after it as one, they cost the same."""

from muster.schedule.action import Action
from muster.schedule.registry import make_schedule
from muster.schedule.schedule import Schedule
from tests.test_schedules import setting_of


def test_dualpipe_in_pairs_costs_what_was_published():
    """(p/2 − 1)(tFB + tB − 3 tW), and (p − 1) / 2 of it for the V, where a forward and the backward after it end
    together; on the ranks in the middle the first pair is two passes."""
    for ranks, micro_batches, dualpipe, dualpipe_v in ((4, 8, 2, 3), (4, 16, 2, 3), (8, 32, 6, 7)):
        assert bubble_in_pairs("dualpipe", ranks, micro_batches) == dualpipe
        assert bubble_in_pairs("dualpipe-v", ranks, micro_batches) == dualpipe_v


def bubble_in_pairs(name: str, ranks: int, micro_batches: int) -> float:
    setting = setting_of(name, ranks, micro_batches)
    schedule = make_schedule(name, setting)
    middle = {ranks - 1} if schedule.replicas == 1 else {ranks // 2 - 1, ranks // 2}
    orders = [pairs_of(order, rank in middle) for rank, order in enumerate(schedule.ranks)]
    known = {action for order in schedule.ranks for action in order}
    end_s, free_s, todo = {}, [0.0] * ranks, [list(reversed(order)) for order in orders]
    while any(todo):
        for rank, order in enumerate(todo):
            while order and all(one in end_s for action in order[-1] for one in inputs_of(action, schedule, known)):
                passes = order.pop()
                ready_s = [end_s[one] for action in passes for one in inputs_of(action, schedule, known)]
                free_s[rank] = max([free_s[rank], *ready_s])
                free_s[rank] += sum(setting.stage_activation * (2 if one.kind == "B" else 1) for one in passes)
                end_s.update(dict.fromkeys(passes, free_s[rank]))
    return max(free_s) - 3 * micro_batches


def pairs_of(order: tuple[Action, ...], middle: bool) -> list[tuple[Action, ...]]:
    passes: list[tuple[Action, ...]] = []
    for action in order:
        if action.kind == "B" and len(passes[-1]) == 1 and passes[-1][0].kind == "F" and not middle:
            passes[-1] += (action,)
        else:
            passes.append((action,))
            middle = middle and action.kind != "B"
    return passes


def inputs_of(action: Action, schedule: Schedule, known: set[Action]) -> list[Action]:
    level = action.stage % schedule.depth
    if action.kind == "F":
        return [action._replace(stage=action.stage - 1)] if level else []
    if action.kind == "W" or level == schedule.depth - 1:
        return []
    after = [Action(kind, action.stage + 1, action.micro_batch) for kind in "BI"]
    return [one for one in after if one in known]
