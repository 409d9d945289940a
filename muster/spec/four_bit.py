"""Frozen linear layers in 4 bits: which weights they are, and the tensors that hold one (QLoRA, T. Dettmers et al.,
arXiv:2305.14314 §3).

A block of 64 consecutive elements of a weight, in row-major order, has codes of 4 bits and one absolute maximum, which
is itself stored in 8 bits beside a float32 scale for every 256 blocks: 0.516 bytes an element. Blocks and groups lie as
in bitsandbytes.
"""

from collections.abc import Iterable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from muster.spec.adapters import TARGETS

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec

BLOCK = 64
"""Elements with one absolute maximum (arXiv:2305.14314 §3)."""
NESTED_BLOCK = 256
"""Blocks whose absolute maxima have one scale (double quantization, §3)."""
CODES, ABSMAX, NESTED = "weight_4bit", "weight_absmax", "weight_nested_absmax"
"""Tensors in the place of `weight`: two elements' codes a byte (out, in / 2); a code of 8 bits of each block's absolute
maximum (out, in / 64); as the bits of float32 numbers, which no cast to another precision changes, the scale of every
256 blocks, and last the mean of all absolute maxima."""
_ELEMENTS = {CODES: 2, ABSMAX: BLOCK}
_ENTRY_BYTES = {CODES: 1, ABSMAX: 1, NESTED: 4}


def has_four_bits(spec: "ModelSpec", name: str) -> bool:
    """Return True for a weight that is stored in 4 bits: those of all linear layers of the decoder layers."""
    if spec.adapter is None or not spec.adapter.load_in_4bit or not name.startswith("layers."):
        return False
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in TARGETS


def with_whole_weights(spec: "ModelSpec") -> "ModelSpec":
    """Return the model that holds no weights in 4 bits."""
    if spec.adapter is None:
        return spec
    return spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"load_in_4bit": False})})


def is_four_bit_part(name: str) -> bool:
    """Return True for a tensor that holds a part of a weight in 4 bits."""
    return name.endswith((f".{CODES}", f".{ABSMAX}", f".{NESTED}"))


def weight_of_part(name: str) -> str:
    """Return the name of the weight that a tensor holds a part of."""
    return f"{name.rpartition('.')[0]}.weight"


def stored_parameters(
    spec: "ModelSpec", shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield parameters as ranks hold them: those in 4 bits by their parts."""
    for name, shape in shapes:
        if has_four_bits(spec, name):
            yield from four_bit_parts(name, shape)
        else:
            yield name, shape


def four_bit_parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors in the place of a weight (out, in)."""
    rows, columns = shape
    yield name.removesuffix("weight") + CODES, (rows, columns // _ELEMENTS[CODES])
    yield name.removesuffix("weight") + ABSMAX, (rows, columns // BLOCK)
    yield name.removesuffix("weight") + NESTED, (ceil(rows * columns / BLOCK / NESTED_BLOCK) + 1,)


def stored_element_bytes(spec: "ModelSpec", name: str, size: float) -> float:
    """Return the bytes of an element of a weight as passes hold it, where others have `size` bytes."""
    if not has_four_bits(spec, name):
        return size
    return 1 / _ELEMENTS[CODES] + (1 + _ENTRY_BYTES[NESTED] / NESTED_BLOCK) / BLOCK


def cut_weights(sizes: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield parameters, or a rank's parts of them, with the size of the weight in the place of those of its parts."""
    for name, size in sizes:
        if name.endswith(f".{CODES}"):
            yield weight_of_part(name), (size[0], size[1] * _ELEMENTS[CODES])
        elif not is_four_bit_part(name):
            yield name, size


def elements_per_entry(name: str) -> int:
    """Return the neighbouring elements of a row of the weight that one entry of a parameter stands for."""
    return _ELEMENTS.get(name.rpartition(".")[2], 1)


def part_bytes(name: str) -> int | None:
    """Return the bytes of an entry of a part of a weight in 4 bits; None for any other parameter."""
    return _ENTRY_BYTES.get(name.rpartition(".")[2])


def check_four_bits(spec: "ModelSpec", shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise ValueError where the linear layers of a model, given by a layer's parameters, can't be held in 4 bits."""
    other = next(
        (
            what
            for has, what in (
                (spec.moe is not None, "experts (moe)"),
                (spec.mla is not None, "latent attention (mla)"),
                (spec.linear_attention is not None, "linear attention (linear_attention)"),
            )
            if has
        ),
        None,
    )
    if other is not None:
        raise ValueError(f"adapter.load_in_4bit isn't known for a model with {other}: leave load_in_4bit out")
    for name, shape in shapes:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2] in TARGETS and shape[1] % BLOCK:
            raise ValueError(
                f"adapter.load_in_4bit cuts rows into blocks of {BLOCK} elements, but those of"
                f" {module.rpartition('.')[2]} have {shape[1]}: leave load_in_4bit out"
            )
