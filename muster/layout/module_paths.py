"""Paths through shared modules: which module of each level of layers an island trains (DiPaCo, arXiv:2403.10616)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from muster.layout.host_updates import layer_of


@dataclass(frozen=True)
class ModulePaths:
    """Paths of a model whose layers have several modules, and the islands that train them.

    Levels are groups of consecutive layers, about equally many each. A level has one module or several: copies of its
    layers, each with weights of its own. A path is a choice of one module in each level, and each island trains one
    path. Parameters outside layers are shared by all paths.

    Example: modules (1, 2) are two paths, which share the first half of the layers; modules (2, 2) are four, and each
    module of either level is on two of them. Path p has module p mod 2 of the first level and p div 2 of the second.
    """

    modules: tuple[int, ...]
    """Modules of each level."""
    islands: int
    """A multiple of the number of paths: islands p, p + paths, … train path p."""
    num_layers: int

    @property
    def num_paths(self) -> int:
        """Number of paths."""
        return prod(self.modules)

    def path_of(self, island: int) -> int:
        """Return the path that an island trains."""
        return island % self.num_paths

    def place_of(self, island: int) -> int:
        """Return the number of an island among those of its path."""
        return island // self.num_paths

    def module_of(self, island: int, name: str) -> int:
        """Return the module of its level from which an island has a parameter; 0 for those that all share."""
        level = self._level_of(name)
        return 0 if level is None else self.path_of(island) // prod(self.modules[:level]) % self.modules[level]

    def members(self, island: int, name: str) -> tuple[int, ...]:
        """Return the islands with the same module of a parameter as an island."""
        own = self.module_of(island, name)
        return tuple(other for other in range(self.islands) if self.module_of(other, name) == own)

    def paths_through(self, name: str) -> int:
        """Return the paths with the same module of a parameter."""
        level = self._level_of(name)
        return self.num_paths if level is None else self.num_paths // self.modules[level]

    def exchanged(self, names: Sequence[str]) -> list[list[str]]:
        """Return the parameters of each level that several islands share, those outside layers first: one exchange for
        each. Those of a single path are exchanged at once."""
        if self.num_paths == 1:
            return [list(names)]
        levels: dict[int, list[str]] = {}
        for name in names:
            if len(self.members(0, name)) > 1:
                level = self._level_of(name)
                levels.setdefault(-1 if level is None else level, []).append(name)
        return [levels[level] for level in sorted(levels)]

    def _level_of(self, name: str) -> int | None:
        layer = layer_of(name)
        if layer is None or self.num_paths == 1:
            return None
        return layer * len(self.modules) // self.num_layers
