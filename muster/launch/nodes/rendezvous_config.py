"""Rendezvous configuration of a launcher, and the network interface that it uses."""

import os
from dataclasses import dataclass

from muster.launch.network import (
    Interface,
    format_endpoint,
    interfaces,
    is_loopback,
    local_interface,
    named_interface,
    resolve,
    route_interface,
)
from muster.spec.errors import MusterError

DEFAULT_PORT = 29400
"""Port of node 0's launcher by default, as torchrun's."""
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RendezvousConfig:
    """One launcher's place among those of several nodes."""

    num_nodes: int
    node_rank: int
    """Number of this node, from 0."""
    host: str
    """Node 0's name or address."""
    port: int = DEFAULT_PORT
    interface: str | None = None
    """Network interface of the ranks; None: the one of the route to node 0."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Longest wait for the other nodes."""


def listening_address(config: RendezvousConfig) -> str:
    """Return node 0's own address, as the others call it. Raises MusterError where this machine doesn't have it."""
    address = resolve(config.host)
    own = ", ".join(str(one) for one in interfaces() if not is_loopback(one.address)) or "none"
    if local_interface(address) is None:
        named = "" if address == config.host else f", which is {address},"
        raise MusterError(
            f"node 0 has to be the machine of --rendezvous {config.host}{named} but this one's addresses are {own}:"
            " start node 0 there, or give an address of this machine to all nodes"
        )
    if is_loopback(address) and not is_loopback(config.host) and config.host != "localhost":
        raise MusterError(
            f"--rendezvous {config.host} is {address} here, which no other machine can reach: give this machine's"
            f" address ({own}) to all nodes, or correct /etc/hosts"
        )
    return address


def data_interface(config: RendezvousConfig, address: str) -> Interface:
    """Return the interface where this node's ranks meet the others': the one asked for, or that of the route to node 0.

    Raises ConfigError for an interface that is not there, MusterError where there is no route.
    """
    if config.interface is not None:
        return named_interface(config.interface, "--interface")
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named_interface(name, "GLOO_SOCKET_IFNAME")
    try:
        return route_interface(address)
    except OSError as error:
        there = ", ".join(str(one) for one in interfaces() if not is_loopback(one.address)) or "none"
        raise MusterError(
            f"there is no route from here to node 0 at {format_endpoint(address, config.port)} ({error.strerror}): this"
            f" machine's addresses are {there}; give one of node 0's that they reach as --rendezvous"
        ) from None


def rank_environment(config: RendezvousConfig, interface: Interface) -> dict[str, str]:
    """Return environment variables with the interface for a rank's gloo and NCCL.

    Variables that are set already stay, unless --interface says otherwise.
    """
    names: dict[str, str] = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface.name)
    if config.interface is not None:
        return names
    return {variable: name for variable, name in names.items() if not os.environ.get(variable)}
