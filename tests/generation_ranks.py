"""Ranks in the tests of text generation and evaluation on several ranks."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.model.decoder import Decoder
from muster.model.kv_cache import KvCache
from muster.model.routing import Routing
from muster.parallel import ep_slicing
from muster.parallel.axis import ExpertAxis, TensorAxis
from muster.parallel.ep_slicing import local_pairs
from muster.parallel.inference import all_gather_logits, build_inference_decoder
from muster.parallel.world import open_world
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.text_generation import SamplingParams
from muster.train import evaluate
from muster.train.text_generation import GenerationRequest, TrainedModel, find_trained_model, generate_texts
from tests.parity import small_run, start_value

CPU = torch.device("cpu")


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> dict[str, Any]:
    """In float64, logits and texts of ranks that share each layer, and those of one process."""
    source = find_trained_model(Path(payload["run"]))
    plan = Plan(tp=world_size, precision="fp64")
    prompts, greedy = ("import ", "d", "class Text:\n    "), SamplingParams(temperature=0)
    request = GenerationRequest(trained_model=source, plan=plan, prompts=prompts, max_new_tokens=60, sampling=greedy)
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
    return _read(model, source.model, axis)


def compare_experts(
    rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]
) -> dict[str, list[float | bool]]:
    """In float64, by family: the largest difference of logits to those of one process, relative to the largest logit;
    `fault`: every rank takes the rows of the first one's experts."""
    plan = parse_plan_name(payload["plan"], Plan(precision="fp64"))
    found: dict[str, list[float | bool]] = {}
    with open_world(store, rank, world_size, plan) as world:
        axis, experts = world.tensor_axis(plan.default_strategy), world.expert_axis()
        for family in payload["families"]:
            spec = small_run(family=family).model
            whole, layouts = build_inference_decoder(spec, "fp64", CPU, None)
            for name, parameter in whole.named_parameters():
                parameter.copy_(4 * start_value(spec, name, layouts[name].shape, seed=3))
            own, layouts = build_inference_decoder(spec, "fp64", CPU, axis, experts)
            sizes = dict(whole.named_parameters())
            for name, parameter in own.named_parameters():
                for box, view in LocalShard(name, layouts[name], parameter).box_views():
                    view.copy_(sizes[name][box.slices])
            first = patch.object(ep_slicing, "local_pairs", lambda routing, axis: _pairs_of_first(routing, axis))
            with first if payload.get("fault") else nullcontext():
                logits, expected = _read(own, spec, axis), _read(whole, spec, None)
            found[family] = [float((logits - expected).abs().max() / expected.abs().max()), experts is not None]
    return found


def _pairs_of_first(routing: Routing, axis: ExpertAxis) -> Routing:
    return local_pairs(routing, replace(axis, index=0))


def _read(model: Decoder, spec: ModelSpec, axis: TensorAxis | None) -> Tensor:
    """Logits after each of three reads of a few tokens of two texts."""
    tokens, logits = torch.arange(24).view(2, 12) * 7 % spec.vocab_size, []
    with KvCache(model, torch.tensor([0, 3]), capacity=12) as cache:
        for part in tokens.split((7, 1, 4), dim=1):
            own = cache.read(part)
            logits.append(own if axis is None else all_gather_logits(axis, spec.vocab_size, own))
    return torch.stack(logits)
