"""Work of passes at perturbed parameters (`muster.parallel.perturbed_passes`), beside that of forwards."""

from muster.config.optim_config import OptimConfig
from muster.config.optimizers import PERTURBATION_BYTES
from muster.cost.memory.param_shards import stage_param_shards
from muster.cost.precision_bytes import compute_bytes
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.workload import Workload

POINTS = 2
"""Points at which a step evaluates the loss, and copies of each hidden state in a pass."""
WIDE_BYTES = 4
"""Bytes of an element, at least, in which a point is computed before it is rounded."""


def as_one_forward(plan: Plan, workload: Workload) -> tuple[Plan, Workload]:
    """Return a plan and a workload whose forwards are the passes at both points: of twice as many sequences, without
    compiled blocks, since their parameters are replaced.

    Either each sequence is computed twice, or under perturbation parallelism those of two ranks are.
    """
    doubled = plan.model_copy(update={"micro_batch_size": POINTS * plan.micro_batch_size, "compile": False})
    return doubled, workload.model_copy(update={"global_batch_size": POINTS * workload.global_batch_size})


def perturbation_bytes(model: ModelSpec, plan: Plan, stage: int, optim: OptimConfig) -> float:
    """Return the bytes that a pass of a stage reads and writes to perturb its parameters: random numbers are drawn
    once; at each point they are read and converted, and parameters are read and their copies written."""
    held = stage_param_shards(model, plan, stage, optim).total
    size = compute_bytes(plan.precision)
    points = 1 if optim.perturbation_parallel else POINTS
    each = PERTURBATION_BYTES + points * (2 * size + 5 * WIDE_BYTES)
    return (held.unsharded_numel - held.frozen_unsharded_numel) * each
