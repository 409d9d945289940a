"""Where the stages of a pipeline lie: the pipeline rank of each, in the order of the model's layers."""


def looped_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Round after round in the same direction, as in interleaved schedules: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks


def wave_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """There and back: 0 1 2 2 1 0 with two chunks (a V), and so on; where it turns, nothing has to be sent."""
    there = tuple(range(num_ranks))
    return tuple(rank for chunk in range(chunks) for rank in (there[::-1] if chunk % 2 else there))


def bidirectional_placement(placement: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Two replicas: one placed as given, the other from the opposite end."""
    return placement + tuple(num_ranks - 1 - rank for rank in placement)
