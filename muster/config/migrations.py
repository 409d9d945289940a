"""The one migration table: former names of keys, values, plan-name parts, flags and instructions, and today's.

Files of an earlier schema, and former flags, are still read; each former name is reported once on stderr. Writers use
today's names only, with the schema version of `SCHEMAS`. A rename needs one line here:

* `KEYS`: per file format, former dotted key → today's, with the schema version since which it has that name.
  A key may name a whole section. `*` stands for any item of a list or any key of a mapping.
* `VALUES`: the same for single values of a key, such as `recompute: selective`.
* `DEFAULTS`: what a left-out key meant in files that name an earlier schema.
* `PLAN_PARTS`: parts of a plan's short name (kept in `muster.spec.former_names`, for the parser).
* `FLAGS`: per verb, former command-line flag → today's; `*` holds for all verbs.
* `ARGUMENTS`: per function of `import muster`, former argument → today's.
* `INSTRUCTIONS`: former instruction kinds of program texts and timelines.

A plan inside another file ("run": below `parallel`) takes part with the rows of "plan".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from muster.spec.errors import ConfigError
from muster.spec.former_names import PLAN_PARTS, report_renames

__all__ = [
    "ARGUMENTS",
    "DEFAULTS",
    "FLAGS",
    "INSTRUCTIONS",
    "KEYS",
    "LANES",
    "PLAN_PARTS",
    "SCHEMAS",
    "VALUES",
    "FormerDefault",
    "FormerKey",
    "FormerValue",
    "migrate",
    "migrate_values",
    "report_renames",
]

Format = Literal["run", "plan", "cluster", "manifest", "profile", "store", "timeline"]

SCHEMAS: dict[Format, int] = {"run": 3, "plan": 2, "profile": 2}
"""Schema version that is written today. Formats without one, and those whose own
reader checks it, are left out."""


@dataclass(frozen=True, slots=True)
class FormerKey:
    """A renamed key."""

    old: str
    new: str
    since: int = 2
    """First schema version with the new name."""


@dataclass(frozen=True, slots=True)
class FormerValue:
    """A renamed value of a key."""

    key: str
    """Today's key."""
    old: str
    new: str
    since: int = 2
    """First schema version with the new name."""
    ambiguous: str = ""
    """Reason why the old value is refused in files of today's schema; empty: it is read there, too."""


@dataclass(frozen=True, slots=True)
class FormerDefault:
    """Meaning of a left-out key in files that name an earlier schema; those that name none have today's."""

    key: str
    value: Any
    since: int
    """First schema version with another default."""


_SELECTIVE = (
    "'selective' names different things in different programs: say elementwise (norms and activations, which Muster"
    " called selective), core_attention (Megatron-LM's selective) or every_second_matmul (torchtitan's selective, 'op')"
)

_PLAN_KEYS = (
    FormerKey("spread_vocab", "vocab_parallel"),
    FormerKey("data_shares", "uneven_micro_batches"),
    FormerKey("activation_limit", "max_in_flight_micro_batches"),
    FormerKey("order", "pinned_schedule"),
)
_PLAN_VALUES = tuple(
    row
    for strategy in ("default_strategy", "overrides.*.strategy")
    for row in (
        FormerValue(f"{strategy}.tp_overlap", "chunked", "async_tp"),
        FormerValue(f"{strategy}.recompute", "selective", "elementwise", ambiguous=_SELECTIVE),
        FormerValue(f"{strategy}.recompute", "attention", "core_attention"),
        FormerValue(f"{strategy}.recompute", "alternate", "every_second_matmul"),
    )
)

KEYS: dict[Format, tuple[FormerKey, ...]] = {
    "plan": _PLAN_KEYS,
    "run": (
        *(FormerKey(f"parallel.{row.old}", f"parallel.{row.new}", row.since) for row in _PLAN_KEYS),
        FormerKey("data.held_out", "data.validation_split"),
        FormerKey("data.bad_rows", "data.on_invalid_row"),
        FormerKey("data.end_token", "data.eos_token"),
        FormerKey("data.mix", "data.blend"),
        FormerKey("data.changes", "data.weight_schedule"),
        FormerKey("train.mirror", "train.remote_checkpoint_dir"),
        FormerKey("train.copies_every", "train.in_memory_checkpoint_every"),
        FormerKey("train.copies_dir", "train.in_memory_checkpoint_dir"),
        FormerKey("train.hang_s", "train.hang_timeout_s"),
        FormerKey("train.max_skipped", "train.max_consecutive_skips"),
        FormerKey("train.eval_every", "eval.every", 1),
        FormerKey("train.eval_batches", "eval.batches", 1),
        FormerKey("track", "tracking"),
    ),
    "profile": (  # a device's `rates` in a cluster file
        FormerKey("company", "contention"),
        FormerKey("kernels.*.products", "kernels.*.matmuls"),
        FormerKey("kernels.*.curves.words forward", "kernels.*.curves.embedding forward"),
        FormerKey("kernels.*.curves.words backward", "kernels.*.curves.embedding backward"),
        *(
            FormerKey(f"overheads.{tensor}{level} {old} {part}", f"overheads.{tensor}{level} {new} {part}")
            for tensor in ("", "tensor ")
            for level in ("whole", "z1", "z2", "z3")
            for old, new in (("REDUCE", "REDUCE_GRAD"), ("NORM", "GRAD_NORM"))
            for part in ("base", "layer")
        ),
    ),
}

VALUES: dict[Format, tuple[FormerValue, ...]] = {
    "plan": _PLAN_VALUES,
    "run": (
        *(FormerValue(f"parallel.{r.key}", r.old, r.new, r.since, r.ambiguous) for r in _PLAN_VALUES),
        FormerValue("data.packing", "documents", "document_mask"),
        FormerValue("data.packing", "whole", "next_fit"),
    ),
}

DEFAULTS: dict[Format, tuple[FormerDefault, ...]] = {
    "run": (FormerDefault("data.add_bos", False, 3),)  # whatever the tokenizer does of itself
}

FLAGS: dict[str, dict[str, str]] = {
    "*": {"--join-limit": "--rendezvous-timeout"},
    "plan": {"--limit": "--time-limit", "--memory": "--memory-limit", "--fix": "--require", "--runnable": ""},
    "doctor": {"--limit": "--time-limit"},
    "schedule": {"--comm": "--p2p-time", "--chunks": "--vpp", "--vocab": "--vocab-parallel"},
    "memory-check": {"--real": "--on-device"},
    "data prepare": {"--end-token": "--eos-token", "--bad-rows": "--on-invalid-row"},
    "data inspect": {"--end-token": "--eos-token"},
    "data check": {"--end-token": "--eos-token"},
}
"""Verb (`*`: all) → former flag → today's, each with its dashes; empty for a switch that is the default today."""

ARGUMENTS: dict[str, dict[str, str]] = {
    "plan": {"fix": "require", "memory": "memory_limit", "limit_s": "time_limit", "runnable": ""},
}
"""Function of `import muster` → former argument → today's; none where True is what holds without it."""

INSTRUCTIONS: dict[str, str] = {
    "SF": "SEND_F",
    "RF": "RECV_F",
    "SB": "SEND_B",
    "RB": "RECV_B",
    "E": "EMB_F",
    "EC": "EMB_REDUCE",
    "HC": "HIDDEN_BCAST",
    "SC": "LOGIT_STATS",
    "DC": "EMB_GRAD_BCAST",
    "EW": "EMB_W",
    "REDUCE": "REDUCE_GRAD",
    "SYNC": "ALL_REDUCE_TP",
    "MERGE": "ALL_REDUCE_REPLICAS",
    "TIE": "ALL_REDUCE_TIED",
    "NORM": "GRAD_NORM",
    "VOTE": "GRAD_NORM_ASYNC",
}
"""Former instruction kind → today's, in program texts and timelines of version 1 and in profiles."""

LANES: dict[str, str] = {"copy": "host_copy"}
"""Former lane → today's, in program texts and timelines of version 1."""


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def migrate(file_format: Format, tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a nested tree, read from `source`, in today's names and with today's `version`.

    Raises ConfigError for a later schema, for a key given under both names, and for an ambiguous former value.
    """
    version = _version(file_format, tree.get("version"), source)
    run = _Migration(file_format, version)
    found = run.tree(tree, "", source)
    if "version" in tree and version is not None and file_format in SCHEMAS:
        found["version"] = SCHEMAS[file_format]
        for row in _former_defaults(file_format, version):
            section, _, key = row.key.partition(".")
            if isinstance(inner := found.get(section), dict):
                inner.setdefault(key, row.value)
    run.report(source)
    return found


def migrate_values(
    file_format: Format, values: Mapping[str, Any], origin: Callable[[str], str], *, versioned: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by today's dotted key, and for each renamed key its former name.

    `values` is by dotted key, as a run file's layer has it; `origin` tells where a key stands. Without `versioned`
    (a command line) today's schema is assumed, so that ambiguous values are refused. Raises ConfigError as `migrate`.
    """
    current = SCHEMAS.get(file_format)
    run = _Migration(
        file_format, _version(file_format, values.get("version"), origin("version")) if versioned else current
    )
    found: dict[str, Any] = {}
    former: dict[str, str] = {}
    for key, value in values.items():
        new = run.key(key, origin(key))
        if new in found:
            raise ConfigError(f"{origin(key)}: {new} is given twice, also as {former.get(new, key)}, its former name")
        if new != key:
            former[new] = key
        found[new] = run.value(value, new, origin(key))
    if versioned and "version" in found and current is not None and run.version is not None:
        found["version"] = current
        for row in _former_defaults(file_format, run.version):
            found.setdefault(row.key, row.value)
    if versioned and "parallel.version" in found:
        found["parallel.version"] = SCHEMAS["plan"]
    run.report(origin(""))
    return found, former


def _former_defaults(file_format: Format, version: int) -> list[FormerDefault]:
    return [row for row in DEFAULTS.get(file_format, ()) if version < row.since]


MAX_REPORTED_RENAMES = 4
"""Renames of one file that are reported one by one; a file that Muster itself wrote has more, and gets one line."""


class _Migration:
    """One file on its way to today's schema; collects the renames to report."""

    def __init__(self, file_format: Format, version: int | None) -> None:
        self.keys = KEYS.get(file_format, ())
        self.values = VALUES.get(file_format, ())
        self.version = version
        self.renames: list[tuple[str, str, str]] = []
        """(place, former name, today's)."""

    def key(self, path: str, place: str) -> str:
        """Return today's name of a dotted key: of the key itself, or of a section around it."""
        parts = path.split(".")
        for row in self.keys:
            length = row.old.count(".") + 1
            if len(parts) >= length and _matches(row.old, ".".join(parts[:length])):
                new = ".".join([_filled(row, parts), *parts[length:]])
                self.renames.append((place, path, new))
                return new
        return path

    def value(self, value: Any, path: str, place: str) -> Any:
        """Return today's form of the value of a key, which may be a tree or a list."""
        if isinstance(value, Mapping):
            return self.tree(value, f"{path}.", place)
        if isinstance(value, list | tuple):
            return [self.value(item, f"{path}.*", place) for item in value]
        for row in self.values:
            if value == row.old and _matches(row.key, path):
                if row.ambiguous and self.version is not None and self.version >= row.since:
                    raise ConfigError(f"{place}: {path}: {row.ambiguous}")
                self.renames.append((place, f"{path} {row.old}", row.new))
                return row.new
        return value

    def tree(self, tree: Mapping[Any, Any], prefix: str, place: str) -> dict[str, Any]:
        """Return today's form of a tree whose keys lie below `prefix`; keys stay within their section."""
        found: dict[str, Any] = {}
        for key, value in tree.items():
            path = f"{prefix}{key}"
            new = self.key(path, place)
            name = key if new == path else new.removeprefix(prefix)
            if name in found:
                raise ConfigError(f"{place}: {new} is given twice, also as {path}, its former name")
            found[name] = self.value(value, new, place)
        return found

    def report(self, source: str) -> None:
        """Print the renames of a file in one line, or their number where they are many."""
        if len(self.renames) > MAX_REPORTED_RENAMES:
            _, old, new = self.renames[0]
            report_renames(source, [(f"{len(self.renames)} keys and values have new names; for example, {old}", new)])
        else:
            for place in dict.fromkeys(place for place, _, _ in self.renames):
                report_renames(place, [(old, new) for at, old, new in self.renames if at == place])


def _version(file_format: Format, given: Any, source: str) -> int | None:
    """Return the schema version of a file: the first where it names none.

    Raises ConfigError for a later version, and for a value that is no version.
    """
    known = SCHEMAS.get(file_format)
    if given is None or known is None:
        return 1 if given is None else None
    if isinstance(given, bool) or not str(given).isdecimal() or int(given) < 1:
        choices = " or ".join(str(version) for version in range(1, known + 1))
        raise ConfigError(f"{source}: version: expected {choices}, got {given!r}")
    if int(given) > known:
        raise ConfigError(
            f"{source}: version {given} is of a newer Muster; this one reads {file_format} files up to version {known}"
        )
    return int(given)


def _filled(row: FormerKey, parts: list[str]) -> str:
    """Return the new name, each `*` of it as in the path that the old one matched."""
    stars = iter(part for part, pattern in zip(parts, row.old.split("."), strict=False) if pattern == "*")
    return ".".join(next(stars) if part == "*" else part for part in row.new.split("."))


def _matches(pattern: str, path: str) -> bool:
    """Return True if a path has the pattern's keys, `*` being any."""
    wanted = pattern.split(".")
    parts = path.split(".")
    return len(wanted) == len(parts) and all(one in ("*", part) for one, part in zip(wanted, parts, strict=True))
