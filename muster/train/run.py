"""`muster train`: prepares a run and starts its ranks, on one node, on several, or as one of torchrun's processes."""

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

from muster.config.load_config import ResolvedConfig
from muster.launch.fork_server import RANK_PYTHON
from muster.launch.open_files import require_open_files
from muster.launch.output_streams import ignore_output_errors
from muster.launch.rank_errors import EXIT_STOPPED
from muster.launch.rank_starter import RankStarter, quiet_pytorch
from muster.launch.restarts import Restarts, note_launch_time
from muster.planner.auto import choose_plan
from muster.report.run_files import last_step
from muster.spec.errors import MusterError
from muster.train.preflight import TrainOptions, check_launcher_environment, require_launcher
from muster.train.prepare import WORKER, prepare, prepare_for_losses
from muster.train.run_directory import locked_run_dir

if find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


def train(resolved: ResolvedConfig, options: TrainOptions) -> int:
    """Start or resume the run in `options.run_dir`; returns the exit code.

    Under torchrun this process becomes one of the ranks; otherwise it starts them. A lost output stops neither.
    """
    note_launch_time()
    with ignore_output_errors():
        return _train(resolved, options)


def _train(resolved: ResolvedConfig, options: TrainOptions) -> int:
    require_launcher(resolved.config)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from muster.train.torchrun import train_under_torchrun

        return train_under_torchrun(resolved, options)
    check_launcher_environment(options.nodes)
    if options.nodes is not None:
        from muster.train.multi_node import train_on_nodes

        return train_on_nodes(resolved, options, options.nodes)
    chosen = choose_plan(resolved, options.nproc)
    world_size = chosen.plan.world_size
    # Until there are ranks, nothing has to be saved before stopping.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
    train_config = resolved.config.train
    with locked_run_dir(options.run_dir, train_config.remote_checkpoint_dir), RankStarter() as starter:
        quiet_pytorch(train_config.elastic)
        with suppress(MusterError):  # which `launch` raises
            require_open_files(world_size)  # ranks have the limit that their fork server has had
        starter.begin([*RANK_PYTHON, WORKER], {})  # beside what this process imports and prepares
        restarts = Restarts(options.run_dir, train_config.restarts, lambda: last_step(options.run_dir))
        while prepare(resolved, chosen, options):
            from muster.launch.launcher import launch, rank_command

            hang_s, elastic = train_config.hang_timeout_s, None
            if train_config.elastic:
                elastic = prepare_for_losses(resolved, chosen.plan, options.run_dir)
            command = rank_command(WORKER, options.run_dir, world_size)
            status = launch(
                command, world_size, options.run_dir, hang_timeout_s=hang_s, elastic=elastic, starter=starter
            )
            if not restarts.wait_for_next(status):
                return restarts.explained(status).report_training()
            options = replace(options, fresh=False)
    return 0
