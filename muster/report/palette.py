"""Colours of pages and terminal, distinguishable for people who confuse red and green.

The hues are those of Okabe and Ito ("Color Universal Design", 2008), softened. Tests measure their distances under
simulated colour blindness and the contrast of the text on them.
"""

from dataclasses import dataclass

from muster.schedule.action import COPIES, PART_UPDATES, Kind


@dataclass(frozen=True, slots=True)
class Paint:
    """Colours of a group of instruction kinds on light and dark backgrounds, each with its text colour."""

    key: str
    label: str
    kinds: tuple[str, ...]
    light: str
    light_text: str
    dark: str
    dark_text: str = "#101214"

    @property
    def pale_colour(self) -> str:
        """Colour halfway between the one on light background and white; its text is `PALE_TEXT`."""
        return mix(self.light, "#ffffff")


def mix(one: str, other: str) -> str:
    """Return the colour halfway between two colours such as `#3274b5`."""
    return "#" + "".join(f"{(int(one[i : i + 2], 16) + int(other[i : i + 2], 16)) // 2:02x}" for i in (1, 3, 5))


PALE_TEXT = "#1d2126"
"""Text colour on pale colours."""


_GATHERS = (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED)
_GATHERS += (Kind.UNSHARD_BUCKET, Kind.RESHARD, Kind.OUTER_REDUCE, Kind.OUTER_WAIT, Kind.MOVE_EXPERTS)
"""Kinds that share the colour of collectives."""

PAINTS = (
    Paint("forward", "forward", (Kind.F, Kind.EMB_F, Kind.S), "#3274b5", "#ffffff", "#6aa5dc"),
    Paint("backward", "backward", (Kind.B,), "#e5a52f", "#1d2126", "#e3b04f"),
    Paint("inputs", "backward for inputs", (Kind.I,), "#e3a3c0", "#1d2126", "#d78fbc"),
    Paint("weights", "backward for weights", (Kind.W, Kind.T, Kind.EMB_W), "#176655", "#ffffff", "#33907a"),
    Paint(
        "step",
        "gradient norm, optimizer step",
        (
            *(Kind.GRAD_NORM, Kind.GRAD_NORM_ASYNC, Kind.GRAD_NORM_BESIDE),
            *(Kind.CLIP, *PART_UPDATES, Kind.STEP_BUCKET, Kind.STEP, Kind.OUTER_STEP),
        ),
        "#2b2f36",
        "#ffffff",
        "#e3e7ec",
    ),
    Paint("gather", "gather, reduce", _GATHERS, "#c3502e", "#ffffff", "#df7650"),
    Paint(
        "transfer",
        "send, receive",
        (
            Kind.SEND_F,
            Kind.RECV_F,
            Kind.SEND_B,
            Kind.RECV_B,
            Kind.EMB_REDUCE,
            Kind.HIDDEN_BCAST,
            Kind.LOGIT_STATS,
            Kind.EMB_GRAD_BCAST,
        ),
        "#5fb3e4",
        "#1d2126",
        "#86c9f0",
    ),
    Paint("copy", "copy to the host, back", COPIES, "#7a6bb0", "#ffffff", "#a196d3"),
    Paint("other", "other", (), "#8d8a96", "#101214", "#a3a0ad"),
)
"""Colours of all kinds; the last is for any other."""

_BY_KIND = {kind: paint for paint in PAINTS for kind in paint.kinds}

SERIES = (("#3274b5", "#6aa5dc"), ("#b8600b", "#e0aa4c"), ("#1d7360", "#4fb39a"), ("#a8487a", "#e6a9c6"))
"""Colours of a chart's runs on light and on dark background."""


def paint_of(kind: str) -> Paint:
    """Return the paint of an instruction kind; kinds without their own share one."""
    return _BY_KIND.get(kind, PAINTS[-1])
