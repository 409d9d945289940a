"""Clusters and devices of the catalogue, short names, files, and what is said of wrong ones."""

import pytest

from muster.catalog import names
from muster.config.cluster_files import load_cluster, load_device
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError


@pytest.mark.parametrize("name", names("devices"))
def test_every_device_says_where_its_numbers_come_from(name):
    device = load_device(name)
    assert device.name == name
    assert device.sources["peak_flops_per_s"]
    assert device.sources["matmul_efficiency"]
    assert device.flops_per_s("fp32")
    assert device.memory_bandwidth_bytes_per_s
    assert device.node
    assert all(0 < share <= 1 for share in device.matmul_efficiency.values())


@pytest.mark.parametrize("name", names("clusters"))
def test_every_cluster_loads(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert ClusterSpec.model_validate_json(cluster.model_dump_json()) == cluster


def test_a_short_name_makes_full_nodes_and_what_is_left():
    cluster = load_cluster("20xh100+4xa100-40")
    assert [(group.num_nodes, group.devices_per_node) for group in cluster.groups] == [(2, 8), (1, 4), (1, 4)]
    assert cluster.num_devices == 24
    assert cluster.locate(17) == (1, 2)
    assert cluster.group_of(23).device.name == "a100-40-sxm"
    assert cluster.watts == 20 * 700 + 4 * 400


def test_a_price_that_is_unknown_makes_the_sum_unknown():
    assert load_cluster("8xh100").usd_per_hour == 8 * 4.916
    assert load_cluster("8xh100+8xv100").usd_per_hour is None


def test_a_file_changes_what_a_device_usually_comes_in(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "groups:\n"
        "  - {num_nodes: 4, device: a100-80, nics: {link: roce-100g, count: 4}}\n"
        "  - {num_nodes: 2, device: h100, devices_per_node: 4, intra: {like: pcie5, efficiency: 0.5}}\n"
        "tiers: [{name: sites, nodes: 4, link: wan-10g}]\n"
    )
    first, second = load_cluster(str(path)).groups
    assert first.devices_per_node == 8
    assert first.nics is not None
    assert first.nics.link.name == "roce-100g"
    assert second.num_devices == 8
    assert second.intra.efficiency == 0.5
    assert second.intra.kind == "pcie"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("64xh10", "there is no device 'h10'; did you mean 'h100'?"),
        ("0xh100", "at least one device, got 0xh100"),
        ("-8xh100", "at least one device, got -8xh100"),
        ("dgx-h10", "there is no cluster 'dgx-h10'; did you mean 'dgx-h100'?"),
        ("no/such.yaml", "can't read cluster file no/such.yaml: no such file or directory"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(text, sentence):
    with pytest.raises(ConfigError) as caught:
        load_cluster(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("groups: [{num_nodes: 0, device: h100}]", "groups.0.num_nodes: expected a whole number >= 1, got 0"),
        ("groups: [{num_nodes: 2.5, device: h100}]", "groups.0.num_nodes: expected a whole number >= 1, got 2.5"),
        ("groups: [{nodes: 2, device: h100}]", "groups.0.nodes: unknown key; did you mean 'num_nodes'?"),
        ("groups: [{num_nodes: 1}]", "groups.0.device: missing, expected a device such as h100"),
        ("groups: [{num_nodes: 1, device: h1000}]", "wrong.yaml: groups.0.device: there is no device 'h1000'; did you"),
        ("groups: many", "wrong.yaml: groups: expected a list, got 'many'"),
        ("devices: 64", "wrong.yaml: devices: expected devices such as 64xh100, got 64"),
        ("devices: 4xh100\ngroups: []", "expected one of them"),
        ("", "wrong.yaml: expected 'key: value' lines, got nothing"),
        (
            "devices: 8xh100\nnode_bandwidth_bytes_per_s: fast",
            "node_bandwidth_bytes_per_s: expected a list or null, got",
        ),
        ("devices: 8xh100\nnode_bandwidth_bytes_per_s: [[-1.0]]", "_per_s.0.0: expected a number > 0, got -1.0"),
        (
            "groups: [{num_nodes: 1, device: h100, nics: {link: {like: ib-ndr, latency_s: -2.0}}}]",
            "wrong.yaml: groups.0.nics.link.latency_s: expected a number > 0, got -2.0",
        ),
        (
            "groups: [{num_nodes: 1, device: {name: x, kind: gpuu}, devices_per_node: 1, intra: pcie4}]",
            "groups.0.device.kind: expected one of cpu, gpu, tpu, got 'gpuu'; did you mean 'gpu'?",
        ),
        ("groups: [{num_node: 2, device: h100}]", "groups.0.num_node: unknown key; did you mean 'num_nodes'?"),
        ("groups: [{num_nodes: 2, device: h100, nics: {link: ib-nrd}}]", "no link 'ib-nrd'; did you mean 'ib-ndr'?"),
        ("groups: []", "a cluster has at least one group of nodes"),
        ("groups: [{num_nodes: 2, device: h100}]\nnode_bandwidth_bytes_per_s: [[1.0]]", "2 rows and columns"),
        ("- 3", "expected 'key: value' lines"),
        ("groups: [", "is not valid YAML"),
        ("devices: 8xh100\ndevices: 16xh100", "wrong.yaml:2: devices is given twice, first in line 1"),
        ("groups:\n- num_nodes: 1\n  device: h100\n  num_nodes: 2", ":4: num_nodes is given twice, first in line 2"),
    ],
)
def test_a_wrong_file_is_told_in_one_sentence(tmp_path, yaml, sentence):
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bytes_may_have_exponents(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("groups: [{num_nodes: 1e1, device: h100, host_memory_bytes: 96e9}]")
    (group,) = load_cluster(str(path)).groups
    assert (group.num_nodes, group.host_memory_bytes) == (10, 96_000_000_000)
