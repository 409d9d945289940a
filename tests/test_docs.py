"""Tests of README.md and docs/: their commands run and print the shown output, their links lead somewhere.

Every ```console block is run in one folder for each page, in order, each line that begins with `$ ` as a command:

* a comment `# exit N` at a command's end is its expected exit code (default: 0);

* the lines after a command are its whole output in order; `…` alone on a line stands for any lines, within a line for
any text; in measured output every number counts as #;

* `make` and `pip` are not run, but what they name must exist; no virtual environment is made, since the tests run in
one; of `torchrun` the arguments are tried.

A ```yaml block that begins with `# NAME.yaml` is written to the file of that name first, and so is any block that names
a file in its first line, as in ```json rows.jsonl.
"""

import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.cli.main import VERBS
from muster.schedule.action import KINDS
from muster.spec.errors import ConfigError
from muster.spec.plan_name import parse_plan_name
from tests.forks import interpreter_words, words_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

WALK = ROOT / "docs/planning.md"
"""Page whose searches take minutes: a soak test runs it."""
LONG = (
    "asynchronous-pipelines",
    "context-parallel",
    "fine-tuning",
    "generate",
    "islands",
    "ladder-residual",
    "low-rank",
    "memory",
    "experts",
    "parallel-sublayers",
    "offload-optimizer",
    "offload-parameters",
    "linear-attention",
    "sequence-slices",
    "skipped-stages",
    "zeroth-order",
    "models",
    "offload",
    "plan",
    "plans",
    "predict",
    "profile",
    "quick-start",
    "run-directory",
    "run-files",
    "tracking",
    "verify",
)
"""Pages whose commands train, search or simulate for long, and which only the soak tests run."""


def each_page(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", paths, ids=lambda page: page.relative_to(ROOT).as_posix())


pages, pages_but_the_walk = each_page(PAGES), each_page([page for page in PAGES if page != WALK])
quick_pages = each_page([page for page in PAGES if page != WALK and page.stem not in LONG])

SHELL_TOOLS = ("cat", "ls", "sed")
"""Commands that are run beside muster."""


@dataclass(frozen=True)
class Command:
    """Line of a page that begins with `$ `, and the output that the page shows."""

    text: str
    exit_code: int
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def measures(self) -> bool:
        """True where the printed numbers differ from run to run, as those of a training and of a profile do."""
        measuring = (["muster", verb] for verb in ("train", "verify", "profile", "report", "eval"))
        trains = self.words[:2] in measuring and "--dry-run" not in self.words
        return self.words[0] == "cat" or trains


@dataclass(frozen=True)
class File:
    """File that a page shows in full."""

    name: str
    text: str


def parts_of(text: str) -> Iterator[Command | File]:
    """Yield the commands and files of a page's fenced blocks, in order."""
    for language, file, block in re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if file:
            yield File(file, block)
        if language == "yaml" and (name := re.match(r"# (\S+\.yaml)\n", block)):
            yield File(name[1], block)
        if language == "console":
            yield from commands_of(block)


def commands_of(block: str) -> Iterator[Command]:
    assert block.startswith("$ "), f"a console block begins with a command, not with {block[:40]!r}"
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        text, *shown = part.rstrip().split("\n")
        code = re.search(r"# exit (\d+)$", text)
        yield Command(text, int(code[1]) if code else 0, tuple(line.rstrip() for line in shown))


# ----------------------------------------------------------------------------------------------------------------------
# Running


def check_page(text: str, folder: Path, muster: list[str] | None = None) -> None:
    """Run a page's commands in `folder`; `muster` is the command line of muster, None: without an interpreter for each.

    Raises AssertionError where the output differs from the page.
    """
    for part in parts_of(text):
        if isinstance(part, File):
            (folder / part.name).write_text(part.text)
            continue
        tool = part.words[0]
        if tool == "muster" or tool in SHELL_TOOLS:
            run(part, folder, muster)
        else:
            assert tool in CHECKS, f"`{part.text}`: this test knows nothing of {tool}"
            CHECKS[tool](part, folder)


def run(command: Command, folder: Path, muster: list[str] | None = None) -> None:
    # With the interpreter of the tests, whatever `muster` may be on the path.
    function = f'muster() {{ {shlex.join(muster or words_of())} "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(
        ["bash", "-c", function + command.text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        timeout=600,
    )
    said = f"`{command.text}` ended with {done.returncode} and printed\n{done.stdout}"
    assert done.returncode == command.exit_code, f"{said}\nexpected exit code {command.exit_code}"
    if command.shown:
        expected = "\n".join(command.shown)
        assert prints(done.stdout, command.shown, command.measures), f"{said}\nbut the page shows\n{expected}"


def prints(output: str, shown: tuple[str, ...], measures: bool) -> bool:
    """Tell if the output matches what is shown."""
    lines = [line.rstrip() for line in output.splitlines()]
    if measures:
        lines, shown = [blur(line) for line in lines], tuple(blur(line) for line in shown)
    pattern = ""
    for line in shown:
        pieces = [re.escape(piece) for piece in line.split("…")]
        pattern += r"(?:.*\n)*?" if line == "…" else ".*".join(pieces) + r"\n"
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None


def blur(line: str) -> str:
    """Return the line without what differs from run to run: numbers, units of times, hashes, alignment of columns."""
    line = re.sub(r"(?<!\.)\b[0-9a-f]{12}\b", "#", line)
    line = re.sub(r"[+−-]?\d[\d,.]*(e[+-]\d+)?( (ns|µs|ms|s)\b)?", "#", line)
    return re.sub(r"\s+", " ", line)


# ----------------------------------------------------------------------------------------------------------------------
# What is not run


def check_make(command: Command, folder: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    for word in command.words[1:]:
        assert "=" in word or word in targets[1].split(), f"`{command.text}`: the Makefile has no target {word}"


def check_pip(command: Command, folder: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in command.words:
        if wanted := re.fullmatch(r"\.\[(.+)\]", word):
            assert set(wanted[1].split(",")) <= set(extras), f"`{command.text}`: the extras are {', '.join(extras)}"
        if word.endswith(".txt"):
            assert (ROOT / word).is_file(), f"`{command.text}`: there is no {word}"


def check_torchrun(command: Command, folder: Path) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(command.words[1:])
    assert (args.module, args.training_script) == (True, "muster"), f"`{command.text}` doesn't start muster"
    run(Command(shlex.join(["muster", *args.training_script_args, "--dry-run"]), 0, ()), folder)


def check_environment(command: Command, folder: Path) -> None:
    known = (["python3", "-m", "venv", ".venv"], ["source", ".venv/bin/activate"])
    assert command.words in known, f"`{command.text}`: this test knows only how .venv is made and entered"


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "python3": check_environment,
    "source": check_environment,
    "torchrun": check_torchrun,
}


# ----------------------------------------------------------------------------------------------------------------------
# Tests


@quick_pages
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    """Without an interpreter for each process: a soak test starts them."""
    check_page(page.read_text(), tmp_path)


@pytest.mark.soak
@pages_but_the_walk
def test_the_commands_of_a_page_print_what_it_shows_as_a_person_runs_them(page: Path, tmp_path: Path) -> None:
    check_page(page.read_text(), tmp_path, interpreter_words())


@pytest.mark.soak
def test_the_walk_through_planning_prints_what_it_shows(tmp_path: Path) -> None:
    check_page(WALK.read_text(), tmp_path)


@pytest.mark.parametrize(
    "block",
    [
        "$ muster --version # exit 3",
        "$ muster trian # exit 2\nmuster: unknown verb 'trian'; did you mean 'report'?…",
        "$ muster program pp2-mb12\nprogram 2 schedule=1f1b ranks=2 micro_batches=3 placement=0,1\n…",
        "$ muster program pp2-mb12\nprogram 2 schedule=1f1b ranks=2 micro_batches=2 placement=0,1",
        "$ cat nothing.yaml",
        "$ make tea",
        "$ pip install '.[trains]'",
        "$ torchrun --nproc-per-node 2 -m -- muster train --preset tiny --train.step 4",
        "$ rm -rf runs",
        "muster --version",
    ],
)
def test_a_page_that_is_wrong_is_noticed(block: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_page(f"A page.\n\n```console\n{block}\n```\n", tmp_path)


def test_measured_numbers_may_differ_and_words_may_not() -> None:
    shown = ("step 4/4 loss 4.9861 step 92.8 ms eta 0 s", "…", "step    105 ms   103 ms   +2.3 %")
    output = "step 4/4 loss 5.1 step 1.02 s eta 0 s\na line\nstep  1.05 s  1.10 s  −4.5 %\n"
    assert prints(output, shown, measures=True)
    assert not prints(output, shown, measures=False)
    assert not prints(output.replace("loss", "los"), shown, measures=True)
    assert not prints(output + "more\n", shown, measures=True)


@pages
def test_links_and_pictures_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} points to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page.name} points to {target}: there is no such heading"


def anchors(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    assert [page.name for page in PAGES[1:] if page.name != "README.md" and f"({page.name})" not in index] == []


def test_the_readme_names_every_verb() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS if f"`muster {verb}" not in readme] == []


def test_the_pages_name_every_word_of_their_subject() -> None:
    from muster.train.resume_check import CHANGEABLE_KEYS

    def missing(page: str, words: list[str]) -> list[str]:
        text = (ROOT / "docs" / page).read_text()
        return [word for word in words if f"`{word}" not in text]

    assert missing("programs.md", KINDS) == []
    with pytest.raises(ConfigError, match="the parts are ") as error:
        parse_plan_name("nonsense")
    words = str(error.value).partition("the parts are ")[2].removesuffix(" (layers per stage))")
    assert missing("plans.md", re.split(", | or ", words)) == []
    assert missing("run-directory.md", list(CHANGEABLE_KEYS)) == []
