"""Muster's launcher: starts one process per rank on this machine, owns their store, and reports one cause of
failure."""

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from muster.launch.exit_status import ExitStatus
from muster.launch.fork_server import RANK_PYTHON
from muster.launch.network import address_family, format_endpoint
from muster.launch.nodes.elastic_nodes import ElasticNodes
from muster.launch.nodes.launcher_group import LauncherGroup
from muster.launch.nodes.node_supervisor import NodeSupervisor
from muster.launch.nodes.rank_agent import RankAgent
from muster.launch.nodes.rendezvous_config import rank_environment
from muster.launch.open_files import require_open_files
from muster.launch.rank_errors import error_path, hang_path, log_path
from muster.launch.rank_starter import RankStarter, quiet_pytorch
from muster.launch.recovery import Elasticity, ElasticSupervisor
from muster.launch.supervisor import POLL_INTERVAL_S, RankSupervisor
from muster.spec.errors import MusterError

_STORE_TIMEOUT_S = 60.0
"""Longest time that node 0 may take to open its store once the launchers have agreed."""


def launch(
    command_for_rank: Callable[[int, str], list[str]],
    num_ranks: int,
    run_dir: Path,
    grace_s: float = 5.0,
    hang_timeout_s: float | None = None,
    group: LauncherGroup | None = None,
    timeout_s: float | None = None,
    elastic: Elasticity | None = None,
    starter: RankStarter | None = None,
) -> ExitStatus:
    """Run `command_for_rank(rank, "host:port of the store")` for every rank; returns how the job ended.

    Exit code 0: all ranks finished; 75: they stopped on request; otherwise the code of the rank that failed first.
    After a failure the other ranks have `grace_s` seconds to end by themselves. When no rank makes progress for
    `hang_timeout_s` seconds, the rank that the others wait for is named and all are killed; after `timeout_s` seconds
    all are killed in any case. Rank 0 writes to this process's output, the others to `run_dir/logs/rank-R.txt`;
    `run_dir/exit.json` keeps the exit status. The first SIGTERM or SIGINT is passed on as SIGTERM; a later SIGINT
    kills. No rank outlives this call.

    With `elastic` the ranks that are left go on when others are lost (`recovery.py`); the command of a spare is that
    for rank -1, and its module calls `member_main`.

    With a `group` each node's launcher calls this for its own `num_ranks` ranks, with a run directory on a shared file
    system; all return the same status, unless node 0 is lost.

    Must run in the main thread. Raises MusterError when the run directory can't be written or a rank can't be started;
    what fails here while they run ends them, as the loss of a rank would.
    """
    quiet_pytorch(elastic is not None)
    first = 0 if group is None else group.node_rank * num_ranks
    environment = {} if group is None else rank_environment(group.config, group.interface)
    with contextlib.ExitStack() as held:
        starter = starter or held.enter_context(RankStarter())
        if group is None or group.is_coordinator:  # whose limit ranks inherit
            require_open_files(num_ranks * (1 if group is None else group.num_nodes))
        starter.begin(command_for_rank(first, ""), environment)
        store = None
        if group is None or group.is_coordinator:
            _remove_previous_outcome(run_dir)
            store = open_store() if group is None else open_store(address=group.address)
            address = format_endpoint(store.host, store.port)
            if group is not None:
                group.send("start", store=address)
        else:
            address = group.wait_for("start", _STORE_TIMEOUT_S)[0]["store"]
        own = run_dir, grace_s, hang_timeout_s
        if group is None:
            supervisor = RankSupervisor(*own) if elastic is None else ElasticSupervisor(*own, elastic)
        elif elastic is None:
            supervisor = NodeSupervisor(*own, group, num_ranks)
        elif group.is_coordinator:
            supervisor = ElasticNodes(*own, elastic, group, num_ranks, address)
        else:
            supervisor = RankAgent(*own, group)
        supervisor.starter = starter
        held.enter_context(_forward_signals(supervisor))
        try:
            starter.await_imports(lambda: not supervisor.stop_requested)
            ranks = range(first, first + num_ranks)
            supervisor.start(lambda rank: command_for_rank(rank, address), ranks, environment)
            begin = time.monotonic()
            while supervisor.poll():
                supervisor.kill_requested |= timeout_s is not None and time.monotonic() - begin > timeout_s
                time.sleep(POLL_INTERVAL_S)
        finally:
            supervisor.shut_down()
    status = supervisor.exit_status()
    if supervisor.writes_exit_file:
        status.write(run_dir)
    return status


def rank_command(module: str, folder: Path, world_size: int) -> Callable[[int, str], list[str]]:
    """Return a function from a rank's number, -1 for a spare, and the store's endpoint to the command of a module that
    calls `rank_main`."""
    python = [*RANK_PYTHON, module, str(folder)]

    def command(rank: int, store: str) -> list[str]:
        place = ["--rank", str(rank)] if rank >= 0 else ["--spare"]
        return [*python, *place, "--world-size", str(world_size), "--store", store]

    return command


def open_store(port: int = 0, address: str = "127.0.0.1") -> dist.TCPStore:
    """Open a store at an address of this machine, on `port` (0: any free one).

    With the default address only this machine reaches it. Raises MusterError when the port is taken.
    """
    listener = socket.socket(address_family(address))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else error
        raise MusterError(f"could not listen on port {port} of {address} ({reason}): give another one, or 0") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextlib.contextmanager
def _forward_signals(supervisor: RankSupervisor) -> Iterator[None]:
    """Turn SIGTERM and SIGINT into requests to the supervisor."""

    def on_signal(number: int, _frame: object) -> None:
        supervisor.kill_requested |= supervisor.stop_requested and number == signal.SIGINT
        supervisor.stop_requested = True

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _remove_previous_outcome(run_dir: Path) -> None:
    """Remove the exit status and the errors of an earlier attempt."""
    try:
        log_path(run_dir, 0).parent.mkdir(parents=True, exist_ok=True)
        for path in [
            run_dir / "exit.json",
            hang_path(run_dir),
            *error_path(run_dir, 0).parent.glob("rank-*.error.json"),
            *error_path(run_dir, 0).parent.glob("generation-*.json"),
        ]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise MusterError(f"can't write the run directory {run_dir}: {error.strerror}") from error
