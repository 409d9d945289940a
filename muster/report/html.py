"""HTML as values: plain text is always escaped, so no caller can forget to."""

from html import escape


class Html(str):
    """Markup; any other string is plain text."""


_VOID = {"meta", "br"}
"""Elements without content."""


def element(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """Return an element. `class_` and `stroke_width` stand for class and stroke-width; None leaves an attribute out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        parts.append(f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_text(value)}"'))
    parts.append(">")
    if name in _VOID:
        return Html("".join(parts))
    return Html("".join(parts) + join(*children) + f"</{name}>")


def join(*children: str) -> Html:
    """Return the concatenated children, plain text escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def _text(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(str(value))
