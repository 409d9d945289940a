"""Options of a shell script or a file of arguments, without running anything."""

import re
import shlex
from math import prod

from muster.spec.errors import ConfigError

_NAME = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:\[@\])?(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_PRODUCT = re.compile(r"\$\(\((\w+(?:\*\w+)*)\)\)")
_ENDS = {")", "|", ";", "&&", "||", "&", ">", "2>&1", "fi", "done", "then", "else"}


def parse_shell_options(text: str) -> dict[str, str | list[str] | bool]:
    """Return `--flag value …` by the flag's name without dashes; True for a flag alone, a list for several values.

    Variables (`X=8`, `$X`, `${X:-8}`, products in `$((…))`), arrays and quoted lists of arguments are understood. A
    variable that is never set stays as it is written. The last of repeated flags counts. Raises ConfigError for
    unbalanced quotes.
    """
    variables: dict[str, str] = {}
    found: dict[str, str | list[str] | bool] = {}
    flag = None
    for word in _words(text):
        if assigned := _NAME.fullmatch(word):
            flag = None
            value = _expanded(assigned[2], variables)
            if "--" in value:
                found |= parse_shell_options(value)
            else:
                variables[assigned[1]] = value.lstrip("(").strip()
            continue
        word = _expanded(word, variables)
        if word.startswith("--") and " " in word.partition("=")[0]:
            found |= parse_shell_options(word)
            flag = None
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
            flag = None if equals else name
        elif word in _ENDS or word.startswith(("|", ">", "<")):
            flag = None
        elif flag is not None and word.strip():
            found[flag] = _more(found[flag], word)
    return found


def _words(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    compact = re.sub(r"\$\(\((.*?)\)\)", lambda match: match[0].replace(" ", ""), joined)
    try:
        parts = shlex.shlex(re.sub(r"(?<==)\(|\)(?=\s)", lambda match: f"{match[0]}\n", compact), posix=True)
        parts.whitespace_split = True
        return [word for part in parts for word in _apart(part)]
    except ValueError as error:
        raise ConfigError(f"the script can't be read: {str(error).lower()}, expected balanced quotes") from None


def _apart(word: str) -> list[str]:
    """Split a word from the semicolon that ends a command, or the bracket that ends an array."""
    ends = word.endswith(";") or (word.endswith(")") and "(" not in word)
    return [word[:-1], word[-1]] if ends and len(word) > 1 else [word]


def _expanded(word: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    for _ in range(5):
        word, before = _VARIABLE.sub(value, word), word
        word = _PRODUCT.sub(lambda match: _product(match, variables), word)
        if word == before:
            break
    return word


def _product(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return a product, whose names need no `$`; one with a factor that isn't a number stays as it is written."""
    factors = [variables.get(factor, factor) for factor in match[1].split("*")]
    return str(prod(map(int, factors))) if all(map(str.isdecimal, factors)) else match[0]


def _more(old: str | list[str] | bool, word: str) -> str | list[str]:
    if isinstance(old, bool):
        return word
    return [*old, word] if isinstance(old, list) else [old, word]
