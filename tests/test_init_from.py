"""A training that begins with weights from elsewhere: under any plan, from any kind of directory, reading its part."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.model_directory import open_directory
from muster.checkpoint.tensors import ArrayFile
from muster.cli.main import main
from muster.layout.tensor_layout import rank_layouts
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from tests.train_runs import QUICK, train
from tests.weights import expected_weights, make_run, read_weights, save_weights

SPEC = ModelSpec(
    vocab_size=19, hidden_size=12, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=10, tied_embeddings=True
)
PLANS = [
    Plan(),
    Plan(dp_shard=4),
    Plan(pp=3, dp_replicate=2),
    Plan(
        pp=2,
        stages=(StageSpec(layers=SPEC.num_layers - 1, mesh=Mesh(tp=3)), StageSpec(layers=1, mesh=Mesh(dp_shard=3))),
    ),
]


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Write the same weights in every format of directory."""
    step = save_weights(tmp_path / "checkpoints", SPEC, Plan(dp_shard=2))
    for kind in ("hf", "dcp"):
        assert main(["checkpoint", "convert", str(step), str(tmp_path / kind), "--to", kind]) == 0
    return [step, tmp_path / "hf", tmp_path / "dcp"]


def empty_shards(plan: Plan, rank: int, dtype: torch.dtype = torch.float32) -> list[LocalShard]:
    found = []
    for layout in rank_layouts(SPEC, plan, rank):
        size = layout.boxes[0].size if layout.boxes else (0, *layout.shape[1:])
        for group in ("model", "optim"):
            found.append(LocalShard(f"{group}/{layout.name}", layout, torch.full(size, 5.0, dtype=dtype)))
    return found


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"world {plan.world_size}")
def test_each_rank_gets_its_part(plan: Plan, places: list[Path]) -> None:
    weights = expected_weights(SPEC)
    for place in places:
        for rank in range(plan.world_size):
            shards = empty_shards(plan, rank)
            load_initial_weights(place, SPEC, shards)
            for shard in shards:
                group, _, name = shard.name.partition("/")
                for box, local in shard.box_views():
                    wanted = weights[name][box.slices] if group == "model" else torch.full(box.size, 5.0)
                    assert torch.equal(local, wanted), (place, rank, shard.name)
    shards = empty_shards(Plan(), 0, torch.float64)
    load_initial_weights(places[1], SPEC, shards)
    assert torch.equal(shards[0].tensor, weights["embed.weight"].double())


def test_a_rank_reads_only_what_it_holds(places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counted(self: ArrayFile, *arguments: Any) -> torch.Tensor:
        nonlocal read
        found = read_box(self, *arguments)
        read += found.nbytes
        return found

    read_box = ArrayFile.read_box
    monkeypatch.setattr(ArrayFile, "read_box", counted)
    for place in places[1:]:
        for rank in range(4):
            read, shards = 0, empty_shards(Plan(dp_shard=4), rank)
            load_initial_weights(place, SPEC, shards)
            assert read == sum(shard.tensor.nbytes for shard in shards if shard.name.startswith("model/"))


def test_train_begins_with_the_weights(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source", "tp2")
    assert main(["checkpoint", "convert", str(source), str(tmp_path / "hf"), "--to", "hf"]) == 0
    # An update this small is lost in rounding, so that what is saved is what training began with.
    still = ("--optim.lr", "1e-30", "--optim.warmup_steps", "0", "--train.steps", "1")
    flags = ("--preset", "tiny", "--parallel", "dp1", "--init-from", tmp_path / "hf", *still, *QUICK)
    ended = train(*flags, "--run", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert f"weights: from {tmp_path / 'hf'}\n" in ended.out
    weights = read_weights(tmp_path / "run")
    spec = open_directory(source).model
    assert spec is not None
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected_weights(spec).items())


def test_weights_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(make_run(tmp_path / "source")), str(tmp_path / "hf"), "--to", "hf"]) == 0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0, "hidden_size": 32}))
    capsys.readouterr()
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["train", "--preset", "tiny", "--init-from", str(tmp_path / "hf"), "--run", str(tmp_path / "run")])
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "hidden_size is 32 there, 64 in the run; rope_theta is 7.0" in err
    assert f"give --model hf:{tmp_path / 'hf'}" in err
    assert not (tmp_path / "run" / "config.yaml").exists()
