"""Properties of reading tables: what is written in any usual way is read back, and no cell ends in a traceback."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.report.accuracy_rows import sections
from muster.spec.errors import ConfigError
from muster.validate.case import row_inputs
from muster.validate.cells import parse_length, parse_memory
from muster.validate.columns import canonical_column
from muster.validate.comparison import CasePrediction, predict_rows
from muster.validate.errors import UnpredictableRowError
from muster.validate.row_table import row_table
from muster.validate.summary import summarize
from muster.validate.table import parse_table
from muster.validate.table_header import metric_columns, unread_columns

CELLS = {
    "model": ["llama3-8b", "Qwen/Qwen3-30B-A3B", "GPT 175B", "mystery", ""],
    "gpu": ["H100", "NVIDIA H100 80GB HBM3", "A100-40GB", "TPU v5p", "cpu", "B200", "Quantum 9", ""],
    "n_gpus": ["8", "64", "1.024", "8 GPUs", "zero", ""],
    "tp": ["1", "2", "TP=2", "3", "tp", ""],
    "pp": ["1", "2", "64", "-", ""],
    "seq": ["8192", "8.2k", "3.7M", "8,2k", "4.096", "2^13", "0.0k", "1e9", "k", ""],
    "gbs": ["128", "1.024", "1,2k", "128 seqs", "7", ""],
    "precision": ["bf16", "tensorwise", "fp8", "NVFP4", "delayed scaling", "int4", "wise", ""],
    "zero": ["3", "ZeRO-1", "FSDP within 8", "HSDP", "zero", ""],
    "ac": ["full", "none", "sometimes", ""],
    "peak memory": ["OOM", "55,3 GiB", "62000 MB", "47.28GiB(59.76%)", "~60G", "-", "full", "0", "1.2 TB", ""],
    "step time (s)": ["9", "9,5", "1.013,8", "850 ms", "OOM", "-", "fast", "9 ± 0.1", "NaN", ""],
}
"""Cells of each column, as people write them and as they don't."""
HEADERS = {
    "n_gpus": ["n_gpus", "# of GPUs", "n_gpuss"],
    "tp": ["tp", "tensor_paralel_size", "TP size"],
    "seq": ["seq", "sequnce_length", "seq (tokens)"],
    "peak memory": ["peak memory", "peak memory (MB)", "max_mem_mib", "memory_gb", "peak_mem_gb"],
    "step time (s)": ["step time (s)", "step time [ms]", "tok/s/gpu", "throughput", "mfu", "time"],
}
"""Names of columns, right and wrong ones."""


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, int, bool]:
    """Draw a table of some of the columns, its number of rows, and if it lacks a column that each table must have."""
    needed = ["model", "gpu", "n_gpus", draw(st.sampled_from(["peak memory", "step time (s)"]))]
    columns = needed + draw(st.lists(st.sampled_from([name for name in CELLS if name not in needed]), unique=True))
    mark = draw(st.sampled_from([";", "\t", "|"]))
    header = [draw(st.sampled_from(HEADERS.get(name, [name]))) for name in columns]
    misspelt = "n_gpuss" in header or not metric_columns([canonical_column(name) for name in header])
    rows = draw(st.integers(1, 4))
    lines = [[draw(st.sampled_from(CELLS[name])) for name in columns] for _ in range(rows)]
    lines = [line if any(line) else [*line[:-1], "x"] for line in lines]
    return "\n".join(mark.join(line) for line in (header, *lines)) + "\n", rows, misspelt


def tell(inputs, case):
    return CasePrediction(10.0, inputs.cluster.device.memory_bytes, lambda: (40e9, True))


@given(tables())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_each_row_of_any_table_is_predicted_or_says_why_not(drawn: tuple[str, int, bool]):
    text, rows, misspelt = drawn
    if misspelt:
        with pytest.raises(ConfigError, match="the header lacks the column"):
            parse_table(text, "t.csv")
        return
    read = parse_table(text, "t.csv")
    results = predict_rows(read, tell)
    assert [result.row.number for result in results] in ([*range(1, rows + 1)], [*range(1, rows)])
    for result, found in zip(results, row_table(results), strict=True):
        assert (result.prediction is None) == bool(found["why"])
        assert (found["low_s"] is None) == (result.prediction is None or "never measured" in found["interval_from"])
        assert "\n" not in result.reason
    shown = [one.title for one in sections(summarize(results))]
    assert ("Not predicted" in shown) == any(result.reason for result in results)
    assert isinstance(unread_columns(text), list)


@given(st.floats(0.6, 5000), st.sampled_from(["{} GiB", "{}GB", "~{} G", "{}"]), st.booleans())
@settings(derandomize=True)
def test_memory_is_read_back_however_it_is_written(gib: float, how: str, comma: bool):
    for text, digits in ((f"{gib:.2f}", 0.006), (f"{gib:.0f}", 0.51)):
        cell = how.format(text.replace(".", ",") if comma else text)
        assert parse_memory(cell) == pytest.approx(gib, abs=digits)
    assert parse_memory(f"{gib * 1024:.0f} MB") == pytest.approx(gib, abs=0.001)


@given(st.integers(10, 24), st.integers(1, 2), st.sampled_from([("k", 10**3), ("M", 10**6)]))
@settings(derandomize=True)
def test_a_rounded_power_of_two_is_read_back(power: int, digits: int, unit: tuple[str, int]):
    if 2**power >= unit[1]:
        assert parse_length(f"{2**power / unit[1]:.{digits}f}{unit[0]}") == 2**power


@given(st.lists(st.floats(0.01, 1e5), min_size=2, max_size=4))
@settings(derandomize=True)
def test_german_numbers_are_read_back(times_s: list[float]):
    def german(value: float) -> str:
        return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))

    lines = [f"llama3-8b;H100;8;1;1;8.192;128;4.096;{german(value)}" for value in times_s]
    rows = parse_table("model;gpu;n_gpus;tp;pp;seq;gbs;hidden;step time (s)\n" + "\n".join(lines), "t.csv")
    assert [(row.seq_len, row.hidden) for row in rows] == [(8192, 4096)] * len(rows)
    assert [row.value for row in rows] == pytest.approx([round(value, 2) for value in times_s])


LAYOUTS = {
    "TP2PP2CP2": {"tp": 2, "pp": 2, "cp": 2},
    "TP8,PP2,recompute=full": {"tp": 8, "pp": 2, "recompute": "full"},
    "FSDP 16, AC=no": {"zero": "FSDP within 16", "recompute": "none"},
    "dp16-mb1-z3": {"dp": 16, "zero": "ZeRO-3"},
    "FSDP hybrid shard": {"zero": "hsdp"},
}


@pytest.mark.parametrize("cell", LAYOUTS)
def test_a_layout_in_one_cell_is_read(cell: str) -> None:
    (row,) = parse_table(f'{LAYOUT_HEAD}\nllama3-8b,H100,16,"{cell}",1,64,4096,2\n', "table")
    assert {name: getattr(row, name) for name in LAYOUTS[cell]} == LAYOUTS[cell]


LAYOUT_HEAD = "model,gpu,gpus,parallelism,mbs,gbs,seq,step time (s)"


def test_what_a_layout_cell_says_twice_or_beside_all_columns_is_told() -> None:
    (row,) = parse_table(f'{LAYOUT_HEAD}\nllama3-8b,H100,16,"TP=2, TP=4",1,64,4096,2\n', "table")
    assert "tp: found '2 and 4'" in row.problem
    (row,) = parse_table(f"{LAYOUT_HEAD}\nllama3-8b,H100,16,TP=2 XP=3,1,64,4096,2\n", "table")
    assert (row.tp, row.assumed) == (2, "layout without XP=3, which nothing was taken from")


@pytest.mark.parametrize(("cell", "sequences"), [("524288 tokens", 64), ("4M", 512), ("3.7M tok", 452), ("64", 64)])
def test_a_global_batch_of_tokens_is_one_of_sequences(cell: str, sequences: int) -> None:
    text = f"model,gpu,gpus,tp,pp,mbs,seq,gbs,tokens/s/gpu\nllama3-8b,H100,8,1,1,1,8192,{cell},9500\n"
    (row,) = parse_table(text, "table")
    assert row.global_batch == sequences
    assert bool(row.assumed) == (cell != "64")


def test_comments_of_latex_are_no_rows() -> None:
    lines = [
        r"Model & Device & GPUs & Seq & TP & PP & MBS & GBS & Iter. time [s] \\",
        r"LLaMA-2 13B & A100 & 64 & 4096 & 2 & 2 & 1 & 512 & 13.2 \\ % LLaMA & foo",
        r"% LLaMA-2 7B & A100 & 64 & 4096 & 2 & 2 & 1 & 512 & 7.2 \\",
        r" & A100 & 64 & 4096 & 4 & 2 & 1 & 512 & 14.2 \\",
    ]
    rows = parse_table("\n".join(lines), "table")
    assert [(row.model_name, row.tp) for row in rows] == [("LLaMA-2 13B", 2), ("LLaMA-2 13B", 4)]


@pytest.mark.parametrize("model", ["Llama-3.1 405B", "DeepSeek-V3", "Mixtral-8x7B"])
def test_no_degrees_are_guessed_that_memory_or_experts_rule_out(model: str) -> None:
    text = f"model,gpu,gpus,seq,gbs,tokens/s/gpu\n{model},H100,512,8192,512,200\n"
    (row,) = parse_table(text, "table")
    with pytest.raises(UnpredictableRowError, match="are unknown"):
        row_inputs(row)
