"""Costs and savings of moving experts to other ranks, in bytes that a rank gives, and the placement that saves most.

A choice of an expert takes its rank's links at least four hidden states: one to the expert and one back, and their
gradients. An exchange of two experts takes their parameters and optimizer state. The time of matmuls, which an even
load also saves, isn't counted, so that a choice rests on no rates of a machine, and a resumed run makes it again.
"""

from collections import Counter
from collections.abc import Sequence

from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import optimizer_state
from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.layout.expert_moves import moved_tensors, stage_of_layer
from muster.layout.tensor_layout import is_expert, stage_shards, state_shard_dim
from muster.spec.model import ModelSpec, layer_prefix
from muster.spec.plan import Plan
from muster.spec.routing_load import ExpertPlacement, rank_shares, rebalanced_order

HIDDEN_STATES_PER_CHOICE = 4
"""Hidden states that travel for each choice of an expert."""


def rebalanced_placement(
    model: ModelSpec, plan: Plan, optim: OptimConfig | None, loads_LE: Sequence[Sequence[float]]
) -> ExpertPlacement:
    """Return the placement for experts that will be chosen as often as they were (`loads_LE`: choices on all ranks, by
    layer with experts and expert); that of the plan where no move pays."""
    orders = [
        rebalanced_order(loads_E, ep, order, exchange_cost(model, plan, optim, layer)) if ep > 1 else order
        for layer, ep, order, loads_E in _placed_layers(model, plan, loads_LE)
    ]
    own = tuple(order for _, _, order, _ in _placed_layers(model, plan, loads_LE))
    return plan.expert_placement if tuple(orders) == own else tuple(orders)


def ranks_max_over_mean(model: ModelSpec, plan: Plan, loads_LE: Sequence[Sequence[float]]) -> float:
    """Return the load of the fullest expert-parallel rank relative to the mean, on average over the layers that expert
    parallelism spreads."""
    found = [
        max(rank_shares(loads_E, ep, order)) * ep / sum(loads_E)
        for _, ep, order, loads_E in _placed_layers(model, plan, loads_LE)
        if ep > 1 and sum(loads_E)
    ]
    return sum(found) / len(found) if found else 1.0


def _placed_layers(
    model: ModelSpec, plan: Plan, loads_LE: Sequence[Sequence[float]]
) -> list[tuple[int, int, tuple[int, ...], Sequence[float]]]:
    """Return each layer with experts, the ranks that share them (1 for `mtp_layers`, whose experts keep their places),
    its experts by place, and their load."""
    found = []
    for index, (layer, loads_E) in enumerate(zip(model.expert_layers, loads_LE, strict=True)):
        is_placed = layer < model.num_layers
        ep = plan.mesh(stage_of_layer(plan, model.num_layers, layer)).ep if is_placed else 1
        order = plan.expert_placement[index] if plan.expert_placement else tuple(range(len(loads_E)))
        found.append((layer, ep, order, loads_E))
    return found


def exchange_cost(model: ModelSpec, plan: Plan, optim: OptimConfig | None, layer: int) -> float:
    """Return the choices of experts on all ranks that take as many bytes of the fullest rank as an exchange of two of a
    layer's experts takes of either's."""
    stage = stage_of_layer(plan, model.num_layers, layer)
    mesh, expert_bytes = plan.mesh(stage), 0.0
    for name, shape, part, _, _ in stage_shards(model, plan, stage):
        if is_expert(name) and name.startswith(layer_prefix(model, layer)):
            shards = mesh.expert_state_shards if state_shard_dim(name, part.size, mesh.expert_state_shards) else 1
            expert_bytes += part.numel / part.size[0] / shards * moved_element_bytes(plan, optim, name, shape)
    choice_bytes = HIDDEN_STATES_PER_CHOICE * model.hidden_size * compute_bytes(plan.precision)
    return expert_bytes / choice_bytes * mesh.expert_state_shards * mesh.dp_replicate


def moved_bytes(model: ModelSpec, before: Plan, after: Plan, optim: OptimConfig | None) -> int:
    """Return the bytes that all ranks together send when the placement of one plan becomes that of the other."""
    return sum(
        one.numel * moved_element_bytes(before, optim, one.name, one.shape)
        for one in moved_tensors(model, before, after)
    )


def exchanged_tensors(model: ModelSpec, before: Plan, after: Plan, optim: OptimConfig | None) -> int:
    """Return the tensors, master weights and states of the optimizer, that the pipeline rank with most exchanges one
    after another when the placement of one plan becomes that of the other."""
    found: Counter[int] = Counter()
    for one in moved_tensors(model, before, after):
        found[before.pp_rank(one.stage)] += 1 + len(optimizer_state(optim, one.name, one.shape))
    return max(found.values(), default=0)


def trial_placements(model: ModelSpec, plan: Plan) -> list[ExpertPlacement]:
    """Return two placements whose moves a run times to predict others: in each layer the first experts of two ranks
    change places, and every expert goes to the next rank; none where no layer's experts lie on several ranks."""
    assert model.moe is not None
    layers = _placed_layers(model, plan, [(0,) * model.moe.num_experts] * len(model.expert_layers))
    few, all_ = [], []
    for _, ep, order, _ in layers:
        each = len(order) // ep
        few.append((order[each], *order[1:each], order[0], *order[each + 1 :]) if ep > 1 else order)
        all_.append((*order[each:], *order[:each]) if ep > 1 else order)
    return [tuple(few), tuple(all_)] if any(ep > 1 for _, ep, _, _ in layers) else []


def moved_element_bytes(plan: Plan, optim: OptimConfig | None, name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a master weight and its optimizer state."""
    master = master_bytes(plan.precision)
    return master + sum(one.element_bytes(master) for one in optimizer_state(optim, name, shape))
