"""Settings of a swarm."""

from dataclasses import dataclass

from muster.schedule.swarm.wiring import Method


@dataclass(frozen=True)
class SwarmSettings:
    """Numbers that the trainer of a swarm decides by."""

    num_stages: int
    wiring: Method = "throughput"
    in_flight: int | None = None
    """Micro-batches that may be under way at once; None: four times the peers."""
    timeout_s: float = 60.0
    """Time without an answer after which a pass is sent to another peer."""
    rebalance_every: int = 10
    """Steps after which a peer may move to another stage; 0: never."""
    silence_s: float = 10.0
    """Silence after which a peer is taken for dead, and the trainer by its peers."""
    beat_s: float = 1.0
    seed: int = 0
    """Seed of the choice among peers with as much work."""
