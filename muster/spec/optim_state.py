"""What an optimizer keeps for each parameter: the one truth for its state, checkpoints and memory."""

from collections.abc import Iterable

from muster.spec.layout import TensorLayout
from muster.spec.run import OptimConfig

ADAMW_STATE = ("exp_avg", "exp_avg_sq")


def no_decay(name: str) -> bool:
    """Whether weight decay passes over a parameter: norms, biases and embeddings."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" or module.endswith("norm") or module.rpartition(".")[2] in ("embed", "positions")


def is_muon_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a parameter of this (global) shape: a matrix, but neither embedding, positions nor head."""
    return len(shape) == 2 and name.rpartition(".")[0].rpartition(".")[2] not in ("embed", "positions", "head")


def state_names(optim: OptimConfig, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The state tensors of one parameter, each with the shape, layout and dtype of the parameter (its master weights).

    In a checkpoint they are called `optim/NAME.STATE`.
    """
    if optim.name == "lion":
        return ("exp_avg",)
    if optim.name == "sgd":
        return ("momentum",) if optim.momentum else ()
    if optim.name == "muon" and is_muon_matrix(name, shape):
        return ("momentum",)
    return ADAMW_STATE


def state_numel(optim: OptimConfig, layouts: Iterable[TensorLayout]) -> int:
    """Numbers of optimizer state that the rank with these layouts keeps."""
    return sum(layout.numel * len(state_names(optim, layout.name, layout.shape)) for layout in layouts)
