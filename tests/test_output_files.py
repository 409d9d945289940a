"""Files that a person asks a verb to write, and output that nobody can take."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread

import pytest

from muster.cli.main import main
from muster.config.file_writer import write_atomically, write_output
from muster.spec.errors import MusterError
from tests.full_disk import files_of_at_most

PREDICT = ["predict", "--model", "tiny", "--cluster", "4xh100", "--plan", "dp4"]
PLAN = ["plan", "--model", "tiny", "--cluster", "4xh100", "--effort", "0.1"]
SCHEDULE = ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
NO_FILE = [".", "", "gone/file", "n" * 300, "dangling"]
"""Paths of which none is a file that can be written."""


@pytest.mark.parametrize("path", NO_FILE)
@pytest.mark.parametrize(
    ("computing", "command"),
    [
        ("muster.api.verbs.predict", [*PREDICT, "--html"]),
        ("muster.api.verbs.predict", [*PREDICT, "--trace"]),
        ("muster.planner.answer.answer_request", [*PLAN, "-o"]),
        ("muster.planner.pareto.pareto_front", [*PLAN, "--pareto", "--html"]),
        ("muster.validate.summary.validate_table", ["validate", "--csv-out"]),
        ("muster.validate.summary.validate_table", ["validate", "--html"]),
        ("muster.config.import_config.import_config", ["import-config", "gpt.sh", "-o"]),
        ("muster.schedule.build.make_schedule", [*SCHEDULE, "--svg"]),
        ("muster.report.run_files.read_runs", ["report", "a", "b", "--html"]),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    computing, command, path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere/file")
    monkeypatch.setattr(computing, lambda *_, **__: pytest.fail("it computes"))
    assert main([*command, path]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert command[-1] in said.err
    reasons = dict.fromkeys(("gone/file", "dangling"), "there is no directory") | {"n" * 300: "File name too long"}
    assert reasons.get(path, "expected a file to write, got the directory '.'") in said.err
    assert [left.name for left in tmp_path.iterdir()] == ["dangling"]


@pytest.mark.parametrize(
    "command",
    [[*PREDICT, "--html"], [*PREDICT, "--trace"], [*PLAN, "-o"], [*SCHEDULE, "--svg"], [*SCHEDULE, "--trace"]],
)
def test_a_full_disk_costs_the_file_but_not_the_answer(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    with files_of_at_most(200):
        assert main([*command, "file"]) == 1
    said = capsys.readouterr()
    assert "can't be written to file: File too large" in said.err
    assert said.out.startswith({"schedule": "1f1b", "plan": "model", "predict": "plan"}[command[0]])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_link_keeps_leading_to_the_file_that_is_written(tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    link = tmp_path / "plan.yaml"
    link.symlink_to("elsewhere/real.yaml")
    for text in ("first", "second"):
        write_output(link, text, "the plan")
        assert link.is_symlink()
        assert (place / "real.yaml").read_text() == text
    assert [path.name for path in place.iterdir()] == ["real.yaml"]


def test_a_run_replaces_links_in_its_own_directory(tmp_path):
    """A directory that was cloned by links must not write into the one that it was cloned from."""
    (tmp_path / "original").write_text("old")
    link = tmp_path / "plan.yaml"
    link.symlink_to("original")
    write_atomically(link, "new")
    assert (link.is_symlink(), link.read_text(), (tmp_path / "original").read_text()) == (False, "new", "old")


def test_a_file_keeps_its_permissions_and_another_of_a_like_name_its_text(tmp_path):
    path, other = tmp_path / "page.html", tmp_path / "page.html.tmp"
    path.write_text("old")
    path.chmod(0o640)
    other.write_text("mine")
    write_output(path, "new", "the report")
    assert (path.read_text(), path.stat().st_mode & 0o777, other.read_text()) == ("new", 0o640, "mine")


def test_a_new_file_has_usual_permissions(tmp_path):
    write_output(tmp_path / ("n" * 250), "text", "the report")
    (tmp_path / "usual").touch()
    assert (tmp_path / ("n" * 250)).stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("refused", ["making the draft", "renaming it"])
def test_a_file_in_a_folder_that_takes_no_new_ones_is_written_in_place(refused, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS if refused == "making the draft" else errno.EBUSY, "refused")

    (tmp_path / "file").write_text("old and longer")
    monkeypatch.setattr(*((tempfile, "mkstemp") if refused == "making the draft" else (os, "replace")), refuse)
    write_output(tmp_path / "file", "new", "the report")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "new"}
    with pytest.raises(MusterError, match="the report can't be written to .*/other: refused"):
        write_output(tmp_path / "other", "new", "the report")
    assert not (tmp_path / "other").exists()


def test_a_pipe_takes_the_text_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write_output(pipe, "text", "the report")
    reader.join(timeout=60)
    assert got == ["text"]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system doesn't name open files")
def test_a_file_that_stdout_goes_to_has_the_output_too(tmp_path):
    with open(tmp_path / "all.txt", "w") as file:
        command = [sys.executable, "-m", "muster", "schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
        subprocess.run([*command, "--svg", "/proc/self/fd/1"], stdout=file, timeout=120, check=True)
    printed, _, picture = (tmp_path / "all.txt").read_text().partition("<svg")
    assert "1f1b" in printed
    assert picture.rstrip().endswith("</svg>")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_sentence(unbuffered):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "muster", "schedule", "--list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (found.returncode, found.stderr) == (1, "muster: writing failed: No space left on device\n")
