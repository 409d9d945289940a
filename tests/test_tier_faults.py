"""Faults of the disk under each tier: the run ends with one sentence, leaves nothing behind, and resumes with the
losses of a run that nothing disturbed."""

import random
from functools import cache
from pathlib import Path
from socket import gethostname

import pytest

from muster.config.attempt_files import SCRATCH_PREFIX
from tests.train_runs import AT_ONCE, QUICK, ROOT, Command, Ended, assert_one_sentence, losses, steps, train

RUN = (
    *("--preset", "tiny", *QUICK, *AT_ONCE, "--train.steps", "4", "--train.save_every", "1"),
    *("--train.global_batch_size", "4"),
)
LATE = ("--train.delayed_update", "true", "--train.delayed_update_warmup_steps", "1")
EARLY = ("--train.update_in_backward", "true", "--optim.clip_by_previous_norm", "true")
NAMES = {(): "whole", LATE: "delayed", EARLY: "within"}
"""Further words of runs that nothing disturbs, and their folders."""
TIERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "state": ("dp1-mb2-fp32-ooptd", "the optimizer's state", ()),
    "parameters": ("dp1-mb2-fp32-ooptd-oparamd", "the parameters", ()),
    "activations": ("dp1-mb2-fp32-oactd", "the activations", ()),
    "delayed": ("dp1-mb2-fp32-ooptd", "the optimizer's state", LATE),
    "state within the backward": ("dp1-mb2-fp32-ooptd", "the optimizer's state", EARLY),
    "parameters within the backward": ("dp1-mb2-fp32-ooptd-oparamd", "the parameters", EARLY),
    "all": ("dp1-mb2-fp32-ooptd-oparamd-oactd", "checkpoint", ("--train.async_save", "true")),
}
"""Plan, what the file holds that fails, and further words, by tier."""
SENTENCES = {
    "kill": "rank 0 on {host} was killed by signal 9",
    "full": "on disk can't be written in {run}: No space left on device; make room there, or leave o",
    "lost": "on disk can't be read in {run}: the file ends after ",
    "changed": "on disk isn't what was written there (its CRC-32 differs)",
}
CASES = [(tier, fault) for tier in TIERS for fault in SENTENCES if tier != "all" or fault == "kill"]
SAMPLE = random.Random(19).sample(CASES, 1)


@cache
def undisturbed(folder: Path, *more: str) -> Path:
    """A run without a tier, or without a fault where updates are delayed or within the backward."""
    run = folder / NAMES[more]
    ended = train(*RUN, *more, "--parallel", "dp1-mb2-fp32-oopt" if more else "dp1-mb2-fp32", "--run", run)
    assert ended.code == 0, ended.err
    return run


def with_fault(run: Path, fault: str, content: str, *words: str) -> Ended:
    """The end of a run whose file with some content fails once the checkpoint of step 2, or the first, is
    there."""
    env = {
        "PYTHONPATH": f"{ROOT}/tests/faults:{ROOT}",
        "FAULT": fault,
        "FAULT_CONTENT": content,
        "FAULT_AFTER": str(run / "checkpoints" / ("latest" if content == "checkpoint" else "step-00000002")),
    }
    with Command(*RUN, *words, "--run", run, env=env) as command:
        return command.wait()


def assert_it_goes_on(tier: str, fault: str, folder: Path, tmp_path: Path) -> None:
    plan, content, more = TIERS[tier]
    whole, run = undisturbed(folder, *(more if more in NAMES else ())), tmp_path / "run"
    ended = with_fault(run, fault, content, *more, "--parallel", plan)
    assert ended.code
    assert_one_sentence(ended, ended.code, SENTENCES[fault].format(host=gethostname(), run=run))
    if fault in ("kill", "full") and tier != "all":  # the others are noticed by the next read
        assert steps(run) == [1, 2]
    assert list(run.glob(f"{SCRATCH_PREFIX}*")) == []
    (run / f"{SCRATCH_PREFIX}left").write_text("of a kill where files can't be without a name")
    again = train(*RUN, *more, "--parallel", plan, "--run", run)
    assert again.code == 0, again.err
    assert f"resuming {run} after step " in again.out
    assert list(run.glob(f"{SCRATCH_PREFIX}*")) == []
    assert steps(run) == [1, 2, 3, 4]
    assert losses(run) == losses(whole)


@pytest.mark.parametrize(("tier", "fault"), SAMPLE)
def test_a_run_goes_on_after_a_fault_of_its_disk(
    tier: str, fault: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    assert_it_goes_on(tier, fault, tmp_path_factory.getbasetemp(), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("tier", "fault"), [case for case in CASES if case not in SAMPLE])
def test_runs_go_on_after_each_fault_of_each_tier(
    tier: str, fault: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    assert_it_goes_on(tier, fault, tmp_path_factory.getbasetemp(), tmp_path)
