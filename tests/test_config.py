"""Configuration: layers and their precedence, where values come from, what is refused, what is written."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.catalog import names, read
from muster.config.config_layers import read_file_layer
from muster.config.file_writer import write_atomically
from muster.config.load_config import (
    config_yaml,
    load_plan,
    load_run_config,
    plan_yaml,
    with_steps_from_epochs,
    write_run_files,
)
from muster.config.named_model import load_model
from muster.config.run_paths import with_absolute_paths
from muster.config.yaml_writer import yaml_text
from muster.planner.auto import resolve_plan
from muster.spec.cluster import ClusterSpec, single_node_cluster
from muster.spec.device import DeviceSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import format_plan_name
from tests.full_disk import files_of_at_most


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def plan_name(*overrides: tuple[str, str], preset: str | None = "tiny", file: Path | None = None, n: int | None = None):
    return format_plan_name(resolve_plan(load_run_config(preset, file, list(overrides)), n))


def refusal(*overrides: tuple[str, str], preset: str | None = "tiny", file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(preset, file, list(overrides))
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- precedence and origins ---


def test_the_command_line_beats_the_file_beats_the_preset(tmp_path):
    write(tmp_path, "base.yaml", "extends: tiny\ntrain:\n  steps: 30\n  seq_len: 32\nseed: 1\n")
    file = write(tmp_path, "run.yaml", "extends: base.yaml\n\ntrain:\n  seq_len: 16\noptim.lr: 1e-4\n")
    resolved = load_run_config(None, file, [("seed", "7")])
    config, origins = resolved.config, resolved.origins
    assert (config.train.steps, config.train.seq_len, config.seed) == (30, 16, 7)
    assert (config.optim.lr, config.train.global_batch_size) == (1e-4, 24)
    assert origins["train.steps"] == f"{tmp_path}/base.yaml:3"
    assert origins["train.seq_len"] == f"{tmp_path}/run.yaml:4"
    assert origins["optim.lr"] == f"{tmp_path}/run.yaml:5"
    assert origins["seed"] == "command line"
    assert origins["train.global_batch_size"] == "preset tiny"
    assert origins["model.num_layers"] == "model tiny"
    assert "optim.eps" not in origins
    assert config.workload.tokens_per_step == 16 * 24


def test_a_file_lies_over_a_preset_named_beside_it(tmp_path):
    file = write(tmp_path, "run.yaml", "train: {steps: 3}\n")
    config = load_run_config("demo", file, []).config
    assert (config.train.steps, config.model.name) == (3, "demo")


def test_paths_in_extends_are_relative_to_the_file(tmp_path):
    write(tmp_path, "common/base.yaml", "extends: tiny\nseed: 3\n")
    file = write(tmp_path, "runs/run.yaml", "extends: ../common/base.yaml\n")
    assert load_run_config(None, file, []).config.seed == 3


def test_an_empty_section_changes_nothing(tmp_path):
    file = write(tmp_path, "run.yaml", "extends: tiny\ntrain:\n  # steps: 5\n")
    assert load_run_config(None, file, []).config.train.steps == 20


def test_extends_in_a_circle_is_refused(tmp_path):
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    write(tmp_path, "b.yaml", "extends: ./c.yaml\n")
    write(tmp_path, "c.yaml", "seed: 1\nextends: b.yaml\n")
    assert "c.yaml:2" in refusal(preset=None, file=tmp_path / "a.yaml")
    own = write(tmp_path, "own.yaml", "extends: own.yaml\n")
    assert "extends it in turn" in refusal(preset=None, file=own)


# --- values ---


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optim.lr", "1e-3", 1e-3),
        ("optim.lr", "2", 2.0),
        ("train.steps", "1_000", 1000),
        ("train.steps", "010", 10),
        ("data.max_bytes", "2e6", 2_000_000),
        ("data.max_bytes", "null", None),
        ("data.cache", "null", None),
        ("data.source", "123", "123"),
        ("data.source", "a b: [c", "a b: [c"),
        ("train.deterministic", "true", True),
        ("train.deterministic", "no", False),
    ],
)
def test_text_becomes_what_is_wanted(key, text, value):
    section, _, field = key.partition(".")
    found = getattr(getattr(load_run_config("tiny", None, [(key, text)]).config, section), field)
    assert found == value
    assert type(found) is type(value)


def test_numbers_in_quotes_still_give_derived_values(tmp_path):
    text = "vocab_size: '257', hidden_size: '64', num_layers: '2', num_heads: 4.0, intermediate_size: 8"
    file = write(tmp_path, "run.yaml", f"model: {{{text}}}\n")
    base = load_run_config("tiny", None, []).config.model
    config = load_run_config(None, write(tmp_path, "all.yaml", f"extends: tiny\nmodel: {{{text}}}\n"), []).config
    assert (config.model.head_dim, config.model.num_kv_heads) == (16, base.num_kv_heads)
    assert "data: missing" in refusal(preset=None, file=file)
    demo = yaml.safe_load(read("presets", "demo"))
    demo["model"] = yaml.safe_load(f"{{{text}}}")
    config = load_run_config(None, write(tmp_path, "own.yaml", yaml.safe_dump(demo)), []).config
    assert (config.model.head_dim, config.model.num_kv_heads) == (16, 4)  # the model's own: nothing below says more


# --- the model ---


def test_a_model_is_a_name_or_a_name_with_changes(tmp_path):
    big = load_run_config("tiny", None, [("model", "llama3-8b")]).config.model
    assert big == ModelSpec.model_validate(
        {key: value for key, value in yaml.safe_load(read("models", "llama3-8b")).items() if key != "version"}
    )
    file = write(tmp_path, "run.yaml", "extends: tiny\nmodel: {preset: llama3-8b, num_layers: 2}\n")
    resolved = load_run_config(None, file, [("model.num_heads", "16")])
    model = resolved.config.model
    assert (model.hidden_size, model.num_layers, model.num_heads, model.head_dim) == (4096, 2, 16, 256)
    assert resolved.origins["model.hidden_size"] == "model llama3-8b"
    assert resolved.origins["model.num_layers"] == f"{file}:2"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("demo", 2460480), ("tiny", 427_200)],
)
def test_models_have_their_published_sizes(name, parameters):
    assert load_run_config("tiny", None, [("model", name)]).config.model.num_parameters == parameters


# --- the plan ---


def test_ways_to_give_a_plan(tmp_path):
    plan = Plan(pp=2, dp_shard=3, precision="fp64", default_strategy=LayerStrategy(zero="z2"))
    write(tmp_path, "deep/plan.yaml", plan_yaml(plan))
    by_path = write(tmp_path, "path.yaml", "extends: tiny\nparallel: deep/plan.yaml\n")
    inline = write(tmp_path, "inline.yaml", "extends: tiny\nparallel: {pp: 2, default_strategy: {zero: z1}}\n")
    named = write(tmp_path, "named.yaml", "extends: tiny\nparallel: {plan: dp2x2, schedule: gpipe}\n")
    assert load_run_config(None, by_path, []).config.parallel == plan
    assert plan_name(preset=None, file=inline) == "pp2-mb1-z1-fp32"
    assert plan_name(preset=None, file=named) == "dp2x2-mb1-sgpipe-fp32"
    assert plan_name(("parallel", str(tmp_path / "deep/plan.yaml"))) == "dp3-pp2-mb1-z2-fp64"
    assert plan_name(("parallel", "dp2-pp2")) == "dp2-pp2-mb1-fp32"
    assert plan_name(("parallel", "dp2-bf16"), ("parallel.micro_batch_size", "3")) == "dp2-mb3-bf16"
    assert plan_name(("parallel.stages", "[{layers: 3}, {layers: 5}]"), ("parallel.pp", "2")) == "pp2-mb1-fp32-l3.5"


@pytest.fixture(name="piped")
def _piped(tmp_path) -> Path:
    """A run file whose plan says more than the defaults."""
    return write(tmp_path, "piped.yaml", "extends: tiny\nparallel: dp2-pp2-mb4-z1-sgpipe\n")


def test_a_name_keeps_micro_batch_and_precision_from_below_and_nothing_else(piped):
    assert plan_name(file=piped) == "dp2-pp2-mb4-z1-sgpipe-fp32"
    assert plan_name(("parallel", "pp4"), file=piped) == "pp4-mb4-fp32"
    automatic = resolve_plan(load_run_config("tiny", piped, [("parallel", "auto")]), 2)
    assert (automatic.world_size, automatic.micro_batch_size, automatic.precision) == (2, 4, "fp32")
    origins = load_run_config(None, piped, [("parallel", "pp4-bf16")]).origins
    assert origins["parallel.micro_batch_size"] == f"{piped}:2"
    assert origins["parallel.pp"] == origins["parallel.precision"] == "command line"


def test_a_plan_file_that_says_less_keeps_micro_batch_and_precision_too(tmp_path, piped):
    path = write(tmp_path, "plan.yaml", "pp: 2\n")
    assert plan_name(("parallel", str(path)), file=piped) == "pp2-mb4-fp32"


def test_auto_follows_the_number_of_processes_and_an_explicit_plan_does_not():
    assert [resolve_plan(load_run_config("tiny", None, []), n).world_size for n in (None, 2, 3)] == [1, 2, 3]
    assert "-mb3-" in plan_name(("parallel.micro_batch_size", "3"), n=2)
    with pytest.raises(InfeasibleError, match="it needs 4 processes .* but there are 3; nearest: dp3"):
        plan_name(("parallel", "dp2-pp2"), n=3)
    with pytest.raises(InfeasibleError, match="it needs 2 processes"):
        plan_name(("parallel.pp", "2"), n=4)


def test_without_a_word_about_the_plan_it_is_auto(tmp_path):
    tiny = yaml.safe_load(read("presets", "tiny"))
    del tiny["parallel"]
    assert plan_name(preset=None, file=write(tmp_path, "run.yaml", yaml.safe_dump(tiny)), n=1).endswith("-bf16")


# --- what is refused ---


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([("train.steps", "abc")], "train.steps: expected a whole number >= 1 or null, got 'abc' (from command line)"),
        ([("train.steps", "1.5")], "train.steps: expected a whole number >= 1 or null, got 1.5 (from command line)"),
        ([("train.save_every", "-1")], "train.save_every: expected a whole number >= 0, got -1 (from command line)"),
        ([("train.stepz", "1")], "train.stepz: unknown key; did you mean 'steps'? (from command line)"),
        ([("steps", "1")], "steps: unknown key; did you mean 'train.steps'? (from command line)"),
        ([("trian.steps", "1")], "trian: unknown key; did you mean 'train'? (from command line)"),
        (
            [("train.steps.more", "1")],
            "train.steps: expected a whole number >= 1 or null, got {'more': '1'} (from command line)",
        ),
        ([("optim.lr", "0")], "optim.lr: expected a number > 0, got 0.0 (from command line)"),
        ([("optim.lr", "nan")], "optim.lr: expected a number > 0, got nan (from command line)"),
        ([("optim.beta1", "1")], "optim.beta1: expected a number >= 0 and < 1, got 1.0 (from command line)"),
        (
            [("data.max_bytes", "x")],
            "data.max_bytes: expected a whole number >= 1 or null, got 'x' (from command line)",
        ),
        (
            [("data.on_invalid_row", "skipp")],
            "data.on_invalid_row: expected one of stop, skip, got 'skipp'; did you mean 'skip'?",
        ),
        ([("train.deterministic", "maybe")], "train.deterministic: expected true or false, got 'maybe'"),
        ([("train", "5")], "train: expected a mapping with at least seq_len, global_batch_size, got '5'"),
        ([("seed", "x")], "seed: expected a whole number >= 0, got 'x' (from command line)"),
        ([("version", "4")], "version: expected 3, got 4 (from command line)"),
        ([("model", "llama3-8")], "there is no model 'llama3-8'; did you mean 'llama3-8b'?"),
        ([("model.num_heads", "3")], "model: num_heads 3 is not a multiple of num_kv_heads 2"),
        ([("model.num_heads", "128")], "model.head_dim: expected a whole number >= 1, got 0"),
        ([("model.vocab_size", "100")], "model.vocab_size 100 is smaller than the 257 ids"),
        ([("parallel.precision", "fp31")], "got 'fp31'; did you mean 'fp32'? (from command line)"),
        ([("parallel.schedule", "gpip")], "parallel.schedule: there is no schedule 'gpip'; did you mean 'gpipe'?"),
        ([("parallel", "dq2")], "parallel: plan name 'dq2': unknown part 'dq2'; did you mean 'dp2'?"),
        (
            [("parallel", "dp2+0123456789ab")],
            "no name expresses all of that plan; give its plan.yaml (from command line)",
        ),
        ([("parallel", "nowhere/plan.yaml")], "there is no file nowhere/plan.yaml"),
        ([("parallel", "auto"), ("parallel.pp", "2")], "parallel.pp: 'auto' chooses it"),
        ([("parallel.micro_batch_size", "x"), ("parallel", "dp2")], "parallel.micro_batch_size: expected a whole"),
        ([("parallel.axis_order", "[pp]")], "parallel.axis_order: axis_order must name each of"),
        ([("parallel.stages", "[{layrs: 1}]")], "parallel.stages.0.layrs: unknown key; did you mean 'layers'?"),
        (
            [("parallel.stages", "[{layers: 8, mesh: {dpp: 1}}]")],
            "parallel.stages.0.mesh.dpp: unknown key, expected one of dp_replicate, dp_shard",
        ),
        ([("parallel.stages", "[{layers")], "parallel.stages: expected a list, got '[{layers'"),
    ],
)
def test_a_wrong_value_gets_a_sentence(overrides, sentence):
    assert sentence in refusal(*overrides)


def test_each_wrong_value_gets_its_own_line():
    lines = refusal(("train.steps", "0"), ("optim.lr", "x"), ("optim.epz", "1")).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["train.steps", "optim.lr", "optim.epz"]


def test_a_merge_key_may_be_overridden(tmp_path):
    file = write(tmp_path, "run.yaml", "a: &a {x: 1, y: 2}\nb: &b\n  <<: *a\n  x: 3\nc: {<<: *b, y: 4}\n")
    assert read_file_layer(file).values["c.x"] == 3
    assert read_file_layer(file).values["c.y"] == 4


def test_whole_numbers_may_have_exponents(tmp_path):
    file = write(tmp_path, "run.yaml", "extends: tiny\ntrain: {steps: 1e3}\nmodel: {vocab_size: 25.6e3}\n")
    config = load_run_config(None, file, []).config
    assert (config.train.steps, config.model.vocab_size) == (1000, 25_600)
    model = "vocab_size: 32e3\nhidden_size: 6.4e1\nnum_layers: 2\nnum_heads: 4\nintermediate_size: 128\n"
    spec = load_model(str(write(tmp_path, "model.yaml", model)))
    assert (spec.vocab_size, spec.hidden_size) == (32_000, 64)
    wrong = write(tmp_path, "wrong.yaml", model.replace("6.4e1", "6.45e1"))
    with pytest.raises(ConfigError, match="hidden_size: expected a whole number >= 1, got '6.45e1'"):
        load_model(str(wrong))
    twice = write(tmp_path, "twice.yaml", model + "num_layers: 3\n")
    with pytest.raises(ConfigError, match="twice.yaml:6: num_layers is given twice, first in line 3"):
        load_model(str(twice))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("extends: tiny\ntrain:\n  stepz: 3\n", "train.stepz: unknown key; did you mean 'steps'? (from {file}:3)"),
        ("extends: tiny\nseed: -3\n", "seed: expected a whole number >= 0, got -3 (from {file}:2)"),
        ("extends: tiny\nversion: two\n", "{file}:2: version: expected 1 or 2 or 3, got 'two'"),
        ("extends: tiny\nversion: 0\n", "{file}:2: version: expected 1 or 2 or 3, got 0"),
        ("extends: tiny\nversion: 4\n", "version 4 is of a newer Muster"),
        ("extends: tiny\nseed: 1\nseed: 2\n", "{file}:3: seed is given twice, first in line 2"),
        ("extends: tiny\ntrain:\n  steps: 1\n  steps: 2\n", "{file}:4: steps is given twice, first in line 3"),
        (
            "extends: tiny\nparallel: {{stages: [{{layers: 1, layers: 2}}]}}\n",
            "{file}:2: layers is given twice, first in line 2",
        ),
        ("extends: tiny\ntrain: [1]\n", "train: expected a mapping"),
        ("extends: tinny\n", "there is no preset 'tinny'; did you mean 'tiny'?"),
        ("extends: [tiny]\n", "extends: expected the path of a run file or the name of a preset, got ['tiny']"),
        ("extends: none.yaml\n", "there is no file {folder}/none.yaml"),
        ("extends: tiny\nparallel: {{plan: auto, pp: 2}}\n", "parallel.pp: 'auto' chooses it"),
        ("extends: tiny\nparallel: {{plan: 5}}\n", "parallel.plan: unknown key"),
        ("train: {{steps: 1\n", "{file}:2 is not valid YAML"),
        ("train: 2024-13-45\n", "{file} is not valid YAML"),
        ("a: &x {{b: *x}}\n", "{file} is not valid YAML"),
        ("- a\n- b\n", "{file}: expected 'key: value' lines"),
        ("just text\n", "{file}: expected 'key: value' lines"),
        ("", "has no values: expected the sections of a run, such as model, data and train"),
    ],
)
def test_a_wrong_file_gets_a_sentence_with_its_place(tmp_path, text, sentence):
    file = write(tmp_path, "run.yaml", text.format())
    assert sentence.format(file=file, folder=tmp_path) in refusal(preset=None, file=file)


def test_files_that_cannot_be_read(tmp_path):
    assert "there is no file nowhere.yaml" in refusal(preset=None, file=Path("nowhere.yaml"))
    assert "write --preset tiny" in refusal(preset=None, file=Path("tiny"))
    assert "Is a directory" in refusal(preset=None, file=tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "expected YAML in UTF-8" in refusal(preset=None, file=tmp_path / "binary.yaml")
    assert "there is no preset 'x'" in refusal(preset="x")


def test_a_wrong_plan_file_gets_a_sentence(tmp_path):
    path = write(tmp_path, "plan.yaml", "pp: 2\ntpp: 1\n")
    with pytest.raises(ConfigError, match=r"tpp: unknown key; did you mean 'tp'\? \(from .*plan.yaml:2\)"):
        load_plan(path)
    assert "parallel.tpp: unknown key" in refusal(("parallel", str(path)))


# --- what is written ---

overrides_that_hold = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**63).map(str),
        "optim.lr": st.floats(1e-12, 1e12).map(repr),
        "optim.eps": st.sampled_from(["1e-8", "1e-30", "0.5"]),
        "data.source": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        "data.cache": st.sampled_from(["null", "~", "on", "# x", "a: b", "- c", "1e3", "'", '"', "0x10"]),
        "train.deterministic": st.sampled_from(["true", "false"]),
        "model": st.sampled_from(["tiny", "demo"]),
        "model.tied_embeddings": st.sampled_from(["true", "false"]),
        "parallel": st.sampled_from(["dp2-pp2-z1", "pp2-l3.5-sgpipe", "auto", "dp2x2-fp64"]),
        "parallel.default_strategy.zero": st.sampled_from(["z1", "z2"]),
    },
)


ANY_FOLDER = [HealthCheck.function_scoped_fixture]


@given(overrides_that_hold)
@settings(deadline=None, suppress_health_check=ANY_FOLDER, max_examples=20)
def test_config_yaml_and_plan_yaml_load_back_to_the_same_values(tmp_path, overrides):
    check_written_files(tmp_path, overrides)


@pytest.mark.soak
@given(overrides_that_hold)
@settings(deadline=None, suppress_health_check=ANY_FOLDER, max_examples=200)
def test_config_yaml_and_plan_yaml_of_more_runs_load_back_to_the_same_values(tmp_path, overrides):
    check_written_files(tmp_path, overrides)


def check_written_files(tmp_path, overrides):
    if overrides.get("model") == "demo" and "l3.5" in overrides.get("parallel", ""):
        return
    resolved = load_run_config("tiny", None, list(overrides.items()))
    plan = resolve_plan(resolved, None)
    write_run_files(resolved, plan, tmp_path / "run")
    again = load_run_config(None, tmp_path / "run" / "config.yaml", [])
    assert with_absolute_paths(again.config) == with_absolute_paths(
        resolved.config.model_copy(update={"parallel": plan})
    )
    assert not again.plan_is_auto
    assert resolve_plan(again, None) == plan
    assert load_plan(tmp_path / "run" / "plan.yaml") == plan
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "plan.yaml"]


def test_every_value_in_config_yaml_says_where_it_comes_from(tmp_path):
    file = write(tmp_path, "run.yaml", "extends: tiny\nseed: 3\n")
    resolved = load_run_config(None, file, [("optim.lr", "1e-2")])
    lines = config_yaml(resolved, resolve_plan(resolved, 2)).splitlines()
    assert f"seed: 3  # {file}:2" in lines
    assert "  lr: 0.01  # command line" in lines
    assert "  steps: 20  # preset tiny" in lines
    assert "  num_layers: 8  # model tiny" in lines
    assert "  eps: 1.0e-08  # default" in lines
    assert any(line.endswith("# auto, for world size 2") for line in lines if line.startswith("  dp_shard: "))
    assert "  precision: fp32  # preset tiny" in lines
    assert all("  # " in line or line.endswith(":") for line in lines)


def test_plans_that_no_name_can_say_load_back(tmp_path):
    plan = Plan(
        pp=2,
        overrides=(LayerOverride(start=1, count=2, strategy=LayerStrategy(recompute="full")),),
        stages=(StageSpec(layers=3, ranks=(0,)), StageSpec(layers=5)),
        compile=True,
    )
    path = write(tmp_path, "plan.yaml", plan_yaml(plan))
    assert load_plan(path) == plan
    assert path.read_text().splitlines()[:2] == [f"# {format_plan_name(plan)}", f"# hash {plan.hash}"]


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
)


@settings(deadline=None, max_examples=40)
@given(trees)
def test_yaml_text_reads_back_as_it_was(value):
    check_yaml_text(value)


@pytest.mark.soak
@settings(deadline=None, max_examples=200)
@given(trees)
def test_yaml_text_of_more_values_reads_back_as_it_was(value):
    check_yaml_text(value)


def check_yaml_text(value):
    tree = {"key": value, "other": 1}
    text = yaml_text(tree, lambda path: f"about {path}\nand more # of it")
    assert yaml.safe_load(text) == tree
    assert text.count("\n") == count_keys(tree)


def count_keys(tree: object) -> int:
    return sum(1 + count_keys(value) for value in tree.values()) if isinstance(tree, dict) else 0


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(tmp_path):
    path = write(tmp_path, "config.yaml", "old")

    with files_of_at_most(8), pytest.raises(OSError, match="File too large"):
        write_atomically(path, "new and longer")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path], "its draft is removed"


# --- the catalog and the cluster ---


@pytest.mark.parametrize("name", names("presets"))
def test_every_preset_loads_and_has_a_plan(name):
    resolved = load_run_config(name, None, [])
    assert resolve_plan(resolved, None).world_size == {"demo": 4}.get(name, 1)


def test_a_cluster_of_cpu_ranks_shares_its_cores():
    device = DeviceSpec(name="cpu", kind="cpu", shared_cores=2, why_unknown="a CPU's peak depends on its clock")
    cluster = single_node_cluster(device, 4)
    assert cluster.device.peak_flops_per_s.get("fp32") is None
    assert ClusterSpec.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize("tokens", ["1M", "1.5", "0", "-4", True])
def test_tokens_that_are_no_number_are_named(tokens, tmp_path):
    path = write(tmp_path, "a.yaml", "extends: tiny\ntrain: {global_batch_size: 8, seq_len: 64}")
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, path, [("train.tokens", tokens)])
    shown = {True: "'true'", "1M": "'1M'"}.get(tokens, tokens)
    assert str(caught.value) == f"train.tokens: expected a whole number >= 1, got {shown}"


def test_truth_values_are_no_numbers_in_run_files_and_plans(tmp_path):
    with pytest.raises(ConfigError, match="train.steps: expected a whole number >= 1 or null, got 'true'"):
        load_run_config(None, write(tmp_path, "a.yaml", "extends: tiny\ntrain: {steps: true}"), [])
    with pytest.raises(ConfigError, match="dp_shard: expected a whole number >= 1, got 'true'"):
        load_plan(write(tmp_path, "plan.yaml", "dp_shard: true"))


def test_empty_files_are_no_plan_and_no_run(tmp_path):
    path = write(tmp_path, "empty.yaml", "# nothing\nversion: 2\n")
    with pytest.raises(ConfigError, match="empty.yaml has no values: expected the fields of a plan"):
        load_plan(path)
    with pytest.raises(ConfigError, match="empty.yaml has no values: expected the sections of a run"):
        load_run_config(None, path, [])


def test_tokens_stand_for_steps_and_the_later_layer_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: tiny\ntrain: {tokens: 10000, global_batch_size: 8, seq_len: 64}")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml\ntrain: {steps: 3}")
    by_tokens, by_steps = (load_run_config(None, tmp_path / name, []) for name in ("a.yaml", "b.yaml"))
    assert (by_tokens.config.train.steps, by_tokens.config.train.tokens) == (20, 10_000)
    assert by_tokens.origins["train.steps"] == "train.tokens 10000 / (8 sequences of 64 tokens)"
    assert (by_steps.config.train.steps, by_steps.config.train.tokens) == (3, None)
    assert load_run_config(None, tmp_path / "b.yaml", [("train.tokens", "512")]).config.train.steps == 1
    with pytest.raises(ConfigError, match="its number of steps follows from train.global_batch_size"):
        load_run_config(None, None, [("model", "tiny"), ("train.tokens", "512"), ("train.seq_len", "64")])


def test_epochs_stand_for_steps_when_the_data_are_there():
    resolved = load_run_config("tiny", None, [("train.epochs", "1.5"), ("train.global_batch_size", "8")])
    assert (resolved.config.train.steps, resolved.config.train.epochs) == (None, 1.5)
    with pytest.raises(ValueError, match="once the data are there"):
        _ = resolved.config.train.num_steps
    known = with_steps_from_epochs(resolved, 100)
    assert known.config.train.num_steps == 19  # 150 samples: the last step reaches into the next epoch
    assert known.origins["train.steps"] == "train.epochs 1.5 of 100 samples, 8 in each step"
    assert with_steps_from_epochs(
        load_run_config("tiny", None, [("train.epochs", "0.1"), ("train.global_batch_size", "7")]), 70
    ).config
    assert with_steps_from_epochs(known, 100).config == known.config
    assert load_run_config("tiny", None, [("train.steps", "3")]).config.train.epochs is None
    with pytest.raises(
        ConfigError, match=r"train.steps 19 and train.epochs 1.5 \(15 steps\) are given, expected one of"
    ):
        with_steps_from_epochs(known, 80)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([("train.epochs", "0")], "train.epochs: expected a number > 0 or null, got 0.0 (from command line)"),
        ([("train.epochs", "2"), ("train.tokens", "512")],
         "train.tokens 512 and train.epochs 2.0 are given, expected one of them"),
        ([("train.steps", "2"), ("train.tokens", "5120"), ("train.global_batch_size", "8")],
         "train.steps 2 and train.tokens 5120 (10 steps) are given, expected one of them"),
    ],
)  # fmt: skip
def test_a_run_has_one_length(overrides, sentence):
    assert refusal(*overrides) == sentence


def test_a_length_in_epochs_derives_nothing():
    with pytest.raises(ConfigError, match=r"train\.epochs: train\.global_batch_size and optim\.lr can't be derived"):
        load_run_config(None, None, [("model", "tiny"), ("train.epochs", "2"), ("train.seq_len", "64")])


def test_keys_that_had_other_names_are_read_with_a_word(tmp_path, capsys):
    file = write(tmp_path, "old.yaml", "extends: tiny\ntrain:\n  eval_every: 7\n  eval_batches: 3\n")
    config = load_run_config(None, file, []).config
    assert (config.eval.every, config.eval.batches) == (7, 3)
    said = capsys.readouterr().err
    assert f"{file}:3: train.eval_every is called eval.every now" in said


def test_a_mixture_stands_in_the_place_of_a_source(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "extends: tiny\ndata: {blend: [{name: a, source: x}, {name: b, source: y, weight: 2}]}"
    )
    data = load_run_config(None, tmp_path / "a.yaml", []).config.data
    assert (data.source, [part.weight for part in data.blend]) == (None, [1, 2])
    assert load_run_config(None, tmp_path / "a.yaml", [("data.source", "z")]).config.data.blend == ()
    for text, sentence in {
        "[{from_step: 2, weights: {c: 1}}]": "blend has no source 'c', expected one of a, b",
        "[{from_step: 2, from_sample: 3, weights: {a: 1}}]": "either from_step or from_sample",
        "[{from_step: 2, weights: {a: 0}}]": "all weights are 0",
        "[{from_step: 2, weights: {a: 1}}, {from_sample: 3, weights: {b: 1}}]": "must begin one after the other",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load_run_config(None, tmp_path / "a.yaml", [("data.weight_schedule", text)])
