"""`muster train` as a person uses it: real processes, each with a time limit and a process group of its own."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests import forks
from tests.forks import interpreter_words, words_of

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0
"""Longest time of a command on a slow, busy machine."""
AT_ONCE = ("--train.async_save", "false")
"""A step that is fast may find the last save under way, and then saves later: with this, each saves where it should."""
QUICK = ("--eval.batches", "1", "--train.sample_tokens", "0")


@dataclass(frozen=True)
class Ended:
    """End of a command: exit code, output, duration."""

    code: int
    out: str
    err: str
    seconds: float


class Command:
    """A running `muster train`, under Muster's own launcher or as `torchrun` processes of torchrun.

    It makes no row of metrics after those of the steps `hold_after` until it may `go_on`, or is asked to stop.
    `forked`, it starts sooner (see forks.py), and under torchrun its ranks do. What it says is kept for `wait`: in a
    pipe, which holds some hundred lines, or in files, added to `output`.
    """

    def __init__(
        self,
        *arguments: str | Path,
        torchrun: int = 0,
        env: dict[str, str] | None = None,
        before: Sequence[str] = (),
        cwd: Path | None = None,
        verb: str = "train",
        hold_after: Sequence[int] = (),
        forked: bool = False,
        output: Path | None = None,
    ) -> None:
        python = words_of() if forked else interpreter_words()
        if torchrun:
            elastic = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port())]
            # Without `--`, it would take --run for its own --run-path.
            python = [*elastic, "--nproc-per-node", str(torchrun), "--no-python", "--", *python]
        run = Path(arguments[arguments.index("--run") + 1]) if "--run" in arguments else None
        self._run, self._old_rows = run, rows_of(run) if run else []
        self._started = time.monotonic()
        self._words = tempfile.TemporaryDirectory(prefix="held-")
        held = {"HELD_AFTER": " ".join(map(str, hold_after)), "HELD_IN": self._words.name} if hold_after else {}
        path = f"{ROOT}/tests/held{os.pathsep}{ROOT}" if hold_after else str(ROOT)
        self._output = output
        out, err = (open(f"{output}.{name}", "a") if output else subprocess.PIPE for name in ("out", "err"))  # noqa: SIM115
        self.process = subprocess.Popen(
            [*before, *python, verb, *map(str, arguments)],
            cwd=cwd or ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **held, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            start_new_session=True,
        )
        for file in (out, err):
            if not isinstance(file, int):
                file.close()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._words.cleanup()

    def go_on(self, step: int) -> None:
        """Lets it make what follows a step of `hold_after`."""
        (Path(self._words.name) / str(step)).touch()

    def kill(self) -> None:
        """SIGKILL for the whole process group."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # a forked one may have ended
                os.killpg(self._launcher(), signal.SIGKILL)

    def wait(self) -> Ended:
        """Lets it end by itself."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
            if self._output:
                out, err = (Path(f"{self._output}.{name}").read_text() for name in ("out", "err"))
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = (said or "" for said in self.process.communicate())
            raise AssertionError(f"still ran after {LIMIT_S} s\n{out[-2000:]}\n{err[-2000:]}") from None
        return Ended(self.process.returncode, out, err, time.monotonic() - self._started)

    def wait_for(self, file: Path) -> None:
        """Returns once the file is there."""
        while not file.exists():
            self.be_patient(f"no {file}")

    def hear(self, words: str) -> str:
        """Returns what it has said since it was last heard, once there is a line with `words`."""
        assert self.process.stdout is not None
        heard = ""
        for said in iter(self.process.stdout.readline, ""):
            heard += said
            if words in said:
                return heard
        ended = self.wait()
        raise AssertionError(f"no {words!r} before it ended with {ended.code}\n{heard}\n{ended.err}")

    def wait_for_step(self, step: int) -> None:
        """Returns once this command has written down `step`, or a later one."""
        assert self._run is not None
        while not any(row["step"] >= step and row not in self._old_rows for row in rows_of(self._run)):
            self.be_patient(f"no step {step}")

    def wait_until_held(self, step: int) -> None:
        """Returns once the row after that of `step` is held up. The step's copies are complete by then: ranks make them
        before they take part in the next one's sums."""
        while not Path(self._words.name, f"held {step}").exists():
            self.be_patient(f"not held after step {step}")

    def be_patient(self, problem: str) -> None:
        """Waits a moment; an AssertionError with `problem` when there is nothing left to wait for."""
        if self.process.poll() is not None:
            ended = self.wait()
            raise AssertionError(f"{problem} before it ended with {ended.code}\n{ended.out}\n{ended.err}")
        assert time.monotonic() < self._started + LIMIT_S, f"{problem} within {LIMIT_S} s"
        time.sleep(0.003)

    def children(self) -> list[int]:
        """The processes that Muster's launcher has started, spares among them."""
        try:
            launcher = self._launcher()
            return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
        except OSError:
            return []

    def _launcher(self) -> int:
        """The process of the command, which is another than that which asked for a fork of it: see fork_client.py."""
        name = Path(f"/proc/{self.process.pid}/comm").read_text().strip()
        return int(name) if name.isdecimal() else self.process.pid

    def ranks(self) -> dict[int, int]:
        """The process of each rank that Muster's launcher has started and that still runs."""
        found = {}
        with contextlib.suppress(OSError):
            for child in self.children():
                words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                if "--rank" in words:
                    found[int(words[words.index("--rank") + 1])] = child
        return found


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def train(*arguments: str | Path, torchrun: int = 0, env: dict[str, str] | None = None) -> Ended:
    """Runs one command to its end."""
    with Command(*arguments, torchrun=torchrun, env=env, forked=not torchrun) as command:
        return command.wait()


def generated(run: Path, *prompts: str, plan: str, words: Sequence[str] = ()) -> tuple[str, ...]:
    """The likeliest texts of `muster generate`, whose ranks are forked (see forks.py)."""
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    done = forks.run("generate", run, *asked, "--plan", plan, "--temperature", "0", "--json", *words)
    assert done.returncode == 0, done.stderr
    return tuple(one["text"] for one in json.loads(done.stdout)["texts"])


def rows_of(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run: Path) -> list[float]:
    return [row["train/loss"] for row in rows_of(run)]


def steps(run: Path) -> list[int]:
    return [row["step"] for row in rows_of(run)]


def sample_hash(run: Path) -> str:
    return (run / "samples.sha256").read_text()


def exit_of(run: Path) -> dict:
    return json.loads((run / "exit.json").read_text())


def assert_same_training(run: Path, reference: Path) -> None:
    """The same samples in the same order, each step once, and the losses within 1e-5."""
    assert steps(run) == steps(reference), f"steps {steps(run)}"
    assert sample_hash(run) == sample_hash(reference), "other samples, or in another order"
    far = [
        (step, ours, theirs)
        for step, ours, theirs in zip(steps(run), losses(run), losses(reference), strict=True)
        if not abs(ours - theirs) <= 1e-5 * abs(theirs)
    ]
    assert not far, f"(step, loss, loss of {reference.name}): {far}"


def assert_one_sentence(ended: Ended, code: int, *words: str) -> None:
    """One clear line on standard error with all `words`, the exit code, and no traceback anywhere."""
    assert (ended.code, len(ended.err.splitlines())) == (code, 1), f"{ended.code}\n{ended.out}\n{ended.err}"
    assert "Traceback" not in ended.out + ended.err
    missing = [word for word in words if word not in ended.err]
    assert not missing, f"{missing} not in: {ended.err}"


@cache
def whole_run(folder: Path) -> tuple[Path, Ended]:
    """A run of the preset `tiny` in one process that nothing disturbed; read-only, for all tests to compare with.

    `folder` is the test process's own; of several test processes the first makes the run, beside their folders.
    """
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    run, said = shared / "train" / "whole", shared / "whole.json"
    with open(shared / "whole.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            with Command("--preset", "tiny", "--run", run, "--train.save_every", "5", *AT_ONCE, forked=True) as command:
                ended = command.wait()
            assert ended.code == 0, ended.err
            said.write_text(json.dumps(asdict(ended)))
    return run, Ended(**json.loads(said.read_text()))


def copy_of(whole: Path, name: str) -> Path:
    """A copy beside it, which shares its token store."""
    return Path(shutil.copytree(whole, whole.with_name(name)))
