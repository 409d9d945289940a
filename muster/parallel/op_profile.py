"""Short profile of a run: seconds of each instruction on this machine, measured on the stages that will train."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any

import torch

from muster.cost.time.bucket_steps import with_bucket_steps
from muster.cost.time.op_times import OpTimes
from muster.layout.host_updates import part_sizes_of
from muster.layout.mesh import coordinates_of
from muster.model.dropout import sample_keys
from muster.model.further_tokens import shift_further
from muster.model.saved_tensors import count_saved_bytes_of_each
from muster.parallel.axis import PendingTensor
from muster.parallel.device_clock import synchronize
from muster.parallel.fsdp import gradient_bytes, reduce_in_next_backward
from muster.parallel.machines import machine_of_each_rank
from muster.parallel.p2p import P2PRoute
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.vocab_parallel import VocabShard
from muster.parallel.world import World
from muster.schedule.action import Action, Kind, Lane
from muster.schedule.offload import LAYER_COPIES
from muster.schedule.program import Program
from muster.simulate.pairs import pairs_of_rank
from muster.spec.plan import Plan

REPEATS = 4
"""Repetitions of instructions that all ranks start together."""
PASS_REPEATS = 8
"""Repetitions of a pass; the same on every rank, since ranks may communicate within a pass."""


PAIR = "pair"
"""First part of the key of a pair of passes."""
TimedKey = tuple[Any, ...]
"""(kind, stage) of an instruction, or (kind, stage, slice); of a pair (PAIR, forward's stage, backward's stage)."""


@dataclass(frozen=True)
class StageProfile:
    """Results of a short profile."""

    times: OpTimes
    gradients_bytes: int
    """Bytes of gradients that this rank holds at a step's peak, before they are reduced."""
    saved_bytes: dict[int, tuple[int, ...]]
    """Activations that one micro-batch saves for its backward, by stage of this rank; those of each of its slices,
    the first with the keys and values of all."""
    offloaded_bytes: dict[int, tuple[int, ...]]
    """Part of these that OFFLOAD moves to host memory."""
    vocab_bytes: int
    """Bytes that one micro-batch keeps from pass S to pass T under vocabulary parallelism."""


def profile_stages(
    program: Program,
    stages: Mapping[int, DecoderStage],
    world: World,
    handlers: Mapping[Kind, Callable[[Action], object]],
    routes: Mapping[tuple[int, int], P2PRoute],
    copies: Mapping[Kind, Callable[[Action], Callable[[], None]]] | None = None,
) -> StageProfile:
    """Time each kind of instruction in the Program; all ranks must call it together, and all get the same times.

    It overwrites parameters and optimizer state, so it must run before they get their values. All ranks work at once,
    as in a step, and compete for caches and memory bandwidth; the simulator models how ranks wait for each other where
    a CPU has fewer cores than ranks (see `_InstructionTimer`).
    """
    cores = min(world.all_gather_object(len(os.sched_getaffinity(0)))) if world.device.type == "cpu" else None
    machines = machine_of_each_rank(world)
    clock = _InstructionTimer(world, 1.0 if cores is None else max(1.0, max(Counter(machines).values()) / cores))
    actions = {instruction.action for instruction in program.ranks[world.at.pp].get("collective", ())}
    kinds = {item.action.kind for lanes in program.ranks for item in lanes.get("compute", ())}
    backwards = [kind for kind in (Kind.I, Kind.B) if kind in kinds]
    host_copies = [item.action for item in program.ranks[world.at.pp].get("host_copy", ())]
    offloads = any(action.kind == Kind.OFFLOAD for action in host_copies)
    beside = {
        index
        for index, stage in stages.items()
        if stage.overlaps_data_parallel
        and Action(Kind.REDUCE_GRAD, index) in actions
        and len(stage.default_slices) == 1
    }
    """Stages whose gathers and reductions are timed with the passes that they run beside."""
    reductions = {action._replace(version=0) for action in actions}  # those of all weight versions take as long
    has_units = world.plan.max_active_stages is not None
    """True if stages are gathered, and their gradients reduced, for units of passes: here, too, one at a time."""
    saved: dict[int, tuple[int, ...]] = {}
    offloaded: dict[int, tuple[int, ...]] = {}
    vocab_bytes = 0
    for repeat in range(REPEATS):
        _time_gathers(stages, clock, actions, beside if repeat else (), has_units)
        for index, stage in sorted(stages.items()):
            if has_units:
                stage.unshard()
            if repeat == 0:
                saved[index], offloaded[index] = _profile_stage(stage, clock, backwards)
            else:
                for kind in backwards:
                    _time_forward_backward(stage, clock, kind, offloads)
                if not backwards:
                    _time_forward(stage, clock, 0)
            if has_units:
                _time_reductions({index: stage}, clock, reductions, beside)
                stage.reshard()
        _time_pairs(program, stages, world, clock)
        for _, stage in sorted(stages.items()):
            if stage.vocab is not None:
                vocab_bytes = _time_vocab_passes(stage, stage.vocab, clock)
        gradients = sum(gradient_bytes(stage.module) for stage in stages.values())  # of units, once they are reduced
        if not has_units:
            _time_reductions(stages, clock, reductions, beside)
        _time_gradient_exchanges(world.plan, clock, actions, handlers)
        clock.time_together((Kind.GRAD_NORM, -1), lambda: handlers[Kind.GRAD_NORM](Action(Kind.GRAD_NORM)))
        lanes: dict[Lane, list[Action]] = {
            lane: [item.action for item in items] for lane, items in program.ranks[world.at.pp].items()
        }
        _time_host_updates(clock, lanes, handlers, copies or {})
        clock.time_together((Kind.STEP, -1), partial(_step, lanes.get("compute", []), handlers))
        for stage in stages.values():
            stage.param_offload.forget_updates()
    pools, processes = _core_pools(world.plan, machines)
    times_s = _without_passes(clock.seconds(), beside)
    merged, p2p_s = _mean_over_ranks(world.all_gather_object((times_s, _measure_p2p(stages, world, routes))))
    pairs_s = {key[1:]: merged.pop(key) for key in list(merged) if key[0] == PAIR}
    whole = {key[:2]: time_s for key, time_s in merged.items() if not any(key[2:])}
    slices = _times_of_slices(merged, p2p_s, next(iter(stages.values())))
    sizes = part_sizes_of(next(iter(stages.values())).spec, world.plan)
    times = OpTimes(whole, p2p_s, cores, processes, pools, slices=slices, pairs_s=pairs_s, part_sizes=sizes)
    times = with_bucket_steps(times, world.plan, next(iter(stages.values())).spec)
    return StageProfile(times, gradients, saved, offloaded, vocab_bytes)


def _core_pools(plan: Plan, machines: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the machine of each pipeline rank, the first of several, and the number of its ranks there."""
    counts: list[Counter[int]] = [Counter() for _ in range(plan.pp)]
    for rank, machine in enumerate(machines):
        counts[coordinates_of(plan, rank).pp][machine] += 1
    return tuple(min(one) for one in counts), tuple(max(one.values()) for one in counts)


def _time_gathers(
    stages: Mapping[int, DecoderStage],
    clock: "_InstructionTimer",
    actions: Collection[Action],
    beside: Collection[int],
    drops: bool,
) -> None:
    """Time the gathers of parameters, those of the stages `beside` with a forward; with `drops` each stage is dropped
    before the next one is gathered."""
    for index, stage in sorted(stages.items()):
        gather = partial(_gather_beside_forward, stage) if index in beside else stage.unshard
        clock.time_together((Kind.UNSHARD, index), gather if Action(Kind.UNSHARD, index) in actions else None)
        if index in beside:
            stage.backward(0, _output_gradient(stage, 0))
        if drops:
            stage.reshard()


def _time_reductions(
    stages: Mapping[int, DecoderStage], clock: "_InstructionTimer", actions: Collection[Action], beside: Collection[int]
) -> None:
    """Time the reductions of gradients that a micro-batch has left, those of the stages `beside` with its backward."""
    for index, stage in sorted(stages.items()):
        reduce = partial(_reduce, stage)
        if index in beside:
            stage.forward(0, _input(stage, 0))
            reduce = partial(_reduce_beside_backward, stage)
        for kind, do in ((Kind.REDUCE_GRAD, reduce), (Kind.ALL_REDUCE_TP, stage.all_reduce_replicated_grads)):
            clock.time_together((kind, index), do if Action(kind, index) in actions else None)


def _without_passes(times_s: dict[TimedKey, float], beside: Collection[int]) -> dict[TimedKey, float]:
    """Return the times, of what was timed with a pass that it runs beside only what the pass took longer."""
    pairs = (Kind.UNSHARD, Kind.F), (Kind.REDUCE_GRAD, Kind.B)
    less = {(kind, index): times_s[run, index] for index in beside for kind, run in pairs}
    return {key: max(0.0, time_s - less.get(key, 0.0)) for key, time_s in times_s.items()}


def _gather_beside_forward(stage: DecoderStage) -> None:
    stage.unshard()
    stage.forward(0, _input(stage, 0))


def _reduce_beside_backward(stage: DecoderStage) -> None:
    reduce_in_next_backward(stage.module)
    stage.backward(0, _output_gradient(stage, 0))
    _reduce(stage)


def _step(compute: Sequence[Action], handlers: Mapping[Kind, Callable[[Action], object]]) -> None:
    """Run an optimizer step, bucket by bucket where the Program does."""
    buckets = [action for action in compute if action.kind == Kind.STEP_BUCKET]
    for action in (*[Action(Kind.CLIP)] * bool(buckets), *buckets, Action(Kind.STEP)):
        handlers[action.kind](action)


def _reduce(stage: DecoderStage) -> None:
    pending = stage.reduce_gradients()
    if pending is not None:
        pending.wait()


def _input(stage: DecoderStage, part: int) -> torch.Tensor | None:
    """Return random hidden states for a forward; None for one that reads tokens."""
    return None if stage.reads_tokens else stage.receive_buffer(part).normal_()


def _output_gradient(stage: DecoderStage, part: int) -> torch.Tensor | None:
    """Return a random gradient for a backward; None for one that begins with the loss."""
    return None if stage.computes_loss else stage.receive_buffer(part).normal_()


def _time_host_updates(
    clock: "_InstructionTimer",
    lanes: Mapping[Lane, Sequence[Action]],
    handlers: Mapping[Kind, Callable[[Action], object]],
    copies: Mapping[Kind, Callable[[Action], Callable[[], None]]],
) -> None:
    """Time the updates of state off the device that the lanes of this rank have, part by part, with those of their
    copies that they have.

    A kind's time is the mean over the parts of a stage.
    """
    compute, host = lanes.get("compute", ()), lanes.get("host", ())
    made = [one for one in (*compute, *host) if one.kind in (Kind.UPDATE, Kind.LATE_UPDATE, Kind.HOST_UPDATE)]
    parts = [one._replace(kind=Kind.UPDATE) for one in made]
    parts += [one for one in compute if one.kind == Kind.DEVICE_UPDATE]
    if not parts:
        return
    copied = {(one.kind, one.stage, one.slice) for lane in ("host_copy", "disk") for one in lanes.get(lane, ())}
    clock.time((Kind.CLIP, -1), lambda: handlers[Kind.CLIP](Action(Kind.CLIP)))
    orders = {
        Kind.UPDATE: (Kind.OFFLOAD_GRAD, Kind.READ_STATE, Kind.UPDATE, Kind.RELOAD_PARAM, Kind.WRITE_STATE),
        Kind.DEVICE_UPDATE: (Kind.RELOAD_STATE, Kind.DEVICE_UPDATE, Kind.OFFLOAD_STATE),
    }
    for action in parts:
        for kind in orders[action.kind]:
            if kind == action.kind:
                clock.time((kind, action.stage), partial(handlers[kind], action))
            elif (kind, action.stage, action.slice) in copied:
                clock.time((kind, action.stage), lambda kind=kind, action=action: copies[kind](action)())


def _times_of_slices(merged: Mapping[TimedKey, float], p2p_s: float, stage: DecoderStage) -> tuple[OpTimes, ...]:
    """Return the times of each slice of a sequence; `p2p_s`: of a transfer of the first. Empty without slices."""
    lengths = [len(positions) for positions in stage.default_slices]
    found = []
    for part, length in enumerate(lengths if len(lengths) > 1 else ()):
        own = {key[:2]: time_s for key, time_s in merged.items() if key[2:] == (part,)}
        found.append(OpTimes(own, p2p_s * length / lengths[0]))
    return tuple(found)


def _time_gradient_exchanges(
    plan: Plan,
    clock: "_InstructionTimer",
    actions: Collection[Action],
    handlers: Mapping[Kind, Callable[[Action], object]],
) -> None:
    """Time the gradient exchanges between two pipeline ranks, which all ranks begin together."""
    for ends in _gradient_exchanges(plan):
        local = next((action for action in ends if action in actions), None)
        run = None if local is None else partial(_run_to_end, handlers[local.kind], local)
        clock.time_together(("", -1) if local is None else local[:2], run)


def _run_to_end(handler: Callable[[Action], object], action: Action) -> None:
    """Run an instruction and wait for what it leaves under way."""
    pending = handler(action)
    if isinstance(pending, PendingTensor):
        pending.wait()


def _gradient_exchanges(plan: Plan) -> Iterator[list[Action]]:
    """Yield the gradient exchanges between two pipeline ranks, each as the actions of its two ends."""
    if plan.pipeline_replicas > 1:
        yield from ([Action(Kind.ALL_REDUCE_REPLICAS, stage)] for stage in range(plan.stages_per_replica))
    for first in range(0, plan.num_stages, plan.stages_per_replica):
        yield [Action(Kind.ALL_REDUCE_TIED, first), Action(Kind.ALL_REDUCE_TIED, first + plan.stages_per_replica - 1)]


class _InstructionTimer:
    """Times by kind and stage of instructions that run while `ranks_per_core` ranks compete for each core.

    If each rank has a core, a time is wall-clock time. If ranks share cores, it is the larger of two: the process's CPU
    time, which other processes don't lengthen, and its share of the wall-clock time. The latter is larger for latency,
    such as that of a collective in many small messages.
    """

    def __init__(self, world: World, ranks_per_core: float) -> None:
        self._world, self._ranks_per_core = world, ranks_per_core
        self._wall_s: dict[TimedKey, list[float]] = {}
        self._cpu_s: dict[TimedKey, list[float]] = {}

    def time_together(self, key: TimedKey, run: Callable[[], object] | None) -> None:
        """Time an instruction that ranks start at the same moment; None on the ranks of a stage that has no such
        instruction."""
        self._world.barrier()
        if run is not None:
            self.time(key, run)

    def time(self, key: TimedKey, run: Callable[[], object]) -> None:
        self._synchronize()
        start_s, start_cpu_s = perf_counter(), process_time()
        run()
        self._synchronize()
        self._wall_s.setdefault(key, []).append(perf_counter() - start_s)
        self._cpu_s.setdefault(key, []).append(process_time() - start_cpu_s)

    def seconds(self) -> dict[TimedKey, float]:
        """Return means over the later half of the repetitions; the first ones pay for fresh memory and cold caches."""
        shares_s = {key: _mean_of_later_half(times) / self._ranks_per_core for key, times in self._wall_s.items()}
        if self._ranks_per_core == 1:
            return shares_s
        return {key: max(share_s, _mean_of_later_half(self._cpu_s[key])) for key, share_s in shares_s.items()}

    def _synchronize(self) -> None:
        synchronize(self._world.device)


def _mean_of_later_half(values: list[float]) -> float:
    return mean(values[len(values) // 2 :])


def _time_forward_backward(stage: DecoderStage, clock: _InstructionTimer, backward: str, copies: bool = False) -> None:
    """Time forward and backward of one micro-batch, slice by slice, with random data: the backward whole (B), or in two
    passes (I, W). With `copies` the saved activations are offloaded and reloaded in between."""
    parts = range(len(stage.default_slices))
    for part in parts:
        _time_forward(stage, clock, part)
        if copies:
            clock.time(_key(Kind.OFFLOAD, stage, part), lambda part=part: stage.offload(part)())
            clock.time(_key(Kind.RELOAD, stage, part), lambda part=part: stage.reload(part)())
        for lane, own in stage.layer_activations.items():
            for kind in LAYER_COPIES[lane] * own.has_layers:  # what the passes, whose times contain the rest, leave
                clock.time(_key(kind, stage, part), partial(_copy_layers, stage, lane, kind, part))
    _time_backwards(stage, clock, backward)


def _copy_layers(stage: DecoderStage, lane: Lane, kind: Kind, part: int) -> None:
    stage.copy_layers(lane, kind, part)()


def _key(kind: Kind, stage: DecoderStage, part: int) -> TimedKey:
    return (kind, stage.index) if len(stage.default_slices) == 1 else (kind, stage.index, part)


def _time_forward(stage: DecoderStage, clock: _InstructionTimer, part: int) -> None:
    x = _input(stage, part)
    _time_loads(stage, clock, part, Kind.LOAD_F, Kind.READ_F)
    clock.time(_key(Kind.F, stage, part), lambda: stage.forward(part, x))


def _time_loads(stage: DecoderStage, clock: _InstructionTimer, part: int, load: Kind, read: Kind) -> None:
    """Time the begin of loads of parameters beside a pass, and the end of the gradients' copies before it; the pass's
    own time contains the rest."""
    offload = stage.param_offload
    for kind in (load,) * bool(offload.groups) + (read,) * any(group.on_disk for group in offload.groups):
        clock.time(_key(kind, stage, part), lambda: stage.load_params(backward=load == Kind.LOAD_B)())


def _time_backwards(stage: DecoderStage, clock: _InstructionTimer, backward: str) -> None:
    for part in reversed(range(len(stage.default_slices))):
        gradient = _output_gradient(stage, part)
        if backward == Kind.I:
            inputs = partial(stage.backward_input, part, gradient)
            clock.time(_key(Kind.I, stage, part), inputs)
            clock.time(_key(Kind.W, stage, part), partial(stage.backward_weight, part))
        else:
            _time_loads(stage, clock, part, Kind.LOAD_B, Kind.READ_B)
            clock.time(_key(Kind.B, stage, part), partial(stage.backward, part, gradient))


def _time_pairs(program: Program, stages: Mapping[int, DecoderStage], world: World, clock: _InstructionTimer) -> None:
    """Time the forwards and backwards of the Program that run as one, each pair of stages once, with random data."""
    pairs = {(one.stage, other.stage) for _, one, other in pairs_of_rank(program, world.at.pp)}
    for ends in sorted(pairs):
        forward, backward = (stages[stage] for stage in ends)
        x_F, x_B = (None if stage.reads_tokens else stage.receive_buffer(0).normal_() for stage in (forward, backward))
        gradient_F, gradient_B = (
            None if stage.computes_loss else stage.receive_buffer(0).normal_() for stage in (forward, backward)
        )
        backward.forward(0, x_B)
        both = partial(forward.forward, 0, x_F), partial(backward.backward, 0, gradient_B)
        clock.time((PAIR, *ends), partial(world.turns.run, *both))
        forward.backward(0, gradient_F)


def _time_vocab_passes(stage: DecoderStage, vocab: VocabShard, clock: _InstructionTimer) -> int:
    """Time the vocabulary passes and collectives of one micro-batch, which all pipeline ranks start together; return
    the bytes kept for T."""
    vocab.inputs = stage.inputs
    contributes = {
        Kind.HIDDEN_BCAST: vocab.axis.index == vocab.last,
        Kind.EMB_GRAD_BCAST: vocab.axis.index == vocab.first,
    }
    saved_bytes = 0
    for kind in (
        Kind.EMB_F,
        Kind.EMB_REDUCE,
        Kind.HIDDEN_BCAST,
        Kind.S,
        Kind.LOGIT_STATS,
        Kind.T,
        Kind.EMB_GRAD_BCAST,
        Kind.EMB_W,
    ):
        if kind == Kind.T:
            saved_bytes = vocab.saved_bytes(0)
        if kind in vocab.passes:
            clock.time_together((kind, stage.index), partial(vocab.passes[kind], 0))
        else:
            tensor = stage.receive_buffer(0).normal_() if contributes.get(kind) else None
            start = partial(vocab.collectives[kind], 0, tensor)
            clock.time_together((kind, stage.index), lambda start=start: start().wait())
    return saved_bytes


def _profile_stage(
    stage: DecoderStage, clock: _InstructionTimer, backwards: list[Kind]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Time the passes of one micro-batch, with each kind of backward in the Program; return the bytes that a first one
    saves, slice by slice, and those of them that may be offloaded."""
    tokens = torch.randint(stage.spec.vocab_size, stage.token_shape, device=stage.world.device)
    lengths = [len(positions) for positions in stage.default_slices]
    slices = (tokens,) if len(lengths) == 1 else tuple(part.clone() for part in tokens.split(lengths, dim=1))
    keys = (sample_keys(0, range(len(tokens)), stage.world.device),) * len(slices)
    further = tuple(
        tuple(shift_further(part, part, depth) for depth in range(1, stage.spec.mtp_layers + 1)) for part in slices
    )
    stage.inputs = StageInputs(slices, slices, tokens.numel(), dropout_keys_M=keys, further_M=further)
    if not backwards:  # nothing is saved
        for _ in range(PASS_REPEATS):
            _time_forward(stage, clock, 0)
        return (0,), (0,)
    kept_bytes = 0
    offloaded: tuple[int, ...] = ()

    def run_backwards() -> None:
        nonlocal kept_bytes, offloaded
        kept_bytes = stage.kept_bytes
        offloaded = tuple(map(stage.offloadable_bytes, range(len(lengths))))
        _time_backwards(stage, clock, backwards[0])

    forwards = [partial(_time_forward, stage, clock, part) for part in range(len(lengths))]
    saved = count_saved_bytes_of_each(forwards, stage.module.resident_tensors(), run_backwards)
    saved[0] += kept_bytes
    for _ in range(PASS_REPEATS):
        for kind in backwards:
            _time_forward_backward(stage, clock, kind)
    return tuple(saved), offloaded


def _measure_p2p(stages: Mapping[int, DecoderStage], world: World, routes: Mapping[tuple[int, int], P2PRoute]) -> float:
    """Return the seconds from a send's start until the receiver has the activation: half a round trip between the first
    two consecutive stages on different ranks."""
    plan = world.plan
    world.barrier()
    if plan.pp == 1:
        return 0.0
    first = next(stage for stage in range(plan.num_stages) if plan.pp_rank(stage) != plan.pp_rank(stage + 1))
    ends = [plan.pp_rank(first), plan.pp_rank(first + 1)]
    if world.at.pp not in ends:
        return 0.0
    is_first = world.at.pp == ends[0]
    stage, other = (first, first + 1) if is_first else (first + 1, first)
    route = routes[stage, other]
    buffer = stages[stage].receive_buffer(0).zero_()

    def send() -> None:
        for work, _ in route.send(buffer):
            work.wait()

    times = []
    synchronize(world.device)
    for _ in range(6):
        start_s = perf_counter()
        if is_first:
            send()
        route.receive(buffer).wait()
        if not is_first:
            send()
        synchronize(world.device)  # work under way on a device is over before its wait returns only on a CPU
        times.append((perf_counter() - start_s) / 2)
    return median(times[1:])


def _mean_over_ranks(
    values: list[tuple[dict[TimedKey, float], float]],
) -> tuple[dict[TimedKey, float], float]:
    """Return the mean over ranks of each time, and of the measured p2p transfers."""
    by_key: dict[TimedKey, list[float]] = {}
    for seconds, _ in values:
        for key, time_s in seconds.items():
            by_key.setdefault(key, []).append(time_s)
    transfers_s = [p2p_s for _, p2p_s in values if p2p_s > 0]
    return {key: mean(times) for key, times in by_key.items()}, mean(transfers_s) if transfers_s else 0.0
