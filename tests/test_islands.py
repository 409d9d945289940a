"""Islands: groups of ranks that meet in outer steps alone."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

from muster.config.cluster_files import load_cluster
from muster.config.load_config import load_run_config
from muster.config.named_model import load_model
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.cost.time.island_round import island_round
from muster.layout.host_updates import layer_of
from muster.layout.island_bytes import Compression
from muster.optim.outer.build import build_outer_method
from muster.optim.outer.diloco import DiLoCo
from muster.planner.islands import outer_flags
from muster.report.prediction import headline_figures
from muster.schedule.build import build_program
from muster.schedule.check import ProgramError, check
from muster.schedule.outer_steps import OuterEvents, outer_events, pending_fragments, round_end_events
from muster.schedule.program import parse_program
from muster.simulate.predict import predict
from muster.spec.errors import MusterError
from muster.spec.model import parameter_shapes
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload
from muster.train.preflight import notes
from tests.islands_ranks import round_trip_errors
from tests.ranks import run_ranks

DILOCO = {"every": 3}
AVERAGING = {"every": 1, "optimizer": "sgd", "learning_rate": 1.0}
STREAMING = {"method": "streaming", "every": 4, "fragments": 2, "delay": 1, "mixing": 0.5}
DILOCOX = {"method": "dilocox", "every": 3}
CO2 = {"method": "co2", "every": 2, "momentum_clip": 0.004}
DIPACO = {"method": "dipaco", "every": 3, "route_tokens": 4, "reroute_every": 8}
RESHARDED = DIPACO | {"router": "discriminative", "reshard_at": (3, 6), "scored_samples": 50}
LOW_RANK = {"method": "dilocox", "every": 2, "low_rank": 3}
ADAPTIVE = {"method": "diloco", "every": 2, "low_rank": 8, "rank_window": 2, "rank_tolerance": 0.3}
EXACT = {"loss": 0.0, "outer": 0.0, "momentum": 0.0, "islands": 0.0}


def _cases(*cases: tuple[str, dict[str, Any], str] | tuple[str, dict[str, Any], str, dict[str, Any]]) -> list[Any]:
    return [
        {"plan": plan, "outer": outer, "precision": precision, **(more[0] if more else {})}
        for plan, outer, precision, *more in cases
    ]


def _run(
    ranks: int, target: str, cases: list[Any], folder: Path, micro_batch_size: int = 2
) -> list[list[dict[str, Any]]]:
    if isinstance(cases[0], dict):
        cases = [case | {"micro_batch_size": micro_batch_size} for case in cases]
    payload = {"cases": cases, "cache": str(folder), "folder": str(folder)}
    return run_ranks(ranks, f"tests.islands_ranks:{target}", payload)


def test_islands_train_as_a_serial_emulator_does_to_the_bit(tmp_path: Path) -> None:
    cases = _cases(
        ("isl2", DILOCO, "fp64"),
        ("isl2-dp2-z3", STREAMING, "fp32"),
        ("isl2-pp2", DILOCOX | {"warmup_steps": 2, "every": 2}, "fp32", {"tied": True}),
        ("isl4", AVERAGING, "fp64"),
        ("isl2", CO2, "fp64"),
        ("isl2-tp2", ADAPTIVE, "fp64"),
        ("isl2", LOW_RANK, "fp64", {"bug": "error lost"}),
        ("isl2", DILOCO, "fp32", {"bug": "sum for mean"}),
        ("isl2", DILOCO | {"warmup_steps": 2}, "fp32", {"bug": "warm-up skipped"}),
    )
    ranks = _run(4, "compare_with_emulator", cases, tmp_path)
    _check_islands(cases, ranks)
    diloco = ranks[0][0]
    assert diloco["meetings"] == [[3, 0], [6, 0], [7, 0]]
    assert diloco["distance"] > 0
    assert diloco["sent_bytes"] == 8 * diloco["numel"]  # two islands: a half of the elements twice, in 8 bytes
    assert ranks[0][1]["meetings"] == [[2, 0], [4, 1], [6, 0], [7, 0], [7, 1]]
    # Two rounds of two steps after the warm-up of two; the last exchange of all ends with its own round.
    assert ranks[0][2]["meetings"] == [[1, 0], [2, 0], [6, 0], [7, 0], [7, 0]]


@pytest.mark.soak
def test_more_outer_steps_of_islands_are_those_of_a_serial_emulator(tmp_path: Path) -> None:
    cases = _cases(
        ("isl2-tp2", DILOCO, "fp32"),
        ("isl2-pp2-z1", DILOCO, "fp32", {"tied": True}),
        ("isl2-pp2", DILOCOX | {"warmup_steps": 2, "every": 2}, "fp32"),
        ("isl2-tp2", LOW_RANK, "fp64"),
        ("isl2", ADAPTIVE | {"method": "dilocox", "rank_window": 1}, "fp64"),
        ("isl2", STREAMING | {"every": 2, "delay": 0, "warmup_steps": 3}, "fp32"),
        ("isl2", ADAPTIVE, "fp64", {"bug": "ranks stay"}),
        ("isl2", DILOCO, "fp32", {"bug": "momentum lost"}),
    )
    _check_islands(cases, _run(4, "compare_with_emulator", cases, tmp_path, micro_batch_size=1))


def _check_islands(cases: list[Any], ranks: list[list[dict[str, Any]]]) -> None:
    for index, case in enumerate(cases):
        for rank in ranks:
            found = rank[index]
            if "loss" in found:
                differences = {key: found[key] for key in EXACT}
                # CO2's mean parameters are x' − (x' − x̄) and matmuls of low rank have other strides: both round.
                if case["outer"] == CO2 or "low_rank" in case["outer"]:
                    assert ("bug" in case) == (max(differences.values()) > 1e-12), (case, differences)
                    continue
                assert ("bug" in case) == (differences != EXACT), (case, differences)
        found = ranks[0][index]
        assert found["counted_bytes"] == sum(found["sent_by_meeting"]), case
        if "rank_window" in case["outer"] and "bug" not in case:
            _check_ranks(found)


def _check_ranks(found: dict[str, Any]) -> None:
    """Check that ranks of factors were those of the emulator, and fell, and bytes with them."""
    used = [{name: rank for name, rank in ranks.items() if name in found["used_ranks"][0]} for ranks in found["ranks"]]
    assert used == found["used_ranks"]
    assert set(used[0].values()) == {8}
    assert all(rank <= 8 for rank in used[-1].values())
    assert min(used[-1].values()) < 8
    assert found["sent_by_meeting"][-1] < found["sent_by_meeting"][0]


def test_paths_through_modules_train_as_a_serial_emulator_does_to_the_bit(tmp_path: Path) -> None:
    cases = _cases(
        ("isl2", DIPACO, "fp64"),
        ("isl4", DIPACO | {"modules": (2, 2)}, "fp64"),
        ("isl2-dp2", RESHARDED, "fp64"),
        ("isl2", RESHARDED, "fp64", {"bug": "labels of another path"}),
        ("isl2", DIPACO, "fp32", {"bug": "modules mixed"}),
    )
    ranks = _run(4, "compare_with_emulator", cases, tmp_path)
    _check_paths(cases, ranks)
    # Two islands exchange what both have: of four layers the first two, and the parameters outside layers.
    assert ranks[0][0]["sent_bytes"] < 0.7 * 8 * ranks[0][0]["numel"]


def _check_paths(cases: list[Any], ranks: list[list[dict[str, Any]]]) -> None:
    for index, case in enumerate(cases):
        for rank in ranks:
            found = rank[index]
            if "loss" in found:
                assert ("bug" in case) == ({key: found[key] for key in EXACT} != EXACT), (case, found)
                assert "bug" in case or found["validation"] < 1e-6, (case, found)


@pytest.mark.soak
def test_more_paths_through_modules_train_as_a_serial_emulator_does(tmp_path: Path) -> None:
    cases = _cases(
        ("isl4", DIPACO | {"modules": (2, 1)}, "fp32"),
        ("isl2-pp2", DIPACO, "fp32", {"tied": True}),
        ("isl2-dp2", RESHARDED, "fp64"),
        ("isl4", RESHARDED | {"modules": (2, 2), "route_top": 2}, "fp64"),
        ("isl2", DIPACO, "fp32", {"bug": "paths share data"}),
    )
    _check_paths(cases, _run(4, "compare_with_emulator", cases, tmp_path, micro_batch_size=1))


@pytest.mark.soak
def test_routers_that_learn_are_those_of_a_serial_emulator(tmp_path: Path) -> None:
    top = DIPACO | {"modules": (2, 2), "route_top": 3}
    cases = _cases(
        ("isl2-pp2", RESHARDED, "fp32"),
        ("isl2-tp2", RESHARDED, "fp64"),
        ("isl4", RESHARDED, "fp64"),
        ("isl4", top, "fp64"),
        ("isl4", top, "fp64", {"bug": "one path a sample"}),
        ("isl2", RESHARDED, "fp64", {"bug": "stale router"}),
    )
    _check_paths(cases, _run(4, "compare_with_emulator", cases, tmp_path))


def test_paths_through_one_module_a_level_are_diloco_to_the_bit(tmp_path: Path) -> None:
    cases = _cases(("isl2", DILOCO, "fp32"), ("isl2", DIPACO | {"modules": (1, 1)}, "fp32"))
    assert _run(2, "train_both", cases, tmp_path) == [0.0, 0.0]


@pytest.mark.soak
def test_more_plans_within_islands_train_as_a_serial_emulator_does(tmp_path: Path) -> None:
    outers = (DILOCO, DIPACO, STREAMING, {"method": "streaming", "every": 4, "fragments": 4, "delay": 0, "mixing": 0.0})
    plans = (
        "isl2-dp2-z1",
        "isl2-dp2-z2",
        "isl2-dp2x1",
        "isl2-pp2",
        "isl2-pp2-vocab",
        "isl2-cp2",
        "isl2-tp2-sp",
        "isl4",
    )
    cases = _cases(*((plan, outer, precision) for plan in plans for outer in outers for precision in ("fp64", "fp32")))
    for rank in _run(4, "compare_with_emulator", cases, tmp_path, micro_batch_size=1):
        for case, found in zip(cases, rank, strict=True):
            assert {key: found[key] for key in EXACT if key in found} in ({}, EXACT), case


def test_streaming_with_one_fragment_and_no_delay_is_diloco(tmp_path: Path) -> None:
    outer = OuterConfig.model_validate({"method": "streaming", "every": 5, "fragments": 1, "delay": 0, "mixing": 0.0})
    for step in range(1, 24):
        assert outer_events(outer, step, 23) == outer_events(OuterConfig(every=5), step, 23)


def test_dilocox_without_delay_is_diloco() -> None:
    outer = OuterConfig.model_validate({"method": "dilocox", "every": 5, "delay": 0})
    assert isinstance(build_outer_method(outer), DiLoCo)
    for step in range(1, 24):
        assert outer_events(outer, step, 23) == outer_events(OuterConfig(every=5), step, 23)


def test_momentum_is_lower_where_changes_are_a_round_late() -> None:
    values = {"method": "dilocox", "every": 5}
    found = [
        OuterConfig.model_validate(values | more).momentum
        for more in ({}, {"delay": 0}, {"optimizer": "sgd"}, {"momentum": 0.8})
    ]
    assert found == [0.3, 0.9, 0.0, 0.8]
    assert OuterConfig.model_validate({"method": "co2"}).momentum == 0.5


def test_delayed_rounds_end_as_the_next_ones_begin() -> None:
    outer = OuterConfig.model_validate(DILOCOX)
    for last in range(1, 14):
        under_way: list[int] = []
        for step in range(1, last + 1):
            starts, ends = outer_events(outer, step, last)
            assert not set(starts) & set(under_way)
            under_way += starts
            assert list(ends) == under_way[: len(ends)]
            under_way = under_way[len(ends) :]
            assert pending_fragments(outer, step, last) == tuple(under_way)
            assert bool(starts) == (step % 3 == 0 or step == last)
        assert not under_way


def test_runs_resume_within_a_round_to_the_bit_and_under_another_inner_plan(tmp_path: Path) -> None:
    cases = _cases(
        ("isl2-pp2", STREAMING, "fp32", {"at": 3}),  # while fragment 1 is under way
        ("isl2-dp2-z3", DILOCO, "fp64", {"at": 4, "then": "isl2-pp2"}),
        ("isl2", CO2, "fp64", {"at": 4, "then": "isl2-tp2"}),
        ("isl2-tp2", ADAPTIVE | {"method": "dilocox", "rank_window": 1, "compression": "int4"}, "fp32", {"at": 5}),
        ("isl4", DIPACO | {"modules": (2, 2)}, "fp32", {"at": 4}),
        ("isl2", RESHARDED, "fp32", {"at": 3, "fits_anew": True}),
        ("isl2", DIPACO, "fp32", {"at": 4, "fits_anew": True, "bug": "router lost"}),
    )
    _check_resumed(cases, tmp_path)


@pytest.mark.soak
def test_more_runs_resume_within_a_round(tmp_path: Path) -> None:
    cases = _cases(
        ("isl2", DILOCO, "fp32", {"at": 4}),
        ("isl2", STREAMING, "fp64", {"at": 5, "then": "isl2-tp2"}),
        ("isl2-pp2", DILOCOX | {"warmup_steps": 1}, "fp32", {"at": 5}),
        ("isl2-dp2-z1", LOW_RANK | {"compression": "int4"}, "fp32", {"at": 3}),
        ("isl2", RESHARDED, "fp32", {"at": 2}),
        ("isl2-dp2-z3", DIPACO, "fp64", {"at": 4, "then": "isl2-pp2"}),
    )
    _check_resumed(cases, tmp_path)


def _check_resumed(cases: list[Any], folder: Path) -> None:
    ranks = _run(4, "resume", cases, folder)
    for index, case in enumerate(cases):
        found = ranks[0][index]
        if "then" in case:
            assert found["loss"] < 1e-10, case
        else:
            assert ("bug" in case) == (found != {"loss": 0.0, "outer": 0.0}), case


def test_means_of_islands_are_the_same_everywhere_and_send_what_the_formula_says(tmp_path: Path) -> None:
    kinds, ways = ("normal", "heavy", "zero", "inf"), ("none", "bf16", "int8", "int4")
    cases = [(numel, kind, how) for numel in (5001, 7) for kind in kinds for how in ways]
    ranks = _run(3, "exchange", cases, tmp_path)
    bounds = {"none": 1e-7, "bf16": 5e-3, "int8": 0.04, "int4": 0.3}
    for index, (numel, kind, how) in enumerate(cases):
        found = [rank[index] for rank in ranks]
        assert all(one["digest"] == found[0]["digest"] for one in found), (numel, kind, how)
        assert all(one["intact"] for one in found)
        assert all(one["sent"] == one["formula"] for one in found), (numel, kind, how, found[0])
        assert found[0]["error"] < bounds[how], (numel, kind, how, found[0]["error"])
        for lost, missing in zip(zip(*(one["lost"] for one in found), strict=True), found[0]["missing"], strict=True):
            assert sum(lost) / 3 == pytest.approx(missing, abs=1e-6), (numel, kind, how)
        if kind == "inf" and how in ("int8", "int4"):
            assert found[0]["nan"]  # not lost, for the run to stop


def test_factors_of_low_rank_send_what_the_formula_says_and_account_for_what_they_lose(tmp_path: Path) -> None:
    ways = ("none", "int8", "int4")
    ranks = _run(3, "exchange_factors", list(ways), tmp_path)
    for index, how in enumerate(ways):
        for rank in ranks:
            found = rank[index]
            assert found["sent"] == found["formula"], how
            assert all(one["unaccounted"] < 1e-12 for one in found.values() if isinstance(one, dict)), (how, found)
        exact = [name for name in ("matrix", "low rank", "narrow", "vector") if found[name]["lost"] < 1e-12]
        assert exact == (["low rank", "narrow", "vector"] if how == "none" else [])
    # 70 · 4 + 80 · 4 elements of factors, 24 and 17 whole, of which two islands' thirds travel twice, 8 bytes each
    assert ranks[0][0]["sent"] == 4 * (-(-(70 * 4 + 41) // 3) + -(-74 * 4 // 3)) * 8


def test_integers_are_off_by_half_a_step_of_their_own_block_at_most() -> None:
    bounds: tuple[tuple[Compression, float, float], ...] = (("int8", 0.01, 0.05), ("int4", 0.12, 0.2))
    for compression, normal, heavy in bounds:
        for kind, most in (("normal", normal), ("heavy", heavy)):
            of_bound, relative = round_trip_errors(64 * 1024, kind, compression)
            assert of_bound <= 1.0 + 1e-5
            assert relative < most


def test_rounds_begin_after_the_warm_up() -> None:
    for values in (DILOCO, STREAMING, DILOCOX):
        outer = OuterConfig.model_validate(values)
        later = OuterConfig.model_validate(values | {"warmup_steps": 5})
        everything = tuple(range(outer.fragments))
        for step in range(1, 18):
            found, under_way = outer_events(later, step, 17), pending_fragments(later, step, 17)
            if step <= 5:
                assert (found, under_way) == (OuterEvents(everything, everything), ())
            else:
                assert found == outer_events(outer, step - 5, 12)
                assert under_way == pending_fragments(outer, step - 5, 12)
        assert round_end_events(later) == round_end_events(outer)
        assert outer_events(later, 4, 4) == OuterEvents(everything, everything)  # a training that ends within it


def test_outer_steps_are_planned_and_checked() -> None:
    outer = OuterConfig.model_validate(STREAMING | {"every": 8, "delay": 2})
    found = {step: events for step in range(1, 14) if any(events := outer_events(outer, step, 13))}
    assert found == {
        2: OuterEvents((0,), ()),
        4: OuterEvents((), (0,)),
        6: OuterEvents((1,), ()),
        8: OuterEvents((), (1,)),
        10: OuterEvents((0,), ()),
        12: OuterEvents((), (0,)),
        13: OuterEvents((0, 1), (0, 1)),
    }
    assert pending_fragments(outer, 3, 13) == (0,)
    assert pending_fragments(outer, 4, 13) == ()
    assert round_end_events(OuterConfig(every=5)) == OuterEvents((0,), (0,))


def test_programs_show_exchanges_and_the_checker_finds_wrong_ones() -> None:
    config = load_run_config("tiny", None, []).config
    plan = parse_plan_name("isl2-pp2-mb4-z1-fp32")
    program = build_program(plan, config.model, config.workload, outer=OuterEvents((0, 1), (1,)))
    text = str(program)
    assert "rank 1 outer: OUTER_REDUCE@compute:6 OUTER_REDUCE.1@compute:6 OUTER_WAIT.1@outer:1" in text
    check(parse_program(text))
    for wrong, reason in (
        (text.replace("OUTER_STEP.1@outer:2", "OUTER_STEP.1", 1), "doesn't wait for OUTER_WAIT.1"),
        (text.replace("OUTER_WAIT.1@outer:1", "OUTER_WAIT.1@compute:6", 1), "doesn't wait for OUTER_REDUCE.1"),
        (text.replace("OUTER_REDUCE@compute:6", "OUTER_REDUCE@compute:5", 1), "begins before"),
        (
            text.replace("OUTER_REDUCE@compute:6 ", "", 1)
            .replace("@outer:1", "@outer:0", 1)
            .replace("STEP.1@outer:2", "STEP.1@outer:1", 1),
            "OUTER_REDUCE is missing on rank 0",
        ),
    ):
        with pytest.raises(ProgramError, match=reason):
            check(parse_program(wrong))


def test_plans_with_islands_have_names_and_share_the_batch() -> None:
    plan = parse_plan_name("isl2-dp2-pp2-mb2-z1-fp32")
    assert format_plan_name(plan) == "isl2-dp2-pp2-mb2-z1-fp32"
    assert plan.world_size == 8
    config = load_run_config("tiny", None, []).config
    assert plan.num_micro_batches(config.workload) == 3  # 24 sequences over 2 islands of 2 ranks, 2 at a time
    with pytest.raises(MusterError, match="islands 5 × data-parallel ranks 1"):
        parse_plan_name("isl5").num_micro_batches(config.workload)


def test_a_round_waits_for_what_its_delay_does_not_hide() -> None:
    model, cluster = load_model("llama3-8b"), load_cluster("two-sites")
    plan = parse_plan_name("isl2-dp64-mb1-bf16")
    workload = Workload(seq_len=8192, global_batch_size=256)
    keys = {"method": "streaming", "every": 100, "fragments": 4, "delay": 1}
    rounds = [
        island_round(model, plan, workload, cluster, OuterConfig.model_validate(outer), 5.0)
        for outer in ({"every": 100}, keys, keys | {"delay": 24}, {"every": 100, "compression": "int8"})
    ]
    diloco, streaming, hidden, int8 = rounds
    assert diloco.sent_bytes == pytest.approx(model.num_parameters * 4 / 64, rel=0.01)
    assert int8.sent_bytes == pytest.approx(diloco.sent_bytes / 4, rel=0.01)
    assert diloco.exposed_s == sum(diloco.transfers_s) == pytest.approx(sum(streaming.transfers_s), rel=0.05)
    assert streaming.exposed_s == pytest.approx(sum(max(0.0, time_s - 5.0) for time_s in streaming.transfers_s))
    assert hidden.exposed_s == 0.0 < streaming.exposed_s < diloco.exposed_s
    assert diloco.round_s == 500 + diloco.exposed_s
    paths = island_round(model, plan, workload, cluster, OuterConfig.model_validate({"method": "dipaco"}), 5.0)
    shared = sum(prod(shape) for name, shape in parameter_shapes(model) if (layer_of(name) or 0) < 16)
    assert paths.sent_bytes == pytest.approx(shared * 4 / 64, rel=0.01)  # half of the layers, and what lies outside
    prediction = predict(model, plan, workload, cluster)
    assert prediction.round is not None
    assert prediction.tokens_per_s == pytest.approx(workload.tokens_per_step * 100 / prediction.round.round_s)


def test_rounds_of_any_length_stream() -> None:
    for every, fragments in ((5, 1), ("5", 1), (20, 2), (None, 2)):
        given = {"method": "streaming"} | ({} if every is None else {"every": every})
        assert OuterConfig.model_validate(given).fragments == fragments


def test_steps_at_which_a_router_does_not_learn_and_what_a_forecast_leaves_out_are_said(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    outer = "{method: dipaco, every: 5, router: discriminative, reshard_at: [5, 15], scored_samples: 64}"
    file.write_text(f"parallel: isl2\nouter: {outer}\ntrain: {{steps: 10}}\n")
    config = load_run_config("tiny", file, []).config
    assert list(notes(config)) == ["router: it doesn't learn at outer.reshard_at 15, which the 10 steps don't reach"]
    workload, cluster = Workload(seq_len=64, global_batch_size=8), load_cluster("2xh100")
    found = predict(config.model, parse_plan_name("isl2-mb1"), workload, cluster, outer=config.outer)
    told = dict(headline_figures(found))
    assert told["router"] == "learns 2 times; the paths' losses on 64 samples then aren't counted"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"every": 5, "method": "streaming", "fragments": 2}, "every 5 is not a multiple of fragments 2"),
        ({"every": 4, "method": "streaming", "delay": 2}, "delay 2 is not shorter than the 2 steps"),
        ({"fragments": 2}, "fragments 2 is for method streaming"),
        ({"momentum_clip": 1.0}, "momentum_clip 1.0 is for method co2"),
        ({"method": "dilocox", "delay": 3}, "delay 3 is neither a round nor nothing: expected 100"),
        ({"method": "co2", "optimizer": "nesterov"}, "optimizer nesterov is not CO2's"),
        ({"delay": 1}, "delay 1 is for methods streaming, dilocox and co2"),
        ({"modules": [1, 2]}, "is for method dipaco, not for diloco"),
        ({"rank_window": 2}, "rank_window has no rank to begin with"),
        ({"low_rank": 4, "rank_tolerance": 0.1}, "rank_tolerance 0.1 is for ranks that adapt"),
        ({"method": "dipaco", "low_rank": 4}, "low_rank 4 isn't built for dipaco: leave it out"),
        ({"method": "dipaco", "error_feedback": True}, "error_feedback isn't built for dipaco: leave it out"),
        (
            {"coordinator": "host-a:1", "secret_file": "x", "error_feedback": True},
            "error_feedback isn't built for peers of a coordinator: leave it out",
        ),
        ({"method": "dipaco", "scored_samples": 50}, "scored_samples 50 is for router discriminative"),
        ({"method": "dipaco", "router": "discriminative", "reshard_at": [100, 100]}, r"\[100, 100\] is in no order or"),
        ({"method": "dipaco", "router": "discriminative", "reshard_at": [200, 100]}, "expected ascending steps"),
        ({"method": "dipaco", "route_top": 2}, "route_top 2 sends each sample to all 2 paths"),
        ({"method": "dipaco", "router": "discriminative"}, "reshard_at, the steps at which it learns, go together"),
        ({"method": "dipaco", "reshard_at": [100]}, "reshard_at, the steps at which it learns, go together"),
        (
            {"method": "dipaco", "router": "discriminative", "reshard_at": [100], "warmup_steps": 20},
            "reshard_at 100 is not the end of a round: expected warmup_steps 20 and a multiple of every 100",
        ),
        ({"method": "dipaco", "reroute_every": 8}, "reroute_every 8 is shorter than the route_tokens 32"),
    ],
)
def test_keys_that_do_not_fit_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OuterConfig.model_validate(values)


def test_flags_of_outer_steps_write_lists_without_spaces() -> None:
    outer = OuterConfig.model_validate({"method": "dipaco", "every": 5, "modules": [2, 2]})
    assert outer_flags(outer) == "--outer.method dipaco --outer.every 5 --outer.modules [2,2]"


def test_more_fragments_than_layers_are_refused() -> None:
    tree = load_run_config("tiny", None, []).config.model_dump()
    outer = {"method": "streaming", "every": 100, "fragments": 50}
    with pytest.raises(ValueError, match="outer.fragments 50 are more than the model's 8 layers"):
        RunConfig.model_validate(tree | {"outer": outer})
