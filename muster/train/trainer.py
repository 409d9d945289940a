"""The trainer: one rank's part of training, round by round. It knows rounds, not micro-batches."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.piece import Piece
from muster.data.dataset import Samples
from muster.optim.lr import rate_of_step
from muster.optim.make import make_optimizer
from muster.parallel.executor import Executor
from muster.parallel.op_profile import Profile, profile_stages
from muster.parallel.route import stage_routes, tied_routes, varying_routes
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.schedule.build import program_of
from muster.schedule.check import check
from muster.schedule.program import Program, has_split_backward
from muster.simulate.timeline import Event
from muster.spec.layout import TensorLayout, stages_of
from muster.spec.mesh import data_index, rank_at
from muster.spec.plan import Order, Plan
from muster.spec.run import RunConfig
from muster.train.feeding import Feeder
from muster.train.gradients import add_other_replica, find_copies, sum_of_squares
from muster.train.held_out import HeldOut
from muster.train.loss_scale import LossScale
from muster.train.own_step import OwnStep
from muster.train.post_validation import PostValidation
from muster.train.skips import Skips
from muster.train.step_result import StepResult

KEPT_ROUNDS = 64
"""Rounds whose events are kept, for the measured timeline."""


class Trainer:
    """This rank's stages, optimizer and position in the data."""

    stage_type = DecoderStage

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: Samples) -> None:
        self.config, self.plan, self.world, self.dataset = config, plan, world, dataset
        workload = config.workload
        self._read_plan()
        split_backward = has_split_backward(self.program) or plan.splits
        self.stages = {
            index: self.stage_type(config.model, world, index, workload.seq_len, config.seed, split_backward)
            for index in stages_of(plan, world.at.pp)
        }
        self.parameters: dict[str, Tensor] = {}
        self._layouts: dict[str, TensorLayout] = {}
        for stage in self.stages.values():
            for name, layout in stage.layouts.items():
                if self._layouts.setdefault(name, layout) is layout and layout.boxes:
                    self.parameters[name] = stage.parameters[name]
        self._copies = find_copies(self.stages.values(), self.parameters)
        self.handlers = {"NORM": self._norm, "STEP": self._apply, "TIE": self._tie, "MERGE": self._merge}
        self._own_step = OwnStep(self, config.train.training_step) if config.train.training_step is not None else None
        make_routes = varying_routes if config.data.packing == "none" else stage_routes
        self._routes = make_routes(config.model, world, workload.seq_len, self.stages)
        self._tied_routes = tied_routes(config.model, world, self.stages)
        self._make_executors()
        self.feeder = Feeder(config, plan, world, dataset, self.stages)
        evaluation = program_of(plan, config.model, workload, train=False, data=data_index(plan, world.at))
        self.held_out = HeldOut(self.feeder, lambda tells: self._make_executor(evaluation, self.handlers, tells))
        self._make_optimizer()
        self.skips = Skips(config.train)
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
        self.rounds: deque[tuple[int, list[Event]]] = deque(maxlen=KEPT_ROUNDS)

    def _read_plan(self) -> None:
        self.program = self._program_of(self.plan)
        report, at = check(self.program), self.world.at.pp
        self.peak_by_stage, self.peak_words = report.peak_by_stage[at], report.peak_words[at]

    def _program_of(self, plan: Plan) -> Program:
        """With as many micro-batches as this rank's share of the data has."""
        data = data_index(plan, self.world.at)
        return program_of(plan, self.config.model, self.config.workload, data=data)

    def take_order(self, order: Order) -> None:
        """Goes on in another order of the plan's schedule, which has the stages where they are."""
        self.plan = self.plan.model_copy(update={"order": order})
        self._read_plan()
        self._make_executors()

    def _make_executors(self) -> None:
        """The one that waits for all ranks before a step, and what goes ahead of that where the plan says so."""
        waiting = self.plan.model_copy(update={"post_validation": False})
        program = self._program_of(waiting)
        own = {} if self._own_step is None else self._own_step.handlers
        self._executor = self._make_executor(program, self.handlers | own)
        self.ahead: PostValidation | None = None
        if self.plan.post_validation:
            self.ahead = PostValidation(self, lambda own: self._make_executor(self.program, self.handlers | own))

    def _make_executor(
        self, program: Program, handlers: Mapping[str, Callable[[Action], None]], tells: bool = True
    ) -> Executor:
        world, where = self.world, self.world.where if tells else None
        words = next((stage.words for stage in self.stages.values() if stage.words), None)
        return Executor(program, world.at.pp, world.rank, self.stages, self._routes, handlers, words=words, where=where)

    def _make_optimizer(self) -> None:
        self.optimizer = make_optimizer(self.config.optim, self.parameters, self._layouts, self.world)

    # ------------------------------------------------------------------------------------------------------------------
    # Training

    def step(self) -> StepResult:
        """One optimizer step over the next global batch. A batch whose step is skipped is not tried again."""
        start_s = perf_counter()
        self.feed_step()
        data_s = perf_counter() - start_s
        events = self._executor.run()
        if self._own_step is not None:
            self._own_step.take(self._executor.run)
        self.count_step(events)
        return self.result(self.step_count, self.learning_rate, self.num_tokens, perf_counter() - start_s, data_s)

    def feed_step(self) -> None:
        """Gives the stages the next global batch."""
        self.world.where.step = self.step_count
        self.world.where.say("data")
        share = self.feeder.take(self.samples_consumed)
        self.num_valid, self.num_tokens = share.num_valid, share.num_tokens
        self.feeder.feed(share, self.loss_scale.value if self.loss_scale else 1.0)
        self.learning_rate = rate_of_step(self.config.optim, self.step_count, self.config.train.num_steps)

    def count_step(self, events: list[Event]) -> None:
        """Goes on to the batch after the one that has been trained on."""
        self.step_count += 1
        self.samples_consumed += self.config.train.global_batch_size
        self.rounds.append((self.step_count, events))

    def result(self, step: int, learning_rate: float, tokens: int, time_s: float, data_s: float) -> StepResult:
        """Of the step that was judged last."""
        return StepResult(
            step=step,
            loss=self.loss,
            z_loss=self._z_loss,
            grad_norm=self.grad_norm,
            learning_rate=learning_rate,
            tokens=tokens,
            time_s=time_s,
            data_s=data_s,
            skipped=self._skipped,
            skipped_so_far=self.skips.total,
            skipped_in_row=self.skips.in_row,
            stop_requested=self._any_stop_requested,
            saving=self._saving,
            save_failed=self._save_failed,
        )

    def stands_after(self, step: int) -> bool:
        """Whether the state is that after this step, for good."""
        return step == self.step_count and (self.ahead is None or self.ahead.is_settled)

    def profile(self) -> Profile:
        """Times every instruction and counts bytes; afterwards parameters and optimizer are as new."""
        self.learning_rate = 0.0
        self.world.where.say("profile")
        found = profile_stages(self.program, self.stages, self.world, self.handlers, self._routes)
        for stage in self.stages.values():
            stage.drop_gradients()
            stage.reshard()
            stage.reset_values(self.config.seed)
        self._make_optimizer()
        self.skips = Skips(self.config.train)
        self.loss_scale = LossScale() if self.loss_scale else None
        return found

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions that are no stage's own

    def _tie(self, action: Action) -> None:
        """Adds the other copy's gradient to this copy of the tied embedding; both end with the same bits."""
        stage = self.stages[action.stage]
        stage.take_gradients()
        gradient = stage.parameters["embed.weight"].grad
        assert gradient is not None
        gradient += self._tied_routes[action.stage].swap(gradient)

    def _merge(self, action: Action) -> None:
        """Adds the other replica's gradients to these; both end with the same bits."""
        depth = self.plan.depth
        stage = self.stages.get(action.stage) or self.stages[action.stage + depth]
        other = rank_at(self.plan, replace(self.world.at, pp=self.plan.pp_rank((stage.index + depth) % (2 * depth))))
        add_other_replica(stage, other)

    def _norm(self, action: Action) -> None:
        """The global gradient norm, the step's loss, whether anyone wants to stop and how saving goes, in one sum over
        all ranks; from it whether the step is skipped."""
        self.add_up_norm()

    def add_up_norm(self, judges: bool = True) -> None:
        """As `_norm`; for passes that are made again within a step, without another judgement of it."""
        sums = self.world.add_up(self.local_sums())
        if judges:
            self.conclude(sums, self.num_valid)
            return
        self._read_sums(sums, self.num_valid)

    def local_sums(self) -> Tensor:
        """What this rank adds to that sum, of its complete gradients: float64 [6]."""
        sums = torch.zeros(6, dtype=torch.float64, device=self.world.device)
        for stage in self.stages.values():
            stage.take_gradients()
        if self.plan.pp_rank(0) == self.plan.pp_rank(self.plan.depth - 1):  # else TIE has added them up
            for copy, original in self._copies:
                assert copy.grad is not None
                assert original.grad is not None
                original.grad += copy.grad
                copy.grad.copy_(original.grad)
        if self.loss_scale is not None:
            self._multiply_gradients(1 / self.loss_scale.value)
        for stage in self.stages.values():
            sums[0] += sum_of_squares(stage)
            sums[1:3] += stage.take_losses()
        sums[3] = self.stop_requested
        sums[4], sums[5] = self.save_votes()
        return sums

    def conclude(self, sums: Tensor, num_valid: int) -> None:
        """Reads the sum of a step with so many counted tokens, and judges by it."""
        self._any_stop_requested = self._saving = self._save_failed = False
        self._read_sums(sums, num_valid)
        self._skipped = self.skips.judge(self.loss, self.grad_norm)
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
    def is_as_computed(self) -> bool:
        """Whether the step that was judged last is one with the gradients as they are."""
        return self._skipped is None and not self._clips()

    def _clips(self) -> bool:
        return 0 < self.config.optim.clip_norm < self.grad_norm

    def _apply(self, action: Action) -> None:
        """Clips by the global norm and steps; gathered parameters are dropped, since they are old now."""
        if self._skipped is None:
            self.clip()
            self.take_step()
        self.drop_gradients()

    def clip(self) -> None:
        """Cuts the gradients down to the global norm that they may have."""
        if self._clips():
            self._multiply_gradients(self.config.optim.clip_norm / (self.grad_norm + 1e-6))

    def take_step(self) -> None:
        """Changes the parameters by their gradients as they are."""
        self.before_change()
        self.optimizer.step(self.learning_rate)
        self.update_copies()

    def drop_gradients(self) -> None:
        """And the gathered parameters."""
        for stage in self.stages.values():
            stage.drop_gradients()
            stage.reshard()

    def _multiply_gradients(self, factor: float) -> None:
        locals_ = (local for stage in self.stages.values() for local in stage.parameters.values())
        if gradients := [local.grad for local in locals_ if local.grad is not None]:  # a rank may hold no part of any
            torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def update_copies(self) -> None:
        for copy, original in self._copies:
            copy.copy_(original)

    def pieces(self) -> list[Piece]:
        """Everything on this rank that a checkpoint holds."""
        layouts = self._layouts
        pieces = [Piece(f"model/{name}", layouts[name], local) for name, local in self.parameters.items()]
        for key, (name, tensor) in self.optimizer.state().items():
            pieces.append(Piece(f"optim/{key}", layouts[name], tensor))
        return pieces

    def counters(self) -> dict[str, Any]:
        """Where training stands, beside the step: what a checkpoint's manifest holds of it."""
        counters = {"samples_consumed": self.samples_consumed, "skips": self.skips.state()}
        return counters if self.loss_scale is None else counters | {"loss_scale": self.loss_scale.state()}

    def go_to(self, step: int, counters: Mapping[str, Any]) -> None:
        """Takes up the position of a checkpoint whose pieces have been loaded."""
        self.update_copies()
        self.step_count, self.samples_consumed = step, counters["samples_consumed"]
        if "skips" in counters:
            self.skips.load(counters["skips"])
        if self.loss_scale is not None and "loss_scale" in counters:
            self.loss_scale.load(counters["loss_scale"])
        self.optimizer.step_count = step - self.skips.total

    def go_back(self, steps: int) -> None:
        """Goes back over steps that were skipped: the state is still that before them."""
        self.step_count -= steps
        self.samples_consumed -= steps * self.config.train.global_batch_size
