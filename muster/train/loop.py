"""Training from the first step, or the last checkpoint, to the end: what every rank does, in the same order."""

import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import time
from typing import Any

import torch
import torch.distributed as dist

from muster.checkpoint.folder import find_latest, step_of
from muster.checkpoint.initial import load_initial
from muster.checkpoint.load import load
from muster.checkpoint.manifest import Manifest
from muster.data.dataset import Samples, StreamHash, sample_digest
from muster.parallel.world import World, open_world
from muster.schedule.build import program_of
from muster.simulate.simulator import simulate
from muster.spec.errors import ConfigError, MusterError
from muster.spec.load import plan_text
from muster.spec.plan import Plan
from muster.spec.run import RunConfig
from muster.spec.write import replace_text
from muster.train.agreement import require_agreement
from muster.train.console import TrainingDisplay
from muster.train.data import open_dataset
from muster.train.ending import announce, finish
from muster.train.errors import STOPPED
from muster.train.memory import LOAD_LIMIT, open_copies, recall
from muster.train.metrics import MetricsLog, metrics_row, write_text
from muster.train.order import measured_order
from muster.train.saves import CHECKPOINTS, Saves
from muster.train.step_result import StepResult
from muster.train.track import Trackers
from muster.train.trainer import Trainer
from muster.train.validation import validate, validation_row, validation_text


def train_rank(config: RunConfig, plan: Plan, run_dir: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Trains as one rank. Returns 0 at the end, 75 when asked to stop."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    dataset = open_dataset(config, run_dir)
    require_agreement(config, plan, dataset.fingerprint, store, rank)
    with open_world(store, rank, world_size, plan) as world:
        return Run(config, plan, world, dataset, run_dir).go()


class Run:
    """One rank's way through a run."""

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: Samples, run_dir: Path) -> None:
        self.config, self.plan, self.world, self.run_dir = config, plan, world, run_dir
        self.is_main = world.rank == 0
        self.trainer = Trainer(config, plan, world, dataset)
        self.metrics = MetricsLog(run_dir / "metrics.jsonl")
        self.stream = StreamHash()
        self.tokens_seen = 0
        """Trained on since the first step, without padding; those of skipped steps, too."""
        self._tokens_skipped = 0
        """Of the last steps in a row that were skipped."""
        self.copies = open_copies(config.train, world, run_dir, self.trainer.pieces())
        self.saves = Saves(config.train, self.trainer, world, run_dir, self.copies)
        signal.signal(signal.SIGTERM, self._on_stop)

    def _on_stop(self, *_: object) -> None:
        self.trainer.stop_requested = True

    def go(self) -> int:
        """Profiles, resumes, trains, reports."""
        started_at = self.started_at = time()
        profile = self.trainer.profile()
        if (order := measured_order(self.config, self.plan, self.world, profile)) is not None:
            self.trainer.take_order(order)
            self.plan = self.trainer.plan
            if self.is_main:
                replace_text(self.run_dir / "plan.yaml", plan_text(self.plan))
        # Of the ranks with most micro-batches, for which the others wait.
        predicted = simulate(program_of(self.plan, self.config.model, self.config.workload), profile.times)
        self._resume()
        self.saves.prepare()
        first_step = self.trainer.step_count + 1
        if self.is_main:
            announce(self.trainer, predicted)
        with closing(Trackers(self.config, self.run_dir, first_step - 1, self.is_main)) as self.trackers:
            code = self._train()
            self.metrics.flush()
            self.world.where.say("finish")
            if code == 0:
                losses = finish(self.trainer, self.run_dir, predicted, profile, started_at, first_step)
                self.trackers.log({"step": self.trainer.step_count} | validation_row(losses))
                self.world.wait_for_main()
        self.saves.close()
        return code

    def _train(self) -> int:
        trainer, train = self.trainer, self.config.train
        with TrainingDisplay(train.num_steps, trainer.step_count, visible=self.is_main) as display:
            while trainer.step_count < train.num_steps:
                stopping = False
                if self.is_main and train.max_minutes and time() - self.started_at >= 60 * train.max_minutes:
                    trainer.stop_requested = True
                for result in self._steps():
                    self._write_down(result, display)
                    if result.skipped and result.skipped_in_row >= train.max_skipped:
                        self._give_up(result, result.skipped)
                    stopping = stopping or result.stop_requested
                    if result.step < train.num_steps and not stopping:
                        problem = self.saves.after_step(result, self._info)
                        if problem and self.is_main:
                            display.say(problem)
                at_end = trainer.step_count == train.num_steps
                if (at_end or stopping) and (problem := self.saves.now(self._info())) and self.is_main:
                    display.say(problem)
                if stopping and not at_end:
                    if self.is_main:
                        print(f"stopped after step {trainer.step_count} as asked; the same command goes on from here")
                    return STOPPED
        return 0

    def _steps(self) -> Iterator[StepResult]:
        """Makes the next step, and gives the steps whose outcome is known by now: all, where a save may begin then, or
        the fed samples are hashed."""
        ahead, step = self.trainer.ahead, self.trainer.step_count + 1
        if ahead is None:
            yield self.trainer.step()
            return
        settle = self.config.data.hash_samples or step == self.config.train.num_steps or self.saves.expects(step)
        settle = settle or self._validates(step)
        for result in ahead.advance(settle):
            yield result
            if result.stop_requested:
                yield from ahead.settle()

    def _write_down(self, result: StepResult, display: TrainingDisplay) -> None:
        self.tokens_seen += result.tokens
        self._tokens_skipped = self._tokens_skipped + result.tokens if result.skipped else 0
        if self.config.data.hash_samples:
            self._hash_samples()
        if self.is_main and result.skipped:
            display.say(f"step {result.step} was skipped: {result.skipped} ({self._samples(1)})")
        train = self.config.train
        losses = validate(self.trainer, self.config.eval.batches) if self._validates(result.step) else {}
        if losses and self.is_main:
            display.say(f"step {result.step}: {validation_text(losses)}")
        logged = result.step % train.log_every == 0 or result.step == train.num_steps
        if self.is_main and (logged or result.skipped or losses):
            row = metrics_row(result, self.tokens_seen, self._epoch(result.step), None)
            row |= validation_row(losses)
            if problem := self.metrics.append(row):
                display.say(problem)
            self.trackers.log(row)
            display.step(row)

    def _epoch(self, step: int) -> float:
        """How often the training samples have been gone through after this step."""
        trainer, later = self.trainer, self.trainer.step_count - step
        return trainer.feeder.epochs_of(trainer.samples_consumed - later * self.config.train.global_batch_size)

    def _validates(self, step: int) -> bool:
        """Whether a validation loss is due after this step; the last one is the ending's."""
        every = self.config.eval.every
        return every > 0 and step % every == 0 and step < self.config.train.num_steps

    def _hash_samples(self) -> None:
        """Adds the samples that the first stages were really fed, in global order, to the stream's hash."""
        own: list[tuple[int, bytes]] = []
        if self.world.at.tp == 0:  # its neighbours are fed the same
            own = [(number, sample_digest(tokens)) for number, tokens in self.trainer.feeder.samples_fed()]
        everyone = sorted(pair for pairs in self.world.exchange(own) for pair in pairs)
        self.stream.update(digest for _, digest in everyone)
        if self.is_main:
            with suppress(MusterError):  # as with metrics.jsonl, which says so
                write_text(self.run_dir / "samples.sha256", self.stream.state + "\n")

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def _info(self) -> dict[str, Any]:
        """What a checkpoint says beside the tensors."""
        counters = {
            **self.trainer.counters(),
            "stream_hash": self.stream.state,
            "tokens_seen": self.tokens_seen,
            "data": self.trainer.dataset.fingerprint,
        }
        return {
            "plan": self.plan.model_dump(mode="json"),
            "model": self.config.model.model_dump(mode="json"),
            "run": self.config.model_dump(mode="json"),
            "counters": counters,
        }

    def _resume(self) -> None:
        """Goes on from the last checkpoint, if there is one."""
        if (manifest := self._recall() or self._load_latest()) is not None:
            self.trainer.go_to(manifest.step, manifest.counters)
            self.stream.state = manifest.counters["stream_hash"]
            before = manifest.step * self.config.workload.tokens_per_step  # of a checkpoint that doesn't say it
            self.tokens_seen = manifest.counters.get("tokens_seen", before)
        elif (place := self.config.train.init_from) is not None:
            load_initial(Path(place), self.config.model, self.trainer.pieces())
            self.trainer.go_to(0, {"samples_consumed": 0})
        if self.is_main:
            self.metrics.forget_after(self.trainer.step_count)

    def _recall(self) -> Manifest | None:
        """Loads the copies in the nodes' memory, where they are the newest."""
        if self.copies is None:
            return None
        pieces, most = self.trainer.pieces(), self.config.train.num_steps
        return recall(self.world, self.copies, self.run_dir, pieces, most)

    def _load_latest(self) -> Manifest | None:
        """Loads the last checkpoint; one that turns out to be damaged is said, and the one before it is taken."""
        root, damaged = self.run_dir / CHECKPOINTS, list[Path]()
        said = ""
        while (latest := self.world.share(find_latest(root, without=damaged))) is not None:
            manifest, problem = self._try_load(latest)
            everyone = self.world.exchange_within(f"load {latest.name}", problem, LOAD_LIMIT)
            problem = next((text for text in everyone if text), None)
            if problem is None:
                if damaged and self.is_main:
                    step = step_of(latest)
                    lost = f"steps {step + 1} to {step_of(damaged[0])} are done again"
                    print(f"resuming {self.run_dir} after step {step}: {lost}", flush=True)
                return manifest
            damaged.append(latest)
            said = problem
            if self.is_main:
                print(f"passed over a damaged checkpoint: {problem}", flush=True)
        if damaged:
            raise MusterError(f"{self.run_dir} has no checkpoint to go on from ({said}): --fresh starts anew")
        return None

    def _try_load(self, folder: Path) -> tuple[Manifest | None, str | None]:
        """The manifest of a checkpoint that was loaded, or why this rank could not load it."""
        self.world.where.say("load")
        try:
            return load(folder, self.trainer.pieces()), None
        except ConfigError:
            raise
        except MusterError as error:
            return None, str(error)

    def _give_up(self, result: StepResult, reason: str) -> None:
        """Stops after so many skipped steps in a row, the last for `reason`; keeps what led to them."""
        count = result.skipped_in_row
        samples = self._samples(count)
        self.trainer.go_back(count)
        self.tokens_seen -= self._tokens_skipped
        self.saves.now(self._info(), "failed")
        steps = f"step {result.step} was" if count == 1 else f"steps {result.step - count + 1} to {result.step} were"
        raise MusterError(
            f"{steps} skipped, as many in a row as train.max_skipped allows: step {result.step} because {reason};"
            f" the state before is in {self.run_dir / 'failed'}, what followed are {samples}"
        )

    def _samples(self, steps: int) -> str:
        """The samples of the last `steps` steps, in words."""
        size = self.config.train.global_batch_size
        end = self.trainer.samples_consumed
        return f"samples {end - steps * size} to {end - 1}"
