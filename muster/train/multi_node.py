"""`muster train` on several nodes: one launcher on each, which join into one job."""

import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from muster.config.attempt_files import current_files
from muster.config.load_config import ResolvedConfig, load_plan
from muster.launch.exit_status import ExitStatus
from muster.launch.nodes.handshake import require_same
from muster.launch.nodes.launcher_group import JobEnded, LauncherGroup, error_for_code
from muster.launch.nodes.rendezvous import rendezvous
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.launch.rank_errors import EXIT_STOPPED
from muster.launch.rank_starter import RankStarter
from muster.launch.recovery import Elasticity
from muster.launch.restarts import Restarts
from muster.launch.shared_filesystem import require_marker, write_marker
from muster.planner.auto import choose_plan
from muster.report.run_files import last_step
from muster.train.config_consistency import ranks_per_node, training_facts
from muster.train.data import open_dataset
from muster.train.preflight import TrainOptions, require_device
from muster.train.prepare import PREPARE_TIMEOUT, WORKER, prepare, prepare_for_losses
from muster.train.run_directory import locked_run_dir

_DATA_TIMEOUT = timedelta(hours=2)
"""Longest time of the other nodes to open the data, which they may have to build on disks of their own."""


def train_on_nodes(resolved: ResolvedConfig, options: TrainOptions, nodes: RendezvousConfig) -> int:
    """Train together with the launchers of the other nodes. Returns the exit code, the same on all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))  # until there are ranks
    run_dir = options.run_dir
    restarts = Restarts(run_dir, resolved.config.train.restarts, lambda: last_step(run_dir), nodes.node_rank == 0)
    with RankStarter() as starter:
        while True:
            status = _train_once(resolved, options, nodes, starter)
            if not restarts.wait_for_next(status):
                return restarts.explained(status).report_training()
            options = replace(options, fresh=False)


def _train_once(
    resolved: ResolvedConfig, options: TrainOptions, nodes: RendezvousConfig, starter: RankStarter
) -> ExitStatus:
    """Meet the launchers of the other nodes and train until the ranks end, all of them or one too early."""
    ranks = ranks_per_node(resolved, options.nproc, nodes.num_nodes)
    train = resolved.config.train
    elastic = Elasticity(train.spares) if train.elastic else None
    try:
        with rendezvous(nodes, training_facts(resolved, ranks)) as group, ExitStack() as held:
            if group.is_coordinator:
                _check_nodes(group)
                held.enter_context(locked_run_dir(options.run_dir, train.remote_checkpoint_dir))
                chosen = choose_plan(resolved, ranks * nodes.num_nodes, nodes.num_nodes)
                if not prepare(resolved, chosen, options):
                    raise JobEnded(0, f"{options.run_dir} is finished")
                if train.elastic:
                    elastic = prepare_for_losses(resolved, chosen.plan, options.run_dir, nodes.num_nodes)
                group.send("prepared", mark=write_marker(options.run_dir))
                group.wait_for("ready", _DATA_TIMEOUT.total_seconds())
            else:
                _follow_node_0(group, resolved, options)
            from muster.launch.launcher import launch, rank_command

            command = rank_command(WORKER, options.run_dir, ranks * nodes.num_nodes)
            return launch(
                command,
                ranks,
                options.run_dir,
                hang_timeout_s=train.hang_timeout_s,
                group=group,
                elastic=elastic,
                starter=starter,
            )
    except JobEnded as over:
        if over.code == 0:
            print(over.reason)
            return ExitStatus(0, over.reason)
        raise error_for_code(over.code, over.reason) from None


def _check_nodes(group: LauncherGroup) -> None:
    """Raise, on node 0, where the nodes differ or don't reach each other."""
    require_same(group)
    group.send("agreed")
    group.measure_clocks()
    if problems := group.check_connectivity():
        raise error_for_code(1, problems[0])
    hosts = ", ".join(dict.fromkeys(f"node {node} on {one.host}" for node, one in sorted(group.nodes.items())))
    print(f"nodes: {hosts}; ranks meet through {group.interface}", flush=True)


def _follow_node_0(group: LauncherGroup, resolved: ResolvedConfig, options: TrainOptions) -> None:
    """Wait, on another node, for node 0, and check that the run directory, the device and the data are there."""
    group.wait_for("agreed", PREPARE_TIMEOUT.total_seconds())
    print(f"{group.local_node} has joined {group.nodes[0]}, which shows the job's progress", flush=True)
    group.check_connectivity()
    mark = group.wait_for("prepared", PREPARE_TIMEOUT.total_seconds())[0]["mark"]
    require_marker(options.run_dir, mark, str(group.local_node), str(group.nodes[0]))
    require_device(load_plan(current_files(options.run_dir).plan))
    open_dataset(resolved.config, options.run_dir)
    group.send("ready")
