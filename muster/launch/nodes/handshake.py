"""Comparison of the launchers of all nodes: software, plan and configuration have to be the same; free of torch."""

import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import muster
from muster.launch.nodes.launcher_group import LauncherGroup, NodeInfo
from muster.spec.errors import ConfigError
from muster.version import __version__


def software_versions() -> dict[str, Any]:
    """Return the versions of Muster, Python and PyTorch on this machine."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "muster": f"{__version__} ({_source_digest()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch,
    }


def require_same(group: LauncherGroup) -> None:
    """Raise ConfigError on node 0, with a sentence that names the node, where a launcher runs something else."""
    for node in sorted(group.nodes):
        if said := next(node_differences(group.local_node, group.nodes[node]), None):
            raise ConfigError(said)


def node_differences(first: NodeInfo, other: NodeInfo) -> Iterator[str]:
    """Yield the differences of `other` from node 0, each as a sentence, the most telling first."""
    a, b = first.facts, other.facts
    if a.get("job") != b.get("job"):
        yield f"{other} was started to {b.get('job')}, {first} to {a.get('job')}: start the same on all nodes"
        return
    for key, what, way_out in _COMPARED_FACTS:
        if a.get(key) != b.get(key):
            yield f"{other} {what.format(b.get(key))}, but {first} {what.format(a.get(key))}: {way_out}"
    if "config" in a and (changed := list(config_differences(a["config"], b["config"]))):
        yield f"{other} has another configuration than {first} ({'; '.join(changed)}): give all nodes the same run file"


_COMPARED_FACTS = (
    ("muster", "runs Muster {}", "install the same code on all nodes"),
    ("torch", "has PyTorch {}", "install the same one"),
    ("python", "runs Python {}", "use the same one"),
    ("plan", "has the plan {}", "give all nodes the same --parallel"),
    ("ranks", "would start {}", "give all nodes the same --nproc"),
)


def config_differences(first: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """Yield the differences of two configurations, except for the plan, which is compared by itself."""
    for section in sorted((first | other).keys() - {"parallel"}):
        a, b = first.get(section), other.get(section)
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a | b):
                if a.get(key) != b.get(key):
                    yield f"{section}.{key} {b.get(key)}, not {a.get(key)}"
        elif isinstance(a, dict) or isinstance(b, dict):
            yield f"{'without' if b is None else 'with'} section {section}"
        elif a != b:
            yield f"{section} {b}, not {a}"


@cache
def _source_digest() -> str:
    """Return a digest of the program's files: development versions have the same number and differ."""
    root, digest = Path(muster.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
