"""Cluster of the catalogue from the cells of a row."""

import re

from muster.config.cluster_files import link_names, load_device, load_link
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.device import DeviceSpec, LinkSpec, Nics
from muster.spec.errors import ConfigError
from muster.spec.suggest import did_you_mean
from muster.validate.combined_cells import DEVICE_FAMILY
from muster.validate.errors import UnpredictableRowError
from muster.validate.table import MeasurementRow

_CLOUD_MACHINES = {
    r"p3\.": "v100-16-sxm",
    r"p3dn\.": "v100-32-sxm",
    r"p4d\b|a2-highgpu|nd96\w*asr": "a100-40-sxm",
    r"p4de\b|a2-ultragpu|nd96am|nd96\w*amsr": "a100-80-sxm",
    r"p5\.|a3-(high|mega)gpu|nd96isr_h100": "h100-sxm",
    r"p5e|p5en|a3-ultragpu|nd96isr_h200": "h200",
    r"p6-b200|a4-highgpu": "b200",
    r"p6e-gb200|a4x": "gb200",
    r"trn2": "trainium2",
    r"v4-\d": "tpu-v4",
    r"v5litepod|ct5lp|v5e\b": "tpu-v5e",
    r"ct5p|v5p\b": "tpu-v5p",
    r"ct6e|v6e\b|trillium": "tpu-v6e",
}
"""Patterns of clouds' names of machines, with their devices in the catalogue (instance types of AWS, Google Cloud and
Azure, 2026-11)."""

_GBIT_PER_S = 1e9 / 8
_RATE = re.compile(
    r"(?:(\d+)\s*[x×]\s*(?:[a-z][\w-]*\s+){0,4}?)?(\d+(?:\.\d+)?)\s*(gbps|gb/s|gbit/s|gb|gbytes/s)", re.IGNORECASE
)
"""Count, rate and unit in an `inter_link` cell."""
_NETWORK_NAMES = ("infiniband", "roce", "omni-path", "ethernet")
"""Networks suggested in error messages."""
_OTHER_TRAFFIC = r"storage|management|pci(e|[ -]?express)"
"""Parts of a cell about networks that training doesn't use, or about the way to them."""
_NETWORKS = (
    r"infiniband|connec|mellanox|\bib\b|[hnex]dr\b|cx-?\d|roce|rdma|omni|\bopa\b|eth|efa|slingshot|tcp|nvlink"
    r"|^(none|n/?a|-)$"
)
"""Networks that a cell may name without a rate; the device's default rate applies then."""
_NO_NETWORK_NAME = r"\bper\b|/|\b(each|every|nodes?|gpus?|devices?|cards?|nics?|x|gb/s|gbps|gbit/s)\b|[\d\W_]"
"""Words and signs beside a rate that name no network."""
_FABRICS = {"nvlink": r"nv.?link|nv.?switch", "pcie": r"pci(e|[ -]?express)\b|pcie\d", "xgmi": r"xgmi|infinity.?fabric"}
"""Fabrics within a node by their kind, with patterns of their names in an `intra_link` cell."""
_FABRIC_NAMES = ("nvlink", "nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5", "xgmi")
"""Fabrics suggested in error messages."""
_BY_RATE = {
    "infiniband": {100: "ib-edr", 200: "ib-hdr", 400: "ib-ndr", 800: "ib-xdr"},
    "roce": {100: "roce-100g", 200: "roce-200g", 400: "roce-400g"},
    "omni-path": {100: "omnipath"},
    "ethernet": {10: "eth-10g", 25: "eth-25g", 100: "eth-100g", 400: "eth-400g"},
}
"""Links of the catalogue by kind and Gbit/s."""


def cluster_from_row(row: MeasurementRow, usual_device: str | None = None) -> ClusterSpec:
    """Return the devices of a row in nodes of `gpus_per_node`, with the device's default network where the row states
    none.

    `usual_device` is a catalogue name that replaces the row's `gpu` where the source's facts are more exact. Raises
    UnpredictableRowError.
    """
    device = parse_device(row.gpu) if usual_device is None else load_device(usual_device)
    if row.n_gpus is None:
        raise UnpredictableRowError("n_gpus is empty: expected the number of devices")
    shape = device.node
    per_node = min(row.gpus_per_node or (shape.devices if shape else 8), row.n_gpus)
    nodes, rest = divmod(row.n_gpus, per_node)
    if rest:
        raise UnpredictableRowError(f"n_gpus {row.n_gpus} is not a multiple of gpus_per_node {per_node}")
    intra = parse_intra(row.intra_link, shape.intra if shape else load_link("pcie4"))
    nics = parse_nics(row.inter_link, per_node, _usual_nics(device, row.gpus_per_node or per_node))
    group = NodeGroup(
        num_nodes=nodes,
        devices_per_node=per_node,
        device=device,
        intra=intra,
        nics=nics,
        domain_nodes=shape.domain_nodes if shape else 1,
    )
    return ClusterSpec(name=f"{row.n_gpus}x{device.name}", groups=(group,))


def parse_device(text: str) -> DeviceSpec:
    """Return the catalogue's device for a text such as `A100-80GB (Selene)`. Raises UnpredictableRowError."""
    if not text:
        raise UnpredictableRowError("gpu is empty: expected a device such as H100")
    for name in (text, *_names(text)):
        try:
            return load_device(name)
        except ConfigError:
            continue
    try:
        load_device(text)
    except ConfigError as error:
        raise UnpredictableRowError(str(error)) from None
    raise AssertionError("unreachable")


def _names(text: str) -> list[str]:
    """Return candidate names in the catalogue, the most specific first: family, memory, form factor."""
    lower = text.lower()
    for pattern, device in _CLOUD_MACHINES.items():
        if re.match(pattern, lower) or re.search(rf"[\s_]({pattern})", lower):
            return [device]
    family = DEVICE_FAMILY.search(lower)
    if not family:
        return []
    name = re.sub(r"^(?=[345]090)", "rtx", family[1].replace(" ", ""))
    memory = re.search(r"(\d+)\s*g[ib]b?\b", lower)
    size = memory[1] if memory else ""
    said = re.search(r"pcie|nvl(?!\d)", lower)
    form = said[0] if said else "sxm"
    whole = [f"{name}-{size}-{form}", f"{name}-{size}-hbm2e", f"{name}-{size}"] if size else []
    if said and size:
        whole.insert(1, f"{name}-{form}")
    return [*whole, f"{name}-{form}", *([f"{name}-80-{form}"] if name == "a100" and not size else []), name]


def parse_intra(text: str, usual: LinkSpec) -> LinkSpec:
    """Return the link between the devices of a node for a text such as `NVLink`, `PCIe` or `nvlink4-h800`; `usual`
    where the cell is empty.

    Without a generation it is the device's own link of that kind, for PCIe the fourth generation. Raises
    UnpredictableRowError.
    """
    name = text.strip().lower()
    if not name or name == usual.name:
        return usual
    kind = next((kind for kind, pattern in _FABRICS.items() if re.search(pattern, name)), None)
    generation = re.search(r"(?:nv.?link|pcie|pci.?express|xgmi)[ -]*(?:gen(?:eration)?)?[ -.]*(\d)(?!\d)", name)
    if kind == usual.kind and (not generation or generation[1] in usual.name) and name not in link_names():
        return usual
    own = f"{kind}{generation[1] if generation else '4' if kind == 'pcie' else ''}"
    found = next((candidate for candidate in (name, own) if candidate in link_names()), None)
    if found is None:
        hint = did_you_mean(name, _FABRIC_NAMES)
        raise UnpredictableRowError(
            f"intra_link '{text}' is not known{hint or ':'} expected one of {', '.join(_FABRIC_NAMES)},"
            " or a link of the catalogue"
        )
    return load_link(found)


def _usual_nics(device: DeviceSpec, per_node: int) -> Nics | None:
    """Return the network cards of the device's default node, with as many cards per device in a node of `per_node`."""
    if device.node is None or device.node.nics is None:
        return None
    count = max(1, round(device.node.nics.count * per_node / device.node.devices))
    return Nics(link=device.node.nics.link, count=count)


def parse_nics(text: str, per_node: int, usual: Nics | None) -> Nics | None:
    """Parse network cards such as `8x200Gb HDR IB per node` or `1600 Gbps/node RoCE`; `usual` where no rate is stated.

    A rate without a count holds for a whole node if the text says so, otherwise for each device.
    """
    text = " + ".join(part for part in re.split(r"[,;+]", text) if not re.search(_OTHER_TRAFFIC, part, re.IGNORECASE))
    found = max(_RATE.finditer(text), key=lambda rate: int(rate[1] or 1) * float(rate[2]), default=None)
    _require_network(text, bool(found))
    if not found:
        return usual
    is_bytes = found[3] in ("GB/s", "GBytes/s")  # Gb is bits, GB bytes
    rate = float(found[2]) * (8 if is_bytes else 1)
    count = int(found[1]) if found[1] else per_node
    if not found[1] and re.search(r"(per |/)node", text, re.IGNORECASE):
        rate /= per_node
    return Nics(link=_network(text.lower(), rate, usual), count=count)


def _require_network(text: str, has_rate: bool) -> None:
    """Raise UnpredictableRowError for an inter_link cell that names neither a rate nor a kind of network, or a rate of
    an unknown network."""
    rest = re.sub(_NO_NETWORK_NAME, " ", _RATE.sub(" ", text), flags=re.IGNORECASE) if has_rate else text
    if not rest.strip() or re.search(_NETWORKS, text, re.IGNORECASE):
        return
    hint = did_you_mean(rest.strip().lower(), _NETWORK_NAMES)
    raise UnpredictableRowError(
        f"inter_link '{text}' is not known{hint or ':'} expected a rate and a network, such as '8x200Gb IB per node'"
        f" (networks: {', '.join(_NETWORK_NAMES)})"
    )


def _network(text: str, gbit_per_s: float, usual: Nics | None) -> LinkSpec:
    """Return the catalogue's link of that kind with the nearest rate, set to the stated rate."""
    kind = "infiniband"
    if "roce" in text or "rdma" in text:
        kind = "roce"
    elif re.search(r"omni|\bopa\b", text):
        kind = "omni-path"
    elif re.search(r"eth|efa|slingshot|tcp", text):
        kind = "ethernet"
    elif not re.search(r"\bib\b|infiniband|hdr|ndr|edr|xdr|cx-?\d", text) and usual and usual.link.kind in _BY_RATE:
        kind = usual.link.kind
    table = _BY_RATE[kind]
    link = load_link(table[min(table, key=lambda rate: abs(rate - gbit_per_s))])
    return link.model_copy(update={"bandwidth_bytes_per_s": gbit_per_s * _GBIT_PER_S})
