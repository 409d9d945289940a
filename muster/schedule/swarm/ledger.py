"""Account of one step: of each micro-batch and stage exactly one gradient counts, whatever is retried or lost."""

from dataclasses import dataclass, field

Unit = tuple[int, int]
"""Stage and micro-batch."""


@dataclass
class Ledger:
    """Peers that hold the gradients of a step. A gradient counts once it is accepted; a second one of the same unit
    never does, and one whose peer is lost has to be computed anew."""

    num_stages: int
    num_micro_batches: int
    holders: dict[Unit, str] = field(default_factory=dict)
    """Peer whose gradient counts, by unit."""

    def accept(self, unit: Unit, peer: str) -> bool:
        """Let a peer's gradient count; returns False where another one, or the same, does already."""
        if unit in self.holders:
            return False
        self.holders[unit] = peer
        return True

    def lose(self, peer: str) -> list[Unit]:
        """Forget the gradients that a peer held; returns their units, which have to be computed anew."""
        lost = sorted(unit for unit, holder in self.holders.items() if holder == peer)
        for unit in lost:
            del self.holders[unit]
        return lost

    def micro_batches(self, peer: str, stage: int) -> list[int]:
        """Return the micro-batches whose gradients a peer contributes to a stage's sum."""
        return sorted(mb for (own, mb), holder in self.holders.items() if own == stage and holder == peer)

    def is_complete(self, stage: int) -> bool:
        """Return whether all micro-batches of a stage count."""
        return all((stage, micro_batch) in self.holders for micro_batch in range(self.num_micro_batches))
