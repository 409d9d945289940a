"""Decisions of the coordinator: a function of what the peers say of themselves, so that one that was restarted decides
as the one before would have.

A peer says in each message all that it is: the round and the hash of its shared state, and its phase:

idle: it has a state, and hasn't trained the round; training; arrived: it has trained the round; fetching a state from
another peer; exchanging changes in a generation; prepared: it has the mean of all changes, and hasn't applied it.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal, get_args

from muster.launch.peers.bandwidth import without_noise
from muster.launch.peers.channel import Message
from muster.launch.peers.settings import Settings
from muster.layout.ring_order import ring_order

Phase = Literal["idle", "training", "arrived", "fetching", "exchanging", "prepared"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_KEPT_GENERATIONS = 64
MAX_LINK_FAILURES = 2
"""Failures of a link in a round after which one of its ends is left out."""
MAX_PEER_FAILURES = 3
"""Failures of a peer's links to different others in a round after which it is left out."""


@dataclass(frozen=True)
class PeerState:
    """A peer as it describes itself."""

    phase: Phase
    round: int
    digest: str
    """Hash of the shared state."""
    generation: int = 0
    """Exchange under way."""
    result: str = ""
    """prepared: hash of the mean."""
    ring: tuple[str, ...] = ()
    """Peers of the exchange under way."""
    failed: int = 0
    """Last generation whose exchange didn't end here."""
    suspect: str = ""
    """Peer at the other end of the link that failed then, or from which no state came."""
    committed: int = 0
    """Last generation whose result was applied."""
    members: tuple[str, ...] = ()
    """Peers that began the present round together."""
    rates: tuple[tuple[str, float, int], ...] = ()
    """Peers that this one has measured its links to, with their bytes a second and the round of the measurement."""

    @classmethod
    def from_message(cls, message: Message) -> "PeerState":
        """Read a state. Raises KeyError, TypeError or ValueError where it is none."""
        fields = {key: message[key] for key in cls.__dataclass_fields__}
        for key in ("ring", "members"):
            fields[key] = tuple(map(str, fields[key]))
        for key in ("round", "generation", "failed", "committed"):
            fields[key] = int(fields[key])
        fields["rates"] = tuple((str(name), float(rate), int(round_)) for name, rate, round_ in fields["rates"])
        if fields["phase"] not in PHASES:
            raise ValueError(fields["phase"])
        return cls(**fields)

    @property
    def shared(self) -> tuple[int, str]:
        """Round and hash of the shared state."""
        return self.round, self.digest


@dataclass
class Exchange:
    """Exchange under way."""

    generation: int
    ring: tuple[str, ...]
    order: Message = field(default_factory=dict)
    """Order to begin it; empty where a former coordinator gave that."""
    broken: str = ""
    """Reason for which it can't end."""


@dataclass
class Membership:
    """Knowledge of the peers, and the orders that follow from it. Times are those of one monotonic clock."""

    settings: Settings
    started_s: float
    first_generation: int = 1
    """Lower bound of generations; greater than those of any coordinator before."""
    peers: dict[str, PeerState] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    lost_s: dict[str, float] = field(default_factory=dict)
    """Peers whose connections were lost, and when."""
    exchange: Exchange | None = None
    committed: list[int] = field(default_factory=list)
    """Last generations that all peers of the exchange had prepared."""
    bad_links: Counter[frozenset[str]] = field(default_factory=Counter)
    """Failures of links between pairs of peers, at most one in an exchange."""
    events: list[str] = field(default_factory=list)
    """Sentences for the log since they were last read."""
    _arrived_s: float | None = None
    _generation: int = 0
    _aborted: int = 0
    """Last generation that was aborted."""
    _blamed: int = 0
    """Last generation of which it is known which link failed first."""
    _last_round: int = 0
    """Last round of which a peer had the state."""
    _last_round_s: float = 0.0
    """Time at which one was last there."""
    _aborts: int = 0
    """Exchanges that were aborted since one ended."""
    _next_s: float = 0.0
    """Time before which no further exchange begins: twice as long after each that was aborted."""
    _fetches: dict[str, tuple[PeerState, Message]] = field(default_factory=dict)
    """Last order of each peer that fetches a state, with its own state then."""
    _begun: Message = field(default_factory=dict)
    """Last order to begin a round."""
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    # ------------------------------------------------------------------------------------------------------------------
    # What happens

    def update(self, name: str, state: PeerState, now_s: float) -> None:
        """Take note of what a peer says of itself."""
        before = self.peers.get(name)
        self.peers[name], self.heard_s[name] = state, now_s
        self.lost_s.pop(name, None)
        if state.round > self._last_round:
            self._last_round, self._last_round_s = state.round, now_s
        self._generation = max(self._generation, state.generation, state.failed, state.committed)
        if before is not None and state.failed > max(before.failed, self._blamed) and state.suspect:
            self._blamed = state.failed  # the other peers' links fail only because this one ends the exchange
            self.bad_links[frozenset((name, state.suspect))] += 1

    def lose(self, name: str, now_s: float, has_left: bool) -> None:
        """Take note that a peer's connection is gone; `has_left`: as it had announced."""
        state = self.peers.pop(name, None)
        if state is None:
            return
        self.heard_s.pop(name, None)
        if not has_left:
            self.lost_s[name] = now_s
        exchange = self.exchange
        if exchange and name in exchange.ring and not _is_prepared(state, exchange.generation):
            exchange.broken = exchange.broken or f"{name} is gone"

    # ------------------------------------------------------------------------------------------------------------------
    # What follows

    def decide(self, now_s: float) -> dict[str, Message]:
        """Return the order for each peer that has one; the same again until the peer's state changes."""
        self.lost_s = {name: at for name, at in self.lost_s.items() if now_s - at < self.settings.reconnect_s}
        if self._waits_for_former_peers(now_s):
            return {}
        self._adopt_exchange()
        if self.exchange is not None and not self._end_exchange(self.exchange, now_s):
            return self._orders_under_way(self.exchange)
        return self._orders_after_an_exchange(0) or self._begin(now_s)

    def _orders_under_way(self, exchange: Exchange) -> dict[str, Message]:
        """Return the order for those peers of an exchange that haven't begun it. One that was too slow to hear of the
        end of an exchange before is still in that one, where the others would wait for it until their links fail."""
        orders = self._orders_after_an_exchange(exchange.generation)
        for name in exchange.ring if exchange.order else ():
            state = self.peers.get(name)
            if state is not None and state.phase in ("idle", "arrived"):
                orders[name] = exchange.order
        return orders

    def _orders_after_an_exchange(self, under_way: int) -> dict[str, Message]:
        """Return the order for each peer in an exchange that has ended, unlike generation `under_way`."""
        orders: dict[str, Message] = {}
        committed = {*self.committed, *(state.committed for state in self.peers.values())}
        for name, state in self.peers.items():
            if state.generation == under_way or state.phase not in ("exchanging", "prepared"):
                continue
            is_applied = state.phase == "prepared" and state.generation in committed
            orders[name] = {"do": "commit" if is_applied else "abort", "generation": state.generation}
        return orders

    def _waits_for_former_peers(self, now_s: float) -> bool:
        """Return True after a start, until the peers of the round under way are back or had time to come."""
        if self._generation_is_own:
            return False
        known = {name for state in self.peers.values() for name in (*state.members, *state.ring)}
        has_all = bool(known) and known <= self.peers.keys()
        patience_s = self.settings.silence_s if known else self.settings.reconnect_s
        return not has_all and now_s - self.started_s < patience_s

    @property
    def _generation_is_own(self) -> bool:
        return self.exchange is not None or bool(self.committed)

    def _adopt_exchange(self) -> None:
        """Go on with an exchange that a former coordinator has begun."""
        if self.exchange is None:
            under_way = [state for state in self.peers.values() if state.phase in ("exchanging", "prepared")]
            known = {*self.committed, *(state.committed for state in self.peers.values())}
            under_way = [state for state in under_way if state.generation not in known]
            last = max(under_way, key=lambda state: state.generation, default=None)
            if last is not None and last.generation > self._aborted:
                self.exchange = Exchange(last.generation, last.ring)
                taking_part = {name for name, state in self.peers.items() if state.generation == last.generation}
                if not {*last.ring} <= taking_part:
                    self.exchange.broken = "not all of its peers are in it"

    def _end_exchange(self, exchange: Exchange, now_s: float) -> bool:
        """End the exchange under way where it can: by its result where all of its peers that are left have it, else
        without where one has failed. Returns False while it goes on.

        A peer has applied a result only after all peers that were left then had it. So where one hasn't, none has
        applied it, and all still have their changes.
        """
        generation = exchange.generation
        present = {name: self.peers[name] for name in exchange.ring if name in self.peers}
        results = {state.result for state in present.values() if _is_prepared(state, generation)}
        applied = any(state.committed == generation for state in self.peers.values())
        if applied or (present and len(results) == 1 and all(_is_prepared(s, generation) for s in present.values())):
            self.committed = [*self.committed, generation][-_KEPT_GENERATIONS:]
            self._aborts = 0
            self.bad_links -= Counter(self.bad_links.keys())  # each is tried again in the next round
            self.exchange = None
            return True
        failed = next((name for name, state in present.items() if state.failed >= generation), None)
        if failed is not None:
            link = self.peers[failed].suspect
            exchange.broken = exchange.broken or f"{failed} failed" + (f" on its link with {link}" if link else "")
        elif len(results) > 1:
            exchange.broken = exchange.broken or "its peers have different results"
        elif not present:
            exchange.broken = "all of its peers are gone"
        if not exchange.broken:
            return False
        self.events.append(f"exchange {generation} was aborted, since {exchange.broken}; nothing is lost by it")
        self._aborted, self.exchange = generation, None
        self._next_s = now_s + min(self.settings.reconnect_s, self.settings.beat_s / 8 * 2**self._aborts)
        self._aborts = min(self._aborts + 1, 10)
        return True

    def _begin(self, now_s: float) -> dict[str, Message]:
        """Let peers without the shared state fetch it, and begin what the others are ready for. Peers with an earlier
        state than there was wait for those that had it, who may come back, before they go on from theirs."""
        if not self.peers:
            return {}
        round_, digest = self.shared_state()
        if round_ == self._last_round:
            self._last_round_s = now_s
        elif now_s - self._last_round_s < self.settings.silence_s:
            return {}
        else:
            self.events.append(
                f"rounds {round_ + 1} to {self._last_round} are lost with the peers that had their state"
            )
            self._last_round = round_
        current = {name: state for name, state in self.peers.items() if state.shared == (round_, digest)}
        orders = {
            name: self._fetch_order(name, state, current)
            for name, state in self.peers.items()
            if name not in current and state.phase in ("idle", "arrived")
        }
        idle, training, arrived = (
            sorted(name for name, state in current.items() if state.phase == phase)
            for phase in ("idle", "training", "arrived")
        )
        self._arrived_s = None if not arrived else now_s if self._arrived_s is None else self._arrived_s
        is_late = self._arrived_s is not None and now_s - self._arrived_s > self.settings.straggler_s
        ready = sorted([*idle, *arrived])
        is_waiting = now_s < self._next_s or bool(self.lost_s) or (training and not is_late)
        if is_waiting or len(ready) < max(1, self.settings.min_peers):
            order = {"do": "wait", "present": len(self.peers), "needed": self.settings.min_peers}
            orders |= dict.fromkeys(ready, order) if len(self.peers) < self.settings.min_peers else {}
            return orders | (self._measure_order(training) if not arrived else {})
        self._arrived_s = None
        if not arrived:
            order = {"do": "begin", "round": round_, "members": ready}
            if order != self._begun:
                self.events.append(f"round {round_ + 1} begins with {_names(ready)}")
            self._begun = order
            return orders | dict.fromkeys(ready, order)
        self._generation = max(self._generation + 1, self.first_generation)
        ring = choose_ring([*arrived, *idle], self.bad_links, self.settings.min_peers, self.rates())
        weights = {name: int(name in arrived) for name in ring}
        late = f", without {_names(training)} (late)" if training else ""
        cut = sorted({*ready} - {*ring})
        orders |= dict.fromkeys(cut, {"do": "leave_out", "round": round_})
        late += f", without {_names(cut)} (links have failed)" if cut else ""
        changes = _names(name for name in ring if weights[name])
        joins = _names(name for name in ring if not weights[name])
        joins = f", {joins} joining" if joins else ""
        self.events.append(f"round {round_ + 1} ends with an exchange between {changes}{joins}{late}")
        order = {"do": "exchange", "generation": self._generation, "round": round_, "ring": ring, "weights": weights}
        order["trained"] = max(1, *(len(current[name].members) for name in arrived))
        self.exchange = Exchange(self._generation, ring, order)
        return orders | dict.fromkeys(ring, order)

    def _measure_order(self, training: Sequence[str]) -> dict[str, Message]:
        """Return the order to measure a link between two peers that train: the first that has not been measured for
        long. One at a time, so that no two share a line; the next follows once the peer has said what it found."""
        every = self.settings.measure_every
        for name in training if every else ():
            state = self.peers[name]
            measured = {other: round_ for other, _, round_ in state.rates}
            for other in training:
                if other != name and state.round >= measured.get(other, -every) + every:
                    return {name: {"do": "measure", "target": other, "round": state.round}}
        return {}

    def rates(self) -> dict[tuple[str, str], float]:
        """Return the measured bytes a second from each peer to each other."""
        return {(name, other): rate for name, state in self.peers.items() for other, rate, _ in state.rates}

    def shared_state(self) -> tuple[int, str]:
        """Return the round and the hash of the state that is the run's: the last round, and of different hashes the
        one that most peers have."""
        votes = Counter(state.shared for state in self.peers.values())
        return max(votes, key=lambda shared: (shared[0], votes[shared], shared[1]), default=(0, ""))

    def _fetch_order(self, name: str, state: PeerState, current: dict[str, PeerState]) -> Message:
        before = self._fetches.get(name)
        if before is not None and before[0] == state and before[1]["source"] in current:
            return before[1]
        sources = [one for one in sorted(current) if one != state.suspect] or sorted(current)
        round_, digest = self.shared_state()
        if state.round == round_:
            self.events.append(f"{name} has another state of round {round_} than most: it takes theirs")
        order = {"do": "fetch", "round": round_, "digest": digest, "source": self._random.choice(sources)}
        self._fetches[name] = state, order
        return order


def choose_ring(
    names: Sequence[str],
    bad_links: Counter[frozenset[str]],
    min_peers: int,
    rates: Mapping[tuple[str, str], float] | None = None,
) -> tuple[str, ...]:
    """Return the ring of peers that exchange: all, but for those whose links have failed too often in this round.

    A peer is left out whose links to several others have failed, and where no ring avoids a link that has failed twice,
    the end of it whose links have failed most; of equals the later in `names`. Of the rings with the fewest failures it
    is the one whose slowest link is the fastest by the measured `rates` in bytes a second; a link that was not measured
    counts as the median of the others. Raises ValueError without names.
    """
    known = {link: without_noise(rate) for link, rate in (rates or {}).items() if {*link} <= {*names}}
    usual = median_low(known.values()) if known else 0.0

    def value(one: str, other: str) -> float:
        failures = bad_links[frozenset((one, other))]
        return -failures if failures else known.get((one, other), usual)

    left = list(names)
    while True:
        order = [left[n] for n in ring_order([[value(one, other) for other in left] for one in left])]
        failed = {link: count for link, count in bad_links.items() if count and link <= {*left}}
        failures = Counter({name: sum(count for link, count in failed.items() if name in link) for name in left})
        links = map(frozenset, zip(order, [*order[1:], *order[:1]], strict=True))
        suspects = {name for link in links if failed.get(link, 0) >= MAX_LINK_FAILURES for name in link}
        suspects |= {
            name for name in left if failures[name] >= MAX_PEER_FAILURES and sum(name in link for link in failed) > 1
        }
        if not suspects or len(left) <= min_peers:
            return tuple(order)
        left.remove(max(suspects, key=lambda name: (failures[name], names.index(name))))


def _is_prepared(state: PeerState, generation: int) -> bool:
    return state.phase == "prepared" and state.generation == generation


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
