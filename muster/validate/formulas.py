"""Step times from published metrics: rates, and FLOP/s by the formula that the source uses."""

from collections.abc import Callable

from muster.cost.flops import train_flops_per_token
from muster.spec.model import ModelSpec
from muster.spec.workload import Workload
from muster.validate.errors import UnpredictableRowError
from muster.validate.table import MeasurementRow

TIME_METRICS = (
    *("iteration_time_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "samples_per_s_per_gpu", "samples_per_s_total"),
)
"""Step times and throughputs, which all sources define alike."""
FLOP_METRICS = ("TFLOPs_per_gpu", "model_TFLOPs_per_gpu", "MFU_pct")
"""Metrics that depend on how FLOPs are counted."""
UNTIMED_METRICS = ("outcome", "peak_memory_gb")
"""Metrics of a whole run other than its speed."""
OTHER_METRICS = (
    "activation_memory_pct_of_TP_baseline",
    "single_layer_forward_time_ms",
    "single_layer_backward_time_ms",
    "param+optimizer_GiB",
    "activation_GiB_no_recompute",
    "activation_GiB_present_work",
)
"""Metrics of a part of a step, which are not scored."""


def sc21_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the FLOPs of a step with full recompute, all attention scores counted: 96·B·s·l·h²·(1 + s/6h + V/16lh).

    Megatron-LM (arXiv:2104.04473, appendix). The forward counts twice, whatever was recomputed.
    """
    h = model.hidden_size
    layers = model.num_layers
    s = workload.seq_len
    return 96 * workload.tokens_per_step * layers * h * h * (1 + s / (6 * h) + model.vocab_size / (16 * layers * h))


def korthikanti_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step, all attention scores counted: 72·B·s·l·h²·(1 + s/6h + V/12lh).

    Reducing Activation Recomputation (arXiv:2205.05198, appendix A), equation 7.
    """
    h = model.hidden_size
    layers = model.num_layers
    s = workload.seq_len
    return 72 * workload.tokens_per_step * layers * h * h * (1 + s / (6 * h) + model.vocab_size / (12 * layers * h))


def megatron_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step as Megatron-LM logs them, all attention scores counted.

    `num_floating_point_operations` in megatron/training/training.py, core r0.7 on: 12·B·s·l·h²·((1 + g/a + s/h)·q +
    f/h·m + V/2lh) with g key/value heads of a heads, q the queries' width over h, f the inner width, m 3/2 for a gated
    MLP and 1 otherwise.
    """
    h = model.hidden_size
    layers = model.num_layers
    s = workload.seq_len
    queries = model.num_heads * model.head_dim / h
    attention = (1 + model.num_kv_heads / model.num_heads + s / h) * queries
    inner, top_k = (model.moe.expert_size, model.moe.top_k) if model.moe else (model.intermediate_size, 1)
    mlp = inner / h * top_k * (1.5 if model.gated else 1.0)
    return 12 * workload.tokens_per_step * layers * h * h * (attention + mlp + model.vocab_size / (2 * layers * h))


def vocabulary_parallel_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step as Vocabulary Parallelism counts them: 3·B·(2shV + l·(8sh² + 4s²h + 4sh·f)).

    Artifact of arXiv:2411.05288, show_result_full_exp.py.
    """
    h = model.hidden_size
    s = workload.seq_len
    layer = 8 * s * h * h + 4 * s * s * h + 4 * s * h * model.intermediate_size
    return 3 * workload.global_batch_size * (2 * s * h * model.vocab_size + model.num_layers * layer)


def mpt_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step as llm-foundry counts them: (6·N + 12·l·h·s) per token, all attention scores
    counted.

    scripts/train/benchmarking/README.md of llm-foundry.
    """
    per_token = 6 * model.num_parameters + 12 * model.num_layers * model.hidden_size * workload.seq_len
    return per_token * workload.tokens_per_step


def model_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step, all attention scores counted: three times the forward's matmuls.

    PaLM (arXiv:2204.02311, appendix B). Experts count by those of a token, shared ones included.
    """
    return train_flops_per_token(model, workload.seq_len) * workload.tokens_per_step


def causal_flops(model: ModelSpec, workload: Workload) -> float:
    """Return the model FLOPs of a step, with those scores alone that the causal mask leaves (arXiv:2307.08691 §4.1)."""
    return train_flops_per_token(model, workload.seq_len, causal=True) * workload.tokens_per_step


FORMULAS: dict[str, Callable[[ModelSpec, Workload], float]] = {
    "sc21": sc21_flops,
    "korthikanti": korthikanti_flops,
    "megatron": megatron_flops,
    "vocabulary-parallel": vocabulary_parallel_flops,
    "mpt": mpt_flops,
    "model": model_flops,
    "causal": causal_flops,
}
"""FLOP formulas by the names that sources.yaml uses."""

FORMULA_WORDS = {
    "sc21": "FLOPs with full recompute (arXiv:2104.04473)",
    "korthikanti": "model FLOPs, all attention scores (arXiv:2205.05198)",
    "megatron": "model FLOPs as Megatron-LM logs them, all attention scores",
    "vocabulary-parallel": "model FLOPs as arXiv:2411.05288 counts them",
    "mpt": "model FLOPs as llm-foundry counts them, all attention scores",
    "model": "model FLOPs, all attention scores (arXiv:2204.02311, appendix B)",
    "causal": "model FLOPs, of the scores those that the causal mask leaves",
}
"""Words for each formula, for who reads a row's assumptions."""


def step_time_s(
    row: MeasurementRow, model: ModelSpec, workload: Workload, formula: str | None, peak_flops_per_s: float
) -> float:
    """Return the measured seconds of a step. `peak_flops_per_s` is that of one device, as the source's MFU takes it.

    Raises UnpredictableRowError for an empty value, and for FLOP/s without a shipped formula.
    """
    assert row.n_gpus is not None
    if row.value is None:
        raise UnpredictableRowError("value is empty: expected what was measured")
    if row.metric == "iteration_time_s":
        return row.value
    devices = row.n_gpus if row.metric.endswith("_per_gpu") or row.metric == "MFU_pct" else 1
    if row.metric in TIME_METRICS:
        per_step = workload.tokens_per_step if row.metric.startswith("tokens") else workload.global_batch_size
        return per_step / (row.value * devices)
    if formula is None:
        raise UnpredictableRowError(f"{row.metric} can't be turned into a time: no formula is known for its source")
    rate = row.value / 100 * peak_flops_per_s if row.metric == "MFU_pct" else row.value * 1e12
    return FORMULAS[formula](model, workload) / (rate * devices)
