"""The all-reduce of peers around a ring of sockets: the same on all of them to the bit, whoever is fast or slow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.launch.peers.links import Ring
from muster.layout.island_bytes import Compression, island_chunk
from muster.parallel.island_exchange import decode, encode


def ring_mean(values_N: Tensor, ring: Ring, weights: Sequence[int], compression: Compression) -> Tensor:
    """Return the mean of the peers' `values_N` over those whose weight is 1; values are left as they are. Raises
    LinkError."""
    own_N = values_N if weights[ring.index] else torch.zeros_like(values_N)
    return ring_sum(own_N, ring, compression, sum(weights))


def ring_sum(values_N: Tensor, ring: Ring, compression: Compression = "none", divisor: int = 1) -> Tensor:
    """Return the sum of the peers' `values_N`, over `divisor`; values are left as they are.

    A reduce-scatter and an all-gather around the ring, in each of which a peer sends (size − 1) parts. The sum of part
    p begins at the peer of index p and is added to by one peer after another, so that the order of additions follows
    from the ring alone. What travels is compressed at each hop, sums are in the precision of the values; the result of
    a part is compressed once, and all continue with that (PRIME, github.com/PrimeIntellect-ai/prime). Raises LinkError.
    """
    size, index = ring.size, ring.index
    chunk = island_chunk(values_N.numel(), size, compression)
    padded = values_N.new_zeros(size * chunk)
    padded[: values_N.numel()] = values_N
    parts = list(padded.split(chunk))
    for step in range(size - 1):
        arrived = _exchange(ring, encode(parts[(index - step) % size], compression))
        part = (index - step - 1) % size
        parts[part] = decode(arrived, compression, values_N.dtype) + parts[part]
    part = (index + 1) % size
    encoded = encode(parts[part] / divisor, compression)
    parts[part] = decode(encoded, compression, values_N.dtype)
    for _ in range(size - 1):
        encoded = _exchange(ring, encoded)
        part = (part - 1) % size
        parts[part] = decode(encoded, compression, values_N.dtype)
    return torch.cat(parts)[: values_N.numel()]


def _exchange(ring: Ring, encoded: Tensor) -> Tensor:
    arrived = ring.exchange(encoded.cpu().numpy().tobytes())
    return torch.frombuffer(bytearray(arrived), dtype=torch.uint8).to(encoded.device)
