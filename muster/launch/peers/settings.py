"""Settings of a coordinator of peers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Numbers that the coordinator decides by."""

    min_peers: int = 1
    """Peers without which no round begins or ends."""
    beat_s: float = 1.0
    silence_s: float = 10.0
    """Silence after which a peer is taken for dead, and the coordinator by its peers."""
    reconnect_s: float = 2.0
    """Time that a peer whose connection is lost has to come back before the others go on without it."""
    straggler_s: float = 600.0
    """Longest wait for the last peers of a round once the first has arrived."""
    measure_every: int = 20
    """Rounds after which the bandwidth between peers is measured again; 0: it isn't measured."""
