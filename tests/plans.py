"""Plans that no name says."""

from typing import Any


def unequal(*stages: tuple[int, dict[str, int]]) -> dict[str, Any]:
    """Stages of so many layers on such a mesh."""
    return {"stages": [{"layers": layers, "mesh": mesh} for layers, mesh in stages]}
