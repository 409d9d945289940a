"""From a plan to its Program."""

from math import prod

from muster.layout.tensor_layout import tp_partial_grad_copies
from muster.schedule.forward_only import forward_only
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.offload import MIN_OFFLOAD_GAP
from muster.schedule.program import Program
from muster.schedule.registry import make_schedule
from muster.schedule.resolve import pinned_schedule
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.vocab_passes import VocabTimes
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.model import ModelSpec, layer_parameter_shapes, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.workload import Workload


def _vocab_times(plan: Plan, model: ModelSpec) -> VocabTimes:
    """By the numbers that each product goes through: the scores need two with a rank's part of the head, their
    backward one. They only choose between orders that are all right."""
    part = model.vocab_size * model.hidden_size / plan.pp
    layers = sum(prod(shape) for _, shape in layer_parameter_shapes(model, 0)) * model.num_layers / plan.pp
    return VocabTimes(logits=2 * part / layers, backward=part / layers)


def schedule_for_plan(plan: Plan, num_micro_batches: int) -> Schedule:
    """The plan's schedule: made by its name, or where it was searched for as the plan keeps it.

    Raises InfeasibleError where it doesn't serve the plan, MusterError where it is yet to be found (`resolve`),
    ProgramError where what the plan keeps is no schedule.
    """
    if plan.pinned_schedule is not None:
        return pinned_schedule(plan.schedule, plan.pinned_schedule)
    if plan.schedule_entry.searched:
        raise MusterError(f"schedule {plan.schedule} is yet to be found for the plan: resolve it first")
    return make_schedule(
        plan.schedule, ScheduleSpec(plan.pp, num_micro_batches, plan.vpp, replicas=plan.pipeline_replicas)
    )


def build_program(
    plan: Plan, model: ModelSpec, workload: Workload, train: bool = True, data_rank: int | None = None
) -> Program:
    """The Program of one optimizer step; with `train` false, of the forwards alone over as many micro-batches.

    Under `uneven_micro_batches` each data-parallel rank has a Program of its own length: `data` says which, None the
    longest. All have the same collectives in the same order.

    Raises InfeasibleError when the batch or the schedule doesn't fit the plan, and as `schedule_of`.
    """
    num_micro_batches = plan.num_micro_batches(workload, data_rank)
    schedule = schedule_for_plan(plan, num_micro_batches)
    if not train:
        schedule = forward_only(schedule.placement[: schedule.depth], num_micro_batches)
    stages = range(plan.num_stages)
    names = [name for name, _ in parameter_shapes(model)]
    tensor_axes = {
        (plan.mesh(stage).tp, plan.strategy(layer).sp)
        for stage in stages
        for layer in (plan.layers(stage, model.num_layers) or [plan.layers(stage, model.num_layers).start])
    }
    lowering = LoweringOptions(
        zero=plan.default_strategy.zero,
        data_ranks=tuple(plan.mesh(stage).grad_sum_size for stage in stages),
        tp_replicated_weights=any(tp_partial_grad_copies(model, names, tp, sp) for tp, sp in tensor_axes),
        tied_embeddings=model.tied_embeddings and not plan.vocab_parallel,
        vocab_times=_vocab_times(plan, model) if plan.vocab_parallel else None,
        post_validation=plan.post_validation,
        offload=frozenset(stage for stage in stages if train and plan.offloaded_layers(stage, model.num_layers)),
        train=train,
    )
    program = lower(schedule, lowering)
    is_longest = num_micro_batches == plan.num_micro_batches(workload)
    if lowering.offload and is_longest and not any(lanes.get("host_copy") for lanes in program.ranks):
        raise nothing_to_offload_error(plan, num_micro_batches)
    return program


def nothing_to_offload_error(plan: Plan, num_micro_batches: int) -> InfeasibleError:
    """Why a plan whose activations never lie long enough can't offload them."""
    return InfeasibleError(
        f"offload has nothing to move: with schedule {plan.schedule}, pp {plan.pp} and"
        f" {num_micro_batches} micro-batches no activations lie for {MIN_OFFLOAD_GAP} passes"
    )
