"""Waiting for keys of a store, without keeping others off its connection.

A store's client lets one operation at a time onto its connection, and a wait for a key lasts until that is set. Asking
again and again, several threads of a rank can wait, and NCCL's threads ask, on a single one, so that the store of a job
has as many connections as there are ranks.
"""

from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep

import torch.distributed as dist

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.25
"""Shortest and longest time between two questions: an eighth of the time waited so far, between these."""


def wait_for_keys(store: dist.Store, keys: Sequence[str], limit: timedelta) -> None:
    """Wait until all keys are set. Raises DistStoreError after `limit`."""
    begin = monotonic()
    while not store.check(list(keys)):
        waited_s = monotonic() - begin
        if waited_s > limit.total_seconds():
            raise dist.DistStoreError(f"{keys[0]} was not set within {limit.total_seconds():.0f} s")
        sleep(min(max(waited_s / 8, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
