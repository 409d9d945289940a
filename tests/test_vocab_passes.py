"""Vocabulary parallelism: its mathematics, its order of work, its cost."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.cost.time.op_times import OpTimes
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import stage_layouts
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, ProgramError, parse_program
from muster.schedule.registry import SCHEDULES, make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.vocab_passes import VocabTimes
from muster.simulate.simulator import simulate
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload
from tests.ranks import run_ranks

ONE_REPLICA = [
    name for name, entry in SCHEDULES.items() if entry.replicas == 1 and name not in ("auto", "exact", "checkfree-plus")
]
WORDS = VocabTimes(embedding=0.05, logits=0.5, backward=0.25)
MODEL = ModelSpec(
    vocab_size=128_256, hidden_size=1024, num_layers=16, num_heads=16, num_kv_heads=4, intermediate_size=4096
)
WORKLOAD = Workload(seq_len=1024, global_batch_size=16)


def test_loss_and_gradients_equal_the_whole_ones() -> None:
    """Equality in float64 to 1e-12, for vocabularies that the ranks divide evenly or not."""
    for num_ranks, words in ((2, [2, 3, 64]), (4, [4, 7, 10, 257])):
        payload = {"words": words, "z_loss": 0.1, "fault": False}
        for found in run_ranks(num_ranks, "tests.vocab_parallel_ranks:errors", payload):
            assert max(found) < 1e-12
    shifted = run_ranks(2, "tests.vocab_parallel_ranks:errors", {"words": [64], "z_loss": 0.1, "fault": True})
    assert max(max(found) for found in shifted) > 1e-3


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ONE_REPLICA), st.integers(1, 8), st.integers(1, 16), st.floats(0, 2), st.floats(0, 2))
def test_woven_programs_can_be_run(name: str, ranks: int, micro_batches: int, score: float, backward: float) -> None:
    """Any schedule, whatever its words take; at most one micro-batch more is kept on any rank."""
    try:
        schedule = make_schedule(name, ScheduleSpec(ranks, micro_batches, SCHEDULES[name].default_chunks))
    except InfeasibleError:
        return
    words = VocabTimes(logits=score, backward=backward)
    plain, woven = (check(lower(schedule, LoweringOptions("z1", 2, vocab_times=times))) for times in (None, words))
    for before, after in zip(plain.peak_activations, woven.peak_activations, strict=True):
        assert after <= before + 1


@pytest.mark.parametrize("name", ONE_REPLICA)
def test_words_cost_their_own_time_alone(name: str) -> None:
    """No rank waits for words: with equal parts on all ranks the makespan grows by what one rank's words take, and a
    hop's worth of filling at most."""
    chunks = SCHEDULES[name].default_chunks
    schedule = make_schedule(name, ScheduleSpec(4, 16, chunks))
    part = 1 / chunks
    seconds = {("F", -1): part, ("B", -1): 2 * part, ("I", -1): part, ("W", -1): part}
    seconds |= {(kind, -1): WORDS.of_kind(kind) for kind in ("EMB_F", "S", "T", "EMB_W")}
    plain, woven = (
        simulate(lower(schedule, LoweringOptions(vocab_times=words)), OpTimes(seconds)).makespan_s
        for words in (None, WORDS)
    )
    assert woven - plain < 16 * sum(WORDS.of_kind(kind) for kind in ("EMB_F", "S", "T", "EMB_W")) + 0.5


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("0EMB_F1 ", ""), "0EMB_F1 is missing on rank 0"),
        (
            ("0S0@collective:3", "0S0"),
            "0S0 on rank 0 reads the hidden state under the head before 0HIDDEN_BCAST0 is known to be over",
        ),
        (
            ("1B0@collective:4", "1B0"),
            "1B0 on rank 1 reads the gradient of its output before 1LOGIT_STATS0 is known to be over",
        ),
        (("0HIDDEN_BCAST0 0LOGIT_STATS0@compute:5", "0LOGIT_STATS0@compute:5 0HIDDEN_BCAST0"), "deadlock"),
        (("0F0@collective:0", "0F0"), "0F0 on rank 0 reads its input before 0EMB_REDUCE0 is known to be over"),
    ],
)
def test_wrong_words_are_refused(change: tuple[str, str], problem: str) -> None:
    text = str(lower(make_schedule("1f1b", ScheduleSpec(2, 3)), LoweringOptions(vocab_times=WORDS)))
    assert str(parse_program(text)) == text
    assert text.count(change[0]) == 1
    with pytest.raises(ProgramError, match=problem):
        check(parse_program(text.replace(*change)))


def test_missing_words_are_refused() -> None:
    text = str(lower(make_schedule("gpipe", ScheduleSpec(2, 2)), LoweringOptions(vocab_times=WORDS)))
    with pytest.raises(ProgramError, match="1T1 is missing on rank 1"):
        check(parse_program(re.sub(r" 1T1\S*", "", text)))


def test_busiest_rank_is_near_the_mean() -> None:
    """Imbalance by the sizes of matmuls; without vocabulary parallelism the last rank has twice the work of the
    others."""
    spread, plain = (_imbalance(parse_plan_name(name, Plan())) for name in ("pp4-mb1-vocab", "pp4-mb1"))
    assert spread < 1.05 < 1.5 < plain


def _imbalance(plan: Plan) -> float:
    """The busiest rank's compute time over the mean."""
    program = build_program(plan, MODEL, WORKLOAD)
    seconds: dict[tuple[str, int], float] = {}
    for stage in range(plan.num_stages):
        held = {layout.name: layout.numel for layout in stage_layouts(MODEL, plan, stage, coordinates_of(plan, stage))}
        head = held.pop("head.weight", 0)
        held.pop("embed.weight", 0)
        layers = sum(held.values()) + (0 if plan.vocab_parallel else head)
        seconds |= {("F", stage): layers, ("B", stage): 2 * layers, ("S", stage): 2 * head, ("T", stage): head}
    work = _work(program, OpTimes(seconds))
    return max(work) * len(work) / sum(work)


def _work(program: Program, times: OpTimes) -> list[float]:
    events = [event for event in simulate(program, times).events if event.lane == "compute"]
    ranks = range(program.num_ranks)
    return [sum(event.end_s - event.start_s for event in events if event.rank == rank) for rank in ranks]


def test_unsupported_vocabulary_parallelism_is_refused() -> None:
    for name, reason in (
        ("tp2-pp2-vocab", "tensor parallelism"),
        ("dp2-pp2-vocab", "under z3"),
    ):
        assert any(reason in problem for problem in unsupported_features(parse_plan_name(name, Plan())))
    for name, words, reason in (
        ("dp4-vocab", 99, "pp is 1"),
        ("pp4-vocab", 9, "leaves a rank without any"),
        ("dp2-pp2v2-z1-sdualpipe-vocab", 99, "one replica, but schedule dualpipe runs two"),
    ):
        model, plan = MODEL.model_copy(update={"vocab_size": words}), parse_plan_name(name, Plan())
        with pytest.raises(InfeasibleError, match=reason):
            require_runnable(plan, model, WORKLOAD, 4)
    assert format_plan_name(parse_plan_name("pp4-mb2-vocab-bf16", Plan())) == "pp4-mb2-vocab-bf16"


def test_shards_cover_every_word_once() -> None:
    plan = parse_plan_name("pp2v2-szbv-dp2-vocab", Plan())
    for name in ("embed.weight", "head.weight"):
        layouts = [
            layout
            for rank in range(4)
            for stage in range(4)
            for layout in stage_layouts(MODEL, plan, stage, coordinates_of(plan, rank))
            if layout.name == name and plan.pp_rank(stage) == coordinates_of(plan, rank).pp
        ]
        assert sum(layout.numel for layout in layouts if layout.copy_index == 0) == MODEL.vocab_size * MODEL.hidden_size
