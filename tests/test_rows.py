"""Rows of JSON in every form that fine-tuners have them, and the tokens that begin and end their documents."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from muster.cli.main import main
from muster.config.run_config import DataConfig
from muster.data.chat import ChatTemplate
from muster.data.json_files import array_rows
from muster.data.prepare import PrepareOptions, open_or_prepare, prepare
from muster.data.rows import RowReader
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from muster.data.tokenizer_files import settle_exported_tokenizer, special_token_ids, stop_ids
from muster.spec.errors import ConfigError
from muster.train.data import run_tokenizer
from tests.fine_tuning import LLAMA3_TEMPLATE, write_llama3_tokenizer, write_mistral_tokenizer

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day."}]
ROWS = [{"text": "one\n  two, [three]"}, {"prompt": "a", "completion": "b"}, {"text": 'ünï 🐍 "quoted" }{'}]


def texts_of(source: Path, tokenizer: Tokenizer | None = None, **more: Any) -> list[str]:
    own = tokenizer or ByteTokenizer()
    store = prepare(PrepareOptions(str(source), own, **more), source.with_name(f"{source.name}.store"))
    bounds = [*store.document_starts.tolist(), store.header.num_tokens]
    return [own.decode(store.read(a, b - 1).tolist()) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Files


def write_as(path: Path, rows: list[Any]) -> Path:
    """Write rows as the name says: `list`, `pretty` or one a line, compressed or not."""
    text = "\n".join(map(json.dumps, rows)) + "\n"
    if "list" in path.name or "pretty" in path.name:
        text = json.dumps(rows, indent=2 if "pretty" in path.name else None, ensure_ascii=False)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        import pyarrow

        data = pyarrow.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "name",
    ["list.json", "pretty.json", "lines.json", "list.json.gz", "lines.json.gz"]
    + ["a.jsonl.gz", "a.jsonl.zst", "a.ndjson.zst", "pretty.json.zst"],
)
@pytest.mark.parametrize("in_directory", [False, True])
def test_rows_of_json_are_rows_in_every_kind_of_file(name, in_directory, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    file = write_as(folder / name, ROWS)
    (folder / "README.md").write_text("about")
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"description": ""}}))
    (folder / "config.json").write_text(json.dumps({"a": [1, 2]}, indent=1))
    assert texts_of(folder if in_directory else file) == ["one\n  two, [three]", "ab", 'ünï 🐍 "quoted" }{']


def test_a_list_longer_than_a_chunk_is_read_item_by_item(tmp_path, monkeypatch):
    monkeypatch.setattr("muster.data.json_files._CHUNK_BYTES", 64)
    rows = [{"text": f"row {i} " + "ü" * (i % 150)} for i in range(300)] + [{"text": '[{\\"' * 40}]
    for name in ("list.json", "pretty.json"):
        found = list(array_rows(write_as(tmp_path / name, rows)))
        assert [row for row, _ in found] == rows
    assert list(array_rows(write_as(tmp_path / "list.json", []))) == []


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b'{"a": {"b": 1},\n "c": 2}', "holds no rows: expected a list of objects, or an object a line"),
        ("a.json", b"[1, 2]", "holds no rows"),
        ("a.json", b"plain text", "holds no rows"),
        ("a.json", b'[{"text": "x"},\n{"text": "y"]', "a.json:2: not JSON: Expecting ',' delimiter"),
        ("a.json", b'[{"text": "x"}\n{"text": "y"}]', "a.json:2: expected ',' or ']' after an object"),
        ("a.json", b'[{"text": "x"}', "a.json:1: it ends within the list"),
        ("a.json", b'[{"text": "x"}, {"text": 5}]', "a.json: row 2: text should be text, got 5"),
        ("a.json", b'[{"text": "\xff"}]', "not UTF-8: it has the byte 0xff"),
        ("a.jsonl.gz", b"no gzip", "can't be decompressed"),
        ("a.jsonl.zst", b"no zstd", "can't be decompressed"),
        (
            "a.txt.gz",
            b"",
            "expected a compressed file's name to end with .jsonl, .ndjson or .json and then .gz or .zst",
        ),
    ],
)
def test_a_file_that_holds_no_rows_is_one_sentence(name, data, words, tmp_path, capsys):
    (tmp_path / name).write_bytes(data)
    assert main(["data", "prepare", str(tmp_path / name), "--out", str(tmp_path / "store")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.glob("store*"))


def test_max_bytes_limits_lists_and_compressed_lines(tmp_path):
    rows = [{"text": f"row {i}" + "x" * 50} for i in range(100)]
    for name in ("list.json", "lines.jsonl.gz"):
        file = write_as(tmp_path / name, rows)
        assert len(texts_of(file)) == 100
        size = file.stat().st_size // 2
        found = texts_of(write_as(tmp_path / f"few-{name}", rows), max_bytes=size)
        assert 0 < len(found) < 60


# ----------------------------------------------------------------------------------------------------------------------
# Forms of rows


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Good day."}]}, TALK),
        ({"conversations": TALK}, TALK),
        ({"instruction": "Hi", "input": "", "output": "Good day."}, TALK),
        (
            {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be short."},
            [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Add\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TALK[1]], "system": None}, TALK),
        ({"messages": [{**TALK[0], "tool_calls": None, "name": None}, TALK[1]]}, TALK),
    ],
)
def test_dialogues_of_other_programs_are_the_same_dialogue(row, same):
    reader = RowReader(ChatTemplate(LLAMA3_TEMPLATE, (("bos_token", "<|begin_of_text|>"),)))
    assert reader.row(row) == reader.row({"messages": same})
    assert reader.row(row).is_dialogue


def test_tools_reach_the_template_and_their_arguments_are_objects():
    template = ChatTemplate(
        "{% if tools %}{{ tools[0].name }};{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<{{ call.function.arguments.city }}>{% endfor %};{% endfor %}"
    )
    call = {"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "no"},
        {"role": "assistant", "content": "It is dry."},
    ]
    expected = [
        ("weather;user:Rain?;", False),
        ("assistant:<Bern>;", True),
        ("tool:no;", False),
        ("assistant:It is dry.;", True),
    ]
    for tools in ([{"name": "weather"}], '[{"name": "weather"}]'):
        assert RowReader(template).row({"messages": messages, "tools": tools}).segments == expected
    from muster.data.invalid_rows import InvalidRow

    with pytest.raises(InvalidRow, match="ChatML has no form for tools"):
        RowReader(ChatTemplate()).row({"messages": messages})
    with pytest.raises(InvalidRow, match="tools should be JSON, got '{'"):
        RowReader(template).row({"messages": messages, "tools": "{"})


# ----------------------------------------------------------------------------------------------------------------------
# The begin of a document


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("llama", "mistral")}
    write_llama3_tokenizer(folders["llama"])
    write_mistral_tokenizer(folders["mistral"])
    return folders


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_each_document_begins_once_as_the_tokenizer_says(kind, folders, tmp_path):
    own = load_tokenizer(str(folders[kind]))
    bos, eos = own.bos_id, own.eos_id
    assert (bos, eos) == {"llama": (0, 4), "mistral": (1, 2)}[kind]
    begin = {"llama": "<|begin_of_text|>", "mistral": "<s>"}[kind]
    rows = [{"text": "the fox"}, {"prompt": "the", "completion": "dog"}, {"messages": TALK}, {"text": begin + "the"}]
    long = [{"text": "the dog jumps over " * 40}]
    for number, some in enumerate((rows, long)):
        file = tmp_path / f"{number}.jsonl"
        file.write_text("\n".join(map(json.dumps, some)))
        store = prepare(PrepareOptions(str(file), own), tmp_path / f"{number}.store")
        bounds = [*store.document_starts.tolist(), store.header.num_tokens]
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            ids = store.read(a, b).tolist()
            assert (ids[0], ids.count(bos), ids[-1]) == (bos, 1, eos)
            assert ids[-2] != eos or kind == "llama", "a template that ends a dialogue has ended the document"
        mask = store.read_loss_mask(0, bounds[-1])
        assert (mask is None) == (some is long)
        if mask is not None:
            assert [int(mask[a]) for a in bounds[:-1]] == [1, 0, 0, 1]
    text = tmp_path / "text.txt"
    text.write_text("the fox")
    store = prepare(PrepareOptions(str(text), own), tmp_path / "text.store")
    assert store.tokens.tolist() == [bos, *own.encode("the fox").tolist(), eos]


def test_add_bos_decides_otherwise_and_stores_know_it(folders, tmp_path):
    (tmp_path / "a.txt").write_text("the fox")
    source, place = str(tmp_path / "a.txt"), str(folders["llama"])
    own = {add: run_tokenizer(DataConfig(source=source, tokenizer=place, add_bos=add)) for add in (None, True, False)}
    assert [one.bos_id for one in own.values()] == [0, 0, None]
    assert own[None].fingerprint == own[True].fingerprint != own[False].fingerprint
    stores = [open_or_prepare(PrepareOptions(source, one), tmp_path) for one in own.values()]
    assert stores[0].directory == stores[1].directory != stores[2].directory
    assert stores[0].header.num_tokens == stores[2].header.num_tokens + 1
    with pytest.raises(ConfigError, match=r"use the same tokenizer, data.eos_token and data.add_bos"):
        TokenStore.open(stores[2].directory, own[None])
    bare = json.loads((folders["llama"] / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(bare))
    assert load_tokenizer(str(tmp_path)).bos_id is None
    assert load_tokenizer(str(tmp_path), add_bos=True).bos_id == 0
    with pytest.raises(ConfigError, match="data.add_bos: the tokenizer bytes has no token that begins a document"):
        load_tokenizer("bytes", add_bos=True)


def test_a_sentencepiece_model_begins_documents_where_its_configuration_says(tmp_path):
    import sentencepiece

    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "words.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=31, minloglevel=2
    )
    assert load_tokenizer(str(tmp_path)).bos_id is None
    assert load_tokenizer(str(tmp_path), add_bos=True).bos_id == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    own = load_tokenizer(str(tmp_path))
    assert own.bos_id == 1
    assert own.encode("<s>the fox</s>").tolist() == [1, *own.encode("the fox").tolist(), 2]


# ----------------------------------------------------------------------------------------------------------------------
# Special ids


def test_a_bare_tokenizer_gives_its_own_special_ids_and_a_models_hold_where_they_fit(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folders["llama"] / "tokenizer.json").read_bytes())
    bare = load_tokenizer(str(tmp_path))
    own = {"eos_token_id": 1, "bos_token_id": 0, "pad_token_id": None}
    assert special_token_ids(bare, {}) == own
    assert special_token_ids(bare, {"eos_token_id": 2, "bos_token_id": 1}) == own, "another tokenizer's"
    given = {"eos_token_id": [1, 4], "bos_token_id": 0, "pad_token_id": 3}
    assert special_token_ids(bare, {**given, "temperature": 0.6}) == given
    assert stop_ids(bare) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert stop_ids(bare) == (1, 4)


@pytest.mark.parametrize("add_bos", [True, False])
def test_an_exported_tokenizer_does_what_the_run_did(add_bos, folders, tmp_path):
    from transformers import AutoTokenizer

    content = json.loads((folders["llama"] / "tokenizer.json").read_text())
    if add_bos:
        content["post_processor"] = content["post_processor"]["processors"][0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    run = load_tokenizer(str(tmp_path), "<|eot_id|>", add_bos)
    settle_exported_tokenizer(tmp_path, run, special_token_ids(run, {}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("the fox").input_ids == [0] * add_bos + run.encode("the fox").tolist()
    assert (theirs.eos_token_id, theirs.bos_token_id) == (4, 0 if add_bos else theirs.bos_token_id)
