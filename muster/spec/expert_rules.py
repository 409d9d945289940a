"""Rules of dispatchers: which of them have a meaning under a plan."""

from muster.spec.expert_kinds import DISPATCHERS, usual_inner_size
from muster.spec.plan import Plan
from muster.spec.rules import Rule, setting


def _inner_sizes(ep: int) -> list[int]:
    return [size for size in range(2, ep) if ep % size == 0]


def _has_no_levels(plan: Plan) -> bool:
    return plan.ep_dispatcher == "hierarchical" and any(
        plan.expert_dispatch(mesh).inner not in _inner_sizes(mesh.ep) for mesh in plan.distinct_meshes
    )


def _missing_levels(plan: Plan) -> str:
    mesh = next(one for one in plan.distinct_meshes if plan.expert_dispatch(one).inner not in _inner_sizes(one.ep))
    legal = ", ".join(map(str, _inner_sizes(mesh.ep))) or "none"
    return (
        f"ep_dispatcher hierarchical needs several groups of several ranks, and ep_inner_size"
        f" {plan.expert_dispatch(mesh).inner} of ep {mesh.ep} doesn't make them: legal are {legal}"
    )


def _with_levels(plan: Plan) -> Plan:
    ep = plan.distinct_meshes[0].ep
    if _inner_sizes(ep):
        return plan.model_copy(update={"ep_inner_size": usual_inner_size(ep)})
    return plan.model_copy(update={"ep_dispatcher": "all_to_all", "ep_inner_size": None})


def _lacks_same_tokens(plan: Plan) -> bool:
    shares = DISPATCHERS[plan.ep_dispatcher].shares_tokens
    return shares and any((mesh.ep, mesh.etp) != (mesh.tp, 1) for mesh in plan.distinct_meshes)


DISPATCHER_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.ep_dispatcher != "all_to_all" and not plan.uses_axis("ep"),
        lambda plan: f"ep_dispatcher {plan.ep_dispatcher} sends tokens between ranks, but ep is 1",
        setting(ep_dispatcher="all_to_all", ep_inner_size=None),
    ),
    Rule(_has_no_levels, _missing_levels, _with_levels),
    Rule(
        lambda plan: plan.ep_inner_size is not None and plan.ep_dispatcher != "hierarchical",
        "ep_inner_size is of the hierarchical dispatcher",
        setting(ep_inner_size=None),
    ),
    Rule(
        _lacks_same_tokens,
        "ep_dispatcher slicing takes rows of the same tokens, which only tensor-parallel ranks have: ep must be tp, and"
        " etp 1",
        setting(ep_dispatcher="all_to_all"),
    ),
    Rule(
        lambda plan: plan.ep_chunks > 1 and not (plan.uses_axis("ep") and DISPATCHERS[plan.ep_dispatcher].sends_chunks),
        "ep_chunks are exchanged by the dispatcher all_to_all, between several ranks",
        setting(ep_chunks=1),
    ),
    Rule(
        lambda plan: plan.ep_redundant_experts > 0 and not plan.uses_axis("ep"),
        "ep_redundant_experts are copies of other ranks' experts, but ep is 1",
        setting(ep_redundant_experts=0),
    ),
    Rule(
        lambda plan: (
            plan.ep_dispatch_dtype != "none"
            and not (plan.uses_axis("ep") and DISPATCHERS[plan.ep_dispatcher].casts_rows)
        ),
        lambda plan: (
            f"hidden states travel in {plan.ep_dispatch_dtype} with the dispatcher all_to_all, between several ranks"
        ),
        setting(ep_dispatch_dtype="none"),
    ),
    Rule(
        lambda plan: (
            plan.ep_lsh_rate > 0
            and not (
                plan.uses_axis("ep")
                and DISPATCHERS[plan.ep_dispatcher].sends_centroids
                and plan.ep_chunks == 1
                and not plan.ep_redundant_experts
            )
        ),
        "centroids of hidden states (ep_lsh_rate) travel by the dispatcher all_to_all, between several ranks, in one"
        " chunk and to no copies of experts",
        setting(ep_lsh_rate=0.0),
    ),
)
