"""Addresses with ports, as flags and run files give them."""

import re

SWARM_PORT = 29700
"""Port at which the trainer of a swarm listens, if none is given."""
MAX_CONNECTIONS = 32
"""Most TCP connections of a link between two peers; each has a thread at both ends."""


def parse_endpoint(text: str, usual_port: int | None = None) -> tuple[str, int]:
    """Parse `HOST:PORT` or `[fd00::1]:PORT`, with a `usual_port` also without a port. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/\s]+))(?::(\d+))?", text)
    port = None if found is None else int(found[3]) if found[3] else usual_port
    if found is None or port is None or not 0 < port < 1 << 16:
        raise ValueError(f"{text} is no address with a port: expected HOST:PORT")
    return found[1] or found[2], port
