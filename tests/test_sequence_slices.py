"""Sequence slices as units of a pipeline: equal work, bubble, parity with one process, times, memory, refusals."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from muster.cli.memory_check import _compare
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.layout.sequence_slices import forward_work, num_offloaded_layers, sequence_slices
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.lower import LoweringOptions, lower
from muster.schedule.program import Program, ProgramError, format_program, parse_program
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.schedule.serialization import schedule_from_json, schedule_to_json
from muster.schedule.timing import time_schedule
from muster.simulate.predict import predict
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from tests.ranks import run_ranks
from tests.sampling import quick_sample
from tests.test_comm_volume import assert_bytes_equal
from tests.test_context_parallel import in_float64
from tests.test_parity import cache, check_parity, run  # noqa: F401

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"plan": "pp2-slice4", "profile": True},
        {"plan": "pp2-slice4-oact", "profile": True},
        {"plan": "pp2-slice2-sgpipe", "tied": True, "z_loss": 0.1},
        {"plan": "pp2-slice3-rfull", "family": "gpt2", "profile": True},
        {"plan": "pp2-slice4-relem-mb2", "family": "qwen3", "packing": "document_mask"},
        {"plan": "pp2-slice2", "family": "gemma2", "packing": "none"},
        {"plan": "pp2-slice4", "family": "gemma3", "tied": True, "packing": "next_fit"},
        {"plan": "pp2-slice3-l1.3", "family": "gpt_neox", "kv_heads": 4},
        {"plan": "pp2-slice2-tile2", "family": "olmo2"},
        {"plan": "pp2-slice5-oact-sgpipe-rfull", "family": "gpt2", "layers": 8, "profile": True},
        {"plan": "pp2-slice4-relem-mb2-oact", "family": "qwen3", "packing": "document_mask"},
    ],
    4: [
        {"plan": "pp4-slice4", "profile": True},
        {"plan": "tp2-sp-pp2-slice4", "tied": True, "profile": True},
        {"plan": "tp2-pp2-slice3-rfull-mb2", "family": "qwen3", "packing": "none"},
        {"plan": "dp2-pp2-slice4-z1"},
        {"plan": "dp2-pp2-slice2-z2", "profile": True},
        {"plan": "dp2-pp2-slice4-z3-rfull", "tied": True},
        {"plan": "pp4-slice8-sgpipe-rfull", "z_loss": 0.1},
        {"plan": "dp2-pp2-slice2-z1-uneven3.1"},
        {"plan": "tp2-sp-pp2-slice4-oact", "packing": "next_fit", "profile": True},
        {"plan": "dp2-pp2-slice4-z3-rfull-oact", "tied": True},
    ],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    sample = CASES[num_ranks][: 4 // num_ranks] + random.Random(num_ranks).sample(CASES[num_ranks][2:], 1)
    found = check_parity(num_ranks, in_float64(sample), cache)
    if num_ranks == 2:
        for on_device, offloaded in zip(*found[:2], strict=True):
            assert (on_device["losses"], on_device["parameters"]) == (offloaded["losses"], offloaded["parameters"])
            assert offloaded["memory"]["activations"] < on_device["memory"]["activations"]


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


@pytest.mark.soak
def test_a_slice_that_does_not_return_from_the_host_is_found(cache: Path) -> None:  # noqa: F811
    (found,) = run(2, in_float64([{"plan": "pp2-slice4-oact", "fault": "lost reload"}]), cache)
    assert max(rank["gradient_error"] for rank in found) > 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# Cuts and schedules


@pytest.mark.parametrize(("model", "seq_len"), [("llama3-8b", 131_072), ("gemma-3-1b", 32_768), ("tiny", 4096)])
@pytest.mark.parametrize("num_slices", [2, 4, 7, 16])
def test_slices_have_equal_work(model: str, seq_len: int, num_slices: int) -> None:
    spec = load_model(model)
    plan = parse_plan_name(f"tp2-sp-pp2-slice{num_slices}")
    slices = sequence_slices(spec, plan, seq_len)
    assert [position for part in slices for position in part] == list(range(seq_len))
    assert all(len(part) % 2 == 0 for part in slices)
    work = [forward_work(spec, part.stop) - forward_work(spec, part.start) for part in slices]
    assert max(work) <= min(work) * 1.01 + 4 * forward_work(spec, seq_len) / seq_len
    lengths = [len(part) for part in slices]
    assert lengths == sorted(lengths, reverse=True) or max(lengths) - min(lengths) <= 2


def test_every_slice_of_a_short_sequence_has_positions() -> None:
    plan = parse_plan_name("pp2-slice5")
    assert [len(part) for part in sequence_slices(load_model("tiny"), plan, 5)] == [1] * 5


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("ranks", "micro_batches", "num_slices"), [(2, 1, 4), (4, 1, 16), (4, 3, 4), (8, 16, 2)])
def test_bubble_and_memory_are_those_of_the_papers(name: str, ranks: int, micro_batches: int, num_slices: int) -> None:
    spec = ScheduleSpec(ranks, micro_batches, num_slices=num_slices)
    schedule = make_schedule(name, spec)
    timing = time_schedule(schedule, spec)
    assert timing.bubble_s / timing.work_s[0] == pytest.approx((ranks - 1) / (num_slices * micro_batches))
    most = micro_batches if name == "gpipe" else min(micro_batches, (ranks + num_slices - 1) / num_slices)
    assert max(timing.peak_activation) == pytest.approx(most)
    program = lower(schedule, LoweringOptions(zero="z1", data_ranks=2))
    assert max(check(program).peak_activations) == round(most * num_slices)
    assert parse_program(format_program(program)) == program
    assert schedule_from_json(schedule_to_json(schedule, timing)) == schedule


def test_executed_bubble_is_that_of_the_formula() -> None:
    """Four processes, a logical clock, and slices of a long sequence whose passes take what their FLOPs take."""
    model = load_model("llama3-8b")
    for num_slices in (4, 16):
        plan = parse_plan_name(f"pp4-slice{num_slices}")
        slices = sequence_slices(model, plan, 131_072)
        work = [forward_work(model, part.stop) - forward_work(model, part.start) for part in slices]
        seconds = [one / sum(work) for one in work]
        found = run_ranks(4, "tests.logical_clock:run_slices", {"seconds": seconds})
        bubble = max(end_s for end_s, _ in found) / max(busy_s for _, busy_s in found) - 1
        assert bubble == pytest.approx(3 / num_slices, rel=0.05)


def swapped(program: Program, one: Action, other: Action) -> Program:
    """The program with two passes of rank 0 in each other's places."""
    lane = list(program.ranks[0]["compute"])
    places = [next(index for index, item in enumerate(lane) if item.action == action) for action in (one, other)]
    first, second = (lane[place] for place in places)
    lane[places[0]] = first._replace(action=second.action)
    lane[places[1]] = second._replace(action=first.action)
    ranks = ({**program.ranks[0], "compute": tuple(lane)}, *program.ranks[1:])
    return Program(program.schedule, program.placement, program.num_micro_batches, ranks, num_slices=2)


def test_checker_refuses_slices_in_another_order() -> None:
    program = lower(make_schedule("gpipe", ScheduleSpec(2, 1, num_slices=2)), LoweringOptions())
    with pytest.raises(ProgramError, match="0F0.1 on rank 0 comes before 0F0, whose keys and values it reads"):
        check(swapped(program, Action(Kind.F, 0, 0, 0), Action(Kind.F, 0, 0, 1)))
    with pytest.raises(ProgramError, match="0B0 on rank 0 comes before 0B0.1, which adds to the gradients"):
        check(swapped(program, Action(Kind.B, 0, 0, 0), Action(Kind.B, 0, 0, 1)))


def test_other_schedules_say_that_they_have_no_order() -> None:
    with pytest.raises(InfeasibleError, match="zb-h1 has no order for slices"):
        make_schedule("zb-h1", ScheduleSpec(2, 4, num_slices=2))


# ----------------------------------------------------------------------------------------------------------------------
# Predictions and refusals


@pytest.mark.parametrize(
    ("name", "seq_len"),
    quick_sample(
        [
            ("pp2-slice4", 4096),
            ("pp2-slice4-rfull", 4096),
            ("pp2-slice8-oact", 4096),
            ("tp2-sp-pp2-slice8-relem", 4096),
            ("pp2-slice4-rfull", 1024),
        ],
        4,
    ),
)
def test_forecast_is_what_pytorch_counts(name: str, seq_len: int) -> None:
    model = ModelSpec(
        vocab_size=2000, hidden_size=128, num_layers=4, num_heads=8, num_kv_heads=4, intermediate_size=512
    )
    for found in _compare(
        model, parse_plan_name(name), Workload(seq_len=seq_len, global_batch_size=3), real=False, optim=None
    ):
        assert abs(found.difference) < 0.05, name


@pytest.mark.soak
def test_step_bytes_equal_the_formula(tmp_path: Path) -> None:
    assert_bytes_equal(2, [("pp2-slice4", True), ("pp2-slice4-oact", True)], tmp_path)
    cases: list[tuple[Any, ...]] = [(f"dp2-pp2-slice3-{zero}", True) for zero in ("z1", "z2", "z3")]
    assert_bytes_equal(4, [*cases, ("tp2-sp-pp2-slice4-rfull", False)], tmp_path)


def test_slices_shrink_the_predicted_bubble_and_peak() -> None:
    model, cluster = load_model("llama3-8b"), load_cluster("8xh100")
    workload = Workload(seq_len=65_536, global_batch_size=2)
    whole, cut = (predict(model, parse_plan_name(name), workload, cluster) for name in ("pp8", "pp8-slice8"))
    assert cut.step_time_s < 0.5 * whole.step_time_s
    assert cut.bubble_fraction < 0.5 * whole.bubble_fraction
    peaks = [max(rank.terms.activations for rank in one.forecast.ranks) for one in (whole, cut)]
    assert peaks[1] < peaks[0]


def test_offload_keeps_the_bytes_on_the_device_constant() -> None:
    """M_i = M_(i-1) + A_i - α_(i-1) A_(i-1), up to the layer by which a share is rounded up."""
    model, num_layers = load_model("llama3-8b"), 16
    lengths = [len(part) for part in sequence_slices(model, parse_plan_name("pp2-slice8"), 131_072)]
    held = [num_layers * lengths[0]]
    for length, following in pairwise(lengths):
        held.append(held[-1] + num_layers * following - length * num_offloaded_layers(num_layers, length, following))
    assert all(held[0] - sum(lengths) <= now <= held[0] for now in held)
    assert num_offloaded_layers(num_layers, lengths[-1], 0) == 0


def test_offloaded_slices_lie_in_the_host_until_their_backwards() -> None:
    model, cluster = load_model("llama3-8b"), load_cluster("8xh100")
    workload = Workload(seq_len=65_536, global_batch_size=2)
    kept, offloaded = (
        predict(model, parse_plan_name(f"pp8-slice8{word}"), workload, cluster) for word in ("", "-oact")
    )
    first, less = kept.forecast.ranks[0], offloaded.forecast.ranks[0]
    assert less.terms.activations < 0.5 * first.terms.activations
    assert less.host_bytes > 0.5 * first.terms.activations
    plan = parse_plan_name("pp2-slice4-oact")
    program = build_program(plan, load_model("tiny"), Workload(seq_len=64, global_batch_size=1))
    copies = [str(item.action) for item in program.ranks[0]["host_copy"]]
    assert copies == ["0OFFLOAD0", "0OFFLOAD0.1", "0RELOAD0.1", "0RELOAD0"]  # 0.2 comes back too soon, 0.3 stays
    lane = list(program.ranks[0]["compute"])
    place = next(place for place, item in enumerate(lane) if str(item.action) == "0B0.1")
    lane[place] = lane[place]._replace(waits=tuple(wait for wait in lane[place].waits if wait.lane != "host_copy"))
    ranks = ({**program.ranks[0], "compute": tuple(lane)}, *program.ranks[1:])
    with pytest.raises(ProgramError, match="0B0.1 on rank 0 reads its saved activations"):
        check(Program(program.schedule, program.placement, 1, ranks, num_slices=4))


def test_program_names_the_slices_of_every_transfer() -> None:
    plan = parse_plan_name("pp2-slice2")
    program = build_program(plan, load_model("tiny"), Workload(seq_len=64, global_batch_size=1))
    sent = [str(item.action) for item in program.ranks[0]["p2p"] if item.action.kind == Kind.SEND_F]
    assert sent == ["0SEND_F0", "0SEND_F0.1"]


def test_what_slices_do_not_go_with_is_said() -> None:
    model = load_model("tiny")
    workload = Workload(seq_len=64, global_batch_size=4)
    for name, words in {
        "dp2-slice4": "but pp is 1; nearest: ",
        "pp2-cp2-slice4": "sequence_slices with context parallelism",
        "pp2-vocab-slice2": "sequence_slices with vocab_parallel",
        "pp2-szbh1-slice2": "schedule zb-h1 has no order for slices",
        "pp2v2-sinterleaved-slice2": "those that have: gpipe, 1f1b",
        "pp2-slice2-pv": "sequence_slices with post_validation",
        "pp2-slice4-oactd": "sequence_slices with activations on disk",
        "pp2-slice65": "legal are 1 to 64",
        "tp2-sp-pp2-slice33": "in multiples of 2: legal are 1 to 32",
    }.items():
        plan = parse_plan_name(name)
        with pytest.raises(InfeasibleError, match=words) as refused:
            require_runnable(plan, model, workload, plan.world_size)
        assert "nearest" in str(refused.value), name


def test_slices_too_few_to_leave_are_said() -> None:
    words = "offload has nothing to move: .* 1 micro-batch of 2 slices no activations lie for 4 passes"
    with pytest.raises(InfeasibleError, match=words):
        build_program(parse_plan_name("pp2-slice2-oact"), load_model("tiny"), Workload(seq_len=64, global_batch_size=1))


def test_names_say_the_slices() -> None:
    assert format_plan_name(parse_plan_name("pp4-slice8")) == "pp4-mb1-slice8-bf16"
    assert parse_plan_name("pp4").hash == parse_plan_name("pp4-slice1").hash
