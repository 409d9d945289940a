"""HD-PiSSA as its paper has it, in one process, and what each rank finds beside it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.adapters import pissa_weights
from muster.checkpoint.tensors import TensorMeta, TensorSource
from muster.config.run_config import RunConfig
from muster.cost.comm_volume import adapter_step_bytes
from muster.layout.tensor_layout import Box
from muster.model.decoder import Decoder
from muster.model.init import initial_value
from muster.optim.lr import lr_at_step
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.stage import DecoderStage
from muster.parallel.world import open_world
from muster.spec.adapters import AdapterSpec
from muster.spec.model import parameter_shapes
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run, sums_of

STEPS = 3


def run_of(parts: int) -> RunConfig:
    adapter = AdapterSpec(kind="hd_pissa", r=2, parts=parts, lora_alpha=3, target_modules=("q", "v", "o", "down"))
    config = small_run(layers=2).model_dump()
    return RunConfig.model_validate(config | {"adapter": adapter, "train": config["train"] | {"init_from": "base"}})


class Tensors:
    """Tensors in memory as a `TensorSource`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.metas = {name: TensorMeta(tuple(one.shape), one.dtype) for name, one in tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._tensors[name][box.slices].clone()


def start(config: RunConfig) -> TensorSource:
    """The base model, whose singular vectors are far apart, and the adapters that it begins with."""
    base = config.model.model_copy(update={"adapter": None})
    values = {
        name: initial_value(base, name, shape, config.seed).double() * 3 for name, shape in parameter_shapes(base)
    }
    return pissa_weights(Tensors(values), config.model)


@lru_cache
def reference(parts: int, cache: str) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The weights with adapters before and after each step, and the losses, from the gradients of whole weights."""
    config = run_of(parts)
    spec, optim, dataset, size = config.model, config.optim, open_data(config, cache), config.train.global_batch_size
    assert spec.adapter is not None
    r, scaling = spec.adapter.r, spec.adapter.scaling
    began = start(config)
    read = {name: began.read(name, meta.whole) for name, meta in began.metas.items()}
    model = Decoder(spec.model_copy(update={"adapter": None}), range(spec.num_layers), first=True, last=True).double()
    model.load_state_dict({name: read[name] for name, _ in model.named_parameters()}, strict=False)
    named = dict(model.named_parameters())
    modules = [name.removesuffix(".lora_A.weight") for name in read if name.endswith(".lora_A.weight")]
    factors = {
        (module, part): (
            read[f"{module}.lora_A.weight"][part * r : (part + 1) * r],
            read[f"{module}.lora_B.weight"][:, part * r : (part + 1) * r],
        )
        for module in modules
        for part in range(parts)
    }
    moments = {key: [torch.zeros_like(x) for x in (a, a, b, b)] for key, (a, b) in factors.items()}
    weights, losses = [{module: named[f"{module}.weight"].detach().clone() for module in modules}], []
    for step in range(STEPS):
        whole = dataset.train_batch(step * size, size)
        total, grads = 0.0, {}
        for part in range(parts):
            own = dataset.train_batch(step * size + part * (size // parts), size // parts)
            loss = sums_of(model, own, None)[0] / whole.num_valid_tokens
            model.zero_grad()
            loss.backward()
            total += loss.item()
            for module in modules:
                a, b = factors[module, part]
                g = named[f"{module}.weight"].grad
                assert g is not None
                grads[module, part] = scaling * b.T @ g, scaling * g @ a.T
        norm = sum(float(g.square().sum()) for pair in grads.values() for g in pair) ** 0.5
        clip = min(1.0, optim.clip_norm / (norm + 1e-6))
        lr, t = lr_at_step(optim, step, config.train.num_steps), step + 1
        with torch.no_grad():
            for (module, part), pair in grads.items():
                steps = []
                for index, g in enumerate(pair):
                    m, v = moments[module, part][2 * index : 2 * index + 2]
                    m.mul_(optim.beta1).add_(g * clip, alpha=1 - optim.beta1)
                    v.mul_(optim.beta2).add_((g * clip) ** 2, alpha=1 - optim.beta2)
                    root = (v / (1 - optim.beta2**t)).sqrt() + optim.eps
                    steps.append(lr * m / (1 - optim.beta1**t) / root)
                a, b = factors[module, part]
                da, db = steps
                named[f"{module}.weight"].sub_(scaling * (db @ a + b @ da - db @ da))
        weights.append({module: named[f"{module}.weight"].detach().clone() for module in modules})
        losses.append(total)
    return weights, losses


@contextmanager
def one_part() -> Iterator[None]:
    """All micro-batches give their gradients to the first part."""
    with patch.object(DecoderStage, "_select_part", lambda self, unit: None):
        yield


@contextmanager
def counted_bytes(sent: list[int]) -> Iterator[None]:
    """Add what this rank sends its peers up."""
    exchange = PeerGroup.all_to_all

    def count(self: PeerGroup, sends: Any, receives: Any) -> None:
        sent[0] += sum(one.nbytes for member, one in enumerate(sends) if member != self.member)
        exchange(self, sends, receives)

    with patch.object(PeerGroup, "all_to_all", count):
        yield


def on_rank(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case in turn: errors of weights and losses, and the bytes sent in a step beside the forecast."""
    found = []
    for generation, case in enumerate(payload["cases"]):
        config = run_of(case["parts"])
        plan = parse_plan_name(case["plan"], Plan(precision="fp64", micro_batch_size=1))
        require_runnable(plan, config.model, config.workload, world_size)
        weights, losses = reference(case["parts"], payload["cache"])
        source, sent = start(config), [0]
        with open_world(store, rank, world_size, plan, generation) as world, ExitStack() as stack:
            if case.get("fault"):
                stack.enter_context(one_part())
            trainer = Trainer(config, plan, world, open_data(config, payload["cache"]))
            for shard in trainer.local_shards():
                group, _, name = shard.name.partition("/")
                for box, view in shard.box_views() if group == "model" else ():
                    view.copy_(source.read(name, box))
            stack.enter_context(counted_bytes(sent))
            results = [trainer.step() for _ in range(STEPS)]
            error, num_compared = 0.0, 0
            for module, expected in weights[-1].items():
                name = f"{module}.weight"
                if (layout := trainer.updater.layouts.get(name)) is None or not layout.boxes:
                    continue
                part = torch.cat([expected[box.slices] for box in layout.boxes])
                moved = float((weights[-1][module] - weights[0][module]).abs().max())
                error = max(error, float((trainer.updater.parameters[name] - part).abs().max()) / moved)
                num_compared += 1
            found.append(
                {
                    "error": error,
                    "num_compared": num_compared,
                    "loss_error": max(abs(one.loss - loss) / loss for one, loss in zip(results, losses, strict=True)),
                    "sent": [sent[0] / STEPS, adapter_step_bytes(config.model, plan, rank)],
                }
            )
    return found
