"""Lowering: turn a Schedule into a Program by adding communication and the optimizer step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.schedule.action import COPY_LANES, KINDS, LANES, Action, Kind, Lane
from muster.schedule.active_stages import add_active_stages
from muster.schedule.bucket_steps import add_bucket_steps
from muster.schedule.host_update import PARTS_AHEAD, carried_order, copy_order, shared_copy_order
from muster.schedule.offload import PassCopies, add_copy_lane, add_pass_copies
from muster.schedule.outer_steps import NO_EXCHANGE, OuterEvents
from muster.schedule.program import Instruction, Program, Wait
from muster.schedule.schedule import Schedule
from muster.schedule.transfers import Transfers, lanes_with_transfers, schedule_transfers
from muster.schedule.versions import add_versioned_steps
from muster.schedule.vocab_passes import VocabSchedule, VocabTimes, add_vocab_passes
from muster.spec.gc_pause import gc_paused
from muster.spec.layer_strategy import Tier, ZeroLevel


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """Facts of a plan that decide which instructions its schedule needs."""

    zero: ZeroLevel = "z3"
    data_ranks: int | tuple[int, ...] = 1
    """Data-parallel ranks of all stages, or of each; with one there is nothing to gather or reduce."""
    tp_replicated_weights: bool = False
    """True if tensor-parallel ranks replicate a weight whose gradients must be all-reduced."""
    tied_embeddings: bool = False
    """True if first and last stage share the embedding."""
    vocab_times: VocabTimes | None = None
    """Nominal times of vocabulary passes under vocabulary parallelism, else None."""
    post_validation: bool = False
    """True if the optimizer steps before the global gradient norm is known."""
    offload: frozenset[int] = frozenset()
    """Stages whose activations are offloaded to host memory, where they are saved long enough."""
    host_activations: frozenset[int] = frozenset()
    """Stages whose activations go to host memory layer by layer."""
    disk_activations: frozenset[int] = frozenset()
    """Stages that keep activations on disk."""
    late_writes: frozenset[int] = frozenset()
    """Stages among these that may write some of the layers while the next pass runs."""
    host_updates: tuple[tuple[Tier, ...], ...] = ()
    """Places, by stage, of the optimizer's state of each part that the host updates; empty: the device updates
    all."""
    device_updates: tuple[tuple[bool, ...], ...] = ()
    """For each of these parts, by stage, whether the device updates it with state that comes from host memory; empty:
    the host updates all."""
    part_sizes: tuple[tuple[float, ...], ...] = ()
    """Relative size of each of these parts, by stage; empty: all are alike."""
    delayed_update: bool = False
    """True if the host updates parameters with the gradients of the step before, beside the passes."""
    backward_updates: tuple[int, ...] = ()
    """Parts of each stage, from its first on, that the host updates within its last backward; empty: none."""
    param_tiers: tuple[tuple[Tier, ...], ...] = ()
    """Places, by stage, of the parameters of each of these parts; empty: all are on the device."""
    outer: OuterEvents = NO_EXCHANGE
    """Exchanges with other islands after the step."""
    moves_experts: bool = False
    """True if experts may move to other ranks after the step."""
    train: bool = True
    """False for evaluation: no optimizer steps."""
    has_backward: bool = True
    """False where passes are forwards alone: no gradients are reduced."""
    max_active_stages: int | None = None
    """Stages of a rank, at most, that are gathered at a time, for units of passes; None: as `zero` says."""
    update_buckets: tuple[int, ...] = ()
    """Buckets of each stage's parameters that are updated one after another, each gathered for the next step beside the
    updates behind it; empty: the optimizer updates all at once, and the next step gathers."""
    keeps_whole_weights: bool = False
    """True if data-parallel ranks hold whole weights, which nothing gathers, and all-reduce their gradients once a
    step."""
    copies_params: bool = False
    """True if under z3 a step begins with copies of the parameters, from which passes gather them."""

    def stages_with_params(self, *tiers: Tier) -> frozenset[int]:
        """Return the stages with parameters in one of some tiers."""
        return frozenset(stage for stage, own in enumerate(self.param_tiers) if not set(own).isdisjoint(tiers))

    def is_sharded(self, stage: int) -> bool:
        """Return True if the stage has several data-parallel ranks."""
        return (self.data_ranks if isinstance(self.data_ranks, int) else self.data_ranks[stage]) > 1


@dataclass(slots=True)
class ProgramDraft:
    """Program under construction: lowering passes append to its lanes, so that indices of waits stay valid."""

    schedule: Schedule
    vocab_schedule: VocabSchedule | None = None
    """Schedule with vocabulary passes, under vocabulary parallelism."""
    ranks: list[dict[Lane, list[Instruction]]] = field(init=False)
    transfers: Transfers = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [{lane: [] for lane in LANES} for _ in self.schedule.ranks]
        ends_s = self.vocab_schedule.ends_s if self.vocab_schedule else None
        self.transfers = schedule_transfers(self.schedule, ends_s)
        for rank, both in enumerate(lanes_with_transfers(self.schedule, self.transfers)):
            if self.vocab_schedule:
                both = _insert_vocab_passes(self.vocab_schedule.orders[rank], *both)
            self.ranks[rank]["compute"], self.ranks[rank]["p2p"] = both

    def add(self, rank: int, action: Action, waits: Sequence[Wait] = (), peer: int | None = None) -> Wait:
        """Append an instruction to its lane, and return the wait for it."""
        lane = KINDS[action.kind].lane
        self.ranks[rank][lane].append(Instruction(action, peer, tuple(waits)))
        return Wait(lane, len(self.ranks[rank][lane]) - 1)

    def wait_all_passes(self, rank: int) -> list[Wait]:
        """Return the wait for all of a rank's passes, which is that for the last one."""
        return [Wait("compute", len(self.ranks[rank]["compute"]) - 1)] if self.ranks[rank]["compute"] else []

    def wait_collectives(self, rank: int, *kinds: Kind) -> list[Wait]:
        """Return the waits for the rank's collectives of these kinds."""
        lane = self.ranks[rank]["collective"]
        return [Wait("collective", index) for index, item in enumerate(lane) if item.action.kind in kinds]

    def wait_copies_of(self, rank: int, *kinds: Kind) -> list[Wait]:
        """Return the waits for the last of a rank's copies of each of these kinds."""
        last = {
            item.action.kind: Wait(lane, index)
            for lane in COPY_LANES
            for index, item in enumerate(self.ranks[rank][lane])
            if item.action.kind in kinds
        }
        return list(last.values())

    def wait_copies_beside(self, rank: int) -> list[Wait]:
        """Return the waits for the copies beside a rank's last backward, of activations and of gradients, or beside its
        last forward where there is no backward."""
        beside = (Kind.LOAD_B, Kind.READ_B, Kind.RELOAD_ACT, Kind.READ_ACT, Kind.WRITE_ACT_LATE)
        if not any(item.action.kind in (Kind.B, Kind.I) for item in self.ranks[rank]["compute"]):
            beside = (Kind.LOAD_F, Kind.READ_F)
        waits: list[Wait] = []
        for lane in COPY_LANES:
            last: dict[Kind, int] = {}  # where activations and gradients share a lane, the last of each
            for index in reversed(range(len(self.ranks[rank][lane]))):
                kind = self.ranks[rank][lane][index].action.kind
                if kind not in beside:
                    break
                last.setdefault(kind, index)
            waits += [Wait(lane, index) for index in sorted(last.values())]
        return waits

    def finish(self) -> Program:
        """Return the Program."""
        schedule = self.schedule
        ranks: tuple[dict[Lane, tuple[Instruction, ...]], ...] = tuple(
            {lane: tuple(items) for lane, items in lanes.items() if items} for lanes in self.ranks
        )
        sizes = schedule.num_micro_batches, ranks, schedule.replicas, schedule.num_slices, schedule.pairs
        sizes = *sizes, schedule.num_steps, schedule.paths
        transfers = None if self.vocab_schedule else self.transfers
        return Program(schedule.name, schedule.placement, *sizes, transfers=transfers)


def lower(schedule: Schedule, options: LoweringOptions) -> Program:
    """Return the Program of one step. Raises ProgramError for a schedule that no rank could follow."""
    with gc_paused():
        woven = add_vocab_passes(schedule, options.vocab_times) if options.vocab_times else None
        draft = ProgramDraft(woven.schedule if woven else schedule, woven)
        add_unshards(draft, options)
        if woven:
            add_vocab_collectives(draft, woven)
        if options.train:
            for lanes in draft.ranks if options.offload else ():
                lanes["compute"], lanes["host_copy"] = add_copy_lane(lanes["compute"], options.offload)
            add_copies_beside_passes(draft, options)
            if draft.schedule.num_steps > 1:
                of_stages = [
                    (stage, kind)
                    for stage in range(draft.schedule.num_stages)
                    for kind, has in (
                        (Kind.REDUCE_GRAD, options.is_sharded(stage)),
                        (Kind.ALL_REDUCE_TP, options.tp_replicated_weights),
                    )
                    if has
                ]
                add_versioned_steps(draft, of_stages)
                return draft.finish()
            if options.has_backward:
                add_gradient_exchanges(draft, options)
            add_step(draft, options)
            add_outer_steps(draft, options.outer)
            for rank in range(len(draft.ranks) if options.moves_experts else 0):
                draft.add(rank, Action(Kind.MOVE_EXPERTS), draft.wait_all_passes(rank))  # STEP is the last of them
        return draft.finish()


def add_gradient_exchanges(draft: ProgramDraft, options: LoweringOptions) -> None:
    """Add what makes gradients complete once the backwards are over."""
    add_grad_reductions(draft, options)
    if draft.schedule.replicas > 1:
        add_replica_reductions(draft, options.tp_replicated_weights)
    elif options.tp_replicated_weights:
        add_replicated_grad_reductions(draft)
    if options.tied_embeddings:
        add_tied_embedding_reductions(draft)


def add_copies_beside_passes(draft: ProgramDraft, options: LoweringOptions) -> None:
    """Add the copies beside passes, of parameters and of layers' activations, from and to host memory and disk."""
    beside: dict[Lane, PassCopies] = {
        "host_copy": PassCopies(options.host_activations, params=options.stages_with_params("host", "disk")),
        "disk": PassCopies(options.disk_activations, options.late_writes, options.stages_with_params("disk")),
    }
    for lane, copies in beside.items():
        for lanes in draft.ranks if copies.params or copies.activations else ():
            lanes["compute"], lanes[lane] = add_pass_copies(lanes["compute"], copies, lane)


def _last_backwards(compute: Sequence[Instruction]) -> dict[int, Wait]:
    """Return each stage with the wait for its last backward on a rank, in the order of these."""
    last: dict[int, Wait] = {}
    stages = {item.action.stage for item in compute}
    for index in range(len(compute) - 1, -1, -1):
        action = compute[index].action
        if action.kind in (Kind.B, Kind.W, Kind.T, Kind.EMB_W) and action.stage not in last:
            last[action.stage] = Wait("compute", index)
            if len(last) == len(stages):
                break
    return dict(reversed(last.items()))


def _insert_vocab_passes(
    order: Sequence[Action], compute: Sequence[Instruction], p2p: Sequence[Instruction]
) -> tuple[list[Instruction], list[Instruction]]:
    """Return both lanes, with the vocabulary passes of `order` inserted between those of the schedule."""
    passes = {item.action: item for item in compute}
    place = {action: index for index, action in enumerate(order)}
    places = [place[item.action] for item in compute]
    moved = [item._replace(waits=tuple(wait._replace(index=places[wait.index]) for wait in item.waits)) for item in p2p]
    return [passes.get(action) or Instruction(action) for action in order], moved


def add_vocab_collectives(draft: ProgramDraft, vocab_schedule: VocabSchedule) -> None:
    """Add the collectives of vocabulary parallelism, in one order on all ranks, and the waits for them.

    A rank that contributes begins after its contribution; the others begin once the collective before it has begun.
    """
    placement = draft.schedule.placement
    for rank, lanes in enumerate(draft.ranks):
        positions = {item.action: index for index, item in enumerate(lanes["compute"])}
        first_stage = placement.index(rank)
        last = len(placement) - 1
        inputs: dict[Kind, list[tuple[Kind, int]]] = {
            Kind.EMB_REDUCE: [(Kind.EMB_F, first_stage)],
            Kind.HIDDEN_BCAST: [(Kind.F, last)],
            Kind.LOGIT_STATS: [(Kind.S, first_stage)],
            Kind.EMB_GRAD_BCAST: [(Kind.B, 0), (Kind.I, 0)],
        }
        readers: dict[Kind, list[tuple[Kind, int]]] = {
            Kind.EMB_REDUCE: [(Kind.F, 0)],
            Kind.HIDDEN_BCAST: [(Kind.S, first_stage)],
            Kind.LOGIT_STATS: [(Kind.B, last), (Kind.I, last), (Kind.T, first_stage)],
            Kind.EMB_GRAD_BCAST: [(Kind.EMB_W, first_stage)],
        }
        for kind, micro_batch in vocab_schedule.collectives:
            producers, consumers = (
                [positions[action] for end in ends[kind] if (action := Action(*end, micro_batch)) in positions]
                for ends in (inputs, readers)
            )
            wait = draft.add(
                rank, Action(kind, first_stage, micro_batch), [Wait("compute", producer) for producer in producers]
            )
            for consumer in consumers:
                item = lanes["compute"][consumer]
                lanes["compute"][consumer] = item._replace(waits=(*item.waits, wait))


def add_unshards(draft: ProgramDraft, options: LoweringOptions) -> None:
    """Add UNSHARD for z1 and z2: parameters are gathered before a stage's first pass and kept until the step.

    z3 gathers inside the passes, from neighbours' copies where the plan has `param_shard_size`, which UNSHARD makes, or
    for units of them (`add_active_stages`).
    """
    if options.max_active_stages is not None:
        add_active_stages(draft, options)
        return
    if (options.zero == "z3" and not options.copies_params) or options.keeps_whole_weights:
        return
    for rank, lanes in enumerate(draft.ranks):
        compute = lanes["compute"]
        first: dict[int, int] = {}
        for index in range(len(compute) - 1, -1, -1):
            first[compute[index].action.stage] = index
        for stage in sorted(first, key=first.__getitem__):
            if options.is_sharded(stage):
                item = compute[first[stage]]
                gathered = draft.add(rank, Action(Kind.UNSHARD, stage))
                compute[first[stage]] = item._replace(waits=(*item.waits, gathered))


def add_grad_reductions(draft: ProgramDraft, options: LoweringOptions) -> None:
    """Add REDUCE_GRAD for z1 and whole weights: one reduction per stage, after its last backward. z2 and z3 reduce
    inside the passes.

    Under vocabulary parallelism it comes after all passes of the rank: vocabulary collectives that other ranks have not
    reached yet would stand before it.
    """
    if options.zero == "z1" or options.keeps_whole_weights:
        for rank, lanes in enumerate(draft.ranks):
            for stage, last in _last_backwards(lanes["compute"]).items():
                if options.is_sharded(stage):
                    draft.add(
                        rank,
                        Action(Kind.REDUCE_GRAD, stage),
                        draft.wait_all_passes(rank) if draft.vocab_schedule else [last],
                    )


def add_replicated_grad_reductions(draft: ProgramDraft) -> None:
    """Add the all-reduce of gradients of weights replicated over tp, once those of the stage are complete."""
    for rank, lanes in enumerate(draft.ranks):
        for stage, last in _last_backwards(lanes["compute"]).items():
            _add_replicated_grad_reduction(draft, rank, stage, last)


def _add_replicated_grad_reduction(draft: ProgramDraft, rank: int, stage: int, last: Wait) -> Wait:
    """Add that of a stage behind the `last` of its backwards, and return the wait for it."""
    actions = [item.action for item in draft.ranks[rank]["collective"]]
    reduced = [Wait("collective", index) for index, one in enumerate(actions) if one[:2] == (Kind.REDUCE_GRAD, stage)]
    complete = reduced[-1:] or [last]  # units of active stages have a reduction each
    return draft.add(rank, Action(Kind.ALL_REDUCE_TP, stage), [*complete, *draft.wait_copies_beside(rank)])


def add_replica_reductions(draft: ProgramDraft, tp_replicated_weights: bool) -> None:
    """Add the all-reduce of gradients between the two replicas; n ALL_REDUCE_REPLICAS is the n-th stage of each. With
    `tp_replicated_weights` that over tp comes before it.

    It begins once the rank's own copy of the stage is done, beside passes of others (BitPipe, arXiv:2410.19367). No two
    ranks wait for each other: nothing waits for it before the passes are over, and all ranks have the stages in one
    order, that in which both copies are done. Behind a REDUCE_GRAD, whose end no rank knows before it waits for it, and
    behind copies of parameters and gradients, it comes after all passes.
    """
    placement, depth = draft.schedule.placement, draft.schedule.depth
    last = [_last_backwards(lanes["compute"]) for lanes in draft.ranks]
    left = [0] * len(placement)  # passes of the rank behind the stage's last backward
    for rank, own in enumerate(last):
        for stage, wait in own.items():
            left[stage] = len(draft.ranks[rank]["compute"]) - wait.index
    order = sorted(range(depth), key=lambda stage: (-min(left[stage], left[stage + depth]), -stage))
    for rank, own in enumerate(last):
        passes = draft.wait_all_passes(rank)
        late = draft.wait_collectives(rank, Kind.REDUCE_GRAD) + draft.wait_copies_beside(rank)
        summed: dict[int, Wait] = {}
        for number in order:
            copies = [stage for stage in (number, number + depth) if placement[stage] == rank]
            last_of_copies = [] if late else sorted(own[stage] for stage in copies if stage in own)[-1:]
            done = last_of_copies or passes
            for stage, wait in own.items():
                if copies and tp_replicated_weights and stage not in summed and wait <= max(done):
                    summed[stage] = _add_replicated_grad_reduction(draft, rank, stage, wait)
            complete = [wait for stage, wait in summed.items() if late or stage in copies]
            for stage in copies[:1]:
                other = placement[(stage + depth) % len(placement)]
                waits = [*done, *late, *complete]
                draft.add(rank, Action(Kind.ALL_REDUCE_REPLICAS, number), waits, None if other == rank else other)


def add_tied_embedding_reductions(draft: ProgramDraft) -> None:
    """Add the all-reduce of the tied embedding's gradients, if first and last stage of a replica lie on two ranks.

    It comes after all passes of the rank: the peer may need them first.
    """
    placement, depth = draft.schedule.placement, draft.schedule.depth
    for first in range(0, len(placement), depth):
        for stage, other in ((first, first + depth - 1), (first + depth - 1, first)):
            rank, partner = placement[stage], placement[other]
            if rank != partner:
                after = draft.wait_all_passes(rank) + draft.wait_collectives(
                    rank, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS
                )
                after += draft.wait_copies_beside(rank)
                draft.add(rank, Action(Kind.ALL_REDUCE_TIED, stage), after, partner)


def add_step(draft: ProgramDraft, options: LoweringOptions) -> None:
    """Add the global gradient norm, once every gradient is complete, and the optimizer step after it.

    With post-validation the optimizer steps at once, and the norm is all-reduced during the next step's passes.
    """
    kind = Kind.GRAD_NORM_ASYNC if options.post_validation else Kind.GRAD_NORM
    for rank in range(len(draft.ranks)):
        after = draft.wait_all_passes(rank) + draft.wait_collectives(
            rank, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED
        )
        after += draft.wait_copies_beside(rank)
        early = add_backward_updates(draft, rank, options) if any(options.backward_updates) else []
        norm = draft.add(rank, Action(kind), after)
        updated = add_host_updates(draft, rank, options, norm) if any(options.host_updates) else []
        if options.update_buckets:
            updated = add_bucket_steps(draft, rank, options, norm)
        draft.add(rank, Action(Kind.STEP), [*early, *updated] if updated else [*early, norm])


def add_outer_steps(draft: ProgramDraft, outer: OuterEvents) -> None:
    """Add the exchanges of fragments with other islands after the step: those that begin, and then the wait for each
    that ends, with the outer optimizer's step. An exchange that began after an earlier step has its start there."""
    for rank in range(len(draft.ranks)):
        stepped = draft.wait_all_passes(rank)
        started = {n: draft.add(rank, Action(Kind.OUTER_REDUCE, slice=n), stepped) for n in outer.starts}
        for fragment in outer.ends:
            before = [started[fragment]] if fragment in started else stepped
            arrived = draft.add(rank, Action(Kind.OUTER_WAIT, slice=fragment), before)
            draft.add(rank, Action(Kind.OUTER_STEP, slice=fragment), [arrived])


def add_host_updates(draft: ProgramDraft, rank: int, options: LoweringOptions, norm: Wait) -> list[Wait]:
    """Add the updates of a rank's parameters by the host, and their copies; return the waits for their results.

    Parameters off the device are updated in place, with gradients that left the device in the passes; what is on disk
    is read once the last of these is there.
    """
    tiers, params = _parts_of_rank(draft, rank, options)
    if not tiers:
        return []
    clipped = draft.add(rank, Action(Kind.CLIP), [norm])
    late = [place for place in tiers if not options.has_backward and params.get(place) == "host"]
    early = [place for place in tiers if options.backward_updates and place[1] < options.backward_updates[place[0]]]
    for place in (*late, *early):
        del tiers[place]
    done = add_late_updates(draft, rank, late) if late else []
    if options.delayed_update:
        return add_delayed_updates(draft, rank, tiers, clipped)
    if any(options.device_updates):
        return add_shared_updates(draft, rank, options, clipped)
    # An UPDATE is the instruction after CLIP that has the number of its part.
    updates = {place: clipped._replace(index=clipped.index + 1 + number) for number, place in enumerate(tiers)}
    arrived: dict[tuple[int, int], list[Wait]] = {place: [] for place in tiers}
    on_disk = [place for place, tier in tiers.items() if tier == "disk"]
    for parts, before, after in (
        ([place for place in tiers if place not in params], Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM),
        (on_disk, Kind.READ_STATE, Kind.WRITE_STATE),
    ):
        for action in copy_order(parts, before, after):
            place = action.stage, action.slice
            if action.kind == before:
                waits = before == Kind.OFFLOAD_GRAD or params.get(place) == "disk"
                arrived[place].append(draft.add(rank, action, [clipped] if waits else []))
            else:
                done.append(draft.add(rank, action, [updates[place]]))
    for (stage, part), waits in arrived.items():
        draft.add(rank, Action(Kind.UPDATE, stage, slice=part), waits)
    return done


def add_shared_updates(draft: ProgramDraft, rank: int, options: LoweringOptions, clipped: Wait) -> list[Wait]:
    """Add the updates that host and device share, and their copies; return the waits for their results.

    State comes to the device once that of the part before the last has left it.
    """
    sizes: tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]] = {}, {}
    for place in _parts_of_rank(draft, rank, options)[0]:
        stage, part = place
        sizes[options.device_updates[stage][part]][place] = options.part_sizes[stage][part] if options.part_sizes else 1
    by_host, by_device = (list(own) for own in sizes)
    updates = {place: Wait("host", number) for number, place in enumerate(by_host)}
    updates |= {place: clipped._replace(index=clipped.index + 1 + n) for n, place in enumerate(by_device)}
    arrived, returned = dict[tuple[int, int], Wait](), list[Wait]()
    left = list[Wait]()
    for action in shared_copy_order(*sizes):
        place = action.stage, action.slice
        if action.kind in (Kind.OFFLOAD_GRAD, Kind.RELOAD_STATE):
            is_late = action.kind == Kind.RELOAD_STATE and by_device.index(place) > PARTS_AHEAD
            arrived[place] = draft.add(rank, action, [clipped, *left[-1:]] if is_late else [clipped])
        else:
            returned.append(draft.add(rank, action, [updates[place]]))
            left += returned[-1:] if action.kind == Kind.OFFLOAD_STATE else []
    for kind, places in ((Kind.HOST_UPDATE, by_host), (Kind.DEVICE_UPDATE, by_device)):
        for stage, part in places:
            draft.add(rank, Action(kind, stage, slice=part), [arrived[stage, part]])
    return returned


def _parts_of_rank(
    draft: ProgramDraft, rank: int, options: LoweringOptions
) -> tuple[dict[tuple[int, int], Tier], dict[tuple[int, int], Tier]]:
    """Return the parts that a rank's host updates, by stage and number, with the place of their optimizer state, and
    those whose parameters are off the device with the place of these."""
    stages = [stage for stage, holder in enumerate(draft.schedule.placement) if holder == rank]
    tiers: dict[tuple[int, int], Tier] = {
        (stage, part): tier for stage in stages for part, tier in enumerate(options.host_updates[stage])
    }
    params: dict[tuple[int, int], Tier] = {
        (stage, part): tier
        for stage in stages
        for part, tier in enumerate(options.param_tiers[stage] if options.param_tiers else ())
        if tier != "none"
    }
    return tiers, params


def add_backward_updates(draft: ProgramDraft, rank: int, options: LoweringOptions) -> list[Wait]:
    """Add the updates by the host within the last backward of each stage, from its last layer to its first, with their
    copies; return the waits for their results.

    All of them may begin with that backward, in which each waits for its own gradients; the first layer's are complete
    once the backward, and what is copied beside it, is over.
    """
    tiers, params = _parts_of_rank(draft, rank, options)
    begin: dict[tuple[int, int], list[Wait]] = {}
    complete: dict[tuple[int, int], list[Wait]] = {}
    for stage, last in _last_backwards(draft.ranks[rank]["compute"]).items():
        for part in reversed(range(options.backward_updates[stage])):
            begin[stage, part] = [last._replace(index=last.index - 1)] if last.index else []
            complete[stage, part] = [] if part else [last, *draft.wait_copies_of(rank, Kind.LOAD_B, Kind.READ_B)]
    updates = {place: Wait("host", number) for number, place in enumerate(begin)}
    arrived: dict[tuple[int, int], list[Wait]] = {place: [] for place in begin}
    done: list[Wait] = []
    for parts, before, after in (
        ([place for place in begin if place not in params], Kind.OFFLOAD_GRAD, Kind.RELOAD_PARAM),
        ([place for place in begin if tiers[place] == "disk"], Kind.READ_STATE, Kind.WRITE_STATE),
    ):
        for action in copy_order(parts, before, after):
            place = action.stage, action.slice
            if action.kind == before:
                waits = begin[place] + (complete[place] if before == Kind.OFFLOAD_GRAD else [])
                arrived[place].append(draft.add(rank, action, waits))
            else:
                done.append(draft.add(rank, action, [updates[place]]))
    for place, waits in arrived.items():
        own = begin[place] + complete[place] + waits
        done.append(draft.add(rank, Action(Kind.BACKWARD_UPDATE, place[0], slice=place[1]), own))
    return done


def add_late_updates(draft: ProgramDraft, rank: int, late: Sequence[tuple[int, int]]) -> list[Wait]:
    """Add the updates that end the step before, of parameters in host memory, beside the passes: those of each stage in
    the order in which its passes use them, what lies outside of layers, the last part, first (ZO2, arXiv:2503.12668,
    whose device makes them). Return the waits for them.

    Within the pass each layer waits for its own; the pass itself begins after the first.
    """
    compute, waits = draft.ranks[rank]["compute"], list[Wait]()
    for stage in dict.fromkeys(stage for stage, _ in late):
        *layers, outside = [part for own, part in late if own == stage]
        first = len(waits)
        waits += [draft.add(rank, Action(Kind.LATE_UPDATE, stage, slice=part)) for part in (outside, *layers)]
        place = next(index for index, item in enumerate(compute) if item.action[:2] == (Kind.F, stage))
        compute[place] = compute[place]._replace(waits=(*compute[place].waits, waits[first]))
    return waits


def add_delayed_updates(
    draft: ProgramDraft, rank: int, tiers: Mapping[tuple[int, int], Tier], clipped: Wait
) -> list[Wait]:
    """Add the updates by the host with the gradients of the step before, beside the passes (`tiers`: by stage and
    part), and behind these the copies of their results and of this step's gradients; return the waits for them."""
    updates = {place: Wait("host", number) for number, place in enumerate(tiers)}
    on_disk = [place for place, tier in tiers.items() if tier == "disk"]
    read: dict[tuple[int, int], list[Wait]] = {place: [] for place in tiers}
    moved: list[Wait] = []
    order = carried_order(on_disk)
    of_other_steps = {order[0], order[-1]} if len(on_disk) > 1 else set()
    for action in order:
        place, is_own = (action.stage, action.slice), action not in of_other_steps
        waits = [updates[place]] if is_own and action.kind == Kind.WRITE_STATE else []
        moved.append(draft.add(rank, action, waits))
        if is_own and action.kind == Kind.READ_STATE:
            read[place].append(moved[-1])
    for (stage, part), waits in read.items():
        draft.add(rank, Action(Kind.DELAYED_UPDATE, stage, slice=part), waits)
    done = []
    for stage, part in tiers:
        waits = [updates[stage, part], clipped]
        returned = draft.add(rank, Action(Kind.RELOAD_PARAM, stage, slice=part), waits)
        done.append(draft.add(rank, Action(Kind.OFFLOAD_GRAD, stage, slice=part), [returned, clipped]))
    return done + moved  # the copies first: a rank waits in this order
