"""The trainer: one rank's part of training, round by round. It knows rounds, not micro-batches."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.config.run_config import RunConfig
from muster.data.dataset import SampleStream
from muster.layout.mesh import dp_index_of, rank_at
from muster.layout.tensor_layout import TensorLayout, stages_on
from muster.optim.build import build_optimizer
from muster.optim.lr import lr_at_step
from muster.parallel.executor import Executor
from muster.parallel.op_profile import StageProfile, profile_stages
from muster.parallel.p2p import stage_routes, tied_embedding_routes, variable_length_routes
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import Program, has_split_backward
from muster.simulate.timeline import Event
from muster.spec.plan import PinnedSchedule, Plan
from muster.train.batch_loader import BatchLoader
from muster.train.custom_step import CustomStep
from muster.train.evaluator import Evaluator
from muster.train.gradients import add_replica_gradients, find_tied_copies, sum_of_squares
from muster.train.loss_scale import LossScale
from muster.train.post_validation import PostValidation
from muster.train.step_result import StepResult
from muster.train.step_skipper import StepSkipper

KEPT_STEPS = 64
"""Rounds whose events are kept, for the measured timeline."""


class Trainer:
    """This rank's stages, optimizer and position in the data."""

    stage_type = DecoderStage

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: SampleStream) -> None:
        self.config, self.plan, self.world, self.dataset = config, plan, world, dataset
        workload = config.workload
        self._read_plan()
        split_backward = has_split_backward(self.program) or plan.split_backward
        self.stages = {
            index: self.stage_type(config.model, world, index, workload.seq_len, config.seed, split_backward)
            for index in stages_on(plan, world.at.pp)
        }
        self.parameters: dict[str, Tensor] = {}
        self._layouts: dict[str, TensorLayout] = {}
        for stage in self.stages.values():
            for name, layout in stage.layouts.items():
                if self._layouts.setdefault(name, layout) is layout and layout.boxes:
                    self.parameters[name] = stage.parameters[name]
        self._copies = find_tied_copies(self.stages.values(), self.parameters)
        self.handlers = {"NORM": self._norm, "STEP": self._apply, "TIE": self._tie, "MERGE": self._merge}
        self._custom_step = (
            CustomStep(self, config.train.training_step) if config.train.training_step is not None else None
        )
        make_routes = variable_length_routes if config.data.packing == "none" else stage_routes
        self._routes = make_routes(config.model, world, workload.seq_len, self.stages)
        self._tied_routes = tied_embedding_routes(config.model, world, self.stages)
        self._make_executors()
        self.batch_loader = BatchLoader(config, plan, world, dataset, self.stages)
        evaluation = build_program(plan, config.model, workload, train=False, data_rank=dp_index_of(plan, world.at))
        self.evaluator = Evaluator(
            self.batch_loader, lambda tells: self._make_executor(evaluation, self.handlers, tells)
        )
        self._make_optimizer()
        self.step_skipper = StepSkipper(config.train)
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self.step_count = 0
        """Steps made, skipped ones included."""
        self.samples_consumed = 0
        self.num_valid, self.num_tokens = 1, 0
        self.stop_requested = False
        self.save_votes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        """Asked in each step: whether this rank is saving, and whether a save has failed since."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before parameters and the optimizer's state change."""
        self.step_events: deque[tuple[int, list[Event]]] = deque(maxlen=KEPT_STEPS)

    def _read_plan(self) -> None:
        self.program = self._program_of(self.plan)
        report, at = check(self.program), self.world.at.pp
        self.peak_by_stage, self.peak_words = report.peak_by_stage[at], report.peak_logits[at]

    def _program_of(self, plan: Plan) -> Program:
        """With as many micro-batches as this rank's share of the data has."""
        data = dp_index_of(plan, self.world.at)
        return build_program(plan, self.config.model, self.config.workload, data_rank=data)

    def use_order(self, order: PinnedSchedule) -> None:
        """Goes on in another order of the plan's schedule, which has the stages where they are."""
        self.plan = self.plan.model_copy(update={"pinned_schedule": order})
        self._read_plan()
        self._make_executors()

    def _make_executors(self) -> None:
        """The one that waits for all ranks before a step, and what goes ahead of that where the plan says so."""
        waiting = self.plan.model_copy(update={"post_validation": False})
        program = self._program_of(waiting)
        own = {} if self._custom_step is None else self._custom_step.handlers
        self._executor = self._make_executor(program, self.handlers | own)
        self.post_validation: PostValidation | None = None
        if self.plan.post_validation:
            self.post_validation = PostValidation(
                self, lambda own: self._make_executor(self.program, self.handlers | own)
            )

    def _make_executor(
        self, program: Program, handlers: Mapping[str, Callable[[Action], None]], tells: bool = True
    ) -> Executor:
        world, where = self.world, self.world.heartbeat if tells else None
        words = next((stage.vocab for stage in self.stages.values() if stage.vocab), None)
        return Executor(
            program, world.at.pp, world.rank, self.stages, self._routes, handlers, vocab=words, heartbeat=where
        )

    def _make_optimizer(self) -> None:
        self.optimizer = build_optimizer(self.config.optim, self.parameters, self._layouts, self.world)

    # ------------------------------------------------------------------------------------------------------------------
    # Training

    def step(self) -> StepResult:
        """One optimizer step over the next global batch. A batch whose step is skipped is not tried again."""
        start_s = perf_counter()
        self.load_batch()
        data_s = perf_counter() - start_s
        events = self._executor.run()
        if self._custom_step is not None:
            self._custom_step.run(self._executor.run)
        self.count_finished_step(events)
        return self.result(self.step_count, self.learning_rate, self.num_tokens, perf_counter() - start_s, data_s)

    def load_batch(self) -> None:
        """Gives the stages the next global batch."""
        self.world.heartbeat.step = self.step_count
        self.world.heartbeat.update("data")
        share = self.batch_loader.next_batch(self.samples_consumed)
        self.num_valid, self.num_tokens = share.num_valid, share.num_tokens
        self.batch_loader.feed_stages(share, self.loss_scale.value if self.loss_scale else 1.0)
        self.learning_rate = lr_at_step(self.config.optim, self.step_count, self.config.train.num_steps)

    def count_finished_step(self, events: list[Event]) -> None:
        """Goes on to the batch after the one that has been trained on."""
        self.step_count += 1
        self.samples_consumed += self.config.train.global_batch_size
        self.step_events.append((self.step_count, events))

    def result(self, step: int, learning_rate: float, tokens: int, time_s: float, data_s: float) -> StepResult:
        """Of the step that was judged last."""
        return StepResult(
            step=step,
            loss=self.loss,
            z_loss=self._z_loss,
            grad_norm=self.grad_norm,
            learning_rate=learning_rate,
            num_tokens=tokens,
            time_s=time_s,
            data_s=data_s,
            skip_reason=self._skipped,
            total_skips=self.step_skipper.total,
            consecutive_skips=self.step_skipper.consecutive,
            stop_requested=self._any_stop_requested,
            is_saving=self._saving,
            save_failed=self._save_failed,
        )

    def is_state_after(self, step: int) -> bool:
        """Whether the state is that after this step, for good."""
        return step == self.step_count and (self.post_validation is None or self.post_validation.is_settled)

    def profile(self) -> StageProfile:
        """Times every instruction and counts bytes; afterwards parameters and optimizer are as new."""
        self.learning_rate = 0.0
        self.world.heartbeat.update("profile")
        found = profile_stages(self.program, self.stages, self.world, self.handlers, self._routes)
        for stage in self.stages.values():
            stage.zero_grad()
            stage.reshard()
            stage.reset_parameters(self.config.seed)
        self._make_optimizer()
        self.step_skipper = StepSkipper(self.config.train)
        self.loss_scale = LossScale() if self.loss_scale else None
        return found

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions that are no stage's own

    def _tie(self, action: Action) -> None:
        """Adds the other copy's gradient to this copy of the tied embedding; both end with the same bits."""
        stage = self.stages[action.stage]
        stage.attach_local_gradients()
        gradient = stage.parameters["embed.weight"].grad
        assert gradient is not None
        gradient += self._tied_routes[action.stage].exchange(gradient)

    def _merge(self, action: Action) -> None:
        """Adds the other replica's gradients to these; both end with the same bits."""
        depth = self.plan.stages_per_replica
        stage = self.stages.get(action.stage) or self.stages[action.stage + depth]
        other = rank_at(self.plan, replace(self.world.at, pp=self.plan.pp_rank((stage.index + depth) % (2 * depth))))
        add_replica_gradients(stage, other)

    def _norm(self, action: Action) -> None:
        """The global gradient norm, the step's loss, whether anyone wants to stop and how saving goes, in one sum over
        all ranks; from it whether the step is skipped."""
        self.reduce_norm()

    def reduce_norm(self, decides: bool = True) -> None:
        """As `_norm`; for passes that are made again within a step, without another judgement of it."""
        sums = self.world.all_reduce(self.local_statistics())
        if decides:
            self.decide_step(sums, self.num_valid)
            return
        self._read_sums(sums, self.num_valid)

    def local_statistics(self) -> Tensor:
        """What this rank adds to that sum, of its complete gradients: float64 [6]."""
        sums = torch.zeros(6, dtype=torch.float64, device=self.world.device)
        for stage in self.stages.values():
            stage.attach_local_gradients()
        if self.plan.pp_rank(0) == self.plan.pp_rank(self.plan.stages_per_replica - 1):  # else TIE has added them up
            for copy, original in self._copies:
                assert copy.grad is not None
                assert original.grad is not None
                original.grad += copy.grad
                copy.grad.copy_(original.grad)
        if self.loss_scale is not None:
            self._multiply_gradients(1 / self.loss_scale.value)
        for stage in self.stages.values():
            sums[0] += sum_of_squares(stage)
            sums[1:3] += stage.pop_losses()
        sums[3] = self.stop_requested
        sums[4], sums[5] = self.save_votes()
        return sums

    def decide_step(self, sums: Tensor, num_valid: int) -> None:
        """Reads the sum of a step with so many counted tokens, and judges by it."""
        self._any_stop_requested = self._saving = self._save_failed = False
        self._read_sums(sums, num_valid)
        self._skipped = self.step_skipper.check(self.loss, self.grad_norm)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not math.isfinite(self.grad_norm))

    def _read_sums(self, sums: Tensor, num_valid: int) -> None:
        squares, loss_sum, z_loss_sum, stop, saving, save_failed = sums.tolist()
        self.loss, self._z_loss = loss_sum / num_valid, z_loss_sum / num_valid
        self.grad_norm = math.sqrt(squares) if squares >= 0 else math.nan
        self._any_stop_requested |= stop > 0
        self._saving |= saving > 0
        self._save_failed |= save_failed > 0

    @property
    def is_skipped(self) -> bool:
        """Whether the step that was judged last is not to be taken."""
        return self._skipped is not None

    @property
    def is_unmodified(self) -> bool:
        """Whether the step that was judged last is one with the gradients as they are."""
        return self._skipped is None and not self._exceeds_clip_norm()

    def _exceeds_clip_norm(self) -> bool:
        return 0 < self.config.optim.clip_norm < self.grad_norm

    def _apply(self, action: Action) -> None:
        """Clips by the global norm and steps; gathered parameters are dropped, since they are old now."""
        if self._skipped is None:
            self.clip()
            self.optimizer_step()
        self.drop_gradients()

    def clip(self) -> None:
        """Cuts the gradients down to the global norm that they may have."""
        if self._exceeds_clip_norm():
            self._multiply_gradients(self.config.optim.clip_norm / (self.grad_norm + 1e-6))

    def optimizer_step(self) -> None:
        """Changes the parameters by their gradients as they are."""
        self.before_change()
        self.optimizer.step(self.learning_rate)
        self.sync_tied_copies()

    def drop_gradients(self) -> None:
        """And the gathered parameters."""
        for stage in self.stages.values():
            stage.zero_grad()
            stage.reshard()

    def _multiply_gradients(self, factor: float) -> None:
        locals_ = (local for stage in self.stages.values() for local in stage.parameters.values())
        if gradients := [local.grad for local in locals_ if local.grad is not None]:  # a rank may hold no part of any
            torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def sync_tied_copies(self) -> None:
        for copy, original in self._copies:
            copy.copy_(original)

    def local_shards(self) -> list[LocalShard]:
        """Everything on this rank that a checkpoint holds."""
        layouts = self._layouts
        pieces = [LocalShard(f"model/{name}", layouts[name], local) for name, local in self.parameters.items()]
        for key, (name, tensor) in self.optimizer.state().items():
            pieces.append(LocalShard(f"optim/{key}", layouts[name], tensor))
        return pieces

    def counters(self) -> dict[str, Any]:
        """Where training stands, beside the step: what a checkpoint's manifest holds of it."""
        counters = {"samples_consumed": self.samples_consumed, "skips": self.step_skipper.state()}
        return counters if self.loss_scale is None else counters | {"loss_scale": self.loss_scale.state()}

    def restore(self, step: int, counters: Mapping[str, Any]) -> None:
        """Takes up the position of a checkpoint whose pieces have been loaded."""
        self.sync_tied_copies()
        self.step_count, self.samples_consumed = step, counters["samples_consumed"]
        if "skips" in counters:
            self.step_skipper.load(counters["skips"])
        if self.loss_scale is not None and "loss_scale" in counters:
            self.loss_scale.load(counters["loss_scale"])
        self.optimizer.step_count = step - self.step_skipper.total

    def rewind(self, steps: int) -> None:
        """Goes back over steps that were skipped: the state is still that before them."""
        self.step_count -= steps
        self.samples_consumed -= steps * self.config.train.global_batch_size
