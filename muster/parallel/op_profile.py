"""A short profile: how long each instruction takes on this machine, measured on the very stages that will train."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from time import perf_counter, process_time

import torch

from muster.cost.time.op_times import OpTimes
from muster.model.saved_tensors import count_saved_bytes
from muster.parallel.fsdp import gradient_bytes
from muster.parallel.p2p import P2PRoute
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.vocab_parallel import VocabShard
from muster.parallel.world import World
from muster.schedule.action import Action
from muster.schedule.program import Program
from muster.spec.plan import Plan

REPEATS = 4
"""Times that what all ranks do at once is timed."""
PASS_REPEATS = 8
"""Times that a pass is timed: the same on every rank, since ranks may meet within a pass."""


@dataclass(frozen=True)
class StageProfile:
    """What a short profile finds."""

    times: OpTimes
    gradients_bytes: int
    """Held by this rank where a step holds most: before they are reduced."""
    saved_bytes: dict[int, int]
    """What one micro-batch's forward keeps for its backward, by stage of this rank."""
    vocab_bytes: int
    """What one micro-batch keeps from S to T, where the vocabulary is spread."""


def profile_stages(
    program: Program,
    stages: Mapping[int, DecoderStage],
    world: World,
    handlers: Mapping[str, Callable[[Action], None]],
    routes: Mapping[tuple[int, int], P2PRoute],
) -> StageProfile:
    """Times the Program's kinds of instruction; spoils parameters and optimizer state, so run it before they get their
    values.

    All ranks work at once, as they do in a step, and share caches and memory; how those of a CPU that has fewer cores
    than ranks wait for a core is the simulator's business (`_Clock`).
    All ranks must call it together; all get the same answer.
    """
    cores = min(world.all_gather_object(len(os.sched_getaffinity(0)))) if world.device.type == "cpu" else None
    clock = _InstructionTimer(world, 1.0 if cores is None else max(1.0, world.size / cores))
    actions = {instruction.action for instruction in program.ranks[world.at.pp].get("collective", ())}
    kinds = {item.action.kind for lanes in program.ranks for item in lanes.get("compute", ())}
    backwards = [kind for kind in ("I", "B") if kind in kinds]
    copies = any(lanes.get("copy") for lanes in program.ranks)
    saved: dict[int, int] = {}
    word_bytes = 0
    for repeat in range(REPEATS):
        for index, stage in sorted(stages.items()):
            clock.time_together(("UNSHARD", index), stage.unshard if Action("UNSHARD", index) in actions else None)
        for index, stage in sorted(stages.items()):
            if repeat == 0:
                saved[index] = _profile_stage(stage, clock, backwards)
            else:
                for kind in backwards:
                    _time_forward_backward(stage, clock, kind, copies)
        for _, stage in sorted(stages.items()):
            if stage.vocab is not None:
                word_bytes = _time_vocab_passes(stage, stage.vocab, clock)
        gradients = sum(gradient_bytes(stage.module) for stage in stages.values())
        for index, stage in sorted(stages.items()):
            for kind, do in (("REDUCE", stage.reduce_gradients), ("SYNC", stage.all_reduce_replicated_grads)):
                clock.time_together((kind, index), do if Action(kind, index) in actions else None)
        for both in _gradient_exchanges(world.plan):
            own = next((action for action in both if action in actions), None)
            do = None if own is None else partial(handlers[own.kind], own)
            clock.time_together(("", -1) if own is None else own[:2], do)
        for kind in ("NORM", "STEP"):
            clock.time_together((kind, -1), lambda kind=kind: handlers[kind](Action(kind)))
    processes = tuple(world.plan.mesh(pp_rank).num_ranks for pp_rank in range(world.plan.pp))
    merged, hop_s = _mean_over_ranks(world.all_gather_object((clock.seconds(), _measure_p2p(stages, world, routes))))
    return StageProfile(OpTimes(merged, hop_s, cores, processes), gradients, saved, word_bytes)


def _gradient_exchanges(plan: Plan) -> Iterator[list[Action]]:
    """What two pipeline ranks do with each other, each by its own name."""
    if plan.pipeline_replicas > 1:
        yield from ([Action("MERGE", stage)] for stage in range(plan.stages_per_replica))
    for first in range(0, plan.num_stages, plan.stages_per_replica):
        yield [Action("TIE", first), Action("TIE", first + plan.stages_per_replica - 1)]


class _InstructionTimer:
    """Times by kind and stage, of what is done while `crowding` ranks want each core.

    Where ranks have a core each, that is the time that passes. Where they share cores, it is the CPU time of the
    process, which no other process makes longer; or its share of the time that passes, if that is more: the rest is
    latency, such as that of a collective in many small messages.
    """

    def __init__(self, world: World, ranks_per_core: float) -> None:
        self._world, self._ranks_per_core = world, ranks_per_core
        self._wall_s: dict[tuple[str, int], list[float]] = {}
        self._cpu_s: dict[tuple[str, int], list[float]] = {}

    def time_together(self, key: tuple[str, int], do: Callable[[], object] | None) -> None:
        """What ranks begin at the same moment; None on those of a stage that has nothing of the kind to do."""
        self._world.barrier()
        if do is not None:
            self.time(key, do)

    def time(self, key: tuple[str, int], do: Callable[[], object]) -> None:
        self._synchronise()
        start_s, start_cpu_s = perf_counter(), process_time()
        do()
        self._synchronise()
        self._wall_s.setdefault(key, []).append(perf_counter() - start_s)
        self._cpu_s.setdefault(key, []).append(process_time() - start_cpu_s)

    def seconds(self) -> dict[tuple[str, int], float]:
        """Means of the later half: what comes first pays for fresh memory and cold caches."""
        found = {key: _mean_of_later_half(times) / self._ranks_per_core for key, times in self._wall_s.items()}
        if self._ranks_per_core == 1:
            return found
        return {key: max(share_s, _mean_of_later_half(self._cpu_s[key])) for key, share_s in found.items()}

    def _synchronise(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)


def _mean_of_later_half(values: list[float]) -> float:
    return mean(values[len(values) // 2 :])


def _time_forward_backward(stage: DecoderStage, clock: _InstructionTimer, backward: str, copies: bool = False) -> None:
    """Forward and backward of one micro-batch of any data; the backward whole (B), or in two passes (I). `copies`: what
    the forward keeps goes to the host and back in between."""
    x = None if stage.reads_tokens else stage.receive_buffer(0).normal_()
    gradient = None if stage.computes_loss else stage.receive_buffer(0).normal_()
    clock.time(("F", stage.index), lambda: stage.forward(0, x))
    if copies:
        clock.time(("OFFLOAD", stage.index), lambda: stage.offload(0)())
        clock.time(("RELOAD", stage.index), lambda: stage.reload(0)())
    if backward == "I":
        clock.time(("I", stage.index), lambda: stage.backward_input(0, gradient))
        clock.time(("W", stage.index), lambda: stage.backward_weight(0))
    else:
        clock.time(("B", stage.index), lambda: stage.backward(0, gradient))


def _time_vocab_passes(stage: DecoderStage, words: VocabShard, clock: _InstructionTimer) -> int:
    """All that is done for words of one micro-batch, which all pipeline ranks begin together; the bytes kept for T."""
    words.inputs = stage.inputs
    given = {"HC": words.axis.index == words.last, "DC": words.axis.index == words.first}
    kept = 0
    for kind in ("E", "EC", "HC", "S", "SC", "T", "DC", "EW"):
        if kind == "T":
            kept = words.saved_bytes(0)
        if kind in words.passes:
            clock.time_together((kind, stage.index), partial(words.passes[kind], 0))
        else:
            tensor = stage.receive_buffer(0).normal_() if given.get(kind) else None
            begin = partial(words.collectives[kind], 0, tensor)
            clock.time_together((kind, stage.index), lambda begin=begin: begin().wait())
    return kept


def _profile_stage(stage: DecoderStage, clock: _InstructionTimer, backwards: list[str]) -> int:
    """Times the passes of one micro-batch, with each kind of backward that the Program has, after a first that counts
    the bytes that it saves."""
    tokens = torch.randint(stage.spec.vocab_size, stage.micro_batch_shape, device=stage.world.device)
    stage.inputs = StageInputs((tokens,), (tokens,), tokens.numel())
    saved = count_saved_bytes(
        lambda: _time_forward_backward(stage, clock, backwards[0]), stage.module.resident_tensors()
    )
    for _ in range(PASS_REPEATS):
        for kind in backwards:
            _time_forward_backward(stage, clock, kind)
    return saved


def _measure_p2p(stages: Mapping[int, DecoderStage], world: World, routes: Mapping[tuple[int, int], P2PRoute]) -> float:
    """Seconds from a send's start until its receiver has the activation: half a round trip between the first two stages
    that follow each other on two ranks."""
    plan, own = world.plan, world.at.pp
    world.barrier()
    if plan.pp == 1:
        return 0.0
    first = next(stage for stage in range(plan.num_stages) if plan.pp_rank(stage) != plan.pp_rank(stage + 1))
    ends = [plan.pp_rank(first), plan.pp_rank(first + 1)]
    if own not in ends:
        return 0.0
    begins = own == ends[0]
    stage, other = (first, first + 1) if begins else (first + 1, first)
    route, buffer = routes[stage, other], stages[stage].receive_buffer(0).zero_()

    def send() -> None:
        for work, _ in route.send(buffer):
            work.wait()

    times = []
    for _ in range(6):
        start_s = perf_counter()
        if begins:
            send()
        route.receive(buffer).wait()
        if not begins:
            send()
        times.append((perf_counter() - start_s) / 2)
    return median(times[1:])


def _mean_over_ranks(
    values: list[tuple[dict[tuple[str, int], float], float]],
) -> tuple[dict[tuple[str, int], float], float]:
    """The mean over ranks of each time, and of the hops that were measured."""
    by_key: dict[tuple[str, int], list[float]] = {}
    for seconds, _ in values:
        for key, time_s in seconds.items():
            by_key.setdefault(key, []).append(time_s)
    hops = [hop_s for _, hop_s in values if hop_s > 0]
    return {key: mean(times) for key, times in by_key.items()}, mean(hops) if hops else 0.0
