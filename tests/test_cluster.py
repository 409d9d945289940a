"""Clusters and devices of the catalogue, short names, files, and what is said of wrong ones."""

import pytest

from muster.api.inputs import resolve_cluster
from muster.catalog import names
from muster.cli.main import main
from muster.config.cluster_files import load_cluster, load_device
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import ConfigError
from muster.spec.unit_slips import UnitWarning, unit_slips


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


def test_a_device_like_another_changes_what_is_given(tmp_path):
    file = tmp_path / "lab.yaml"
    file.write_text(
        "groups:\n"
        "  - num_nodes: 2\n"
        "    device:\n"
        "      like: h100\n"
        "      name: h100-slow\n"
        "      watts: 500\n"
        "      peak_flops_per_s: {bf16: 800e12}\n"
        "      node: {devices: 4}\n"
    )
    [group] = load_cluster(str(file)).groups
    known = load_device("h100-sxm")
    assert (group.device.name, group.device.watts, group.devices_per_node) == ("h100-slow", 500, 4)
    assert group.device.peak_flops_per_s == {**known.peak_flops_per_s, "bf16": 800e12}
    assert group.device.attention == known.attention
    assert group.intra == known.node.intra


def test_nodes_like_a_devices_nodes(tmp_path):
    file = tmp_path / "lab.yaml"
    file.write_text(
        "groups:\n"
        "  - {num_nodes: 1, like: h100, intra: {like: nvlink4, efficiency: 0.5}}\n"
        "  - {num_nodes: 1, like: h100, device: {like: a100, memory_bytes: 40000000000}}\n"
    )
    first, second = load_cluster(str(file)).groups
    assert (first.device.name, first.intra.efficiency) == ("h100-sxm", 0.5)
    assert (second.device.name, second.device.memory_bytes) == ("a100-80-sxm-changed", 40_000_000_000)
    assert second.intra.name == "nvlink4"


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("{num_nodes: 1, device: {like: h10}}", "groups.0.device.like: there is no device 'h10'; did you mean 'h100'?"),
        ("{num_nodes: 1, like: h10}", "groups.0.like: there is no device 'h10'; did you mean 'h100'?"),
        ("{num_nodes: 1, device: {like: h100, wats: 3}}", "groups.0.device.wats: unknown key; did you mean 'watts'?"),
    ],
)
def test_a_wrong_likeness_is_told(tmp_path, yaml, sentence):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"groups: [{yaml}]")
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    assert sentence in str(caught.value)


SLIPS = {
    "nics: {link: {like: ib-ndr, bandwidth_bytes_per_s: 400}}": "400 means 400 bytes a second; 400 Gbit/s is 50e9",
    "nics: {link: {like: ib-ndr, bandwidth_bytes_per_s: 400e9}}": (
        "400e9 means 3,200 Gbit/s; if it counts bits, it is 50e9 in bytes"
    ),
    "nics: {link: {like: ib-ndr, latency_s: 3}}": "latency_s 3 means 3 seconds; 3 µs is 3e-06",
    "intra: {like: nvlink4, bandwidth_bytes_per_s: 3600e9}": "if it counts bits, it is 450e9 in bytes",
    "device: {like: h100, peak_flops_per_s: {bf16: 989}}": "bf16 989 means 989 FLOP/s; 989 TFLOP/s is 989e12",
    "device: {like: h100, matmul_efficiency: {bf16: 64.5}}": "64.5 means 64.5 times the peak",
    "device: {like: h100, matmul_rates: {bf16: [[1e9, 1200e12]]}}": "989.4e12 is below the measured 1.2e15",
    "device: {like: h100, memory_bytes: 80}": "memory_bytes 80 means 80 bytes; 80 GB is 80e9",
    "device: {like: h100, memory_bandwidth_bytes_per_s: 3350}": "3350 GB/s is 3.35e12",
    "device: {like: h100, memory_bandwidth_bytes_per_s: 3.35e9}": "3.35 TB/s is 3.35e12",
    "device: {like: h100, watts: 0.7}": "watts 0.7 means 0.7 W; 0.7 kW is 700",
    "host_memory_bytes: 2000": "host_memory_bytes 2000 means 2000 bytes; 2000 GB is 2e12",
}


@pytest.mark.parametrize("line", SLIPS)
def test_a_likely_slip_of_units_is_warned_of(tmp_path, line):
    file = tmp_path / "lab.yaml"
    file.write_text(f"groups: [{{num_nodes: 2, like: h100, {line}}}]")
    found = unit_slips(load_cluster(str(file)))
    assert len(found) == 1
    assert SLIPS[line] in found[0]
    assert found[0].startswith("groups.0.")


def test_a_slip_is_one_line_on_the_terminal_and_a_warning_in_python(tmp_path, capsys):
    file = tmp_path / "lab.yaml"
    file.write_text("groups: [{num_nodes: 2, like: h100, nics: {link: {like: ib-ndr, latency_s: 3}}}]")
    main(["predict", "--model", "tiny", "--cluster", str(file), "--plan", "dp16", "--seq-len", "64"])
    [line] = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert line.startswith("muster: warning: cluster ")
    assert line.endswith("groups.0.nics.link.latency_s 3 means 3 seconds; 3 µs is 3e-06")
    with pytest.warns(UnitWarning, match="means 3 seconds"):
        resolve_cluster(str(file))


def test_the_catalogue_has_no_slips():
    for name in names("clusters"):
        assert not unit_slips(load_cluster(name)), name
    for name in names("devices"):
        assert not unit_slips(load_cluster(f"16x{name}")), name
