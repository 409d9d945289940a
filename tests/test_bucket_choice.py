"""Layers that ranks gather and reduce as one (`bucketN`): names, times, and the planner's choice."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time import param_communication
from muster.cost.time.plan_times import place_plan
from muster.layout.update_buckets import update_buckets
from muster.parallel.fsdp import _groups, _state, fsdp_modules
from muster.parallel.stage import DecoderStage
from muster.parallel.world import fake_world
from muster.planner.bucket_choice import choose_buckets
from muster.planner.plan_evaluator import PlanEvaluator
from muster.planner.request import PlanRequest, require_more
from muster.planner.search_budget import SearchBudget
from muster.planner.search_result import SearchResult
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload

MANY_RANKS = "512xh100"
MODEL = ModelSpec(
    vocab_size=8, hidden_size=16, num_layers=5, num_heads=2, num_kv_heads=2, intermediate_size=16, gated=False
)


def _request(cluster: ClusterSpec, seq_len: int, **changes: Any) -> PlanRequest:
    workload = Workload(seq_len=seq_len, global_batch_size=cluster.num_devices)
    return PlanRequest(load_model("llama3-8b"), cluster, workload, **changes)


def _chosen(request: PlanRequest, name: str) -> list[Plan]:
    """Return the plans of a search that found this plan, the best first, with the best buckets."""
    evaluator = PlanEvaluator(request)
    found = SearchResult(evaluator, [evaluator.evaluate(parse_plan_name(name))], 0.0, None)
    return [one.plan for one in choose_buckets(found, SearchBudget()).best]


@pytest.mark.parametrize("name", ["dp8-mb1-bucket2-bf16", "dp2-pp2-mb2-z1-stepgather-bucket16-bf16"])
def test_a_name_has_the_layers_of_a_bucket(name: str) -> None:
    plan = parse_plan_name(name)
    assert plan.bucket_layers > 1
    assert format_plan_name(plan) == name


def test_no_layer_in_a_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bucket0' is 0"):
        parse_plan_name("dp8-bucket0")


@pytest.mark.parametrize("name", ["dp2-z1", "dp2-z2-bucket2", "dp2-bucket3", "dp2-bucket8"])
def test_a_stage_communicates_in_the_buckets_that_are_predicted(name: str) -> None:
    """Layers of each group of `fully_shard`, and the collectives of a step that its times count."""
    plan = parse_plan_name(f"{name}-fp32")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        module = DecoderStage(MODEL, fake_world(plan, 0, FakeStore()), 0, 8, seed=0).module
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        states = {id(_state(part)): _state(part) for part in fsdp_modules(module)}
        groups = [group for state in states.values() for group in _groups(state)]
        found = [sorted({_layer(names[id(one.sharded_param)]) for one in group.fsdp_params}) for group in groups]
    finally:
        dist.destroy_process_group()
    placed = place_plan(MODEL, plan, Workload(seq_len=8, global_batch_size=2), load_cluster("2xh100"))
    predicted = param_communication.ParamCommunication(placed, 0)
    assert [[*run] for run in predicted.buckets(range(5))] == found[1:]
    assert [[*run] for run in update_buckets(plan, MODEL, 0)][1:] == found[1:]
    assert found[0] == [-1], "embedding and head are one more"
    assert sum(predicted._group_shares().values()) == len(found)
    assert isinstance(module, FSDPModule)


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


@pytest.mark.parametrize("level", ["z1", "z2", "z3"])
def test_larger_buckets_pay_the_latency_less_often(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 layers of which 8 are gathered as one: 4 collectives of layers, each of a second."""
    for name in ("all_gather_s", "reduce_scatter_s"):
        monkeypatch.setattr(param_communication, name, lambda group, size: 1.0)
    times = {}
    for size in (1, 8, 5):
        plan = parse_plan_name(f"dp8-{level}-mb1-bf16").model_copy(update={"bucket_layers": size})
        workload = Workload(seq_len=1024, global_batch_size=8)
        placed = place_plan(load_model("llama3-8b"), plan, workload, load_cluster("8xh100"))
        communication = param_communication.ParamCommunication(placed, 0)
        in_passes = communication.per_micro_batch_s(communication.layers)
        own = dict(communication.per_step_times({"F": 0.0, "B": 0.0}))
        times[size] = (*in_passes, own["UNSHARD"], own["REDUCE_GRAD"])
    for size, count in ((1, 32), (8, 4), (5, 7)):
        per_pass = {"z1": (0, 0), "z2": (0, count), "z3": (count, count)}[level]
        assert times[size] == (*per_pass, count + 1, count + 1)


def test_the_planner_takes_larger_buckets_where_they_pay() -> None:
    request = _request(load_cluster(MANY_RANKS), 1024)
    best, *others = _chosen(request, "dp512-mb1-bf16")
    assert format_plan_name(best) == "dp512-mb1-bucket4-bf16"
    assert not others
    evaluator = PlanEvaluator(request)
    values = {size: evaluator.evaluate(best.model_copy(update={"bucket_layers": size})).value for size in (1, 2, 4, 8)}
    assert min(values, key=values.__getitem__) == 4
    assert values[4] < 0.85 * values[1]


def test_the_planner_keeps_single_layers_where_they_are_better_or_required() -> None:
    near = _request(load_cluster("64xh100"), 4096)
    assert _chosen(near, "dp64-mb1-bf16") == [parse_plan_name("dp64-mb1-bf16")]
    far = _request(load_cluster(MANY_RANKS), 1024)
    assert _chosen(require_more(far, "bucket1"), "dp512-mb1-bf16") == [parse_plan_name("dp512-mb1-bf16")]
    assert _chosen(replace(far, objective="memory"), "dp512-mb1-bf16") == [parse_plan_name("dp512-mb1-bf16")]


def test_the_planner_keeps_to_buckets_that_fit() -> None:
    request = _request(load_cluster(MANY_RANKS), 1024)
    evaluator = PlanEvaluator(request)
    plans = {size: parse_plan_name(f"dp512-mb1-bucket{size}-bf16") for size in (1, 2, 4)}
    peaks = {size: evaluator.evaluate(plan).peak_bytes for size, plan in plans.items()}
    assert peaks[1] < peaks[2] < peaks[4]
    for size, limit in ((2, peaks[4] - 1), (1, peaks[2] - 1)):
        (best,) = _chosen(replace(request, memory_limit_bytes=limit), "dp512-mb1-bf16")
        assert best == plans[size]
