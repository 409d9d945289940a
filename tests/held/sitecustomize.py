"""Holds up a training that `Command` started with `hold_after`: once metrics.jsonl ends with such a step, the next row
waits until a file in the folder HELD_IN has the step's number as its name, or this process has been sent a signal. A
file `held N` there says that it waits.

Python imports a module of this name by itself, in every process on whose path it lies; forks.py does where it forks.
"""

import os
import select
import signal
import sys

STEPS = {int(word) for word in os.environ.get("HELD_AFTER", "").split()}


def hold(event: str, arguments: tuple) -> None:
    if event != "open" or arguments[1] != "a" or os.path.basename(arguments[0]) != "metrics.jsonl":
        return
    try:
        with open(arguments[0]) as rows:
            step = sum(1 for _ in rows)
    except FileNotFoundError:
        return
    if step not in STEPS:
        return
    os.close(os.open(f"{os.environ['HELD_IN']}/held {step}", os.O_CREAT))
    while not os.path.exists(f"{os.environ['HELD_IN']}/{step}"):
        if select.select([signalled], [], [], 0.002)[0]:
            break


def listen() -> None:
    """Notices signals of this process: a forked one has closed the pipe of that which it comes from."""
    global signalled
    signalled, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)


if STEPS:
    listen()
    sys.addaudithook(hold)
