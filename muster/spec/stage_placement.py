"""Placement of stages: the pipeline rank of each stage, in model order."""


def looped_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return rounds in the same direction, as in interleaved schedules: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks


def wave_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return a placement that goes back and forth: 0 1 2 2 1 0 with two chunks (a V), and so on; at the turns nothing
    is sent."""
    there = tuple(range(num_ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there[::-1] if chunk % 2 else there))


def bidirectional_placement(placement: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Return the placement of two replicas: one as given, the other mirrored from the opposite end."""
    return placement + tuple(num_ranks - 1 - rank for rank in placement)
