"""Clusters from a preset, a short name such as `64xh100`, or a file."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from muster.catalog import names, read
from muster.config.migrations import migrate
from muster.config.yaml_reader import read_yaml, validate_values
from muster.spec.cluster import ClusterSpec, NodeGroup, single_node_cluster
from muster.spec.config_errors import ConfigSchema, error_sentence
from muster.spec.device import DeviceSpec, LinkSpec, NodeShape
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean

_SHORT = re.compile(r"(-?\d+)\s*[x×*]\s*([A-Za-z][\w.-]*)")
Loaded = TypeVar("Loaded")


def load_cluster(text: str) -> ClusterSpec:
    """Load the cluster that `text` names: a file, a preset of the catalogue, or devices as in `64xh100` and
    `32xh100+32xa100`.

    A file has the keys of `ClusterSpec`, with devices and links by name or written out. Raises ConfigError, with the
    nearest name.
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
        return single_node_cluster(load_device(text))
    missing = re.fullmatch(r"(\d+)\s*([A-Za-z][\w.-]*)", text)
    near = f"; did you mean '{missing[1]}x{missing[2]}'?" if missing and missing[2].lower() in _device_names() else None
    raise ConfigError(
        f"there is no cluster '{text}'{near or did_you_mean(text, [*names('clusters'), *_device_names()])}"
        f" (expected a number of devices as in 64xh100, a file, or one of {', '.join(names('clusters'))})"
    )


@cache
def load_device(name: str) -> DeviceSpec:
    """Load a device of the catalogue, by its name or an alias. Raises ConfigError with the nearest name."""
    known = _device_names()
    if name.lower() not in known:
        raise ConfigError(
            f"there is no device '{name}'{did_you_mean(name.lower(), known)} (there are {', '.join(names('devices'))})"
        )
    file = known[name.lower()]
    return _device(_mapping(read("devices", file), f"device {file}"), KeyLocation(f"device {file}"))


@cache
def _links() -> dict[str, Any]:
    """Return the links of the catalogue, as written."""
    return _mapping(read("links", "links"), "links")


def link_names() -> list[str]:
    """Return the names of the catalogue's links."""
    return list(_links())


@cache
def load_link(name: str) -> LinkSpec:
    """Load a link of the catalogue. Raises ConfigError with the nearest name."""
    links = _links()
    if name not in links:
        raise ConfigError(f"there is no link '{name}'{did_you_mean(name, links)} (there are {', '.join(links)})")
    return _validated(LinkSpec, {"name": name, **links[name]}, KeyLocation(f"link {name}"))


@cache
def _device_names() -> dict[str, str]:
    """Return every name and alias with the device's file."""
    found: dict[str, str] = {}
    for name in names("devices"):
        aliases = re.search(r"^aliases: \[(.*)\]$", read("devices", name), re.MULTILINE)
        for alias in (name, *(aliases[1].split(",") if aliases else ())):
            found[alias.strip()] = name
    return found


def _groups(count: int, name: str) -> list[NodeGroup]:
    """Return `count` devices in the nodes that they usually come in: full nodes, then the remainder."""
    device = load_device(name)
    if count < 1:
        raise ConfigError(f"a cluster has at least one device, got {count}x{name}")
    node = device.node
    if node is None:
        return list(single_node_cluster(device, count).groups)
    full, rest = divmod(count, node.devices)
    shape = {"device": device, **_usual_node(node)}
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


class KeyLocation(NamedTuple):
    """The location of a value: a file, and the dotted path of keys in it."""

    file: str
    path: str = ""

    def key(self, name: str) -> "KeyLocation":
        """Return the location of the value under a key of this one."""
        return KeyLocation(self.file, f"{self.path}.{name}" if self.path else name)

    def __str__(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file


def _build(data: dict[str, Any], where: str) -> ClusterSpec:
    """Return the cluster of a file's keys; `devices: 64xh100` stands for groups."""
    data, file = dict(data), KeyLocation(where)
    if "devices" in data:
        short = data.pop("devices")
        if "groups" in data:
            raise ConfigError(f"{where}: devices and groups are given, expected one of them")
        if not isinstance(short, str):
            raise ConfigError(f"{file.key('devices')}: expected devices such as 64xh100, got {short!r}")
        data["groups"] = _named(load_cluster, short, file.key("devices")).groups
    elif "groups" not in data:
        raise ConfigError(f"{where}: expected groups of nodes, or devices such as 64xh100")
    elif isinstance(data["groups"], list):
        data["groups"] = [_group(group, file.key(f"groups.{index}")) for index, group in enumerate(data["groups"])]
    tiers = data.get("tiers")
    for index, tier in enumerate(tiers if isinstance(tiers, list) else ()):
        if isinstance(tier, dict) and "link" in tier:
            tier["link"] = _link(tier["link"], file.key(f"tiers.{index}.link"))
    return _checked(where, **data)


def _group(data: Any, place: KeyLocation) -> Any:
    """Return one group: node properties left out are those of the device's usual node, or of that of `like`."""
    if not isinstance(data, dict):
        return data
    data = dict(data)
    like = data.pop("like", None)
    model = None if like is None else _named(load_device, str(like), place.key("like"))
    if "device" not in data and model is None:
        raise ConfigError(f"{place.key('device')}: missing, expected a device such as h100")
    device = data.get("device", like)
    at = place.key("device")
    device = _named(load_device, device, at) if isinstance(device, str) else _device(device, at)
    usual: dict[str, Any] = {}
    comes_in = model or device
    if isinstance(comes_in, DeviceSpec) and comes_in.node is not None:
        usual = {"devices_per_node": comes_in.node.devices, **_usual_node(comes_in.node)}
    return usual | _joined(data, place) | {"device": device}


def _joined(data: dict[str, Any], place: KeyLocation) -> dict[str, Any]:
    """Return the keys of a node, with its links loaded."""
    keys = {key: _link(value, place.key(key)) if key == "intra" else value for key, value in data.items()}
    if isinstance(nics := keys.get("nics"), dict) and "link" in nics:
        keys["nics"] = nics | {"link": _link(nics["link"], place.key("nics.link"))}
    return keys


def _usual_node(node: NodeShape) -> dict[str, Any]:
    """Return the properties that a group takes from its devices' usual node."""
    names = ("intra", "nics", "domain_nodes", "host_memory_bytes", "host_update_bytes_per_s", "disk")
    return {name: getattr(node, name) for name in names}


def _device(data: Any, place: KeyLocation) -> Any:
    if not isinstance(data, dict):
        return data
    data = _like_device(data, place)
    if isinstance(node := data.get("node"), dict):
        data["node"] = _validated(NodeShape, _joined(node, place.key("node")), place.key("node"))
    if isinstance(rates := data.get("rates"), dict):
        data["rates"] = migrate("profile", rates, str(place.key("rates")))
    return _validated(DeviceSpec, data, place)


def _like_device(data: dict[str, Any], place: KeyLocation) -> dict[str, Any]:
    """Return the keys of a device; `{like: NAME, …}` changes those of a device of the catalogue, and of a mapping such
    as `peak_flops_per_s` only the entries that are given. Its name is that of the other with `-changed`."""
    if "like" not in data:
        return dict(data)
    data = dict(data)
    like = _named(load_device, str(data.pop("like")), place.key("like"))
    keys = {"name": f"{like.name}-changed", "title": like.title}
    known: dict[str, Any] = like.model_dump() | {"aliases": (), "node": like.node} | keys
    merged = {
        key: {**known[key], **value} if isinstance(value, dict) and isinstance(known.get(key), dict) else value
        for key, value in data.items()
    }
    if isinstance(node := merged.get("node"), dict) and like.node is not None:
        merged["node"] = {**like.node.model_dump(), "intra": like.node.intra, "nics": like.node.nics, **node}
    return known | merged


def _link(data: Any, place: KeyLocation) -> Any:
    """Return a link by name, as `{like: NAME, …}` with the differences, or written out."""
    if isinstance(data, str):
        return _named(load_link, data, place)
    if isinstance(data, dict) and "like" in data:
        other = {key: value for key, value in data.items() if key != "like"}
        like = _named(load_link, str(data["like"]), place.key("like"))
        return _validated(LinkSpec, {**like.model_dump(), **other}, place)
    return data


def _named(load: Callable[[str], Loaded], name: str, place: KeyLocation) -> Loaded:
    """Load by name; the error about a wrong one gives its location."""
    try:
        return load(name)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _mapping(text: str, where: str) -> dict[str, Any]:
    data = read_yaml(text, where)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected 'key: value' lines, got {'nothing' if data is None else repr(str(data)[:40])}"
        )
    return dict(data)


def _checked(where: str, **data: Any) -> ClusterSpec:
    return _validated(ClusterSpec, data, KeyLocation(where))


def _validated(kind: Any, data: Any, place: KeyLocation) -> Any:
    """Return `data` as `kind`, or raise ConfigError with one sentence about its first error."""
    try:
        return validate_values(kind, data)
    except ValidationError as error:
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        message = error_sentence(first, ConfigSchema(kind), {})
        raise ConfigError(f"{place}{'.' if place.path and first['loc'] else ': '}{message}") from None
