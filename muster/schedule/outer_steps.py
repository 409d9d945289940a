"""Steps at which islands exchange: a pure function of the step, so that all ranks, the simulator and a resumed run
agree."""

from typing import NamedTuple

from muster.config.outer_config import OuterConfig


class OuterEvents(NamedTuple):
    """Fragments that islands exchange after one step."""

    starts: tuple[int, ...] = ()
    """Fragments whose exchange begins."""
    ends: tuple[int, ...] = ()
    """Fragments whose exchange ends, and which the outer optimizer updates."""


NO_EXCHANGE = OuterEvents()


def outer_events(outer: OuterConfig, step: int, last_step: int) -> OuterEvents:
    """Return the exchanges after `step`, counted from 1.

    Fragment n is updated at steps (n + 1) · every / fragments + k · every, so that the last one closes the round, and
    its exchange begins `delay` steps earlier (arXiv:2501.18512 §2.2). After the last step of the training all fragments
    are exchanged without delay, and none of those that would end later begins before. So they are after each step of
    the warm-up, with which rounds begin to count.
    """
    if step <= outer.warmup_steps:
        everything = tuple(range(outer.fragments))
        return OuterEvents(everything, everything)
    step, last_step = step - outer.warmup_steps, last_step - outer.warmup_steps
    if outer.is_delayed_by_a_round:
        return _events_of_delayed_rounds(outer, step, last_step)
    fragments = tuple(range(outer.fragments))
    if step >= last_step:
        return OuterEvents(fragments, fragments)
    starts = _ends(outer, step + outer.delay) if step + outer.delay < last_step else ()
    return OuterEvents(starts, _ends(outer, step))


def fragment_of(outer: OuterConfig, layer: int | None) -> int:
    """Return the fragment of the parameters of a layer: each has every `fragments`-th, so that it has early and late
    ones (arXiv:2501.18512 §2.2). None: parameters outside layers, which belong to the last."""
    return outer.fragments - 1 if layer is None else layer % outer.fragments


def pending_fragments(outer: OuterConfig, step: int, last_step: int) -> tuple[int, ...]:
    """Return the fragments whose exchange is under way after `step`."""
    step, last_step = step - outer.warmup_steps, last_step - outer.warmup_steps
    if step <= 0:
        return ()
    if outer.is_delayed_by_a_round:
        return ((step // outer.every) % 2,) if outer.every <= step < last_step else ()
    later = range(step + 1, min(step + outer.delay + 1, last_step))
    return tuple(fragment for one in later for fragment in _ends(outer, one))


def _events_of_delayed_rounds(outer: OuterConfig, step: int, last_step: int) -> OuterEvents:
    """Return the exchanges after a step where all parameters travel beside the whole next round (arXiv:2506.21263,
    arXiv:2401.16265). Exchanges have the number 0 in even rounds, counted from 1, and 1 in odd ones. That of the round
    before ends when this one's has begun; after the last step that ends, too."""
    number = -(-step // outer.every) if step >= last_step else step // outer.every
    if not number or (step < last_step and step % outer.every):
        return NO_EXCHANGE
    before = ((number - 1) % 2,) if number > 1 else ()
    return OuterEvents((number % 2,), (*before, number % 2) if step >= last_step else before)


def _ends(outer: OuterConfig, step: int) -> tuple[int, ...]:
    """Return the fragments that are updated after a step before the last one."""
    number, rest = divmod(step, outer.steps_between)
    return () if rest or not number else ((number - 1) % outer.fragments,)


def round_end_events(outer: OuterConfig) -> OuterEvents:
    """Return the exchanges after the last step of a round that isn't the last one."""
    return outer_events(outer, outer.warmup_steps + 2 * outer.every, outer.warmup_steps + 4 * outer.every)
