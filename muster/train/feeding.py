"""What a rank reads of the data, and how its stages get it."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from muster.data.by_length import Arrangement, arrange
from muster.data.dataset import Batch, Samples
from muster.data.share import read_share
from muster.model.documents import Documents
from muster.parallel.feed import Feed
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.spec.mesh import data_index
from muster.spec.parts import part_of
from muster.spec.plan import Plan
from muster.spec.run import RunConfig
from muster.train.ahead import Ahead, Share


class Feeder:
    """Gives this rank's stages their part of each global batch."""

    def __init__(
        self, config: RunConfig, plan: Plan, world: World, dataset: Samples, stages: Mapping[int, DecoderStage]
    ) -> None:
        self.config, self.plan, self.world, self.dataset, self.stages = config, plan, world, dataset, stages
        self.micro_batches = plan.num_micro_batches(config.workload, data_index(plan, world.at))
        self.reads = config.data.packing != "concatenate" or plan.spread_vocab
        """Whether any stage of this rank needs data."""
        self.reads |= any(stage.is_first or stage.is_last for stage in stages.values())
        self._reader = Ahead(self._next)
        self._fed: tuple[Share, tuple[Tensor, ...]] | None = None
        """What the first stage was fed last."""

    def take(self, first: int) -> Share:
        """The training batch that begins with global sample `first`; the one after it is read meanwhile."""
        return self._reader.take(first, self.config.train.global_batch_size)

    def _next(self, first: int, count: int) -> Share:
        return self.read(self.dataset, first, count)

    def read(self, dataset: Samples, first: int, count: int, held_out: bool = False) -> Share:
        """What this rank computes of the global samples first … first + count, and how much they are in all."""
        index, seq_len, arrangement = np.arange(first, first + count), self.config.train.seq_len, None
        num_tokens = count * seq_len
        if (lengths_B := dataset.lengths(index, held_out)) is not None:
            arrangement = arrange(lengths_B, self.plan, self.config.model.num_layers, seq_len)
            index, num_tokens = index[arrangement.samples_B], int(lengths_B.sum())

        def read(place: int, size: int) -> Batch:
            return dataset.rows(index[place : place + size], held_out)

        batch = read_share(read, self.plan, self.world.at, 0, count) if self.reads else None
        # A batch in which nothing is to be learnt has a loss of 0.
        num_valid = 1 if held_out else max(1, dataset.num_valid(first, count))
        return Share(first, batch, num_valid, num_tokens, arrangement)

    def feed(self, share: Share, loss_scale: float = 1.0) -> None:
        """Gives the stages their part of a step."""
        train, tokens_M, labels_M, documents = self.config.train, (), (), None
        loss = None if train.loss is None else part_of("loss", train.loss)
        if (batch := share.batch) is not None:
            shape = (self.micro_batches, -1, self.config.train.seq_len)
            tokens_M, labels_M = (
                self._cut(torch.from_numpy(array).view(shape), share.arrangement)
                for array in (batch.tokens_BS, batch.labels_BS)
            )
            if batch.positions_BS is not None:
                positions = torch.from_numpy(batch.positions_BS).view(shape)
                documents = tuple(Documents.of(one, self.world.device) for one in positions)
        feed = Feed(tokens_M, labels_M, share.num_valid, train.z_loss, loss_scale, loss, documents)
        for stage in self.stages.values():
            stage.feed = feed
            if stage.words is not None:
                stage.words.feed = feed
        self._fed = (share, tokens_M) if 0 in self.stages else None

    def _cut(self, array_MBS: Tensor, arrangement: Arrangement | None) -> tuple[Tensor, ...]:
        """By micro-batch, without what is padding in all of its samples."""
        device = self.world.device
        if arrangement is None:
            return tuple(array_MBS.to(device).unbind())
        lengths = arrangement.lengths_M
        return tuple(x_BS[:, :length].contiguous().to(device) for x_BS, length in zip(array_MBS, lengths, strict=False))

    def epochs_of(self, samples: int) -> float:
        """How often that is all training samples."""
        return samples / self.dataset.num_train_samples

    def samples_fed(self) -> Iterator[tuple[int, np.ndarray]]:
        """The step's samples that this rank's first stage was fed last, each with its number in the step; none on other
        ranks."""
        if self._fed is None:
            return
        share, tokens_M = self._fed
        at, count = data_index(self.plan, self.world.at), self.config.train.global_batch_size
        places = self.plan.samples_of(at, count)
        rows = (row for tokens_BS in tokens_M for row in tokens_BS.cpu().numpy())
        for place, row in zip(places, rows, strict=True):
            if share.arrangement is None:
                yield place, row
            else:
                sample = int(share.arrangement.samples_B[place])
                yield sample, row[: share.arrangement.lengths_B[sample]]
