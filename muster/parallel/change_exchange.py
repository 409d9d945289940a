"""Exchange of parameter changes between islands: whole or as factors of low rank, with what that lost before."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from muster.config.outer_config import OuterConfig
from muster.layout.island_bytes import Compression, travels_in_factors, whole_blocks
from muster.model.init import keyed_generator
from muster.parallel.axis import IslandAxis
from muster.parallel.island_exchange import mean_over_islands


class ChangeExchange:
    """Means of parameter changes over islands.

    With `error_feedback` an island adds to its change what the exchange before lost of it (arXiv:1901.09847), so that
    no part of a change is lost, only late. With `low_rank` a matrix M of m × n travels as P (m, rank) and Q (n, rank):
    P = M · start, averaged over the islands and made orthonormal, then Q = Mᵀ · P, averaged; the mean is P · Qᵀ
    (PowerSGD, arXiv:1905.13727, algorithm 1; low rank before integers: arXiv:2506.21263 §2.4).
    """

    def __init__(self, config: OuterConfig, axis: IslandAxis, parameters: Mapping[str, Tensor]) -> None:
        self.config = config
        self.axis = axis
        self.errors: dict[str, Tensor] = (
            {name: torch.zeros_like(x) for name, x in parameters.items()} if config.error_feedback else {}
        )
        """Losses of the exchanges before in this island's changes, by parameter."""
        self.measured_ranks: dict[str, int] = {}
        """Numerical rank of the last mean of each change that travelled in factors (rank_window)."""

    @property
    def state_bytes(self) -> int:
        """Bytes of what the exchanges before lost."""
        return sum(error.nbytes for error in self.errors.values())

    def mean(self, changes: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the islands' mean of each change; all islands have the same bits on devices of one kind.

        `starts` has a matrix (n, rank) for each change that travels in factors, the same on all islands.
        """
        if self.errors:
            changes = {name: change + self.errors[name] for name, change in changes.items()}
        lefts = {name: change @ starts[name] for name, change in changes.items() if name in starts}
        whole = {name: change for name, change in changes.items() if name not in starts}
        first, lost = self._average({**whole, **lefts})
        means = {name: first[name] for name in whole}
        if self.errors:
            self._remember({name: lost[name] for name in whole})
        if lefts:
            lefts = {name: orthonormal_columns(first[name]) for name in lefts}
            rights = {name: changes[name].mT @ left for name, left in lefts.items()}
            second, lost = self._average(rights)
            means |= {name: left @ second[name].mT for name, left in lefts.items()}
            if self.config.rank_window is not None:  # P is orthonormal: P · Qᵀ has the singular values of Q
                tolerance = self.config.rank_tolerance
                self.measured_ranks |= {name: numerical_rank(right, tolerance) for name, right in second.items()}
            if self.errors:
                sent = {name: left @ (rights[name] - lost[name]).mT for name, left in lefts.items()}
                self._remember({name: changes[name] - part for name, part in sent.items()})
        return means

    def _average(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the means of tensors in one exchange, and with error feedback what it lost of each."""
        if not values:
            return {}, {}
        flat = flatten_in_blocks(values.values(), self.config.compression)
        error = torch.empty_like(flat) if self.errors else None
        mean = mean_over_islands(flat, self.axis, self.config.compression, error)
        how = self.config.compression
        return unflatten(mean, values, how), {} if error is None else unflatten(error, values, how)

    def _remember(self, lost: Mapping[str, Tensor]) -> None:
        """Keep what an exchange has lost of this island's changes for the next one."""
        for name, error in lost.items():
            self.errors[name].copy_(error)


def right_start(name: str, step: int, offset: tuple[int, ...], rank: int, momentum: Tensor) -> Tensor:
    """Return the orthonormal matrix (n, rank) by which a change (m, n) of the step is projected.

    It lies where the outer momentum, which all islands share, is longest: the rows' space of the changes before.
    PowerSGD begins with the Q of the exchange before for that, which a run that resumes under another plan wouldn't
    have. Without momentum it is random. `offset`: first row and column of the change in the whole matrix.
    """
    drawn = torch.empty(momentum.shape[1], rank, dtype=torch.float32)
    drawn.normal_(generator=keyed_generator(0, f"outer/{name}/{step}/{offset}"))
    start = drawn.to(momentum)
    if momentum.any():
        start = momentum.mT @ orthonormal_columns(momentum @ start)
    return orthonormal_columns(start)


def start_matrices(
    rank_of: Callable[[str], int | None],
    step: int,
    offsets: Mapping[str, tuple[int, ...]],
    momenta: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return `right_start` of each parameter whose change travels in factors. `rank_of`: their rank by parameter."""
    ranks = {name: rank_of(name) for name in momenta}
    return {
        name: right_start(name, step, offsets[name], rank, momenta[name])
        for name, rank in ranks.items()
        if rank is not None and travels_in_factors(tuple(momenta[name].shape), rank)
    }


def numerical_rank(x_MN: Tensor, tolerance: float) -> int:
    """Return the number of singular values above `tolerance` times the largest; 0 for zeros and for NaN."""
    if not bool(x_MN.isfinite().all()):
        return 0
    values = torch.linalg.svdvals(x_MN.float())
    return int((values > tolerance * values[0]).sum())


def orthonormal_columns(x_MR: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns' space."""
    return torch.linalg.qr(x_MR).Q


def flatten_in_blocks(values: Iterable[Tensor], compression: Compression) -> Tensor:
    """Return tensors one after another, each followed by zeros to the end of its last block of integers.

    No scale is so shared by two tensors: one of which several ranks of an island have copies would otherwise differ
    between these after an exchange, by its neighbours.
    """
    flat = [value.flatten() for value in values]
    return torch.cat([pad(one, (0, whole_blocks(one.numel(), compression) - one.numel())) for one in flat])


def unflatten(flat: Tensor, like: Mapping[str, Tensor], compression: Compression) -> dict[str, Tensor]:
    """Return the tensors that `flatten_in_blocks` has made one of, in the shapes of `like`."""
    parts = flat.split([whole_blocks(value.numel(), compression) for value in like.values()])
    return {
        name: part[: value.numel()].view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)
    }
