"""Text generation from a trained model on disk: finding the model, and generating on one rank."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from muster.checkpoint.checkpoint_dir import find_latest
from muster.checkpoint.convert import AUXILIARY_FOLDER
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.checkpoint.tensors import TensorSource
from muster.config.load_config import load_run_config, plan_from_tree
from muster.config.migrations import migrate
from muster.config.run_config import DataConfig
from muster.data.blended_dataset import BlendedDataset
from muster.data.dataset import Dataset, SampleStream
from muster.data.tokenizer import Tokenizer
from muster.model.dtypes import DTYPES
from muster.model.generation import generate
from muster.parallel.axis import TensorAxis
from muster.parallel.inference import all_gather_logits, build_inference_decoder
from muster.plugins.loader import require_unchanged_plugins
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Precision
from muster.spec.text_generation import SamplingParams
from muster.train.data import run_tokenizer

_PROMPT_LENGTH, _PROMPT_TOKENS = 32, 128
"""Largest number of characters of a sample's prompt, and of the tokens that it is cut from."""


class TrainedModel(Frozen):
    """A trained model on disk."""

    checkpoint: Path
    step: int
    model: ModelSpec
    context_length: int
    """Tokens of the sequences that it was trained on: the longest context."""
    plan: Plan
    """Plan under which it was saved."""
    data: DataConfig
    """Data configuration with the tokenizer of its training."""


class GenerationRequest(Frozen):
    """Request for texts."""

    trained_model: TrainedModel
    plan: Plan
    prompts: tuple[str, ...]
    max_new_tokens: int
    """Largest number of new tokens for each prompt; a text ends with its document."""
    sampling: SamplingParams = SamplingParams()


def find_trained_model(path: Path) -> TrainedModel:
    """Find the model of a run directory's last checkpoint, of the checkpoint at `path`, or of a converted directory.

    Raises ConfigError where there is none, MusterError where it is damaged.
    """
    is_checkpoint = (path / MANIFEST).exists()
    run_dir = path.resolve().parent.parent if is_checkpoint else path
    if not (run_dir / "config.yaml").exists():
        return _find_converted_model(path)
    problems: list[str] = []
    folder = path if is_checkpoint else find_latest(run_dir / "checkpoints", problems.append)
    if folder is None and problems:
        raise MusterError(f"{run_dir} has no readable checkpoint: {'; '.join(problems)}")
    if folder is None:
        raise ConfigError(f"{run_dir} has no complete checkpoint yet: train to the end or to train.save_every")
    for problem in problems:
        print(f"muster: {problem}", file=sys.stderr)
    config, manifest = load_run_config(None, run_dir / "config.yaml", []).config, read_manifest(folder)
    require_unchanged_plugins(config.plugins)
    return TrainedModel(
        checkpoint=folder.resolve(),
        step=manifest.step,
        model=config.model,
        context_length=config.train.seq_len,
        plan=plan_from_tree(manifest.plan, "the checkpoint's plan"),
        data=config.data,
    )


def _find_converted_model(path: Path) -> TrainedModel:
    """Find the model of a directory that `muster checkpoint convert` or another program wrote. Raises ConfigError."""
    directory = open_directory(path)
    weights = model_weights(directory)
    assert directory.model is not None
    run = migrate("run", directory.manifest.run, str(path)) if directory.manifest is not None else {}
    context = run.get("train", {}).get("seq_len") or directory.model.max_positions
    if context is None:
        raise ConfigError(f"{path} doesn't say how long the model's context is: expected max_positions in its model")
    places = (directory.folder, directory.folder / AUXILIARY_FOLDER)
    tokenizer = next((str(place) for place in places if (place / "tokenizer.json").exists()), None)
    if tokenizer is None and "data" not in run:
        raise ConfigError(
            f"{path} has no tokenizer: expected tokenizer.json in it (convert's --tokenizer puts it there)"
        )
    data = DataConfig.model_validate(
        {"source": "none", **run.get("data", {}), **({"tokenizer": tokenizer} if tokenizer else {})}
    )
    return TrainedModel(
        checkpoint=directory.folder.resolve(),
        step=directory.step or 0,
        model=directory.model,
        context_length=context,
        plan=plan_from_tree(directory.plan or {"precision": _stored_precision(weights)}, "the checkpoint's plan"),
        data=data,
    )


def _stored_precision(weights: TensorSource) -> Precision:
    """Return the precision that keeps the weights as they are stored: that of most of their elements."""
    numel: Counter[torch.dtype] = Counter()
    for meta in weights.metas.values():
        numel[meta.dtype] += meta.numel
    dtype = numel.most_common(1)[0][0]
    return next((precision for precision, known in DTYPES.items() if known == dtype), "fp32")


def sample_prompt(dataset: SampleStream, tokenizer: Tokenizer, context: int) -> str:
    """Return the first words of a text that the model wasn't trained on, as the prompt of a sample."""
    own = next(iter(dataset.by_name.values())) if isinstance(dataset, BlendedDataset) else dataset
    assert isinstance(own, Dataset)
    text = tokenizer.decode(own.sample_prompt(_PROMPT_TOKENS).tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
    prompt = text[:_PROMPT_LENGTH]
    if len(prompt) < len(text) and (words := prompt.rpartition(" ")[0].strip()):
        prompt = words
    while len(tokenizer.encode(prompt)) > context:
        prompt = prompt[:-1]
    return prompt if prompt.strip() else "\n"


def generate_texts(request: GenerationRequest, device: torch.device, axis: TensorAxis | None = None) -> list[str]:
    """Return the continuation of each prompt. With an axis all of its ranks call it, and all get the same."""
    source, precision = request.trained_model, request.plan.precision
    model, layouts = build_inference_decoder(source.model, precision, device, axis)
    pieces = [LocalShard(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]
    load_initial_weights(source.checkpoint, source.model, pieces)
    tokenizer = run_tokenizer(source.data)
    ids = generate(
        model,
        [tokenizer.encode(prompt).tolist() for prompt in request.prompts],
        request.max_new_tokens,
        request.sampling,
        source.context_length,
        eos_token=tokenizer.eos_id,
        gather_vocab=None if axis is None else partial(all_gather_logits, axis, source.model.vocab_size),
    )
    return [tokenizer.decode(new) for new in ids]
