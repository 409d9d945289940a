"""Steps that would spoil the model are skipped with their samples, by all ranks alike, and not for ever."""

import json
import math
from pathlib import Path
from typing import Any

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.config.run_config import TrainConfig
from muster.train.step_skipper import StepSkipper
from tests.ranks import run_ranks
from tests.train_runs import rows_of, sample_hash, steps


def judge_of(**keys: Any) -> StepSkipper:
    return StepSkipper(TrainConfig(steps=1, seq_len=1, global_batch_size=1, **keys))


def test_what_is_not_finite_is_skipped_and_counted() -> None:
    skips = judge_of()
    assert skips.check(2.0, 1e30) is None
    assert skips.check(math.nan, 1.0) == "its loss is nan"
    assert skips.check(2.0, math.inf) == "its gradient norm is inf"
    assert (skips.total, skips.consecutive) == (2, 2)
    assert skips.check(1e9, 1.0) is None, "nothing finite is a spike unless that is asked for"
    assert (skips.total, skips.consecutive) == (2, 0)


def test_a_spike_lies_far_above_the_mean_of_the_last_applied_steps() -> None:
    skips = judge_of(spike_sigmas=6, spike_window=8)
    norms = [1.0, 1.2, 0.9, 1.1]
    assert [skips.check(3.0, 50.0)] + [skips.check(3.0 + n / 9, n) for n in norms] == [None] * 5
    for norm in (1.0, 1.1, 0.9, 1.2):  # the first, 50, leaves the window
        assert skips.check(3.0, norm) is None
    reason = skips.check(3.1, 2.0)
    assert reason is not None
    assert "its gradient norm 2 is a spike, more than 6 standard deviations (0.12) above the mean 1.05" in reason
    assert skips.check(3.1, 2.0) is not None, "a spike must not make the next one look usual"
    assert "its loss 9 is a spike" in (skips.check(9.0, 1.0) or "")
    assert skips.check(2.0, 0.1) is None, "what lies below the mean is no spike"


def test_few_steps_make_no_mean() -> None:
    skips = judge_of(spike_sigmas=6, spike_window=8)
    assert [skips.check(3.0, norm) for norm in (1.0, 1.0, 1.0, 1e6)] == [None] * 4


def test_the_state_goes_through_json_without_loss() -> None:
    first, second = (judge_of(spike_sigmas=3, spike_window=4) for _ in range(2))
    for step in range(9):
        first.check(2 + math.sin(step), 1 / (step + 3))
    first.check(math.nan, 1.0)
    second.load(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert second.check(5.0, 0.1) == first.check(5.0, 0.1) is not None


def test_two_ranks_skip_alike_go_on_and_end(tmp_path: Path) -> None:
    """One rank's gradients become NaN in step 4, and a spike in step 9."""
    spikes = {"spike_sigmas": 6.0, "spike_window": 8}
    poison = {"4": math.inf, "9": 1e4}
    attempts: list[dict[str, Any]] = [
        {"run": "whole", "plan": "dp2", "factors": poison, **spikes},
        {"run": "parts", "plan": "dp2", "factors": poison, "stop_after": 4, **spikes},
        {"run": "parts", "plan": "dp2", "factors": poison, "stop_after": 9, **spikes},
        {"run": "parts", "plan": "dp2", "factors": poison, **spikes},
        {
            "run": "doomed",
            "plan": "pp2",
            "factors": {"2": math.nan, "4": math.nan, "5": math.nan},
            "max_consecutive_skips": 2,
        },
    ]
    said = run_ranks(2, "tests.step_skipper_ranks:run_cases", {"attempts": attempts, "folder": str(tmp_path)})
    assert said[0] == said[1]
    whole, parts, doomed = (tmp_path / name for name in ("whole", "parts", "doomed"))
    assert said[0][:4] == ["0", "75", "75", "0"]
    rows = rows_of(whole)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["train/skipped"] for row in rows] == [0] * 3 + [1] * 5 + [2] * 4
    assert {row["step"]: row["skipped"] for row in rows if "skipped" in row}.keys() == {4, 9}
    assert rows[3]["train/grad_norm"] is None
    assert "its gradient norm" in rows[8]["skipped"]
    assert "is a spike" in rows[8]["skipped"]
    _assert_same(whole, parts)
    _assert_doomed(doomed, said[0][4])


def _assert_same(whole: Path, parts: Path) -> None:
    """The run that was stopped twice ends with the same bits as the one that was not."""
    keys = ("train/loss", "train/grad_norm", "train/lr", "train/skipped")
    assert [[row[key] for key in keys] for row in rows_of(parts)] == [
        [row[key] for key in keys] for row in rows_of(whole)
    ]
    assert sample_hash(whole) == sample_hash(parts), "the samples of skipped steps are not read again"
    last = [find_latest(run / "checkpoints") for run in (whole, parts)]
    assert all(folder is not None for folder in last)
    manifests = [read_manifest(folder) for folder in last if folder is not None]
    assert manifests[0].counters == manifests[1].counters
    assert manifests[0].counters["skips"]["total"] == 2
    assert manifests[0].counters["samples_consumed"] == 12 * 8
    for name in manifests[0].tensors:
        values = [read_full(folder, name) for folder in last if folder is not None]
        assert values[0].equal(values[1]), name


def _assert_doomed(run: Path, sentence: str) -> None:
    assert (
        "steps 4 to 5 were skipped, as many in a row as train.max_consecutive_skips allows: step 5 because" in sentence
    )
    assert f"the state before is in {run / 'failed'}, what followed are samples 24 to 39" in sentence
    assert steps(run) == [1, 2, 3, 4, 5]
    (kept,) = list_checkpoints(run / "failed")
    manifest = read_manifest(kept)
    assert (manifest.step, manifest.counters["samples_consumed"]) == (3, 24)
