"""Prediction of a swarm's step, for people."""

from collections import defaultdict
from collections.abc import Iterator

from muster.report.prediction import align_columns
from muster.simulate.predict_swarm import PredictedPeer, SwarmPrediction
from muster.spec.formatting import format_bytes, format_count, format_fraction, format_seconds
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize


def swarm_prediction_lines(found: SwarmPrediction) -> Iterator[str]:
    """Yield the step, what limits it, and a row for all peers of one kind on a stage."""
    trainer = found.plan.model_copy(update={"pp": 1})
    micro_batches = found.plan.num_micro_batches(found.workload)
    yield (
        f"swarm     {found.model.name} in {pluralize(found.plan.pp, 'stage')} on"
        f" {pluralize(len(found.peers), 'peer')}, trainer's plan {format_plan_name(trainer)}:"
        f" {pluralize(micro_batches, 'micro-batch')} a step"
    )
    yield f"cluster   {found.cluster.name or found.cluster.device.name}, with the trainer on its first node"
    yield (
        f"step      {format_seconds(found.step_time_s)}: passes {format_seconds(found.passes_s)}, then sums of"
        f" gradients {format_seconds(found.sums_s)} and the update {format_seconds(found.update_s)}"
    )
    bound_s = found.bounds_s[found.binding]
    yield f"binds     {found.binding}: {format_seconds(bound_s)} at least"
    yield f"tokens/s  {format_count(found.tokens_per_s)}"
    yield f"fits      {_FITS[found.fits]}"
    yield ""
    kinds: defaultdict[tuple[int, str], list[PredictedPeer]] = defaultdict(list)
    for peer in found.peers:
        kinds[peer.stage, peer.device].append(peer)
    rows = [("stage", "peers", "micro-batches", "busy", "passes", "sum", "memory")]
    for (stage, device), peers in sorted(kinds.items()):
        most = max(peers, key=lambda peer: peer.micro_batches)
        busy = most.micro_batches * (most.forward_s + most.backward_s) / found.step_time_s
        rows.append(
            (
                str(stage),
                f"{len(peers)} × {device}",
                f"{sum(peer.micro_batches for peer in peers):,}",
                format_fraction(busy),
                format_bytes(most.pass_bytes),
                format_bytes(most.sum_bytes),
                format_bytes(max(peer.memory_bytes for peer in peers)),
            )
        )
    yield from align_columns(rows)
    yield "Busy, passes (bytes both ways) and sum (bytes sent): of the peer with most of them; memory: of the fullest."


_FITS = {True: "yes", False: "no", None: "unknown: the memory of a device isn't given"}
