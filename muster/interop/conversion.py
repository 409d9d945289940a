"""Conversion of another trainer's configuration: run-file keys with the options they come from, and dropped options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.spec.errors import ConfigError

NO_EQUIVALENT = "a run file has no key for it"


@dataclass(frozen=True, slots=True)
class DroppedOption:
    """An option that was not converted."""

    option: str
    value: Any
    reason: str


@dataclass
class ConfigConversion:
    """A configuration of another program on its way to a run file.

    Options are taken one by one; whatever nobody took ends in `dropped`, so that none is lost silently.
    """

    program: str
    options: Mapping[str, Any]
    """Options by name, as the other program writes them."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values by dotted key of a run file."""
    origins: dict[str, str] = field(default_factory=dict)
    dropped: list[DroppedOption] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def take(self, option: str, default: Any = None) -> Any:
        """Return an option's value, or the other program's default; null counts as not given."""
        self.used.add(option)
        value = self.options.get(option)
        return default if value is None else value

    def number(self, option: str, default: float | None = None) -> Any:
        """Return an option as a number, an integer where possible. Raises ConfigError where it is none."""
        value = self.take(option, default)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            unset = ": its variable isn't set in the file" if "$" in str(value) else ""
            raise ConfigError(f"{option}: expected a number, got {value!r}{unset}") from None
        return int(number) if number.is_integer() and "e" not in str(value).lower() else number

    def put(self, key: str, value: Any, *options: str) -> None:
        """Set a key of the run file, with the options that it follows from; none given: the other program's default."""
        given = [option for option in options if self.options.get(option) is not None]
        self.values[key] = value
        self.origins[key] = ", ".join(given) if given else f"default of {self.program}"

    def copy_number(self, key: str, option: str, default: float | None = None) -> Any:
        """Copy a number as it is; without an option or a default nothing is set."""
        value = self.number(option, default)
        if value is not None:
            self.put(key, value, option)
        return value

    def drop(self, option: str, reason: str) -> None:
        """Record the reason why an option is dropped, where it was given at all."""
        self.used.add(option)
        if self.options.get(option) is not None:
            self.dropped.append(DroppedOption(option, self.options[option], reason))

    def drop_rest(self, reasons: Mapping[str, str]) -> None:
        """Drop all options that nobody took; a reason is found by the option's name, or by a prefix of it."""
        for option in self.options:
            if option not in self.used:
                fits = [start for start in reasons if option.startswith(start)]
                self.drop(option, reasons[max(fits, key=len)] if fits else NO_EQUIVALENT)


def infer_dp_size(found: ConfigConversion, world_size: int | None, others: int) -> int:
    """Return the data-parallel ranks of a world where all other axes take `others` ranks; 1 where the world's size is
    unknown.

    Raises ConfigError where that isn't an integer.
    """
    if world_size is None:
        found.dropped.append(
            DroppedOption("number of processes", None, "not given; taken as the fewest: give --nproc N")
        )
        return 1
    count, rest = divmod(world_size, others)
    if rest or not count:
        raise ConfigError(
            f"{world_size} processes are not a multiple of the {others} of all other axes: give --nproc N"
        )
    return count
