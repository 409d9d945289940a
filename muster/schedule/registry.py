"""Schedules made by their names, which stand in `muster/spec/schedules.py`."""

from collections.abc import Callable, Sequence
from importlib import import_module

from muster.schedule.auto import Makers, auto_among
from muster.schedule.exact import Proof, prove
from muster.schedule.schedule import Schedule
from muster.schedule.setting import Setting
from muster.schedule.timing import Timing
from muster.spec.errors import InfeasibleError
from muster.spec.schedules import SCHEDULES, Entry, entry_of


def make_schedule(name: str, setting: Setting) -> Schedule:
    """The schedule `name` for a setting.

    Raises ConfigError on an unknown name, InfeasibleError where the schedule can't serve the setting.
    """
    entry = entry_of(name)
    if entry.chunks not in (None, setting.chunks):
        stages = "one stage" if entry.chunks == 1 else f"{entry.chunks} stages"
        raise InfeasibleError(
            f"schedule {name} runs {stages} per pipeline rank, got {setting.chunks};"
            f" the nearest that runs has vpp {entry.chunks}"
        )
    if entry.replicas not in (None, setting.replicas):
        raise InfeasibleError(
            f"schedule {name} runs {entry.replicas} {'copy' if entry.replicas == 1 else 'copies'} of the model,"
            f" got replicas {setting.replicas}; the nearest that runs has {entry.replicas}"
        )
    return maker_of(entry)(setting)


def maker_of(entry: Entry) -> Callable[[Setting], Schedule]:
    """The function that makes a schedule."""
    if not isinstance(entry.function, str):
        return entry.function
    file, function = entry.function.split(":")
    return getattr(import_module(f"muster.schedule.{file}"), function)


def prove_exact(setting: Setting) -> Proof:
    """The `exact` schedule with what is known of it, from `auto`'s. Raises InfeasibleError, MusterError as `prove`."""
    return prove(setting, best(setting))


def proven(setting: Setting) -> Schedule:
    """The schedule `exact`."""
    return prove_exact(setting).schedule


def best(setting: Setting) -> Schedule:
    """The schedule `auto`, which chooses from all that are not searched for."""
    return best_among([setting])[0]


def best_among(settings: Sequence[Setting]) -> tuple[Schedule, Timing]:
    """The best `auto` over settings that differ in their chunks."""
    return auto_among([(setting, _makers(setting)) for setting in settings])


def _makers(setting: Setting) -> Makers:
    return {
        name: maker_of(entry)
        for name, entry in SCHEDULES.items()
        if not entry.searched and entry.serves(setting.chunks) and entry.replicas == setting.replicas
    }
