"""Parts of a plan: its stages, and the schedule that a search has found for it."""

from functools import cached_property
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from muster.spec.base import Frozen
from muster.spec.mesh import Mesh


class StageSpec(Frozen):
    """One pipeline stage: a contiguous run of layers, and its ranks and mesh where they are not the default."""

    layers: int = Field(ge=0)
    """Number of layers."""
    ranks: tuple[int, ...] | None = None
    """World ranks that hold the stage."""
    mesh: Mesh | None = None
    """Degrees of this stage alone."""

    @model_validator(mode="before")
    @classmethod
    def _take_older(cls, content: Any) -> Any:
        # Checkpoints written before uneven_micro_batches existed give every stage a share of None.
        if isinstance(content, dict) and content.get("micro_batch_share", 0) is None:
            return {key: value for key, value in content.items() if key != "micro_batch_share"}
        return content


class PinnedSchedule(Frozen):
    """The result of a schedule search, stored with the plan that it was made for."""

    times: Literal["nominal", "predicted", "measured"] = "nominal"
    """Pass times that the search used. nominal: shares of the model's matmul FLOPs; predicted: by the planner, for
    passes and p2p transfers; measured: by a profile."""
    micro_batches: PositiveInt
    """Micro-batches per step."""
    placement: tuple[int, ...]
    """Pipeline rank of each stage."""
    ranks: tuple[str, ...]
    """Passes of each pipeline rank in order, such as `0F0 0F1 0B0`."""
    paths: tuple[str, ...] = ()
    """Stages that each micro-batch passes through, such as `0.2.3`; empty: all in turn."""

    @cached_property
    def stage_paths(self) -> tuple[tuple[int, ...], ...]:
        """The paths as numbers of stages."""
        return tuple(tuple(map(int, path.split("."))) for path in self.paths)

    @field_validator("paths")
    @classmethod
    def _check_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not all(stage.isdecimal() for stage in path.split(".")):
                raise ValueError(f"{path!r} is no path of a micro-batch; expected numbers of stages, such as 0.2.3")
        return paths
