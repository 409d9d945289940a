"""A run's copy of its tokenizer."""

import json
from pathlib import Path

import pytest

from muster.config.load_config import load_run_config
from muster.data.chat import CHATML
from muster.data.train_tokenizer import train_tokenizer
from muster.train.data import open_dataset, run_tokenizer
from muster.train.run_tokenizer import keep_tokenizer

DIALOGUE = {"messages": [{"role": "user", "content": "dear"}, {"role": "assistant", "content": "friend"}]}
PAIR = {"prompt": "dear", "completion": "friend"}


@pytest.mark.parametrize(("row", "kept"), [(DIALOGUE, CHATML), (PAIR, None)])
def test_the_template_that_dialogues_were_trained_with_is_kept(row: dict, kept: str | None, tmp_path: Path) -> None:
    """The copy names ChatML where the tokenizer has no template and dialogues were read; their tokens stay the same."""
    pytest.importorskip("tokenizers")
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 300))
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
