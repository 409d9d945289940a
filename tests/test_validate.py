"""Comparison of predictions with measurements: reading of tables, meaning of rows, scores."""

import csv
import io
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from io import StringIO
from math import log
from pathlib import Path
from random import Random
from statistics import mean

import pytest
from rich.console import Console

from muster.cli.progress import RowProgress
from muster.config.cluster_files import load_device, load_link
from muster.cost.uncertainty import measured_errors
from muster.report.accuracy_markdown import accuracy_markdown
from muster.report.accuracy_page import write_accuracy_page
from muster.report.accuracy_rows import sections
from muster.report.accuracy_terminal import accuracy_text
from muster.simulate.predict import predict
from muster.spec.errors import ConfigError
from muster.spec.plan_name import parse_plan_name
from muster.validate.axis_bias import axis_biases
from muster.validate.case import RowCase, RowInputs, row_inputs
from muster.validate.columns import COLUMNS, REQUIRED_COLUMNS
from muster.validate.comparison import CasePrediction, RowResult, predict_rows, predict_rows_both_ways
from muster.validate.error_table import error_table
from muster.validate.errors import UnpredictableRowError
from muster.validate.formulas import FORMULA_WORDS, korthikanti_flops, megatron_flops, model_flops, sc21_flops
from muster.validate.row_table import row_table, row_table_csv
from muster.validate.score import score_fits
from muster.validate.sources import sequences_of_round
from muster.validate.summary import shipped_rows, summarize, to_json, validate_table
from muster.validate.sweeps import correlation_apart, score_sweeps, spearman
from muster.validate.table import MeasurementRow, is_out_of_memory, parse_table, read_table
from muster.validate.table_header import unread_columns
from muster.validate.term_parsing import Sharding, parse_sharding
from tests.chromium import Browser
from tests.conftest import require_chromium
from tests.page_audit import audit, blank_pictures
from tests.sampling import quick_sample

read_shipped_rows = cache(shipped_rows)
"""The rows that come with Muster, read once for all tests."""

LLAMA_8B = {
    "source": "a paper",
    "model_name": "LLAMA3-8B",
    "layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-80GB SXM",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "2",
    "vpp": "1",
    "dp": "4",
    "zero": "ZeRO-1",
    "cp": "1",
    "ep": "1",
    "sp": "True",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "none",
    "precision": "bf16",
    "schedule": "1F1B",
    "attn_kernel": "flash",
    "metric": "iteration_time_s",
    "value": "10",
}
"""A row that leaves nothing open."""


def table(*rows: dict[str, str]) -> str:
    """Return a table whose rows are LLAMA_8B with changes."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**LLAMA_8B, **row} for row in rows)
    return out.getvalue()


def row(**changes: str) -> MeasurementRow:
    return parse_table(table(changes), "t.csv")[0]


def predicted(step_time_s: float = 10.0, peak_bytes: float = 40e9, fits: bool | None = True) -> CasePrediction:
    return CasePrediction(step_time_s, 80e9, lambda: (peak_bytes, fits))


def tell(inputs: RowInputs, case: RowCase) -> CasePrediction:
    return predicted()


def scored(*rows: dict[str, str], answer=tell) -> list[RowResult]:
    return predict_rows(parse_table(table(*rows), "t.csv"), answer)


# --- tables ---


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "t.csv:1: the table is empty"),
        (table(), "t.csv:1: the table has a header but no rows"),
        (
            table({}).replace("n_gpus", "n_gpuss", 1),
            "t.csv:1: the header lacks the column n_gpus; is it 'n_gpuss'",
        ),
        (table({}).replace("metric,", "", 1), "t.csv:1: the header lacks the column metric"),
    ],
)
def test_an_invalid_table_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as error:
        parse_table(text, "t.csv")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden": "4k"}, "row 2, hidden: found '4k', expected a number above 0 without a unit"),
        ({"value": "10 kg"}, "row 2, value: found '10 kg', expected a number above 0 without a unit"),
        ({"value": "-1"}, "row 2, value: found '-1', expected a number above 0"),
        ({"value": "nan"}, "row 2, value: found 'nan', expected a number above 0"),
        ({"tp": "0"}, "row 2, tp: found '0', expected a number above 0"),
        ({"tp": "1.5"}, "row 2, tp: found '1.5', expected a whole number"),
        ({"layers": "1e8"}, "row 2, layers: found '1e8', expected a whole number from 1 to 10,000"),
        ({"tp": "two", "pp": "?"}, "row 2, tp: found 'two', expected a number above 0 without a unit; row 2, pp:"),
        ({"vpp": "max (one layer per chunk)", "layers": "33"}, "row 2, vpp: found 'max (one layer per chunk)'"),
    ],
)
def test_a_cell_that_cannot_be_read_leaves_out_its_row_alone(changes, sentence):
    bad, good = scored({}, changes, {})[1:]
    assert sentence in bad.reason
    assert not bad.is_predicted
    assert good.is_predicted


def test_a_row_of_another_length_is_left_out():
    first, short, last = predict_rows(parse_table(table({}) + "one,two\n" + table({}).split("\n")[1], "t.csv"), tell)
    assert (first.is_predicted, last.is_predicted) == (True, True)
    assert short.reason == "row 2: found 2 cells, expected 41, as many as the header has"


def cut(text: str, kept: Collection[str], delimiter: str = ",") -> str:
    """Return the table with those columns alone."""
    rows = list(csv.DictReader(io.StringIO(text)))
    lines = [delimiter.join(kept), *(delimiter.join(row[name] for name in kept) for row in rows)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_optional_columns_may_be_missing(delimiter):
    kept = (*REQUIRED_COLUMNS, "seq_len", "tp", "pp", "global_batch")
    found = parse_table(cut(table({}, {"value": "20"}), kept, delimiter), "t.csv")
    whole = row()
    assert [one.value for one in found] == [10, 20]
    assert (found[0].source, found[0].hidden, found[0].dp, found[0].sp) == ("t.csv", None, None, "")
    assert row_inputs(found[0]).model == row_inputs(whole).model, "a known name says the widths"
    assert set(row_inputs(found[0]).unstated) == {"attn_kernel", "sp", "vpp", "micro_batch", "recompute"}


def test_headers_may_be_written_in_capitals_and_with_columns_of_ones_own():
    text = cut(table({}), (*REQUIRED_COLUMNS[:-1], "tp", "pp", "value"))
    text = text.replace("tp,pp", "TP, PP").replace("value", "value,gpu_hours", 1)
    assert parse_table(text.replace(",10\n", ",10,3\n"), "t.csv")[0].pp == 2


def test_headers_and_metrics_may_have_the_names_of_other_programs():
    names = {"model_name": "Model", "gpu": "device", "n_gpus": "World Size", "seq_len": "sequence_length"}
    names |= {"tp": "tensor_parallel_size", "micro_batch": "MBS", "global_batch": "GBS", "hidden": "hidden_size"}
    text = table({"metric": "Tokens/s/GPU", "value": "2,150"}, {"metric": "MFU", "value": "41.5 %"})
    head, *lines = text.split("\n")
    head = ",".join(names.get(name, name) for name in head.split(","))
    first, second = parse_table("\n".join([head, *lines]), "t.csv")
    assert (first.metric, first.value, first.tp, first.seq_len) == ("tokens_per_s_per_gpu", 2150, 2, 8192)
    assert (second.metric, second.value) == ("MFU_pct", 41.5)
    milliseconds, share = parse_table(
        table({"metric": "step_time_ms", "value": "8500 (median)"}, {"metric": "mfu", "value": "0.415"}), "t.csv"
    )
    assert (milliseconds.metric, milliseconds.value, share.value) == ("iteration_time_s", 8.5, 41.5)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"ffn_hidden": "18432 dense / 2048 per expert"}, "ffn_hidden", 18432),
        ({"ffn_hidden": "18432 dense / 2048 per expert"}, "expert_hidden", 2048),
        ({"ffn_hidden": "768 per expert"}, "expert_hidden", 768),
        ({"ffn_hidden": "14,336"}, "ffn_hidden", 14336),
        ({"vpp": "max (one layer per chunk)", "layers": "32", "pp": "4"}, "vpp", 8),
        ({"seq_len": "8k"}, "seq_len", 8192),
        ({"n_gpus": "1,024 (128 nodes)"}, "n_gpus", 1024),
        ({"value": "10.2 ± 0.1"}, "value", 10.2),
    ],
)
def test_numbers_are_read_as_people_write_them(changes, field, value):
    assert getattr(row(**changes), field) == value


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_table_is_read_in_the_usual_encodings(tmp_path, encoding, ends):
    path = tmp_path / "t.csv"
    path.write_bytes(table({"notes": "3 × 8 µs"}).replace("\n", ends).encode(encoding))
    assert [one.notes for one in read_table(path)] == ["3 × 8 µs"]


def test_a_line_with_an_open_quote_is_left_out_alone():
    broken = table({}).split("\n")[1].replace("LLAMA3-8B", '"LLAMA3-8B')
    first, bad, last = predict_rows(parse_table(table({}) + broken + "\n" + table({}).split("\n")[1], "t.csv"), tell)
    assert (first.is_predicted, last.is_predicted) == (True, True)
    assert bad.reason == "row 2: not valid CSV, expected quotes in pairs around whole cells"
    assert bad.row.line == 3


def test_columns_that_are_not_read_are_told(tmp_path, capsys):
    from muster.cli.main import main

    path = tmp_path / "mine.csv"
    path.write_text(table({}).replace("micro_batch,", "micro_batches,", 1).replace(",notes", ",cost", 1))
    assert main(["validate", "--csv", str(path)]) == 0
    assert "Columns not read: micro_batches, did you mean 'micro_batch', cost" in capsys.readouterr().out
    assert main(["validate", "--csv", str(path), "--csv-out", str(path)]) == 2
    assert "is the table itself" in capsys.readouterr().err
    assert path.read_text().startswith("source,")
    assert main(["validate", "--csv", str(path), "--csv-out", str(tmp_path / "no" / "x.csv")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_a_table_with_a_column_for_each_metric_is_read():
    """As logs have it: the first of its metrics that a row states counts; comments and rules are no rows."""
    head, line = table({}).split("\n")[:2]
    names, cells = head.split(","), line.split(",")
    kept = [at for at, name in enumerate(names) if name not in ("metric", "value")]
    wide = ",".join([*(names[at] for at in kept), "MFU (%)", "TPS"])
    both, one = (",".join([*(cells[at] for at in kept), *values]) for values in (("41.5", "2150"), ("", "2150")))
    rows = parse_table("\n".join(["# by hand", wide, "|---|---|", both, "# more", one + ",,"]), "t.csv")
    assert [(row.metric, row.value, row.line) for row in rows] == [
        ("MFU_pct", 41.5, 4),
        ("tokens_per_s_per_gpu", 2150, 6),
    ]
    assert not any(row.problem for row in rows)


@pytest.mark.parametrize(
    ("text", "plan", "gpus", "batch"),
    [
        ("Parallelism,MBS,GBS\nTP4/PP2,1,64", "dp2-tp4-sp-pp2-mb1-z1", 16, 64),
        ('strategy,batch size per gpu\n"FSDP 8, TP 2",4', "dp8-tp2-sp-mb4-z3", 16, 32),
        ("TP/PP/CP/EP/VPP,MBS,GBS\n2/2/1/1/4,1,64", "dp4-tp2-sp-pp2v4-mb1-z1-sinterleaved", 16, 64),
        ("FSDP,TP,PP,VP,MBS,GA\n16,1,1,n/a,2,4", "dp16-mb2-z3", 16, 128),
        ("fsdp,per-device batch size\n16,2", "dp16-mb2-z3", 16, 32),
        ("zero_stage,dp,gradient_accumulation_steps,micro_batch\n3,16,2,2", "dp16-mb2-z3", 16, 64),
        ("tp,mbs,batch_size_tokens\n2,1,512k", "dp8-tp2-sp-mb1-z1", 16, 64),
    ],
)
def test_a_plan_is_read_from_the_cells_that_programs_and_papers_have(text, plan, gpus, batch):
    """Degrees in one cell or under one header, groups of FSDP, batches of a device, accumulation, tokens of a step."""
    head, cells = text.split("\n")
    table = f"model,gpu,n_gpus,seq,step_time_s,{head}\nllama3-8b,H100,16,8192,10,{cells}\n"
    inputs = row_inputs(parse_table(table, "t.csv")[0])
    case = inputs.cases[0]
    stated = case.plan.model_copy(update={"precision": "bf16", "compile": None})
    known = parse_plan_name(plan)
    for field in ("tp", "pp", "vpp", "cp", "ep", "dp_shard", "micro_batch_size"):
        assert getattr(stated, field) == getattr(known, field), field
    assert (stated.world_size, inputs.workload.global_batch_size) == (gpus, batch)
    assert stated.default_strategy.zero == known.default_strategy.zero
    assert unread_columns(table) == []


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("gpu,nodes,gpus_per_node\nH100,2,8", "n_gpus", 16),
        ("gpu,x\n16 x H100,1", "n_gpus", 16),
        ("gpu,slice\nTPU v6e,v6e-256", "n_gpus", 256),
        ("gpu,x\nTPU v5p-128,1", "n_gpus", 64),
        ("gpu,n_gpus,time/iter\nH100,16,12.5s", "value", 12.5),
        ("gpu,n_gpus,iteration time\nH100,16,850 ms", "value", 0.85),
        ("gpu,n_gpus,wps\nH100,16,5762", "metric", "tokens_per_s_per_gpu"),
        ("gpu,n_gpus,throughput (samples/s)\nH100,16,4.2", "metric", "samples_per_s_total"),
        ("gpu,# of GPUs,iter/s\nH100,16,0.1", "value", 10),
        ("gpu,n_gpus,status,Time per iteration [ms]\nH100,16,ok,9800", "value", 9.8),
        ("gpu,n_gpus,peak mem\nH100,16,71 GB", "peak_mem_gb", 71),
        ("gpu,n_gpus,recompute_granularity,recompute_modules\nH100,16,selective,moe_act", "recompute", "moe_act"),
    ],
)
def test_the_other_cells_of_a_table_are_read_as_people_write_them(text, field, value):
    head, cells = text.split("\n")
    wide = f"model,tp,pp,seq,gbs,{head}\nllama3-8b,2,2,8192,64,{cells}\n"
    if not any(word in head.lower() for word in ("time", "wps", "samples", "iter/s")):
        wide = wide.replace("model,", "step_time_s,model,").replace("llama3-8b", "10,llama3-8b")
    found = parse_table(wide, "t.csv")[0]
    assert (found.problem, getattr(found, field)) == ("", value)


def test_two_columns_of_one_meaning_may_agree_but_not_differ():
    text = "model,gpu,n_gpus,tp,tensor_parallel_size,pp,seq,gbs,step_time_s\nllama3-8b,H100,16,2,{},2,8192,64,10\n"
    assert parse_table(text.format("2"), "t.csv")[0].problem == parse_table(text.format(""), "t.csv")[0].problem == ""
    assert parse_table(text.format("4"), "t.csv")[0].problem == (
        "row 1, tp: found '2' and '4' in two columns, expected one"
    )


def test_a_batch_that_follows_from_no_accumulation_is_told():
    text = "model,gpu,n_gpus,fsdp,micro_batch,seq,step_time_s\nllama3-8b,H100,16,yes,1,8192,2\n"
    row = row_table(predict_rows(parse_table(text, "t.csv"), tell))[0]
    assert row["assumed"]["global_batch"] == "one micro-batch for each data-parallel rank"


@pytest.mark.parametrize("count", quick_sample([60, 200], 0))
def test_every_row_of_malformed_tables_is_accounted_for(count: int):
    """Cells, separators and quotes are replaced at random: each line is a row that is predicted or says why not."""
    draw = Random(23)
    cells = ["", "?", "-1", "1e400", "a,b", "\x00", "NaN", "8;8", "½", "9" * 200_000, "True (all)", "64 dense / 8"]
    for number in range(count):
        rows = [list(LLAMA_8B.values()) for _ in range(4)]
        for _ in range(draw.randint(1, 6)):
            line = draw.choice(rows)
            line[draw.randrange(len(line))] = draw.choice(cells)
        if number % 3 == 0:
            rows[draw.randrange(4)][draw.randrange(len(LLAMA_8B))] = '"'
        mark = draw.choice([",", ";", "\t", "|"])
        text = "\n".join(mark.join(line) for line in [list(LLAMA_8B), *rows])
        results = predict_rows(parse_table(text, "t.csv"), tell)
        assert [result.row.number for result in results] == [1, 2, 3, 4]
        assert all(result.is_predicted or result.reason or result.row.metric == "outcome" for result in results)
        assert len(row_table(results)) == 4


def test_an_empty_degree_is_one_where_the_others_fill_the_devices():
    plan = row_inputs(row(tp="", pp="", vpp="", sp="", schedule="", dp="16")).cases[0].plan
    assert (plan.tp, plan.pp, plan.dp_shard) == (1, 1, 16)


def test_widths_that_a_gpt_row_leaves_out_are_the_usual_ones():
    shape = {"model_name": "GPT 175B", "hidden": "12288", "layers": "96", "heads": "96", "kv_heads": ""}
    inputs = row_inputs(row(**shape, ffn_hidden="", vocab=""))
    assert (inputs.model.intermediate_size, inputs.model.vocab_size) == (4 * 12288, 51_200)
    assert "vocab" not in inputs.unstated


def test_an_unstated_vocabulary_widens_the_interval():
    inputs = row_inputs(row(model_name="ours", vocab=""))
    assert inputs.unstated == ("vocab",)
    assert [case.model.vocab_size for case in inputs.cases] == [32_000, 128_256]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("dev_dgx_h100", "h100-sxm"),
        ("p4d.24xlarge", "a100-40-sxm"),
        ("AWS p5e.48xlarge", "h200"),
        ("a3-highgpu-8g", "h100-sxm"),
        ("Standard_ND96isr_H100_v5", "h100-sxm"),
        ("v5litepod-256", "tpu-v5e"),
        ("TPU v5p-512", "tpu-v5p"),
    ],
)
def test_devices_are_read_by_their_usual_names_and_by_those_of_clouds(words, name):
    assert row_inputs(row(gpu=words, intra_link="")).cluster.device.name == name


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("core_attn", "core_attention"),
        ("layernorm,moe_act", "elementwise"),
        ("mla_up_proj", "elementwise"),
        ("nothing_saveable", "full"),
        ("dots_saveable", "elementwise"),
        ("minimal", "elementwise"),
        ("everything_saveable", "none"),
    ],
)
def test_recompute_of_modules_and_of_jax_policies_is_read(words, kind):
    assert row_inputs(row(recompute=words)).cases[0].plan.default_strategy.recompute == kind


def test_facts_of_some_rows_go_before_those_of_all():
    changes = {"source": "MoE Parallel Folding", "model_name": "mixtral-8x7b", "ep": "2", "etp": "", "recompute": ""}
    plain = row_inputs(row(**changes, notes="method MCore", zero="ZeRO-3")).cases[0]
    folded = row_inputs(row(**changes, notes="method MCore w/ Folding")).cases[0]
    assert (plain.plan.etp, folded.plan.etp) == (2, 1)
    assert (plain.software.overlap_fsdp, folded.software.overlap_fsdp) == (False, True)


def test_a_run_that_kept_activations_in_the_hosts_memory_says_nothing_of_the_devices():
    changes = {"source": "NVIDIA NeMo Megatron-Bridge", "model_name": "LLAMA3-70B", "gpu": "GB200", "zero": "FSDP=64"}
    changes |= {"tp": "1", "pp": "1", "dp": "64", "n_gpus": "64", "gpus_per_node": "4", "recompute": "", "sp": ""}
    changes |= dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads"), "")
    result = scored(changes, answer=lambda inputs, case: predicted(10.0, 400e9, fits=False))[0]
    assert result.inputs.cases[0].plan.default_strategy.recompute == "none"
    assert (score_fits([result]).success_predicted_oom, score_fits([result]).undecided) == (0, 1)


def test_fp8_layers_save_the_inputs_of_their_matmuls_in_a_byte():
    """Of a dense layer half of both norms' outputs and of the last matmul's input, but attention's output once more."""
    known = {"model_name": "ours", "layers": "1", "hidden": "1024", "ffn_hidden": "4096", "heads": "8", "kv_heads": "8"}
    known |= {"tp": "1", "pp": "1", "n_gpus": "1", "gpus_per_node": "1", "dp": "1", "global_batch": "1", "sp": "no"}
    sizes = {}
    for precision in ("bf16", "fp8"):
        inputs = row_inputs(row(**known, precision=precision, source="MLPerf Training"))
        found = predict(
            inputs.model, inputs.cases[0].plan, inputs.workload, inputs.cluster, framework=inputs.cases[0].software
        )
        sizes[precision] = found.memory[0].terms["activations"]
    assert sizes["bf16"] - sizes["fp8"] == 8192 * (2 * 1024 + 4096 - 1024)


def test_the_published_order_of_strategies_for_experts_is_predicted():
    """Table 3 of MoE Parallel Folding: FSDP, FSDP with experts, tensor parallelism, a pipeline, folding. That
    collectives of FSDP are exposed was inferred from these rows (sources.yaml), and decides the second place."""
    rows = [one for one in read_shipped_rows() if one.file == "moe_parallel_folding.csv"][:5]
    results = predict_rows(rows)
    for times in ([one.measured_s for one in results], [one.predicted_s for one in results]):
        assert times == sorted(times, reverse=True)


def test_rows_say_what_was_assumed(tmp_path):
    results = scored({}, {"recompute": "", "metric": "MFU_pct", "value": "40"}, {"tp": "two"})
    first, second, third = to_json(summarize(results))["rows"]
    assert (first["row"], first["error"], first["assumed"], first["why"]) == ("t.csv:2", 0, {}, None)
    assert second["assumed"] == {"recompute": "none", "FLOPs": FORMULA_WORDS["model"]}
    assert second["measured_s"] == pytest.approx(model_flops(*_llama()) / (0.4 * 989.4e12 * 16), rel=0.01)
    assert (third["predicted_s"], third["why"][:9]) == (None, "row 3, tp")
    lines = list(csv.DictReader(io.StringIO(row_table_csv(results))))
    assert [line["row"] for line in lines] == ["t.csv:2", "t.csv:3", "t.csv:4"]
    assert lines[1]["assumed"].startswith("recompute none; FLOPs model FLOPs")


def _llama():
    inputs = row_inputs(row())
    return inputs.model, inputs.workload


@pytest.mark.parametrize("said", ["OOM", "CUDA out of memory"])
def test_a_time_that_is_an_outcome_is_read_as_one(said):
    result = scored({"value": said})[0]
    assert (result.row.metric, result.row.outcome, result.succeeded) == ("outcome", said, False)


@pytest.mark.parametrize(
    "name", ["llama3-8b", "meta-llama/Meta-Llama-3-8B", "Llama-3-8B-Instruct", "LLAMA3 8B (run 4)", "llama3_8b"]
)
def test_publishers_and_suffixes_are_no_part_of_a_models_name(name):
    bare = dict.fromkeys(("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab"), "")
    named = row_inputs(row(model_name=name, **bare)).model
    assert named.model_copy(update={"name": ""}) == row_inputs(row()).model.model_copy(update={"name": ""})


@pytest.mark.parametrize(
    ("words", "zero", "group"),
    [
        ("2", "z2", None),
        ("ZeRO stage 3", "z3", None),
        ("zero_stage=1", "z1", None),
        ("False", "z1", 1),
        ("ZeRO-1 sharded within groups of 4", "z1", 4),
        ("HSDP within 8", "z3", 8),
        ("zero1=-1 fsdp=False", "z1", None),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", "z2", None),
    ],
)
def test_sharding_is_read_from_the_usual_words(words, zero, group):
    assert parse_sharding(words) == Sharding(zero, group)


def test_an_axis_bias_compares_layouts_that_differ_in_one_axis_alone():
    """Layouts of tp 2 take twice as long as predicted, whatever else differs; the third and fourth have no partner."""
    layouts = [("1", "1", "10"), ("2", "1", "20"), ("4", "2", "10"), ("2", "2", "20"), ("1", "2", "10")]
    rows = [{"tp": tp, "dp": "", "micro_batch": mb, "value": value} for tp, mb, value in layouts]
    tilts = {(tilt.axis, tilt.change): tilt for tilt in axis_biases(scored(*(row | {"sp": "no"} for row in rows)))}
    assert {key: round(tilt.tilt) for key, tilt in tilts.items()} == {
        ("tp", "1 → 2"): round(-100 * log(2)),
        ("tp", "2 → 4"): round(100 * log(2)),
        ("micro-batch", "1 → 2"): 0,
    }
    assert (tilts["tp", "1 → 2"].pairs, tilts["tp", "1 → 2"].positive) == (2, 0)


def test_few_small_sweeps_are_shown_one_by_one():
    two = summarize(scored({}, {"micro_batch": "2", "value": "9"}))
    title, rows, sentence = next(section for section in sections(two) if section.title == "Sweeps")
    assert len(rows) == 2
    assert sentence.startswith("In 1 small sweep of 2 to 2 layouts, the layout ranked first reaches 90.0 %")


def test_a_row_becomes_a_plan():
    inputs = row_inputs(row())
    plan = inputs.cases[0].plan
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.pp) == (1, 4, 2, 2)
    assert (plan.default_strategy.zero, plan.default_strategy.sp, plan.schedule) == ("z1", True, "1f1b")
    assert inputs.cluster.num_devices == 16
    assert inputs.cluster.device.name == "h100-sxm"
    assert inputs.model.num_parameters == 8_030_261_248
    assert (inputs.unstated, len(inputs.cases)) == ((), 1)


@pytest.mark.parametrize(
    ("zero", "replicate", "shard", "level"),
    [
        ("none (DDP)", 4, 1, "z1"),
        ("ZeRO-1 sharded within groups of 2", 2, 2, "z1"),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", 1, 4, "z2"),
        ("FSDP=2 (+DP)", 2, 2, "z3"),
        ("1 (Megatron distributed optimizer)", 1, 4, "z1"),
    ],
)
def test_sharding_becomes_degrees(zero, replicate, shard, level):
    plan = row_inputs(row(zero=zero)).cases[0].plan
    assert (plan.dp_replicate, plan.dp_shard, plan.default_strategy.zero) == (replicate, shard, level)


def test_open_choices_become_cases():
    inputs = row_inputs(row(recompute="", sp="", vpp="", schedule="", attn_kernel="of its own"))
    assert set(inputs.unstated) == {"recompute", "sp", "vpp", "attn_kernel"}
    assert len(inputs.cases) == 16
    assert len({case.plan.hash + repr(case.software) for case in inputs.cases}) == 16


def test_irrelevant_columns_are_not_open():
    """Sequence parallelism without tensor parallelism, chunks without a pipeline."""
    alone = row_inputs(row(tp="1", pp="1", dp="16", sp="", vpp="", schedule=""))
    assert alone.unstated == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"hidden": "", "model_name": "llama3-9b"},
            "hidden is empty, and the catalogue has no model 'llama3-9b'; did you mean 'llama3-8b'",
        ),
        ({"zero": "HSDP"}, "zero 'HSDP' doesn't say how many ranks share a copy"),
        ({"n_gpus": ""}, "n_gpus is empty"),
        ({"tp": ""}, "tp is empty"),
        ({"dp": "8"}, "tp 2 × pp 2 × cp 1 × dp 8 is 32, but n_gpus is 16"),
        ({"gpu": "H1000"}, "there is no device 'H1000'"),
        ({"gpu": "Quantum 9"}, "there is no device 'Quantum 9'"),
        ({"global_batch": "62"}, "global_batch_size 62 is not a multiple of 4"),
        ({"precision": "MXFP4"}, "precision 'MXFP4' is not predicted"),
        ({"recompute": "some"}, "recompute 'some' is not known: expected none, selective"),
        ({"sp": "maybe"}, "sp 'maybe' is neither yes nor no"),
        ({"sp": "maybe", "tp": "1", "dp": "8"}, "sp 'maybe' is neither yes nor no"),
        ({"seq_len": ""}, "seq_len is empty"),
        ({"schedule": "zzz"}, "schedule 'zzz' is not known: expected one of gpipe, 1f1b, interleaved,"),
        ({"schedule": "zb-h3"}, "schedule 'zb-h3' is not known; did you mean 'zb-h"),
        ({"schedule": "1F1B; vocabulary doubled"}, "schedule '1F1B; vocabulary doubled' is not known"),
        ({"attn_kernel": "flesh2"}, "attn_kernel 'flesh2' is not known; did you mean 'flash2': expected one of"),
        ({"inter_link": "carrier pigeon"}, "inter_link 'carrier pigeon' is not known: expected a rate and a network"),
        (
            {"inter_link": "infinband"},
            "inter_link 'infinband' is not known; did you mean 'infiniband'? expected a rate",
        ),
        ({"inter_link": "400Gb/s carrier pigeon"}, "inter_link '400Gb/s carrier pigeon' is not known: expected a rate"),
        ({"inter_link": "8x400Gb infinbend per node"}, "is not known; did you mean 'infiniband'? expected a rate"),
        ({"intra_link": "string"}, "intra_link 'string' is not known: expected one of nvlink, nvlink3"),
        ({"intra_link": "nvlunk"}, "intra_link 'nvlunk' is not known; did you mean 'nvlink'? expected one of nvlink"),
        ({"schedule": "GA=3"}, "schedule says 3 micro-batches, but global_batch 64 makes 16"),
        ({"tp": "3", "n_gpus": "24"}, "tp 3 doesn't divide"),
        ({"n_gpus": "12", "dp": "3"}, "n_gpus 12 is not a multiple of gpus_per_node 8"),
        ({"metric": "energy"}, "metric 'energy' is none of"),
        ({"value": "10000"}, "of the devices' peak"),
        ({"metric": "tokens_per_s_per_gpu", "value": "1e9"}, "of the devices' peak"),
        ({"value": ""}, "value is empty"),
        ({"metric": "TFLOPs_per_gpu", "source": "InternEvo"}, "no formula is known for its source"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_counted_and_named(changes, sentence):
    summary = summarize(scored({}, changes))
    wrong = summary.results[1]
    assert sentence in wrong.reason
    if changes.get("metric") != "TFLOPs_per_gpu":  # which isn't a row, but is told
        assert (summary.overall.every.rows, summary.overall.every.predicted) == (2, 1)
        assert to_json(summary)["unpredicted"] == [{"row": "t.csv:3", "why": wrong.reason}]
    else:
        assert to_json(summary)["left_out"] == {"TFLOPs_per_gpu": 1}


def test_attention_counts_where_a_time_is_held_against_the_peak():
    """Nearly all of the work is attention where a sequence has millions of tokens."""
    long = {"seq_len": "15728640", "global_batch": "1", "cp": "64", "n_gpus": "64", "tp": "1", "pp": "1", "dp": "1"}
    long |= {"sp": "False", "recompute": "full"}
    hours, minute = scored(*(long | {"value": value} for value in ("13500", "60")))
    assert (hours.reason, hours.measured_s) == ("", 13500)
    assert "of the devices' peak" in minute.reason


@pytest.mark.parametrize(
    ("text", "per_node", "rate_bytes_per_s", "count"),
    [
        ("8x200Gb HDR IB per node", 8, 25e9, 8),
        ("1600 Gbps/node RoCE", 8, 25e9, 8),
        ("4x100Gb RoCE per node", 8, 12.5e9, 4),
        ("400Gb/s RDMA per GPU", 8, 50e9, 8),
        ("25 GB/s InfiniBand per GPU", 4, 25e9, 4),
        ("4x100Gb Omni-Path per node", 8, 12.5e9, 4),
        ("100 Gbps OPA", 4, 12.5e9, 4),
    ],
)
def test_networks_are_parsed(text, per_node, rate_bytes_per_s, count):
    changes = {"inter_link": text, "gpus_per_node": str(per_node)}
    nics = row_inputs(row(**changes)).cluster.groups[0].nics
    assert nics is not None
    assert (nics.link.bandwidth_bytes_per_s, nics.count) == (rate_bytes_per_s, count)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "nvlink4"),
        ("NVLink/NVSwitch", "nvlink4"),
        ("NVLink 3", "nvlink3"),
        ("NVLink5", "nvlink5"),
        ("NVLINK Gen4 900 GB/s + NVSWITCH Gen3", "nvlink4"),
        ("nvlink4-h800", "nvlink4-h800"),
        ("PCIe", "pcie4"),
        ("PCIe Gen 5 x16", "pcie5"),
        ("PCI Express", "pcie4"),
    ],
)
def test_the_link_within_a_node_is_read(text, name):
    """The row's device is an H100 SXM."""
    assert row_inputs(row(intra_link=text)).cluster.groups[0].intra.name == name


@pytest.mark.parametrize(
    ("said", "succeeded"), [("OOM", False), ("CUDA out of memory", False), ("ok", True), ("Success", True)]
)
def test_an_outcome_is_a_failure_of_memory_or_a_success(said, succeeded):
    [result] = scored({"metric": "outcome", "value": said})
    assert result.succeeded is succeeded


@pytest.mark.parametrize("said", ["NCCL error", "", "crashed", "not ok"])
def test_an_outcome_of_other_words_is_left_out(said):
    [result] = scored({"metric": "outcome", "value": said})
    assert f"value: found '{said}', expected OOM, or ok" in result.reason
    assert result.succeeded is None


@pytest.mark.parametrize(
    "changes",
    [
        {"source": "my sheet", "url_or_repo": "https://github.com/Aleph-Alpha/NeurIPS-WANT-submission"},
        {"source": "Hagemann 2023 (arXiv:2311.05610)"},
        {"source": "", "software": "Aleph Alpha scaling"},
    ],
)
def test_a_program_is_known_by_a_rows_citation(changes):
    case = row_inputs(row(**changes)).cases[0]
    assert case.software.all_reduce_grads
    assert not row_inputs(row(source="my sheet")).cases[0].software.all_reduce_grads


def test_the_name_of_a_source_wins_over_its_rows_citations():
    case = row_inputs(row(source="InternEvo", url_or_repo="github:Aleph-Alpha/scaling")).cases[0]
    assert case.software.broadcast_updates
    assert not case.software.all_reduce_grads


@pytest.mark.parametrize("text", ["4x100Gb Omni-Path per node", "100 Gbps OPA", "Intel OmniPath 100Gb"])
def test_omni_path_is_not_taken_for_infiniband(text):
    nics = row_inputs(row(inter_link=text)).cluster.groups[0].nics
    assert nics is not None
    assert nics.link.efficiency == load_link("omnipath").efficiency


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("A100-80GB (Selene)", "a100-80-sxm"),
        ("A100-40GB", "a100-40-sxm"),
        ("A100-PCIe", "a100-80-pcie"),
        ("V100-32GB (DGX-2)", "v100-32-sxm"),
        ("H100-96GB HBM2e 2.4TB/s 500W cap (Grand Teton)", "h100-96-hbm2e"),
        ("H200-141GB SXM", "h200"),
        ("B200-SXM", "b200"),
        ("GB300", "gb300"),
    ],
)
def test_devices_are_parsed(gpu, name):
    assert row_inputs(row(gpu=gpu)).cluster.device.name == name


@pytest.mark.parametrize(
    ("changes", "norm", "gated", "tied"),
    [
        ({"model_name": "GPT 175B", "ffn_hidden": "16384"}, "layer", False, True),
        ({"model_name": "MPT-7b", "ffn_hidden": "16384"}, "layer", False, True),
        ({"model_name": "InternLM-7B", "ffn_hidden": "11008"}, "rms", True, False),
        ({"model_name": "a model", "ffn_hidden": "16384", "kv_heads": "32", "params_b": "7.5"}, "rms", False, False),
    ],
)
def test_styles_of_models(changes, norm, gated, tied):
    model = row_inputs(row(**changes)).model
    assert (model.norm, model.gated, model.tied_embeddings) == (norm, gated, tied)


# --- times ---


def test_rates_become_times():
    tokens = 64 * 8192
    rates = {
        "iteration_time_s": 10.0,
        "tokens_per_s_per_gpu": tokens / 160,
        "tokens_per_s_total": tokens / 10,
        "samples_per_s_per_gpu": 64 / 160,
        "samples_per_s_total": 6.4,
    }
    found = scored(*({"metric": metric, "value": f"{value}"} for metric, value in rates.items()))
    assert [result.measured_s for result in found] == pytest.approx([10.0] * 5)


def test_flops_of_published_formulas():
    """GPT-3 of 1 T parameters: iteration time and FLOP/s of arXiv:2205.05198, table 5; 175 B: arXiv:2104.04473."""
    by_model = {(r.source, r.model_name, r.n_gpus): r for r in read_shipped_rows() if r.metric == "iteration_time_s"}
    one_trillion = next(
        r for (source, model, _), r in by_model.items() if "Korthikanti" in source and model == "GPT 1T"
    )
    inputs = row_inputs(one_trillion)
    per_s = korthikanti_flops(inputs.model, inputs.workload) / (71.49 * 512 * 312e12)
    assert per_s == pytest.approx(0.563, abs=0.002)  # MFU in the same table
    gpt3 = next(r for (source, _, _), r in by_model.items() if "GPT-3" in source)
    inputs = row_inputs(gpt3)
    assert sc21_flops(inputs.model, inputs.workload) / (32 * 1024) == pytest.approx(138e12, rel=0.02)


def test_megatron_counts_as_its_logs_do():
    """Llama 3 8B at 8192: 12,273 tokens/s and 711 TFLOP/s in one line of NeMo's summary."""
    inputs = row_inputs(row())
    per_token = megatron_flops(inputs.model, inputs.workload) / inputs.workload.tokens_per_step
    assert per_token * 12_273 == pytest.approx(711e12, rel=0.01)


# --- scores ---


def test_errors_are_weighed_by_family():
    """Three releases of one configuration count as much as one other row."""
    releases = [{"software": release, "value": "10"} for release in ("1", "2", "3")]
    found = summarize(
        scored(*releases, {"global_batch": "128", "value": "20"}, answer=lambda s, c: predicted(15.0))
    ).overall
    assert (found.every.rows, found.every.predicted, found.every.families) == (4, 4, 2)
    assert found.every.mape == pytest.approx((50 + 25) / 2)
    assert found.every.bias == pytest.approx((50 - 25) / 2)
    assert found.every.median_ape == pytest.approx((50 + 25) / 2)


def by_recompute(inputs: RowInputs, case: RowCase) -> CasePrediction:
    full = case.plan.default_strategy.recompute == "full"
    return predicted(13.0, 40e9) if full else predicted(9.0, 120e9, fits=False)


def test_an_interval_over_what_is_open_and_the_case_that_fits():
    [result] = scored({"recompute": ""}, answer=by_recompute)
    assert result.interval_s == (9.0, 13.0)
    assert result.predicted_s == 13.0
    group = summarize([result]).overall
    assert (group.specified.predicted, group.interval.rows, group.interval.coverage) == (0, 1, 100.0)
    assert group.interval.width == pytest.approx(100 * 4 / 9)


def test_outcomes():
    def answer(inputs: RowInputs, case: RowCase) -> CasePrediction:
        size = {1: 40e9, 2: 79e9, 4: 120e9}[case.plan.micro_batch_size]
        return predicted(10.0, size, fits=size < 80e9)

    oom = {"metric": "outcome", "value": "OOM Error"}
    rows = [{}, {"micro_batch": "4"}, oom, oom | {"micro_batch": "4"}, oom | {"micro_batch": "2"}]
    summary = summarize(scored(*rows, answer=answer))
    found = summary.overall.outcome
    assert (found.success_predicted_fit, found.success_predicted_oom) == (1, 1)
    assert (found.oom_predicted_fit, found.oom_predicted_oom) == (1, 1)
    assert found.balanced_accuracy == 50.0
    assert [result.row.line for result in found.near] == [6]
    assert summary.overall.every.rows == 2  # an outcome is no row


def test_memory_that_is_only_mentioned_is_no_failure():
    failed = ["OOM", "OOM Error", "CUDA out of memory", "torch.OutOfMemoryError", "memory", "not enough memory"]
    fine = ["2.5 (peak memory 60 GB)", "fits in memory", "no OOM", "bloom", "ok", "without OOM", "non-OOM"]
    assert [said for said in [*failed, *fine] if is_out_of_memory(said)] == failed
    [measured] = parse_table(table({"value": fine[0]}), "t.csv")
    assert (measured.metric, measured.value) == (LLAMA_8B["metric"], 2.5)


def test_a_header_may_begin_with_a_number_sign():
    lines = table({}).splitlines()
    text = "\n".join(["# a comment", "#," + lines[0], "1," + lines[1]])
    assert len(parse_table(text, "t.csv")) == 1


def test_wrong_cells_are_corrected_and_regressions_left_out():
    """MLPerf's table says FP8 where the submission's README says NVFP4; a release of Megatron-Bridge was slower by an
    error of its own, by its page."""
    rows = {one.location: one for one in read_shipped_rows()}
    places = ("mlperf_training.csv:18", *(f"nvidia_megatron_bridge.csv:{line}" for line in (6, 102, 51)))
    wrong, regressed, right, staged = predict_rows([rows[place] for place in places], tell)
    assert wrong.row.precision == "FP8"
    assert wrong.case.plan.precision == "nvfp4"
    assert "cudnn-frontend issue 256" in regressed.reason
    assert right.row.micro_batch == 2
    assert (right.case.plan.micro_batch_size, right.case.plan.vpp) == (1, 12)
    assert (staged.row.pp, staged.row.micro_batch) == (1, 2)  # whose state alone is more than a GB300 holds
    assert (staged.case.plan.pp, staged.case.plan.vpp, staged.case.plan.micro_batch_size) == (4, 5, 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [("2,51", 2.51), ("1.234,5", 1234.5), ("12,3456", 12.3456), ("1,234", 1234.0), ("1,234.5", 1234.5)],
)
def test_numbers_may_have_decimal_commas(text: str, number: float):
    assert row(metric="iteration_time_s", value=text).value == number


def test_long_tables_tell_their_progress_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr("muster.cli.progress.LINE_INTERVAL_S", 0.0)
    with RowProgress("predicting rows") as bar:
        bar.update(3, 10)
    assert capsys.readouterr().err == "predicting rows: 3 of 10\n"


def test_predictions_without_a_contribution_are_those_of_their_own():
    rows = [one for one in read_shipped_rows() if one.file == "rocm_transformer_engine.csv"][:2]
    rows += parse_table(table({}), "t.csv")
    stated, without = predict_rows_both_ways(rows)
    assert row_table(stated) == row_table(predict_rows(rows))
    alone = predict_rows(rows[:2], uncalibrated=True)
    assert [one.predicted_s for one in without] == [one.predicted_s for one in alone]
    assert [one.predicted_s for one in without] != [one.predicted_s for one in stated[:2]]


def test_several_processes_predict_what_one_does():
    rows = parse_table(
        table(*({"micro_batch": size, "global_batch": str(64 * n)} for size in ("", "1") for n in range(1, 6))), "t.csv"
    )
    told: list[int] = []
    forked = predict_rows(rows, processes=2, on_row=lambda: told.append(1))
    assert [result.row for result in forked] == rows
    assert len(told) == len(rows)
    assert row_table(forked) == row_table(predict_rows(rows))


def test_sweeps():
    layouts = [
        {"tp": t, "dp": d, "micro_batch": m} for t, d in (("2", "4"), ("4", "2"), ("8", "1")) for m in ("1", "2")
    ]
    rows = [layout | {"value": f"{10 + i}"} for i, layout in enumerate(layouts)]
    failed = {"metric": "outcome", "value": "OOM Error", "micro_batch": "4"}

    def answer(inputs: RowInputs, case: RowCase) -> CasePrediction:
        tp, size = case.plan.tp, case.plan.micro_batch_size
        return predicted({2: 12.0, 4: 11.0, 8: 13.0}[tp] + size / 10, fits=size < 4)

    [sweep] = score_sweeps(scored(*rows, failed, answer=answer))
    assert (sweep.layouts, sweep.failed) == (6, 1)
    assert sweep.rank_correlation == pytest.approx(spearman([12.1, 12.2, 11.1, 11.2, 13.1, 13.2], range(6)))
    assert (sweep.misordered, sweep.pairs) == (4, 15)  # (10, 12), (10, 13), (11, 12) and (11, 13), 9 to 30 % apart
    assert sweep.first_reaches == pytest.approx(10 / 12)
    assert sweep.best_in_first_three
    assert sweep.three_reach == 1.0
    assert score_sweeps(scored(*rows, failed, answer=answer), 2, 5) == []
    [small] = summarize(scored(*rows[:3], answer=answer)).small_sweeps
    assert small.layouts == 3
    [hopeful] = score_sweeps(scored(*rows, failed, answer=lambda s, c: predicted(case_time(c))))
    assert hopeful.first_reaches == 0.0  # it ranks the one first that ran out of memory


def test_a_layout_that_nearly_fills_the_memory_is_ranked_after_those_that_do_not():
    layouts = [{"tp": t, "dp": d, "micro_batch": m} for t, d in (("2", "4"), ("4", "2"), ("8", "1")) for m in "12"]
    rows = [layout | {"value": f"{10 + i}"} for i, layout in enumerate(layouts)]

    def answer(inputs: RowInputs, case: RowCase) -> CasePrediction:
        slow = case.plan.tp == 2 and case.plan.micro_batch_size == 1
        return predicted(12.0 if slow else 10.0 + case.plan.tp / 100, 40e9 if slow else 73e9)

    [sweep] = score_sweeps(scored(*rows, answer=answer))
    assert sweep.first_reaches == 1.0


def test_stages_where_embedding_norm_and_head_are_dealt_as_layers():
    changes = {"source": "Aleph Alpha", "model_name": "LLAMA-13B", "hidden": "5120", "heads": "40", "kv_heads": "40"}
    changes |= {"ffn_hidden": "13824", "layers": "40", "n_gpus": "64", "tp": "1", "dp": "16", "zero": "ZeRO-1"}
    changes |= {"pp": "4", "global_batch": "2048", "recompute": "none", "schedule": "1F1B"}
    case = row_inputs(row(**changes)).cases[0]
    assert [stage.layers for stage in case.plan.stages] == [10, 11, 11, 8]  # 43 parts: 11, 11, 11, 10


def case_time(case: RowCase) -> float:
    return 20.0 - case.plan.micro_batch_size


def test_pairs_that_no_measurement_tells_apart_leave_the_rank_correlation():
    """Ranks 1 2 3 4 are predicted as 2 1 3 4: the pair in the wrong order counts where it is more than 6 % apart."""
    predicted_s = [11.0, 10.0, 12.0, 13.0]
    far, near = [10.0, 11.0, 12.0, 13.0], [10.0, 10.5, 12.0, 13.0]
    assert correlation_apart(predicted_s, far) == pytest.approx(spearman(predicted_s, far)) == pytest.approx(0.8)
    kept = [(-1, -2), (-2, -3), (-2, -1), (-3, -2), (-1, -1)]  # differences of ranks without the pair of 1 and 2
    above, a, b = (
        sum(x * y for x, y in pairs) for pairs in (kept, [(x, x) for x, _ in kept], [(y, y) for _, y in kept])
    )
    assert correlation_apart(predicted_s, near) == pytest.approx(above / (a * b) ** 0.5)
    assert correlation_apart(predicted_s, [10.0, 10.1, 10.2, 10.3]) == 0.0


def _flash2_times(is_of_rounds: bool) -> list[MeasurementRow]:
    """Timed rows of the sheet of 64 devices: those that are said to be multiples of a round's time, or the others."""
    rows = [row for row in read_shipped_rows() if row.file.startswith("aleph") and row.n_gpus == 64 and row.value]
    return [row for row in rows if (sequences_of_round(row) is not None) == is_of_rounds]


def test_the_digits_of_a_sheet_say_that_its_values_are_multiples_of_a_part_of_a_step():
    """Means of nine readings of a clock that counts in 2⁻²² s: multiples of 8 where 8 rounds make up the batch."""
    counts = {way: [row.value * 9 * 2**22 for row in _flash2_times(way) if row.value] for way in (True, False)}
    assert all(abs(count - round(count)) < 1e-3 for way in counts for count in counts[way])
    assert [round(count) % 8 for count in counts[True]] == [0] * 28
    assert sum(round(count) % 8 == 0 for count in counts[False]) == 4
    assert len(counts[False]) == 46


def test_values_that_are_multiples_of_a_part_of_a_step_are_ranked_as_such():
    """Both sweeps are in the measured order, and no row is off by more than 10 %, where as one batch some are by 40."""
    results = predict_rows(_flash2_times(True))
    assert max(abs(result.error) for result in results) > 0.4
    assert max(abs((result.rounds_s or 0.0) / (result.measured_s or 1.0) - 1) for result in results) < 0.1
    for sweep in score_sweeps(results):
        assert sweep.rank_correlation < 0.8
        assert (sweep.correlation_in_rounds or 0.0) > 0.95


def test_the_sweep_of_large_layouts_is_out_of_order_by_one_layout():
    """With tp 8, halving micro-batches of four cost 8 to 11 % in nine pairs of ten; it is predicted to cost nothing."""
    results = predict_rows(row for row in read_shipped_rows() if row.file.startswith("bigscience") and row.value)
    times: dict[tuple[object, ...], dict[int | None, list[RowResult]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        row = result.row
        if row.tp == 8:
            times[row.software, row.model_name, row.pp, row.global_batch][row.micro_batch].append(result)
    pairs = [sizes for sizes in times.values() if {2, 4} <= sizes.keys()]
    grown = sorted(
        mean(one.measured_s or 0.0 for one in sizes[2]) / mean(one.measured_s or 0.0 for one in sizes[4])
        for sizes in pairs
    )
    assert len(grown) == 10
    assert grown[0] == pytest.approx(1.025, abs=0.001)
    assert all(1.07 < growth < 1.12 for growth in grown[1:])
    assert all(abs(sizes[2][0].predicted_s / sizes[4][0].predicted_s - 1) < 0.02 for sizes in pairs)
    (sweep,) = score_sweeps(results, least=8)
    without = [
        one
        for one in results
        if (one.row.tp, one.row.pp, one.row.micro_batch, one.row.global_batch) != (8, 12, 2, 2048)
    ]
    assert (sweep.layouts, sweep.misordered) == (11, 4)
    (rest,) = score_sweeps(without, least=8)
    assert (rest.layouts, rest.misordered) == (10, 1)
    assert rest.correlation_apart == pytest.approx(0.926, abs=0.005)


def test_spearman_shares_ranks():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


# --- the shipped tables ---


def test_every_shipped_row_can_be_read_or_says_why():
    rows = read_shipped_rows()
    assert len(rows) == 1360
    reasons = set()
    for one in rows:
        try:
            row_inputs(one)
        except UnpredictableRowError as error:
            reasons.add(str(error))
    assert reasons == {
        "tp is empty: expected a degree, 1 for none",
        "schedule says 128 micro-batches, but global_batch 1024 makes 256",
        "schedule says 128 micro-batches, but global_batch 1024 makes 512",
        "no plan has the vocabulary as 'interlaced' says: there are baseline, redis, vocab-1, vocab-2",
    }


def test_calculon_stands_beside_its_rows():
    rows = [one for one in read_shipped_rows() if "Korthikanti" in one.source]
    overall = summarize(predict_rows(rows, lambda inputs, case: predicted())).overall
    assert overall.calculon.predicted == 9
    assert overall.calculon.mape == pytest.approx(4.5, abs=0.1)


def test_the_command(tmp_path: Path, capsys):
    from muster.cli.main import main

    path = tmp_path / "mine.csv"
    path.write_text(table({}, {"gpu": "Quantum 9"}))
    assert main(["validate", "--csv", str(path), "--json"]) == 0
    import json

    found = json.loads(capsys.readouterr().out)
    assert set(found["overall"]) >= {"rows", "predicted", "mape", "median_ape", "bias", "outcome"}
    assert found["by_source"]["a paper"]["rows"] == 2
    assert found["unpredicted"][0]["row"] == "mine.csv:3"
    assert main(["validate", "--csv", str(path)]) == 0
    assert "Quantum 9" in capsys.readouterr().out
    path.write_text(table({"gpu": "Quantum 9"}, {"gpu": "Quantum 10"}))
    assert main(["validate", "--csv", str(path)]) == 2
    error = capsys.readouterr().err
    assert "none of the 2 rows can be predicted: mine.csv:2: " in error
    assert "Quantum 9" in error
    path.write_text(table({"hidden": "wide"}))
    assert main(["validate", "--csv", str(path)]) == 2
    wrong = "row 1, hidden: found 'wide', expected a number above 0 without a unit"
    assert f"none of the 1 row can be predicted: mine.csv:2: {wrong}\n" in capsys.readouterr().err
    path.write_text(table({}, {"hidden": "wide"}))
    assert main(["validate", "--csv", str(path)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if wrong.replace("row 1", "row 2") in line)
    assert line.endswith("mine.csv:3"), "a piped table's rows are not folded"


# --- pages ---


@pytest.fixture(scope="module")
def summary():
    def answer(inputs: RowInputs, case: RowCase) -> CasePrediction:
        slow = case.plan.default_strategy.recompute == "full"
        return predicted(13.0 if slow else 9.0, 40e9 if slow else 78e9)

    oom = {"metric": "outcome", "value": "OOM Error", "micro_batch": "4"}
    rows = [{}, {"tp": "4", "dp": "2"}, {"recompute": ""}, {"source": "another | paper", "value": "4"}, oom]
    return summarize(scored(*rows, {"gpu": "Quantum 9"}, answer=answer))


def test_the_page_is_legible(request, tmp_path, summary):
    require_chromium(request.config)
    path = tmp_path / "page.html"
    write_accuracy_page(path, summary)
    with Browser() as browser:
        for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
            page = browser.open(path, width, dark=dark)
            assert audit(page, pictures=2) == []
        assert blank_pictures(page) == []
        x, y = page.evaluate(
            "(plane => { const r = plane.querySelector('.frame').getBoundingClientRect();"
            " const [x, y] = JSON.parse(plane.querySelector('script').textContent)[0];"
            " return [r.left + x * r.width, r.top + y * r.height]; })(document.querySelector('.plane'))"
        )
        page.move_pointer(x + 2, y)
        assert "measured 10.0 s, predicted 9.00 s" in page.evaluate("document.querySelector('#tip').textContent")


def test_the_documentation_has_every_score(summary):
    text = accuracy_markdown(summary)
    assert "| a paper | 4 | 3 | 10.0 % |" in text
    assert "another \\| paper" in text
    assert "there is no device 'Quantum 9'" in text
    assert "t.csv:6 (out of memory)" in text


def test_terminal_and_documentation_have_the_same_tables(summary):
    titles = [section.title for section in sections(summary)]
    assert titles[0] == "All rows"
    assert "Not predicted" in titles
    text = accuracy_markdown(summary)
    console = Console(width=200, record=True, file=StringIO())
    console.print(accuracy_text(summary))
    shown = console.export_text()
    assert all(f"## {title}\n" in text and title in shown for title in titles)


@pytest.mark.soak
def test_the_shipped_page_is_what_the_command_writes():
    summary = validate_table()
    text = accuracy_markdown(summary)
    assert summary.overall.outcome.success_predicted_oom == 0, "no run that worked is said not to fit by more than 5 %"
    assert (Path(__file__).resolve().parents[1] / "docs/accuracy.md").read_text() == text, "run it again"
    kept = {(row.source, row.device, row.fp8, row.experts): row for row in measured_errors()}
    for row in error_table(summary):
        found = kept.pop((row["source"], row["device"], row["fp8"], row["experts"]))
        assert found.most_devices == row["most_devices"]
        for column in ("errors", "uncalibrated"):
            assert getattr(found, column) == pytest.approx(row[column], abs=0.0021), "muster validate --errors"
    assert not kept


MAX_VENDOR_BIAS = 0.08


def test_no_vendor_is_favoured():
    """The kept errors are those of `muster validate` on all shipped tables; the soak test compares them."""
    errors = defaultdict(list)
    for row in measured_errors():
        errors[load_device(row.device).title.split()[0]] += row.errors
    assert {"NVIDIA", "AMD"} <= errors.keys()
    for vendor, found in errors.items():
        assert abs(mean(found)) <= MAX_VENDOR_BIAS, vendor


@pytest.mark.parametrize("table", ["rocm_transformer_engine.csv", "rtx4090_gpt2.csv"])
def test_a_devices_published_runs_are_predicted_without_favour(table):
    rows = [row for row in read_shipped_rows() if row.file == table]
    found = summarize(predict_rows(rows))
    assert found.overall.every.predicted == len(rows)
    for errors in (*found.by_device.values(), *found.by_vendor.values()):
        assert errors.bias is not None
        assert abs(errors.bias) <= 100 * MAX_VENDOR_BIAS


def test_a_source_left_out_of_calibration_is_predicted_with_other_constants():
    seen = []

    def answer(inputs: RowInputs, case: RowCase) -> CasePrediction:
        seen.append(inputs.cluster.device.matmul_efficiency["bf16"])
        return predicted()

    rows = [one for one in read_shipped_rows() if "Korthikanti" in one.source and one.metric == "iteration_time_s"]
    stated, without = predict_rows(rows, answer), predict_rows(rows, answer, uncalibrated=True)
    assert len(set(seen)) == 2
    group = summarize(stated, without).by_source[rows[0].source]
    assert group.uncalibrated is not None
    assert group.uncalibrated.rows == group.every.rows == 9
    assert summarize(stated).overall.uncalibrated is None


def test_commands_of_latex_are_not_part_of_cells():
    text = r"""\begin{tabular}{@{}lrrrrrrr@{}}
\textbf{Model} & GPU & n_gpus & seq_len & global_batch & tp & pp & \textbf{tokens/s/GPU} \\
\multirow{2}{*}{Llama-2 7B} & A100-80GB & 8 & 4096 & 64 & 1 & 1 & 3{,}450 \\
\rowcolor{gray} \textbf{Llama-2 13B} & A100-80GB & 8 & 4096 & 64 & 2 & 1 & \textbf{1,800} \\
 & A100-80GB & 16 & 4096 & 64 & 2 & 1 & $1{,}750$ \\
\end{tabular}
"""
    rows = parse_table(text, "t.csv")
    assert [(row.model_name, row.value) for row in rows] == [
        ("Llama-2 7B", 3450.0),
        ("Llama-2 13B", 1800.0),
        ("Llama-2 13B", 1750.0),
    ]


def test_more_than_the_peak_of_its_precision_is_refused():
    (found,) = scored({"precision": "bf16", "metric": "MFU_pct", "value": "145"})
    assert "% of the devices' peak" in found.reason
