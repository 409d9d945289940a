"""Self-contained SVG pictures, legible on light and dark backgrounds.

Colours are given twice: as attributes for light background, which every program understands, and by class in a rule
that browsers follow where the reader prefers dark.
"""

import re

from muster.report.html import Html, element
from muster.report.palette import PAINTS, PALE_TEXT, Paint, mix

_DARK_PAPER, _DARK_INK = "#14161a", "#e7e5e1"
_LIGHT = (
    "svg{fill:#1d2126}text{font:12px system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
    ".paper{fill:#ffffff}.quiet{fill:#5c6370}.title{font-size:16px;font-weight:600}.middle{text-anchor:middle}"
    ".end{text-anchor:end}.number text{font-size:11px;text-anchor:middle}.idle{stroke:#eceef1}"
    ".grid{stroke:#d5d9df}.line{stroke:#5c6370}path{fill:none}"
)
"""Rules for light backgrounds."""
_DARK = (
    f"svg{{fill:{_DARK_INK}}}.paper{{fill:{_DARK_PAPER}}}.quiet{{fill:#a0a6af}}.idle{{stroke:#23272d}}"
    ".grid{stroke:#363b43}.line{stroke:#a0a6af}"
)
"""Rules for dark mode."""


def standalone_svg(title: str, facts: str, body: str, width_px: float, height_px: float) -> Html:
    """Return the whole picture, with a title and a description for screen readers."""
    return element(
        "svg",
        element("title", title),
        element("desc", facts),
        element("style", Html(_LIGHT + f"@media(prefers-color-scheme:dark){{{_DARK}{_dark_rules(body)}}}")),
        element("rect", width="100%", height="100%", class_="paper"),
        body,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width_px:g} {height_px:g}",
        width=width_px,
        height=height_px,
        role="img",
    )


def stroke_attributes(paint: Paint, pale: bool = False) -> dict[str, str]:
    """Return attributes of a line in a colour."""
    return {"stroke": paint.pale_colour if pale else paint.light, "class_": f"mark s-{_name(paint, pale)}"}


def fill_attributes(paint: Paint, pale: bool = False) -> dict[str, str]:
    """Return attributes of an area in a colour."""
    return {"fill": paint.pale_colour if pale else paint.light, "class_": f"mark f-{_name(paint, pale)}"}


def text_attributes(paint: Paint, pale: bool = False, style: str = "") -> dict[str, str]:
    """Return attributes of text on a colour; `style` is for further classes."""
    fill = PALE_TEXT if pale else paint.light_text
    return {"fill": fill, "class_": f"t-{_name(paint, pale)} {style}".rstrip()}


def _name(paint: Paint, pale: bool) -> str:
    return f"{paint.key}-pale" if pale else paint.key


def _dark_rules(body: str) -> str:
    """Return the dark-mode rules of the classes used in the picture."""
    used = set(re.findall(r"\b[sft]-[a-z]+(?:-pale)?", " ".join(re.findall(r'class="([^"]*)"', body))))
    rules = []
    for paint in PAINTS:
        for pale in (False, True):
            name = _name(paint, pale)
            colour = mix(paint.dark, _DARK_PAPER) if pale else paint.dark
            text = _DARK_INK if pale else paint.dark_text
            values = {"s": f"stroke:{colour}", "f": f"fill:{colour}", "t": f"fill:{text}"}
            rules += [f".{kind}-{name}{{{rule}}}" for kind, rule in values.items() if f"{kind}-{name}" in used]
    return "".join(rules)
