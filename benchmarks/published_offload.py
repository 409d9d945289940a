"""Published figures of training with state off the device beside the planner's answers.

    python -m benchmarks.published_offload

ZeRO-Offload (arXiv:2101.06840), ZeRO-Infinity (arXiv:2104.07857) and Fuyou (arXiv:2403.06504): largest models, and
rates with optimizer state and parameters in host memory or on disk. For what doesn't fit the table says by how much.
ZO2 (arXiv:2503.12668): memory of a device without a backward, with parameters in host memory.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from muster.config.cluster_files import load_cluster
from muster.config.optim_config import OptimConfig
from muster.planner.request import PlanRequest, with_tier, with_tier_sizes
from muster.planner.smallest_plan import smallest_plan
from muster.simulate.predict import Prediction, predict
from muster.spec.cluster import ClusterSpec
from muster.spec.model import ModelSpec
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.workload import Workload

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure beside Muster's."""

    case: str
    published: str
    muster: str
    reason: str


def gpt(num_layers: int, hidden_size: int, num_heads: int, seq_len: int) -> ModelSpec:
    """Return a GPT-2 of these sizes, as the papers train."""
    return ModelSpec(
        name=f"gpt-{12 * num_layers * hidden_size**2 / 1e9:.0f}b",
        vocab_size=50304,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        position="learned",
        max_positions=seq_len,
        norm="layer",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
    )


def machine(devices: str, host_bytes: float, disk_bytes: float | None = None) -> ClusterSpec:
    """Return devices with so much host memory and disk space on their node."""
    return with_tier_sizes(load_cluster(devices), int(host_bytes), None if disk_bytes is None else int(disk_bytes))


def deepest_need(
    model: ModelSpec, cluster: ClusterSpec, seq_len: int, word: str = "ooptd-oparamd"
) -> tuple[float, float, bool]:
    """Return the bytes that the smallest plan needs on a device, the bytes that this has, and True if all of it fits,
    with optimizer state and parameters where `word` says."""
    workload = Workload(seq_len=seq_len, global_batch_size=cluster.num_devices)
    asked = PlanRequest(model, cluster, workload, precision="bf16")  # fp16 has as many bytes, and stays off disks
    found = smallest_plan(with_tier(asked, word))
    assert found is not None
    return found.peak_bytes, found.limit_bytes, found.fits and not found.full_tiers


def largest_model(cluster: ClusterSpec, hidden_size: int, num_heads: int, seq_len: int) -> int:
    """Return the most layers of a GPT that fit a device and its host's memory."""
    low, high = 1, 2
    while deepest_need(gpt(high, hidden_size, num_heads, seq_len), cluster, seq_len, "oopt-oparam")[2]:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = deepest_need(gpt(middle, hidden_size, num_heads, seq_len), cluster, seq_len, "oopt-oparam")[2]
        low, high = (middle, high) if fits else (low, middle)
    return low


def zero_offload() -> Iterator[Row]:
    """Yield the largest model and the rate on a V100 of a DGX-2, whose share of host memory is all of its 1.5 TB."""
    cluster, seq_len = machine("1xv100-32", 1.5e12), 1024
    largest = gpt(largest_model(cluster, 8192, 64, seq_len), 8192, 64, seq_len)
    published = gpt(65, 4096, 32, seq_len)
    need, limit, _ = deepest_need(published, cluster, seq_len, "oopt-oparam")
    yield Row(
        "ZeRO-Offload: largest model on one V100-32 (table 3: 65 layers of width 4096)",
        "13B",
        f"{largest.num_parameters / 1e9:.1f}B",
        f"13B needs {need / GIB:.0f} of {limit / GIB:.0f} GiB on the device: parameters lie in host memory, too, on the"
        " device in ZeRO-Offload; host memory binds",
    )
    plan = parse_plan_name("dp1-mb8-rfull-oopt-oparam-fp16")
    found = predict(gpt(50, 4096, 32, seq_len), plan, Workload(seq_len=seq_len, global_batch_size=512), cluster)
    yield rate_row("ZeRO-Offload: 10B on one V100, batch 512 (abstract; PyTorch: 30 at 1.4B)", 40, found)


def zero_infinity() -> Iterator[Row]:
    """Yield what 1T on a DGX-2 lacks, and the efficiency over the disk's rate beside the paper's formula."""
    node = load_cluster("16xv100-32").groups[0].model_copy(update={"devices_per_node": 16, "num_nodes": 1})
    dgx2 = with_tier_sizes(ClusterSpec(name="16xv100-32", groups=(node,)), 1_500_000_000_000, 28_000_000_000_000)
    need, limit, _ = deepest_need(gpt(128, 25600, 256, 1024), dgx2, 1024)
    yield Row(
        "ZeRO-Infinity: 1T on a DGX-2 (table 1)",
        "trains",
        f"needs {need / GIB:.0f} of {limit / GIB:.0f} GiB on a device",
        "state and parameters on disk",
    )
    cluster = machine("1xrtx4090", 1e12, 1e13)
    model, seq_len = gpt(24, 2048, 16, 1024), 1024
    plan = parse_plan_name("dp1-mb8-rfull-ooptd-bf16")
    for sequences in (8, 32, 128):
        workload = Workload(seq_len=seq_len, global_batch_size=sequences)
        for rate in (1.5e9, 6e9):
            disk = cluster.groups[0].disk
            assert disk is not None
            rates = disk.model_copy(update={"read_bytes_per_s": rate, "write_bytes_per_s": rate})
            group = cluster.groups[0].model_copy(update={"disk": rates})
            slow = replace_group(cluster, group)
            found = predict(model, plan, workload, slow)
            alone = predict(model, parse_plan_name("dp1-mb8-rfull-oopt-bf16"), workload, slow)
            peak = 8 * model.num_parameters * workload.tokens_per_step / alone.step_time_s
            intensity = workload.tokens_per_step / 2
            formula = intensity * rate / (intensity * rate + peak)
            ours = alone.step_time_s / found.step_time_s
            yield Row(
                f"ZeRO-Infinity §4: efficiency with state on a disk of {rate / 1e9:g} GB/s, {sequences} sequences of"
                f" {seq_len:,}",
                f"{formula:.2f}",
                f"{ours:.2f} ({ours / formula - 1:+.0%})",
                "AIT · bw / (AIT · bw + rate), AIT = tokens / 2: 16 bytes an element, not their 32",
            )


def rate_row(case: str, published: float, found: Prediction) -> Row:
    """Return the row of a rate in model TFLOP/s, with the memory on the device."""
    ours, fullest = found.tflops_per_device, found.forecast.fullest
    return Row(
        case,
        f"{published} TFLOP/s",
        f"{ours:.0f} TFLOP/s ({ours / published - 1:+.0%})",
        f"{format_plan_name(found.plan)}, {fullest.terms.total / GIB:.1f} GiB on the device; model FLOPs without"
        " recompute",
    )


def replace_group(cluster: ClusterSpec, group: object) -> ClusterSpec:
    """Return the cluster with one group of nodes."""
    return cluster.model_copy(update={"groups": (group,)})


def fuyou() -> Iterator[Row]:
    """Yield what 175B needs on a 4090 with 768 GB and 12 drives, and the rate of 13B."""
    cluster = machine("1xrtx4090", 768e9, 12 * 3.84e12)
    disk = cluster.groups[0].disk
    assert disk is not None
    rate = 12 * 3e9  # of each drive as much as is assumed of any
    drives = disk.model_copy(update={"read_bytes_per_s": rate, "write_bytes_per_s": rate})
    cluster = replace_group(cluster, cluster.groups[0].model_copy(update={"disk": drives}))
    need, limit, _ = deepest_need(gpt(96, 12288, 96, 1024), cluster, 1024)
    yield Row(
        "Fuyou: 175B on one RTX 4090",
        "trains",
        f"needs {need / GIB:.0f} of {limit / GIB:.0f} GiB on the device",
        "state and parameters on disk",
    )
    plan = parse_plan_name("dp1-mb16-rfull-ooptd-oparamd-bf16")
    found = predict(gpt(40, 5120, 40, 1024), plan, Workload(seq_len=1024, global_batch_size=64), cluster)
    yield rate_row("Fuyou: 13B on one RTX 4090, batch 64, 12 drives", 156, found)


OPT_SIZES = {
    "1.3B": (24, 2048, 32, 3.75),
    "2.7B": (32, 2560, 32, 4.14),
    "6.7B": (32, 4096, 32, 4.99),
    "13B": (40, 5120, 40, 6.18),
    "30B": (48, 7168, 56, 8.86),
    "66B": (64, 9216, 72, 12.07),
    "175B": (96, 12288, 96, 18.04),
}
"""Layers, width and heads of OPT's sizes, and the GB that ZO2 has of the device (its README; batch 1 of 2,048 tokens,
fp16, what NVML says is in use after a step)."""


def zo2() -> Iterator[Row]:
    """Yield the memory of OPT's sizes on a device whose parameters come from host memory."""
    cluster, seq_len = machine("1xa100-80", 2e12), 2048
    plan = parse_plan_name("dp1-mb1-oopt-oparam-fp16")
    for size, (num_layers, hidden_size, num_heads, published) in OPT_SIZES.items():
        model = gpt(num_layers, hidden_size, num_heads, seq_len)
        model = model.model_copy(update={"vocab_size": 50272, "max_positions": seq_len + 2, "activation": "relu"})
        optim = OptimConfig(name="mezo", lr=1e-6)
        found = predict(model, plan, Workload(seq_len=seq_len, global_batch_size=1), cluster, optim=optim)
        fullest = found.forecast.fullest
        ours = fullest.terms.total / GIB
        yield Row(
            f"ZO2: OPT-{size}, batch 1 of 2,048 (README)",
            f"{published:.2f} GB",
            f"{ours:.2f} GiB ({ours / published - 1:+.0%})",
            f"{format_plan_name(plan)}, at its peak {fullest.peak_instruction.partition(', ')[2]}; up to 30B theirs is"
            " 2.0 to 2.3 GB more: copies of all logits in fp32, 0.4 GB each, where Muster's loss takes chunks",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| case | published | Muster | |\n|---|---|---|---|")
    for rows in (zero_offload, zero_infinity, fuyou, zo2):
        for row in rows():
            print(f"| {row.case} | {row.published} | {row.muster} | {row.reason} |")


if __name__ == "__main__":
    main()
