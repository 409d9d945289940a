"""Files that a person asks a verb to write, and output that nobody can take."""

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from muster.cli.main import main
from muster.config.file_writer import write_atomically
from tests.full_disk import files_of_at_most

PREDICT = ["predict", "--model", "tiny", "--cluster", "4xh100", "--plan", "dp4"]
PLAN = ["plan", "--model", "tiny", "--cluster", "4xh100", "--effort", "0.1"]
NO_FILE = [".", "", "gone/file"]
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
        ("muster.schedule.build.make_schedule", ["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--svg"]),
        ("muster.report.run_files.read_runs", ["report", "a", "b", "--html"]),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(
    computing, command, path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(computing, lambda *_, **__: pytest.fail("it computes"))
    assert main([*command, path]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert command[-1] in said.err
    assert ("there is no directory" if "gone" in path else "a file to write, got the directory '.'") in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [[*PREDICT, "--html"], [*PREDICT, "--trace"], [*PLAN, "-o"]])
def test_a_full_disk_costs_the_file_but_not_the_answer(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    with files_of_at_most(200):
        assert main([*command, "file"]) == 1
    said = capsys.readouterr()
    assert "can't be written to file: File too large" in said.err
    assert "\nmodel" in f"\n{said.out}"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_link_keeps_leading_to_the_file_that_is_written(tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    link = tmp_path / "plan.yaml"
    link.symlink_to("elsewhere/real.yaml")
    for text in ("first", "second"):
        write_atomically(link, text)
        assert link.is_symlink()
        assert (place / "real.yaml").read_text() == text
    assert [path.name for path in place.iterdir()] == ["real.yaml"]


def test_a_pipe_takes_the_text_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomically(pipe, "text")
    reader.join(timeout=60)
    assert got == ["text"]
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


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
    assert (found.returncode, found.stderr) == (1, "muster: the output can't be written: No space left on device\n")
