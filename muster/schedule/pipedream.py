"""Asynchronous 1F1B: steps follow each other without a flush, on versions of the weights (PipeDream)."""

from collections.abc import Callable

from muster.schedule.action import Action, Kind
from muster.schedule.one_f_one_b import one_f_one_b
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError


def pipedream_2bw(spec: ScheduleSpec) -> Schedule:
    """1F1B through `num_steps` steps, two versions of the weights at most (Narayanan et al. 2020, arXiv:2006.09503).

    All stages run step t on version max(t − 1, 0), so that w(t + 1) = w(t) − ν ∇f(w(t − 1)): when the first
    micro-batches of a step begin, the gradients of the step before aren't complete yet on any rank but the last, those
    of the one before that are on all ranks. That needs as many micro-batches in a step as there are ranks: raises
    InfeasibleError for fewer. Bubble (p − 1)(tF + tB) in all these steps together.
    """
    count = spec.num_micro_batches
    if count < spec.num_ranks:
        raise InfeasibleError(
            f"schedule pipedream-2bw needs as many micro-batches in a step as pipeline ranks, {spec.num_ranks},"
            f" got {count}: the second version of the weights would not be there in time"
        )
    ranks = tuple(
        tuple(action._replace(version=max(action.micro_batch // count - 1, 0)) for action in order)
        for order in through_steps(spec)
    )
    placement = tuple(range(spec.num_ranks))
    return Schedule("pipedream-2bw", placement, count * spec.num_steps, ranks, num_steps=spec.num_steps)


def pipedream(spec: ScheduleSpec) -> Schedule:
    """1F1B through `num_steps` steps, in which each rank steps once its own gradients are complete (Narayanan et al.
    2019, PipeDream, §3.3).

    Rank r has p − 1 − r micro-batches between forward and backward when it steps. So with m micro-batches in a step the
    forward of micro-batch j, counted through all steps, uses version (j − (p − 1 − r)) // m, and its backward the same
    one, of which a rank keeps up to p − r. With one micro-batch in a step that is PipeDream's. Bubble
    (p − 1)(tF + tB) in all these steps together.
    """
    return _stepping_alone(spec, "pipedream", lambda action, after: action.micro_batch - after)


def pipelined_backprop(spec: ScheduleSpec) -> Schedule:
    """`pipedream` without weight stashing: a backward uses the newest weights of its rank (A. Kosson et al., Pipelined
    Backpropagation at Scale, arXiv:2003.11666 §2).

    So the forward of micro-batch j on rank r uses version (j − (p − 1 − r)) // m, and its backward version j // m, made
    by all micro-batches of the steps before.
    """
    return _stepping_alone(
        spec, "pipelined-backprop", lambda action, after: action.micro_batch - after * (action.kind == Kind.F)
    )


def _stepping_alone(spec: ScheduleSpec, name: str, seen: Callable[[Action, int], int]) -> Schedule:
    """Return 1F1B through all steps; `seen` gives the micro-batches whose gradients are in the weights of a pass, which
    has so many ranks after it."""
    count, last = spec.num_micro_batches, spec.num_ranks - 1
    ranks = tuple(
        tuple(action._replace(version=max(seen(action, last - rank) // count, 0)) for action in order)
        for rank, order in enumerate(through_steps(spec))
    )
    return Schedule(name, tuple(range(last + 1)), count * spec.num_steps, ranks, num_steps=spec.num_steps)


def through_steps(spec: ScheduleSpec) -> tuple[tuple[Action, ...], ...]:
    """Return the order of 1F1B on each rank over the micro-batches of all steps."""
    return one_f_one_b(ScheduleSpec(spec.num_ranks, spec.num_micro_batches * spec.num_steps)).ranks
