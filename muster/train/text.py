"""Text from a trained model on disk: what is wanted, where the model lies, and how one rank makes the text."""

import sys
from functools import partial
from pathlib import Path

import torch

from muster.checkpoint.convert import SIDE_FOLDER
from muster.checkpoint.directory import open_directory, weights_of
from muster.checkpoint.folder import find_latest
from muster.checkpoint.initial import load_initial
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.checkpoint.piece import Piece
from muster.data.dataset import Dataset, Samples
from muster.data.mixed import MixedDataset
from muster.data.tokenizer import Tokenizer
from muster.model.sample import generate
from muster.parallel.axis import TensorAxis
from muster.parallel.generation import decoder_for_text, join_words
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError
from muster.spec.generation import Sampling
from muster.spec.load import load_run
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plugins import require_unchanged
from muster.spec.run import DataConfig
from muster.train.data import tokenizer_of

_PROMPT_LENGTH, _PROMPT_TOKENS = 32, 128
"""Characters of a sample's prompt at most, and tokens that they take at most."""


class Source(Frozen):
    """A trained model on disk."""

    checkpoint: Path
    step: int
    model: ModelSpec
    context: int
    """Tokens of the sequences that it was trained on: it sees so many at most."""
    plan: Plan
    """Under which it was saved."""
    data: DataConfig
    """With the tokenizer that it was trained with."""


class Request(Frozen):
    """Texts to be made."""

    source: Source
    plan: Plan
    prompts: tuple[str, ...]
    tokens: int
    """New ones for each prompt, at most: a text ends where its document does."""
    sampling: Sampling = Sampling()


def find_source(path: Path) -> Source:
    """The model of a run directory's last checkpoint, of the checkpoint at `path`, or of a converted directory.

    Raises ConfigError where there is none, MusterError where it is damaged.
    """
    is_checkpoint = (path / MANIFEST).exists()
    run_dir = path.resolve().parent.parent if is_checkpoint else path
    if not (run_dir / "config.yaml").exists():
        return _converted(path)
    problems: list[str] = []
    folder = path if is_checkpoint else find_latest(run_dir / "checkpoints", problems.append)
    if folder is None and problems:
        raise MusterError(f"{run_dir} has no checkpoint that can be read: {'; '.join(problems)}")
    if folder is None:
        raise ConfigError(f"{run_dir} has no finished checkpoint yet: let it train to its end or to train.save_every")
    for problem in problems:
        print(f"muster: {problem}", file=sys.stderr)
    config, manifest = load_run(None, run_dir / "config.yaml", []).config, read_manifest(folder)
    require_unchanged(config.plugins)
    return Source(
        checkpoint=folder.resolve(),
        step=manifest.step,
        model=config.model,
        context=config.train.seq_len,
        plan=Plan.model_validate(manifest.plan),
        data=config.data,
    )


def _converted(path: Path) -> Source:
    """The model of a directory that `muster checkpoint convert` or another program wrote. Raises ConfigError."""
    directory = open_directory(path)
    weights_of(directory)
    assert directory.model is not None
    run = directory.manifest.run if directory.manifest is not None else {}
    context = run.get("train", {}).get("seq_len") or directory.model.max_positions
    if context is None:
        raise ConfigError(f"{path} doesn't say how long the model's context is: expected max_positions in its model")
    places = (directory.folder, directory.folder / SIDE_FOLDER)
    tokenizer = next((str(place) for place in places if (place / "tokenizer.json").exists()), None)
    if tokenizer is None and "data" not in run:
        raise ConfigError(
            f"{path} has no tokenizer: expected tokenizer.json in it (convert's --tokenizer puts it there)"
        )
    data = DataConfig.model_validate(
        {"source": "none", **run.get("data", {}), **({"tokenizer": tokenizer} if tokenizer else {})}
    )
    return Source(
        checkpoint=directory.folder.resolve(),
        step=directory.step or 0,
        model=directory.model,
        context=context,
        plan=Plan.model_validate(directory.plan or {}),
        data=data,
    )


def sample_prompt(dataset: Samples, tokenizer: Tokenizer, context: int) -> str:
    """The first words of a text that the model hasn't learnt from, for a sample of what it writes."""
    own = next(iter(dataset.sources.values())) if isinstance(dataset, MixedDataset) else dataset
    assert isinstance(own, Dataset)
    text = tokenizer.decode(own.beginning(_PROMPT_TOKENS).tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
    prompt = text[:_PROMPT_LENGTH]
    if len(prompt) < len(text) and (words := prompt.rpartition(" ")[0].strip()):
        prompt = words
    while len(tokenizer.encode(prompt)) > context:
        prompt = prompt[:-1]
    return prompt if prompt.strip() else "\n"


def make_texts(request: Request, device: torch.device, axis: TensorAxis | None = None) -> list[str]:
    """What follows each prompt. With an axis all of its ranks call it, and all get the same."""
    source, precision = request.source, request.plan.precision
    model, layouts = decoder_for_text(source.model, precision, device, axis)
    pieces = [Piece(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]
    load_initial(source.checkpoint, source.model, pieces)
    tokenizer = tokenizer_of(source.data)
    ids = generate(
        model,
        [tokenizer.encode(prompt).tolist() for prompt in request.prompts],
        request.tokens,
        request.sampling,
        source.context,
        end=tokenizer.end,
        join_words=None if axis is None else partial(join_words, axis, source.model.vocab_size),
    )
    return [tokenizer.decode(new) for new in ids]
