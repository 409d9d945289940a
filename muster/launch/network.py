"""Addresses, names and interfaces of this machine, from the kernel; free of torch."""

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
"""Request RTM_GETADDR of rtnetlink(7) for all addresses."""
_RTM_NEWADDR, _NLMSG_DONE = 20, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
"""Address attributes; IFA_LOCAL is this machine's own on a point-to-point link."""
RESOLVE_TIMEOUT_S = 20.0
_ACCEPT_PAUSE_S = 0.1
_TEST_NET_ADDRESS = "192.0.2.1"
"""Address that no machine has (TEST-NET-1, RFC 5737): the route to it is the default route."""


@dataclass(frozen=True)
class Interface:
    """Interface of this machine with one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.address} on {self.name}"


def interfaces() -> list[Interface]:
    """Return all addresses of this machine, IPv4 first, without link-local ones (fe80::)."""
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
    """Return the address of a host. Raises MusterError when its name has none, or no answer comes in time."""
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
    """Return whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"


def local_interface(address: str) -> Interface | None:
    """Return this machine's interface with an address; None without one."""
    return next((one for one in interfaces() if one.address == address), None) or (
        Interface("lo", address) if is_loopback(address) else None
    )


def route_interface(address: str) -> Interface:
    """Return the interface of the route to an address. Raises OSError where there is no route."""
    with socket.socket(address_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # nothing is sent
        own = probe.getsockname()[0]
    found = local_interface(own)
    if found is None:
        raise OSError(None, f"no interface has the address {own}")
    return found


def local_address_for(peer: str) -> str:
    """Return the address at which machines that reach `peer`, a name or address of the job, reach this one.

    It is never a loopback address unless `peer` is one or this machine has no other. GLOO_SOCKET_IFNAME, the network
    that the training uses, takes precedence. Raises OSError or MusterError.
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
    """Return the interface with a name; `origin` says where the name comes from.

    Raises ConfigError where no such interface has an address.
    """
    known = interfaces()
    if found := next((one for one in known if one.name == name), None):
        return found
    there = ", ".join(map(str, known))
    raise ConfigError(
        f"{origin} {name}: there is no such interface with an address here, only {there}: choose one of them"
    )


def address_family(address: str) -> socket.AddressFamily:
    """Return the address family, IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def format_endpoint(address: str, port: int) -> str:
    """Return `10.0.0.1:29400` or `[fd00::1]:29400`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class ConnectionAcceptor:
    """Accepts connections until `close`, and runs `handler` on each in a thread of its own."""

    def __init__(self, listener: socket.socket, handler: Callable[[socket.socket], None], name: str) -> None:
        self._listener, self._serve, self._name = listener, handler, name
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
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


def listen_at(host: str, port: int, usual_port: int) -> socket.socket:
    """Listen for connections to an address of this machine. Raises ConfigError where that can't be done."""
    listener = socket.socket(address_family(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"could not listen at {format_endpoint(host, port)} ({error.strerror}): expected an address of this machine"
            f" and a free port, as 0.0.0.0:{usual_port}"
        ) from None
    listener.listen()
    return listener
