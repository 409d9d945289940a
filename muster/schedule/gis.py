"""GIS, generalized interleaved: 1F1B over several stages per rank with a shorter warm-up, in groups of any size
(PipeOffload, Wan et al. 2025, arXiv:2503.01328)."""

from muster.schedule.interleaved import group_sizes, interleave_groups
from muster.schedule.schedule import Schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import InfeasibleError


def gis(spec: ScheduleSpec) -> Schedule:
    """Interleaved's bubble (p − 1)(tF + tB) / v with p activations on rank 0 instead of p + (p − 1) / v.

    Groups of g < p micro-batches keep less, (g(v − 1) + p) / v, and add (p − g)(v − 1)(tF + tB) / v to the bubble,
    below 2p/3 more with every group. The largest groups that fit the memory limit are taken, down to g = p/2.
    """
    ranks, count, chunks = spec.num_ranks, spec.num_micro_batches, spec.chunks
    fewest = max(1, count // ranks)
    most = max(fewest, count // -(-ranks // 2))
    for num_groups in range(fewest, most + 1):
        sizes = group_sizes(count, num_groups)
        peak = min(sizes[0] * (chunks - 1) + ranks, count * chunks) * spec.stage_activation
        if peak <= spec.memory_limit:
            warm_ups = [ranks - 1 - rank + (chunks - 1) * sizes[0] for rank in range(ranks)]
            return interleave_groups("gis", spec, sizes, warm_ups)
    raise InfeasibleError(
        f"gis keeps at least {peak:g} micro-batches' activations with {ranks} ranks of {chunks} stages,"
        f" more than the limit of {spec.memory_limit:g}"
    )
