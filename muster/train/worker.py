"""One rank's process: joins the world that the launcher opened, and trains or does what else a rank is for."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from muster.config.load_config import load_plan, load_run_config
from muster.launch.rank_errors import die_with_parent, run_guarded
from muster.plugins.loader import require_unchanged_plugins
from muster.train.loop import train_rank


def run_rank(run_dir: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Trains as one rank of `world_size`; the configuration and the plan are those in the run directory."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config = load_run_config(None, run_dir / "config.yaml", []).config
    require_unchanged_plugins(config.plugins)
    return train_rank(config, load_plan(run_dir / "plan.yaml"), run_dir, store, rank, world_size)


def rank_main(body: Callable[[Path, dist.Store, int, int], int] = run_rank) -> int:
    """`python -m muster.train.worker RUN_DIR --rank R --world-size N --store HOST:PORT`; the same for other bodies."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--store", required=True)
    args = parser.parse_args()

    def joined() -> int:
        host, _, port = args.store.rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False)
        return body(args.run_dir, store, args.rank, args.world_size)

    return run_guarded(args.run_dir, args.rank, joined)


def exit_process(code: int) -> NoReturn:
    """Ends this process at once: PyTorch's threads can abort a process whose interpreter is being taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_process(rank_main())
