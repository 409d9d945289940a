"""What plans and predictions are asked about: a model, a cluster, a plan, a step; by names, files or as typed data."""

from pathlib import Path
from typing import Any

from muster.api.usual import MICRO_BATCHES, SEQ_LEN
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.load import load_plan
from muster.spec.machine import cluster_here
from muster.spec.model import ModelSpec
from muster.spec.named_model import HF_PREFIX, load_model
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload


def model_of(said: str | Path | ModelSpec) -> ModelSpec:
    """The model of a name, a file or a Hugging Face directory. Raises ConfigError."""
    if isinstance(said, ModelSpec):
        return said
    require_text("model", said, "a model's name, a file, a Hugging Face directory or a ModelSpec")
    return load_model(HF_PREFIX + str(said) if Path(said).is_dir() else str(said))


def cluster_of(said: str | Path | ClusterSpec) -> ClusterSpec:
    """The cluster of a name such as 64xh100, a file, or `this`. Raises ConfigError."""
    if isinstance(said, ClusterSpec):
        return said
    require_text("cluster", said, "a cluster's name such as 64xh100, a file, this or a ClusterSpec")
    return cluster_here(str(said))


def plan_of(said: str | Path | Plan) -> Plan:
    """The plan of a name or of a file. Raises ConfigError."""
    if isinstance(said, Plan):
        return said
    require_text("plan", said, "a plan's name such as dp2-pp2, a file or a Plan")
    text = str(said)
    return load_plan(Path(text)) if "/" in text or text.endswith((".yaml", ".yml")) else parse_plan_name(text)


def require_text(name: str, said: Any, expected: str) -> None:
    """Raises ConfigError for what is neither a text nor a path."""
    if not isinstance(said, str | Path):
        raise ConfigError(f"{name}: expected {expected}, got {said!r}")


def require_whole(name: str, number: Any) -> int | None:
    """A whole number above 0, or None. Raises ConfigError for anything else."""
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ConfigError(f"{name}: expected a whole number >= 1, got {number!r}")
    return number


def usual_seq_len(seq_len: int | None, model: ModelSpec) -> int:
    """Tokens of a sequence, where nobody says otherwise."""
    return require_whole("seq_len", seq_len) or min(SEQ_LEN, model.max_positions or SEQ_LEN)


def usual_workload(plan: Plan, seq_len: int, global_batch: int | None) -> Workload:
    """A step, of so many micro-batches for each pipeline rank where nobody says otherwise."""
    batch = (
        require_whole("global_batch", global_batch)
        or plan.micro_batch_size * plan.mesh(0).data_ranks * MICRO_BATCHES * plan.pp
    )
    return Workload(seq_len=seq_len, global_batch_size=batch)
