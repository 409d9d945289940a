"""Paths of micro-batches, and places and layers of stages, by the predicted times of a cluster's passes and links.

The planner never lets micro-batches skip stages by itself, since that changes what is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from muster.config.optim_config import OptimConfig
from muster.cost.time.cost_cache import CostCache
from muster.cost.time.op_times import P2PTime
from muster.cost.time.plan_times import p2p_times_between, place_plan, plan_times
from muster.planner.balance import balance_layers
from muster.planner.bounds.pass_times import PassTimes
from muster.schedule.resolve import pin_schedule, schedule_spec_of
from muster.schedule.skippipe import skip_schedules
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.model import ModelSpec
from muster.spec.plan import PinnedSchedule, Plan
from muster.spec.workload import Workload


def resolve_on_cluster(
    plan: Plan,
    model: ModelSpec,
    workload: Workload,
    cluster: ClusterSpec,
    framework: FrameworkTraits | None = None,
    cache: CostCache | None = None,
    optim: OptimConfig | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Plan:
    """Return a plan of schedule skippipe with paths and places found for the times of a cluster's passes and links.

    Of several schedules the one whose simulated step is shortest is taken; where none that skips stages is shorter than
    the best that skips none, that one, with a `skip_ratio` of 0. Where devices differ stages stay where they are. Once
    `is_late` returns True, the best of those found so far is taken; at least one always is.
    Raises InfeasibleError where no paths keep to the plan's limits, or the plan doesn't fit the cluster.
    """
    cache = cache or CostCache()
    count = plan.num_micro_batches(workload)
    in_turn = tuple(stage % plan.pp for stage in range(plan.num_stages))
    empty = PinnedSchedule(times="predicted", micro_batches=count, placement=in_turn, ranks=("",) * plan.pp)
    draft = plan.model_copy(update={"pinned_schedule": empty})
    own = model, draft, workload, cluster, framework
    op_times = plan_times(*own, cache=cache, optim=optim)
    times = op_times.pass_times(plan.num_stages)
    if cluster.device.rates is None:
        setting = place_plan(*own, cache=cache, optim=optim)
        ranks = range(plan.pp)
        p2p_times = [
            [P2PTime(0.0) if one == other else p2p_times_between(setting, one, other)[0] for other in ranks]
            for one in ranks
        ]
        times = replace(
            times,
            link_s=[[p2p.total_s for p2p in row] for row in p2p_times],
            link_busy_s=[[p2p.send_busy_s for p2p in row] for row in p2p_times],
        )
    places = () if cluster.is_uniform and plan.is_uniform else in_turn
    ratios = sorted({0.0, plan.skip_ratio}, reverse=True)
    tried = (
        one.model_copy(update={"pinned_schedule": pin_schedule(schedule, "predicted")})
        for one in (plan.model_copy(update={"skip_ratio": ratio}) for ratio in ratios)
        for schedule in skip_schedules(schedule_spec_of(one, count, times, places))
    )
    found = [next(tried)]
    while not is_late() and (other := next(tried, None)) is not None:
        found.append(other)

    def rating(one: Plan) -> tuple[float, float]:
        own = model, one, workload, cluster
        return predict(*own, framework=framework, cache=cache, optim=optim).step_time_s, one.skip_ratio

    return min(found, key=rating)


def layers_by_visits(
    plan: Plan, ordinary: Plan, num_layers: int, pass_times_of: Callable[[Plan], PassTimes]
) -> Sequence[int]:
    """Return numbers of layers with which no stage has more to do, with the micro-batches that see it, than it must.

    `plan` has the paths, `ordinary` is the same pipeline without, with one stage on each rank. Empty where its layers
    are those already.
    """
    visits = [sum(stage in path for path in plan.paths) for stage in range(plan.pp)]
    balanced = balance_layers(ordinary, num_layers, pass_times_of, visits)
    return balanced.layer_counts(num_layers) if balanced else ()
