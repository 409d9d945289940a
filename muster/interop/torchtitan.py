"""torchtitan's TOML as a run file.

Names and defaults are those of github:pytorch/torchtitan, torchtitan/config/job_config.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from muster.interop.conversion import ConfigConversion, infer_dp_size
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec

PROGRAM = "torchtitan"
_TRAIN = "training."
_PARALLEL = "parallelism."
_RATE = "lr_scheduler."
_AC = "activation_checkpoint."
_SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved", "loopedbfs": "breadth-first"}
_SCHEDULES |= {"zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v"}
_MODELS = {"llama3-405b": "llama3.1-405b", "deepseek-v3-671b": "deepseek-v3"}
"""Muster's names where they are not name-flavor."""
_SCALING = "a plan says fp8 and its recipe; the rest of scaling is the runtime's"
_REASONS = {
    "job.": "a run is named by its directory, --run",
    "profiling.": "muster report shows a step of each rank",
    "metrics.": "metrics are in the run directory",
    "checkpoint.": "runs are saved below --run; initial weights are train.init_from",
    "comm.": "set by the launcher",
    "training.dataset": "set data.source: a file, a directory or a store",
    "training.gc_": "Muster doesn't change Python's garbage collection",
    "training.dtype": "parameters are stored in fp32",
    "training.mixed_precision_reduce": "gradients are reduced in fp32",
    "model.hf_assets_path": "set data.tokenizer: a tokenizer.json or its directory",
    "model.tokenizer_path": "set data.tokenizer: a tokenizer.json or its directory",
    "quantize.": _SCALING,
    "float8.": _SCALING,
    "optimizer.implementation": "a run file doesn't choose kernels",
    "compile.": "layers are compiled: parallel.compile",
    "validation.": "set eval.every and eval.batches",
    "parallelism.pipeline_parallel_first_stage_less_layers": "layers are split evenly unless parallel.stages is set",
    "parallelism.pipeline_parallel_last_stage_less_layers": "layers are split evenly unless parallel.stages is set",
    "parallelism.module_fqns_per_model_part": "layers are split evenly unless parallel.stages is set",
    "activation_checkpoint.": "the plan sets recompute by layer: parallel.overrides",
}


def read_torchtitan(
    tree: Mapping[str, Any], nproc: int | None, load_model: Callable[[str], ModelSpec], model: str | None = None
) -> ConfigConversion:
    """Convert a job file. `load_model` finds a model by Muster's name; `model` replaces the file's where none fits.

    Raises ConfigError for anything else.
    """
    for section in ("model", "training"):
        if not isinstance(tree.get(section), Mapping):
            raise ConfigError(f"[{section}] is missing: expected the TOML of a torchtitan training")
    found = ConfigConversion(PROGRAM, dict(flatten(tree)))
    layers = _model(found, load_model, model)
    _plan(found, nproc, layers)
    _recompute(found, layers)
    _train(found)
    _optim(found)
    found.drop_rest(_REASONS)
    return found


def _model(found: ConfigConversion, load_model: Callable[[str], ModelSpec], model: str | None) -> int:
    """Convert the model; return its number of layers."""
    name = found.take("model.name", "llama3")
    flavor = found.take("model.flavor", "debugmodel")
    known = f"{name}-{flavor}".lower().replace("_", "-")
    try:
        spec = load_model(model or _MODELS.get(known, known))
    except ConfigError:
        if model:
            raise
        raise ConfigError(f"model {name} {flavor}: Muster has no such model; give --model M") from None
    for key, value in flatten(spec.model_dump(mode="json", exclude_unset=True)):
        found.put(f"model.{key}", value, "model.flavor")
    return spec.num_layers


def _plan(found: ConfigConversion, nproc: int | None, layers: int) -> None:
    degree: dict[str, int] = {}
    for key, option in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"), ("ep", "expert")):
        degree[key] = found.copy_number(f"parallel.{key}", f"{_PARALLEL}{option}_parallel_degree", 1)
    rotation = str(found.take(_PARALLEL + "context_parallel_rotate_method", "allgather"))
    if degree["cp"] > 1:
        # PyTorch's alltoall passes keys and values around a ring, each hop an all-to-all.
        kind = "all_gather" if rotation == "allgather" else "p2p"
        found.put("parallel.cp_comm_type", kind, _PARALLEL + "context_parallel_rotate_method")
    found.copy_number("parallel.etp", _PARALLEL + "expert_tensor_parallel_degree")
    replicas = found.copy_number("parallel.dp_replicate", _PARALLEL + "data_parallel_replicate_degree", 1)
    shards = found.number(_PARALLEL + "data_parallel_shard_degree", -1)
    if shards < 0:
        shards = infer_dp_size(found, nproc, degree["tp"] * degree["pp"] * degree["cp"] * replicas)
    found.put("parallel.dp_shard", shards, _PARALLEL + "data_parallel_shard_degree")
    reshard = str(found.take(_PARALLEL + "fsdp_reshard_after_forward", "default"))
    # By default parameters are gathered in each pass, but under a pipeline once for all micro-batches.
    again = reshard == "always" or (reshard == "default" and degree["pp"] == 1)
    found.put("parallel.default_strategy.zero", "z3" if again else "z2", _PARALLEL + "fsdp_reshard_after_forward")
    found.put("parallel.default_strategy.sp", degree["tp"] > 1, _PARALLEL + "tensor_parallel_degree")
    if found.take(_PARALLEL + "enable_async_tensor_parallel"):
        found.put("parallel.default_strategy.tp_overlap", "async_tp", _PARALLEL + "enable_async_tensor_parallel")
    kind = str(found.take(_TRAIN + "mixed_precision_param", "bfloat16"))
    converters = found.take("model.converters", ())
    names = [str(one) for one in (converters if isinstance(converters, list) else [converters])]
    if any("float8" in name or name.endswith("mx") for name in names):
        found.put("parallel.precision", "fp8", "model.converters")
        recipe = str(found.take("quantize.linear.float8.recipe_name", found.take("float8.recipe_name", "tensorwise")))
        if any(name.endswith("mx") for name in names):
            found.put("parallel.fp8_recipe", "mxfp8", "model.converters")
        elif recipe.startswith("rowwise"):
            options = "quantize.linear.float8.recipe_name", "float8.recipe_name"
            found.put("parallel.fp8_recipe", "rowwise", *options)
    else:
        found.put("parallel.precision", "fp32" if kind == "float32" else "bf16", _TRAIN + "mixed_precision_param")
    if found.take("compile.enable", found.take(_TRAIN + "compile")):
        found.put("parallel.compile", True, "compile.enable", _TRAIN + "compile")
    _pipeline(found, degree["pp"], layers)


def _pipeline(found: ConfigConversion, pp: int, layers: int) -> None:
    option = _PARALLEL + "pipeline_parallel_schedule"
    each = _PARALLEL + "pipeline_parallel_layers_per_stage"
    name = str(found.take(option, "1F1B"))
    per_stage = found.number(each)
    if pp == 1:
        return
    schedule = _SCHEDULES.get(name.lower())
    if schedule is None:
        found.drop(option, f"only {', '.join(_SCHEDULES)} are read; the run file says 1f1b")
        schedule = "1f1b"
    chunks = -(-layers // per_stage) // pp if per_stage else 1 if schedule in ("gpipe", "1f1b") else 2
    found.put("parallel.schedule", schedule, option)
    found.put("parallel.vpp", chunks, each, option)


def _recompute(found: ConfigConversion, layers: int) -> None:
    mode = str(found.take(_AC + "mode", "selective"))
    which = str(found.take(_AC + "selective_ac_option", "2"))
    key = "parallel.default_strategy.recompute"
    if mode == "full" or (mode == "selective" and which == "1"):
        found.put(key, "full", _AC + "mode")
    elif mode == "selective" and which == "op":
        found.put(key, "every_second_matmul", _AC + "mode", _AC + "selective_ac_option")
    elif mode == "selective" and which.isdecimal() and int(which):
        runs = [
            {"start": n, "count": 1, "strategy": {"recompute": "full"}}
            for n in range(int(which) - 1, layers, int(which))
        ]
        found.put("parallel.overrides", runs, _AC + "mode", _AC + "selective_ac_option")
    else:
        found.put(key, "none", _AC + "mode")
        if mode != "none":
            found.drop(_AC + "mode", "only full and op are read; the run file says none")


def _train(found: ConfigConversion) -> None:
    ranks = found.values["parallel.dp_shard"] * found.values["parallel.dp_replicate"]
    option = _TRAIN + ("local_batch_size" if _TRAIN + "local_batch_size" in found.options else "batch_size")
    local = found.number(option, 8)
    whole = found.number(_TRAIN + "global_batch_size", -1)
    found.put("train.global_batch_size", whole if whole > 0 else local * ranks, _TRAIN + "global_batch_size", option)
    # Without a pipeline the local batch is one micro-batch; with one it is split.
    cut = _PARALLEL + "pipeline_parallel_microbatch_size"
    size = found.number(cut, 1)
    found.put("parallel.micro_batch_size", size if found.values["parallel.pp"] > 1 else local, cut, option)
    found.copy_number("train.seq_len", _TRAIN + "seq_len", 2048)
    found.copy_number("train.steps", _TRAIN + "steps", 10_000)
    found.copy_number("train.log_every", "metrics.log_freq", 10)
    if found.take("checkpoint.enable", found.take("checkpoint.enable_checkpoint")):
        found.copy_number("train.save_every", "checkpoint.interval", 500)
    found.copy_number("seed", "training.seed")
    if found.take(_TRAIN + "deterministic"):
        found.put("train.deterministic", True, _TRAIN + "deterministic")


def _optim(found: ConfigConversion) -> None:
    name = str(found.take("optimizer.name", "AdamW"))
    if name.lower() != "adamw":
        found.drop("optimizer.name", "only torchtitan's AdamW is read; the run file says adamw")
    found.put("optim.name", "adamw", "optimizer.name")
    for key, default in (("lr", 8e-4), ("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-8), ("weight_decay", 0.1)):
        found.copy_number(f"optim.{key}", f"optimizer.{key}", default)
    found.copy_number("optim.clip_norm", _TRAIN + "max_norm", 1.0)
    warm_up = found.copy_number("optim.warmup_steps", _RATE + "warmup_steps", 200)
    steps = found.values["train.steps"]
    found.copy_number("optim.min_lr_ratio", _RATE + "min_lr_factor", 0.0)
    shape = str(found.take(_RATE + "decay_type", "linear"))
    part = found.number(_RATE + "decay_ratio")
    if part is None and shape in ("linear", "cosine"):
        found.put("optim.schedule", shape, _RATE + "decay_type")
        return
    found.put("optim.schedule", "wsd", _RATE + "decay_ratio", _RATE + "decay_type")
    found.put("optim.decay_shape", shape, _RATE + "decay_type")
    found.put("optim.decay_fraction", part or (steps - warm_up) / steps, _RATE + "decay_ratio")
