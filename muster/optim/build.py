"""The optimizer that a run asks for."""

from collections.abc import Mapping

from torch import Tensor

from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import TensorLayout
from muster.optim.adamw import AdamW
from muster.optim.base import Optimizer
from muster.optim.lion import Lion
from muster.optim.muon import Muon
from muster.optim.peer_exchange import PeerGroup
from muster.optim.plugin_optimizer import TorchOptimizerAdapter
from muster.optim.sgd import SGD
from muster.parallel.world import World


def build_optimizer(
    config: OptimConfig, params: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], world: World | None = None
) -> Optimizer:
    """The optimizer over a rank's local leaf tensors, with its state at zero. All ranks of the world must call it.

    `layouts` says what the rank holds of every parameter of its stages, also of those of which it holds nothing and
    which `params` may leave out. `world` is None for one process alone.
    """
    if config.name == "muon":
        return Muon(config, params, layouts, PeerGroup.from_world(world))
    return {"adamw": AdamW, "sgd": SGD, "lion": Lion}.get(config.name, TorchOptimizerAdapter)(config, params)
