"""Import of modules that need PyTorch."""

from importlib import import_module
from types import ModuleType

from muster.spec.errors import MusterError
from muster.spec.gc_pause import gc_paused


def import_torch_module(module: str = "muster.train.run") -> ModuleType:
    """Import and return a module that needs PyTorch. Raises MusterError if PyTorch is missing."""
    try:
        with gc_paused():
            return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MusterError("this needs PyTorch, which is not installed: pip install 'muster-llm[train]'") from None
