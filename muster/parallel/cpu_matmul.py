"""Float32 matmuls of a CPU by oneDNN, where MKL leaves half of the processor's vector width unused.

PyTorch multiplies float32 matrices by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which PyTorch
contains for other operators, uses it wherever the processor has it: there it multiplies twice as fast
(docs/performance.md).
"""

import functools
import warnings
from pathlib import Path

import torch
from torch import Tensor

MIN_ROWS = 64
"""Rows of the smallest left matrix for oneDNN, which first brings the right one into an order of its own."""
MIN_MULTIPLICATIONS = 1 << 21
"""Multiplications of the smallest matmul for oneDNN, whose calls take 10 µs longer."""


@functools.cache
def use_wide_matmuls() -> bool:
    """Let oneDNN compute this process's float32 matmuls on CPUs, if MKL would use narrower instructions than the
    processor has; returns True if so.

    The processor's kind and the shapes decide, not a measurement, so that equal processes agree to the bit.
    """
    if not _is_mkl_narrow():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that these kernels take the place of PyTorch's own
        for name, kernel in {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm, "addmm_": _addmm_}.items():
            _registrations.impl(name, kernel, "CPU")
    return True


_registrations = torch.library.Library("aten", "IMPL")
"""Kernels of this process in place of PyTorch's own, as long as it lives."""


def _is_mkl_narrow() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", "GenuineIntel")


def _vendor() -> str:
    """Return the processor's vendor as Linux names it; nothing if it doesn't."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


# ----------------------------------------------------------------------------------------------------------------------
# Kernels. Those that leave a matmul to MKL call addmm.out, which isn't replaced.


def _is_wide(left_MK: Tensor, right_KN: Tensor, *others: Tensor) -> bool:
    """Return True for a matmul that oneDNN takes less time for."""
    (rows, inner), columns = left_MK.shape, right_KN.shape[1]
    if rows < MIN_ROWS or rows * inner * columns < MIN_MULTIPLICATIONS or inner != right_KN.shape[0]:
        return False
    return all(one.dtype == torch.float32 for one in (left_MK, right_KN, *others))


def multiply(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return the product of two float32 matrices, and a bias, by oneDNN."""
    if not (right_KN.is_contiguous() or right_KN.t().is_contiguous()):
        right_KN = right_KN.contiguous()  # oneDNN has but a slow reference kernel for parts of matrices
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_KN.t(), bias_N, "none", [], "")


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    if _is_wide(left_MK, right_KN):
        return multiply(left_MK, right_KN)
    out_MN = left_MK.new_empty(left_MK.shape[0], right_KN.shape[1])
    return torch.addmm(out_MN, left_MK, right_KN, beta=0, out=out_MN)


def _mm_out(left_MK: Tensor, right_KN: Tensor, *, out: Tensor) -> Tensor:
    if _is_wide(left_MK, right_KN, out) and out.shape == (left_MK.shape[0], right_KN.shape[1]):
        return out.copy_(multiply(left_MK, right_KN))
    return torch.addmm(left_MK.new_empty(()), left_MK, right_KN, beta=0, out=out)


def _addmm(term: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    is_bias = term.shape == right_KN.shape[1:] and alpha == beta == 1
    if is_bias and _is_wide(left_MK, right_KN, term):
        return multiply(left_MK, right_KN, term.contiguous())
    out_MN = left_MK.new_empty(left_MK.shape[0], right_KN.shape[1])
    return torch.addmm(term, left_MK, right_KN, beta=beta, alpha=alpha, out=out_MN)


def _addmm_(sum_MN: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == 1 and sum_MN.shape == (left_MK.shape[0], right_KN.shape[1]) and _is_wide(left_MK, right_KN, sum_MN):
        return sum_MN.add_(multiply(left_MK, right_KN), alpha=alpha)
    return torch.addmm(sum_MN, left_MK, right_KN, beta=beta, alpha=alpha, out=sum_MN)
