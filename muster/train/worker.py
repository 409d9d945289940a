"""A rank that trains: `python -m muster.train.worker RUN_DIR --rank R --world-size N --store HOST:PORT`."""

import os
from pathlib import Path

import torch
import torch._dynamo  # PyTorch imports it with the first module that it makes: a spare has it by then

from muster.config.attempt_files import current_files
from muster.config.load_config import load_plan, load_run_config
from muster.launch.rank_process import Body, exit_process, member_main
from muster.plugins.loader import require_unchanged_plugins
from muster.train.data import open_dataset
from muster.train.generations import train_rank


def prepare_rank(run_dir: Path) -> Body:
    """Open the configuration, the plan and the data of this attempt; return what trains in the place that the
    launcher's words give."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    files = current_files(run_dir)
    config = load_run_config(None, files.config, []).config
    require_unchanged_plugins(config.plugins)
    plan, data = load_plan(files.plan), open_dataset(config, run_dir)
    return lambda store, words: train_rank(config, plan, run_dir, store, words, data)


if __name__ == "__main__":
    exit_process(member_main(prepare_rank))
