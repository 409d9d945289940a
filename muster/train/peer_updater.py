"""Outer steps of a run whose islands are peers of a coordinator: other runs, which come and go."""

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.run_config import RunConfig
from muster.data.dataset import SampleStream
from muster.launch.peers.channel import load_secret
from muster.launch.peers.client import PeerClient, Round, Stopped
from muster.parallel.axis import IslandAxis
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.spec.endpoint import parse_endpoint
from muster.spec.errors import MusterError
from muster.train.outer_updater import OuterExchange, OuterUpdater
from muster.train.parameter_updater import ParameterUpdater
from muster.train.peer_state import PeerState
from muster.train.resume_check import kept_settings


class PeerUpdater(OuterUpdater):
    """Outer steps of one peer, a run of a single rank. Its client runs in the thread of the exchanges."""

    def __init__(self, config: RunConfig, world: World, updater: ParameterUpdater, dataset: SampleStream) -> None:
        self.batch_size = config.train.global_batch_size
        self.last_step = config.train.num_steps
        assert config.outer is not None
        self.every = config.outer.every
        self.members, self.index = 1, 0
        """Peers of this round, and the place of this one."""
        self.placed_step: int | None = None
        """Step after which this peer goes on with the state that it has now; None: that of its own count."""
        self.awaits_exchange = False
        """True once this peer has trained a round and was asked to stop before the exchange."""
        self._client: PeerClient | None = None
        self._begun: Round | None = None
        self._run_settings = kept_settings(config) | {
            "train.steps": self.last_step,
            "the data's fingerprint": dataset.fingerprint,
        }
        super().__init__(config, world, updater)

    def _open_axis(self, world: World) -> IslandAxis:
        """Return an axis of this island alone."""
        alone = dist.group.WORLD
        assert alone is not None
        return IslandAxis(alone, alone, 1, 0)

    def reset(self) -> None:
        """Begin anew from the present parameters."""
        super().reset()
        self.shared = PeerState(self.config, self.method, self.parameters, self._samples_of)

    def _samples_of(self, round_: int) -> int:
        """Return the samples of one peer in a round, counted from 0."""
        return (self._end_of(round_ + 1) - self._end_of(round_)) * self.batch_size

    def _end_of(self, rounds: int) -> int:
        """Return the step after which so many rounds are over."""
        return min(rounds * self.every, self.last_step)

    # ------------------------------------------------------------------------------------------------------------------
    # Joining and leaving

    def join(self, step: int) -> bool:
        """Join the other peers after a step of this run's own. Returns True once this one may train, False where it was
        asked to stop before."""
        assert self.config.coordinator is not None
        secret_file, announce = self.config.secret_file, self.config.announce
        assert secret_file is not None
        self.world.heartbeat.update("peers")
        name = f"{socket.gethostname()}-{os.urandom(3).hex()}"
        self._client = PeerClient(
            parse_endpoint(self.config.coordinator),
            load_secret(Path(secret_file)),
            self._run_settings,
            self.shared,
            name,
            None if announce is None else parse_endpoint(announce),
            lambda line: print(line, flush=True),
            connections=self.config.connections,
        )
        coordinator, number = self.config.coordinator, self.shared.round + 1
        print(f"waiting, as {name}, for the peers at {coordinator}, in round {number}", flush=True)
        try:
            if self._end_of(self.shared.round) < step == self._end_of(self.shared.round + 1):
                self.shared.change = torch.cat([x.flatten() for x in self._changes().values()])
                begun = self._client.meet(self._is_stopping)
            else:
                begun = self._client.join(self._is_stopping)
        except Stopped:
            return False
        self._begin(begun, step)
        return True

    def leave(self) -> None:
        """Leave the other peers."""
        if self._client is not None:
            self._client.close()

    def _is_stopping(self) -> bool:
        return self.stop_requested or self.updater.hooks.stop_requested()

    def _begin(self, begun: Round, step: int) -> None:
        """Take up the place of a new round."""
        rounds = self.shared.round
        is_in_round = self._end_of(rounds) <= step < self._end_of(rounds + 1)
        if begun.weight or begun.has_jumped or not is_in_round:
            self.begin_from()
            self.placed_step = self._end_of(rounds)
        if self.placed_step is not None or step == self._end_of(rounds):
            self.members, self.index = len(begun.members), begun.index

    def pop_placed_step(self) -> int | None:
        """Return `placed_step`, once."""
        step, self.placed_step = self.placed_step, None
        return step

    def first_sample(self, step: int) -> int:
        """Return the first sample of the step after this one. Peers take turns in the steps of a round."""
        steps = step - self._end_of(self.shared.round)
        return self.shared.samples + (steps * self.members + self.index) * self.batch_size

    @property
    def stride(self) -> int:
        """Samples from this peer's batch to its next one."""
        return self.members * self.batch_size

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    def _changes(self) -> dict[str, Tensor]:
        parameters = self.updater.parameters
        with torch.no_grad():
            return {name: one.value - parameters[name] for name, one in self.parameters.items()}

    def _exchange(
        self, changes: Mapping[str, Tensor], starts: Mapping[str, Tensor], told: list[float], ranks: Mapping[str, int]
    ) -> OuterExchange:
        """Exchange changes with the other peers, and step the outer optimizer, while the rank waits. Raises Stopped;
        MusterError where the changes are not finite, so that they reach no other peer."""
        assert self._client is not None
        self._synchronize()
        own = torch.cat([change.flatten() for change in changes.values()])
        if not bool(own.isfinite().all()):
            raise MusterError(
                f"parameters are no longer finite after step {self.updater.state.step}, and were not sent to other"
                " peers: resume from an earlier checkpoint with a lower optim.lr"
            )
        self.shared.change = own
        begun = self._begun = self._client.meet(self._is_stopping)
        mean = own if self.shared.mean is None else self.shared.mean
        sums = [float((own - mean).double().square().sum()), float(mean.double().square().sum())]
        return OuterExchange(mean, [*sums, *told], begun.transfer_s)

    def wait(self, action: Action) -> None:
        """Wait for the exchange with the other peers, or for the request to stop."""
        start_s = perf_counter()
        self.world.heartbeat.update("peers")
        try:
            exchange = self._pending.pop(action.slice).result()
        except Stopped:
            self.stop_requested = self.awaits_exchange = True
            return
        self._arrived[action.slice] = exchange, perf_counter() - start_s

    def step(self, action: Action) -> None:
        """Continue from the outer parameters after the exchange."""
        if action.slice not in self._arrived:
            return
        exchange, wait_s = self._arrived.pop(action.slice)
        begun = self._begun
        assert begun is not None
        meeting = self._meeting(action.slice, exchange, wait_s)
        self._meetings.append(replace(meeting, sent_bytes=begun.sent_bytes, peers=begun.weight))
        self.updater.hooks.before_update()
        self._begin(begun, self.updater.state.step)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def counters(self) -> dict[str, Any]:
        """Counters of a checkpoint's manifest."""
        own = {"round": self.shared.round, "samples": self.shared.samples}
        return super().counters() | own | {"members": self.members, "index": self.index}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Take up the counters of a checkpoint whose shards have been loaded."""
        super().restore(counters)
        self.shared.round, self.shared.samples = counters["round"], counters["samples"]
        self.members, self.index = counters["members"], counters["index"]
