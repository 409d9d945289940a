"""Dispatchers of tokens to experts over links of known rates: two steps beside one, chunks beside sleeping experts.

    python -m benchmarks.expert_exchange [--rounds 7]                       # as root: makes network namespaces

Eight processes on two "nodes" of four, each with a link to its neighbours and one to the others (`shaped_network.py`).
First two ranks of a node, then of different nodes measure the rate and the time of a message of their link; from these
the cost model predicts everything else. Then, in turns: the all-to-all in one step and in two, with more and more
tokens; and, between two processes, the forward and backward of experts that sleep, in as many chunks as are predicted
to be fastest.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.shaped_network import Shape, ShapedNetwork
from muster.cost.expert_traffic import ExpertCall, RoutedShape, dispatch_calls
from muster.cost.time.collectives import CommGroup, all_to_all_s
from muster.cost.time.expert_parallel import chunked_s
from muster.model.grouped_matmul import Segments
from muster.model.routing import Routing
from muster.parallel.axis import ExpertAxis
from muster.parallel.ep_all_to_all import AllToAll
from muster.parallel.ep_hierarchical import HierarchicalAllToAll
from muster.spec.device import LinkSpec
from muster.spec.expert_kinds import ExpertDispatch

NODES, PER_NODE = 2, 4
WIDTH, TOP_K = 64, 2
TOKENS = (8, 32, 128, 512, 2048)
"""Tokens of each rank in the comparison of one step with two."""
CHUNKED_TOKENS = 2048
EXCHANGE_SHARES = (0.4, 0.7, 1.5)
"""Exchange of the chunked experts, in units of their compute."""
CHUNK_COUNTS = (1, 2, 4, 8, 16, 32)
SMALL_ROWS, LARGE_ROWS, IN_A_ROW = 1, 1024, 8


def even_routing(tokens: int, experts: int) -> Routing:
    """Return k experts for each token, each expert the same number of times."""
    expert = (torch.arange(tokens * TOP_K) % experts).view(tokens, TOP_K)
    return Routing(torch.ones(tokens, TOP_K), expert, experts)


class Sleep(torch.autograd.Function):
    """Experts that take `seconds_per_row`, and twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, seconds_per_row: float) -> Tensor:
        ctx.seconds = seconds_per_row * len(x_RD)
        time.sleep(ctx.seconds)
        return x_RD.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Links:
    """What two ranks measured of their links, as the cost model takes it."""

    def __init__(self, near: tuple[float, float], far: tuple[float, float]) -> None:
        self.near, self.far = near, far

    def group(self, size: int, nodes: int) -> CommGroup:
        """Return the group of so many ranks on so many nodes."""
        link = LinkSpec(
            name="near",
            kind="memory",
            bandwidth_bytes_per_s=self.near[1],
            latency_s=1e-6,
            efficiency=1.0,
            message_s=self.near[0],
        )
        return CommGroup(size, nodes, size // nodes, link, link if nodes > 1 else None, self.far[1], 1e-6, self.far[0])

    def calls_s(self, calls: tuple[ExpertCall, ...]) -> list[float]:
        """Return the predicted seconds of each collective among the eight ranks."""
        groups = {
            "all": self.group(NODES * PER_NODE, NODES),
            "inner": self.group(PER_NODE, 1),
            "outer": self.group(NODES, NODES),
        }
        return [all_to_all_s(groups[call.among], call.nbytes) for call in calls]


def timed(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
    """Return the seconds of an action, of the slowest rank of the group."""
    dist.barrier(group)
    begin = time.perf_counter()
    action()
    slowest = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def measure_link(axis: ExpertAxis, rounds: int) -> tuple[float, float]:
    """Return the seconds of a message and the bytes per second between two ranks, while all pairs measure."""
    seconds = {}
    for rows in (SMALL_ROWS, LARGE_ROWS):
        x, count = torch.zeros(2 * rows, WIDTH), IN_A_ROW if rows == SMALL_ROWS else 1

        def exchange(x: Tensor = x, rows: int = rows, count: int = count) -> None:
            for _ in range(count):
                axis.all_to_all(x, [rows, rows], [rows, rows])

        seconds[rows] = median(timed(exchange) for _ in range(rounds)) / count
    rate = (LARGE_ROWS - SMALL_ROWS) * WIDTH * 4 / (seconds[LARGE_ROWS] - seconds[SMALL_ROWS])
    return seconds[SMALL_ROWS], rate


def make_axes() -> tuple[ExpertAxis, ExpertAxis, ExpertAxis]:
    """Return the axis of all ranks with its two levels, and pairs of neighbours and of ranks on different nodes."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def axis(groups: list[list[int]]) -> ExpertAxis:
        made = [(ranks, dist.new_group(ranks)) for ranks in groups]
        ranks, group = next(pair for pair in made if rank in pair[0])
        return ExpertAxis(group, len(ranks), ranks.index(rank))  # type: ignore[arg-type]

    inner = axis([list(range(node * PER_NODE, (node + 1) * PER_NODE)) for node in range(NODES)])
    outer = axis([list(range(place, size, PER_NODE)) for place in range(PER_NODE)])
    pairs = axis([[first, first + 1] for first in range(0, size, 2)])
    whole = axis([list(range(size))])
    return ExpertAxis(whole.group, size, rank, inner, outer), pairs, outer


def compare_steps(axis: ExpertAxis, links: Links, rounds: int) -> list[dict[str, Any]]:
    """Time forwards of experts that do nothing, in one step and in two, by turns."""
    rows = []
    for tokens in TOKENS:
        shape = RoutedShape(tokens, tokens * TOP_K, WIDTH * 4, 4, axis.size)
        x, routing = torch.zeros(1, tokens, WIDTH), even_routing(tokens, axis.size)
        kinds = {
            "one": (ExpertDispatch(size=axis.size), AllToAll),
            "two": (ExpertDispatch("hierarchical", axis.size, PER_NODE), HierarchicalAllToAll),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, (dispatch, implementation) in kinds.items():
                call = partial(implementation(axis, dispatch), lambda y, _: y, x, routing)
                seconds[kind].append(timed(call))
        row: dict[str, Any] = {"tokens": tokens}
        for kind, (dispatch, _) in kinds.items():
            row[kind] = median(seconds[kind])
            row[f"predicted {kind}"] = sum(links.calls_s(dispatch_calls(dispatch, shape).forward))
        rows.append(row)
    return rows


def compare_chunks(axis: ExpertAxis, link: tuple[float, float], rounds: int) -> list[dict[str, Any]]:
    """Time forward and backward of sleeping experts between two ranks of different nodes."""
    x = torch.zeros(1, CHUNKED_TOKENS, WIDTH, requires_grad=True)
    routing, pairs = even_routing(CHUNKED_TOKENS, 2), CHUNKED_TOKENS * TOP_K

    def passes_s(chunks: int, seconds_per_row: float) -> float:
        dispatch = AllToAll(axis, ExpertDispatch(size=2, chunks=chunks))

        def experts(y_RD: Tensor, segments: Segments) -> Tensor:
            return Sleep.apply(y_RD, seconds_per_row)  # type: ignore[return-value]

        return median(timed(lambda: dispatch(experts, x, routing).sum().backward()) for _ in range(rounds))

    exchange_s = passes_s(1, 0.0)
    rows = []
    for share in EXCHANGE_SHARES:
        compute_s = exchange_s / share
        one_way_s = exchange_s / 4
        predicted = {}
        for chunks in CHUNK_COUNTS:
            each_s = [link[0] + (one_way_s - link[0]) / chunks] * (2 * chunks)
            predicted[chunks] = sum(chunked_s(each_s, part * compute_s / chunks) for part in (1 / 3, 2 / 3))
        chosen = min(predicted, key=predicted.__getitem__)
        row: dict[str, Any] = {"exchange": exchange_s, "compute": compute_s, "chunks": chosen}
        row |= {"predicted": predicted[chosen], "one": passes_s(1, compute_s / 3 / pairs)}
        row["chunked"] = passes_s(chosen, compute_s / 3 / pairs)
        rows.append(row)
    return rows


def run_rank(rounds: int) -> None:
    """Measure as one of the ranks; rank 0 prints everything as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axis, neighbours, far = make_axes()
    for _ in range(2):
        axis.all_to_all(torch.zeros(axis.size, WIDTH), [1] * axis.size, [1] * axis.size)  # opens the connections
    links = Links(measure_link(neighbours, rounds), measure_link(far, rounds))
    found = {"near": links.near, "far": links.far, "steps": compare_steps(axis, links, rounds)}
    found["chunks"] = compare_chunks(far, links.far, max(3, rounds // 2))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each, of which the median counts")
    parser.add_argument("--network", type=int, default=24, help="megabits per second of a link between nodes")
    parser.add_argument("--fabric", type=int, default=240, help="megabits per second of a link within a node")
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(given.rounds)
        return
    with ShapedNetwork(NODES, PER_NODE, Shape(given.fabric), Shape(given.network)) as network:
        found = json.loads(network.run("benchmarks.expert_exchange", ["--rounds", str(given.rounds)], 600))
    for name in ("near", "far"):
        print(f"{name}: {found[name][0] * 1e3:.2f} ms a message, {found[name][1] / 1e6:.2f} MB/s")
    print(f"{'tokens':>8} {'one step':>10} {'two steps':>10} {'ratio':>7} {'predicted':>22}  (ms)")
    for row in found["steps"]:
        one, two, p_one, p_two = (1e3 * row[key] for key in ("one", "two", "predicted one", "predicted two"))
        print(f"{row['tokens']:8d} {one:10.1f} {two:10.1f} {one / two:7.2f} {p_one:10.1f} {p_two:10.1f}")
    head = ("exchange", "compute", "one chunk", "chunks", "time", "predicted", "/ max")
    print(" ".join(f"{word:>9}" for word in head), " (ms)")
    for row in found["chunks"]:
        exchange, compute, one, chunked, predicted = (
            1e3 * row[key] for key in ("exchange", "compute", "one", "chunked", "predicted")
        )
        print(
            f"{exchange:9.0f} {compute:9.0f} {one:9.0f} {row['chunks']:9d} {chunked:9.0f} {predicted:9.0f}"
            f" {chunked / max(exchange, compute):9.3f}"
        )


if __name__ == "__main__":
    main()
