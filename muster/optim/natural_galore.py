"""Natural GaLore: GaLore with natural gradients in its subspace (A. Das, arXiv:2410.16029;
github:selfsupervised-ai/Natural-GaLore, galore_torch/galore_projector_tensor.py).

With the last projected gradients, flattened, as the columns of G, Adam is given (damping · I + G Gᵀ)⁻¹ g instead of g.
The published code inverts by Woodbury's identity. As g is a column of G, the same is G (damping · I + Gᵀ G)⁻¹ e with
the unit vector e of that column: a sum of the last gradients, without the cancellation of large terms. They are stored,
`gradient_history` times what a moment takes, and are kept where the subspace changes.
"""

import torch
from torch import Tensor

from muster.optim.galore import GaLore


class NaturalGaLore(GaLore):
    """Natural GaLore over one rank's local tensors."""

    def preconditioned(self, low_rank: Tensor, state: dict[str, Tensor], step: int) -> Tensor:
        last_gradients = state["last_gradients"]
        place = step % len(last_gradients)
        last_gradients[place] = low_rank
        columns = last_gradients.flatten(1)
        products = (columns @ columns.mT).double()
        products.diagonal().add_(self.config.damping)
        unit = torch.zeros(len(columns), dtype=products.dtype, device=products.device)
        unit[place] = 1
        weights = torch.linalg.solve(products, unit).to(columns.dtype)
        return (weights @ columns).view_as(low_rank)
