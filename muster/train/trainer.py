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
from muster.data.dataset import Batch, Dataset
from muster.data.share import read_share
from muster.optim.lr import rate_of_step
from muster.optim.make import make_optimizer
from muster.parallel.executor import Executor
from muster.parallel.feed import Feed
from muster.parallel.op_profile import Profile, profile_stages
from muster.parallel.route import Route, stage_routes, tied_routes
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.schedule.build import program_of
from muster.schedule.check import check
from muster.schedule.program import has_split_backward
from muster.simulate.timeline import Event
from muster.spec.layout import TensorLayout, stages_of
from muster.spec.mesh import rank_at
from muster.spec.plan import Order, Plan
from muster.spec.run import RunConfig
from muster.train.loss_scale import LossScale
from muster.train.skips import Skips
from muster.train.step_result import StepResult

KEPT_ROUNDS = 64
"""Rounds whose events are kept, for the measured timeline."""


class Trainer:
    """This rank's stages, optimizer and position in the data."""

    stage_type = DecoderStage

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: Dataset) -> None:
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
        self._copies = self._find_copies()
        handlers = {"NORM": self._norm, "STEP": self._apply, "TIE": self._tie, "MERGE": self._merge}
        self._handlers = handlers
        self._routes = stage_routes(config.model, world, workload.seq_len, self.stages)
        self._tied_routes = tied_routes(config.model, world, self.stages)
        self._executor = self._make_executor(train=True)
        self._evaluator = self._make_executor(train=False)
        self._make_optimizer()
        self.skips = Skips(config.train)
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self.step_count = 0
        """Steps made, skipped ones included."""
        self.samples_consumed = 0
        self._num_valid = 1
        self.stop_requested = False
        self.save_votes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        """Asked in each step: whether this rank is saving, and whether a save has failed since."""
        self.rounds: deque[tuple[int, list[Event]]] = deque(maxlen=KEPT_ROUNDS)
        self._micro_batches = plan.num_micro_batches(workload)
        self._reads = plan.spread_vocab or any(stage.is_first or stage.is_last for stage in self.stages.values())
        self.tokens_fed: Tensor | None = None

    def _read_plan(self) -> None:
        self.program = program_of(self.plan, self.config.model, self.config.workload)
        report, at = check(self.program), self.world.at.pp
        self.peak_by_stage, self.peak_words = report.peak_by_stage[at], report.peak_words[at]

    def take_order(self, order: Order) -> None:
        """Goes on in another order of the plan's schedule, which has the stages where they are."""
        self.plan = self.plan.model_copy(update={"order": order})
        self._read_plan()
        self._executor = self._make_executor(train=True)

    def _make_executor(self, train: bool) -> Executor:
        program = self.program if train else program_of(self.plan, self.config.model, self.config.workload, train=False)
        world = self.world
        words = next((stage.words for stage in self.stages.values() if stage.words), None)
        return Executor(program, world.at.pp, world.rank, self.stages, self._routes, self._handlers, words=words)

    def _make_optimizer(self) -> None:
        self.optimizer = make_optimizer(self.config.optim, self.parameters, self._layouts, self.world)

    # ------------------------------------------------------------------------------------------------------------------
    # Training

    def step(self) -> StepResult:
        """One optimizer step over the next global batch. A batch whose step is skipped is not tried again."""
        start_s = perf_counter()
        batch_size = self.config.train.global_batch_size
        self._num_valid = self.dataset.num_valid(self.samples_consumed, batch_size)
        self._feed(self._share(self.dataset.train_batch, self.samples_consumed, batch_size), self._num_valid)
        data_s = perf_counter() - start_s
        self._learning_rate = rate_of_step(self.config.optim, self.step_count, self.config.train.steps)
        self.rounds.append((self.step_count + 1, self._executor.run()))
        self.step_count += 1
        self.samples_consumed += batch_size
        return StepResult(
            step=self.step_count,
            loss=self._loss,
            z_loss=self._z_loss,
            grad_norm=self._grad_norm,
            learning_rate=self._learning_rate,
            tokens=self.config.workload.tokens_per_step,
            time_s=perf_counter() - start_s,
            data_s=data_s,
            skipped=self._skipped,
            skipped_so_far=self.skips.total,
            skipped_in_row=self.skips.in_row,
            stop_requested=self._any_stop_requested,
            saving=self._saving,
            save_failed=self._save_failed,
        )

    def evaluate(self, num_batches: int) -> float | None:
        """Mean loss over the first held-out batches; None when there are too few held-out samples for one."""
        batch_size = self.config.train.global_batch_size
        num_batches = min(num_batches, self.dataset.num_held_out_samples // batch_size)
        sums = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        with torch.no_grad():
            for index in range(num_batches):
                batch = self._share(self.dataset.held_out_batch, index * batch_size, batch_size)
                self._feed(batch, 1)
                self._evaluator.run()
                for stage in self.stages.values():
                    sums[0] += stage.take_losses()[0]
                    # Tensor-parallel neighbours have the same; a second replica is idle.
                    if stage.index == self.plan.depth - 1 and batch is not None and self.world.at.tp == 0:
                        sums[1] += batch.num_valid
        for stage in self.stages.values():
            stage.reshard()
        total, count = self.world.add_up(sums).tolist()
        return total / count if count else None

    def profile(self) -> Profile:
        """Times every instruction and counts bytes; afterwards parameters and optimizer are as new."""
        self._learning_rate = 0.0
        found = profile_stages(self.program, self.stages, self.world, self._handlers, self._routes)
        for stage in self.stages.values():
            stage.drop_gradients()
            stage.reshard()
            stage.reset_values(self.config.seed)
        self._make_optimizer()
        self.skips = Skips(self.config.train)
        self.loss_scale = LossScale() if self.loss_scale else None
        return found

    # ------------------------------------------------------------------------------------------------------------------
    # Data

    def _share(self, read: Callable[[int, int], Batch], first: int, count: int) -> Batch | None:
        """This rank's part of the global samples first … first + count; None on ranks that need no data."""
        if not self._reads:
            return None
        return read_share(read, self.plan, self.world.at, first, count)

    def _feed(self, batch: Batch | None, num_valid: int) -> None:
        z_coefficient, scale = self.config.train.z_loss, self.loss_scale.value if self.loss_scale else 1.0
        if batch is None:
            feed = Feed(torch.empty(0), torch.empty(0), num_valid, z_coefficient, scale)
        else:
            shape = (self._micro_batches, -1, self.config.train.seq_len)
            tokens, labels = (
                torch.from_numpy(array).to(self.world.device).view(shape)
                for array in (batch.tokens_BS, batch.labels_BS)
            )
            feed = Feed(tokens, labels, num_valid, z_coefficient, scale)
        for stage in self.stages.values():
            stage.feed = feed
            if stage.words is not None:
                stage.words.feed = feed
        self.tokens_fed = feed.tokens_MBS if 0 in self.stages else None

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
        stage.take_gradients()
        gradients = [local.grad for local in stage.parameters.values() if local.grad is not None]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            flat += Route.to(other).swap(flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _find_copies(self) -> list[tuple[Tensor, Tensor]]:
        """(tied weight of a last stage, the same weight of a first stage on this rank): the optimizer knows one."""
        return [
            (copy, self.parameters[name])
            for stage in self.stages.values()
            for name, copy in stage.parameters.items()
            if name in self.parameters and copy is not self.parameters[name]
        ]

    def _norm(self, action: Action) -> None:
        """The global gradient norm, the step's loss, whether anyone wants to stop and how saving goes, in one sum over
        all ranks; from it whether the step is skipped."""
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
            sums[0] += _sum_of_squares(stage)
            sums[1:3] += stage.take_losses()
        sums[3] = self.stop_requested
        sums[4], sums[5] = self.save_votes()
        squares, loss_sum, z_loss_sum, stop, saving, save_failed = self.world.add_up(sums).tolist()
        self._loss, self._z_loss = loss_sum / self._num_valid, z_loss_sum / self._num_valid
        self._grad_norm = math.sqrt(squares) if squares >= 0 else math.nan
        self._any_stop_requested, self._saving, self._save_failed = stop > 0, saving > 0, save_failed > 0
        self._skipped = self.skips.judge(self._loss, self._grad_norm)
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not math.isfinite(self._grad_norm))

    def _apply(self, action: Action) -> None:
        """Clips by the global norm and steps; gathered parameters are dropped, since they are old now."""
        if self._skipped is None:
            clip_norm = self.config.optim.clip_norm
            if clip_norm and self._grad_norm > clip_norm:
                self._multiply_gradients(clip_norm / (self._grad_norm + 1e-6))
            self.optimizer.step(self._learning_rate)
            self._update_copies()
        for stage in self.stages.values():
            stage.drop_gradients()
            stage.reshard()

    def _multiply_gradients(self, factor: float) -> None:
        locals_ = (local for stage in self.stages.values() for local in stage.parameters.values())
        if gradients := [local.grad for local in locals_ if local.grad is not None]:  # a rank may hold no part of any
            torch._foreach_mul_(gradients, factor)

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def _update_copies(self) -> None:
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
        self._update_copies()
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


def _sum_of_squares(stage: DecoderStage) -> float:
    """Of this rank's gradients, each divided by the number of ranks that hold the same."""
    by_copies: dict[int, list[Tensor]] = {}
    for name, local in stage.parameters.items():
        if local.grad is not None and local.grad.numel():
            by_copies.setdefault(stage.layouts[name].copies, []).append(local.grad)
    norms = {copies: float(torch.nn.utils.get_total_norm(grads)) for copies, grads in by_copies.items()}
    return sum(norm * norm / copies for copies, norm in norms.items())
