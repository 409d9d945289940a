"""`muster checkpoint`: any kind of directory becomes any other, and says what it holds."""

import json
import pickle
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from muster.checkpoint.convert import ConversionOptions, convert
from muster.checkpoint.formats.dcp import DcpTensors
from muster.checkpoint.load import read_full
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.checkpoint.model_directory import open_directory
from muster.checkpoint.remapped import BoxMapping, RemappedTensors
from muster.checkpoint.tensors import TensorMeta, split_into_boxes
from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.layout.tensor_layout import Box
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from tests.weights import STATES, expected_weights, make_run, number_tensor, read_weights, save_weights

SPEC = ModelSpec(vocab_size=19, hidden_size=12, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=10)


def run_muster(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def facts(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, Any]:
    """Return the command's JSON, which is all of its output."""
    capsys.readouterr()
    assert run_muster(*arguments, "--json") == code, capsys.readouterr().err
    said = json.loads(capsys.readouterr().out)
    assert said["version"] == 1
    return said


def error_message(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Return the one sentence with which the command ends in `code`."""
    capsys.readouterr()
    assert run_muster(*arguments) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), (out, err)
    return err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", "dp2-pp2")


# ----------------------------------------------------------------------------------------------------------------------
# From one kind to another


def test_round_trips_keep_every_bit(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, target, kind in (
        (run, "hf", "hf"),
        (run, "dcp", "dcp"),
        (run / "checkpoints" / "step-00000007", "one", "muster"),
        (tmp_path / "hf", "from_hf", "muster"),
        (tmp_path / "dcp", "from_dcp", "muster"),
        (tmp_path / "dcp", "hf2", "hf"),
        (tmp_path / "hf", "dcp2", "dcp"),
    ):
        assert run_muster("convert", source, tmp_path / target, "--to", kind) == 0, capsys.readouterr().err
    spec = open_directory(run).model
    assert spec is not None
    wanted = expected_weights(spec)
    for place in ("hf", "dcp", "one", "from_hf", "from_dcp", "hf2", "dcp2"):
        found = read_weights(tmp_path / place)
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), place
    for place in ("one", "from_dcp"):
        manifest = read_manifest(tmp_path / place)
        assert (manifest.step, manifest.counters, manifest.plan["pp"]) == (7, {"samples_consumed": 9}, 2)
        for name, shape in parameter_shapes(spec):
            state = STATES[1].format(name)
            assert torch.equal(read_full(tmp_path / place, state), number_tensor(state, shape))
    assert (
        load_file(tmp_path / "hf" / "model.safetensors").keys() == load_file(tmp_path / "hf2/model.safetensors").keys()
    )


def test_what_convert_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = facts(
        capsys, "convert", run, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--max-shard-size", "200KB"
    )
    assert said["source"] == {"path": str(run / "checkpoints/step-00000007"), "format": "muster", "step": 7}
    assert said["target"] == {"path": str(tmp_path / "hf"), "format": "hf"}
    assert (said["dtype"], said["tokenizer"]) == ("bfloat16", "bytes")
    assert said["bytes"] == 2 * said["parameters"]
    shards = [name for name in said["files"] if name.startswith("model-")]
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 3
    assert all((tmp_path / "hf" / name).stat().st_size < 220_000 for name in shards)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == said["bytes"]
    assert all(name in load_file(tmp_path / "hf" / file) for name, file in index["weight_map"].items())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["torch_dtype"], config["eos_token_id"], config["model_type"]) == ("bfloat16", 256, "llama")
    wanted = expected_weights(open_directory(run).model)  # type: ignore[arg-type]
    found = read_weights(tmp_path / "hf")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())


def test_files_beside_the_weights_travel_along(run: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    assert run_muster("convert", run, hf, "--to", "hf") == 0
    config = json.loads((hf / "config.json").read_text()) | {"attention_dropout": 0.25, "bos_token_id": 3}
    (hf / "config.json").write_text(json.dumps(config))
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (hf / "generation_config.json").write_text('{"temperature": 0.5}')
    assert run_muster("convert", hf, tmp_path / "ours", "--to", "muster") == 0
    assert run_muster("convert", tmp_path / "ours", tmp_path / "again", "--to", "hf") == 0
    assert run_muster("convert", run, tmp_path / "other", "--to", "hf", "--tokenizer", hf) == 0
    for name in ("chat_template.jinja", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (hf / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() == (hf / name).read_bytes()
    assert (tmp_path / "again" / "generation_config.json").read_bytes() == (hf / "generation_config.json").read_bytes()
    other = json.loads((tmp_path / "other" / "generation_config.json").read_text())
    assert other == {"temperature": 0.5, "eos_token_id": 256, "bos_token_id": 3, "pad_token_id": None}
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (again["attention_dropout"], again["bos_token_id"]) == (0.25, 3)


def test_torch_reads_the_folder_that_is_written(tmp_path: Path) -> None:
    step = save_weights(tmp_path / "checkpoints", SPEC, Plan(dp_shard=2))
    assert run_muster("convert", step, tmp_path / "dcp", "--to", "dcp") == 0
    found: dict[str, Any] = {
        group: {name + tail: torch.zeros(shape) for name, shape in parameter_shapes(SPEC)}
        for group, tail in (("model", ""), ("optim", ".exp_avg"))
    }
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for state in STATES:
        for name, shape in parameter_shapes(SPEC):
            group, _, rest = state.format(name).partition("/")
            assert torch.equal(found[group][rest], number_tensor(state.format(name), shape))
    about = json.loads((tmp_path / "dcp" / "muster.json").read_text())
    assert (about["version"], about["step"], about["model"]["hidden_size"]) == (1, 7, 12)


def test_a_folder_that_torch_wrote_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = expected_weights(SPEC)
    strided = weights["layers.1.mlp.up.weight"].t().contiguous().t()
    state = {"model": weights | {"layers.1.mlp.up.weight": strided}, "step": torch.tensor(3), "note": {"by": "hand"}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    tensors = DcpTensors(tmp_path / "dcp")
    assert tensors.other_objects == ["note.by"]
    for name in ("layers.1.mlp.up.weight", "layers.0.attn.q.weight"):
        box = Box((1, 2), (5, 3))
        assert torch.equal(tensors.read(f"model.{name}", box), weights[name][box.slices])
    assert "give --model" in error_message(capsys, 2, "convert", tmp_path / "dcp", tmp_path / "no", "--to", "muster")
    (tmp_path / "spec.yaml").write_text(
        "\n".join(f"{key}: {value}" for key, value in SPEC.model_dump(exclude_defaults=True).items())
    )
    assert (
        run_muster("convert", tmp_path / "dcp", tmp_path / "ours", "--to", "muster", "--model", tmp_path / "spec.yaml")
        == 0
    )
    found = read_weights(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn])
def test_every_dtype_and_number_of_dimensions_of_a_folder(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {f"t{len(shape)}": torch.randn(shape).mul(9).to(dtype) for shape in ((), (7,), (3, 4), (2, 3, 4))}
    dcp.save(dict(state), checkpoint_id=tmp_path / "dcp", no_dist=True)
    tensors = DcpTensors(tmp_path / "dcp")
    for name, tensor in state.items():
        assert torch.equal(tensors.read(name, tensors.metas[name].whole).double(), tensor.double())


# ----------------------------------------------------------------------------------------------------------------------
# Parts


class InMemoryTensors:
    """Tensors in memory (`Tensors`)."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.metas = {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self.tensors[name][box.slices].clone()


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 3, 4), (1, 100), (100, 1), (0, 3)])
@pytest.mark.parametrize("limit", [1, 8, 20, 64, 10_000])
def test_chunks_are_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.randn(shape)
    boxes = list(split_into_boxes(TensorMeta(shape, torch.float32), limit))
    assert all(box.numel * 4 <= max(limit, 4) for box in boxes)
    parts = [tensor[box.slices].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat(parts) if parts else tensor.new_empty(0), tensor.reshape(-1))


def test_parts_of_linked_tensors_are_parts_of_their_origins() -> None:
    stacked, wide = torch.randn(2, 4, 6), torch.randn(6, 8)
    stored = InMemoryTensors(stacked=stacked, wide=wide)
    origins = [
        BoxMapping("left", Box((0, 0), (4, 6)), "wide", Box((0, 0), (6, 4)), transposed=True),
        BoxMapping("both", Box((0, 0), (4, 6)), "stacked", Box((1, 0, 0), (1, 4, 6))),
        BoxMapping("both", Box((4, 0), (4, 6)), "wide", Box((0, 4), (6, 4)), transposed=True),
        BoxMapping("cube", Box((0, 0, 0), (1, 6, 8)), "wide", Box((0, 0), (6, 8))),
    ]
    wanted = {"left": wide[:, :4].t(), "both": torch.cat((stacked[1], wide[:, 4:].t())), "cube": wide[None]}
    tensors = RemappedTensors(stored, {n: TensorMeta(tuple(t.shape), t.dtype) for n, t in wanted.items()}, origins)
    for name, tensor in wanted.items():
        for limit in (4, 40, 10_000):
            for box in split_into_boxes(tensors.metas[name], limit):
                assert torch.equal(tensors.read(name, box), tensor[box.slices])


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong


def test_a_wrong_request_is_one_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    target = tmp_path / "new" / "hf"
    for words, said in (
        ((tmp_path / "nowhere", target, "--to", "hf"), "there is no directory"),
        ((tmp_path / "file", target, "--to", "hf"), "there is no directory"),
        ((tmp_path / "empty", target, "--to", "hf"), "a directory of an unknown format: expected a run"),
        ((run, tmp_path / "empty", "--to", "hf"), "exists already"),
        ((run, target), "--to"),
        ((run, target, "--to", "gguf"), "--to gguf: expected one of "),
        ((run, target, "--to", "hf", "--max-shard-size", "5 apples"), "--max-shard-size: expected a size such as 70GB"),
        ((run, target, "--to", "hf", "--tokenizer", tmp_path / "empty"), "no tokenizer files"),
        ((run, target, "--to", "hf", "--model", "lama"), "there is no model 'lama'"),
        ((run, target, "--to", "hf", "--model", "gpt2"), "but --model is another one: leave --model out"),
    ):
        assert said in error_message(capsys, 2, "convert", *words)
        assert not target.exists()
    assert list((tmp_path / "empty").iterdir()) == []
    assert "unknown verb 'checkpoint convrt'; did you mean 'convert'?" in error_message(capsys, 2, "convrt")


def spoil_shard(hf: Path) -> None:
    next(hf.glob("model-00002*")).unlink()


def cut_shard(hf: Path) -> None:
    shard = next(hf.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-100])


def rename_tensor(hf: Path) -> None:
    shard = next(hf.glob("model-00001*"))
    tensors = load_file(shard)
    save_file({"x" + name: tensor for name, tensor in tensors.items()}, shard)


def misshape(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


def other_family(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))


def only_pickles(hf: Path) -> None:
    for path in hf.glob("model*"):
        path.unlink()
    torch.save({}, hf / "pytorch_model.bin")


def no_header(hf: Path) -> None:
    next(hf.glob("model-00001*")).write_bytes(b"\xff" * 30)


@pytest.mark.parametrize(
    ("spoil", "code", "said"),
    [
        (spoil_shard, 1, "lacks 1 of the"),
        (cut_shard, 1, "is damaged: it has"),
        (rename_tensor, 1, "of the 75 tensors of its model"),
        (misshape, 1, "but its model has"),
        (other_family, 2, "'bert' is not a supported family"),
        (only_pickles, 2, "a pickle, which can run any code"),
        (no_header, 1, "not a safetensors file"),
    ],
)
def test_a_bad_hugging_face_directory_is_one_sentence(
    spoil: Any, code: int, said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, target = tmp_path / "hf", tmp_path / "target"
    assert run_muster("convert", run, hf, "--to", "hf", "--max-shard-size", "400KB") == 0
    spoil(hf)
    assert said in error_message(capsys, code, "convert", hf, target, "--to", "muster")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}, "nothing half-written may stay"


class Bomb:
    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("bomb"), "boom"))


def test_a_pickle_in_a_folder_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": expected_weights(SPEC)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = tmp_path / "dcp" / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Bomb()))
    assert "is not opened: it names pathlib" in error_message(capsys, 1, "inspect", tmp_path / "dcp")
    metadata.write_bytes(whole[: len(whole) // 2])
    assert ".metadata: it is damaged" in error_message(capsys, 1, "inspect", tmp_path / "dcp")
    metadata.write_bytes(pickle.dumps({"no": "metadata"}))
    assert "it doesn't describe tensors" in error_message(capsys, 1, "inspect", tmp_path / "dcp")
    metadata.write_bytes(whole)
    file = tmp_path / "dcp" / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1000])
    assert run_muster("verify", tmp_path / "dcp") == 1
    assert "damaged" in capsys.readouterr().out
    assert not (tmp_path / "bomb").exists()


def test_a_disk_that_fails_leaves_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for kind in ("hf", "muster", "dcp"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
            said = error_message(capsys, 1, "convert", run, tmp_path / "target", "--to", kind)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert "could not write" in said
            assert "File too large" in said
            assert {path.name for path in tmp_path.iterdir()} == {"run"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_conversion_that_is_stopped_leaves_nothing(run: Path, tmp_path: Path, stop: type[BaseException]) -> None:
    def interrupt(nbytes: int) -> None:
        raise stop

    for kind in ("hf", "muster", "dcp"):
        with pytest.raises(stop):
            convert(run, tmp_path / "target", ConversionOptions(target_format=kind), lambda _: None, interrupt)  # type: ignore[arg-type]
        assert {path.name for path in tmp_path.iterdir()} == {"run"}


# ----------------------------------------------------------------------------------------------------------------------
# inspect, verify, diff, prune


def test_inspect(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model/layers.0.mlp.up.weight"
    said = facts(capsys, "inspect", run, "--tensor", name, "--tensors")
    assert (said["format"], said["step"], said["plan"]) == ("muster", 7, "dp2-pp2-mb1-fp32")
    assert said["model"] == {"name": "tiny", "parameters": 427_200}
    assert said["groups"]["optim"] == {"tensors": 75, "bytes": 1_708_800, "numbers": {"float32": 427_200}}
    assert (len(said["tensors"]), len(said["files"])) == (150, 4)
    wanted = number_tensor(name, (192, 64))
    found = said["statistics"][name]
    assert (found["shape"], found["dtype"], found["zeros"], found["not_finite"]) == ([192, 64], "float32", 0, 0)
    assert found["smallest"] == pytest.approx(float(wanted.min()))
    assert found["std"] == pytest.approx(float(wanted.double().std(correction=0)), rel=1e-9)
    assert run_muster("inspect", run, "--tensor", name) == 0
    out = capsys.readouterr().out
    assert "tiny, 427,200 parameters" in out
    assert "mean" in out
    assert "did you mean 'model/embed.weight'?" in error_message(capsys, 2, "inspect", run, "--tensor", "embed.weight")
    tensor = torch.tensor([[float("nan"), 0.0, 2.0, float("inf")]])
    dcp.save({"x": tensor}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = facts(capsys, "inspect", tmp_path / "dcp", "--tensor", "x")["statistics"]["x"]
    assert (found["not_finite"], found["zeros"], found["mean"], found["largest"]) == (2, 1, 1.0, 2.0)
    dcp.save({"x": torch.full((2,), float("nan"))}, checkpoint_id=tmp_path / "nan", no_dist=True)
    found = facts(capsys, "inspect", tmp_path / "nan", "--tensor", "x")["statistics"]["x"]
    assert (found["not_finite"], found["mean"]) == (2, None)


def test_a_damaged_checkpoint_before_which_an_older_one_is_read_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = run / "checkpoints/step-00000009"
    shutil.copytree(run / "checkpoints/step-00000007", newer)
    (run / "checkpoints/latest").write_text(newer.name + "\n")
    file = newer / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert run_muster("inspect", run, "--json") == 0
    said = capsys.readouterr()
    assert f"muster: skipped a damaged checkpoint: {file} has " in said.err
    assert json.loads(said.out)["step"] == 7


def test_verify_finds_a_flipped_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = facts(capsys, "verify", run)["directories"]
    assert (found["checksums"], found["problems"], found["bytes"]) == (True, [], 2 * 1_708_800)
    file = run / "checkpoints/step-00000007/rank-00002.safetensors"
    whole = file.read_bytes()
    data = bytearray(whole)
    for place in (-5, len(data) // 2):
        data[place] ^= 16
    file.write_bytes(data)
    (found,) = facts(capsys, "verify", run, code=1)["directories"]
    assert len(found["problems"]) == 1, "one sentence for each file"
    assert f"{file} is damaged: the checksum of " in found["problems"][0]
    assert found["problems"][0].endswith("; 1 more of its tensors can't be read")
    file.write_bytes(whole[:-1])
    (found,) = facts(capsys, "verify", run, code=1)["directories"]
    assert len(found["problems"]) == 1
    assert f"has {len(whole) - 1} bytes instead of {len(whole)}" in found["problems"][0]
    file.write_bytes(data)
    assert run_muster("verify", run) == 1
    assert "damaged" in capsys.readouterr().out
    (file.parent / MANIFEST).write_text("{")
    (found,) = facts(capsys, "verify", run, code=1)["directories"]
    assert "manifest.json is damaged" in found["problems"][0]


def test_diff(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(tmp_path / "other", "tp2", step=9)
    said = facts(capsys, "diff", run, other)
    assert said["equal"]
    assert said["facts"]["step"] == [7, 9]
    assert said["facts"]["plan.pp"] == [2, 1]
    assert (said["compared"], said["different"]) == (150, [])
    assert run_muster("convert", run, tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16") == 0
    said = facts(capsys, "diff", run, tmp_path / "hf", code=1)
    assert (said["compared"], said["a"]["not_compared"]) == (75, ["optim"])
    first = said["different"][0]
    assert first["dtypes"] == ["float32", "bfloat16"]
    assert 1e-4 < first["relative"] < 1e-2
    assert run_muster("diff", run, tmp_path / "hf") == 1
    out = capsys.readouterr().out
    assert "… and 65 more" in out
    assert "0 of 75 compared tensors are equal" in out
    small = save_weights(tmp_path / "small", SPEC)
    said = facts(capsys, "diff", run, small, code=1)
    assert said["shapes"]["model/embed.weight"] == [[257, 64], [19, 12]]
    assert "model/layers.3.attn.q.weight" in said["only_a"]


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = run / "checkpoints"
    for step in (10, 20, 30, 35):
        shutil.copytree(root / "step-00000007", root / f"step-{step:08}")
    (root / "step-00000040.tmp").mkdir()
    (root / "latest").write_text("step-00000035\n")
    said = facts(capsys, "prune", run, "--keep-last", "2", "--keep-every", "20", "--dry-run")
    doomed = [str(root / name) for name in ("step-00000007", "step-00000010", "step-00000040.tmp")]
    assert (said["removed"], said["dry_run"]) == (doomed, True)
    assert len(list(root.iterdir())) == 7
    assert facts(capsys, "prune", run, "--keep-last", "2", "--keep-every", "20")["removed"] == doomed
    left = {"latest", "step-00000020", "step-00000030", "step-00000035"}
    assert {path.name for path in root.iterdir()} == left
    assert run_muster("prune", run, "--keep-last", "1") == 0
    assert {path.name for path in root.iterdir()} == {"latest", "step-00000035"}
    assert "kept" in capsys.readouterr().out
    assert "no good checkpoint" in error_message(capsys, 2, "prune", run.parent, "--keep-last", "1")


def test_prune_keeps_the_last_checkpoint_whose_checksums_are_right(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest has all its bytes, two of them wrong: without the ones before it the training would be lost."""
    root = run / "checkpoints"
    for step in (8, 9):
        shutil.copytree(root / "step-00000007", root / f"step-{step:08}")
    (root / "latest").write_text("step-00000009\n")
    file = root / "step-00000009/rank-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    said = facts(capsys, "prune", run, "--keep-last", "2")
    assert said["removed"] == [str(root / "step-00000009")]
    assert said["kept"] == [str(root / "step-00000007"), str(root / "step-00000008")]
    for folder in (root / "step-00000007", root / "step-00000008"):
        (folder / file.name).write_bytes(data)
    assert "nothing is removed, since no checkpoint can be read: " in error_message(
        capsys, 1, "prune", run, "--keep-last", "1"
    )
    assert len(list(root.glob("step-*"))) == 2, "nothing is removed"


def test_a_folder_of_torch_knows_the_context_of_the_run(run: Path, tmp_path: Path) -> None:
    assert run_muster("convert", run, tmp_path / "dcp", "--to", "dcp") == 0
    model = open_directory(tmp_path / "dcp").model
    assert model is not None
    assert model.max_positions == load_run_config(None, run / "config.yaml", []).config.train.seq_len
