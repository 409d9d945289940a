"""How long every instruction of a plan's Program takes on a cluster."""

from collections.abc import Iterator

from muster.cost.collectives import Group, all_reduce_s, message_s
from muster.cost.kernels import matmul_s, stream_s
from muster.cost.measured import measured_times
from muster.cost.op_times import Hop, OpTimes
from muster.cost.places import PlanSetting, known_of
from muster.cost.stage_times import StageTimes
from muster.spec.cluster import ClusterSpec
from muster.spec.device import LinkSpec
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.plan import Mesh, Plan
from muster.spec.software import Software
from muster.spec.workload import Workload

OPTIMIZER_BYTES = 30
"""AdamW reads and writes master weight and two moments in float32, reads the gradient, and writes the weight that the
passes use: 3 · 8 + 4 + 2 for each number (arXiv:1711.05101, algorithm 2)."""
NORM_BYTES = 4
"""The gradients' norm reads each once."""
STEP_HOST_S = 5e-3
"""Of the host, once a step: the optimizer's and the loop's own Python, as far as it can't run ahead of the device
because the gradients' norm is waited for."""


def plan_times(
    model: ModelSpec, plan: Plan, workload: Workload, cluster: ClusterSpec, software: Software | None = None
) -> OpTimes:
    """Seconds of each (kind, stage) of the plan's Program, and of each hop between stages.

    Ranks are those of the plan's mesh, laid on the cluster's devices in order. Raises InfeasibleError where the cluster
    has fewer devices, ConfigError where a device's rates are unknown. On a machine that was measured Muster itself
    computes (`measured_times`).
    """
    if cluster.device.rates is not None:
        return measured_times(model, plan, workload, cluster.device.rates)
    if plan.world_size > cluster.num_devices:
        raise InfeasibleError(
            f"the plan needs {plan.world_size} devices, but {cluster.name or 'the cluster'} has {cluster.num_devices}"
        )
    software = software or Software()
    setting = PlanSetting(
        model, plan, workload, cluster, software, known_of(model, workload.seq_len, cluster, software)
    )
    seconds: dict[tuple[str, int], float] = {}
    exposed_s: dict[tuple[str, int], dict[str, float]] = {}
    held = [0.0] * plan.pp
    alike: dict[tuple, StageTimes] = {}
    for stage in range(plan.num_stages):
        key = setting.signature(stage)
        at = alike.get(key) or alike.setdefault(key, StageTimes(setting, stage))
        for kind, time_s in at.seconds.items():
            seconds[kind, stage] = time_s
        for kind, waits_s in at.waits_s.items():
            exposed_s[kind, stage] = waits_s
        seconds.update({(kind, stage): time_s for kind, time_s in _between_stages(setting, stage, at)})
        held[setting.placement[stage]] += at.owned_numel
    if plan.spread_vocab:
        seconds.update(_word_times(setting))
    world = setting.group(0, ((1, plan.world_size),))
    most, device = max(held), cluster.device
    seconds["NORM", -1] = all_reduce_s(world, 32) + stream_s(device, NORM_BYTES * most)
    seconds["STEP", -1] = STEP_HOST_S + stream_s(device, OPTIMIZER_BYTES * most)
    processes = tuple(plan.mesh(rank).ranks for rank in range(plan.pp)) if device.shared_cores else ()
    return OpTimes(seconds, 0.0, device.shared_cores, processes, hops=dict(_hops(setting)), exposed_s=exposed_s)


def _between_stages(setting: PlanSetting, stage: int, at: StageTimes) -> Iterator[tuple[str, float]]:
    """(kind, seconds) of what a stage adds up with another once a step; `at`: a stage whose times are the same."""
    plan, gradient_bytes = setting.plan, setting.software.gradient_bytes
    if stage % setting.depth and (stage + 1) % setting.depth and plan.replicas == 1:
        return
    words = setting.model.vocab_size * setting.model.hidden_size / at.mesh.tp
    other = plan.tied_stage(stage)
    if other is not None:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(other))
        yield "TIE", all_reduce_s(pair, words * gradient_bytes)
    if plan.replicas > 1 and stage < plan.depth:
        pair = setting.pair(setting.first_rank(stage), setting.first_rank(stage + plan.depth))
        yield "MERGE", all_reduce_s(pair, at.numel * gradient_bytes)


def _hops(setting: PlanSetting) -> Iterator[tuple[tuple[int, int], Hop]]:
    """(sender's stage, receiver's stage) → the transfer between them: the hidden state forward, its gradient back."""
    plan, model = setting.plan, setting.model
    known: dict[tuple, Hop] = {}
    for stage in range(len(setting.placement) - 1):
        if (stage + 1) % setting.depth == 0 or setting.placement[stage] == setting.placement[stage + 1]:
            continue
        for source, target in ((stage, stage + 1), (stage + 1, stage)):
            mesh: Mesh = plan.mesh(source)
            sp = plan.strategy(plan.layers(source, model.num_layers).start).sp
            pair = setting.between(source, target)
            key = id(pair), mesh, sp
            if key not in known:
                split = mesh.tp if sp or setting.software.split_p2p else 1
                tokens = plan.rows(source) * setting.workload.seq_len / mesh.cp / split
                size = tokens * model.hidden_size * max(2, _bytes(plan))
                known[key] = Hop(message_s(pair, size), size / _wire(pair))
            yield (source, target), known[key]


def _bytes(plan: Plan) -> int:
    return {"fp64": 8, "fp32": 4}.get(plan.precision, 2)


def _wire(group: Group) -> float:
    link: LinkSpec = group.intra
    fabric = link.bandwidth_bytes_per_s * link.efficiency
    return fabric if group.domains == 1 else min(fabric, group.network_bytes_per_s)


def _word_times(setting: PlanSetting) -> Iterator[tuple[tuple[str, int], float]]:
    """Where the vocabulary is spread over the pipeline (arXiv:2411.05288): each rank looks up and scores its part of
    the words; what it gives the others travels beside its passes."""
    plan, model = setting.plan, setting.model
    words = model.vocab_size / plan.pp
    pipeline = setting.axis_group(0, "pp") if plan.is_uniform else setting.alone
    for rank in range(plan.pp):
        stage = next(stage for stage in range(plan.num_stages) if plan.pp_rank(stage) == rank)
        at = StageTimes(setting, stage).at
        hidden, wide = at.hidden_bytes, at.wide
        score_s = matmul_s(at.device, at.tokens, words, model.hidden_size, wide)
        logits_s = stream_s(at.device, 3 * at.act * at.tokens * words, 2)
        yield ("E", stage), stream_s(at.device, 2 * hidden / plan.pp)
        yield ("S", stage), 2 * score_s + logits_s
        yield ("T", stage), score_s + stream_s(at.device, at.act * at.tokens * words)
        yield ("EW", stage), stream_s(at.device, 3 * hidden / plan.pp)
        for kind, size in (("EC", hidden), ("HC", hidden), ("SC", 2 * hidden), ("DC", hidden)):
            yield (kind, stage), all_reduce_s(pipeline, size) / 2
