"""Communication of data parallelism beside compute, for `benchmarks.overlap`: gathers of parameters and reductions of
gradients by the runtime's own code, within passes, or as instructions of a Program.

Embedding and head take no time and send nothing, but beside the optimizer step.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.sleeping_layers import (
    FORWARD_S,
    INPUT_S,
    LAYERS,
    MODEL,
    POSITIONS,
    SEQUENCES,
    Case,
    Link,
    sleep_in_layers,
    timed,
    without_slowdown,
)
from muster.cost.time.op_times import OpTimes
from muster.cost.time.param_communication import exposed_beside_pass_s
from muster.cost.time.pass_cost import PassCost
from muster.layout.update_buckets import update_buckets
from muster.model.decoder import Decoder
from muster.parallel.axis import PendingTensor
from muster.parallel.executor import Executor
from muster.parallel.grad_reduce import DeferrableReduceScatter
from muster.parallel.stage import DecoderStage
from muster.parallel.world import fake_world
from muster.schedule.action import Kind
from muster.schedule.build import build_program
from muster.schedule.program import Instruction, Program, Wait
from muster.simulate.simulator import simulate
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

DEEP = MODEL.model_copy(update={"num_layers": 32})
DEEP_S = FORWARD_S / 4
"""A model of more layers, and seconds of its sublayers for one sequence, in either pass."""
MICRO_BATCHES, PASS_S = 4, 0.025
"""Micro-batches of a step of pipeline stages, and seconds of a sublayer of theirs, in either pass."""
STEPS = 6
"""Steps of an asynchronous pipeline without a flush between them."""
STEP_S = 0.7
"""Seconds of an optimizer step."""


class SlowAllGather:
    """An all-gather of a layer's parameters, which are zeros; it takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.link, self._seconds = Link(), seconds

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        output_tensor.zero_()
        return self.link.send(self._seconds)


def gather_cases(ratio: float) -> Iterator[Case]:
    """Yield z3's gathers of layers, or of two layers each, beside the bucket before, in a forward and in a backward."""
    for size in (1, 2):
        yield from bucket_gather_cases(ratio, parse_plan_name(f"dp2-z3-bucket{size}-fp32"))


def bucket_gather_cases(
    ratio: float, plan: Plan, model: ModelSpec = MODEL, each_s: tuple[float, float] = (FORWARD_S, INPUT_S)
) -> Iterator[Case]:
    """Yield the gathers of a plan's buckets of layers, a forward's and a backward's; `each_s`: seconds of a
    sublayer for one sequence in both."""
    world, size, layers = fake_world(plan, 0, FakeStore()), plan.bucket_layers, model.num_layers
    buckets = [size] * (layers // size)
    named = f"z3's gathers of {size} layers" if size > 1 else "z3's gathers"
    named += f", {layers} layers" * (layers != LAYERS)
    for words, backward, computed_s in zip(("forward", "backward"), (False, True), each_s, strict=True):
        compute_s = 2 * layers * SEQUENCES * computed_s
        gathers = [SlowAllGather(ratio * compute_s / len(buckets)) for _ in buckets]
        stage = DecoderStage(model, world, 0, POSITIONS, seed=0)
        sleep_in_layers(stage.module, 0.0 if backward else each_s[0], each_s[1])
        for layer, own in zip([*stage.module.blocks()][::size], gathers, strict=True):
            layer.set_custom_all_gather(own)  # type: ignore[operator]

        def run(
            link: Link, module: Decoder = stage.module, gathers: list[SlowAllGather] = gathers, back: bool = backward
        ) -> float:
            made: list[Tensor] = []
            tokens_BS = torch.zeros(SEQUENCES, POSITIONS, dtype=torch.int64)
            for own in gathers:
                own.link = Link(takes_time=False) if back else link
            forward_s = timed(lambda: made.append(module(tokens_BS).sum()))
            for own in gathers:
                own.link = link
            return timed(made[0].backward) if back else forward_s

        messages_s, cost = ratio * compute_s, PassCost()
        cost.add_by_buckets("dp", messages_s, 0.0, buckets, compute_s)
        predicted_s = without_slowdown(compute_s + cost.exposed_s["dp"], compute_s + messages_s)
        yield Case(f"{named}, {words}", compute_s, messages_s, run, predicted_s)


class SlowReduceScatter(DeferrableReduceScatter):
    """A reduce-scatter of a bucket's gradients, whose sum is zeros; it takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.link, self._seconds = Link(), seconds

    def _start(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> PendingTensor:
        output_tensor.zero_()
        return PendingTensor([self.link.send(self._seconds)], lambda: output_tensor)  # type: ignore[list-item]


class SleepingStage(DecoderStage):
    """A stage that is fed zeros, and whose sublayers take time; its layers' gathers and reductions go over a link."""

    def __init__(self, model: ModelSpec, plan: Plan, index: int, each_s: tuple[float, float]) -> None:
        """`each_s`: seconds of a sublayer for one sequence in the forward, and in the backward."""
        super().__init__(model, fake_world(plan, 0, FakeStore()), index, POSITIONS, seed=0)
        sleep_in_layers(self.module, *each_s)
        self._link_users: list[SlowAllGather | SlowReduceScatter] = []

    def gather_in(self, seconds: float) -> None:
        """Let the gather of each layer take so long."""
        for layer in self.module.blocks():
            self._link_users.append(own := SlowAllGather(seconds))
            layer.set_custom_all_gather(own)  # type: ignore[operator]

    def reduce_in(self, seconds: float) -> None:
        """Let the reduction of each layer's gradients take so long."""
        self.module.reduce_scatter = own = SlowReduceScatter(seconds)  # type: ignore[assignment]
        self._link_users.append(own)
        for layer in self.module.blocks():
            layer.set_custom_reduce_scatter(own)  # type: ignore[operator]

    def use(self, link: Link) -> None:
        """Begin a step over a link."""
        self.reshard()
        self.zero_grad()
        for user in self._link_users:
            user.link = link

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        batch = self.micro_batch_shape[0], POSITIONS
        if self.is_first:
            x = torch.zeros(batch, dtype=torch.int64)
        else:
            x = torch.zeros(*batch, self.spec.hidden_size, requires_grad=True)
        y = self.module(x)
        self._saved[micro_batch] = (x, y)
        return y.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> None:
        self.last_backward.count()
        self._saved.pop(micro_batch)[1].sum().backward()  # type: ignore[union-attr]


class DeviceStage(SleepingStage):
    """A stage with the calls of one on a GPU, whose collectives run beside passes."""

    overlapping_devices = frozenset({"cpu"})


def many_layers_cases(ratio: float) -> Iterator[Case]:
    """Yield what `once_a_step_cases` and `gather_cases` do, with more layers."""
    yield from once_a_step_cases(ratio, DEEP, (DEEP_S, DEEP_S))
    yield from bucket_gather_cases(ratio, parse_plan_name("dp2-z3-fp32"), DEEP, (DEEP_S, DEEP_S))


def once_a_step_cases(
    ratio: float, model: ModelSpec = MODEL, each_s: tuple[float, float] = (FORWARD_S, INPUT_S)
) -> Iterator[Case]:
    """Yield z1's gathers beside the first forward, and its reductions beside the last backward, as on a GPU."""
    plan, layers = parse_plan_name(f"dp2-mb{SEQUENCES}-z1-fp32"), model.num_layers
    forward_s, backward_s = (2 * layers * SEQUENCES * one_s for one_s in each_s)
    gathering = DeviceStage(model, plan, 0, (each_s[0], 0.0))
    gathering.gather_in(ratio * forward_s / layers)
    reducing = DeviceStage(model, plan, 0, (0.0, each_s[1]))
    reducing.reduce_in(ratio * backward_s / layers)
    reducing.last_backward.backwards_per_step = 1

    def forward(link: Link) -> float:
        gathering.use(link)
        return timed(lambda: (gathering.unshard(), gathering.forward(0, None)))

    def backward(link: Link) -> float:
        reducing.use(link)
        reducing.unshard()
        reducing.forward(0, None)
        return timed(partial(reduce_in_backward, reducing))

    for words, compute_s, run in (("gathers", forward_s, forward), ("reductions", backward_s, backward)):
        messages_s = ratio * compute_s
        exposed_s = exposed_beside_pass_s(messages_s, compute_s, 1 / layers, 1 / layers)
        predicted_s = without_slowdown(compute_s + exposed_s, compute_s + messages_s)
        named = f"z1's {words}, {layers} layers" if layers != LAYERS else f"z1's {words}"
        yield Case(named, compute_s, messages_s, run, predicted_s)


def reduce_in_backward(stage: SleepingStage) -> None:
    """Run a step's only backward, and wait for its reductions; calls return at once, as those of NCCL."""
    sent: DeferrableReduceScatter = stage.module.reduce_scatter  # type: ignore[assignment]
    sent.pending = []
    stage.backward(0, None)
    reduction = stage.reduce_gradients()
    assert reduction is not None
    reduction.wait()
    for pending in sent.pending:  # where a GPU waits for the end of its stream
        pending.wait()
    sent.pending = None


def program_case(
    name: str,
    plan_name: str,
    kind: Kind,
    ratio: float,
    stage_type: type[SleepingStage],
    handlers: dict[Kind, Any] | None = None,
) -> Case:
    """Return the instructions `kind` of one pipeline rank beside its passes, in a Program without the other ranks,
    whose messages are there at once; its times are simulated."""
    plan = parse_plan_name(plan_name)
    model = MODEL.model_copy(update={"num_layers": plan.num_stages})
    workload = Workload(seq_len=POSITIONS, global_batch_size=2 * MICRO_BATCHES)
    program = of_first_rank(build_program(plan, model, workload))
    lanes = program.ranks[0]
    passes = sum(item.action.kind in (Kind.F, Kind.B) for item in lanes["compute"])
    sent = sum(item.action.kind == kind for item in lanes["collective"])
    pass_s = 2 * PASS_S
    seconds = ratio * passes * pass_s / sent
    held = {item.action.stage for item in lanes["compute"] if item.action.kind == Kind.F}
    stages = {index: stage_type(model, plan, index, (PASS_S, PASS_S)) for index in held}
    for stage in stages.values():
        if kind == Kind.UNSHARD:
            stage.gather_in(seconds)
        else:
            stage.reduce_in(seconds)
        stage.last_backward.backwards_per_step = MICRO_BATCHES
    nothing: dict[Kind, Any] = dict.fromkeys((Kind.GRAD_NORM, Kind.CLIP, Kind.STEP), lambda action: None)
    executor = Executor(program, 0, 0, stages, {}, nothing | (handlers or {}))

    def run(link: Link) -> float:
        for stage in stages.values():
            stage.use(link)
        return timed(executor.run)

    times = OpTimes({(Kind.F, -1): pass_s, (Kind.B, -1): pass_s, (kind, -1): seconds})
    return Case(name, passes * pass_s, sent * seconds, run, simulate(program, times).makespan_s)


def of_first_rank(program: Program) -> Program:
    """Return the part of a Program that its first rank runs."""
    lanes = {
        lane: tuple(
            item._replace(waits=tuple(wait for wait in item.waits if wait.lane != "p2p"), peer=None) for item in items
        )
        for lane, items in program.ranks[0].items()
        if lane != "p2p"
    }
    return replace(program, ranks=(lanes,), placement=(0,) * len(program.placement), transfers=None)


def stage_cases(ratio: float) -> Iterator[Case]:
    """Yield reductions of stages that are done beside passes of the others (z1), and, as on a GPU, the gathers of
    stages of which two are active."""
    plan = "dp2-pp2v4-sbreadthfirst"
    yield program_case("reductions of stages that are done", f"{plan}-z1-fp32", Kind.REDUCE_GRAD, ratio, SleepingStage)
    yield program_case("gathers, two active stages", f"{plan}-active2-fp32", Kind.UNSHARD, ratio, DeviceStage)


class KeptVersions:
    """Versions of a stage's weights, all of which are the same."""

    def enter(self, micro_batch: int, version: int) -> None: ...

    def leave(self, micro_batch: int) -> None: ...


def version_cases(ratio: float) -> Iterator[Case]:
    """Yield sums of gradients over replicas beside the passes of later steps, in an asynchronous pipeline."""
    plan = parse_plan_name("dp2x1-pp2-spipedream2bw-fp32")
    model = MODEL.model_copy(update={"num_layers": plan.num_stages})
    workload = Workload(seq_len=POSITIONS, global_batch_size=2 * MICRO_BATCHES)
    program = of_first_rank(build_program(plan, model, workload, num_steps=STEPS))
    stage = SleepingStage(model, plan, 0, (PASS_S, PASS_S))
    compute_s = STEPS * MICRO_BATCHES * 2 * 2 * PASS_S
    seconds = ratio * compute_s / STEPS
    gradients = [torch.zeros(1)]
    handlers: dict[Kind, Any] = {
        Kind.REDUCE_GRAD: lambda action: stage.sum_over_replicas(gradients),
        Kind.GRAD_NORM_BESIDE: lambda action: None,
        Kind.STEP: lambda action: None,
    }
    executor = Executor(program, 0, 0, {0: stage}, {}, handlers)
    executor.versions = {0: KeptVersions()}  # type: ignore[dict-item]

    def run(link: Link) -> float:
        with patch.object(dist, "all_reduce", lambda *_, **__: link.send(seconds)):
            return timed(executor.run)

    times = OpTimes({(Kind.F, -1): 2 * PASS_S, (Kind.B, -1): 2 * PASS_S, (Kind.REDUCE_GRAD, -1): seconds})
    yield Case("2BW's reductions", compute_s, STEPS * seconds, run, simulate(program, times).makespan_s)


def step_cases(ratio: float) -> Iterator[Case]:
    """Yield an optimizer step bucket by bucket, each gathered beside the updates behind it, as instructions of a
    Program; its times are simulated."""
    plan = parse_plan_name("dp2-z1-stepgather-fp32")
    program = steps_of(build_program(plan, MODEL, Workload(seq_len=POSITIONS, global_batch_size=2)))
    stage = DecoderStage(MODEL, fake_world(plan, 0, FakeStore()), 0, POSITIONS, seed=0)
    buckets = update_buckets(plan, MODEL, 0)
    update_s, gather_s = STEP_S / len(buckets), ratio * STEP_S / len(buckets)
    parts = [stage.module, *stage.module.blocks()]
    gathers = [SlowAllGather(gather_s) for _ in parts]
    for part, own in zip(parts, gathers, strict=True):
        part.set_custom_all_gather(own)  # type: ignore[operator]
    handlers: dict[Kind, Any] = {
        Kind.CLIP: lambda action: None,
        Kind.STEP_BUCKET: lambda action: time.sleep(update_s),
        Kind.UNSHARD_BUCKET: lambda action: stage.unshard_bucket(buckets[action.slice]),
        Kind.STEP: lambda action: stage.unshard(),  # which waits, as the next step's does
    }
    executor = Executor(program, 0, 0, {0: stage}, {}, handlers)

    def run(link: Link) -> float:
        stage.reshard()
        for own in gathers:
            own.link = link
        return timed(executor.run)

    times = {Kind.STEP_BUCKET: update_s, Kind.UNSHARD_BUCKET: gather_s}
    own_s: dict[tuple[str, int], tuple[float, ...]] = {(kind, 0): (s,) * len(buckets) for kind, s in times.items()}
    predicted_s = simulate(program, OpTimes({}, bucket_s=own_s)).makespan_s
    yield Case("gathers beside the optimizer step", STEP_S, ratio * STEP_S, run, predicted_s)


def steps_of(program: Program) -> Program:
    """Return the end of a one-rank Program, behind its gradient norm."""
    lanes = program.ranks[0]
    compute = [item.action.kind for item in lanes["compute"]].index(Kind.CLIP)
    gathers = [item.action.kind for item in lanes["collective"]].index(Kind.UNSHARD_BUCKET)

    def moved(items: Sequence[Instruction]) -> tuple[Instruction, ...]:
        waits = (tuple(Wait(lane, n - compute) for lane, n in item.waits if lane == "compute") for item in items)
        return tuple(item._replace(waits=own) for item, own in zip(items, waits, strict=True))

    rank = {"compute": moved(lanes["compute"][compute:]), "collective": moved(lanes["collective"][gathers:])}
    return replace(program, ranks=(rank,), transfers=None)  # type: ignore[arg-type]
