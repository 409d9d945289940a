"""Batches of a rank: reads its part of each global batch and feeds its stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.cost.perturbation import POINTS
from muster.data.dataset import Batch, SampleStream, require_known_ids
from muster.data.dp_slice import join_by_micro_batch, parts_of_micro_batches, read_dp_slice, samples_of_micro_batch
from muster.data.length_bucketing import BucketedStep, bucket_by_length
from muster.layout.context_parallel import kept_positions
from muster.layout.mesh import MeshCoordinates, dp_index_of
from muster.layout.sequence_slices import sequence_slices
from muster.model.documents import Documents
from muster.model.dropout import sample_keys
from muster.model.further_tokens import FurtherTokens, shift_further
from muster.model.host_copies import to_device
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.world import World
from muster.plugins.registry import get_component
from muster.spec.plan import Plan
from muster.train.grouped_batches import GroupedStep, GroupReader
from muster.train.path_routing import module_paths
from muster.train.prefetch import LocalBatch, Prefetcher


class BatchLoader:
    """Gives this rank's stages their part of each global batch."""

    def __init__(
        self, config: RunConfig, plan: Plan, world: World, dataset: SampleStream, stages: Mapping[int, DecoderStage]
    ) -> None:
        self.config = config
        self.plan = plan
        self.world = world
        self.dataset = dataset
        self.stages = stages
        self.paths = module_paths(config, plan)
        """Paths that islands train; one where they have the same samples in turns."""
        self._batch_size = config.train.global_batch_size // plan.islands
        """Samples of a step that this rank's island works on."""
        self.num_micro_batches = plan.num_micro_batches(config.workload, dp_index_of(plan, world.at))
        self.needs_data = config.data.packing != "concatenate" or plan.vocab_parallel
        """True when a stage of this rank needs data."""
        self.needs_data |= any(stage.is_first or stage.is_last for stage in stages.values())
        self._groups = GroupReader(config, plan, world.at.cp) if plan.dynamic_context_parallel else None
        self._prefetcher = Prefetcher(self._read_training)
        self.fed_groups: GroupedStep | None = None
        """Micro-batches that the stages were given last, where samples are assigned to groups of ranks."""
        self.last_fed: tuple[LocalBatch, tuple[Tensor, ...]] | None = None
        """Batch of the last step and the tokens of its micro-batches, before they were cut for the first stage."""

    def use_dataset(self, dataset: SampleStream) -> None:
        """Go on with the samples of another stream."""
        self.dataset = dataset
        self._prefetcher.forget()

    def next_batch(self, first: int, stride: int | None = None) -> LocalBatch:
        """Return the training batch that begins with global sample `first`; the following one, `stride` samples later
        (None: behind it), is read in the background."""
        return self._prefetcher.take(first, self.config.train.global_batch_size, stride)

    @property
    def num_fed_micro_batches(self) -> int:
        """Micro-batches of the batch that the stages were given last; under `cpdyn` each has its own number."""
        return self.num_micro_batches if self.fed_groups is None else len(self.fed_groups.micro_batches)

    def _read_training(self, first: int, count: int) -> LocalBatch:
        return self.read_batch(self.dataset, first, count)

    def read_batch(self, dataset: SampleStream, first: int, count: int, validation: bool = False) -> LocalBatch:
        """Read this rank's part of the global samples first … first + count: of its island's, which are consecutive.
        With several paths each has consecutive samples of its own stream, of which others have as many.

        Valid labels are counted in the island's samples, by whose number its loss is divided, tokens in all of them.
        """
        seq_len = self.config.train.seq_len
        arrangement = None
        num_tokens = self._count_tokens(dataset, first, count, validation)
        count //= self.plan.islands
        first = first // self.paths.num_paths + self.paths.place_of(self.world.at.island) * count
        index = np.arange(first, first + count)
        # A batch of ignored labels alone has a loss of 0, not 0 / 0.
        num_valid = 1 if validation else max(1, dataset.num_valid_tokens(first, count))
        lengths_B = dataset.lengths(index, validation)
        if self._groups is not None:
            if lengths_B is None:
                lengths_B = np.full(count, seq_len)
            groups = self._groups.read(dataset, index, lengths_B, validation)
            return LocalBatch(first, None, num_valid, int(lengths_B.sum()), groups=groups)
        if lengths_B is not None:
            arrangement = bucket_by_length(lengths_B, self.plan, self.config.model.num_layers, seq_len)
            index = index[arrangement.samples_B]

        def read(place: int, size: int) -> Batch:
            return dataset.rows(index[place : place + size], validation)

        batch = None
        if self.needs_data:
            shares = [read_dp_slice(read, self.plan, at, 0, count) for at in self.ranks_to_read(validation)]
            batch = join_by_micro_batch(shares, self.num_micro_batches)
        if batch is not None:
            require_known_ids(batch, self.config.model.vocab_size)
        by_stage = {} if validation else self._valid_by_stage(dataset, index)
        return LocalBatch(first, batch, num_valid, num_tokens, by_stage, arrangement)

    def _valid_by_stage(self, dataset: SampleStream, index_B: np.ndarray) -> dict[int, int]:
        """Return, for each stage that some micro-batches skip, the valid labels of those that pass through it, on all
        data-parallel ranks; `index_B`: the step's samples."""
        plan, paths = self.plan, self.plan.paths
        size, ranks = plan.micro_batch_size, range(plan.mesh(0).dp_size)
        stages = [stage for stage in range(plan.num_stages) if any(stage not in path for path in paths)]
        if not stages:
            return {}
        starts = [plan.sample_range(rank, len(index_B)).start for rank in ranks]
        valid_M = [
            sum(
                dataset.num_valid_tokens(int(sample), 1)
                for start in starts
                for sample in index_B[start + number * size : start + (number + 1) * size]
            )
            for number in range(len(paths))
        ]
        return {
            stage: sum(count for path, count in zip(paths, valid_M, strict=True) if stage in path) for stage in stages
        }

    def ranks_to_read(self, validation: bool = False) -> list[MeshCoordinates]:
        """Return the ranks whose parts of a batch this one reads: itself, or under perturbation parallelism, which
        validation has none of, a pair of neighbouring data-parallel ranks."""
        at = self.world.at
        if validation or not self.config.optim.perturbation_parallel:
            return [at]
        first = dp_index_of(self.plan, at) // POINTS * POINTS
        size = self.plan.mesh(at.pp).dp_shard
        return [
            replace(at, dp_replicate=index // size, dp_shard=index % size) for index in range(first, first + POINTS)
        ]

    def _count_tokens(self, dataset: SampleStream, first: int, count: int, validation: bool) -> int:
        """Return the positions of global samples that are no padding."""
        lengths_B = dataset.lengths(np.arange(first, first + count), validation)
        return count * self.config.train.seq_len if lengths_B is None else int(lengths_B.sum())

    def feed_stages(self, share: LocalBatch, loss_scale: float = 1.0) -> None:
        """Give the stages their part of a batch."""
        train = self.config.train
        tokens_M: tuple[Tensor, ...] = ()
        labels_M: tuple[Tensor, ...] = ()
        documents = None
        loss = None if train.loss is None else get_component("loss", train.loss)
        if (batch := share.batch) is not None:
            shape = (self.num_micro_batches, -1, self.config.train.seq_len)
            tokens_M, labels_M = (
                self._split(torch.from_numpy(array).view(shape), share.arrangement)
                for array in (batch.tokens_BS, batch.labels_BS)
            )
            if batch.positions_BS is not None:
                positions = torch.from_numpy(batch.positions_BS).view(shape)
                documents = tuple(part for one in positions for part in self._documents(one))
        local_tokens_M, local_labels_M = (
            tuple(part_BS for x_BS in xs for part_BS in self._slices(self._cut(x_BS))) for xs in (tokens_M, labels_M)
        )
        if (groups := share.groups) is not None:
            device = self.world.device
            local_tokens_M, local_labels_M = (groups.tensors(name, device) for name in ("tokens_S", "labels_S"))
            documents = tuple(one.documents(device) for one in groups.micro_batches)
            self.fed_groups = groups
        drops = self.config.model.has_dropout and share.groups is None
        keys_M = self._dropout_keys(share) if drops else None
        counted_M = self._counted(share, tokens_M)
        feed = StageInputs(
            local_tokens_M,
            local_labels_M,
            share.num_valid,
            z_loss_coefficient=train.z_loss,
            loss_scale=loss_scale,
            plugin_loss=loss,
            documents_M=documents,
            dropout_keys_M=keys_M,
        )
        feed.further_M = self._further(tokens_M, labels_M, counted_M, share.batch)
        adapter = self.config.model.adapter
        if adapter is not None and adapter.parts > 1:
            feed.parts_M = parts_of_micro_batches(
                self.plan, self.world.at, self.num_micro_batches, train.global_batch_size, adapter.parts
            )
        if counted_M is not None:
            feed.counted_M = tuple(part_BS for x_BS in counted_M for part_BS in self._slices(self._cut(x_BS)))
        for stage in self.stages.values():
            stage.inputs = feed
            if stage.vocab is not None:
                stage.vocab.inputs = feed
        self.last_fed = (share, tokens_M) if 0 in self.stages else None

    def _split(self, array_MBS: Tensor, arrangement: BucketedStep | None) -> tuple[Tensor, ...]:
        """Split into micro-batches on the device, each without the positions that are padding in all of its samples."""
        device = self.world.device
        if arrangement is None:
            return to_device(array_MBS, device).unbind()
        lengths = arrangement.lengths_M
        cut = (x_BS[:, :length].contiguous() for x_BS, length in zip(array_MBS, lengths, strict=False))
        return tuple(to_device(x_BS, device) for x_BS in cut)

    def _cut(self, x_BS: Tensor) -> Tensor:
        """Return the positions that this rank keeps of tokens, labels or positions of whole sequences.

        Labels were shifted before, so a token and its label stay together on one rank.
        """
        context = self.plan.context_ranks(self.plan.mesh(self.world.at.pp))
        if context.size == 1:
            return x_BS
        runs = kept_positions(x_BS.shape[1], context.size, self.world.at.cp, context.is_contiguous)
        return torch.cat([x_BS[:, run.start : run.stop] for run in runs], dim=1)

    def _slices(self, x_BS: Tensor) -> list[Tensor]:
        """Return the slices in which sequences pass through the pipeline."""
        if self.plan.sequence_slices == 1:
            return [x_BS]
        found = sequence_slices(self.config.model, self.plan, x_BS.shape[1])
        return [x_BS[:, positions.start : positions.stop].contiguous() for positions in found]

    def _counted(self, share: LocalBatch, tokens_M: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Return the positions of each micro-batch that are no padding, for routers; None where all are."""
        if share.arrangement is None or not tokens_M or self.config.model.moe is None:
            return None
        lengths_M = self._by_micro_batch(share.arrangement.lengths_B[share.arrangement.samples_B])
        device = self.world.device
        return tuple(
            torch.arange(tokens_BS.shape[1], device=device) < torch.from_numpy(lengths_B).to(device).unsqueeze(1)
            for tokens_BS, lengths_B in zip(tokens_M, lengths_M, strict=True)
        )

    def _by_micro_batch(self, values_B: np.ndarray) -> list[np.ndarray]:
        """Return the values of each micro-batch's rows on this rank, of one for each place in the global batch."""
        count = self._batch_size
        return [
            np.concatenate(
                [
                    values_B[first : first + rows.stop - rows.start]
                    for rows, first in samples_of_micro_batch(self.plan, self.world.at, micro_batch, count)
                ]
            )
            for micro_batch in range(self.num_micro_batches)
        ]

    def _further(
        self,
        tokens_M: tuple[Tensor, ...],
        labels_M: tuple[Tensor, ...],
        counted_M: tuple[Tensor, ...] | None,
        batch: Batch | None,
    ) -> tuple[tuple[FurtherTokens, ...], ...]:
        """Return the data of each depth of multi-token prediction, which are shifted in whole sequences, for each
        micro-batch."""
        depths = range(1, self.config.model.mtp_layers + 1)
        if batch is None or not depths or not any(stage.computes_loss for stage in self.stages.values()):
            return ()
        positions_M: Sequence[Tensor | None] = [None] * len(tokens_M)
        if batch.positions_BS is not None:
            shape = (self.num_micro_batches, -1, self.config.train.seq_len)
            positions_M = to_device(torch.from_numpy(batch.positions_BS).view(shape), self.world.device).unbind()
        further_M = []
        for index, (tokens_BS, labels_BS) in enumerate(zip(tokens_M, labels_M, strict=True)):
            counted_BS = None if counted_M is None else counted_M[index]
            shifted = [shift_further(tokens_BS, labels_BS, n, positions_M[index], counted_BS) for n in depths]
            further_M.append(tuple(FurtherTokens(*map(self._cut, one)) for one in shifted))
        return tuple(further_M)

    def _documents(self, positions_BS: Tensor) -> list[Documents | None]:
        """Return the documents of each slice of a micro-batch; their lengths are those in whole sequences."""
        whole = Documents.from_positions(positions_BS, self.world.device)
        if whole is None:
            return [None] * self.plan.sequence_slices
        return [replace(whole, positions_BS=part_BS) for part_BS in self._slices(self._cut(whole.positions_BS))]

    def _dropout_keys(self, share: LocalBatch) -> tuple[Tensor, ...]:
        """Return the keys of each micro-batch's samples, in the order of its rows."""
        count = self._batch_size
        places = np.arange(count) if share.arrangement is None else share.arrangement.samples_B
        samples_M = ((share.first_sample + own).tolist() for own in self._by_micro_batch(places))
        return tuple(sample_keys(self.config.seed, samples, self.world.device) for samples in samples_M)

    def num_epochs(self, num_samples: int) -> float:
        """Return the number of passes over the training samples that `num_samples` make up."""
        return num_samples / self.dataset.num_train_samples

    def fed_samples(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the samples of the last step that this rank's first stage was fed, each with its index in the global
        batch.

        Nothing on ranks without the first stage, and of context-parallel ranks, which have parts of the same samples,
        only on the first, of groups of them on the first of each.
        """
        if self.last_fed is None:
            return
        share, tokens_M = self.last_fed
        if share.groups is not None:
            yield from share.groups.led_samples
            return
        if self.world.at.cp > 0:
            return
        at, count = dp_index_of(self.plan, self.world.at), self._batch_size
        places = self.plan.sample_range(at, count)
        before = self.world.at.island * count
        own = slice(None)
        if self.config.optim.perturbation_parallel:
            size = self.plan.local_micro_batch_size(self.world.at.pp)
            own = slice(at % POINTS * size, (at % POINTS + 1) * size)
        rows = (row for tokens_BS in tokens_M for row in tokens_BS[own].cpu().numpy())
        for place, row in zip(places, rows, strict=True):
            if share.arrangement is None:
                yield before + place, row
            else:
                sample = int(share.arrangement.samples_B[place])
                yield before + sample, row[: share.arrangement.lengths_B[sample]]
