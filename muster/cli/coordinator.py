"""`muster coordinator`: bring together the peers of one training."""

import argparse
import signal
import socket
import sys
import threading
from pathlib import Path

from muster.cli.parser import Parser, positive_int, whole_number
from muster.launch.network import format_endpoint, listen_at, local_address_for
from muster.launch.peers.settings import Settings
from muster.spec.endpoint import parse_endpoint
from muster.spec.errors import ConfigError

PORT = 29600


def run(arguments: list[str]) -> int:
    """Serve peers until it is interrupted. Returns the exit code."""
    parser = Parser(
        "coordinator",
        "Bring together runs that come and go: `muster train --outer.coordinator HOST:PORT --outer.secret_file FILE`"
        " joins. It may be restarted at any time.",
    )
    add, usual = parser.add_argument, Settings()
    add("--listen", default="0.0.0.0", metavar="HOST:PORT", help=f"address to listen at (default: any, port {PORT})")
    add(
        "--secret-file",
        type=Path,
        default=Path("muster.secret"),
        metavar="FILE",
        help="secret of the run, made where it isn't there; peers need a copy (default: muster.secret)",
    )
    add(
        "--min-peers",
        type=positive_int,
        default=usual.min_peers,
        metavar="N",
        help=f"peers without which no round begins or ends (default: {usual.min_peers})",
    )
    add(
        "--silence",
        type=_seconds,
        default=usual.silence_s,
        metavar="S",
        help=f"seconds of silence after which a peer is taken for dead (default: {usual.silence_s:g})",
    )
    add(
        "--straggler-timeout",
        type=_seconds,
        default=usual.straggler_s,
        metavar="S",
        help="seconds from the end of a round on the first peer after which the others go on without the last"
        f" (default: {usual.straggler_s:g})",
    )
    add(
        "--measure-every",
        type=whole_number,
        default=usual.measure_every,
        metavar="N",
        help="rounds after which the bandwidth between peers is measured again, for the ring's order; 0: never"
        f" (default: {usual.measure_every})",
    )
    args = parser.parse(arguments)
    settings = Settings(
        min_peers=args.min_peers,
        beat_s=min(usual.beat_s, args.silence / 5),
        silence_s=args.silence,
        reconnect_s=min(usual.reconnect_s, args.silence / 2),
        straggler_s=args.straggler_timeout,
        measure_every=args.measure_every,
    )
    from muster.launch.peers.channel import create_secret
    from muster.launch.peers.coordinator import Coordinator

    listener = _listen(args.listen)
    secret = create_secret(args.secret_file)
    host, port = listener.getsockname()[:2]
    place = format_endpoint(local_address_for("0.0.0.0") if host in ("0.0.0.0", "::") else host, port)
    print(f"coordinator at {place}, secret in {args.secret_file}", flush=True)
    print(f"peers join with --outer.coordinator {place} --outer.secret_file {args.secret_file}", flush=True)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    coordinator = Coordinator(listener, secret, settings, lambda line: print(line, flush=True))
    ended.wait()
    waiting = "; peers train on to the end of their round, and wait for it" if coordinator.peers() else ""
    coordinator.close()
    print(f"the coordinator has ended{waiting}", file=sys.stderr)
    return 0


def _listen(text: str) -> socket.socket:
    try:
        host, port = parse_endpoint(text, PORT)
    except ValueError as error:
        raise ConfigError(f"--listen {error}, such as 0.0.0.0:{PORT}") from None
    return listen_at(host, port, PORT)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a number of seconds > 0, got '{text}'")
    return value
