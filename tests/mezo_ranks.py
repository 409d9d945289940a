"""Ranks of the tests of zeroth-order training: a few steps under each plan, saved and resumed under others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import functional_call

from muster.checkpoint.load import load
from muster.checkpoint.save import save
from muster.config.optim_config import OptimConfig
from muster.config.run_config import RunConfig
from muster.layout.box import Box
from muster.model import perturbation
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.init import init_stage
from muster.model.perturbation import Direction, Part, whole_numbers
from muster.optim.lr import lr_at_step
from muster.parallel.offloaded_group import OffloadedGroup
from muster.parallel.perturbed_passes import PerturbedPasses
from muster.parallel.world import open_world
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run
from tests.resume_ranks import assemble

CPU = torch.device("cpu")
STEPS = 3
LR = 1e-2


def mezo_run(case: dict[str, Any]) -> RunConfig:
    config = small_run(**{key: case[key] for key in ("tied", "family", "packing") if key in case})
    optim = OptimConfig(name="mezo", lr=LR, weight_decay=0.1, **case.get("optim", {}))
    return config.model_copy(update={"optim": optim})


def train(rank: int, size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Per case, on rank 0, the losses, slopes and the sum of squares of each parameter's difference from the first case
    of its group."""
    found: list[dict[str, Any] | None] = []
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for number, case in enumerate(payload["cases"]):
        base = Plan(precision=case.get("precision", "fp64"), micro_batch_size=payload.get("micro_batch_size", 1))
        config, plan = mezo_run(case), parse_plan_name(case["plan"], base)
        result = None
        if rank < plan.world_size:
            with open_world(store, rank, plan.world_size, plan, number) as world, FAULTS[case.get("fault")]():
                trainer = Trainer(config, plan, world, open_data(config, payload["cache"]))
                if case.get("profiles"):
                    trainer.profile()
                info: dict[str, Any] = {"plan": {}, "model": {}}
                if (start := case.get("load")) is not None:
                    manifest = load(Path(start), trainer.updater.local_shards())
                    trainer.restore(manifest.step, manifest.counters)
                steps = [trainer.step() for _ in range(case.get("until", STEPS) - trainer.step_count)]
                if case.get("save"):
                    info["counters"] = trainer.counters()
                    root, shards = Path(case["save"]), trainer.updater.local_shards()
                    save(root, trainer.step_count, shards, info, rank, world.size, world.all_gather_object)
                values = assemble(world, trainer.updater.local_shards())
                result = {"losses": [one.loss for one in steps], "slopes": [one.grad_norm for one in steps]}
                result["state"] = [name for name in values if not name.startswith("model/")]
                result["gradients"] = any(local.grad is not None for local in trainer.updater.parameters.values())
            if rank == 0:
                tensors = {name: torch.from_numpy(value) for name, value in values.items()}
                first = whole.setdefault(case["group"], tensors)
                if case.get("reference"):
                    losses, first = reference(config, payload["cache"])
                    result["loss_error"] = max(abs(a - b) for a, b in zip(result["losses"], losses, strict=True))
                result["error"] = max(float((tensors[name] - first[name]).abs().max()) for name in first)
        if store.add(f"done {number}", 1) == size:
            store.set(f"all done {number}", "")
        store.wait([f"all done {number}"])
        found.append(result)
    return found


@torch.no_grad()
def reference(config: RunConfig, cache: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of the steps on one process, in float64, by plain PyTorch but for the model and the random
    numbers."""
    spec, optim, dataset = config.model, config.optim, open_data(config, cache)
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    init_stage(model, spec, config.seed)
    values = {name: value.detach().double() for name, value in model.named_parameters()}
    count, losses = config.train.global_batch_size, []
    for step in range(1, STEPS + 1):
        direction = Direction(config.seed, step)
        z = {
            name: whole_numbers(direction, Part(name, tuple(value.shape), whole_box(value)), value.device).double()
            / perturbation._STD
            for name, value in values.items()
        }
        batch = dataset.train_batch((step - 1) * count, count)
        tokens, labels = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.labels_BS)
        if batch.positions_BS is not None:
            model.position_state.documents = Documents.from_positions(torch.from_numpy(batch.positions_BS), CPU)
        at = []
        for length in (optim.zo_eps, -optim.zo_eps):
            logits = functional_call(model, {name: value + length * z[name] for name, value in values.items()}, tokens)
            at.append(float(F.cross_entropy(logits.flatten(0, 1), labels.flatten())))
        slope, lr = (at[0] - at[1]) / (2 * optim.zo_eps), lr_at_step(optim, step - 1, config.train.num_steps)
        losses.append(sum(at) / 2)
        for name, value in values.items():
            decay = optim.weight_decay if value.ndim > 1 and not name.startswith(("embed", "positions")) else 0.0
            values[name] = value - lr * (slope * z[name] + decay * value)
    return losses, {f"model/{name}": value for name, value in values.items()}


def whole_box(value: torch.Tensor) -> Box:
    return Box((0,) * value.ndim, tuple(value.shape))


# ----------------------------------------------------------------------------------------------------------------------
# Seeded bugs


@contextmanager
def no_fault() -> Iterator[None]:
    yield


@contextmanager
def numbers_of_own_parts() -> Iterator[None]:
    """Each rank draws as if its part of a parameter were the whole."""
    pieces = perturbation._pieces

    def own(direction: Any, part: Part, device: Any) -> Any:
        box = part.box.__class__((0,) * len(part.box.size), part.box.size)
        return pieces(direction, Part(part.name, part.box.size, box), device)

    with patch.object(perturbation, "_pieces", own):
        yield


@contextmanager
def one_point_for_both() -> Iterator[None]:
    """Both ranks of a pair compute the first point."""
    begin = PerturbedPasses.begin
    with patch.object(PerturbedPasses, "begin", lambda self, direction, signs: begin(self, direction, (1,))):
        yield


@contextmanager
def lost_late_update() -> Iterator[None]:
    """An update that ends the step before is dropped instead of made."""
    with patch.object(OffloadedGroup, "catch_up", OffloadedGroup.defer_nothing):
        yield


FAULTS = {
    None: no_fault,
    "own numbers": numbers_of_own_parts,
    "one point": one_point_for_both,
    "lost update": lost_late_update,
}
