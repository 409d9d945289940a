"""The command line: exit codes and sentences, independence from torch, and the floors of the house."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import muster
from muster.cli import main as cli
from muster.cli.main import VERBS, main
from muster.cli.parser import sequence_length, split_overrides
from muster.schedule.program import parse_program
from muster.spec.errors import ConfigError, MusterError
from muster.train.preflight import TrainOptions

PACKAGE = Path(muster.__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # any import of it now fails
from muster.cli.main import main
code = main(sys.argv[1:])
print("loaded", json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
sys.exit(code)
"""


def without_torch(folder: Path, *arguments: str, script: str = WITHOUT_TORCH) -> tuple[int, str, list[str]]:
    """Return exit code, standard output and lines on standard error of a command line without torch installed."""
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, env=ENVIRONMENT)
    return done.returncode, done.stdout, done.stderr.splitlines()


# --- where torch is not installed ---


def test_help_imports_nothing_heavy(tmp_path):
    """Of every verb, one after the other in an interpreter."""
    asked = [["--help"], ["--version"], *[[verb, "--help"] for verb in VERBS]]
    script = WITHOUT_TORCH.replace("code = main(sys.argv[1:])", f"code = max(main(words) for words in {asked})")
    assert script != WITHOUT_TORCH
    code, out, errors = without_torch(tmp_path, script=script)
    assert code == 0
    assert out.startswith("usage: muster ")
    assert [verb for verb in VERBS if f"usage: muster {verb}" not in out] == []
    loaded = set(json.loads(errors[-1].removeprefix("loaded ")))
    assert not loaded & {"pydantic", "yaml", "numpy", "rich", "safetensors"}
    assert len(errors) == 1


def test_dry_run_without_torch_prints_all_and_writes_nothing(tmp_path):
    code, out, errors = without_torch(tmp_path, "train", "--preset", "demo", "--dry-run", "--train.steps", "5")
    assert (code, len(errors)) == (0, 1)
    assert "  steps: 5  # command line\n" in out
    assert "\nplan     dp2-pp2-" in out
    assert "\nprogram  1f1b, pipeline ranks: 2, micro-batches: " in out
    assert "\nrun      runs/demo (dry run: nothing is written)\n" in out
    assert list(tmp_path.iterdir()) == []


def test_program_without_torch_parses_back_and_passes_the_check(tmp_path):
    code, out, _ = without_torch(tmp_path, "program", "dp2-pp2-mb2-z1", "--train.global_batch_size=32")
    assert code == 0
    program = parse_program(out)
    assert (program.num_ranks, program.num_micro_batches) == (2, 8)
    (tmp_path / "program.txt").write_text(out)
    code, out, _ = without_torch(tmp_path, "program", "--check", "program.txt")
    assert (code, out) == (
        0,
        "program.txt can be run; peak activations by pipeline rank, in micro-batches: 2, 1\n",
    )


@pytest.mark.parametrize("arguments", [["train", "--preset", "tiny"], ["verify", "--preset", "tiny"]])
def test_where_torch_is_needed_and_missing_the_sentence_says_so(tmp_path, arguments):
    code, _, errors = without_torch(tmp_path, *arguments)
    assert code == 1
    assert errors[0] == "muster: this needs PyTorch, which is not installed: pip install 'muster-llm[train]'"
    assert len(errors) == 2
    assert list(tmp_path.iterdir()) == []


# --- bad requests ---


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("trian", 2, "unknown verb 'trian'; did you mean 'train'?"),
        ("--hlep", 2, "unknown flag '--hlep'; did you mean '--help'?"),
        ("train", 2, "expected a run file or --preset NAME"),
        ("train nofile.yaml", 2, "there is no file nofile.yaml"),
        ("train tiny", 2, "there is no file tiny; for the preset of that name write --preset tiny"),
        ("train --preset tinny", 2, "there is no preset 'tinny'; did you mean 'tiny'?"),
        ("train --preset tiny --fres", 2, "unknown flag '--fres'; did you mean '--fresh'?"),
        ("train --preset tiny --steps 5", 2, "unknown flag '--steps'; did you mean '--train.steps'?"),
        ("train --preset tiny --lr=5", 2, "unknown flag '--lr'; did you mean '--optim.lr'?"),
        ("train --preset tiny -x", 2, "unknown flag '-x'"),
        ("train a.yaml b.yaml", 2, "unexpected argument 'b.yaml'"),
        ("train --preset", 2, "argument --preset: expected one argument"),
        ("train --preset tiny --nproc 0", 2, "expected a whole number >= 1, got '0'"),
        ("train --preset tiny --nproc two", 2, "expected a whole number >= 1, got 'two'"),
        ("train --preset tiny --train.steps", 2, "--train.steps: a value is missing"),
        ("train --preset tiny --train.steps --fresh", 2, "--train.steps: a value is missing"),
        ("train --preset tiny --train.steps=", 2, "train.steps: expected a whole number >= 1 or null, got ''"),
        ("train --preset tiny --train.stepz 5", 2, "train.stepz: unknown key; did you mean 'steps'?"),
        ("train --preset tiny --seed x", 2, "seed: expected a whole number >= 0, got 'x' (from command line)"),
        ("train --preset tiny --model llama", 2, "there is no model 'llama'"),
        ("train --preset tiny --parallel dq2", 2, "unknown part 'dq2'; did you mean 'dp2'?"),
        ("train --preset tiny --parallel no/plan.yaml", 2, "there is no file no/plan.yaml"),
        ("train --preset tiny --nproc 4 --parallel dp2", 3, "nearest: dp2-pp2-mb1-fp32, dp2x2-mb1-fp32, dp4-mb1-fp32"),
        ("train --preset tiny --nproc 11", 3, "nearest with 10 processes: dp2-pp5-mb1-fp32"),
        ("train --preset tiny --parallel tp2-fp8", 3, "fp8 with tensor parallelism"),
        ("train --preset tiny --parallel pp2-szbv", 3, "schedule zb-v runs 2 stages on each pipeline rank"),
        ("train --preset demo --parallel.recompute full", 2, "parallel.recompute: unknown key"),
        ("program", 2, "expected a plan such as dp2-pp2-mb4, or --check FILE"),
        ("program dp1 --check x", 2, "expected a plan such as"),
        ("program pp9", 3, "it has 9 stages, but the model has only 8 layers"),
        ("program dp2 --nproc 2", 2, "unknown flag '--nproc'"),
        ("program --check nowhere.txt", 2, "can't read nowhere.txt: No such file or directory"),
        ("verify", 2, "nothing to verify: expected a run file or --preset NAME"),
        ("verify nowhere.yaml", 2, "there is no file nowhere.yaml"),
        (
            "verify --preset tiny --parallel cp2",
            2,
            "--parallel: plans to verify are given with --against, here --against cp2",
        ),
        (
            "verify --preset tiny --parallel.plan cp2 --against dp2",
            2,
            "--parallel: plans to verify are given with --against, here --against cp2",
        ),
        ("verify --preset tiny --against cp2,dp2", 2, "expected spaces between plans: --against cp2 dp2"),
        ("verify --preset tiny --against", 2, "argument --against: expected at least one argument"),
        ("verify --preset tiny --against dq2", 2, "unknown part 'dq2'; did you mean 'dp2'?"),
        ("verify --preset tiny --against dp2 pp9", 3, "it has 9 stages, but the model has only 8 layers"),
        (
            "verify --preset tiny --tolerance 0",
            2,
            "argument --tolerance: expected a number above 0, such as 1e-5, got '0'",
        ),
        ("verify --preset tiny --tolerance x", 2, "expected a number above 0, such as 1e-5, got 'x'"),
        ("verify --preset tiny --steps 0", 2, "expected a whole number >= 1, got '0'"),
        ("plan --model tiny --cluster 8xh100 --mtbf 5years", 2, "--mtbf: expected a number, got '5years'"),
        ("generate runs/demo --prompt x --top-p all", 2, "--top-p: expected a number, got 'all'"),
        ("verify --preset tiny --precision fp12", 2, "parallel.precision"),
        ("report nowhere", 2, "there is no run directory nowhere"),
        ("report", 2, "the following arguments are required: RUN"),
    ],
)
def test_a_bad_request_gets_one_sentence_and_its_exit_code(line, code, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry = ["--dry-run"] if line.startswith("train ") else []
    assert main([*line.split(), *dry]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("muster: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        ("", 2, "a program begins with"),
        ("program 2 schedule=x ranks=1 micro_batches=1 placement=0\nrank 0 compute: 0F0 0Q0\n", 2, "0Q0"),
        (
            "program 2 schedule=x ranks=1 micro_batches=2 placement=0\nrank 0 compute: 0F0 0B0 0F1\n",
            1,
            "0B1 is missing",
        ),
    ],
)
def test_a_bad_program_gets_a_sentence(text, code, sentence, capsys, tmp_path):
    (tmp_path / "program.txt").write_text(text)
    assert main(["program", "--check", str(tmp_path / "program.txt")]) == code
    assert sentence in capsys.readouterr().err


def test_each_wrong_value_gets_a_line(capsys):
    assert main(["train", "--preset", "tiny", "--dry-run", "--train.steps", "0", "--optim.lr", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["muster", "muster"]


# --- main ---


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (MusterError("it broke"), 1, "muster: it broke\n"),
        (ConfigError("it is wrong"), 2, "muster: it is wrong\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(0), 0, ""),
    ],
)
def test_an_exception_decides_the_exit_code(raised, code, said, capsys, monkeypatch):
    class Verb:
        @staticmethod
        def run(arguments):
            assert arguments == ["a", "--b"]
            raise raised

    monkeypatch.setattr(cli, "import_module", lambda name: {"muster.cli.train": Verb}[name])
    assert main(["train", "a", "--b"]) == code
    assert capsys.readouterr().err == said


def test_a_verb_gets_its_configuration_and_options(monkeypatch, tmp_path):
    from muster.cli import train

    seen = []

    class Runtime:
        @staticmethod
        def train(resolved, options):
            seen.append((resolved.config.seed, resolved.config.parallel.pp, options))
            return 75

    monkeypatch.setattr(train, "import_torch_module", lambda: Runtime)
    file = tmp_path / "mine.yaml"
    file.write_text("extends: tiny\n")
    assert main(["train", str(file), "--seed", "9", "--parallel=pp2", "--nproc", "2"]) == 75
    assert main(["train", "--preset", "tiny", "--run", "here", "--fresh"]) == 75
    assert main(["train", "--preset", "demo", str(file)]) == 75
    assert main(["train", "--preset", "tiny", "--no-resume"]) == 75
    assert seen == [
        (9, 2, TrainOptions(Path("runs/mine"), nproc=2)),
        (0, 1, TrainOptions(Path("here"), fresh=True)),
        (0, 1, TrainOptions(Path("runs/mine"))),
        (0, 1, TrainOptions(Path("runs/tiny"), fresh=True)),
    ]


def test_predict_reads_the_plan_of_a_run_file(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\nparallel:\n  tp: 2\n  micro_batch_size: 1\ntrain:\n  seq_len: 64\n")
    command = ["predict", "--model", "tiny", "--cluster", "2xh100", "--plan", str(file), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["plan"].startswith("tp2-mb1")
    file.write_text("extends: tiny\nparallel: {plan: auto, micro_batch_size: 2}\n")
    assert main(command) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert "mb2" in plan.split("-"), "it is planned for the cluster first"


@pytest.mark.parametrize(
    ("arguments", "old", "new"),
    [
        ("schedule 1f1b --ranks 2 --microbatches 2 --comm=0.5", "--comm", "--p2p-time"),
        ("schedule interleaved --ranks 2 --microbatches 2 --chunks 2", "--chunks", "--vpp"),
        ("train --preset tiny --dry-run --join-limit 3", "--join-limit", "--rendezvous-timeout"),
    ],
)
def test_a_former_flag_is_read_and_says_its_new_name(arguments, old, new, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("muster.spec.former_names._REPORTED", set())
    former = main(arguments.split()), capsys.readouterr()
    current = main(arguments.replace(old, new).split()), capsys.readouterr()
    assert former[0] == current[0]
    assert former[1].out == current[1].out
    verb = arguments.partition(" ")[0]
    assert former[1].err == f"muster {verb}: {old} is called {new} now\n" + current[1].err


def test_a_flag_under_both_names_is_refused(capsys):
    assert main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--comm=0.5", "--p2p-time", "1"]) == 2
    assert "--p2p-time is given twice, also as --comm, its former name: leave --comm out" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error():
    nobody, output = os.pipe()
    os.close(nobody)
    command = [sys.executable, "-m", "muster", "program", "dp1", "--train.global_batch_size=2000"]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=300)
    os.close(output)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_terminal_of_few_letters_gets_question_marks():
    command = [sys.executable, "-m", "muster", "plan", "--help"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "CO?" in done.stdout


def test_a_closed_output_is_no_error_and_no_file_gets_its_number(tmp_path):
    script = (
        "import os, sys; from muster.cli.main import main; code = main();"
        f" file = open({str(tmp_path / 'file')!r}, 'w'); sys.exit(code or 10 * (file.fileno() < 3))"
    )
    command = '"$0" -c "$1" predict --model tiny --cluster 2xa100 --plan dp2 >&-'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, script], capture_output=True, text=True, env=ENVIRONMENT, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("train.learning_rate", "unknown key; that is optim.lr here"),
        ("train.per_device_train_batch_size", "unknown key; that is parallel.micro_batch_size here"),
        ("train.gradient_accumulation_steps", "unknown key: it follows from train.global_batch_size, parallel."),
        ("optim.warmup_ratio", "unknown key; that is optim.warmup_steps (a number of steps) here"),
        ("train.bf16", "unknown key; that is parallel.precision here"),
        ("lora.rank", "unknown key: the section adapter has low-rank adapters"),
        ("train.sequence_len", "unknown key; did you mean 'seq_len'?"),
    ],
)
def test_keys_of_other_trainers_are_known(key, sentence, capsys):
    assert main(["train", "--preset", "tiny", f"--{key}", "1", "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def test_flags_of_other_trainers_are_known(capsys):
    assert main(["train", "--preset", "tiny", "--learning_rate", "1"]) == 2
    assert "unknown flag '--learning_rate'; did you mean '--optim.lr'?" in capsys.readouterr().err


def test_every_key_that_stands_for_another_trainers_is_a_key():
    from muster.config.merge import run_schema
    from muster.spec.other_names import OTHER_NAMES, WITHOUT_KEY

    for name, key in OTHER_NAMES.items():
        assert run_schema().schema_at(key.partition(" ")[0]) is not None, name
    assert not OTHER_NAMES.keys() & WITHOUT_KEY.keys()


@pytest.mark.parametrize("place", ["gone/machine.yaml", "."])
def test_a_profile_that_cannot_be_written_is_not_measured(place, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("muster.probe.profile.launch", lambda *_: pytest.fail("it measures"))
    assert main(["profile", "-o", place]) == 2
    said = capsys.readouterr().err
    assert "argument -o/--output: " in said
    assert place in said


def test_a_profile_that_is_stopped_has_not_failed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stopped = SimpleNamespace(report=lambda: 75)
    monkeypatch.setattr("muster.probe.profile.launch", lambda *_: stopped)
    assert main(["profile", "--quick"]) == 130
    assert not capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run.yaml", "gone.yml"])
def test_a_run_file_is_no_address_of_a_training(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    assert main(["swarm", name]) == 2
    assert f"{name} is a file: expected the address HOST:PORT of the training" in capsys.readouterr().err


def test_dotted_flags_are_split_off():
    arguments = ["run.yaml", "--a.b", "1", "--c.d=x=y", "--run=./e.f", "--nproc", "2", "--g.h", "-3"]
    rest, overrides = split_overrides(arguments)
    assert rest == ["run.yaml", "--run=./e.f", "--nproc", "2"]
    assert overrides == [("a.b", "1"), ("c.d", "x=y"), ("g.h", "-3")]


# --- the house ---

FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        (
            ("spec", "catalog"),
            ("layout", "plugins"),
            ("interop",),
            ("config",),
            ("schedule",),
            ("cost",),
            ("simulate",),
            ("planner", "validate"),
            ("report", "data"),
            ("model", "launch"),
            ("parallel",),
            ("optim",),
            ("checkpoint",),
            ("train",),
            ("probe",),
            ("api",),
            ("cli",),
        )
    )
    for room in rooms
}
"""Rooms of the package, from the lowest floor up: a room imports only rooms below it."""


def _imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the room"
            yield node.module or ""


def test_every_room_has_a_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(FLOORS)


def test_the_architecture_page_has_every_room_and_names_files_that_exist():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (`.*?`) \|", page, re.MULTILINE)
    assert {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)/`", rooms)} == FLOORS
    files = {path.as_posix() for folder in (PACKAGE, PACKAGE.parent / "docs") for path in folder.rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert len(named) > 100
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("room", [room for room, floor in FLOORS.items() if floor < FLOORS["model"]] + ["api", "cli"])
def test_rooms_up_to_the_reports_never_import_torch(room):
    for path in (PACKAGE / room).rglob("*.py"):
        assert not [name for name in _imports(path) if name.partition(".")[0] == "torch"], path


@pytest.mark.parametrize("room", FLOORS)
def test_imports_run_downward(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for name in _imports(path):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package != "muster" or other in ("", "version", room) or (room, other) == ("spec", "catalog"):
                continue
            assert FLOORS[other] < FLOORS[room], f"{path} imports {name}"


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("128k", 131_072), ("1M", 1_048_576)])
def test_lengths_of_sequences_are_named_as_contexts_are(text: str, tokens: int) -> None:
    assert sequence_length(text) == tokens


@pytest.mark.parametrize("text", ["0", "k", "1.5k", "1G", "-8"])
def test_a_wrong_length_of_sequences_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--model", "tiny", "--cluster", "2xa100", "--plan", "dp2", f"--seq-len={text}"]
    assert main(words) == 2
    assert f"expected tokens such as 8192, 128k (131,072) or 1M, got '{text}'" in capsys.readouterr().err
