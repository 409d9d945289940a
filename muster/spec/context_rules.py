"""Rules of context parallelism: which kinds and degrees have a meaning, for a plan alone and for a model."""

from collections.abc import Iterator

from muster.spec.context_kinds import CONTEXT_KINDS, CpCommType
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.rules import Rule, setting
from muster.spec.units import pluralize


def group_degrees(cp: int) -> list[int]:
    """Return the sizes of groups that leave several groups of several ranks."""
    return [degree for degree in range(2, cp) if cp % degree == 0]


def _without_groups(plan: Plan) -> bool:
    degrees = [mesh.cp for mesh in plan.distinct_meshes]
    return plan.cp_comm_type == "a2a+p2p" and any(plan.cp_ulysses_degree not in group_degrees(cp) for cp in degrees)


def _odd_groups(plan: Plan) -> str:
    cp = max(mesh.cp for mesh in plan.distinct_meshes)
    legal = ", ".join(map(str, group_degrees(cp))) or "none, but a2a or p2p"
    return (
        f"cp_comm_type a2a+p2p needs several groups of several ranks, and cp_ulysses_degree {plan.cp_ulysses_degree}"
        f" of cp {cp} doesn't make them: legal are {legal}"
    )


def _with_groups(plan: Plan) -> Plan:
    nearest = _nearest(group_degrees(min(mesh.cp for mesh in plan.distinct_meshes)), plan.cp_ulysses_degree)
    kind = "p2p" if nearest == 1 else "a2a+p2p"
    return plan.model_copy(update={"cp_comm_type": kind, "cp_ulysses_degree": nearest})


def _rings(plan: Plan) -> list[int]:
    """Return the ranks of each stage's ring."""
    return [plan.context_ranks(mesh).ring for mesh in plan.distinct_meshes]


def _without_inner_rings(plan: Plan) -> bool:
    if plan.cp_window_size == 1:
        return False
    has_rings = CONTEXT_KINDS[plan.cp_comm_type].has_double_ring
    return not has_rings or any(plan.cp_window_size not in group_degrees(ring) for ring in _rings(plan))


def _odd_inner_rings(plan: Plan) -> str:
    if not CONTEXT_KINDS[plan.cp_comm_type].has_double_ring:
        return f"cp_window_size {plan.cp_window_size} is of inner rings, which cp_comm_type {plan.cp_comm_type} hasn't"
    ring = max(_rings(plan))
    legal = ", ".join(map(str, group_degrees(ring))) or "none, but a single ring"
    return (
        f"a double ring needs several inner rings of several ranks, and cp_window_size {plan.cp_window_size} of a ring"
        f" of {ring} doesn't make them: legal are {legal}"
    )


def _with_inner_rings(plan: Plan) -> Plan:
    legal = group_degrees(min(_rings(plan))) if CONTEXT_KINDS[plan.cp_comm_type].has_double_ring else []
    return plan.model_copy(update={"cp_window_size": _nearest(legal, plan.cp_window_size)})


def _nearest(legal: list[int], degree: int) -> int:
    """Return the legal degree next to one, 1 where there is none."""
    return min(legal, key=lambda other: (abs(other - degree), other), default=1)


CONTEXT_RULES = (
    Rule(
        lambda plan: plan.cp_comm_type != "p2p" and not plan.uses_axis("cp"),
        lambda plan: f"cp_comm_type {plan.cp_comm_type} is how context-parallel ranks communicate, but cp is 1",
        setting(cp_comm_type="p2p", cp_ulysses_degree=1),
    ),
    Rule(
        lambda plan: plan.cp_ulysses_degree > 1 and plan.cp_comm_type != "a2a+p2p",
        lambda plan: (
            f"cp_ulysses_degree {plan.cp_ulysses_degree} is the size of groups under cp_comm_type a2a+p2p, not under"
            f" {plan.cp_comm_type}"
        ),
        setting(cp_ulysses_degree=1),
    ),
    Rule(_without_groups, _odd_groups, _with_groups),
    Rule(_without_inner_rings, _odd_inner_rings, _with_inner_rings),
    Rule(
        lambda plan: plan.dynamic_context_parallel and any(mesh.cp & (mesh.cp - 1) for mesh in plan.distinct_meshes),
        lambda plan: (
            f"cpdyn halves the context-parallel ranks again and again, which cp {plan.mesh(0).cp} isn't made for: legal"
            " are powers of two"
        ),
        setting(dynamic_context_parallel=False),
    ),
    Rule(
        lambda plan: plan.dynamic_context_parallel and not plan.uses_axis("cp"),
        "cpdyn assigns sequences to groups of context-parallel ranks, but cp is 1",
        setting(dynamic_context_parallel=False),
    ),
)
"""Combinations of the context-parallel fields of a plan that no runtime could give a meaning."""


# ----------------------------------------------------------------------------------------------------------------------
# With a model


def divides_exchanged_heads(model: ModelSpec, tp: int, ranks: int) -> bool:
    """Return True if some context-parallel ranks can exchange positions for heads (Ulysses): each gets whole query
    heads, and whole key/value heads or, where there are fewer than ranks, a copy of one."""
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    return heads % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0


def context_violations(plan: Plan, mesh: Mesh, model: ModelSpec) -> Iterator[str]:
    """Yield a sentence for each reason why a model's attention can't be computed by a plan's kind of context
    parallelism."""
    ranks = plan.context_ranks(mesh)
    row = CONTEXT_KINDS[ranks.kind]
    if mesh.cp > 1 and _has_states(model) != ranks.is_contiguous:
        yield _wrong_states(ranks.kind, _has_states(model))
    if model.sliding_window is not None and mesh.cp > 1 and not row.has_windows:
        yield (
            f"cp_comm_type {ranks.kind} sends queries past all keys, most of which a sliding window of"
            f" {model.sliding_window} positions hides: p2p, all_gather and a2a have windows"
        )
    if not row.exchanges_heads or divides_exchanged_heads(model, mesh.tp, ranks.ulysses):
        return
    heads, kv_heads = model.num_heads // mesh.tp, max(1, model.num_kv_heads // mesh.tp)
    possible = range(1, heads + 1)
    if ranks.kind != "a2a":
        possible = group_degrees(mesh.cp)
        if ranks.ulysses not in possible:
            return  # a rule's own sentence
    legal = [degree for degree in possible if divides_exchanged_heads(model, mesh.tp, degree)] or ["none"]
    each = f" of each of tp {mesh.tp} ranks" if mesh.tp > 1 else ""
    name = "cp" if ranks.kind == "a2a" else "cp_ulysses_degree"
    yield (
        f"cp_comm_type {ranks.kind} exchanges heads, and {name} {ranks.ulysses} doesn't divide the"
        f" {pluralize(heads, 'head')} and {pluralize(kv_heads, 'key/value head')}{each}: legal are"
        f" {', '.join(map(str, legal))}, or p2p and all_gather with any cp"
    )


def _has_states(model: ModelSpec) -> bool:
    """Return True for a model whose linear attention may exchange states; the gated delta rule's are no sums."""
    return model.linear_attention is not None and model.linear_attention.kind != "gated_deltanet"


def _wrong_states(kind: str, has_states: bool) -> str:
    if not has_states:
        return (
            f"cp_comm_type {kind} exchanges the states of linear attention, which the model hasn't: p2p, all_gather and"
            " a2a are for attention with a softmax"
        )
    kinds = " and ".join(name for name, row in CONTEXT_KINDS.items() if row.states is not None)
    return f"cp_comm_type {kind} has no exchange for the states of linear attention: {kinds} have one"


def with_possible_kind(plan: Plan, model: ModelSpec) -> Plan:
    """Return the plan with the nearest kind of context parallelism that the model's attention can be computed by: the
    largest groups that divide the heads, or a ring."""
    mesh = plan.mesh(0)
    if not list(context_violations(plan, mesh, model)):
        return plan
    ranks = plan.context_ranks(mesh)
    if mesh.cp > 1 and (_has_states(model) or ranks.is_contiguous):
        kind: CpCommType = "lasp2" if _has_states(model) else "all_gather"
        return plan.model_copy(update={"cp_comm_type": kind, "cp_ulysses_degree": 1, "cp_window_size": 1})
    for degree in reversed(group_degrees(mesh.cp)):
        if CONTEXT_KINDS[ranks.kind].exchanges_heads and divides_exchanged_heads(model, mesh.tp, degree):
            return _with_inner_rings(plan.model_copy(update={"cp_comm_type": "a2a+p2p", "cp_ulysses_degree": degree}))
    return plan.model_copy(update={"cp_comm_type": "p2p", "cp_ulysses_degree": 1, "cp_window_size": 1})
