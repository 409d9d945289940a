"""The all-reduce between islands: compressed on the way, added in one order, and the same on all islands to the bit."""

import torch
import torch.distributed as dist
from torch import Tensor

from muster.layout.island_bytes import BLOCKS, Compression, island_chunk
from muster.parallel.axis import IslandAxis, all_gather_into_tensor


def mean_over_islands(
    values_N: Tensor, axis: IslandAxis, compression: Compression, error_N: Tensor | None = None
) -> Tensor:
    """Return the mean of all islands' `values_N`, which are left as they are.

    Each island owns an equal part of the elements: it receives that part from all others, adds the parts in the order
    of the islands, in the precision of the values, and sends the mean to all. What travels is compressed, the mean too,
    and its owner continues with the same compressed mean. So all islands have the same bits, and the order of the
    additions depends on nothing. Each rank sends `island_reduce_bytes`.

    `error_N`, if given, is filled with what compression loses of this island's values: its mean over the islands is the
    exact mean less the one that is returned. The owner of a part has the loss of the part's mean, too.
    """
    chunk = island_chunk(values_N.numel(), axis.size, compression)
    padded = values_N.new_zeros(axis.size * chunk)
    padded[: values_N.numel()] = values_N
    sent = torch.stack([encode(part, compression) for part in padded.split(chunk)]) if chunk else None
    if sent is None:
        return values_N.clone()
    if error_N is not None:
        arriving = [decode(part, compression, values_N.dtype) for part in sent]
        errors = padded - torch.cat(arriving)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    total = decode(received[0], compression, values_N.dtype)
    for part in received[1:]:
        total += decode(part, compression, values_N.dtype)
    mean = encode(total / axis.size, compression)
    if error_N is not None:
        own = slice(axis.index * chunk, (axis.index + 1) * chunk)
        errors[own] += total - decode(mean, compression, values_N.dtype) * axis.size
        error_N.copy_(errors[: values_N.numel()])
    gathered = mean.new_empty(axis.size * mean.numel())
    all_gather_into_tensor(gathered, mean, group=axis.group)
    parts = [decode(part, compression, values_N.dtype) for part in gathered.view(axis.size, -1)]
    return torch.cat(parts)[: values_N.numel()]


def encode(values_N: Tensor, compression: Compression) -> Tensor:
    """Return the bytes in which values travel: uint8.

    int8: for each block of elements a scale, the largest magnitude / 127 in fp32, and then each element's nearest
    multiple of it: no element is off by more than half the scale. int4: the same with 7 for 127 in smaller blocks, two
    elements in a byte, the first in its upper half (4 bits for outer gradients: arXiv:2501.18512 §2.4). Outliers so
    coarsen their own block alone, where one scale for a whole tensor that clips at a few standard deviations loses them
    (heavy tails). A block with an infinity or NaN arrives as NaN.
    """
    if compression == "none":
        return _as_bytes(values_N.contiguous())
    if compression == "bf16":
        return _as_bytes(values_N.to(torch.bfloat16))
    most = _LARGEST_LEVEL[compression]
    blocks = values_N.view(-1, BLOCKS[compression])
    scales = (blocks.abs().amax(1) / most).float()
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    levels = (blocks / divisors.unsqueeze(1)).nan_to_num(0.0, 0.0, 0.0).round().clamp(-most, most).to(torch.int8)
    if compression == "int4":
        pairs = (levels.view(-1, 2) + 8).to(torch.uint8)
        return torch.cat([_as_bytes(scales), pairs[:, 0] * 16 + pairs[:, 1]])
    return torch.cat([_as_bytes(scales), levels.view(-1).view(torch.uint8)])


def decode(encoded: Tensor, compression: Compression, dtype: torch.dtype) -> Tensor:
    """Return the values that `encode` made bytes of, in `dtype`."""
    if compression == "none":
        return encoded.view(dtype).clone()
    if compression == "bf16":
        return encoded.view(torch.bfloat16).to(dtype)
    size = BLOCKS[compression]
    blocks = encoded.numel() // (4 + (size // 2 if compression == "int4" else size))
    scales = encoded[: 4 * blocks].clone().view(torch.float32)
    scales = torch.where(scales.isfinite(), scales, torch.full_like(scales, torch.nan))
    levels = encoded[4 * blocks :]
    if compression == "int4":
        levels = torch.stack([levels // 16, levels % 16], 1).view(torch.int8) - 8
    levels = levels.view(torch.int8).view(blocks, size)
    return (levels.to(dtype) * scales.to(dtype).unsqueeze(1)).view(-1)


_LARGEST_LEVEL: dict[Compression, int] = {"int8": 127, "int4": 7}


def _as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
