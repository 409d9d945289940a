"""`muster train` on several nodes: one launcher on each, which become one job or say why not."""

import os
import signal
import sys
from contextlib import ExitStack
from datetime import timedelta

from muster.planner.auto import choose_plan
from muster.spec.load import Resolved, load_plan
from muster.train.data import open_dataset
from muster.train.errors import STOPPED
from muster.train.nodes.agree import ranks_here, require_same, training
from muster.train.nodes.meet import meet
from muster.train.nodes.request import NodesRequest
from muster.train.nodes.team import Over, Team, error_of
from muster.train.run import PREPARE_LIMIT, WORKER, TrainOptions, claimed, prepare, require_device
from muster.train.shared_disk import find_mark, leave_mark

_LOOK_LIMIT = timedelta(hours=2)
"""How long the other nodes may take to open the data, which they may have to build on disks of their own."""


def train_on_nodes(resolved: Resolved, options: TrainOptions, nodes: NodesRequest) -> int:
    """Trains with the launchers of the other nodes. Returns the exit code, the same on all."""
    ranks = ranks_here(resolved, options.nproc, nodes.count)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # until there are ranks
    # Addresses without a name make PyTorch warn at each connection.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        with meet(nodes, training(resolved, ranks)) as team, ExitStack() as held:
            if team.is_hub:
                _agree(team)
                held.enter_context(claimed(options.run_dir, resolved.config.train.mirror))
                chosen = choose_plan(resolved, ranks * nodes.count, nodes.count)
                if not prepare(resolved, chosen, options):
                    raise Over(0, f"{options.run_dir} is finished")
                team.tell("prepared", mark=leave_mark(options.run_dir))
                team.expect("ready", _LOOK_LIMIT.total_seconds())
            else:
                _follow(team, resolved, options)
            from muster.train.launch import launch, rank_command

            command = rank_command(WORKER, options.run_dir, ranks * nodes.count)
            hang_s = resolved.config.train.hang_s
            return launch(command, ranks, options.run_dir, hang_s=hang_s, team=team).tell()
    except Over as over:
        if over.code == 0:
            print(over.reason)
            return 0
        raise error_of(over.code, over.reason) from None


def _agree(team: Team) -> None:
    """Node 0: raises where the nodes differ or don't reach each other."""
    require_same(team)
    team.tell("agreed")
    team.measure_clocks()
    if problems := team.unreached():
        raise error_of(1, problems[0])
    hosts = ", ".join(dict.fromkeys(f"node {node} on {one.host}" for node, one in sorted(team.members.items())))
    print(f"nodes: {hosts}; ranks meet through {team.interface}", flush=True)


def _follow(team: Team, resolved: Resolved, options: TrainOptions) -> None:
    """Another node: waits for node 0, and sees that it has all it needs."""
    team.expect("agreed", PREPARE_LIMIT.total_seconds())
    print(f"{team.own} has joined {team.members[0]}, which shows how the job goes on", flush=True)
    team.unreached()
    mark = team.expect("prepared", PREPARE_LIMIT.total_seconds())[0]["mark"]
    find_mark(options.run_dir, mark, str(team.own), str(team.members[0]))
    require_device(load_plan(options.run_dir / "plan.yaml"))
    open_dataset(resolved.config, options.run_dir)
    team.tell("ready")
