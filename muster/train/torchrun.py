"""`muster train` under torchrun, or a launcher with the same environment: each process of the command is one rank."""

import os
import socket
from contextlib import ExitStack

from muster.config.load_config import ResolvedConfig
from muster.launch.launcher_words import LauncherWords, Membership
from muster.launch.rank_errors import run_guarded, write_exit_file
from muster.launch.rank_process import exit_process
from muster.launch.shared_filesystem import require_shared_run_dir
from muster.launch.torchrun import open_torchrun_store, start_watchdog, write_exit_status
from muster.planner.auto import choose_plan
from muster.spec.errors import ConfigError, MusterError
from muster.train.preflight import TrainOptions
from muster.train.prepare import PREPARE_TIMEOUT, prepare
from muster.train.run_directory import locked_run_dir
from muster.train.worker import prepare_rank


def train_under_torchrun(resolved: ResolvedConfig, options: TrainOptions) -> int:
    """Train as one of torchrun's ranks; rank 0 prepares the run directory while the others wait."""
    run_dir, rank, world_size = options.run_dir, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.nodes is not None:
        raise ConfigError(
            "--nodes under torchrun, which starts the ranks of all nodes itself: leave out one of the two"
        )
    if options.nproc not in (None, world_size):
        raise ConfigError(f"--nproc {options.nproc} under torchrun, which started {world_size} processes: leave it out")
    store = open_torchrun_store(rank)
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
        words = LauncherWords(Membership(0, rank, world_size))
        code = run_guarded(run_dir, lambda: rank, lambda: prepare_rank(run_dir)(store, words), announce=rank == 0)
        if rank == 0:
            write_exit_status(run_dir, code, world_size)
        return exit_process(code)


def _prepare_as_torchrun(resolved: ResolvedConfig, options: TrainOptions, world_size: int) -> bool:
    """Prepare the run; an error is also written to exit.json, since torchrun's own exit code doesn't tell it."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    nodes = world_size // local if local and world_size % local == 0 else 1
    try:
        return prepare(resolved, choose_plan(resolved, world_size, nodes), options)
    except MusterError as error:
        write_exit_file(options.run_dir, error.exit_code, str(error), rank=0, host=socket.gethostname())
        raise
