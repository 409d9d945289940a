"""CheckFree+: micro-batches that see end stages swapped, and lost end stages that are copies of those beside them."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.report.approximation import Approximation, RebuiltStage
from muster.report.run_files import read_metrics
from muster.report.terminal import paths_text
from muster.schedule.checkfree_plus import checkfree_plus, swapped_paths
from muster.schedule.resolve import resolve_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.checkfree import Holding, plan_transfers, substitutes
from tests.checkfree_ranks import INNER_LAYERS, state_of
from tests.ranks import run_ranks
from tests.test_checkfree import emulate
from tests.test_skippipe import check_same
from tests.train_runs import AT_ONCE, QUICK, Command, assert_one_sentence, losses, train

PLAN = "pp4-scheckfreeplus-l0.2.2.0"


# ----------------------------------------------------------------------------------------------------------------------
# Training


def test_gradients_equal_a_serial_emulator(tmp_path: Path) -> None:
    """With the embedding and the head alone on the first and the last rank; passes in turn are found out."""
    cases = [{"plan": PLAN}, {"plan": f"{PLAN}-mb2", "packing": "next_fit", "tied": True}]
    check_same(4, [*cases, {"plan": PLAN, "fault": "unswapped"}], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_gradients_equal_a_serial_emulator_with_two_pairs_of_swapped_stages(tmp_path: Path) -> None:
    plan = "pp6-scheckfreeplus-l0.1.1.1.1.0"
    check_same(6, [{"plan": plan}, {"plan": plan, "fault": "unswapped"}], tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_gradients_equal_a_serial_emulator_with_data_parallelism(tmp_path: Path) -> None:
    cases = [{"plan": f"{degrees}{PLAN}", "packing": "next_fit"} for degrees in ("dp2x1-", "dp2-", "tp2-")]
    check_same(8, cases, tmp_path)


def test_every_second_micro_batch_has_end_stages_swapped() -> None:
    assert swapped_paths(4, 3) == ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3))
    assert swapped_paths(7, 2)[1] == (0, 2, 1, 3, 5, 4, 6)
    assert checkfree_plus(ScheduleSpec(6, 5)).paths == swapped_paths(6, 5)
    for ranks, count, words in ((3, 8, "of 4 pipeline ranks, or of 6 or more"), (5, 8, "not of 5"), (4, 1, "only one")):
        with pytest.raises(InfeasibleError, match=words):
            checkfree_plus(ScheduleSpec(ranks, count))


def test_a_plan_says_what_it_swaps() -> None:
    model = ModelSpec(vocab_size=32, hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, intermediate_size=16)
    workload = Workload(seq_len=8, global_batch_size=5)
    for name, words in (
        (f"{PLAN}-mb1", "2 of 5 micro-batches have stages 1 and 2 swapped"),
        (
            "pp6-mb1-scheckfreeplus-l0.1.1.1.1.0",
            "2 of 5 micro-batches have stages 1 and 2, and 3 and 4 swapped",
        ),
    ):
        plan = resolve_schedule(parse_plan_name(name), model, workload)
        assert paths_text(plan) == f"{words}, which changes what is trained"


# ----------------------------------------------------------------------------------------------------------------------
# Recovery


def test_what_takes_the_place_of_each_stage() -> None:
    plan = parse_plan_name("pp6-scheckfreeplus-l0.1.1.1.1.0")
    assert [substitutes(plan, stage) for stage in range(6)] == [(), (2,), (1, 3), (2, 4), (3,), ()]
    held = [[Holding(stage, 6, 6, 1.0)] for stage in range(6)]
    held[1].append(Holding(0, 6, 6, 1.0))
    held[4].append(Holding(5, 6, 6, 1.0))
    lost = {rank: [] for rank in (0, 4)}
    found = plan_transfers(plan, [lost.get(rank, one) for rank, one in enumerate(held)], "squared_norm")
    assert found is not None
    assert found.sources == [(1,), (1,), (2,), (3,), (3,), (5,)]
    assert found.approximation == Approximation((RebuiltStage(4, (3,), (1.0,)),))
    assert found.approximation.sentences == ["stage 4 is approximated by a copy of stage 3"]
    for one, other in ((0, 1), (3, 4), (4, 5)):
        lost = {rank: [] for rank in (one, other)}
        assert plan_transfers(plan, [lost.get(rank, own) for rank, own in enumerate(held)], "squared_norm") is None


BOTH = [[[0, 6, 6, 1.0]], [[1, 6, 6, 1.0], [0, 6, 6, 1.0]], [[2, 6, 6, 1.0], [3, 6, 6, 1.0]], [[3, 6, 6, 1.0]]]
EARLIER = [[], [[1, 6, 5, 1.0], [0, 5, 5, 1.0]], BOTH[2], BOTH[3]]
"""Rank 0 was lost while it sent its copy, when other ranks had recorded the step already."""


def test_lost_end_stages_are_copies() -> None:
    cases = {"embedding": [[], *BOTH[1:]], "head": [*BOTH[:3], []], "first layers": [BOTH[0], [], *BOTH[2:]]}
    cases |= {"last layers": [*BOTH[:2], [], BOTH[3]], "copy cut short": EARLIER}
    payload = {"plan": PLAN.replace("l0.2.2.0", "l0.4.4.0")}
    payload |= {"cases": [{"held": held, "kind": "squared_norm"} for held in cases.values()]}
    by_rank = run_ranks(4, "tests.checkfree_ranks:on_rank", payload)
    told = {name: [own[index] for own in by_rank] for index, name in enumerate(cases)}
    for case, others in {"embedding": {}, "head": {}, "first layers": {1: 2}, "last layers": {2: 1}}.items():
        for rank, (about, values) in enumerate(told[case]):
            copied = others.get(rank)
            wanted = kept(rank) if copied is None else layers_of(copied, rank)
            assert {name: torch.tensor(one) for name, one in values.items()}.keys() == kept(rank).keys()
            for name, one in values.items():
                assert torch.equal(torch.tensor(one), wanted.get(name, torch.full((3, 5), -1.0))), (case, rank, name)
            assert about[0] == 6
            assert about[2] == [f"stage {own} is approximated by a copy of stage {it}" for own, it in others.items()]
    for name, tensor in kept(0, 5).items():
        assert torch.equal(torch.tensor(told["copy cut short"][0][1][name]), tensor)
    assert told["copy cut short"][0][0][0] == 5
    assert told["copy cut short"][0][0][2] == ["stages 1, 2 and 3 see the update of the step under way twice"]


@pytest.mark.parametrize(("degrees", "num_ranks"), [("", 4), pytest.param("dp2x1-", 8, marks=pytest.mark.soak)])
def test_end_stages_are_kept_beside_them_after_every_step(degrees: str, num_ranks: int) -> None:
    """A copy that is cut short leaves the one before."""
    payload = {"plan": degrees + PLAN.replace("l0.2.2.0", "l0.4.4.0")}
    for rank, found in enumerate(run_ranks(num_ranks, "tests.checkfree_ranks:copies_on_rank", payload)):
        end_stage = {1: 0, 2: 3}.get(rank * 4 // num_ranks)
        assert found["stage"] == end_stage
        assert found["updates"] == (0 if end_stage is None else 2)
        wanted = {} if end_stage is None else kept(end_stage, 2)
        assert found["tensors"].keys() == wanted.keys()
        for name, values in found["tensors"].items():
            assert torch.equal(torch.tensor(values), wanted[name])


def kept(stage: int, updates: int = 6) -> dict[str, Tensor]:
    return state_of(stage, updates, INNER_LAYERS)


def layers_of(stage: int, as_stage: int) -> dict[str, Tensor]:
    """The parameters of a stage's four layers, by the names of another stage's."""
    found = {}
    for name, tensor in kept(stage).items():
        kind, layer, rest = name.split(".", 2)
        if kind == "model/layers":
            found[f"{kind}.{int(layer) + 4 * (as_stage - stage)}.{rest}"] = tensor
    return found


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_run_loses_the_embedding_exactly_and_an_end_stage_as_from_a_checkpoint_with_the_copy(tmp_path: Path) -> None:
    """Rank 0 is killed after a step, and rank 1 after a later one. Losses are to the bit those of a run without losses
    until then, and afterwards those of one that resumes from a checkpoint in which one process has copied the stage."""
    parallel = PLAN.replace("l0.2.2.0", "l0.4.4.0")
    common = ["--preset", "tiny", *QUICK, *AT_ONCE, "--parallel", parallel, "--train.steps", "10"]
    run, other = tmp_path / "run", tmp_path / "other"
    elastic = ["--train.elastic", "true", "--train.recovery", "checkfree"]
    with Command(*common, *elastic, "--run", run, hold_after=[3, 6]) as job:
        for rank, step in ((0, 3), (1, 6)):
            job.wait_for_step(step)
            os.kill(job.ranks()[rank], signal.SIGKILL)
            job.go_on(step)
        ended = job.wait()
    assert (ended.code, ended.err) == (0, "")
    assert "CheckFree: stage 1 is approximated by a copy of stage 2" in ended.out
    exact, copied = read_metrics(run / "recoveries.jsonl")
    assert exact["approximation"] is None
    assert copied["approximation"]["rebuilt"] == [{"stage": 1, "neighbours": [2], "weights": [1.0]}]
    assert "stage 1 is approximated by a copy of stage 2" in (run / "report.html").read_text()
    assert train(*common, "--run", other, "--train.save_every", "6").code == 0
    undisturbed = losses(other)
    emulate(checkpoint_path(other / "checkpoints", 6), other / "checkpoints", 1, range(4), {4: 1.0})
    resumed = train(*common, "--run", other)
    assert (resumed.code, resumed.err) == (0, ""), resumed.out
    assert losses(run) == losses(other)
    assert losses(run)[:6] == undisturbed[:6]
    assert losses(run)[6] != undisturbed[6]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("pp5-scheckfreeplus-l0.3.3.2.0", "but pp is 5: expected 4"),
        ("pp6-scheckfreeplus", "as in l0.2.2.0"),
        ("pp4-scheckfreeplus-l1.3.3.1", "as in l0.2.2.0"),
        ("pp4-scheckfreeplus-l0.4.4.0-vocab", "needs all ranks for each of them in turn"),
        ("pp4-scheckfreeplus-l0.4.4.0-oopt", "can't be run yet"),
        ("pp4-scheckfreeplus-l0.5.3.0", "which have 5, 3"),
    ],
)
def test_what_is_refused(parallel: str, words: str, tmp_path: Path) -> None:
    keys = ["--train.elastic", "true", "--train.recovery", "checkfree"]
    ended = train("--preset", "tiny", "--dry-run", "--run", tmp_path / "run", *keys, "--parallel", parallel)
    assert_one_sentence(ended, ended.code, words)
    assert ended.code in (2, 3)
