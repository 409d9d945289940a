"""How a model is spread over ranks: the plan."""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from math import gcd, prod
from operator import attrgetter
from typing import Any, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from muster.spec.base import Frozen
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.mesh_axes import BATCH_AXES, GRAD_SUM_AXES, MESH_AXES, SEQUENCE_AXES, STAGE_AXES, STATE_SHARD_AXES
from muster.spec.schedules import SCHEDULES, ScheduleEntry, stage_placement
from muster.spec.suggest import did_you_mean
from muster.spec.workload import Workload

ZeroLevel = Literal["z1", "z2", "z3"]
Recompute = Literal["none", "elementwise", "core_attention", "every_second_matmul", "full"]
"""Part of a layer that its backward computes again. none: nothing. elementwise: norms and the product of the gated
linear unit, one pass over memory each. core_attention: scores, softmax and weighted values (Megatron-LM's selective,
arXiv:2205.05198 §5). every_second_matmul: every second matmul and everything cheap (torchtitan's selective activation
checkpointing by operation). full: the whole layer."""
Offload = Literal["none", "optimizer", "activations", "all"]
"""What lies in the host's memory. activations: what a layer keeps of a micro-batch, where enough other passes run
between its forward and its backward (arXiv:2503.01328). optimizer: its state (arXiv:2101.06840)."""
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class Mesh(Frozen):
    """Degrees of the axes within one pipeline stage."""

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    cp: PositiveInt = 1
    tp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of one stage; the experts' axes fold into the others."""
        return prod(_STAGE_DEGREES(self))

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return prod(_BATCH_DEGREES(self))

    @property
    def sequence_shards(self) -> int:
        """Parts that a sequence is cut into by the axes whose ranks read different positions."""
        return prod(_SEQUENCE_DEGREES(self))

    @property
    def grad_sum_size(self) -> int:
        """Ranks that every parameter's gradient is summed over."""
        return prod(_GRAD_SUM_DEGREES(self))

    @property
    def state_shards(self) -> int:
        """Parts that optimizer state is sharded into."""
        return prod(_STATE_SHARD_DEGREES(self))


def _degrees_of(axes: Sequence[str]) -> Callable[[Mesh], tuple[int, ...]]:
    first, *others = axes
    return attrgetter(first, *others) if others else lambda mesh: (getattr(mesh, first),)


_STAGE_DEGREES = _degrees_of(STAGE_AXES)
_BATCH_DEGREES = _degrees_of(BATCH_AXES)
_SEQUENCE_DEGREES = _degrees_of(SEQUENCE_AXES)
_GRAD_SUM_DEGREES = _degrees_of(GRAD_SUM_AXES)
_STATE_SHARD_DEGREES = _degrees_of(STATE_SHARD_AXES)


class LayerStrategy(Frozen):
    """How one layer is stored and computed."""

    zero: ZeroLevel = "z3"
    """z1: optimizer state sharded, gradients reduced once per step; z2: gradients kept sharded across
    micro-batches too; z3: parameters too. Without sharded ranks (dp_shard 1) all three are the same."""
    sp: bool = False
    """Between layers the sequence is cut over the tp ranks."""
    tp_overlap: Literal["none", "async_tp"] = "none"
    """Overlap of tensor-parallel collectives with matmuls under sp. none: all-gather, then matmul, and matmul, then
    reduce-scatter; only weight gradients are computed meanwhile. async_tp: cut into chunks, each multiplied while the
    next one travels."""
    recompute: Recompute = "none"
    """What a layer's backward computes again."""
    attention: Literal["flash", "unfused"] = "flash"
    """flash: scores stay within one kernel (arXiv:2205.14135). unfused: they are written to memory, and kept."""
    offload: Offload = "none"
    """What lies in the host's memory."""


class LayerOverride(Frozen):
    """A strategy for `count` layers from `start` on. In a file, what it leaves out is that of `default_strategy`."""

    start: int = Field(ge=0)
    count: PositiveInt
    strategy: LayerStrategy


class StageSpec(Frozen):
    """One pipeline stage: a contiguous run of `layers` layers, and what it runs on when that is not the default."""

    layers: int = Field(ge=0)
    """How many."""
    ranks: tuple[int, ...] | None = None
    """World ranks that hold it."""
    mesh: Mesh | None = None
    """Degrees of its own."""

    @model_validator(mode="before")
    @classmethod
    def _take_older(cls, content: Any) -> Any:
        # Checkpoints of before `uneven_micro_batches` say of each stage that it has none.
        if isinstance(content, dict) and content.get("micro_batch_share", 0) is None:
            return {key: value for key, value in content.items() if key != "micro_batch_share"}
        return content


class PinnedSchedule(Frozen):
    """A schedule that was searched for, kept with the plan that it was found for."""

    times: Literal["nominal", "predicted", "measured"] = "nominal"
    """What it was found for: the passes' shares of the model's products, what a planner predicted for them and for the
    hops between stages, or what a profile measured."""
    micro_batches: PositiveInt
    """Of a step."""
    placement: tuple[int, ...]
    """The pipeline rank of each stage."""
    ranks: tuple[str, ...]
    """For each pipeline rank its passes in order, such as `0F0 0F1 0B0`."""


class Plan(Frozen):
    """How a model is spread: degrees, stages, schedule, micro-batches, storage, precision.

    Code asks `plan.mesh(stage)`, `plan.strategy(layer)` and `plan.layers(stage, …)`, never the degrees themselves:
    stages and layers may differ.
    """

    version: Literal[2] = 2
    """The schema of the file."""
    dp_replicate: PositiveInt = 1
    """Data-parallel groups, each with a whole copy of what it stores."""
    dp_shard: PositiveInt = 1
    """Data-parallel ranks that share what they store."""
    tp: PositiveInt = 1
    """Ranks over which each layer's products are cut."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    vpp: PositiveInt = 1
    """Stages (model chunks) that each pipeline rank holds."""
    cp: PositiveInt = 1
    """Ranks over which a sequence is cut."""
    ep: PositiveInt = 1
    """Ranks over which experts are spread."""
    etp: PositiveInt = 1
    """Ranks over which each expert is cut."""
    schedule: str = "1f1b"
    """The order of the passes."""
    pinned_schedule: PinnedSchedule | None = None
    """Of a searched schedule (auto, exact), once it is found (`muster.schedule.resolve`); before, nobody can say where
    stages lie."""
    max_in_flight_micro_batches: PositiveFloat | None = None
    """Of a searched schedule: micro-batches' activations of a rank's share of the layers that a rank may keep; None: as
    many as there are pipeline ranks, which is what 1f1b keeps."""
    micro_batch_size: PositiveInt = 1
    """Sequences of a micro-batch on each data-parallel rank of the first stage; see `rows`."""
    uneven_micro_batches: tuple[PositiveInt, ...] = ()
    """For data-parallel ranks on devices of unequal speed: how many micro-batches each runs in a step, in proportion.
    Fewer numbers than ranks stand for as many neighbours each; empty: all ranks run as many."""
    default_strategy: LayerStrategy = LayerStrategy()
    """How layers are stored and computed."""
    overrides: tuple[LayerOverride, ...] = ()
    """The same for runs of layers, where they differ."""
    stages: tuple[StageSpec, ...] = ()
    """Of one replica, in model order; empty: layers split as evenly as can be."""
    precision: Precision = "bf16"
    """Of the compute; parameters are kept in fp32 (in fp64 for fp64), and gradients summed in it."""
    compile: bool = False
    """torch.compile of each block."""
    bucket_layers: PositiveInt = 1
    """Layers whose parameters are gathered, and whose gradients are reduced, in one collective of sharded ranks."""
    prefetch_buckets: PositiveInt = 1
    """Under z3, buckets that are gathered ahead of the one in use."""
    vocab_parallel: bool = False
    """Embedding and head lie in equal parts on all pipeline ranks, instead of on the first and the last stage."""
    post_validation: bool = False
    """Steps don't wait for the gradient norm of all ranks: a rank steps when its own gradients are complete, and takes
    the step back where it should have been clipped or skipped. It keeps its parameters, their optimizer state and
    gradients once more for that."""
    axis_order: tuple[str, ...] = MESH_AXES
    """Mesh axes, the outermost first."""

    @model_validator(mode="before")
    @classmethod
    def _complete_overrides(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(data.get("overrides"), list | tuple):
            return data
        default = data.get("default_strategy")
        return data | {"overrides": [_complete_override(run, default) for run in data["overrides"]]}

    @field_validator("axis_order")
    @classmethod
    def _check_axis_order(cls, order: tuple[str, ...]) -> tuple[str, ...]:
        if sorted(order) != sorted(MESH_AXES):
            raise ValueError(f"axis_order must name each of {', '.join(MESH_AXES)} once, got {', '.join(order)}")
        return order

    @field_validator("uneven_micro_batches")
    @classmethod
    def _check_data_shares(cls, shares: tuple[int, ...]) -> tuple[int, ...]:
        return normalize_shares(shares)

    @field_validator("schedule")
    @classmethod
    def _check_schedule(cls, schedule: str) -> str:
        if schedule not in SCHEDULES:
            raise ValueError(f"there is no schedule '{schedule}'{did_you_mean(schedule, SCHEDULES)}")
        return schedule

    @property
    def num_stages(self) -> int:
        """Over all replicas of the model, one after the other."""
        return self.pp * self.vpp

    @property
    def schedule_entry(self) -> ScheduleEntry:
        """What is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def split_backward(self) -> bool:
        """Whether backwards are in two passes; of a searched schedule that isn't found yet, whether they may be."""
        if self.pinned_schedule is not None:
            return any("W" in passes for passes in self.pinned_schedule.ranks)
        return self.schedule_entry.split_backward or self.schedule_entry.searched

    @property
    def pipeline_replicas(self) -> int:
        """Copies of the model that the schedule runs through the pipeline."""
        return self.schedule_entry.default_replicas

    @property
    def stages_per_replica(self) -> int:
        """Stages of one replica."""
        return max(1, self.pp * self.vpp // SCHEDULES[self.schedule].default_replicas)

    def is_first(self, stage: int) -> bool:
        """Whether a stage has the embedding."""
        return stage % self.stages_per_replica == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage has the head."""
        return stage % self.stages_per_replica == self.stages_per_replica - 1

    @property
    def is_uniform(self) -> bool:
        """All stages run on ranks and meshes of the default kind."""
        return all(s.ranks is None and s.mesh is None for s in self.stages)

    @property
    def world_size(self) -> int:
        if all(stage.mesh is None for stage in self.stages):
            return self.pp * self.mesh(0).num_ranks
        return sum(self.mesh(stage).num_ranks for stage in range(self.pp))

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage, as the schedule places them.

        Raises MusterError where that is still to be found.
        """
        if self.pinned_schedule is not None:
            return self.pinned_schedule.placement
        if self.schedule_entry.searched and self.vpp > 1:
            raise MusterError(f"where schedule {self.schedule} puts stages is known once it is resolved")
        return stage_placement(self.schedule_entry, self.pp, self.vpp)

    def pp_rank(self, stage: int) -> int:
        """The pipeline rank that holds a stage; raises as `placement`."""
        return self.placement[stage]

    def receives_activations(self, stage: int) -> bool:
        """Whether a stage's input comes from another rank."""
        return not self.is_first(stage) and self.pp_rank(stage - 1) != self.pp_rank(stage)

    def sends_activations(self, stage: int) -> bool:
        """Whether a stage's output goes to another rank."""
        return not self.is_last(stage) and self.pp_rank(stage + 1) != self.pp_rank(stage)

    def tied_embedding_peer(self, stage: int) -> int | None:
        """The other end of a stage's replica, if the stage is one and they lie on two ranks: the holder of a tied
        weight's other copy."""
        if self.is_first(stage) == self.is_last(stage):
            return None
        other = stage + (self.stages_per_replica - 1 if self.is_first(stage) else 1 - self.stages_per_replica)
        return None if self.pp_rank(other) == self.pp_rank(stage) else other

    def local_micro_batch_size(self, stage: int) -> int:
        """Sequences of a micro-batch on each data-parallel rank of a stage: every stage cuts the same micro-batch."""
        return self.micro_batch_size * self.mesh(0).dp_size // self.mesh(stage).dp_size

    def mesh(self, stage: int) -> Mesh:
        """The mesh that one stage runs on."""
        if self.stages and (own := self.stages[stage % self.stages_per_replica].mesh) is not None:
            return own
        return _default_mesh(*_MESH_DEGREES(self))

    @property
    def distinct_meshes(self) -> list[Mesh]:
        """Those of all stages, each different one once."""
        meshes = [self.mesh(stage) for stage in range(len(self.stages) or 1)]
        return list({str(mesh): mesh for mesh in meshes}.values())

    def uses_axis(self, axis: str) -> bool:
        """Whether some stage has several ranks on an axis."""
        return any(getattr(mesh, axis) > 1 for mesh in self.distinct_meshes)

    @property
    def strategies(self) -> list[LayerStrategy]:
        """The default and those of some layers."""
        return [self.default_strategy, *(run.strategy for run in self.overrides)]

    def strategy(self, layer: int) -> LayerStrategy:
        """How one layer is stored and computed; the last override that covers it wins."""
        for run in reversed(self.overrides):
            if run.start <= layer < run.start + run.count:
                return run.strategy
        return self.default_strategy

    def layers(self, stage: int, num_layers: int) -> range:
        """The layers of one stage, of a model with `num_layers`."""
        if not self.stages:
            return _even_runs(num_layers, self.stages_per_replica)[stage % self.stages_per_replica]
        start = sum(s.layers for s in self.stages[: stage % self.stages_per_replica])
        return range(start, start + self.stages[stage % self.stages_per_replica].layers)

    def layer_counts(self, num_layers: int) -> list[int]:
        """How many layers each stage of one replica has, of a model with `num_layers`."""
        return [stage.layers for stage in self.stages] or split_evenly(num_layers, self.stages_per_replica)

    def offloaded_layers(self, stage: int, num_layers: int) -> list[int]:
        """The layers of one stage whose activations may wait in the host's memory."""
        return [n for n in self.layers(stage, num_layers) if self.strategy(n).offload in ("activations", "all")]

    def num_micro_batches(self, workload: Workload, dp_index: int | None = None) -> int:
        """Micro-batches that a data-parallel rank of the first stage runs in one step. With `uneven_micro_batches`,
        `dp_index` says which rank (`layout.mesh.dp_index_of`); None: the one that runs most.

        Raises InfeasibleError when the global batch can't be cut so.
        """
        ranks, shares = self.mesh(0).dp_size, self.uneven_micro_batches or (1,)
        parts = max(1, ranks // len(shares)) * sum(shares)
        per_micro_batch = parts * self.micro_batch_size
        count, rest = divmod(workload.global_batch_size, per_micro_batch)
        if rest or not count:
            cut = (
                f"parts of uneven_micro_batches {parts}"
                if self.uneven_micro_batches
                else f"data-parallel ranks {ranks}"
            )
            raise InfeasibleError(
                f"global_batch_size {workload.global_batch_size} is not a multiple of {per_micro_batch}"
                f" ({cut} × micro_batch_size {self.micro_batch_size})"
            )
        if not self.uneven_micro_batches:
            return count
        return count * (max(shares) if dp_index is None else shares[dp_index * len(shares) // ranks])

    def sample_range(self, dp_index: int, count: int) -> range:
        """Which of a step's `count` samples a data-parallel rank of the first stage reads: consecutive ones, in the
        order of the ranks, so that the step's samples are the same under any plan."""
        shares = self.uneven_micro_batches or (1,)
        block = self.mesh(0).dp_size // len(shares)
        whole, within = divmod(dp_index, block)
        part = count // (block * sum(shares))
        own = part * shares[min(whole, len(shares) - 1)]
        start = part * block * sum(shares[:whole]) + within * own
        return range(start, start + own)

    def num_stage_micro_batches(self, stage: int, workload: Workload, dp_index: int | None = None) -> int:
        """Micro-batches that run through one stage in one step: each replica has half of them, the first the larger.
        `data` as in `num_micro_batches`."""
        return split_evenly(self.num_micro_batches(workload, dp_index), self.pipeline_replicas)[
            stage // self.stages_per_replica
        ]

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that differ when any field does."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def normalize_shares(shares: Sequence[int]) -> tuple[int, ...]:
    """The one way to write the shares of data-parallel ranks: smallest numbers, one for as many neighbours as can be;
    nothing where all are equal."""
    if len(set(shares)) < 2:
        return ()
    common, run = gcd(*shares), gcd(*(len(list(alike)) for _, alike in groupby(shares)))
    return tuple(share // common for share in shares[::run])


_MESH_DEGREES = attrgetter(*Mesh.model_fields)


@lru_cache(maxsize=4096)
def _default_mesh(*degrees: int) -> Mesh:
    return Mesh(**dict(zip(Mesh.model_fields, degrees, strict=True)))


def _complete_override(run: object, default: object) -> object:
    """An override as a file says it, over the default strategy as the file says that."""
    if isinstance(run, dict) and isinstance(own := run.get("strategy"), dict) and isinstance(default, dict):
        return run | {"strategy": default | own}
    return run


@lru_cache(maxsize=1024)
def _even_runs(num_layers: int, parts: int) -> tuple[range, ...]:
    ends = list(accumulate(split_evenly(num_layers, parts)))
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def split_evenly(count: int, parts: int) -> list[int]:
    """`count` things in `parts` contiguous parts, the larger ones first (the last stage has the output head)."""
    base, rest = divmod(count, parts)
    return [base + (part < rest) for part in range(parts)]
