"""Cells that say what the columns of a table say in another way: several degrees in one cell, nodes instead of devices,
batches for each device, and steps of gradient accumulation."""

import re
from collections.abc import Callable, Iterable, Sequence

from muster.validate.cells import parse_length, parse_whole

_DEGREES = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "ep": "ep", "etp": "etp", "vpp": "vpp", "vp": "vpp"}
_DATA_PARALLEL_ALONE = re.compile(r"d?dp|ddp|zero[- ]?(?:stage[- ]?)?[0-3]", re.IGNORECASE)
"""A layout of data-parallel ranks alone, in one word."""
_BATCHES = {"mbs": "micro_batch", "gbs": "global_batch"}
_LAYOUT_COLUMNS = (
    *("parallelism", "parallelization", "strategy", "configuration", "config", "layout", "mesh", "mesh_shape"),
    *("ici_parallelism", "sharding_ici"),
)
"""Columns whose cells may name degrees, as `TP=4, PP=2` or `FSDP 32 + TP 8`."""
_LAYOUT_WORD = re.compile(
    rf"(?<![a-z0-9])({'|'.join((*_DEGREES, *_BATCHES))})\s*[-=: ]?\s*(\d+)(?![\d.])"
    r"|(?<![a-z0-9])(fsdp2?|hsdp)(\s*[-=: ]\s*\d+)?",
    re.IGNORECASE,
)
_JOINED_WORDS = re.compile(rf"((?:{'|'.join((*_DEGREES, *_BATCHES))})\d+)(?=[a-z])", re.IGNORECASE)
"""End of a degree that the next follows without a separator, as in `TP2PP2`."""
_ZERO_STAGE = re.compile(r"(?<![a-z0-9])z(?:ero)?[- ]?([0-3])(?![\d.])", re.IGNORECASE)
_RECOMPUTE_WORD = re.compile(
    r"(?<![a-z0-9])(?:recompute|ac|activation checkpointing)\s*[=:]\s*(full|selective|none|no)\b", re.IGNORECASE
)
_SETTING = re.compile(r"[a-z][a-z_]*\s*[=:]\s*[^,;\s]+", re.IGNORECASE)
"""Setting in a layout cell that no column stands for."""
DEVICE_FAMILY = re.compile(
    r"(gb300|gb200|gh200|b300|b200|h200|h100|h800|h20|a100|a800|a6000|v100|mi\d{3}x?|l40s|l4"
    r"|rtx[ -]?[345]090|[345]090|gaudi[ -]?3|trainium[ -]?2|tpu[ -]?v\d\w?)(?!\d)"
)
"""Device families in lower-case free text, such as a `gpu` cell."""
_DEVICE_DETAILS = re.compile(r"[ -]?(sxm\d?|pcie|nvl(?!\d))?[ -]?(\d+ ?g[ib]?b?)?", re.IGNORECASE)
"""Form and memory behind the family in a device's name."""
_COUNT_OF_DEVICES = re.compile(
    rf"(\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\s*[x×*]\s*(?=[a-z])|\s+(?=(?:nvidia |amd |tpu)?{DEVICE_FAMILY.pattern}))",
    re.IGNORECASE,
)
"""Number before a device's name: `256 x TPU v5p`, `8 H100s`."""
_NODES_OF_DEVICES = re.compile(r"(\d+)\s*nodes?\s*(?:[x×*]|of)\s*(\d+)\s*[x×*]?\s*(?=[a-z])", re.IGNORECASE)
_COUNT_BEHIND = re.compile(r"\s*[x×*]\s*(\d+)$")
_TPU_SLICE = re.compile(r"v(4|5p|5e|5litepod|6e)-(\d+)$", re.IGNORECASE)
"""Name of a part of a pod of TPUs, with its number of chips; of v4 and v5p that of their cores, two a chip."""
OTHER_COLUMNS: dict[str, tuple[str, ...]] = {
    "nodes": ("num_nodes", "n_nodes", "number_of_nodes", "node_count"),
    "slice": ("tpu_slice", "topology"),
    "fsdp": ("fsdp_size", "fsdp_degree", "fully_sharded"),
    "accumulation": (
        "ga",
        "gas",
        "grad_accum",
        "grad_accum_steps",
        "grad_acc",
        "gradient_accumulation",
        "gradient_accumulation_steps",
    )
    + ("grad_accumulation_steps", "num_microbatches", "num_micro_batches", "n_micro_batches"),
    "batch_per_device": (
        "per_device_batch_size",
        "per_device_batch",
        "per_chip_batch",
        "per_chip_batch_size",
        "batch_per_chip",
    ),
    "batch_per_rank": ("batch_size_per_gpu", "batch_per_gpu", "local_batch_size", "local_batch", "per_gpu_batch_size"),
    "batch_tokens": ("global_batch_tokens", "batch_size_tokens", "global_batch_size_tokens", "tokens_per_batch")
    + ("tokens_per_step", "batch_tokens"),
    "recompute_modules": ("modules_recomputed",),
    "dispatcher": ("moe_dispatcher", "moe_token_dispatcher_type", "token_dispatcher"),
}
"""Columns that say in another way what others do, with their other names; each layout column stands for itself."""


def combined_column(name: str) -> str | None:
    """Return the name of a column of this page for what a header calls it; None for any other column."""
    if name in _LAYOUT_COLUMNS or _degrees_of_header(name):
        return name
    return next((own for own, others in OTHER_COLUMNS.items() if name == own or name in others), None)


def counts_devices(header: Sequence[str], rows: Iterable[Sequence[str] | None]) -> bool:
    """Return True if a table without `n_gpus` says the number of devices by its nodes, or before their names."""
    if "gpu" not in header or {"nodes", "slice"} & set(header):
        return bool({"nodes", "slice"} & set(header))
    at = header.index("gpu")
    named = [cells[at].strip() for cells in rows if cells and len(cells) > at]
    return any(any(_devices_in(name)) or _TPU_SLICE.search(name) for name in named)


def device_in_words(text: str) -> str:
    """Return the device that a text names, such as a table's title; an empty text where it names none."""
    found = DEVICE_FAMILY.search(text.lower())
    if found is None or (found.start() and text[found.start() - 1].isalnum()):
        return ""
    details = _DEVICE_DETAILS.match(text, found.end())
    return text[found.start() : details.end() if details else found.end()].strip(" -")


def _devices_in(text: str) -> tuple[str, str]:
    """Return the number of devices and the device of a cell that says both; both empty where it doesn't."""
    if found := _NODES_OF_DEVICES.match(text):
        return str(int(found[1]) * int(found[2])), text[found.end() :]
    if found := _COUNT_OF_DEVICES.match(text):
        return found[1], text[found.end() :]
    if found := _COUNT_BEHIND.search(text):
        return found[1], text[: found.start()]
    return "", ""


def fill_from_combined(cells: dict[str, str]) -> dict[str, str]:
    """Return a row's cells with those filled in that combined cells say; what a column says itself goes before."""
    filled = dict(cells)

    def fill(column: str, text: str | None) -> None:
        if text and not filled.get(column):
            filled[column] = text

    for name, text in cells.items():
        if degrees := _degrees_of_header(name):
            parts = [part for part in re.split(r"[^0-9]+", text) if part]
            for column, part in zip(degrees, parts, strict=False) if len(parts) == len(degrees) else ():
                fill(column, part)
        elif name in _LAYOUT_COLUMNS:
            _fill_layout(filled, text, fill)
    _fill_tokens(filled)
    _fill_devices(filled, fill_one=fill)
    fill("zero", _sharding(filled.get("fsdp", "")))
    says_all = any(name in _LAYOUT_COLUMNS and _LAYOUT_WORD.search(text) for name, text in cells.items())
    words = " ".join(text for name, text in cells.items() if name in _LAYOUT_COLUMNS)
    if not says_all and (plain := _DATA_PARALLEL_ALONE.fullmatch(words.strip())):
        fill("zero", "none" if plain[0].lower() in ("ddp", "dp") else plain[0])
        says_all = True
    says_all |= bool(re.search(r"fsdp|hsdp|zero.?3|full.?shard", filled.get("zero", ""), re.IGNORECASE))
    says_all |= not {"tp", "pp"} & cells.keys() and bool(filled.get("zero"))
    for axis, other in (("tp", "pp"), ("pp", "tp")):
        if says_all or (axis not in cells and filled.get(other)):
            fill(axis, "1")
    says_none = not any(name in ("tp", "pp", *_LAYOUT_COLUMNS) or _degrees_of_header(name) for name in cells)
    if says_none and not filled.get("tp") and not filled.get("pp"):
        filled["open_degrees"] = "yes"
    if filled.get("recompute_modules") and filled.get("recompute", "").lower() in ("", "selective"):
        filled["recompute"] = filled["recompute_modules"].strip("[]")
    if filled.get("dispatcher"):
        filled["schedule"] = "; ".join(filter(None, (filled.get("schedule"), f"{filled['dispatcher']} dispatcher")))
    _fill_batch(filled)
    return filled


def _fill_layout(filled: dict[str, str], text: str, fill: Callable[[str, str | None], None]) -> None:
    """Take degrees, batches, sharding and recompute from a layout cell. A degree that it gives twice can't be read, and
    `assumed` says which settings nothing was taken from."""
    plain = _JOINED_WORDS.sub(r"\1 ", text)
    said: dict[str, list[str]] = {}
    for word, number, sharded, group in _LAYOUT_WORD.findall(plain):
        column = (_DEGREES | _BATCHES).get(word.lower(), "zero")
        said.setdefault(column, []).append(number or f"{sharded}{_group(group)}")
    if "zero" in said and re.search(r"hybrid", plain, re.IGNORECASE):
        said["zero"] = [value.lower().replace("fsdp", "hsdp") for value in said["zero"]]
    for column, values in said.items():
        fill(column, values[0] if column == "zero" else " and ".join(dict.fromkeys(values)))
    rest = _LAYOUT_WORD.sub(" ", plain)
    if stage := _ZERO_STAGE.search(rest):
        fill("zero", f"ZeRO-{stage[1]}")
    if recompute := _RECOMPUTE_WORD.search(rest):
        word = recompute[1].lower()
        fill("recompute", "none" if word == "no" else word)
    if unread := _SETTING.findall(_RECOMPUTE_WORD.sub(" ", rest)):
        _assume(filled, f"layout without {', '.join(unread)}, which nothing was taken from")


def _assume(cells: dict[str, str], words: str) -> None:
    """Add to what is assumed of a row, a column's name and words."""
    cells["assumed"] = "; ".join(filter(None, (cells.get("assumed"), words)))


def _fill_tokens(cells: dict[str, str]) -> None:
    """Take a global batch that is given in tokens, as `524288 tokens` or `4M`, as sequences."""
    batch = cells.get("global_batch", "")
    if not (re.search(r"tok", batch, re.IGNORECASE) or re.fullmatch(r"~?\s*\d+(?:[.,]\d+)?\s*[mM]", batch.strip())):
        return
    tokens, length = _number(re.sub(r"(?i)\s*tok\w*", "", batch)), _number(cells.get("seq_len", ""))
    if tokens and length and tokens >= length:
        cells["global_batch"] = str(round(tokens / length))
        said = re.sub(r"(?i)\s*tok\w*", "", batch).strip()
        _assume(cells, f"global_batch {cells['global_batch']} for {said} tokens")


def _degrees_of_header(name: str) -> list[str]:
    """Return the degrees that a header such as `TP/PP/CP` names, in their order; none for any other header."""
    words = [word for word in name.split("_") if word not in ("per", "x")]
    return [_DEGREES[word] for word in words] if len(words) > 1 and all(word in _DEGREES for word in words) else []


def _group(text: str) -> str:
    """Return the size of a sharding group as `zero` has it."""
    number = re.search(r"\d+", text)
    return f" within {number[0]}" if number else ""


def _sharding(text: str) -> str | None:
    """Return the words of `zero` for a column `fsdp`: the ranks of a group, or yes or no."""
    word = text.strip().lower()
    if word in ("", "0", "1", "no", "false", "off", "none", "-", "n/a"):
        return None
    return f"FSDP within {word}" if word.isdecimal() else "FSDP"


def _fill_devices(cells: dict[str, str], fill_one: Callable[[str, str], None]) -> None:
    """Take the number of devices from before their name, or from the nodes."""
    count, device = _devices_in(cells.get("gpu", ""))
    if count:
        fill_one("n_gpus", count)
        cells["gpu"] = device
    if found := _TPU_SLICE.search(cells.get("slice") or cells.get("gpu", "")):
        fill_one("n_gpus", str(int(found[2]) // (2 if found[1].lower() in ("4", "5p") else 1)))
    nodes, each = _number(cells.get("nodes", "")), _number(cells.get("gpus_per_node", ""))
    if nodes and each:
        fill_one("n_gpus", str(nodes * each))


def _fill_batch(cells: dict[str, str]) -> None:
    """Take both batches from what a step does with them elsewhere: sequences of each device, or of each data-parallel
    rank, tokens of a step, steps of accumulation.

    A batch for each device is that of JAX's programs, the global batch over all devices. Without accumulation, ranks
    that are no pipeline are taken to run one micro-batch a step, which `assumed` says.
    """
    devices = _number(cells.get("n_gpus", ""))
    cut = [_number(cells.get(axis, "") or "1") for axis in ("tp", "pp", "cp")]
    if not devices or not all(cut) or devices % (cut[0] * cut[1] * cut[2]):  # type: ignore[operator]
        return
    ranks = devices // (cut[0] * cut[1] * cut[2])  # type: ignore[operator]
    tokens, length = _number(cells.get("batch_tokens", "")), _number(cells.get("seq_len", ""))
    each, own = _number(cells.get("batch_per_device", "")), _number(cells.get("batch_per_rank", ""))
    if cells.get("global_batch"):
        return
    if tokens and length and tokens % length == 0:
        cells["global_batch"] = str(tokens // length)
        return
    if each:
        cells["global_batch"] = str(each * devices)
        cells["micro_batch"] = cells.get("micro_batch") or str(max(1, each * devices // ranks))
        return
    micro = _number(cells.get("micro_batch", "")) or own
    steps = _number(cells.get("accumulation", ""))
    if micro and (steps or cut[1] == 1):
        cells["global_batch"] = str(micro * ranks * (steps or 1))
        cells["micro_batch"] = cells.get("micro_batch") or str(micro)
        if not steps:
            _assume(cells, "global_batch one micro-batch for each data-parallel rank")


def _number(text: str) -> int | None:
    """Return a whole number, or None where there is none; the column itself is told where it can't be read."""
    try:
        return parse_length(text) or parse_whole(text)
    except ValueError:
        return None
