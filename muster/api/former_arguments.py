"""Former names of arguments, which `import muster`'s functions still take."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from muster.config.migrations import ARGUMENTS, report_renames
from muster.spec.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def takes_former_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which also takes its arguments by the former names of `ARGUMENTS` and says today's on
    stderr."""
    former = ARGUMENTS[function.__name__]

    @wraps(function)
    def call(*args: P.args, **arguments: P.kwargs) -> R:
        for old, new in former.items():
            if old not in arguments:
                continue
            if new in arguments:
                raise ConfigError(f"{new} is given twice, also as {old}, its former name: leave {old} out")
            if new:
                report_renames(f"muster.{function.__name__}", [(old, new)])
                arguments[new] = arguments.pop(old)
            elif arguments[old] is True:
                del arguments[old]
        return function(*args, **arguments)

    return call
