"""Unequal shares of the data for devices of unequal speed: what they take, and which ones are chosen."""

import pytest

from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.load_cluster import load_cluster, load_device
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

MODEL = ModelSpec(
    vocab_size=512, hidden_size=1024, num_layers=8, num_heads=8, num_kv_heads=8, intermediate_size=4096, name="small"
)
INSIDE = ("dp_replicate", "dp_shard", "pp", "cp", "tp")


def mixed(*devices: str) -> ClusterSpec:
    """A node of two devices of each kind."""
    groups = []
    for name in devices:
        device = load_device(name)
        assert device.node is not None
        nics = device.node.nics
        groups.append(NodeGroup(num_nodes=1, devices_per_node=2, device=device, intra=device.node.intra, nics=nics))
    return ClusterSpec(name="mixed", groups=tuple(groups))


def step_s(plan: Plan, cluster: ClusterSpec, global_batch: int) -> float:
    return predict(MODEL, plan, Workload(seq_len=512, global_batch_size=global_batch), cluster).step_time_s


@pytest.mark.parametrize("name", ["dp4-z1", "dp2-pp2-z1", "dp2x1-pp2-z1-szbh1", "dp2-pp2v2-z1-szbv"])
def test_on_equal_devices_all_wait_for_the_largest_share(name: str) -> None:
    cluster = load_cluster("4xh100")
    equal = parse_plan_name(name)
    unequal = parse_plan_name(f"{name}-share3.1")
    assert step_s(unequal, cluster, 32) == pytest.approx(step_s(equal, cluster, 48), rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_rank_is_as_fast_as_its_own_devices(schedule: str) -> None:
    """Pipelines within a node: the fast one may do more micro-batches while the slow one does its own."""
    plan = parse_plan_name("dp2-pp2-z1").model_copy(update={"axis_order": INSIDE, "schedule": schedule})
    both = mixed("h100-sxm", "a100-80-sxm")
    fast, slow = (mixed(name, name) for name in ("h100-sxm", "a100-80-sxm"))
    for shares in ((3, 1), (2, 1), (1, 3)):
        unequal = plan.model_copy(update={"data_shares": shares})
        count = 24 // sum(shares)
        alone = max(step_s(plan, fast, 2 * count * shares[0]), step_s(plan, slow, 2 * count * shares[1]))
        # The groups of both kinds meet over the slower network, and step when the slower ones do.
        assert step_s(unequal, both, 24) == pytest.approx(alone, rel=0.02)
    equal = step_s(plan, both, 24)
    assert step_s(plan.model_copy(update={"data_shares": (2, 1)}), both, 24) < 0.8 * equal
