"""Matmuls in 8 and 4 bits against a measurement of all recipes side by side, and what may run."""

import pytest

from muster.config.cluster_files import load_cluster, load_device
from muster.config.named_model import load_model
from muster.cost.time.cost_cache import CostCache
from muster.cost.time.kernels import matmul_s, stream_s
from muster.cost.time.plan_times import plan_times
from muster.cost.time.scaled_casts import matmul_rate, operand_cast_bytes
from muster.spec.frameworks import MEGATRON
from muster.spec.plan import Float8Recipe, Plan, Precision
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload

TOKENS, LINEARS = 15_872, ((12_288, 4096), (4096, 4096), (16_384, 4096), (4096, 16_384))
"""Rows, and outputs and inputs of the linear layers of a layer, of Transformer Engine's measurement."""
SPEEDUPS: dict[str, dict[tuple[Precision, Float8Recipe], float]] = {
    "h200": {("fp8", "tensorwise"): 1.58, ("fp8", "delayed"): 1.69, ("fp8", "blockwise"): 1.40},
    "b300": {
        ("fp8", "tensorwise"): 1.41,
        ("fp8", "delayed"): 1.61,
        ("fp8", "mxfp8"): 1.44,
        ("nvfp4", "tensorwise"): 2.03,
    },
}
"""Measured times in bf16 over those in each recipe, casts included (github:NVIDIA/TransformerEngine
docs/examples/gemm_profiling)."""


def _layer_s(device_name: str, precision: Precision, recipe: Float8Recipe = "tensorwise") -> float:
    """Return the seconds of a layer's twelve matmuls, each of which casts both operands as a measured one does."""
    device, total_s = load_device(device_name), 0.0
    cast = 0.0 if precision == "bf16" else operand_cast_bytes(precision, recipe, device)
    rate = matmul_rate(recipe, device) if precision == "fp8" else 1.0
    for outputs, inputs in LINEARS:
        for m, n, k in ((TOKENS, outputs, inputs), (TOKENS, inputs, outputs), (outputs, inputs, TOKENS)):
            total_s += matmul_s(device, m, n, k, precision) / rate + stream_s(device, cast * (m * k + n * k))
    return total_s


@pytest.mark.parametrize("device", SPEEDUPS)
def test_recipes_gain_over_bf16_what_was_measured(device: str) -> None:
    """The measured casts write weights along rows alone, and were made on H200 NVL, whose memory is as fast."""
    measured = SPEEDUPS[device]
    found = {kind: _layer_s(device, "bf16") / _layer_s(device, *kind) for kind in measured}
    assert found == pytest.approx(measured, rel=0.1)
    assert sorted(found, key=lambda kind: found[kind])[-1] == max(measured, key=lambda kind: measured[kind])


def test_a_plan_takes_the_time_of_its_recipe() -> None:
    """With one cache for all, as rows of a table have."""
    model, workload, cache = load_model("llama3-8b"), Workload(seq_len=8192, global_batch_size=8), CostCache()
    clusters = {device: load_cluster(f"1x{device}") for device in ("h100", "b200", "a100", "v100")}

    def pass_s(device: str, precision: Precision, recipe: Float8Recipe = "tensorwise") -> float:
        plan = Plan(precision=precision, fp8_recipe=recipe, micro_batch_size=4)
        times = plan_times(model, plan, workload, clusters[device], framework=MEGATRON, cache=cache).seconds
        return sum(times[kind, 0] for kind in "FB")

    h100 = [pass_s("h100", "fp8", recipe) for recipe in ("delayed", "tensorwise", "blockwise")]
    assert sorted(h100) == h100
    assert h100[-1] < pass_s("h100", "bf16")
    assert pass_s("b200", "nvfp4") < pass_s("b200", "fp8", "mxfp8") < pass_s("b200", "bf16")
    assert pass_s("h100", "nvfp4") == pass_s("h100", "fp8"), "which has no matmuls of 4 bits"
    assert pass_s("a100", "tf32") < pass_s("a100", "fp32") / 3
    assert pass_s("v100", "tf32") == pass_s("v100", "fp32")


@pytest.mark.parametrize(
    "fields", [{"precision": "nvfp4"}, {"precision": "tf32"}, {"precision": "fp8", "fp8_recipe": "delayed"}]
)
def test_what_is_predicted_alone_is_refused_by_the_runtime(fields: dict[str, str]) -> None:
    refused = unsupported_features(Plan.model_validate(fields), load_model("tiny"))
    assert any("predicted for other programs alone" in reason for reason in refused)
