"""A run of several paths on disk: evaluated part by part on the path of each, and generated from prompt by prompt."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.save import save
from muster.cli.main import main
from muster.config.load_config import ResolvedConfig, config_yaml
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.data.dataset import Dataset
from muster.data.path_stream import SampleRouter, fit_sample_router
from muster.data.tokenizer import ByteTokenizer
from muster.layout.box import Box
from muster.layout.module_paths import ModulePaths
from muster.layout.tensor_layout import TensorLayout
from muster.model.decoder import Decoder
from muster.model.generation import generate
from muster.parallel.inference import build_inference_decoder
from muster.spec.model import parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.text_generation import SamplingParams
from muster.train.data import open_dataset
from tests.parity import small_run, start_value

SAMPLES = 20
PROMPTS = (
    "import os\n",
    "    return self",
    "zzzz",
    "# The end",
    "    def x(self):",
    "\n\n\n\n",
    "0123456789",
    "class A:",
)


@dataclass(frozen=True)
class PathsRun:
    """A run of four paths, and what it is made of."""

    folder: Path
    config: RunConfig
    decoders: list[Decoder]
    """Model of each path."""
    averages: list[Decoder]
    """Moving average of each, of a module that several islands trained the mean of theirs."""
    router: SampleRouter


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> PathsRun:
    """Random weights, those of two modules in each half of the layers; path p has module p mod 2 of the first half and
    p div 2 of the second."""
    folder = tmp_path_factory.mktemp("paths")
    outer = OuterConfig.model_validate({"method": "dipaco", "modules": (2, 2), "route_tokens": 4, "reroute_every": 8})
    config = small_run().model_copy(update={"outer": outer})
    plan, spec = parse_plan_name("isl4-fp64"), config.model
    values: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(spec):
        modules = 2 if name.startswith("layers.") else 1
        for module in range(modules):
            stored = f"modules/{module}/model/{name}" if module else f"model/{name}"
            values[stored] = 2 * start_value(spec, name, shape, seed=module).double()
    averages = {
        f"islands/{island}/optim/{name}.ema": 2 * start_value(spec, name, shape, seed=10 + island).double()
        for island in range(4)
        for name, shape in parameter_shapes(spec)
    }
    values |= averages
    shards = [LocalShard(name, _whole(name, tuple(value.shape)), value) for name, value in values.items()]
    data = open_dataset(config, folder)
    assert isinstance(data, Dataset)
    router = fit_sample_router(data, 4, 257, config.seed, 4, 8)
    info = {
        "plan": plan.model_dump(mode="json"),
        "model": spec.model_dump(mode="json"),
        "run": config.model_dump(mode="json"),
        "counters": {"router": router.router.state()},
    }
    save(folder / "checkpoints", 3, shards, info, 0, 1, lambda problem: [problem])
    (folder / "config.yaml").write_text(config_yaml(ResolvedConfig(config, {}, plan_is_auto=False), plan))

    decoders, means = [], []
    for path in range(4):
        (decoder, _), (mean, _) = (build_inference_decoder(spec, "fp64", torch.device("cpu"), None) for _ in range(2))
        for (name, parameter), (_, average) in zip(decoder.named_parameters(), mean.named_parameters(), strict=True):
            layer = int(name.split(".")[1]) if name.startswith("layers.") else None
            module = _module(path, layer)
            parameter.data.copy_(values[f"modules/{module}/model/{name}" if module else f"model/{name}"])
            alike = [island for island in range(4) if _module(island, layer) == module]
            average.data.copy_(sum(values[f"islands/{island}/optim/{name}.ema"] for island in alike) / len(alike))
        decoders.append(decoder)
        means.append(mean)
    return PathsRun(folder, config, decoders, means, router)


def _module(path: int, layer: int | None) -> int:
    return 0 if layer is None else path % 2 if layer < 2 else path // 2


def _whole(name: str, shape: tuple[int, ...]) -> TensorLayout:
    return TensorLayout(name, shape, (Box((0,) * len(shape), shape),))


def muster(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def reference(
    run: PathsRun,
    only: int | None = None,
    decoders: list[Decoder] | None = None,
    parts: tuple[tuple[int, int, int], ...] = ((0, 4, 8), (4, 8, 16)),
) -> dict[str, tuple[float, int]]:
    """Mean loss and number of labels of all paths and of each, one part of one sample after another."""
    decoders = decoders or run.decoders
    losses: dict[int, list[float]] = {path: [] for path in range(4)}
    data = open_dataset(run.config, run.folder)
    for sample in range(SAMPLES):
        batch = data.validation_batch(sample, 1)
        tokens, labels = (torch.from_numpy(array[0]) for array in (batch.tokens_BS, batch.labels_BS))
        for seen, first, end in parts:
            path = run.router.path_of(tokens[seen : seen + 4].tolist()) if only is None else only
            with torch.no_grad():
                logits = decoders[path](tokens[None])[0]
            losses[path] += cross_entropy(logits[first:end], labels[first:end], reduction="none").tolist()
    every = [loss for path in losses.values() for loss in path]
    of = {"all": every} | {f"path{path}": own for path, own in losses.items()}
    return {name: (sum(own) / len(own), len(own)) for name, own in of.items() if own}


def test_each_part_of_a_sample_is_evaluated_on_its_path(
    run: PathsRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(run)
    assert len(expected) == 5  # labels on all four paths, or this shows little

    def found(*flags: object, place: object = run.folder) -> dict[str, tuple[float, int]]:
        sources = muster(capsys, "eval", place, "--samples", SAMPLES, *flags)["sources"]
        return {name: (of["loss"], of["tokens"]) for name, of in sources.items()}

    def agrees(ours: dict[str, tuple[float, int]], theirs: dict[str, tuple[float, int]]) -> bool:
        return ours.keys() == theirs.keys() and all(ours[name] == pytest.approx(theirs[name]) for name in ours)

    assert agrees(found(), expected)
    assert agrees(found("--path", 2), {"all": reference(run, only=2)["all"]})
    assert agrees(found(place=f"{run.folder}@ema"), reference(run, decoders=run.averages))

    swapped = ModulePaths.module_of
    monkeypatch.setattr(ModulePaths, "module_of", lambda self, island, name: swapped(self, 3 - island, name))
    assert not agrees(found(), expected)


def test_other_data_is_routed_as_the_run_routes_its_own(run: PathsRun, capsys: pytest.CaptureFixture[str]) -> None:
    source, text = run.folder / "text.txt", ("".join(PROMPTS) * 10)[: 47 * 16]
    source.write_text(text)
    sources = muster(capsys, "eval", run.folder, "--source", source)["sources"]
    routes_BS = run.router.routes(np.frombuffer(text.encode(), np.uint8).astype(np.int64).reshape(47, 16))
    expected = {f"path{path}": int((routes_BS == path).sum()) for path in range(4)}
    assert {name: of["tokens"] for name, of in sources.items()} == {"all": 47 * 12, **expected}


def test_each_prompt_is_continued_on_its_path(run: PathsRun, capsys: pytest.CaptureFixture[str]) -> None:
    def texts(*flags: object) -> list[str]:
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        found = muster(capsys, "generate", run.folder, *prompts, "--tokens", 6, "--temperature", 0, *flags)
        return [one["text"] for one in found["texts"]]

    by_path = [texts("--path", path) for path in range(4)]
    ids, greedy, tokenizer = (
        [list(prompt.encode()) for prompt in PROMPTS],
        SamplingParams(temperature=0),
        ByteTokenizer(),
    )
    for decoder, found in zip(run.decoders, by_path, strict=True):
        expected = generate(decoder, ids, 6, greedy, 16, stop_ids=[tokenizer.eos_id])
        assert found == [tokenizer.decode(new) for new in expected]
    chosen = [run.router.path_of(prompt) for prompt in ids]
    assert len(set(chosen)) > 1
    assert len({tuple(found) for found in by_path}) == 4
    assert texts() == [by_path[path][row] for row, path in enumerate(chosen)]


def test_a_text_is_continued_part_by_part_on_the_path_of_each(
    run: PathsRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> list[str]:
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        flags = ("--tokens", 9, "--temperature", 0, "--reroute-every", 4)
        return [one["text"] for one in muster(capsys, "generate", run.folder, *prompts, *flags)["texts"]]

    expected, used = [], []
    for prompt in PROMPTS:
        ids, chosen, begin = list(prompt.encode()), [], 0
        for made in range(9):
            part = (len(ids) - 1) // 4
            if made == 0 or (len(ids) - 1) % 4 == 0:
                path = run.router.path_of(ids[4 * part - 4 : 4 * part] if part else ids[:4])
                end = min(4 * part + 5, len(prompt) + 9)  # of the text with the part
                begin = max(0, end - 1 - 16)
            chosen.append(path)
            with torch.no_grad():
                ids.append(int(run.decoders[path](torch.tensor([ids[begin:]]))[0, -1].argmax()))
        new = ids[len(prompt.encode()) :]
        end = new.index(ByteTokenizer().eos_id) if ByteTokenizer().eos_id in new else len(new)
        expected.append(ByteTokenizer().decode(new[:end]))
        used.append(len(set(chosen[:end])))
    assert max(used) > 1
    assert texts() == expected
    monkeypatch.setattr(SampleRouter, "next_part", lambda self, tokens: (self.path_of(tokens), 4))
    assert texts() != expected


def test_parts_of_other_lengths_are_evaluated(run: PathsRun, capsys: pytest.CaptureFixture[str]) -> None:
    found = muster(capsys, "eval", run.folder, "--samples", SAMPLES, "--reroute-every", 4)["sources"]
    expected = reference(run, parts=((0, 4, 8), (4, 8, 12), (8, 12, 16)))
    assert {name: of["tokens"] for name, of in found.items()} == {name: count for name, (_, count) in expected.items()}
    assert all(found[name]["loss"] == pytest.approx(loss) for name, (loss, _) in expected.items())


def test_the_router_is_read_from_the_checkpoint_alone(
    run: PathsRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object, **keywords: object) -> Dataset:
        raise AssertionError("the training's data were opened")

    monkeypatch.setattr(Dataset, "__init__", none)
    assert muster(capsys, "generate", run.folder, "--prompt", PROMPTS[0], "--tokens", 2)["texts"]
    manifest = next((run.folder / "checkpoints").glob("step-*")) / "manifest.json"
    content = manifest.read_text()
    manifest.write_text(content.replace('"router":', '"other":'))
    assert main(["generate", str(run.folder), "--prompt", "a"]) == 2
    assert "has no router, which chooses the path of a text: choose it with --path N" in capsys.readouterr().err
    manifest.write_text(content)


def test_paths_that_there_are_not_are_refused(
    run: PathsRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source := tmp_path / "other.txt").write_text("some words of another text " * 20)
    for verb in (["eval", run.folder], ["generate", run.folder, "--prompt", "a"]):
        assert main([*map(str, verb), "--path", "4"]) == 2
        assert "has 4, expected 0 to 3" in capsys.readouterr().err
    assert main(["eval", str(run.folder), "--seq-len", "4", "--source", str(source)]) == 2
    assert "leaves nothing of samples whose first 4 tokens" in capsys.readouterr().err
    for flags, problem in ((["2"], "shorter than the 4 tokens"), (["8", "--path", "1"], "and --path 1 is one for all")):
        for verb in (["eval", run.folder], ["generate", run.folder, "--prompt", "a"]):
            assert main([*map(str, verb), "--reroute-every", *flags]) == 2
            assert problem in capsys.readouterr().err
    assert main(["generate", str(run.folder), "--chat"]) == 2
    assert "a dialogue keeps to one of the model's paths" in capsys.readouterr().err
