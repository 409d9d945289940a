"""Parsers of the free-text cells: recompute, sharding, precision, schedules, kernels."""

import re
from dataclasses import dataclass

from muster.spec.device import AttentionKernel
from muster.spec.layer_strategy import Recompute, ZeroLevel
from muster.spec.plan import Float8Recipe, Precision
from muster.spec.schedules import SCHEDULES
from muster.spec.suggest import did_you_mean
from muster.validate.cells import is_nothing
from muster.validate.errors import UnpredictableRowError

_YES = ("true", "yes", "y", "t", "1", "on", "enabled", "✓", "✔", "✔️", "✅", "☑")
_NO = ("false", "no", "n", "f", "0", "off", "disabled", "✗", "✘", "✖", "❌", "×")

_REMARK = re.compile(r"\s*(?:\(.*|[,;:].*)$", re.DOTALL)
"""Remark behind the word that counts: `True (REDUCE_SCATTER mode)`."""

_RECOMPUTE_WORDS = re.compile(
    r"\b(ac|(activation |gradient )?(re)?(checkpointing|computation|compute)|recompute)\b", re.IGNORECASE
)
"""Words around a recompute mode that say nothing of it."""
_RECOMPUTE: tuple[tuple[str, Recompute], ...] = (
    (r"none|off|no|false|0|disabled|✗|❌|everything.saveable", "none"),
    (r"selective[ _]\(?(per op sac|sac|repo default|op)\)?|sac|every.second.matmul", "every_second_matmul"),
    (r"selective( \(attention core\))?|attention|core.?attn|core.attention", "core_attention"),
    (r"elementwise|(checkpoint.)?dots(.saveable)?|(checkpoint_)?dots_with_no_batch_dims(_saveable)?", "elementwise"),
    (r"minimal(_flash|_with_\w+)?", "elementwise"),
    (r"save_dot_except_mlp(wi)?", "every_second_matmul"),
    (r"full\b.*|uniform|block|(every|each|all) layers?|layer.?wise|nothing.saveable|save_(qkv|out)_proj", "full"),
    (r"true|yes|on|enabled|✓|✔|✅|1", "full"),
)
"""Patterns of the whole text. Plain `selective` is Megatron-LM's (attention core) unless it names torchtitan's SAC. The
policies with `saveable` are JAX' (jax.checkpoint_policies), those with `save_` and `minimal` MaxText's (remat_policy in
configs/base.yml): the products of matrices are kept, some of them, or hardly any."""

_RECOMPUTED_MODULES: dict[str, Recompute] = {
    "core_attn": "core_attention",
    "layernorm": "elementwise",
    "moe_act": "elementwise",
    "mla_up_proj": "elementwise",
    "mlp": "elementwise",
    "moe": "full",
    "shared_experts": "elementwise",
}
"""Modules of Megatron-LM's `--recompute-modules`, and the kind of recompute here that is nearest."""

_MOST_RECOMPUTED_FIRST: tuple[Recompute, ...] = ("full", "elementwise", "core_attention")

_PRECISION: tuple[tuple[str, Precision], ...] = (
    (r"(?<!mx)fp4|e2m1", "nvfp4"),
    (r"fp8|float8|e4m3|e5m2", "fp8"),
    (r"bf16|bfloat16|^(mixed|amp|16.?bit)", "bf16"),
    (r"fp16|float16|half", "fp16"),
    (r"tf32|tensor.?float", "tf32"),
    (r"fp32|float32|single", "fp32"),
)
"""Patterns of precisions, searched in this order."""
_PREDICTED = "nvfp4, fp8, bf16, fp16, tf32 or fp32"

_FP8_RECIPES: tuple[tuple[str, Float8Recipe], ...] = (
    (r"mx|micro.?scaling|32.?x.?1|1.?x.?32\b", "mxfp8"),
    (r"block|128|sub.?channel|[-_ ]sc\b|deepseek|fine", "blockwise"),
    (r"delayed|hybrid|[-_ ]ds\b", "delayed"),
    (r"row.?wise|per.?row|per.?channel", "rowwise"),
    (r"tensor.?wise|per.?tensor|current|[-_ ]cs\b|dynamic", "tensorwise"),
)
"""Patterns of recipes for the scales of fp8, in the words of Transformer Engine, Megatron-Core and torchtitan, searched
in this order."""

_RECIPE_ALONE = (
    r"((tensor|row|block|channel|sub.?channel).?wise|per.?(tensor|row|block|channel)|mx|micro|delayed|current|hybrid)"
    r"([-_ ]?scal(ing|ed|es?))?"
)
"""Recipes that stand where a precision would."""

_KERNEL: tuple[tuple[str, AttentionKernel], ...] = (
    (r"flash.?attention.?v?3|flash.?3|fa3|cudnn", "flash3"),
    (r"flash.?attention.?v?2|flash.?2|fa2", "flash2"),
    (r"flash.?attention.?v?1|flash.?1|fa1|flash.*triton|triton.*flash", "flash1"),
    (r"non.?flash.*fused|unfused softmax|fused softmax|\bfused$", "fused"),
    (r"^torch$|eager|math|unfused|naive|non.?flash", "unfused"),
    (r"flash|sdpa|memory.?efficient", "flash2"),
)
"""Patterns of attention kernels, searched in this order."""

_KERNEL_CHOICES = ("flash1", "flash2", "flash3", "cudnn", "fused", "torch")
"""Attention kernels, as one's own table should name them."""


def parse_yes_no(text: str, column: str) -> bool | None:
    """Parse yes or no; None for an empty cell. Raises UnpredictableRowError for another word."""
    word = _REMARK.sub("", text).lower()
    if not word or is_nothing(word):
        return None
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise UnpredictableRowError(f"{column} '{text}' is neither yes nor no")


def parse_recompute(text: str) -> Recompute | None:
    """Parse a recompute mode; None for an empty cell. Raises UnpredictableRowError for another word."""
    text = _RECOMPUTE_WORDS.sub("", text).strip() or text
    if not text or re.fullmatch("[-–—]|n/?a", text):
        return None
    for pattern, found in _RECOMPUTE:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            return found
    modules = [_RECOMPUTED_MODULES.get(word.strip()) for word in re.split(r"[,+ ]+", text.lower())]
    kinds = [kind for kind in modules if kind is not None]
    if len(kinds) == len(modules):
        return next(kind for kind in _MOST_RECOMPUTED_FIRST if kind in kinds)
    raise UnpredictableRowError(
        f"recompute '{text}' is not known: expected none, selective, selective (per op SAC), full, modules of"
        f" Megatron-LM ({', '.join(_RECOMPUTED_MODULES)}) or a policy of JAX, such as dots_saveable"
    )


def parse_precision(text: str) -> Precision | None:
    """Parse the precision of matmuls; None for an empty cell. Raises UnpredictableRowError for another word."""
    if not text or is_nothing(text):
        return None
    if re.search(r"mxfp4|int8|int4", text, re.IGNORECASE):
        raise UnpredictableRowError(f"precision '{text}' is not predicted: expected {_PREDICTED}")
    for pattern, found in _PRECISION:
        if re.search(pattern, text, re.IGNORECASE):
            return found
    if re.fullmatch(_RECIPE_ALONE, text.strip(), re.IGNORECASE):
        return "fp8"
    hint = did_you_mean(text.lower(), ("nvfp4", "fp8", "bf16", "fp16", "tf32", "fp32"))
    raise UnpredictableRowError(f"precision '{text}' is not known{hint}: expected {_PREDICTED}")


def parse_fp8_recipe(text: str) -> Float8Recipe | None:
    """Parse the recipe of a precision in fp8, such as `FP8-CS` or `fp8 (delayed scaling)`; None where none is named."""
    return next((recipe for pattern, recipe in _FP8_RECIPES if re.search(pattern, text, re.IGNORECASE)), None)


def parse_attention_kernel(text: str) -> AttentionKernel | None:
    """Parse an attention kernel; None for an empty cell, and for words of something else.

    Raises UnpredictableRowError for a word that is nearly a kernel's.
    """
    if not text:
        return None
    for pattern, found in _KERNEL:
        if re.search(pattern, text, re.IGNORECASE):
            return found
    if hint := did_you_mean(text.lower(), _KERNEL_CHOICES).rstrip("?"):
        choices = ", ".join(_KERNEL_CHOICES)
        raise UnpredictableRowError(f"attn_kernel '{text}' is not known{hint}: expected one of {choices}")
    return None  # words about something else, which leave the kernel open


@dataclass(frozen=True)
class Sharding:
    """Sharding over data-parallel ranks: `group` of them hold one copy (None: all)."""

    zero: ZeroLevel
    group: int | None


def parse_sharding(text: str) -> Sharding | None:
    """Parse the `zero` cell; None where it is empty. Raises UnpredictableRowError for another word."""
    if not text or is_nothing(text) and text.lower() != "none":
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


_SCHEDULES: tuple[tuple[str, str], ...] = (
    (r"interleaved|1f1b-i\b", "interleaved"),
    (r"dualpipe-?v", "dualpipe-v"),
    (r"dualpipe", "dualpipe"),
    (r"v-?min", "v-min"),
    (r"v-?half", "v-half"),
    (r"zb-?h2|zb-?2p\*?", "zb-h2"),
    (r"zb-?h1|zb-?1p", "zb-h1"),
    (r"zb-?v\b", "zb-v"),
    (r"gpipe", "gpipe"),
    (r"1f1b", "1f1b"),
)
"""Spellings of schedules, the most specific ones first."""
_SCHEDULE_CHOICES = tuple(name for name, entry in SCHEDULES.items() if not entry.searched)
"""Schedules that a row may name; searched ones depend on costs that a table doesn't state."""
_SCHEDULE_DETAILS = (
    r"(no )?grad(ient)? accumulation.*|ga\s*=.*|\d+ micro-?batches|vocab method=.*|(no|without) (pp|pipeline.*)"
    r"|none|n/?a|-|(no )?(tp-comm|p2p|grad-reduce|param-gather)[ -]overlap|\w+ dispatcher|cuda graphs?"
)
"""Parts of a schedule cell that name no schedule."""


@dataclass(frozen=True)
class ScheduleTerms:
    """Contents of a schedule cell."""

    schedule: str | None = None
    vpp: int | None = None
    """Chunks per rank: 1 where the schedule has only one; None where it may have several."""
    micro_batches: int | None = None
    vocabulary: str = ""
    """Placement of embedding and head on a pipeline (arXiv:2411.05288): baseline, redis, vocab-1, …"""


def parse_schedule(text: str) -> ScheduleTerms:
    """Parse a schedule cell, such as `1F1B; vocab method=redis`. Raises UnpredictableRowError for an unknown part."""
    lower = text.lower()
    found = [_schedule_name(part.strip(), text) for part in re.split("[;,]", lower)]
    schedule = next((name for name in found if name), None)
    count = re.search(r"(?:grad(?:ient)? accumulation (?:x|steps\s*=?)\s*|ga\s*=\s*)(\d+)|^(\d+) micro-?batches", lower)
    vocabulary = re.search(r"vocab method=([\w-]+)", lower)
    alone = re.search(r"no grad accumulation", lower)
    return ScheduleTerms(
        schedule=schedule,
        vpp=1 if schedule in ("1f1b", "gpipe", "zb-h1", "zb-h2") else None,
        micro_batches=1 if alone else int(count[1] or count[2]) if count else None,
        vocabulary=vocabulary[1] if vocabulary else "",
    )


def _schedule_name(part: str, text: str) -> str | None:
    """Return the schedule named by a part of a cell; None for other details. Raises UnpredictableRowError."""
    if not part or part in _SCHEDULE_CHOICES:
        return part or None
    for pattern, name in _SCHEDULES:
        if re.search(pattern, part):
            return name
    if re.fullmatch(_SCHEDULE_DETAILS, part):
        return None
    hint = did_you_mean(part, _SCHEDULE_CHOICES) or f": expected one of {', '.join(_SCHEDULE_CHOICES)}"
    raise UnpredictableRowError(f"schedule '{text}' is not known{hint}")
