"""`muster import-config`: files of other trainers become run files that load, and nothing is lost without a word."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.interop.shell_options import parse_shell_options
from muster.spec.plan_name import format_plan_name

MEGATRON = """\
#!/bin/bash
GPUS=8
NODES=${NODES:-2}
WORLD=$(( $GPUS * $NODES ))  # isn't used
TP=4; SEQ=4096
LAUNCH="--nproc_per_node $GPUS --nnodes $NODES --master_port 6000"
MODEL=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length $SEQ --max-position-embeddings ${SEQ} --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --swiglu --ffn-hidden-size 14336 --disable-bias-linear --attention-dropout 0
    --untie-embeddings-and-output-weights --vocab-size 128256 --tokenizer-type HuggingFaceTokenizer)
torchrun $LAUNCH pretrain_gpt.py ${MODEL[@]} \\
    --micro-batch-size 1 --global-batch-size 256 --train-samples 256000 \\
    --lr 3.0e-4 --min-lr=3.0e-5 --lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style minus_sqrt \\
    --lr-warmup-samples 25600 --bf16 --use-distributed-optimizer --sequence-parallel \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 \\
    --num-layers-per-virtual-pipeline-stage 4 --recompute-granularity full --recompute-method block \\
    --recompute-num-layers 1 --data-path 0.3 a_document 0.7 b_document --some-new-thing 7 2>&1 | tee log.txt
"""

TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "4"
"""

NANOTRON = """\
general: {seed: 7, project: debug}
model:
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config: {hidden_size: 512, intermediate_size: 1536, num_attention_heads: 8, num_hidden_layers: 8,
    num_key_value_heads: 2, vocab_size: 256, hidden_act: silu, tie_word_embeddings: true, max_position_embeddings: 256,
    initializer_range: 0.5, is_llama_config: true}
optimizer:
  clip_grad: 1.0
  weight_decay: 0.01
  zero_stage: 1
  learning_rate_scheduler: {learning_rate: 0.001, lr_warmup_steps: 10, lr_warmup_style: linear,
    lr_decay_style: 1-sqrt, lr_decay_starting_step: 80, lr_decay_steps: 20, min_decay_lr: 0.0001}
  optimizer_factory: {name: adamW, adam_beta1: 0.9, adam_beta2: 0.98, adam_eps: 1.0e-8, torch_adam_is_fused: true}
parallelism: {dp: 4, pp: 2, tp: 2, pp_engine: afab, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {batch_accumulation_per_replica: 3, micro_batch_size: 2, sequence_length: 128, train_steps: 100}
"""


def imported(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, *flags: str
) -> tuple[Any, dict[str, Any]]:
    """The configuration that the written run file loads as, and what --json said."""
    (folder / name).write_text(text)
    run_file = folder / "run.yaml"
    assert main(["import-config", str(folder / name), "-o", str(run_file), "--json", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    extra = [("data.tokenizer", "words.json")]
    extra += [] if "data.blend" in said["origins"] else [("data.source", "python-stdlib")]
    extra += [("train.seq_len", 64)] if "train.seq_len" in said["missing"] else []
    return load_run_config(None, run_file, extra).config, said


def test_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = imported(tmp_path, capsys, "gpt.sh", MEGATRON)
    assert config.model.num_parameters == 8_030_261_248
    assert (config.model.num_kv_heads, config.model.norm, config.model.activation) == (8, "rms", "silu")
    assert format_plan_name(config.parallel).startswith("dp2-tp4-sp-pp2v4-mb1-z1-sinterleaved-bf16")
    again = [layer for layer in range(32) if config.parallel.strategy(layer).recompute == "full"]
    assert again == list(range(0, 32, 4))
    assert (config.train.steps, config.train.global_batch_size, config.train.seq_len) == (1000, 256, 4096)
    optim = config.optim
    assert (optim.schedule, optim.decay_shape, optim.decay_fraction, optim.warmup_steps) == ("wsd", "sqrt", 0.1, 100)
    assert (optim.lr, optim.beta2, optim.weight_decay) == (3e-4, 0.999, 0.01)
    assert optim.min_lr_ratio == pytest.approx(0.1)
    blend = [(part.source, part.weight) for part in config.data.blend]
    assert blend == [(f"{tmp_path}/a_document", 0.3), (f"{tmp_path}/b_document", 0.7)]
    left = {one["option"]: one["reason"] for one in said["not_carried"]}
    assert left.keys() == {"master_port", "tokenizer-type", "some-new-thing"}
    rates = config.model.attention_dropout, config.model.hidden_dropout, config.model.embedding_dropout
    assert rates == (0, 0.1, 0.1), "Megatron-LM's default is 0.1"
    assert (said["program"], said["missing"]) == ("Megatron-LM", ["data.tokenizer"])
    assert said["origins"]["parallel.vpp"] == "num-layers-per-virtual-pipeline-stage"
    assert said["origins"]["optim.beta2"] == "default of Megatron-LM"


@pytest.mark.parametrize(
    ("old", "new", "is_kept"),
    [
        ("--bf16", "--bf16", True),
        ("--use-distributed-optimizer", "--use-torch-fsdp2", False),
        ("--num-layers 32", "--num-layers 32 --num-experts 8", False),
        ("GPUS=8", "GPUS=4", False),  # one data-parallel rank
    ],
)
def test_megatron_gathers_beside_the_step_where_muster_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, is_kept: bool
) -> None:
    option = "overlap-param-gather-with-optimizer-step"
    text = MEGATRON.replace(old, new).replace("--lr 3.0", f"--overlap-param-gather --{option} --lr 3.0")
    config, said = imported(tmp_path, capsys, "gpt.sh", text)
    assert config.parallel.overlap_param_gather_with_optimizer_step == is_kept
    left = {one["option"]: one["reason"] for one in said["not_carried"]}
    assert left["overlap-param-gather"] == "always on in Muster"
    assert left.get(option, "").startswith("" if is_kept else "stepgather needs z1 or z2")
    assert (option in left) != is_kept


def test_torchtitan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = imported(tmp_path, capsys, "job.toml", TITAN, "--nproc", "64")
    assert config.model.num_layers == 32
    # 64 processes over 2 replicas, tp 2 and pp 4 leave 4 shards; a pipeline gathers parameters once.
    assert format_plan_name(config.parallel).startswith("dp2x4-tp2-sp-pp4v2-mb1-z2-sinterleaved-bf16")
    again = [layer for layer in range(32) if config.parallel.strategy(layer).recompute == "full"]
    assert again == list(range(3, 32, 4))
    assert (config.train.global_batch_size, config.train.seq_len) == (4 * 8, 8192)
    optim = config.optim
    assert (optim.schedule, optim.decay_shape, optim.decay_fraction) == ("wsd", "cosine", 0.8)
    assert (optim.lr, optim.weight_decay, optim.warmup_steps, optim.min_lr_ratio) == (3e-4, 0.1, 20, 0.1)
    assert [one["option"] for one in said["not_carried"]] == ["training.dataset"]


def test_nanotron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = imported(tmp_path, capsys, "config.yaml", NANOTRON)
    model = config.model
    assert (model.hidden_size, model.num_layers, model.num_kv_heads, model.tied_embeddings) == (512, 8, 2, True)
    assert (model.init_std, model.norm_eps, config.seed) == (0.025, 1e-6, 7)
    assert format_plan_name(config.parallel) == "dp4-tp2-sp-pp2-mb2-z1-sgpipe-rfull-bf16"
    assert (config.train.global_batch_size, config.train.seq_len, config.train.steps) == (24, 128, 100)
    optim = config.optim
    assert (optim.schedule, optim.decay_shape, optim.decay_fraction, optim.beta2) == ("wsd", "sqrt", 0.2, 0.98)
    assert optim.min_lr_ratio == pytest.approx(0.1)
    options = {one["option"] for one in said["not_carried"]}
    assert options == {
        "general.project",
        "model.model_config.initializer_range",
        "optimizer.optimizer_factory.torch_adam_is_fused",
    }
    assert said["refused"] == []


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
    "gradient_clipping": 0.5,
}


def test_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps(DEEPSPEED)
    config, said = imported(tmp_path, capsys, "ds.json", text, "--model", "tiny")
    assert format_plan_name(config.parallel) == "dp8-mb4-z2-bf16"
    assert (config.train.global_batch_size, config.train.steps, config.model.name) == (64, 1000, "tiny")
    optim = config.optim
    assert (optim.lr, optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (2e-4, 0.9, 0.98, 0.05, 0.5)
    assert (optim.schedule, optim.min_lr_ratio, optim.warmup_steps) == ("linear", 0.0, 100)
    left = {one["option"] for one in said["not_carried"]}
    assert left == {"zero_optimization.overlap_comm", "scheduler.params.warmup_type"}
    assert said["missing"] == ["data.source", "train.seq_len", "data.tokenizer"]


def test_deepspeed_whose_values_are_left_to_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = DEEPSPEED | {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "optimizer": {}}
    del tree["scheduler"]
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    assert main(["import-config", str(tmp_path / "ds.json"), "--nproc", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["run"]["parallel"]["dp_shard"] == 4
    assert said["run"]["train"]["global_batch_size"] == 16
    wanted = {"data.source", "model", "train.steps", "train.seq_len", "optim.lr", "data.tokenizer"}
    assert set(said["missing"]) == wanted
    auto = {one["option"] for one in said["not_carried"] if "Hugging Face Trainer" in one["reason"]}
    assert auto == {"train_batch_size", "gradient_accumulation_steps"}


def test_deepspeed_whose_values_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | sizes))
    assert main(["import-config", str(tmp_path / "ds.json"), "--nproc", "4"]) == 2
    assert (
        "train_batch_size 32 isn't train_micro_batch_size_per_gpu 4 · gradient_accumulation_steps 3 · 4 data-parallel"
        " ranks (48): mend one of them"
    ) in capsys.readouterr().err
    sizes = {"train_batch_size": 60, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED | sizes))
    assert main(["import-config", str(tmp_path / "ds.json"), "--nproc", "4"]) == 2
    assert (
        "train_batch_size 60 is not a multiple of gradient_accumulation_steps 4 · 4 data-parallel ranks"
        in capsys.readouterr().err
    )


def test_plans_that_cannot_run_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = imported(tmp_path, capsys, "c.yaml", NANOTRON.replace("dp: 4", "expert_parallel_size: 2, dp: 4"))
    assert any("expert" in reason for reason in said["refused"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.sh", "echo hello", "--num-layers is missing"),
        ("a.sh", "X='", "expected balanced quotes"),
        ("a.sh", MEGATRON.replace("TP=4;", ""), "its variable isn't set"),
        ("a.sh", MEGATRON.replace("nodes 2", "").replace("GPUS=8", "GPUS=3"), "6 processes are not a multiple of"),
        ("a.toml", "x", "no TOML"),
        ("a.toml", "[job]", "[model] is missing"),
        ("a.toml", TITAN.replace("8B", "9B"), "give --model M"),
        ("a.yaml", "{", "is not valid YAML"),
        ("a.yaml", "a: 1", "expected the YAML of a nanotron training"),
        ("a.yaml", NANOTRON.replace("num_attention_heads: 8", "num_attention_heads: 3"), "num_attention_heads 3"),
        (".", "", "can't read"),
        ("a.json", "{", "no JSON"),
        ("a.json", '{"model_type": "llama"}', "a model's config.json is named in a run file, as model: hf:DIR"),
        ("a.json", json.dumps(DEEPSPEED | {"train_batch_size": 60}), "train_batch_size 60 is not a multiple of"),
        ("a.json", json.dumps(DEEPSPEED | {"fp16": {"enabled": True}, "bf16": {"enabled": True}}), "are both true"),
        ("a.yaml", "extends: tiny", "it is a run file of Muster already: start it with muster train"),
        ("a.yaml", "train: {steps: 3}", "it is a run file of Muster already: start it with muster train"),
    ],
)
def test_bad_files_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, sentence: str
) -> None:
    if name != ".":
        (tmp_path / name).write_text(text)
    assert main(["import-config", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_shell_words() -> None:
    assert parse_shell_options("A=2; B=3\nrun --x $(( A * B )) --y=$B --z ${C:-5} --on --many 1 2 | tee f") == {
        "x": "6",
        "y": "3",
        "z": "5",
        "on": True,
        "many": ["1", "2"],
    }
    assert parse_shell_options("--a 1 # --b 2\n--a 3") == {"a": "3"}
    assert parse_shell_options('L+=("--a 1" "--b")\nrun --c') == {"a": "1", "b": True, "c": True}


@pytest.mark.parametrize("format", ["e4m3", "hybrid"])
def test_fp8_is_carried_over_and_predicted(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MEGATRON.replace("--bf16", f"--bf16 --fp8-format {format} --fp8-amax-history-len 1024")
    config, said = imported(tmp_path, capsys, "gpt.sh", text)
    assert config.parallel.precision == "fp8"
    assert said["origins"]["parallel.precision"] == "fp8-format, bf16"
    assert "fp8-amax-history-len" in {one["option"] for one in said["not_carried"]}
    assert any(reason.startswith("fp8") for reason in said["refused"])
    run_file = tmp_path / "run.yaml"
    assert main(["import-config", str(tmp_path / "gpt.sh"), "-o", str(run_file)]) == 0
    capsys.readouterr()
    asked = ["predict", "--plan", str(run_file), "--cluster", "16xh100", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["plan"].startswith("dp2-tp4-sp-pp2v4-mb1-z1-sinterleaved-fp8")
    assert main([*asked, "--model", "tiny"]) == 2
    assert "leave --model out, or give the plan alone, as a plan.yaml" in capsys.readouterr().err


def test_the_printed_run_file_is_all_of_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gpt.sh").write_text(MEGATRON)
    assert main(["import-config", str(tmp_path / "gpt.sh"), "-o", str(tmp_path / "run.yaml")]) == 0
    told = capsys.readouterr().out
    assert main(["import-config", str(tmp_path / "gpt.sh")]) == 0
    printed = capsys.readouterr()
    assert printed.out == (tmp_path / "run.yaml").read_text()
    assert told == printed.err + f"run file: {tmp_path / 'run.yaml'}\n"
    assert "carried over" in told


def test_float8_converters_are_carried_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = imported(tmp_path, capsys, "job.toml", TITAN.replace('"8B"', '"8B"\nconverters = ["float8"]'))
    assert config.parallel.precision == "fp8"
    rows = '"8B"\nconverters = ["float8"]\n[float8]\nrecipe_name = "rowwise"\n[model_rest]'
    config, _ = imported(tmp_path, capsys, "job.toml", TITAN.replace('"8B"', rows))
    assert config.parallel.fp8_recipe == "rowwise"


def test_experts_without_zero_lie_on_ranks_that_share_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = MEGATRON.replace(" --use-distributed-optimizer", "").replace("TP=4", "TP=1")
    text += " --num-experts 8 --expert-model-parallel-size 4"
    config, said = imported(tmp_path, capsys, "gpt.sh", text.replace("2>&1 | tee log.txt\n", ""))
    assert format_plan_name(config.parallel).startswith("dp2x4-pp2v4-ep4-")
    assert not [reason for reason in said["refused"] if "home" in reason or "doesn't divide" in reason]


@pytest.mark.parametrize(
    ("name", "text", "kind", "left"),
    [
        ("gpt.sh", MEGATRON.rstrip() + " --context-parallel-size 2 --cp-comm-type a2a\n", "a2a", []),
        ("gpt.sh", MEGATRON.rstrip() + " --context-parallel-size 2\n", "p2p", []),
        ("gpt.sh", MEGATRON.rstrip() + " --context-parallel-size 2 --cp-comm-type a2a+p2p\n", "p2p", ["cp-comm-type"]),
        (
            "gpt.sh",
            MEGATRON.rstrip().replace("TP=4", "TP=2")
            + " --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2\n",
            "a2a+p2p",
            [],
        ),
        ("job.toml", TITAN.replace("[activation", "context_parallel_degree = 2\n[activation"), "all_gather", []),
        (
            "job.toml",
            TITAN.replace(
                "[activation",
                'context_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"\n[activation',
            ),
            "p2p",
            [],
        ),
    ],
)
def test_the_communication_of_context_parallelism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, kind: str, left: list[str]
) -> None:
    config, said = imported(tmp_path, capsys, name, text, "--nproc", "64")
    assert config.parallel.cp_comm_type == kind
    assert (config.parallel.cp, config.parallel.cp_ulysses_degree) == ((4, 2) if kind == "a2a+p2p" else (2, 1))
    dropped = [one["option"] for one in said["not_carried"]]
    assert [option for option in dropped if "comm" in option or "context" in option] == left
