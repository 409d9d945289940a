"""How much communication does each mechanism hide? Muster's passes over links that only take time.

    python -m benchmarks.overlap [MECHANISM …] [--rounds 3] [--ratios 0.5 1 2]      # one process, which sleeps

Each mechanism's own code runs on small tensors: compute sleeps, and a message arrives after a set time, one after
another over one link. So neither cores nor arithmetic count. In turns: with messages that take no time, without overlap
(each message is waited for where it is sent), and with it. Prints, for messages of several shares of the compute, these
times, the longer one of compute and messages over the time with overlap, the overlap efficiency η (what overlap saves
over the most that it could, the smaller one of the two), the η of the cost model's formulas, whose compute isn't slower
beside messages here, and the exposed part of the messages' time.
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
from benchmarks.overlap_data_parallel import (
    gather_cases,
    many_layers_cases,
    once_a_step_cases,
    stage_cases,
    step_cases,
    version_cases,
)
from benchmarks.sleeping_layers import (
    FORWARD_S,
    INPUT_S,
    LAYERS,
    MODEL,
    POSITIONS,
    SEQUENCES,
    WEIGHT_S,
    Case,
    Link,
    sleep_in_layers,
    timed,
    without_slowdown,
)
from benchmarks.sleeping_stages import ExchangingStage, turns_of
from muster.cost.time.alternating_turns import alternating_s
from muster.cost.time.batch_slices import slices_s
from muster.cost.time.expert_parallel import chunked_s
from muster.cost.time.pass_cost import PassCost
from muster.cost.time.pass_pairs import Turns as PassTurns
from muster.cost.time.pass_pairs import pair_s
from muster.cost.time.sublayer import add_in_chunks
from muster.model.decoder import Decoder
from muster.model.grouped_matmul import Segments
from muster.parallel import axis as axes
from muster.parallel.axis import ExpertAxis, PendingTensor, TensorAxis
from muster.parallel.domino import DominoLayers
from muster.parallel.ep_all_to_all import AllToAll
from muster.parallel.tensor_parallel import apply_parallel_linears
from muster.parallel.turns import Turns
from muster.parallel.weight_grad_store import WeightGradStore
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.model import ModelSpec

RING, RING_MATMUL_S = 8, 0.4
"""Ranks of a ring, and seconds of the matmul of what all of them have."""
CHUNKS, EXPERT_TOKENS, EXPERT_COMPUTE_S = 8, 256, 2.0
CPU = torch.device("cpu")


@dataclass
class SlowAxis(TensorAxis):
    """Two tensor-parallel ranks, of which there is one; a sum of a micro-batch takes `seconds` a sequence."""

    link: Link = field(default_factory=Link)
    seconds: float = 0.0

    def all_reduce(self, x: Tensor, *_: Any) -> PendingTensor:
        return PendingTensor([self.link.send(self.seconds * len(x))], lambda: x, self.turns)  # type: ignore[list-item]


class SlowWeightGrads(WeightGradStore):
    """Gradients of weights, of which the first matrix that a hidden state enters takes the time of all."""

    def __init__(self, slow: Sequence[Tensor]) -> None:
        super().__init__()
        self._slow = {id(weight) for weight in slow}

    def compute_or_defer(self, weight_OI: Tensor, bias_O: Tensor | None, x_NI: Tensor, grad_NO: Tensor) -> Any:
        if id(weight_OI) in self._slow:
            time.sleep(WEIGHT_S * len(x_NI) / POSITIONS)
        return super().compute_or_defer(weight_OI, bias_O, x_NI, grad_NO)


# ----------------------------------------------------------------------------------------------------------------------
# Mechanisms


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


MECHANISMS: dict[str, Callable[[float], Iterator[Case]]] = {
    "tensor-parallel": tensor_parallel_cases,
    "ladder": ladder_cases,
    "kraken": kraken_cases,
    "async-tp": ring_cases,
    "pairs": pair_cases,
    "tp-pairs": tp_pair_cases,
    "experts": expert_cases,
    "z1": once_a_step_cases,
    "many-layers": many_layers_cases,
    "stages": stage_cases,
    "2bw": version_cases,
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
        f"{case.name:42} {compute_s * 1e3:8.0f} {case.messages_s * 1e3:9.0f} {apart_s * 1e3:9.0f}"
        f" {together_s * 1e3:11.0f} {spread:>11} {longer_s / together_s:8.2f} {saved / shorter_s:6.2f}"
        f" {predicted / min(case.compute_s, case.messages_s):10.2f} {(together_s - compute_s) / case.messages_s:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mechanisms", nargs="*", choices=[*MECHANISMS, []], metavar="MECHANISM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    print(
        f"{'ms':42} {'compute':>8} {'messages':>9} {'in turn':>9} {'overlapped':>11} {'range':>11} {'max / it':>8}"
        f" {'η':>6} {'predicted':>10} {'exposed':>8}"
    )
    for name in args.mechanisms or MECHANISMS:
        for ratio in args.ratios if name != "pairs" else args.ratios[:1]:
            for case in MECHANISMS[name](ratio):
                print(row(case, args.rounds), flush=True)


if __name__ == "__main__":
    main()
