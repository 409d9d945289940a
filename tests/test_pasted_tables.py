"""Tables as people paste them from papers, pages and spreadsheets."""

import pytest

from muster.report.accuracy_rows import sections
from muster.spec.errors import ConfigError
from muster.validate.case import row_inputs
from muster.validate.cluster_from_row import parse_device
from muster.validate.comparison import CasePrediction, predict_rows
from muster.validate.errors import UnpredictableRowError
from muster.validate.row_table import row_table
from muster.validate.summary import summarize
from muster.validate.table import parse_table
from muster.validate.table_header import unread_columns
from muster.validate.term_parsing import parse_fp8_recipe, parse_precision

WIDE = "model,gpu,n_gpus,tp,pp,seq,gbs,"
PASTED = {
    "a title above Markdown": """Table 3: Llama on 8×H100

| Model | GPU | GPUs | TP | PP | Seq | GBS | tok/s/GPU |
|:--|--:|---|---|---|---|---|---|
| **llama3-8b** | H100 | 8 | 1 | 1 | 8192 | 128 | 9,500† |
""",
    "a title with commas": """"Table 1. Speed, tokens a second"

model,GPU,#GPUs,TP,PP,seq,GBS,tok/s/GPU
llama3-8b,H100,8,1,1,8192,128,9.5k
""",
    "two rows of names": """Model,GPU,Parallelism,,Batch,,,Speed
,,TP,PP,MBS,GBS,Seq,tokens/s/GPU
llama3-8b,8x H100,1,1,1,128,8192,~9500
""",
    "units below names": """model,gpu,n_gpus,tp,pp,seq_len,global_batch,throughput
,,,,,tokens,sequences,tokens/s/GPU
llama3-8b,H100,8,1,1,8192,128,9500
""",
    "units in cells": """model,gpu,gpus,tp,pp,seq,gbs,throughput
llama3-8b,H100,8,TP=1,1,8K tokens,128 seqs,"9,500 tok/s/GPU"
""",
    "the device in a heading": """## DGX H100

| Model | #-GPUs | GBS | Sequence <br> Length | TP | PP | Tokens <br> / sec / GPU |
|---|---|---|---|---|---|---|
| llama3-8b | 8 | 128 | 8192 | 1 | 1 | 9,500 |
""",
    "LaTeX": r"""Model & GPU & \#GPUs & TP & PP & Seq & GBS & Tokens/s/GPU \\
\hline
llama3-8b & H100 & 8 & 1 & 1 & 8192 & 128 & 9500 \\
""",
    "columns of spaces": """model      gpu   n_gpus  tp  pp  seq_len  global_batch  tokens_per_s_per_gpu
llama3-8b  H100  8       1   1   8192     128           9500
""",
    "a drawn box": """┏━━━━━━━━━━━┳━━━━━━┳━━━━━━━━┳━━━━┳━━━━┳━━━━━━┳━━━━━┳━━━━━━━━━━━┓
┃ model     ┃ gpu  ┃ n_gpus ┃ tp ┃ pp ┃ seq  ┃ gbs ┃ tok/s/gpu ┃
┡━━━━━━━━━━━╇━━━━━━╇━━━━━━━━╇━━━━╇━━━━╇━━━━━━╇━━━━━╇━━━━━━━━━━━┩
│ llama3-8b │ H100 │ 8      │ 1  │ 1  │ 8192 │ 128 │ 9500      │
└───────────┴──────┴────────┴────┴────┴──────┴─────┴───────────┘
""",
    "a frame of signs": """+-----------+------+--------+----+----+------+-----+-----------+
| model     | gpu  | n_gpus | tp | pp | seq  | gbs | tok/s/gpu |
+-----------+------+--------+----+----+------+-----+-----------+
| llama3-8b | H100 | 8      | 1  | 1  | 8192 | 128 | `9500`    |
+-----------+------+--------+----+----+------+-----+-----------+
""",
    "devices before their name": "model,GPUs,tp,pp,seq,gbs,tok/s/gpu\nllama3-8b,8 H100s,1,1,2^13,128,9400-9600\n",
    "odd spaces": WIDE + "tok/s/gpu\nllama3-8b\u200b,H100\u00a0SXM,8,1,1,8192,128,9\u202f500\n",
    "marks for yes and no": WIDE + "sp,compile,ac,tok/s/gpu\nllama3-8b,H100,8,1,1,8192,128,✗,✓,-,9500 [1]\n",
    "units of names": """model,gpu,n_gpus,TP size,PP size,seq (tokens),global batch size (sequences),step time [ms]
llama3-8b,H100,8,1,1,8192,128,13 797
""",
    "the header again": f"{WIDE}tok/s/gpu\n{WIDE}tok/s/gpu\nllama3-8b,H100,8,1,1,8192,128,9'500\n",
    "a decimal comma": "model;gpu;n_gpus;tp;pp;seq;gbs;step time (s)\nllama3-8b;H100;8;1;1;8192;128;13,80\n",
    "the first of several metrics": WIDE + "tok/s/gpu,step time (s)\nllama3-8b,H100,8,1,1,8192,128,-,13.8\n",
}
"""Tables that all say the same."""


def tell(inputs, case):
    return CasePrediction(10.0, inputs.cluster.device.memory_bytes, lambda: (40e9, True))


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED.keys())
def test_a_table_is_read_as_people_paste_it(text):
    [result] = predict_rows(parse_table(text, "t.csv"), tell)
    assert result.reason == ""
    assert result.inputs.model.num_layers == 32
    assert result.inputs.cluster.name == "8xh100-sxm"
    assert (result.inputs.workload.seq_len, result.inputs.workload.global_batch_size) == (8192, 128)
    assert result.measured_s == pytest.approx(128 * 8192 / 9500 / 8, rel=1e-3)


def test_cells_that_span_rows_hold_for_all_of_them_and_say_so():
    text = (
        f"{WIDE}tok/s/gpu\nllama3-8b,H100,8,1,1,8192,128,9500\n,,,2,1,,,8900\nLarge models,,,,,,,\n"
        "llama3-70b,H100,64,8,2,8192,128,900\n"
    )
    first, second, title, large = predict_rows(parse_table(text, "t.csv"), tell)
    assert (second.row.model_name, second.row.n_gpus, second.row.seq_len, second.row.tp) == ("llama3-8b", 8, 8192, 2)
    assert "as in the row above" in second.row.assumed
    assert first.row.assumed == large.row.assumed == ""
    assert "'Large models' stands alone" in title.reason


def test_a_table_of_memory_alone_is_scored_by_memory_and_outcome():
    text = f"{WIDE}mbs,peak memory (GB)\nllama3-8b,H100,8,1,1,8192,128,1,62.1\nllama3-8b,H100,8,1,1,8192,128,8,O.O.M.\n"
    held, failed = predict_rows(parse_table(text, "t.csv"), tell)
    assert (held.row.metric, held.row.value, held.reason, held.is_timed) == ("peak_memory_gb", 62.1, "", False)
    assert held.succeeded
    assert (failed.row.metric, failed.succeeded) == ("outcome", False)


def test_the_scores_of_memory_and_its_refused_rows_are_shown():
    """40 10⁹ bytes are predicted: of 32 and 50 GiB, errors of +16.4 and −25.5 %; the second leaves recompute open."""
    head = f"{WIDE}mbs,ac,attn_kernel,peak memory (GB)\n"
    rows = ("llama3-8b,H100,8,1,1,8192,128,1,none,flash2,32", "llama3-8b,H100,8,1,1,8192,128,1,,flash2,50")
    refused = "llama3-8b,Quantum 9,8,1,1,8192,128,1,none,flash2,50"
    shown = {
        one.title: one
        for one in sections(summarize(predict_rows(parse_table(head + "\n".join((*rows, refused)), "t.csv"), tell)))
    }
    assert shown["Peak memory"].rows[-1] == ("all", "1", "16.4 %", "+16.4 %", "1", "25.5 %", "−25.5 %")
    assert "Quantum 9" in shown["Not predicted"].rows[1][0]
    assert shown["Not predicted"].sentence == ""
    assert "All rows" not in shown


@pytest.mark.parametrize(
    ("header", "cell", "gib"),
    [
        ("peak memory (GB)", "55,3 GiB", 55.3),
        ("peak memory", "62000 MB", 62000 / 1024),
        ("peak memory (MiB)", "62000", 62000 / 1024),
        ("max_memory_mb", "62,000", 62000 / 1024),
        ("memory_gb", "47.28GiB(59.76%)", 47.28),
        ("peak_mem_gb", "~60G", 60),
    ],
)
def test_memory_is_read_in_its_usual_units(header, cell, gib):
    """Alone, and beside a time, whose row keeps it."""
    line = f'llama3-8b,H100,8,1,1,8192,128,"{cell}"'
    alone = parse_table(f"{WIDE}{header}\n{line}\n", "t.csv")[0]
    assert (alone.problem, alone.metric, alone.value) == ("", "peak_memory_gb", pytest.approx(gib))
    timed = parse_table(f"{WIDE}{header},step_time_s\n{line},9\n", "t.csv")[0]
    assert (timed.problem, timed.metric, timed.peak_mem_gb) == ("", "iteration_time_s", pytest.approx(gib))


def test_a_row_that_ran_out_of_memory_may_say_so_in_the_column_of_memory():
    lines = (
        "llama3-8b,H100,8,1,1,8192,128,OOM,-",
        "llama3-8b,H100,8,1,1,8192,128,OOM,OOM",
        "llama3-8b,H100,8,1,1,8192,128,OOM,9",
    )
    failed, twice, both = parse_table(f"{WIDE}peak memory,step_time_s\n" + "\n".join(lines), "t.csv")
    assert (failed.problem, failed.metric, failed.outcome) == ("", "outcome", "OOM")
    assert (twice.problem, twice.metric) == ("", "outcome")
    assert both.problem == "row 3, peak_mem_gb: found 'OOM' beside '9', expected one"


@pytest.mark.parametrize(
    ("cell", "tokens"),
    [("8.2k", 8192), ("131k", 2**17), ("65.5k", 2**16), ("1.05M", 2**20), ("3.7M", 3613 * 1024), ("96k", 96 * 1024)]
    + [("1.3k", 1300), ("0.5M", 2**19), ("4.096", 4096), ("131.072", 2**17), ("8,2k", 8192)],
)
def test_a_rounded_length_is_the_one_that_programs_run(cell, tokens):
    row = parse_table(f"model;gpu;n_gpus;tp;pp;seq;gbs;tok/s/gpu\nllama3-8b;H100;8;1;1;{cell};128;9500\n", "t.csv")[0]
    assert (row.problem, row.seq_len) == ("", tokens)


def test_numbers_of_a_german_table_have_decimal_commas_and_dotted_thousands():
    head = "model;gpu;n_gpus;tp;pp;seq;gbs;{}\n"
    line = "llama3-8b;H100;8;1;1;{};128;{}\n"
    for seq, metric, cells, values in (
        ("8.192", "tok/s/gpu", ("9.500", "950"), (9500, 950)),
        ("8192", "step time (s)", ("13,797", "13,8"), (13.797, 13.8)),
        ("8192", "step time (s)", ("13,797", "1.013,8"), (13.797, 1013.8)),
        ("8192", "tok/s/gpu", ("9,500", "950"), (9500, 950)),
        ("8192", "step time (s)", ("13.797", "1,234.5"), (13.797, 1234.5)),
    ):
        rows = parse_table(head.format(metric) + "".join(line.format(seq, cell) for cell in cells), "t.csv")
        assert [(row.problem, row.seq_len, row.value) for row in rows] == [("", 8192, value) for value in values]


@pytest.mark.parametrize(
    ("said", "recipe"),
    [("tensorwise", "tensorwise"), ("delayed scaling", "delayed"), ("rowwise", "rowwise"), ("MX", "mxfp8")],
)
def test_a_recipe_alone_is_one_of_fp8(said, recipe):
    assert (parse_precision(said), parse_fp8_recipe(said)) == ("fp8", recipe)


def test_a_misspelt_column_is_told_with_the_name_that_it_may_mean(tmp_path, capsys):
    from muster.cli.main import main

    text = f"{WIDE}tensor_paralel_size,gradient_acumulation_steps,loss,tok/s/gpu\n"
    assert unread_columns(text.replace("tp,", "")) == [
        "tensor_paralel_size, did you mean 'tensor_parallel_size'",
        "gradient_acumulation_steps, did you mean 'gradient_accumulation_steps'",
        "loss",
    ]
    for wrong, name in (("modle_name", "model"), ("acelerator", "gpu")):
        with pytest.raises(ConfigError, match=f"is it '{wrong}'"):
            parse_table(f"{WIDE}step_time_s\nx,H100,8,1,1,8192,128,9\n".replace(name, wrong, 1), "t.csv")
    with pytest.raises(ConfigError, match="lacks the columns metric, value; is it 'tokens_per_sec_pr_gpu'"):
        parse_table(f"{WIDE}tokens_per_sec_pr_gpu\nllama3-8b,H100,8,1,1,8192,128,9\n", "t.csv")
    path = tmp_path / "mine.csv"
    path.write_text(f"{WIDE}step_time_s\nllama3-8b,H100,8,1,1,8192,128,9\n".replace("seq,", "sequence_lenght,"))
    assert main(["validate", "--csv", str(path)]) == 2
    assert "columns not read: sequence_lenght, did you mean 'sequence_length'" in capsys.readouterr().err


def test_a_table_without_columns_for_degrees_is_predicted_over_layouts():
    """70B parameters on 64 devices, 9 bytes each at dp 4, take 47 % of the memory on 16 ranks, and 78 % on 8."""
    text = "model,gpu,n_gpus,seq,gbs,mbs,{}tok/s/gpu\nllama3-70b,H100,64,8192,128,1,{}900\n"
    inputs = row_inputs(parse_table(text.format("", ""), "t.csv")[0])
    layouts = list(dict.fromkeys((case.plan.tp, case.plan.pp) for case in inputs.cases))
    assert layouts == [(8, 2), (8, 4)]
    assert {"tp", "pp"} <= set(inputs.unstated)
    [row] = row_table(predict_rows(parse_table(text.format("", ""), "t.csv"), tell))
    assert (row["assumed"]["tp"], row["assumed"]["pp"]) == ("8", "2")
    small = row_inputs(parse_table(text.format("", "").replace("70b", "8b"), "t.csv")[0])
    assert {(case.plan.tp, case.plan.pp) for case in small.cases} == {(1, 1), (2, 1), (1, 2)}
    with pytest.raises(UnpredictableRowError, match="tp is empty: expected a degree"):
        row_inputs(parse_table(text.format("tp,pp,", ",,"), "t.csv")[0])


def test_a_layout_of_more_ranks_than_devices_is_refused_with_both_numbers():
    text = "model,gpu,n_gpus,tp,pp,seq,gbs,tok/s/gpu\nllama3-8b,H100,8,8,2,8192,128,9500\n"
    [result] = predict_rows(parse_table(text, "t.csv"), tell)
    assert result.reason == "tp 8 × pp 2 × cp 1 × dp 1 is 16, but n_gpus is 8"


def test_a_row_says_which_precision_and_sharding_were_assumed():
    text = f"{WIDE}{{}}tok/s/gpu\nllama3-8b,H100,8,1,1,8192,128,{{}}9500\n"
    [bare] = row_table(predict_rows(parse_table(text.format("", ""), "t.csv"), tell))
    assert (bare["assumed"]["zero"], bare["assumed"]["precision"]) == ("ZeRO-1", "bf16")
    stated = parse_table(text.format("zero,precision,", "2,bf16,"), "t.csv")
    [full] = row_table(predict_rows(stated, tell))
    assert not {"zero", "precision"} & set(full["assumed"])


def test_a_prediction_without_anything_like_it_has_no_interval():
    [row] = row_table(predict_rows(parse_table(f"{WIDE}step_time_s\ntiny,cpu,2,1,1,128,8,1\n", "t.csv"), tell))
    assert (row["predicted_s"], row["low_s"], row["high_s"]) == (10.0, None, None)
    assert row["interval_from"] == "nothing like it was ever measured"


@pytest.mark.parametrize(
    ("cell", "metric", "value"),
    [
        ("76k tok/s", "tokens_per_s_total", 76_000),
        ("0.48 PFLOP/s", "TFLOPs_per_gpu", 480),
        ("480 TFLOPS/GPU", "TFLOPs_per_gpu", 480),
        ("9.3 samples/s", "samples_per_s_total", 9.3),
    ],
)
def test_a_unit_in_a_cell_says_what_a_throughput_is(cell, metric, value):
    [row] = parse_table(f"{WIDE}throughput\nllama3-8b,H100,8,1,1,8192,128,{cell}\n", "t.csv")
    assert (row.problem, row.metric, row.value) == ("", metric, value)


def test_a_throughput_without_a_unit_and_one_of_another_quantity_are_refused():
    bare, other = (
        predict_rows(parse_table(f"{WIDE}{metric}\nllama3-8b,H100,8,1,1,8192,128,{cell}\n", "t.csv"), tell)[0]
        for metric, cell in (("throughput", "9500"), ("tok/s/gpu", "480 TFLOP/s"))
    )
    assert "throughput has no unit" in bare.reason
    assert "found '480 TFLOP/s'" in other.reason


@pytest.mark.parametrize(
    ("said", "device"),
    [
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe 80GB", "h100-pcie"),
        ("H100 SXM5 80GB", "h100-sxm"),
        ("NVIDIA H200 NVL 141GB", "h200-nvl"),
        ("GB200 NVL72", "gb200"),
    ],
)
def test_forms_of_a_device_are_devices_of_their_own(said, device):
    assert parse_device(said).name == device


@pytest.mark.parametrize(("gpu", "precision"), [("H100", "MXFP8"), ("H100", "NVFP4"), ("A100", "fp8")])
def test_precisions_that_a_device_lacks_are_refused(gpu, precision):
    text = f"{WIDE}precision,tok/s/gpu\nllama3-8b,{gpu},8,1,1,8192,128,{precision},9500\n"
    [result] = predict_rows(parse_table(text, "t.csv"), tell)
    assert f"precision '{precision}' needs matmuls that {parse_device(gpu).name} isn't known to have" in result.reason
