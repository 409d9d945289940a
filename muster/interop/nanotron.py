"""nanotron's YAML as a run file.

Names and defaults are those of github:huggingface/nanotron, src/nanotron/config/.
"""

from collections.abc import Mapping
from typing import Any

from muster.interop.conversion import ConfigConversion
from muster.interop.hf_config import spec_from_hf_config
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError

PROGRAM = "nanotron"
_MODEL = "model.model_config."
_PARALLEL = "parallelism."
_TOKENS = "tokens."
_OPTIM = "optimizer."
_RATE = "optimizer.learning_rate_scheduler."
_READ = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_READ += ("intermediate_size", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")
_READ += ("tie_word_embeddings", "attention_bias", "is_llama_config", "is_qwen2_config")
_ELSEWHERE = ("attention_bias", "initializer_range")
"""Keys with another meaning than in a Hugging Face config.json, or none."""
_REASONS = {
    "checkpoints.": "runs are saved below --run; initial weights are train.init_from",
    "data_stages": "set data.source or data.blend",
    "general.": "a run is named by its directory, --run",
    "logging.": "metrics are in the run directory",
    "metrics_logging": "metrics are in the run directory",
    "tokenizer.": "a tokenizer is a file here: set data.tokenizer",
    "parallelism.tp_linear_async_communication": "Muster always overlaps; tp_overlap: async_tp overlaps more",
    "parallelism.tp_recompute_allgather": "set by the plan's recompute",
    "optimizer.accumulate_grad_in_fp32": "Muster always accumulates gradients in fp32",
    "model.ddp_bucket_cap_mb": "parallel.bucket_layers counts layers",
    "model.make_vocab_size_divisible_by": "any vocabulary size can be sharded: none is padded",
    "model.model_config.bos_token_id": "data.tokenizer sets it",
    "model.model_config.eos_token_id": "data.tokenizer sets it",
    "model.model_config.initializer_range": "model.init_method.std sets it",
    "optimizer.optimizer_factory.torch_adam_is_fused": "a run file doesn't choose kernels",
}


def read_nanotron(tree: Mapping[str, Any]) -> ConfigConversion:
    """Convert a configuration. Raises ConfigError for anything else."""
    for section in ("model", "parallelism", "tokens", "optimizer"):
        if not isinstance(tree.get(section), Mapping):
            raise ConfigError(f"{section}: missing, expected the YAML of a nanotron training")
    found = ConfigConversion(PROGRAM, dict(flatten(tree)))
    _model(found, tree["model"].get("model_config"))
    _plan(found)
    _train(found)
    _optim(found)
    found.drop_rest(_REASONS)
    return found


def _model(found: ConfigConversion, config: Mapping[str, Any] | None) -> None:
    if not isinstance(config, Mapping) or config.get("moe_config"):
        raise ConfigError(
            "model.model_config: expected that of a dense Llama or Qwen2, which is what Muster reads here"
        )
    bias = bool(config.get("attention_bias", False))
    plain = {key: value for key, value in config.items() if value is not None and key not in _ELSEWHERE}
    spec = spec_from_hf_config({**plain, "model_type": "llama"})
    used = {option for option in found.options if option.removeprefix(_MODEL).partition(".")[0] in _READ}
    found.used |= {option for option in used if option.startswith(_MODEL)}
    for key, value in flatten(spec.model_dump(mode="json", exclude_unset=True)):
        if key != "name":
            found.put(f"model.{key}", value, "model.model_config.hidden_size")
            found.origins[f"model.{key}"] = "model.model_config"
    found.put("model.qkv_bias", bias, _MODEL + "attention_bias")
    found.copy_number("model.init_std", "model.init_method.std")
    if found.take(_MODEL + "z_loss_enabled", False):
        found.copy_number("train.z_loss", _MODEL + "z_loss_coefficient", 1e-4)


def _plan(found: ConfigConversion) -> None:
    sizes = {key: found.copy_number(f"parallel.{key}", _PARALLEL + key) for key in ("tp", "pp")}
    if None in sizes.values():
        raise ConfigError("parallelism: expected dp, tp and pp")
    found.copy_number("parallel.cp", _PARALLEL + "context_parallel_size", 1)
    found.copy_number("parallel.ep", _PARALLEL + "expert_parallel_size", 1)
    stage = found.number(_OPTIM + "zero_stage", 0)
    ranks = found.number(_PARALLEL + "dp", 1)
    found.put("parallel.dp_shard" if stage else "parallel.dp_replicate", ranks, _PARALLEL + "dp")
    found.put("parallel.default_strategy.zero", f"z{stage or 1}", _OPTIM + "zero_stage")
    engine = str(found.take(_PARALLEL + "pp_engine", "afab"))
    found.put("parallel.schedule", "1f1b" if engine == "1f1b" else "gpipe", _PARALLEL + "pp_engine")
    mode = str(found.take(_PARALLEL + "tp_mode", "ALL_REDUCE")).upper()
    found.put("parallel.default_strategy.sp", mode == "REDUCE_SCATTER" and sizes["tp"] > 1, _PARALLEL + "tp_mode")
    full = found.take(_PARALLEL + "recompute_layer", False)
    found.put("parallel.default_strategy.recompute", "full" if full else "none", _PARALLEL + "recompute_layer")
    kind = str(found.take("model.dtype", "bfloat16"))
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    if kind not in names:
        raise ConfigError(f"model.dtype {kind}: expected one of {', '.join(names)}")
    found.put("parallel.precision", names[kind], "model.dtype")
    found.copy_number("parallel.micro_batch_size", _TOKENS + "micro_batch_size", 1)


def _train(found: ConfigConversion) -> None:
    ranks = found.values.get("parallel.dp_shard", 1) * found.values.get("parallel.dp_replicate", 1)
    rounds = found.number(_TOKENS + "batch_accumulation_per_replica", 1)
    batch = found.values["parallel.micro_batch_size"] * rounds * ranks
    parts = (_TOKENS + "micro_batch_size", _TOKENS + "batch_accumulation_per_replica", _PARALLEL + "dp")
    found.put("train.global_batch_size", batch, *parts)
    found.copy_number("train.seq_len", _TOKENS + "sequence_length")
    found.copy_number("train.steps", _TOKENS + "train_steps")
    found.copy_number("train.save_every", "checkpoints.checkpoint_interval")
    found.copy_number("train.log_every", "logging.iteration_step_info_interval", 1)
    found.copy_number("seed", "general.seed", 42)


def _optim(found: ConfigConversion) -> None:
    factory = _OPTIM + "optimizer_factory."
    name = str(found.take(factory + "name", "adamW")).lower()
    if name not in ("adamw", "sgd"):
        raise ConfigError(f"{factory}name {name}: expected adamW or sgd")
    found.put("optim.name", name, factory + "name")
    if name == "adamw":
        for key in ("beta1", "beta2", "eps"):
            found.copy_number(f"optim.{key}", f"{factory}adam_{key}")
    else:
        found.put("optim.momentum", 0.0)
    found.copy_number("optim.weight_decay", _OPTIM + "weight_decay")
    found.copy_number("optim.clip_norm", _OPTIM + "clip_grad", 0.0)
    _rate(found)


def _rate(found: ConfigConversion) -> None:
    rate = found.copy_number("optim.lr", _RATE + "learning_rate")
    if not rate:
        raise ConfigError(f"{_RATE}learning_rate: missing, expected a number above 0")
    steps = found.values.get("train.steps")
    warm_up = found.copy_number("optim.warmup_steps", _RATE + "lr_warmup_steps", 0)
    if found.take(_RATE + "lr_warmup_style", "linear") != "linear":
        found.drop(_RATE + "lr_warmup_style", "Muster's warm-up is linear")
    least = found.number(_RATE + "min_decay_lr", rate)
    found.put("optim.min_lr_ratio", least / rate, _RATE + "min_decay_lr")
    style = str(found.take(_RATE + "lr_decay_style", "linear"))
    start = found.number(_RATE + "lr_decay_starting_step", warm_up)
    fall = found.number(_RATE + "lr_decay_steps", (steps or 0) - start)
    if start + fall != steps:
        found.drop(_RATE + "lr_decay_steps", "Muster's learning rate decays until the last step")
    if start > warm_up or style == "1-sqrt":
        found.put("optim.schedule", "wsd", _RATE + "lr_decay_starting_step")
        shape = "sqrt" if style == "1-sqrt" else style
        found.put("optim.decay_shape", shape, _RATE + "lr_decay_style")
        if steps:
            found.put("optim.decay_fraction", (steps - start) / steps, _RATE + "lr_decay_starting_step")
    else:
        found.put("optim.schedule", style, _RATE + "lr_decay_style")
