"""A store of many ranks where a process may open few files."""

import subprocess
import sys

import pytest

from tests.ranks import ROOT

_SERVE = """
import resource, subprocess, sys
from muster.launch.launcher import open_store
from muster.launch.open_files import require_open_files
from muster.spec.errors import MusterError
soft, hard, ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    require_open_files(ranks)
except MusterError as error:
    sys.exit(str(error))
store = open_store()
store.set("key", "value")
clients = '''
import socket, sys, torch.distributed as dist
clients = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]) - 1)]
print(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False).get("key").decode(), 1 + len(clients))
'''
sys.exit(subprocess.run([sys.executable, "-c", clients, str(store.port), str(ranks)]).returncode)
"""


def serve(soft: int, hard: int, ranks: int = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SERVE, str(soft), str(hard), str(ranks)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("soft", [256, 1024])
def test_a_store_of_600_ranks_serves_them_where_a_process_may_open_1024_files(soft: int) -> None:
    ended = serve(soft, 1024)
    assert (ended.returncode, ended.stdout) == (0, "value 600\n"), ended.stderr


def test_a_hard_limit_that_is_too_low_is_said_before_any_rank_starts() -> None:
    ended = serve(256, 1024, ranks=900)
    assert ended.returncode == 1
    assert "900 ranks needs 1,100 open files, but a process here may open 1,024" in ended.stderr
