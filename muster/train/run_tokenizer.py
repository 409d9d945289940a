"""A run's own copy of its tokenizer, which makes the run directory complete and movable."""

import shutil
from dataclasses import replace
from pathlib import Path

from muster.checkpoint.checkpoint_dir import TOKENIZER_FOLDER
from muster.config.load_config import ResolvedConfig
from muster.data.blended_dataset import BlendedDataset
from muster.data.chat import BEGIN_OF_MESSAGE, CHATML
from muster.data.dataset import Dataset, SampleStream
from muster.data.describe import learned_parts
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
    resolved: ResolvedConfig, run_dir: Path, initial_model: Path | None, dataset: SampleStream | None = None
) -> ResolvedConfig:
    """Copy the tokenizer into the run directory, and return the configuration that names the copy.

    Where `dataset` has dialogues in ChatML, for want of another template, the copy says so, and an export likewise.
    `initial_model` is the folder with the configuration files of the model that the run began with, if it has any; they
    come along. Raises OSError.
    """
    tokenizer = run_tokenizer(resolved.config.data)
    folder = run_dir / TOKENIZER_FOLDER
    if isinstance(tokenizer, ByteTokenizer):
        shutil.rmtree(folder, ignore_errors=True)
        return resolved
    assert isinstance(tokenizer, JsonTokenizer | SentencePieceTokenizer)
    data = resolved.config.data
    if tokenizer.path.resolve().parent != folder.resolve():
        draft = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        main = folder / copy_tokenizer(tokenizer, draft).name
        if data.chat_template is not None:
            shutil.copyfile(data.chat_template, draft / TEMPLATE_FILE)
        elif tokenizer.chat_template.text == CHATML and dataset is not None and _has_chatml(dataset, tokenizer):
            (draft / TEMPLATE_FILE).write_text(CHATML, encoding="utf-8")
        if initial_model is not None:
            copy_files(initial_model, draft, _MODEL_FILES)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        update = {"tokenizer": str(main)}
        update |= {} if data.chat_template is None else {"chat_template": str(folder / TEMPLATE_FILE)}
        data = data.model_copy(update=update)
    return replace(resolved, config=resolved.config.model_copy(update={"data": data}))


def _has_chatml(dataset: SampleStream, tokenizer: Tokenizer) -> bool:
    """Return whether one of the first documents of a source is a dialogue in ChatML."""
    parts = dataset.by_name.values() if isinstance(dataset, BlendedDataset) else [dataset]
    stores = [part.store for part in parts if isinstance(part, Dataset)]
    return any(
        BEGIN_OF_MESSAGE in "".join(text for text, _ in learned_parts(store, number, tokenizer, 64))
        for store in stores
        for number in range(min(4, store.header.num_documents))
    )
