"""Peers that come and go: transport, coordinator, shared state, and random events among processes."""

import socket
import stat
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from muster.cli.main import main
from muster.launch.peers.channel import Channel, Message, RefusedError, accept, connect, create_secret, load_secret
from muster.launch.peers.client import PeerClient, Stopped
from muster.launch.peers.coordinator import Coordinator
from muster.launch.peers.links import LinkError, Ring
from muster.launch.peers.membership import MAX_LINK_FAILURES
from muster.launch.peers.settings import Settings
from muster.launch.swarm.connections import PeerConnections
from muster.launch.swarm.peer import StageWorker, SwarmPeer
from muster.layout.island_bytes import BLOCKS, island_reduce_bytes
from muster.parallel.peer_ring import ring_mean
from muster.spec.errors import ConfigError
from tests.peer_churn import Churn
from tests.toy_peers import QUICK, ToyClient, ToyState, change_of, serial_mean

SECRET = bytes(range(32))


def channel_pair(secret: bytes = SECRET) -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        calling = thread.submit(connect, listener.getsockname(), secret)
        return accept(listener.accept()[0], SECRET), calling.result()


def ring_of(size: int, connections: int = 1) -> list[Ring]:
    """A ring within this process."""
    names = [str(n) for n in range(size)]
    rings = [Ring(7, 3, names, name) for name in names]
    for one, other in zip(rings, [*rings[1:], *rings[:1]], strict=True) if size > 1 else ():
        for number in range(connections):
            sender, receiver = channel_pair()
            one.attach("next", sender, number)
            other.attach("previous", receiver, number)
    return rings


def means_around(
    values: list[torch.Tensor], weights: list[int], compression: str = "none", connections: int = 1
) -> list[torch.Tensor]:
    rings = ring_of(len(values), connections)
    with ThreadPoolExecutor(len(values)) as threads:
        return list(threads.map(lambda x, ring: ring_mean(x, ring, weights, compression), values, rings))  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------------------
# Transport


def test_channels_carry_frames_and_refuse_changed_repeated_and_other_ones() -> None:
    one, other = channel_pair()
    one.send(b"changes", generation=5, round_=2)
    assert other.receive() == (b"changes", 5, 2)
    kept = one._sent
    one.send(b"again")
    assert other.receive().content == b"again"
    one._sent = kept  # as who repeats a frame
    one.send(b"again")
    with pytest.raises(RefusedError, match="wrong checksum"):
        other.receive()
    one, other = channel_pair()
    one._send_key = bytes(32)
    one.send(b"changes")
    with pytest.raises(RefusedError, match="wrong checksum"):
        other.receive()


def test_secrets_are_made_for_their_owner_alone_and_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.secret"
    secret = create_secret(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert create_secret(file) == load_secret(file) == secret
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others: chmod 600"):
        load_secret(file)
    file.chmod(0o600)
    file.write_text("open sesame")
    with pytest.raises(ConfigError, match="holds no secret"):
        load_secret(file)
    with pytest.raises(ConfigError, match="can't be read"):
        load_secret(tmp_path / "other")


@pytest.mark.parametrize(("size", "connections"), [(1, 1), (2, 1), (3, 1), (5, 1), (3, 2), (2, 5)])
def test_means_around_a_ring_are_those_of_one_process_to_the_bit(size: int, connections: int) -> None:
    values = [torch.randn(1001) * 10.0**n for n in range(size)]
    before = [x.clone() for x in values]
    weights = [1] * size if size < 3 else [1, 0, *[1] * (size - 2)]
    expected = serial_mean(values, weights)
    means = means_around(values, weights, connections=connections)
    assert all(torch.equal(mean, expected) for mean in means)
    assert all(map(torch.equal, before, values))


@pytest.mark.parametrize("compression", ["bf16", "int8", "int4"])
def test_compressed_means_are_the_same_everywhere_and_near(compression: str) -> None:
    values = [torch.randn(5000) for _ in range(4)]
    means = means_around(values, [1] * 4, compression)
    assert all(torch.equal(mean, means[0]) for mean in means)
    exact = torch.stack(values).mean(0)
    levels = {"bf16": 256, "int8": 127, "int4": 7}[compression]
    largest = torch.stack(values).abs().sum(0).max() / levels / 2
    assert (means[0] - exact).abs().max() <= largest * 4 / 4 + largest
    assert compression == "bf16" or (means[0] - exact).abs().max() > 0


@pytest.mark.parametrize("connections", [1, 4])
def test_peers_send_what_the_formula_says(connections: int) -> None:
    values, rings = [torch.randn(3 * BLOCKS["int8"])] * 3, ring_of(3, connections)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda x, ring: ring_mean(x, ring, [1] * 3, "int8"), values, rings))
    assert {ring.sent_bytes for ring in rings} == {island_reduce_bytes(values[0].numel(), 3, "int8")}


def test_an_aborted_exchange_ends_at_once_and_leaves_its_inputs() -> None:
    values, rings = [torch.randn(1000) for _ in range(3)], ring_of(3)
    before = [x.clone() for x in values]
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(ring_mean, values[n], rings[n], [1] * 3, "none") for n in range(2)]
        rings[2].abort()
        for one in running:
            with pytest.raises(LinkError):
                one.result(timeout=30)
    assert all(map(torch.equal, before, values))


def test_one_lost_connection_of_several_ends_the_exchange_and_leaves_its_inputs() -> None:
    values, rings = [torch.randn(1000) for _ in range(3)], ring_of(3, connections=3)
    before = [x.clone() for x in values]
    rings[1]._channels["next"][2].close()
    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(ring_mean, values[n], rings[n], [1] * 3, "none") for n in range(3)]:
            with pytest.raises(LinkError):
                one.result(timeout=30)
    assert all(map(torch.equal, before, values))


# ----------------------------------------------------------------------------------------------------------------------
# Coordinator and peers in one process


class Group:
    """A coordinator and clients in threads."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.log: list[str] = []
        self.coordinator = Coordinator(listener, SECRET, QUICK, self.log.append)
        self.clients: list[PeerClient] = []

    def add(self, state: ToyState, secret: bytes = SECRET, connections: int = 1) -> ToyClient:
        own = self.address, secret, {"train.steps": 4}, state, state.name
        client = ToyClient(*own, log=self.log.append, connections=connections)
        self.clients.append(client)
        return client

    def join_all(self) -> None:
        """Let all clients join, and train no round without one of them: the first would begin one alone where the
        others are late on a busy machine, and these would wait for its end."""
        membership = self.coordinator.membership
        membership.settings = replace(membership.settings, min_peers=len(self.clients))
        with ThreadPoolExecutor(len(self.clients)) as threads:
            list(threads.map(lambda client: client.join(), self.clients))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.coordinator.close()


@pytest.fixture
def group():
    made = Group()
    yield made
    made.close()


class FailsOnce(ToyState):
    """State of a peer that loses its link when another has received all that it needs."""

    has_failed = False

    def __init__(self, name: str, other_has_all: threading.Event) -> None:
        super().__init__(name)
        self.other_has_all = other_has_all

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        result = super().reduce(ring, weights)
        if not self.has_failed:
            self.has_failed = True
            assert self.other_has_all.wait(timeout=30)
            raise LinkError(ring.next, "cut")
        return result


class AppliesEarly(ToyState):
    """A seeded bug: the result is applied before all have confirmed that they have it."""

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        result = super().reduce(ring, weights)
        super().apply(1)
        return result

    def apply(self, trained: int) -> None: ...


def rounds_after_a_failure(group: Group, kind: type[ToyState]) -> list[ToyState]:
    has_all = threading.Event()
    states = [first := kind("a"), ToyState("b"), FailsOnce("c", has_all)]
    reduce = first.reduce

    def reduce_and_tell(ring: Ring, weights: tuple[int, ...]) -> str:
        result = reduce(ring, weights)
        has_all.set()
        return result

    first.reduce = reduce_and_tell
    clients = [group.add(state) for state in states]
    group.join_all()
    for state in states:
        state.train()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda client: client.meet(), clients))
    return states


def run_until_all_are_in_a_round(clients: list[ToyClient], states: list[ToyState]) -> None:
    """Let peers train round after round, each in a thread and a time of its own, until all were in one exchange with
    their changes. Were one made to wait for another's return, those left out of a round, who
    are in the next exchange at the earliest, would never come to it."""

    def run(client: ToyClient, state: ToyState) -> None:
        begun = client.join()
        while begun.weight < len(clients):
            state.train()
            begun = client.meet()

    with ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(run, clients, states))


def test_peers_with_links_of_other_numbers_of_connections_exchange(group: Group) -> None:
    states = [ToyState(name) for name in "abc"]
    clients = [group.add(state, connections=count) for state, count in zip(states, (1, 2, 5), strict=True)]
    run_until_all_are_in_a_round(clients, states)
    assert len({state.digest() for state in states}) == 1


class LosesLinks(ToyState):
    """State of a peer whose link to the next fails until it is left out."""

    failures = MAX_LINK_FAILURES

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        if self.failures and ring.size == 3:
            self.failures -= 1
            raise LinkError("a", "cut")
        return super().reduce(ring, weights)


def test_a_peer_that_was_left_out_of_a_round_is_in_the_next(group: Group) -> None:
    states = [ToyState("a"), ToyState("b"), LosesLinks("c")]
    clients = [group.add(state, connections=count) for state, count in zip(states, (1, 2, 5), strict=True)]
    run_until_all_are_in_a_round(clients, states)
    assert len({state.digest() for state in states}) == 1
    assert any("without c (links have failed)" in line for line in group.log), group.log


def test_a_late_order_to_take_over_an_earlier_state_is_passed_over(group: Group) -> None:
    state = ToyState("a")
    client = group.add(state)
    client.join()
    state.train()
    client._orders.put({"do": "fetch", "round": -1, "digest": "former", "source": "b", "addresses": {}})
    assert client.meet().weight == 1
    assert not any("could not be taken over" in line for line in group.log)


def test_nobody_applies_a_result_that_not_all_have(group: Group) -> None:
    states = rounds_after_a_failure(group, ToyState)
    assert len({state.digest() for state in states}) == 1
    assert {state.round for state in states} == {1}
    assert any("aborted" in line for line in group.log)


def test_a_peer_that_applies_before_confirmation_is_found(group: Group) -> None:
    states = rounds_after_a_failure(group, AppliesEarly)
    assert {state.round for state in states} != {1}


class SumsByArrival(ToyState):
    """A seeded bug: each peer adds its own change last, as where others' are added when they arrive."""

    def reduce(self, ring: Ring, weights: tuple[int, ...]) -> str:
        super().reduce(ring, weights)
        others = [name for name in self.names if name != self.name]
        self.mean = sum((change_of(name, self.round) for name in [*others, self.name]), torch.zeros(())) / 3
        return sha256(self.mean.numpy().tobytes()).hexdigest()


def test_sums_in_the_order_of_arrival_are_found_and_never_applied(group: Group) -> None:
    states = [SumsByArrival(name) for name in "abc"]
    clients = [group.add(state) for state in states]
    group.join_all()
    with ThreadPoolExecutor(3) as threads:
        before = [state.digest() for state in states]
        for state in states:
            state.train()
        is_found = threading.Event()
        meeting = [threads.submit(client.meet, is_found.is_set) for client in clients]
        assert wait_for(lambda: any("different results" in line for line in group.log)), group.log
        is_found.set()
        for one in meeting:
            with pytest.raises(Stopped):
                one.result()
    assert [state.digest() for state in states] == before


def test_strangers_are_refused_in_one_line_and_harm_nothing(group: Group) -> None:
    states = [ToyState("a"), ToyState("b")]
    clients = [group.add(state) for state in states]
    group.join_all()
    with ThreadPoolExecutor(2) as threads:
        for port in (group.address[1], clients[0]._socket.getsockname()[1]):
            group.log.clear()
            with pytest.raises((RefusedError, OSError)):
                connect(("127.0.0.1", port), bytes(32))
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100)
                assert wait_for(lambda: len(group.log) == 2), group.log
            assert sorted(line.partition(": ")[2] for line in group.log) == [
                "it doesn't know the run's secret",
                "it is no peer of Muster",
            ]
        for state in states:
            state.train()
        list(threads.map(lambda client: client.meet(), clients))
    assert [state.round for state in states] == [1, 1]


def test_a_member_that_sends_garbage_is_dropped(group: Group) -> None:
    channel = connect(group.address, SECRET)
    channel.send_message({"name": "x", "phase": 3})
    assert wait_for(lambda: any("it sends what no peer sends" in line for line in group.log)), group.log
    channel.close()


@pytest.mark.parametrize("place", ["nonsense", "192.0.2.1:29600", "127.0.0.1:99999"])
def test_a_coordinator_says_where_it_can_listen(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["coordinator", "--listen", place, "--secret-file", str(tmp_path / "secret")]) == 2
    told = capsys.readouterr().err
    assert place in told
    assert told.endswith("0.0.0.0:29600\n")
    assert told.count("\n") == 1


def test_a_peer_of_another_run_is_refused(group: Group) -> None:
    group.add(ToyState("a")).join()
    settings = {"train.steps": 5, **{f"optim.{n}": n for n in range(7)}}
    other = ToyClient(group.address, SECRET, settings, ToyState("b"), "b", log=group.log.append)
    group.clients.append(other)
    words = r"the same configuration and data; of .*, optim.0 is 0 \(of the others None\); .*; and 2 more keys"
    with pytest.raises(ConfigError, match=words):
        other.join()


def test_peers_of_swarms_and_of_coordinators_are_told_apart(group: Group) -> None:
    def make_no_stage(welcome: Message) -> StageWorker:
        raise AssertionError(welcome)

    peer = SwarmPeer(group.address, SECRET, "s", make_no_stage)
    with pytest.raises(ConfigError, match="it is a coordinator, which runs with outer.coordinator join"):
        peer.run()
    peer.close()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    trainer = PeerConnections(listener, SECRET, {}, 1.0, 5.0, group.log.append)
    client = ToyClient(address, SECRET, {}, ToyState("a"), "a", log=group.log.append)
    with pytest.raises(ConfigError, match=f":{address[1]} has refused this run: it is the trainer of a swarm"):
        client.join()
    client.close()
    trainer.stop_accepting()
    trainer.close()


def test_another_run_may_follow_once_all_peers_of_one_have_left(group: Group) -> None:
    first = ToyState("a")
    client = group.add(first)
    client.join()
    for _ in range(2):
        first.train()
        client.meet()
    client.close()
    assert wait_for(lambda: any("a has left" in line for line in group.log))
    other = ToyClient(group.address, SECRET, {"train.steps": 5}, ToyState("b"), "b", log=group.log.append)
    group.clients.append(other)
    assert other.join().members == ("b",)
    assert any("another run" in line for line in group.log)
    assert not any("are lost" in line for line in group.log)


def test_another_secret_ends_a_peer_unless_it_was_let_in_before(group: Group) -> None:
    stranger = group.add(ToyState("b"), secret=bytes(32))
    with pytest.raises(ConfigError, match="has another secret: give all peers a copy"):
        stranger.join(lambda: len(group.log) > 4)
    state = ToyState("a")
    client = group.add(state)
    client.join()
    group.coordinator.close()
    impostor = Coordinator(socket.create_server(group.address), bytes(32), QUICK, group.log.append)
    assert wait_for(lambda: any("has another secret" in line for line in group.log)), group.log
    impostor.close()
    group.log.clear()
    group.coordinator = Coordinator(socket.create_server(group.address), SECRET, QUICK, group.log.append)
    state.train()
    assert client.meet().weight == 1


def wait_for(is_reached, timeout_s: float = 30) -> bool:
    done = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if is_reached():
            return True
        done.wait(0.02)
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Peers as processes


def survive(folder: Path, seed: int, events: int, round_s: float, settings: Settings = QUICK) -> Churn:
    with Churn(folder, seed, round_s, settings) as churn:
        for _ in range(3):
            churn.join()
        churn.wait_for_all()
        for _ in range(events):
            before = churn.last_round()
            churn.any_event()
            churn.wait_for_round(before + 1)
        churn.wait_for_all()
        return churn


def test_peers_come_and_go(tmp_path: Path) -> None:
    churn = survive(tmp_path, seed=1, events=8, round_s=0.05)
    rounds, _ = churn.check()
    assert rounds > 8


def share_of_rounds(churn: Churn) -> float:
    rounds, share = churn.check()
    stops = churn.stops()
    print(f"{rounds} rounds of {churn.round_s} s, {share:.3f} of the peers' rounds counted; {Counter(churn.kinds)}")
    print(f"from one to the next {stops[len(stops) // 2]:.2f} s (median), longest {[round(x, 2) for x in stops[-5:]]}")
    return share


@pytest.mark.soak
def test_peers_come_and_go_200_times(tmp_path: Path) -> None:
    """Rounds as short as this meet most events in the midst of an exchange."""
    assert share_of_rounds(survive(tmp_path, seed=0, events=200, round_s=0.3)) >= 0.8


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_no_stop_is_longer_than_a_round(tmp_path: Path, seed: int) -> None:
    """200 events in four parts, with rounds several times as long as processes need to start and connect, and twice as
    long as the silence after which a peer is taken for dead; real rounds take minutes beside ten seconds."""
    settings = replace(QUICK, silence_s=1.0)
    churn = survive(tmp_path, seed, events=50, round_s=2 * settings.silence_s, settings=settings)
    assert share_of_rounds(churn) >= 0.8
    assert churn.stops()[-1] <= churn.round_s
