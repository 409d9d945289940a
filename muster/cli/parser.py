"""Arguments of a verb: its flags, and any key of a run file as `--section.key VALUE`."""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import Any, NoReturn, TypeVar

from muster.spec.errors import ConfigError
from muster.spec.other_names import OTHER_NAMES
from muster.spec.suggest import closest_match, did_you_mean

Override = tuple[str, Any]
"""Dotted key with its text or value."""


OTHER_WORDS = {
    "speed": "time",
    "throughput": "time",
    "price": "cost",
    "dollars": "cost",
    "power": "energy",
    "k8s": "kubernetes",
    "sbatch": "slurm",
}
"""Words for a flag's choices that spelling doesn't suggest."""


class _HelpFormatter(argparse.HelpFormatter):
    """Help that never breaks a flag such as `--time-limit` at its hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(
            " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are ConfigErrors."""

    def __init__(self, verb: str, description: str, **more: Any) -> None:
        """Make the parser of `muster VERB`."""
        super().__init__(
            prog=f"muster {verb}", description=description, allow_abbrev=False, formatter_class=_HelpFormatter, **more
        )
        self.foreign_flags: dict[str, str] = {}
        """Flags of other programs → Muster's flags with the same meaning."""
        self.add_argument(
            "--plugins",
            action="append",
            default=[],
            metavar="FILE",
            help="Python file that registers plugins",
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(f"{message} ('{self.prog} --help' explains)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for a value that isn't one of an argument's choices, with the closest of them."""
        if action.choices is None or value in action.choices:
            return
        choices = list(map(str, action.choices))
        meant = OTHER_WORDS.get(str(value))
        hint = f"; did you mean '{meant}'?" if meant in choices else did_you_mean(str(value), choices)
        place = "/".join(action.option_strings) or action.metavar or action.dest
        self.error(f"{place} {value}: expected one of {', '.join(choices)}{hint}")

    def parse(self, arguments: Iterable[str], keys: Callable[[], list[str]] = list) -> argparse.Namespace:
        """Parse arguments, all of which must be known; `keys` returns dotted keys for suggestions."""
        arguments = list(arguments)
        self._refuse_both_names(arguments)
        args, unknown = self.parse_known_args(
            self._joined(one for one in map(self._renamed, arguments) if one is not None)
        )
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("-"):
                self.error(f"unexpected argument '{flag}'")
            flags = {f"--{key.rpartition('.')[2]}": f"--{key}" for key in keys()}
            flags |= {f"--{name}": f"--{key}" for name, key in OTHER_NAMES.items() if f"--{key}" in flags.values()}
            flags |= {option: option for option in self._option_string_actions}
            flags |= self.foreign_flags | {old: new for old, new in self._former_flags().items() if new}
            close = closest_match(flag.replace("_", "-"), flags) or closest_match(flag, flags)
            meant = flag if flag in flags else close
            self.error(f"unknown flag '{flag}'" + (f"; did you mean '{flags[meant]}'?" if meant else ""))
        if args.plugins:
            from muster.plugins.loader import load_plugins, resolve_plugin

            load_plugins(map(resolve_plugin, args.plugins))
        return args

    def _renamed(self, argument: str) -> str | None:
        """Return an argument with today's name of a former flag, which is reported on stderr; None for a former switch
        that is the default today."""
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return argument
        today = self._former_flags().get(flag)
        if today is None:
            return argument
        from muster.config.migrations import report_renames

        report_renames(self.prog, [(flag, today)])
        return f"{today}{equals}{value}" if today else None

    def _refuse_both_names(self, arguments: Sequence[str]) -> None:
        """Raise ConfigError for a flag that is given under its former name and under today's."""
        given = {argument.partition("=")[0] for argument in arguments}
        for old, new in self._former_flags().items():
            if new and old in given and new in given:
                self.error(f"{new} is given twice, also as {old}, its former name: leave {old} out")

    def _former_flags(self) -> dict[str, str]:
        """Return the former flags of this verb, which are still read, with today's names."""
        from muster.config.migrations import FLAGS

        former = FLAGS["*"] | FLAGS.get(self.prog.removeprefix("muster "), {})
        return {old: new for old, new in former.items() if not new or new in self._option_string_actions}

    def _joined(self, arguments: Iterable[str]) -> list[str]:
        """Return the arguments with `--flag -4x` joined to `--flag=-4x`, which argparse would take for two flags."""
        joined: list[str] = []
        for argument in arguments:
            action = self._option_string_actions.get(joined[-1]) if joined else None
            if re.match(r"-\d", argument) and action is not None and action.nargs is None and action.const is None:
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        return joined


def run_file_keys() -> list[str]:
    """Return every dotted key of a run file."""
    from muster.config.run_config import RunConfig
    from muster.spec.config_errors import ConfigSchema

    return ConfigSchema(RunConfig).paths()


def split_overrides(arguments: Iterable[str]) -> tuple[list[str], list[Override]]:
    """Split off the pairs given as `--section.key VALUE` or `--section.key=VALUE`. Returns the rest and the pairs."""
    rest: list[str] = []
    overrides: list[Override] = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or "." not in flag:
            rest.append(argument)
            continue
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise ConfigError(f"{flag}: a value is missing, expected {flag} VALUE")
        overrides.append((flag.removeprefix("--"), value))
    return rest, overrides


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got '{text}'")
    return int(text)


def output_file(text: str) -> Path:
    """Parse the path of a file to write, before anything is computed for it."""
    path = Path(text)
    try:
        place = Path(os.path.realpath(path)).parent
        exists = path.exists()
        if not text or path.is_dir():
            raise argparse.ArgumentTypeError(f"expected a file to write, got the directory '{path}'")
        if not place.is_dir():
            raise argparse.ArgumentTypeError(f"{path} can't be written: there is no directory {place}")
    except OSError as error:  # a name that is too long, or a folder that may not be searched
        raise argparse.ArgumentTypeError(f"{path} can't be written: {error.strerror}") from None
    if not os.access(path if exists else place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} can't be written: no permission for {'it' if exists else place}")
    return path


def whole_number(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got '{text}'")
    return int(text)


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None


def sequence_length(text: str) -> int:
    """Parse tokens of a sequence: `8192`, or as contexts are named, in powers of two: `128k`, `1M`."""
    digits, factor = text, 1
    if text[-1:].lower() in _BINARY_FACTORS:
        digits, factor = text[:-1], _BINARY_FACTORS[text[-1].lower()]
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"expected tokens such as 8192, 128k (131,072) or 1M, got '{text}'")
    return int(digits) * factor


_BINARY_FACTORS = {"k": 2**10, "m": 2**20}

Verb = TypeVar("Verb")


def find_subcommand(group: str, verbs: Mapping[str, Verb], arguments: Sequence[str]) -> tuple[Verb, list[str]]:
    """Return the entry of a subcommand, and the arguments after it. Raises ConfigError for an unknown one."""
    verb, *rest = arguments
    if verb not in verbs:
        raise ConfigError(f"unknown verb '{group} {verb}'{did_you_mean(verb, verbs)} (there are {', '.join(verbs)})")
    return verbs[verb], rest
