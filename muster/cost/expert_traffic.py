"""Transfers of expert parallelism: what a rank passes to the collectives of its experts' layers, by kind.

From here `muster.cost.comm_volume` takes bytes. The dispatchers of `muster.parallel.expert_parallel` make these calls
and no others: a test counts them. Rows that come back depend on the routing; counted as many as were sent, which is
what they are over all ranks together.
"""

from muster.cost.context_traffic import Transfer

COUNT_BYTES = 8
"""Bytes of the number of rows of one expert, an int64."""


def dispatch_transfers(ep: int, rows: int, hidden_size: int) -> tuple[Transfer, ...]:
    """Return the transfers of one forward of a layer whose rank sends `rows` hidden states to their experts: an
    all-to-all there, and one back (arXiv:2006.16668 §3.2). The backward makes the same, with their gradients.

    Example: 1,024 tokens with 2 experts each send 2,048 rows and get as many back.
    """
    return () if ep == 1 else (Transfer("all_to_all", 2, rows * hidden_size),)


def count_bytes(ep: int, num_experts: int) -> int:
    """Return the bytes of the numbers of rows, which a forward exchanges before the rows."""
    return 0 if ep == 1 else num_experts * COUNT_BYTES
