"""Text generation from a trained model on disk: finding the model, and generating on one rank."""

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch

from muster.checkpoint.checkpoint_dir import AVERAGE, find_latest, named_checkpoint, split_average
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.checkpoint.model_directory import AUXILIARY_FOLDER, model_weights, open_directory
from muster.checkpoint.tensors import TensorSource
from muster.config.load_config import load_run_config, plan_from_tree
from muster.config.migrations import migrate
from muster.config.run_config import DataConfig
from muster.cost.memory.generation import away_layers
from muster.data.blended_dataset import BlendedDataset
from muster.data.dataset import Dataset, SampleStream
from muster.data.invalid_rows import InvalidRow
from muster.data.tokenizer import Tokenizer, bos_before
from muster.data.tokenizer_files import stop_ids
from muster.layout.host_updates import layer_of
from muster.layout.module_paths import ModulePaths
from muster.model.dtypes import DTYPES
from muster.model.generation import generate
from muster.parallel.allocation_meter import host_memory
from muster.parallel.axis import ExpertAxis, TensorAxis
from muster.parallel.inference import all_gather_logits, build_inference_decoder
from muster.parallel.layer_window import LayerWindow, write_disk_layers
from muster.plugins.loader import require_unchanged_plugins
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import PRECISIONS, Plan, Precision
from muster.spec.text_generation import SamplingParams
from muster.train.data import run_tokenizer
from muster.train.generation_memory import limit_of_request, require_memory
from muster.train.path_routing import module_paths, read_router
from muster.train.rerouted_generation import generate_rerouted

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
    average: bool = False
    """True: the moving averages of its weights."""
    modules: tuple[int, ...] = (1,)
    """Modules of each level of its layers, through which several paths go (dipaco)."""

    @property
    def paths(self) -> ModulePaths:
        """Paths through its modules."""
        return ModulePaths(self.modules, prod(self.modules), self.model.num_layers)

    @property
    def run_dir(self) -> Path:
        """Run directory of the checkpoint."""
        return self.checkpoint.parent.parent

    def require_path(self, path: int) -> None:
        """Raise ConfigError for a path that it doesn't have."""
        count = self.paths.num_paths
        if count == 1:
            raise ConfigError(f"--path {path} is one of several, but {self.checkpoint} has a single one: leave it out")
        if not 0 <= path < count:
            raise ConfigError(f"--path {path}: {self.checkpoint} has {count}, expected 0 to {count - 1}")

    def require_rerouting(self, positions: int | None, path: int | None) -> None:
        """Raise ConfigError where its path can't be chosen anew after so many positions."""
        if positions is None:
            return
        if self.paths.num_paths == 1:
            raise ConfigError(
                f"--reroute-every {positions} chooses among paths, but {self.checkpoint} has a single one: leave it out"
            )
        if path is not None:
            raise ConfigError(f"--reroute-every {positions} chooses paths, and --path {path} is one for all: give one")

    @property
    def weights(self) -> Path:
        """Path at which `open_directory` finds its weights."""
        return self.checkpoint.with_name(f"{self.checkpoint.name}@{AVERAGE}") if self.average else self.checkpoint


class GenerationRequest(Frozen):
    """Request for texts."""

    trained_model: TrainedModel
    plan: Plan
    prompts: tuple[str, ...]
    max_new_tokens: int
    """Largest number of new tokens for each prompt; a text ends with its document."""
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    """Texts before the first of which a new text ends, too."""
    chat: bool = False
    """Take each prompt for a user's message, which the model answers in the form of its chat template."""
    system: str | None = None
    """System message before the user's, in a chat."""
    window: int = 2
    """Layers on the device at once of those that the plan keeps in host memory or on disk."""
    memory_limit_bytes: int | None = None
    """Most memory of each device that may be taken."""
    path: int | None = None
    """Path that continues all prompts, where there are several; None: the one to which the router sends each."""
    reroute_every: int | None = None
    """Positions of a text after which the router chooses its path anew; None: the path of its beginning stays."""


def find_trained_model(path: Path) -> TrainedModel:
    """Find the model of a run directory's last checkpoint, of the checkpoint at `path`, or of a converted directory;
    after `@ema` the moving average of its weights.

    Raises ConfigError where there is none, MusterError where it is damaged.
    """
    place, average = split_average(path)
    if average:
        found = find_trained_model(place).model_copy(update={"average": True})
        open_directory(found.weights)
        return found
    path = named_checkpoint(path)
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
    plan = plan_from_tree(manifest.plan, "the checkpoint's plan")
    return TrainedModel(
        checkpoint=folder.resolve(),
        step=manifest.step,
        model=config.model,
        context_length=config.train.seq_len,
        plan=plan,
        data=config.data,
        modules=module_paths(config, plan).modules,
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
    base = () if directory.base is None else (directory.base.folder,)
    places = (directory.folder, directory.folder / AUXILIARY_FOLDER, *base)
    files = [place / name for place in places for name in ("tokenizer.json", "tokenizer.model")]
    tokenizer = next((str(file) for file in files if file.exists()), None)
    if tokenizer is None and "data" not in run:
        raise ConfigError(
            f"{path} has no tokenizer: expected tokenizer.json in it (convert's --tokenizer puts it there)"
        )
    own = {"tokenizer": tokenizer, "chat_template": None} if tokenizer else {}  # the template lies beside the tokenizer
    data = DataConfig.model_validate({"source": "none", **run.get("data", {}), **own})
    return TrainedModel(
        checkpoint=directory.folder.resolve(),
        step=directory.step or 0,
        model=directory.model,
        context_length=context,
        plan=plan_from_tree(directory.plan or {"precision": stored_precision(weights)}, "the checkpoint's plan"),
        data=data,
    )


def stored_precision(weights: TensorSource) -> Precision:
    """Return the precision that keeps the weights as they are stored: that of most of their elements."""
    numel: Counter[torch.dtype] = Counter()
    for meta in weights.metas.values():
        numel[meta.dtype] += meta.numel
    dtype = numel.most_common(1)[0][0]
    for precision in PRECISIONS:  # fp8 has no dtype of its own: its weights are stored in another
        if DTYPES.get(precision) == dtype:
            return precision
    return "fp32"


def sample_prompt(dataset: SampleStream, tokenizer: Tokenizer, context: int) -> str:
    """Return the first words of a text that the model wasn't trained on, as the prompt of a sample."""
    own = next(iter(dataset.by_name.values())) if isinstance(dataset, BlendedDataset) else dataset
    assert isinstance(own, Dataset)
    text = tokenizer.decode(own.sample_prompt(_PROMPT_TOKENS).tolist()).rstrip("\N{REPLACEMENT CHARACTER}")
    prompt = text[:_PROMPT_LENGTH]
    if len(prompt) < len(text) and (words := prompt.rpartition(" ")[0].strip()):
        prompt = words
    while len(encode_prompt(prompt, tokenizer)) > context:
        prompt = prompt[:-1]
    return prompt if prompt.strip() else "\n"


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text that begins a document, as training saw it."""
    ids = tokenizer.encode(prompt)
    return [*bos_before(ids, tokenizer), *ids.tolist()]


def encode_dialogue(messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Return the ids after which the assistant answers. Raises ConfigError where the chat template refuses."""
    try:
        return tokenizer.encode(tokenizer.chat_template.prompt(messages)).tolist()
    except InvalidRow as problem:
        raise ConfigError(f"these messages can't be answered: {problem}") from None


def generate_texts(
    request: GenerationRequest,
    device: torch.device,
    axis: TensorAxis | None = None,
    experts: ExpertAxis | None = None,
) -> list[str]:
    """Return the continuation of each prompt. With an axis all of its ranks call it, and all get the same; `experts`:
    the same ranks, where each has some whole experts."""
    with limit_of_request(request, device):
        tokenizer, prompts = run_tokenizer(request.trained_model.data), request.prompts
        if request.chat:
            ids = [encode_dialogue(first_messages(one, request.system), tokenizer) for one in prompts]
        else:
            ids = [encode_prompt(prompt, tokenizer) for prompt in prompts]
        if request.reroute_every is not None:
            router = read_router(request.trained_model.checkpoint).every(request.reroute_every)
            return generate_rerouted(
                request, router, ids, lambda path: TextGenerator(request, device, axis, experts, path)
            )
        paths, texts = prompt_paths(request, ids), [""] * len(ids)
        for path in sorted(set(paths)):
            rows = [row for row, chosen in enumerate(paths) if chosen == path]
            found = TextGenerator(request, device, axis, experts, path).texts([ids[row] for row in rows])
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return texts


def prompt_paths(request: GenerationRequest, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the path that continues each prompt, given as ids: 0 for a model of one path."""
    model = request.trained_model
    if request.path is not None or model.paths.num_paths == 1:
        return [request.path or 0] * len(prompts)
    router = read_router(model.checkpoint)
    return [router.path_of(prompt) for prompt in prompts]


def first_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages that begin a dialogue."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


class TextGenerator:
    """A model in memory that generates texts as a request says."""

    def __init__(
        self,
        request: GenerationRequest,
        device: torch.device,
        axis: TensorAxis | None = None,
        experts: ExpertAxis | None = None,
        path: int = 0,
    ) -> None:
        """`path`: whose weights it reads, where the model has several."""
        source = request.trained_model
        self.request, self.path = request, path
        self.tokenizer = run_tokenizer(source.data)
        require_memory(request)
        away = away_layers(source.model, request.plan)
        own = source.model, request.plan.precision, device, axis, experts
        self.model, layouts = build_inference_decoder(*own, away)
        parameters = self.model.named_parameters()
        pieces = {name: LocalShard(f"model/{name}", layouts[name], parameter) for name, parameter in parameters}

        def load(names: Collection[str]) -> None:
            with host_memory():  # what is read before it is copied to its place
                load_initial_weights(source.weights, source.model, [pieces[name] for name in names], path)

        slots = write_disk_layers(self.model, away, load)
        load([name for name in pieces if layer_of(name) not in slots])
        self.window = LayerWindow(self.model, device, away, request.window, slots)
        self._gather = None if axis is None else partial(all_gather_logits, axis, source.model.vocab_size)

    def texts(self, prompts: list[list[int]]) -> list[str]:
        """Return the continuation of each prompt, given as ids."""
        return [self.text_of(new) for new in self.continue_ids(prompts, self.request.max_new_tokens)]

    def continue_ids(
        self, prompts: list[list[int]], count: int, skipped: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Return at most `count` ids that continue each prompt; `skipped`: ids of each text before it."""
        require_memory(self.request, len(prompts), max(map(len, prompts)))
        return generate(
            self.model,
            prompts,
            count,
            self.request.sampling,
            self.request.trained_model.context_length,
            stop_ids=stop_ids(self.tokenizer),
            is_complete=self.is_complete if self.request.stop else None,
            gather_vocab=self._gather,
            skipped=skipped,
        )

    def is_complete(self, ids: Sequence[int]) -> bool:
        """Return whether new ids have one of the texts at which they end."""
        return any(text in self.tokenizer.decode(ids) for text in self.request.stop)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of new ids, which ends before such a text."""
        return _cut_before(self.tokenizer.decode(ids), self.request.stop)


def _cut_before(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the stop texts."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]
