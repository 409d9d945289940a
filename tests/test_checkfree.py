"""CheckFree: lost stages of a pipeline are rebuilt from those beside them, to the bit as one process does it."""

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.checkpoint.load import read_full
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import read_manifest
from muster.checkpoint.save import save
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import Box, TensorLayout
from muster.report.approximation import Approximation, RebuiltStage
from muster.report.run_files import read_metrics
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train import loop
from muster.train.carried import Carried
from muster.train.checkfree import Holding, KeptState, neighbour_weights, plan_transfers
from muster.train.loop import TrainingLoop
from muster.train.parameter_updater import ParameterUpdater
from tests.checkfree_ranks import state_of
from tests.ranks import run_ranks
from tests.train_runs import AT_ONCE, QUICK, Command, assert_one_sentence, losses, train

NORMS = (0.5, 2.0, 0.25, 4.0)
HELD = [[[stage, 6, 6, norm]] for stage, norm in enumerate(NORMS)]


def without(*lost: int, held: list = HELD) -> list:
    """Holdings of the ranks when some have lost everything."""
    return [[] if rank in lost else one for rank, one in enumerate(held)]


CASES = {
    "inner stage": (without(2), "squared_norm"),
    "inner stage, weights of the authors' program": (without(1), "clipped_norm"),
    "first stage": (without(0), "squared_norm"),
    "two beside each other": (without(1, 2), "squared_norm"),
    "a rank was faster": (without(2, held=[HELD[0], [[1, 7, 6, 2.0]], HELD[2], HELD[3]]), "squared_norm"),
    "a spare has old state": (without(held=[HELD[0], [[1, 3, 3, 9.0]], HELD[2], HELD[3]]), "squared_norm"),
    "stages change places": ([HELD[0], HELD[2], HELD[1], HELD[3]], "squared_norm"),
    "the rank that takes the place held a neighbour": ([HELD[0], HELD[3], HELD[1], []], "squared_norm"),
}


def serial_mean(stage: int, updates: tuple[int, int], weights: tuple[float, float]) -> dict[str, Tensor]:
    """The parameters of a stage as the weighted means of its neighbours', in one process."""
    before, after = state_of(stage - 1, updates[0]), state_of(stage + 1, updates[1])
    found = {}
    for name in state_of(stage):
        if not name.startswith("model/layers."):
            continue
        layer, rest = int(name.split(".")[1]), name.split(".", 2)[2]
        one, other = (state[f"model/layers.{layer + shift}.{rest}"] for state, shift in ((before, -2), (after, 2)))
        found[name] = weights[0] * one + weights[1] * other
    return found


def squares(before: float, after: float) -> tuple[float, float]:
    return before**2 / (before**2 + after**2), after**2 / (before**2 + after**2)


def test_lost_stages_are_the_means_that_one_process_computes() -> None:
    cases = [{"held": held, "kind": kind} for held, kind in CASES.values()]
    payload = {"plan": "pp4", "cases": cases}
    by_rank = run_ranks(4, "tests.checkfree_ranks:on_rank", payload)
    found = {name: [told[index] for told in by_rank] for index, name in enumerate(CASES)}

    def assert_state(case: str, rank: int, wanted: dict[str, Tensor]) -> None:
        tensors = {name: torch.tensor(values, dtype=torch.float32) for name, values in found[case][rank][1].items()}
        assert tensors.keys() == state_of(rank).keys()
        for name, tensor in tensors.items():
            expected = wanted.get(name, torch.full((3, 5), -1.0))
            assert torch.equal(tensor, expected), f"{case}: {name} of rank {rank}"

    clipped = [min(norm, 1.0) + 1e-4 for norm in NORMS]
    means = {
        "inner stage": (2, squares(2.0, 4.0), (6, 6)),
        "inner stage, weights of the authors' program": (
            1,
            (clipped[0] / (clipped[0] + clipped[2]), clipped[2] / (clipped[0] + clipped[2])),
            (6, 6),
        ),
        "a rank was faster": (2, squares(2.0, 4.0), (7, 6)),
        "a spare has old state": (1, squares(0.5, 0.25), (6, 6)),
    }
    for case, (lost, weights, updates) in means.items():
        for rank in range(4):
            ahead = 7 if (case, rank) == ("a rank was faster", 1) else 6
            assert_state(case, rank, serial_mean(lost, updates, weights) if rank == lost else state_of(rank, ahead))
        (step, counters, sentences, names), *others = [about for about, _ in found[case]]
        assert all(other == [step, counters, sentences, names] for other in others), "all ranks agree"
        assert step == 6
        assert names == sorted(name[6:] for name in state_of(lost) if name.startswith("model/"))
        assert sentences[0].startswith(f"stage {lost} is approximated by {weights[0]:.2f} x stage {lost - 1} + ")
    assert found["a rank was faster"][0][0][2][1:] == ["stage 1 sees the update of the step under way twice"]
    for case in ("first stage", "two beside each other"):
        for rank in range(4):
            assert found[case][rank][0] is None
            assert_state(case, rank, {})
    for rank in range(4):
        assert_state("stages change places", rank, state_of(rank))
        assert found["stages change places"][rank][0] == [6, {"of": 0}, [], []]
    moved = "the rank that takes the place held a neighbour"
    assert_state(moved, 1, state_of(1))
    assert_state(moved, 2, serial_mean(2, (6, 6), squares(2.0, 4.0)))
    assert_state(moved, 3, state_of(3))


def test_replicas_give_what_a_lost_rank_held() -> None:
    plan = parse_plan_name("dp2x1-pp3")
    stages = [at for at in range(3) for _ in range(2)]
    ranks_of = {stage: [rank for rank in range(6) if held_stage(plan, rank) == stage] for stage in set(stages)}
    held = [[Holding(held_stage(plan, rank), 6, 6, 1.0)] for rank in range(6)]
    first, second = ranks_of[0]
    held[first] = []
    found = plan_transfers(plan, held, "squared_norm")
    assert found is not None
    assert found.approximation == Approximation(), "another rank holds it"
    assert [sources for rank, sources in enumerate(found.sources) if rank != first] == [
        (r,) for r in range(6) if r != first
    ]
    assert found.sources[first] == (second,)
    for rank in ranks_of[1]:
        held[rank] = []
    found = plan_transfers(plan, held, "squared_norm")
    assert found is not None
    assert {found.sources[rank] for rank in ranks_of[1]} == {(second, ranks_of[2][0])}, "replicas stay alike"
    assert found.approximation.rebuilt == (RebuiltStage(1, (0, 2), (0.5, 0.5)),)
    assert plan_transfers(plan, [[]] * 6, "squared_norm") is None


def test_a_stage_that_is_lost_before_the_first_step_begins_anew() -> None:
    plan = parse_plan_name("pp4")
    held = [[Holding(rank, 0, 0, 0.0)] if rank != 2 else [] for rank in range(4)]
    assert plan_transfers(plan, held, "squared_norm") is None


def test_state_from_before_a_return_to_a_checkpoint_counts_as_lost() -> None:
    """Ranks that waited as spares meanwhile are ahead of the others, in steps that these have taken back."""
    plan = parse_plan_name("dp2x1-pp2")
    held = [[Holding(held_stage(plan, rank), 12, 12, 1.0, origin=3)] for rank in range(4)]
    waited = next(rank for rank in range(4) if held_stage(plan, rank) == 0)
    held[waited] = [Holding(0, 15, 15, 1.0, origin=0)]
    found = plan_transfers(plan, held, "squared_norm")
    assert found is not None
    assert (found.step, found.origin, found.approximation) == (12, 3, Approximation())
    other = next(rank for rank in range(4) if held_stage(plan, rank) == 0 and rank != waited)
    assert found.sources[waited] == (other,)


def held_stage(plan: Plan, rank: int) -> int:
    return coordinates_of(plan, rank).pp


def test_weights_of_neighbours() -> None:
    assert neighbour_weights(1.0, 2.0, "squared_norm") == pytest.approx((0.2, 0.8))
    assert neighbour_weights(3.0, 9.0, "clipped_norm") == (0.5, 0.5), "both are clipped"
    assert neighbour_weights(0.1, 0.3, "clipped_norm") == pytest.approx((0.1001 / 0.4002, 0.3001 / 0.4002))
    assert neighbour_weights(0.0, 0.0, "squared_norm") == (0.5, 0.5)


def test_a_rebuilt_stage_learns_faster() -> None:
    for stages, rate in (({1: None}, 0.6), ({2: None}, 0.5)):
        updater = MagicMock(lr_scales={1: 1.2}, stages=stages, _buckets={})
        updater.state.learning_rate, updater._lr_scale = 0.5, cast(Any, ParameterUpdater._lr_scale).fget(updater)
        ParameterUpdater.optimizer_step(updater)
        updater.optimizer.step.assert_called_once_with(rate)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parallel", "pp2"], "expected pp3 or more"),
        (["--parallel", "pp4-vocab"], "expected pp3 or more"),
        (["--parallel", "pp3"], "which have 3, 3, 2"),
        (["--parallel", "pp4-tp2"], "hold its stage whole"),
        (["--parallel", "pp4", "--optim.ema_decay", "0.9"], "optim.ema_decay 0"),
        (["--parallel", "pp4", "--optim.freeze", "layers.0"], "optim.freeze"),
        (["--parallel", "pp4", "--train.elastic", "false"], "set elastic true"),
        (
            ["--parallel", "pp4", "--train.straggler_check_every", "5", "--train.straggler_action", "replace"],
            "it also needs train.recovery copy, or replicas",
        ),
    ],
)
def test_what_checkfree_does_not_go_with(arguments: list[str], words: str, tmp_path: Path) -> None:
    common = ["--preset", "tiny", "--dry-run", "--run", tmp_path / "run", "--train.elastic", "true"]
    ended = train(*common, "--train.recovery", "checkfree", *arguments)
    assert_one_sentence(ended, ended.code, words)
    assert ended.code in (2, 3)


def test_what_is_kept_outlasts_a_loss_while_ranks_take_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost while the others load: the next generation has no other state of them than that before."""
    kept = KeptState(2, 6, 6, {}, 1.0, {})
    monkeypatch.setattr(loop, "StateLoader", MagicMock())
    run = MagicMock(carried=Carried(kept=[kept]), _recorded=None, is_main=False, in_memory_checkpoint=None)
    for error in (ConnectionError("by a peer"), None):
        run._renew_end_stage_copy.side_effect = error
        with nullcontext() if error is None else pytest.raises(ConnectionError):
            TrainingLoop._resume(run)
        TrainingLoop.abandon(run)
        assert list(run.carried.kept) == ([] if error is None else [kept])


def test_a_step_is_kept_before_its_validation() -> None:
    """Its update isn't made twice where a rank is lost in the validation, or in a comparison of ranks."""
    run = MagicMock()
    run.stragglers.after_step.side_effect = ConnectionError("by a peer")
    with pytest.raises(ConnectionError):
        TrainingLoop._record(run, MagicMock(num_tokens=0, skip_reason=None), MagicMock())
    run._keep_counters.assert_called_once_with()


def test_new_processes_learn_when_the_run_began() -> None:
    """So that `train.max_minutes` counts from there, whoever is rank 0."""
    world = SimpleNamespace(generation=2, all_gather_object=lambda own: [own, 40.0, 41.0])
    run = SimpleNamespace(carried=Carried(), started_at=100.0, world=world)
    assert TrainingLoop._first_start(cast(Any, run)) == 40.0
    world.generation = 0
    assert TrainingLoop._first_start(cast(Any, run)) == 100.0


@pytest.mark.soak
def test_a_run_goes_on_as_from_a_checkpoint_with_that_mean(tmp_path: Path) -> None:
    """A rank is killed after a step; another run resumes from its checkpoint of that step, in which one process has
    replaced the stage, and both have the same losses to the bit."""
    common = ["--preset", "tiny", *QUICK, *AT_ONCE, "--parallel", "pp4", "--train.steps", "10"]
    run, other = tmp_path / "run", tmp_path / "other"
    elastic = ["--train.elastic", "true", "--train.recovery", "checkfree"]
    with Command(*common, *elastic, "--run", run, hold_after=[6]) as job:
        job.wait_for_step(6)
        os.kill(job.ranks()[2], signal.SIGKILL)
        job.go_on(6)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "CheckFree: stage 2 is approximated by " in ended.out
    (row,) = read_metrics(run / "recoveries.jsonl")
    (rebuilt,) = row["approximation"]["rebuilt"]
    assert (rebuilt["stage"], rebuilt["neighbours"]) == (2, [1, 3])
    assert "stage 2 is approximated by" in (run / "report.html").read_text()
    assert train(*common, "--run", other, "--train.save_every", "6").code == 0
    undisturbed = losses(other)
    root = other / "checkpoints"
    emulate(checkpoint_path(root, 6), root, 2, (4, 5), dict(zip((-2, 2), rebuilt["weights"], strict=True)))
    resumed = train(*common, "--run", other)
    assert (resumed.code, resumed.err) == (0, ""), resumed.out
    assert losses(run) == losses(other)
    assert losses(run)[:6] == undisturbed[:6]
    assert losses(run)[6] != undisturbed[6]


def emulate(source: Path, root: Path, stage: int, layers: Sequence[int], weights: Mapping[int, float]) -> None:
    """Write the checkpoint after the loss of a stage of four: its layers are means of those that are so many layers on,
    with these weights, its optimizer state is new, and its learning rate higher."""
    manifest = read_manifest(source)
    parameters, states = (tuple(f"{kind}/layers.{layer}." for layer in layers) for kind in ("model", "optim"))
    shards = []
    for name, stored in manifest.tensors.items():
        tensor = read_full(source, name, manifest)
        if name.startswith(parameters):
            _, layer, rest = name.split(".", 2)
            terms = [
                weight * read_full(source, f"model/layers.{int(layer) + shift}.{rest}", manifest)
                for shift, weight in weights.items()
            ]
            tensor = sum(terms[1:], terms[0])
        elif name.startswith(states):
            tensor = torch.zeros_like(tensor)
        whole = Box((0,) * len(stored.shape), tuple(stored.shape))
        shards.append(LocalShard(name, TensorLayout(name, tuple(stored.shape), (whole,)), tensor))
    counters = json.loads(json.dumps(manifest.counters))
    lost = sorted(name[6:] for name in manifest.tensors if name.startswith(parameters))
    counters["optimizer_starts"] = {"parameters": dict.fromkeys(lost, 6), "average": 1}
    counters["lr_scales"] = {"num_stages": 4, "by_stage": [[stage, 1.2]]}
    for former in root.glob("step-*"):
        shutil.rmtree(former)
    info = {"plan": manifest.plan, "model": manifest.model, "run": manifest.run, "counters": counters}
    save(root, 6, shards, info, 0, 1, lambda error: [error])
