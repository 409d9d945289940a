"""bf16 computes in bf16 and adds up in fp32; fp16 scales its loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.model.decoder import Decoder
from muster.model.init import initial_value
from muster.model.loss import loss_sums
from muster.parallel.world import open_world
from muster.spec.plan_name import parse_plan_name
from muster.train.loss_scale import GROWTH_STEPS, LossScale
from muster.train.trainer import Trainer
from tests.parity import WatchedTrainer, open_data, reference, small_run
from tests.ranks import run_ranks
from tests.sampling import quick_sample


def micro_batch_gradients(config: RunConfig, cache: str) -> list[dict[str, Tensor]]:
    """Return the gradients of each sequence of the first step, in plain bf16."""
    dataset, spec = open_data(config, cache), config.model
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(spec, name, tuple(parameter.shape), config.seed))
    model.bfloat16()
    batch, found = dataset.train_batch(0, config.train.global_batch_size), []
    for tokens_S, labels_S in zip(batch.tokens_BS, batch.labels_BS, strict=True):
        logits = model(torch.from_numpy(tokens_S)[None])
        (loss_sums(logits, torch.from_numpy(labels_S)[None]).total / batch.num_valid_tokens).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    return found


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[tuple[float, float]]:
    """Per plan, how far this rank's gradients are from the sums of the micro-batches' in fp32 and in bf16, relative."""
    config, found = small_run(), []
    each = micro_batch_gradients(config, payload["cache"])
    for index, name in enumerate(payload["plans"]):
        plan = parse_plan_name(name)
        with open_world(store, rank, world_size, plan, index) as world:
            trainer = WatchedTrainer(config, plan, world, open_data(config, payload["cache"]))
            trainer.step()
            own, layouts = trainer.first_gradients or {}, trainer.updater.layouts
            errors = []
            for dtype in (torch.float32, torch.bfloat16):
                worst = 0.0
                for parameter, gradient in own.items():
                    whole = torch.zeros(layouts[parameter].shape, dtype=dtype)
                    for gradients in each:
                        whole += gradients[parameter].to(dtype)
                    part = whole[layouts[parameter].boxes[0].slices]
                    worst = max(worst, float((gradient - part).abs().max() / whole.abs().max()))
                errors.append(worst)
            found.append(tuple(errors))
    return found


@pytest.mark.parametrize(
    ("num_ranks", "plans"), [(1, ["dp1-bf16"]), (2, ["dp2-z1-bf16", "dp2-z2-bf16", "dp2-z3-bf16"])]
)
def test_gradients_of_micro_batches_are_added_up_in_fp32(num_ranks: int, plans: list[str], tmp_path: Path) -> None:
    for rank in run_ranks(num_ranks, "tests.test_precision:compare", {"plans": plans, "cache": str(tmp_path)}):
        for plan, (in_fp32, in_bf16) in zip(plans, rank, strict=True):
            assert in_fp32 < 1e-6, plan
            assert in_bf16 > 1e-3, plan


def overflow(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Per plan in fp16, how the losses of some steps differ from fp32's, and what a scale that is too large does."""
    config, found = small_run(), []
    losses, _ = reference(config.model_dump_json(), payload["cache"], "fp32", payload["steps"])
    for index, name in enumerate(payload["plans"]):
        plan = parse_plan_name(name)
        with open_world(store, rank, world_size, plan, index) as world:
            trainer = Trainer(config, plan, world, open_data(config, payload["cache"]))
            own = [trainer.step().loss for _ in range(payload["steps"])]
            before = {name: local.clone() for name, local in trainer.updater.parameters.items()}
            assert trainer.updater.loss_scale is not None
            trainer.updater.loss_scale.value = 2.0**60
            skipped = trainer.step().skip_reason
            same = all(torch.equal(local, before[name]) for name, local in trainer.updater.parameters.items())
            scale = trainer.counters()["loss_scale"]["value"]
            trainer.updater.loss_scale.value = 2.0**10
            applied = trainer.step().skip_reason is None
            error = max(abs(a - b) / b for a, b in zip(own, losses, strict=False))
            found.append({"error": error, "skipped": skipped, "same": same, "scale": scale, "applied": applied})
    return found


@pytest.mark.parametrize("steps", quick_sample([6, 20], 0))
def test_fp16_trains_and_skips_what_overflows(steps: int, tmp_path: Path) -> None:
    """On small matrices, which a CPU can multiply in fp16 too; `muster train` asks for a GPU."""
    payload = {"plans": ["dp2-z3-fp16", "pp2-fp16"], "cache": str(tmp_path), "steps": steps}
    for rank in run_ranks(2, "tests.test_precision:overflow", payload):
        for found in rank:
            assert found["error"] < 1e-2
            assert "gradient norm" in found["skipped"]
            assert found["same"]
            assert found["scale"] == 2.0**59
            assert found["applied"]


def test_a_loss_scale_halves_at_once_and_doubles_slowly() -> None:
    scale = LossScale(8.0)
    scale.update(overflowed=True)
    for _ in range(GROWTH_STEPS - 1):
        scale.update(overflowed=False)
    again = LossScale()
    again.load(scale.state())
    assert again.value == 4.0
    again.update(overflowed=False)
    assert again.value == 8.0
    for _ in range(9):
        again.update(overflowed=True)
    assert again.value == 1.0
