"""How much communication does each mechanism hide? Muster's passes over links that only take time.

    python -m benchmarks.overlap [MECHANISM …] [--rounds 3] [--ratios 0.5 1 2]      # one process, which sleeps

Each mechanism's own code runs on small tensors: compute sleeps, and a message arrives after a set time, one after
another over one link. So neither cores nor arithmetic count. In turns: with messages that take no time, without overlap
(each message is waited for where it is sent), and with it. Prints, for messages of several shares of the compute, these
times, the longer one of compute and messages over the time with overlap, the overlap efficiency η (what overlap saves
over the most that it could, the smaller one of the two), and the η of the cost model's formulas, whose compute isn't
slower beside messages here.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.expert_exchange import Sleep as SleepingExperts
from benchmarks.expert_exchange import even_routing
from benchmarks.sleeping_stages import ExchangingStage, turns_of
from muster.cost.time.alternating_turns import alternating_s
from muster.cost.time.batch_slices import slices_s
from muster.cost.time.expert_parallel import chunked_s
from muster.cost.time.op_times import OpTimes
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN, PassCost
from muster.cost.time.pass_pairs import Turns as PassTurns
from muster.cost.time.pass_pairs import pair_s
from muster.cost.time.sublayer import add_in_chunks
from muster.layout.update_buckets import update_buckets
from muster.model.decoder import Decoder
from muster.model.grouped_matmul import Segments
from muster.parallel import axis as axes
from muster.parallel.axis import ExpertAxis, PendingTensor, TensorAxis
from muster.parallel.domino import DominoLayers
from muster.parallel.ep_all_to_all import AllToAll
from muster.parallel.executor import Executor
from muster.parallel.stage import DecoderStage
from muster.parallel.tensor_parallel import apply_parallel_linears
from muster.parallel.turns import Turns
from muster.parallel.weight_grad_store import WeightGradStore
from muster.parallel.world import fake_world
from muster.schedule.action import Kind
from muster.schedule.build import build_program
from muster.schedule.program import Instruction, Program, Wait
from muster.simulate.simulator import simulate
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

LAYERS, SEQUENCES, POSITIONS = 6, 4, 8
MODEL = ModelSpec(
    vocab_size=8, hidden_size=16, num_layers=LAYERS, num_heads=2, num_kv_heads=2, intermediate_size=16, gated=False
)
FORWARD_S, INPUT_S, WEIGHT_S = 0.025, 0.025, 0.0125
"""Seconds of a sublayer's compute for one sequence: of the forward, of the backward until the gradient of its input
sets out, and of the gradients of weights behind that."""
RING, RING_MATMUL_S = 8, 0.4
"""Ranks of a ring, and seconds of the matmul of what all of them have."""
CHUNKS, EXPERT_TOKENS, EXPERT_COMPUTE_S = 8, 256, 2.0
STEP_S = 0.7
"""Seconds of an optimizer step."""
CPU = torch.device("cpu")


@dataclass
class Link:
    """A link over which messages travel one after another."""

    overlaps: bool = True
    """False: each message is waited for where it is sent."""
    takes_time: bool = True
    """False: messages arrive at once."""
    free_s: float = 0.0

    def send(self, seconds: float) -> "Arrival":
        """Send a message that takes so long once the link is free."""
        self.free_s = max(time.perf_counter(), self.free_s) + seconds * self.takes_time
        arrival = Arrival(self.free_s)
        if not self.overlaps:
            arrival.wait()
        return arrival


class Arrival(dist.Work):
    """End of a message."""

    def __init__(self, at_s: float) -> None:
        super().__init__()
        self._at_s = at_s

    def wait(self, timeout: object = None) -> bool:
        time.sleep(max(0.0, self._at_s - time.perf_counter()))
        return True


@dataclass
class SlowAxis(TensorAxis):
    """Two tensor-parallel ranks, of which there is one; a sum of a micro-batch takes `seconds` a sequence."""

    link: Link = field(default_factory=Link)
    seconds: float = 0.0

    def all_reduce(self, x: Tensor, *_: Any) -> PendingTensor:
        return PendingTensor([self.link.send(self.seconds * len(x))], lambda: x, self.turns)  # type: ignore[list-item]


class Slept(torch.autograd.Function):
    """The same tensor after a while, by its sequences (B, …)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(INPUT_S * len(grads[0]))
        return grads[0], None


class SlowWeightGrads(WeightGradStore):
    """Gradients of weights, of which the first matrix that a hidden state enters takes the time of all."""

    def __init__(self, slow: Sequence[Tensor]) -> None:
        super().__init__()
        self._slow = {id(weight) for weight in slow}

    def compute_or_defer(self, weight_OI: Tensor, bias_O: Tensor | None, x_NI: Tensor, grad_NO: Tensor) -> Any:
        if id(weight_OI) in self._slow:
            time.sleep(WEIGHT_S * len(x_NI) / POSITIONS)
        return super().compute_or_defer(weight_OI, bias_O, x_NI, grad_NO)


@dataclass(frozen=True)
class Case:
    """A mechanism at one ratio: seconds of compute and of messages, the run, which returns its seconds, and those that
    are predicted."""

    name: str
    compute_s: float
    messages_s: float
    run: Callable[[Link], float]
    predicted_s: float


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of an action."""
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


# ----------------------------------------------------------------------------------------------------------------------
# Mechanisms


def sleep_in_layers(module: Decoder, forward_s: float) -> None:
    """Let attention and MLP of each layer take `forward_s` a sequence in the forward, and INPUT_S in the backward."""
    for layer in module.blocks():
        attend, activate = layer.attn.attend, layer.mlp._activate  # type: ignore[union-attr]
        layer.attn.attend = lambda *args, own=attend: Slept.apply(own(*args), forward_s)  # type: ignore[method-assign,union-attr,assignment]
        layer.mlp._activate = lambda *args, own=activate: Slept.apply(own(*args), forward_s)  # type: ignore[union-attr]


def pass_of_layers(
    turns: Turns | None, seconds: float, backward: bool, model: ModelSpec = MODEL
) -> Callable[[Link], float]:
    """Return the run of a stage's forward, or of its backward; its layers' all-reduces take `seconds` a sequence."""
    axis = SlowAxis(None, 2, 0, False)  # type: ignore[arg-type]
    module = sleeping_decoder(axis, 0.0 if backward else FORWARD_S, model)

    def run(link: Link) -> float:
        axis.link, axis.turns, axis.seconds = link, turns if link.overlaps else None, 0.0 if backward else seconds
        run_layers = DominoLayers(turns) if turns is not None and link.overlaps else module.run_layers
        run_layers = module._through_ladder if module.is_ladder else run_layers
        made: list[Tensor] = []
        forward_s = timed(lambda: made.append(through_layers(module, run_layers, model)))
        axis.seconds = seconds
        return timed(made[0].sum().backward) if backward else forward_s

    return run


def sleeping_decoder(axis: SlowAxis, forward_s: float, model: ModelSpec = MODEL) -> Decoder:
    """Return a stage whose sublayers take time, and whose sums go over the axis."""
    module = Decoder(model, range(LAYERS), first=True, last=True)
    slow = [weight for layer in module.blocks() for weight in (layer.attn.q.weight, layer.mlp.up.weight)]  # type: ignore[union-attr]
    apply_parallel_linears(module, axis, SlowWeightGrads(slow))  # type: ignore[arg-type]
    sleep_in_layers(module, forward_s)
    return module


def through_layers(module: Decoder, run_layers: Callable[..., Tensor], model: ModelSpec = MODEL) -> Tensor:
    """Return the hidden state behind a stage's layers."""
    numbered = dict(enumerate(module.blocks()))
    x_BSD = torch.zeros(SEQUENCES, POSITIONS, model.boundary_size(1), requires_grad=True)
    return run_layers(list(numbered.values()), x_BSD, list(module._constants(x_BSD, numbered)))


def tensor_parallel_cases(ratio: float) -> Iterator[Case]:
    """Yield what hides all-reduces of the backward without more ado, gradients of weights; and Domino."""
    rows = 2 * LAYERS * SEQUENCES  # sublayers of one sequence
    for words, backward, computed_s, beside_s in (
        ("forward", False, FORWARD_S, 0.0),
        ("backward", True, INPUT_S + WEIGHT_S, WEIGHT_S),
    ):
        message_s = ratio * computed_s
        left_s = max(0.0, message_s - beside_s)  # behind the gradients of weights
        alone = rows * computed_s, rows * message_s
        if backward:
            run = pass_of_layers(None, message_s, backward)
            yield Case("all-reduce beside weight gradients", *alone, run, rows * (computed_s + left_s))
        turn_s, exchange_s, own_s = (
            [SEQUENCES / 2 * time_s] * 2 for time_s in (computed_s, message_s, min(message_s, beside_s))
        )
        layer_s, end_s = slices_s(turn_s, exchange_s, own_s)
        predicted_s = without_slowdown(LAYERS * layer_s + end_s, LAYERS * 2 * sum(turn_s + exchange_s))
        yield Case(f"Domino, {words}", *alone, pass_of_layers(Turns(CPU), message_s, backward), predicted_s)


def ladder_cases(ratio: float) -> Iterator[Case]:
    """Yield a ladder, whose all-reduces travel beside the next sublayer, and in the backward the one before."""
    model = MODEL.model_copy(update={"residual": "ladder"})
    for words, backward, one_s in (("forward", False, FORWARD_S), ("backward", True, INPUT_S + WEIGHT_S)):
        turn_s, message_s = SEQUENCES * one_s, SEQUENCES * ratio * one_s
        layer_s, end_s = alternating_s([(turn_s, message_s, 0.0)] * 2)
        alone = 2 * LAYERS * turn_s, 2 * LAYERS * message_s
        predicted_s = without_slowdown(LAYERS * layer_s + end_s, sum(alone))
        yield Case(f"ladder, {words}", *alone, pass_of_layers(None, ratio * one_s, backward, model), predicted_s)


def kraken_cases(ratio: float) -> Iterator[Case]:
    """Yield layers of two sub-layers side by side, whose sum of streams travels beside attention in each layer but the
    first, in the forward and in the backward."""
    model = MODEL.model_copy(update={"parallel_sublayers": 2})
    for words, backward, one_s in (("forward", False, FORWARD_S), ("backward", True, INPUT_S + WEIGHT_S)):
        turn_s, message_s, sums = SEQUENCES * one_s, SEQUENCES * ratio * one_s, LAYERS - 1
        layer = PassCost(2 * turn_s)
        layer.add_overlapped("tp", message_s, turn_s)
        alone = 2 * LAYERS * turn_s, sums * message_s
        predicted_s = 2 * turn_s + sums * (layer.compute_s + layer.exposed_s["tp"])
        run = pass_of_layers(None, ratio * one_s, backward, model)
        yield Case(f"sub-layers, {words}", *alone, run, without_slowdown(predicted_s, sum(alone)))


def without_slowdown(seconds: float, alone_s: float) -> float:
    """Return the predicted seconds of things that overlap where none of them is slower for it; `alone_s`: what they
    take one after another."""
    return (seconds - OVERLAP_SLOWDOWN * alone_s) / (1 - OVERLAP_SLOWDOWN)


def ring_cases(ratio: float) -> Iterator[Case]:
    """Yield async TP: an all-gather beside the matmul of what it brings, a matmul beside the reduce-scatter of it."""
    messages_s = ratio * RING_MATMUL_S
    axis = TensorAxis(None, RING, 0, True, "ring")  # type: ignore[arg-type]
    x_BSD = torch.zeros(1, POSITIONS, MODEL.hidden_size)

    def matmul(_: int = 0) -> Tensor:
        time.sleep(RING_MATMUL_S / RING)
        return x_BSD.clone()

    def on_link(action: Callable[[], object]) -> Callable[[Link], float]:
        def run(link: Link) -> float:
            def shift(group: object, index: int, size: int, x: Tensor) -> PendingTensor:
                return PendingTensor([link.send(messages_s / (size - 1))], lambda: x)  # type: ignore[list-item]

            with patch.object(axes, "_ring_shift", shift):
                return timed(action)

        return run

    cost = PassCost()
    add_in_chunks(cost, messages_s, RING_MATMUL_S, RING)
    predicted_s = without_slowdown(RING_MATMUL_S + cost.exposed_s["tp"], RING_MATMUL_S + messages_s)
    gather = on_link(lambda: [matmul() for _ in axis.ring_all_gather(x_BSD)])
    scatter = on_link(lambda: axis.ring_reduce_scatter(matmul))
    for name, run in (("async TP: all-gather, matmul", gather), ("async TP: matmul, reduce-scatter", scatter)):
        yield Case(name, RING_MATMUL_S, messages_s, run, predicted_s)


def pair_cases(_: float) -> Iterator[Case]:
    """Yield a forward and a backward of two micro-batches as one (DualPipe), with the times of `sleeping_stages`."""
    one, other = turns_of("F"), turns_of("B")
    turns = Turns(CPU)
    compute_s = sum(one.computed_s + other.computed_s)
    messages_s = sum(one.exchanged_s + other.exchanged_s)
    alone_s = one.alone_s + other.alone_s

    def run(link: Link) -> float:
        if not link.takes_time:
            return timed(partial(time.sleep, compute_s))
        stage = ExchangingStage(turns)
        passes = partial(stage._sleep, "F"), partial(stage._sleep, "B")
        return timed(partial(turns.run, *passes)) if link.overlaps else sum(map(timed, passes))

    yield Case("fused pair (DualPipe)", compute_s, messages_s, run, without_slowdown(pair_s(one, other), alone_s))


def tp_pair_cases(ratio: float) -> Iterator[Case]:
    """Yield a forward and a backward of two micro-batches whose all-reduces travel beside each other's compute."""
    axis, turns, sums = SlowAxis(None, 2, 0, False), Turns(CPU), 2 * LAYERS  # type: ignore[arg-type]
    stages = sleeping_decoder(axis, FORWARD_S), sleeping_decoder(axis, 0.0)
    forward_s, backward_s = SEQUENCES * FORWARD_S, SEQUENCES * (INPUT_S + WEIGHT_S)
    message_s = ratio * (forward_s + backward_s) / 2
    passes = (
        PassTurns((*[forward_s] * sums, 0.0), (message_s,) * sums),
        PassTurns((*[backward_s] * sums, 0.0), (message_s,) * sums, (SEQUENCES * WEIGHT_S,) * sums),
    )
    alone = sums * (forward_s + backward_s), 2 * sums * message_s

    def run(link: Link) -> float:
        axis.link, axis.turns, axis.seconds = link, turns if link.overlaps else None, 0.0
        backward = through_layers(stages[1], stages[1].run_layers).sum().backward
        axis.seconds = message_s / SEQUENCES
        forward = partial(through_layers, stages[0], stages[0].run_layers)
        return timed(partial(turns.run, forward, backward)) if link.overlaps else timed(forward) + timed(backward)

    yield Case("fused pair, all-reduces", *alone, run, without_slowdown(pair_s(*passes), sum(alone)))


class SlowExpertAxis(ExpertAxis):
    """Two ranks that send each other the same rows, of which there is one; a row takes `seconds`."""

    link: Link
    seconds: float

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        y = x.clone()
        arrival = self.link.send(self.seconds * len(x) if x.ndim > 1 and x.is_floating_point() else 0.0)
        return PendingTensor([arrival], lambda: y)  # type: ignore[list-item]


def expert_cases(ratio: float) -> Iterator[Case]:
    """Yield the exchange of experts' rows in chunks."""
    routing, pairs = even_routing(EXPERT_TOKENS, 2), EXPERT_TOKENS * 2
    x_BSD = torch.zeros(1, EXPERT_TOKENS, MODEL.hidden_size, requires_grad=True)
    messages_s = ratio * EXPERT_COMPUTE_S
    axis = SlowExpertAxis(None, 2, 0)  # type: ignore[arg-type]
    object.__setattr__(axis, "seconds", messages_s / 4 / pairs)
    dispatch = AllToAll(axis, ExpertDispatch(size=2, chunks=CHUNKS))

    def experts(y_RD: Tensor, segments: Segments) -> Tensor:
        return SleepingExperts.apply(y_RD, EXPERT_COMPUTE_S / 3 / pairs)  # type: ignore[return-value]

    def run(link: Link) -> float:
        object.__setattr__(axis, "link", link)
        return timed(lambda: dispatch(experts, x_BSD, routing).sum().backward())

    each_s = [messages_s / 4 / CHUNKS] * (2 * CHUNKS)
    predicted_s = sum(chunked_s(each_s, part * EXPERT_COMPUTE_S / CHUNKS) for part in (1 / 3, 2 / 3))
    yield Case(f"experts' rows in {CHUNKS} chunks", EXPERT_COMPUTE_S, messages_s, run, predicted_s)


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


def bucket_gather_cases(ratio: float, plan: Plan) -> Iterator[Case]:
    """Yield the gathers of a plan's buckets of layers, a forward's and a backward's."""
    world, size = fake_world(plan, 0, FakeStore()), plan.bucket_layers
    buckets = [size] * (LAYERS // size)
    named = f"z3's gathers of {size} layers" if size > 1 else "z3's gathers"
    for words, backward, computed_s in (("forward", False, FORWARD_S), ("backward", True, INPUT_S)):
        compute_s = 2 * LAYERS * SEQUENCES * computed_s
        gathers = [SlowAllGather(ratio * compute_s / len(buckets)) for _ in buckets]
        stage = DecoderStage(MODEL, world, 0, POSITIONS, seed=0)
        sleep_in_layers(stage.module, 0.0 if backward else FORWARD_S)
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


MECHANISMS: dict[str, Callable[[float], Iterator[Case]]] = {
    "tensor-parallel": tensor_parallel_cases,
    "ladder": ladder_cases,
    "kraken": kraken_cases,
    "async-tp": ring_cases,
    "pairs": pair_cases,
    "tp-pairs": tp_pair_cases,
    "experts": expert_cases,
    "z3": gather_cases,
    "step": step_cases,
}

# ----------------------------------------------------------------------------------------------------------------------
# Measurement


LINKS = (Link(overlaps=False, takes_time=False), Link(overlaps=False), Link())
"""Links of the contestants: compute alone, without overlap, and with it."""


def row(case: Case, rounds: int) -> str:
    """Measure a case in rounds, its contestants in turns, and return a row of the table."""
    case.run(replace(LINKS[0]))
    found = [[case.run(replace(link)) for link in LINKS] for _ in range(rounds)]
    compute_s, apart_s, together_s = map(median, zip(*found, strict=True))
    shorter_s, longer_s = sorted((compute_s, case.messages_s))
    saved, predicted = apart_s - together_s, case.compute_s + case.messages_s - case.predicted_s
    spread = f"{min(one[2] for one in found) * 1e3:.0f}–{max(one[2] for one in found) * 1e3:.0f}"
    return (
        f"{case.name:34} {compute_s * 1e3:8.0f} {case.messages_s * 1e3:9.0f} {apart_s * 1e3:9.0f}"
        f" {together_s * 1e3:11.0f} {spread:>11} {longer_s / together_s:8.2f} {saved / shorter_s:6.2f}"
        f" {predicted / min(case.compute_s, case.messages_s):10.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mechanisms", nargs="*", choices=[*MECHANISMS, []], metavar="MECHANISM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    print(
        f"{'ms':34} {'compute':>8} {'messages':>9} {'in turn':>9} {'overlapped':>11} {'range':>11} {'max / it':>8}"
        f" {'η':>6} {'predicted':>10}"
    )
    for name in args.mechanisms or MECHANISMS:
        for ratio in args.ratios if name != "pairs" else args.ratios[:1]:
            for case in MECHANISMS[name](ratio):
                print(row(case, args.rounds), flush=True)


if __name__ == "__main__":
    main()
