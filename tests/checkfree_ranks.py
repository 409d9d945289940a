"""Ranks of a pipeline in the tests of CheckFree: they recover state from one another, case by case."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.mesh import coordinates_of
from muster.parallel.world import open_world
from muster.spec.plan_name import parse_plan_name
from muster.train.checkfree import KeptState, recover_state
from muster.train.end_stage_copy import EndStageCopy

NUM_LAYERS = 8
LAYERS = (range(2), range(2, 4), range(4, 6), range(6, 8))
INNER_LAYERS = (range(0), range(4), range(4, 8), range(0))
"""Layers of four stages, the first and the last of which have the embedding and the head alone."""
NAMES = ("attn.q.weight", "mlp.up.weight")
ENDS = {0: ("embed.weight",), 3: ("head.weight", "norm.weight")}


def state_of(stage: int, updates: int = 6, layers: Sequence[range] = LAYERS) -> dict[str, Tensor]:
    """The state of a stage after as many updates, by stored name, the same in every process."""
    found = {}
    own = [f"layers.{layer}.{name}" for layer in layers[stage] for name in NAMES]
    for name in [*own, *ENDS.get(stage, ())]:
        for stored in (f"model/{name}", f"optim/{name}.exp_avg"):
            draw = torch.Generator().manual_seed(hash_of(f"{stored} {updates}"))
            found[stored] = torch.randn(3, 5, generator=draw, dtype=torch.float32)
    return found


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**index for index, letter in enumerate(text)) % 2**31


def on_rank(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """For each case, what `recover_state` says and the tensors that it has filled, as lists of numbers."""
    told = []
    plan = parse_plan_name(payload["plan"])
    layers = INNER_LAYERS if plan.stages else LAYERS
    with open_world(store, rank, world_size, plan) as world:
        for case in payload["cases"]:
            kept = [
                KeptState(stage, updates, step, {"of": rank}, norm, state_of(stage, updates, layers))
                for stage, updates, step, norm in case["held"][rank]
            ]
            tensors = {name: torch.full_like(tensor, -1) for name, tensor in state_of(rank, layers=layers).items()}
            found = recover_state(world, kept, tensors, NUM_LAYERS, case["kind"])
            about = (
                None
                if found is None
                else (found.step, dict(found.counters), found.approximation.sentences, found.new_parameters)
            )
            told.append((about, {name: tensor.tolist() for name, tensor in tensors.items()}))
    return told


def copies_on_rank(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> dict[str, Any]:
    """The copy that this rank has after two steps, and a third one that is cut short on rank 1."""
    plan = parse_plan_name(payload["plan"])
    with open_world(store, rank, world_size, plan) as world:
        stage = coordinates_of(plan, rank).pp
        copy = EndStageCopy(world, state_of(stage, 0, INNER_LAYERS))
        for updates in (1, 2):
            copy.renew(updates, state_of(stage, updates, INNER_LAYERS))
        if rank == 1:
            with patch.object(dist, "recv", _receive_one), suppress(ConnectionError):
                copy.renew(3, {})
        tensors = {name: tensor.tolist() for name, tensor in copy.tensors.items()}
        return {"stage": copy.stage, "updates": copy.num_updates, "tensors": tensors}


def _receive_one(tensor: Tensor, rank: int) -> None:
    """Receive the half of a tensor, before the sender is lost."""
    tensor[:1] = -1
    raise ConnectionError
