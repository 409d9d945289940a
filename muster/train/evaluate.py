"""`muster eval`: loss of a trained model on validation or other data, by this process or on several ranks of its own.

Data-parallel ranks share the batches of one process; tensor-parallel ranks hold a shard of each layer.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.checkpoint_dir import named_checkpoint, split_average
from muster.checkpoint.formats.peft import ADAPTER_CONFIG
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import MANIFEST
from muster.checkpoint.model_directory import model_weights, open_directory
from muster.config.load_config import load_run_config
from muster.config.named_model import HF_PREFIX, load_model
from muster.config.run_config import DataConfig
from muster.data.dataset import IGNORE_INDEX, Batch, Dataset, require_known_ids
from muster.data.invalid_rows import InvalidRowPolicy
from muster.data.path_stream import SampleRouter
from muster.data.tokenizer import Tokenizer
from muster.launch.rank_process import exit_process, rank_main
from muster.layout.mesh import dp_index_of
from muster.layout.tensor_layout import chunk_bounds
from muster.model.chunk_sizes import chunk_elements
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.loss import loss_sums
from muster.parallel.axis import TensorAxis
from muster.parallel.inference import build_inference_decoder
from muster.parallel.tensor_parallel import vocab_parallel_loss
from muster.parallel.world import World, open_world, pick_device
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError
from muster.spec.inference_plans import require_evaluation_supported
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Precision
from muster.spec.plan_name import parse_plan_name
from muster.train.data import open_dataset, open_token_store, require_vocab_size, run_tokenizer, token_store_folder
from muster.train.path_routing import read_router
from muster.train.text_generation import TrainedModel, find_trained_model, stored_precision
from muster.train.validation_loss import perplexity
from muster.train.verb_ranks import REQUEST_FILE, run_on_ranks, write_result

BATCH_SIZE, BATCH_TOKENS = 8, 8192
"""Most samples of a forward, and most tokens where it has more than one sample."""
HEAD_ROWS = 256
"""Fewest positions whose logits are made at once: enough that reading the head's weights isn't what takes the time."""
MAX_SEQ_LEN = 2048


class EvalOptions(Frozen):
    """Options of the command line."""

    model_path: Path
    """Run directory, checkpoint in one, or Hugging Face directory."""
    source: str | None = None
    """Data other than the run's validation samples."""
    tokenizer: str | None = None
    """Tokenizer other than the run's or the directory's own."""
    seq_len: int | None = None
    samples: int = 256
    """Largest number of samples of each source."""
    on_invalid_row: InvalidRowPolicy | None = None
    """Treatment of invalid rows of `source`; None: as the run treats its own."""
    precision: Precision | None = None
    """Precision of weights and passes; None: the plan's, the run's, or that of the directory's weights."""
    plan: str = "dp1"
    """Name of a plan: its data-parallel ranks share the samples, its tensor-parallel ranks the layers."""
    path: int | None = None
    """Path that reads all samples, where a run has several; None: the one to which the run's router sends each part."""
    reroute_every: int | None = None
    """Positions of a sample after which its path is chosen anew; None: the run's."""

    def data_config(self, own: DataConfig) -> DataConfig:
        """Return how `source` is read: as the model's own data, but for what these options say."""
        given = {"tokenizer": self.tokenizer, "on_invalid_row": self.on_invalid_row}
        update: dict[str, object] = {key: value for key, value in given.items() if value is not None}
        if self.tokenizer is not None:  # the tokens that begin and end documents are its own
            update |= {"eos_token": None, "add_bos": None}
        return own.model_copy(update=update)

    def plan_for(self, spec: ModelSpec, own: Precision) -> Plan:
        """Return the plan, in precision `own` unless these options give another. Raises ConfigError,
        InfeasibleError."""
        plan = parse_plan_name(self.plan, Plan(precision=self.precision or own))
        if self.precision not in (None, plan.precision):
            raise ConfigError(f"--precision {self.precision} and --plan {self.plan} give two precisions: leave out one")
        require_evaluation_supported(plan, spec)
        return plan


@dataclass(frozen=True)
class _Samples:
    """Samples of one source."""

    read: Callable[[int, int], Batch]
    """Function that returns a batch of so many samples (second argument) from the n-th on (first)."""
    count: int
    per_forward: int

    def batches(self, index: int, num_ranks: int) -> Iterator[Batch]:
        """Yield the batches of one of `num_ranks` ranks: every `num_ranks`-th of those of one process."""
        for at in range(index * self.per_forward, self.count, num_ranks * self.per_forward):
            yield self.read(at, min(self.per_forward, self.count - at))


@dataclass(frozen=True)
class _Part:
    """Weights on disk, and the samples by source whose loss they compute."""

    load: Callable[[list[LocalShard]], object]
    """Function that reads the weights."""
    samples: Mapping[str, _Samples]


@dataclass(frozen=True)
class _Evaluation:
    """Model, the plan to run it under, and its weights: a part for each path of several, which read samples one after
    another."""

    spec: ModelSpec
    plan: Plan
    parts: Sequence[_Part]


def evaluate(options: EvalOptions) -> dict[str, dict[str, float]]:
    """Return loss, perplexity and number of tokens by source; data that is no blend has the name `all`.

    Under a plan for several processes, ranks of its own compute it. Raises ConfigError where there is no model or no
    data, or they don't fit each other; InfeasibleError for a plan that can't run the model; MusterError if a rank
    failed.
    """
    opened = _open(options)
    if opened.plan.world_size == 1:
        return _evaluate(opened, pick_device(0, 1))
    return run_on_ranks("eval", "muster.train.evaluate", options, opened.plan.world_size)


def _evaluate_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Evaluate the request in `folder` as one rank of `world_size`. Returns 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    opened = _open(EvalOptions.model_validate_json((folder / REQUEST_FILE).read_bytes()))
    with open_world(store, rank, world_size, opened.plan) as world:
        found = _evaluate(opened, world.device, world)
    if rank == 0:
        write_result(folder, found)
    return 0


def _evaluate(opened: _Evaluation, device: torch.device, world: World | None = None) -> dict[str, dict[str, float]]:
    """Return the result of one process, or as a rank of `world` that of all."""
    axis = None if world is None else world.tensor_axis(opened.plan.default_strategy)
    experts = None if world is None else world.expert_axis()
    model, layouts = build_inference_decoder(opened.spec, opened.plan.precision, device, axis, experts)
    shards = [LocalShard(f"model/{name}", layouts[name], local) for name, local in model.named_parameters()]
    model.caps_logits = False  # the loss caps them, in float32
    index, ranks = (0, 1) if world is None else (dp_index_of(opened.plan, world.at), opened.plan.mesh(0).dp_size)
    sums: dict[str, tuple[float, int]] = {}
    for part in opened.parts:
        part.load(shards)
        for name, samples in part.samples.items():
            total, count = _loss_sum(model, opened.spec.vocab_size, samples.batches(index, ranks), device, axis)
            if world is not None:  # tensor-parallel ranks have the same sums
                both = torch.tensor([total, count], dtype=torch.float64, device=device) * (world.at.tp == 0)
                dist.all_reduce(both)
                total, count = both[0].item(), int(both[1])
            sums[name] = total, count
    if len(opened.parts) > 1:
        sums = {name: (total, count) for name, (total, count) in sums.items() if count}
        sums = {"all": (sum(total for total, _ in sums.values()), sum(count for _, count in sums.values())), **sums}
    return {name: _result(total, count) for name, (total, count) in sums.items()}


def _result(total: float, count: int) -> dict[str, float]:
    loss = total / max(1, count)
    return {"loss": loss, "perplexity": perplexity(loss), "tokens": count}


# ----------------------------------------------------------------------------------------------------------------------
# Model and samples on disk


def _open(options: EvalOptions) -> _Evaluation:
    place = named_checkpoint(split_average(options.model_path)[0])
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}: expected a run, a checkpoint or a Hugging Face directory")
    if (place / "config.yaml").exists() or (place / MANIFEST).exists():
        return _open_run(options)
    if (place / ADAPTER_CONFIG).exists():
        raise ConfigError(
            f"{place} is a PEFT directory: merge its adapters with 'muster checkpoint convert {place} DIR --to hf', and"
            " evaluate DIR"
        )
    open_directory(options.model_path)  # which says what is wrong with it
    spec = load_model(f"{HF_PREFIX}{place}")
    plan = options.plan_for(spec, stored_precision(model_weights(open_directory(place))))
    data = options.data_config(DataConfig(source=options.source or "", tokenizer=str(place)))
    if not options.source:
        raise ConfigError(f"{place} has no data of its own: name some with --source")
    seq_len = options.seq_len or min(MAX_SEQ_LEN, spec.max_positions or MAX_SEQ_LEN)
    _require_positions(spec, seq_len)
    own = _open_whole_dataset(options.source, data, run_tokenizer(data), spec, seq_len, Path(".data"))
    if options.path is not None:
        raise ConfigError(
            f"--path {options.path} is one of several of a run, but {place} has a single one: leave it out"
        )
    part = _Part(partial(load_initial_weights, place, spec), {"all": _whole_samples(own, options.samples)})
    return _Evaluation(spec, plan, [part])


def _open_run(options: EvalOptions) -> _Evaluation:
    for key in ("tokenizer", "on_invalid_row"):
        if options.source is None and getattr(options, key) is not None:
            raise ConfigError(
                f"--{key.replace('_', '-')} {getattr(options, key)} is for the data of --source, which is missing: a"
                " run's validation samples are tokens already"
            )
    source = find_trained_model(options.model_path)
    plan = options.plan_for(source.model, source.plan.precision)
    run_dir = source.run_dir
    config = load_run_config(None, run_dir / "config.yaml", []).config
    seq_len = options.seq_len or config.train.seq_len
    _require_positions(source.model, seq_len)
    if options.source is not None:
        data = options.data_config(config.data)
        own = _open_whole_dataset(
            options.source, data, run_tokenizer(data), config.model, seq_len, token_store_folder(data, run_dir)
        )
        samples = {"all": _whole_samples(own, options.samples)}
        return _Evaluation(source.model, plan, _parts(source, options, samples, seq_len))
    if seq_len != config.train.seq_len and config.data.validation_split:  # other windows, with tokens trained on
        raise ConfigError(
            f"--seq-len {seq_len}: the run's validation samples are windows of {config.train.seq_len} tokens; leave"
            " --seq-len out, or name data that the run hasn't read with --source"
        )
    dataset = open_dataset(config, run_dir)
    size = _samples_per_forward(seq_len)
    samples = {
        name: _Samples(part.validation_batch, min(options.samples, part.num_validation_samples), size)
        for name, part in {"all": dataset, **dataset.sources}.items()
        if part.num_validation_samples
    }
    if not samples:
        raise ConfigError(f"{run_dir} holds nothing out (data.validation_split 0): name other data with --source")
    return _Evaluation(source.model, plan, _parts(source, options, samples, seq_len))


def _parts(source: TrainedModel, options: EvalOptions, samples: Mapping[str, _Samples], seq_len: int) -> list[_Part]:
    """Return the run's weights with the samples that they read: of several paths each with the parts of samples that
    the run's router sends there, or one path with all of them. Raises ConfigError for a path that there isn't."""
    paths, path = source.paths, options.path
    source.require_rerouting(options.reroute_every, path)

    def part(chosen: int, read: Mapping[str, _Samples]) -> _Part:
        return _Part(partial(load_initial_weights, source.weights, source.model, island=chosen), read)

    if path is not None:
        source.require_path(path)
    if paths.num_paths == 1:
        return [part(0, samples)]
    router = read_router(source.checkpoint).every(options.reroute_every)
    if seq_len <= router.prefix:
        raise ConfigError(
            f"--seq-len {seq_len} leaves nothing of samples whose first {router.prefix} tokens (outer.route_tokens)"
            f" choose the path: expected more than {router.prefix}"
        )

    def routed(to: int | None) -> _Samples:
        return replace(samples["all"], read=partial(_read_routed, samples["all"].read, router, to))

    if path is not None:
        return [part(path, {"all": routed(None)})]
    return [part(one, {f"path{one}": routed(one)}) for one in range(paths.num_paths)]


def _read_routed(
    read: Callable[[int, int], Batch], router: SampleRouter, path: int | None, first: int, count: int
) -> Batch:
    """Return those samples of a batch of which a part is sent to a path, with the labels of such parts."""
    batch = router.with_labels_of(path, read(first, count))
    rows = (batch.labels_BS != IGNORE_INDEX).any(1)
    positions = None if batch.positions_BS is None else batch.positions_BS[rows]
    return Batch(batch.tokens_BS[rows], batch.labels_BS[rows], batch.num_valid_tokens, positions)


def _require_positions(spec: ModelSpec, seq_len: int) -> None:
    """Raise ConfigError for samples that are longer than the model's learned positions."""
    if spec.position == "learned" and seq_len > (spec.max_positions or 0):
        raise ConfigError(
            f"--seq-len {seq_len} is longer than the model's {spec.max_positions} learned positions: expected at most"
            f" {spec.max_positions}"
        )


def _open_whole_dataset(
    source: str, data: DataConfig, tokenizer: Tokenizer, spec: ModelSpec, seq_len: int, cache: Path
) -> Dataset:
    """Open all samples of a source, none held out."""
    require_vocab_size(spec, tokenizer, data)
    return Dataset(open_token_store(data, source, tokenizer, cache), seq_len, packing=data.packing)


def _whole_samples(dataset: Dataset, samples: int) -> _Samples:
    size = _samples_per_forward(dataset.seq_len)
    return _Samples(dataset.train_batch, min(samples, dataset.num_train_samples), size)


def _samples_per_forward(seq_len: int) -> int:
    return max(1, min(BATCH_SIZE, BATCH_TOKENS // seq_len))


# ----------------------------------------------------------------------------------------------------------------------
# Loss


@torch.no_grad()
def _loss_sum(
    model: Decoder, vocab_size: int, batches: Iterator[Batch], device: torch.device, axis: TensorAxis | None = None
) -> tuple[float, int]:
    """Return the cross-entropy summed over the labels that count, and their number."""
    total, count = 0.0, 0
    for batch in batches:
        if not batch.num_valid_tokens:
            continue
        require_known_ids(batch, vocab_size)
        filled = 1 + int(np.flatnonzero((batch.labels_BS != IGNORE_INDEX).any(0)).max(initial=0))
        tokens_BS, labels_BS = (
            torch.from_numpy(array[:, :filled]).to(device) for array in (batch.tokens_BS, batch.labels_BS)
        )
        positions = None if batch.positions_BS is None else batch.positions_BS[:, :filled]
        model.position_state.documents = (
            None if positions is None else Documents.from_positions(torch.from_numpy(positions), device)
        )
        total += _cross_entropy(model, vocab_size, tokens_BS, labels_BS, axis)
        count += batch.num_valid_tokens
    return total, count


def _cross_entropy(
    model: Decoder, vocab_size: int, tokens_BS: Tensor, labels_BS: Tensor, axis: TensorAxis | None = None
) -> float:
    """Return the cross-entropy summed over labels, from the logits of some positions at a time.

    The logits of a whole sample would be the largest tensor by far: 8k positions of 128k words are 4 GB in float32.
    """
    hidden_ND, labels_N = model.final_hidden(tokens_BS).flatten(0, 1), labels_BS.flatten()
    rows = max(HEAD_ROWS, chunk_elements("loss", hidden_ND.device.type) // vocab_size)
    losses = loss_sums
    if axis is not None:
        losses = partial(vocab_parallel_loss, axis, chunk_bounds(vocab_size, axis.size, axis.index)[0])
    sums = [
        losses(model.logits(hidden_RD.unsqueeze(0)), labels_R.unsqueeze(0), softcap=model.logit_softcap).total
        for hidden_RD, labels_R in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True)
    ]
    return float(torch.stack(sums).double().sum())


if __name__ == "__main__":
    exit_process(rank_main(_evaluate_rank))
