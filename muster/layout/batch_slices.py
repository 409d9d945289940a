"""Slices of a micro-batch's sequences, whose collectives travel beside each other's compute (`tp_overlap: domino`)."""


def batch_slices(sequences: int) -> tuple[range, range]:
    """Return the sequences of either slice, the first one of which leads.

    Example: of five the first three, and the other two.
    """
    middle = -(-sequences // 2)
    return range(middle), range(middle, sequences)
