"""Addresses, names and interfaces of this machine, as the kernel has them; free of torch."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from muster.spec.errors import ConfigError, MusterError

_RTM_GETADDR_REQUEST = struct.pack("=IHHIIBBBBI", 24, 22, 0x301, 1, 0, 0, 0, 0, 0, 0)
"""The request RTM_GETADDR of rtnetlink(7), for all addresses."""
_RTM_NEWADDR, _NLMSG_DONE = 20, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
"""IFA_ADDRESS and IFA_LOCAL: the latter is this machine's own on a link between two."""
RESOLVE_TIMEOUT_S = 20.0
_ACCEPT_PAUSE_S = 0.1
_TEST_NET_ADDRESS = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the route to it is the default one."""


@dataclass(frozen=True)
class Interface:
    """An interface of this machine and one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} on {self.name}"


def interfaces() -> list[Interface]:
    """All addresses of this machine, IPv4 first; those of a link alone (fe80::) are left out."""
    names, found = dict(socket.if_nameindex()), []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(RESOLVE_TIMEOUT_S)
        kernel.send(_RTM_GETADDR_REQUEST)
        while True:
            data = kernel.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _NLMSG_DONE:
                    return sorted(found, key=lambda interface: ":" in interface.address)
                if kind == _RTM_NEWADDR:
                    family, _, _, _, index = struct.unpack_from("=BBBBI", data, 16)
                    address = _address_in(data[24:length], family)
                    if address and not address.startswith("fe80:") and index in names:
                        found.append(Interface(names[index], address))
                data = data[(length + 3) & ~3 :]


def _address_in(attributes: bytes, family: int) -> str:
    values: dict[int, bytes] = {}
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        values[kind] = attributes[4:length]
        attributes = attributes[(length + 3) & ~3 :]
    packed = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
    return socket.inet_ntop(family, packed) if packed else ""


def resolve(host: str, timeout_s: float = RESOLVE_TIMEOUT_S) -> str:
    """The address of a host. Raises MusterError when its name has none, or nobody says so in time."""
    answer: list[str] = []
    problem = [f"no answer within {timeout_s:g} s"]

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.append(str(min(rows, key=lambda row: row[0] != socket.AF_INET)[4][0]))
        except (OSError, UnicodeError) as error:
            problem[0] = getattr(error, "strerror", None) or str(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not answer:
        raise MusterError(f"the name {host} has no address here ({problem[0]}): give the first node's address")
    return answer[0]


def is_loopback(address: str) -> bool:
    """Whether it stands for the machine itself."""
    return address.startswith("127.") or address == "::1"


def local_interface(address: str) -> Interface | None:
    """The interface that has this address; None where none of this machine has."""
    return next((one for one in interfaces() if one.address == address), None) or (
        Interface("lo", address) if is_loopback(address) else None
    )


def route_interface(address: str) -> Interface:
    """The interface that the route to an address goes through. Raises OSError where there is no route."""
    with socket.socket(address_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # nothing is sent
        own = probe.getsockname()[0]
    found = local_interface(own)
    if found is None:
        raise OSError(None, f"no interface has the address {own}")
    return found


def local_address_for(peer: str) -> str:
    """The address at which those who reach `towards`, a name or address of one of the job's machines, find this one:
    never one that stands for a machine itself, unless `towards` or this machine has no other.

    Where GLOO_SOCKET_IFNAME says which network the training takes, that one's. Raises OSError, MusterError.
    """
    if peer == "localhost" or is_loopback(peer):
        return "127.0.0.1"
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named_interface(names.split(",")[0], "GLOO_SOCKET_IFNAME").address
    for place in (
        resolve(peer),
        _TEST_NET_ADDRESS,
    ):  # a machine's own name may be 127.0.1.1 to itself, as Debian has it
        with contextlib.suppress(OSError):
            found = route_interface(place).address
            if not is_loopback(found):
                return found
    return next((one.address for one in interfaces() if not is_loopback(one.address)), "127.0.0.1")


def named_interface(name: str, origin: str) -> Interface:
    """The interface of that name; `origin` says who named it. Raises ConfigError where there is none with an
    address."""
    known = interfaces()
    if found := next((one for one in known if one.name == name), None):
        return found
    there = ", ".join(map(str, known))
    raise ConfigError(f"{origin} {name}: there is no such interface with an address here, only {there}: choose of them")


def address_family(address: str) -> socket.AddressFamily:
    """IPv4's or IPv6's."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def format_endpoint(address: str, port: int) -> str:
    """`10.0.0.1:29400`, `[fd00::1]:29400`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class ConnectionAcceptor:
    """Gives each connection that comes to `serve`, in a thread of its own, until `close`."""

    def __init__(self, listener: socket.socket, handler: Callable[[socket.socket], None], name: str) -> None:
        self._listener, self._serve, self._name = listener, handler, name
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Takes no further connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # one that is gone again (ECONNABORTED), or no file is left to open for now (EMFILE)
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True).start()
