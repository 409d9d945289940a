"""Colours: one set for the page and the terminal, told apart by people who see red and green alike.

The hues are those of Okabe and Ito ("Color Universal Design", 2008), calmed; the tests measure the distances under
simulated colour blindness and the contrast of the text upon them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paint:
    """A group of instruction kinds that share a colour; the colours on light and on dark paper, each with its text."""

    key: str
    label: str
    kinds: tuple[str, ...]
    light: str
    light_text: str
    dark: str
    dark_text: str = "#101214"

    @property
    def pale_colour(self) -> str:
        """Half way from the colour on light paper to white; text upon it is `PALE_TEXT`."""
        return mix(self.light, "#ffffff")


def mix(one: str, other: str) -> str:
    """The colour half way between two."""
    return "#" + "".join(f"{(int(one[i : i + 2], 16) + int(other[i : i + 2], 16)) // 2:02x}" for i in (1, 3, 5))


PALE_TEXT = "#1d2126"


_GATHERS = ("UNSHARD", "REDUCE", "SYNC", "MERGE", "TIE")

PAINTS = (
    Paint("forward", "forward", ("F", "E", "S"), "#3274b5", "#ffffff", "#6aa5dc"),
    Paint("backward", "backward", ("B",), "#e5a52f", "#1d2126", "#e3b04f"),
    Paint("inputs", "backward for inputs", ("I",), "#e3a3c0", "#1d2126", "#d78fbc"),
    Paint("weights", "backward for weights", ("W", "T", "EW"), "#176655", "#ffffff", "#33907a"),
    Paint("step", "gradient norm, optimizer step", ("NORM", "VOTE", "STEP"), "#2b2f36", "#ffffff", "#e3e7ec"),
    Paint("gather", "gather, reduce", _GATHERS, "#c3502e", "#ffffff", "#df7650"),
    Paint(
        "transfer", "send, receive", ("SF", "RF", "SB", "RB", "EC", "HC", "SC", "DC"), "#5fb3e4", "#1d2126", "#86c9f0"
    ),
    Paint("copy", "copy to the host, back", ("OFFLOAD", "RELOAD"), "#7a6bb0", "#ffffff", "#a196d3"),
    Paint("other", "other", (), "#8d8a96", "#101214", "#a3a0ad"),
)

_BY_KIND = {kind: paint for paint in PAINTS for kind in paint.kinds}

SERIES = (("#3274b5", "#6aa5dc"), ("#b8600b", "#e0aa4c"), ("#1d7360", "#4fb39a"), ("#a8487a", "#e6a9c6"))
"""Colours of the runs of a chart, on light and on dark paper."""


def paint_of(kind: str) -> Paint:
    """How a kind of instruction is painted; kinds without a colour of their own share one."""
    return _BY_KIND.get(kind, PAINTS[-1])
