"""Measured bandwidth between peers, and the order of the ring that follows from it."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from muster.launch.peers import bandwidth, links
from muster.launch.peers.bandwidth import LinkMeasurement, without_noise
from muster.launch.peers.channel import Channel
from muster.launch.peers.links import PeerListener
from muster.launch.peers.membership import choose_ring
from muster.launch.peers.settings import Settings
from tests.test_peer_membership import IN, NOW, SETTINGS, group
from tests.test_peers import SECRET, Group, wait_for
from tests.toy_peers import Proxy, ToyState

Rates = dict[tuple[str, str], float]
NOTHING: Counter[frozenset[str]] = Counter()


def slowest(rates: Mapping[tuple[str, str], float], ring: tuple[str, ...]) -> float:
    return min(without_noise(rates[link]) for link in zip(ring, [*ring[1:], ring[0]], strict=True))


def random_rates(names: str, random: Random) -> Rates:
    return {(one, other): 10 ** random.uniform(6, 8) for one in names for other in names if one != other}


def misses(rates: Rates, given: Rates, names: str) -> bool:
    """Whether the ring by the rates that were given has a slower link than the best one."""
    best = max(slowest(rates, (names[0], *rest)) for rest in permutations(names[1:]))
    return slowest(rates, choose_ring(names, NOTHING, 1, given)) < best * (1 - 1e-9)


def test_the_ring_is_the_one_whose_slowest_measured_link_is_the_fastest() -> None:
    random = Random(0)
    every = [(random_rates(names, random), names) for names in ("abc", "abcd", "abcdef") for _ in range(5)]
    assert not any(misses(rates, rates, names) for rates, names in every)
    # a seeded bug: each link's rate is taken for that of the other direction
    assert any(
        misses(rates, {(other, one): rate for (one, other), rate in rates.items()}, names) for rates, names in every
    )


def test_failed_links_are_avoided_before_slow_ones_and_unknown_ones_are_usual() -> None:
    rates = random_rates("abcd", Random(1)) | {("a", "b"): 1.0, ("b", "a"): 1.0}
    ring = choose_ring("abcd", NOTHING, 1, rates)
    assert {*"ab"} not in [{*link} for link in zip(ring, [*ring[1:], ring[0]], strict=True)]
    fast = choose_ring("abc", NOTHING, 1, {("a", "c"): 9e6, ("c", "b"): 9e6, ("b", "a"): 9e6, ("a", "b"): 1e6})
    assert fast == ("a", "c", "b")
    failed = Counter({frozenset("cd"): 1})
    ring = choose_ring("abcd", failed, 1, dict.fromkeys(rates, 1e6) | {("c", "d"): 1e9, ("d", "c"): 1e9})
    assert {*"cd"} not in [{*link} for link in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert choose_ring("abc", NOTHING, 1, dict.fromkeys(rates, 0.0)) == ("a", "b", "c")


def measured_links(settings: Settings, round_: int, rates: dict[str, tuple[tuple[str, float, int], ...]]) -> list[str]:
    """The links that a coordinator has measured in a round, one after another."""
    state = replace(IN, phase="training", round=round_)
    members = group(settings)
    for name in "abc":
        members.update(name, replace(state, rates=rates.get(name, ())), NOW)
    found: list[str] = []
    while orders := members.decide(NOW):
        ((name, order),) = orders.items()
        assert order["do"] == "measure"
        found.append(name + order["target"])
        others = tuple(one for one in members.peers[name].rates if one[0] != order["target"])
        entry = order["target"], 1e6 * len(found), order["round"]
        members.update(name, replace(members.peers[name], rates=(*others, entry)), NOW)
    rates |= {name: state.rates for name, state in members.peers.items()}
    return found


def test_each_link_is_measured_one_at_a_time_and_again_after_so_many_rounds() -> None:
    rates: dict[str, tuple[tuple[str, float, int], ...]] = {}
    settings = replace(SETTINGS, measure_every=3)
    assert measured_links(settings, 4, rates) == ["ab", "ac", "ba", "bc", "ca", "cb"]
    assert measured_links(settings, 6, rates) == []
    assert len(measured_links(settings, 7, rates)) == 6
    assert measured_links(replace(SETTINGS, measure_every=0), 4, {}) == []
    arrived = group(settings, a=IN, b=replace(IN, phase="training"), c=replace(IN, phase="training"))
    assert arrived.decide(NOW) == {}


def test_the_coordinator_orders_the_ring_by_what_peers_say() -> None:
    fast = {"a": "c", "c": "b", "b": "a"}
    members = group(SETTINGS)
    for name in fast:
        rates = tuple((one, 9e6 if fast[name] == one else 1e6, 4) for one in fast if one != name)
        members.update(name, replace(IN, rates=rates), NOW)
    assert members.decide(NOW)["a"]["ring"] == ("a", "c", "b")


# ----------------------------------------------------------------------------------------------------------------------
# Over sockets


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    made = PeerListener(socket.create_server(("127.0.0.1", 0)), SECRET, bytes, lambda line: None)
    yield made
    made.close()


def address_of(listener: PeerListener) -> tuple[str, int]:
    return listener._acceptor._listener.getsockname()


def test_a_slow_link_is_measured_as_slow_and_a_dead_one_as_nothing(listener: PeerListener) -> None:
    address = address_of(listener)
    direct = LinkMeasurement("b").run(address, SECRET, 2)
    proxy = Proxy(address[1])
    proxy.delay_s = 0.01  # 512 bytes each
    slow = LinkMeasurement("b").run(("127.0.0.1", proxy.port), SECRET, 2)
    proxy.cut()
    assert direct
    assert slow
    assert direct > 5 * slow
    assert LinkMeasurement("b").run(("127.0.0.1", proxy.port), SECRET, 2) == 0
    assert LinkMeasurement("b").run(address, bytes(32), 1) == 0
    proxy.close()


@pytest.fixture
def measuring_group() -> Iterator[Group]:
    made = Group()
    made.coordinator.membership.settings = replace(made.coordinator.settings, measure_every=1)
    yield made
    made.close()


def meet_all(group: Group, states: list[ToyState]) -> None:
    for state in states:
        state.train()
    with ThreadPoolExecutor(len(states)) as threads:
        list(threads.map(lambda client: client.meet(), group.clients))


def test_peers_measure_their_links_while_they_train(measuring_group: Group) -> None:
    states = [ToyState(name) for name in "abc"]
    for state, count in zip(states, (1, 2, 5), strict=True):
        measuring_group.add(state, connections=count)
    measuring_group.join_all()
    membership = measuring_group.coordinator.membership
    assert wait_for(lambda: len(membership.rates()) == 6), membership.peers
    assert all(rate > 0 for rate in membership.rates().values())
    expected = choose_ring("abc", NOTHING, 3, membership.rates())
    meet_all(measuring_group, states)
    assert states[0].names == expected
    assert len({state.digest() for state in states}) == 1


def test_a_measurement_that_is_broken_off_says_nothing(listener: PeerListener, monkeypatch: pytest.MonkeyPatch) -> None:
    is_measuring = threading.Event()

    def say_nothing(channel: Channel, count: int) -> None:
        is_measuring.set()
        while True:
            channel.receive()

    monkeypatch.setattr(links, "answer_measurement", say_nothing)
    monkeypatch.setattr(bandwidth, "_TIMEOUT_S", 60.0)
    measurement = LinkMeasurement("b")
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(measurement.run, address_of(listener), SECRET, 2)
        assert is_measuring.wait(30)
        measurement.abort()
        assert running.result(30) is None


def test_measurements_that_fail_or_never_end_stop_no_round(
    measuring_group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_measuring = threading.Event()

    def say_nothing(channel: Channel, count: int) -> None:
        is_measuring.set()
        while True:
            channel.receive()

    def fail(channel: Channel, count: int) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(links, "answer_measurement", say_nothing)
    states = [ToyState(name) for name in "ab"]
    for state in states:
        measuring_group.add(state)
    measuring_group.join_all()
    assert is_measuring.wait(30)
    meet_all(measuring_group, states)
    assert {state.round for state in states} == {1}
    monkeypatch.setattr(links, "answer_measurement", fail)
    membership = measuring_group.coordinator.membership
    assert wait_for(lambda: membership.rates() == {("a", "b"): 0.0, ("b", "a"): 0.0}), membership.peers
    meet_all(measuring_group, states)
    assert {state.round for state in states} == {2}
    assert len({state.digest() for state in states}) == 1
