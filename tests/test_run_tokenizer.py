"""A run's copy of its tokenizer."""

import json
from pathlib import Path

import pytest

from muster.config.attempt_files import adopt_attempt_files, attempt_files
from muster.config.load_config import load_run_config, write_attempt_files
from muster.data.chat import CHATML
from muster.data.train_tokenizer import train_tokenizer
from muster.planner.auto import resolve_plan
from muster.train.data import open_dataset, run_tokenizer
from muster.train.run_tokenizer import keep_tokenizer
from tests.fine_tuning import write_llama3_tokenizer

DIALOGUE = {"messages": [{"role": "user", "content": "dear"}, {"role": "assistant", "content": "friend"}]}
PAIR = {"prompt": "dear", "completion": "friend"}


@pytest.mark.parametrize(("last", "kept"), [(DIALOGUE, CHATML), (PAIR, None)])
def test_the_template_that_dialogues_were_trained_with_is_kept(last: dict, kept: str | None, tmp_path: Path) -> None:
    """The copy names ChatML where the tokenizer has no template and a dialogue was read; their tokens stay the same."""
    pytest.importorskip("tokenizers")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [PAIR] * 299 + [last])))
    train_tokenizer([str(tmp_path / "rows.jsonl")], tmp_path / "tokenizer", 300)
    flags = {"data.source": "rows.jsonl", "data.tokenizer": "tokenizer", "model.vocab_size": "300"}
    words = [(key, str(tmp_path / text) if key.startswith("data") else text) for key, text in flags.items()]
    resolved = load_run_config("tiny", None, words)
    run = tmp_path / "run"
    dataset = open_dataset(resolved.config, run)
    copied = keep_tokenizer(resolved, run, None, dataset)
    template = run / "tokenizer" / "chat_template.jinja"
    assert (template.read_text() if template.exists() else None) == kept
    assert run_tokenizer(copied.config.data).chat_template == run_tokenizer(resolved.config.data).chat_template
    assert open_dataset(copied.config, run).fingerprint == dataset.fingerprint


def test_a_tokenizer_that_an_attempt_brings_becomes_the_runs_with_its_configuration(tmp_path: Path) -> None:
    """A resume that fails before its ranks have loaded leaves the run's own tokenizer as it was."""
    for name, eos in (("old", "<|eot_id|>"), ("new", "<|end_of_text|>")):
        write_llama3_tokenizer(tmp_path / name)
        file = tmp_path / name / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": eos}))
    run = tmp_path / "run"

    def attempt(name: str, resumes: bool) -> None:
        words = [("data.tokenizer", str(tmp_path / name)), ("model.vocab_size", "320")]
        resolved = load_run_config("tiny", None, words)
        kept = keep_tokenizer(resolved, run, None, None, resumes)
        write_attempt_files(kept, resolve_plan(resolved, 1), run, resumes)

    def eos_of_run() -> int | None:
        return run_tokenizer(load_run_config(None, run / "config.yaml", []).config.data).eos_id

    attempt("old", False)
    before, config = eos_of_run(), (run / "config.yaml").read_text()
    attempt("old", True)
    assert not (run / "tokenizer.next").exists(), "it is the same"
    attempt("new", True)
    assert (eos_of_run(), (run / "config.yaml").read_text()) == (before, config)
    with_next = run_tokenizer(load_run_config(None, attempt_files(run).config, []).config.data)
    adopt_attempt_files(run)
    assert eos_of_run() == with_next.eos_id != before
    assert "tokenizer.next" not in (run / "config.yaml").read_text()
