"""Kernels of experts' matmuls on a rank that trains."""

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from muster.config.grouped_matmul_file import read_grouped_rates
from muster.model.experts import Experts
from muster.model.grouped_matmul import MeasuredKernels


def use_measured_kernels(modules: Iterable[nn.Module], run_dir: Path, device_type: str) -> None:
    """Let the experts of a rank's stages take the kernels that were the fastest, where the run has their rates."""
    if not (rates := read_grouped_rates(run_dir, device_type)):
        return
    kernels = MeasuredKernels(rates)
    for module in modules:
        for part in module.modules():
            if isinstance(part, Experts):
                part.choose_kernel = kernels
