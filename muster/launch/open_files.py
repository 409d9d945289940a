"""The number of files that a process may open, of which a job's store needs some for each rank."""

import resource

from muster.spec.errors import MusterError

STORE_CONNECTIONS_PER_RANK = 1
"""Connections of a rank to the store, which all its threads share (`store_waits.py`)."""
_OTHER_FILES = 200
"""Open files of a launcher beside its store's connections: logs, heartbeats, libraries."""


def require_open_files(num_ranks: int) -> None:
    """Raise this process's limit of open files as far as it may, for a store of so many ranks.

    Raises MusterError where that isn't far enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = STORE_CONNECTIONS_PER_RANK * num_ranks + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
        if allowed < needed:
            raise MusterError(
                f"the store of {num_ranks:,} ranks needs {needed:,} open files, but a process here may open {hard:,}:"
                f" raise the hard limit, as with 'ulimit -Hn {needed}' as root or LimitNOFILE in systemd"
            )
