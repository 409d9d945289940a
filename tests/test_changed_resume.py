"""A run that resumes with another configuration: the optimizer state that begins there, and what a failure leaves."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import read_manifest
from muster.config.optimizers import ADAMW_UPDATE
from muster.spec.plan_name import parse_plan_name
from muster.train.resume_point import ResumePoint
from tests.train_runs import AT_ONCE, QUICK, Ended, assert_one_sentence, rows_of, train

TINY = ("--preset", "tiny", *QUICK, *AT_ONCE, "--train.save_every", "1", "--train.keep_last", "9")
BEFORE = ("--optim.freeze", "embed.*,layers.[01].*", "--train.steps", "3", "--parallel", "dp1-mb4")
AFTER = ("--optim.freeze", "embed.*", "--optim.ema_decay", "0.5", "--train.steps", "5", "--allow-changes")
NEW, OLD, FROZEN = "layers.1.attn.q.weight", "layers.2.attn.q.weight", "embed.weight"


@pytest.fixture(scope="module")
def frozen_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a frozen embedding and frozen first layers; read-only."""
    run = tmp_path_factory.mktemp("changed") / "frozen"
    ended = train(*TINY, *BEFORE, "--run", run)
    assert ended.code == 0, ended.err
    return run


def resumed(run: Path, name: str, plan: str) -> tuple[Path, Ended]:
    copy = Path(shutil.copytree(run, run.with_name(name)))
    ended = train(*TINY, *AFTER, "--parallel", plan, "--run", copy)
    assert ended.code == 0, ended.out + ended.err
    return copy, ended


def test_a_run_with_other_islands_or_sections_is_refused_before_it_starts(frozen_run: Path, tmp_path: Path) -> None:
    islands = Path(shutil.copytree(frozen_run, tmp_path / "islands"))
    for manifest in islands.glob("checkpoints/*/manifest.json"):
        content = json.loads(manifest.read_text())
        content["plan"]["islands"] = 2
        manifest.write_text(json.dumps(content))
    before = (islands / "exit.json").read_bytes()
    refused = train(*TINY, *BEFORE[:2], "--train.steps", "5", "--parallel", "dp1-mb4", "--run", islands)
    assert_one_sentence(refused, 2, "was trained on 2 islands", "the plan has 1", "--init-from")
    assert (islands / "exit.json").read_bytes() == before
    outer = ("--parallel", "isl2-mb4", "--outer.method", "diloco", "--outer.every", "5")
    refused = train(*TINY, *BEFORE[:2], "--train.steps", "5", *outer, "--run", islands)
    assert_one_sentence(refused, 2, "another configuration (section outer is new): use the same")
    refused = train(*TINY, *BEFORE[:2], "--train.steps", "5", *outer, "--allow-changes", "--run", islands)
    assert_one_sentence(refused, 2, "states of exchanges between islands", "section outer is new")
    wide = ("--model.intermediate_size", "96", "--allow-changes", "--run", frozen_run, "--dry-run")
    refused = train(*TINY, *BEFORE[:2], "--train.steps", "5", *wide)
    assert_one_sentence(refused, 2, "has trained another model (layers.0.mlp.", "give the same section model")


def test_a_resumed_run_names_the_plan_of_its_checkpoint_where_that_is_another() -> None:
    plan = parse_plan_name("dp2-ep2")
    moved = plan.model_copy(update={"expert_placement": ((1, 0),)})
    said = [
        ResumePoint(4, {}, fields).describe(plan)
        for fields in (moved.model_dump(), {}, parse_plan_name("dp4").model_dump())
    ]
    assert said == ["after step 4", "after step 4", "after step 4, saved under dp4-mb1-bf16"]
    assert ResumePoint(4, {}, {**plan.model_dump(), "schedule": "own"}).describe(plan) == "after step 4", "a plugin's"


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = checkpoint_path(run / "checkpoints", step)
    return {name: read_full(folder, name) for name in read_manifest(folder).tensors}


def assert_same_tensors(run: Path, reference: Path, step: int) -> None:
    """They differ by rounding only, which the square root of AdamW's second moment makes larger."""
    ours, theirs = tensors(run, step), tensors(reference, step)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-5, msg=lambda text, of=name: of + text)


def test_an_average_and_unfrozen_parameters_begin_where_a_run_resumes(frozen_run: Path) -> None:
    run, ended = resumed(frozen_run, "dp1", "dp1-mb4")
    assert "optim.ema_decay: the average begins at step 3\n" in ended.out
    assert "optim.freeze: the optimizer state of 18 newly trained parameters begins at step 3\n" in ended.out
    before, after = tensors(run, 3), tensors(run, 4)
    assert f"optim/{NEW}.exp_avg" not in before
    assert f"optim/{FROZEN}.ema" not in after
    for name in (NEW, OLD):
        weights = [of[f"model/{name}"] for of in (before, after)]
        torch.testing.assert_close(after[f"optim/{name}.ema"], 0.1 * weights[0] + 0.9 * weights[1])
    _assert_first_update(run, before, after)
    assert_same_tensors(resumed(frozen_run, "tp2", "tp2-mb4")[0], run, 5)


def _assert_first_update(run: Path, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """The newly trained parameter's fourth step is its optimizer state's first, by which the moments are corrected."""
    optim = read_manifest(checkpoint_path(run / "checkpoints", 4)).run["optim"]
    mean, square = (after[f"optim/{NEW}.{state.name}"] for state in ADAMW_UPDATE.state)
    corrected = mean / (1 - optim["beta1"]) / ((square / (1 - optim["beta2"])).sqrt() + optim["eps"])
    lr = rows_of(run)[3]["train/lr"]
    expected = before[f"model/{NEW}"] * (1 - lr * optim["weight_decay"]) - lr * corrected
    torch.testing.assert_close(after[f"model/{NEW}"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp1-mb4", "pp2-mb4", "dp2-mb4-z1"])
def test_what_began_late_goes_on(plan: str, frozen_run: Path) -> None:
    run, _ = resumed(frozen_run, f"begun-{plan}", plan)
    again = Path(shutil.copytree(run, run.with_name(f"again-{plan}")))
    shutil.rmtree(checkpoint_path(again / "checkpoints", 5))
    ended = train(*TINY, *AFTER, "--parallel", "pp2-mb4", "--run", again)
    assert ended.code == 0, ended.out + ended.err
    assert "resuming" in ended.out
    assert "begins at step" not in ended.out
    assert_same_tensors(again, run, 5)


def test_a_resume_that_cannot_load_leaves_the_run_as_it_was(frozen_run: Path) -> None:
    run = Path(shutil.copytree(frozen_run, frozen_run.with_name("failed")))
    kept = ("config.yaml", "plan.yaml", "report.html", "metrics.jsonl")
    before = [(run / name).read_text() for name in kept]
    changes = ("--optim.name", "muon", "--train.steps", "5", "--allow-changes", "--parallel", "tp2-mb4")
    ended = train(*TINY, *BEFORE, *changes, "--run", run)
    assert_one_sentence(ended, 2, "holds no tensor optim/", ".momentum")
    assert [(run / name).read_text() for name in kept] == before
    ended = train(*TINY, *BEFORE, "--run", run)
    assert (ended.code, "is finished" in ended.out) == (0, True), ended.out + ended.err
