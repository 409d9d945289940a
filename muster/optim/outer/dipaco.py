"""DiPaCo: DiLoCo for each module that paths share (arXiv:2403.10616)."""

from math import sqrt

from torch import Tensor

from muster.optim.outer.base import OuterParameter
from muster.optim.outer.diloco import DiLoCo


class DiPaCo(DiLoCo):
    """Islands train paths through shared modules, each on its own part of the data; changes are averaged by module."""

    def update(self, parameter: OuterParameter, change: Tensor) -> None:
        """Step DiLoCo's outer optimizer with the mean change of a module, √paths times as long for a module of several
        paths: a mean over more of them is shorter (§2.6)."""
        scaled = change if parameter.paths == 1 else change * sqrt(parameter.paths)
        super().update(parameter, scaled)
