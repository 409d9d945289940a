"""A store of many ranks where a process may open few files."""

import subprocess
from pathlib import Path

import pytest

from tests import forks

_SERVE = """
import os, resource, socket, sys
import torch.distributed as dist
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
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
clients = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(ranks - 1)]
print(dist.TCPStore("127.0.0.1", store.port, is_master=False).get("key").decode(), 1 + len(clients), flush=True)
os._exit(0)
"""


def serve(soft: int, hard: int, folder: Path, ranks: int = 600) -> subprocess.CompletedProcess[str]:
    (script := folder / "serve.py").write_text(_SERVE)
    return forks.run(str(soft), str(hard), str(ranks), program=script)


@pytest.mark.parametrize("soft", [256, 1024])
def test_a_store_of_600_ranks_serves_them_where_a_process_may_open_1024_files(soft: int, tmp_path: Path) -> None:
    ended = serve(soft, 1024, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "value 600\n"), ended.stderr


def test_a_hard_limit_that_is_too_low_is_said_before_any_rank_starts(tmp_path: Path) -> None:
    ended = serve(256, 1024, tmp_path, ranks=900)
    assert ended.returncode == 1
    assert "900 ranks needs 1,100 open files, but a process here may open 1,024" in ended.stderr
