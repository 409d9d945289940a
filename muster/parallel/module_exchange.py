"""Exchange of parameter changes between islands that share some modules: each gets the means of its own."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.outer_config import OuterConfig
from muster.layout.island_bytes import Compression, island_chunk
from muster.layout.module_paths import ModulePaths
from muster.parallel.axis import IslandAxis
from muster.parallel.change_exchange import ChangeExchange, flatten_in_blocks, unflatten
from muster.parallel.island_exchange import decode, encode


class ModuleExchange(ChangeExchange):
    """Means of parameter changes over the islands with the same module, weighted by the samples of their paths. What
    an island has for itself stays there."""

    def __init__(
        self,
        config: OuterConfig,
        axis: IslandAxis,
        parameters: Mapping[str, Tensor],
        paths: ModulePaths,
        sizes: Sequence[int],
    ) -> None:
        """`sizes`: training samples of each path."""
        super().__init__(config, axis, parameters)
        self.paths = paths
        self.sizes = sizes

    def mean(self, changes: Mapping[str, Tensor], starts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of each change over the islands that share it, the same bits on all of these."""
        means = dict(changes)
        for names in self.paths.exchanged(list(changes)):
            shared, how = {name: changes[name] for name in names}, self.config.compression
            flat = flatten_in_blocks(shared.values(), how)
            means |= unflatten(means_over_members(flat, self.axis, how, self._weights(names[0])), shared, how)
        return means

    def _weights(self, name: str) -> list[dict[int, int]]:
        """Return for each island the weights of those whose mean of a parameter it gets (arXiv:2403.10616 §2.6)."""
        everyone = range(self.axis.size)
        return [{n: self.sizes[self.paths.path_of(n)] for n in self.paths.members(one, name)} for one in everyone]


def means_over_members(
    values_N: Tensor, axis: IslandAxis, compression: Compression, weights: Sequence[Mapping[int, int]]
) -> Tensor:
    """Return the mean over those islands for which this one has weights, `weights[axis.index]`.

    As `mean_over_islands`: each island owns an equal part of the elements, adds what all have of it, once for each
    distinct mean, in the order of the islands, and sends each island the mean that is its own. A rank so sends as many
    bytes as there, and islands with the same weights have the same bits.
    """
    chunk = island_chunk(values_N.numel(), axis.size, compression)
    if not chunk:
        return values_N.clone()
    padded = values_N.new_zeros(axis.size * chunk)
    padded[: values_N.numel()] = values_N
    sent = torch.stack([encode(part, compression) for part in padded.split(chunk)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    parts = [decode(part, compression, values_N.dtype) for part in received]
    means: dict[tuple[tuple[int, int], ...], Tensor] = {}
    for own in weights:
        if (key := tuple(sorted(own.items()))) not in means:
            means[key] = encode(_weighted_mean(parts, key), compression)
    answers = torch.stack([means[tuple(sorted(own.items()))] for own in weights])
    own_means = torch.empty_like(answers)
    dist.all_to_all_single(own_means, answers, group=axis.group)
    return torch.cat([decode(part, compression, values_N.dtype) for part in own_means])[: values_N.numel()]


def _weighted_mean(parts: Sequence[Tensor], weights: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean of those of `parts` that (index, weight) pairs name; equal weights leave rounding as in a plain
    mean."""
    if len({weight for _, weight in weights}) == 1:
        weights = [(index, 1) for index, _ in weights]
    total = torch.zeros_like(parts[0])
    for number, (index, weight) in enumerate(weights):
        part = parts[index] if weight == 1 else parts[index] * weight
        total = part.clone() if number == 0 else total.add_(part)
    return total / sum(weight for _, weight in weights)
