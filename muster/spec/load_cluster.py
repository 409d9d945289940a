"""Clusters from a preset, a short name such as `64xh100`, or a file."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from muster.catalog import names, read
from muster.spec.cluster import ClusterSpec, NodeGroup, single_device
from muster.spec.device import DeviceSpec, LinkSpec, NodeShape
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

_SHORT = re.compile(r"(-?\d+)\s*[x×*]\s*([A-Za-z][\w.-]*)")
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_cluster(text: str) -> ClusterSpec:
    """The cluster that `text` names: a file, a preset of the catalogue, or devices as in `64xh100` and
    `32xh100+32xa100`.

    A file has the keys of `ClusterSpec`, with devices and links by their names or written out.
    Raises ConfigError, with the nearest name.
    """
    text = text.strip()
    if text.endswith((".yaml", ".yml")) or "/" in text or Path(text).is_file():
        return _from_file(Path(text))
    if text in names("clusters"):
        return _build(_mapping(read("clusters", text), f"cluster {text}"), f"cluster {text}")
    parts = [_SHORT.fullmatch(part.strip()) for part in text.split("+")]
    if all(parts):
        groups = tuple(group for part in parts if part for group in _groups(int(part[1]), part[2]))
        return _checked(f"cluster {text}", name=text, groups=groups)
    if text.lower() in _device_names():
        return single_device(load_device(text))
    raise ConfigError(
        f"there is no cluster '{text}'{did_you_mean(text, [*names('clusters'), *_device_names()])}"
        f" (give a number of devices as in 64xh100, a file, or one of {', '.join(names('clusters'))})"
    )


@cache
def load_device(name: str) -> DeviceSpec:
    """A device of the catalogue, by its name or an alias. Raises ConfigError with the nearest name."""
    known = _device_names()
    if name.lower() not in known:
        raise ConfigError(
            f"there is no device '{name}'{did_you_mean(name.lower(), known)} (there are {', '.join(names('devices'))})"
        )
    file = known[name.lower()]
    return _device(_mapping(read("devices", file), f"device {file}"), f"device {file}")


@cache
def load_link(name: str) -> LinkSpec:
    """A link of the catalogue. Raises ConfigError with the nearest name."""
    links = _mapping(read("links", "links"), "links")
    if name not in links:
        raise ConfigError(f"there is no link '{name}'{did_you_mean(name, links)} (there are {', '.join(links)})")
    return _validated(LinkSpec, {"name": name, **links[name]}, f"link {name}")


@cache
def _device_names() -> dict[str, str]:
    """Every name and alias → the device's file."""
    found: dict[str, str] = {}
    for name in names("devices"):
        aliases = re.search(r"^aliases: \[(.*)\]$", read("devices", name), re.MULTILINE)
        for alias in (name, *(aliases[1].split(",") if aliases else ())):
            found[alias.strip()] = name
    return found


def _groups(count: int, name: str) -> list[NodeGroup]:
    """`count` devices in the nodes that they usually come in: full nodes, then what is left."""
    device = load_device(name)
    if count < 1:
        raise ConfigError(f"a cluster has at least one device, got {count}x{name}")
    node = device.node
    if node is None:
        return list(single_device(device, count).groups)
    full, rest = divmod(count, node.devices)
    shape = {"device": device, "intra": node.intra, "nics": node.nics, "domain_nodes": node.domain_nodes}
    groups = [NodeGroup(num_nodes=full, devices_per_node=node.devices, **shape)] if full else []
    return groups + ([NodeGroup(num_nodes=1, devices_per_node=rest, **shape)] if rest else [])


# ----------------------------------------------------------------------------------------------------------------------
# Files


def _from_file(path: Path) -> ClusterSpec:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't read cluster file {path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"can't read cluster file {path}: expected YAML in UTF-8") from None
    return _build(_mapping(text, str(path)), str(path))


def _build(data: dict[str, Any], where: str) -> ClusterSpec:
    """A cluster from a file's keys; `devices: 64xh100` stands for groups."""
    data = dict(data)
    if isinstance(short := data.pop("devices", None), str):
        data["groups"] = load_cluster(short).groups
    elif isinstance(data.get("groups"), list):
        data["groups"] = [_group(group, where) for group in data["groups"]]
    for tier in data.get("tiers") or ():
        if isinstance(tier, dict) and "link" in tier:
            tier["link"] = _link(tier["link"], where)
    return _checked(where, **data)


def _group(data: Any, where: str) -> Any:
    """One group: what it doesn't say of its nodes is as the device usually comes."""
    if not isinstance(data, dict):
        return data
    device = data.get("device")
    device = load_device(device) if isinstance(device, str) else _device(device, where)
    usual: dict[str, Any] = {}
    if isinstance(device, DeviceSpec) and device.node is not None:
        node = device.node
        usual = {
            "devices_per_node": node.devices,
            "intra": node.intra,
            "nics": node.nics,
            "domain_nodes": node.domain_nodes,
        }
    own = {key: _link(value, where) if key == "intra" else value for key, value in data.items()}
    if isinstance(nics := own.get("nics"), dict) and "link" in nics:
        own["nics"] = nics | {"link": _link(nics["link"], where)}
    return usual | own | {"device": device}


def _device(data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        return data
    data = dict(data)
    if isinstance(node := data.get("node"), dict):
        node = {key: _link(value, where) if key == "intra" else value for key, value in node.items()}
        if isinstance(nics := node.get("nics"), dict):
            node["nics"] = nics | {"link": _link(nics.get("link"), where)}
        data["node"] = _validated(NodeShape, node, where)
    return _validated(DeviceSpec, data, where)


def _link(data: Any, where: str) -> Any:
    """A link by name, or `{like: NAME, …}` with what is different, or written out."""
    if isinstance(data, str):
        return load_link(data)
    if isinstance(data, dict) and isinstance(like := data.get("like"), str):
        other = {key: value for key, value in data.items() if key != "like"}
        return _validated(LinkSpec, {**load_link(like).model_dump(), **other}, where)
    return data


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        data = yaml.load(text, Loader=_YAML)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected 'key: value' lines, got {str(data)[:40]!r}")
    return dict(data)


def _checked(where: str, **data: Any) -> ClusterSpec:
    return _validated(ClusterSpec, data, where)


def _validated(kind: Any, data: Any, where: str) -> Any:
    """`data` as `kind`, or one sentence about the first thing that is wrong with it."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"there is no such key{did_you_mean(str(first['loc'][-1]), _keys(kind))}"
        raise ConfigError(f"{where}: {place + ': ' if place else ''}{message[:1].lower()}{message[1:]}") from None


def _keys(kind: Any) -> list[str]:
    kinds = [kind, NodeGroup, DeviceSpec, LinkSpec] if kind is ClusterSpec else [kind]
    return [key for each in kinds for key in each.model_fields]
