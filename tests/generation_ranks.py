"""Ranks in the tests of text generation and evaluation on several ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.model.kv_cache import KvCache
from muster.parallel.axis import TensorAxis
from muster.parallel.inference import all_gather_logits, build_inference_decoder
from muster.parallel.world import open_world
from muster.spec.plan import Plan
from muster.spec.text_generation import SamplingParams
from muster.train import evaluate
from muster.train.text_generation import GenerationRequest, TrainedModel, find_trained_model, generate_texts

CPU = torch.device("cpu")


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> dict[str, Any]:
    """In float64, logits and texts of ranks that share each layer, and those of one process."""
    source = find_trained_model(Path(payload["run"]))
    plan = Plan(tp=world_size, precision="fp64")
    prompts, greedy = ("import ", "d", "class Text:\n    "), SamplingParams(temperature=0)
    request = GenerationRequest(trained_model=source, plan=plan, prompts=prompts, max_new_tokens=90, sampling=greedy)
    expected = logits_of(source, None)
    with open_world(store, rank, world_size, plan) as world:
        axis = world.tensor_axis(plan.default_strategy)
        found = logits_of(source, axis)
        texts = generate_texts(request, CPU, axis)
    alone = request.model_copy(update={"plan": Plan(precision="fp64")})
    return {
        "difference": float((found - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "texts": texts,
        "expected": generate_texts(alone, CPU),
    }


def evaluate_loss(
    rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Losses by source, as a rank of the plan."""
    opened = evaluate._open(evaluate.EvalOptions.model_validate(payload))
    with open_world(store, rank, world_size, opened.plan) as world:
        return evaluate._evaluate(opened, world.device, world)


def logits_of(source: TrainedModel, axis: TensorAxis | None) -> Tensor:
    """After each of three reads of a few tokens."""
    model, layouts = build_inference_decoder(source.model, "fp64", CPU, axis)
    shards = [LocalShard(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]
    load(source.checkpoint, shards, convert=True)
    tokens = torch.arange(24).view(2, 12) * 7 % source.model.vocab_size
    logits = []
    with KvCache(model, torch.tensor([0, 3]), capacity=12) as cache:
        for part in tokens.split((7, 1, 4), dim=1):
            own = cache.read(part)
            logits.append(own if axis is None else all_gather_logits(axis, source.model.vocab_size, own))
    return torch.stack(logits)
