"""Frozen parameters: `optim.freeze` in the configuration, in optimizer state, traffic and memory."""

from math import prod
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.freezing import check_patterns, is_frozen
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import optimizer_state
from muster.cost.comm_volume import step_comm_bytes
from muster.cost.memory.forecast import forecast_memory
from muster.cost.time import param_communication
from muster.cost.time.plan_times import plan_times
from muster.cost.time.trained_parts import trained_parts
from muster.model.decoder import Decoder
from muster.schedule.build import build_program
from muster.spec.cluster import ClusterSpec, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train import memory_check
from tests.test_profiled_times import here, machine

SPEC = ModelSpec(vocab_size=512, hidden_size=64, num_layers=4, num_heads=4, intermediate_size=176)
WORKLOAD = Workload(seq_len=64, global_batch_size=4)


def frozen(*patterns: str) -> OptimConfig:
    return OptimConfig(lr=1e-3, freeze=patterns)


def test_patterns_name_parameters() -> None:
    optim = frozen("embed.*", "layers.[01].*", "*norm.*")
    names = ("embed.weight", "layers.1.attn.q.weight", "layers.3.mlp_norm.weight", "layers.2.attn.q.weight")
    assert [is_frozen(optim, name) for name in names] == [True, True, True, False]
    assert optimizer_state(optim, names[0], (512, 64)) == ()
    assert len(optimizer_state(optim, names[3], (64, 64))) == 2


def test_a_pattern_that_matches_nothing_and_a_model_without_anything_to_train_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match=r"no parameter is called 'model\.layers\.0\.\*'"):
        check_patterns(frozen("model.layers.0.*"), SPEC)
    assert main(["train", "--preset", "tiny", "--optim.freeze", "*", "--dry-run"]) == 2
    assert "all parameters are frozen, expected at least one that is trained" in capsys.readouterr().err


def test_frozen_gradients_are_not_reduced() -> None:
    plan = parse_plan_name("dp2-z1-fp32")
    whole, half = (step_comm_bytes(SPEC, plan, WORKLOAD, 0, optim) for optim in (None, frozen("layers.[0-3].mlp.*")))
    numel = 4 * 3 * 64 * 176
    assert whole["dp_shard"]["reduce_scatter"] - half["dp_shard"]["reduce_scatter"] == 4 * numel
    assert whole["dp_shard"]["all_gather"] == half["dp_shard"]["all_gather"]


@pytest.mark.parametrize(
    ("name", "patterns"),
    [("dp2-z1-fp32", ("embed.*", "layers.[0-2].*")), ("pp2-mb2-fp32", ("embed.*", "layers.[0-2].*"))],
)
def test_the_forecast_knows_what_is_frozen(name: str, patterns: tuple[str, ...]) -> None:
    """State, gradients and the activations of layers that nothing trained lies below, against PyTorch's tracker."""
    plan, optim, make = parse_plan_name(name), frozen(*patterns), memory_check._run_config
    cluster = single_node_cluster(DeviceSpec(name="cpu", kind="cpu"), plan.world_size)
    program = build_program(plan, SPEC, WORKLOAD)
    kernels = memory_check.FAKE_KERNELS
    forecast = forecast_memory(SPEC, plan, WORKLOAD, cluster, program, kernel_workspace=kernels, optim=optim)
    with patch.object(memory_check, "_run_config", lambda *of: make(*of).model_copy(update={"optim": optim})):
        found = memory_check.measure_fake_rank(SPEC, plan, WORKLOAD, plan.world_size - 1)
    assert forecast.ranks[-1].terms.total == pytest.approx(found.peak_bytes, rel=0.03)


def test_stages_that_are_alike_but_for_what_is_frozen_need_different_memory() -> None:
    """The middle stages of four have a layer each, of which one is frozen."""
    plan, optim = parse_plan_name("pp4-fp32"), frozen("embed.*", "layers.[01].*")
    cluster = single_node_cluster(DeviceSpec(name="cpu", kind="cpu"), 4)
    program = build_program(plan, SPEC, WORKLOAD)
    _, second, third, _ = forecast_memory(SPEC, plan, WORKLOAD, cluster, program, optim=optim).ranks
    layer = prod((64, 64)) * 4 + 3 * 64 * 176 + 2 * 64
    assert (second.terms.gradients, third.terms.gradients) == (0, 4 * layer)


PATTERNS = [
    ("embed.*", "layers.[01].*"),
    ("embed.*", "layers.[0-2].*", "layers.3.mlp.*"),
    ("*.attn.*",),
    ("embed.*", "layers.*", "norm.weight"),
    ("head.weight", "layers.1.*"),
]


@pytest.mark.parametrize("patterns", PATTERNS)
def test_the_trained_parts_are_those_whose_gradients_pytorch_computes(patterns: tuple[str, ...]) -> None:
    """FLOPs of the matmuls of a backward, by PyTorch's counter; attention's own are left out of both."""
    optim, plan = frozen(*patterns), parse_plan_name("dp1-fp32")
    with torch.device("meta"):
        model = Decoder(SPEC, range(SPEC.num_layers), first=True, last=True)
        tokens = torch.zeros(1, 64, dtype=torch.long)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(optim, name))
    loss = model(tokens).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(flops for op, flops in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    parts = trained_parts(optim, SPEC, plan, 0)
    assert parts is not None
    shapes = dict(parameter_shapes(SPEC))
    layer = sum(prod(shape) for name, shape in shapes.items() if name.startswith("layers.0.") and len(shape) == 2)
    of_head = prod(shapes["head.weight"])
    expected = sum((has + share) * layer for has, share in parts.layers) + (parts.head_input + parts.head) * of_head
    # The lowest layer with a backward needs no gradient of its input; the parts count whole layers.
    lowest = next((index for index, (has, _) in enumerate(parts.layers) if has), None)
    slack = 0 if lowest is None or parts.embedding else layer
    assert 2 * 64 * (expected - slack) <= counted <= 2 * 64 * expected


@pytest.mark.parametrize(
    ("cluster", "name"),
    [(load_cluster("2xh100"), "pp2-mb2"), (here(machine()), "pp2-mb2-fp32")],
    ids=["data sheet", "profile"],
)
def test_a_prediction_has_no_backward_of_frozen_layers(cluster: ClusterSpec, name: str) -> None:
    """By the data sheets of devices, and on a profiled machine."""
    whole, half, mlp = (
        plan_times(SPEC, parse_plan_name(name), WORKLOAD, cluster, optim=optim).seconds
        for optim in (None, frozen("embed.*", "layers.[01].*"), frozen("*.mlp.*"))
    )
    for kind in ("B", "I", "W"):
        assert half[kind, 0] < 0.02 * whole[kind, 0]
        assert half[kind, 1] == pytest.approx(whole[kind, 1])
    assert half["F", 0] == whole["F", 0]
    assert mlp["I", 0] == whole["I", 0]
    assert mlp["W", 1] < whole["W", 1]


def test_backwards_reduce_no_frozen_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, byte_s = parse_plan_name("dp2-pp2-z2-bf16"), 1e-18
    monkeypatch.setattr(param_communication, "reduce_scatter_s", lambda group, size: size * byte_s)
    whole, rest = (
        plan_times(SPEC, plan, WORKLOAD, load_cluster("4xh100"), optim=optim).exposed_s
        for optim in (None, frozen("embed.*"))
    )
    assert (whole["B", 0]["dp"] - rest["B", 0]["dp"]) / byte_s == pytest.approx(4 * prod((512, 64)))
    assert rest["B", 1] == whole["B", 1]


def test_frozen_shards_of_the_vocabulary_have_no_gradient_to_compute() -> None:
    plan = parse_plan_name("pp2-vocab-fp32")

    def seconds(optim: OptimConfig | None, kind: str) -> float:
        times = plan_times(SPEC, plan, WORKLOAD, load_cluster("2xh100"), optim=optim).seconds
        return sum(time_s for (own, _), time_s in times.items() if own == kind)

    for kind, pattern in (("T", "head.*"), ("EMB_W", "embed.*")):
        assert seconds(frozen("norm.*"), kind) == seconds(None, kind) > 0
        assert seconds(frozen(pattern), kind) == 0 < seconds(frozen(pattern), "S")
