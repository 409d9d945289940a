"""Nominal times of passes in units of their matmuls: for choosing an order before anything is measured."""

from math import prod

from muster.schedule.timing import PassTimes
from muster.spec.layer_strategy import Recompute
from muster.spec.model import ModelSpec, layer_parameter_shapes
from muster.spec.plan import Plan
from muster.spec.workload import Workload

NOMINAL_P2P = 0.05
"""Nominal p2p time in units of a mean stage's forward: enough for the search to prefer orders that bear delays."""


def nominal_pass_times(plan: Plan, model: ModelSpec, workload: Workload) -> PassTimes:
    """Return nominal pass times by stage: multiply-adds of matmuls and of causal attention; a mean stage's forward
    takes 1.

    A forward has each matmul once; a backward once for the inputs and once for the weights. Attention has no weights,
    and its backward costs twice its forward. Full recompute repeats a layer's forward before its backward.
    """
    forward, inputs, weights = [], [], []
    for stage in range(plan.stages_per_replica):
        layers = plan.layers(stage, model.num_layers)
        products = sum(_layer_matmul_elements(model, layer) for layer in layers)
        attention = workload.seq_len * model.num_heads * model.head_dim * len(layers)
        again = sum(
            _layer_matmul_elements(model, layer) + attention // len(layers)
            for layer in layers
            if _recompute(plan, layer) == "full"
        )
        head = model.vocab_size * model.hidden_size if plan.is_last(stage) and not plan.vocab_parallel else 0
        share = plan.local_micro_batch_size(stage) / plan.mesh(stage).tp
        forward.append(share * (products + head + attention))
        inputs.append(share * (products + head + 2 * attention + again))
        weights.append(share * (products + head))
    unit = sum(forward) / len(forward)
    return PassTimes(*([time / unit for time in times] for times in (forward, inputs, weights)), p2p_s=NOMINAL_P2P)


def _layer_matmul_elements(model: ModelSpec, layer: int) -> int:
    return sum(prod(shape) for _, shape in layer_parameter_shapes(model, layer) if len(shape) > 1)


def _recompute(plan: Plan, layer: int) -> Recompute:
    return plan.strategy(layer).recompute
