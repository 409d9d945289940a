"""`muster eval` on a Hugging Face directory: losses as `transformers` has them, and tasks of lm-evaluation-harness."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.cli.main import main
from muster.data.dataset import Batch
from muster.model.init import init_stage
from muster.model.loss import cross_entropy_sum
from muster.parallel.inference import build_inference_decoder
from muster.spec.model import ModelSpec
from muster.train import evaluate
from tests.ranks import run_ranks

TEXTS = ["a rose is a rose", "is a rose", "a", "rose rose rose is a rose a rose"]
WORDS = {"<end>": 0, "a": 1, "rose": 2, "is": 3, "no": 4}


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory) -> Path:
    """A tiny random model with a tokenizer of words, as `transformers` saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from tests.hf_models import random_model

    folder = tmp_path_factory.mktemp("exported")
    random_model("llama").save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="no"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<end>", "unk_token": "no", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def muster(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["eval", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_loss_of_a_directory_is_that_of_transformers(directory, tmp_path, monkeypatch, capsys):
    import transformers

    monkeypatch.chdir(tmp_path)  # the store goes to .data
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    code, out, err = muster(capsys, directory, "--source", "rows.jsonl", "--seq-len", 8, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["sources"]["all"]
    ids = [token for text in TEXTS for token in [*(WORDS[word] for word in text.split()), 0]]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    total = 0.0
    with torch.no_grad():
        for at in range(0, len(ids) - 1, 8):
            window = torch.tensor([ids[at : at + 9]])
            logits = model(window[:, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))
    assert found["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "has no data of its own: name some with --source"),
        (("--source", "gone.txt"), "--source: there is no file or directory 'gone.txt'"),
        (("--tasks", "own", "--source", "x"), "--source is not for --tasks, which bring their own data: leave it out"),
    ],
)
def test_what_is_missing_is_a_sentence(directory, tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    code, _, err = muster(capsys, directory, *arguments)
    assert (code, sentence in err, err.count("\n")) == (2, True, 1), err


def test_samples_beyond_learned_positions_are_refused(tmp_path, monkeypatch, capsys):
    from tests.hf_models import random_model

    monkeypatch.chdir(tmp_path)
    random_model("gpt2").save_pretrained("gpt2")
    Path("text.txt").write_text("a rose is a rose " * 40)
    code, _, err = muster(capsys, "gpt2", "--source", "text.txt", "--tokenizer", "bytes", "--seq-len", 65)
    assert (code, err.count("\n")) == (2, 1)
    assert "--seq-len 65 is longer than the model's 64 learned positions: expected at most 64" in err


@pytest.mark.parametrize("flag", [("--tokenizer", "bytes"), ("--on-invalid-row", "skip")])
def test_flags_about_other_data_need_other_data(tmp_path, capsys, flag):
    (tmp_path / "config.yaml").write_text("")
    code, _, err = muster(capsys, tmp_path, *flag)
    assert (code, f"{' '.join(flag)} is for the data of --source, which is missing" in err) == (2, True), err


def test_samples_of_another_length_are_no_held_out_ones(whole, capsys):
    """They would be other windows of the stream, most of which the run has trained on."""
    code, _, err = muster(capsys, whole, "--seq-len", 32)
    assert (code, err) == (
        2,
        "muster: --seq-len 32: the run's validation samples are windows of 64 tokens; leave --seq-len out, or name data"
        " that the run hasn't read with --source\n",
    )
    code, out, _ = muster(capsys, whole, "--seq-len", 64)
    assert (code, out) == muster(capsys, whole)[:2]


def test_invalid_rows_are_refused_or_skipped(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": text}) for text in TEXTS]
    Path("rows.jsonl").write_text("\n".join([*rows, "{"]) + "\n")
    flags = (directory, "--source", "rows.jsonl", "--seq-len", 8)
    code, _, err = muster(capsys, *flags)
    assert (code, "leave such rows out with --on-invalid-row skip" in err) == (2, True), err
    code, out, _ = muster(capsys, *flags, "--on-invalid-row", "skip", "--json")
    assert code == 0
    assert json.loads(out)["sources"]["all"]["tokens"] == sum(len(text.split()) + 1 for text in TEXTS) - 1


def rows_of_19_batches(directory: Path) -> dict[str, Any]:
    """Write data of 19 batches, the last of them smaller, to the working directory, and return the options."""
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 55))
    return {"model_path": str(directory), "source": "rows.jsonl", "seq_len": 8}


def test_ranks_find_together_what_one_process_finds(directory, tmp_path, monkeypatch):
    """Data-parallel ranks share the batches, tensor-parallel ones each layer."""
    monkeypatch.chdir(tmp_path)
    options = rows_of_19_batches(directory)
    alone = evaluate.evaluate(evaluate.EvalOptions.model_validate(options))["all"]
    assert alone["tokens"] > 8 * 8 * 17
    for found in run_ranks(4, "tests.generation_ranks:evaluate_loss", {**options, "plan": "dp2-tp2"}):
        assert found["all"] == {
            "tokens": alone["tokens"],
            "loss": pytest.approx(alone["loss"], rel=1e-6),
            "perplexity": pytest.approx(alone["perplexity"], rel=1e-5),
        }


@pytest.mark.soak
def test_the_command_starts_the_processes_of_its_plan(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = rows_of_19_batches(directory)
    flags = (directory, "--source", options["source"], "--seq-len", 8, "--json")
    alone, together = (json.loads(muster(capsys, *flags, *more)[1]) for more in ((), ("--plan", "dp2")))
    assert together["sources"]["all"]["loss"] == pytest.approx(alone["sources"]["all"]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (
            ("--plan", "dp3-tp2-z1-cp2"),
            3,
            "with cp2, z1: only dp and tp can distribute it so far; nearest: dp3-tp2-mb1-fp32",
        ),
        (
            ("--plan", "pp2"),
            3,
            "can't evaluate with pp2: only dp and tp can distribute it so far; nearest: dp1-mb1-fp32",
        ),
        (("--plan", "dp2-bf16", "--precision", "fp32"), 2, "--precision fp32 and --plan dp2-bf16 give two precisions"),
        (("--plan", "tp3"), 3, "tp 3 doesn't divide the model's"),
    ],
)
def test_plans_that_cannot_evaluate_are_one_sentence(directory, tmp_path, monkeypatch, capsys, flags, code, words):
    monkeypatch.chdir(tmp_path)
    found, _, err = muster(capsys, directory, "--source", "rows.jsonl", *flags)
    assert (found, words in err, err.count("\n")) == (code, True, 1), err


# --- tasks ---


def test_without_the_harness_a_sentence_says_how_to_get_it(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = muster(capsys, directory, "--tasks", "own")
    assert code == 2
    assert err.startswith("muster: --tasks needs lm_eval (")
    assert err.endswith("pip install 'muster-llm[eval]'\n")
    code, _, err = muster(capsys, tmp_path, "--tasks", "own")
    assert (code, f"'muster checkpoint convert {tmp_path} DIR --to hf'" in err) == (2, True)


def fake_harness(monkeypatch: pytest.MonkeyPatch, results: dict[str, Any] | Exception) -> list[dict[str, Any]]:
    """A module in the harness's place, and what it was asked."""
    asked = []

    def simple_evaluate(**told: Any) -> dict[str, Any]:
        asked.append(told)
        print("what a harness says on its way")
        if isinstance(results, Exception):
            raise results
        return {"results": results}

    manager = SimpleNamespace(TaskManager=lambda include_path: SimpleNamespace(all_tasks=["own", "other"]))
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", manager)  # type: ignore[arg-type]
    return asked


def test_tasks_are_run_over_the_directory(directory, monkeypatch, capsys):
    asked = fake_harness(monkeypatch, {"own": {"alias": "own", "acc,none": 0.5, "acc_stderr,none": 0.25}})
    code, out, _ = muster(capsys, directory, "--tasks", "own,other", "--samples", 7, "--json")
    assert code == 0
    assert json.loads(out) == {
        "version": 1, "place": str(directory), "tasks": {"own": {"acc": 0.5, "acc_stderr": 0.25}}}  # fmt: skip
    (told,) = asked
    assert (told["tasks"], told["limit"], told["model"]) == (["own", "other"], 7, "hf")
    assert told["model_args"]["pretrained"] == str(directory)
    assert "own          acc 0.5  acc_stderr 0.25\n" in muster(capsys, directory, "--tasks", "own")[1]
    code, _, err = muster(capsys, directory, "--tasks", "ohter")
    assert (code, "the harness knows no task 'ohter'; did you mean 'other'?" in err) == (2, True)
    fake_harness(monkeypatch, OSError("no network"))
    code, _, err = muster(capsys, directory, "--tasks", "own")
    assert (code, err) == (1, "muster: the harness failed (OSError: no network)\n")


@pytest.mark.soak
def test_the_real_harness_finds_what_the_model_prefers(directory, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = [{"question": "a rose is a", "answers": ["rose", "no"], "right": 0}] * 3
    (tmp_path / "rows.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"""
task: own_roses
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.json"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: answers
doc_to_target: right
metric_list: [{{metric: acc}}]
"""
    (tmp_path / "own.yaml").write_text(task)
    code, out, err = muster(capsys, directory, "--tasks", "own_roses", "--task-dir", tmp_path, "--json")
    assert code == 0, err
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits = model(torch.tensor([[1, 2, 3, 1]])).logits[0, -1]
    assert json.loads(out)["tasks"]["own_roses"]["acc"] == float(logits[2] > logits[4])


# --- memory ---


class AllocationWatch(TorchDispatchMode):
    """Notes the largest result of an operator, in elements."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_logits_of_all_positions_are_never_in_memory(softcap):
    spec = ModelSpec(
        vocab_size=1000, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=8,
        logit_softcap=softcap)  # fmt: skip
    model, _ = build_inference_decoder(spec, "fp32", torch.device("cpu"), None)
    init_stage(model, spec, 0)
    ids = np.random.default_rng(0).integers(0, 1000, (2, 2049))
    batch = Batch(ids[:, :-1], ids[:, 1:].copy(), 2 * 2048)
    with torch.no_grad():
        expected = float(cross_entropy_sum(model(torch.from_numpy(ids[:, :-1])), torch.from_numpy(batch.labels_BS)))
    with AllocationWatch() as watch:
        total, count = evaluate._loss_sum(model, 1000, iter([batch]), torch.device("cpu"))
    assert watch.largest < 2 * 2048 * 1000 / 8
    assert (total, count) == (pytest.approx(expected, rel=1e-6), 4096)


def test_weights_are_held_in_the_precision_of_those_on_disk_or_in_that_asked_for(
    directory, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    built, build = [], evaluate.build_inference_decoder

    def note(*arguments: Any) -> Any:
        module, layouts = build(*arguments)
        built.append({parameter.dtype for parameter in module.parameters()})
        return module, layouts

    monkeypatch.setattr(evaluate, "build_inference_decoder", note)
    flags = (directory, "--source", "rows.jsonl", "--seq-len", 8, "--json")
    found = [
        json.loads(muster(capsys, *flags, *more)[1])["sources"]["all"]["loss"] for more in ((), ("--precision", "bf16"))
    ]
    assert built == [{torch.float32}, {torch.bfloat16}]
    assert found[1] == pytest.approx(found[0], rel=0.02)
