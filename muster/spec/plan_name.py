"""A plan's short name: `dp2x8-tp4-pp4v2-mb1-szbv-relem-bf16` ↔ Plan."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from muster.spec.context_kinds import CONTEXT_KINDS
from muster.spec.errors import ConfigError
from muster.spec.expert_kinds import DISPATCHERS
from muster.spec.former_names import current_plan_part, report_renames
from muster.spec.layer_strategy import LayerStrategy, Recompute
from muster.spec.mesh_axes import DEGREE_FIELDS
from muster.spec.plan import Plan, Precision, StageSpec
from muster.spec.schedules import DEFAULT_SCHEDULE, MAX_FLUSH_EVERY, SCHEDULES
from muster.spec.suggest import did_you_mean

_RECOMPUTE: dict[str, Recompute] = {
    "elem": "elementwise",
    "core": "core_attention",
    "mm2": "every_second_matmul",
    "full": "full",
}
_EP_WORDS = {name: kind.word for name, kind in DISPATCHERS.items()}
TP_OVERLAPS = {"asynctp": "async_tp", "domino": "domino", "tppairs": "pairs"}
"""Words of overlapped tensor-parallel collectives."""
_CP_WORDS = {name: kind.word for name, kind in CONTEXT_KINDS.items()}
_DEFAULTS = Plan()
_STRATEGY_FIELDS = (
    *("zero", "sp", "tp_overlap", "recompute", "offload", "offload_optimizer", "offload_optimizer_ratio"),
    *("device_update_ratio", "offload_param", "offload_param_ratio"),
)

_NAMED_AXES = tuple(axis for axis in DEGREE_FIELDS if not axis.startswith("dp_"))
_PLAIN_AXES = tuple(axis for axis in _NAMED_AXES if axis not in ("pp", "tp", "cp", "ep"))
"""Axes that a name gives as the axis and its degree alone, such as `etp2`."""


@dataclass(frozen=True, slots=True)
class _NamePart:
    """One part of a name: its form as shown to people, its pattern, and the plan fields that it sets."""

    shown: str
    pattern: str
    fields: Callable[..., dict[str, Any]]


def _degree(field: str, word: str) -> _NamePart:
    return _NamePart(f"{word}N", rf"{word}(\d{{1,9}})", lambda n: {field: int(n)})


def _data_parallel(first: str, second: str | None) -> dict[str, Any]:
    if second is None:
        return {"dp_shard": int(first)}
    return {"dp_replicate": int(first), "dp_shard": int(second)}


def _context_parallel(degree: str, word: str, ulysses: str | None, window: str | None) -> dict[str, Any]:
    """Return the fields of `cp8`, `cp8a`, `cp8u2`, `cp8u2w2`.

    Groups of all ranks are Ulysses alone, of one rank a ring alone; inner rings of one rank or of all a single ring.
    """
    cp, groups = int(degree), int(ulysses or degree)
    fields: dict[str, Any] = {"cp": cp}
    if groups == cp:
        if word:
            fields["cp_comm_type"] = next(kind for kind, own in _CP_WORDS.items() if own == word)
    elif groups != 1:
        fields |= {"cp_comm_type": "a2a+p2p", "cp_ulysses_degree": groups}
    if window is not None and int(window) not in (1, cp // (int(ulysses or 1) or 1)):
        fields["cp_window_size"] = int(window)
    return fields


def _expert_parallel(degree: str, word: str, inner: str | None, redundant: str | None) -> dict[str, Any]:
    """Return the fields of `ep8`, `ep8g`, `ep8h`, `ep8h4`, `ep8x2`."""
    fields: dict[str, Any] = {"ep": int(degree)}
    if word:
        fields["ep_dispatcher"] = next(kind for kind, own in _EP_WORDS.items() if own == word)
    if inner is not None:
        fields["ep_inner_size"] = int(inner)
    if redundant is not None:
        fields["ep_redundant_experts"] = int(redundant)
    return fields


USUAL_LSH_RATE = 0.2
"""Share of centroids of `eplsh`, that of LSH-MoE."""
_RATIO = r"\d{0,3}\.\d{1,6}|\d{1,3}"


_STATE_OFFLOADS = {"opt": "offload_optimizer", "param": "offload_param"}
"""Words of states that leave the device for the whole step → field of the strategy."""


def _state_offload(state: str, ratio: str | None, tier: str) -> dict[str, Any]:
    """Return the fields of `oopt`, `oopt0.5`, `ooptd`, `oparam0.5d`. Raises ConfigError for no share of the layers."""
    if ratio is not None and not 0 < float(ratio) <= 1:
        raise ConfigError(
            f"o{state}{ratio} is no share of the layers: expected one above 0, at most 1, such as o{state}0.5"
        )
    field = _STATE_OFFLOADS[state]
    return {field: "disk" if tier == "d" else "host"} | ({} if ratio is None else {f"{field}_ratio": float(ratio)})


def _state_offload_words(strategy: LayerStrategy) -> dict[str, bool]:
    """Return the words of states that a strategy takes off the device, each with True."""
    found = {}
    for word, field in _STATE_OFFLOADS.items():
        tier, ratio = getattr(strategy, field), getattr(strategy, f"{field}_ratio")
        found[f"o{word}{'' if ratio == 1 else f'{ratio:g}'}{'d' if tier == 'disk' else ''}"] = tier != "none"
    return found


def _device_updates(ratio: str) -> dict[str, float]:
    """Return the field of `devupdate0.5`. Raises ConfigError for no share of the layers."""
    if not 0 < float(ratio) <= 1:
        raise ConfigError(
            f"devupdate{ratio} is no share of the layers: expected one above 0, at most 1, such as devupdate0.5"
        )
    return {"device_update_ratio": float(ratio)}


def _centroids(rate: str | None) -> dict[str, Any]:
    """Return the fields of `eplsh`, `eplsh0.5`. Raises ConfigError for no share of the hidden states."""
    if rate is not None and not 0 < float(rate) <= 1:
        raise ConfigError(
            f"eplsh{rate} is no share of the hidden states: expected one above 0, at most 1, as in eplsh0.5"
        )
    return {"ep_lsh_rate": float(rate or USUAL_LSH_RATE)}


_LAYER_RUN = r"\d{1,9}(?:x[1-9]\d{0,3})?"
"""Layers of a stage, or of several stages in a row: `3`, or `3x4` for four stages of 3 layers."""
_SHARES = ("skip_ratio", "min_visits", "swaps_stages")
"""Fields that may be 0 in a name."""
_MAX_STAGES = 10_000


def _stage_layers(text: str) -> list[int]:
    """Return the layers of each stage. Raises ConfigError for more stages than any model has layers."""
    runs = [run.partition("x") for run in text.split(".")]
    if sum(int(count or 1) for _, _, count in runs) > _MAX_STAGES:
        raise ConfigError(f"plan name part 'l{text}' gives layers for more than {_MAX_STAGES:,} stages")
    return [int(layers) for layers, _, count in runs for _ in range(int(count or 1))]


def _schedule_names() -> dict[str, str]:
    """Return schedules by their spelling in plan names, without hyphens; plugins may add some."""
    return {name.replace("-", ""): name for name in SCHEDULES}


def _skipped(ratio: str, visits: str | None, swaps: str) -> dict[str, Any]:
    """Return the fields of `skip0.25`, `skip0.25m0.5`, `skip0.25w`. Raises ConfigError for no share."""
    for share, of in ((ratio, "stages, from 0 to below 1"), (visits or "0", "micro-batches, from 0 to 1")):
        if not (0 <= float(share) <= 1) or (share is ratio and float(share) == 1):
            raise ConfigError(f"skip{ratio}{'' if visits is None else f'm{visits}'}: {share} is no share of the {of}")
    fields: dict[str, Any] = {"schedule": "skippipe", "skip_ratio": float(ratio)}
    return (
        fields | ({} if visits is None else {"min_visits": float(visits)}) | ({"swaps_stages": True} if swaps else {})
    )


_SCHEDULE_PART = _NamePart("sNAME", "s([a-z0-9_]+)", lambda word: {"schedule": _schedule_names()[word]})
_NAME_PARTS = (
    _degree("islands", "isl"),
    _NamePart("dpN or dpRxS", r"dp(\d{1,9})(?:x(\d{1,9}))?", _data_parallel),
    _degree("tp", "tp"),
    _NamePart("sp", "sp", lambda: {"sp": True}),
    *(_NamePart(word, f"({word})", lambda word: {"tp_overlap": TP_OVERLAPS[word]}) for word in TP_OVERLAPS),
    _NamePart("ppN or ppNvK", r"pp(\d{1,9})(?:v(\d{1,9}))?", lambda pp, vpp: {"pp": int(pp), "vpp": int(vpp or 1)}),
    _NamePart(
        ", ".join([*dict.fromkeys("cpN" + word for word in _CP_WORDS.values()), "cpNuK", "cpNwW"]),
        rf"cp(\d{{1,9}})([{''.join(sorted(set(_CP_WORDS.values())))}]?)((?<=u)\d{{1,9}})?(?:w(\d{{1,9}}))?",
        _context_parallel,
    ),
    _NamePart("cpdyn", "cpdyn", lambda: {"dynamic_context_parallel": True}),
    _NamePart(
        ", ".join([*("epN" + word for word in _EP_WORDS.values()), "epNhL", "epNxM"]),
        rf"ep(\d{{1,9}})([{''.join(_EP_WORDS.values())}]?)((?<=h)\d{{1,9}})?(?:x(\d{{1,9}}))?",
        _expert_parallel,
    ),
    _degree("ep_chunks", "epover"),
    _NamePart("epfp8, epint8", "ep(fp8|int8)", lambda dtype: {"ep_dispatch_dtype": dtype}),
    _NamePart("eplsh, eplshR", rf"eplsh({_RATIO})?", _centroids),
    *(_degree(axis, axis) for axis in _PLAIN_AXES),
    _degree("micro_batch_size", "mb"),
    _degree("sequence_tiles", "tile"),
    _degree("sequence_slices", "slice"),
    _NamePart(
        "unevenA.B",
        r"uneven(\d{1,9}(?:\.\d{1,9})*)",
        lambda text: {"uneven_micro_batches": tuple(map(int, text.split(".")))},
    ),
    _NamePart("z1, z2, z3", "(z[123])", lambda zero: {"zero": zero}),
    _NamePart(
        "zpNgM",
        r"zp(\d{1,9})g(\d{1,9})",
        lambda params, grads: {"param_shard_size": int(params), "grad_shard_size": int(grads)},
    ),
    _degree("max_active_stages", "active"),
    _NamePart("stepgather", "stepgather", lambda: {"overlap_param_gather_with_optimizer_step": True}),
    _degree("bucket_layers", "bucket"),
    _NamePart("gbf16", "g(bf16)", lambda dtype: {"grad_reduce_dtype": dtype}),
    _NamePart("qwint8", "qw(int8)", lambda dtype: {"quantized_weights": dtype}),
    _NamePart("qgint8, qgint4", "qg(int8|int4)", lambda dtype: {"quantized_gradients": dtype}),
    _SCHEDULE_PART,
    _NamePart(
        "inflightN", r"inflight(\d{1,9}(?:\.\d{1,3})?)", lambda text: {"max_in_flight_micro_batches": float(text)}
    ),
    _NamePart("skipR, skipRmV, skipRw", rf"skip({_RATIO})(?:m({_RATIO}))?(w?)", _skipped),
    _degree("flush_every", "flush"),
    _NamePart("pv", "pv", lambda: {"post_validation": True}),
    _NamePart("vocab", "vocab", lambda: {"vocab_parallel": True}),
    _NamePart(
        ", ".join("r" + word for word in _RECOMPUTE),
        f"r({'|'.join(_RECOMPUTE)})",
        lambda word: {"recompute": _RECOMPUTE[word]},
    ),
    _NamePart(
        "oact",
        "oacth?",
        lambda: {"offload": "activations"},
    ),
    _NamePart("oactd", "oactd", lambda: {"offload": "activations_on_disk"}),
    *(
        _NamePart(shown.format(state), rf"o({state})({_RATIO})?({tier})", _state_offload)
        for state in _STATE_OFFLOADS
        for shown, tier in (("o{0}, o{0}R", "h?"), ("o{0}d, o{0}Rd", "d"))
    ),
    _NamePart("devupdateR", rf"devupdate({_RATIO})", _device_updates),
    _NamePart(", ".join(get_args(Precision)), f"({'|'.join(get_args(Precision))})", lambda word: {"precision": word}),
    _NamePart(
        "lA.B.C or lAxN.B (layers per stage)",
        rf"l({_LAYER_RUN}(?:\.{_LAYER_RUN})*)",
        lambda text: {"layers": _stage_layers(text)},
    ),
)


def format_plan_name(plan: Plan) -> str:
    """Return the plan's short name; micro-batch size and precision are always in it.

    The name of a plan that it can't express in full ends in `+` and the plan's hash.
    """
    name = "-".join(_format_parts(plan))
    try:
        sayable = parse_plan_name(name) == plan
    except ConfigError:  # a number with more digits than a name takes
        sayable = False
    return name if sayable else f"{name}+{plan.hash}"


def settings_beyond_name(plan: Plan) -> list[str]:
    """Return the settings of a plan that its short name can't express, a few words each; empty where it expresses
    all."""
    default = plan.default_strategy
    settings = []
    if plan.axis_order != _DEFAULTS.axis_order:
        used = [axis for axis in plan.axis_order if getattr(plan, axis) > 1]
        settings.append(f"axes, outermost first: {', '.join(used)}")
    layers: dict[str, list[str]] = {}
    for run in plan.overrides:
        end = run.start + run.count - 1
        layers.setdefault(_differing_fields(run.strategy, default), []).append(
            str(end) if run.count == 1 else f"{run.start}–{end}"
        )
    for words, runs in layers.items():
        settings.append(f"{words} in layer{'' if len(runs) == 1 and runs[0].isdecimal() else 's'} {', '.join(runs)}")
    if words := _differing_fields(default, LayerStrategy(), ("attention",)):
        settings.append(words)
    known = {name: getattr(plan, name) for name in ("fp8_recipe", "compile", "cuda_graphs", "prefetch_buckets")}
    settings += [
        name if value is True else f"{name} {value}"
        for name, value in known.items()
        if value != getattr(_DEFAULTS, name)
    ]
    if any(stage.ranks or stage.mesh for stage in plan.stages):
        settings.append("stages with individual ranks or degrees")
    if plan.expert_placement:
        settings.append("placed experts")
    return [*settings, *(["a pinned schedule"] if plan.pinned_schedule else [])]


def _differing_fields(
    one: LayerStrategy, other: LayerStrategy, names: Iterable[str] = tuple(LayerStrategy.model_fields)
) -> str:
    values = {name: getattr(one, name) for name in names if getattr(one, name) != getattr(other, name)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _format_parts(plan: Plan) -> list[str]:
    strategy = plan.default_strategy
    data = f"dp{plan.dp_replicate}x{plan.dp_shard}" if plan.dp_replicate > 1 else f"dp{plan.dp_shard}"
    mesh = {
        f"isl{plan.islands}": plan.islands > 1,
        data: plan.dp_replicate * plan.dp_shard > 1,
        f"tp{plan.tp}" + ("-sp" if strategy.sp else ""): plan.tp > 1 or strategy.sp,
        **{word: strategy.tp_overlap == kind for word, kind in TP_OVERLAPS.items()},
        f"pp{plan.pp}" + (f"v{plan.vpp}" if plan.vpp > 1 else ""): plan.num_stages > 1,
        f"cp{plan.cp}" + _cp_word(plan): plan.cp > 1 or plan.cp_comm_type != "p2p" or plan.cp_window_size > 1,
        "cpdyn": plan.dynamic_context_parallel,
        f"ep{plan.ep}{_ep_word(plan)}": plan.ep > 1 or bool(_ep_word(plan)),
        f"epover{plan.ep_chunks}": plan.ep_chunks > 1,
        f"ep{plan.ep_dispatch_dtype}": plan.ep_dispatch_dtype != "none",
        "eplsh" + ("" if plan.ep_lsh_rate == USUAL_LSH_RATE else f"{plan.ep_lsh_rate:g}"): plan.ep_lsh_rate > 0,
        **{f"{axis}{getattr(plan, axis)}": getattr(plan, axis) > 1 for axis in _PLAIN_AXES},
    }
    rest = {
        f"mb{plan.micro_batch_size}": True,
        f"tile{plan.sequence_tiles}": plan.sequence_tiles > 1,
        f"slice{plan.sequence_slices}": plan.sequence_slices > 1,
        "uneven" + ".".join(map(str, plan.uneven_micro_batches)): bool(plan.uneven_micro_batches),
        strategy.zero: strategy.zero != "z3",
        f"zp{plan.param_shard_size}g{plan.grad_shard_size}": plan.has_shard_levels,
        f"active{plan.max_active_stages}": plan.max_active_stages is not None,
        "stepgather": plan.overlap_param_gather_with_optimizer_step,
        f"bucket{plan.bucket_layers}": plan.bucket_layers > 1,
        f"g{plan.grad_reduce_dtype}": plan.grad_reduce_dtype != "fp32",
        f"qw{plan.quantized_weights}": plan.quantized_weights != "none",
        f"qg{plan.quantized_gradients}": plan.quantized_gradients != "none",
        _skip_word(plan): plan.schedule_entry.skips_stages,
        "s" + plan.schedule.replace("-", ""): plan.schedule != DEFAULT_SCHEDULE
        and not plan.schedule_entry.skips_stages,
        f"inflight{plan.max_in_flight_micro_batches or 0:g}": plan.max_in_flight_micro_batches is not None,
        f"flush{plan.flush_every}": plan.flush_every != _DEFAULTS.flush_every,
        "pv": plan.post_validation,
        "vocab": plan.vocab_parallel,
        **{"r" + word: strategy.recompute == how for word, how in _RECOMPUTE.items()},
        "oact": strategy.offload == "activations",
        "oactd": strategy.offload == "activations_on_disk",
        **_state_offload_words(strategy),
        f"devupdate{strategy.device_update_ratio:g}": strategy.device_update_ratio > 0,
        plan.precision: True,
        "l" + ".".join(str(stage.layers) for stage in plan.stages): bool(plan.stages),
    }
    degrees = [word for word, shown in mesh.items() if shown]
    return (degrees or ["dp1"]) + [word for word, shown in rest.items() if shown]


def _ep_word(plan: Plan) -> str:
    copies = f"x{plan.ep_redundant_experts}" if plan.ep_redundant_experts else ""
    return f"{_EP_WORDS[plan.ep_dispatcher]}{plan.ep_inner_size or ''}{copies}"


def _skip_word(plan: Plan) -> str:
    visits = "" if plan.min_visits == _DEFAULTS.min_visits else f"m{plan.min_visits:g}"
    return f"skip{plan.skip_ratio:g}{visits}{'w' * plan.swaps_stages}"


def _cp_word(plan: Plan) -> str:
    groups = str(plan.cp_ulysses_degree) if plan.cp_comm_type == "a2a+p2p" else ""
    return _CP_WORDS[plan.cp_comm_type] + groups + (f"w{plan.cp_window_size}" if plan.cp_window_size > 1 else "")


def parse_plan_name(text: str, base: Plan = _DEFAULTS) -> Plan:
    """Return the plan that a short name describes.

    A micro-batch size or precision that the name leaves out is that of `base`; everything else left out is the default.
    Raises ConfigError for an invalid name, with the closest part that exists.
    """
    if "+" in text:
        raise ConfigError(
            f"plan name '{text}' ends in '+' and a hash because no name expresses all of that plan; give its plan.yaml"
        )
    fields = _parse_parts(text)
    strategy = LayerStrategy(**{key: fields.pop(key) for key in _STRATEGY_FIELDS if key in fields})
    stages = tuple(StageSpec(layers=count) for count in fields.pop("layers", ()))
    kept = {"micro_batch_size": base.micro_batch_size, "precision": base.precision}
    return Plan(**{**kept, **fields}, default_strategy=strategy, stages=stages)


def parse_name_parts(text: str) -> dict[str, Any]:
    """Return the fields of a plan, or of its default strategy, that parts of a name such as `tp8-z1` set. Raises
    ConfigError."""
    fields = _parse_parts(text)
    if "layers" in fields:
        fields["stages"] = tuple(StageSpec(layers=count) for count in fields.pop("layers"))
    if fields.get("vpp") == 1:
        del fields["vpp"]  # `pp4` says nothing about chunks; `pp4v2` does
    return fields


def _parse_parts(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    setters: dict[str, str] = {}
    for token in text.strip().split("-"):
        if (current := current_plan_part(token)) != token:
            report_renames("plan names", [(token, current)])
        given = _parse_part(current, text)
        if earlier := next((setters[key] for key in given if key in setters), None):
            raise ConfigError(f"plan name '{text}': '{token}' sets again what '{earlier}' sets; leave one of them out")
        fields |= given
        setters |= dict.fromkeys(given, token)
    return fields


def _parse_part(token: str, text: str) -> dict[str, Any]:
    for word in _NAME_PARTS:
        if word is _SCHEDULE_PART and token[1:] not in _schedule_names():
            continue
        if match := re.fullmatch(word.pattern, token, re.ASCII):
            given = word.fields(*match.groups())
            if 0 in (value for key, value in given.items() if key not in _SHARES) or 0 in given.get(
                "uneven_micro_batches", ()
            ):
                raise ConfigError(f"plan name '{text}': '{token}' is 0, but degrees and sizes start at 1")
            if given.get("flush_every", 1) > MAX_FLUSH_EVERY:
                raise ConfigError(
                    f"plan name '{text}': '{token}' flushes too rarely: expected at most flush{MAX_FLUSH_EVERY}"
                )
            return given
    if re.search(r"\d{10}", token, re.ASCII):
        raise ConfigError(f"plan name '{text}': '{token}' has a number of more than 9 digits")
    shorter = re.sub(r"(\.\d{6})\d+", r"\1", token)
    if shorter != token and any(re.fullmatch(word.pattern, shorter, re.ASCII) for word in _NAME_PARTS):
        raise ConfigError(f"plan name '{text}': '{token}' has a number of more than 6 decimals")
    shown = {_SCHEDULE_PART.shown: ", ".join("s" + word for word in _schedule_names())}
    known = ", ".join(shown.get(word.shown, word.shown) for word in _NAME_PARTS)
    if re.fullmatch(r"oactd?[\d.]+[hd]?", token):
        raise ConfigError(
            f"plan name '{text}': '{token}' names a share, which oact doesn't take: say oact or oactd, or give"
            " the layers in a plan file (overrides)"
        )
    if suggestion := _suggestion(token):
        raise ConfigError(f"plan name '{text}': unknown part '{token}'{suggestion}")
    raise ConfigError(f"plan name '{text}': unknown part '{token}' (the parts are {known})")


def name_parts() -> list[str]:
    """Return the parts of a plan's short name as people are shown them, such as `tpN`."""
    return [part.shown for part in _NAME_PARTS]


def _suggestion(token: str) -> str:
    others = (word for word in _NAME_PARTS if word is not _SCHEDULE_PART)
    is_schedule = token[:1] in "sS" and token[1:].lower() in _schedule_names()
    if is_schedule or any(re.fullmatch(word.pattern, token.lower(), re.ASCII) for word in others):
        return f"; did you mean '{token.lower()}'?"
    begin = re.match(r"[a-z]*", re.sub("[NR]$", "", token).lower())  # `tpN`, as the parts are shown, too
    for word in _NAME_PARTS:
        letters = re.match(r"([a-z]{2,})[A-Z]", word.shown)
        if begin and letters and letters[1] == begin[0]:
            return f"; expected {word.shown}, with a number for each capital"
    number, share = re.search(r"\d+", token), re.search(r"\d*\.?\d+", token)
    words = [word for part in _NAME_PARTS for word in re.split(r", | or ", part.shown)]
    fixed = [word for word in words if re.fullmatch(r"[a-z][a-z0-9]*", word)]
    fixed += ["s" + word for word in _schedule_names()]
    numbered = [
        begin + (given[0] if (given := number if letter == "N" else share) else letter) + end
        for word in words
        for begin, letter, end in re.findall(r"^([a-z]+)([NR])([a-z]?)$", word)
    ]
    if re.fullmatch(r"(z|zero)-?\d+", token.lower(), re.ASCII) and number:
        return f"; did you mean 'z{max(1, min(3, int(number[0])))}'?"
    return did_you_mean(token.lower(), fixed + numbered)
