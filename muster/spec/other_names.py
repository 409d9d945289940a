"""Keys of other trainers' configurations, and where Muster has them, for the sentence about an unknown key."""

_BATCH = "parallel.micro_batch_size"
_STEPS = "train.steps"
_SEQ_LEN = "train.seq_len"
_RECOMPUTE = "parallel.default_strategy.recompute"
_PRECISION = "parallel.precision"
_DROPOUT = "model.hidden_dropout (beside model.attention_dropout and model.embedding_dropout)"
_FOUR_BIT = "adapter.load_in_4bit (NF4 with double quantization)"
_LORA = "the section adapter has low-rank adapters, such as adapter.r: 8"

OTHER_NAMES: dict[str, str] = {
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "batch_size": "train.global_batch_size",
    "bf16": _PRECISION,
    "attn_pdrop": "model.attention_dropout",
    "block_size": _SEQ_LEN,
    "dropout": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "early_stopping": "train.early_stopping_patience (with train.early_stopping_min_delta)",
    "early_stopping_threshold": "train.early_stopping_min_delta",
    "load_in_4bit": _FOUR_BIT,
    "quantize_base": _FOUR_BIT,
    "quantization_bit": _FOUR_BIT,
    "bnb_4bit_quant_type": _FOUR_BIT,
    "bnb_4bit_use_double_quant": _FOUR_BIT,
    "load_best_model_at_end": "train.keep_best",
    "min_delta": "train.early_stopping_min_delta",
    "patience": "train.early_stopping_patience",
    "callbacks": "train.callbacks (names that a plugin registers)",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "dataset_path": "data.source",
    "embd_pdrop": "model.embedding_dropout",
    "early_step_in_backward": "train.update_in_backward",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "evaluation_strategy": "eval.every",
    "fp16": _PRECISION,
    "freeze": "optim.freeze (patterns of parameter names)",
    "freeze_layers": "optim.freeze (patterns of parameter names)",
    "frozen_parameters": "optim.freeze (patterns of parameter names)",
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_clipping": "optim.clip_norm",
    "learning_rate": "optim.lr",
    "local_batch_size": _BATCH,
    "logging_steps": "train.log_every",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip_norm",
    "max_length": _SEQ_LEN,
    "max_seq_length": _SEQ_LEN,
    "max_steps": _STEPS,
    "min_lr": "optim.min_lr_ratio (a part of optim.lr)",
    "mixed_precision": _PRECISION,
    "model_name_or_path": "model (as hf:DIR), with train.init_from for its weights",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "optimizer": "optim",
    "optimizer_in_bwd": "train.update_in_backward",
    "per_device_eval_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "resid_pdrop": "model.hidden_dropout",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_last",
    "scheduler": "optim.schedule",
    "seq_length": _SEQ_LEN,
    "sequence_length": _SEQ_LEN,
    "train_batch_size": "train.global_batch_size",
    "train_iters": _STEPS,
    "train_micro_batch_size_per_gpu": _BATCH,
    "training": "train",
    "warmup_ratio": "optim.warmup_steps (a number of steps)",
    "warmup_iters": "optim.warmup_steps",
    "zero_stage": "parallel.default_strategy.zero",
}
"""Key, of whatever section (Hugging Face's Trainer, DeepSpeed, torchtitan, Megatron-LM) → Muster's dotted key, with a
remark in brackets where it means something else."""

WITHOUT_KEY: dict[str, str] = {
    "dataloader_num_workers": "samples are read ahead by a thread of its own: leave it out",
    "gradient_accumulation_steps": (
        "it follows from train.global_batch_size, parallel.micro_batch_size and the data-parallel ranks of the plan"
    ),
    "lora": _LORA,
    "load_in_8bit": "adapter.load_in_4bit holds frozen weights in 4 bits; there is no 8-bit form of them",
    "qlora": f"{_LORA}; with adapter.load_in_4bit: true beside weights in 4 bits",
    "lora_alpha": _LORA,
    "lora_rank": _LORA,
    "output_dir": "muster train --run names the directory",
    "unfrozen_parameters": "optim.freeze names those that are frozen",
    "resume_from_checkpoint": "the same command resumes a run by itself: leave it out",
}
"""Key → what stands in its place."""


def other_name_hint(path: str) -> str:
    """Return the end of a sentence about an unknown key that another trainer has; empty where none is known."""
    for part in reversed(path.split(".")):
        if part in OTHER_NAMES:
            return f"; that is {OTHER_NAMES[part]} here"
        if part in WITHOUT_KEY:
            return f": {WITHOUT_KEY[part]}"
    return ""
