"""Parts of several contestants of train_step.py: their turns, their batches, weight decay and names of parameters."""

import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from benchmarks.train_step import CLIP_NORM, WEIGHT_DECAY
from muster.data.dataset import Dataset

Batches = Iterator[tuple[Tensor, Tensor]]


class Pace:
    """Blocks until steps are wanted, and times them."""

    def __init__(self, answers: TextIO) -> None:
        self.answers = answers

    def wait(self) -> bool:
        """True when more steps are wanted, False at the end."""
        line = sys.stdin.readline()
        self._wanted = self._left = int(line or 0)
        self._start_s = perf_counter()
        return self._left > 0

    def step_done(self, loss: float) -> bool:
        """Counts a step; when the last one asked for is done, answers and waits. False at the end."""
        self._left -= 1
        if self._left:
            return True
        answer = {"seconds": perf_counter() - self._start_s, "loss": loss}
        print(json.dumps(answer), file=self.answers, flush=True)
        return self.wait()


def read_batches(dataset: Dataset, rank: int, world_size: int, global_batch: int) -> Batches:
    """This rank's tokens and labels, step by step."""
    share, step = global_batch // world_size, 0
    while True:
        batch = dataset.train_batch(step * global_batch + rank * share, share)
        yield torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.labels_BS)
        step += 1


def is_decayed(name: str) -> bool:
    """Weight decay works on matrices, but not on the embedding, as in Muster: all must do the same work."""
    return not name.endswith("norm.weight") and name != "embed.weight"


def decayed_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: with weight decay and without."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if is_decayed(name)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named if not is_decayed(name)], "weight_decay": 0.0},
    ]


def step_deepspeed(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: dict[str, Any], batches: Batches, pace: Pace
) -> None:
    """Steps of DeepSpeed's engine around a model that returns its loss; `zero` is its `zero_optimization`."""
    import deepspeed

    tokens_BS, labels_BS = next(batches)
    config = {
        "train_micro_batch_size_per_gpu": len(tokens_BS),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    wanted = pace.wait()
    while wanted:
        loss = engine(tokens_BS, labels_BS)
        engine.backward(loss)
        engine.step()
        wanted = pace.step_done(loss.item())
        tokens_BS, labels_BS = next(batches)


def common_name(name: str) -> str:
    """Hugging Face's name of a parameter → ours."""
    for theirs, ours in (
        ("model.", ""),
        ("embed_tokens", "embed"),
        ("lm_head", "head"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("mlp.gate.", "mlp.router."),
        ("self_attn", "attn"),
        ("_proj", ""),
    ):
        name = name.replace(theirs, ours)
    return name
