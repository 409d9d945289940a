"""`muster profile --nodes`: links between nodes are measured, written into a cluster file, and read by predictions."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from benchmarks.shaped_network import Shape, ShapedNetwork, address
from muster.cli.main import main
from muster.config.cluster_files import load_cluster, load_link
from muster.cost.time.collectives import make_comm_group
from muster.launch.nodes.rendezvous_config import RendezvousConfig
from muster.planner.node_order import reorder_nodes
from muster.probe.node_links import LinkListener, measure_link
from muster.probe.profile_nodes import LinkProfileRequest, alike, links_summary, nodes_text, profile_nodes
from muster.spec.cluster import ClusterSpec, NetworkTier
from muster.spec.errors import ConfigError, MusterError


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def profiled(port: int, request: LinkProfileRequest, nodes: int = 3) -> list[ClusterSpec | None]:
    """What the launchers of some nodes return, all on this machine."""
    configs = [RendezvousConfig(nodes, node, "127.0.0.1", port, timeout_s=60) for node in range(nodes)]
    with ThreadPoolExecutor(nodes) as pool:
        return list(pool.map(lambda config: profile_nodes(config, request), configs))


def test_three_launchers_measure_all_links_and_node_0_has_a_cluster_that_predictions_read(port, tmp_path) -> None:
    request = LinkProfileRequest(None, connections=2, seconds=0.05)
    found, *others = profiled(port, request)
    assert others == [None, None]
    assert found is not None
    assert found.num_nodes == 3
    assert found.node_bandwidth_bytes_per_s is not None
    assert found.node_latency_s is not None
    assert all(found.node_bandwidth_bytes_per_s[one][other] > 1e6 for one, other in permutations(range(3), 2))
    assert all(0 < found.node_latency_s[one][other] < 0.5 for one, other in permutations(range(3), 2))
    (tmp_path / "nodes.yaml").write_text(nodes_text(found, request))
    assert load_cluster(str(tmp_path / "nodes.yaml")) == found
    lines = links_summary(found).splitlines()
    assert len(lines) == 11
    assert lines[-1].startswith("ring 0 ")


def test_given_nodes_keep_their_devices_and_must_be_as_many(port) -> None:
    cluster = load_cluster("16xh100")
    found, _ = profiled(port, LinkProfileRequest(cluster, seconds=0.02), 2)
    assert found is not None
    assert found.groups == cluster.groups
    assert found.node_bandwidth_bytes_per_s is not None
    assert found.node_bandwidth_bytes_per_s[0][0] == cluster.groups[0].intra.bandwidth_bytes_per_s * 0.8
    with pytest.raises(ConfigError, match="--cluster 16xh100 has 2 nodes, but --nodes is 3"):
        profile_nodes(RendezvousConfig(3, 0, "127.0.0.1", port), LinkProfileRequest(cluster))


def test_who_has_no_token_is_sent_away(port) -> None:
    listener = LinkListener("127.0.0.1", "a" * 32)
    try:
        assert measure_link("127.0.0.1", listener.port, "a" * 32, "127.0.0.1", 3, 0.02).bytes_per_s > 1e6
        with pytest.raises(MusterError, match=r"the link to 127\.0\.0\.1 could not be measured"):
            measure_link("127.0.0.1", listener.port, "b" * 32, "127.0.0.1", 1, 0.02)
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: own\r\n\r\n"[:32].ljust(32))
            assert stranger.recv(100) == b""
    finally:
        listener.close()
    with pytest.raises(MusterError, match="could not be measured"):
        measure_link("127.0.0.1", port, "a" * 32, "127.0.0.1")


def test_values_that_differ_by_noise_are_one_and_directions_are_two() -> None:
    values = {(0, 1): 100.0, (1, 0): 109.0, (0, 2): 10.4, (2, 0): 20.0, (1, 2): 10.0, (2, 1): 111.0}
    assert alike(values) == {
        (0, 1): 104.0,
        (1, 0): 104.0,
        (0, 2): 10.2,
        (1, 2): 10.2,
        (2, 0): 20.0,
        (2, 1): 111.0,
    }


def test_measured_latencies_are_those_of_groups_and_follow_their_nodes() -> None:
    group = load_cluster("2xa100-80").groups[0].model_copy(update={"num_nodes": 3, "devices_per_node": 1})
    rates = ((3e11, 1e9, 2e9), (1e9, 3e11, 4e9), (2e9, 4e9, 3e11))
    latencies = ((1e-6, 1e-3, 2e-3), (5e-3, 1e-6, 3e-3), (2e-3, 3e-3, 1e-6))
    cluster = ClusterSpec(groups=(group,), node_bandwidth_bytes_per_s=rates, node_latency_s=latencies)
    pair = make_comm_group(cluster, [0, 1])
    assert (pair.network_bytes_per_s, pair.network_latency_s) == (1e9, 5e-3)
    line = load_link("wan-10g")
    sites = cluster.model_copy(update={"tiers": (NetworkTier(name="sites", nodes=2, link=line),)})
    assert make_comm_group(sites, [0, 1]).network_bytes_per_s == 1e9
    across = line.bandwidth_bytes_per_s * line.efficiency / 2  # which both nodes share, though each had it alone
    assert make_comm_group(sites, [1, 2]).network_bytes_per_s == across < 4e9
    turned = make_comm_group(reorder_nodes(cluster, (2, 1, 0)), [0, 1])
    assert (turned.network_bytes_per_s, turned.network_latency_s) == (4e9, 3e-3)
    with pytest.raises(ValueError, match="node_latency_s must have 3 rows and columns"):
        ClusterSpec.model_validate({"groups": (group,), "node_latency_s": latencies[:2]})


def test_flags_of_nodes_and_of_one_machine_are_told_apart(capsys) -> None:
    assert main(["profile", "--connections", "4"]) == 2
    assert "--connections 4 is for the links between nodes: add --nodes N" in capsys.readouterr().err
    nodes = ["--nodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1"]
    assert main(["profile", *nodes, "--ranks", "2"]) == 2
    assert "--ranks 2 is for measuring one machine" in capsys.readouterr().err


MEGABITS = (20, 40, 80)
"""Rates at which the nodes send."""


@pytest.mark.soak
def test_shaped_links_are_measured_as_they_are(tmp_path: Path) -> None:
    shape = Shape(100, overhead_bytes=0)
    try:
        network = ShapedNetwork(3, 1, shape, shape)
        entered = network.__enter__()
    except SystemExit as refused:
        pytest.skip(str(refused))
    try:
        for node, megabits in enumerate(MEGABITS):
            words = f"qdisc replace dev net root {Shape(megabits, 0).bucket()}"
            subprocess.run(["tc", "-n", f"{entered.tag}r{node}", *words.split()], check=True)
        place = ["--nodes", "3", "--rendezvous", address(0), "--connections", "2", "-o", str(tmp_path / "nodes.yaml")]
        launchers = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{entered.tag}r{node}", sys.executable, "-m", "muster", "profile"]
                + [*place, "--node-rank", str(node)]
            )
            for node in range(3)
        ]
        assert [launcher.wait(timeout=200) for launcher in launchers] == [0, 0, 0]
    finally:
        network.__exit__()
    rates = yaml.safe_load((tmp_path / "nodes.yaml").read_text())["node_bandwidth_bytes_per_s"]
    for one, other in permutations(range(3), 2):
        assert rates[one][other] == pytest.approx(MEGABITS[one] * 1e6 / 8, rel=0.15)
