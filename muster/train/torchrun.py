"""Ranks that torchrun, or a launcher that speaks as it does, has started: each process of the command is one."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from muster.config.load_config import ResolvedConfig
from muster.launch.heartbeat import create_page
from muster.launch.network import address_family, local_interface, resolve
from muster.launch.rank_errors import EXIT_STOPPED, read_rank_error, run_guarded, write_exit_file
from muster.launch.shared_filesystem import require_shared_run_dir
from muster.launch.watchdog import WatchdogConfig, attempt_id
from muster.planner.auto import choose_plan
from muster.spec.errors import ConfigError, MusterError
from muster.train.run import PREPARE_TIMEOUT, TrainOptions, locked_run_dir, prepare
from muster.train.worker import exit_process, run_rank


def train_under_torchrun(resolved: ResolvedConfig, options: TrainOptions) -> int:
    """One of torchrun's ranks; rank 0 prepares the run directory while the others wait for its word."""
    run_dir, rank, world_size = options.run_dir, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.nodes is not None:
        raise ConfigError(
            "--nodes under torchrun, which starts the ranks of all nodes itself: leave out one of the two"
        )
    if options.nproc not in (None, world_size):
        raise ConfigError(f"--nproc {options.nproc} under torchrun, which started {world_size} processes: leave it out")
    store = _torchrun_store(rank)
    with ExitStack() as held:
        if rank == 0:
            verdict = "failed"
            try:
                held.enter_context(locked_run_dir(run_dir, resolved.config.train.remote_checkpoint_dir))
                verdict = "train" if _prepare_as_torchrun(resolved, options, world_size) else "finished"
            finally:
                store.set("prepared", verdict)
        store.wait(["prepared"], PREPARE_TIMEOUT)
        verdict = store.get("prepared").decode()
        if verdict != "train":
            return int(verdict == "failed")  # rank 0 says why
        require_shared_run_dir(run_dir, rank, store)
        start_watchdog(run_dir, resolved.config.train.hang_timeout_s, store, rank, world_size)
        code = run_guarded(run_dir, rank, lambda: run_rank(run_dir, store, rank, world_size), announce=rank == 0)
        if rank == 0:
            _write_exit_status(run_dir, code, world_size)
        return exit_process(code)


def _torchrun_store(rank: int) -> dist.Store:
    env = os.environ
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    is_master = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        root = dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise MusterError(f"could not open the store of torchrun on {address}:{port} ({reason})") from error
    return dist.PrefixStore(f"{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", root)


def _prepare_as_torchrun(resolved: ResolvedConfig, options: TrainOptions, world_size: int) -> bool:
    """Prepares; what is wrong is written to exit.json too, because torchrun's own exit code says nothing."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = world_size // local if local and world_size % local == 0 else 1
    try:
        return prepare(resolved, choose_plan(resolved, world_size, nodes), options)
    except MusterError as error:
        write_exit_file(options.run_dir, error.exit_code, str(error), rank=0, host=socket.gethostname())
        raise


def _write_exit_status(run_dir: Path, code: int, world_size: int) -> None:
    """Writes exit.json with the first cause that any rank has named."""
    errors = [error for rank in range(world_size) if (error := read_rank_error(run_dir, rank)) is not None]
    cause = min(errors, key=lambda error: (not error.primary, error.time), default=None)
    reason = {0: "finished", EXIT_STOPPED: "stopped on request; the same command continues the run"}.get(code, "failed")
    if cause is not None:
        reason = f"rank {cause.rank} on {cause.host}: {cause.sentence}"
    write_exit_file(run_dir, code, reason, cause and cause.rank, cause and cause.host)


# ----------------------------------------------------------------------------------------------------------------------
# Watching


def start_watchdog(run_dir: Path, hang_timeout_s: float, store: dist.Store, rank: int, world_size: int) -> None:
    """Lets a process on each node watch its ranks, as Muster's launcher would; all ranks call it.

    Where nodes have different numbers of ranks, or none can be told, nobody watches.
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
