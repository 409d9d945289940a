"""Parts of one's own and the Python API: what examples/ shows works, and what can't work is said in a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import muster
from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.config.run_config import BlendSource, RunConfig
from muster.cost.flops import forward_flops_per_token
from muster.cost.memory.rank_memory import activation_bytes
from muster.data.prepare import PrepareOptions, prepare
from muster.data.tokenizer import load_tokenizer
from muster.layout.tensor_layout import Box, TensorLayout
from muster.model.decoder import Decoder
from muster.model.generation import generate
from muster.model.init import init_stage
from muster.model.loss import plugin_loss_sums
from muster.optim.build import build_optimizer
from muster.parallel.tensor_parallel import apply_parallel_linears
from muster.parallel.weight_grad_store import WeightGradStore
from muster.plugins import loader, registry
from muster.plugins.loader import load_plugins, require_unchanged_plugins, resolve_plugin
from muster.plugins.registry import find_component
from muster.spec import former_names
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.plugin_model import PLUGIN_MODELS
from muster.spec.schedules import SCHEDULES
from muster.spec.text_generation import SamplingParams
from muster.spec.workload import Workload
from muster.train.resume_check import check_config_unchanged, config_changes
from tests import forks
from tests.weights import make_run, save_weights

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def examples():
    """Read once, and forgotten after the tests of this file."""
    kept = [(register, dict(register)) for register in (SCHEDULES, PLUGIN_MODELS, registry._COMPONENTS)]
    load_plugins(resolve_plugin(str(path)) for path in EXAMPLES.glob("my_*.py"))
    yield
    for register, before in kept:
        register.clear()
        register.update(before)


@pytest.fixture
def own(monkeypatch):
    """A register of this test alone."""
    monkeypatch.setattr(registry, "_COMPONENTS", dict(registry._COMPONENTS))
    models = dict(PLUGIN_MODELS)
    yield
    PLUGIN_MODELS.clear()
    PLUGIN_MODELS.update(models)


def optimizer_of(name: str, **options: float) -> OptimConfig:
    return OptimConfig(name=name, lr=0.1, weight_decay=0.1, options=options)


# --- examples ---


def test_no_example_of_a_plugin_is_longer_than_40_lines():
    assert {path.name: n for path in EXAMPLES.glob("my_*.py") if (n := len(path.read_text().splitlines())) > 40} == {}


def test_the_python_example_trains_with_every_part_and_goes_on_under_another_plan(tmp_path):
    """Two ranks, then one, with a model, a schedule, an optimizer, a data set, a loss and a step of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forks.run(tmp_path / "run", program=EXAMPLES / "python_api.py", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "True True [1, 2, 3, 4] report.html"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    config = load_run_config(None, tmp_path / "run" / "config.yaml", []).config
    assert [Path(plugin.file).name for plugin in config.plugins][0] == "my_model.py"
    assert len({plugin.sha256 for plugin in config.plugins}) == 6


# --- Python API ---


def test_import_muster_imports_nothing_else():
    code = "import sys, muster; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    names = {name for name in done.stdout.split() if name.partition(".")[0] in ("muster", "torch", "pydantic")}
    assert names == {"muster", "muster.version"}


def test_a_run_in_python_is_the_run_of_its_file(tmp_path):
    run = muster.Run(extends="tiny", train={"steps": 7}, model={"num_layers": 4}, parallel="dp2-pp2", seed=3)
    file = tmp_path / "run.yaml"
    file.write_text("extends: tiny\ntrain: {steps: 7}\nmodel: {num_layers: 4}\nparallel: dp2-pp2\nseed: 3\n")
    assert run.config == muster.load(file).config
    again = tmp_path / "again.yaml"
    again.write_text(run.to_yaml())
    assert muster.load(again).config == run.config
    assert muster.load(file, **{"train.steps": 9}).config.train.steps == 9
    assert muster.load(preset="tiny", train={"steps": 9}, parallel=run.config.parallel).plan() == run.plan()
    assert muster.Run(extends="tiny").to_yaml().count("parallel: auto") == 1


def test_every_section_of_a_run_file_is_an_argument():
    """Sections without an argument of their own go through `others`, as in the file."""
    arguments = set(muster.Run.__init__.__annotations__) - {"return", "unnamed", "others", "extends"}
    assert arguments <= set(RunConfig.model_fields)
    everything = muster.Run(extends="tiny").config.model_dump(mode="json")
    assert muster.Run(**everything).config == muster.Run(extends="tiny").config


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"train": {"stepz": 3}}, "train.stepz: unknown key; did you mean 'steps'? (from muster.Run)"),
        ({"trian": {"steps": 1}}, "trian: unknown key; did you mean 'train'?"),
        ({"optim": {"name": "sign-momentun"}}, "there is no optimizer 'sign-momentun'; did you mean 'sign-momentum'?"),
        ({"train": {"loss": "smooth"}}, "train.loss: there is no loss 'smooth'; did you mean 'smoothed'?"),
        ({"parallel": "pp2-sshalow1f1b"}, "did you mean 'sshallow1f1b'?"),
        ({"plugins": ["nothing.py"]}, "plugins: there is no file"),
        ({"plugins": ["no.such.module"]}, "plugins: Python finds no module no.such.module"),
        ({"plugins": [3]}, "plugins: expected Python files or modules, such as my_plugin.py, got 3"),
        ({"optim": {"options": {"momentum": 0.5}}}, "options are for an optimizer that a plugin registers, but adamw"),
        ({"train": {"loss": "smoothed", "z_loss": 1e-4}}, "z_loss is added to cross-entropy, but loss is smoothed"),
    ],
)
def test_errors_are_exceptions_with_one_sentence(keys, sentence):
    with pytest.raises(muster.ConfigError) as caught:
        muster.Run(extends="tiny", **keys)
    assert sentence in str(caught.value)


def test_plan_and_predict_give_what_the_verbs_print(capsys):
    found = muster.plan("llama3-8b", "8xh100", top=2, seq_len=2048, global_batch=64, require="tp1-pp1-z2-mb1")
    flags = "--model llama3-8b --cluster 8xh100 --top 2 --seq-len 2048 --global-batch 64 --require tp1-pp1-z2-mb1"
    assert main(["plan", *flags.split(), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert found.to_json()["plans"] == printed["plans"]
    one = muster.predict("llama3-8b", "8xh100", found.best, seq_len=2048, global_batch=64)
    assert one.step_time_s == found.predictions[0].step_time_s
    assert one.to_json()["fits"] is True
    with pytest.raises(muster.InfeasibleError, match="it needs 16 processes|needs 16 devices"):
        muster.predict("llama3-8b", "8xh100", "dp16")


def test_former_arguments_of_plan_are_read_and_say_todays(capsys, monkeypatch):
    monkeypatch.setattr(former_names, "_REPORTED", set())
    asked = {"seq_len": 64, "global_batch": 8, "top": 1}
    found = muster.plan("tiny", "2xh100", **asked, require="tp2", memory_limit="60GB", time_limit=60)
    former = muster.plan("tiny", "2xh100", **asked, fix="tp2", memory="60GB", limit_s=60, runnable=True)  # type: ignore[call-arg]
    assert former.best == found.best
    said = capsys.readouterr().err
    for old, new in (("fix", "require"), ("memory", "memory_limit"), ("limit_s", "time_limit")):
        assert f"muster.plan: {old} is called {new} now\n" in said


def test_the_public_names_are_listed():
    assert set(muster.__all__) <= set(dir(muster))
    for name in muster.__all__:
        assert getattr(muster, name).__doc__


def test_data_in_python_gives_what_the_verbs_print(tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n')
    made = muster.prepare_data(source, tmp_path / "store", workers=1)
    assert made == muster.inspect_data(tmp_path / "store")
    assert main(["data", "inspect", str(tmp_path / "store"), "--documents", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == muster.inspect_data(tmp_path / "store", documents=2)
    assert shown["texts"] == ["one", "two"] or [text.startswith(("one", "two")) for text in shown["texts"]]
    assert muster.check_data(tmp_path / "store")["documents"] == muster.check_data(source)["documents"] == 2


def test_trained_models_in_python_give_what_the_verbs_print(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", "dp1")
    facts = muster.convert(run, tmp_path / "copy", to="muster")
    assert (facts["target"]["format"], (tmp_path / "copy" / "manifest.json").exists()) == ("muster", True)
    main(["checkpoint", "convert", str(run), str(tmp_path / "again"), "--to", "muster", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed | {"target": None} == facts | {"target": None}


def test_a_checkpoint_brings_the_plugin_of_its_model(tmp_path, monkeypatch, capsys):
    mixer = {"preset": "tiny-mixer", "num_layers": 2}
    run = muster.Run(extends="tiny", model=mixer, plugins=[EXAMPLES / "my_model.py"])
    folder = save_weights(tmp_path / "checkpoints", run.config.model, run=run.config.model_dump(mode="json"))
    for register in (PLUGIN_MODELS, registry._COMPONENTS, loader._LOADED):
        for key in list(register):
            monkeypatch.delitem(register, key)
    for arguments in (
        ["inspect", folder],
        ["verify", folder],
        ["convert", folder, tmp_path / "copy", "--to", "muster"],
    ):
        assert main(["checkpoint", *map(str, arguments)]) == 0, capsys.readouterr().err
        assert "tiny-mixer" in capsys.readouterr().out or arguments[0] != "inspect"


def test_a_run_that_cannot_be_is_refused_by_train(tmp_path, own):
    def here(**keys: object) -> muster.Run:
        return muster.Run(extends="tiny", **keys)  # type: ignore[arg-type]

    with pytest.raises(muster.InfeasibleError, match=r"train\.loss smoothed reads the logits of all words, which tp"):
        here(train={"loss": "smoothed"}, parallel="tp2").train(tmp_path / "a")
    with pytest.raises(muster.InfeasibleError, match="which post_validation doesn't wait for: leave pv out"):
        here(train={"training_step": "sam"}, parallel="pp2-mb2-pv").train(tmp_path / "b")
    registry._COMPONENTS["loss", "at-a-prompt"] = registry.PluginComponent("loss", "at-a-prompt", len, None)
    with pytest.raises(muster.ConfigError, match="loss at-a-prompt is registered at a prompt or in a notebook"):
        here(train={"loss": "at-a-prompt"}).train(tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: muster.plan("tiny", "2xh100", seq_len=0), "seq_len: expected a whole number >= 1, got 0"),
        (
            lambda: muster.plan("tiny", "2xh100", global_batch=8.5),
            "global_batch: expected a whole number >= 1, got 8.5",
        ),
        (lambda: muster.plan("tiny", "2xh100", top=0), "top: expected a whole number >= 1, got 0"),
        (lambda: muster.plan("tiny", "2xh100", effort=-1), "effort: expected a number above 0, got -1"),
        (lambda: muster.plan("tiny", "2xh100", time_limit=0), "time_limit: expected seconds above 0, got 0"),
        (
            lambda: muster.plan("tiny", "2xh100", require=2),
            "require: expected parts of a plan's name such as tp2-z1, got 2",
        ),
        (lambda: muster.plan("tiny", "2xh100", fix="dp2", require="dp2"), "require is given twice, also as fix"),
        (
            lambda: muster.generate(3, "x"),
            "run: expected a run directory, a checkpoint or a converted directory, got 3",
        ),
        (lambda: muster.generate("here", "x", top_p=0), "top_p 0: input should be greater than 0"),
        (lambda: muster.eval(3), "place: expected a run, a checkpoint or a Hugging Face directory, got 3"),
        (lambda: muster.verify(), "nothing to verify: expected a run file or a preset, such as tiny"),
        (lambda: muster.convert("a", "b", to="onnx"), "to: expected muster, hf or dcp, got 'onnx'"),
        (lambda: muster.prepare_data("a", 3), "out: expected a directory, got 3"),
        (lambda: muster.check_data(3), "source: expected a token store, or a file or directory of texts, got 3"),
        (lambda: muster.plan(5, "2xh100"), "model: expected a model's name, a file, "),
        (lambda: muster.plan("tiny", 2), "cluster: expected a cluster's name such as 64xh100, "),
        (lambda: muster.predict("tiny", "2xh100", 2), "plan: expected a plan's name such as dp2-pp2, "),
        (lambda: muster.Run("tiny"), "got 'tiny' without one: say extends=… for a preset, or muster.load(…) for a run"),
        (lambda: muster.load(3), "file: expected a run file's path, got 3"),
        (lambda: muster.Run(extends="tiny").train(3), "directory: expected a path, got 3"),
        (lambda: muster.plan("tiny", "2xh100", objective="costs"), "got 'costs'; did you mean 'cost'?"),
        (
            lambda: muster.predict("tiny", "2xh100", "dp2", seq_len="64"),
            "seq_len: expected a whole number >= 1, got '64'",
        ),
        (lambda: muster.predict("tiny", "2xh100", "dp2", global_batch=0), "global_batch: expected a whole number >= 1"),
        (lambda: muster.Run(extends="tiny").train("runs/never", nproc=0), "nproc: expected a whole number >= 1, got 0"),
        (lambda: muster.Run(extends="tiny").plan(-1), "nproc: expected a whole number >= 1, got -1"),
        (lambda: muster.register_loss(len), r"got <built-in function len>: write register_loss('mine')"),
        (lambda: muster.register_optimizer(torch.optim.SGD), "register_optimizer('mine')"),
        (
            lambda: muster.register_loss("number")(3),
            "register_loss: expected a function or a class for 'number', got 3",
        ),
        (lambda: muster.register_schedule("none", chunks=0), "expected chunks >= 1 for 'none', got 0"),
    ],
)
def test_a_wrong_argument_is_said_in_an_exception(ask, sentence, own):
    with pytest.raises(muster.ConfigError) as caught:
        ask()
    assert sentence in str(caught.value)


# --- plugins ---


def plugin(folder: Path, text: str, name: str = "own_parts.py") -> Path:
    path = folder / name
    path.write_text("import muster\n" + text)
    return path


def test_a_path_in_plugins_is_relative_to_its_run_file(tmp_path, own):
    plugin(tmp_path, "muster.register_loss('relative')(len)\n")
    (tmp_path / "run.yaml").write_text("extends: tiny\nplugins: [own_parts.py]\ntrain: {loss: relative}\n")
    found = load_run_config(None, tmp_path / "run.yaml", []).config.plugins
    assert [one.file for one in found] == [str(tmp_path / "own_parts.py")]


def test_a_part_that_a_run_uses_brings_its_file():
    assert [Path(p.file).name for p in muster.Run(extends="tiny", data={"source": "sums"}).config.plugins] == [
        "my_dataset.py"
    ]


def test_a_plugin_that_fails_is_named_with_its_line(tmp_path, own):
    with pytest.raises(muster.ConfigError, match=r"own_parts\.py:3: ZeroDivisionError: division by zero"):
        load_plugins([resolve_plugin(str(plugin(tmp_path, "\n1 / 0\n")))])
    with pytest.raises(muster.ConfigError, match=r"broken\.py:2: SyntaxError"):
        load_plugins([resolve_plugin(str(plugin(tmp_path, "def\n", "broken.py")))])


def test_a_plugin_that_ends_the_process_or_registers_twice_is_refused(tmp_path, own):
    with pytest.raises(muster.ConfigError, match=r"own_parts\.py:2: SystemExit: 3"):
        load_plugins([resolve_plugin(str(plugin(tmp_path, "raise SystemExit(3)\n")))])
    text = "muster.register_loss('double')(len)\n" * 2
    with pytest.raises(muster.ConfigError, match=r"twice\.py registers 'double' twice"):
        load_plugins([resolve_plugin(str(plugin(tmp_path, text, "twice.py")))])


def test_a_name_belongs_to_one_file(tmp_path, own):
    first, other = (
        plugin(tmp_path, "muster.register_loss('twice')(len)\n", f"{name}.py") for name in ("first", "other")
    )
    load_plugins([resolve_plugin(str(first)), resolve_plugin(str(first))])
    with pytest.raises(muster.ConfigError, match=r"other\.py registers 'twice', which .*first\.py has registered"):
        load_plugins([resolve_plugin(str(other))])
    for register, taken in ((muster.register_optimizer, "adamw"), (muster.register_schedule, "1f1b")):
        with pytest.raises(muster.ConfigError, match=f"expected a name|'{taken}' is a built-in"):
            register(taken)(len)
    with pytest.raises(
        muster.ConfigError, match="in a plan's name szbh1 already stands for zb-h1; choose another name"
    ):
        muster.register_schedule("zbh1")(len)
    with pytest.raises(
        muster.ConfigError, match="expected a name of lowercase letters, digits and hyphens, got 'My Loss'"
    ):
        muster.register_loss("My Loss")(len)


def test_changed_data_are_named_as_they_were_and_are() -> None:
    before, after = (load_run_config("tiny", None, [("data.source", f"/{name}")]).config for name in ("a", "b"))
    assert config_changes(before, after) == [], "what data hold is compared, not where they lie"
    parts = (BlendSource(name="x", source="/a", weight=1.0),)
    blend = after.model_copy(update={"data": after.data.model_copy(update={"source": None, "blend": parts})})
    assert "data.source was /a, now None" in config_changes(before, blend)


def test_a_changed_plugin_is_shown_when_the_run_goes_on(tmp_path, own):
    path = plugin(tmp_path, "muster.register_loss('changing')(len)\n")
    before = muster.Run(extends="tiny", plugins=[path], train={"loss": "changing"}).config
    path.write_text(path.read_text() + "# another line\n")
    after = muster.Run(extends="tiny", plugins=[path], train={"loss": "changing"}).config
    (change,) = config_changes(before, after)
    assert change.startswith("plugin own_parts.py has changed (sha256 was ")


def test_a_run_knows_that_a_part_it_uses_has_changed(tmp_path, own):
    """The hash in its config.yaml counts, not that of the file now; readers of the run compare with it, too."""
    path = plugin(tmp_path, "muster.register_loss('used')(len)\n")
    run = muster.Run(extends="tiny", plugins=[path], train={"loss": "used"})
    (tmp_path / "config.yaml").write_text(run.to_yaml())
    check_config_unchanged(tmp_path, run.config, 0)
    path.write_text(path.read_text() + "# another line\n")
    with pytest.raises(muster.ConfigError, match=r"plugin own_parts\.py has changed \(sha256 was "):
        check_config_unchanged(tmp_path, muster.Run(extends="tiny", plugins=[path], train={"loss": "used"}).config, 0)
    with pytest.raises(muster.ConfigError, match="has changed since this run was trained"):
        require_unchanged_plugins(load_run_config(None, tmp_path / "config.yaml", []).config.plugins)


# --- schedules ---


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("yield f'{rank}F0'", "rank 0 leaves out 0B0, 0B1, 0B2, 0F1"),
        ("yield f'{rank}F0'; yield f'{rank}F0'", "rank 0 does 0F0 twice"),
        ("yield f'{rank}I0'", "rank 0 does 0I0 which is none of 0FN, 0BN"),
        ("yield 'forward'", "'forward' is not an action"),
        ("for m in range(3): yield f'{rank}B{m}'; yield f'{rank}F{m}'", "wrong"),
        ("while True: yield '0F0'", "rank 0 does 0F0 twice"),
        ("yield 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(body, sentence, tmp_path, own, capsys):
    path = plugin(tmp_path, f"@muster.register_schedule('wrong')\ndef wrong(rank, setting):\n    {body}\n")
    try:
        assert main(["schedule", "wrong", "--ranks", "2", "--microbatches", "3", "--plugins", str(path)]) == 3
    finally:
        SCHEDULES.pop("wrong", None)
    assert sentence in capsys.readouterr().err


# --- optimizers ---


def test_a_cut_matrix_steps_as_the_whole_one_does():
    shape, gradients = (6, 4), [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]
    start = torch.randn(shape, dtype=torch.float64)
    layouts = {"layers.0.mlp.up.weight": TensorLayout("layers.0.mlp.up.weight", shape, (Box((0, 0), shape),))}

    def after(cut: slice) -> tuple[torch.Tensor, torch.Tensor]:
        param = start[cut].clone()
        optimizer = build_optimizer(
            optimizer_of("sign-momentum", momentum=0.5), {"layers.0.mlp.up.weight": param}, layouts
        )
        (name, state) = optimizer.state()["layers.0.mlp.up.weight.momentum"]
        assert (name, state.abs().sum().item()) == ("layers.0.mlp.up.weight", 0.0)
        for gradient in gradients:
            param.grad = gradient[cut].clone()
            optimizer.step(0.1)
        return param, state

    whole, parts_ = after(slice(None)), [after(slice(0, 2)), after(slice(2, 6))]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts_]))
    plain = start.clone()
    mean = torch.zeros_like(plain)
    for gradient in gradients:
        mean = 0.5 * mean + 0.5 * gradient
        plain = plain * (1 - 0.1 * 0.1) - 0.1 * mean.sign()
    torch.testing.assert_close(whole[0], plain)


@pytest.mark.parametrize("name", ["Adagrad", "RAdam", "Adamax", "RMSprop", "Adam"])
def test_torchs_elementwise_optimizers_work_and_equal_themselves(name, own):
    factory = getattr(torch.optim, name)
    muster.register_optimizer("of-torch", factory)
    config = OptimConfig(name="of-torch", lr=0.1, weight_decay=0.0)
    ours, theirs = (torch.ones(3, 2).requires_grad_() for _ in range(2))
    layouts = {"a.weight": TensorLayout("a.weight", (3, 2), (Box((0, 0), (3, 2)),))}
    optimizer, plain = build_optimizer(config, {"a.weight": ours}, layouts), factory([theirs], lr=0.1)
    assert optimizer.state()
    for step in range(3):
        ours.grad, theirs.grad = (torch.full((3, 2), 1.0 - step) for _ in range(2))
        optimizer.step(0.1)
        plain.step()
    torch.testing.assert_close(ours, theirs)


def test_making_an_optimizer_leaves_gradients_alone():
    """`muster verify` sets them first."""
    param, layouts = torch.ones(2, 2), {"a.weight": TensorLayout("a.weight", (2, 2), (Box((0, 0), (2, 2)),))}
    param.grad = torch.ones(2, 2)
    optimizer = build_optimizer(optimizer_of("sign-momentum"), {"a.weight": param}, layouts)
    assert param.grad is not None
    optimizer.step(0.1)
    assert float(param[0, 0]) == pytest.approx(1 - 0.1 * 0.1 - 0.1)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "def step(self, closure): closure()",
            r"optimizer failing: step\(\), which is called without a closure, fails: ",
        ),
        ("def step(self): {}['x']", r"own_parts\.py:5: KeyError: 'x'"),
        ("def __init__(self, params, lr): {}['x']", "can't be made with {}: KeyError: 'x'"),
    ],
)
def test_an_optimizer_that_fails_is_refused(body, sentence, tmp_path, own):
    text = f"import torch\n@muster.register_optimizer('failing')\nclass Failing(torch.optim.SGD):\n    {body}\n"
    load_plugins([resolve_plugin(str(plugin(tmp_path, text)))])
    with pytest.raises(muster.ConfigError, match=sentence):
        find_component("optimizer", "failing").target.state_names({})


def test_an_optimizer_that_wants_whole_matrices_is_refused(own):
    class Normed(torch.optim.SGD):
        def step(self):  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])

    muster.register_optimizer("normed", Normed)
    muster.register_optimizer("nadam", torch.optim.NAdam)
    with pytest.raises(muster.ConfigError, match="optimizer normed changes a matrix"):
        muster.Run(extends="tiny", optim={"name": "normed"}, parallel="dp1").plan()
    with pytest.raises(
        muster.ConfigError, match="changes a matrix that is sharded by rows differently from the whole one"
    ):
        find_component("optimizer", "normed").target.state_names({})
    with pytest.raises(muster.ConfigError, match="optimizer nadam keeps mu_product"):
        find_component("optimizer", "nadam").target.state_names({})
    with pytest.raises(muster.ConfigError, match=r"optim\.options: optimizer sign-momentum can't be made with"):
        find_component("optimizer", "sign-momentum").target.state_names({"wrong": 1})


# --- losses ---


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda logits, labels: logits.sum(1), r"other than -100, got \(4,\)"),
        (lambda logits, labels: None, "one number, the sum over the labels other than -100, got NoneType"),
        (lambda logits, labels: logits.detach().sum(), "expected a number that can be differentiated"),
        (lambda logits, labels: {}["x"], r"train\.loss: .*test_extend\.py:\d+: KeyError: 'x'"),
        (lambda logits: logits.sum(), "takes 1 positional argument but 2 were given"),
    ],
)
def test_a_loss_that_cannot_be_one_is_refused(loss, sentence):
    with pytest.raises(muster.ConfigError, match=sentence):
        plugin_loss_sums(loss, torch.ones(2, 2, 3, requires_grad=True), torch.zeros(2, 2, dtype=torch.long))


# --- data sets ---


def test_a_data_set_becomes_a_store_and_says_what_is_wrong(tmp_path, own):
    path = plugin(
        tmp_path,
        "@muster.register_dataset('few')\ndef few():\n    yield 'one'\n    yield {'text': 'two'}\n"
        "@muster.register_dataset('odd')\ndef odd():\n    yield 'one'\n    yield 3\n"
        "@muster.register_dataset('failing')\ndef failing():\n    yield 'one'\n    raise KeyError('x')\n",
    )
    load_plugins([resolve_plugin(str(path))])
    tokenizer = load_tokenizer("bytes")
    store = prepare(PrepareOptions("few", tokenizer), tmp_path / "few")
    assert tokenizer.decode(store.read(0, 3).tolist()) == "one"
    assert (store.header.num_documents, store.header.num_tokens) == (2, 8)
    with pytest.raises(muster.ConfigError, match="odd: row 2"):
        prepare(PrepareOptions("odd", tokenizer), tmp_path / "odd")
    with pytest.raises(muster.ConfigError, match=r"data set failing: .*own_parts\.py:13: KeyError: 'x'"):
        prepare(PrepareOptions("failing", tokenizer), tmp_path / "failing")
    registry._COMPONENTS["dataset", "text"] = registry.PluginComponent("dataset", "text", lambda: "all of it", path)
    with pytest.raises(muster.ConfigError, match="data set text: expected documents one by one, got one str"):
        prepare(PrepareOptions("text", tokenizer), tmp_path / "text")
    with pytest.raises(muster.ConfigError, match="no file or directory 'fewe'; did you mean 'few'"):
        prepare(PrepareOptions("fewe", tokenizer), tmp_path / "fewe")


# --- models ---


def spec_of(name: str, **values: Any) -> ModelSpec:
    return load_model(name).model_copy(update=values)


def test_a_layer_that_is_musters_own_is_counted_as_musters_is(own):
    """Products, parameters and what is kept, by following a forward and by the formulas."""
    muster.register_model("same", like="tiny", tensor_parallel=True)(type("Same", (muster.DecoderLayer,), {}))
    ours, theirs = spec_of("tiny"), spec_of("same")
    assert list(parameter_shapes(ours)) == list(parameter_shapes(theirs))
    assert forward_flops_per_token(theirs, 128) == forward_flops_per_token(ours, 128)
    for name in ("dp1-mb2", "tp2-mb2", "dp1-mb2-fp32", "dp1-mb2-rfull"):
        plan, workload = parse_plan_name(name), Workload(seq_len=128, global_batch_size=8)
        counted, formula = (activation_bytes(one, plan, workload, 0) for one in (theirs, ours))
        assert counted == pytest.approx(formula, rel=0.01), name


def test_a_models_forecast_is_what_pytorch_counts(capsys):
    line = "memory-check --model tiny-mixer --plan pp2-mb2 --seq-len 128 --json"
    assert main(line.split()) == 0
    assert all(abs(rank["difference"]) < 0.05 for rank in json.loads(capsys.readouterr().out)["ranks"])


def test_a_model_writes_without_a_cache():
    spec = spec_of("tiny-mixer", num_layers=2)
    model = Decoder(spec, range(2), first=True, last=True)
    init_stage(model, spec, 0)
    prompts = [[5, 7, 9], [3]]
    found = generate(model, prompts, 4, SamplingParams(temperature=0), 64)
    for prompt, new in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in new:
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
            text.append(token)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"parallel": "tp2"}, "model plain doesn't declare that tensor parallelism can shard its layers"),
        ({"parallel": "dp1-relem"}, "recompute elementwise supports Muster's own layers, not those of model plain"),
        (
            {"parallel": "dp1", "data": {"packing": "next_fit"}},
            "packing next_fit needs layers that keep documents apart",
        ),
    ],
)
def test_undeclared_abilities_of_a_model_are_refused(keys, sentence, own):
    muster.register_model("plain", like="tiny")(muster.DecoderLayer)
    with pytest.raises(muster.InfeasibleError) as caught:
        muster.Run(extends="tiny", model="plain", **keys).plan()
    assert sentence in str(caught.value)


def test_auto_and_the_planner_take_what_a_model_can(own):
    muster.register_model("plain", like="tiny")(muster.DecoderLayer)
    found = muster.plan("plain", "4xh100", top=3, seq_len=256, global_batch=32)
    assert {plan.tp for plan in found.plans} == {1}
    assert muster.Run(extends="tiny", model="tiny-mixer").plan(2).world_size == 2


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("self.register_buffer('mask', torch.ones(2))", "its layer has the buffer mask, which checkpoints don't hold"),
        ("self.more = torch.nn.Linear(2, layer + 1)", "its layers have other parameters than the first"),
        ("1 / 0", r"model odd: its layer can't be made: "),
    ],
)
def test_a_layer_that_cannot_be_one_is_refused(body, sentence, tmp_path, own):
    text = f"""
import torch
@muster.register_model("odd", like="tiny")
class Odd(muster.DecoderLayer):
    def __init__(self, spec, layer):
        super().__init__(spec, layer)
        {body}
"""
    load_plugins([resolve_plugin(str(plugin(tmp_path, text)))])
    with pytest.raises(muster.ConfigError) as caught:
        list(parameter_shapes(spec_of("odd")))
    assert sentence in str(caught.value)


def test_layers_that_are_no_modules_are_refused(own):
    muster.register_model("number", like="tiny")(lambda spec, layer: 3)
    with pytest.raises(
        muster.ConfigError, match=r"model number: expected layers that are a torch\.nn\.Module, got a int"
    ):
        list(parameter_shapes(spec_of("number")))


def test_a_layer_that_makes_something_else_is_refused(own):
    class Wider(muster.DecoderLayer):
        def forward(self, x_BSD, *shared):
            return torch.cat((x_BSD, x_BSD), -1)

    muster.register_model("wider", like="tiny")(Wider)
    refusal = r"its layer returns \(1, 64, 128\).* for a hidden state \(1, 64, 64\)"
    with pytest.raises(muster.ConfigError, match=refusal):
        forward_flops_per_token(spec_of("wider"), 64)


def test_an_unknown_model_names_the_closest():
    with pytest.raises(muster.ConfigError, match="there is no model 'tiny-mixr'; did you mean 'tiny-mixer'"):
        muster.Run(extends="tiny", model="tiny-mixr")


def verify(*flags: str) -> subprocess.CompletedProcess[str]:
    """Two layers, two steps, in float64, with the examples."""
    command = [sys.executable, "-m", "muster", "verify", "--preset", "tiny", "--steps", "2", "--precision", "fp64"]
    command += ["--model.num_layers", "2", "--train.seq_len", "32"]
    command += [f"--plugins={path}" for path in sorted(EXAMPLES.glob("my_*.py"))]
    return subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.soak
@pytest.mark.parametrize(
    "flags",
    [
        "--model tiny-mixer --against tp2-sp-mb4 pp2-mb4-szbh1 dp2-mb4-z3-rfull pp2-mb4-sshallow1f1b",
        "--optim.name sign-momentum --against dp2-mb4-z1 dp2-mb4-z2 dp2-mb4-z3",
        "--train.loss smoothed --optim.name sign-momentum --against dp2-mb4-z1 pp2-mb4-sshallow1f1b",
    ],
)
def test_every_part_trains_as_one_process_does(flags):
    """`muster verify`: tensor parallelism, split backwards, z1 to z3, own schedules, losses and optimizers."""
    done = verify(*flags.split())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_parity_of_parts_fails_on_a_seeded_bug(tmp_path):
    """An optimizer that steps further on the second rank, which no check of one process can see."""
    path = plugin(
        tmp_path,
        "import torch\nfrom torch import distributed\n@muster.register_optimizer('seeded')\n"
        "class Seeded(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            group['lr'] *= 1 + (distributed.get_rank() if distributed.is_initialized() else 0)\n"
        "        super().step()\n",
    )
    done = verify("--plugins", str(path), "--optim.name", "seeded", "--against", "dp2-mb4-z1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "dp1-mb8-fp64 trains as one process does" in done.stdout
    assert "dp2-mb4-z1-fp64 differs in the update" in done.stdout


# --- plugins for version 0.1 ---


def test_a_plugin_for_version_0_1_still_works():
    from muster.model import decoder

    @muster.register_schedule("former-v", chunks=2, turns=True, splits=True)
    def order(rank: int, setting: Any) -> list[str]:
        return []

    assert SCHEDULES["former-v"].v_shaped
    assert SCHEDULES["former-v"].split_backward
    assert muster.Setting is muster.ScheduleSpec
    assert muster.Now is muster.StepContext

    class Former(torch.nn.Module):
        spread, join = staticmethod(decoder.spread), staticmethod(decoder.join)

        def __init__(self, spec: ModelSpec, layer: int) -> None:
            super().__init__()
            self.up = torch.nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)
            self.down = torch.nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)

        def forward(self, x_BSD: torch.Tensor, *_: Any) -> torch.Tensor:
            (y,) = self.spread(x_BSD, self.up)
            return x_BSD + self.join(y, self.down)

    muster.register_model("former", like="tiny", tensor_parallel=True)(Former)
    module = Decoder(spec_of("former"), range(2), first=True, last=True)
    apply_parallel_linears(module, None, store := WeightGradStore())
    with store.deferring(0):
        module(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert module.layers["0"].up.weight.grad is None
    store.flush(0)
    assert module.layers["0"].up.weight.grad is not None
