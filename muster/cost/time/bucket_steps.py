"""Times of an optimizer step bucket by bucket, and of the gathers beside it."""

from dataclasses import replace

from muster.cost.time.op_times import OpTimes
from muster.layout.update_buckets import bucket_shares
from muster.schedule.action import Kind
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


def with_bucket_steps(times: OpTimes, plan: Plan, model: ModelSpec) -> OpTimes:
    """Return times in which each bucket takes its share of STEP, and of what a forward beside it leaves of UNSHARD, by
    its elements; these take no time of their own then."""
    if not plan.overlap_param_gather_with_optimizer_step:
        return times
    shares, step_s = bucket_shares(plan, model), times.seconds.get((Kind.STEP, -1), 0.0)
    seconds = dict(times.seconds) | {(Kind.STEP, -1): 0.0}
    bucket_s: dict[tuple[str, int], tuple[float, ...]] = {}
    for stage, own in shares.items():
        on_rank = [other for other, rank in enumerate(plan.placement) if rank == plan.placement[stage]]
        gather_s = seconds.pop((Kind.UNSHARD, stage), 0.0)
        bucket_s[Kind.STEP_BUCKET, stage] = tuple(step_s / len(on_rank) * share for share in own)
        bucket_s[Kind.UNSHARD_BUCKET, stage] = tuple(gather_s * share for share in own)
    return replace(times, seconds=seconds, bucket_s=bucket_s)
