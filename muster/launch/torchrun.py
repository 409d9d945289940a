"""Supervision of ranks that torchrun, or a launcher with the same environment variables, has started."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from muster.config.attempt_files import attempt_id
from muster.launch.heartbeat import create_page
from muster.launch.network import address_family, local_interface, resolve
from muster.launch.open_files import require_open_files
from muster.launch.rank_errors import EXIT_STOPPED, read_rank_error, write_exit_file
from muster.launch.watchdog import WatchdogConfig
from muster.spec.errors import MusterError


def open_torchrun_store(rank: int) -> dist.Store:
    env = os.environ
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    is_master = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_master:
        require_open_files(int(env["WORLD_SIZE"]))
    try:
        root = dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise MusterError(f"could not open the store of torchrun on {address}:{port} ({reason})") from error
    return dist.PrefixStore(f"{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", root)


def write_exit_status(run_dir: Path, code: int, world_size: int) -> None:
    """Write exit.json with the first cause that any rank has recorded."""
    errors = [error for rank in range(world_size) if (error := read_rank_error(run_dir, rank)) is not None]
    cause = min(errors, key=lambda error: (not error.primary, error.time), default=None)
    reason = {0: "finished", EXIT_STOPPED: "stopped on request; the same command continues the run"}.get(code, "failed")
    if cause is not None:
        reason = f"rank {cause.rank} on {cause.host}: {cause.sentence}"
    write_exit_file(run_dir, code, reason, cause and cause.rank, cause and cause.host)


def start_watchdog(run_dir: Path, hang_timeout_s: float, store: dist.Store, rank: int, world_size: int) -> None:
    """Start one watchdog process on each node, which watches its ranks as Muster's launcher would; all ranks call it.

    Without a watchdog where nodes have different or unknown numbers of ranks.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not per_node or world_size % per_node:
        return
    store.set(f"watched {rank}", json.dumps([rank, os.getpid(), create_page()]))
    if int(os.environ.get("LOCAL_RANK", -1)) != 0:
        return
    node, host = rank // per_node, os.environ["MASTER_ADDR"]
    if node == 0 and world_size > per_node:
        store.set("watchers meet at", str(_free_port(host)))
    port = int(store.get("watchers meet at")) if world_size > per_node else 0
    ranks = [tuple(json.loads(store.get(f"watched {rank + index}"))) for index in range(per_node)]
    job = WatchdogConfig(
        str(run_dir), hang_timeout_s, world_size, node, world_size // per_node, host, port, ranks, attempt_id(run_dir)
    )
    # In a session of its own, so that it is there to the end, whatever ends the ranks.
    command = [sys.executable, "-m", "muster.launch.watchdog", json.dumps(asdict(job))]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _free_port(host: str) -> int:
    address = resolve(host)
    with socket.create_server(
        (address if local_interface(address) else "", 0), family=address_family(address)
    ) as listener:
        return listener.getsockname()[1]
