"""A forked command is what an interpreter would have made of it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tests import forks

SCRIPT = """
import json, os, signal, subprocess, sys
import muster.spec.plan
left = hasattr(muster.spec.plan, "left_behind")
muster.spec.plan.left_behind = True
child = subprocess.run([sys.executable, "-m", "muster.checkpoint.writer_process", "0"], stdin=subprocess.DEVNULL)
print(json.dumps({
    "words": sys.argv[1:], "cwd": os.getcwd(), "path": sys.path[0], "said": os.environ.get("SAID"), "left": left,
    "files": len(os.listdir("/proc/self/fd")), "child": child.returncode, "name": __name__,
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
}))
print("a warning", file=sys.stderr)
sys.exit(7)
"""


def test_a_forked_command_is_that_of_an_interpreter() -> None:
    words = ["trian", "--preset", "tiny"]
    alone = subprocess.run([*forks.interpreter_words(), *words], capture_output=True, text=True, check=False)
    forked = forks.run(*words)
    assert (forked.returncode, forked.stdout, forked.stderr) == (2, alone.stdout, alone.stderr)
    assert "did you mean" in forked.stderr


def test_it_has_its_own_words_streams_and_modules_and_nothing_of_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for said in ("one", "two"):
        done = forks.run("a b", program=script, cwd=tmp_path, env={**os.environ, "SAID": said})
        assert (done.returncode, done.stderr) == (7, "a warning\n")
        found = json.loads(done.stdout)
        assert found.pop("files") <= 5, "only its streams, and what lists them"
        assert found == {
            "words": ["a b"],
            "cwd": str(tmp_path),
            "path": str(tmp_path),
            "said": said,
            "left": False,
            "child": 0,
            "name": "__main__",
            "term": True,
        }


def test_it_goes_with_whoever_asked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen(forks.words_of(script), stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        process = Path(f"/proc/{int(asking.stdout.readline())}")
        assert process.exists()
        asking.send_signal(signal.SIGKILL)
    limit = time.monotonic() + 60
    while process.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not process.exists()
