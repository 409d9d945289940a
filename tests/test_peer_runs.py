"""Runs of `muster train` that are peers of a coordinator: their model, and how they leave and come back."""

import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from muster.api.verbs import predict
from muster.config.cluster_files import load_cluster, load_device
from muster.config.outer_config import OuterConfig
from muster.launch.peers.channel import create_secret
from muster.launch.peers.coordinator import Coordinator
from muster.spec.cluster import ClusterSpec
from muster.spec.errors import MusterError
from tests.toy_peers import QUICK
from tests.train_runs import AT_ONCE, Command, assert_one_sentence, steps, train
from tests.train_runs import QUICK as QUICK_END

SMALL = ("--preset", "tiny", "--model.num_layers", "1", "--outer.every", "2", *QUICK_END)


class Meeting:
    """A coordinator in this process, and the flags of its peers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, list[str]()
        self.secret = create_secret(folder / "secret")
        self._open: Coordinator | None = None

    def start(self, min_peers: int = 1, port: int = 0) -> None:
        listener = socket.create_server(("127.0.0.1", port))
        self.port = listener.getsockname()[1]
        self._open = Coordinator(listener, self.secret, replace(QUICK, min_peers=min_peers), self.log.append)

    def stop(self) -> None:
        if self._open is not None:
            self._open.close()

    def flags(self, name: str) -> tuple[str | Path, ...]:
        address = "--outer.coordinator", f"127.0.0.1:{self.port}", "--outer.secret_file", self.folder / "secret"
        return (*SMALL, "--parallel", "mb1-fp32", "--nproc", "1", *address, "--run", self.folder / name)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    made = Meeting(tmp_path)
    yield made
    made.stop()


def shared_state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Outer parameters and momentum of a checkpoint, flat."""
    found: dict[str, torch.Tensor] = {}
    for file in (run / "checkpoints" / f"step-{step:08}").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(("model/", "outer/"))]  # noqa: SIM118
            found |= {name: tensors.get_tensor(name).flatten() for name in names}
    return found


def assert_equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_runs_that_stay_are_the_islands_of_a_plan_to_the_bit(meeting: Meeting) -> None:
    meeting.start(min_peers=2)
    length = "--train.steps", "5", "--train.global_batch_size"
    with (
        Command(*meeting.flags("a"), *length, "2", forked=True) as a,
        Command(*meeting.flags("b"), *length, "2", forked=True) as b,
    ):
        ended = [a.wait(), b.wait()]
    assert [one.code for one in ended] == [0, 0], ended
    run = meeting.folder / "islands"
    islands = train(*SMALL, "--parallel", "isl2-mb1-fp32", "--nproc", "2", *length, "4", "--run", run)
    assert islands.code == 0, islands.err
    expected = shared_state(run, 5)
    for name in ("a", "b"):
        assert_equal_states(shared_state(meeting.folder / name, 5), expected)
        rows = [json.loads(line) for line in (meeting.folder / name / "islands.jsonl").read_text().splitlines()]
        assert [(row["step"], row["peers"]) for row in rows] == [(2, 2), (4, 2), (5, 2)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--parallel", "dp2-mb1-fp32", "--nproc", "2"), ("it has 2 ranks", "expected one")),
        (("--outer.method", "streaming"), ("method streaming isn't built for peers", "expected diloco")),
        (("--outer.coordinator", "host-a"), ("coordinator 'host-a' is no address with a port", "HOST:PORT")),
        (("--outer.secret_file", "nowhere"), ("the secret file", "copy the one")),
    ],
)
def test_what_a_peer_can_not_be_is_refused(meeting: Meeting, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    meeting.start()
    ended = train(*meeting.flags("a"), "--train.steps", "2", *flags)
    assert_one_sentence(ended, 3 if "ranks" in words[0] else 2, *words)


@pytest.mark.soak
def test_a_run_with_another_secret_than_the_coordinator_ends(meeting: Meeting) -> None:
    meeting.start()
    create_secret(meeting.folder / "other")
    ended = train(*meeting.flags("a"), "--train.steps", "2", "--outer.secret_file", meeting.folder / "other")
    assert_one_sentence(ended, 2, f"127.0.0.1:{meeting.port} has another secret", "a copy of its secret file")


@pytest.mark.soak
def test_runs_are_killed_leave_and_come_back(meeting: Meeting) -> None:
    meeting.start(min_peers=2)
    length = "--train.steps", "40", "--train.global_batch_size", "2", "--train.save_every", "3", *AT_ONCE

    def start(name: str) -> Command:
        return Command(*meeting.flags(name), *length)

    with start("a") as a, start("b") as b:
        b.wait_for_step(7)
        b.kill()  # min_peers hold a up until b is back, which takes over a's state
        with start("b") as b:
            b.wait_for_step(14)
            b.process.send_signal(signal.SIGTERM)
            ended = b.wait()
            assert ended.code == 75, ended
            meeting.stop()
            meeting.start(min_peers=2, port=meeting.port)
            with start("b") as b:
                ended = b.wait()
                assert ended.code == 0, ended
        ended = a.wait()
    assert ended.code == 0, ended
    assert steps(meeting.folder / "a") == list(range(1, 41))
    assert_equal_states(shared_state(meeting.folder / "a", 40), shared_state(meeting.folder / "b", 40))


def test_a_round_of_peers_is_predicted_as_that_of_islands_with_their_batches(tmp_path: Path) -> None:
    file = tmp_path / "peer.yaml"
    file.write_text(
        "model: {preset: llama3.2-1b}\nparallel: mb1\ntrain: {seq_len: 2048, global_batch_size: 16}\n"
        "outer: {coordinator: 'host-a:29600', secret_file: run.secret, every: 50, compression: int8}\n"
    )
    peers = predict(None, "4xh100", file)
    outer = OuterConfig(every=50, compression="int8")
    islands = predict("llama3.2-1b", "4xh100", "isl4-mb1", seq_len=2048, global_batch=64, outer=outer)
    assert peers.round is not None
    assert islands.round is not None
    assert peers.round.round_s == islands.round.round_s > 50 * peers.step_time_s
    assert peers.round.sent_bytes == islands.round.sent_bytes
    assert [one.total for one in peers.memory] == [one.total for one in islands.memory]
    alone = predict(None, "1xh100", file)
    assert alone.round is None
    assert alone.step_time_s == pytest.approx(peers.step_time_s, rel=0.01)
    for plan, words in (
        ("dp4", "outer.coordinator doesn't go with plan dp4-mb1-bf16: it has 4 ranks"),
        ("isl2-mb1", "each peer is an island already"),
        ("auto", "leaves the plan to auto: expected that of a peer, such as parallel: mb1"),
    ):
        other = tmp_path / "other.yaml"
        other.write_text(file.read_text().replace("parallel: mb1", f"parallel: {plan}"))
        with pytest.raises(MusterError, match=words):
            predict(None, "4xh100", other)
    with pytest.raises(MusterError, match="outer is for plans with islands, and dp4-mb1-bf16 has none"):
        predict("llama3.2-1b", "4xh100", "dp4-mb1", outer=outer)
    at = outer.model_copy(update={"coordinator": "host-a:29600"})
    by_flags = predict("llama3.2-1b", "4xh100", "mb1", seq_len=2048, global_batch=16, outer=at)
    assert by_flags.round is not None
    assert by_flags.round.round_s == pytest.approx(50 * by_flags.step_time_s, rel=0.2)


def test_a_round_of_peers_is_predicted_with_the_ring_that_avoids_slow_links() -> None:
    outer = OuterConfig(every=50).model_copy(update={"coordinator": "host-a:29600"})
    slow = {frozenset((0, 1)), frozenset((2, 3))}

    def round_s(slow_links: set[frozenset[int]]) -> float:
        rates = tuple(
            tuple(1e6 if frozenset((one, other)) in slow_links else 1e7 for other in range(4)) for one in range(4)
        )
        node = load_device("h100-sxm").node
        assert node is not None
        group = load_cluster("1xh100").groups[0].model_copy(update={"num_nodes": 4, "nics": node.nics})
        cluster = ClusterSpec(name="sites", groups=(group,), node_bandwidth_bytes_per_s=rates)
        found = predict("llama3.2-1b", cluster, "mb1", seq_len=2048, global_batch=16, outer=outer).round
        assert found is not None
        return found.round_s

    assert round_s(slow) == round_s(set())
    assert round_s({*slow, frozenset((0, 2))}) > 2 * round_s(set())
