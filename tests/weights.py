"""Checkpoints with random weights, as a training would have left them, without one."""

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.checkpoint.save import save
from muster.config.load_config import load_run_config, write_run_files
from muster.layout.tensor_layout import rank_layouts
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from tests.test_checkpoint import Ranks

STATES = ("model/{}", "optim/{}.exp_avg")


def number_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Random numbers that only the name and the shape decide about."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1


def save_weights(
    folder: Path, spec: ModelSpec, plan: Plan | None = None, step: int = 7, run: dict[str, Any] | None = None
) -> Path:
    """A checkpoint of the model under `folder`, written by the ranks of a plan."""
    plan = plan or Plan()
    info = {
        "plan": plan.model_dump(mode="json"),
        "model": spec.model_dump(mode="json"),
        "counters": {"samples_consumed": 9},
        "run": run or {},
    }
    ranks = Ranks(plan.world_size)

    def shards(rank: int) -> list[LocalShard]:
        found = []
        for layout in rank_layouts(spec, plan, rank):
            for state in STATES:
                name = state.format(layout.name)
                whole = number_tensor(name, layout.shape)
                parts = [whole[box.slices] for box in layout.boxes]
                found.append(LocalShard(name, layout, torch.cat(parts) if parts else whole[:0]))
        return found

    results = ranks.each(
        lambda rank: save(folder, step, shards(rank), info, rank, ranks.count, lambda text: ranks.exchange(rank, text))
    )
    assert isinstance(results[0], Path), results[0]
    return results[0]


def make_run(run: Path, plan: str = "dp1", step: int = 7) -> Path:
    """A run directory of the preset `tiny` with a checkpoint."""
    resolved = load_run_config("tiny", None, [("parallel", plan)])
    write_run_files(resolved, resolved.config.parallel, run)
    save_weights(run / "checkpoints", resolved.config.model, resolved.config.parallel, step)
    return run


def read_weights(path: Path, spec: ModelSpec | None = None) -> dict[str, Tensor]:
    """The weights of a directory of any kind, by our names."""
    weights = model_weights(open_directory(path, spec))
    return {name: weights.read(name, kind.whole) for name, kind in weights.metas.items()}


def expected_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors that `save_weights` writes."""
    return {name: number_tensor(f"model/{name}", shape) for name, shape in parameter_shapes(spec)}
