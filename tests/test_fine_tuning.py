"""A fine-tuner's walk: a model with its tokenizer from Hugging Face, dialogues in JSON, and back to `transformers`."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import muster
from muster.cli.main import main
from muster.spec.plan import Plan
from muster.train.text_generation import (
    GenerationRequest,
    TextGenerator,
    encode_dialogue,
    encode_prompt,
    find_trained_model,
    first_messages,
)
from tests.fine_tuning import write_base_model, write_dialogues, write_llama3_tokenizer
from tests.train_runs import QUICK, train

PROMPTS = ("say hello", "say fox")
RUN_FILE = """
model: hf:../base
data: {source: ./talks.json, tokenizer: ../base, validation_split: 0.1, packing: document_mask}
train: {steps: 3, global_batch_size: 4, seq_len: 64, init_from: ../base}
optim: {lr: 1.0e-3}
"""


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", "tp2-mb2-fp32"),
        ("mistral", "pp2-mb1-fp32"),
        *(
            pytest.param(kind, plan, marks=pytest.mark.soak)
            for kind in ("llama", "mistral")
            for plan in ("dp1-mb2-fp32", "dp2-mb1-fp32-z3", "tp2-mb2-fp32", "pp2-mb1-fp32")
            if (kind, plan) not in (("llama", "tp2-mb2-fp32"), ("mistral", "pp2-mb1-fp32"))
        ),
    ],
)
def test_a_fine_tuned_model_is_the_same_in_transformers(
    kind: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    base, project, run = tmp_path / "base", tmp_path / "project", tmp_path / "first" / "run"
    write_base_model(kind, base)
    write_dialogues(project / "talks.json")
    (project / "sft.yaml").write_text(RUN_FILE)
    dropout = [f"--model.{rate}_dropout=0.1" for rate in ("hidden", "attention")]
    ended = train(project / "sft.yaml", "--run", run, "--parallel", plan, *dropout, *QUICK)
    assert ended.code == 0, ended.err
    elsewhere = tmp_path / "second"
    elsewhere.mkdir()
    run = Path(shutil.move(run, elsewhere / "moved"))
    kept = base.rename(tmp_path / "base that the run doesn't need")
    monkeypatch.chdir(elsewhere)

    assert main(["eval", "moved", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sources"]["all"]["tokens"] > 0
    assert main(["report", "moved"]) == 0
    assert "moved/report.html" in capsys.readouterr().out
    assert main(["report", "moved", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]
    flags = [flag for prompt in PROMPTS for flag in ("--prompt", prompt)]
    assert main(["generate", "moved", "--chat", *flags, "--tokens", "12", "--temperature", "0", "--json"]) == 0
    texts = [entry["text"] for entry in json.loads(capsys.readouterr().out)["texts"]]
    assert main(["checkpoint", "convert", "moved", "export", "--to", "hf"]) == 0
    export = Path(shutil.move("export", tmp_path / "released"))
    _compare_with_transformers(run, export, kept, texts)
    ours = muster.load_model("moved")
    theirs, tokenizer = muster.to_transformers("moved")
    ids = torch.tensor([tokenizer("the lazy dog").input_ids])
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    ours(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
    capsys.readouterr()
    assert main(["generate", str(export), "--chat", *flags, "--tokens", "12", "--temperature", "0", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [entry["text"] for entry in again["texts"]] == texts


def _compare_with_transformers(run: Path, export: Path, base: Path, texts: list[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(export).eval(), AutoTokenizer.from_pretrained(export)
    before = AutoTokenizer.from_pretrained(base)
    assert tokenizer.chat_template == before.chat_template
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(tokenizer, name) for name in names] == [getattr(before, name) for name in names]
    for file in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((folder / file).read_text()) for folder in (export, base))
        assert {name: ours.get(name) for name in names} == {name: theirs.get(name) for name in names}, file
    assert model.generation_config.temperature == 0.6

    source = find_trained_model(run)
    request = GenerationRequest(trained_model=source, plan=Plan(precision="fp32"), prompts=PROMPTS, max_new_tokens=12)
    generator = TextGenerator(request, torch.device("cpu"))
    plain = "the lazy dog"
    assert encode_prompt(plain, generator.tokenizer) == tokenizer(plain).input_ids
    for prompt, text in zip(PROMPTS, texts, strict=True):
        messages: list[Any] = first_messages(prompt, None)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
        assert encode_dialogue(messages, generator.tokenizer) == ids[0].tolist()
        with torch.no_grad():
            torch.testing.assert_close(generator.model(ids), model(ids).logits, rtol=1e-5, atol=1e-5)
            found = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True) == text


def test_what_is_learned_is_shown_with_all_special_tokens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_llama3_tokenizer(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]})
        + "\n"
        + json.dumps({"text": "the fox"})
    )
    own = ["--tokenizer", str(tmp_path)]
    assert main(["data", "prepare", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "store"), *own]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", str(tmp_path / "store"), "--show", "5", *own]) == 0
    shown = capsys.readouterr().out
    assert (
        "document 1: <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nfox<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«dog<|eot_id|>»\n"
    ) in shown
    assert "document 2: «<|begin_of_text|>the fox<|eot_id|>»" in shown


def test_a_text_ends_before_a_stop_text(whole: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["generate", str(whole), "--prompt", "import ", "--tokens", "30", "--temperature", "0", "--json"]
    texts = []
    for more in ([], ["--stop", "nowhere"]):
        assert main([*command, *more]) == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"][0]["text"])
    assert texts[0] == texts[1]
    stop = texts[0][9:12]
    assert main([*command, "--stop", "nowhere", "--stop", stop]) == 0
    assert json.loads(capsys.readouterr().out)["texts"][0]["text"] == texts[0][: texts[0].index(stop)]


def test_a_dialogue_goes_on_line_by_line(
    whole: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["generate", str(whole), "--chat", "--tokens", "4", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\n"))
    assert main(flags) == 0
    spoken = capsys.readouterr().out
    assert main([*flags, "--prompt", "Hi"]) == 0
    assert spoken == capsys.readouterr().out
    assert main(["generate", str(whole)]) == 2
    assert "give --prompt TEXT, or --chat for a dialogue" in capsys.readouterr().err
