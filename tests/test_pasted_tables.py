"""Tables as people paste them from papers, pages and spreadsheets."""

import pytest

from muster.validate.cluster_from_row import parse_device
from muster.validate.comparison import CasePrediction, predict_rows
from muster.validate.table import parse_table

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
    assert (failed.row.metric, failed.succeeded) == ("outcome", False)


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


@pytest.mark.parametrize("precision", ["MXFP8", "NVFP4"])
def test_precisions_that_a_device_lacks_are_refused(precision):
    text = f"{WIDE}precision,tok/s/gpu\nllama3-8b,H100,8,1,1,8192,128,{precision},9500\n"
    [result] = predict_rows(parse_table(text, "t.csv"), tell)
    assert "h100-sxm doesn't have" in result.reason
