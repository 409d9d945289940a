"""The coordinator: it knows which peers are there, and tells them when a round begins, when and in which ring they
exchange, and when they apply the result. It has no state that the peers don't have, so it may be restarted."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from muster.launch.network import ConnectionAcceptor
from muster.launch.peers.channel import Channel, Message, RefusedError, accept, refusal
from muster.launch.peers.membership import Membership, PeerState
from muster.launch.peers.settings import Settings
from muster.spec.units import pluralize

_NAMED_DIFFERENCES = 6
"""Most keys that are named where a run is refused."""


@dataclass
class _Connected:
    """Connection of a peer."""

    channel: Channel
    address: tuple[str, int]
    """Address at which it listens for other peers."""
    told: tuple[PeerState, Message] | None = None
    """Last order that it got, with its state at that time."""


class Coordinator:
    """Server of the peers of one run, in threads of its own, until `close`."""

    def __init__(
        self, listener: socket.socket, secret: bytes, settings: Settings, log: Callable[[str], None] = print
    ) -> None:
        self.settings = settings
        self._secret, self._log = secret, log
        # Peers name generations; milliseconds keep those of a restarted coordinator above the ones before.
        self.membership = Membership(settings, time.monotonic(), int(time.time() * 1000))
        self._connected: dict[str, _Connected] = {}
        self._run_settings: dict[str, object] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._acceptor = ConnectionAcceptor(listener, self._serve, "coordinator")
        threading.Thread(target=self._decide, name="coordinator", daemon=True).start()

    def peers(self) -> tuple[str, ...]:
        """Return the names of the peers that are there."""
        with self._changed:
            return tuple(sorted(self._connected))

    def close(self) -> None:
        """Accept no peers, and leave those that are there."""
        self._acceptor.close()
        with self._changed:
            self._closed = True
            channels = [one.channel for one in self._connected.values()]
            self._changed.notify()
        for channel in channels:
            channel.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Peers

    def _serve(self, connection: socket.socket) -> None:
        """Let a caller in, and listen to it until it is gone."""
        host, name, has_left, channel = "", "", False, None
        try:
            host = connection.getpeername()[0]
            channel = accept(connection, self._secret)
            channel.set_timeout(self.settings.silence_s)
            hello = channel.receive_message()
            if "host" in hello and "settings" not in hello:  # as peers of a swarm say
                raise refusal(channel, "it is a coordinator, which runs with outer.coordinator join")
            name = self._admit(channel, hello)
            while not has_left:
                message = channel.receive_message()
                if not (has_left := message.get("phase") == "left"):
                    self._update(name, PeerState.from_message(message))
        except RefusedError as error:
            self._log(f"refused a connection from {host}: {error}")
        except (KeyError, TypeError, ValueError):
            self._log(f"refused a connection from {host}: it sends what no peer sends")
        except OSError:
            connection.close()
        if channel is not None:
            self._leave(name, channel, has_left)
            channel.close()

    def _admit(self, channel: Channel, hello: Message) -> str:
        """Take up a peer; returns its name. Raises RefusedError where it belongs to another run."""
        name, state = str(hello["name"]), PeerState.from_message(hello["state"])
        address = str(hello["host"]), int(hello["port"])
        with self._changed:
            if not self._connected and not self.membership.lost_s:
                self._begin_run(dict(hello["settings"]))
            if different := _differences(self._run_settings, dict(hello["settings"])):
                raise refusal(channel, f"all peers need the same configuration and data; of {name}, {different}")
            if (former := self._connected.get(name)) is not None:
                self.membership.lose(name, time.monotonic(), has_left=False)
            self._connected[name] = _Connected(channel, address)
            if name not in self.membership.peers:
                count, least = len(self._connected), self.settings.min_peers
                of = f"of at least {least}" if count < least else "in all"
                self._log(f"{name} is there ({count} {of}), with the state of round {state.round}")
            settings = self.settings
            channel.send_message({"do": "welcome", "beat_s": settings.beat_s, "silence_s": settings.silence_s})
            self.membership.update(name, state, time.monotonic())
            self._changed.notify()
        if former is not None:
            former.channel.close()
        return name

    def _begin_run(self, run_settings: dict[str, object]) -> None:
        """Serve the run of the first peer that is there, and forget another one from before."""
        if self._run_settings and run_settings != self._run_settings:
            self._log("a peer of another run than the one before is there, and no other: this run is served now")
            self.membership = Membership(self.settings, time.monotonic(), int(time.time() * 1000))
        self._run_settings = run_settings

    def _update(self, name: str, state: PeerState) -> None:
        with self._changed:
            is_news = self.membership.peers.get(name) != state
            self.membership.update(name, state, time.monotonic())
            if is_news:
                self._changed.notify()

    def _leave(self, name: str, channel: Channel, has_left: bool) -> None:
        with self._changed:
            connected = self._connected.get(name)
            if connected is None or connected.channel is not channel:
                return
            del self._connected[name]
            self._log(f"{name} has left" if has_left else f"{name} is lost")
            self.membership.lose(name, time.monotonic(), has_left)
            self._changed.notify()

    # ------------------------------------------------------------------------------------------------------------------
    # Orders

    def _decide(self) -> None:
        """Send orders whenever something has changed, and signs of life."""
        next_beat_s = 0.0
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                orders = self.membership.decide(now_s)
                for sentence in self.membership.events:
                    self._log(sentence)
                self.membership.events.clear()
                is_due = now_s >= next_beat_s
                for name, one in list(self._connected.items()):
                    order = self._completed(orders[name]) if name in orders else None
                    self._tell(one, self.membership.peers[name], order, is_due)
                if is_due:
                    next_beat_s = now_s + self.settings.beat_s
                self._changed.wait(self.settings.beat_s / 4)

    def _tell(self, one: _Connected, state: PeerState, order: Message | None, is_due: bool) -> None:
        try:
            if order is not None and one.told != (state, order):
                one.told = state, order
                one.channel.send_message(order)
            elif is_due:
                one.channel.send_message({"do": "beat"})
        except OSError:
            one.channel.close()  # the thread that listens to it notices

    def _completed(self, order: Message) -> Message:
        """Add the addresses of the peers that an order names."""
        one = order.get("source", order.get("target"))  # to fetch from, or to measure the link to
        names = order["ring"] if order["do"] == "exchange" else [] if one is None else [one]
        addresses = {name: self._connected[name].address for name in names if name in self._connected}
        return order | {"addresses": addresses} if names else order


def _differences(theirs: dict[str, object], own: dict[str, object]) -> str:
    """Return what the settings of a run differ in from those of the peers that are there; nothing if they are equal."""
    different = [name for name in sorted({*theirs, *own}) if theirs.get(name) != own.get(name)]
    named = [f"{name} is {own.get(name)} (of the others {theirs.get(name)})" for name in different[:_NAMED_DIFFERENCES]]
    more = len(different) - len(named)
    return "; ".join(named) + (f"; and {pluralize(more, 'more key')}" if more else "")
