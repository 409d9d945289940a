"""One rank of a run whose allocations are counted: the peak of its tensors' bytes during a step.

`python -m benchmarks.peak_memory RUN_DIR --rank R --world-size N --store HOST:PORT`, with config.yaml and plan.yaml in
the folder; rank R writes its peak to peak-R.json there.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from muster.config.load_config import load_plan, load_run_config
from muster.launch.rank_process import exit_process, rank_main
from muster.parallel.world import open_world
from muster.train.data import open_dataset
from muster.train.trainer import Trainer

WARM_UP_STEPS = 2


def count_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Run some steps and count in the last one. Returns 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config, plan = load_run_config(None, folder / "config.yaml", []).config, load_plan(folder / "plan.yaml")
    dataset = open_dataset(config, folder)
    with open_world(store, rank, world_size, plan) as world:
        trainer = Trainer(config, plan, world, dataset)
        for _ in range(WARM_UP_STEPS):
            trainer.step()
        resident = sum(local.nbytes for stage in trainer.stages.values() for local in stage.parameters.values())
        resident += sum(tensor.nbytes for _, tensor in trainer.updater.optimizer.state().values())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            trainer.step()
        (folder / f"peak-{rank}.json").write_text(json.dumps(resident + _highest(found)))
    return 0


def _highest(found: profile) -> int:
    """Return the largest number of bytes that were allocated and not yet freed since the profile began."""
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


if __name__ == "__main__":
    exit_process(rank_main(count_rank))
