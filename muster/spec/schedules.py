"""Registry of pipeline schedules: each name with its function, its placement, and its facts for plan and planner.

A new schedule takes one file in `muster/schedule` and one line here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from muster.spec.errors import ConfigError
from muster.spec.stage_placement import bidirectional_placement, looped_placement, wave_placement
from muster.spec.suggest import did_you_mean


@dataclass(frozen=True, slots=True)
class PlannerTraits:
    """Facts of a schedule that the planner searches and bounds it by.

    Every default is safe: the planner doesn't try the schedule by itself, and its bounds hold for any order of passes.
    `tests/test_planner.py` holds the facts to the schedules themselves.
    """

    searchable: bool = False
    """True if the planner tries the schedule."""
    tried_late: bool = False
    """True if it is seldom the best: it is only tried for the shapes of the best plans, after the search for them."""
    for_slow_links: bool = False
    """True if it is tried late unless nodes or links differ: it hides slow transfers, at the price of memory."""
    slow_to_build: bool = False
    """True if it is put together pass by pass, which takes seconds for thousands of micro-batches."""
    low_bubble: bool = False
    """True if it keeps ranks busy enough to seed a search over slow links."""
    compared_with_chunks: int | None = None
    """Stages of a rank with which `muster plan` compares its best plan to this schedule; None: it doesn't."""
    max_in_flight: tuple[int, int] | None = None
    """(a, b): whatever passes take, at most a·n + b micro-batches are between the begin of their forward and the end of
    their backward on the n-th stage from the end. None where the order depends on times, or nothing is known."""
    weight_grad_delay: int = 0
    """c: on the n-th stage the weight backward of a micro-batch comes after the backward for inputs of the one that is
    c·n later, and before the forward that this backward makes room for; 0 where backwards are whole."""
    warmup_forwards: Callable[[int, int, int], int] | None = None
    """(rank, pp, micro_batches) → most forwards of the rank's first stage before any other pass; None: all of them."""
    deferred_weight_grads: Callable[[int, int, int], int] | None = None
    """(rank, pp, micro_batches) → micro-batches that each stage of the rank holds between I and W, at least, once the
    first backwards of all stages are over; None where nothing is known."""


NO_TRAITS = PlannerTraits()
"""Traits of a schedule that the planner doesn't try."""

LATE = PlannerTraits(searchable=True, tried_late=True)
"""Traits of a schedule that is tried late, and bounded by what holds for any order of passes."""

LATE_AND_SLOW = PlannerTraits(searchable=True, tried_late=True, slow_to_build=True)
"""The same for one that is slow to build."""


@dataclass(frozen=True, slots=True, eq=False)  # each stands once in SCHEDULES; told apart by identity, hashing is fast
class ScheduleEntry:
    """Registry entry of a schedule: its function, its explanation, and the placement of its stages."""

    function: str | Callable[..., Any]
    """Function from a ScheduleSpec to a Schedule: `file:function` of `muster/schedule`, imported when used, so that
    plans can be read without it; or a plugin's function itself."""
    explanation: str
    chunks: int | None = None
    """Stages per rank, over all replicas, if the schedule fixes them; None: any number."""
    replicas: int | None = 1
    """Copies of the model; the second begins at the other end of the ranks. None: one or two."""
    v_shaped: bool = False
    """True if stages run there and back over the ranks (0 1 2 2 1 0), not round and round (0 1 2 0 1 2)."""
    split_backward: bool = False
    """True if backwards are split into I (for inputs) and a later W (for weights)."""
    has_slices: bool = False
    """True if it also has an order for slices of sequences."""
    has_pairs: bool = False
    """True if it has forwards that may run as one with the backward after them (`muster.spec.pass_pairs`)."""
    usual_free_chunks: int = 2
    """Default for stages per rank, if the schedule leaves them free."""
    compared_chunks: tuple[int, ...] = ()
    """Stages per rank to compare if the caller leaves them open."""
    searched: bool = False
    """True if the order is searched for given times; its stages may then lie anywhere."""
    max_delay: Callable[[int, int, int], int] | None = None
    """(rank, pp, micro-batches of a step) → most steps by which the weights may be older that a pass of the rank uses,
    in an asynchronous schedule, whose steps follow each other without a flush; None: all passes use the newest ones."""
    mean_delay: Callable[[int, int, int], float] = lambda rank, pp, m: 0.0
    """(rank, pp, micro-batches of a step) → mean of these ages of weights between two flushes."""
    steps_alone: bool = False
    """True if in an asynchronous schedule each rank steps as soon as its own gradients are complete: it can't know
    those of other ranks, so that nothing is clipped or skipped."""
    stashes_weights: bool = True
    """False if in an asynchronous schedule backwards use the newest weights, and not those of their forwards, which
    ranks don't keep then."""
    min_micro_batches: Callable[[int], int] = lambda pp: 1
    """pp → fewest micro-batches of a step."""
    skips_stages: bool = False
    """True if micro-batches may skip stages, which changes what is trained."""
    swaps_end_stages: bool = False
    """True if half of the micro-batches pass through the first two stages with layers, and the last two, in the other
    order, which changes what is trained."""
    slow: bool = False
    """True if it may take a minute: made only when asked for by name."""
    planner: PlannerTraits = NO_TRAITS
    """Facts for the planner: whether to search it, and how to bound it."""

    @property
    def is_asynchronous(self) -> bool:
        """True if steps follow each other without a flush, on weights of several versions."""
        return self.max_delay is not None

    @property
    def has_paths(self) -> bool:
        """True if micro-batches don't all pass through all stages in turn."""
        return self.skips_stages or self.swaps_end_stages

    @property
    def default_chunks(self) -> int:
        return self.chunks or self.usual_free_chunks

    @property
    def default_replicas(self) -> int:
        return self.replicas or 1

    @property
    def min_chunks(self) -> int:
        """Smallest supported number of stages per rank: 2 for a V, and one of each replica."""
        return self.chunks or (2 if self.v_shaped else 1) * self.default_replicas

    def supports_chunks(self, chunks: int) -> bool:
        """Return True if the schedule runs with this number of stages per rank."""
        return chunks == self.chunks if self.chunks else chunks % self.min_chunks == 0


DEFAULT_MIN_VISITS = 0.25
"""Least share of the micro-batches that each stage sees where these skip stages, unless a plan says another."""

DEFAULT_SCHEDULE = "1f1b"
"""Schedule of a plan that names none; with one pipeline rank it is plain gradient accumulation."""
MAX_FLUSH_EVERY = 256
"""Most steps between two flushes of an asynchronous pipeline."""

SCHEDULES: dict[str, ScheduleEntry] = {
    "gpipe": ScheduleEntry(
        "gpipe:gpipe",
        "all forwards, then all backwards; bubble (p−1)(tF+tB), memory m",
        1,
        has_slices=True,
        planner=LATE,
    ),
    "1f1b": ScheduleEntry(
        "one_f_one_b:one_f_one_b",
        "one forward, one backward in turn; bubble (p−1)(tF+tB), memory p",
        1,
        has_slices=True,
        planner=PlannerTraits(searchable=True, compared_with_chunks=1, max_in_flight=(1, 0)),
    ),
    "interleaved": ScheduleEntry(
        "interleaved:interleaved",
        "1F1B over v stages per rank; bubble (p−1)(tF+tB)/v, memory p + (p−1)/v where p divides m",
        planner=PlannerTraits(
            searchable=True, compared_with_chunks=2, warmup_forwards=lambda rank, pp, m: -(-m // max(1, m // pp))
        ),
    ),
    "gis": ScheduleEntry(
        "gis:gis",
        "interleaved with a shorter warm-up; bubble (p−1)(tF+tB)/v, memory p where p divides m, less if limited",
        planner=LATE,
    ),
    "breadth-first": ScheduleEntry(
        "breadth_first:breadth_first",
        "GPipe over v stages per rank, few gathers; bubble (p−1)(tF+tB)/v, memory m",
        planner=LATE,
    ),
    "2bp-gpipe": ScheduleEntry(
        "two_bp:two_bp_gpipe",
        "GPipe with W deferred to the end; bubble (p−1)(tF+tI), memory m",
        1,
        split_backward=True,
        planner=LATE,
    ),
    "2bp-1f1b": ScheduleEntry(
        "two_bp:two_bp_1f1b",
        "1F1B with W deferred; bubble (p−1)(tF+tI), filled (p−1)(tF+tI−tW), memory m",
        1,
        split_backward=True,
        planner=LATE,
    ),
    "zb-h1": ScheduleEntry(
        "zero_bubble:zb_h1",
        "1F1B with W where a rank would idle; bubble (p−1)(tF+tI−tW), memory p",
        1,
        split_backward=True,
        planner=PlannerTraits(
            searchable=True,
            compared_with_chunks=1,
            max_in_flight=(1, 0),
            weight_grad_delay=1,
            deferred_weight_grads=lambda rank, pp, m: min(rank + 1, m),
        ),
    ),
    "zb-h2": ScheduleEntry(
        "zero_bubble:zb_h2",
        "a deeper warm-up, no bubble within a rank's span; bubble (p−1)tF from m = 2p−2 on, memory 2p−1",
        1,
        split_backward=True,
        planner=PlannerTraits(
            searchable=True,
            for_slow_links=True,
            low_bubble=True,
            max_in_flight=(2, -1),
            weight_grad_delay=2,
            deferred_weight_grads=lambda rank, pp, m: min(2 * rank + 1, m),
        ),
    ),
    "zb-v": ScheduleEntry(
        "zb_v:zb_v",
        "two stages per rank as a V, no bubble within a rank's span; bubble (p−1)tF/2 from m = 3p/2 on, memory p",
        2,
        v_shaped=True,
        split_backward=True,
        planner=PlannerTraits(
            searchable=True,
            slow_to_build=True,
            low_bubble=True,
            compared_with_chunks=2,
            max_in_flight=(1, 0),
            warmup_forwards=lambda rank, pp, m: min(m, 2 * (pp - rank) - 1),
            deferred_weight_grads=lambda rank, pp, m: max(0, rank - max(0, 2 * pp - 1 - m)),
        ),
    ),
    "v-half": ScheduleEntry(
        "v_blocks:v_half",
        "V from building blocks; bubble about half of 1F1B's, memory p/2 + 1",
        2,
        v_shaped=True,
        split_backward=True,
        planner=PlannerTraits(searchable=True, slow_to_build=True, warmup_forwards=lambda rank, pp, m: min(m, pp + 2)),
    ),
    "v-min": ScheduleEntry(
        "v_blocks:v_min",
        "V from building blocks; bubble about ⅔ of 1F1B's, memory about p/3 + 1",
        2,
        v_shaped=True,
        split_backward=True,
        planner=LATE_AND_SLOW,
    ),
    "v-zb": ScheduleEntry(
        "v_blocks:v_zb",
        "V from building blocks, placed by the given times; bubble (p−1)tF/2, memory p",
        2,
        v_shaped=True,
        split_backward=True,
        planner=LATE_AND_SLOW,
    ),
    "hanayo": ScheduleEntry(
        "hanayo:hanayo",
        "v/2 waves, nothing to send where they turn; bubble about 4(p−1)tF/v and memory p at m = p, else up to 2p−1",
        v_shaped=True,
        planner=LATE_AND_SLOW,
    ),
    "bitpipe": ScheduleEntry(
        "bitpipe:bitpipe",
        "two V-shaped replicas; bubble (p−2)tF(1+(m/p−1)/2) where p divides m, memory p, weights twice",
        4,
        replicas=2,
        v_shaped=True,
        planner=LATE,
    ),
    "dualpipe": ScheduleEntry(
        "dualpipe:dualpipe",
        "two replicas; bubble (p/2−1)(tF+tI−tW) for even m from 2p on, memory p + 1, weights twice",
        2,
        replicas=2,
        split_backward=True,
        has_pairs=True,
        planner=LATE,
    ),
    "dualpipe-v": ScheduleEntry(
        "dualpipe:dualpipe_v",
        "DualPipe cut in half: a V; bubble (p−1)(tF+tI−tW)/2 from m = 2p on, memory p + ½",
        2,
        v_shaped=True,
        split_backward=True,
        has_pairs=True,
        planner=LATE,
    ),
    "zeropp": ScheduleEntry(
        "zeropp:zeropp",
        "breadth-first in units with split backwards; bubble (p−1)(tF+tI)/v, memory 2p where p divides m",
        split_backward=True,
        planner=LATE_AND_SLOW,
    ),
    "pipedream-2bw": ScheduleEntry(
        "pipedream:pipedream_2bw",
        "1F1B without a flush between steps, weights one step old; bubble (p−1)(tF+tB)/steps, memory p, weights twice",
        1,
        max_delay=lambda rank, pp, m: 1,
        mean_delay=lambda rank, pp, m: 1.0,
        min_micro_batches=lambda pp: pp,
    ),
    "pipedream": ScheduleEntry(
        "pipedream:pipedream",
        "1F1B without a flush, ranks step alone; bubble (p−1)(tF+tB)/steps, memory p, weights up to p times",
        1,
        max_delay=lambda rank, pp, m: -((rank + 1 - pp) // m),
        mean_delay=lambda rank, pp, m: (pp - 1 - rank) / m,
        steps_alone=True,
    ),
    "pipelined-backprop": ScheduleEntry(
        "pipedream:pipelined_backprop",
        "pipedream without older weights: backwards use the newest; bubble (p−1)(tF+tB)/steps, memory p, weights once",
        1,
        max_delay=lambda rank, pp, m: -((rank + 1 - pp) // m),
        mean_delay=lambda rank, pp, m: (pp - 1 - rank) / m,
        steps_alone=True,
        stashes_weights=False,
    ),
    "skippipe": ScheduleEntry(
        "skippipe:skippipe",
        "micro-batches skip stages, which changes what is trained; bubble as 1f1b's on shorter paths, memory p",
        usual_free_chunks=1,
        searched=True,
        skips_stages=True,
    ),
    "checkfree-plus": ScheduleEntry(
        "checkfree_plus:checkfree_plus",
        "half of the micro-batches swap the first two stages with layers, and the last two, which changes what is"
        " trained; bubble above that of 1f1b, memory p",
        1,
        searched=True,
        swaps_end_stages=True,
    ),
    "auto": ScheduleEntry(
        "registry:auto_schedule",
        "the best of all these and of a search, for the given times; least bubble found, memory within the limit",
        replicas=None,
        compared_chunks=(1, 2, 4),
        searched=True,
    ),
    "auto-bidirectional": ScheduleEntry(
        "registry:auto_schedule",
        "auto over two replicas; least bubble found, memory within the limit, weights twice",
        replicas=2,
        compared_chunks=(2, 4),
        searched=True,
    ),
    "exact": ScheduleEntry(
        "registry:exact_schedule",
        "proven best, or how far from it, in a minute (needs OR-Tools); least bubble, memory within the limit",
        usual_free_chunks=1,
        searched=True,
        slow=True,
    ),
}
"""Schedules by name; short names of plans drop the hyphens. Memory in the explanations is that of the fullest rank, in
activations of one micro-batch on one rank's share of the model."""


def find_schedule(name: str) -> ScheduleEntry:
    """Return the entry of a schedule. Raises ConfigError for an unknown name."""
    if name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}{did_you_mean(name, SCHEDULES)}")
    return SCHEDULES[name]


@lru_cache
def stage_placement(entry: ScheduleEntry, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, replica by replica, for `chunks` stages per rank."""
    one = (wave_placement if entry.v_shaped else looped_placement)(num_ranks, chunks // entry.default_replicas)
    return one if entry.default_replicas == 1 else bidirectional_placement(one, num_ranks)
