"""Preparation of token stores from rows, tables and foreign files, on several processes, and after a kill."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.cli.main import main
from muster.data.chat import CHATML, ChatTemplate
from muster.data.prepare import PrepareOptions, prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer, load_tokenizer
from muster.spec.errors import ConfigError

TOKENIZER = ByteTokenizer()
END = TOKENIZER.eos_id
DIALOGUE = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "So"},
    {"role": "assistant", "content": "No"},
]


@pytest.fixture(scope="module", name="tokenizers")
def _tokenizers(tmp_path_factory) -> dict[str, Path]:
    """A tokenizer.json and a SentencePiece model, trained on a few words."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizers")
    words = ["a rose is a rose is a rose", "so it goes, and goes on"] * 20
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(words, trainer)
    own.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<eos>",
        "chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "text").write_text("\n".join(words))
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        input=str(folder / "text"), model_prefix=str(folder / "own"), vocab_size=20, minloglevel=2
    )
    return {"json": folder / "tokenizer.json", "folder": folder, "spm": folder / "own.model"}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def store_of(source: Path, **more: Any) -> TokenStore:
    tokenizer = more.pop("tokenizer", TOKENIZER)
    place = source.parent / f"store-{len(list(source.parent.iterdir()))}"
    store = prepare(PrepareOptions(str(source), tokenizer, **more), place)
    store.verify()
    return store


def documents(store: TokenStore) -> list[str]:
    """Each document as text, with | where it ends."""
    ends = [*store.document_starts.tolist()[1:], store.header.num_tokens]
    texts = []
    for start, end in zip(store.document_starts.tolist(), ends, strict=True):
        ids = store.read(start, end).tolist()
        assert ids[-1] == END
        texts.append(TOKENIZER.decode(ids))
    return texts


def counted(store: TokenStore) -> str:
    """Return the text that contributes to the loss, with | where a document ends."""
    learnt = store.read_loss_mask(0, store.header.num_tokens)
    assert learnt is not None
    return "".join("|" if i == END else chr(i) for i in store.tokens[learnt == 1].tolist())


# --- rows ---


def test_rows_of_each_kind_become_documents_and_only_answers_are_learnt(tmp_path):
    rows = [{"text": "one"}, {"prompt": "2+2=", "completion": "4"}, {"messages": DIALOGUE}, {"text": "ende \u00e9"}]
    store = store_of(write_rows(tmp_path / "a.jsonl", *rows))
    text = ChatTemplate(CHATML)._render(DIALOGUE, False)
    assert documents(store) == ["one", "2+2=4", text, "ende \u00e9"]
    assert counted(store).encode("latin-1").decode() == "one|4|Ho<|im_end|>\nNo<|im_end|>\n|ende \u00e9|"
    plain = store_of(write_rows(tmp_path / "b.jsonl", *rows[:1] * 3))
    assert plain.has_full_loss
    own = store_of(write_rows(tmp_path / "c.jsonl", {"text": "no", "body": "yes"}), text_key="body")
    assert documents(own) == ["yes"]


def test_short_and_long_rows_are_put_together_alike(tmp_path):
    texts = ["x" * length for length in (1, 2, 3, 500, 1, 900)]
    store = store_of(write_rows(tmp_path / "a.jsonl", *({"text": text} for text in texts)))
    alone = [store_of(write_rows(tmp_path / f"b{i}.jsonl", {"text": text})) for i, text in enumerate(texts)]
    assert store.tokens.tolist() == [i for one in alone for i in one.tokens.tolist()]


BAD = [
    ('{"text": "go', "json", ":2: not JSON: Unterminated string starting at column 10"),
    ('{"text": ""}', "empty", ":2: the document is empty"),
    ('{"text": 5}', "fields", ":2: text should be text, got 5"),
    (
        '["text"]',
        "fields",
        ":2: expected an object with messages or conversations, prompt and completion, instruction and output, or"
        " text, got ['text']",
    ),
    (
        '{"body": "x"}',
        "fields",
        ":2: expected messages or conversations, prompt and completion, instruction and output, or text, the row"
        " has body",
    ),
    ('{"messages": []}', "fields", ":2: messages should be a list of messages, got []"),
    ('{"messages": [{"role": "user", "content": "?"}]}', "empty", ":2: no message has the role assistant"),
    ('{"text": "\\ud800"}', "encoding", ":2: text has an unpaired surrogate"),
]


@pytest.mark.parametrize(("row", "kind", "sentence"), BAD, ids=[sentence for _, _, sentence in BAD])
def test_a_bad_row_is_one_sentence_with_file_and_line_or_is_left_out_and_counted(tmp_path, row, kind, sentence):
    source = write_rows(tmp_path / "a.jsonl", {"text": "good"}, row, "", {"text": "end"})
    with pytest.raises(ConfigError) as error:
        store_of(source)
    assert f"{source}{sentence}" in str(error.value)
    assert "\n" not in str(error.value)
    assert "data.on_invalid_row skip" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
    store = store_of(source, on_invalid_row="skip")
    assert (documents(store), store.header.skipped) == (["good", "end"], {kind: 1})


def test_text_in_another_encoding_names_its_line(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("caf\u00e9\n" * 300_000 + "caf\u00e9", encoding="utf-8")
    (tmp_path / "text" / "b.txt").write_bytes(b"one\ntwo\ncaf\xe9 three\n")
    rows = tmp_path / "c.jsonl"
    rows.write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    for source, place in ((tmp_path / "text", "text/b.txt: line 3 is not UTF-8"), (rows, "c.jsonl:2: not UTF-8")):
        with pytest.raises(ConfigError, match=f"{place}: it has the byte 0xe9"):
            store_of(source)
        store = store_of(source, on_invalid_row="skip")
        assert (store.header.num_documents, store.header.skipped) == (1, {"encoding": 1})
    with pytest.raises(ConfigError, match=r"no usable document: all of its rows are invalid \(1 encoding\)"):
        store_of(tmp_path / "text" / "b.txt", on_invalid_row="skip")


# --- tokenizers ---


def test_a_tokenizer_json_gives_the_ids_of_its_library_and_brings_its_template(tokenizers, tmp_path):
    from tokenizers import Tokenizer

    own, theirs = load_tokenizer(str(tokenizers["folder"])), Tokenizer.from_file(str(tokenizers["json"]))
    assert own.encode("a rose goes").tolist() == theirs.encode("a rose goes").ids
    assert (own.eos_id, own.vocab_size) == (theirs.token_to_id("<eos>"), theirs.get_vocab_size())
    assert own.decode(own.encode("so it is \u00e9")) == "so it is \u00e9"
    assert own.chat_template.segments(DIALOGUE[:2]) == [("user:Hi\n", False), ("assistant:Ho\n", True)]
    source = write_rows(tmp_path / "a.jsonl", {"text": "a rose"}, {"text": "so"})
    store = store_of(source, tokenizer=own)
    assert store.tokens.tolist() == [*theirs.encode("a rose").ids, own.eos_id, *theirs.encode("so").ids, own.eos_id]
    with pytest.raises(ConfigError, match="was made with tokenizer json-.*, not with bytes-"):
        TokenStore.open(store.directory, TOKENIZER)


def test_a_sentencepiece_model_gives_the_ids_of_its_library(tokenizers):
    import sentencepiece

    own = load_tokenizer(str(tokenizers["spm"]))
    theirs: Any = sentencepiece.SentencePieceProcessor(model_file=str(tokenizers["spm"]))
    assert own.encode("a rose goes").tolist() == theirs.encode("a rose goes")
    assert (own.eos_id, own.decode(own.encode("a rose"))) == (theirs.eos_id(), "a rose")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("byte", "there is no file 'byte'; give bytes, a tokenizer.json"),
        ("{tmp}", "has neither tokenizer.json nor tokenizer.model"),
        ("{tmp}/broken.json", "can't be read as a tokenizer.json"),
        ("{tmp}/broken.model", "can't be read as a SentencePiece model"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_sentence(tmp_path, name, sentence):
    for file in ("broken.json", "broken.model"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=sentence) as error:
        load_tokenizer(name.format(tmp=tmp_path))
    assert "\n" not in str(error.value)


# --- other programs' files ---


def test_parquet_and_directories_of_datasets(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"id": list(range(5)), "text": ["a", "bb", None, "ccc", "d"]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (saved.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    (saved / "cache-1.arrow").write_text("no")
    with (
        pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table, max_chunksize=2)
    for source in (tmp_path / "a.parquet", saved.parent, saved):
        with pytest.raises(ConfigError, match=r"(parquet|arrow): row 3: expected messages.* the row has "):
            store_of(source)
        assert documents(store_of(source, on_invalid_row="skip")) == ["a", "bb", "ccc", "d"]


@pytest.mark.parametrize("vocab_size", [257, 70_000])
def test_megatron_files_go_out_and_in(tmp_path, vocab_size):
    class Own(ByteTokenizer):
        pass

    Own.vocab_size = vocab_size
    rows = write_rows(tmp_path / "a.jsonl", *({"text": "x" * n} for n in (3, 1, 40)))
    store = store_of(rows, tokenizer=Own())
    from muster.data.describe import export_indexed

    export_indexed(store, tmp_path / "out")
    for source in ("out", "out.bin", "out.idx"):
        again = store_of(tmp_path / source, tokenizer=Own())
        assert again.tokens.tolist() == store.tokens.tolist()
        assert again.document_starts.tolist() == store.document_starts.tolist()
    index = (tmp_path / "out.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    assert index[17] == (8 if vocab_size < 1 << 16 else 4)
    os.truncate(tmp_path / "out.bin", 4)
    with pytest.raises(ConfigError, match=r"out.bin has 4 bytes, but its index needs "):
        store_of(tmp_path / "out", tokenizer=Own())


def test_ids_beyond_the_vocabulary_are_named(tmp_path):
    from muster.data.megatron import write_indexed

    write_indexed(tmp_path / "a", [np.array([1, 2, 3, 999, 5])], np.array([2, 3]), np.dtype("uint16"))
    with pytest.raises(
        ConfigError, match=r"a.bin: document 2: token 2 has the id 999, but the tokenizer's ids are 0 … 256"
    ):
        store_of(tmp_path / "a")
    store = store_of(tmp_path / "a", on_invalid_row="skip")
    assert (store.tokens.tolist(), store.header.skipped) == ([1, 2, END], {"vocabulary": 1})
    with pytest.raises(
        ConfigError, match="tokens-00000.bin: token 3, in document 1, has the id 256, expected one below 9"
    ):
        store.check_ids(9)


# --- in parts, and again ---


@pytest.fixture(name="parts")
def _parts(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("muster.data.prepare.MIN_SHARD_BYTES", 1_000)
    rows = [{"text": f"row {i} " + "x" * (i % 90)} for i in range(200)]
    return write_rows(tmp_path / "rows.jsonl", *rows[:7], "", *rows[7:])


def test_shards_are_read_as_one_stream_and_name_their_lines(parts, tmp_path, monkeypatch):
    seen: list[int] = []
    many = prepare(PrepareOptions(str(parts), TOKENIZER), tmp_path / "many", seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == parts.stat().st_size
    two = prepare(PrepareOptions(str(parts), TOKENIZER, workers=2), tmp_path / "two")
    assert two.fingerprint == many.fingerprint
    parts.write_text(parts.read_text() + "{\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:202: not JSON"):
        prepare(PrepareOptions(str(parts), TOKENIZER), tmp_path / "bad")
    monkeypatch.undo()
    one = prepare(PrepareOptions(str(parts), TOKENIZER, on_invalid_row="skip"), tmp_path / "one")
    assert len(many.shards) > 10
    assert len(one.shards) == 1
    assert many.tokens.tolist() == one.tokens.tolist()
    assert many.document_starts.tolist() == one.document_starts.tolist()
    size = one.header.num_tokens
    for start, stop in [(0, 1), (990, 1030), (5, 4000), (size - 3, size), (7, 7)]:
        assert many.read(start, stop).tolist() == one.read(start, stop).tolist()


KILLED = """
import sys
from pathlib import Path
import muster.data.prepare as module
from muster.data.prepare import PrepareOptions, prepare
from muster.data.tokenizer import ByteTokenizer
module.MIN_SHARD_BYTES = 1_000
def wait(done):
    if done > 5_000:
        print(done, flush=True)
        sys.stdin.readline()
prepare(PrepareOptions(sys.argv[1], ByteTokenizer()), Path(sys.argv[2]), wait)
"""

WORKER = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from muster.data.prepare import _init_worker
work = "import time; print('at work', flush=True); time.sleep(100); print('outlived it', flush=True)"
ProcessPoolExecutor(1, get_context("spawn"), _init_worker).submit(exec, work).result()
"""


def test_no_worker_outlives_a_killed_preparation():
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"at work\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b"", "it ends when its worker does"


def test_a_killed_preparation_goes_on_with_what_is_finished(parts, tmp_path):
    whole = prepare(PrepareOptions(str(parts), TOKENIZER), tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, str(parts), str(tmp_path / "store")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    partial = tmp_path / "store.partial"
    finished = {path: path.stat().st_mtime_ns for path in partial.glob("tokens-*.bin")}
    kept = len(list(partial.glob("shard-*.json")))
    assert 4 <= kept < len(whole.shards)
    assert not (tmp_path / "store").exists()
    seen: list[int] = []
    store = prepare(PrepareOptions(str(parts), TOKENIZER), tmp_path / "store", seen.append)
    assert seen[0] > 5_000
    same = [path for path, at in finished.items() if (tmp_path / "store" / path.name).stat().st_mtime_ns == at]
    assert len(same) >= kept
    assert store.fingerprint == whole.fingerprint
    store.verify()
    assert not partial.exists()
    # Finished shards of another text are of no use.
    (tmp_path / "store").rename(partial)
    (partial / "job.json").write_text("other")
    assert prepare(PrepareOptions(str(parts), TOKENIZER), tmp_path / "store").fingerprint == whole.fingerprint


# --- the command ---


def muster(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["data", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_builder_goes_on_where_another_has_just_renamed_the_folder(tmp_path, monkeypatch):
    """The folder is there for mkdir, and gone when pathlib looks whether it is one."""
    (tmp_path / "rows.txt").write_text("a row")
    make, met = os.mkdir, []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        if str(path).endswith(".partial") and not met:
            met.append(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    prepare(PrepareOptions(str(tmp_path / "rows.txt"), ByteTokenizer()), tmp_path / "store").verify()
    assert met


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path):
    (tmp_path / "rows.txt").write_text("a row")
    (tmp_path / "store.partial").write_text("")
    with pytest.raises(ConfigError, match="store.partial, where the store is built, must be a folder"):
        prepare(PrepareOptions(str(tmp_path / "rows.txt"), ByteTokenizer()), tmp_path / "store")


def test_prepare_inspect_and_check(tmp_path, capsys):
    source = write_rows(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "c"}, {"text": "long enough"}, "{")
    code, _, err = muster(capsys, "prepare", source, "--out", tmp_path / "store")
    assert (code, err.count("\n")) == (2, 1)
    assert f"muster: {source}:3: not JSON" in err
    code, out, _ = muster(capsys, "check", source)
    assert code == 2
    assert out.splitlines()[0].startswith(f"{source}:3: not JSON")
    assert out.splitlines()[1].endswith("has 1 invalid row (1 json); the rest: 2 documents, 16 tokens")
    more = ("--on-invalid-row", "skip", "--workers", "1", "--json")
    code, out, err = muster(capsys, "prepare", source, "--out", tmp_path / "store", *more)
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert (facts["tokens"], facts["counted_tokens"], facts["documents"]) == (16, 14, 2)
    assert facts["skipped"] == {"json": 1}
    code, out, _ = muster(capsys, "inspect", tmp_path / "store", "--documents", 1)
    assert code == 0
    assert "learned     14 tokens (87.5%)" in out
    assert "skipped     1 invalid row (1 json)" in out
    assert out.splitlines()[-1] == "document 1: 'abc'"
    assert muster(capsys, "check", tmp_path / "store")[:2] == (
        0,
        f"{tmp_path / 'store'} is sound: 2 documents, 16 tokens\n",
    )
    shard = tmp_path / "store" / "tokens-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    code, _, err = muster(capsys, "check", tmp_path / "store")
    assert (code, err.count("\n")) == (2, 1)
    assert "tokens-00000.bin is damaged (its checksum is wrong)" in err
    assert muster(capsys, "inspekt", "x")[2].startswith("muster: unknown verb 'data inspekt'; did you mean 'inspect'?")


def test_nothing_in_the_way_is_overwritten(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "out").mkdir()
    code, _, err = muster(capsys, "prepare", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert (code, "exists and is not a token store" in err) == (2, True)
    code, _, err = muster(capsys, "check", tmp_path / "out")
    assert (code, "out has no *.txt" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("prepare", "gone.txt"), "SOURCE: there is no file or directory 'gone.txt'"),
        (("prepare", "rows.jsonl"), "or leave such rows out with --on-invalid-row skip"),
        (("prepare", "rows.jsonl", "--tokenizer", "gone.json"), "--tokenizer: there is no file 'gone.json'"),
        (("prepare", "rows.jsonl", "--eos-token", "x"), "--eos-token 'x' can't be set for the tokenizer bytes"),
        (("check", "rows.jsonl", "--chat-template", "gone"), "--chat-template: gone can't be read"),
    ],
)
def test_a_verb_speaks_of_its_own_flags(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "data.source"}\n{')
    out = ("--out", "store") if arguments[0] == "prepare" else ()
    code, _, err = muster(capsys, *arguments, *out)
    assert (code, sentence in err, "data." in err) == (2, True, False), err
