"""Entry point of a rank's process: joins the launcher's store and runs a body."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from muster.launch.output_streams import ignore_output_errors
from muster.launch.rank_errors import die_with_parent, run_guarded
from muster.spec.standard_streams import forgive_standard_streams


def rank_main(body: Callable[[Path, dist.Store, int, int], int]) -> int:
    """Run `body(run_dir, store, rank, world_size)` with the arguments that `launcher.rank_command` gives a rank:
    `RUN_DIR --rank R --world-size N --store HOST:PORT`. Returns the exit code; an exception is recorded in the run
    directory."""
    die_with_parent()
    forgive_standard_streams()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True)
    args = parser.parse_args()

    def join_and_run() -> int:
        host, _, port = args.store.rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False)
        return body(args.run_dir, store, args.rank, args.world_size)

    with ignore_output_errors():
        return run_guarded(args.run_dir, args.rank, join_and_run)


def exit_process(code: int) -> NoReturn:
    """End this process at once, without tearing down the interpreter, during which PyTorch's threads can abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
