"""A run's own copy of its tokenizer, which makes the run directory complete and movable."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from muster.config.attempt_files import NEXT_TOKENIZER_FOLDER, TOKENIZER_FOLDER
from muster.config.load_config import ResolvedConfig
from muster.data.blended_dataset import BlendedDataset
from muster.data.chat import BEGIN_OF_MESSAGE, CHATML
from muster.data.dataset import Dataset, SampleStream
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer
from muster.data.tokenizer_files import GENERATION_CONFIG_FILE, TEMPLATE_FILE, copy_files, copy_tokenizer
from muster.train.data import run_tokenizer

_MODEL_FILES = ("config.json", GENERATION_CONFIG_FILE)


def with_settled_bos(resolved: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration in which `data.add_bos` says what the tokenizer does, where it was left out."""
    if resolved.config.data.add_bos is not None:
        return resolved
    adds = run_tokenizer(resolved.config.data).bos_id is not None
    data = resolved.config.data.model_copy(update={"add_bos": adds})
    origins = {**resolved.origins, "data.add_bos": "as the tokenizer does"}
    return replace(resolved, config=resolved.config.model_copy(update={"data": data}), origins=origins)


def keep_tokenizer(
    resolved: ResolvedConfig,
    run_dir: Path,
    initial_model: Path | None,
    dataset: SampleStream | None = None,
    resumes: bool = False,
) -> ResolvedConfig:
    """Copy the tokenizer into the run directory, and return the configuration that names the copy.

    Another tokenizer than that of the run which the attempt `resumes` waits beside it until the ranks have loaded.

    Where `dataset` has dialogues in ChatML, for want of another template, the copy says so, and an export likewise.
    `initial_model` is the folder with the configuration files of the model that the run began with, if it has any; they
    come along. Raises OSError.
    """
    tokenizer = run_tokenizer(resolved.config.data)
    folder, waiting = run_dir / TOKENIZER_FOLDER, run_dir / NEXT_TOKENIZER_FOLDER
    shutil.rmtree(waiting, ignore_errors=True)
    if isinstance(tokenizer, ByteTokenizer):
        if resumes and folder.exists():
            waiting.mkdir()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return resolved
    assert isinstance(tokenizer, JsonTokenizer | SentencePieceTokenizer)
    data = resolved.config.data
    if tokenizer.path.resolve().parent != folder.resolve():
        draft = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        name = copy_tokenizer(tokenizer, draft).name
        if data.chat_template is not None:
            shutil.copyfile(data.chat_template, draft / TEMPLATE_FILE)
        elif tokenizer.chat_template.text == CHATML and dataset is not None and _has_chatml(dataset, tokenizer):
            (draft / TEMPLATE_FILE).write_text(CHATML, encoding="utf-8")
        if initial_model is not None:
            copy_files(initial_model, draft, _MODEL_FILES)
        if resumes and folder.exists():
            folder = folder if _holds_the_same(folder, draft) else waiting
        if folder.exists() and resumes:
            shutil.rmtree(draft)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        update = {"tokenizer": str(folder / name)}
        update |= {} if data.chat_template is None else {"chat_template": str(folder / TEMPLATE_FILE)}
        data = data.model_copy(update=update)
    return replace(resolved, config=resolved.config.model_copy(update={"data": data}))


def _holds_the_same(folder: Path, other: Path) -> bool:
    """Return whether two folders have the same files with the same contents."""
    names = {path.name for path in folder.iterdir()}
    if names != {path.name for path in other.iterdir()}:
        return False
    return all((folder / name).read_bytes() == (other / name).read_bytes() for name in names)


def _has_chatml(dataset: SampleStream, tokenizer: Tokenizer) -> bool:
    """Return whether a document is a dialogue in ChatML: of those that begin alike, one is looked at."""
    parts = dataset.by_name.values() if isinstance(dataset, BlendedDataset) else [dataset]
    stores = [part.store for part in parts if isinstance(part, Dataset)]
    return any(
        BEGIN_OF_MESSAGE in tokenizer.decode_all(store.read(start, start + 32).tolist())
        for store in stores
        for start in _beginnings(store)
    )


def _beginnings(store: TokenStore) -> list[int]:
    """Return the first token of a document for each pair of tokens that documents begin with which the loss leaves out,
    as it does the prompt of a dialogue."""
    found: list[int] = []
    end = 0
    for tokens, mask in zip(store.shards, store.loss_masks, strict=True):
        begin, end = end, end + len(tokens)
        starts = store.document_starts[np.searchsorted(store.document_starts, (begin, end))[0] :]
        starts = starts[starts < end] - begin
        if mask is None:
            continue
        starts = starts[(mask[starts] == 0) & (starts + 1 < len(tokens))]
        pairs = tokens[starts].astype(np.int64) << 32 | tokens[starts + 1]
        found += (starts[np.unique(pairs, return_index=True)[1]] + begin).tolist()
    return found
