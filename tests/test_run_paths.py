"""Paths in a run file: begun at the file, on the command line at the working directory, in a run at the run."""

import json
import shutil
from pathlib import Path

import pytest

from muster.api.run import Run
from muster.config.load_config import load_run_config, write_run_files
from muster.config.run_config import RunConfig
from muster.planner.auto import resolve_plan
from muster.spec.errors import ConfigError
from muster.train.data import run_tokenizer
from muster.train.resume_check import config_changes
from muster.train.run_tokenizer import keep_tokenizer, with_settled_bos
from tests.fine_tuning import write_llama3_tokenizer

BASE = "extends: tiny\nmodel: {vocab_size: 320}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(BASE + text)
    return folder / name


def paths_of(config: RunConfig) -> list[str | None]:
    data, train = config.data, config.train
    return [*data.sources, data.tokenizer, data.chat_template, data.cache, train.init_from]


def test_paths_in_a_file_begin_at_the_file_and_those_of_the_command_line_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(
        tmp_path / "a" / "b",
        "data: {source: ./rows.json, tokenizer: ../tok, chat_template: t.jinja, cache: c}\n"
        "train: {init_from: ../base}\n",
    )
    assert paths_of(load_run_config(None, file, []).config) == [
        str(tmp_path / where) for where in ("a/b/rows.json", "a/tok", "a/b/t.jinja", "a/b/c", "a/base")
    ]
    given = load_run_config(None, file, [("data.source", "./rows.json"), ("train.init_from", "base")]).config
    assert (given.data.source, given.train.init_from) == ("./rows.json", "base")
    here = paths_of(load_run_config(None, Path("a/b/run.yaml"), []).config)
    assert here == ["a/b/rows.json", "a/tok", "a/b/t.jinja", "a/b/c", "a/base"]
    above = write(tmp_path / "c", "", "above.yaml")
    above.write_text("extends: ../a/b/run.yaml\n")
    assert load_run_config(None, above, []).config.data.tokenizer == str(tmp_path / "a/tok")


def test_sources_of_a_blend_begin_at_the_file_and_names_are_no_paths(tmp_path):
    file = write(
        tmp_path,
        "data:\n  blend:\n    - {name: one, source: one.jsonl}\n    - {name: code, source: python-stdlib}\n"
        "    - {name: home, source: ~/texts}\n"
        "train: {remote_checkpoint_dir: 's3://bucket/run'}\n",
    )
    config = load_run_config(None, file, []).config
    assert config.data.sources == [str(tmp_path / "one.jsonl"), "python-stdlib", str(Path.home() / "texts")]
    assert (config.data.tokenizer, config.train.remote_checkpoint_dir) == ("bytes", "s3://bucket/run")


def test_a_file_of_an_earlier_schema_keeps_its_meaning(tmp_path):
    text = "data: {source: rows.json, tokenizer: tok}\n"
    for version in (1, 2):
        config = load_run_config(None, write(tmp_path, f"version: {version}\n{text}"), []).config
        assert (config.data.source, config.data.tokenizer, config.data.add_bos) == ("rows.json", "tok", False)
    config = load_run_config(None, write(tmp_path, f"version: 3\n{text}"), []).config
    assert (config.data.source, config.data.add_bos) == (str(tmp_path / "rows.json"), None)


def test_a_runs_config_names_its_own_tokenizer_wherever_it_lies(tmp_path, monkeypatch):
    write_llama3_tokenizer(tmp_path / "tok")
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    file = write(tmp_path, "data: {source: rows.json, tokenizer: tok, chat_template: own.jinja}\n")
    resolved = with_settled_bos(load_run_config(None, file, []))
    kept = keep_tokenizer(resolved, tmp_path / "run", None)
    write_run_files(kept, resolve_plan(resolved, 1), tmp_path / "run")
    shutil.rmtree(tmp_path / "tok")
    (tmp_path / "own.jinja").unlink()
    shutil.move(tmp_path / "run", tmp_path / "else" / "moved")
    monkeypatch.chdir("/")
    again = load_run_config(None, tmp_path / "else" / "moved" / "config.yaml", []).config
    tokenizer = run_tokenizer(again.data)
    assert again.data.tokenizer == str(tmp_path / "else/moved/tokenizer/tokenizer.json")
    assert again.data.source == str(tmp_path / "rows.json")
    assert (again.data.add_bos, tokenizer.bos_id) == (True, 0)
    assert tokenizer.chat_template.text == "{{ messages[0].content }}"
    assert config_changes(again, resolved.config) == [], "the place of a tokenizer or of data is no change"
    again_kept = keep_tokenizer(
        load_run_config(None, tmp_path / "else/moved/config.yaml", []), tmp_path / "else/moved", None
    )
    assert again_kept.config == again


def test_another_tokenizer_is_a_change_and_so_is_its_begin_of_document_token(tmp_path):
    write_llama3_tokenizer(tmp_path / "tok")
    write_llama3_tokenizer(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "tokenizer_config.json").read_text())
    (tmp_path / "other" / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end_of_text|>"}))
    data = {"source": "python-stdlib", "tokenizer": str(tmp_path / "tok")}

    def settled(**more: object) -> RunConfig:
        run = Run(extends="tiny", model={"vocab_size": 320}, data={**data, **more})
        return with_settled_bos(run.resolved).config

    (change,) = config_changes(settled(), settled(tokenizer=str(tmp_path / "other")))
    assert change.startswith(f"data.tokenizer was {tmp_path}/tok (json-")
    assert config_changes(settled(), settled(add_bos=False)) == ["data.add_bos was True, now False"]
    assert config_changes(settled(), settled(add_bos=True)) == []


@pytest.mark.parametrize("key", ["data.source", "data.tokenizer", "train.init_from"])
def test_what_a_run_file_names_and_is_not_there_is_said_with_its_whole_path(key, tmp_path, capsys):
    from muster.cli.main import main

    section, name = key.split(".")
    file = write(tmp_path / "deep", f"{section}: {{{name}: ./nowhere}}\n")
    assert main(["train", str(file), "--run", str(tmp_path / "run"), "--parallel", "dp1"]) == 2
    assert f"{tmp_path}/deep/nowhere" in capsys.readouterr().err


def test_a_directory_as_a_model_is_told_to_be_named_by_its_kind(tmp_path):
    (tmp_path / "base").mkdir()
    file = tmp_path / "run.yaml"
    for name in ("base", "./base"):
        file.write_text(f"extends: tiny\nmodel: {name}\n")
        with pytest.raises(ConfigError, match=f"model {name} is a directory: .* write hf:{name}"):
            load_run_config(None, file, [])
