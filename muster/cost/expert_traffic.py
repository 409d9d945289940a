"""Transfers of expert parallelism: what a rank passes to the collectives of its experts' layers, by kind.

From here `muster.cost.comm_volume` takes bytes, and `muster.cost.time.layer` times. The dispatchers of
`muster.spec.expert_kinds` make these calls and no others: a test counts them and their messages. Rows that come back,
or are passed on, depend on the routing; counted as many as were sent, which is what they are over all ranks together.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from muster.cost.precision_bytes import compute_bytes, master_bytes
from muster.spec.expert_kinds import ROW_SCALE_BYTES, ExpertDispatch
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.routing_load import LoadOfRanks
from muster.spec.workload import Workload

COUNT_BYTES = 8
"""Bytes of the number of rows of one expert, of an expert's number or a token's, an int64."""


class ExpertCall(NamedTuple):
    """One collective of the ranks that share a layer's experts."""

    kind: Literal["all_to_all", "all_gather", "reduce_scatter"]
    nbytes: int
    """Bytes of the tensor that it is given."""
    ranks: int
    """Ranks of its group, to each other of which it sends a message, or which a ring passes through."""
    among: Literal["all", "inner", "outer"] = "all"
    """Ranks of the group: all that share the experts, neighbours, or those with the same place in other groups."""

    @property
    def messages(self) -> int:
        """Messages that a rank sends."""
        return self.ranks - 1


class ExpertCalls(NamedTuple):
    """Collectives of one layer over one micro-batch."""

    forward: tuple[ExpertCall, ...]
    repeated: tuple[ExpertCall, ...]
    """Calls that full recompute repeats."""
    backward: tuple[ExpertCall, ...]


class RoutedShape(NamedTuple):
    """Tokens of one rank on their way to experts."""

    tokens: int
    pairs: int
    """Pairs of a token and an expert."""
    row_bytes: int
    """Bytes of a hidden state."""
    weight_bytes: int
    """Bytes of a pair's weight."""
    num_experts: int
    has_list: bool = False
    """Pairs are a list, with the token of each."""
    result_is_repeated: bool = False
    """Full recompute goes on behind the experts' results: to shared experts, or to a norm of the output."""
    row_elements: int = 0
    """Elements of a hidden state."""


def routed_shape(spec: ModelSpec, plan: Plan, stage: int, routed_tokens: int) -> RoutedShape:
    """Return the tokens of a micro-batch that a rank of a stage routes, in Muster's own passes."""
    moe, sequences = spec.moe, plan.local_micro_batch_size(stage)
    assert moe is not None
    return RoutedShape(
        routed_tokens,
        sequences * moe.pairs_per_sequence(routed_tokens // sequences),
        spec.hidden_size * compute_bytes(plan.precision),
        master_bytes(plan.precision),
        moe.num_experts,
        moe.needs_whole_sequences,
        moe.shared_size > 0 or spec.has_post_norms,
        spec.hidden_size,
    )


def load_of_ranks(workload: Workload, plan: Plan, mesh: Mesh) -> LoadOfRanks:
    """Return the work of the ranks of a mesh that share a layer's experts, under the load of the workload."""
    load = workload.expert_load
    if load is None or mesh.ep == 1:
        return LoadOfRanks(1.0)
    return load.of_ranks(mesh.ep, plan.expert_placement, plan.ep_redundant_experts)


def dispatch_calls(dispatch: ExpertDispatch, shape: RoutedShape) -> ExpertCalls:
    """Return the collectives of one layer.

    all_to_all: numbers of rows, then the rows to their experts, which they may do in 8 bits or by centroids, and back,
    chunk by chunk; the backward sends their gradients (arXiv:2006.16668 §3.2). hierarchical: each of these once among
    neighbours and once between groups (arXiv:2206.03382 §4.3). all_gather: hidden states, weights and experts' numbers;
    the backward reduce-scatters gradients (arXiv:2505.11432 §3.2). slicing: none; where the hidden state leaves, tensor
    parallelism sums it.

    Example: 1,024 tokens with 2 experts each send 2,048 rows and get as many back.
    """
    if dispatch.size == 1 or dispatch.kind == "slicing":
        return ExpertCalls((), (), ())
    return {"all_to_all": _all_to_all, "hierarchical": _hierarchical, "all_gather": _all_gather}[dispatch.kind](
        dispatch, shape
    )


def copy_calls(
    dispatch: ExpertDispatch, num_experts: int, parameter_bytes: Sequence[int], copies: float
) -> ExpertCalls:
    """Return the collectives that bring a rank copies of other ranks' experts, and their gradients home.

    The numbers of rows of all ranks are gathered; then a matrix of each copied expert travels in one all-to-all, and so
    does its gradient. `parameter_bytes` are those of each matrix and bias of one expert, `copies` those that a rank
    gives to others.
    """
    if dispatch.size == 1 or not dispatch.redundant:
        return ExpertCalls((), (), ())
    counts = ExpertCall("all_gather", num_experts * COUNT_BYTES, dispatch.size)
    sizes = [round(copies * nbytes) for nbytes in parameter_bytes] if copies else []
    moves = tuple(ExpertCall("all_to_all", nbytes, dispatch.size) for nbytes in sizes)
    return ExpertCalls((counts, *moves), (counts, *moves), moves)


def _all_to_all(dispatch: ExpertDispatch, shape: RoutedShape) -> ExpertCalls:
    chunks, ranks = dispatch.chunks, dispatch.size
    base, rest = divmod(shape.tokens, chunks)
    k = shape.pairs // shape.tokens if shape.tokens else 0
    sent = dispatch.sent_rows(shape.pairs, shape.num_experts)
    sizes = [sent] if chunks == 1 else [k * (base + (chunk < rest)) for chunk in range(chunks)]
    rows = tuple(ExpertCall("all_to_all", size * shape.row_bytes, ranks) for size in sizes)
    row_bytes = shape.row_bytes if dispatch.dtype == "none" else shape.row_elements + ROW_SCALE_BYTES
    departing = tuple(ExpertCall("all_to_all", size * row_bytes, ranks) for size in sizes)
    counts = ExpertCall("all_to_all", chunks * shape.num_experts * COUNT_BYTES, ranks)
    forward = (counts, *departing, *rows)
    return ExpertCalls(forward, forward, (*rows, *rows))


def _hierarchical(dispatch: ExpertDispatch, shape: RoutedShape) -> ExpertCalls:
    counts, rows = shape.num_experts * COUNT_BYTES, shape.pairs * shape.row_bytes

    def both(nbytes: int) -> tuple[ExpertCall, ExpertCall]:
        inner = ExpertCall("all_to_all", nbytes, dispatch.inner, "inner")
        return inner, ExpertCall("all_to_all", nbytes, dispatch.outer, "outer")

    forward = (*both(counts), *both(rows), *both(rows))
    return ExpertCalls(forward, forward, (*both(rows), *both(rows)))


def _all_gather(dispatch: ExpertDispatch, shape: RoutedShape) -> ExpertCalls:
    ranks, states, weights = dispatch.size, shape.tokens * shape.row_bytes, shape.pairs * shape.weight_bytes
    gathered = (states, weights, *[shape.pairs * COUNT_BYTES] * (1 + shape.has_list))
    gathers = tuple(ExpertCall("all_gather", nbytes, ranks) for nbytes in gathered)
    out = ExpertCall("reduce_scatter", ranks * states, ranks)
    backward = (
        ExpertCall("all_gather", states, ranks),
        ExpertCall("reduce_scatter", ranks * states, ranks),
        ExpertCall("reduce_scatter", ranks * weights, ranks),
    )
    repeated = (*gathers, out) if shape.result_is_repeated else gathers
    return ExpertCalls((*gathers, out), repeated, backward)
