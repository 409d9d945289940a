"""A store of many ranks where a process may open few files."""

import subprocess
import sys

import pytest

from tests.ranks import ROOT

_SERVE = """
import resource, sys
from muster.launch.launcher import open_store
from muster.launch.open_files import require_open_files
from muster.spec.errors import MusterError
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    require_open_files(600)
except MusterError as error:
    sys.exit(str(error))
import socket
store = open_store()
clients = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(600)]
store.set("key", "value")
print(store.get("key").decode(), len(clients))
"""


def serve(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SERVE, str(soft), str(hard)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("soft", [256, 1024])
def test_a_store_of_600_ranks_opens_what_it_needs(soft: int) -> None:
    """Both ends of each connection are in one process here, as the two connections of a rank would be with NCCL."""
    ended = serve(soft, 4096)
    assert (ended.returncode, ended.stdout) == (0, "value 600\n"), ended.stderr


def test_a_hard_limit_that_is_too_low_is_said_before_any_rank_starts() -> None:
    ended = serve(256, 1024)
    assert ended.returncode == 1
    assert "600 ranks needs 1,400 open files, but a process here may open 1,024" in ended.stderr
