"""Generation with layers in host memory: the same texts, copies ahead of compute, and memory as forecast."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from muster.api.trained_models import generate
from muster.cli.main import main
from muster.config.named_model import load_model
from muster.cost.memory.generation import away_layers, generation_memory
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.parallel.allocation_meter import AllocationMeter
from muster.parallel.inference import build_inference_decoder
from muster.parallel.layer_window import LayerWindow, _AwayLayer
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from tests.parity import small_run
from tests.test_model import SMALL, tokens_for

CPU = torch.device("cpu")


def logits(spec: ModelSpec, name: str, window: int) -> tuple[list[Tensor], list[str]]:
    """Logits after each of four reads, and the copies to the device and forwards of layers in their order."""
    plan, events = parse_plan_name(name, Plan(precision="fp64")), []
    away = away_layers(spec, plan)
    model, _ = build_inference_decoder(spec, plan.precision, CPU, None, away=away)
    for parameter, value in zip(model.parameters(), _values(spec), strict=True):
        parameter.copy_(value)
    slid = LayerWindow(model, CPU, away, window)
    enter, copies = _AwayLayer.enter, _AwayLayer.copies_into

    def note(kind: str, layer: _AwayLayer) -> None:
        events.append(f"{kind}{slid._layers.index(layer)}")

    def entered(self: _AwayLayer, buffer: Tensor) -> None:
        note("F", self)
        enter(self, buffer)

    def copied(self: _AwayLayer, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        note("C", self)
        return copies(self, buffer)

    found, tokens = [], tokens_for(spec, seq=9)
    with (
        patch.object(_AwayLayer, "enter", entered),
        patch.object(_AwayLayer, "copies_into", copied),
        KvCache(model, torch.tensor([0, 2]), capacity=9) as cache,
    ):
        for part in tokens.split((5, 1, 1, 2), dim=1):
            found.append(cache.read(part))
    return found, events


def swapped_layers(start: Callable[[LayerWindow, int], None]) -> Callable[[LayerWindow, int], None]:
    """A window that brings the layer after the one that it should."""

    def faulty(self: LayerWindow, place: int) -> None:
        layers = self._layers
        self._layers = [*layers[1:], layers[0]]
        start(self, place)
        self._layers = layers

    return faulty


def _values(spec: ModelSpec) -> list[Tensor]:
    model, _ = build_inference_decoder(spec, "fp64", CPU, None)
    init_stage(model, spec, 5)
    return [8 * one if one.ndim > 1 else one for one in model.parameters()]


@pytest.mark.parametrize("family", ["llama", "experts", "deepseek", "gpt2", "low rank"])
def test_a_window_changes_no_bit(family: str) -> None:
    spec = small_run(layers=3, family=family).model
    expected, none = logits(spec, "dp1", 2)
    assert not none
    for name, window in (("oparam", 1), ("oparam", 2), ("oparam", 9), ("oparam0.5", 2)):
        found, events = logits(spec, name, window)
        assert all(map(torch.equal, found, expected)), (name, window)
        assert events
    with patch.object(LayerWindow, "_start", swapped_layers(LayerWindow._start)):
        assert not any(map(torch.equal, logits(spec, "oparam", 2)[0], expected))


def test_layers_arrive_while_earlier_ones_compute() -> None:
    """In a window of two each is copied before the one before it computes, also around the end of the model."""
    spec = SMALL.model_copy(update={"num_layers": 3})
    _, events = logits(spec, "oparam", 2)
    assert events[:9] == ["C0", "C1", "F0", "C2", "F1", "C0", "F2", "C1", "F0"]
    _, events = logits(spec, "oparam", 1)
    assert events[:6] == ["C0", "F0", "C1", "F1", "C2", "F2"]


@pytest.mark.parametrize(("name", "window"), [("dp1", 2), ("oparam", 1), ("oparam", 3), ("oparam0.5", 2)])
def test_memory_is_that_forecast(name: str, window: int) -> None:
    spec = load_model("demo").model_copy(update={"num_layers": 8, "hidden_size": 256, "intermediate_size": 1024})
    plan = parse_plan_name(name, Plan(precision="fp32"))
    needed = generation_memory(spec, plan, texts=2, prompt_positions=24, positions=48, window=window)
    with AllocationMeter(1 << 40, AssertionError) as counted:
        away = away_layers(spec, plan)
        model, _ = build_inference_decoder(spec, "fp32", CPU, None, away=away)
        assert LayerWindow(model, CPU, away, window)
        with KvCache(model, torch.tensor([0, 3]), capacity=48) as cache:
            cache.read(torch.zeros(2, 24, dtype=torch.long))
            cache.read(torch.zeros(2, 1, dtype=torch.long))
    assert counted.peak_bytes <= needed.device <= 1.05 * counted.peak_bytes
    layer_bytes = sum(parameter.nbytes for parameter in model.layers["0"].parameters())
    assert needed.host == len(away) * layer_bytes
    assert needed.window == min(window, len(away)) * layer_bytes


def test_a_limit_is_kept_and_names_the_plan_that_fits(whole: Path, capsys: pytest.CaptureFixture) -> None:
    expected = generate(whole, ["import ", "d"], tokens=12, temperature=0).texts
    limited = generate(whole, ["import ", "d"], tokens=12, temperature=0, plan="oparam", memory_limit="900KB")
    assert limited.texts == expected
    assert generate(whole, ["import ", "d"], tokens=12, temperature=0, plan="tp2-oparam", window=1).texts == expected
    flags = ["generate", str(whole), "--prompt", "import ", "--tokens", "12", "--memory-limit"]
    assert main([*flags, "900KB"]) == 3
    assert "--plan dp1-mb1-oparam-fp32 --window 2 fits" in capsys.readouterr().err
    assert main([*flags, "90KB", "--plan", "oparam"]) == 3
    assert "even one layer at a time doesn't fit" in capsys.readouterr().err
    assert main([*flags, "900KB", "--plan", "oparamd"]) == 3
    error = capsys.readouterr().err
    assert "can't generate text with oparamd" in error
    assert error.rstrip().endswith("oparam-fp32")
    assert main([*flags, "900KB", "--window", "1"]) == 2
    assert "--window 1 is the number of layers" in capsys.readouterr().err
