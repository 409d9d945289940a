"""Moves of experts between steps: to other ranks of `ep`, with their optimizer state, as their load asks for.

All ranks decide alike, from choices of experts that the step's all-reduce has summed, by a pure function of these
(`muster.cost.expert_moves`). Then each tensor of stacked experts is exchanged in place, one after the other, and
layouts name its rows anew: whatever reads a layout, checkpoints above all, knows of nothing else.
"""

from collections.abc import Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.config.run_config import RunConfig
from muster.cost.expert_moves import (
    exchanged_tensors,
    moved_bytes,
    ranks_max_over_mean,
    rebalanced_placement,
    trial_placements,
)
from muster.layout.box import Box
from muster.layout.expert_moves import box_transfers, expert_members, num_moved_experts
from muster.layout.expert_placement import expert_order
from muster.layout.tensor_layout import TensorLayout, is_expert, slices_within, stage_layouts
from muster.optim.peer_exchange import PeerGroup
from muster.parallel.device_clock import synchronize
from muster.parallel.expert_parallel import place_experts
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.spec.plan import Plan
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_result import ExpertMoves
from muster.train.step_state import StepState

TRIALS = 2
"""Times that a profile moves experts there and back."""


class MoveRates(NamedTuple):
    """Rates of moves on this machine."""

    tensor_s: float
    """Seconds of the exchange of a tensor besides its bytes."""
    byte_s: float
    """Seconds of a byte that any rank sends."""


class ExpertMover:
    """The load of the experts since the last moves, and the moves of this rank's."""

    def __init__(self, config: RunConfig, world: World, updater: ParameterUpdater) -> None:
        self._config, self._world, self._updater = config, world, updater
        self._members, member = expert_members(world.plan, world.at)
        self._peers = PeerGroup(world, tuple(self._members), member)
        self._load_LE: Tensor | None = None
        """Choices of each expert in the steps since the last moves: float64 [layers with experts, E]."""
        self._last_step = 0
        self._rates: MoveRates | None = None
        self.sent_bytes = 0
        """Bytes that this rank has sent so far."""

    def is_due(self, step: int) -> bool:
        """Return whether experts may move after a step; after the last one it would serve nothing."""
        train = self._config.train
        return step % train.rebalance_experts_every == 0 and step < train.num_steps

    def add(self, state: StepState) -> None:
        """Add the load of a step, once."""
        if state.router_load is not None and state.step != self._last_step:
            load_LE = state.router_load[:, :-1]
            self._load_LE = load_LE.clone() if self._load_LE is None else self._load_LE + load_LE
            self._last_step = state.step

    def profile(self, plan: Plan) -> None:
        """Time moves there and back, from which the time of others is predicted; all ranks call it."""
        trials = [
            plan.model_copy(update={"expert_placement": one}) for one in trial_placements(self._config.model, plan)
        ]
        found = []
        for after in trials:
            times_s = [self._exchange_s(*way) for _ in range(TRIALS) for way in ((plan, after), (after, plan))]
            found.append((*self._sizes(plan, after), max(self._world.all_gather_object(median(times_s)))))
        if found:
            (count, few, few_s), (_, many, many_s) = found
            byte_s = max(0.0, many_s - few_s) / (many - few) if many > few else few_s / few
            self._rates = MoveRates(max(0.0, few_s - few * byte_s) / count, byte_s)
        self.sent_bytes = 0

    def _exchange_s(self, before: Plan, after: Plan) -> float:
        self._world.barrier()
        start_s = perf_counter()
        self._exchange(before, after)
        self.place(after)
        synchronize(self._world.device)
        return perf_counter() - start_s

    def _sizes(self, before: Plan, after: Plan) -> tuple[int, int]:
        """Return the tensors of the busiest rank and the bytes of all ranks that an exchange takes."""
        own = self._config.model, before, after, self._config.optim
        return exchanged_tensors(*own), moved_bytes(*own)

    def move(self, plan: Plan, state: StepState) -> tuple[Plan, ExpertMoves | None]:
        """Move experts where that pays; returns the plan with their places of now, and what has moved."""
        self.add(state)
        if self._load_LE is None:
            return plan, None
        model, optim, loads_LE = self._config.model, self._config.optim, self._load_LE.tolist()
        self._load_LE = None
        after = plan.model_copy(update={"expert_placement": rebalanced_placement(model, plan, optim, loads_LE)})
        start_s = perf_counter()
        if after.expert_placement != plan.expert_placement:
            self._updater.hooks.before_update()
            self._exchange(plan, after)
            self.place(after)
            synchronize(self._world.device)
        time_s = perf_counter() - start_s
        tensors, sent = self._sizes(plan, after)
        rates = self._rates
        return after, ExpertMoves(
            num_moved_experts(model, plan, after),
            sent,
            time_s,
            ranks_max_over_mean(model, plan, loads_LE),
            ranks_max_over_mean(model, after, loads_LE),
            None if rates is None else tensors * rates.tensor_s + sent * rates.byte_s,
        )

    def place(self, plan: Plan) -> None:
        """Go on with experts in the places of a plan, whose values the caller has put there or will."""
        for stage in self._updater.stages.values():
            place_experts(stage.module, partial(expert_order, stage.spec, plan))
            layouts = stage_layouts(stage.spec, plan, stage.index, self._world.at)
            placed = {layout.name: layout for layout in layouts if is_expert(layout.name)}
            stage.layouts.update(placed)
            self._updater.layouts.update(placed)

    def _exchange(self, before: Plan, after: Plan) -> None:
        shards = self._updater.local_shards()
        for stage in self._updater.stages.values():
            old, new = (self._layouts_of_members(stage, plan) for plan in (before, after))
            for shard in shards:
                if (name := shard.layout.name) in old and old[name] != new[name]:
                    self._exchange_shard(shard, old[name], new[name])

    def _layouts_of_members(self, stage: DecoderStage, plan: Plan) -> dict[str, list[TensorLayout]]:
        """Return the layouts of the stage's experts under a plan by name, a member's each."""
        found: dict[str, list[TensorLayout]] = {}
        for at in self._members.values():
            for layout in stage_layouts(self._config.model, plan, stage.index, at):
                if is_expert(layout.name):
                    found.setdefault(layout.name, []).append(layout)
        return found

    def _exchange_shard(self, shard: LocalShard, before: list[TensorLayout], after: list[TensorLayout]) -> None:
        """Fill a tensor with the parts that its rows are named after from now on."""
        own, device = self._peers.member, self._world.device
        sends: list[list[Tensor]] = [[] for _ in before]
        places: list[list[Tensor]] = [[] for _ in before]
        for sender, receiver, box in box_transfers([one.boxes for one in before], [one.boxes for one in after]):
            part = _part_of(shard, before[own], box) if sender == own else None
            place = _part_of(shard, after[own], box) if receiver == own else None
            if part is not None and place is not None and part.data_ptr() == place.data_ptr():
                continue
            if part is not None:
                sends[receiver].append(part)
            if place is not None:
                places[sender].append(place)
        sent = [_joined(parts, shard.tensor).to(device) for parts in sends]
        received = [shard.tensor.new_empty(sum(map(Tensor.numel, parts)), device=device) for parts in places]
        self._peers.all_to_all(sent, received)
        self.sent_bytes += sum(one.nbytes for member, one in enumerate(sent) if member != own)
        with torch.no_grad():
            for parts, flat in zip(places, received, strict=True):
                for place, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                    place.copy_(values.view(place.shape))

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def counters(self) -> dict[str, Any]:
        """Return the counters that the next moves depend on beside the plan, for a checkpoint's manifest."""
        return {} if self._load_LE is None else {"expert_choices": self._load_LE.tolist()}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Take up the counters of a checkpoint."""
        choices = counters.get("expert_choices")
        self._load_LE = None if choices is None else torch.tensor(choices, dtype=torch.float64)


def _part_of(shard: LocalShard, layout: TensorLayout, box: Box) -> Tensor:
    """Return the view of a shard's tensor that holds a box under a layout."""
    for outer, view in LocalShard(shard.name, layout, shard.tensor).box_views():
        if all(start <= first for start, first in zip(outer.start, box.start, strict=True)) and all(
            first + size <= start + whole
            for first, size, start, whole in zip(box.start, box.size, outer.start, outer.size, strict=True)
        ):
            return view[slices_within(box, outer)]
    raise AssertionError(f"{shard.name}: {box} isn't here")


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)
