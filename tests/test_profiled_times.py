"""Times from a machine's measured rates."""

import pytest

from muster.config.cluster_files import load_cluster
from muster.cost.flops import forward_flops_per_token
from muster.cost.host_updates import disk_rates
from muster.cost.time import alternating_turns
from muster.cost.time.plan_times import plan_times
from muster.cost.time.profiled_times import overhead_name, profiled_times
from muster.cost.time.rate_interpolation import RateInterpolator
from muster.simulate.predict import predict
from muster.spec.cluster import ClusterSpec, NodeGroup, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.machine_rates import KernelRates, MachineRates
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

SMALL = ModelSpec(vocab_size=512, hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, intermediate_size=128)
WORKLOAD = Workload(seq_len=64, global_batch_size=16)
FLOPS_PER_S, BYTES_PER_S, TINY_S = 1e9, 1e8, 1e-12
CURVES = ("norm", "gated", "rotary", "loss", "embedding")
PLAIN = ("add", "copy", "adamw", "gradient norm", "scale")


def machine(overheads: dict[str, float] | None = None, curve_s: float = TINY_S) -> MachineRates:
    """Products take as many seconds as they have GFLOPs, collectives as their bytes want; all else is almost free."""
    sizes = (1, 16, 256, 4096)
    grid = [(m, k, n, 2 * m * k * n / FLOPS_PER_S) for m in sizes for k in sizes for n in sizes]
    curve = ((1, curve_s), (1 << 24, curve_s))
    kernels = KernelRates(
        matmuls={"forward": tuple(grid), "input": tuple(grid), "weight": tuple(grid)},
        attention=dict.fromkeys(("forward", "backward"), ((1, 1, TINY_S), (4096, 4096, TINY_S))),
        curves={f"{name} {way}": curve for name in CURVES for way in ("forward", "backward")}
        | dict.fromkeys(PLAIN, curve),
    )
    calls = tuple((ranks, count, count / BYTES_PER_S) for ranks in (2, 4) for count in (16, 1 << 24))
    names = ("all_reduce", "all_gather", "reduce_scatter", "send")
    return MachineRates(
        ranks=4, cores=2, kernels={"fp32": kernels}, collectives=dict.fromkeys(names, calls), overheads=overheads or {}
    )


def here(rates: MachineRates) -> ClusterSpec:
    """A machine of two cores with these rates."""
    return single_node_cluster(DeviceSpec(name="here", kind="cpu", shared_cores=2, rates=rates), 2)


# ----------------------------------------------------------------------------------------------------------------------
# Between sizes


def test_a_power_law_lies_between_sizes_and_grows_beyond():
    rates = RateInterpolator(machine(), "fp32")
    for tokens, inner, outer in ((16, 256, 256), (100, 300, 70), (5000, 4096, 10_000), (1, 1, 3)):
        assert rates.matmul("forward", tokens, inner, outer) == pytest.approx(2e-9 * tokens * inner * outer)
    curved = machine().kernels["fp32"].model_copy(update={"curves": {"x": ((10, 1e-6), (1000, 1e-4), (10_000, 1e-2))}})
    rates = RateInterpolator(machine().model_copy(update={"kernels": {"fp32": curved}}), "fp32")
    found = [rates.kernel("x", numbers) for numbers in (0, 1, 10, 100, 1000, 10_000, 20_000)]
    assert found == pytest.approx([0, 1e-6, 1e-6, 1e-5, 1e-4, 1e-2, 2e-2])


def test_corners_that_were_too_large_go_on_at_the_rate_of_smaller_ones():
    kernels = machine().kernels["fp32"]
    known = {kind: tuple(p for p in points if p[0] * p[1] * p[2] < 4096**2) for kind, points in kernels.matmuls.items()}
    less = machine().model_copy(update={"kernels": {"fp32": kernels.model_copy(update={"matmuls": known})}})
    for size in ((256, 4096, 4096), (4096, 4096, 4096), (1000, 3000, 500)):
        assert RateInterpolator(less, "fp32").matmul("input", *size) == pytest.approx(
            2e-9 * size[0] * size[1] * size[2]
        )


def test_collectives_of_numbers_of_ranks_that_were_not_measured():
    rates = RateInterpolator(machine(), "fp32")
    at_4_s = rates.collective("all_gather", 4, 1 << 20)
    assert rates.collective("all_gather", 8, 1 << 20) == pytest.approx(at_4_s * 7 / 3)
    assert rates.collective("all_reduce", 8, 1 << 20) == pytest.approx(at_4_s * (7 / 8) / (3 / 4))
    assert rates.collective("all_reduce", 1, 1 << 20) == 0.0


def test_what_was_not_measured_is_refused():
    plan = Plan(pp=2, vocab_parallel=True, precision="fp32")
    with pytest.raises(InfeasibleError, match="no times for a vocabulary that is spread"):
        profiled_times(SMALL, plan, WORKLOAD, machine())


def test_a_type_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="measured in fp32, not in bf16"):
        RateInterpolator(machine(), "bf16")


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def test_products_are_all_of_the_models_flops():
    """Attention's scores aside, which cost nothing here."""
    spec = SMALL.model_copy(update={"tied_embeddings": False})
    scores = 4 * WORKLOAD.seq_len * spec.num_heads * spec.head_dim * spec.num_layers
    flops = (forward_flops_per_token(spec, WORKLOAD.seq_len) - scores) * WORKLOAD.seq_len * 2
    for name in ("mb2-dp1", "pp4-mb2", "pp2v2-sinterleaved-mb2"):
        plan = parse_plan_name(f"{name}-fp32")
        times = profiled_times(spec, plan, WORKLOAD, machine())
        forward_s, backward_s, split_s = (
            sum(times.seconds[kind, stage] for kind in kinds for stage in range(plan.num_stages))
            for kinds in ("F", "B", "IW")
        )
        assert forward_s == pytest.approx(flops / FLOPS_PER_S, rel=1e-3)
        assert backward_s == pytest.approx(2 * flops / FLOPS_PER_S, rel=1e-3)
        assert split_s == pytest.approx(backward_s)


def test_tensor_parallelism_halves_the_products_and_adds_two_sums_each_way():
    alone, cut = (
        profiled_times(SMALL, parse_plan_name(f"{name}-pp4-fp32"), WORKLOAD, machine()) for name in ("dp1", "tp2")
    )
    hidden_bytes = 64 * 64 * 4
    within_s = 2 * 2 * hidden_bytes / BYTES_PER_S  # two layers, each two sums
    for kind in ("F", "B"):
        assert cut.exposed_s[kind, 1] == pytest.approx({"tp": within_s})
        assert cut.seconds[kind, 1] == pytest.approx(alone.seconds[kind, 1] / 2 + within_s, rel=1e-3)
    sequence = profiled_times(SMALL, parse_plan_name("tp2-sp-pp4-fp32"), WORKLOAD, machine())
    assert sequence.exposed_s["F", 1]["tp"] == pytest.approx(within_s * 1.5)  # a half is gathered, a whole scattered


def test_each_level_of_sharding_gathers_and_reduces_where_it_does():
    numbers = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64)
    gather_s, reduce_s = (numbers * 4 / part / BYTES_PER_S for part in (2, 1))
    for zero in ("z1", "z2", "z3"):
        plan = Plan(pp=4, dp_shard=2, precision="fp32", default_strategy=LayerStrategy(zero=zero))
        times = profiled_times(SMALL, plan, WORKLOAD, machine())
        forward, backward, inputs, weights = (times.exposed_s.get((kind, 1), {}).get("dp", 0.0) for kind in "FBIW")
        assert forward == pytest.approx(gather_s if zero == "z3" else 0, rel=1e-3)
        expected = (gather_s if zero == "z3" else 0) + (reduce_s if zero != "z1" else 0)
        assert backward == pytest.approx(expected, rel=1e-3)
        assert (inputs, weights) == pytest.approx((forward, reduce_s if zero != "z1" else 0), rel=1e-3)
        assert times.seconds["UNSHARD", 1] == pytest.approx(gather_s, rel=1e-3)
        assert times.seconds["REDUCE_GRAD", 1] == pytest.approx(reduce_s, rel=1e-3)


def test_recompute_makes_forwards_again():
    plain, cheap, full = (
        profiled_times(SMALL, parse_plan_name(f"pp4-fp32{more}"), WORKLOAD, machine(curve_s=1e-3))
        for more in ("", "-relem", "-rfull")
    )
    assert full.seconds["B", 1] - plain.seconds["B", 1] == pytest.approx(plain.seconds["F", 1])
    assert cheap.seconds["B", 1] - plain.seconds["B", 1] == pytest.approx(2 * 3e-3)  # two norms and the gated unit
    assert cheap.seconds["F", 1] == plain.seconds["F", 1]


def test_in_company_everything_takes_as_much_longer_as_whole_steps_did():
    """Sharded stages by what was measured of them, others by the mean."""
    for name, factor in (("dp2-pp2-z1-fp32", 1.5), ("dp2-tp2-z1-fp32", 1.25)):
        plan = parse_plan_name(name)
        known = machine().model_copy(update={"contention": {"z1": 1.5, "z2": 1.0}})
        with_others, alone = (predict(SMALL, plan, WORKLOAD, here(rates)) for rates in (known, machine()))
        assert with_others.step_time_s == pytest.approx(factor * alone.step_time_s)
        assert with_others.parts.compute_s == pytest.approx(factor * alone.parts.compute_s)


def test_bookkeeping_comes_with_each_layer():
    known = {overhead_name("z1", "F", "base"): 1.0, overhead_name("z1", "F", "layer"): 10.0}
    plan = parse_plan_name("dp2-pp2-z1-fp32").model_copy(update={"stages": (StageSpec(layers=3), StageSpec(layers=5))})
    times, bare = (profiled_times(SMALL, plan, WORKLOAD, machine(overheads)) for overheads in (known, None))
    assert [times.seconds["F", stage] - bare.seconds["F", stage] for stage in (0, 1)] == pytest.approx([31, 51])


def test_a_measured_machine_runs_any_number_of_ranks_on_its_cores():
    cluster = here(machine())
    one, two, four = (
        predict(SMALL, parse_plan_name(f"{name}-fp32"), WORKLOAD, cluster) for name in ("dp1", "dp2-z1", "dp4-z1")
    )
    assert two.times.cores == 2
    assert one.step_time_s / two.step_time_s == pytest.approx(2, rel=0.1)
    assert two.step_time_s == pytest.approx(four.step_time_s, rel=0.1)
    assert plan_times(SMALL, four.plan, WORKLOAD, cluster) == four.times


def test_a_profile_is_a_cluster_file(tmp_path):
    from muster.config.local_machine import cluster_text
    from muster.probe.profile import cluster_from_rates, summary

    disk = {"disk_read_bytes_per_s": 6e9, "disk_write_bytes_per_s": 2e9}
    rates = machine({"z1 F base": 1e-4}).model_copy(update=disk)
    cluster = cluster_from_rates(rates)
    (tmp_path / "machine.yaml").write_text(cluster_text(cluster))
    read = load_cluster(str(tmp_path / "machine.yaml"))
    assert isinstance(read, ClusterSpec)
    assert isinstance(read.groups[0], NodeGroup)
    assert read == cluster
    assert read.device.rates == rates
    assert disk_rates(read.groups[0]) == (6e9, 2e9)
    assert "2 cores" in summary(read)
    assert "6.00 GB/s read and 2.00 GB/s written" in summary(read)
    plan = parse_plan_name("dp1-ooptd-fp32")
    times = plan_times(SMALL, plan, WORKLOAD, read)
    assert times.seconds["WRITE_STATE", 0] == pytest.approx(3 * times.seconds["READ_STATE", 0])


@pytest.mark.parametrize(("residual", "words"), [("ladder", "tp2"), ("standard", "tp2-domino-mb2")])
def test_the_last_collective_of_layers_that_take_turns_is_exposed(monkeypatch, residual, words):
    """Once a pass, however many layers there are, on a device whose collectives take no cores."""
    monkeypatch.setattr(alternating_turns, "OVERLAP_SLOWDOWN", 0.0)
    rates = machine().model_copy(update={"cores": 0})
    plan = parse_plan_name(f"{words}-fp32")

    def constant_s(model: ModelSpec, plan: Plan) -> float:
        """Exposed seconds of a forward that don't grow with the layers."""
        found = []
        for layers in (8, 16):
            longer = model.model_copy(update={"num_layers": layers})
            found.append(profiled_times(longer, plan, WORKLOAD, rates).exposed_s["F", 0]["tp"])
        return 2 * found[0] - found[1]

    plain = parse_plan_name(f"{words.replace('-domino', '')}-fp32")
    end_s = constant_s(SMALL.model_copy(update={"residual": residual}), plan) - constant_s(SMALL, plain)
    assert end_s == pytest.approx(64 * 64 * 4 / BYTES_PER_S, rel=1e-3)
