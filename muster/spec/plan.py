"""The plan: how a model is distributed over ranks."""

import hashlib
import json
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from muster.spec.base import Frozen
from muster.spec.context_kinds import ContextRanks, CpCommType, context_ranks
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.expert_kinds import DISPATCHERS, DispatchDtype, EpDispatcher, ExpertDispatch, usual_inner_size
from muster.spec.layer_strategy import (
    LayerOverride,
    LayerStrategy,
    Tier,
    complete_override,
    drop_later_defaults,
    is_in_share,
)
from muster.spec.mesh import Mesh, default_mesh
from muster.spec.mesh_axes import MESH_AXES
from muster.spec.plan_parts import PinnedSchedule, StageSpec
from muster.spec.routing_load import ExpertPlacement
from muster.spec.schedules import (
    DEFAULT_MIN_VISITS,
    DEFAULT_SCHEDULE,
    MAX_FLUSH_EVERY,
    SCHEDULES,
    ScheduleEntry,
    stage_placement,
)
from muster.spec.shares import normalize_shares
from muster.spec.suggest import did_you_mean
from muster.spec.workload import Workload

Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "nvfp4", "tf32"]
Float8Recipe = Literal["tensorwise", "rowwise", "mxfp8", "delayed", "blockwise"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
PREDICTED_PRECISIONS: frozenset[Precision] = frozenset(("nvfp4", "tf32"))
"""Precisions that published runs of other programs have, and the runtime doesn't."""
SCALED_PRECISIONS: frozenset[Precision] = frozenset(("fp8", "nvfp4"))
"""Precisions of the operands of matmuls in blocks alone, which have scales; everything else is in bf16."""


class Plan(Frozen):
    """Distribution of a model: degrees, stages, schedule, micro-batches, storage, precision.

    Code asks `plan.mesh(stage)`, `plan.strategy(layer)` and `plan.layers(stage, …)`, never the degrees themselves:
    stages and layers may differ.
    """

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...

    version: Literal[2] = 2
    """Schema version of the file."""
    islands: PositiveInt = 1
    """Groups of ranks, each with all degrees of this plan and its own copy of the model, that exchange parameters in
    outer steps alone; they share the global batch (DiLoCo, arXiv:2311.08105)."""
    dp_replicate: PositiveInt = 1
    """Data-parallel groups, each with a complete copy of its state."""
    dp_shard: PositiveInt = 1
    """Data-parallel ranks that shard their state (ZeRO, FSDP)."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks, over which each layer's matmuls are sharded."""
    pp: PositiveInt = 1
    """Pipeline ranks."""
    vpp: PositiveInt = 1
    """Stages (model chunks, virtual pipeline stages) on each pipeline rank."""
    cp: PositiveInt = 1
    """Context-parallel ranks, over which each sequence is sharded."""
    cp_comm_type: CpCommType = "p2p"
    """Communication of attention between the context-parallel ranks. p2p: keys and values travel around a ring.
    all_gather: every rank gathers all of them. a2a: ranks exchange positions for heads (Ulysses). a2a+p2p: groups of
    neighbours exchange heads, and a ring joins the groups (USP). burst: a ring, whose backward sends queries and
    gradients of outputs instead (BurstAttention). token_ring: queries travel around a ring, results the other way. rsa:
    keys and then values travel around a ring, and all scores are in memory between (RSA). lasp2: layers with linear
    attention gather all ranks' states, others keys and values (LASP-2H). zeco: states go from rank to rank in blocks
    (ZeCO)."""
    cp_ulysses_degree: PositiveInt = 1
    """Ranks of each group that exchanges heads under a2a+p2p."""
    cp_window_size: PositiveInt = 1
    """Ranks of each inner ring of a double ring (LoongTrain), under p2p and a2a+p2p; 1: a single ring."""
    dynamic_context_parallel: bool = False
    """Sequences of unequal lengths are assigned, step by step, to groups of context-parallel ranks: each to as many
    neighbours (a power of two) as it needs. A rank holds the positions of micro_batch_size · seq_len / cp at once
    (arXiv:2412.01523, arXiv:2502.21231)."""
    sequence_tiles: PositiveInt = 1
    """Parts of a micro-batch's positions on a rank that pass the MLPs, and head and loss, one after another. Each is
    computed again in the backward, so that the inner tensors of one part live at a time (arXiv:2506.13996 §3.1)."""
    sequence_slices: PositiveInt = 1
    """Slices of every sequence, which pass through the pipeline one after another; they have equal work, so that
    earlier ones, which see fewer keys, are longer (SPPO)."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, over which experts are distributed. They are ranks of dp_shard, cp and tp."""
    etp: PositiveInt = 1
    """Ranks over which each expert is sharded; neighbours among the same ranks."""
    ep_dispatcher: EpDispatcher = "all_to_all"
    """Way of tokens to the experts of other ranks. all_to_all: rows go to the ranks of their experts and back.
    hierarchical: in two steps, within groups of neighbours and between these (Tutel). all_gather: every rank gets all
    tokens, and their results are reduce-scattered. slicing: tensor-parallel ranks, which have the same tokens, take the
    rows of their own experts (PPMoE)."""
    ep_inner_size: PositiveInt | None = None
    """Neighbouring ranks that exchange tokens first under the hierarchical dispatcher, best those of a node; None: as
    many as make fewest messages."""
    ep_chunks: PositiveInt = 1
    """Chunks of a rank's tokens that travel to experts and back one after another, beside the experts' work on others
    (Tutel's pipelining degree)."""
    ep_dispatch_dtype: DispatchDtype = "none"
    """Numbers in which hidden states travel to experts: in 8 bits with a scale for each, or as they are. Results, and
    gradients, travel as they are."""
    ep_redundant_experts: int = Field(default=0, ge=0)
    """Experts of other ranks, at most, of which a rank gets copies for one micro-batch of a layer, to take over rows of
    the most chosen ones (Hecate)."""
    ep_lsh_rate: float = Field(default=0.0, ge=0, le=1)
    """Centroids of alike hidden states that travel to experts in their place, as a share of these, which changes
    losses; 0: the hidden states themselves (LSH-MoE)."""
    expert_placement: ExpertPlacement = ()
    """Experts of each layer that has any, in the order of the ep ranks that have them, as `muster plan --expert-load`
    places them by their load; empty: in their own order."""
    schedule: str = DEFAULT_SCHEDULE
    """Pipeline schedule."""
    flush_every: int = Field(default=16, ge=1, le=MAX_FLUSH_EVERY)
    """Steps between two flushes of the pipeline, in an asynchronous schedule: after them, and at every save and
    validation, all ranks have the same version of the weights."""
    skip_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the stages that each micro-batch skips under schedule skippipe, which changes what is trained: a stage
    averages its gradients over the micro-batches that it has seen (arXiv:2502.19913)."""
    min_visits: float = Field(default=DEFAULT_MIN_VISITS, ge=0, le=1)
    """Least share of the micro-batches that each stage sees under schedule skippipe, and one of them at least."""
    swaps_stages: bool = False
    """Micro-batches may see two neighbouring stages of their path in the other order under schedule skippipe, where
    that is faster; it changes what is trained, too."""
    pinned_schedule: PinnedSchedule | None = None
    """Result of a schedule search (auto, exact, skippipe); None until it has run (`muster.schedule.resolve`), and
    before that the stages' placement is unknown."""
    max_in_flight_micro_batches: PositiveFloat | None = None
    """Memory limit of a searched schedule: micro-batches whose activations, in units of one rank's share of the layers,
    a rank may hold at once; None: as many as pipeline ranks, as with 1f1b."""
    micro_batch_size: PositiveInt = 1
    """Sequences of a micro-batch on each data-parallel rank of the first stage; see `local_micro_batch_size`."""
    uneven_micro_batches: tuple[PositiveInt, ...] = ()
    """Relative numbers of micro-batches per step on data-parallel ranks of unequal speed. Fewer entries than ranks
    stand for as many neighbouring ranks each; empty: all ranks run equally many."""
    default_strategy: LayerStrategy = LayerStrategy()
    """Storage and computation of all layers without an override."""
    overrides: tuple[LayerOverride, ...] = ()
    """Strategies of runs of layers that differ from the default."""
    stages: tuple[StageSpec, ...] = ()
    """Stages of one replica, in model order; empty: layers are split as evenly as possible."""
    precision: Precision = "bf16"
    """Compute dtype; parameters are stored in fp32 (fp64 for fp64), and gradients accumulated in it."""
    fp8_recipe: Float8Recipe = "tensorwise"
    """Scales of what fp8 matmuls read: one for a tensor, one for each row of an operand along the sum, or one for each
    block of 32 along it (Blackwell). Predicted alone: a tensor's scale from earlier steps (delayed), and one for each
    block of 128 (blockwise)."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients travel between the ranks that share state. fp32: a reduce-scatter in the master weights'
    dtype. bf16: each rank rounds its gradients once and sends every other its part in an all-to-all, and sums what it
    gets in fp32 (MegaScale-MoE, arXiv:2505.11432). Sums over dp_replicate stay in fp32."""
    compile: bool | None = None
    """torch.compile of each decoder block; left out: on GPUs where the runtime can compile the plan, never on CPUs."""
    cuda_graphs: bool = False
    """CUDA graphs of the passes of each stage, captured in the second step and replayed from then on, without host time
    between kernels; a CPU runs them as without."""
    bucket_layers: PositiveInt = 1
    """Layers whose parameters are gathered, and whose gradients are reduced, in one collective of the sharded ranks."""
    prefetch_buckets: PositiveInt = 1
    """Buckets gathered ahead of the one in use, under z3."""
    param_shard_size: PositiveInt | None = None
    """Neighbours, of the ranks that share a stage's state, over which passes gather its parameters under z3: they keep
    copies of these in the compute dtype, made once a step from all ranks' shards; None: all ranks (the first of three
    levels of Frontier's low-bandwidth partitioning, arXiv:2501.04266; ZeRO++'s secondary partition,
    arXiv:2306.10209)."""
    grad_shard_size: PositiveInt | None = None
    """Neighbours of the same ranks over which each backward reduces gradients under z3: their sums are reduced to all
    ranks' shards once a step; None: all ranks (the second of the three levels)."""
    max_active_stages: PositiveInt | None = None
    """Stages of a rank, at most, whose parameters are gathered at a time under z3: each from the first to the last of a
    unit of its passes, behind which their gradients are reduced; None: every pass gathers and drops parameters, layer
    by layer, and every backward reduces gradients (`max_active_stages` of torch.distributed.pipelining; Breadth-First
    pipelines, arXiv:2211.05953 §4.2; ZeroPP, arXiv:2402.03791)."""
    vocab_parallel: bool = False
    """Vocabulary parallelism: embedding and head are sharded evenly over all pipeline ranks, instead of being on the
    first and the last stage (arXiv:2411.05288)."""
    post_validation: bool = False
    """Optimizer steps don't wait for the gradient norm of all ranks: a rank steps once its own gradients are complete,
    and rolls back where the step should have been clipped or skipped (arXiv:2401.10241 §4). It costs a second copy of
    its parameters, optimizer state and gradients."""
    overlap_param_gather_with_optimizer_step: bool = False
    """Under z1 and z2 buckets of parameters are updated one after another, each gathered for the next step beside the
    updates of those behind it (Megatron-LM's word; Holmes's overlapped optimizer, arXiv:2312.03549)."""
    axis_order: tuple[str, ...] = MESH_AXES
    """Mesh axes, outermost first."""

    quantized_weights: Literal["none", "int8"] = "none"
    """Numbers in which parameters travel to the copies of `param_shard_size` neighbours: as in passes, or as 8-bit
    integers with a scale for each 1,024, which rounds what passes compute with (ZeRO++'s qwZ, arXiv:2306.10209)."""
    quantized_gradients: Literal["none", "int8", "int4"] = "none"
    """Numbers in which sums of gradients travel between groups of `grad_shard_size` neighbours: as they are, or as
    integers with a scale for each 1,024 (int8) or 64 (int4), rounded once, by an all-to-all (ZeRO++'s qgZ)."""

    @model_validator(mode="before")
    @classmethod
    def _complete_overrides(cls, data: object) -> object:
        if not isinstance(data, dict) or not isinstance(data.get("overrides"), list | tuple):
            return data
        default = data.get("default_strategy")
        return data | {"overrides": [complete_override(run, default) for run in data["overrides"]]}

    @model_validator(mode="after")
    def _check_shard_sizes(self) -> "Plan":
        if (self.param_shard_size is None) != (self.grad_shard_size is None):
            raise ValueError("param_shard_size and grad_shard_size are given together, as in zp2g8, got one of them")
        return self

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
        """Stages of all replicas of the model."""
        return self.pp * self.vpp

    @property
    def schedule_entry(self) -> ScheduleEntry:
        """Registry entry of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def split_backward(self) -> bool:
        """True if backwards are split into I and W; for a searched schedule not yet found, true if they may be."""
        if self.pinned_schedule is not None:
            return any("W" in passes for passes in self.pinned_schedule.ranks)
        return self.schedule_entry.split_backward or self.schedule_entry.searched

    @property
    def overlaps_data_parallel(self) -> bool:
        """True if z1's gather and reduction can run beside the first forward and the last backward: where these are
        whole, run operator by operator, and contain the vocabulary's layers, parameters stay on the device, all
        ranks shard them, and steps don't follow each other without a flush."""
        apart = self.cuda_graphs or self.split_backward or self.vocab_parallel or self.schedule_entry.is_asynchronous
        return not (apart or self.offloads_params or self.has_shard_levels)

    @property
    def pipeline_replicas(self) -> int:
        """Copies of the model that the schedule runs through the pipeline (two with bidirectional schedules)."""
        return self.schedule_entry.default_replicas

    @property
    def stages_per_replica(self) -> int:
        """Stages of one replica."""
        return self.pp * self.vpp // (SCHEDULES[self.schedule].replicas or 1) or 1

    def is_first(self, stage: int) -> bool:
        """Return True for a stage that begins its replica: the embedding's."""
        return stage % self.stages_per_replica == 0

    def is_last(self, stage: int) -> bool:
        """Return True for a stage that ends its replica: the head's."""
        return (stage + 1) % self.stages_per_replica == 0

    @property
    def is_uniform(self) -> bool:
        """True if no stage has ranks or a mesh of its own."""
        return all(s.ranks is None and s.mesh is None for s in self.stages)

    @property
    def world_size(self) -> int:
        """Ranks of all stages of all islands."""
        return self.islands * self.island_size

    @property
    def island_size(self) -> int:
        """Ranks of all stages of one island; without islands, all."""
        if all(stage.mesh is None for stage in self.stages):
            return self.pp * self.mesh(0).num_ranks
        return sum(self.mesh(stage).num_ranks for stage in range(self.pp))

    @property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank of each stage, in model order, replica by replica.

        Raises MusterError for a searched schedule that hasn't been found yet.
        """
        if self.pinned_schedule is not None:
            return self.pinned_schedule.placement
        if self.schedule_entry.searched and self.vpp > 1:
            raise MusterError(f"where schedule {self.schedule} puts stages is unknown until it is resolved")
        return stage_placement(self.schedule_entry, self.pp, self.vpp)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each micro-batch where some are skipped; empty: all in turn, or not yet found."""
        return () if self.pinned_schedule is None else self.pinned_schedule.stage_paths

    @property
    def hops(self) -> list[tuple[int, int]]:
        """Pairs of stages between which hidden states pass from one rank to another, and gradients back."""
        found = {(stage, stage + 1): None for stage in range(self.num_stages - 1) if not self.is_last(stage)}
        found |= dict.fromkeys(pair for path in self.paths for pair in pairwise(path))
        return [pair for pair in found if self.pp_rank(pair[0]) != self.pp_rank(pair[1])]

    def pp_rank(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage; raises as `placement`."""
        return self.placement[stage]

    def receives_activations(self, stage: int) -> bool:
        """Return True if a stage's input comes from another rank."""
        return not self.is_first(stage) and self.pp_rank(stage - 1) != self.pp_rank(stage)

    def sends_activations(self, stage: int) -> bool:
        """Return True if a stage's output goes to another rank."""
        return not self.is_last(stage) and self.pp_rank(stage + 1) != self.pp_rank(stage)

    def tied_embedding_peer(self, stage: int) -> int | None:
        """Return the stage with the other copy of a tied embedding: the last of the replica for its first, and the
        other way round. None for stages between them, and where both lie on one rank."""
        if self.is_first(stage) == self.is_last(stage):
            return None
        other = stage + (self.stages_per_replica - 1 if self.is_first(stage) else 1 - self.stages_per_replica)
        return None if self.pp_rank(other) == self.pp_rank(stage) else other

    def local_micro_batch_size(self, stage: int) -> int:
        """Return the sequences of a micro-batch on each data-parallel rank, which all stages cut alike."""
        return self.micro_batch_size * self.mesh(0).dp_size // self.mesh(stage).dp_size

    def mesh(self, stage: int) -> Mesh:
        """Return the degrees of a stage."""
        if self.stages and (stage_mesh := self.stages[stage % self.stages_per_replica].mesh) is not None:
            return stage_mesh
        return default_mesh(self)

    def routes_own_tokens(self, mesh: Mesh) -> bool:
        """Return True where each tensor-parallel rank of a mesh sends a part of the positions to whole experts (etp 1),
        instead of computing all of them by its slice of each expert (arXiv:2504.14960 §3.2)."""
        return mesh.tp > 1 and mesh.etp == 1 and not DISPATCHERS[self.ep_dispatcher].shares_tokens

    def expert_dispatch(self, mesh: Mesh) -> ExpertDispatch:
        """Return the expert-parallel ranks of a mesh with their dispatcher."""
        inner = 1
        if self.ep_dispatcher == "hierarchical":
            inner = self.ep_inner_size or usual_inner_size(mesh.ep)
        own = self.ep_dispatcher, mesh.ep, inner, self.ep_chunks
        return ExpertDispatch(*own, self.ep_dispatch_dtype, self.ep_redundant_experts, self.ep_lsh_rate)

    @property
    def distinct_meshes(self) -> list[Mesh]:
        """Meshes of all stages, each different one once."""
        meshes = [self.mesh(stage) for stage in range(len(self.stages) or 1)]
        return list({str(mesh): mesh for mesh in meshes}.values())

    def uses_axis(self, axis: str) -> bool:
        """Return True if some stage has several ranks on an axis."""
        return any(getattr(mesh, axis) > 1 for mesh in self.distinct_meshes)

    @property
    def slice_unit(self) -> int:
        """Positions that every slice of a sequence has a multiple of: those that sequence parallelism shares out."""
        has_sp = any(strategy.sp for strategy in self.strategies)
        return lcm(*(mesh.tp for mesh in self.distinct_meshes)) if has_sp else 1

    def context_ranks(self, mesh: Mesh) -> ContextRanks:
        """Return the context-parallel ranks of the stages with one of the plan's meshes."""
        return context_ranks(self.cp_comm_type, mesh.cp, self.cp_ulysses_degree, self.cp_window_size)

    @property
    def strategies(self) -> list[LayerStrategy]:
        """The default strategy and those of all overrides."""
        return [self.default_strategy, *(run.strategy for run in self.overrides)]

    def strategy(self, layer: int) -> LayerStrategy:
        """Return the strategy of one layer; the last override that covers it wins."""
        for run in reversed(self.overrides):
            if run.start <= layer < run.start + run.count:
                return run.strategy
        return self.default_strategy

    def layers(self, stage: int, num_layers: int) -> range:
        """Return the layers of one stage, of a model with `num_layers`."""
        count = self.stages_per_replica
        if not self.stages:
            return _even_runs(num_layers, count)[stage % count]
        start = sum(s.layers for s in self.stages[: stage % count])
        return range(start, start + self.stages[stage % count].layers)

    def layer_counts(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage of one replica, of a model with `num_layers`."""
        return [stage.layers for stage in self.stages] or split_evenly(num_layers, self.stages_per_replica)

    @property
    def offloads_by_layer(self) -> bool:
        """True if activations go to host memory layer by layer, each beside the next layer's forward: without a
        pipeline no passes of other micro-batches run between a forward and its backward."""
        return self.pp == 1

    def offloaded_layers(self, stage: int, num_layers: int, tier: Tier = "host") -> list[int]:
        """Return the layers of one stage whose activations may be offloaded to host memory, or are on disk."""
        wanted = "activations" if tier == "host" else "activations_on_disk"
        return [n for n in self.layers(stage, num_layers) if self.strategy(n).offload == wanted]

    def late_written_layers(self, stage: int, num_layers: int) -> list[int]:
        """Return the layers of one stage whose activations may wait in host memory for their write to disk while the
        next pass runs: as many as the layers behind them that aren't on disk, from which a backward begins without
        reads, and half of those on disk at most."""
        on_disk = self.offloaded_layers(stage, num_layers, "disk")
        if not on_disk:
            return []
        behind = self.layers(stage, num_layers).stop - 1 - on_disk[-1]
        return on_disk[len(on_disk) - min(behind, len(on_disk) // 2) :]

    def offloads_optimizer(self, layer: int | None) -> bool:
        """Return True if a layer's optimizer state is kept off the device; None: of parameters outside layers."""
        strategy = self.default_strategy if layer is None else self.strategy(layer)
        return strategy.offload_optimizer != "none" and is_in_share(layer, strategy.offload_optimizer_ratio)

    def param_tier(self, layer: int | None) -> Tier:
        """Return the place of a layer's parameters where that isn't the device; None: of those outside layers."""
        strategy = self.default_strategy if layer is None else self.strategy(layer)
        tiers: tuple[Tier, Tier] = ("none", strategy.offload_param)
        return tiers[is_in_share(layer, strategy.offload_param_ratio)]

    @property
    def offloads_params(self) -> bool:
        """True if the parameters of some layers are kept off the device; then `fully_shard` gathers those of single
        ranks, too."""
        return any(strategy.offload_param != "none" for strategy in self.strategies)

    def num_host_updates(self, stage: int, num_layers: int) -> int:
        """Return the parts in which the host updates a stage's parameters."""
        return len(self.host_update_tiers(stage, num_layers))

    def host_update_tiers(self, stage: int, num_layers: int) -> tuple[Tier, ...]:
        """Return the place of the optimizer's state of each part in which the host updates a stage's parameters: one
        for each layer whose state is off the device, and a last one for parameters outside layers."""
        away = self.host_updated_layers(stage, num_layers)
        strategies = (self.default_strategy if part is None else self.strategy(part) for part in away)
        return tuple(strategy.offload_optimizer for strategy in strategies)

    def host_updated_layers(self, stage: int, num_layers: int) -> list[int | None]:
        """Return the layers of a stage whose state is off the device, part by part; None: what lies outside layers."""
        if not self.overrides and self.default_strategy.offload_optimizer == "none":
            return []
        parts: list[int | None] = [*self.layers(stage, num_layers)]
        if self.vocab_parallel or self.is_first(stage) or self.is_last(stage):
            parts.append(None)
        return list(filter(self.offloads_optimizer, parts))

    def param_tiers(self, num_layers: int) -> tuple[tuple[Tier, ...], ...]:
        """Return, by stage, the place of the parameters of each part that `host_update_tiers` has, "none" for the
        device; empty where all are there."""
        if not self.offloads_params:
            return ()
        parts = (self.host_updated_layers(stage, num_layers) for stage in range(self.num_stages))
        return tuple(tuple(self.param_tier(layer) for layer in own) for own in parts)

    def num_micro_batches(self, workload: Workload, dp_index: int | None = None) -> int:
        """Return the micro-batches that a data-parallel rank of the first stage runs in one step. With
        `uneven_micro_batches`, `dp_index` says which rank (`layout.mesh.dp_index_of`); None: the one that runs most.

        Raises InfeasibleError when the global batch can't be divided that way.
        """
        ranks = self.mesh(0).dp_size
        shares = self.uneven_micro_batches or (1,)
        parts = max(1, ranks // len(shares)) * sum(shares)
        per_micro_batch = self.islands * parts * self.micro_batch_size
        count, rest = divmod(workload.global_batch_size, per_micro_batch)
        if rest or not count:
            cut = (
                f"sum of uneven_micro_batches {parts}" if self.uneven_micro_batches else f"data-parallel ranks {ranks}"
            )
            raise InfeasibleError(
                f"global_batch_size {workload.global_batch_size} is not a multiple of {per_micro_batch}"
                f" ({f'islands {self.islands} × ' if self.islands > 1 else ''}{cut} × micro_batch_size"
                f" {self.micro_batch_size})"
            )
        if not self.uneven_micro_batches:
            return count
        return count * (max(shares) if dp_index is None else shares[dp_index * len(shares) // ranks])

    def sample_range(self, dp_index: int, count: int) -> range:
        """Return the slice of an island's `count` samples of a step that a data-parallel rank of the first stage reads.
        Slices are consecutive in rank order, so a step has the same samples under any plan."""
        shares = self.uneven_micro_batches or (1,)
        block = self.mesh(0).dp_size // len(shares)
        whole, within = divmod(dp_index, block)
        part = count // (block * sum(shares))
        count_here = part * shares[min(whole, len(shares) - 1)]
        start = part * block * sum(shares[:whole]) + within * count_here
        return range(start, start + count_here)

    @property
    def has_shard_levels(self) -> bool:
        """True if parameters or gradients are sharded over fewer ranks than the optimizer's state."""
        return self.param_shard_size is not None or self.grad_shard_size is not None

    def gather_ranks(self, mesh: Mesh) -> int:
        """Return the ranks over which a pass gathers parameters under z3."""
        return self.param_shard_size or mesh.state_shards

    def reduce_ranks(self, mesh: Mesh) -> int:
        """Return the ranks over which a backward reduces gradients under z2 and z3."""
        return self.grad_shard_size or mesh.state_shards

    def copies_params(self, mesh: Mesh) -> bool:
        """Return True if a step begins with copies of a stage's parameters on groups of neighbours, from which passes
        gather them."""
        return self.gather_ranks(mesh) < mesh.state_shards

    def gathers_before_passes(self, mesh: Mesh) -> bool:
        """Return True if a step begins by gathering a stage's parameters from all ranks: under z1 and z2 for its
        passes, under z3 for `copies_params` and for the first unit of `max_active_stages`."""
        return self.default_strategy.zero != "z3" or self.copies_params(mesh) or self.max_active_stages is not None

    def pass_strategy(self, layer: int) -> LayerStrategy:
        """Return the strategy of one layer within passes: with `max_active_stages`, or under an asynchronous schedule,
        in which passes neither gather nor reduce, that of z1."""
        strategy, in_passes = self.strategy(layer), self.max_active_stages is None
        in_passes &= not self.schedule_entry.is_asynchronous
        return strategy if in_passes else strategy.model_copy(update={"zero": "z1"})

    @property
    def reduces_replicas_once(self) -> bool:
        """True if gradients are reduced beyond a replica, or beyond `grad_shard_size` ranks, once a step; under z2 and
        z3 split backwards and the vocabulary's own passes reduce a part of a layer's gradients at a time, each to the
        end."""
        may_split = self.schedule_entry.split_backward or self.schedule_entry.searched
        return not may_split and not self.vocab_parallel

    def num_stage_micro_batches(self, stage: int, workload: Workload, dp_index: int | None = None) -> int:
        """Return the micro-batches that run through one stage in one step: replicas share them, the first takes the
        larger half; some skip it where they have paths. `dp_index` as in `num_micro_batches`."""
        if self.paths:
            return sum(stage in path for path in self.paths)
        return split_evenly(self.num_micro_batches(workload, dp_index), self.pipeline_replicas)[
            stage // self.stages_per_replica
        ]

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits that differ when any field differs.

        A field of `_ADDED_LATER` counts only with another value than its default, so that a plan keeps its hash, and a
        `compile` that is left out counts as false, which it was before it could be left out.
        """
        values = self.model_dump(mode="json")
        values["compile"] = bool(self.compile)
        if self.pinned_schedule is not None and not self.pinned_schedule.paths:
            del values["pinned_schedule"]["paths"]  # added later, too
        for strategy in (values["default_strategy"], *(run["strategy"] for run in values["overrides"])):
            drop_later_defaults(strategy)
        added = {key: Plan.model_fields[key].default for key in _ADDED_LATER}
        defaults = {key: list(default) if isinstance(default, tuple) else default for key, default in added.items()}
        text = json.dumps({k: v for k, v in values.items() if k not in defaults or v != defaults[k]}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


_ADDED_LATER = (
    *("cp_comm_type", "cp_ulysses_degree", "cp_window_size", "dynamic_context_parallel", "sequence_tiles"),
    *("ep_dispatcher", "ep_inner_size", "ep_chunks", "sequence_slices", "cuda_graphs", "fp8_recipe"),
    *("expert_placement", "ep_redundant_experts", "ep_dispatch_dtype", "ep_lsh_rate", "islands"),
    *("param_shard_size", "grad_shard_size", "quantized_weights", "quantized_gradients", "grad_reduce_dtype"),
    *("flush_every", "skip_ratio", "min_visits", "swaps_stages", "max_active_stages"),
    "overlap_param_gather_with_optimizer_step",
)
"""Fields of a plan that are younger than the hashes in files."""


@lru_cache(maxsize=1024)
def _even_runs(num_layers: int, parts: int) -> tuple[range, ...]:
    ends = list(accumulate(split_evenly(num_layers, parts)))
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def split_evenly(count: int, parts: int) -> list[int]:
    """Split `count` things into `parts` contiguous parts and return their sizes, larger ones first: the last pipeline
    stage also has the output head."""
    base, rest = divmod(count, parts)
    return [base + (part < rest) for part in range(parts)]
