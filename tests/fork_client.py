"""Runs one command through the server of forks.py: `python -I -S fork_client.py SOCKET PROGRAM WORDS…`.

It imports next to nothing, so that it starts in hundredths of a second. Its name (`/proc/PID/comm`) becomes the number
of the command's process, to which it passes on SIGTERM.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def pass_on(*_: object) -> None:
    with contextlib.suppress(ProcessLookupError):  # the command has just ended
        os.kill(command, signal.SIGTERM)


signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that comes early waits until it can be passed on
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = {"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ)}
    said = json.dumps(asked).encode() + b"\n"
    sent = socket.send_fds(server, [said], [0, 1, 2])
    server.sendall(said[sent:])
    answers = server.makefile("rb")
    if command := int(answers.readline() or b"0"):
        signal.signal(signal.SIGTERM, pass_on)
        with open("/proc/self/comm", "w") as name:
            name.write(str(command))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    answer = answers.readline()
code = int(answer or b"1")
os._exit(code if code >= 0 else 128 - code)
