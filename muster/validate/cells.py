"""Numbers of a table's cells, as people write them: with thousands separators, decimal commas or units, about so many,
remarks in parentheses, and a width for dense layers beside one for experts."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

MAX_VALUE = 10**9
"""Largest degree, width or batch in a table."""
MAX_LAYERS = 10_000
"""Largest number of layers in a table."""

_REMARK = re.compile(r"\s*\(.*\)$", re.DOTALL)
_INVISIBLE = re.compile("[\\x00\u200b-\u200f\u2060\ufeff]")
_SPACES = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_TAGS = re.compile(r"<[^<>]{1,40}>")
_EMPHASIS = re.compile(r"^(\*{1,3}|_{2}|`+|~~|\$)(.+)\1$", re.DOTALL)
_FOOTNOTE = re.compile(r"(?<=[\w)%])\s*(?:[*†‡§¶]+|\[\^?\d{1,2}\]|\^\{?[a-z*]\}?|[¹²³⁴⁵⁶⁷⁸⁹⁰]+)+$")
_SEPARATED = re.compile(r"\d{1,3}(?:[, '’]\d{3})+(?:\.\d+)?")
_SURE_COMMA = re.compile(r"[~≈]?(?:\d+,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,})(?![\d.,])")
_SURE_POINT = re.compile(r"[~≈]?(?:\d+\.(?:\d{1,2}|\d{4,})|\d{1,3}(?:,\d{3})+\.\d+|\d{1,3}(?:,\d{3}){2,})(?![\d.,])")
"""Numbers that are written with a decimal comma, or with a point, whatever their size."""
_COMMA_NUMBER = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+|\d+)(?:,(\d+))?(?![\d.,])")
_DOTTED = re.compile(r"\d{1,3}(?:\.\d{3})+")
_ABOUT = re.compile(r"^(?:~|≈|≃|∼|\\sim|approx\.?|about|ca\.?|circa)\s*(?=\d)", re.IGNORECASE)
_RANGE = re.compile(r"([\d.,]+)\s*(?:-|–|—|to)\s*([\d.,]+)")
_SCALED = re.compile(r"([\d.,]+)\s*([kKMG])")
_DECIMAL = {"k": 1e3, "m": 1e6, "g": 1e9}
_NAMED = re.compile(r"^[a-z]{2,4}\s*[=:]\s*(?=\d)", re.IGNORECASE)
_COUNTED = re.compile(
    r"(?<=[\dkKmM])\s*(?:tokens?|toks?|seqs?|sequences?|samples?|layers?|gpus?|devices?|heads?|experts?)\.?$",
    re.IGNORECASE,
)
"""Units behind a whole number."""
_POWER = re.compile(r"2\s*(?:\^|\*\*)\s*\{?(\d{1,2})\}?")
_UNIT = re.compile(r"^([\d.,' ]+\d\s*[kKMG]?|\d\s*[kKMG]?)\s*([a-zA-Z][a-zA-Z .·]*(?:/\s*[a-zA-Z ]+)*)$")
"""A number with a unit behind it, such as `9,500 tok/s`."""
_DECIMAL_COMMA = re.compile(r"\d{1,3}(?:[. ]\d{3})+,\d+|\d+,(?:\d{1,2}|\d{4,})")
_SPREAD = re.compile(r"\s*(?:±|\+/-)\s*[\d.]+\s*%?$")
_TIMED = re.compile(r"([\d., ]+)\s*(ms|s|sec|secs|seconds?|min|minutes?)\.?", re.IGNORECASE)
_UNITS = {"ms": 1e-3, "min": 60.0, "minute": 60.0, "minutes": 60.0} | dict.fromkeys(
    ("s", "sec", "secs", "second", "seconds"), 1.0
)
_NOTHING = re.compile(r"n/?a|[-–—]|none|null", re.IGNORECASE)
"""Words of a cell that states nothing."""
_POWERS = {"k": 2**10, "m": 2**20, "g": 2**30}
_DENSE = re.compile(r"(\d+)\s*(?:\(?dense\)?|for dense)", re.IGNORECASE)
_EXPERT = re.compile(r"(\d+)\s*(?:\(?(?:per|each|a|an|for|in)?\s*(?:routed\s*)?experts?\)?|\(?moe\)?)", re.IGNORECASE)


_LATEX_COLOUR = re.compile(r"\\(?:row|cell|column)?color(?:\[\w*\])?\{[^{}]*\}")
_LATEX_SET = re.compile(
    r"\\(?:multirow|multicolumn)\{[^{}]*\}\{[^{}]*\}\{([^{}]*)\}"
    r"|\\(?:text(?:bf|it|tt|rm|sc|sf)?|math(?:bf|rm|it)|emph|underline|makecell)\{([^{}]*)\}"
)
"""Commands of LaTeX around what a cell says."""


@lru_cache(maxsize=1 << 14)
def clean_cell(text: str) -> str:
    """Return a cell without what is for the eye alone: emphasis, tags, marks of footnotes, odd and invisible spaces."""
    plain = _SPACES.sub(" ", _INVISIBLE.sub("", _TAGS.sub(" ", text))).strip()
    if "\\" in plain or "{,}" in plain:
        plain = _without_latex(plain)
    while (found := _EMPHASIS.match(plain)) is not None:
        plain = found[2].strip()
    return _FOOTNOTE.sub("", plain)


def _without_latex(text: str) -> str:
    """Return a cell without commands of LaTeX: colours go, what others make bold, or set over several rows, stays."""
    plain = _LATEX_COLOUR.sub("", text.replace("{,}", ",").replace("\\%", "%").replace("\\,", " "))
    before = ""
    while before != plain:
        before, plain = plain, _LATEX_SET.sub(lambda found: found[1] or found[2] or "", plain)
    return plain.strip().removeprefix("$").removesuffix("$").strip()


def is_nothing(text: str) -> bool:
    """Return True for words of a cell that states nothing, such as `-` or `n/a`."""
    return bool(_NOTHING.fullmatch(text))


def split_unit(text: str) -> tuple[str, str]:
    """Return a number and the unit behind it, such as `9.5k` and `tok/s`; an empty unit where there is none."""
    found = _UNIT.match(_REMARK.sub("", text))
    return (found[1].strip(), found[2].strip()) if found else (text, "")


def parse_real(text: str) -> float | None:
    """Parse a number above 0, also `~9500`, or the mean of `9400-9600`; None for an empty cell.

    Raises ValueError with what was found and expected.
    """
    plain = _ABOUT.sub("", _SPREAD.sub("", _REMARK.sub("", text)))
    if ends := _RANGE.fullmatch(plain):
        low, high = parse_real(ends[1]), parse_real(ends[2])
        if low and high and low <= high < 2 * low:
            return (low + high) / 2
    if _NOTHING.fullmatch(plain):
        return None
    if not plain:
        if text:
            raise ValueError(f"found '{text}', expected a number above 0 without a unit")
        return None
    if _SEPARATED.fullmatch(plain):
        plain = re.sub("[, '’]", "", plain)
    elif _DECIMAL_COMMA.fullmatch(plain):
        plain = re.sub("[. ]", "", plain).replace(",", ".")
    try:
        value = float(plain) if "_" not in plain else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"found '{text}', expected a number above 0 without a unit")
    return value


def has_decimal_commas(cells: Iterable[str]) -> bool:
    """Return True if the numbers of a table, as in German ones, have decimal commas, and dots between thousands: where
    some cell can mean nothing else, and none has a decimal point."""
    found = [(bool(_SURE_COMMA.match(cell)), bool(_SURE_POINT.match(cell))) for cell in cells]
    return any(comma for comma, _ in found) and not any(point for _, point in found)


def is_dotted(text: str) -> bool:
    """Return True for a number with dots between its thousands, such as `4.096`."""
    return bool(_DOTTED.fullmatch(text))


def with_decimal_point(text: str) -> str:
    """Return a cell of a table of decimal commas with a point in its number, and nothing between thousands."""
    return _COMMA_NUMBER.sub(lambda found: found[1].replace(".", "") + (f".{found[2]}" if found[2] else ""), text)


def parse_parameters(text: str) -> float | None:
    """Parse 10⁹ parameters, also as `70B` or `125M`; None for an empty cell. Raises ValueError."""
    return _parse_measure(text, {"b": 1.0, "m": 1e-3, "t": 1e3})


def parse_memory(text: str) -> float | None:
    """Parse GiB of memory, also as `55.3 GiB` or `62000 MB`; None for an empty cell. Raises ValueError.

    GB and MB are read as GiB and MiB: most programs print these and call them so.
    """
    sizes = {"m": 2.0**-10, "g": 1.0, "t": 2.0**10}
    return _parse_measure(text, {f"{prefix}{byte}": size for prefix, size in sizes.items() for byte in ("", "b", "ib")})


def in_megabytes(text: str) -> str:
    """Return the text of a cell of MB or MiB, with the unit where it states none."""
    return f"{text} MB" if text[-1:].isdigit() else text


def _parse_measure(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number above 0 with or without one of the units. Raises ValueError with what was found and expected."""
    plain = _ABOUT.sub("", _REMARK.sub("", text))
    found = re.fullmatch(r"(.*\d)\s*([a-z]{1,3})", plain, re.IGNORECASE)
    if found is None or found[2].lower() not in units:
        return parse_real(text)
    value = parse_real(found[1])
    return None if value is None else value * units[found[2].lower()]


def parse_whole(text: str, most: int = MAX_VALUE) -> int | None:
    """Parse a whole number, with dots between thousands, too; None for an empty cell. Raises ValueError with what was
    found and expected."""
    plain = _COUNTED.sub("", _NAMED.sub("", text))
    value = parse_real(plain.replace(".", "") if is_dotted(plain) else plain)
    if value is None:
        return None
    if value != int(value) or not 1 <= value <= most:
        raise ValueError(f"found '{text}', expected a whole number from 1 to {most:,}")
    return int(value)


def parse_length(text: str) -> int | None:
    """Parse tokens of a sequence or a batch, as `8192` or in powers of two as `128k` or `2^17`; None for an empty cell.

    `8.2k` and `131k` are powers of two that were rounded or cut to decimals, `3.7M` is a multiple of 1,024 that ranks
    can divide. Raises ValueError with what was found and expected.
    """
    plain = _COUNTED.sub("", _NAMED.sub("", _REMARK.sub("", text)))
    if power := _POWER.fullmatch(plain):
        return parse_whole(str(2 ** int(power[1])))
    found = re.fullmatch(r"(\d+(?:[.,]\d+)?)\s*([kKmM])", plain)
    if found is None:
        return parse_whole(text)
    number, unit = found[1].replace(",", "."), found[2].lower()
    said, last = float(number) * _DECIMAL[unit], _DECIMAL[unit] * 10.0 ** -len(number.partition(".")[2])
    power, exact, block = 2.0 ** round(math.log2(said or 1)), float(number) * _POWERS[unit], 1024.0 * round(said / 1024)
    if said and -last / 2 <= power - said < last:
        return int(power)
    if not exact.is_integer():
        exact = block if 0 < abs(block - said) <= last / 2 else round(said)
    return parse_whole(f"{exact:.10g}")


def parse_inner_widths(text: str) -> tuple[int | None, int | None]:
    """Parse the inner widths of a dense MLP and of an expert, such as `11264 dense / 1408 per expert`.

    A single number is both. Raises ValueError with what was found and expected.
    """
    dense, expert = _DENSE.search(text), _EXPERT.search(text)
    if dense is None and expert is None:
        value = parse_whole(text)
        return value, value
    return parse_whole(dense[1]) if dense else None, parse_whole(expert[1]) if expert else None


def parse_most_chunks(text: str, layers: int | None, pp: int | None) -> int | None:
    """Parse chunks of layers a rank, also as `max (one layer per chunk)`; None for an empty cell. Raises ValueError."""
    if not re.match(r"max\b", text, re.IGNORECASE):
        return parse_whole(text)
    chunks = next((count // pp for count in (layers, layers + 2) if count % pp == 0), 0) if layers and pp else 0
    if not chunks:  # the first and the last chunk may have no layer beside the embedding and the head
        raise ValueError(f"found '{text}', expected a number where pp doesn't divide the layers")
    return chunks


def parse_value(text: str, metric: str) -> float | None:
    """Parse a measured value in the unit of its metric, thousands and millions as `9.5k`; a share of the peak may be a
    fraction or say `%`. Raises ValueError with what was found and expected."""
    if metric == "peak_memory_gb":
        return parse_memory(text)
    is_share = metric == "MFU_pct"
    plain = _ABOUT.sub("", _REMARK.sub("", text))
    if scaled := _SCALED.fullmatch(plain):
        value = parse_real(scaled[1])
        return None if value is None else value * _DECIMAL[scaled[2].lower()]
    if metric in ("iteration_time_s", "iteration_time_ms") and (timed := _TIMED.fullmatch(plain)):
        value = parse_real(timed[1].strip())
        own = _UNITS[timed[2].lower()] / (1 if metric == "iteration_time_s" else 1e-3)
        return None if value is None else value * own
    value = parse_real(text.rstrip("% ") if is_share else text)
    if value is not None and is_share and value <= 1 and "%" not in text:
        return 100 * value
    return value
