"""Entry point of a rank's process: joins the launcher's store and runs a body."""

import argparse
import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from muster.launch.heartbeat import tell_ready
from muster.launch.launcher_words import LauncherWords, Membership
from muster.launch.output_streams import TERMINAL_FDS_VARIABLE, ignore_output_errors
from muster.launch.rank_errors import log_path, run_guarded
from muster.spec.standard_streams import forgive_standard_streams

Body = Callable[[dist.Store, LauncherWords], int]
"""Work of a rank, given the launcher's store and words; returns the exit code."""


def rank_main(body: Callable[[Path, dist.Store, int, int], int]) -> int:
    """Run `body(run_dir, store, rank, world_size)` with the arguments that `launcher.rank_command` gives a rank:
    `RUN_DIR --rank R --world-size N --store HOST:PORT`. Returns the exit code; an exception is recorded in the run
    directory."""

    def prepare(run_dir: Path) -> Body:
        def run(store: dist.Store, words: LauncherWords) -> int:
            place = words.current()
            return body(run_dir, store, place.rank, place.world_size)

        return run

    return member_main(prepare)


def member_main(prepare: Callable[[Path], Body]) -> int:
    """Run the body that `prepare(run_dir)` returns as `rank_main` does, for ranks that outlive a generation, and for
    spares.

    A spare has `--spare` in place of `--rank R`: it waits, prepared and with all modules imported, until the launcher
    gives it a lost rank's place.
    """
    gc.freeze()  # modules live as long as the process
    gc.enable()
    forgive_standard_streams()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--rank", type=int)
    place.add_argument("--spare", action="store_true")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True)
    args = parser.parse_args()
    words = LauncherWords(None if args.spare else Membership(0, args.rank, args.world_size))
    words.listen()
    prepared = None
    if args.spare:
        with suppress(Exception):  # what fails is done again, and reported, by a rank
            prepared = prepare(args.run_dir)
        tell_ready()
        take_place(args.run_dir, words.current())

    def join_and_run() -> int:
        host, _, port = args.store.rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False)
        body = prepared or prepare(args.run_dir)
        return body(store, words)

    with ignore_output_errors():
        return run_guarded(args.run_dir, lambda: words.current().rank, join_and_run)


def take_place(run_dir: Path, place: Membership) -> None:
    """Make this process look like the rank of its new place: its number on this machine, and its output."""
    number = place.rank if place.local_rank is None else place.local_rank
    size = place.local_world_size or place.world_size
    os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(size)}
    sys.stdout.flush()
    sys.stderr.flush()
    if place.rank:
        with open(log_path(run_dir, place.rank), "ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
    elif terminal := os.environ.get(TERMINAL_FDS_VARIABLE):
        for stream, output in zip((1, 2), terminal.split(","), strict=True):
            os.dup2(int(output), stream)


def exit_process(code: int) -> NoReturn:
    """End this process at once, without tearing down the interpreter, during which PyTorch's threads can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
