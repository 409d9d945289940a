"""The state that peers share: outer parameters with their momentum, and the position in the data."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256

import torch
from torch import Tensor

from muster.config.outer_config import OuterConfig
from muster.launch.peers.links import Ring
from muster.optim.outer.base import OuterMethod, OuterParameter
from muster.parallel.peer_ring import ring_mean


class PeerState:
    """Shared state of one peer, as `muster.launch.peers.client` changes it.

    `samples_of` returns the samples that one peer trains on in a round.
    """

    def __init__(
        self,
        config: OuterConfig,
        method: OuterMethod,
        parameters: Mapping[str, OuterParameter],
        samples_of: Callable[[int], int],
    ) -> None:
        self.config, self.method, self.parameters, self._samples_of = config, method, parameters, samples_of
        self.round = 0
        """Exchanges that it has gone through."""
        self.samples = 0
        """Samples of the rounds before, over all peers."""
        self.change: Tensor | None = None
        """This peer's change in the round, flat, by the order of the parameters."""
        self.mean: Tensor | None = None
        """Mean change of the last exchange."""
        self._lock = threading.Lock()

    def _tensors(self) -> list[Tensor]:
        return [x for one in self.parameters.values() for x in (one.value, one.momentum)]

    def snapshot(self) -> bytes:
        """Return all of it."""
        with self._lock:
            return b"".join(self._parts())

    def digest(self) -> str:
        """Return its SHA-256."""
        found = sha256()
        for part in self._parts():
            found.update(part)
        return found.hexdigest()

    def _parts(self) -> Iterator[bytes]:
        yield json.dumps({"round": self.round, "samples": self.samples}).encode() + b"\n"
        yield from map(_to_bytes, self._tensors())

    def load(self, content: bytes) -> None:
        """Take over a snapshot. Raises ValueError where it is of other parameters."""
        head, _, rest = content.partition(b"\n")
        tensors = self._tensors()
        if len(rest) != sum(x.nbytes for x in tensors):
            raise ValueError(f"{len(rest)} bytes of parameters: expected {sum(x.nbytes for x in tensors)}")
        with self._lock, torch.no_grad():
            start, fields = 0, json.loads(head)
            for x in tensors:
                part = torch.frombuffer(bytearray(rest[start : start + x.nbytes]), dtype=x.dtype)
                x.copy_(part.view(x.shape))
                start += x.nbytes
            self.round, self.samples = int(fields["round"]), int(fields["samples"])

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        """Compute the mean change beside the state and the peer's change. Raises LinkError."""
        change = self.change
        if change is None:  # a joiner, which has trained nothing
            assert not weights[ring.index], "an exchange without a change"
            change = torch.cat([torch.zeros_like(one.value).flatten() for one in self.parameters.values()])
        self.mean = ring_mean(change, ring, weights, self.config.compression)
        return sha256(_to_bytes(self.mean)).hexdigest()

    def apply(self, trained: int) -> None:
        """Step the outer optimizer with the mean change, at the end of a round in which so many peers trained."""
        assert self.mean is not None
        with self._lock:
            sizes = [one.value.numel() for one in self.parameters.values()]
            for one, change in zip(self.parameters.values(), self.mean.split(sizes), strict=True):
                self.method.update(one, change.view_as(one.value))
            self.samples += self._samples_of(self.round) * trained
            self.round += 1


def _to_bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
