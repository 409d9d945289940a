"""What a rank reads of the data, and how its stages get it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
        self._reader = Ahead(self._share)
        self.tokens_fed: Tensor | None = None
        """What the first stage was fed last, (micro-batch, row, position); None on ranks without it."""

    def take(self, first: int) -> Share:
        """The training batch that begins with global sample `first`; the one after it is read meanwhile."""
        return self._reader.take(first, self.config.train.global_batch_size)

    def _share(self, first: int, count: int) -> Share:
        """What this rank trains on of the global samples first … first + count, and how many labels count in all."""
        batch = self.read(self.dataset.train_batch, first, count)
        # A batch in which nothing is to be learnt has a loss of 0.
        return Share(first, batch, max(1, self.dataset.num_valid(first, count)))

    def read(self, read: Callable[[int, int], Batch], first: int, count: int) -> Batch | None:
        """This rank's part of the global samples first … first + count; None on ranks that need no data."""
        if not self.reads:
            return None
        return read_share(read, self.plan, self.world.at, first, count)

    def feed(self, batch: Batch | None, num_valid: int, loss_scale: float = 1.0) -> None:
        """Gives the stages a batch, of a step with so many counted labels."""
        train = self.config.train
        loss = None if train.loss is None else part_of("loss", train.loss)
        if batch is None:
            feed = Feed(torch.empty(0), torch.empty(0), num_valid, train.z_loss, loss_scale, loss)
        else:
            shape = (self.micro_batches, -1, self.config.train.seq_len)
            tokens, labels = (
                torch.from_numpy(array).to(self.world.device).view(shape)
                for array in (batch.tokens_BS, batch.labels_BS)
            )
            documents = None
            if batch.positions_BS is not None:
                positions = torch.from_numpy(batch.positions_BS).view(shape)
                documents = tuple(Documents.of(one, self.world.device) for one in positions)
            feed = Feed(tokens, labels, num_valid, train.z_loss, loss_scale, loss, documents)
        for stage in self.stages.values():
            stage.feed = feed
            if stage.words is not None:
                stage.words.feed = feed
        self.tokens_fed = feed.tokens_MBS if 0 in self.stages else None
