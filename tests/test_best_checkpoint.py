"""The best checkpoint, early stopping, and callbacks."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import yaml

from muster.api.model_in_memory import load_model
from muster.api.trained_models import convert, evaluate, generate
from muster.checkpoint.checkpoint_dir import (
    RetentionPolicy,
    checkpoint_path,
    link_best,
    list_checkpoints,
    named_checkpoint,
    prunable,
)
from muster.checkpoint.formats.native import NativeTensors
from muster.cli.main import main
from muster.config.run_config import TrainConfig
from muster.layout.tensor_layout import Box
from muster.plugins.registry import PluginComponent
from muster.spec.errors import ConfigError
from muster.train import callbacks
from muster.train.best_checkpoint import ValidationTracker
from tests import forks

TEXT = "\n".join(f"dear friend {i}, the letter {i * i % 97} came on day {i % 31}" for i in range(400))
CALLBACK = Path(__file__).resolve().parents[1] / "examples" / "my_callback.py"
RUN = {
    "extends": "tiny",
    "plugins": [str(CALLBACK)],
    "model": {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "num_kv_heads": 2, "num_layers": 2},
    "data": {"source": "letters.txt", "validation_split": 0.2},
    "parallel": "pp2-mb2",
    "train": {
        "steps": 12,
        "seq_len": 32,
        "global_batch_size": 4,
        "sample_tokens": 0,
        "save_every": 5,
        "keep_last": 1,
        "keep_best": True,
        "early_stopping_patience": 3,
        "callbacks": ["notes"],
    },
    "eval": {"every": 1, "batches": 1},
    "optim": {
        "name": "sgd",
        "lr": 1.0,  # diverges soon
        "warmup_steps": 2,
        "clip_norm": 0,
        "weight_decay": 0,
        "ema_decay": 0.9,
        "freeze": ["*.o.weight"],
    },
}


def train_config(**keys: object) -> TrainConfig:
    return TrainConfig.model_validate({"steps": 9, "seq_len": 8, "global_batch_size": 1, **keys})


def write_run(folder: Path, **changes: object) -> Path:
    (folder / "letters.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN | changes))
    return folder / "run.yaml"


def test_small_decreases_are_no_improvement_and_the_state_is_resumed() -> None:
    train = train_config(early_stopping_patience=2, early_stopping_min_delta=0.1)
    tracker = ValidationTracker(train)
    for step, loss in enumerate((3.0, 2.5, 2.45), 1):
        tracker.update(step, loss)
    assert (tracker.best_step, tracker.best_loss, tracker.should_stop) == (3, 2.45, False)
    resumed = ValidationTracker(train)
    resumed.load(json.loads(json.dumps(tracker.state())))
    resumed.update(4, float("nan"))
    assert (resumed.best_step, resumed.should_stop) == (3, True)
    assert not ValidationTracker(train_config()).is_used


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step in (2, 4, 6, 8):
        checkpoint_path(root, step).mkdir(parents=True)
    assert link_best(root, 2)
    assert not link_best(root, 5)
    retention = RetentionPolicy(last=1, best_step=6)  # whose link is still to be made
    assert prunable(root, retention, checkpoint_path(root, 8)) == [checkpoint_path(root, 4)]
    assert len(list_checkpoints(root)) == 4
    assert named_checkpoint(tmp_path / "run@best") == checkpoint_path(root, 2)
    assert named_checkpoint(tmp_path / "run@6") == checkpoint_path(root, 6)
    with pytest.raises(ConfigError, match="has those of steps 2, 4, 6, 8"):
        named_checkpoint(tmp_path / "run@5")
    with pytest.raises(ConfigError, match="run@emma: expected .*run@best, .*run@STEP or .*run@ema; did you mean 'ema'"):
        named_checkpoint(tmp_path / "run@emma")
    with pytest.raises(ConfigError, match="run@best@2 names two checkpoints: expected .*run@best or .*run@2"):
        named_checkpoint(tmp_path / "run@best@2")
    with pytest.raises(ConfigError, match="the average comes last, write .*run@best@ema"):
        named_checkpoint(tmp_path / "run@ema@best")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eval": {"batches": 1}}, "train.keep_best goes by the validation loss, but eval.every is 0"),
        ({"data": {"source": "letters.txt", "validation_split": 0.001}}, "train.keep_best and early stopping go by"),
    ],
)
def test_a_run_without_validation_losses_is_refused(
    changes: dict, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(write_run(tmp_path, **changes)), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_a_run_stops_early_on_all_ranks_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    words = ["train", write_run(tmp_path), "--run", tmp_path / "run"]
    done = forks.run(*words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval/loss"] for row in rows}
    best = min(losses, key=losses.__getitem__)
    assert len(losses) == best + 3 < 12
    assert rows[-1]["eval/best_step"] == best
    assert f"best validation loss {losses[best]:.4f} after step {best}, kept as checkpoints/best" in done.stdout
    assert "stopped early: 3 validations without improvement" in (tmp_path / "run" / "report.html").read_text()
    root = tmp_path / "run" / "checkpoints"
    assert (root / "best").resolve() == checkpoint_path(root, best)
    assert list_checkpoints(root) == [checkpoint_path(root, best), checkpoint_path(root, best + 3)]
    notes = (tmp_path / "run" / "notes.txt").read_text().splitlines()
    assert [line for line in notes if "loss" in line] == [
        f"step {step}: validation loss {loss:.3f}" for step, loss in losses.items()
    ]
    assert f"step {best}: saved {checkpoint_path(root, best)}" in notes
    assert notes[-1] == f"step {best + 3}: saved {checkpoint_path(root, best + 3)}"
    again = forks.run(*words)
    assert f"is finished: it stopped early, after step {best + 3}" in again.stdout
    assert_average_is_used(tmp_path / "run", tmp_path / "averaged")


def assert_average_is_used(run: Path, converted: Path) -> None:
    """RUN@ema reads the averages, and the weights themselves of what is frozen; so does what it is converted to."""
    stored = NativeTensors((run / "checkpoints" / "best").resolve())
    for name, value in load_model(f"{run}@best@ema").state_dict().items():
        source = f"model/{name}" if name.endswith("o.weight") else f"optim/{name}.ema"
        meta = stored.metas[source]
        assert torch.equal(value, stored.read(source, Box((0,) * len(meta.shape), meta.shape))), name
    convert(f"{run}@best@ema", converted, to="muster")
    averaged, whole = (evaluate(place)["all"]["loss"] for place in (f"{run}@best@ema", f"{run}@best"))
    assert averaged != whole
    assert generate(f"{run}@best@ema", "dear ", tokens=5).texts == generate(converted, "dear ", tokens=5).texts
    with pytest.raises(ConfigError, match="has no moving average of the weights: optim.ema_decay keeps one"):
        evaluate(f"{converted}@ema", source=str(run / "config.yaml"))


def test_a_callback_that_fails_or_has_no_methods_is_told_with_its_place() -> None:
    found = PluginComponent("callback", "mine", dict, Path(__file__))
    with (
        patch.object(callbacks, "find_component", lambda *_: found),
        pytest.raises(ConfigError, match="some of the methods on_step, on_eval, on_save, got a dict"),
    ):
        callbacks.Callbacks(["mine"], 0, Path("run"), lambda: None)
    failing = SimpleNamespace(on_step=lambda now: now.metrics["no such key"])
    found = PluginComponent("callback", "mine", lambda: failing, Path(__file__))
    with patch.object(callbacks, "find_component", lambda *_: found):
        told = callbacks.Callbacks(["mine"], 0, Path("run"), lambda: None)
    told.call("on_save", 1)
    with pytest.raises(ConfigError, match=r"train\.callbacks mine: .*KeyError: 'no such key'"):
        told.call("on_step", 1)
