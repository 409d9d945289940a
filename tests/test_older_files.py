"""Files and flags of Muster before its names became the field's: they still open, resume, convert and mean the same."""

import hashlib
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.sampling import quick_sample

OLDER = Path(__file__).parent / "data" / "written_before" / "b48f258"
EXPECTED = json.loads((OLDER / "expected.json").read_text())
TOLERANCE = 1e-5
"""Relative difference between losses of two machines."""


@pytest.fixture(name="root")
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files, without the archives, as the working directory."""
    root = tmp_path / "files"
    shutil.copytree(OLDER, root, ignore=shutil.ignore_patterns("*.tar.gz"))
    _place(root)
    monkeypatch.chdir(root)
    return root


def _place(root: Path) -> None:
    """Put the root's path where the files name it."""
    for path in root.rglob("*"):
        if path.suffix in (".yaml", ".json") and "@ROOT@" in (text := path.read_text()):
            path.write_text(text.replace("@ROOT@", str(root)))


def unpack(root: Path, name: str) -> None:
    """Unpack an archive into the root."""
    with tarfile.open(OLDER / f"{name}.tar.gz") as archive:
        archive.extractall(root, filter="data")
    _place(root)


def muster(*arguments: str) -> str:
    """Run a command, which must succeed, and return its standard output."""
    done = forks.run(*arguments)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


def losses(run: Path) -> list[float]:
    """Training losses of a run, by step."""
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# ----------------------------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize("name", quick_sample(["run", "vocabulary-run", "auto-run"], 0))
def test_an_older_run_resumes_as_if_it_had_never_stopped(root: Path, name: str) -> None:
    unpack(root, f"run_dirs/{name}")
    before = len(losses(root / name))
    out = muster("train", f"{name}.yaml", "--run", name)
    assert f"resuming {name} after step {before}" in out
    assert losses(root / name) == pytest.approx(EXPECTED["losses"][name], rel=TOLERANCE)
    metrics = json.loads((root / name / "result.json").read_text())["metrics"]
    assert metrics == pytest.approx(EXPECTED["eval"][name], rel=TOLERANCE)
    if name == "run":
        assert (root / name / "samples.sha256").read_text().strip() == EXPECTED["samples_sha256"]


def test_an_older_run_resumes_from_its_in_memory_checkpoint(root: Path) -> None:
    unpack(root, "run_dirs/copies")
    (folder,) = (root / "memory").iterdir()
    owner = json.loads((folder / "owner.json").read_text())
    key = hashlib.sha256(f"{owner['id']} {owner['run']}".encode()).hexdigest()[:12]
    folder.rename(folder.with_name(f"muster-{key}"))  # as the run directory's path names it
    out = muster("train", "copies.yaml", "--run", "copies-run")
    assert "after step 19 from" in out
    assert losses(root / "copies-run")[19:] == pytest.approx(EXPECTED["losses"]["copies-run"][19:], rel=TOLERANCE)


def test_an_older_remote_checkpoint_is_fetched(root: Path) -> None:
    unpack(root, "run_dirs/copies")
    shutil.copytree(root / "copies-run/checkpoints/step-00000010", root / "remote/step-00000010")
    out = muster("train", "copies.yaml", "--run", "elsewhere", "--train.copies_every", "0")
    assert "resuming elsewhere after step 10" in out
    assert losses(root / "elsewhere") == pytest.approx(EXPECTED["losses"]["copies-run"][10:], rel=TOLERANCE)


@pytest.mark.parametrize("packing", ["concatenate", "documents", "whole", "none"])
def test_each_older_packing_is_still_read(root: Path, packing: str) -> None:
    out = muster("train", f"packing-{packing}.yaml", "--dry-run")
    assert f"packing-{packing}.yaml" in out


def test_a_report_of_an_older_run_is_drawn(root: Path) -> None:
    unpack(root, "run_dirs/finished")
    assert json.loads(muster("report", "finished", "--json"))
    shutil.copytree("finished", "again")
    muster("report", "finished", "again", "--html", "page.html")
    assert "again" in (root / "page.html").read_text()


# ----------------------------------------------------------------------------------------------------------------------
# Plans, machines, programs


def prediction(plan: str, cluster: str, batch: int) -> dict[str, Any]:
    workload = ("--model", "model.yaml", "--cluster", cluster, "--seq-len", "32", "--global-batch", str(batch))
    return json.loads(muster("predict", "--plan", plan, *workload, "--json"))


def named_plan(plan: str, cluster: str, batch: int) -> str:
    """Return today's name of a plan, which has a hash where the name alone doesn't say all."""
    return prediction(plan, cluster, batch)["plan"]


@pytest.mark.parametrize("name", list(EXPECTED["plans"]))
def test_an_older_plan_file_means_the_same(root: Path, name: str) -> None:
    cluster, batch = ("4xa100", 4) if name == "recompute" else ("2xa100", 6 if name == "shares" else 4)
    assert named_plan(f"plans/{name}.yaml", cluster, batch) == EXPECTED["plans"][name]


@pytest.mark.parametrize("name", list(EXPECTED["plan_names"]))
def test_an_older_plan_name_means_the_same(root: Path, name: str) -> None:
    ranks = 2 if name.startswith("pp2") else 4
    assert named_plan(name, f"{ranks}xa100", 6 if "share" in name else 4) == EXPECTED["plan_names"][name]


def test_an_older_machine_profile_is_read(root: Path) -> None:
    found = prediction("dp2-mb1-z1-fp32", "machine.yaml", 4)
    assert found["step_time_s"] == pytest.approx(EXPECTED["machine_step_time_s"], rel=1e-9)


@pytest.mark.parametrize("name", ["auto-unresolved", "plan-searched", "pinned"])
def test_an_older_plan_has_a_program(root: Path, name: str) -> None:
    assert muster(
        "program",
        f"plans/{name}.yaml",
        "--model",
        "model.yaml",
        "--train.global_batch_size",
        "4" if name == "pinned" else "64",
    ).startswith("program ")


@pytest.mark.parametrize("name", ["dualpipe", "post-validation", "sharded", "vocabulary"])
def test_an_older_program_text_is_checked(root: Path, name: str) -> None:
    muster("program", "--check", f"programs/program-{name}.txt")


def test_an_older_schedule_file_is_drawn(root: Path) -> None:
    muster("schedule", "--file", "programs/schedule-zb-v.json")


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and data


def test_an_older_checkpoint_is_verified_and_converted(root: Path) -> None:
    unpack(root, "run_dirs/run")
    assert json.loads(muster("checkpoint", "inspect", "run", "--json"))["format"] == "muster"
    muster("checkpoint", "verify", "run")
    for kind in ("hf", "dcp", "muster"):
        muster("checkpoint", "convert", "run", kind, "--to", kind)
        found = json.loads(muster("checkpoint", "diff", "run", kind, "--json"))
        assert found["equal"]
        assert not [fact for fact in found["facts"] if fact.startswith("plan.")]


def test_older_exported_directories_open(root: Path) -> None:
    unpack(root, "exported")
    assert json.loads(muster("checkpoint", "diff", "hf", "dcp", "--json"))["equal"]
    muster("checkpoint", "convert", "dcp", "from-dcp", "--to", "muster")
    assert muster("generate", "hf", "--prompt", "the plan", "--tokens", "4", "--temperature", "0")


def test_older_token_stores_are_read(root: Path) -> None:
    unpack(root, "stores")
    facts = json.loads(muster("data", "inspect", "store", "--json"))
    assert (facts["tokens"], facts["documents"]) == (7092, 60)
    masked = json.loads(muster("data", "inspect", "store-masked", "--json"))
    assert masked["tokens"] == 124
    muster("data", "check", "store", "--tokenizer", "tokenizer", "--end-token", "<|endoftext|>")
    muster("data", "check", "store-masked")


# ----------------------------------------------------------------------------------------------------------------------
# Flags

PLANNED = ("plan", "--model", "model.yaml", "--cluster", "4xa100", "--seq-len", "128", "--global-batch", "16")
DREW = ("schedule", "1f1b", "--ranks", "2", "--microbatches", "4")
OLDER_FLAGS = {
    "plan": (*PLANNED, "--limit", "4", "--memory", "70GB", "--fix", "pp2-z1", "--top", "2", "--runnable"),
    "schedule": ("schedule", "interleaved", "--ranks", "2", "--microbatches", "4", "--chunks", "2", "--comm", "0.5"),
    "schedule memory": ("schedule", "auto", "--ranks", "2", "--microbatches", "4", "--memory-limit", "2"),
    "schedule vocabulary": (*DREW, "--vocab", "0.5"),
    "schedule fill": ("schedule", "2bp-1f1b", "--ranks", "2", "--microbatches", "4", "--fill"),
    "doctor": ("doctor", "--ranks", "2", "--limit", "30"),
    "memory-check": ("memory-check", "--model", "tiny", "--plan", "dp2-mb1-z1-fp32", "--seq-len", "256", "--real"),
    "data": (
        "data",
        "prepare",
        "first.jsonl",
        "--out",
        "made",
        "--bad-rows",
        "skip",
        "--tokenizer",
        "tokenizer",
        "--end-token",
        "<|endoftext|>",
    ),
    "train": (
        "train",
        "run.yaml",
        "--dry-run",
        "--fresh",
        "--data.held_out",
        "0.1",
        "--data.bad_rows",
        "skip",
        "--train.hang_s",
        "60",
        "--train.max_skipped",
        "3",
        "--train.copies_every",
        "2",
        "--train.copies_dir",
        "/tmp",
        "--parallel.spread_vocab",
        "false",
        "--track.tensorboard",
        "false",
        "--parallel",
        "dp2-rsel-fp32",
    ),
}


@pytest.mark.parametrize("name", list(OLDER_FLAGS))
def test_older_flags_work(root: Path, name: str) -> None:
    muster(*OLDER_FLAGS[name])
