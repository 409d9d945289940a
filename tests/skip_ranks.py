"""Work of each rank in the tests of micro-batches that skip or swap stages, and the emulator that they are held to."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.model.decoder import Decoder
from muster.parallel.world import open_world
from muster.schedule.check import check
from muster.schedule.paths import Paths
from muster.schedule.resolve import pin_schedule, resolve_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.skippipe import order_passes
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.parameter_updater import ParameterUpdater
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run


@contextmanager
def unweighted() -> Iterator[None]:
    """Gradients of a stage are divided by the labels of all micro-batches."""
    with patch.object(ParameterUpdater, "_multiply_gradients"):
        yield


@contextmanager
def in_turn() -> Iterator[None]:
    """Micro-batches see the stages of their paths in the model's order."""
    of_case = plan_of

    def faulty(config: RunConfig, name: str, paths: list[list[int]], placement: list[int] | None) -> Plan:
        return of_case(config, name, [sorted(path) for path in paths], placement)

    with patch(f"{__name__}.plan_of", faulty):
        yield


@contextmanager
def unswapped() -> Iterator[None]:
    """Under schedule checkfree-plus all micro-batches see all stages in turn."""

    def faulty(num_stages: int, num_micro_batches: int) -> Paths:
        return (tuple(range(num_stages)),) * num_micro_batches

    with patch("muster.schedule.checkfree_plus.swapped_paths", faulty):
        yield


FAULTS = {None: nullcontext, "unweighted": unweighted, "in turn": in_turn, "unswapped": unswapped}


def plan_of(config: RunConfig, name: str, paths: list[list[int]] | None, placement: list[int] | None) -> Plan:
    """The plan of that name with the paths and places that its search finds, or with given ones."""
    plan = parse_plan_name(name, Plan(precision="fp64", micro_batch_size=1))
    if paths is None:
        return resolve_schedule(plan, config.model, config.workload)
    count, places = plan.num_micro_batches(config.workload), tuple(placement or range(plan.num_stages))
    own = tuple(tuple(paths[number % len(paths)]) for number in range(count))
    spec = ScheduleSpec(plan.pp, count, plan.vpp)
    ranks = order_passes(spec, places, own, (plan.num_stages,) * plan.num_stages)
    pinned = pin_schedule(Schedule("skippipe", places, count, ranks, paths=own), "nominal")
    return plan.model_copy(update={"pinned_schedule": pinned})


def run_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case of `payload["cases"]` in turn, in a world of its own."""
    found = []
    for index, case in enumerate(payload["cases"]):
        with FAULTS[case.get("fault")]():
            config, plan = _setting(**case)
        require_runnable(plan, config.model, config.workload, world_size)
        with open_world(store, rank, world_size, plan, index) as world, FAULTS[case.get("fault")]():
            trainer = Trainer(config, plan, world, open_data(config, payload["folder"]))
            check(trainer.program)
            results = [trainer.step() for _ in range(config.train.num_steps)]
            losses, norms = [one.loss for one in results], [one.grad_norm for one in results]
            found.append(_found(trainer, losses, norms, plan))
    return found


def emulate_cases(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The same cases on one process: one micro-batch after another through the layers of its path."""
    found = []
    for index, case in enumerate(payload["cases"]):
        config, plan = _setting(**case)
        serial = Plan(precision=plan.precision, micro_batch_size=plan.micro_batch_size)
        with open_world(store, rank, world_size, serial, index) as world:
            found.append(_emulate(Trainer(config, serial, world, open_data(config, payload["folder"])), plan))
    return found


def _emulate(trainer: Trainer, plan: Plan) -> dict[str, Any]:
    """Train with gradients that are averaged, for each stage, over the labels of the micro-batches that see it."""
    (stage,), losses, norms = trainer.stages.values(), [], []
    parameters, count = dict(stage.module.named_parameters()), trainer.batch_loader.num_micro_batches
    layers = [plan.layers(index, trainer.config.model.num_layers) for index in range(plan.num_stages)]
    stage_of = {layer: index for index, own in enumerate(layers) for layer in own}
    for _ in range(trainer.config.train.num_steps):
        state = trainer.load_batch()
        assert stage.inputs is not None
        sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        valid, loss_sum = dict.fromkeys(parameters, 0), 0.0
        for number in range(count):
            path = plan.paths[number % len(plan.paths)]
            labels_BS = stage.inputs.labels_M[number]
            documents = stage.inputs.documents_M[number] if stage.inputs.documents_M is not None else None
            stage.module.position_state.documents = documents
            logits_BSV = _through(stage.module, stage.inputs.tokens_M[number], [n for s in path for n in layers[s]])
            loss = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="sum")
            loss_sum += float(loss.detach())
            grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for name, grad in zip(parameters, grads, strict=True):
                is_layer = name.startswith("layers.")
                assert (grad is not None) == (not is_layer or stage_of[int(name.split(".")[1])] in path), name
                if grad is not None:
                    sums[name] += grad
                    valid[name] += int((labels_BS != -100).sum())
        for name, parameter in parameters.items():
            parameter.grad = sums[name] / valid[name]
        trainer.updater.reduce_norm(decides=False)
        trainer.updater.apply()
        trainer.step_count, trainer.samples_consumed = (
            trainer.step_count + 1,
            state.step * len(plan.paths) * (count // len(plan.paths)) * plan.micro_batch_size,
        )
        losses.append(loss_sum / state.num_valid)
        norms.append(state.grad_norm)
    return _found(trainer, losses, norms, plan)


def _through(module: Decoder, tokens_BS: Tensor, order: list[int]) -> Tensor:
    """Logits after the layers of these numbers in this order."""

    def run_layers(layers: Any, x_BSD: Tensor, constants: Any) -> Tensor:
        shared = list(constants)
        for layer in order:
            x_BSD = layers[layer](x_BSD, *shared[layer])
        return x_BSD

    with patch.object(module, "run_layers", run_layers):
        return module(tokens_BS)


def _found(trainer: Trainer, losses: list[float], norms: list[float], plan: Plan) -> dict[str, Any]:
    tensors = trainer.updater.parameters
    return {
        "losses": losses,
        "norms": norms,
        "paths": plan.paths,
        "digests": {name: hashlib.sha256(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()},
        "values": {
            name: one.flatten().tolist()
            for name, one in tensors.items()
            if trainer.updater.layouts[name].shape == tuple(one.shape)
        },
    }


def _setting(
    plan: str,
    paths: list[list[int]] | None = None,
    placement: list[int] | None = None,
    packing: Any = "concatenate",
    tied: bool = False,
    layers: int = 4,
    fault: str | None = None,
) -> tuple[RunConfig, Plan]:
    config = small_run(tied, 3, layers, packing=packing)
    config = config.model_copy(update={"train": config.train.model_copy(update={"sample_tokens": 0})})
    return config, plan_of(config, plan, paths, placement)
