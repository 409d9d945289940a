"""Master weights of a stage that one rank holds whole and computes in less than fp32.

Passes use copies in the compute dtype, which are made anew after each optimizer step. Each gradient is added to the sum
in fp32 as soon as autograd has made it, and freed (mixed precision: P. Micikevicius et al., arXiv:1710.03740 §3.1).
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class MasterWeights:
    """Master weights of a module's parameters, which become copies of them in the compute dtype.

    `refresh` fills the copies, `free` drops them once the optimizer is to change the masters; a forward refreshes them
    where that is due. Parameters that aren't floating-point numbers are as they are, without copies.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype) -> None:
        self._module = module
        self._dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        self.by_name: dict[str, Tensor] = {}
        """Masters, whose `.grad` holds the sums of gradients."""
        self._copies: dict[str, nn.Parameter] = {}
        self._master_of: dict[Tensor, Tensor] = {}
        self._is_fresh = False
        self.keeps_copies = False
        """True where the copies stay at their addresses, which graphs remember; only their values are out of date."""
        module.to(compute_dtype)
        module.register_forward_pre_hook(lambda *_: self.refresh())

    def materialize(self, device: torch.device) -> None:
        """Allocate the masters, and let gradients go to them, after the module's parameters have their final place."""
        parameters = dict(self._module.named_parameters())
        self._copies = {name: one for name, one in parameters.items() if one.is_floating_point()}
        self.by_name = {
            name: torch.empty_like(one, dtype=self._dtypes[name], device=device, requires_grad=False)
            if name in self._copies
            else one.detach()
            for name, one in parameters.items()
        }
        self._master_of = {copy: self.by_name[name] for name, copy in self._copies.items()}
        for copy in self._copies.values():
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(self.take_gradient)
        self.free()

    def refresh(self) -> None:
        """Fill the copies from the masters if they were freed."""
        if not self._is_fresh:
            self.fill(self.by_name)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Fill the copies from values by name, which need not be the masters."""
        for copy in self._copies.values():
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            torch._foreach_copy_([copy.data for copy in self._copies.values()], [values[name] for name in self._copies])
        self._is_fresh = True

    def free(self) -> None:
        """Free the copies' memory."""
        self._is_fresh = False
        if self.keeps_copies:
            return
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)

    def add_gradients(self) -> None:
        """Add the gradients that something other than autograd has made."""
        for copy in self._copies.values():
            if copy.grad is not None:
                self.take_gradient(copy)

    def take_gradient(self, copy: Tensor) -> None:
        """Add the gradient of a copy, if it has one, to its master's, and free it."""
        master, gradient = self._master_of[copy], copy.grad
        if gradient is None:  # autograd calls hooks of deferred gradients, too
            return
        copy.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradients that exist now."""
        for tensor in (*self.by_name.values(), *self._copies.values()):
            if tensor.grad is not None:
                yield tensor.grad


def master_weights(module: nn.Module) -> MasterWeights | None:
    """Return the masters of a module's parameters, where it has any."""
    return getattr(module, "master_weights", None)
