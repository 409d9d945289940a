"""Megatron-LM's command line as a run file.

Names and defaults are those of github:NVIDIA/Megatron-LM, megatron/training/arguments.py.
"""

from math import lcm
from typing import Any

from muster.interop.conversion import ConfigConversion, infer_dp_size
from muster.interop.shell_options import parse_shell_options
from muster.spec.errors import ConfigError

PROGRAM = "Megatron-LM"
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_SHARDING = {"no_shard": None, "optim": "z1", "optim_grads": "z2", "optim_grads_params": "z3"}
_CP_COMM_TYPES = {"p2p", "all_gather", "a2a", "a2a+p2p"}
_GPT2_WORDS = 50257
_KERNELS = "a run file doesn't choose kernels"
_ALWAYS = "always on in Muster"
_REASONS = {
    "attention-backend": _KERNELS,
    "use-flash-attn": "always on in Muster: attention is fused",
    "use-mcore-models": _KERNELS,
    "transformer-impl": _KERNELS,
    "no-": _KERNELS,
    "overlap-grad-reduce": _ALWAYS,
    "overlap-param-gather": _ALWAYS,
    "grad-reduce-in-bf16": "parallel.grad_reduce_dtype: bf16 does so, with sums in fp32",
    "tp-comm-overlap": "parallel.default_strategy.tp_overlap: async_tp does so; measure it first",
    "make-vocab-size-divisible-by": "any vocabulary size can be sharded: none is padded",
    "load": "initial weights are train.init_from, once converted: muster checkpoint --help",
    "save": "runs are saved below --run",
    "tensorboard": "metrics are in the run directory",
    "wandb": "metrics are in the run directory",
    "tokenizer": "set data.tokenizer: a tokenizer.json or a SentencePiece model",
    "vocab-file": "set data.tokenizer: a tokenizer.json or a SentencePiece model",
    "merge-file": "set data.tokenizer: a tokenizer.json or a SentencePiece model",
    "split": "data.validation_split sets the validation split",
    "fp8": "a plan says fp8 or not; scaling is the runtime's",
    "moe-": "Muster's experts have no such setting",
    "rampup-batch-size": "every step has the same global batch",
    "nproc": "the plan sets the number of processes",
    "node": "set by the launcher: torchrun, or muster train itself",
    "master": "set by the launcher: torchrun, or muster train itself",
    "rdzv": "set by the launcher: torchrun, or muster train itself",
    "distributed": "set by the launcher: torchrun, or muster train itself",
}


def read_megatron(text: str, nproc: int | None) -> ConfigConversion:
    """Convert the arguments in a script or a file of arguments. Raises ConfigError for anything else."""
    found = ConfigConversion(PROGRAM, parse_shell_options(text))
    missing = [name for name in ("num-layers", "hidden-size", "num-attention-heads") if name not in found.options]
    if missing:
        raise ConfigError(f"--{missing[0]} is missing: expected the arguments of a Megatron-LM training")
    _model(found)
    _plan(found, nproc)
    _train(found)
    _optim(found)
    _data(found)
    found.drop_rest(_REASONS)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The model


def _model(found: ConfigConversion) -> None:
    put = found.put
    carry = found.copy_number
    carry("model.num_layers", "num-layers")
    hidden = carry("model.hidden_size", "hidden-size")
    carry("model.num_heads", "num-attention-heads")
    gated = bool(found.take("swiglu"))
    inner = found.number("ffn-hidden-size")
    # With a gate a third of the width goes to it, in multiples of 64 (validate_args).
    put("model.intermediate_size", inner or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden), "ffn-hidden-size")
    put("model.gated", gated, "swiglu")
    put("model.activation", "silu" if gated else "gelu_tanh", "swiglu")
    if found.options.get("squared-relu"):
        found.drop("squared-relu", "Muster has no squared ReLU; the run file says gelu_tanh")
    if found.take("group-query-attention"):
        carry("model.num_kv_heads", "num-query-groups", 1)
    carry("model.head_dim", "kv-channels")
    carry("model.attention_dropout", "attention-dropout", 0.1)
    hidden_dropout = carry("model.hidden_dropout", "hidden-dropout", 0.1)
    put("model.embedding_dropout", hidden_dropout, "hidden-dropout")  # LanguageModelEmbedding drops at the same rate
    norm = found.take("normalization", "LayerNorm")
    put("model.norm", "rms" if norm == "RMSNorm" else "layer", "normalization")
    carry("model.norm_eps", "norm-epsilon", 1e-5)
    _positions(found)
    biased = not found.take("disable-bias-linear")
    put("model.qkv_bias", biased or bool(found.take("add-qkv-bias")), "disable-bias-linear", "add-qkv-bias")
    put("model.out_bias", biased, "disable-bias-linear")
    put("model.mlp_bias", biased, "disable-bias-linear")
    put("model.qk_norm", bool(found.take("qk-layernorm")), "qk-layernorm")
    put(
        "model.tied_embeddings",
        not found.take("untie-embeddings-and-output-weights"),
        "untie-embeddings-and-output-weights",
    )
    carry("model.init_std", "init-method-std", 0.02)
    if found.options.get("tokenizer-type") == "GPT2BPETokenizer" and "vocab-size" not in found.options:
        put("model.vocab_size", _GPT2_WORDS, "tokenizer-type")
    elif "padded-vocab-size" in found.options:
        carry("model.vocab_size", "padded-vocab-size")
    carry("model.vocab_size", "vocab-size")
    _experts(found)


def _positions(found: ConfigConversion) -> None:
    kind = "rope" if found.take("use-rotary-position-embeddings") else None
    kind = found.take("position-embedding-type", kind or "learned_absolute")
    if kind not in _POSITIONS:
        raise ConfigError(f"--position-embedding-type {kind}: Muster has {', '.join(_POSITIONS)}")
    found.put("model.position", _POSITIONS[kind], "position-embedding-type", "use-rotary-position-embeddings")
    found.copy_number("model.max_positions", "max-position-embeddings")
    base = found.number("rotary-base", 10_000)
    if kind == "rope":
        found.put("model.rope_theta", base, "rotary-base")
    if found.number("rotary-percent", 1.0) != 1.0:
        found.drop("rotary-percent", "Muster rotates whole heads")


def _experts(found: ConfigConversion) -> None:
    if not found.number("num-experts"):
        return
    found.copy_number("model.moe.num_experts", "num-experts")
    found.copy_number("model.moe.top_k", "moe-router-topk", 2)
    found.copy_number("model.moe.expert_size", "moe-ffn-hidden-size", found.values["model.intermediate_size"])
    found.copy_number("model.moe.shared_size", "moe-shared-expert-intermediate-size")


# ----------------------------------------------------------------------------------------------------------------------
# The plan


def _context_parallel(found: ConfigConversion, cp: int) -> None:
    given = found.take("cp-comm-type", "p2p")  # one for all layers, or a list with one for each
    kinds = {str(one) for one in given} if isinstance(given, list) else {str(given)}
    sizes = found.take("hierarchical-context-parallel-sizes", ())  # of the exchange of heads, then of the ring
    groups = isinstance(sizes, (list, tuple)) and len(sizes) == 2 and str(sizes[0]).isdecimal()
    if kinds == {"a2a+p2p"} and not groups or len(kinds) > 1 or not kinds <= _CP_COMM_TYPES:
        found.drop("cp-comm-type", f"all layers have one of {', '.join(sorted(_CP_COMM_TYPES))}; p2p is taken")
    elif cp > 1:
        found.put("parallel.cp_comm_type", *kinds, "cp-comm-type")
        if kinds == {"a2a+p2p"}:
            found.put("parallel.cp_ulysses_degree", int(sizes[0]), "hierarchical-context-parallel-sizes")


def _plan(found: ConfigConversion, nproc: int | None) -> None:
    sizes: dict[str, int] = {}
    for key, option in (
        ("tp", "tensor-model-parallel-size"),
        ("pp", "pipeline-model-parallel-size"),
        ("cp", "context-parallel-size"),
        ("ep", "expert-model-parallel-size"),
        ("etp", "expert-tensor-parallel-size"),
    ):
        sizes[key] = found.copy_number(f"parallel.{key}", option, 1)
    _context_parallel(found, sizes["cp"])
    ranks = infer_dp_size(found, nproc or _world(found), sizes["tp"] * sizes["pp"] * sizes["cp"])
    zero = "z1" if found.take("use-distributed-optimizer") else None
    zero = _SHARDING.get(str(found.take("data-parallel-sharding-strategy")), zero)
    zero = "z3" if found.take("use-torch-fsdp2") else zero
    sources = ("use-distributed-optimizer", "data-parallel-sharding-strategy", "use-torch-fsdp2")
    _data_parallel(found, sizes, ranks, zero, sources)
    found.put("parallel.default_strategy.zero", zero or "z1", *sources)
    # Megatron turns it off for tp 1 (validate_args).
    spread = bool(found.take("sequence-parallel")) and sizes["tp"] > 1
    found.put("parallel.default_strategy.sp", spread, "sequence-parallel")
    found.copy_number("parallel.micro_batch_size", "micro-batch-size", 1)
    precision = "bf16" if found.take("bf16") else "fp16" if found.take("fp16") else "fp32"
    # e4m3 or hybrid (e5m2 for gradients); matmuls compute in it, everything else in bf16.
    precision = "fp8" if found.take("fp8-format") else precision
    found.put("parallel.precision", precision, "fp8-format", "bf16", "fp16")
    _chunks(found, sizes["pp"])
    _gathers_beside_step(found)
    _recompute(found)


def _gathers_beside_step(found: ConfigConversion) -> None:
    """Put the gathers of parameters beside the optimizer step where Muster's plans can have them."""
    option, values = "overlap-param-gather-with-optimizer-step", found.values
    if not found.take(option):
        return
    shards = values.get("parallel.dp_shard", 1) * values["parallel.cp"]
    if values["parallel.default_strategy.zero"] == "z3" or shards == 1 or "model.moe.num_experts" in values:
        found.drop(option, "stepgather needs z1 or z2, optimizer state over several ranks, and a model without experts")
    else:
        found.put("parallel.overlap_param_gather_with_optimizer_step", True, option)


def _data_parallel(
    found: ConfigConversion, sizes: dict[str, int], ranks: int, zero: str | None, sources: tuple[str, ...]
) -> None:
    """Put the data-parallel degrees: without ZeRO all ranks replicate, but for those over which experts are
    distributed."""
    if zero:
        found.put("parallel.dp_shard", ranks, *sources)
        return
    others = sizes["tp"] * sizes["cp"]
    shard = lcm(sizes["ep"] * sizes["etp"], others) // others
    if shard == 1 or ranks % shard:
        found.put("parallel.dp_replicate", ranks, *sources)
        return
    found.put("parallel.dp_shard", shard, "expert-model-parallel-size")
    found.put("parallel.dp_replicate", ranks // shard, *sources)


def _world(found: ConfigConversion) -> int | None:
    """Return the number of processes by the launcher's options, where they give it in numbers."""
    given = [found.take(name, "1") for name in ("nproc_per_node", "nnodes")]
    # The script's name may follow the last of the launcher's options.
    each, nodes = (str(value[0] if isinstance(value, list) else value) for value in given)
    known = "nproc_per_node" in found.options and each.isdecimal() and nodes.isdecimal()
    return int(each) * int(nodes) if known else None


def _chunks(found: ConfigConversion, pp: int) -> None:
    layers = found.values["model.num_layers"]
    each = found.number("num-layers-per-virtual-pipeline-stage")
    chunks = found.number("num-virtual-stages-per-pipeline-rank", layers // pp // each if each else 1)
    options = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    found.put("parallel.vpp", chunks, *options)
    found.put("parallel.schedule", "interleaved" if chunks > 1 else "1f1b", *options)


def _recompute(found: ConfigConversion) -> None:
    granularity = "selective" if found.take("recompute-activations") else None
    granularity = found.take("recompute-granularity", granularity)
    method = found.take("recompute-method", "uniform")
    count = found.number("recompute-num-layers", 1)
    if granularity == "selective":
        reason = "it recomputes attention scores, which Muster's attention never saves"
        for option in ("recompute-activations", "recompute-granularity", "recompute-modules"):
            found.drop(option, reason)
    key = "parallel.default_strategy.recompute"
    stages = found.values["parallel.pp"] * found.values["parallel.vpp"]
    layers = found.values["model.num_layers"]
    if granularity != "full":
        found.put(key, "none", "recompute-granularity")
    elif method == "block" and not layers % stages:
        runs = [
            {
                "start": stage * layers // stages,
                "count": min(count, layers // stages),
                "strategy": {"recompute": "full"},
            }
            for stage in range(stages)
        ]
        found.put("parallel.overrides", runs, "recompute-method", "recompute-num-layers")
    else:
        found.put(key, "full", "recompute-granularity")
        if count != 1 or method == "block":
            found.drop("recompute-num-layers", "Muster saves the input of every recomputed layer")


# ----------------------------------------------------------------------------------------------------------------------
# Steps, optimizer, data


def _train(found: ConfigConversion) -> None:
    found.copy_number("train.seq_len", "seq-length")
    ranks = found.values.get("parallel.dp_shard", 1) * found.values.get("parallel.dp_replicate", 1)
    batch = found.copy_number(
        "train.global_batch_size", "global-batch-size", found.values["parallel.micro_batch_size"] * ranks
    )
    if samples := found.number("train-samples"):
        found.put("train.steps", samples // batch, "train-samples")
    found.copy_number("train.steps", "train-iters")
    found.copy_number("train.log_every", "log-interval", 100)
    found.copy_number("train.save_every", "save-interval")
    found.copy_number("eval.every", "eval-interval", 1000)
    found.copy_number("eval.batches", "eval-iters", 100)
    found.copy_number("seed", "seed", 1234)


def _optim(found: ConfigConversion) -> None:
    name = str(found.take("optimizer", "adam"))
    if name not in ("adam", "sgd"):
        found.drop("optimizer", "only adam and sgd are read; the run file says adamw")
    found.put("optim.name", "sgd" if name == "sgd" else "adamw", "optimizer")
    rate = found.copy_number("optim.lr", "lr")
    if name == "sgd":
        found.copy_number("optim.momentum", "sgd-momentum", 0.9)
    else:
        found.copy_number("optim.beta1", "adam-beta1", 0.9)
        found.copy_number("optim.beta2", "adam-beta2", 0.999)
        found.copy_number("optim.eps", "adam-eps", 1e-8)
    found.copy_number("optim.weight_decay", "weight-decay", 0.01)
    found.copy_number("optim.clip_norm", "clip-grad", 1.0)
    least = found.number("min-lr", 0.0)
    if rate:
        found.put("optim.min_lr_ratio", least / rate, "min-lr", "lr")
    _schedule(found)


def _schedule(found: ConfigConversion) -> None:
    steps = found.values.get("train.steps")
    style = str(found.take("lr-decay-style", "linear"))
    batch = found.values["train.global_batch_size"]
    decay = found.number("lr-decay-iters", (found.number("lr-decay-samples") or 0) // batch or steps)
    if decay != steps:
        for option in ("lr-decay-iters", "lr-decay-samples"):
            found.drop(option, "Muster's learning rate decays until the last step")
    warm_up: Any = found.number("lr-warmup-iters", (found.number("lr-warmup-samples") or 0) // batch)
    if fraction := found.number("lr-warmup-fraction"):
        warm_up = round(fraction * (decay or 0))
    found.put("optim.warmup_steps", warm_up, "lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction")
    if style in ("linear", "cosine"):
        found.put("optim.schedule", style, "lr-decay-style")
    elif style == "constant":
        found.put("optim.schedule", "linear", "lr-decay-style")
        found.put("optim.min_lr_ratio", 1.0, "lr-decay-style")
    elif style == "WSD":
        _wsd(found, steps)
    else:
        found.drop("lr-decay-style", "Muster has cosine, linear and wsd; the run file says cosine, the default")


def _wsd(found: ConfigConversion, steps: int | None) -> None:
    found.put("optim.schedule", "wsd", "lr-decay-style")
    shape = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}.get(str(found.take("lr-wsd-decay-style")))
    if shape:
        found.put("optim.decay_shape", shape, "lr-wsd-decay-style")
    else:
        found.drop("lr-wsd-decay-style", "Muster's decays are linear, cosine and sqrt; the run file says linear")
    if (fall := found.number("lr-wsd-decay-iters")) and steps:
        found.put("optim.decay_fraction", fall / steps, "lr-wsd-decay-iters")


def _data(found: ConfigConversion) -> None:
    paths = found.take("data-path")
    words = paths if isinstance(paths, list) else [paths]
    if paths is None:
        return
    if any("$" in str(word) for word in words):
        found.drop("data-path", "its variable isn't set in the file; set data.source or data.blend")
    elif len(words) == 1:
        found.put("data.source", words[0], "data-path")
    elif len(words) % 2:
        found.drop("data-path", "expected weights and prefixes in turn; set data.source or data.blend")
    else:
        mix = [
            {"name": f"part{i // 2}", "source": words[i + 1], "weight": float(words[i])}
            for i in range(0, len(words), 2)
        ]
        found.put("data.blend", mix, "data-path")
