"""A rank that trains: `python -m muster.train.worker RUN_DIR --rank R --world-size N --store HOST:PORT`."""

import os
from pathlib import Path

import torch
import torch._dynamo  # PyTorch imports it with the first module that it makes: a spare has it by then
import torch.distributed as dist

from muster.config.attempt_files import current_files
from muster.config.load_config import load_plan, load_run_config
from muster.launch.launcher_words import LauncherWords
from muster.launch.rank_process import exit_process, member_main
from muster.plugins.loader import require_unchanged_plugins
from muster.train.generations import train_rank


def run_rank(run_dir: Path, store: dist.Store, words: LauncherWords) -> int:
    """Train in the place that the launcher's `words` give, with the configuration and the plan of this attempt."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    files = current_files(run_dir)
    config = load_run_config(None, files.config, []).config
    require_unchanged_plugins(config.plugins)
    return train_rank(config, load_plan(files.plan), run_dir, store, words)


if __name__ == "__main__":
    exit_process(member_main(run_rank))
