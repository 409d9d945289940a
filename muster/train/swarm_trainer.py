"""Steps of a run whose stages are served by swarms of peers: the Program of its stages, with paths chosen at run
time."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muster.config.run_config import RunConfig
from muster.launch.network import listen_at
from muster.launch.peers.channel import create_secret
from muster.launch.peers.client import Stopped
from muster.launch.swarm.driver import StepSums, SwarmDriver
from muster.launch.swarm.settings import SwarmSettings
from muster.parallel.device_clock import HostRecord
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.swarm.step_passes import pass_order
from muster.simulate.timeline import Event
from muster.spec.endpoint import SWARM_PORT, parse_endpoint
from muster.spec.errors import MusterError
from muster.train.parameter_updater import ParameterUpdater
from muster.train.swarm_worker import fill_stage_state, pack_inputs, stage_parameters, stage_state, stages_plan

MAX_BEAT_S = 1.0
BEATS_IN_SILENCE = 5


class Swarm:
    """The peers that serve this run's stages. The rank itself computes no pass: it holds parameters and optimizer state
    as of the last `pull`, for checkpoints, validation, and the first peers of each stage."""

    def __init__(self, config: RunConfig, world: World, stage: DecoderStage, updater: ParameterUpdater) -> None:
        self.config, self.world, self.updater = config, world, updater
        self._stage = stage
        self.plan = stages_plan(config)
        self.program = build_program(self.plan, config.model, config.workload, optim=config.optim)
        check(self.program)
        self._order = pass_order(self.program)
        self._names = {index: stage_parameters(config, index) for index in range(self.plan.num_stages)}
        self.step = 0
        """Step after which this rank's own copy is."""
        self.say: Callable[[str], None] = lambda line: print(line, flush=True)
        self._driver: SwarmDriver | None = None

    @property
    def driver(self) -> SwarmDriver:
        """Connections to the peers."""
        assert self._driver is not None, "the swarm is not joined yet"
        return self._driver

    def join(self, step: int) -> bool:
        """Listen for peers, and wait until each stage has one. Returns False where the run was asked to stop before."""
        swarm = self.config.swarm
        assert swarm is not None
        self.step = step
        settings = SwarmSettings(
            num_stages=swarm.stages,
            wiring=swarm.wiring,
            in_flight=swarm.in_flight,
            timeout_s=swarm.timeout_s,
            rebalance_every=swarm.rebalance_every,
            silence_s=swarm.silence_s,
            beat_s=min(MAX_BEAT_S, swarm.silence_s / BEATS_IN_SILENCE),
            seed=self.config.seed,
        )
        self.world.heartbeat.update("peers")
        secret = create_secret(Path(swarm.secret_file))
        welcome = {"config": self.config.model_dump(mode="json")}
        listener = listen_for_swarm(swarm.listen)
        own = listener, secret, settings, welcome, self, self.say, self.updater.hooks.stop_requested
        self._driver = SwarmDriver(*own)
        print(f"waiting for peers at {swarm.listen}: muster swarm HOST:PORT --secret-file FILE joins", flush=True)
        try:
            self.driver.join()
        except Stopped:
            return False
        return True

    def leave(self, is_over: bool) -> None:
        """Let the peers end where the run is over, and otherwise wait for it to go on."""
        if self._driver is not None:
            self._driver.close(is_over)

    # ------------------------------------------------------------------------------------------------------------------
    # Steps

    def inputs(self, stage: int, micro_batch: int) -> bytes:
        """Return what a stage needs for a micro-batch beside hidden states."""
        given = self._stage.inputs
        assert given is not None
        return pack_inputs(given, micro_batch, stage == 0, stage == self.plan.num_stages - 1)

    def run(self) -> HostRecord:
        """Run the step whose batch is loaded, on the peers. Raises MusterError where a stage is lost."""
        updater, state = self.updater, self.updater.state
        self.world.heartbeat.update("peers")
        try:
            sums = self.driver.run_step(self._order, self)
        except Stopped:
            raise MusterError(
                f"stopped while a stage had no peer, after step {self.step}: the same command goes on from there"
            ) from None
        updater.decide_step(state, self._statistics(sums))
        is_skipped = state.skip_reason is not None
        update = {"is_skipped": is_skipped, "factor": updater.clip_factor(state)}
        self.driver.commit(update | {"learning_rate": state.learning_rate})
        if not is_skipped:
            updater.previous_norm = state.grad_norm
        return HostRecord(_events(sums))

    def _statistics(self, sums: StepSums) -> torch.Tensor:
        """Return the statistics of a step, as ranks sum them up (`ParameterUpdater.local_statistics`)."""
        hooks = self.updater.hooks
        told = float(hooks.stop_requested()), float(hooks.leave_requested()), *map(float, hooks.save_status())
        return torch.tensor([sums.squared_norm, *sums.losses, *told], dtype=torch.float64)

    def pop_rows(self) -> list[dict[str, Any]]:
        """Return what each peer did in the steps since the last call."""
        found, self.driver.rows = self.driver.rows, []
        return found

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def snapshot(self, stage: int) -> bytes:
        """Return the state of a stage in this rank's own copy."""
        return stage_state(self.updater, self._names[stage], self.step)

    def pull(self) -> None:
        """Take over the peers' state into this rank's own copy, unless it has it."""
        if self._driver is None or self._driver.step == self.step:
            return
        self.world.heartbeat.update("peers")
        self.updater.hooks.before_update()
        for stage, content in self._driver.pull().items():
            optimizer = self.updater.optimizer
            _, optimizer.step_count, optimizer.starts = fill_stage_state(self.updater, self._names[stage], content)
        self.updater.drop_gradients()
        self.step = self._driver.step


def _events(sums: StepSums) -> list[Event]:
    """Return the passes of a step as events, whose ranks are the peers that took part."""
    ranks = {peer: rank for rank, peer in enumerate(sorted({one.peer for one in sums.times}))}
    kinds = {"F": Kind.F, "B": Kind.B}
    return [
        Event(ranks[one.peer], "compute", Action(kinds[one.done.kind], *one.done.unit), one.start_s, one.end_s)
        for one in sums.times
    ]


def listen_for_swarm(text: str) -> socket.socket:
    """Listen for the peers of a swarm. Raises ConfigError."""
    return listen_at(*parse_endpoint(text, SWARM_PORT), SWARM_PORT)
