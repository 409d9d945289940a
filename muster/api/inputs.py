"""Inputs of plans and predictions: a model, a cluster, a plan and a step, by names, files or as typed data."""

import warnings
from pathlib import Path
from typing import Any

from muster.api.defaults import MICRO_BATCHES_PER_PIPELINE_RANK, SEQ_LEN
from muster.config.freezing import check_patterns
from muster.config.load_config import PlanInput, load_plan_input
from muster.config.local_machine import cluster_by_name
from muster.config.named_model import HF_PREFIX, load_model
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.unit_slips import UnitWarning, unit_slips
from muster.spec.workload import Workload


def resolve_model(value: str | Path | ModelSpec) -> ModelSpec:
    """Return the model of a name, a file or a Hugging Face directory. Raises ConfigError."""
    if isinstance(value, ModelSpec):
        return value
    require_text("model", value, "a model's name, a file, a Hugging Face directory or a ModelSpec")
    return load_model(HF_PREFIX + str(value) if Path(value).is_dir() else str(value))


def resolve_cluster(value: str | Path | ClusterSpec) -> ClusterSpec:
    """Return the cluster of a name such as 64xh100, of a file, or of `this` machine. Raises ConfigError."""
    if isinstance(value, ClusterSpec):
        return value
    require_text("cluster", value, "a cluster's name such as 64xh100, a file, this or a ClusterSpec")
    found = cluster_by_name(str(value))
    for sentence in unit_slips(found):
        warnings.warn(f"cluster {value}: {sentence}", UnitWarning, stacklevel=3)
    return found


def resolve_plan_input(value: str | Path | Plan) -> PlanInput:
    """Return the plan of a short name or of a file, with what a run file says of the step beside it. Raises
    ConfigError."""
    if isinstance(value, Plan):
        return PlanInput(value)
    require_text("plan", value, "a plan's name such as dp2-pp2, a file or a Plan")
    return load_plan_input(Path(value)) if _is_file(value) else PlanInput(parse_plan_name(str(value)))


def resolve_planned_model(model: str | Path | ModelSpec | None, plan: str | Path | Plan, given: PlanInput) -> ModelSpec:
    """Return the model to predict: the given one, or that of the run file that `plan` names.

    Raises ConfigError where there is none, where the two differ, or where the run freezes parameters that it lacks.
    """
    if model is None and given.model is None:
        raise ConfigError("--model is missing: expected for example --model llama3-8b, or a run file as --plan")
    spec = given.model if model is None else resolve_model(model)
    assert spec is not None
    if given.model is not None and spec.model_copy(update={"name": given.model.name}) != given.model:
        its = given.model.name if given.model.name != spec.name else f"{spec.name} with other values"
        name = format_plan_name(given.plan)
        alone = "as a plan.yaml" if "+" in name else f"--plan {name}"  # with a hash it is no name to give
        raise ConfigError(
            f"--model {spec.name} is not the model that {plan} trains, {its}: leave --model out, or give the plan"
            f" alone, {alone}"
        )
    if given.optim is not None and given.optim.freeze:
        try:
            check_patterns(given.optim, spec)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return spec


def _is_file(plan: str | Path) -> bool:
    return "/" in str(plan) or str(plan).endswith((".yaml", ".yml"))


def require_text(name: str, value: Any, expected: str) -> None:
    """Check that a value is a text or a path. Raises ConfigError."""
    if not isinstance(value, str | Path):
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")


def require_positive_int(name: str, number: Any) -> int | None:
    """Return the number, an integer above 0, or None. Raises ConfigError for anything else."""
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ConfigError(f"{name}: expected a whole number >= 1, got {number!r}")
    return number


def default_seq_len(seq_len: int | None, model: ModelSpec) -> int:
    """Return the given sequence length, or the default for the model.

    Raises ConfigError where it is beyond the positions that the model has vectors for; warns where it is beyond those
    that the model was made for.
    """
    given, most = require_positive_int("seq_len", seq_len), model.max_positions
    if given is None or most is None or given <= most:
        return given or min(SEQ_LEN, most or SEQ_LEN)
    if model.position == "learned":
        raise ConfigError(f"seq_len {given:,}: {model.name} has vectors for {most:,} positions: give {most} or less")
    sentence = f"seq_len {given:,} is beyond the {most:,} positions that {model.name} was made for (max_positions)"
    warnings.warn(sentence, UnitWarning, stacklevel=3)
    return given


def default_workload(plan: Plan, seq_len: int, global_batch: int | None) -> Workload:
    """Return the workload of a step; without a batch size, one of MICRO_BATCHES_PER_PIPELINE_RANK micro-batches for
    each pipeline rank."""
    batch = (
        require_positive_int("global_batch", global_batch)
        or plan.islands * plan.micro_batch_size * plan.mesh(0).dp_size * MICRO_BATCHES_PER_PIPELINE_RANK * plan.pp
    )
    return Workload(seq_len=seq_len, global_batch_size=batch)
