"""DeepSpeed's JSON as part of a run file: it knows neither the model nor the data nor the number of steps.

Names and defaults are those of github:deepspeedai/DeepSpeed, deepspeed/runtime/constants.py and lr_schedules.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from muster.interop.conversion import ConfigConversion, infer_dp_size
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

PROGRAM = "DeepSpeed"
_SECTIONS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16", "optimizer")
_BATCH, _MICRO, _ROUNDS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OPTIM = "optimizer.params."
_RATE = "scheduler.params."
_DECAYS = {"warmuplr": (1.0, "linear"), "warmupdecaylr": (0.0, "linear"), "warmupcosinelr": (1e-4, "cosine")}
"""Scheduler → the last learning rate as a part of the highest, and the shape of the decay to it."""
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "lion": "lion"}
_ITSELF = "Muster sets it itself"
_REASONS = {
    "activation_checkpointing.": "the plan sets recompute by layer: parallel.default_strategy.recompute",
    "zero_optimization.": _ITSELF,
    "zero_optimization.offload_optimizer": "a plan says so: parallel.default_strategy.offload_optimizer host or disk",
    "zero_optimization.offload_param": "a plan says so: parallel.default_strategy.offload_param host or disk",
    "zero_optimization.zero_quantized": "parallel.quantized_weights and quantized_gradients are of plans with zpNgM",
    "fp16.": "the loss scale adjusts itself",
    "communication_data_type": "gradients are reduced in fp32",
    "prescale_gradients": _ITSELF,
    "wall_clock_breakdown": "muster report shows a step of each rank",
    "flops_profiler.": "muster report shows a step of each rank",
    "tensorboard.": "metrics are in the run directory",
    "wandb.": "metrics are in the run directory",
    "csv_monitor.": "metrics are in the run directory",
}


def read_deepspeed(
    tree: Any, nproc: int | None, load_model: Callable[[str], ModelSpec], model: str | None = None
) -> ConfigConversion:
    """Convert a configuration; `model` names the model, which DeepSpeed's doesn't. Raises ConfigError for anything
    else."""
    if not isinstance(tree, Mapping) or not any(section in tree for section in _SECTIONS):
        raise ConfigError(
            f"expected DeepSpeed's JSON, with {_BATCH}, zero_optimization or the like; a model's config.json is named"
            " in a run file, as model: hf:DIR"
        )
    options = dict(flatten(tree))
    found = ConfigConversion(PROGRAM, {key: None if value == "auto" else value for key, value in options.items()})
    if model is not None:
        for key, value in flatten(load_model(model).model_dump(mode="json", exclude_unset=True)):
            found.put(f"model.{key}", value)
            found.origins[f"model.{key}"] = "--model"
    _plan(found, nproc)
    _optim(found)
    _rate(found)
    found.copy_number("train.log_every", "steps_per_print")
    found.drop_rest(_REASONS)
    found.options = options
    for option in (option for option, value in options.items() if value == "auto"):
        found.drop(option, "the Hugging Face Trainer fills it in")
    return found


def _plan(found: ConfigConversion, nproc: int | None) -> None:
    """Convert batch, sharding and precision: batch = micro-batch · accumulation · data-parallel ranks."""
    batch, micro, rounds = (found.number(option) for option in (_BATCH, _MICRO, _ROUNDS))
    tp = found.number("tensor_parallel.autotp_size", 1) or 1
    if nproc is None and batch and micro and rounds:
        ranks, rest = divmod(batch, micro * rounds)
        if rest or not ranks:
            raise ConfigError(f"{_BATCH} {batch} is not a multiple of {_MICRO} {micro} · {_ROUNDS} {rounds}")
    else:
        ranks = infer_dp_size(found, nproc, tp)
    micro = micro or (batch // (ranks * (rounds or 1)) if batch else None)
    batch = batch or (micro * ranks * (rounds or 1) if micro else None)
    if batch and micro and batch % (micro * ranks):
        raise ConfigError(f"{_BATCH} {batch} is not a multiple of {_MICRO} {micro} · {ranks} data-parallel ranks")
    if batch and micro and rounds and batch != micro * ranks * rounds:
        if not found.number(_MICRO):
            raise ConfigError(f"{_BATCH} {batch} is not a multiple of {_ROUNDS} {rounds} · {ranks} data-parallel ranks")
        raise ConfigError(
            f"{_BATCH} {batch} isn't {_MICRO} {micro} · {_ROUNDS} {rounds} · {ranks} data-parallel ranks"
            f" ({micro * rounds * ranks}): mend one of them, or leave one out"
        )
    if tp > 1:
        found.put("parallel.tp", tp, "tensor_parallel.autotp_size")
    stage = found.number("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage {stage}: expected 0, 1, 2 or 3")
    found.put("parallel.dp_shard" if stage else "parallel.dp_replicate", ranks, _BATCH, _MICRO, _ROUNDS)
    found.put("parallel.default_strategy.zero", f"z{stage or 1}", "zero_optimization.stage")
    near = found.number("zero_optimization.zero_hpz_partition_size", 1) or 1
    if stage == 3 and 1 < near < ranks:  # DeepSpeed reduces gradients over all ranks
        found.put("parallel.param_shard_size", near, "zero_optimization.zero_hpz_partition_size")
        found.put("parallel.grad_shard_size", ranks, "zero_optimization.zero_hpz_partition_size")
    enabled = [kind for kind in ("bf16", "fp16") if found.take(f"{kind}.enabled", False)]
    if len(enabled) == 2:
        raise ConfigError("bf16.enabled and fp16.enabled are both true: expected one of them")
    found.put("parallel.precision", enabled[0] if enabled else "fp32", *(f"{kind}.enabled" for kind in enabled))
    if batch and micro:
        found.put("parallel.micro_batch_size", micro, _MICRO, _BATCH)
        found.put("train.global_batch_size", batch, _BATCH, _MICRO, _ROUNDS)


def _optim(found: ConfigConversion) -> None:
    kind = found.take("optimizer.type")
    found.copy_number("optim.clip_norm", "gradient_clipping", 0.0)
    if kind is None:
        return
    name = _OPTIMIZERS.get(str(kind).lower())
    if name is None:
        found.drop("optimizer.type", f"only {', '.join(_OPTIMIZERS)} are read; the run file says adamw")
    found.put("optim.name", name or "adamw", "optimizer.type")
    found.copy_number("optim.lr", _OPTIM + "lr", 1e-3)
    found.copy_number("optim.weight_decay", _OPTIM + "weight_decay", 0.01 if str(kind).lower() == "adamw" else 0.0)
    if name == "sgd":
        found.copy_number("optim.momentum", _OPTIM + "momentum", 0.0)
        return
    betas = found.take(_OPTIM + "betas", (0.9, 0.99) if name == "lion" else (0.9, 0.999))
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"{_OPTIM}betas: expected two numbers, got {betas!r}")
    for key, value in zip(("beta1", "beta2"), betas, strict=True):
        found.put(f"optim.{key}", value, _OPTIM + "betas")
    if name != "lion":
        found.copy_number("optim.eps", _OPTIM + "eps", 1e-8)


def _rate(found: ConfigConversion) -> None:
    kind = found.take("scheduler.type")
    if kind is None:
        return
    if str(kind).lower() not in _DECAYS:
        found.drop("scheduler.type", "only WarmupLR, WarmupDecayLR and WarmupCosineLR are read")
        return
    least, shape = _DECAYS[str(kind).lower()]
    found.put("optim.schedule", shape, "scheduler.type")
    found.put("optim.min_lr_ratio", found.number(_RATE + "cos_min_ratio", least), "scheduler.type")
    found.copy_number("optim.warmup_steps", _RATE + "warmup_num_steps", 1000)
    found.copy_number("train.steps", _RATE + "total_num_steps")
    found.copy_number("optim.lr", _RATE + "warmup_max_lr")
    found.drop(_RATE + "warmup_min_lr", "Muster's warm-up begins at 0")
    if str(found.take(_RATE + "warmup_type", "log")) != "linear":
        found.options = {**found.options, _RATE + "warmup_type": found.take(_RATE + "warmup_type", "log (default)")}
        found.drop(_RATE + "warmup_type", "Muster's warm-up is linear")
