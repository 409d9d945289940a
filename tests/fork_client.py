"""Runs one command through the server of forks.py: `python -I -S fork_client.py SOCKET PROGRAM WORDS…`.

It imports next to nothing, so that it starts in hundredths of a second.
"""

import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = {"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ)}
    said = json.dumps(asked).encode() + b"\n"
    sent = socket.send_fds(server, [said], [0, 1, 2])
    server.sendall(said[sent:])
    answer = server.recv(100)
code = int(answer or b"1")
os._exit(code if code >= 0 else 128 - code)
