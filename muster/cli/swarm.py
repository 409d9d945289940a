"""`muster swarm`: serve stages of a training that runs on another machine."""

import argparse
import os
import signal
import socket
import threading
from functools import partial
from pathlib import Path

from muster.cli.parser import Parser, positive_int
from muster.spec.endpoint import MAX_CONNECTIONS, SWARM_PORT, parse_endpoint
from muster.spec.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Serve until the training is over or it is interrupted. Returns the exit code."""
    parser = Parser(
        "swarm",
        "Serve pipeline stages of a training whose run file has a section swarm (`muster train --swarm.stages N`)."
        " Model and state come from there; peers may join and leave at any time.",
    )
    add = parser.add_argument
    add("trainer", metavar="HOST:PORT", help=f"address of the training, its swarm.listen (port {SWARM_PORT} if none)")
    add(
        "--secret-file",
        type=Path,
        default=Path("muster.secret"),
        metavar="FILE",
        help="copy of the secret that the training has made, its swarm.secret_file (default: muster.secret)",
    )
    add(
        "--announce",
        metavar="HOST:PORT",
        help="address at which other peers reach this one (default: its own towards the training, any free port)",
    )
    add(
        "--connections",
        type=_connections,
        default=1,
        metavar="N",
        help="TCP connections by which it sends to the next peer of its stage (default: 1)",
    )
    args = parser.parse(arguments)
    if Path(args.trainer).is_file() or Path(args.trainer).suffix in (".yaml", ".yml"):
        raise ConfigError(
            f"{args.trainer} is a file: expected the address HOST:PORT of the training, which knows its run file"
        )
    trainer = _endpoint("HOST:PORT", args.trainer, SWARM_PORT)
    announce = None if args.announce is None else _endpoint("--announce", args.announce)
    from muster.launch.peers.channel import load_secret
    from muster.launch.swarm.peer import SwarmPeer

    secret = load_secret(args.secret_file)
    from muster.train.swarm_worker import make_stage

    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    name = f"{socket.gethostname()}-{os.urandom(3).hex()}"
    log = partial(print, flush=True)
    peer = SwarmPeer(trainer, secret, name, make_stage, announce, log, connections=args.connections)
    print(f"{name} asks the training at {args.trainer} for a stage", flush=True)
    is_over = peer.run(stopping.is_set)
    peer.close()
    ended = "the training is over" if is_over else "left the training"
    print(f"{ended}; backwards done here: {peer.micro_batches:,}", flush=True)
    return 0


def _connections(text: str) -> int:
    count = positive_int(text)
    if count > MAX_CONNECTIONS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_CONNECTIONS} connections, got {count}")
    return count


def _endpoint(what: str, text: str, usual_port: int | None = None) -> tuple[str, int]:
    try:
        return parse_endpoint(text, usual_port)
    except ValueError as error:
        raise ConfigError(f"{what}: {error}, such as host-a:{SWARM_PORT}") from None
