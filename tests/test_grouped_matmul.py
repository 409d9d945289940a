"""Kernels of grouped matmuls: their parity, their choice by measured rates, and predictions from these."""

import copy
from collections.abc import Mapping
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from muster.config.grouped_matmul_file import keep_grouped_rates
from muster.config.local_machine import cluster_text
from muster.config.named_model import load_model
from muster.cost.time.profiled_times import profiled_times
from muster.model.decoder import recomputable
from muster.model.experts import Experts
from muster.model.grouped_matmul import MeasuredKernels, Segments, StackedLinear, grouped_linears, has_grouped_mm
from muster.spec.errors import InfeasibleError
from muster.spec.machine_rates import GroupedKernel, GroupedMatmuls, MachineRates
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.grouped_kernels import use_measured_kernels
from tests.test_profiled_times import here, machine


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (2, 2, 2, 2), (0, 0, 9, 0), (0, 0, 0, 0)])
def test_every_kernel_multiplies_alike(counts: tuple[int, ...]) -> None:
    """Products and gradients of the kernels of grouped matmuls equal those of single matmuls in float64; PyTorch's own,
    which doesn't know it, in float32."""
    num_rows, linear = sum(counts), StackedLinear(4, 8, 12, bias=True).double()
    nn.init.normal_(linear.bias)  # type: ignore[arg-type]
    x_RI = torch.randn(num_rows, 8, dtype=torch.float64, requires_grad=True)
    out_RO = torch.randn(num_rows, 12, dtype=torch.float64)

    def made(kernel: GroupedKernel, dtype: torch.dtype) -> list[Tensor]:
        segments, own = Segments(torch.tensor(counts), num_rows), copy.deepcopy(linear).to(dtype)

        def choose(kind: str, of_dtype: torch.dtype, rows: Segments, *widths: int) -> GroupedKernel:
            assert (of_dtype, rows, *widths) == (dtype, segments, 8, 12), "sizes of the layer in each pass"
            return kernel

        segments.choose_kernel = choose
        rows = x_RI.detach().to(dtype).requires_grad_()
        (y_RO,) = grouped_linears(rows, segments, own)
        return [y_RO, *torch.autograd.grad((y_RO * out_RO.to(dtype)).sum(), (rows, own.weight, own.bias))]  # type: ignore[arg-type]

    bounds = [0, *accumulate(counts)]
    bias_EO = linear.bias
    assert bias_EO is not None
    parts = [x_RI[start:end] @ linear.weight[e].T + bias_EO[e] for e, (start, end) in enumerate(pairwise(bounds))]
    y_RO = torch.cat(parts)
    wanted = [y_RO, *torch.autograd.grad((y_RO * out_RO).sum(), (x_RI, linear.weight, bias_EO))]
    cases: list[tuple[GroupedKernel, torch.dtype, float]] = [
        ("segments", torch.float64, 1e-10),
        ("padded", torch.float64, 1e-10),
    ]
    if has_grouped_mm(torch.device("cpu"), torch.float32):
        cases.append(("grouped_mm", torch.float32, 1e-5))
    for kernel, dtype, tolerance in cases:
        for a, b in zip(made(kernel, dtype), wanted, strict=True):
            torch.testing.assert_close(a, b.to(dtype), rtol=tolerance, atol=tolerance, msg=kernel)


def test_measured_kernels_take_the_fastest_one_for_the_fullest_expert() -> None:
    """A kernel that pads is measured as the fastest for few rows, but isn't taken where one expert has nearly all."""
    slow = dict.fromkeys(("forward", "input", "weight"), ((1, 8, 8, 1e-06), (64, 8, 8, 8e-06)))
    quick = dict.fromkeys(("forward", "input", "weight"), ((1, 8, 8, 1e-07), (64, 8, 8, 1e-05)))
    kernels = MeasuredKernels({"fp64": {"segments": slow, "padded": quick}})

    def chosen(*counts: int) -> GroupedKernel:
        return kernels("forward", torch.float64, Segments(torch.tensor(counts), sum(counts)), 8, 8)

    assert [chosen(2, 2, 2, 2), chosen(0, 64, 0, 0), chosen(64, 64, 64, 64)] == ["padded", "segments", "segments"]
    assert kernels("forward", torch.float32, Segments(torch.tensor([2]), 2), 8, 8) == "segments", "not measured"


def measured(seconds: Mapping[GroupedKernel, float]) -> MachineRates:
    """The machine of profiled times whose kernels take so many seconds for a GFLOP of each expert's matmuls."""
    sizes = (1, 16, 256)
    grouped: GroupedMatmuls = {
        kernel: {
            kind: tuple((m, k, n, 2e-9 * m * k * n * each) for m in sizes for k in sizes for n in sizes)
            for kind in ("forward", "input", "weight")
        }
        for kernel, each in seconds.items()
    }
    known = machine()
    kernels = known.kernels["fp32"]
    routing = {f"routing {way}": kernels.curves["copy"] for way in ("forward", "backward")}
    own = {"grouped_matmuls": grouped, "curves": kernels.curves | routing}
    return known.model_copy(update={"kernels": {"fp32": kernels.model_copy(update=own)}})


SPEEDS: dict[str, dict[GroupedKernel, float]] = {
    "alone": {"segments": 1.0},
    "with faster": {"segments": 1.0, "grouped_mm": 0.5},
}


def test_a_prediction_takes_the_kernel_that_the_runtime_takes() -> None:
    """Experts' matmuls cost what the fastest measured kernel takes, and what travels what a reduce-scatter takes; with
    ep 2 a rank has as many rows, for half as many experts."""
    model, workload = load_model("tiny-moe"), Workload(seq_len=64, global_batch_size=8)
    times = {
        (name, speed): profiled_times(model, parse_plan_name(f"{name}-mb2-z1-fp32"), workload, measured(speeds))
        for name in ("dp2", "dp2-ep2")
        for speed, speeds in SPEEDS.items()
    }
    assert model.moe is not None
    matmuls_s = 2e-9 * 3 * 64 * 96 * (2 * 64 * model.moe.top_k) * len(model.expert_layers)
    for name in ("dp2", "dp2-ep2"):
        slow, fast = (times[name, speed].seconds["F", 0] for speed in ("alone", "with faster"))
        assert slow - fast == pytest.approx(matmuls_s / 2, rel=1e-6)
    exchanged = times["dp2-ep2", "alone"].exposed_s["F", 0]["ep"]
    rows_s = 2 * (2 * 64 * model.moe.top_k) * 64 * 4 / 1e8 * len(model.expert_layers)
    assert exchanged == pytest.approx(rows_s, rel=0.01), "rows there and back, and numbers of them"
    with pytest.raises(InfeasibleError, match="experts, which a profile of an earlier version has not measured"):
        profiled_times(model, parse_plan_name("dp2-fp32"), workload, machine())


def test_a_run_keeps_the_rates_of_its_first_attempt(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = load_model("tiny-moe")
    (run := tmp_path / "run").mkdir()
    part = nn.ModuleList([Experts(model, recomputable)])

    def chosen() -> GroupedKernel:
        use_measured_kernels([part], run, "cpu")
        experts: Experts = part[0]  # type: ignore[assignment]
        return experts.choose_kernel("forward", torch.float32, Segments(torch.tensor([4, 4]), 8), 64, 96)

    keep_grouped_rates(model, run, resumes=False)
    assert chosen() == "segments", "a machine that was not measured"
    attempts: list[tuple[dict[GroupedKernel, float], bool]] = [
        ({"segments": 1.0, "padded": 0.5}, False),
        ({"segments": 0.5, "padded": 1.0}, True),
    ]
    for rates, resumes in attempts:
        (tmp_path / "machine.yaml").write_text(cluster_text(here(measured(rates))))
        keep_grouped_rates(model, run, resumes)
        assert chosen() == "padded"
