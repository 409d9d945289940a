"""Programs of plans."""

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from math import prod

from muster.config.optim_config import OptimConfig, UpdateTime
from muster.config.optimizer_state import is_zeroth_order
from muster.layout.host_updates import device_updates, relative_part_sizes
from muster.layout.tensor_layout import tp_partial_grad_copies
from muster.layout.update_buckets import update_buckets
from muster.schedule.action import Kind
from muster.schedule.active_stages import count_units
from muster.schedule.forward_only import forward_only
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.offload import MIN_OFFLOAD_GAP
from muster.schedule.outer_steps import NO_EXCHANGE, OuterEvents
from muster.schedule.program import Program
from muster.schedule.registry import make_schedule
from muster.schedule.resolve import pinned_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.vocab_passes import VocabTimes
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.layer_strategy import Tier
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, layer_parameter_shapes, parameter_shapes
from muster.spec.pass_pairs import pairs_passes
from muster.spec.plan import Plan
from muster.spec.workload import Workload


def _vocab_times(plan: Plan, model: ModelSpec) -> VocabTimes:
    """Return nominal times of vocabulary passes from the sizes of their matmuls.

    S multiplies twice by the rank's shard of the head, T once. The times only choose between correct orders.
    """
    part = model.vocab_size * model.hidden_size / plan.pp
    layers = sum(prod(shape) for _, shape in layer_parameter_shapes(model, 0)) * model.num_layers / plan.pp
    return VocabTimes(logits=2 * part / layers, backward=part / layers)


def schedule_for_plan(plan: Plan, num_micro_batches: int, pairs: bool = False, num_steps: int = 1) -> Schedule:
    """Return the plan's schedule: made by its name, or the pinned one of a searched schedule. With `pairs` it has the
    pairs that its kind has; `num_steps`: steps of an asynchronous one.

    Raises InfeasibleError if it doesn't support the plan, MusterError if it is still to be searched (`resolve`),
    ProgramError if the pinned schedule is none.
    """
    if plan.pinned_schedule is not None:
        return pinned_schedule(plan.schedule, plan.pinned_schedule)
    if plan.schedule_entry.searched:
        raise MusterError(f"schedule {plan.schedule} is yet to be found for the plan: resolve it first")
    return make_schedule(
        plan.schedule,
        ScheduleSpec(
            plan.pp,
            num_micro_batches,
            plan.vpp,
            replicas=plan.pipeline_replicas,
            num_slices=plan.sequence_slices,
            pair_share=1.0 if pairs else None,
            num_steps=num_steps,
        ),
    )


def build_program(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    train: bool = True,
    data_rank: int | None = None,
    outer: OuterEvents = NO_EXCHANGE,
    update_time: UpdateTime = "after_passes",
    optim: OptimConfig | None = None,
    moves_experts: bool = False,
    num_steps: int | None = None,
) -> Program:
    """Return the Program of one step of an optimizer (None: AdamW); without `train`, that of the forwards alone over as
    many micro-batches, of which the step of a zeroth-order optimizer has no more.
    `outer`: exchanges between islands after the step. `update_time`: time at which the host updates parameters.
    `moves_experts`: of a step after which experts may move to other ranks.
    Under an asynchronous schedule it is that of `num_steps` steps without a flush between them (None: the plan's).

    Under unequal `uneven_micro_batches` each data-parallel rank has a Program of its own length: `data_rank` selects
    it, None the longest. All of them have the same collectives in the same order.

    Raises InfeasibleError if the batch or the schedule doesn't fit the plan, and as `schedule_for_plan`.
    """
    num_micro_batches = plan.num_micro_batches(workload, data_rank)
    if num_steps is None:
        num_steps = plan.flush_every if plan.schedule_entry.is_asynchronous and train else 1
    schedule = schedule_for_plan(plan, num_micro_batches, pairs_passes(plan, model), num_steps)
    has_backward = train and not is_zeroth_order(optim)
    if not has_backward:
        schedule = forward_only(schedule.placement[: schedule.depth], num_micro_batches, schedule.num_slices)
    options = _lowering_options(plan, model, train, has_backward, outer, update_time, moves_experts)
    program = lower(schedule, options)
    is_longest = num_micro_batches == plan.num_micro_batches(workload)
    copies = (item for lanes in program.ranks for item in lanes.get("host_copy", ()))
    if options.offload and is_longest and not any(item.action.kind == Kind.OFFLOAD for item in copies):
        raise nothing_to_offload_error(plan, num_micro_batches)
    return program


def unit_counts(plan: Plan, stage: int, workload: Workload) -> tuple[int, int]:
    """Return the numbers of gathers of a stage's parameters and of reductions of its gradients in a step of a plan with
    `max_active_stages`."""
    assert plan.max_active_stages is not None
    return _unit_counts(plan, plan.num_micro_batches(workload))[stage]


@lru_cache(maxsize=64)
def _unit_counts(plan: Plan, num_micro_batches: int) -> dict[int, tuple[int, int]]:
    return count_units(schedule_for_plan(plan, num_micro_batches).ranks, plan.max_active_stages or 1)


def program_key(plan: Plan, model: ModelSpec, workload: Workload) -> Hashable:
    """Return a key of `build_program` for these three: plans with the same key have the same Program.

    Raises InfeasibleError where the batch doesn't fit the plan.
    """
    options = _lowering_options(plan, model, True, True, NO_EXCHANGE, "after_passes", False)
    several = tuple(options.is_sharded(stage) for stage in range(plan.num_stages))
    order = plan.schedule, plan.pinned_schedule, plan.pp, plan.vpp, plan.pipeline_replicas, plan.sequence_slices
    order = *order, pairs_passes(plan, model), plan.flush_every
    return order, plan.num_micro_batches(workload), several, replace(options, data_ranks=1)


def _lowering_options(
    plan: Plan,
    model: ModelSpec,
    train: bool,
    has_backward: bool,
    outer: OuterEvents,
    update_time: UpdateTime,
    moves_experts: bool,
) -> LoweringOptions:
    """Return the facts of a plan that decide which instructions `build_program` adds."""
    stages = range(plan.num_stages)
    tensor_axes = {
        (plan.mesh(stage), plan.strategy(layer).sp)
        for stage in stages
        for layer in (plan.layers(stage, model.num_layers) or [plan.layers(stage, model.num_layers).start])
    }
    tiers: tuple[Tier, ...] = ("host", "disk")
    saving = stages if has_backward else ()
    on_device = tuple(device_updates(plan, model.num_layers, stage) for stage in stages) if train else ()
    offloaded = {
        tier: frozenset(stage for stage in saving if plan.offloaded_layers(stage, model.num_layers, tier))
        for tier in tiers
    }
    return LoweringOptions(
        zero=plan.default_strategy.zero,
        data_ranks=tuple(plan.mesh(stage).grad_sum_size for stage in stages),
        tp_replicated_weights=any(_replicates_weights(model, mesh, sp) for mesh, sp in tensor_axes),
        tied_embeddings=model.embeds_on_last_stage and not plan.vocab_parallel,
        vocab_times=_vocab_times(plan, model) if plan.vocab_parallel else None,
        post_validation=plan.post_validation,
        offload=frozenset() if plan.offloads_by_layer else offloaded["host"],
        host_activations=offloaded["host"] if plan.offloads_by_layer else frozenset(),
        disk_activations=offloaded["disk"],
        late_writes=frozenset(
            stage for stage in offloaded["disk"] if plan.late_written_layers(stage, model.num_layers)
        ),
        host_updates=tuple(plan.host_update_tiers(stage, model.num_layers) for stage in stages) if train else (),
        device_updates=on_device,
        part_sizes=tuple(relative_part_sizes(plan, model, stage) for stage in stages) if any(on_device) else (),
        delayed_update=update_time == "delayed",
        backward_updates=tuple(
            sum(part is not None for part in plan.host_updated_layers(stage, model.num_layers)) for stage in stages
        )
        if update_time == "in_backward"
        else (),
        param_tiers=plan.param_tiers(model.num_layers) if train else (),
        outer=outer,
        moves_experts=moves_experts,
        train=train,
        has_backward=has_backward,
        max_active_stages=plan.max_active_stages,
        update_buckets=tuple(len(update_buckets(plan, model, stage)) for stage in stages)
        if plan.overlap_param_gather_with_optimizer_step and train
        else (),
        keeps_whole_weights=plan.schedule_entry.is_asynchronous,
        copies_params=any(map(plan.copies_params, plan.distinct_meshes)),
    )


@lru_cache(maxsize=256)
def _replicates_weights(model: ModelSpec, mesh: Mesh, sp: bool) -> bool:
    """Return True if tensor-parallel ranks replicate a weight whose gradients must be all-reduced."""
    return bool(tp_partial_grad_copies(model, [name for name, _ in parameter_shapes(model)], mesh, sp))


def nothing_to_offload_error(plan: Plan, num_micro_batches: int) -> InfeasibleError:
    """Return the error for a plan whose activations are never kept long enough to offload them."""
    slices = f" of {plan.sequence_slices} slices" if plan.sequence_slices > 1 else ""
    return InfeasibleError(
        f"offload has nothing to move: with schedule {plan.schedule}, pp {plan.pp} and"
        f" {num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}{slices}"
        f" no activations lie for {MIN_OFFLOAD_GAP} passes; leave oact out, or take oactd, which moves them within a"
        " pass"
    )
