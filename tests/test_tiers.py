"""The planner's choice of a tier for optimizer state: what looking at every word finds, and what doesn't fit."""

import json
from dataclasses import replace
from math import inf, prod

import pytest

from muster.api.verbs import plan
from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.host_updates import DISK_BYTES_PER_S, HOST_UPDATE_BYTES_PER_S, disk_rates
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, with_tier, with_tier_sizes
from muster.planner.search import exhaustive_search
from muster.planner.search_budget import SearchBudget
from muster.planner.tiers import choose_tier, tier_words
from muster.schedule.action import Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.program import ProgramError
from muster.simulate.predict import predict
from muster.simulate.resource_load import busy_seconds
from muster.spec.cluster import ClusterSpec
from muster.spec.device import DiskSpec
from muster.spec.model import parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.sampling import quick_sample

WORK = Workload(seq_len=256, global_batch_size=16)


def request(memory: int, host: int | None, disk: int | None, devices: str = "1xrtx4090") -> PlanRequest:
    """Return a request for the tiny model within so many bytes of each device."""
    cluster = with_tier_sizes(load_cluster(devices), host, disk)
    return PlanRequest(load_model("demo"), cluster, WORK, memory_limit_bytes=memory, runnable=True, tolerance=0.0)


def least_value(asked: PlanRequest, word: str) -> float:
    """Return the best value of all plans with a word of a tier that fit."""
    evaluator = PlanEvaluator(with_tier(asked, word))
    return min((one.value for one in exhaustive_search(evaluator)), default=inf)


@pytest.mark.parametrize(
    ("devices", "memory", "fixed"),
    quick_sample(
        [
            ("1xrtx4090", 633_000_000, {}),
            ("1xrtx4090", 610_000_000, {}),
            ("1xrtx4090", 60_000_000, {}),
            ("2xrtx4090", 1_175_000_000, {"micro_batch_size": 1, "tp": 1, "pp": 1}),
            ("2xrtx4090", 1_175_000_000, {"micro_batch_size": 1}),
        ],
        *range(4),
    ),
)
def test_the_chosen_tier_is_the_best_of_all_words(devices: str, memory: int, fixed: dict[str, int]) -> None:
    asked = replace(request(memory, 10**10, 10**11, devices), fixed=fixed)
    values = {word: least_value(asked, word) for word in tier_words(asked)}
    found = choose_tier(asked, SearchBudget())
    assert len(values) == 12
    assert found.fits == (min(values.values()) < inf)
    assert not found.fits or values[found.request.tier_word] == pytest.approx(min(values.values()))
    assert (found.request.tier_word == "") == (memory == 60_000_000)


def test_state_goes_to_the_disk_where_the_host_is_too_small() -> None:
    """A plan's state counts against its share of host memory and of the disk, in the search as in the forecast."""
    small = request(620_000_000, 20_000_000, 10**11)
    found = choose_tier(small, SearchBudget())
    assert found.request.tier_word == "ooptd"
    for asked in (request(620_000_000, 20_000_000, None), request(620_000_000, 20_000_000, 10_000_000)):
        assert not choose_tier(asked, SearchBudget()).fits
    evaluator = PlanEvaluator(with_tier(small, "oopt"))
    (plan_on_host,) = [parse_plan_name("dp1-mb1-rfull-oopt-bf16")]
    budget = evaluator.memory_budget
    held = predict(small.model, plan_on_host, WORK, small.cluster).forecast
    assert held.fits is False
    assert held.ranks[0].exceeds_host_memory
    assert budget.host_excess_bytes(plan_on_host) == held.ranks[0].host_bytes - 20_000_000 * (1 - budget.head_room)
    on_disk = parse_plan_name("dp1-mb1-rfull-ooptd-bf16")
    full = request(620_000_000, None, 10_000_000)
    held = predict(full.model, on_disk, WORK, full.cluster).forecast
    assert held.fits is False
    assert held.ranks[0].exceeds_disk
    assert PlanEvaluator(full).memory_budget.host_excess_bytes(on_disk) == held.ranks[0].disk_bytes - 10_000_000


def test_words_are_those_of_tiers_that_the_cluster_is_known_to_have() -> None:
    assert tier_words(request(10**9, None, None)) == ("",)
    assert tier_words(request(10**9, 10**9, None))[1:2] == ("oopt",)
    assert "ooptd" in tier_words(request(10**9, None, 10**9))
    required = replace(request(10**9, 10**9, None), fixed={"offload_optimizer": "host"})
    assert tier_words(required) == ("",)


@pytest.mark.parametrize("rates", [(None, None), (6e9, 1e9)])
def test_disks_have_rates_of_their_own(rates: tuple[float | None, float | None]) -> None:
    cluster = with_tier_sizes(load_cluster("1xrtx4090"), None, 10**12)
    disk = DiskSpec(read_bytes_per_s=rates[0], write_bytes_per_s=rates[1])
    group = cluster.groups[0].model_copy(update={"disk": disk})
    cluster = ClusterSpec(groups=(group,))
    assert disk_rates(group) == (rates[0] or DISK_BYTES_PER_S, rates[1] or DISK_BYTES_PER_S)
    found = predict(load_model("demo"), parse_plan_name("dp1-mb1-ooptd-bf16"), WORK, cluster)
    shards = {event.action.kind: event.duration_s for event in found.timeline.events if event.lane == "disk"}
    assert shards[Kind.READ_STATE] / shards[Kind.WRITE_STATE] == pytest.approx(
        disk_rates(group)[1] / disk_rates(group)[0]
    )
    busy = busy_seconds(found.timeline)
    assert list(busy) == ["compute", "host cores", "host link", "disk link"]
    assert max(busy.values()) <= found.step_time_s


@pytest.mark.parametrize("words", ["dp2", "pp2", "pp2-sgpipe", "dp2-rfull"])
def test_parameters_and_activations_share_the_disk(words: str) -> None:
    plan = parse_plan_name(f"{words}-mb1-ooptd-oparamd-oactd")
    check(build_program(plan, load_model("demo"), Workload(seq_len=256, global_batch_size=8)))


@pytest.mark.parametrize("words", ["dp2", "cp2u-tile2-rfull", "tp2-sp"])
def test_parameters_and_activations_share_the_link_to_the_host(words: str) -> None:
    """Without a pipeline, layers' activations leave beside the forward and return beside the backward, which are
    refused where a copy isn't waited for."""
    plan = parse_plan_name(f"{words}-mb1-oopt-oparam-oact")
    program = build_program(plan, load_model("demo"), Workload(seq_len=256, global_batch_size=8))
    check(program)
    kinds = [item.action.kind for item in program.ranks[0]["host_copy"] if item.action.micro_batch == 0]
    beside = [Kind.LOAD_F, Kind.OFFLOAD_ACT, Kind.LOAD_B, Kind.RELOAD_ACT]
    assert [kind for kind in kinds if kind in beside] == beside
    lanes = dict(program.ranks[0])
    reload = next(n for n, item in enumerate(lanes["host_copy"]) if item.action.kind == Kind.RELOAD_ACT)
    copies = list(lanes["host_copy"])
    copies[reload] = copies[reload]._replace(waits=())
    with pytest.raises(ProgramError, match="reads its layers' saved activations in host memory before 0OFFLOAD_ACT"):
        check(replace(program, ranks=(lanes | {"host_copy": tuple(copies)},)))


def test_plan_with_tiers_names_what_binds_and_runs(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    where: str = f"--model demo --cluster 1xrtx4090 --seq-len 256 --global-batch 16 -o {tmp_path}/plan.yaml"
    asked = f"plan {where} --host-memory 1G --disk 10G --memory-limit 620M"
    assert main(asked.split()) == 0
    out = capsys.readouterr().out
    assert (
        "optimizer state and parameters in host memory (oopt-oparam): no plan fits on the device or with oopt0.5, "
        in out
    )
    assert "binds. At work in a step: compute " in out
    assert main([*asked.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"]["binds"] in found["tiers"]["shares"]
    assert (
        main(f"train --preset demo --parallel {tmp_path}/plan.yaml --train.global_batch_size 16 --dry-run".split()) == 0
    )


def test_what_fits_nowhere_is_told_with_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    where: str = "plan --model llama3.2-3b --cluster 1xrtx4090 --global-batch 64 --seq-len 2048"
    assert main([*where.split(), "--host-memory", "16G"]) == 3
    error = capsys.readouterr().err
    assert "dp1-mb1-rfull-oopt-oparam-bf16, fits on the devices, but needs" in error
    assert "of host memory for each device, whose share is 14.9 GiB: give --host-memory 60G for a node" in error
    assert main([*where.split(), "--host-memory", "60G"]) == 0


def test_where_nothing_fits_known_tiers_are_tried() -> None:
    """Nodes of a known host take its state without being asked; answers of what fits stay."""
    cluster = with_tier_sizes(load_cluster("1xrtx4090"), 10**10, None)
    assert (
        plan(
            "demo", cluster, memory_limit=620_000_000, seq_len=256, global_batch=16
        ).best.default_strategy.offload_optimizer
        == "host"
    )
    fitting = plan("demo", cluster, seq_len=256, global_batch=16)
    assert fitting.best.default_strategy.offload_optimizer == "none"
    assert fitting.to_json()["tiers"] is None


def test_parameters_go_to_the_disk_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    asked: str = "plan --model llama3.2-3b --cluster 1xrtx4090 --memory-limit 6G --host-memory 20G --disk 2T --json"
    assert main(asked.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"]["binds"] == "disk link"
    assert found["plans"][0]["plan"].endswith("-ooptd-oparamd-bf16")


def test_loads_of_parameters_take_the_rates_of_links() -> None:
    """Copies for passes in bf16, gradients in fp32; on disk also sums of gradients, but for a step's first."""
    asked = request(10**9, None, 10**12)
    plan_on_disk = parse_plan_name("dp1-mb8-rfull-ooptd-oparamd-bf16")
    found = predict(asked.model, plan_on_disk, WORK, asked.cluster)
    times = {kind: found.times.seconds[kind, 0] for kind in (Kind.LOAD_F, Kind.LOAD_B, Kind.READ_F, Kind.READ_B)}
    numel = asked.model.num_parameters
    layers = numel - sum(prod(shape) for name, shape in parameter_shapes(asked.model) if not name.startswith("layers."))
    assert times[Kind.READ_F] == pytest.approx(2 * numel / DISK_BYTES_PER_S)
    assert times[Kind.READ_B] == pytest.approx((2 + 4 + 4 / 2) * layers / DISK_BYTES_PER_S)
    assert times[Kind.LOAD_B] / times[Kind.LOAD_F] == pytest.approx((2 * layers + 4 * numel) / (2 * numel))
    assert found.forecast.ranks[0].disk_bytes == (4 + 8 + 2) * numel + 4 * layers


@pytest.mark.parametrize("words", ["oopt", "oopt-oparam", "ooptd-oparamd"])
def test_the_host_takes_the_norm_of_the_gradients_in_its_memory_and_clips_them(words: str) -> None:
    """At the rate of its updates, which a device's memory exceeds many times; norms on disk are taken in the passes."""
    asked = request(10**9, 10**10, 10**12)
    found = predict(asked.model, parse_plan_name(f"dp1-mb1-{words}-bf16"), WORK, asked.cluster)
    numel = asked.model.num_parameters
    outside = sum(prod(shape) for name, shape in parameter_shapes(asked.model) if not name.startswith("layers."))
    on_host = {"oopt": 0, "oopt-oparam": numel, "ooptd-oparamd": outside}[words]
    clip_s, norm_s = (found.times.seconds[kind, -1] for kind in (Kind.CLIP, Kind.GRAD_NORM))
    assert clip_s == pytest.approx(8 * on_host / HOST_UPDATE_BYTES_PER_S)
    plain = predict(asked.model, parse_plan_name("dp1-mb1-bf16"), WORK, asked.cluster)
    on_device_s = plain.times.seconds[Kind.GRAD_NORM, -1] if words == "oopt" else 0.0
    assert norm_s == pytest.approx(on_device_s + clip_s / 2, rel=0.01, abs=1e-6)
    shown = {event.action.kind: event.duration_s for event in found.timeline.events}
    assert (shown[Kind.CLIP], shown[Kind.GRAD_NORM]) == pytest.approx((clip_s, norm_s))
