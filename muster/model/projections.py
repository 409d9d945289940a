"""Functions through which a sublayer's hidden state enters and leaves, which parallelism and recompute replace."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


def project_in(x_BSD: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several linear layers to one hidden state; tensor parallelism replaces this function."""
    return tuple(linear(x_BSD) for linear in linears)


def project_out(x: Tensor, linear: nn.Linear) -> Tensor:
    """Apply the linear layer that leads back to the hidden state; tensor parallelism replaces this function."""
    return linear(x)


def recomputable(
    make: Callable[..., Tensor], inputs: tuple[Tensor, ...], consume: Callable[..., Any], *args: Any
) -> Any:
    """Return consume(make(*inputs), *args); a hook for recompute, which then doesn't save the result of `make`."""
    return consume(make(*inputs), *args)


class HasProjections(Protocol):
    """A sublayer with these functions as attributes."""

    @property
    def project_in(self) -> Callable[..., tuple[Tensor, ...]]: ...

    @property
    def recomputable(self) -> Callable[..., Any]: ...


def project_normed(
    part: HasProjections, norm: nn.Module | None, x_BSD: Tensor, *linears: nn.Linear
) -> tuple[Tensor, ...]:
    """Apply a sublayer's first linear layers to the hidden state, or to its norm where there is one."""
    if norm is None:
        return part.project_in(x_BSD, *linears)
    return part.recomputable(norm, (x_BSD,), part.project_in, *linears)
