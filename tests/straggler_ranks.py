"""Ranks that compare their times, of which one computes slowly by its events."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from muster.config.load_config import load_run_config
from muster.cost.time.op_times import OpTimes
from muster.parallel.world import World
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.simulate.timeline import Event
from muster.spec.plan_name import parse_plan_name
from muster.train.straggler_monitor import StragglerMonitor


def compare(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the checks of nine steps."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    plan, every = parse_plan_name(f"dp{world_size}-z1-fp32"), payload["every"]
    config = load_run_config("tiny", None, [("parallel", f"dp{world_size}-z1-fp32")]).config
    program = build_program(plan, config.model, config.workload)
    passes_s = 100.0 if rank == payload["slow_rank"] else 10.0  # far above what a busy machine adds to the rest
    steps = {
        step: [Event(rank, "compute", Action(kind, 0, 0), 0.0, passes_s) for kind in (Kind.F, Kind.B)]
        for step in range(1, 3 * every + 1)
    }
    world = SimpleNamespace(
        rank=rank,
        size=world_size,
        at=SimpleNamespace(pp=0),
        device=torch.device("cpu"),
        all_gather_object=lambda value: World.all_gather_object(world, value),
    )
    trainer = SimpleNamespace(world=world, plan=plan, program=program, step_events=lambda: steps)
    times = OpTimes({(Kind.F, 0): 1.0, (Kind.B, 0): 1.0})
    monitor = StragglerMonitor(trainer, times, every, Path.cwd())
    rows = []
    for step in steps:
        core_wait_s = float(step % every) if rank == 1 else 0.0
        check = monitor.after_step(SimpleNamespace(step=step, time_s=200.0, data_s=0.0, core_wait_s=core_wait_s))
        assert (check is not None) == (step % every == 0)
        rows += [check.row] if check is not None else []
    dist.destroy_process_group()
    return rows
