"""Inputs of a prediction read from a row: model, devices, batch and plan.

Each choice that a row leaves open is a case of its own, the default choice first. The memory decides which case
represents the row (`muster.validate.comparison`): a run recomputes only as much as it must.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pydantic import ValidationError

from muster.spec.cluster import ClusterSpec
from muster.spec.device import AttentionKernel, DeviceSpec
from muster.spec.device_precision import has_precision
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import framework_named
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.legality import plan_violations
from muster.spec.mesh_cuts import divisors
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.validate.cluster_from_row import cluster_from_row
from muster.validate.degrees import Degrees, degrees_of_row
from muster.validate.errors import UnpredictableRowError
from muster.validate.model_from_row import models_from_row
from muster.validate.sources import MeasurementSource, software_of_row, source_of_row, with_facts
from muster.validate.table import MeasurementRow
from muster.validate.term_parsing import (
    ScheduleTerms,
    Sharding,
    parse_attention_kernel,
    parse_fp8_recipe,
    parse_precision,
    parse_recompute,
    parse_schedule,
    parse_sharding,
    parse_yes_no,
)

_MIN_FLASH_ONLY_SEQ_LEN = 16_384
"""Sequence length from which attention that writes its scores is no choice: they alone would fill a device."""
_MOST_PASSES = 10**6
"""Most passes (stages × micro-batches, forward and backward) of a simulated case; more would take minutes."""
_USUAL_SHARDING = "ZeRO-1"
"""Sharding where nothing says it: that of Megatron-LM's distributed optimizer."""
_VOCAB_PARALLEL = ("vocab-1", "vocab-2")
"""Vocabulary-parallel methods (arXiv:2411.05288)."""
_SCORE_WRITING_KERNELS: tuple[AttentionKernel, ...] = ("fused", "unfused")
"""Attention kernels that write the scores to memory."""


@dataclass(frozen=True)
class RowCase:
    """One interpretation of a row."""

    model: ModelSpec
    plan: Plan
    software: FrameworkTraits
    chosen: tuple[tuple[str, str], ...] = ()
    """Choices made for the columns that the row leaves open."""


@dataclass(frozen=True)
class RowInputs:
    """Typed inputs of a prediction, from one row."""

    model: ModelSpec
    """Model of the default choice."""
    cluster: ClusterSpec
    workload: Workload
    cases: tuple[RowCase, ...]
    """Cases from the default choice on, with recompute rising from none to full."""
    unstated: tuple[str, ...]
    """Columns that the row leaves open."""
    assumed: tuple[tuple[str, str], ...] = ()
    """Columns that the row leaves out without a choice, and what they are taken to be."""


def row_inputs(row: MeasurementRow) -> RowInputs:
    """Parse a row into inputs of a prediction. Raises UnpredictableRowError with a sentence for the first obstacle."""
    source, row = source_of_row(row), with_facts(row)
    models = models_from_row(row)
    if source.tied is not None:
        models = [model.model_copy(update={"tied_embeddings": source.tied}) for model in models]
    cluster = cluster_from_row(row, source.device.get(row.gpu))
    _require_precision(row, cluster.device)
    layouts = [] if row.plan else degrees_of_row(row, models[0], cluster.device)
    enough = _batch_of_memory(row, layouts)
    row = replace(row, global_batch=row.global_batch or enough)
    if row.global_batch is None or row.seq_len is None:
        raise UnpredictableRowError("global_batch is empty: expected the sequences of a step")
    workload = Workload(seq_len=row.seq_len, global_batch_size=row.global_batch)
    if row.plan:
        case = _named_case(row, models[0], workload)
        return RowInputs(models[0], cluster, workload, (case,), ())
    cases: list[RowCase] = []
    unstated: dict[str, None] = {}
    refused = ""
    for degrees in layouts:
        open_columns = dict(_open_choices(row, source, models[0], degrees))
        if len(models) > 1:
            open_columns["vocab"] = [model.vocab_size for model in models]
        if cases:  # a layout beside the likeliest one: with the default choice of everything else
            open_columns = {column: choices[:1] for column, choices in open_columns.items()}
        if len(layouts) > 1:
            open_columns |= {"tp": (degrees.tp,), "pp": (degrees.pp,)}
        for values in product(*open_columns.values()):
            chosen = dict(zip(open_columns, values, strict=True))
            model = next((model for model in models if model.vocab_size == chosen.get("vocab")), models[0])
            case = _case(row, source, model, degrees, chosen)
            wrong = _mismatch(case.plan, model, workload, row)
            refused = refused or wrong
            if not wrong:
                cases.append(case)
        unstated |= {column: None for column, choices in open_columns.items() if len(choices) > 1}
    if not cases:
        raise UnpredictableRowError(refused)
    if len(layouts) > 1:
        unstated |= {"tp": None, "pp": None}
    assumed = _assumed(row, source, cases[0].plan) | ({"global_batch": str(enough)} if enough else {})
    return RowInputs(models[0], cluster, workload, tuple(cases), tuple(unstated), tuple(assumed.items()))


def _batch_of_memory(row: MeasurementRow, layouts: Sequence[Degrees]) -> int | None:
    """Return the sequences of a step that fills the memory of a row which states that alone: as many micro-batches as
    it says or else as there are stages, more of which no rank holds at once; None for other rows."""
    if row.global_batch is not None or row.metric != "peak_memory_gb" or not layouts:
        return None
    count = parse_schedule(row.schedule).micro_batches or layouts[0].pp
    return count * layouts[0].dp * (row.micro_batch or 1)


def _assumed(row: MeasurementRow, source: MeasurementSource, plan: Plan) -> dict[str, str]:
    """Return what the row leaves out and nearly all runs have alike, so that it counts as no choice."""
    found = {"precision": plan.precision} if parse_precision(row.precision) is None else {}
    if plan.dp_replicate * plan.dp_shard > 1 and parse_sharding(row.zero) is None:
        found["zero"] = source.usual.get("zero", _USUAL_SHARDING)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Choices


def _open_choices(
    row: MeasurementRow, source: MeasurementSource, model: ModelSpec, at: Degrees
) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield for each column that a plan needs its choices, the default first; a single one where the row states it."""
    assert row.global_batch is not None
    pipeline = parse_schedule(row.schedule)
    yield "attn_kernel", _kernels(row)
    stated_sp = parse_yes_no(row.sp, "sp")
    if at.tp == 1:
        yield "sp", (False,)
    elif stated_sp is not None:
        yield "sp", (stated_sp,)
    else:
        usual = parse_yes_no(source.usual.get("sp", "yes"), "sp")
        yield "sp", (usual, not usual)
    chunks = _chunks(row, pipeline, model, at)
    yield "vpp", chunks[::-1] if source.usual.get("vpp") == "max" else chunks
    if row.micro_batch is not None:
        yield "micro_batch", (row.micro_batch,)
    elif pipeline.micro_batches is not None:
        yield "micro_batch", (max(1, row.global_batch // (at.dp * pipeline.micro_batches)),)
    else:
        yield "micro_batch", [size for size in divisors(max(1, row.global_batch // at.dp)) if size in (1, 4)]
    stated_recompute = parse_recompute(row.recompute)
    usual_recompute = ("full", "none") if source.usual.get("recompute") == "full" else ("none", "full")
    yield "recompute", (stated_recompute,) if stated_recompute else usual_recompute


def _kernels(row: MeasurementRow) -> tuple[AttentionKernel | None, ...]:
    """Return the choices of an attention kernel; None is the fastest one of the device."""
    assert row.seq_len is not None
    if (stated := parse_attention_kernel(row.attn_kernel)) is not None:
        return (stated,)
    return (None,) if row.seq_len >= _MIN_FLASH_ONLY_SEQ_LEN else (None, "fused")


def _chunks(row: MeasurementRow, pipeline: ScheduleTerms, model: ModelSpec, at: Degrees) -> Sequence[int]:
    """Return the stated chunks per rank, or else 1 and the maximum; for interleaved schedules the minimum above 1
    and the maximum."""
    if at.pp == 1:
        return (1,)
    if row.vpp is not None:
        return (row.vpp,)
    most = model.num_layers // at.pp
    several = [count for count in divisors(most) if count > 1]
    if pipeline.schedule == "interleaved":
        return sorted({several[0], several[-1]}) if several else (1,)
    if pipeline.vpp is not None:
        return (pipeline.vpp,)
    return (1, several[-1]) if several else (1,)


# ----------------------------------------------------------------------------------------------------------------------
# One case


def _named_case(row: MeasurementRow, model: ModelSpec, workload: Workload) -> RowCase:
    """Return the case of a row that names its plan. Raises UnpredictableRowError."""
    try:
        plan = parse_plan_name(row.plan)
    except ConfigError as error:
        raise UnpredictableRowError(str(error)) from None
    if plan.world_size != row.n_gpus:
        raise UnpredictableRowError(f"plan '{row.plan}' is for {plan.world_size} devices, but n_gpus is {row.n_gpus}")
    if wrong := _mismatch(plan, model, workload, row):
        raise UnpredictableRowError(wrong)
    return RowCase(model, plan, _framework(row, source_of_row(row), _kernels(row)[0]))


def _case(
    row: MeasurementRow, source: MeasurementSource, model: ModelSpec, at: Degrees, chosen: dict[str, object]
) -> RowCase:
    """Return the case for one choice of each open column."""
    pipeline = parse_schedule(row.schedule)
    software = _framework(row, source, chosen["attn_kernel"])
    usual = source.usual.get("zero", _USUAL_SHARDING)
    sharding = parse_sharding(row.zero) or parse_sharding(usual) or Sharding("z1", None)
    group = min(sharding.group or at.dp, at.dp)
    if at.dp % group:
        raise UnpredictableRowError(f"zero '{row.zero}': groups of {group} don't divide dp {at.dp}")
    vpp = chosen["vpp"]
    recompute = chosen["recompute"]
    sp = bool(chosen["sp"])
    assert isinstance(vpp, int)
    strategy = LayerStrategy(
        zero=sharding.zero,
        sp=sp,
        tp_overlap="async_tp" if software.async_tp and sp else "none",
        recompute=recompute,  # type: ignore[arg-type]
        attention="unfused" if software.attention in _SCORE_WRITING_KERNELS else "flash",
    )
    named = pipeline.schedule if pipeline.schedule not in (None, "interleaved", "1f1b") else None
    plan = _plan(
        dp_replicate=at.dp // group,
        dp_shard=group,
        tp=at.tp,
        pp=at.pp,
        vpp=vpp,
        cp=at.cp,
        ep=at.ep,
        etp=at.etp,
        schedule=named or ("interleaved" if vpp > 1 else "1f1b"),
        micro_batch_size=chosen["micro_batch"],
        default_strategy=strategy,
        **_precision(row, source),
        compile=bool(parse_yes_no(row.compile, "compile")),
        **_vocabulary(row, source, pipeline, model, at.pp * vpp),
    )
    said = tuple((column, str(value)) for column, value in chosen.items())
    return RowCase(model, plan, software, said)


def _precision(row: MeasurementRow, source: MeasurementSource) -> dict[str, object]:
    """Return the plan fields for the precision of matmuls, with the recipe in fp8: the row's, or else its source's."""
    found = parse_precision(row.precision) or "bf16"
    if found != "fp8":
        return {"precision": found}
    return {"precision": found, "fp8_recipe": parse_fp8_recipe(row.precision) or source.fp8_recipe}


def _require_precision(row: MeasurementRow, device: DeviceSpec) -> None:
    """Raise UnpredictableRowError for matmuls in fp8 or nvfp4 that the device isn't known to have."""
    found = parse_precision(row.precision)
    if found not in SCALED_PRECISIONS or has_precision(device, found, parse_fp8_recipe(row.precision) or "tensorwise"):
        return
    raise UnpredictableRowError(
        f"precision '{row.precision}' needs matmuls that {device.name} isn't known to have: expected another precision"
    )


def _plan(**fields: object) -> Plan:
    """Validate a plan. Raises UnpredictableRowError with the first problem."""
    try:
        return Plan.model_validate(fields)
    except ValidationError as error:
        raise UnpredictableRowError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def _framework(row: MeasurementRow, source: MeasurementSource, kernel: object) -> FrameworkTraits:
    """Return the source's framework traits, changed by the row's kernels, compilation and overlap."""
    base = {} if source.framework is None else framework_named(source.framework).model_dump()
    fields: dict[str, object] = base | {"attention": kernel} | software_of_row(row)
    if re.search(r"\d", row.attn_kernel) or kernel in _SCORE_WRITING_KERNELS:
        fields["attention"] = kernel  # the row itself says which generation
    if compiled := parse_yes_no(row.compile, "compile"):
        fields["fused_elementwise"] = True
    elif compiled is False:
        fields["fused_elementwise"] = False
    if "rms kernel" in row.attn_kernel.lower():
        fields["fused_norms"] = True
    if (chunked := parse_yes_no(row.async_tp, "async_tp")) is not None:
        fields["async_tp"] = chunked and "vanilla tp" not in row.notes.lower()
    words = row.schedule.lower()
    if re.search(r"(deep|hybrid).?ep dispatcher", words):
        fields["dispatch_once_per_rank"] = True
    for phrase, trait in (("tp-comm", "async_tp"), ("p2p", "overlap_p2p"), ("grad-reduce", "overlap_grad_reduce")):
        if f"no {phrase} overlap" in words:
            fields[trait] = False
    return FrameworkTraits.model_validate(fields)


def _vocabulary(
    row: MeasurementRow, source: MeasurementSource, pipeline: ScheduleTerms, model: ModelSpec, stages: int
) -> dict[str, object]:
    """Return the plan fields for the placement of layers, embedding and head on the pipeline."""
    how = pipeline.vocabulary
    if how in ("", "baseline"):
        if source.deals_ends:
            return _stages_with_counted_ends(model.num_layers, row.pp or 1)
        return _stages_with_shorter_ends(model.num_layers, stages)
    if how in _VOCAB_PARALLEL:
        return {"vocab_parallel": True}
    counts = source.stages.get(how, {}).get(model.vocab_size)
    if counts is None:
        raise UnpredictableRowError(
            f"no plan has the vocabulary as '{how}' says: there are baseline, redis, vocab-1, vocab-2"
        )
    return {"stages": tuple(StageSpec(layers=count) for count in counts)}


def _stages_with_counted_ends(num_layers: int, pp: int) -> dict[str, object]:
    """Return the layers of each stage where the embedding counts as a layer before them, and the last norm and the
    head as two after them."""
    least, over = divmod(num_layers + 3, pp)
    counts = [least + (stage < over) for stage in range(pp)]
    counts[0] -= 1
    counts[-1] -= 2
    if pp == 1 or min(counts) < 1:
        return {}
    return {"stages": tuple(StageSpec(layers=count) for count in counts)}


def _stages_with_shorter_ends(num_layers: int, stages: int) -> dict[str, object]:
    """Return stages of which the first and the last have a layer less, where the layers divide so and not evenly: as
    in models that were made for it, such as Llama 3.1 405B (arXiv:2407.21783 §3.3.2: the first and the last stage each
    hold a layer less)."""
    if stages < 3 or num_layers % stages == 0 or (num_layers + 2) % stages:
        return {}
    each = (num_layers + 2) // stages
    return {"stages": tuple(StageSpec(layers=each - (stage in (0, stages - 1))) for stage in range(stages))}


def _mismatch(plan: Plan, model: ModelSpec, workload: Workload, row: MeasurementRow) -> str:
    """Return the reason why the plan can't be the row's; empty where it can."""
    for problem in plan_violations(plan, model, workload, plan.world_size):
        return problem
    try:
        count = plan.num_micro_batches(workload)
    except InfeasibleError as error:
        return str(error)
    if 2 * count * plan.num_stages > _MOST_PASSES:
        most = _MOST_PASSES // (2 * plan.num_stages)
        return (
            f"{count:,} micro-batches on {plan.num_stages} stages are too many to simulate: expected at most {most:,}"
        )
    stated = parse_schedule(row.schedule).micro_batches
    if stated is not None and stated != count:
        return f"schedule says {stated} micro-batches, but global_batch {row.global_batch} makes {count}"
    return ""
