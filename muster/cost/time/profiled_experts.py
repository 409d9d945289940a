"""Times of a layer's experts on a machine that `muster profile` has measured: Muster's own passes, kernel by kernel.

Router, permutation and combination are one measured kernel, by the elements of the permuted rows; grouped matmuls take
the kernel that the runtime chooses from the same rates (`GroupedMatmulRates.fastest`).
"""

from math import log, sqrt

from muster.cost.activations import expert_parameter_bytes, pass_sizes
from muster.cost.expert_traffic import ExpertCall, copy_calls, dispatch_calls, load_of_ranks, routed_shape
from muster.cost.precision_bytes import compute_bytes
from muster.cost.time.profiled_cost import ProfiledCost
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.spec.machine_rates import MatmulPass
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload


def add_experts(
    cost: ProfiledCost,
    rates: RateInterpolator,
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    stage: int,
    parts: dict[str, tuple[int, ...]],
    again: bool,
) -> float:
    """Add a layer's routed experts over one micro-batch, but for their router's matmul, on the rank of a stage whose
    experts get most rows, and return the seconds of their activation. `parts` are the layer's parameters on it;
    `again` repeats the exchange in the backward.

    On a CPU transfers take the cores that compute, so none is hidden; an all-to-all takes as long as a reduce-scatter,
    which sends as many bytes.
    """
    moe, sizes, mesh = model.moe, pass_sizes(model, plan, workload, stage), plan.mesh(stage)
    assert moe is not None
    dispatch, load = plan.expert_dispatch(mesh), load_of_ranks(workload, plan, mesh)
    shape = routed_shape(model, plan, stage, sizes.routed_tokens)
    cost.forward_s += rates.kernel("routing forward", shape.pairs * model.hidden_size)
    cost.input_grad_s += rates.kernel("routing backward", shape.pairs * model.hidden_size)
    activation_s = _add_matmuls(cost, rates, model, parts, sizes.expert_tokens, dispatch.chunks)
    calls = dispatch_calls(dispatch, shape)
    bytes_of_one = expert_parameter_bytes(model, mesh.etp, compute_bytes(plan.precision))
    copied = copy_calls(dispatch, moe.num_experts, bytes_of_one, load.most_copies)
    for made, exposed_s in (
        (calls.forward + copied.forward, cost.forward_exposed_s),
        (calls.backward + copied.backward, cost.backward_exposed_s),
        ((calls.repeated + copied.repeated) * again, cost.backward_exposed_s),
    ):
        exposed_s["ep"] += sum(_call_s(rates, call, load.imbalance) for call in made)
    return activation_s


def _add_matmuls(
    cost: ProfiledCost,
    rates: RateInterpolator,
    model: ModelSpec,
    parts: dict[str, tuple[int, ...]],
    rows: float,
    chunks: int,
) -> float:
    """Add the grouped matmuls of the rank's experts, the sums of their gradients, and their activation, whose seconds
    are returned."""
    stacked = [shape for name, shape in parts.items() if name.startswith("mlp.experts.") and len(shape) == 3]
    experts = stacked[0][0]
    each = max(1.0, rows / experts / chunks)
    for _, outer, inner in stacked:
        seconds = {}
        for kind in ("forward", "input", "weight"):
            seconds[kind] = chunks * experts * _grouped_s(rates, kind, each, experts, inner, outer)
        cost.forward_s += seconds["forward"]
        cost.input_grad_s += seconds["input"]
        # A gradient is added to the one that is there, be it of the micro-batch before or of another chunk.
        cost.weight_grad_s += seconds["weight"] + chunks * rates.kernel("add", experts * outer * inner)
    inner, share = parts["mlp.experts.up.weight"][1], 1 if model.gated else 2
    activation_s = rates.kernel("gated forward", round(rows * inner)) / share
    cost.forward_s += activation_s
    cost.input_grad_s += rates.kernel("gated backward", round(rows * inner)) / share
    biases = sum(shape[1] for name, shape in parts.items() if name.startswith("mlp.experts.") and len(shape) == 2)
    if biases:
        cost.forward_s += rates.kernel("add", round(rows * biases))
        cost.input_grad_s += rates.kernel("add", round(rows * biases))
    return activation_s


def _grouped_s(rates: RateInterpolator, kind: MatmulPass, rows: float, experts: int, inner: int, outer: int) -> float:
    """Return the seconds of one expert's share of a grouped matmul, by the kernel that the runtime chooses.

    Of independent choices the fullest of n experts gets about √(2 r ln n) rows more than the mean r.
    """
    fullest = rows + sqrt(2 * rows * log(experts))
    return rates.grouped.fastest(kind, rows, fullest, inner, outer)[1]


def _call_s(rates: RateInterpolator, call: ExpertCall, imbalance: float) -> float:
    """Return the seconds of one collective of the experts' ranks; the fullest one decides on an all-to-all."""
    name = "reduce_scatter" if call.kind == "all_to_all" else call.kind
    factor = imbalance if call.kind == "all_to_all" else 1.0
    return rates.collective(name, call.ranks, round(factor * call.nbytes))
