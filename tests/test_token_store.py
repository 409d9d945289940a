"""Token stores of texts: sources, the byte tokenizer, and stores that are damaged, raced for or unwritable."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.main import main
from muster.data.chat import read_template
from muster.data.prepare import PrepareOptions, open_or_prepare, prepare
from muster.data.sources import source_files
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer
from muster.data.train_tokenizer import train_tokenizer
from muster.spec.errors import ConfigError, MusterError
from tests.full_disk import files_of_at_most

TOKENIZER = ByteTokenizer()


def build_store(source, directory, tokenizer, max_bytes=None, progress=None) -> TokenStore:
    return prepare(PrepareOptions(source, tokenizer, max_bytes), directory, progress)


class OtherTokenizer(ByteTokenizer):
    vocab_size = 70_000
    fingerprint = "other-1"


@pytest.fixture(name="text")
def _text(tmp_path) -> Path:
    """A directory with three documents, 10,000 bytes in all, that never repeat three bytes in a row."""
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    data = np.random.default_rng(0).integers(0, 128, 10_000, np.uint8).tobytes()
    (folder / "c.txt").write_bytes(data[7_000:])
    (folder / "b" / "b.py").write_bytes(data[3_000:7_000])
    (folder / "a.md").write_bytes(data[:3_000])
    return folder


@pytest.fixture(name="store")
def _store(text, tmp_path) -> TokenStore:
    return build_store(str(text), tmp_path / "store", TOKENIZER)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- tokenizer ---


@given(st.text())
def test_decoding_gives_back_what_was_encoded(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == TOKENIZER.encode(text.encode()).tolist()
    assert TOKENIZER.decode(ids) == text


def test_decoding_survives_broken_text_and_ends_of_documents():
    assert TOKENIZER.decode([0xE2, 104, TOKENIZER.eos_id, 105]) == "\ufffdhi"


# --- sources ---


def test_the_standard_library_is_tens_of_megabytes_without_installed_packages():
    files = source_files("python-stdlib")
    names = [file.name for file in files]
    assert sum(file.size_bytes for file in files) > 5e6
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("-packages" in name for name in names)


def test_a_directory_gives_its_text_files_by_name(text):
    (text / "empty.txt").touch()
    (text / "picture.png").write_bytes(b"no")
    (text / ".git").mkdir()
    (text / ".git" / "x.txt").write_bytes(b"no")
    files = source_files(str(text))
    assert [file.name for file in files] == ["a.md", "b/b.py", "c.txt"]
    assert files[1].path == text / "b" / "b.py"


def test_a_file_is_one_document_whatever_its_name(tmp_path):
    (tmp_path / "poem").write_bytes(b"a rose")
    store = build_store(str(tmp_path / "poem"), tmp_path / "store", TOKENIZER)
    assert store.tokens.tolist() == [*b"a rose", 256]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "there is no file or directory"),
        (lambda path: path.mkdir(), r"has no \*.txt, \*.md, \*.py, \*.jsonl"),
        (lambda path: path.touch(), "every file is empty"),
        (lambda path: (path.mkdir(), (path / "a.txt").touch()), "every file is empty"),
    ],
)
def test_a_source_without_text_is_refused(tmp_path, make, sentence):
    make(tmp_path / "source")
    with pytest.raises(ConfigError, match=sentence):
        open_or_prepare(PrepareOptions(str(tmp_path / "source"), TOKENIZER), tmp_path / "cache")
    with pytest.raises(ConfigError, match=sentence):
        build_store(str(tmp_path / "source"), tmp_path / "cache" / "x", TOKENIZER)
    assert not list(tmp_path.glob("cache/*"))


# --- store ---


def test_a_store_holds_the_documents_each_with_its_end(text, store):
    expected = []
    for name in ("a.md", "b/b.py", "c.txt"):
        expected += [*(text / name).read_bytes(), 256]
    assert store.tokens.tolist() == expected
    assert store.tokens.dtype == np.dtype("<u2")
    assert store.document_starts.tolist() == [0, 3_001, 7_002]
    assert not store.tokens.flags.writeable
    store.verify()


def test_documents_longer_than_a_chunk_and_wide_vocabularies(text, tmp_path, monkeypatch, store):
    monkeypatch.setattr("muster.data.readers.READ_BYTES", 999)
    seen: list[int] = []
    wide = build_store(str(text), tmp_path / "wide", OtherTokenizer(), progress=seen.append)
    assert wide.tokens.dtype == np.dtype("<u4")
    assert wide.tokens.tolist() == store.tokens.tolist()
    assert seen == sorted(seen)
    assert seen[-1] == 10_000


@pytest.mark.parametrize(("max_bytes", "num_documents"), [(1, 1), (3_000, 1), (3_001, 2), (20_000, 3)])
def test_max_bytes_keeps_the_first_ones(text, tmp_path, store, max_bytes, num_documents):
    part = build_store(str(text), tmp_path / "part", TOKENIZER, max_bytes=max_bytes)
    assert part.header.num_documents == num_documents
    assert part.header.num_tokens == min(max_bytes, 10_000) + num_documents
    assert part.tokens[:-1].tolist() == store.tokens[: part.header.num_tokens - 1].tolist()


def _edit_header(directory: Path, **change: object) -> None:
    path = directory / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def _edit_documents(directory: Path, index: int, start: int) -> None:
    starts = np.fromfile(directory / "documents.bin", "<i8")
    starts[index] = start
    starts.tofile(directory / "documents.bin")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (
            lambda d: os.truncate(d / "tokens-00000.bin", 100),
            "tokens-00000.bin has 100 bytes, but store.json",
        ),
        (lambda d: (d / "tokens-00000.bin").unlink(), "tokens-00000.bin has 0 bytes"),
        (lambda d: os.truncate(d / "documents.bin", 8), "documents.bin has 8 bytes, but store.json says 24; build"),
        (
            lambda d: (d / "store.json").unlink(),
            "expected a directory with store.json, which 'muster data prepare' writes",
        ),
        (lambda d: (d / "store.json").write_text('{"version": 1'), "store.json is damaged; build"),
        (lambda d: (d / "store.json").write_text("[]"), "store.json is damaged; build"),
        (
            lambda d: _edit_documents(d, 1, 10**18),
            "documents.bin is damaged; build it again with 'muster data",
        ),
        (lambda d: _edit_documents(d, 0, 1), "documents.bin is damaged; build"),
        (lambda d: _edit_header(d, num_tokens=-3), "store.json is damaged; build"),
        (lambda d: _edit_header(d, version=3), "has schema 3, .* up to 2; use a newer Muster"),
        (lambda d: _edit_header(d, tokenizer="other-1"), "made with tokenizer other-1, not with bytes-"),
    ],
)
def test_a_store_that_cannot_be_right_is_refused_in_a_sentence(store, harm, sentence):
    harm(store.directory)
    with pytest.raises(ConfigError, match=sentence) as caught:
        TokenStore.open(store.directory, TOKENIZER)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin"])
def test_verify_finds_a_flipped_bit(store, name):
    data = bytearray((store.directory / name).read_bytes())
    data[11] ^= 4
    (store.directory / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        TokenStore.open(store.directory, TOKENIZER).verify()


def test_the_cache_follows_the_source_the_tokenizer_and_the_limit(text, tmp_path):
    def built(tokenizer=TOKENIZER, max_bytes=None) -> Path:
        return open_or_prepare(PrepareOptions(str(text), tokenizer, max_bytes), tmp_path / "cache").directory

    first = built()
    modified = (first / "tokens-00000.bin").stat().st_mtime_ns
    assert built() == first
    assert (first / "tokens-00000.bin").stat().st_mtime_ns == modified
    different = [built(OtherTokenizer()), built(max_bytes=50)]
    os.utime(text / "a.md", (1, 1))
    different.append(built())
    (text / "c.txt").rename(text / "d.txt")
    different.append(built())
    assert len({first, *different}) == 5


def test_processes_that_race_all_end_with_the_same_store(tmp_path):
    code = (
        "import sys; from pathlib import Path; from muster.data.prepare import PrepareOptions, open_or_prepare;"
        "from muster.data.tokenizer import ByteTokenizer; print('ready', flush=True); sys.stdin.readline();"
        "options = PrepareOptions('python-stdlib', ByteTokenizer(), 2_000_000);"
        "s = open_or_prepare(options, Path(sys.argv[1])); s.verify();"
        "print(s.directory, s.fingerprint)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    racers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = {racer.communicate(timeout=300)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert len(answers) == 1
    assert len(names_in(tmp_path / "cache")) == 1


def test_a_directory_with_another_store_is_not_taken(text, tmp_path, store):
    with pytest.raises(ConfigError, match="already holds a store of other data"):
        build_store(str(text), store.directory, TOKENIZER, max_bytes=10)
    TokenStore.open(store.directory, TOKENIZER).verify()
    assert names_in(tmp_path) == {"text", "store"}


def test_a_full_disk_leaves_nothing_behind(text, tmp_path):
    with files_of_at_most(10_000), pytest.raises(MusterError, match="can't be written: .*; free space"):
        build_store(str(text), tmp_path / "cache" / "store", TOKENIZER)
    assert names_in(tmp_path / "cache") == set()


def test_a_cache_that_cannot_be_written_is_one_sentence(text, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(MusterError, match="can't be written: .*set data.cache") as caught:
        open_or_prepare(PrepareOptions(str(text), TOKENIZER), tmp_path / "cache")
    assert caught.value.exit_code == 1
    assert (tmp_path / "cache").read_text() == "a file"


def test_an_interrupted_build_without_a_finished_shard_leaves_nothing(text, tmp_path):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(str(text), tmp_path / "cache" / "store", TOKENIZER, progress=interrupt)
    assert names_in(tmp_path / "cache") == set()


@pytest.mark.parametrize("another", [False, True], ids=["alone", "another at work"])
def test_one_that_is_stopped_before_it_holds_the_lock_leaves_what_another_makes(another, text, tmp_path, monkeypatch):
    cache, flock, stops = tmp_path / "cache", fcntl.flock, [KeyboardInterrupt]

    def interrupted(file, how: int) -> None:
        if stops:
            raise stops.pop()
        flock(file, how)

    with contextlib.ExitStack() as held:
        if another:
            (cache / "store.partial").mkdir(parents=True)
            flock(held.enter_context((cache / "store.partial/lock").open("w")), fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_store(str(text), cache / "store", TOKENIZER)
    assert names_in(cache) == ({"store.partial"} if another else set())


def test_a_store_of_schema_1_still_opens(store):
    said = json.loads((store.directory / "store.json").read_text())
    (shard,) = said.pop("shards")
    (store.directory / shard["file"]).rename(store.directory / "tokens.bin")
    old = {key: said[key] for key in ("source", "tokenizer", "dtype", "num_tokens", "num_documents", "documents_crc32")}
    (store.directory / "store.json").write_text(json.dumps(old | {"version": 1, "tokens_crc32": shard["crc32"]}))
    again = TokenStore.open(store.directory, TOKENIZER)
    assert again.fingerprint == store.fingerprint
    again.verify()


def test_a_store_is_no_source_of_another_one(store, tmp_path):
    with pytest.raises(ConfigError, match="is a token store already: train on it, or name what it was made of"):
        prepare(PrepareOptions(str(store.directory), TOKENIZER), tmp_path / "other")


def test_a_vocabulary_beyond_memory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--vocab-size 99999999999 is too large: expected 10000000 or fewer"):
        train_tokenizer(["python-stdlib"], tmp_path / "tokenizer", 99_999_999_999)


def test_a_missing_template_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.jinja can't be read: No such file or directory"):
        read_template(tmp_path / "nowhere.jinja")


def test_invalid_rows_are_left_out_of_what_a_tokenizer_learns_from(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one two three"}\n{\n')
    command = ["data", "tokenizer", str(rows), "-o", str(tmp_path / "tokenizer"), "--vocab-size", "300"]
    assert main(command) == 2
    assert "leave such rows out with --on-invalid-row skip" in capsys.readouterr().err
    assert main([*command, "--on-invalid-row", "skip"]) == 0
