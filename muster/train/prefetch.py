"""Prefetching: the data of the next step is read while this one computes."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from muster.data.dataset import Batch
from muster.data.length_bucketing import BucketedStep
from muster.train.grouped_batches import GroupedStep


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a step's data."""

    first_sample: int
    """First global sample of the step."""
    batch: Batch | None
    """Local samples; None where the rank needs no data."""
    num_valid: int
    """Non-ignored labels of the whole step, over all ranks."""
    num_tokens: int
    """Positions of the whole step that are no padding."""
    valid_by_stage: Mapping[int, int] = field(default_factory=dict)
    """Stage → those of the micro-batches that pass through it, where some skip it."""
    arrangement: BucketedStep | None = None
    """Placement of the samples, if they are bucketed by length."""
    groups: GroupedStep | None = None
    """This rank's micro-batches in place of `batch`, if samples are assigned to groups of ranks."""

    @property
    def num_local_valid(self) -> int:
        """Number of labels that count among those that this rank has read."""
        if self.groups is not None:
            return self.groups.num_valid
        return 0 if self.batch is None else self.batch.num_valid_tokens


class Prefetcher:
    """Returns batches of the stream, and reads the following one in a thread of its own.

    The prefetched batch is thrown away when the stream continues elsewhere.
    """

    def __init__(self, read: Callable[[int, int], LocalBatch]) -> None:
        self._read = read
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[tuple[int, int], Future[LocalBatch]] | None = None

    def forget(self) -> None:
        """Drop what was read ahead, since the samples are others now."""
        if self._next is not None:
            self._next[1].cancel()
            self._next = None

    def take(self, first: int, count: int, stride: int | None = None) -> LocalBatch:
        """Return the batch of the global samples first … first + count; waits until it is read. The following one is
        expected `stride` samples later (None: behind it)."""
        guess, self._next = self._next, None
        share = guess[1].result() if guess is not None and guess[0] == (first, count) else self._read(first, count)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "data")
        following = (first + (stride or count), count)
        self._next = (following, self._thread.submit(self._read, *following))
        return share
