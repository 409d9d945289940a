"""The training loop of one rank, from the first step or the last checkpoint to the end; all ranks go the same way."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any

from torch import Tensor

from muster.checkpoint.checkpoint_dir import checkpoint_path
from muster.config.attempt_files import attempt_files
from muster.config.file_writer import write_atomically
from muster.config.load_config import plan_yaml
from muster.config.run_config import RunConfig
from muster.cost.time.op_times import OpTimes
from muster.data.dataset import SampleStream, StreamHash, sample_digest
from muster.launch.rank_errors import EXIT_STOPPED
from muster.launch.restarts import launch_time
from muster.parallel.op_profile import StageProfile
from muster.parallel.world import World
from muster.planner.slow_ranks import with_usual_ratios
from muster.report.approximation import write_approximation
from muster.report.run_files import MEETINGS_FILE, RECOVERIES_FILE, STRAGGLERS_FILE, SWARM_FILE, read_metrics
from muster.report.wall_time import ATTEMPTS_FILE, append_attempt, attempt_row
from muster.schedule.build import build_program
from muster.simulate.simulator import simulate
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.train.async_pipeline import AsyncPipeline
from muster.train.best_checkpoint import ValidationTracker
from muster.train.callbacks import Callbacks
from muster.train.carried import Carried
from muster.train.checkfree import KeptState
from muster.train.checkpoint_manager import CHECKPOINTS_FOLDER, CheckpointManager
from muster.train.console import TrainingDisplay
from muster.train.device_metrics import DeviceMetrics
from muster.train.end_stage_copy import EndStageCopy
from muster.train.expert_load_log import ExpertLoadLog
from muster.train.finalize import finalize, print_plan
from muster.train.gradient_check import GradientCheck
from muster.train.grouped_kernels import use_measured_kernels
from muster.train.in_memory_checkpoint import open_in_memory_checkpoint
from muster.train.load_state import StateLoader
from muster.train.memory_limit import MemoryLimit
from muster.train.metrics import metrics_row, null_non_finite, write_text
from muster.train.post_validation import PostValidation
from muster.train.replan import Replanner
from muster.train.run_directory import begin_attempt, run_directory_error
from muster.train.schedule_refinement import refine_schedule_from_profile
from muster.train.step_result import StepResult
from muster.train.step_state import StepHooks
from muster.train.straggler_monitor import StragglerCheck, StragglerMonitor, end_if_replaceable, is_replaceable
from muster.train.tracking import Trackers
from muster.train.trainer import Trainer
from muster.train.validation_loss import ALL_DATA, validation_losses, validation_metrics, validation_text

_FLUSHES_FOR_MEAN = 64
"""Flushes of an asynchronous pipeline over which the steps between two are averaged."""


class TrainingLoop:
    """One rank's way through a run: profile, resume, train, evaluate and report."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        world: World,
        dataset: SampleStream,
        run_dir: Path,
        memory_limit: MemoryLimit,
        carried: Carried | None = None,
    ) -> None:
        """`carried` is what an earlier generation of ranks has left to this one."""
        self.config = config
        self.carried = carried or Carried()
        self.plan = plan
        self.world = world
        self.run_dir = run_dir
        self.memory_limit = memory_limit
        self.is_main = world.rank == 0
        self.trainer = Trainer(config, plan, world, dataset, self._hooks())
        stages = self.trainer.stages.values()
        use_measured_kernels((stage.module for stage in stages), run_dir, world.device.type)
        own = config.model, plan, config.train.seq_len, world, config.optim
        self.device_metrics = DeviceMetrics(*own, memory_limit.meter)
        self.post_validation: PostValidation | None = None
        self.async_pipeline = AsyncPipeline(self.trainer) if plan.schedule_entry.is_asynchronous else None
        self.metrics = self.carried.log(run_dir / "metrics.jsonl")
        self.expert_load = ExpertLoadLog(run_dir)
        self.meetings = self.carried.log(run_dir / MEETINGS_FILE)
        self.straggler_log = self.carried.log(run_dir / STRAGGLERS_FILE)
        self.swarm_log = self.carried.log(run_dir / SWARM_FILE)
        self.stragglers: StragglerMonitor | None = None
        """Comparison of the ranks' times; None without `train.straggler_check_every`, or with one rank."""
        self.replanner: Replanner | None = None
        """Search for plans around slow ranks; None except on rank 0 under `train.straggler_action` replan."""
        self.gradient_check: GradientCheck | None = None
        """Comparison of the ranks' gradients; None without `train.gradient_check_every`."""
        self.stream = StreamHash()
        self.validation = ValidationTracker(config.train)
        self.callbacks = Callbacks(config.train.callbacks, world.rank, run_dir, self.carried.request_stop)
        self._last_losses: tuple[int, dict[str, float]] = (-1, {})
        """Step and result of the last validation."""
        self._recorded: tuple[int, dict[str, Any]] | None = None
        """Last step that was recorded and the counters after it, under `train.recovery` checkfree; None before the
        state is whole."""
        self._is_from_disk = False
        """True where a checkpoint on disk has the state with which this generation began."""
        self._origin = 0
        """Generation in which all ranks last went back to a checkpoint, or to the beginning."""
        self._end_stage_copy: EndStageCopy | None = None
        """Copy of the embedding or the head, under CheckFree+."""
        self.tokens_seen = 0
        """Tokens trained on since the first step, without padding, those of skipped steps included."""
        self._tokens_skipped = 0
        """Tokens of the last consecutive steps that were skipped."""
        self.in_memory_checkpoint = open_in_memory_checkpoint(config.train, world, run_dir, self.trainer.local_shards())
        self.checkpoint_manager = CheckpointManager(
            config.train, self.trainer, world, run_dir, self.in_memory_checkpoint
        )
        # Not a method of this loop, which would keep its tensors alive when another generation follows.
        signal.signal(signal.SIGTERM, self.carried.request_stop)

    def _hooks(self) -> StepHooks:
        """Connect the trainer's steps with this run; the checkpoint manager is made after the trainer."""
        return StepHooks(
            stop_requested=lambda: self.carried.stop_requested,
            leave_requested=self.carried.leave_requested,
            save_status=lambda: self.checkpoint_manager.status(),
            before_update=lambda: self.checkpoint_manager.wait_staged(),
            state_folder=self.run_dir,
        )

    def abandon(self) -> None:
        """Leave everything that is under way, as another generation of ranks begins; connections are broken."""
        if self._recorded is not None:
            self.carried.kept = self._kept_states(*self._recorded)
        self.checkpoint_manager.abandon()

    def _kept_states(self, step: int, counters: dict[str, Any]) -> list[KeptState]:
        """Return this rank's state, with the counters after the last step that was recorded, and the copy that it has
        of another stage."""
        trainer, copy = self.trainer, self._end_stage_copy
        (stage,) = trainer.stages
        norm = trainer.updater.layer_grad_norm
        found = [KeptState(stage, trainer.step_count, step, counters, norm, self._own_tensors(), self._origin)]
        if copy is not None and copy.stage is not None and copy.tensors:
            found.append(KeptState(copy.stage, copy.num_updates, step, counters, 1.0, copy.tensors, self._origin))
        return found

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return this rank's parameters and optimizer state, by stored name."""
        return {shard.name: shard.tensor.detach() for shard in self.trainer.local_shards()}

    def run(self) -> int | None:
        """Profile, resume, train and report; returns the exit code, or None where another generation of ranks
        follows."""
        self.started_at = time()
        started_at = self.carried.started_at = self._first_start()
        profile = self._profile()
        if (
            profile is not None
            and self.world.generation == 0
            and (order := refine_schedule_from_profile(self.config, self.plan, self.world, profile)) is not None
        ):
            self.trainer.use_order(order)
            self.plan = self.trainer.plan
            self.carried.plan_refined(self.plan)
            if self.is_main:
                write_atomically(attempt_files(self.run_dir).plan, plan_yaml(self.plan))
        if self.plan.post_validation:
            self.post_validation = PostValidation(self.trainer)
        own = self.plan, self.config.model, self.config.workload  # ranks with most micro-batches: others wait for them
        flushed = None if self.async_pipeline is None else self._usual_steps_until_flush()
        program = build_program(
            *own, num_steps=flushed, update_time=self.config.train.update_time, optim=self.config.optim
        )
        predicted = None if profile is None else simulate(program, profile.times)
        if profile is not None and (every := self.config.train.straggler_check_every * (self.world.size > 1)):
            self.stragglers = StragglerMonitor(self.trainer, self._usual_times(profile), every, self.run_dir)
            if self.config.train.straggler_action == "replan" and self.is_main:
                usual_plan = self.carried.usual_plan or self.plan
                changes = self.carried.num_plan_changes
                self.replanner = Replanner(self.config, self.plan, usual_plan, self.stragglers, changes)
        if every := self.config.train.gradient_check_every:
            self.gradient_check = GradientCheck(self.trainer, every)
        self._resume()
        if not self.trainer.join_peers():
            print("stopped before training, while it waited for its peers; the same command resumes here")
            self.checkpoint_manager.close()
            return EXIT_STOPPED
        self.checkpoint_manager.prepare()
        first_step = self.trainer.step_count + 1
        if self.is_main and (self.world.generation == 0 or first_step == 1):
            print_plan(self.trainer, predicted)
            print(self.device_metrics.note)
        self.device_metrics.start_measuring()
        with closing(Trackers(self.config, self.run_dir, first_step - 1, self.is_main)) as self.trackers:
            code = self._train()
            if self.trainer.peers is not None:
                self.trainer.peers.leave()
            if self.trainer.swarm is not None:
                self.trainer.swarm.leave(is_over=code == 0)
            if code is None:
                return None
            if self.is_main:
                self.metrics.flush()
                self.expert_load.write()
            self.world.heartbeat.update("finish")
            if code == 0:
                losses = self._final_losses()
                self.memory_limit.lift()
                finalize(
                    self.trainer,
                    self.run_dir,
                    predicted,
                    profile,
                    self.device_metrics,
                    started_at,
                    first_step,
                    losses,
                    self.validation.describe(self.trainer.is_done, self.checkpoint_manager.best_step_on_disk()),
                )
                self.trackers.log({"step": self.trainer.step_count} | validation_metrics(losses))
                self.world.wait_for_rank_0()
        self.checkpoint_manager.close()
        return code

    def _first_start(self) -> float:
        """Return the time at which the first generation was ready; all ranks call it. New processes don't know it."""
        own = self.carried.started_at or self.started_at
        return min(self.world.all_gather_object(own)) if self.world.generation else own

    def _profile(self) -> StageProfile | None:
        """Time the instructions, or take what an earlier generation has timed; all ranks call it. None where peers of a
        swarm run them."""
        if self.trainer.swarm is not None:
            return None
        if not self.config.train.elastic:
            return self.trainer.profile()
        key = self.plan.model_copy(update={"pinned_schedule": None}).hash
        carried = self.carried.profiles.get(key)
        known = self.world.all_gather_object(carried) if self.world.generation else []
        profiles = next((found for found in known if found), None)
        profiles = profiles or self.world.all_gather_object(self.trainer.profile())
        self.carried.profiles[key] = profiles
        return profiles[self.world.rank]

    def _usual_times(self, profile: StageProfile) -> OpTimes:
        """Return the times of passes where no rank is slow, under this generation's plan; all ranks call it."""
        own = self.carried.usual_times
        known = self.world.all_gather_object(own) if self.world.generation else []
        first_plan, times = self.carried.usual_times = next(filter(None, known), own or (self.plan, profile.times))
        return with_usual_ratios(self.config, profile.times, self.plan, times, first_plan)

    def _train(self) -> int | None:
        trainer = self.trainer
        train = self.config.train
        with TrainingDisplay(train.num_steps, trainer.step_count, visible=self.is_main) as display:
            self._save_again(display)
            while trainer.step_count < train.num_steps and not self.validation.should_stop:
                stopping = leaving = False
                if self.is_main and train.max_minutes and time() - self.carried.started_at >= 60 * train.max_minutes:
                    self.carried.stop_requested = True
                for result in self._finished_steps():
                    self._renew_end_stage_copy()
                    self._record(result, display)
                    if result.skip_reason and result.consecutive_skips >= train.max_consecutive_skips:
                        self._stop_after_skips(result, result.skip_reason)
                    stopping = stopping or result.stop_requested
                    if train.keeps_every_step:
                        self.checkpoint_manager.keep_step(self._checkpoint_info)
                    self._keep_counters()
                    if result.step < train.num_steps and not stopping and not self.validation.should_stop:
                        is_settled = self._is_settled_after(result.step)
                        problem = self.checkpoint_manager.after_step(result, is_settled, self._checkpoint_info)
                        self._report_saves()
                        if problem and self.is_main:
                            display.print_line(problem)
                    leaving = result.leave_requested
                at_end = self._is_at_end
                if at_end or stopping:
                    self._save_at_end(display)
                self._report_saves()
                if stopping and not at_end:
                    if self.is_main:
                        print(f"stopped after step {trainer.step_count} on request; the same command resumes here")
                    return EXIT_STOPPED
                if leaving and not at_end:
                    # That waits for all ranks, so that nobody's connections are closed while a message is under way.
                    problem = self.checkpoint_manager.finish_save()
                    self._report_saves()
                    if problem and self.is_main:
                        display.print_line(f"{problem}; training continues")
                    return None
        return 0

    @property
    def _is_at_end(self) -> bool:
        return self.trainer.is_done or self.validation.should_stop

    def _save_at_end(self, display: TrainingDisplay) -> None:
        if self.trainer.is_done and self.validation.is_used:
            self._track_validation(self.trainer.step_count, self._final_losses())
        problem = self.checkpoint_manager.save_and_wait(self._checkpoint_info())
        if problem and self.is_main:
            display.print_line(problem)

    def _save_again(self, display: TrainingDisplay) -> None:
        """Save the state from which ranks go on where a loss, or a kill, has cut short a save to disk that was due."""
        if not self.trainer.step_count or self.trainer.swarm is not None or self._is_from_disk:
            return
        if self._is_at_end:
            self._save_at_end(display)
        else:
            self.checkpoint_manager.save_again(self._checkpoint_info)
        self._report_saves()

    def _finished_steps(self) -> Iterator[StepResult]:
        """Run the next step, and yield the results of the steps whose outcome is known by then.

        With post-validation that may be fewer than have run, unless a save or a validation may follow, or samples are
        hashed.
        """
        step = self.trainer.step_count + 1
        if self.async_pipeline is not None:
            yield from self.async_pipeline.run(self._steps_until_flush(step))
            return
        if self.post_validation is None:
            yield self.trainer.step()
            return
        settle = (
            self.config.data.hash_samples
            or step == self.config.train.num_steps
            or self.checkpoint_manager.may_save_after(step)
        )
        settle = settle or self._is_validation_step(step)
        for result in self.post_validation.advance(settle):
            yield result
            if result.stop_requested:
                yield from self.post_validation.settle()

    def _usual_steps_until_flush(self) -> int:
        """Return the steps between two flushes of an asynchronous pipeline, on average over the first ones."""
        first, flushes = 1, 0
        while first <= self.config.train.num_steps and flushes < _FLUSHES_FOR_MEAN:
            first, flushes = first + self._steps_until_flush(first), flushes + 1
        return max(1, round((first - 1) / max(1, flushes)))

    def _steps_until_flush(self, first: int) -> int:
        """Return the steps from the `first` one until an asynchronous pipeline is flushed: at multiples of the plan's
        `flush_every`, and where a save or a validation is due. So it depends on the step alone, and a resumed run has
        the same."""
        last = min(-(-first // self.plan.flush_every) * self.plan.flush_every, self.config.train.num_steps)
        saves = self.checkpoint_manager.is_save_step
        ends = (n for n in range(first, last) if self._is_validation_step(n) or saves(n))
        return next(ends, last) - first + 1

    def _is_settled_after(self, step: int) -> bool:
        """Return whether the trainer's state is that after this step, for good."""
        is_last = step == self.trainer.step_count
        return is_last and (self.post_validation is None or self.post_validation.is_settled)

    def _record(self, result: StepResult, display: TrainingDisplay) -> None:
        self.tokens_seen += result.num_tokens
        self._tokens_skipped = self._tokens_skipped + result.num_tokens if result.skip_reason else 0
        if self.config.data.hash_samples:
            self._hash_samples()
        self._keep_counters()  # what follows may take long, and the update isn't made twice where a rank is lost in it
        meetings = () if self.trainer.outer is None else self.trainer.outer.pop_meetings()
        for meeting in meetings if self.is_main else ():
            if problem := self.meetings.append(null_non_finite(asdict(meeting))):
                display.print_line(problem)
        for row in () if self.trainer.swarm is None else self.trainer.swarm.pop_rows():
            if problem := self.swarm_log.append(row):
                display.print_line(problem)
        if self.is_main:
            self.expert_load.add(result)
        if self.is_main and result.skip_reason:
            display.print_line(
                f"step {result.step} was skipped: {result.skip_reason} ({self._describe_samples(result.step, 1)})"
            )
        if note := self.trainer.path_routing.pop_note():
            display.print_line(f"step {result.step}: {note}")
        if self.is_main and result.expert_moves is not None and result.expert_moves.num_experts:
            display.print_line(f"step {result.step}: {result.expert_moves}")
        if self.stragglers is not None:
            self._tell_stragglers(self.stragglers.after_step(result), result, display)
        if self.gradient_check is not None:
            self._tell_stragglers(self.gradient_check.after_step(result.step), result, display)
        train = self.config.train
        losses = (
            validation_losses(self.trainer, self.config.eval.batches) if self._is_validation_step(result.step) else {}
        )
        self._track_validation(result.step, losses)
        if losses and self.is_main:
            more = self.validation.describe_last(result.step)
            display.print_line(f"step {result.step}: {validation_text(losses)}{more}")
        if self.callbacks:
            row = metrics_row(result, self.tokens_seen, self._epoch_after(result.step), None, None)
            self.callbacks.call("on_step", result.step, row)
            if losses:
                self.callbacks.call("on_eval", result.step, validation_metrics(losses))
        logged = result.step % train.log_every == 0 or result.step == train.num_steps
        if self.is_main and (logged or result.skip_reason or losses or result.expert_moves):
            measured = self.device_metrics.mfu(result), self.device_metrics.memory()
            row = metrics_row(result, self.tokens_seen, self._epoch_after(result.step), *measured)
            row |= validation_metrics(losses) | (self.validation.metrics() if losses else {})
            row |= {} if self.stragglers is None else self.stragglers.metrics()
            if problem := self.metrics.append(row):
                display.print_line(problem)
            self.trackers.log(row)
            display.step(row)

    def _tell_stragglers(self, check: StragglerCheck | None, result: StepResult, display: TrainingDisplay) -> None:
        """Log a comparison of all ranks, if one was due, say what is slow or wrong, and act on it."""
        if check is None:
            return
        if self.stragglers is not None:
            self.carried.usual_times = self.plan, self.stragglers.usual_times()
        for sentence in check.sentences if self.is_main else ():
            display.print_line(sentence)
        if self.is_main and (problem := self.straggler_log.append(check.row)):
            display.print_line(problem)
        if self.config.train.straggler_action == "replace" and check.new:
            recoveries = read_metrics(self.run_dir / RECOVERIES_FILE)
            for one in check.new if self.is_main else ():
                if not is_replaceable(one, recoveries):
                    why = ": another process would wait for a core, too" if one.waits_for_core else ""
                    display.print_line(f"step {result.step}: replace does nothing about the {one.fault}{why}")
            end_if_replaceable(self.world.rank, check.new, recoveries)
        if self.replanner is not None:
            change = self.replanner.after_check(check, result.step)
            for sentence in change.sentences:
                display.print_line(sentence)
            if change.plan is not None:
                self.carried.num_plan_changes += 1
                self.carried.ask_for_plan(change.plan)

    def _report_saves(self) -> None:
        """Tell callbacks of the checkpoints that are complete by now."""
        for saved_step in self.checkpoint_manager.pop_saved_steps():
            folder = checkpoint_path(self.run_dir / CHECKPOINTS_FOLDER, saved_step)
            self.callbacks.call("on_save", saved_step, saved=folder)

    def _track_validation(self, step: int, losses: dict[str, float]) -> None:
        """Let the validation after a step decide which checkpoint is kept, and whether training stops."""
        if (loss := losses.get(ALL_DATA)) is None:
            return
        self._last_losses = step, losses
        self.validation.update(step, loss)
        if self.config.train.keep_best:
            self.checkpoint_manager.keep_best(self.validation.best_step)

    def _final_losses(self) -> dict[str, float]:
        """Return the validation losses after the last step, which are computed once; all ranks call it."""
        step, losses = self._last_losses
        if step != self.trainer.step_count:
            losses = validation_losses(self.trainer, self.config.eval.batches)
            self._last_losses = self.trainer.step_count, losses
        return losses

    def _epoch_after(self, step: int) -> float:
        """Return the number of passes over the training samples after a step."""
        trainer = self.trainer
        later = trainer.step_count - step
        return trainer.batch_loader.num_epochs(trainer.samples_consumed - later * self.config.train.global_batch_size)

    def _is_validation_step(self, step: int) -> bool:
        """Return whether a validation loss is due after a step; the last step's is that of the report."""
        every = self.config.eval.every
        return every > 0 and step % every == 0 and step < self.config.train.num_steps

    def _hash_samples(self) -> None:
        """Add the samples that the first stages were fed, in global order, to the hash of the stream."""
        digests: list[tuple[int, bytes]] = []
        if self.world.at.tp == 0:  # the other ranks of its tensor-parallel group are fed the same
            digests = [(number, sample_digest(tokens)) for number, tokens in self.trainer.batch_loader.fed_samples()]
        everyone = sorted(pair for pairs in self.world.all_gather_object(digests) for pair in pairs)
        self.stream.update(digest for _, digest in everyone)
        if self.is_main:
            with suppress(MusterError):  # metrics.jsonl, on the same disk, reports the error
                write_text(self.run_dir / "samples.sha256", self.stream.state + "\n")

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def _keep_counters(self) -> None:
        """Note the counters after a step, which the next generation goes on with, where no copies are kept."""
        if self.config.train.recovery == "checkfree":
            self._recorded = self.trainer.step_count, self._counters()

    def _renew_end_stage_copy(self) -> None:
        """Send the embedding's or the head's state after a step to the rank beside it, under CheckFree+.

        That is the first thing after a step: a rank that is lost before leaves the others one update ahead.
        """
        if self.config.train.recovery == "checkfree" and self.plan.schedule_entry.swaps_end_stages:
            state = self._own_tensors()
            self._end_stage_copy = self._end_stage_copy or EndStageCopy(self.world, state)
            self._end_stage_copy.renew(self.trainer.step_count, state)

    def _counters(self) -> dict[str, Any]:
        """Return the counters of a checkpoint."""
        counters = {
            **self.trainer.counters(),
            "stream_hash": self.stream.state,
            "tokens_seen": self.tokens_seen,
            "data": self.trainer.dataset.fingerprint,
        }
        if self.validation.is_used:
            counters["validation"] = self.validation.state()
        return counters

    def _checkpoint_info(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        return {
            "plan": self.trainer.plan.model_dump(mode="json"),
            "model": self.config.model.model_dump(mode="json"),
            "run": self.config.model_dump(mode="json"),
            "counters": self._counters(),
        }

    def _resume(self) -> None:
        """Go on from the newest state that there is, and leave steps after it out of the records."""
        own = self.config, self.trainer, self.world, self.run_dir
        loaded = StateLoader(*own, self.in_memory_checkpoint).load(self.carried.kept)
        if self.is_main and self.config.train.recovery == "checkfree" and self.world.generation:
            write_approximation(self.run_dir, self.world.generation, loaded.approximation)
        self._origin, self._is_from_disk = loaded.origin, loaded.is_from_disk
        if loaded.counters is not None:
            self._take_up(loaded.counters)
        self._renew_end_stage_copy()
        self._keep_counters()
        self.carried.kept = ()  # only now: until all ranks have theirs, another loss needs what is kept
        if self.in_memory_checkpoint is not None and self.config.train.elastic:
            self.in_memory_checkpoint.begin_after(self.trainer.step_count, self.world.all_gather_object)
        if self.is_main:
            begin_attempt(self.run_dir)
            self._record_attempt()
            for log in (self.metrics, self.meetings, self.straggler_log, self.swarm_log):
                log.truncate_after(self.trainer.step_count)
        else:
            self.carried.logs.clear()  # of a rank that is no longer the first

    def _take_up(self, counters: Mapping[str, Any]) -> None:
        """Take up the loop's counters after the step that the trainer is at."""
        self.stream.state = counters["stream_hash"]
        # Checkpoints of early versions don't have this counter.
        self.tokens_seen = counters.get("tokens_seen", self.trainer.step_count * self.config.workload.tokens_per_step)
        if (state := counters.get("validation")) is not None and self.validation.is_used:
            self.validation.load(state)
            if self.config.train.keep_best and self.validation.best_loss is not None:
                self.checkpoint_manager.keep_best(self.validation.best_step)

    def _record_attempt(self) -> None:
        """Note when this attempt goes on, and which steps it repeats; ranks that went on after a loss do without."""
        own = self.trainer.step_count, self.metrics.path, self.world.generation, self.plan.hash
        row = attempt_row(self.started_at, time(), *own, launch_time())
        try:
            append_attempt(self.run_dir, row)
        except OSError as error:
            if not self.world.generation:
                raise run_directory_error(self.run_dir, error) from error
            print(f"can't write {self.run_dir / ATTEMPTS_FILE} ({error.strerror}); training continues")

    def _stop_after_skips(self, result: StepResult, reason: str) -> None:
        """Stop after too many consecutive skipped steps, the last one for `reason`, and save the state before them."""
        count = result.consecutive_skips
        if self.trainer.outer is not None:  # the other islands train on: nothing can be saved together
            raise MusterError(
                f"{count} steps in a row were skipped on the island of rank {self.world.rank}, as many as"
                f" train.max_consecutive_skips allows, step {result.step} because {reason}: resume from the last"
                " checkpoint with a lower optim.lr, or allow more"
            )
        if self.async_pipeline is not None:  # the steps up to the flush have run, and can't be taken back
            raise MusterError(
                f"{count} steps in a row were skipped, as many as train.max_consecutive_skips allows, step"
                f" {result.step} because {reason}: resume from the last checkpoint with a lower optim.lr, or allow"
                " more"
            )
        samples = self._describe_samples(result.step, count)
        self.trainer.rewind(count)
        self.tokens_seen -= self._tokens_skipped
        self.checkpoint_manager.save_and_wait(self._checkpoint_info(), "failed")
        steps = f"step {result.step} was" if count == 1 else f"steps {result.step - count + 1} to {result.step} were"
        raise MusterError(
            f"{steps} skipped, as many in a row as train.max_consecutive_skips allows: step {result.step} because"
            f" {reason}; the state before is in {self.run_dir / 'failed'}, what followed are {samples}"
        )

    def _describe_samples(self, last: int, steps: int) -> str:
        """Describe the samples of `steps` steps up to the step `last`."""
        size = self.config.train.global_batch_size
        end = self.trainer.samples_consumed - (self.trainer.step_count - last) * size
        return f"samples {end - steps * size} to {end - 1}"
