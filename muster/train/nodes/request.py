"""What a launcher is told of the nodes, and which interface it then uses."""

import os
from dataclasses import dataclass

from muster.parallel.network import (
    Interface,
    interface_towards,
    interfaces,
    is_loopback,
    named_interface,
    own_interface,
    place,
    resolve,
)
from muster.spec.errors import MusterError

PORT = 29400
"""Where the first node listens if nobody says otherwise: torchrun's choice, too."""
JOIN_LIMIT_S = 600.0


@dataclass(frozen=True)
class NodesRequest:
    """One launcher's place among several."""

    count: int
    rank: int
    """Of this node, from 0."""
    host: str
    """Node 0's name or address."""
    port: int = PORT
    interface: str | None = None
    """Through which the ranks meet; None: the one that the route to node 0 goes through."""
    join_limit_s: float = JOIN_LIMIT_S
    """How long the others are waited for."""


def listening_address(request: NodesRequest) -> str:
    """Node 0's own address, as the others call it. Raises MusterError where that is no address of this machine."""
    address = resolve(request.host)
    own = ", ".join(str(one) for one in interfaces() if not is_loopback(one.address)) or "none"
    if own_interface(address) is None:
        named = "" if address == request.host else f", which is {address},"
        raise MusterError(
            f"node 0 has to be the machine of --rendezvous {request.host}{named} but this one's addresses are {own}:"
            " start node 0 there, or give an address of this machine to all nodes"
        )
    if is_loopback(address) and not is_loopback(request.host) and request.host != "localhost":
        raise MusterError(
            f"--rendezvous {request.host} is {address} here, which no other machine can reach: give this machine's"
            f" address ({own}) to all nodes, or correct /etc/hosts"
        )
    return address


def data_interface(request: NodesRequest, address: str) -> Interface:
    """The interface through which this node's ranks meet those of the others: the one asked for, or that of the route
    to node 0's `address`. Raises ConfigError for one that is not there, MusterError where there is no route."""
    if request.interface is not None:
        return named_interface(request.interface, "--interface")
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named_interface(name, "GLOO_SOCKET_IFNAME")
    try:
        return interface_towards(address)
    except OSError as error:
        there = ", ".join(str(one) for one in interfaces() if not is_loopback(one.address)) or "none"
        raise MusterError(
            f"there is no route from here to node 0 at {place(address, request.port)} ({error.strerror}): this"
            f" machine's addresses are {there}; give one of node 0's that they reach as --rendezvous"
        ) from None


def rank_environment(request: NodesRequest, interface: Interface) -> dict[str, str]:
    """What a rank's gloo and NCCL have to know of the interface: what was set by hand stays, unless --interface says
    otherwise."""
    names: dict[str, str] = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface.name)
    if request.interface is not None:
        return names
    return {variable: name for variable, name in names.items() if not os.environ.get(variable)}
