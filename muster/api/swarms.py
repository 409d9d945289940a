"""Predictions of swarms, from the names and files that `muster predict` takes."""

from pathlib import Path

from muster.api.inputs import (
    default_seq_len,
    default_workload,
    resolve_cluster,
    resolve_plan_input,
    resolve_planned_model,
)
from muster.config.swarm_rules import require_swarm_goes_with
from muster.simulate.predict_swarm import SwarmPrediction
from muster.simulate.predict_swarm import predict_swarm as predict_step
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec


def predict_swarm(
    model: str | Path | ModelSpec | None,
    cluster: str | Path | ClusterSpec,
    run_file: str | Path,
    seq_len: int | None = None,
    global_batch: int | None = None,
) -> SwarmPrediction:
    """Predict a step of the swarm that a run file describes, whose peers are the devices of a cluster; what is None
    comes from the run file. Raises ConfigError, InfeasibleError."""
    given, devices = resolve_plan_input(run_file), resolve_cluster(cluster)
    if given.swarm is None:
        raise ConfigError(f"{run_file} has no section swarm: expected a run file with one")
    if given.is_auto:
        raise ConfigError(f"{run_file} leaves the plan to auto: expected the trainer's own, such as parallel: mb1")
    spec = resolve_planned_model(model, run_file, given)
    own = given.train, given.optim, given.outer, given.has_plugins
    require_swarm_goes_with(given.swarm, spec, given.plan, *own)
    length = given.seq_len if seq_len is None else seq_len
    batch = given.global_batch_size if global_batch is None else global_batch
    workload = default_workload(given.plan, default_seq_len(length, spec), batch)
    return predict_step(spec, given.plan, workload, devices, given.swarm, given.optim)
