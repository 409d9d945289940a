"""What tables write in words: recompute, sharding, precision, schedules, kernels."""

import re
from dataclasses import dataclass

from muster.spec.device import AttentionKernel
from muster.spec.plan import Precision, Recompute, ZeroLevel
from muster.spec.schedules import SCHEDULES
from muster.spec.suggest import did_you_mean
from muster.validate.errors import UnpredictableRowError

_YES, _NO = ("true", "yes", "1", "on"), ("false", "no", "0", "off")

_RECOMPUTE: tuple[tuple[str, Recompute], ...] = (
    (r"none|off|no|false|0", "none"),
    (r"selective \((per op sac|sac|repo default)\)", "every_second_matmul"),
    (r"selective( \(attention core\))?|attention|core.?attn", "core_attention"),
    (r"full\b.*|uniform|block|true|yes|1", "full"),
)
"""Patterns of the whole text; selective is Megatron-LM's (attention's core) unless it names torchtitan's SAC."""

_PRECISION: tuple[tuple[str, Precision], ...] = (
    (r"fp8|float8", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"tf32|fp32|float32", "fp32"),
)

_KERNEL: tuple[tuple[str, AttentionKernel], ...] = (
    (r"flash.?attention.?v?3|flash.?3|fa3|cudnn", "flash3"),
    (r"flash.?attention.?v?2|flash.?2|fa2", "flash2"),
    (r"flash.?attention.?v?1|flash.?1|fa1|triton", "flash1"),
    (r"non.?flash.*fused|unfused softmax|fused softmax|\bfused$", "fused"),
    (r"^torch$|eager|math|unfused|naive|non.?flash", "unfused"),
    (r"flash|sdpa|memory.?efficient", "flash2"),
)


def parse_yes_no(text: str, column: str) -> bool | None:
    """None where nothing is stated."""
    if not text:
        return None
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise UnpredictableRowError(f"{column} '{text}' is neither yes nor no")


def parse_recompute(text: str) -> Recompute | None:
    """None where nothing is stated."""
    if not text:
        return None
    for pattern, found in _RECOMPUTE:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            return found
    raise UnpredictableRowError(f"recompute '{text}' is none of none, selective, selective (per op SAC) and full")


def parse_precision(text: str) -> Precision | None:
    """Of the matrix products; None where nothing is stated."""
    if not text:
        return None
    if re.search(r"fp4|int8|int4", text, re.IGNORECASE):
        raise UnpredictableRowError(f"precision '{text}' is not predicted: expected fp8, bf16, fp16 or fp32")
    for pattern, found in _PRECISION:
        if re.search(pattern, text, re.IGNORECASE):
            return found
    hint = did_you_mean(text.lower(), ("fp8", "bf16", "fp16", "fp32"))
    raise UnpredictableRowError(f"precision '{text}' is not known{hint}")


def parse_attention_kernel(text: str) -> AttentionKernel | None:
    """None where nothing is stated."""
    if not text:
        return None
    for pattern, found in _KERNEL:
        if re.search(pattern, text, re.IGNORECASE):
            return found
    raise UnpredictableRowError(f"attn_kernel '{text}' is not known: expected flash (with a version), fused or torch")


@dataclass(frozen=True)
class Sharding:
    """How data-parallel ranks share: `group` of them hold one copy (None: all)."""

    zero: ZeroLevel
    group: int | None


def parse_sharding(text: str) -> Sharding | None:
    """What `zero` says; None where nothing is stated."""
    if not text:
        return None
    lower = text.lower()
    group = re.search(r"(?:within(?: groups of)?|fsdp\s*=)\s*(\d+)", lower)
    size = int(group[1]) if group else None
    if re.search(r"fsdp=false", lower):
        return Sharding("z1", size)
    if size is None and re.search(r"hsdp|hybrid", lower):
        raise UnpredictableRowError(
            f"zero '{text}' doesn't say how many ranks share a copy: expected e.g. 'FSDP within 8'"
        )
    stage = re.search(r"(?:zero|stage|z)[-_ =]*(?:stage[-_ =]*)?([0-3])\b|^([0-3])$", lower)
    if re.search(r"shard_grad_op", lower):
        return Sharding("z2", size)
    if re.search(r"fsdp|full_shard|hsdp|hybrid", lower):
        return Sharding("z3", size)
    if re.search(r"distributed optimizer", lower):
        return Sharding("z1", size)
    if stage and (number := stage[1] or stage[2]) != "0":
        return Sharding(f"z{number}", size)  # type: ignore[arg-type]
    if stage or re.search(r"none|ddp|^(no|false|off)$", lower):
        return Sharding("z1", 1)
    raise UnpredictableRowError(f"zero '{text}' is none of none, ZeRO-1, ZeRO-2, ZeRO-3 and FSDP")


_SCHEDULE_WORDS = (
    (r"interleaved", "interleaved"),
    (r"dualpipe-?v", "dualpipev"),
    (r"dualpipe", "dualpipe"),
    (r"v-?min", "v-min"),
    (r"v-?half", "v-half"),
    (r"zb-?h2", "zb-h2"),
    (r"zb-?h1", "zb-h1"),
    (r"zb-?v\b", "zb-v"),
    (r"gpipe", "gpipe"),
    (r"1f1b", "1f1b"),
)
"""The more special first."""


@dataclass(frozen=True)
class ScheduleTerms:
    """What the schedule's words say."""

    schedule: str | None = None
    vpp: int | None = None
    """1 where they exclude several chunks on a rank."""
    micro_batches: int | None = None
    vocabulary: str = ""
    """How embedding and head lie on a pipeline (arXiv:2411.05288): baseline, redis, vocab-1, …"""


def parse_schedule(text: str) -> ScheduleTerms:
    """What `schedule` says."""
    lower = text.lower()
    found = next((name for pattern, name in _SCHEDULE_WORDS if re.search(pattern, lower)), None)
    count = re.search(r"(?:grad accumulation x|ga\s*=\s*)(\d+)|^(\d+) micro-?batches", lower)
    vocabulary = re.search(r"vocab method=([\w-]+)", lower)
    alone = re.search(r"no grad accumulation", lower)
    return ScheduleTerms(
        schedule=found if found is None or found in SCHEDULES else None,
        vpp=1 if found in ("1f1b", "gpipe", "zb-h1", "zb-h2") else None,
        micro_batches=1 if alone else int(count[1] or count[2]) if count else None,
        vocabulary=vocabulary[1] if vocabulary else "",
    )
