"""Divisions of a model and its sequences over a mesh: reasons why an axis can't cut what it has to."""

from collections.abc import Iterator
from math import gcd, isqrt, lcm

from muster.spec.context_rules import context_violations
from muster.spec.mesh import Mesh
from muster.spec.mesh_axes import EXPERT_RANK_AXES, SEQUENCE_AXES
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.units import pluralize
from muster.spec.workload import Workload


def cut_violations(plan: Plan, model: ModelSpec, workload: Workload) -> Iterator[str]:
    """Yield a sentence for each width, number of heads or experts, or length that an axis doesn't divide."""
    for mesh in plan.distinct_meshes:
        yield from _width(mesh, model)
        own_tokens = model.moe is not None and plan.routes_own_tokens(mesh)
        cuts = any(strategy.sp for strategy in plan.strategies), own_tokens, plan.context_ranks(mesh).is_contiguous
        yield from _positions(mesh, workload, *cuts)
        yield from context_violations(plan, mesh, model)
        yield from _experts(mesh, model)
    if model.position == "learned" and (model.max_positions or 0) < workload.seq_len:
        yield f"seq_len {workload.seq_len} is longer than the model's {model.max_positions} learned positions"
    if plan.vocab_parallel and -(-model.vocab_size // plan.pp) * (plan.pp - 1) >= model.vocab_size:
        yield (
            f"vocab_parallel over pp {plan.pp} leaves a rank without any of the model's {model.vocab_size}"
            " vocabulary entries"
        )


def _width(mesh: Mesh, model: ModelSpec) -> Iterator[str]:
    legal = [tp for tp in divisors(model.num_heads) if not max(tp, model.num_kv_heads) % min(tp, model.num_kv_heads)]
    if mesh.tp not in legal:
        heads = f"{pluralize(model.num_heads, 'head')} and {pluralize(model.num_kv_heads, 'key/value head')}"
        yield f"tp {mesh.tp} doesn't divide the model's {heads}: legal are {', '.join(map(str, legal))}"
    if model.parallel_sublayers % mesh.tp and model.parallel_sublayers > 1:
        legal = ", ".join(map(str, divisors(model.parallel_sublayers)))
        yield (
            f"tp {mesh.tp} doesn't divide the model's parallel_sublayers {model.parallel_sublayers}, each of which lies"
            f" on one rank: legal are {legal}"
        )
    if (linear := model.linear_attention) is not None and gcd(linear.num_key_heads, linear.num_value_heads) % mesh.tp:
        heads = f"{pluralize(linear.num_key_heads, 'key head')} and {pluralize(linear.num_value_heads, 'value head')}"
        yield f"tp {mesh.tp} doesn't divide the {heads} of linear attention"
    if -(-model.vocab_size // mesh.tp) * (mesh.tp - 1) >= model.vocab_size:
        yield f"tp {mesh.tp} leaves a rank without any of the model's {model.vocab_size} vocabulary entries"


def _positions(mesh: Mesh, workload: Workload, sp: bool, own_tokens: bool, is_contiguous: bool) -> Iterator[str]:
    degrees = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in SEQUENCE_AXES)
    # Each rank takes an early and a late chunk, so that all have equal work under the causal mask.
    halves = 2 if mesh.sequence_shards > 1 and not is_contiguous else 1
    chunks = mesh.sequence_shards * halves
    sp_shards = mesh.tp * mesh.sequence_shards if (sp or own_tokens) and mesh.tp > 1 else 1
    nearest = _nearest_multiples(workload.seq_len, lcm(chunks, sp_shards))
    if workload.seq_len % chunks:
        yield (
            f"seq_len {workload.seq_len} is not a multiple of {chunks} ({'two' if halves == 2 else 'one'} for each rank"
            f" of {degrees}), as {nearest}"
            " would be"
        )
    if workload.seq_len % sp_shards:
        yield (
            f"seq_len {workload.seq_len} is not a multiple of tp {mesh.tp} × {degrees}, over which"
            f" {'sp shards it' if sp else 'its tokens go to experts (etp 1)'}, as {nearest} would be"
        )


def _nearest_multiples(number: int, of: int) -> str:
    """Return the multiples below and above a number in words, without 0."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


# ----------------------------------------------------------------------------------------------------------------------
# Experts


def _experts(mesh: Mesh, model: ModelSpec) -> Iterator[str]:
    if mesh.ep * mesh.etp > 1 and model.moe is None:
        yield f"ep {mesh.ep} × etp {mesh.etp} distribute experts, but the model has none"
    if model.moe is not None and model.moe.num_experts % mesh.ep:
        yield f"ep {mesh.ep} doesn't divide the model's {model.moe.num_experts} experts"
    if model.moe is not None and model.moe.expert_size % mesh.etp:
        yield f"etp {mesh.etp} doesn't divide the experts' inner width {model.moe.expert_size}"


def homeless_experts(plan: Plan) -> str:
    """Return the sentence about a plan whose experts would need more ranks than share them, or other ones."""
    mesh = next(mesh for mesh in plan.distinct_meshes if mesh.expert_ranks % (mesh.ep * mesh.etp))
    degrees = " × ".join(f"{axis} {n}" for axis in EXPERT_RANK_AXES if (n := getattr(mesh, axis)) > 1) or "tp 1"
    ranks = pluralize(mesh.expert_ranks, "rank")
    needed = f"ep {mesh.ep}" + (f" × etp {mesh.etp}" if mesh.etp > 1 else "")
    legal = [ep for ep in divisors(mesh.expert_ranks) if mesh.expert_ranks % (ep * mesh.etp) == 0]
    choices = f"legal are ep {', '.join(map(str, legal))}" if legal else f"legal is etp {_placed(mesh).etp}"
    return f"{needed} doesn't divide the {ranks} of a copy of a layer's experts ({degrees}): {choices}"


def with_placed_experts(plan: Plan) -> Plan:
    """Return the plan with the largest degrees of its experts' mesh that divide the ranks that share the experts."""
    stages = tuple(
        stage if stage.mesh is None else stage.model_copy(update={"mesh": _placed(stage.mesh)}) for stage in plan.stages
    )
    default = _placed(plan.model_copy(update={"stages": ()}).mesh(0))
    return plan.model_copy(update={"stages": stages, "ep": default.ep, "etp": default.etp})


def _placed(mesh: Mesh) -> Mesh:
    etp = gcd(mesh.etp, mesh.expert_ranks)
    return mesh.model_copy(update={"etp": etp, "ep": gcd(mesh.ep, mesh.expert_ranks // etp)})


def divisors(number: int) -> list[int]:
    """Return all divisors in rising order, 1 and the number included."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
