"""Checks before a run: a dry run and a run refuse the same requests, with the same words."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from muster.cli.main import main
from muster.config import local_machine
from muster.launch import launcher
from muster.launch.exit_status import ExitStatus, collect_rank_exit
from muster.launch.oom_kills import oom_kill_count, read_oom_kills
from muster.spec.formatting import format_bytes
from muster.train import memory_preflight
from tests import forks

LETTERS = "".join(f"Letter {n}: dear friend, all is well, and the {n} apples are ripe.\n" for n in range(60))
Tree = dict[str, Any]


def sound(folder: Path) -> Tree:
    """A run file whose run begins."""
    (folder / "letters.txt").write_text(LETTERS)
    return {
        "extends": "tiny",
        "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 48},
        "data": {"source": str(folder / "letters.txt"), "cache": str(folder / "cache")},
        "train": {"steps": 1, "seq_len": 16, "global_batch_size": 4, "sample_tokens": 0},
        "eval": {"batches": 0},
        "parallel": "dp1-mb2-fp32",
    }


# ----------------------------------------------------------------------------------------------------------------------
# Faults: each changes the run file or the folder, and may hold something open


def no_source(tree: Tree, folder: Path, draw: Random) -> None:
    tree["data"]["source"] = str(folder / draw.choice(("letter.txt", "letters.jsonl", "no/such/place")))


def empty_source(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "letters.txt").write_text("")


def source_without_texts(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "notes.doc").write_text(LETTERS)
    tree["data"]["source"] = str(folder / "texts")


def invalid_row(tree: Tree, folder: Path, draw: Random) -> None:
    rows = [json.dumps({"text": line}) for line in LETTERS.splitlines()]
    rows[draw.randrange(len(rows))] = draw.choice(('{"text": 3}', "{", '{"txt": "dear"}'))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    tree["data"]["source"] = str(folder / "rows.jsonl")


def too_little_text(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "letters.txt").write_text("dear friend")
    tree["train"]["seq_len"] = draw.choice((64, 512))


def too_little_text_for_epochs(tree: Tree, folder: Path, draw: Random) -> None:
    too_little_text(tree, folder, draw)
    del tree["train"]["steps"]
    tree["train"] |= {"epochs": 2, "steps": None}


def no_tokenizer(tree: Tree, folder: Path, draw: Random) -> None:
    tree["data"]["tokenizer"] = str(folder / "tokenizer")


def damaged_tokenizer(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "tokenizer.json").write_text("{}")
    tree["data"]["tokenizer"] = str(folder / "tokenizer.json")


def small_vocabulary(tree: Tree, folder: Path, draw: Random) -> None:
    tree["model"]["vocab_size"] = 100


def no_template(tree: Tree, folder: Path, draw: Random) -> None:
    tree["data"]["chat_template"] = str(folder / "template.jinja")


def no_weights(tree: Tree, folder: Path, draw: Random) -> None:
    tree["train"]["init_from"] = str(folder / "weights")


def foreign_weights(tree: Tree, folder: Path, draw: Random) -> None:
    weights = folder / "weights"
    weights.mkdir()
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    config = {"model_type": "llama", "vocab_size": 257, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, **shape}
    (weights / "config.json").write_text(json.dumps(config))
    tree["train"]["init_from"] = str(weights)


def half_precision_on_a_cpu(tree: Tree, folder: Path, draw: Random) -> None:
    tree["parallel"] = "dp1-mb2-fp16"


def too_large(tree: Tree, folder: Path, draw: Random) -> None:
    tree["model"] = draw.choice(("llama3.1-405b", "gpt3-175b", "llama3-70b"))
    tree["parallel"] = draw.choice(("mb1-fp32", "dp2-mb1-z1", "pp2-mb1", "tp2-mb1"))


def illegal_plan(tree: Tree, folder: Path, draw: Random) -> None:
    tree["parallel"] = draw.choice(("pp9-mb1", "tp3-mb1", "dp3-mb1", "mb8", "pp2-szbv-mb1"))


def run_below_a_file(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "runs").write_text("")


def cache_below_a_file(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "cache").write_text("")


def no_plugin(tree: Tree, folder: Path, draw: Random) -> None:
    tree["plugins"] = [str(folder / "plugin.py")]


def no_loss(tree: Tree, folder: Path, draw: Random) -> None:
    tree["train"]["loss"] = "smoothed"


def no_url(tree: Tree, folder: Path, draw: Random) -> None:
    tree["train"]["remote_checkpoint_dir"] = draw.choice(("checkpoints", "memory://checkpoints", "s4://bucket"))


def limit_of_tables(tree: Tree, folder: Path, draw: Random) -> None:
    (folder / "table.parquet").write_text("no table")
    tree["data"]["source"] = str(folder / "table.parquet")


@contextmanager
def held_directory(folder: Path) -> Iterator[None]:
    """Another job in the run directory."""
    (folder / "runs" / "one").mkdir(parents=True)
    with (folder / "runs" / "one" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FAULTS: list[Callable[[Tree, Path, Random], None]] = [
    no_source,
    empty_source,
    source_without_texts,
    invalid_row,
    too_little_text,
    too_little_text_for_epochs,
    no_tokenizer,
    damaged_tokenizer,
    small_vocabulary,
    no_template,
    no_weights,
    foreign_weights,
    half_precision_on_a_cpu,
    too_large,
    illegal_plan,
    run_below_a_file,
    cache_below_a_file,
    no_plugin,
    no_loss,
    no_url,
    limit_of_tables,
]
SAMPLE = (*range(9), 65)
"""Cases that every test run tries; the soak tries all."""


def request(seed: int, folder: Path, held: ExitStack) -> list[str]:
    """A random request: sound, or with one or two faults."""
    draw = Random(seed)
    tree = sound(folder)
    tree["train"]["seq_len"] = draw.choice((16, 32))
    tree["parallel"] = draw.choice(("dp1-mb2-fp32", "dp2-mb1-z1-fp32", "pp2-mb1", "tp2-mb2-fp32", "auto"))
    for fault in draw.sample(FAULTS, draw.choice((0, 1, 1, 1, 2))):
        fault(tree, folder, draw)
    if draw.random() < 0.05 and not (folder / "runs").exists():
        held.enter_context(held_directory(folder))
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return ["train", str(folder / "run.yaml"), "--run", str(folder / "runs" / "one")]


def assert_they_agree(seed: int, folder: Path, capfd: pytest.CaptureFixture[str]) -> list[str] | None:
    """Compare the ends of a dry run and of a run that starts no ranks; returns the words of a request that passes."""
    with ExitStack() as held:
        words = request(seed, folder, held)
        before = sorted(folder.rglob("*"))
        dry = main([*words, "--dry-run"])
        dry_error = capfd.readouterr().err
        assert sorted(folder.rglob("*")) == before, "a dry run writes nothing"
        code = main(words)
        error = capfd.readouterr().err
        assert (dry, dry_error) == (code, error), f"seed {seed}: {(folder / 'run.yaml').read_text()}"
        empty = [path for path in folder.rglob(".lock") if list(path.parent.iterdir()) == [path]]
        assert all(path.parent in before for path in empty), "a refused run leaves no directory without files"
        return None if code else words


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run ends where its ranks would start; the machine has 8 GB of memory whatever the tests run on."""
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: ExitStatus(0, "no ranks were started"))
    for module in (local_machine, memory_preflight):
        monkeypatch.setattr(module, "system_memory_bytes", lambda: 8 << 30)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("seed", SAMPLE)
@pytest.mark.usefixtures("no_ranks")
def test_a_dry_run_refuses_what_a_run_refuses(seed: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_they_agree(seed, tmp_path, capfd)


@pytest.mark.soak
@pytest.mark.usefixtures("no_ranks")
def test_dry_runs_and_runs_agree_on_200_random_run_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What passes also runs, on real ranks."""
    passed = 0
    for seed in range(200):
        folder = tmp_path / str(seed)
        folder.mkdir()
        words = assert_they_agree(seed, folder, capfd)
        if words is not None:
            passed += 1
            done = forks.run(*words, "--fresh")
            assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert 20 < passed < 100


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("no_ranks")
def test_each_fault_is_refused(fault: Callable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tree = sound(tmp_path)
    fault(tree, tmp_path, Random(0))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    code = main(["train", str(tmp_path / "run.yaml"), "--run", str(tmp_path / "runs" / "one"), "--dry-run"])
    error = capfd.readouterr().err
    assert code in (1, 2, 3), error
    assert error.startswith("muster: ")
    assert "Traceback" not in error


# ----------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.usefixtures("no_ranks")
def test_a_plan_that_exceeds_the_memory_is_refused_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--preset", "tiny", "--model", "llama3-8b", "--parallel", "pp2-mb4-fp32", "--dry-run"]
    assert main(words) == 3
    error = capsys.readouterr().err
    assert error.startswith("muster: plan pp2-mb4-fp32 needs ")
    assert "of memory for 2 processes on a machine (on the fullest rank " in error
    assert f"which has {format_bytes(8 << 30)}: " in error
    assert error.endswith("; --ignore-memory tries it all the same\n")
    assert main([*words, "--ignore-memory"]) == 0


@pytest.mark.usefixtures("no_ranks")
def test_what_would_help_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in (local_machine, memory_preflight):
        monkeypatch.setattr(module, "system_memory_bytes", lambda: 24 << 20)
    words = ["train", "--preset", "tiny", "--model.num_layers", "8", "--train.seq_len", "512"]
    assert main([*words, "--parallel", "mb4-fp32", "--dry-run"]) == 3
    assert " would fit (dp1-mb" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ranks")
def test_devices_have_a_memory_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(local_machine, "nvidia_gpu_names", lambda: ["NVIDIA A100-SXM4-40GB"] * 8)
    words = ["train", "--preset", "tiny", "--model", "llama3-8b", "--train.global_batch_size", "8", "--dry-run"]
    assert main([*words, "--parallel", "dp8-mb1-z1"]) == 3
    error = capsys.readouterr().err
    assert "GiB on rank 0 (on the fullest rank " in error
    assert "but a device (a100-40-sxm) has 39.4 GiB" in error
    assert main([*words, "--parallel", "tp8-sp-mb1-rfull"]) == 0


def test_kills_by_the_kernel_are_read_where_it_counts_them(tmp_path: Path) -> None:
    events, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    machine.write_text("nr_free_pages 5\noom_kill 7\n")
    assert read_oom_kills([events, machine]) == 7
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert read_oom_kills([events, machine]) == 2
    assert read_oom_kills([tmp_path / "none"]) is None
    if os.path.exists("/proc/vmstat"):
        assert oom_kill_count() is not None


@pytest.mark.parametrize(
    ("ran_out", "sentence"),
    [
        (True, "was killed by signal 9 (SIGKILL): the kernel ran out of memory"),
        (False, "was killed by signal 9 (SIGKILL)"),
        (None, "was killed by signal 9 (SIGKILL); out of memory?"),
    ],
)
def test_a_killed_rank_is_said_to_lack_memory_where_that_is_known(
    ran_out: bool | None, sentence: str, tmp_path: Path
) -> None:
    end = collect_rank_exit(tmp_path, 1, -9, False, 0.0, False, ran_out)
    assert end.observed is not None
    assert end.observed.sentence == sentence


def test_a_batch_of_too_many_micro_batches_is_refused_before_anything_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--preset", "tiny", "--train.global_batch_size", "1000000000", "--dry-run"]) == 3
    assert "1,000,000,000 micro-batches of 1; with pp 1, a step has at most 262,144" in capsys.readouterr().err


def test_a_directory_that_is_no_store_is_not_one_to_delete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    assert main(["data", "inspect", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is not a token store: expected a directory with store.json" in said
    assert "delete" not in said
