"""Initial weights as a function of (seed, name) alone, so that every plan begins with the same values."""

import hashlib

import torch
from torch import Tensor, nn

from muster.spec.model import ModelSpec


def keyed_generator(seed: int, key: str) -> torch.Generator:
    """Return a CPU generator whose draws depend on (seed, key) alone, not on earlier draws."""
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def draw(name: str, shape: tuple[int, ...], seed: int, std: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw the whole tensor `name` from a normal distribution, in float32 whatever `dtype` is, so that all precisions
    agree.

    A rank that holds a shard draws the whole tensor and slices it.
    """
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, std, generator=keyed_generator(seed, f"init/{name}")).to(dtype)


def initial_value(
    spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the whole initial tensor of one parameter: ones for norms (zeros with `norm_unit_offset`), zeros for
    biases, else normal.

    With `scaled_residual`, weights that write to the residual stream are scaled by 1 / sqrt(2 · layers), since that
    many terms add up there (GPT-2, section 2.3).
    """
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if spec.norm_unit_offset else 1.0, dtype=dtype, device="cpu")
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    residual = spec.scaled_residual and name.endswith(("attn.o.weight", "mlp.down.weight"))
    std = spec.init_std / (2 * spec.num_layers) ** 0.5 if residual else spec.init_std
    return draw(name, shape, seed, std, dtype)


def init_stage(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Set every parameter of an unsharded Decoder; one on the meta device moves to the CPU first."""
    if any(parameter.is_meta for parameter in module.parameters()):
        module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_value(spec, name, tuple(parameter.shape), seed))
