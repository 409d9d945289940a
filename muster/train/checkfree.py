"""State that ranks keep in their own memory when another is lost; lost stages made of those beside them (CheckFree).

Nobody keeps copies. Where another data-parallel rank holds the lost rank's stage, that is exact. Where nobody does, an
inner stage's layers become the weighted means of the layers at the same places of the stage before and the stage after
it, W_i ← (ω_{i−1} W_{i−1} + ω_{i+1} W_{i+1}) / (ω_{i−1} + ω_{i+1}), with a new optimizer state: an approximation, since
neighbouring layers of a decoder are alike (Blagoev, Ersoy and Chen 2025, "All is Not Lost: LLM Recovery without
Checkpoints", arXiv:2506.15461). Under schedule checkfree-plus the first and the last stage with layers become copies of
those that half of the micro-batches see in their place, and the stages of the embedding and of the head are kept by the
ranks beside them (`muster.train.end_stage_copy`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.mesh import coordinates_of
from muster.parallel.world import World
from muster.report.approximation import Approximation, RebuiltStage
from muster.schedule.checkfree_plus import swapped_stages
from muster.spec.plan import Plan
from muster.spec.units import numbered
from muster.train.parameter_updater import ParameterUpdater

WeightKind = Literal["squared_norm", "clipped_norm"]


@dataclass(frozen=True)
class KeptState:
    """A stage's state in the memory of a rank whose generation has ended."""

    stage: int
    num_updates: int
    """Steps whose update the tensors have seen."""
    step: int
    """Last step that was recorded; one less than `num_updates` where the rank left between both."""
    counters: Mapping[str, Any]
    """Counters of a checkpoint after `step`."""
    grad_norm: float
    """Norm of the layers' gradients in the last step, before clipping; 1 before the first."""
    tensors: Mapping[str, Tensor]
    """Parameters and optimizer state, by stored name."""
    origin: int = 0
    """Generation in which all ranks last went back to a checkpoint, or to the beginning; 0: in none."""


class Holding(NamedTuple):
    """Summary of a state that a rank holds, for the others."""

    stage: int
    num_updates: int
    step: int
    grad_norm: float
    origin: int = 0


class Transfers(NamedTuple):
    """Sources of each rank's state."""

    step: int
    """Step after which all go on."""
    counters_rank: int
    """Rank that has the counters of that step."""
    sources: list[tuple[int, ...]]
    """Sources by rank: itself, another with the same stage, or those that hold the stages before and after it."""
    approximation: Approximation
    origin: int


class RecoveredState(NamedTuple):
    """State with which all ranks go on; the tensors are filled."""

    step: int
    counters: Mapping[str, Any]
    approximation: Approximation
    new_parameters: list[str]
    """Parameters of the rebuilt stages, whose optimizer state is new."""
    copied: list[str]
    """Sentences about ranks whose stage comes from another rank that has held it, which is exact."""
    origin: int
    """Generation in which their ranks last went back, as `KeptState` has it."""


def recover_state(
    world: World, kept: Sequence[KeptState], tensors: Mapping[str, Tensor], num_layers: int, kind: WeightKind
) -> RecoveredState | None:
    """Fill this rank's `tensors`, by stored name, from what the ranks have kept; `kept` has this one's own stage first,
    and is empty where it has kept nothing.

    All ranks call it. Returns None, with the tensors as they were, where a lost stage can't be rebuilt.
    """
    own = [Holding(one.stage, one.num_updates, one.step, one.grad_norm, one.origin) for one in kept]
    transfers = plan_transfers(world.plan, world.all_gather_object(own), kind)
    if transfers is None:
        return None
    rebuilt = {one.stage: one for one in transfers.approximation.rebuilt}
    copied: list[str] = []
    for receiver, sources in enumerate(transfers.sources):
        stage = _stage_of(world.plan, receiver)
        if stage not in rebuilt:
            _transfer_whole(world.rank, stage, sources[0], receiver, kept, tensors)
            if sources[0] != receiver and stage not in transfers.approximation.updated_twice:
                copied.append(f"rank {receiver} has stage {stage} as it was, from rank {sources[0]}")
        elif world.rank in (receiver, *sources):
            _rebuild(world, sources, receiver, kept, tensors, rebuilt[stage], num_layers)
    at = transfers.counters_rank
    counters = world.all_gather_object(kept[0].counters if kept and world.rank == at else {})[at]
    own_stage = _stage_of(world.plan, world.rank)
    names = [name.removeprefix("model/") for name in tensors if name.startswith("model/") and own_stage in rebuilt]
    new = sorted({name for gathered in world.all_gather_object(names) for name in gathered})
    return RecoveredState(transfers.step, counters, transfers.approximation, new, copied, transfers.origin)


def plan_transfers(plan: Plan, holdings: Sequence[Sequence[Holding]], kind: WeightKind) -> Transfers | None:
    """Return where each rank's state comes from, given what each holds; None where a stage can't be rebuilt.

    Of ranks with the same stage the first of those with most updates counts. Ranks whose state is older than the step
    before, or than a checkpoint to which others have gone back, count as lost: they have waited as spares meanwhile.
    """
    origin = max((one.origin for held in holdings for one in held), default=0)
    holdings = [[one for one in held if one.origin == origin] for held in holdings]
    newest = max((one.num_updates for held in holdings for one in held), default=0)
    holders: dict[int, int] = {}
    known: dict[int, Holding] = {}
    for rank, one in ((rank, one) for rank, held in enumerate(holdings) for one in held):
        best = known.get(one.stage)
        if one.num_updates >= newest - 1 and (best is None or one.num_updates > best.num_updates):
            holders[one.stage], known[one.stage] = rank, one
    if not holders:
        return None
    rebuilt: dict[int, RebuiltStage] = {}
    for stage in range(plan.num_stages):
        if stage in holders:
            continue
        neighbours = substitutes(plan, stage)
        if not neighbours or any(one not in holders for one in neighbours):
            return None
        norms = [known[one].grad_norm for one in neighbours]
        weights = (1.0,) if len(norms) == 1 else neighbour_weights(norms[0], norms[1], kind)
        rebuilt[stage] = RebuiltStage(stage, neighbours, weights)
    sources: list[tuple[int, ...]] = []
    for rank, held in enumerate(holdings):
        stage = _stage_of(plan, rank)
        if stage in rebuilt:
            sources.append(tuple(holders[one] for one in rebuilt[stage].neighbours))
        elif any((one.stage, one.num_updates) == (stage, known[stage].num_updates) for one in held):
            sources.append((rank,))
        else:
            sources.append((holders[stage],))
    step, counters_rank = min((one.step, holders[stage]) for stage, one in known.items())
    if rebuilt and step == 0:  # all begin alike from the seed, which is exact
        return None
    ahead = tuple(sorted(stage for stage, one in known.items() if one.num_updates > step))
    return Transfers(step, counters_rank, sources, Approximation(tuple(rebuilt.values()), ahead), origin)


def substitutes(plan: Plan, stage: int) -> tuple[int, ...]:
    """Return the stages of which a lost one is made: the one that is swapped with it in half of the micro-batches, or
    those before and after it; none at the ends of the pipeline."""
    last = plan.num_stages - 1
    if plan.schedule_entry.swaps_end_stages and stage in (1, last - 1):
        pairs = swapped_stages(plan.num_stages)
        first, beside = pairs[0] if stage == 1 else reversed(pairs[-1])
        assert stage == first
        return (beside,)
    return (stage - 1, stage + 1) if 0 < stage < last else ()


def recovery_lines(recovered: RecoveredState | None, lr_scale: float) -> list[str]:
    """Return lines about the state with which all ranks go on."""
    if recovered is None:
        return [
            "a lost stage can't be rebuilt from those beside it: all ranks go back to the last checkpoint on disk, or"
            " to the beginning where there is none"
        ]
    told = recovered.copied + recovered.approximation.sentences
    if rebuilt := recovered.approximation.rebuilt:
        stages = numbered("stage", [one.stage for one in rebuilt])
        told.append(f"{stages} has a new optimizer state, and {lr_scale:g} times the learning rate")
    return [*(f"CheckFree: {one}" for one in told), f"going on after step {recovered.step} with what the ranks hold"]


def begin_rebuilt_stages(updater: ParameterUpdater, recovered: RecoveredState, lr_scale: float) -> None:
    """Begin the optimizer state of rebuilt stages, and raise their learning rate."""
    updater.optimizer.begin_state(recovered.new_parameters)
    updater.lr_scales |= {one.stage: lr_scale for one in recovered.approximation.rebuilt}


def neighbour_weights(norm_before: float, norm_after: float, kind: WeightKind) -> tuple[float, float]:
    """Return the weights of the stages before and after a lost one, with the sum 1, from their gradients' norms.

    squared_norm: ω = ‖∇‖² (arXiv:2506.15461 §4). clipped_norm: ω = ‖∇‖ + 1e-4 of gradients clipped to the norm 1, as in
    the authors' program (github.com/gensyn-ai/CheckFree), where both are equal from norm 1 on.
    """
    norms = norm_before, norm_after
    before, after = (norm * norm if kind == "squared_norm" else min(norm, 1.0) + 1e-4 for norm in norms)
    total = before + after
    return (before / total, after / total) if 0 < total < float("inf") else (0.5, 0.5)


def mean_of_neighbours(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of a tensor's counterparts in other stages; of a single one, a copy."""
    first, *others = (weight * one for weight, one in zip(weights, tensors, strict=True))
    return sum(others, first)


def _stage_of(plan: Plan, rank: int) -> int:
    """Return the only stage of a rank."""
    return coordinates_of(plan, rank).pp


def _transfer_whole(
    rank: int, stage: int, sender: int, receiver: int, kept: Sequence[KeptState], tensors: Mapping[str, Tensor]
) -> None:
    """Copy all of a stage's state from the rank that has kept it to the one that goes on with it."""
    if rank == receiver == sender:
        own = _kept_of(stage, kept)
        for name, tensor in tensors.items():
            tensor.copy_(own[name])
    elif rank == sender:
        own = _kept_of(stage, kept)
        _send((own[name] for name in sorted(own)), receiver)
    elif rank == receiver:
        for name in sorted(tensors):
            tensors[name].copy_(_received(tensors[name], sender))


def _kept_of(stage: int, kept: Sequence[KeptState]) -> Mapping[str, Tensor]:
    """Return the tensors of a stage that this rank has kept, with most updates."""
    return max((one for one in kept if one.stage == stage), key=lambda one: one.num_updates).tensors


def _rebuild(
    world: World,
    sources: Sequence[int],
    receiver: int,
    kept: Sequence[KeptState],
    tensors: Mapping[str, Tensor],
    rebuilt: RebuiltStage,
    num_layers: int,
) -> None:
    """Send the layers of a stage's neighbours to a rank, which fills its own with their weighted means."""
    own_names = _layer_names(world.plan, rebuilt.stage, num_layers, tensors)
    found: list[list[Tensor]] = []
    for sender, stage in zip(sources, rebuilt.neighbours, strict=True):
        layers: list[Tensor] = []
        if world.rank == sender:
            own = _kept_of(stage, kept)
            layers = [own[name] for name in _layer_names(world.plan, stage, num_layers, own)]
        if world.rank == sender != receiver:
            _send(layers, receiver)
        elif world.rank == receiver != sender:
            layers = [_received(tensors[name], sender) for name in own_names]
        found.append(layers)
    if world.rank == receiver:
        for name, *neighbours in zip(own_names, *found, strict=True):
            tensors[name].copy_(mean_of_neighbours(neighbours, rebuilt.weights))


def _layer_names(plan: Plan, stage: int, num_layers: int, names: Iterable[str]) -> list[str]:
    """Return the stored names of the parameters of a stage's layers, in an order that its neighbours share."""
    first = plan.layers(stage, num_layers).start

    def place(name: str) -> tuple[int, str]:
        _, layer, rest = name.split(".", 2)
        return int(layer) - first, rest

    return sorted((name for name in names if name.startswith("model/layers.")), key=place)


def _send(tensors: Iterable[Tensor], receiver: int) -> None:
    for tensor in tensors:
        dist.send(tensor.contiguous(), receiver)


def _received(like: Tensor, sender: int) -> Tensor:
    buffer = torch.empty_like(like, memory_format=torch.contiguous_format)
    dist.recv(buffer, sender)
    return buffer
