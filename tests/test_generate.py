"""Text: cached or not, alone or in a batch, on one process or two, it is the same; and what can't be made."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muster.cli.main import main
from muster.config.named_model import load_model
from muster.model.decoder import Decoder
from muster.model.generation import generate, sample_token
from muster.model.kv_cache import KvCache
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.inference_plans import require_generation_supported
from muster.spec.plan_name import parse_plan_name
from muster.spec.text_generation import SamplingParams
from muster.train.text_generation import find_trained_model
from tests.parity import FAMILIES
from tests.ranks import run_ranks
from tests.test_model import SMALL, TIED, build, tokens_for

GREEDY = SamplingParams(temperature=0)
ANY = SamplingParams(temperature=1, top_k=0, seed=4)


GPT2 = SMALL.model_copy(update=FAMILIES["gpt2"] | {"max_positions": 30})
QWEN3 = SMALL.model_copy(update=FAMILIES["qwen3"])


def outspoken_model(spec=SMALL) -> Decoder:
    """Weights so large that every token of the context matters to the next one."""
    model = build(spec).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
            else:
                parameter.mul_(8)
    return model


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# The cache


@pytest.mark.parametrize("spec", [SMALL, TIED, GPT2, QWEN3])
def test_logits_through_the_cache_are_those_without(spec):
    model, tokens = outspoken_model(spec), tokens_for(spec, seq=23)
    expected = model(tokens).detach()
    with KvCache(model, torch.zeros(2, dtype=torch.int64), capacity=23) as cache:
        for first, end in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 23)):
            close(cache.read(tokens[:, first:end]), expected[:, end - 1])
    close(model(tokens), expected)


@pytest.mark.parametrize("spec", [SMALL, GPT2, QWEN3])
def test_texts_of_different_lengths_share_a_cache(spec):
    model, tokens = outspoken_model(spec), tokens_for(spec, batch=3, seq=12)
    starts, reads = [0, 5, 9], ((0, 10), (10, 11), (11, 12))
    expected = [
        [model(tokens[row : row + 1, start:end])[0, -1].detach() for row, start in enumerate(starts)]
        for _, end in reads
    ]
    with KvCache(model, torch.tensor(starts), capacity=12) as cache:
        for (first, end), rows in zip(reads, expected, strict=True):
            close(cache.read(tokens[:, first:end]), torch.stack(rows))


# ----------------------------------------------------------------------------------------------------------------------
# Texts


def test_a_text_is_the_likeliest_token_each_time_also_beyond_the_context():
    model, ids = outspoken_model(), [3, 4]
    kept = ids
    for _ in range(14):
        new = int(model(torch.tensor([kept]))[0, -1].argmax())
        ids, kept = [*ids, new], [*kept, new]
        if len(kept) > 6:  # as many as the model may see: it goes on from the later half
            kept = kept[-3:]
    assert generate(model, [[3, 4]], 14, GREEDY, context=6) == [ids[2:]]
    assert len(set(ids)) > 3


def test_the_others_of_a_batch_change_nothing():
    model, prompts = outspoken_model(), [[1, 2, 3], [7], [5, 4, 3, 2, 1, 0, 9, 8]]
    for sampling in (GREEDY, ANY):
        together = generate(model, prompts, 15, sampling, context=10)
        assert together == [generate(model, [prompt], 15, sampling, context=10)[0] for prompt in prompts]


def test_draws_are_keyed_by_seed_and_position():
    model = outspoken_model()
    (ids,) = generate(model, [[1, 2, 3]], 12, ANY, context=20)
    torch.manual_seed(99)
    assert generate(model, [[1, 2, 3]], 12, ANY, context=20) == [ids]
    assert generate(model, [[1, 2, 3, *ids[:5]]], 7, ANY, context=20) == [ids[5:]]
    assert generate(model, [[1, 2, 3]], 12, ANY.model_copy(update={"seed": 5}), context=20) != [ids]


def test_a_text_ends_where_its_document_does():
    model = outspoken_model()
    whole = generate(model, [[1, 2, 3], [7]], 12, ANY, context=20)
    end = whole[0][4]
    cut = [ids[: ids.index(end)] if end in ids else ids for ids in whole]
    assert generate(model, [[1, 2, 3], [7]], 12, ANY, context=20, stop_ids=[end]) == cut
    assert generate(model, [[1, 2, 3]], 12, ANY, context=20, stop_ids=[end]) == cut[:1]


def test_top_k_and_top_p_leave_the_likeliest():
    logits = torch.tensor([0.1, 0.3, 0.4, 0.2], dtype=torch.float64).log()

    def drawn(**keys) -> set[int]:
        return {
            sample_token(logits, SamplingParams(**{"temperature": 1, "top_k": 0, **keys}), position)
            for position in range(200)
        }

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_p=0.39) == {2}
    assert drawn(top_p=0.41) == {1, 2}
    assert drawn(top_p=0.95) == {0, 1, 2, 3}
    assert drawn(top_k=3, top_p=0.7) == {1, 2}, "top_p counts what top_k has left: 0.44, 0.33, 0.22"
    assert drawn(temperature=0.01) == drawn(temperature=0) == {2}


def test_prompts_that_do_not_fit_are_refused():
    model = outspoken_model()
    with pytest.raises(ConfigError, match="a prompt has 5 tokens, but the model was trained on sequences of 4"):
        generate(model, [[1], [1, 2, 3, 4, 5]], 1, GREEDY, context=4)
    with pytest.raises(ConfigError, match="at least one token"):
        generate(model, [[]], 1, GREEDY, context=4)


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def test_two_ranks_write_what_one_writes(whole: Path) -> None:
    for found in run_ranks(2, "tests.generation_ranks:compare", {"run": str(whole)}):
        assert found["difference"] < 1e-10 * found["largest"]
        assert found["texts"] == found["expected"]
        assert all(found["texts"])


@pytest.mark.parametrize("plan", ["tp2", "tp2-ep2s"])
def test_ranks_that_share_experts_read_what_one_reads(plan: str) -> None:
    """Slices of every expert, or whole experts on each rank."""
    payload = {"plan": plan, "families": ["experts", "grouped", "balanced", "deepseek", "gpt_oss", "capacity"]}
    for found in run_ranks(2, "tests.generation_ranks:compare_experts", payload):
        for family, (difference, has_whole_experts) in found.items():
            assert difference < 1e-10, family
            assert has_whole_experts == plan.endswith("s")


@pytest.mark.parametrize("name", ["dp2-ep2", "tp2-ep2", "tp2-ep2s-sp", "tp2-ep2x1"])
def test_plans_of_experts_that_cannot_write_name_one_that_can(name: str) -> None:
    with pytest.raises(InfeasibleError, match=r"slices of every expert .* whole ones .*; nearest: tp2-ep2s-mb1-bf16$"):
        require_generation_supported(parse_plan_name(name), load_model("tiny-moe"))
    require_generation_supported(parse_plan_name("tp2-ep2s"), load_model("tiny-moe"))


def test_a_rank_that_takes_others_rows_is_seen() -> None:
    payload = {"plan": "tp2-ep2s", "families": ["experts"], "fault": True}
    for found in run_ranks(2, "tests.generation_ranks:compare_experts", payload):
        assert found["experts"][0] > 1e-4


def test_the_command_prints_prompts_and_texts(whole: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["generate", str(whole), "--prompt", "import ", "--prompt", "d", "--tokens", "30", "--temperature", "0"]
    assert main(command) == 0
    plain = capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["step"], found["plan"]) == (1, 20, "dp1-mb1-fp32")
    assert plain == "".join(entry["prompt"] + entry["text"] + "\n" for entry in found["texts"])
    assert [entry["prompt"] for entry in found["texts"]] == ["import ", "d"]
    assert main([command[0], found["checkpoint"], *command[2:]]) == 0
    assert capsys.readouterr().out == plain


def test_converted_weights_write_what_the_run_writes(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--prompt", "import ", "--tokens", "20", "--temperature", "0"]
    assert main(["generate", str(whole), *flags]) == 0
    expected = capsys.readouterr().out
    for source, kind in ((whole, "hf"), (tmp_path / "hf", "muster"), (whole, "dcp")):
        assert main(["checkpoint", "convert", str(source), str(tmp_path / kind), "--to", kind]) == 0
    for kind in ("hf", "muster"):
        capsys.readouterr()
        assert main(["generate", str(tmp_path / kind), *flags]) == 0
        assert capsys.readouterr().out == expected
    assert main(["generate", str(tmp_path / "dcp"), *flags]) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_of_another_program_is_run_as_it_is_stored(dtype: str, tmp_path: Path) -> None:
    from tests.hf_models import random_model

    deepcopy(random_model("llama")).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_trained_model(tmp_path).plan.precision == {"float32": "fp32", "bfloat16": "bf16"}[dtype]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 2, "there is no directory nowhere: expected a run"),
        (["WHOLE", "--prompt", "x" * 65], 2, "a prompt has 65 tokens, but the model was trained on sequences of 64"),
        (["WHOLE", "--prompt", ""], 2, "a prompt of at least one token"),
        (["WHOLE", "--plan", "tq2"], 2, "unknown part 'tq2'; did you mean 'tp2'"),
        (
            ["WHOLE", "--plan", "pp2-tp2"],
            3,
            "with pp2: only tp can distribute it, and oparam or oparamd keep layers off",
        ),
        (
            ["WHOLE", "--plan", "tp3"],
            3,
            "tp 3 doesn't divide the model's 4 heads and 2 key/value heads: legal are 1, 2, 4",
        ),
        (
            ["WHOLE", "--plan", "tp2-ep2s"],
            3,
            "keep layers off the device; nearest: tp2-mb1-fp32",
        ),
        (["WHOLE", "--top-p", "0"], 2, "--top-p 0.0: input should be greater than 0"),
        (["WHOLE", "--tokens", "none"], 2, "expected a whole number >= 1, got 'none'"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    arguments: list[str], code: int, words: str, whole: Path, capsys: pytest.CaptureFixture
) -> None:
    path, *flags = [str(whole) if argument == "WHOLE" else argument for argument in arguments]
    assert main(["generate", path, "--prompt", "def", *flags]) == code
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_run_without_a_checkpoint_is_one_sentence(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.yaml").write_text((whole / "config.yaml").read_text())
    assert main(["generate", str(tmp_path), "--prompt", "def"]) == 2
    assert f"{tmp_path} has no complete checkpoint yet" in capsys.readouterr().err
