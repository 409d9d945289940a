"""`muster data tokenizer`."""

import json
from pathlib import Path

import pytest

from muster.cli.main import main
from muster.data.tokenizer import load_tokenizer

pytest.importorskip("tokenizers")

LETTERS = "\n".join(f"dear friend {i}, the naïve letter {i * i % 97} came on day {i % 31} 😀" for i in range(200))


def test_a_tokenizer_is_trained_on_texts_and_rows_and_read_by_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letters.txt").write_text(LETTERS)
    dialogue = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    rows = [{"text": "dear friend"}, {"messages": dialogue}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "tokenizer"
    words = ["data", "tokenizer", str(tmp_path / "letters.txt"), str(tmp_path / "rows.jsonl"), "-o", str(out)]
    assert main([*words, "--vocab-size", "400", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    tokenizer = load_tokenizer(str(out))
    assert facts["ids"] == tokenizer.vocab_size <= 400
    assert facts["bytes_per_token"] > 1.5
    for text in (LETTERS, "Ünseen 東京\tcode():\n    return\n"):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert len(tokenizer.encode("dear friend")) < 4
    assert len(tokenizer.encode("<|im_start|>")) == 1
    assert main([*words, "--vocab-size", "400"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_vocabulary_smaller_than_the_bytes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "tokenizer", "python-stdlib", "-o", str(tmp_path / "out"), "--vocab-size", "200"]) == 2
    assert "expected 259 or more" in capsys.readouterr().err
