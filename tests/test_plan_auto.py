"""`parallel: auto`: the plan of a run on the machine at hand."""

from dataclasses import replace

import pytest
from test_profiled_times import machine

from muster.catalog import names
from muster.cli.main import main
from muster.config import local_machine as here
from muster.config.load_config import load_run_config
from muster.config.local_machine import detect_machine
from muster.config.yaml_writer import yaml_text
from muster.planner.answer import answer_request
from muster.planner.auto import SEARCH_EFFORT, choose_plan, request_of_config, resolve_plan
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import unsupported_features
from tests.sampling import quick_sample


@pytest.fixture(autouse=True)
def _nowhere(tmp_path, monkeypatch) -> None:
    """A folder without a profile, on two cores without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(here, "_GPUS", tmp_path / "gpus")
    monkeypatch.setattr("muster.planner.auto.usable_cores", lambda: 2)


def tiny(*overrides: tuple[str, str], preset: str = "tiny"):
    return load_run_config(preset, None, [("parallel", "auto"), *overrides])


def write_profile(tmp_path) -> None:
    device = DeviceSpec(name="here", kind="cpu", shared_cores=2, rates=machine())
    group = single_node_cluster(device, 2).groups[0].model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "machine.yaml").write_text(yaml_text({"name": "here", "groups": [group]}))


@pytest.mark.parametrize("count", quick_sample([1, 2, 3, 5, 9], 0, 1, 2, 3))
def test_the_plan_is_for_the_processes_that_there_are_and_can_be_run(count):
    resolved = tiny()
    chosen = choose_plan(resolved, count)
    config = resolved.config
    assert chosen.plan.world_size == count
    assert not plan_violations(chosen.plan, config.model, config.workload, count)
    assert not unsupported_features(chosen.plan)
    check(build_program(chosen.plan, config.model, config.workload))
    assert choose_plan(resolved, count) == chosen
    assert " ms a step by these times" in (chosen.step_line or "")
    assert not any(" ms" in line for line in chosen.lines), "a run says what a step takes once: of its own passes"


@pytest.mark.parametrize("count", quick_sample([1, 2, 4], 1))
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.micro_batch_size", "3"),
        ("parallel.schedule", "gpipe"),
        ("parallel.schedule", "auto"),
        ("parallel.default_strategy.zero", "z2"),
        ("parallel.default_strategy.recompute", "full"),
        ("parallel.compile", "true"),
        ("parallel.bucket_layers", "2"),
        ("parallel.vocab_parallel", "true"),
    ],
)
def test_what_the_run_file_says_of_the_plan_stays(key, value, count):
    if "vocab" in key and count != 2:
        pytest.skip("it needs a pipeline, of two ranks here")
    resolved = tiny((key, value))
    plan = resolve_plan(resolved, count)
    field = key.rpartition(".")[2]
    asked, got = (
        getattr(one.default_strategy if "strategy" in key else one, field) for one in (resolved.config.parallel, plan)
    )
    assert got == asked or (value == "auto" and plan.pp == 1)
    assert plan.world_size == count


@pytest.mark.parametrize("count", quick_sample([2, 4], 0))
def test_auto_takes_what_muster_plan_takes(count):
    resolved = tiny()
    request = request_of_config(resolved, detect_machine(count, 1))
    answer = answer_request(request, 1, SearchBudget.start(SEARCH_EFFORT), explained=False)
    assert resolve_plan(resolved, count) == answer.first.plan


def test_what_binds_is_said(monkeypatch, capsys):
    with pytest.raises(InfeasibleError, match=r"global_batch_size 24 is not a multiple of 11 .*nearest with 10"):
        resolve_plan(tiny(), 11)
    with pytest.raises(InfeasibleError, match="recompute .* can't be run yet"):
        resolve_plan(tiny(("parallel.default_strategy.recompute", "core_attention")), 2)
    monkeypatch.setattr(here, "system_memory_bytes", lambda: 40 << 20)
    assert main(["train", "--preset", "demo", "--parallel", "auto", "--nproc", "2", "--dry-run"]) == 3
    assert "no plan fits" in capsys.readouterr().err


def test_the_profile_of_the_machine_is_planned_for(tmp_path):
    resolved = tiny()
    assert "times of the catalogue" in choose_plan(resolved, 2).lines[1]
    assert resolve_plan(resolved, None).world_size == 1
    write_profile(tmp_path)
    chosen = choose_plan(resolved, None)
    assert "machine.yaml" in chosen.lines[1]
    assert chosen.plan.world_size == 2  # all its cores, since two processes are twice as fast
    assert choose_plan(resolved, 4).plan.world_size == 4
    other = choose_plan(tiny(("parallel.precision", "bf16")), 2).lines[1]
    assert "(machine.yaml was measured in fp32, not in bf16, which 'muster profile' without --quick measures" in other
    (tmp_path / "machine.yaml").write_text((tmp_path / "machine.yaml").read_text()[:-200])
    assert "times of the catalogue (the profile can't be read: machine.yaml:" in choose_plan(resolved, 2).lines[1]


def test_a_number_of_processes_that_leaves_memory_free_goes_before_a_faster_one(tmp_path, monkeypatch):
    """Two are faster, but say that no plan of theirs leaves head-room."""
    write_profile(tmp_path)

    def tight(request: PlanRequest, top: int, budget: SearchBudget) -> SearchResult:
        found = search(request, top, budget)
        if request.cluster.num_devices == 2:
            return replace(found, evaluator=found.evaluator.without_head_room())
        return found

    monkeypatch.setattr("muster.planner.auto.search", tight)
    assert choose_plan(tiny(), 2).plan.world_size == 2
    assert choose_plan(tiny(), None).plan.world_size == 1


def test_ranks_share_the_cores_of_their_own_node_alone(monkeypatch):
    """On two nodes of two cores, four processes have a core each; laid across each other's stages or not."""
    monkeypatch.setattr(here, "usable_cores", lambda: 2)
    config = tiny().config
    one, two = here.detect_machine(2), here.detect_machine(4, nodes=2)
    inside = {"axis_order": ("dp_replicate", "dp_shard", "pp", "cp", "tp")}
    for name, near, far in (("dp4-mb1-z1", "dp2-mb1-z1", {}), ("dp2-pp2-mb1-z1", "pp2-mb1", inside)):
        plan, alone = (parse_plan_name(f"{text}-fp32") for text in (name, near))
        half = config.workload.model_copy(update={"global_batch_size": config.workload.global_batch_size // 2})
        expected_s = predict(config.model, alone, half, one).parts.compute_s
        for laid in (plan, plan.model_copy(update=far)):
            found = predict(config.model, laid, config.workload, two)
            assert found.parts.compute_s == pytest.approx(expected_s, rel=0.02), name
            evaluator = PlanEvaluator(PlanRequest(config.model, two, config.workload, precision="fp32"))
            assert evaluator.bounds.of_plan(laid) <= found.step_time_s * (1 + 1e-9)
    crowded = predict(config.model, parse_plan_name("dp4-mb1-z1-fp32"), config.workload, here.detect_machine(4))
    assert crowded.parts.compute_s > 1.9 * expected_s


def test_this_is_the_machine_that_was_measured_with_as_many_ranks_as_wanted(tmp_path):
    with pytest.raises(ConfigError, match="muster profile"):
        here.cluster_by_name("this")
    write_profile(tmp_path)
    assert [here.cluster_by_name(text).num_devices for text in ("this", "4xthis", "2xh100")] == [2, 4, 2]
    memory = here.cluster_by_name("4xthis").device.memory_bytes
    assert memory == here.system_memory_bytes() // 4


def test_gpus_are_known_by_the_names_that_their_driver_gives(tmp_path, monkeypatch):
    known = {
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100-80-sxm",
        "NVIDIA A100-SXM4-40GB": "a100-40-sxm",
        "Tesla V100-SXM2-32GB": "v100-32-sxm",
        "NVIDIA B200": "b200",
        "NVIDIA GeForce RTX 4090": "rtx4090",
    }
    assert {driver: here.catalog_device_name(driver) for driver in known} == known
    assert set(known.values()) <= set(names("devices"))
    assert {name for _, name in here._NAMES} <= set(names("devices"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number in range(4):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        (tmp_path / "gpus" / str(number) / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 7\n")
    cluster: ClusterSpec = here.detect_machine(4)
    assert (cluster.device.name, cluster.num_devices, cluster.num_nodes) == ("h200", 4, 1)
    assert here.detect_machine(8, nodes=2).num_nodes == 2
    assert resolve_plan(tiny(("parallel.precision", "bf16")), None).world_size == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert len(here.nvidia_gpu_names()) == 2
    assert here.detect_machine(4).device.kind == "cpu"  # more processes than devices


def test_a_device_that_nobody_knows_still_gets_a_plan(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "gpus" / "0" / "information").write_text("Model: \t NVIDIA Future 1\n")
    assert here.detect_machine(1).device.name == "nvidia-future-1"
    assert resolve_plan(tiny(), 1).world_size == 1
