"""`muster verify` finds sown bugs and names the layer, and finds nothing where nothing is wrong."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muster.cli.main import main
from muster.config.load_config import ResolvedConfig, write_run_files
from muster.config.run_config import RunConfig
from muster.data.dataset import IGNORE_INDEX, Batch
from muster.data.dp_slice import read_dp_slice
from muster.layout.mesh import ranks_of_pp_rank
from muster.report.parity import ParityResult, parity_sentence
from muster.spec.mesh import Mesh
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.data import open_dataset
from muster.train.verify.compare import compare
from muster.train.verify.padded import PaddedDataset
from muster.train.verify.rank import TracingTrainer
from muster.train.verify.reference import Reference
from muster.train.verify.run import TOLERANCES, comparison_config
from muster.train.verify.sketch import Sketches
from tests import forks
from tests.parity import small_run
from tests.ranks import ROOT, run_ranks
from tests.verify_ranks import frozen_parameters

SOUND = [
    {"plan": "dp2-z3-mb2-rfull", "precision": "fp8", "fp8_recipe": "rowwise"},
    {"plan": "dp2-z3-ooptd-oparamd"},
]
MORE_SOUND = [
    {"plan": "dp2-z3-mb2", "precision": "bf16"},
    {"plan": "pp2-vocab", "tied": True, "precision": "fp64"},
    {"plan": "pp2-szbh1", "freeze": ("embed.*", "layers.[01].*", "*norm.*"), "tied": True},
    {"plan": "dp2-oopt", "freeze": ("embed.*", "layers.[01].*", "*norm.*")},
    {"plan": "pp2-oopt0.5", "tied": True},
    {"plan": "dp2-z3-oopt-oparam", "family": "low rank"},
    {"plan": "cp2a", "family": "qwen3"},
    {"plan": "dp2-z1", "frozen": True},
    {"plan": "tp2-sp-rfull", "tied": True},
    {"plan": "tp2-domino-mb2-rfull", "precision": "fp64"},
    {"plan": "tp2-sp-domino-mb2", "tied": True},
    {"plan": "tp2-rfull", "family": "llama ladder", "precision": "fp64"},
    {"plan": "dp2x1-sgpipe", "optim": "muon", "z_loss": 1e-2},
    {"plan": "pp2-szbh1", "family": "gpt2", "precision": "bf16"},
    {"plan": "tp2-sp", "family": "gpt2", "tied": True},
    {"plan": "pp2-vocab-relem", "precision": "fp8", "tied": True},
    {"plan": "dp2-z1", "precision": "fp8", "family": "gpt2"},
    {"plan": "pp2-mb2", "precision": "fp8", "fp8_recipe": "mxfp8"},
    {"plan": "dp2-z1-mb2", "precision": "fp8", "fp8_recipe": "mxfp8", "compile": True},
    {"plan": "dp2-z3", "precision": "fp8", "compile": True},
    {"plan": "dp2-z1"},
    {"plan": "pp2", "tied": True, "precision": "fp64"},
    {"plan": "dp2-relem"},
    {"plan": "cp2-z1", "tied": True},
    {"plan": "cp2u", "family": "gpt2", "precision": "bf16"},
    {"plan": "tp2-sp", "family": "qwen3", "precision": "fp64"},
    {"plan": "dp2-z3-mb2", "freeze": ("embed.*", "layers.[01].*", "*.mlp.up.*"), "precision": "bf16"},
    {"plan": "pp2-vocab", "freeze": ("embed.*", "layers.[01].*"), "optim": "muon"},
    {"plan": "tp2-sp-rfull", "freeze": ("embed.*", "layers.0.*", "*.o.*")},
]
SOWN = [
    {"plan": "dp2-z2", "bug": "padding_in_the_loss", "found": ("loss", "loss")},
    {"plan": "pp2", "bug": "dropped_layer", "found": ("forward", "layers.2.attn")},
    {"plan": "dp2", "bug": "wrong_divisor", "found": ("backward", "head.weight"), "says": "0.5 times"},
    {
        "plan": "pp2",
        "tied": True,
        "bug": "stale_tied_weight",
        "found": ("update", "embed.weight"),
        "says": "(copy 2 of 2)",
    },
    {"plan": "dp2-z2", "bug": "gradients_pile_up", "found": ("later", "embed")},
]
MORE_SOWN = [
    {"plan": "tp2", "bug": "qkv_permuted", "found": ("forward", "layers.0.attn")},
    {"plan": "tp2-sp", "bug": "unsynchronised_norms", "found": ("backward", "norm.weight")},
    {"plan": "pp2", "tied": True, "bug": "untied_gradients", "found": ("backward", "embed.weight")},
    {"plan": "pp2-slice4", "bug": "dropped_key_gradients", "found": ("backward", "layers.3.attn.v.weight")},
]


def config_of(case: dict[str, Any], folder: Path) -> RunConfig:
    kind = {key: case[key] for key in ("tied", "optim", "z_loss", "family") if key in case}
    config = small_run(**kind)
    if "freeze" in case:
        config = config.model_copy(update={"optim": config.optim.model_copy(update={"freeze": case["freeze"]})})
    return comparison_config(config, 3, folder / "run")


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[ParityResult]:
    return verdicts_of([*SOUND, *SOWN], tmp_path_factory.mktemp("verify"))


def verdicts_of(cases: list[dict[str, Any]], folder: Path) -> list[ParityResult]:
    """Return the verdicts of cases, sound and with a bug, from one launch of two ranks."""
    asked = []
    for index, case in enumerate(cases):
        config, place = config_of(case, folder), folder / str(index)
        fields = {key: case[key] for key in ("fp8_recipe", "compile") if key in case}
        plan = parse_plan_name(case["plan"], Plan(precision=case.get("precision", "fp32")))
        plan = plan.model_copy(update=fields)
        open_dataset(config, place)
        write_run_files(ResolvedConfig(config.model_copy(update={"parallel": plan}), {}, False), plan, place)
        asked.append({"folder": str(place), "bug": case.get("bug"), "frozen": "frozen" in case})
    run_ranks(2, "tests.verify_ranks:run_cases", {"cases": asked})
    found, references = [], {}
    for index, case in enumerate(cases):
        config, precision = config_of(case, folder), case.get("precision", "fp32")
        recipe = case.get("fp8_recipe", "tensorwise")
        asked = config, precision, recipe, parse_plan_name(case["plan"]).micro_batch_size
        key = config.model_dump_json(), *asked[1:], "frozen" in case
        with frozen_parameters() if "frozen" in case else nullcontext():
            if key not in references:
                references[key] = Reference(*asked, PaddedDataset(open_dataset(config, folder)))
            found.append(compare(case["plan"], folder / str(index), references[key], TOLERANCES[precision]))
    return found


def test_nothing_is_found_where_nothing_is_wrong(verdicts: list[ParityResult]) -> None:
    check_sound(SOUND, verdicts)


@pytest.mark.soak
def test_nothing_is_found_in_more_plans(tmp_path: Path) -> None:
    check_sound(MORE_SOUND, verdicts_of(MORE_SOUND, tmp_path))


def check_sound(cases: list[dict[str, Any]], verdicts: list[ParityResult]) -> None:
    for case, verdict in zip(cases, verdicts, strict=False):
        assert verdict.agrees, (case, parity_sentence(verdict))
        assert list(verdict.gradients) == list(verdict.updates) != []
        assert verdict.hidden.keys() >= {"layers.3.mlp", "norm"} | (
            set() if "vocab" in case["plan"] else {"embed", "head"}
        )


@pytest.mark.parametrize("index", range(len(SOWN)), ids=[str(case["bug"]) for case in SOWN])
def test_a_sown_bug_is_found(index: int, verdicts: list[ParityResult]) -> None:
    check_sown(SOWN[index], verdicts[len(SOUND) + index])


@pytest.mark.soak
def test_more_sown_bugs_are_found(tmp_path: Path) -> None:
    for case, verdict in zip(MORE_SOWN, verdicts_of(MORE_SOWN, tmp_path), strict=True):
        check_sown(case, verdict)


def check_sown(case: dict[str, Any], verdict: ParityResult) -> None:
    assert verdict.first is not None
    assert (verdict.first.phase, verdict.first.where) == case["found"], parity_sentence(verdict)
    assert verdict.first.size > 100 * verdict.tolerance
    assert case.get("says", "") in parity_sentence(verdict)


def test_sketches_of_parts_add_up_and_their_differences_are_those_of_the_outputs() -> None:
    spec, workload = small_run().model, Workload(seq_len=600, global_batch_size=4)
    whole, parts, other = (Sketches(spec, workload, torch.device("cpu")) for _ in range(3))
    x_BSW = torch.randn(4, 600, spec.vocab_size, generator=torch.Generator().manual_seed(1))
    off_BSW = torch.zeros_like(x_BSW)
    off_BSW[:, 300, :100] = 1.0
    whole.add("head", x_BSW, sample=0)
    other.add("head", x_BSW + off_BSW, sample=0)
    for sample in (0, 2):
        for position in (0, 300):
            for column, end in ((0, 200), (200, 257)):
                part = x_BSW[sample : sample + 2, position : position + 300, column:end]
                parts.add("head", part, sample, position, column)
    assert torch.allclose(whole.values, parts.values, rtol=1e-12, atol=1e-9)
    found = (whole.values - other.values).norm() / whole.values.norm()
    assert float(found) == pytest.approx(float(off_BSW.norm() / x_BSW.norm()), rel=0.5)


def test_padded_samples_are_those_of_the_stream_with_fewer_labels(tmp_path: Path) -> None:
    plain = open_dataset(small_run(), tmp_path / "run")
    padded = PaddedDataset(plain)
    whole, batch = plain.train_batch(3, 8), padded.train_batch(3, 8)
    assert (batch.tokens_BS == whole.tokens_BS).all()
    counted = batch.labels_BS != IGNORE_INDEX
    assert (batch.labels_BS[counted] == whole.labels_BS[counted]).all()
    assert counted.sum(1).tolist() == [10, 16, 14, 12, 10, 16, 14, 12]
    assert batch.num_valid_tokens == padded.num_valid_tokens(3, 8) == counted.sum()
    assert (padded.train_batch(5, 2).labels_BS == batch.labels_BS[2:4]).all()


# ----------------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files; the current directory is beside it."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return place


def test_the_command_prints_one_object_and_leaves_nothing(temporary: Path) -> None:
    strict = ["--tolerance", "1e-30", "--precision", "fp64", "--steps", "1", "--json"]
    plans = ["--parallel.micro_batch_size", "12", "--against", "pp2-sauto", "--against", "dp1"]
    done = forks.run("verify", "--preset", "tiny", *plans, *strict)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [plan["plan"].partition("+")[0] for plan in found["plans"]] == ["dp1-mb12-fp64", "pp2-mb12-sauto-fp64"]
    assert "running plan 2 of 2: pp2-mb12-sauto-fp64+" in done.stderr
    for plan in found["plans"]:
        assert len(plan["losses"]) == len(plan["reference_losses"]) == 1
        assert max(plan["gradients"].values()) < 1e-12
    assert found["plans"][1]["first"]["phase"] == "backward"
    assert list(temporary.glob("muster-*")) == []


@pytest.mark.soak
def test_what_a_backward_computes_again_beside_a_forward_is_not_taken_for_that(temporary: Path) -> None:
    small = ["--train.seq_len", "32", "--train.global_batch_size", "12", "--precision", "fp64", "--steps", "1"]
    done = forks.run("verify", "--preset", "tiny", "--against", "tp2-tppairs-pp2v2-mb2-sdualpipev-rfull", *small)
    assert done.returncode == 0, done.stdout


def test_an_interrupt_ends_the_ranks_and_leaves_nothing(temporary: Path) -> None:
    command = [sys.executable, "-m", "muster", "verify", "--preset", "tiny", "--train.seq_len", "512"]
    command += ["--data.max_bytes", "100000"]
    # Whoever runs the tests in the background of a script makes all they start deaf to SIGINT.
    hear = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear) as process:
        while not list(temporary.glob("*/logs")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert list(temporary.glob("muster-*")) == []


BROKEN = """
import os, sys
if "muster.train.verify.rank" in sys.orig_argv:
    os._exit(9)
"""


def test_a_plan_whose_ranks_fail_is_a_row_of_its_own(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (temporary.parent / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{temporary.parent}{os.pathsep}{ROOT}")
    assert main(["verify", "--preset", "tiny", "--steps", "1"]) == 1
    out, _ = capfd.readouterr()
    assert "-fp32 could not be run: rank 0 on" in out
    assert "ended with exit code 9" in out
    assert list(temporary.glob("muster-*")) == []


def test_torchrun_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert main(["verify", "--preset", "tiny"]) == 2
    assert capfd.readouterr().err.endswith("run it without torchrun\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--swarm.stages", "2"), "leave the section swarm out (gradients of swarms are compared with one process by"),
        (("--outer.coordinator", "host-a:1", "--outer.secret_file", "x"), "leave outer.coordinator out (two peers are"),
    ],
)
def test_peers_are_refused(
    temporary: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    assert main(["verify", "--preset", "tiny", *flags]) == 2
    assert words in capfd.readouterr().err


def test_fp16_is_refused(temporary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--preset", "tiny", "--precision", "fp16"]) == 3
    assert "can't compare fp16, as its reference doesn't scale the loss; give one of fp64, " in capfd.readouterr().err


def test_stages_that_cut_the_data_otherwise_are_sketched_at_the_right_samples() -> None:
    """Rows of a micro-batch are samples of several data-parallel ranks of the first stage, or a part of one's."""
    config = small_run()
    count, seq_len = config.train.global_batch_size, config.train.seq_len
    whole_BSD = torch.randn(count, seq_len, config.model.hidden_size)
    expected = Sketches(config.model, config.workload, torch.device("cpu"))
    expected.add("norm", whole_BSD, sample=0)
    numbers_B1 = np.arange(count)[:, None]

    def read(first: int, samples: int) -> Batch:
        own = numbers_B1[first : first + samples]
        return Batch(own, own, samples)

    for degrees in ((2, 1), (1, 2), (4, 2), (2, 4)):
        meshes = [Mesh(dp_shard=degree) for degree in degrees]
        plan = Plan(pp=2, micro_batch_size=2, stages=tuple(StageSpec(layers=2, mesh=mesh) for mesh in meshes))
        sketches = Sketches(config.model, config.workload, torch.device("cpu"))
        for _, at in ranks_of_pp_rank(plan, 1):
            samples = read_dp_slice(read, plan, at, 0, count).tokens_BS.reshape(-1, plan.local_micro_batch_size(1))
            for micro_batch, own in enumerate(samples):
                rank = SimpleNamespace(
                    world=SimpleNamespace(at=at),
                    plan=plan,
                    config=config,
                    sketches=[sketches],
                    batch_loader=SimpleNamespace(
                        fed_groups=None, num_fed_micro_batches=len(samples), ranks_to_read=lambda at=at: [at]
                    ),
                    _micro_batch=micro_batch,
                )
                TracingTrainer._sketch_output(rank, None, "norm", whole_BSD[own])  # type: ignore[arg-type]
        torch.testing.assert_close(sketches.values, expected.values)
