"""Text output of `muster checkpoint`, from its JSON."""

from collections.abc import Mapping
from typing import Any

from muster.spec.formatting import format_bytes, format_count, format_number

Facts = Mapping[str, Any]
"""JSON of a subcommand."""

KINDS = {
    "muster": "Muster checkpoint",
    "hf": "Hugging Face directory",
    "dcp": "torch.distributed.checkpoint folder",
    "peft": "PEFT directory",
    "megatron": "Megatron-LM checkpoint",
    "unknown": "directory",
}
"""Names of the formats of directories."""
MAX_SHOWN = 10
"""Most tensors listed in a difference."""


def converted_lines(facts: Facts) -> list[str]:
    """Return the lines printed by `convert`."""
    source, target = facts["source"], facts["target"]
    step = "" if source["step"] is None else f" of step {source['step']}"
    lines = [
        f"{target['path']}: a {KINDS[target['format']]} with {facts['tensors']} tensors,"
        f" {format_bytes(facts['bytes'])}, {facts['dtype']}, from {source['path']}{step}"
    ]
    if target["format"] == "hf":
        came = {None: "none: --tokenizer DIR takes them from a directory", "bytes": "bytes, as in the run"}
        lines.append(f"tokenizer: {came.get(facts['tokenizer'], 'from ' + str(facts['tokenizer']))}")
    if facts["note"] is not None:
        lines.append(facts["note"])
    return lines


def described_lines(facts: Facts) -> list[str]:
    """Return the lines printed by `inspect`."""
    lines = [f"{facts['path']}: a {KINDS[facts['format']]}"]
    if facts["step"] is not None:
        lines.append(f"step      {facts['step']}")
    if (model := facts["model"]) is not None:
        lines.append(f"model     {model['name']}, {model['parameters']:,} parameters")
    if facts["plan"]:
        lines.append(f"plan      {facts['plan']}")
    if (wrote := facts["written_by"]) is not None:
        lines.append(f"written   by muster {wrote['muster']}, torch {wrote['torch']}")
    files = facts["files"]
    lines.append(f"files     {len(files)}, {format_bytes(sum(files.values()))}")
    for name, group in facts["groups"].items():
        dtypes = ", ".join(f"{format_count(count)} {dtype}" for dtype, count in group["numbers"].items())
        lines.append(f"{name:<9} {group['tensors']} tensors, {format_bytes(group['bytes'])}: {dtypes}")
    tensors = facts.get("tensors", {})
    width = max(map(len, tensors), default=0)
    for name, kind in tensors.items():
        lines.append(f"  {name:<{width}}  {kind['dtype']:<8}  {_shape(kind)}")
    for name, found in facts.get("statistics", {}).items():
        lines += _statistics_lines(name, found)
    return lines


def _statistics_lines(name: str, found: Facts) -> list[str]:
    numbers = {key: format_number(found[key]) for key in ("smallest", "largest", "mean", "std")}
    return [
        f"{name}: {found['dtype']} {_shape(found)}, {format_bytes(found['bytes'])}",
        f"  from {numbers['smallest']} to {numbers['largest']}, mean {numbers['mean']}, std {numbers['std']},"
        f" zeros: {found['zeros']:,}, not finite: {found['not_finite']:,}",
    ]


def verified_lines(facts: Facts) -> list[str]:
    """Return the lines printed by `verify`."""
    lines = []
    for found in facts["directories"]:
        what = f"{found['pieces']} pieces, all checksums match" if found["checksums"] else "all can be read"
        if found["problems"]:
            lines.append(f"{found['path']}: damaged")
            lines += [f"  {problem}" for problem in found["problems"]]
        else:
            lines.append(f"{found['path']}: {found['tensors']} tensors, {format_bytes(found['bytes'])}, {what}")
    return lines


def diff_lines(facts: Facts) -> list[str]:
    """Return the lines printed by `diff`."""
    lines = [f"{key}: {pair[0]} → {pair[1]}" for key, pair in facts["facts"].items()]
    for side in ("a", "b"):
        for group in facts[side]["not_compared"]:
            lines.append(f"only {facts[side]['path']} has {group}/…, which is not compared")
    for name, (one, other) in facts["shapes"].items():
        lines.append(f"{name}: shape {one} → {other}")
    for key, side in (("only_a", "a"), ("only_b", "b")):
        if names := facts[key]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"only {facts[side]['path']} has {names[0]}{more}")
    different = facts["different"]
    for found in different[:MAX_SHOWN]:
        one, other = found["dtypes"]
        dtypes = "" if one == other else f" ({one} → {other})"
        lines.append(
            f"{found['name']}: relative difference {format_number(found['relative'])},"
            f" at most {format_number(found['max_abs'])}{dtypes}"
        )
    if len(different) > MAX_SHOWN:
        lines.append(f"… and {len(different) - MAX_SHOWN} more")
    same = facts["compared"] - len(different)
    lines.append(f"{same} of {facts['compared']} compared tensors are equal, element by element")
    return lines


def pruned_lines(facts: Facts) -> list[str]:
    """Return the lines printed by `prune`."""
    verb = "would be removed" if facts["dry_run"] else "removed"
    lines = [f"{path}: {verb}" for path in facts["removed"]]
    lines += [f"{path}: could not be removed" for path in facts["failed"]]
    lines += [f"{path}: kept" for path in facts["kept"]]
    freed = format_bytes(facts["bytes"]) if facts["removed"] else "nothing"
    return [*lines, f"{freed} {verb}"]


def _shape(kind: Facts) -> str:
    return " × ".join(map(str, kind["shape"])) or "a number"
