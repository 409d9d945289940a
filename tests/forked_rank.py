"""Ranks of tests/test_fork_server.py: `python -m muster.launch.rank_module tests.forked_rank WHAT …`."""

import faulthandler
import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path

import numpy.random

if os.environ.get("TEST_IMPORT") == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if os.environ.get("TEST_IMPORT") == "gpu" and __name__ != "__main__":
    sys.modules["__main__"]._GPU_DEVICES = ("/dev/urandom",)  # type: ignore[attr-defined]
    os.open("/dev/urandom", os.O_RDONLY)
if os.environ.get("TEST_IMPORT") == "error":
    raise ImportError("no such thing")


def describe() -> dict[str, object]:
    """What a process can see of itself, but its number."""
    links = {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) < 3}
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [__name__, __spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals()],
        "imported": sorted(name for name in sys.modules if name.startswith("tests")),
        "environment": {key: value for key, value in os.environ.items() if key != "TEST_FDS"},
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "words": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "streams": [[s.encoding, s.errors, s.fileno(), s.line_buffering] for s in (sys.stdin, sys.stdout, sys.stderr)],
        "links": links["1"] == links["2"],
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "faulthandler": faulthandler.is_enabled(),
        "signals": {n: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)},
        "heard": sys.stdin.readline(),
        "given": [os.write(int(number), b"given ") for number in os.environ["TEST_FDS"].split(",")],
    }


if __name__ == "__main__":
    match sys.argv[1]:
        case "describe":
            print(json.dumps(describe()))
        case "chance":
            print(random.random(), numpy.random.random())
        case "files":
            print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        case "raise":
            raise ValueError("on purpose")
        case "exit":
            sys.exit(sys.argv[2] if not sys.argv[2].isdecimal() else int(sys.argv[2]))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "child":
            os.write(1, b"begun ")
            sys.stdin.read()
            os.write(1, b"ended ")
