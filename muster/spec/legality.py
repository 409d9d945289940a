"""Legality: reasons why a plan can't hold for a model, a batch and a number of processes, one sentence each."""

from collections.abc import Iterator

from muster.spec.asynchronous_rules import ASYNCHRONOUS_LEGAL_RULES, few_micro_batches
from muster.spec.context_rules import CONTEXT_RULES
from muster.spec.errors import InfeasibleError
from muster.spec.expert_rules import DISPATCHER_RULES
from muster.spec.gather_rules import GATHER_LEGAL_RULES
from muster.spec.mesh import Mesh
from muster.spec.mesh_axes import MESH_AXES, SEQUENCE_AXES
from muster.spec.mesh_cuts import cut_violations, homeless_experts, with_placed_experts
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plugin_model import plugin_model
from muster.spec.rules import Rule, broken_rules, in_every_layer, setting
from muster.spec.schedules import SCHEDULES
from muster.spec.shard_level_rules import SHARD_LEVEL_LEGAL_RULES
from muster.spec.skip_rules import SKIP_LEGAL_RULES, pinned_path_faults
from muster.spec.tp_overlap_rules import TP_OVERLAP_LEGAL_RULES
from muster.spec.units import alternatives, pluralize
from muster.spec.workload import MAX_PROGRAM_MICRO_BATCHES, Workload


def plan_violations(plan: Plan, model: ModelSpec, workload: Workload, world_size: int) -> list[str]:
    """Return one sentence for each reason why the plan can't hold for this model, batch and number of processes."""
    if plan.stages and len(plan.stages) != plan.stages_per_replica:
        product = f"pp {plan.pp} × vpp {plan.vpp}" + (
            f" / {plan.pipeline_replicas} replicas" if plan.pipeline_replicas > 1 else ""
        )
        return [f"it lists layers for {len(plan.stages)} stages, but {product} is {plan.stages_per_replica}"]
    checks = (
        _world(plan, world_size),
        _batch(plan, workload),
        layer_violations(plan, model),
        _chunks(plan),
        _order(plan, workload),
        _unequal(plan),
        _shares(plan),
        _replicas(plan, workload),
        few_micro_batches(plan, workload),
        cut_violations(plan, model, workload),
        _listed_ranks(plan),
        broken_rules(LEGAL_RULES, plan),
        _plugin(plan, model),
        _tiles(plan, model, workload),
        _placed_experts(plan, model),
        _redundant_experts(plan, model),
        _slices(plan, model, workload),
    )
    return [problem for check in checks for problem in check]


def required_world_size(plan: Plan) -> int:
    """Return the processes that the plan needs, even if it has a wrong number of stages."""
    badly_counted = plan.stages and len(plan.stages) != plan.stages_per_replica
    return plan.pp * plan.mesh(0).num_ranks if badly_counted else plan.world_size


# ----------------------------------------------------------------------------------------------------------------------
# Checks


def _world(plan: Plan, world_size: int) -> Iterator[str]:
    if plan.world_size != world_size:
        degrees = [f"{axis} {n}" for axis in ("islands", *MESH_AXES) if (n := getattr(plan, axis)) > 1]
        product = f" ({' × '.join(degrees)})" if degrees and plan.is_uniform else ""
        yield f"it needs {pluralize(plan.world_size, 'process')}{product}, but there {_are(world_size)}"


def _batch(plan: Plan, workload: Workload) -> Iterator[str]:
    try:
        count = plan.num_micro_batches(workload)
    except InfeasibleError as error:
        yield str(error)
        return
    if count * plan.pp > MAX_PROGRAM_MICRO_BATCHES:
        yield (
            f"global_batch_size {workload.global_batch_size} gives each data-parallel rank {count:,} micro-batches of"
            f" {plan.micro_batch_size}; with pp {plan.pp}, a step has at most {MAX_PROGRAM_MICRO_BATCHES // plan.pp:,}"
        )


def layer_violations(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Yield a sentence for stages and overrides that don't fit the model's layers."""
    counts = [stage.layers for stage in plan.stages]
    if counts and sum(counts) != model.num_layers:
        shown = ".".join(map(str, counts))
        yield f"its stages hold {sum(counts)} layers ({shown}), but the model has {model.num_layers}"
    if 0 in counts[1:-1]:
        yield f"stage {counts.index(0, 1)} has no layers; only the first and the last may (embedding and head)"
    if not counts and plan.stages_per_replica > model.num_layers:
        yield f"it has {plan.stages_per_replica} stages, but the model has only {pluralize(model.num_layers, 'layer')}"
    for run in plan.overrides:
        if run.start + run.count > model.num_layers:
            yield (
                f"an override covers layers {run.start} to {run.start + run.count - 1},"
                f" but the model's last is {model.num_layers - 1}"
            )


def _chunks(plan: Plan) -> Iterator[str]:
    """Check the number of stages on each pipeline rank against the schedule."""
    entry = plan.schedule_entry
    if plan.vpp > 1 and plan.pp == 1:
        yield f"vpp {plan.vpp} puts several stages on each pipeline rank, but with pp 1 there is nothing to overlap"
    elif not entry.supports_chunks(plan.vpp):
        least = entry.min_chunks
        named = f"vpp {plan.vpp} needs schedule {alternatives(schedules_for_vpp(plan.vpp))}"
        runs = named if least == 1 else f"that is pp{plan.pp}v{least}, not vpp {plan.vpp}"
        stages = pluralize(least, "stage") + ("" if entry.chunks else " for each wave")
        yield f"schedule {plan.schedule} runs {stages} on each pipeline rank; {runs}"
    elif plan.pipeline_replicas > 1 and plan.pp % 2:
        yield f"schedule {plan.schedule} is bidirectional and needs an even number of pipeline ranks, not {plan.pp}"


def _order(plan: Plan, workload: Workload) -> Iterator[str]:
    """Check the pinned result of a schedule search."""
    order = plan.pinned_schedule
    if not plan.schedule_entry.searched:
        searched = ", ".join(name for name, entry in SCHEDULES.items() if entry.searched)
        if order is not None:
            yield f"pinned_schedule is for searched schedules ({searched}), not for {plan.schedule}: leave it out"
        if plan.max_in_flight_micro_batches is not None:
            yield (
                f"max_in_flight_micro_batches is for searched schedules ({searched}); schedule {plan.schedule} holds a"
                " fixed number"
            )
        return
    if plan.max_in_flight_micro_batches is not None and plan.max_in_flight_micro_batches < 1:
        yield (
            f"max_in_flight_micro_batches {plan.max_in_flight_micro_batches:g} doesn't hold one micro-batch's"
            " activations; the least is 1"
        )
    if order is None:
        return
    yield from pinned_path_faults(plan)
    again = "leave pinned_schedule out to search again"
    if len(order.ranks) != plan.pp or sorted(order.placement) != sorted([*range(plan.pp)] * plan.vpp):
        yield f"its pinned_schedule is for {len(order.placement)} stages on {len(order.ranks)} pipeline ranks: {again}"
    per_micro_batch = plan.mesh(0).dp_size * plan.micro_batch_size
    if order.micro_batches * per_micro_batch * plan.islands != workload.global_batch_size:
        yield (
            f"its pinned_schedule is for {order.micro_batches} micro-batches, now of {per_micro_batch} sequences, but"
            f" global_batch_size is {workload.global_batch_size}: {again}"
        )


def schedules_for_vpp(vpp: int) -> list[str]:
    """Return the schedules that can run `vpp` stages on each pipeline rank."""
    return [name for name, entry in SCHEDULES.items() if entry.supports_chunks(vpp) and not entry.searched]


def _unequal(plan: Plan) -> Iterator[str]:
    """Check stages with a mesh of their own."""
    if plan.is_uniform:
        return
    if plan.pipeline_replicas > 1:
        yield f"schedule {plan.schedule} runs two replicas of the model, whose stages all need equal meshes"
        return
    idle = [axis for axis in Mesh.model_fields if getattr(plan, axis) > 1]
    if idle and all(stage.mesh is not None for stage in plan.stages):
        degree = f"{idle[0]} {getattr(plan, idle[0])}"
        yield f"every stage has its own mesh, so {degree} has no effect: leave it out"
    if plan.axis_order[0] != "pp":
        yield f"unequal stages need pp as the first axis of axis_order, not {plan.axis_order[0]}"
    sequences = plan.micro_batch_size * plan.mesh(0).dp_size
    if plan.schedule_entry.searched and plan.pinned_schedule is None and plan.vpp > 1:
        yield f"unequal stages need a known placement, which schedule {plan.schedule} has yet to find"
        return
    for stage in range(plan.num_stages):
        if plan.mesh(stage) != plan.mesh(plan.pp_rank(stage)):
            yield f"stage {stage} has a different mesh from stage {plan.pp_rank(stage)}, but both are on the same ranks"
        if sequences % plan.mesh(stage).dp_size:
            yield (
                f"stage {stage} has {pluralize(plan.mesh(stage).dp_size, 'data-parallel rank')}, which don't divide a"
                f" micro-batch of {pluralize(sequences, 'sequence')} (data-parallel ranks of stage 0"
                f" {plan.mesh(0).dp_size} × micro_batch_size {plan.micro_batch_size})"
            )


def _listed_ranks(plan: Plan) -> Iterator[str]:
    """Check stages that list their own ranks: together they have each rank of the world once."""
    listed = {stage: one.ranks for stage, one in enumerate(plan.stages) if one.ranks is not None}
    if not listed:
        return
    if len(listed) < len(plan.stages):
        missing = next(stage for stage in range(len(plan.stages)) if stage not in listed)
        yield f"stage {missing} lists no ranks, but stage {next(iter(listed))} does: list them for all stages or none"
        return
    if plan.schedule_entry.searched and plan.pinned_schedule is None and plan.vpp > 1:
        return  # `_unequal` says that the stages have no place yet
    for stage, ranks in listed.items():
        expected, first = plan.mesh(stage).num_ranks, listed[plan.pp_rank(stage)]
        if len(ranks) != expected:
            yield f"stage {stage} lists {pluralize(len(ranks), 'rank')}, but its mesh has {expected}"
        if ranks != first:
            yield f"stage {stage} lists other ranks than stage {plan.pp_rank(stage)}, but shares its pipeline rank"
    together = sorted(rank for pp_rank in range(plan.pp) for rank in listed[pp_rank] or ())
    if together != list(range(plan.world_size)):
        yield f"its stages' lists of ranks must have each of 0 to {plan.world_size - 1} once"


def _shares(plan: Plan) -> Iterator[str]:
    """Check data-parallel ranks with unequal numbers of micro-batches."""
    shares = plan.uneven_micro_batches
    ranks = plan.mesh(0).dp_size
    if not shares:
        return
    if ranks % len(shares):
        yield (
            f"uneven_micro_batches has {len(shares)} numbers, which don't divide"
            f" {pluralize(ranks, 'data-parallel rank')}"
        )
    if not plan.is_uniform:
        yield "uneven_micro_batches need equal meshes on all stages: each rank's micro-batches stay on its own pipeline"
    others = sorted({strategy.zero for strategy in plan.strategies} - {"z1"})
    if others and not plan.schedule_entry.is_asynchronous:  # which reduces once a step, but doesn't run them
        yield (
            f"uneven_micro_batches need z1: {others[0]} reduces gradients in every backward, and"
            " ranks with different numbers of backwards would deadlock"
        )
    if plan.schedule_entry.searched:
        yield (
            "uneven_micro_batches need a schedule for each number of micro-batches, but schedule"
            f" {plan.schedule} finds one"
        )


def _plugin(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Check a plugin's layers for what they don't declare to support."""
    if (plugin := plugin_model(model)) is None:
        return
    if plan.uses_axis("tp") and not plugin.tensor_parallel:
        yield (
            f"model {plugin.name} doesn't declare that tensor parallelism can shard its layers (tensor_parallel=True,"
            " which needs `project_in` and `project_out` around their matmuls): legal is tp 1"
        )
    for axis in SEQUENCE_AXES:
        if plan.uses_axis(axis):
            yield f"{axis} shards sequences, which the layers of model {plugin.name} don't support: legal is {axis} 1"
    if others := {s.recompute for s in plan.strategies} - {"none", "full"}:
        yield (
            f"recompute {others.pop()} supports Muster's own layers, not those of model {plugin.name}:"
            " legal are none, full"
        )


def _tiles(plan: Plan, model: ModelSpec, workload: Workload) -> Iterator[str]:
    """Check the parts of a micro-batch that pass MLPs and loss one after another."""
    if plan.sequence_tiles == 1:
        return
    if plugin_model(model) is not None or model.moe is not None:
        layers = "experts" if model.moe is not None else f"the layers of model {model.name}"
        yield f"sequence_tiles cut the positions of Muster's own MLPs, not of {layers}: legal is sequence_tiles 1"
    for mesh in plan.distinct_meshes:
        sp_shards = mesh.tp if plan.default_strategy.sp else 1
        positions = plan.micro_batch_size * workload.seq_len // (mesh.sequence_shards * sp_shards)
        if plan.sequence_tiles > positions:
            yield (
                f"sequence_tiles {plan.sequence_tiles} cut the {pluralize(positions, 'position')} that a rank has of a"
                f" micro-batch: legal are 1 to {positions}"
            )


def _redundant_experts(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Check that a rank is given copies of no more experts than other ranks have."""
    if model.moe is None:
        return
    most = min((model.moe.num_experts - model.moe.num_experts // mesh.ep for mesh in plan.distinct_meshes), default=0)
    if most and plan.ep_redundant_experts > most:
        yield (
            f"ep_redundant_experts {plan.ep_redundant_experts} are more than the {pluralize(most, 'expert')} of other"
            f" ranks: legal are 0 to {most}"
        )


def _placed_experts(plan: Plan, model: ModelSpec) -> Iterator[str]:
    """Check that a placement of experts has each expert of each layer once."""
    if not plan.expert_placement:
        return
    layers, experts = model.expert_layers, 0 if model.moe is None else model.moe.num_experts
    if len(plan.expert_placement) != len(layers):
        yield (
            f"expert_placement has {pluralize(len(plan.expert_placement), 'layer')}, but the model has"
            f" {len(layers)} with experts: leave it out, or let muster plan --expert-load place them"
        )
        return
    for layer, order in zip(layers, plan.expert_placement, strict=True):
        if sorted(order) != list(range(experts)):
            yield f"expert_placement doesn't have each of the experts 0 to {experts - 1} of layer {layer} once"
            return


def _slices(plan: Plan, model: ModelSpec, workload: Workload) -> Iterator[str]:
    """Check the slices in which sequences pass through the pipeline."""
    if plan.sequence_slices == 1:
        return
    if plugin_model(model) is not None:
        yield (
            f"sequence_slices need attention that sees the slices before, not the layers of model {model.name}: legal"
            " is sequence_slices 1"
        )
    if plan.sequence_slices > workload.seq_len // plan.slice_unit:
        each = f" in multiples of {plan.slice_unit}" if plan.slice_unit > 1 else ""
        yield (
            f"sequence_slices {plan.sequence_slices} cut the {pluralize(workload.seq_len, 'position')} of a"
            f" sequence{each}: legal are 1 to {workload.seq_len // plan.slice_unit}"
        )


def _replicas(plan: Plan, workload: Workload) -> Iterator[str]:
    """Check that each copy of the model in one pipeline has micro-batches."""
    shares = plan.uneven_micro_batches or (1,)
    fewest = workload.global_batch_size * min(shares) * len(shares) // (plan.mesh(0).dp_size * sum(shares))
    if plan.pipeline_replicas > 1 and fewest < plan.pipeline_replicas * plan.micro_batch_size:
        yield (
            f"schedule {plan.schedule} runs {plan.pipeline_replicas} replicas of the model, each of which needs a"
            f" micro-batch:"
            f" global_batch_size {workload.global_batch_size} gives data-parallel ranks fewer than"
            f" {plan.pipeline_replicas} of"
            f" {plan.micro_batch_size}"
        )


LEGAL_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.post_validation and plan.pp == 1,
        "post_validation lets pipeline ranks step without waiting for each other, but pp is 1",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.vocab_parallel and plan.pp == 1,
        "vocab_parallel shards the vocabulary over pipeline ranks, but pp is 1",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.vocab_parallel and plan.pipeline_replicas > 1,
        lambda plan: (
            "vocab_parallel interleaves the vocabulary passes with those of one replica, but schedule"
            f" {plan.schedule} runs two"
        ),
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: any(strategy.tp_overlap == "async_tp" and not strategy.sp for strategy in plan.strategies),
        "tp_overlap async_tp sends chunks of the sequence, which only sp shards: add sp or leave it at none",
        in_every_layer(
            lambda s: s if s.sp or s.tp_overlap != "async_tp" else s.model_copy(update={"tp_overlap": "none"})
        ),
    ),
    *TP_OVERLAP_LEGAL_RULES,
    Rule(
        lambda plan: any(s.sp for s in plan.strategies) and all(mesh.tp == 1 for mesh in plan.distinct_meshes),
        "sp shards sequences over the tp ranks, but tp is 1",
        in_every_layer(lambda strategy: strategy.model_copy(update={"sp": False, "tp_overlap": "none"})),
    ),
    Rule(
        lambda plan: plan.grad_reduce_dtype != "fp32" and all(mesh.state_shards == 1 for mesh in plan.distinct_meshes),
        "grad_reduce_dtype bf16 is of gradients between ranks that share state, but dp_shard and cp are 1",
        setting(grad_reduce_dtype="fp32"),
    ),
    Rule(
        lambda plan: plan.grad_reduce_dtype != "fp32" and plan.precision == "fp64",
        "grad_reduce_dtype bf16 rounds gradients, which precision fp64 is to keep: leave it at fp32",
        setting(grad_reduce_dtype="fp32"),
    ),
    *CONTEXT_RULES,
    Rule(
        lambda plan: plan.sequence_slices > 1 and plan.pp == 1,
        "sequence_slices follow each other through pipeline ranks, but pp is 1",
        setting(sequence_slices=1),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1 and not plan.schedule_entry.has_slices,
        lambda plan: (
            f"schedule {plan.schedule} has no order for slices of sequences (sequence_slices {plan.sequence_slices});"
            f" those that have: {', '.join(name for name, entry in SCHEDULES.items() if entry.has_slices)}"
        ),
        setting(sequence_slices=1),
    ),
    Rule(
        lambda plan: any(mesh.expert_ranks % (mesh.ep * mesh.etp) for mesh in plan.distinct_meshes),
        homeless_experts,
        with_placed_experts,
    ),
    *DISPATCHER_RULES,
    *SHARD_LEVEL_LEGAL_RULES,
    *GATHER_LEGAL_RULES,
    *ASYNCHRONOUS_LEGAL_RULES,
    *SKIP_LEGAL_RULES,
)
"""Combinations within a plan that no runtime could give a meaning; checks against model and batch are functions."""


def _are(number: int) -> str:
    return "is 1" if number == 1 else f"are {number}"
