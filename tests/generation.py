"""What each rank does in the test of text from several ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.load import load
from muster.checkpoint.piece import Piece
from muster.model.cache import KvCache
from muster.parallel.axis import TensorAxis
from muster.parallel.generation import decoder_for_text, join_words
from muster.parallel.world import open_world
from muster.spec.generation import Sampling
from muster.spec.plan import Plan
from muster.train.text import Request, Source, find_source, make_texts

CPU = torch.device("cpu")


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> dict[str, Any]:
    """In float64, logits and texts of ranks that share each layer, and those of one process."""
    source = find_source(Path(payload["run"]))
    plan = Plan(tp=world_size, precision="fp64")
    prompts, greedy = ("import ", "d", "class Text:\n    "), Sampling(temperature=0)
    request = Request(source=source, plan=plan, prompts=prompts, tokens=90, sampling=greedy)
    expected = logits_of(source, None)
    with open_world(store, rank, world_size, plan) as world:
        axis = world.tensor_axis(plan.default_strategy)
        found = logits_of(source, axis)
        texts = make_texts(request, CPU, axis)
    alone = request.model_copy(update={"plan": Plan(precision="fp64")})
    return {
        "difference": float((found - expected).abs().max()),
        "largest": float(expected.abs().max()),
        "texts": texts,
        "expected": make_texts(alone, CPU),
    }


def logits_of(source: Source, axis: TensorAxis | None) -> Tensor:
    """After each of three reads of a few tokens."""
    model, layouts = decoder_for_text(source.model, "fp64", CPU, axis)
    pieces = [Piece(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]
    load(source.checkpoint, pieces, convert=True)
    tokens = torch.arange(24).view(2, 12) * 7 % source.model.vocab_size
    logits = []
    with KvCache(model, torch.tensor([0, 3]), capacity=12) as cache:
        for part in tokens.split((7, 1, 4), dim=1):
            own = cache.read(part)
            logits.append(own if axis is None else join_words(axis, source.model.vocab_size, own))
    return torch.stack(logits)
