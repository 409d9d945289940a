"""How many tokens change nodes between layers if experts of consecutive layers that share tokens lie together?

    python -m benchmarks.expert_affinity [--steps 200] [--nodes 2]

Trains `tiny-moe` on the source of Python's standard library, records the experts of each token of a held-out text, and
places each layer's experts on nodes, equally many on each, so that most tokens find their next layer's expert on the
node of their last one (ExFlow, arXiv:2401.08383; MoETuner, arXiv:2502.06643), by an integer program on a first half of
the text; counts crossings on the other half. Muster's own dispatchers bring tokens back to their rank after every
layer, and gain nothing by it.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from muster.config.named_model import load_model
from muster.model.decoder import Decoder
from muster.model.init import initial_value
from muster.model.loss import cross_entropy_sum
from muster.model.routing import Router, Routing

SEQ_LEN, BATCH, HELD_OUT = 128, 8, 64


def text_of_library() -> torch.Tensor:
    """Return the bytes of the modules of the standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def train(steps: int) -> tuple[Decoder, torch.Tensor]:
    """Return a trained model and sequences that it wasn't trained on."""
    spec = load_model("tiny-moe")
    model, text = Decoder(spec, range(spec.num_layers), first=True, last=True), text_of_library()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(spec, name, tuple(parameter.shape), 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = text[: len(text) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        batch = rows[order[HELD_OUT + step * BATCH : HELD_OUT + (step + 1) * BATCH]]
        count = batch[:, 1:].numel()
        model.router_state.loss_weight = 1 / count
        loss = cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step + 1 == steps:
            print(f"step {step + 1}: loss {float(loss.detach()):.3f}", flush=True)
    return model, rows[order[:HELD_OUT], :-1]


@torch.no_grad()
def record(model: Decoder, tokens: torch.Tensor) -> NDArray[np.int64]:
    """Return the experts of each token [tokens, layers], the first choice of each."""
    found: list[torch.Tensor] = []

    def keep(router: Router, inputs: object, routing: Routing) -> None:
        best = routing.weight.argmax(1, keepdim=True)
        found.append(routing.expert.gather(1, best).squeeze(1))

    hooks = [part.register_forward_hook(keep) for part in model.modules() if isinstance(part, Router)]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


def transitions(trace: NDArray[np.int64], experts: int) -> NDArray[np.int64]:
    """Return how many tokens go from each expert of a layer to each of the next [layers − 1, E, E]."""
    counts = np.zeros((trace.shape[1] - 1, experts, experts), dtype=np.int64)
    for layer in range(trace.shape[1] - 1):
        np.add.at(counts[layer], (trace[:, layer], trace[:, layer + 1]), 1)
    return counts


def place_by_affinity(counts: NDArray[np.int64], nodes: int, seconds: float = 60.0) -> list[list[int]]:
    """Return the node of each expert of each layer that keeps most tokens on their node from layer to layer.

    maximize Σ counts[l, e, f] · y[l, e, f, n] with y ≤ x[l, e, n] and y ≤ x[l + 1, f, n], where x says that an expert
    is on a node: on one, and as many on each.
    """
    model, (steps, experts, _) = cp_model.CpModel(), counts.shape
    x = {
        (layer, expert, node): model.new_bool_var("")
        for layer in range(steps + 1)
        for expert in range(experts)
        for node in range(nodes)
    }
    for layer in range(steps + 1):
        for expert in range(experts):
            model.add_exactly_one(x[layer, expert, node] for node in range(nodes))
        for node in range(nodes):
            model.add(sum(x[layer, expert, node] for expert in range(experts)) == experts // nodes)
    terms = []
    for layer, e, f in zip(*np.nonzero(counts), strict=True):
        for node in range(nodes):
            stays = model.new_bool_var("")
            model.add_implication(stays, x[int(layer), int(e), node])
            model.add_implication(stays, x[int(layer) + 1, int(f), node])
            terms.append(int(counts[layer, e, f]) * stays)
    model.add(x[0, 0, 0] == 1)  # nodes are alike
    model.maximize(sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = seconds, 1
    solver.solve(model)
    return [
        [next(node for node in range(nodes) if solver.value(x[layer, expert, node])) for expert in range(experts)]
        for layer in range(steps + 1)
    ]


def crossings(counts: NDArray[np.int64], nodes_of: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that change nodes between layers."""
    places = np.asarray(nodes_of)
    crossed = sum(
        int(one[places[layer][:, None] != places[layer + 1][None, :]].sum()) for layer, one in enumerate(counts)
    )
    return crossed / int(counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=2)
    given = parser.parse_args()
    model, held_out = train(given.steps)
    trace, experts = record(model, held_out), 8
    half = len(trace) // 2
    seen, unseen = (transitions(part, experts) for part in (trace[:half], trace[half:]))
    own = [[expert * given.nodes // experts for expert in range(experts)]] * trace.shape[1]
    placed = place_by_affinity(seen, given.nodes)
    for name, counts in (("text it was placed by", seen), ("other text", unseen)):
        before, after = crossings(counts, own), crossings(counts, placed)
        print(
            f"{name}: {before:.1%} of tokens change nodes in the experts' own order, {after:.1%} placed: "
            f"{1 - after / before:.0%} fewer"
        )


if __name__ == "__main__":
    main()
