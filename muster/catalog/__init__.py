"""The data files that come with Muster, found by kind and name."""

from importlib.resources import files


def names(kind: str) -> list[str]:
    """Return the names of all files of one kind: `presets` (run files), `models`, `devices`, `links`, `clusters`."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder(kind).iterdir() if entry.name.endswith(".yaml"))


def read(kind: str, name: str) -> str:
    """Return the text of one file. Raises FileNotFoundError where there is none."""
    return (_folder(kind) / f"{name}.yaml").read_text(encoding="utf-8")


def _folder(kind: str):
    return files("muster.catalog") / kind
