"""Bytes per element of a precision."""

from muster.spec.plan import Plan, Precision

_COMPUTE_BYTES: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "nvfp4": 2, "tf32": 4}
NVFP4_BYTES = 0.5 + 1 / 16
"""Bytes of an element of 4 bits with its share of the scale of 16, of 8 bits (arXiv:2509.25149)."""
_MASTER_BYTES: dict[Precision, int] = {precision: max(4, size) for precision, size in _COMPUTE_BYTES.items()}


def compute_bytes(precision: Precision) -> int:
    """Return the bytes of an element in forward and backward; under fp8 and nvfp4 2, since only matmuls run in
    these, the rest in bf16."""
    return _COMPUTE_BYTES[precision]


def master_bytes(precision: Precision) -> int:
    """Return the bytes of an element of master weights, gradients, moments, statistics and the loss."""
    return _MASTER_BYTES[precision]


def grad_reduce_bytes(plan: Plan) -> int:
    """Return the bytes of an element of a gradient on its way between ranks that share its state."""
    return 2 if plan.grad_reduce_dtype == "bf16" else master_bytes(plan.precision)
