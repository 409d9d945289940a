"""`muster eval DIR --tasks …`: tasks of lm-evaluation-harness, over a Hugging Face directory.

The harness reads the directory with `transformers`, as for published results.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from muster.parallel.world import pick_device
from muster.spec.errors import ConfigError, MusterError
from muster.spec.suggest import did_you_mean


def run_tasks(
    model_path: Path, tasks: Sequence[str], task_dir: Path | None = None, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Return the harness's metrics by task, such as `acc` and `acc_stderr`; `limit` is the most examples of each.

    `task_dir` holds tasks beside the harness's own. Raises ConfigError where the directory, the harness or a task is
    missing, MusterError where the harness fails.
    """
    if not (model_path / "config.json").exists():
        raise ConfigError(
            f"{model_path} is no Hugging Face directory, which --tasks reads: write one with"
            f" 'muster checkpoint convert {model_path} DIR --to hf'"
        )
    harness, manager = _harness(task_dir)
    for task in tasks:
        if task not in manager.all_tasks:
            hint = did_you_mean(task, manager.all_tasks)
            raise ConfigError(f"--tasks: the harness knows no task {task!r}{hint}; tasks of your own lie in --task-dir")
    arguments = {"pretrained": str(model_path), "dtype": "float32"}
    try:
        found: Any = harness.simple_evaluate(
            model="hf",
            model_args=arguments,
            tasks=list(tasks),
            limit=limit,
            task_manager=manager,
            device=str(pick_device(0, 1)),
        )
    except Exception as error:  # the harness and its data sets raise all kinds
        raise MusterError(f"the harness failed ({type(error).__name__}: {error})") from error
    return {task: _metrics(values) for task, values in found["results"].items()}


def _harness(task_dir: Path | None) -> tuple[Any, Any]:
    """Import the harness; returns it and its task manager."""
    try:
        harness, tasks = import_module("lm_eval"), import_module("lm_eval.tasks")
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm_eval ({error}): pip install 'muster-llm[eval]'") from error
    return harness, tasks.TaskManager(include_path=None if task_dir is None else str(task_dir))


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics; `acc,none` is the harness's name of `acc` without a filter."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
