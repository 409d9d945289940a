"""Lowering: passes that turn a Schedule into a Program by adding what the ranks say to each other, and the step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from muster.schedule.action import KINDS, LANES, Action, Kind, Lane
from muster.schedule.gc_pause import gc_paused
from muster.schedule.offload import add_copy_lane
from muster.schedule.program import Instruction, Program, Wait
from muster.schedule.schedule import Schedule
from muster.schedule.transfers import lanes_with_transfers
from muster.schedule.vocab_passes import VocabSchedule, VocabTimes, add_vocab_passes
from muster.spec.plan import ZeroLevel


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """What a schedule is lowered for."""

    zero: ZeroLevel = "z3"
    data_ranks: int | tuple[int, ...] = 1
    """Data-parallel ranks of every stage, or of each: with one there is nothing to gather or to reduce."""
    tp_replicated_weights: bool = False
    """Whether tensor-parallel ranks have copies of a weight whose gradients they must add up."""
    tied_embeddings: bool = False
    """Whether first and last stage share a weight."""
    vocab_times: VocabTimes | None = None
    """Where the vocabulary is spread over all pipeline ranks: what its passes take."""
    post_validation: bool = False
    """Whether a step is taken before the sum over all ranks is known."""
    offload: frozenset[int] = frozenset()
    """Stages whose activations wait for their backward in the host's memory, where that is long enough."""
    train: bool = True
    """False: no gradients are reduced and no optimizer steps."""

    def is_sharded(self, stage: int) -> bool:
        """Whether the stage's data-parallel ranks have anything to say to each other."""
        return (self.data_ranks if isinstance(self.data_ranks, int) else self.data_ranks[stage]) > 1


@dataclass(slots=True)
class ProgramDraft:
    """A Program in the making: lanes to which a pass may add at the end, so that what is there keeps its place."""

    schedule: Schedule
    vocab_schedule: VocabSchedule | None = None
    """The schedule with words, where they are spread."""
    ranks: list[dict[Lane, list[Instruction]]] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [{lane: [] for lane in LANES} for _ in self.schedule.ranks]
        ends_s = self.vocab_schedule.ends_s if self.vocab_schedule else None
        for rank, both in enumerate(lanes_with_transfers(self.schedule, ends_s)):
            if self.vocab_schedule:
                both = _insert_vocab_passes(self.vocab_schedule.orders[rank], *both)
            self.ranks[rank]["compute"], self.ranks[rank]["p2p"] = both

    def add(self, rank: int, action: Action, waits: Sequence[Wait] = (), peer: int | None = None) -> Wait:
        """Appends an instruction to its lane; returns how others wait for it."""
        lane = KINDS[action.kind].lane
        self.ranks[rank][lane].append(Instruction(action, peer, tuple(waits)))
        return Wait(lane, len(self.ranks[rank][lane]) - 1)

    def wait_all_passes(self, rank: int) -> list[Wait]:
        """What waits for the last of a rank's passes waits for all."""
        return [Wait("compute", len(self.ranks[rank]["compute"]) - 1)] if self.ranks[rank]["compute"] else []

    def wait_collectives(self, rank: int, *kinds: Kind) -> list[Wait]:
        """The rank's collectives of these kinds."""
        lane = self.ranks[rank]["collective"]
        return [Wait("collective", index) for index, item in enumerate(lane) if item.action.kind in kinds]

    def finish(self) -> Program:
        """The Program."""
        schedule = self.schedule
        ranks: tuple[dict[Lane, tuple[Instruction, ...]], ...] = tuple(
            {lane: tuple(items) for lane, items in lanes.items() if items} for lanes in self.ranks
        )
        return Program(schedule.name, schedule.placement, schedule.num_micro_batches, ranks, schedule.replicas)


def lower(schedule: Schedule, options: LoweringOptions) -> Program:
    """The Program of one round. Raises ProgramError where the schedule's order can't be followed."""
    with gc_paused():
        woven = add_vocab_passes(schedule, options.vocab_times) if options.vocab_times else None
        draft = ProgramDraft(woven.schedule if woven else schedule, woven)
        add_unshards(draft, options)
        if woven:
            add_vocab_collectives(draft, woven)
        if options.train:
            for lanes in draft.ranks if options.offload else ():
                lanes["compute"], lanes["host_copy"] = add_copy_lane(lanes["compute"], options.offload)
            add_grad_reductions(draft, options)
            if options.tp_replicated_weights:
                add_replicated_grad_reductions(draft)
            if schedule.replicas > 1:
                add_replica_reductions(draft)
            if options.tied_embeddings:
                add_tied_embedding_reductions(draft)
            add_step(draft, options)
        return draft.finish()


def _last_backwards(compute: Sequence[Instruction]) -> dict[int, Wait]:
    """Stage → its last backward on a rank, in the order in which they come."""
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
    """Both lanes, with the words' passes of `order` between those of the schedule."""
    passes = {item.action: item for item in compute}
    place = {action: index for index, action in enumerate(order)}
    places = [place[item.action] for item in compute]
    moved = [item._replace(waits=tuple(wait._replace(index=places[wait.index]) for wait in item.waits)) for item in p2p]
    return [passes.get(action) or Instruction(action) for action in order], moved


def add_vocab_collectives(draft: ProgramDraft, vocab_schedule: VocabSchedule) -> None:
    """What brings the ranks' words together, in one order on all ranks, and the waits for it.

    It begins when its rank has done its part; the others begin to receive when what comes before it has begun.
    """
    placement = draft.schedule.placement
    for rank, lanes in enumerate(draft.ranks):
        place = {item.action: index for index, item in enumerate(lanes["compute"])}
        own, last = placement.index(rank), len(placement) - 1
        gives: dict[Kind, list[tuple[Kind, int]]] = {
            Kind.EMB_REDUCE: [(Kind.EMB_F, own)],
            Kind.HIDDEN_BCAST: [(Kind.F, last)],
            Kind.LOGIT_STATS: [(Kind.S, own)],
            Kind.EMB_GRAD_BCAST: [(Kind.B, 0), (Kind.I, 0)],
        }
        takes: dict[Kind, list[tuple[Kind, int]]] = {
            Kind.EMB_REDUCE: [(Kind.F, 0)],
            Kind.HIDDEN_BCAST: [(Kind.S, own)],
            Kind.LOGIT_STATS: [(Kind.B, last), (Kind.I, last), (Kind.T, own)],
            Kind.EMB_GRAD_BCAST: [(Kind.EMB_W, own)],
        }
        for kind, unit in vocab_schedule.collectives:
            givers, takers = (
                [place[action] for end in ends[kind] if (action := Action(*end, unit)) in place]
                for ends in (gives, takes)
            )
            wait = draft.add(rank, Action(kind, own, unit), [Wait("compute", giver) for giver in givers])
            for taker in takers:
                item = lanes["compute"][taker]
                lanes["compute"][taker] = item._replace(waits=(*item.waits, wait))


def add_unshards(draft: ProgramDraft, options: LoweringOptions) -> None:
    """z1, z2: a stage's parameters are gathered before its first pass and stay so until the step; z3 gathers inside the
    passes."""
    if options.zero == "z3":
        return
    for rank, lanes in enumerate(draft.ranks):
        compute = lanes["compute"]
        first: dict[int, int] = {}
        for index in range(len(compute) - 1, -1, -1):
            first[compute[index].action.stage] = index
        for stage in sorted(first, key=first.__getitem__):
            if options.is_sharded(stage):
                item, gathered = compute[first[stage]], draft.add(rank, Action(Kind.UNSHARD, stage))
                compute[first[stage]] = item._replace(waits=(*item.waits, gathered))


def add_grad_reductions(draft: ProgramDraft, options: LoweringOptions) -> None:
    """z1: a stage's gradients are reduced once, after its last backward; z2, z3 reduce inside the passes.

    With words, after all passes of the rank: collectives of words, which other ranks may not have come to, would stand
    before it.
    """
    if options.zero == "z1":
        for rank, lanes in enumerate(draft.ranks):
            for stage, last in _last_backwards(lanes["compute"]).items():
                if options.is_sharded(stage):
                    draft.add(
                        rank,
                        Action(Kind.REDUCE_GRAD, stage),
                        draft.wait_all_passes(rank) if draft.vocab_schedule else [last],
                    )


def add_replicated_grad_reductions(draft: ProgramDraft) -> None:
    """Adds up the gradients of tensor-parallel copies, when those of the stage are complete."""
    for rank, lanes in enumerate(draft.ranks):
        reduced = {
            lanes["collective"][wait.index].action.stage: wait
            for wait in draft.wait_collectives(rank, Kind.REDUCE_GRAD)
        }
        for stage, last in _last_backwards(lanes["compute"]).items():
            draft.add(rank, Action(Kind.ALL_REDUCE_TP, stage), [reduced.get(stage, last)])


def add_replica_reductions(draft: ProgramDraft) -> None:
    """The replicas' holders of the same layers add up their gradients; n MERGE is the n-th stage of each replica.

    After all passes of the rank, since the other holder may need them first; by depth on all ranks alike, so that no
    two wait for each other.
    """
    placement, depth = draft.schedule.placement, draft.schedule.depth
    ready = [
        draft.wait_all_passes(rank) + draft.wait_collectives(rank, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP)
        for rank in range(len(draft.schedule.ranks))
    ]
    for stage in range(depth):
        one, other = placement[stage], placement[stage + depth]
        draft.add(one, Action(Kind.ALL_REDUCE_REPLICAS, stage), ready[one], None if one == other else other)
        if one != other:
            draft.add(other, Action(Kind.ALL_REDUCE_REPLICAS, stage), ready[other], one)


def add_tied_embedding_reductions(draft: ProgramDraft) -> None:
    """First and last stage of each replica add up the gradients of the weight they share, if they lie on two ranks.

    Only after all passes of the rank: the partner may need them first.
    """
    placement, depth = draft.schedule.placement, draft.schedule.depth
    for first in range(0, len(placement), depth):
        for stage, other in ((first, first + depth - 1), (first + depth - 1, first)):
            rank, partner = placement[stage], placement[other]
            if rank != partner:
                after = draft.wait_all_passes(rank) + draft.wait_collectives(
                    rank, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS
                )
                draft.add(rank, Action(Kind.ALL_REDUCE_TIED, stage), after, partner)


def add_step(draft: ProgramDraft, options: LoweringOptions) -> None:
    """The gradient norm over all ranks when every gradient is complete, then the optimizer step; or, with
    post-validation, the step at once, while the norm is added up beside the next step's passes."""
    kind = Kind.GRAD_NORM_ASYNC if options.post_validation else Kind.GRAD_NORM
    for rank in range(len(draft.ranks)):
        after = draft.wait_all_passes(rank) + draft.wait_collectives(
            rank, Kind.REDUCE_GRAD, Kind.ALL_REDUCE_TP, Kind.ALL_REDUCE_REPLICAS, Kind.ALL_REDUCE_TIED
        )
        draft.add(rank, Action(Kind.STEP), [draft.add(rank, Action(kind), after)])
