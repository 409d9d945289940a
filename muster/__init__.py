"""Muster: plan, predict and run the training of large language models on whatever machines one has."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from muster.version import __version__ as __version__

if TYPE_CHECKING:
    from muster.api.data import check_data, inspect_data, prepare_data, train_tokenizer
    from muster.api.model_in_memory import load_model, to_transformers
    from muster.api.register import (
        register_callback,
        register_dataset,
        register_loss,
        register_model,
        register_optimizer,
        register_schedule,
        register_step,
    )
    from muster.api.run import Run, load
    from muster.api.trained_models import convert, generate, verify
    from muster.api.trained_models import evaluate as eval
    from muster.api.verbs import plan, predict
    from muster.model.decoder import Layer as DecoderLayer
    from muster.schedule.schedule_spec import ScheduleSpec
    from muster.spec.errors import ConfigError, InfeasibleError, MusterError
    from muster.train.callbacks import CallbackContext
    from muster.train.custom_step import StepContext

__all__ = [
    "CallbackContext",
    "ConfigError",
    "DecoderLayer",
    "InfeasibleError",
    "MusterError",
    "Run",
    "ScheduleSpec",
    "StepContext",
    "check_data",
    "convert",
    "eval",
    "generate",
    "inspect_data",
    "load",
    "load_model",
    "plan",
    "predict",
    "prepare_data",
    "register_callback",
    "register_dataset",
    "register_loss",
    "register_model",
    "register_optimizer",
    "register_schedule",
    "register_step",
    "to_transformers",
    "train_tokenizer",
    "verify",
]

_MODULES = {"Run": "api.run", "load": "api.run", "plan": "api.verbs", "predict": "api.verbs"}
_MODULES |= dict.fromkeys(("convert", "eval", "generate", "verify"), "api.trained_models")
_MODULES |= dict.fromkeys(("check_data", "inspect_data", "prepare_data", "train_tokenizer"), "api.data")
_MODULES |= dict.fromkeys(("load_model", "to_transformers"), "api.model_in_memory")
_MODULES |= {
    "CallbackContext": "train.callbacks",
    "StepContext": "train.custom_step",
    "ScheduleSpec": "schedule.schedule_spec",
    "DecoderLayer": "model.decoder",
}
_FORMER = {"Now": "StepContext", "Setting": "ScheduleSpec"}
"""Former names, which plugins may still use."""
_NAMES = {"DecoderLayer": "Layer", "eval": "evaluate"}
"""Names of those that are called otherwise where they are defined."""


def __dir__() -> list[str]:
    """Return the public names, which are imported on first use."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import what is requested on first use: `import muster` alone costs nothing."""
    name = _FORMER.get(name, name)
    if name not in __all__:
        raise AttributeError(f"module 'muster' has no attribute {name!r}")
    usual = "api.register" if name.startswith("register_") else "spec.errors"
    return getattr(import_module(f"muster.{_MODULES.get(name, usual)}"), _NAMES.get(name, name))
