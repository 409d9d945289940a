"""Ranks of the test of gradients that are reduced in bf16: one step each way, and the gradients that it leaves."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from muster.parallel.fsdp import attach_local_gradients
from muster.parallel.grad_reduce import AllToAllReduceScatter
from muster.parallel.world import World, open_world
from muster.schedule.action import Kind
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run

MANTISSA = 2.0**-8
"""Largest relative error of a number that is rounded to bf16."""


def reduce_by_gathering(
    self: AllToAllReduceScatter, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: Any
) -> None:
    """Reduce as one process that has all ranks' gradients would: rounded, and added in float32 in the ranks' order."""
    all_ranks = [torch.empty_like(input_tensor) for _ in range(group.size())]
    dist.all_gather(all_ranks, input_tensor, group=group)
    part = slice(group.rank() * len(output_tensor), (group.rank() + 1) * len(output_tensor))
    total = torch.zeros_like(output_tensor)
    for gradient in all_ranks:
        total = total + gradient[part].bfloat16().float()
    output_tensor.copy_(total)


def sum_magnitudes(
    self: AllToAllReduceScatter, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **rest: Any
) -> None:
    """Reduce the magnitudes of gradients, of which the error is at most a part."""
    reduce_by_gathering(self, output_tensor, input_tensor.abs(), group)


def dropped_rank(parts_PN: Tensor, out_N: Tensor) -> None:
    """Seeded bug: the last rank's part is left out."""
    out_N.copy_(parts_PN[:-1].float().sum(0))


def rounded_sum(parts_PN: Tensor, out_N: Tensor) -> None:
    """Seeded bug: partial sums are rounded, as in a ring."""
    total = parts_PN[0]
    for part_N in parts_PN[1:]:
        total = total + part_N
    out_N.copy_(total)


FAULTS = {"dropped rank": dropped_rank, "rounded sum": rounded_sum}


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Per case: True if gradients equal the emulation's to the bit, and the largest error beyond its bound, against
    gradients that are reduced in float32."""
    found = []
    for number, (name, family) in enumerate(payload["cases"]):

        def gradients(index: int, word: str) -> dict[str, Tensor]:
            with open_world(store, rank, world_size, parse_plan_name(f"{name}{word}"), number * 8 + index) as world:  # noqa: B023
                return _gradients(world, family, payload["cache"])  # noqa: B023

        made = gradients(0, "-gbf16")
        with patch.object(AllToAllReduceScatter, "__call__", reduce_by_gathering):
            emulated = gradients(1, "-gbf16")
        with patch.object(AllToAllReduceScatter, "__call__", sum_magnitudes):
            magnitudes = gradients(2, "-gbf16")
        exact = gradients(3, "")
        caught = {}
        for place, (fault, faulty) in enumerate(FAULTS.items() if payload["faults"] else ()):
            with patch("muster.parallel.grad_reduce.sum_in_rank_order", faulty):
                wrong = gradients(4 + place, "-gbf16")
            caught[fault] = any(not torch.equal(wrong[key], emulated[key]) for key in emulated)
        beyond = [(made[key] - exact[key]).abs() - 1.01 * MANTISSA * magnitudes[key].abs() for key in made]
        found.append(
            {
                "case": f"{name} {family}",
                "equal": all(torch.equal(made[key], emulated[key]) for key in made) and made.keys() == exact.keys(),
                "differs": any(not torch.equal(made[key], exact[key]) for key in made),
                "beyond": max(float(one.max()) for one in beyond if one.numel()),
                "caught": caught,
            }
        )
    return found


def _gradients(world: World, family: str, cache: str) -> dict[str, Tensor]:
    """Return this rank's gradients before the first update, by stage and name."""
    config = small_run(False, family=family)
    trainer = Trainer(config, world.plan, world, open_data(config, cache))
    found: dict[str, Tensor] = {}

    def keep(action: Any) -> None:
        for index, stage in trainer.stages.items():
            attach_local_gradients(stage.module, stage.parameters)
            for key, parameter in stage.parameters.items():
                if parameter.grad is not None:
                    found[f"{index} {key}"] = parameter.grad.detach().clone()

    trainer._executor._handlers[Kind.STEP] = keep  # type: ignore[assignment]
    trainer.step()
    return found
