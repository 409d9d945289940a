"""Generation with layers in host memory: the same texts, copies ahead of compute, and memory as forecast."""

import errno
import os
from collections.abc import Callable, Collection
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from muster.api.trained_models import generate
from muster.cli.main import main
from muster.config.named_model import load_model
from muster.cost.memory.generation import away_layers, generation_memory
from muster.layout.host_updates import layer_of
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.parallel import file_store
from muster.parallel.allocation_meter import AllocationMeter
from muster.parallel.inference import build_inference_decoder
from muster.parallel.layer_window import LayerWindow, _AwayLayer, write_disk_layers
from muster.parallel.offload import HostLink
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from tests.parity import small_run
from tests.test_model import SMALL, tokens_for
from tests.train_runs import generated

CPU = torch.device("cpu")


def logits(spec: ModelSpec, name: str, window: int) -> tuple[list[Tensor], list[str]]:
    """Logits after each of four reads, and the copies to the device and forwards of layers in their order."""
    plan, events = parse_plan_name(name, Plan(precision="fp64")), []
    away = away_layers(spec, plan)
    model, _ = build_inference_decoder(spec, plan.precision, CPU, None, away=away)
    parameters = dict(model.named_parameters())
    values = dict(zip(parameters, _values(spec), strict=True))

    def load(names: Collection[str]) -> None:
        for name in names:
            parameters[name].copy_(values[name])

    slots = write_disk_layers(model, away, load)
    load([name for name in parameters if layer_of(name) not in slots])
    slid = LayerWindow(model, CPU, away, window, slots)
    enter, bring = _AwayLayer.enter, _AwayLayer.bring

    def note(kind: str, layer: _AwayLayer) -> None:
        events.append(f"{kind}{slid._layers.index(layer)}")

    def entered(self: _AwayLayer, buffer: Tensor) -> None:
        note("F", self)
        enter(self, buffer)

    def brought(self: _AwayLayer, buffer: Tensor, link: HostLink) -> Callable[[], None]:
        note("C", self)
        return bring(self, buffer, link)

    found, tokens = [], tokens_for(spec, seq=9)
    with (
        patch.object(_AwayLayer, "enter", entered),
        patch.object(_AwayLayer, "bring", brought),
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
    for name, window in (("oparam", 1), ("oparam", 2), ("oparam", 9), ("oparam0.5", 2), ("oparamd", 1), ("oparamd", 3)):
        found, events = logits(spec, name, window)
        assert all(map(torch.equal, found, expected)), (name, window)
        assert events
    with patch.object(LayerWindow, "_start", swapped_layers(LayerWindow._start)):
        assert not any(map(torch.equal, logits(spec, "oparam", 2)[0], expected))
        assert not any(map(torch.equal, logits(spec, "oparamd", 2)[0], expected))


def test_layers_on_disk_reach_a_gpu_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, through one buffer in host memory for each layer of the window."""
    links = []

    class GpuLink(HostLink):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.device = torch.device("cuda")
            links.append(self)

    expected, _ = logits(SMALL, "dp1", 2)
    monkeypatch.setattr(LayerWindow, "link_type", GpuLink)
    found, _ = logits(SMALL, "oparamd", 2)
    assert all(map(torch.equal, found, expected))
    model, _ = build_inference_decoder(SMALL, "fp64", CPU, None)
    size = _AwayLayer(model.layers["0"]).num_bytes
    assert links[0].pool.num_bytes == 2 * size
    assert links[0].copied_bytes > 0


def test_a_disk_that_fails_is_one_sentence(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ["generate", str(whole), "--prompt", "d", "--tokens", "2", "--plan", "oparamd"]

    def no_room(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", no_room)
        assert main(words) == 1
    error = capsys.readouterr().err
    assert "muster: layers on disk can't be given " in error
    assert "No space left on device; make room there, or leave oparamd out of the plan, or name another" in error
    (tmp_path / "file").touch()
    monkeypatch.setattr(file_store, "gettempdir", lambda: str(tmp_path / "file"))
    assert main(words) == 1
    assert "muster: layers on disk can't be opened in " in capsys.readouterr().err


def test_layers_arrive_while_earlier_ones_compute() -> None:
    """In a window of two each is copied before the one before it computes, also around the end of the model."""
    spec = SMALL.model_copy(update={"num_layers": 3})
    _, events = logits(spec, "oparam", 2)
    assert events[:9] == ["C0", "C1", "F0", "C2", "F1", "C0", "F2", "C1", "F0"]
    _, events = logits(spec, "oparam", 1)
    assert events[:6] == ["C0", "F0", "C1", "F1", "C2", "F2"]


@pytest.mark.parametrize(
    ("name", "window"), [("dp1", 2), ("oparam", 1), ("oparam", 3), ("oparam0.5", 2), ("oparamd", 2)]
)
def test_memory_is_that_forecast(name: str, window: int) -> None:
    spec = load_model("demo").model_copy(update={"num_layers": 8, "hidden_size": 256, "intermediate_size": 1024})
    plan = parse_plan_name(name, Plan(precision="fp32"))
    needed = generation_memory(spec, plan, texts=2, prompt_positions=24, positions=48, window=window)
    with AllocationMeter(1 << 40, AssertionError) as counted:
        away = away_layers(spec, plan)
        model, _ = build_inference_decoder(spec, "fp32", CPU, None, away=away)
        slots = write_disk_layers(model, away, lambda _: None)
        assert LayerWindow(model, CPU, away, window, slots)
        with KvCache(model, torch.tensor([0, 3]), capacity=48) as cache:
            cache.read(torch.zeros(2, 24, dtype=torch.long))
            cache.read(torch.zeros(2, 1, dtype=torch.long))
    assert counted.peak_bytes <= needed.device <= 1.05 * counted.peak_bytes
    layer_bytes = sum(parameter.nbytes for parameter in model.layers["0"].parameters())
    assert needed.host == sum(tier == "host" for tier in away.values()) * layer_bytes
    assert needed.disk == sum(slot.size for slot in slots.values()) == len(slots) * layer_bytes
    assert needed.window == min(window, len(away)) * layer_bytes


def test_a_limit_is_kept_and_names_the_plan_that_fits(whole: Path, capsys: pytest.CaptureFixture) -> None:
    expected = generate(whole, ["import ", "d"], tokens=12, temperature=0).texts
    limited = generate(whole, ["import ", "d"], tokens=12, temperature=0, plan="oparam", memory_limit="900KB")
    assert limited.texts == expected
    assert generated(whole, "import ", "d", plan="tp2-oparam", words=("--tokens", "12", "--window", "1")) == expected
    limited = generate(whole, ["import ", "d"], tokens=12, temperature=0, plan="oparamd", memory_limit="900KB")
    assert limited.texts == expected
    flags = ["generate", str(whole), "--prompt", "import ", "--tokens", "12", "--memory-limit"]
    assert main([*flags, "900KB"]) == 3
    assert "--plan dp1-mb1-oparam-fp32 --window 2 fits" in capsys.readouterr().err
    assert main([*flags, "90KB", "--plan", "oparam"]) == 3
    assert "even one layer at a time doesn't fit" in capsys.readouterr().err
    assert main([*flags, "900KB", "--plan", "ooptd-oparamd"]) == 3
    error = capsys.readouterr().err
    assert "can't generate text with ooptd" in error
    assert error.rstrip().endswith("oparamd-fp32")
    assert main([*flags, "900KB", "--window", "1"]) == 2
    assert "--window 1 is the number of layers" in capsys.readouterr().err
