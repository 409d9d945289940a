"""What the launchers of all nodes have to have alike, and how a difference is told; free of torch."""

import hashlib
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import muster
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legal import asked_world_size
from muster.spec.load import Resolved
from muster.spec.machine import gpu_names
from muster.spec.plan_name import format_plan_name
from muster.spec.sizes import counted
from muster.train.nodes.team import Member, Team


def software() -> dict[str, Any]:
    """What this machine runs."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "muster": f"{muster.__version__} ({_code()})",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch,
    }


def training(resolved: Resolved, ranks: int) -> dict[str, Any]:
    """What a launcher that trains says of itself."""
    config, plan = resolved.config, resolved.config.parallel
    return {
        **software(),
        "job": "train",
        "ranks": counted(ranks, "rank"),
        "plan": f"auto ({plan.hash})" if resolved.auto else f"{format_plan_name(plan)} ({plan.hash})",
        "config": config.model_dump(mode="json"),
    }


def ranks_here(resolved: Resolved, nproc: int | None, nodes: int) -> int:
    """The processes of each node: as asked for; else an equal share of the plan's; for `auto` one for each GPU, or one.

    Raises InfeasibleError for a plan that the nodes can't share equally.
    """
    if nproc is not None:
        return nproc
    if resolved.auto:
        return max(1, len(gpu_names()))
    size = asked_world_size(resolved.config.parallel)
    if size % nodes:
        name = format_plan_name(resolved.config.parallel)
        raise InfeasibleError(
            f"{name} has {counted(size, 'process')}, which {nodes} nodes can't share equally: expected a plan with a"
            f" multiple of {nodes}, such as {nodes * max(1, size // nodes)}"
        )
    return size // nodes


def require_same(team: Team) -> None:
    """Node 0 raises ConfigError, with one sentence that names the node, where a launcher runs something else."""
    for node in sorted(team.members):
        if said := next(differences(team.own, team.members[node]), None):
            raise ConfigError(said)


def differences(first: Member, other: Member) -> Iterator[str]:
    """In what `other` differs from node 0, each a sentence; the first says most."""
    a, b = first.facts, other.facts
    if a.get("job") != b.get("job"):
        yield f"{other} was started to {b.get('job')}, {first} to {a.get('job')}: start the same on all nodes"
        return
    for key, what, way_out in _WORDS:
        if a.get(key) != b.get(key):
            yield f"{other} {what.format(b.get(key))}, but {first} {what.format(a.get(key))}: {way_out}"
    if "config" in a and (changed := list(config_differences(a["config"], b["config"]))):
        yield f"{other} has another configuration than {first} ({'; '.join(changed)}): give all nodes the same run file"


_WORDS = (
    ("muster", "runs Muster {}", "install the same code on all nodes"),
    ("torch", "has PyTorch {}", "install the same one"),
    ("python", "runs Python {}", "use the same one"),
    ("plan", "has the plan {}", "give all nodes the same --parallel"),
    ("ranks", "would start {}", "give all nodes the same --nproc"),
)


def config_differences(first: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """What the sections of two configurations say differently, but for the plan, which has its own word."""
    for section in first:
        if section == "parallel" or first[section] == own[section]:
            continue
        if not isinstance(first[section], dict):
            yield f"{section} {own[section]}, not {first[section]}"
            continue
        for key in first[section]:
            if first[section][key] != own[section].get(key):
                yield f"{section}.{key} {own[section].get(key)}, not {first[section][key]}"


@cache
def _code() -> str:
    """A digest of the program's own files: versions in development have one number and differ."""
    root, digest = Path(muster.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
