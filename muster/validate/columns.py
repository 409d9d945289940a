"""Columns and metrics of a table of measurements, and the other names that people give them."""

import re
from collections.abc import Iterable
from functools import cache

from muster.spec.suggest import closest_match
from muster.validate.cells import split_unit
from muster.validate.combined_cells import OTHER_COLUMNS, combined_column

REQUIRED_COLUMNS = ("model_name", "gpu", "n_gpus", "metric", "value")
"""Columns that a table must have. A missing optional column counts as empty in every row."""
COLUMNS = (
    *("source", "url_or_repo", "model_name", "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads"),
    *("vocab", "seq_len", "n_experts", "top_k", "gpu", "n_gpus", "gpus_per_node", "intra_link", "inter_link"),
    *("tp", "pp", "vpp", "dp", "zero", "cp", "ep", "etp", "sp", "micro_batch", "global_batch", "recompute"),
    *("precision", "schedule", "attn_kernel", "compile", "async_tp", "software", "metric", "value", "peak_mem_gb"),
    *("plan", "notes"),
)
"""Columns that a header may have, in their usual order; others are ignored."""

_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "model_name": ("model", "name", "model_type"),
    "params_b": ("params", "parameters_b", "model_size_b"),
    "layers": ("num_layers", "n_layers", "number_of_layers"),
    "hidden": ("hidden_size", "d_model", "hidden_dim"),
    "ffn_hidden": ("ffn_hidden_size", "intermediate_size", "ffn", "d_ff"),
    "heads": ("num_heads", "n_heads", "num_attention_heads"),
    "kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_query_groups"),
    "vocab": ("vocab_size",),
    "seq_len": ("seq", "seqlen", "seq_length", "sequence_length", "context", "context_length", "context_len")
    + ("sequence", "max_seq_len", "max_seq_length", "sequence_len", "max_target_length"),
    "n_experts": ("num_experts", "experts"),
    "top_k": ("topk", "num_experts_per_tok"),
    "gpu": ("device", "gpu_type", "gpu_model", "accelerator", "accelerators", "hardware", "system", "machine", "chip")
    + ("device_type", "chip_type"),
    "n_gpus": (
        "num_gpus",
        "gpus",
        "n_chips",
        "num_chips",
        "num_accelerators",
        "total_gpus",
        "number_of_gpus",
        "of_gpus",
        "world_size",
        "n_devices",
        "num_devices",
        "gpu_count",
        "ngpu",
        "ngpus",
        "chips",
        "n_accelerators",
        "number_of_accelerators",
        "number_of_devices",
    ),
    "tp": ("tp_size", "tp_degree", "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree")
    + ("tensor_model_parallel_size",),
    "pp": ("pp_size", "pp_degree", "pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree")
    + ("pipeline_model_parallel_size",),
    "vpp": ("virtual_pipeline", "virtual_pipeline_model_parallel_size", "vp"),
    "dp": ("dp_size", "dp_degree", "data_parallel", "data_parallel_size", "data_parallel_degree"),
    "cp": ("cp_size", "cp_degree", "context_parallel", "context_parallel_size", "context_parallel_degree"),
    "ep": ("ep_size", "ep_degree", "expert_parallel", "expert_parallel_size", "expert_parallel_degree")
    + ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "sp": ("sequence_parallel",),
    "zero": ("zero_stage", "sharding", "sharding_strategy"),
    "micro_batch": (
        "mbs",
        "micro_batch_size",
        "microbatch_size",
        "microbatch",
        "micro_bs",
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
    ),
    "global_batch": (
        "gbs",
        "global_batch_size",
        "train_batch_size",
        "total_batch_size",
        "batch",
        "batch_size",
        "global_bs",
    ),
    "recompute": ("recomputation", "activation_recompute", "activation_checkpointing", "activation_checkpoint", "remat")
    + ("remat_policy", "recompute_granularity", "gradient_checkpointing", "ac", "ac_mode"),
    "precision": ("dtype", "training_precision", "compute_dtype", "data_type"),
    "attn_kernel": ("attention_kernel", "attention_backend", "attn_impl"),
    "software": ("framework", "program", "trainer"),
    "peak_mem_gb": ("peak_memory_gb", "max_memory_gb", "peak_mem_gib", "peak_memory_gib", "peak_memory", "peak_mem")
    + ("max_memory", "memory_gib", "max_mem_gb"),
}

_METRICS: dict[str, tuple[str, ...]] = {
    "iteration_time_s": ("step_time_s", "iteration_time", "step_time", "seconds_per_step", "s_per_step", "sec_per_step")
    + ("time_per_iter", "sec_per_iter", "sec_per_iteration", "s_per_iteration", "step_time_sec", "time_per_step")
    + ("iter_time", "iter_time_s", "seconds_per_iteration", "iteration_time_sec", "time_per_iteration_s")
    + ("s_per_iter", "s_per_it", "time_per_step_s", "time_per_iteration", "elapsed_time_per_iteration_s"),
    "iteration_time_ms": (
        "step_time_ms",
        "ms_per_step",
        "ms_per_iter",
        "time_per_iteration_ms",
        "time_per_step_ms",
        "time_per_iter_ms",
        "iter_time_ms",
        "ms_per_iteration",
        "elapsed_time_per_iteration_ms",
        "elapsed_ms",
    ),
    "iterations_per_s": ("iter_per_s", "it_per_s", "iter_per_sec", "it_per_sec", "steps_per_s", "steps_per_sec"),
    "tokens_per_s_per_gpu": ("tokens_per_sec_per_gpu", "tokens_per_second_per_gpu", "tok_per_s_per_gpu", "tgs")
    + (
        "tokens_per_s_per_device",
        "tokens_per_sec_per_device",
        "tokens_per_gpu_per_s",
        "tps",
        "tps_per_gpu",
        "wps",
        "wps_per_gpu",
        "tok_per_s_per_device",
        "tokens_per_s_per_chip",
        "tokens_per_sec_per_chip",
        "tokens_per_second_per_device",
        "tokens_per_second_per_chip",
        "throughput_tokens_per_s_per_gpu",
    ),
    "tokens_per_s_total": (
        "tokens_per_s",
        "tokens_per_sec",
        "tokens_per_second",
        "tok_per_s",
        "throughput_tokens_per_s",
    ),
    "samples_per_s_per_gpu": ("samples_per_sec_per_gpu", "samples_per_second_per_gpu", "sequences_per_s_per_gpu"),
    "samples_per_s_total": (
        "samples_per_s",
        "samples_per_sec",
        "samples_per_second",
        "sequences_per_s",
        "throughput_samples_per_s",
    )
    + ("seq_per_s", "seqs_per_s", "throughput_sequences_per_s"),
    "TFLOPs_per_gpu": ("tflops", "tflops_per_gpu", "tflop_per_s_per_gpu", "tflops_per_s_per_gpu", "tflop_per_s")
    + ("tflops_per_device", "tflop_per_s_per_device", "tflop_per_s_per_chip", "throughput_per_gpu_tflop_per_s_per_gpu")
    + ("throughput_tflop_per_s_per_gpu", "throughput_tflops_per_gpu", "throughput_tflops", "tflops_per_s", "tflops_s")
    + ("tflops_per_chip", "tflop_per_s_per_accelerator", "tflops_per_s_per_device"),
    "model_TFLOPs_per_gpu": (
        "model_tflops_per_gpu",
        "model_tflops",
        "model_tflop_per_s_per_gpu",
        "model_tflop_per_sec_per_gpu",
    )
    + ("model_tflops_per_sec_per_gpu", "model_tflops_per_s_per_gpu"),
    "MFU_pct": ("mfu", "mfu_percent", "mfu_pct", "bf16_mfu"),
    "peak_memory_gb": ("peak_mem_gb", "max_memory_gb", "memory_gb"),
    "peak_memory_mb": ("peak_mem_mb", "peak_mem_mib", "peak_memory_mib", "max_memory_mb", "max_memory_mib")
    + ("max_mem_mb", "max_mem_mib", "memory_mb", "memory_mib"),
    "outcome": ("result", "status"),
}
"""Metrics with their other names, as `_plain` writes them."""

ITERATION_MS, ITERATIONS_PER_S = "iteration_time_ms", "iterations_per_s"
"""Metrics that are read as `iteration_time_s`."""
MEMORY_MB = "peak_memory_mb"
"""Metric that is read as `peak_memory_gb`."""
THROUGHPUT = "throughput"
"""Column whose cells say in which unit they are."""
LAST_METRICS = ("peak_memory_gb", MEMORY_MB, "outcome")
"""Metrics that count where a row has no other."""


@cache
def canonical_column(name: str) -> str:
    """Return a column's name for what a header calls it, with or without what stands in parentheses behind; the
    lower-case name itself where none is known."""
    plain = _plain(name)
    short = _plain(re.sub(r"(?<=\S)\s*[(\[].*[)\]]\s*$", "", name))
    for one in (plain, short):
        found = one if one in COLUMNS else next((own for own, others in _OTHER_NAMES.items() if one in others), None)
        if found := found or combined_column(one):
            return found
        if canonical_metric(plain) in _METRICS:
            break
    return THROUGHPUT if short == THROUGHPUT and canonical_metric(plain) not in _METRICS else plain


def closest_name(name: str, columns: Iterable[str]) -> str | None:
    """Return the name of one of the columns, or another name of it, that a misspelt one most likely means; None where
    none is close. `value` has the names of all metrics."""
    wanted = tuple(columns)
    others = [other for column in wanted for other in (*_OTHER_NAMES.get(column, ()), *OTHER_COLUMNS.get(column, ()))]
    if "value" in wanted:
        others += [other for names in _METRICS.values() for other in names]
    return closest_match(name, wanted, _SURE) or closest_match(name, others, _SURE) or closest_match(name, wanted)


_SURE = 0.85
"""Likeness from which a name among all other names of columns counts."""


_QUANTITIES = ("iteration_time", "tokens", "samples", "TFLOPs", "model_TFLOPs", "MFU", "peak_memory")
"""First words of metrics that measure the same, in one unit or another."""


def metric_with_unit(metric: str, text: str) -> tuple[str, str]:
    """Return the metric of a value and the value without its unit, such as `9,500 tok/s`.

    A unit says what a column `throughput` is; under any other metric one of the same quantity is left out, and of
    another one kept, so that the value can't be read.
    """
    number, unit = split_unit(text)
    plain = _plain(unit)
    found = canonical_metric(re.sub("^p(?=flop)", "t", plain))
    if found not in _METRICS:
        return metric, text
    if plain.startswith("pflop"):
        number += "k"
    if metric == THROUGHPUT:
        return found, number
    same = _quantity(metric) == _quantity(found)
    return metric, number if same else text


def _quantity(metric: str) -> str:
    return next((one for one in _QUANTITIES if metric.startswith(one)), metric).removeprefix("model_")


def metric_of_column(name: str) -> str | None:
    """Return the metric that a column is called after, as in tables with a column for each; None for other columns."""
    found = canonical_metric(name)
    return found if found in _METRICS else None


def canonical_metric(name: str) -> str:
    """Return a metric's name for what a cell calls it, such as `tokens/s/GPU`; the text itself where none is known."""
    plain = _plain(name)
    for one in (plain, plain.removeprefix("throughput_")):
        if found := next((own for own, others in _METRICS.items() if one in (*others, own.lower())), None):
            return found
    return name


def _plain(name: str) -> str:
    """Return a name in lower case, with its words joined by underscores: `Tokens/s/GPU` is `tokens_per_s_per_gpu`."""
    words = re.sub(r"<[^<>]*>", " ", name).strip().lower().replace("%", " pct ").replace("/", " per ")
    words = re.sub(r"^(#|no\.|nr\.)\s*(of\s+)?-?\s*(?=[a-z])", "n_", words)
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")
