"""Recovery over several nodes: ranks and whole nodes are lost and come back while the others go on."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from muster.cli.main import main
from muster.launch.exit_status import RankExit
from muster.launch.nodes.copy_ring import choose_ranks_per_node, missing_pairs
from muster.launch.nodes.elastic_nodes import ElasticNodes
from muster.launch.nodes.rank_agent import RankAgent
from muster.launch.rank_errors import StragglerError, make_rank_error
from muster.launch.recovery import MAX_RECOVERIES_IN_A_ROW, Elasticity
from muster.report.recoveries import recoveries_note
from muster.spec.errors import MusterError
from tests.nodes import HOSTS, Network, network
from tests.test_elastic import RANK, MadeUpRank, recoveries, whole_beside
from tests.test_launch import assert_gone
from tests.train_runs import QUICK, Command, assert_one_sentence, exit_of, free_port, rows_of, sample_hash

HOST = socket.gethostname()
SMALL = ("--preset", "tiny", *QUICK, "--train.seq_len", "32", "--train.global_batch_size", "12")


def counting(run: Path, node: int, port: int, *words: str) -> Command:
    """A launcher of two whose ranks, two on each node, only count steps."""
    place = ("--nodes", "2", "--node-rank", str(node), "--rendezvous", f"127.0.0.1:{port}")
    before = (sys.executable, "-m", "tests.counting_node")
    plan = ("--parallel", "dp4-z1", "--train.elastic", "true", "--train.spares", "0")
    return Command(*SMALL, *plan, *place, "--run", run, *words, before=before)


def wait_until_whole(run: Path, rows: int, size: int, job: Command) -> None:
    """Returns once that many losses and returns of ranks have ended, the last with `size` ranks."""
    while not (len(found := recoveries(run)) >= rows and found[-1]["recovered_s"] is not None):
        job.be_patient(f"{rows} recoveries")
    assert found[-1]["world_size"] == size, found


def test_ranks_and_launchers_of_another_node_are_lost_and_come_back(tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    (tmp_path / "rank.py").write_text(RANK)
    with counting(run, 0, port) as first, counting(run, 1, port) as second:
        first.wait_for(run / "logs" / "rank-3.txt")
        (run / "killed-3").touch()
        wait_until_whole(run, 2, 4, first)
        second.kill()
        wait_until_whole(run, 3, 2, first)
        with counting(run, 1, port, "--optim.lr", "0.5") as other:
            refused = other.wait()
        with counting(run, 1, port) as back:
            wait_until_whole(run, 4, 4, first)
            (run / "end").touch()
            ended = [first.wait(), back.wait()]
    assert [(one.code, one.err) for one in ended] == [(0, ""), (0, "")], ended
    found = [(row["ranks"], row["causes"], row["world_size"]) for row in recoveries(run)]
    lost = ["node lost", "node lost"]
    assert found == [([3], ["dead"], 3), ([], [], 4), ([2, 3], lost, 2), ([], [], 4)]
    differs = f"node 1 on {HOST} has another configuration than node 0 on {HOST} (optim.lr 0.5, not 0.003): give all"
    assert_one_sentence(refused, 2, differs)
    out = ended[0].out
    assert f"rank 3 on {HOST} was killed by signal 9 (SIGKILL): 3 ranks go on (generation 1)" in out
    assert f"rank 2 on {HOST} is gone with node 1 on {HOST}: the connection to its launcher closed without" in out
    assert differs in out
    assert f"node 1 on {HOST} is back\n" in out
    assert "2 ranks came back: 4 ranks go on after this step (generation 4)" in out
    assert "2 recoveries and 2 returns of ranks without a restart" in (recoveries_note(run) or "")


def test_a_launcher_that_fails_before_its_ranks_start_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = SimpleNamespace(send=lambda *_, **__: None, close=lambda _: None)
    group = SimpleNamespace(nodes={0: "node 0 on a"}, connections={1: connection}, node_rank=0)
    nodes = ElasticNodes(tmp_path, 1.0, None, Elasticity(0), group, 2, "")  # type: ignore[arg-type]
    group.nodes[1] = "node 1 on b"
    for message in ({"kind": "failed", "code": 1, "reason": "no disk"}, {"kind": "gone"}):
        nodes._handle(1, message)
    nodes.shut_down()
    assert capsys.readouterr().out == "node 1 on b has left again: no disk\n"


def test_fewer_ranks_go_on_on_nodes_that_together_have_the_newest_copies(tmp_path: Path) -> None:
    """Of two neighbours in the ring one stays, then whole nodes, and two nodes at least."""
    group = SimpleNamespace(nodes={}, connections={})
    nodes = ElasticNodes(tmp_path, 1.0, None, Elasticity(0), group, 2, "")  # type: ignore[arg-type]
    chosen = []
    for num_nodes, places, size in (
        (2, (0, 0, 1), 2),
        (2, (0, 1, 1), 2),
        (2, (0, 0, 1), 1),
        (2, (1, 1), 1),
        (3, (0, 0, 0, 1, 1, 2), 3),
        (4, (0, 0, 1, 1, 2, 2, 3), 4),
        (4, (0, 0, 1, 2, 2, 3, 3), 6),
        (4, (0, 1, 2), 2),
        (4, (0, 1, 3), 2),
        (3, (0, 1), 1),  # too few
        (6, (0, 1, 2, 3, 3, 4, 4), 3),
    ):
        nodes._ring = tuple(range(num_nodes))
        left: list = [SimpleNamespace(node=node, number=number) for number, node in enumerate(places)]
        chosen.append([rank.number for rank in nodes._choose(left, size)])
    nodes.shut_down()
    assert chosen == [
        [0, 2],
        [0, 1],
        [0],
        [0],
        [0, 1, 3],
        [0, 1, 4, 5],
        [0, 1, 3, 4, 5, 6],
        [0, 2],
        [1, 2],
        [0],
        [0, 2, 5],
    ]


@given(st.permutations(range(6)), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.data())
def test_fewer_ranks_on_all_nodes_keep_the_newest_copies(ring: list[int], counts: list[int], data: Any) -> None:
    """Nodes 6 and 7 have just come back, or never had a rank."""
    left = {node: count for node, count in enumerate(counts) if count}
    assume(left)
    size = data.draw(st.integers(1, sum(left.values())))
    kept = choose_ranks_per_node(ring, left, size)
    assert sum(kept.values()) == size
    assert all(1 <= count <= left[node] for node, count in kept.items())
    assert len(kept) >= min(2, size, len(left))
    assert size < len(left) or holds_all(ring, left, kept)


def test_the_fewest_nodes_that_can_keep_the_newest_copies_do() -> None:
    """Each node has one rank; any nodes are lost."""
    ring = range(7)
    for left in (left for count in ring for left in combinations(ring, count + 1)):
        enough = (some for count in ring for some in combinations(left, count + 1) if holds_all(ring, left, some))
        size = len(next(enough))
        kept = choose_ranks_per_node(ring, dict.fromkeys(left, 1), size)
        assert holds_all(ring, left, kept), (left, kept)


def holds_all(ring: Sequence[int], left: Iterable[int], kept: Iterable[int]) -> bool:
    return missing_pairs(ring, set(kept)) == missing_pairs(ring, set(left))


def test_a_node_whose_memory_alone_has_the_newest_copies_gets_a_process(tmp_path: Path) -> None:
    """Those of nodes that have just come back are ready at once, but have no copies yet."""

    def process(node: int) -> Any:
        return MadeUpRank(node=node)

    group = SimpleNamespace(nodes={0: "a", 1: "b", 2: "c"}, connections={})
    nodes = ElasticNodes(tmp_path, 1.0, None, Elasticity(0, (1,)), group, 2, "")  # type: ignore[arg-type]
    nodes._start_on = lambda node: SimpleNamespace(node=node, exit_code=None)  # type: ignore[assignment,return-value]
    found = {}
    for ring, left, gone in (
        ((0,), (), ()),
        ((0,), (0,), ()),
        ((0,), (1,), ()),
        ((0, 2), (), ()),
        ((0, 2), (2,), ()),
        ((0, 2), (1,), (0,)),
        ((0,), (), (0,)),
        ((0, 1, 2), (), ()),  # any of them has copies of all but one: that where a process waits
        ((0, 1, 2, 3), (0,), ()),  # 2 has both parts that are missing
        ((0, 1, 2), (), (0, 2)),  # the part of 2 is lost
    ):
        nodes._ring, nodes._joined = ring, {0, 1, 2} - set(gone)
        nodes.ranks, nodes._spares = [process(node) for node in left], [process(1), process(1)]
        found[ring, left, gone] = nodes._take_spare(2).node, len(nodes._spares)
    assert list(found.values()) == [(0, 2), (1, 1), (0, 2), (0, 2), (1, 1), (2, 2), (1, 1), (1, 1), (2, 2), (1, 1)]
    nodes._ring, nodes._joined, nodes._spares = (0, 1, 2), {0, 1, 2}, []
    nodes.ranks = [process(0), process(1)]
    assert nodes._smaller_size([process(2)]) is None, "one rank alone would lose the part of node 1"
    nodes._in_a_row = MAX_RECOVERIES_IN_A_ROW - 1
    assert nodes._smaller_size([process(2)]) == 1, "but a place where none survives isn't filled again and again"
    nodes._in_a_row, nodes._joined, nodes._ranks_per_node = 0, {0, 1}, 1
    assert nodes._smaller_size([process(2)]) == 1, "node 2 is gone, and there is no room elsewhere"
    nodes._ranks_per_node = 2
    nodes._ring, nodes._joined, nodes.ranks, nodes._spares = (0,), {0, 1}, [process(1)], [process(0), process(1)]
    assert nodes._take_spare(1).node == 0, "one that waits there, before a new one"
    nodes._spares, nodes.ranks = [], [process(1)]
    assert nodes._smaller_size([process(0), process(0)]) is None, "a rank of the other node doesn't go on alone"
    nodes.ranks = [process(0)]
    assert nodes._smaller_size([process(0), process(0), process(0), process(0)]) == 1
    nodes.ranks, nodes._in_a_row, nodes._spares = [process(1)], MAX_RECOVERIES_IN_A_ROW, [process(1)]
    assert nodes._take_spare(0).node == 1, "before the last attempt there was none on the other node either"
    nodes._in_a_row, nodes._spares = 0, [process(1)]

    def fail(node: int) -> Any:
        raise MusterError("no more processes")

    nodes._start_on = fail
    assert nodes._take_spare(0).node == 1
    nodes.ranks = []
    nodes.shut_down()


@pytest.mark.parametrize(
    ("error", "starts", "expected"),
    [
        (StragglerError("takes 2.00 times as long as the others to compute", "slow"), None, 1),
        (StragglerError("takes 2.00 times as long as the others to compute", "slow"), 1, 1),
        (StragglerError("takes 2.00 times as long as the others to compute", "slow"), 0, 1),
        (ValueError("once"), None, 0),
        (ValueError("once"), 0, 1),  # one that is ready, at once
    ],
)
def test_the_place_of_a_slow_rank_goes_to_another_node(
    error: Exception, starts: int | None, expected: int, tmp_path: Path
) -> None:
    """Where a node is slow, so is another process there; other ranks are replaced on their own node if they can."""

    def process(node: int, rank: int, **more: Any) -> Any:
        one = MadeUpRank(node=node, rank=rank, last_alive=0.0, fault=None, tell=lambda _: None, **more)
        one.renumber, one.status = partial(setattr, one, "rank"), lambda: SimpleNamespace(step=3)
        return one

    group = SimpleNamespace(nodes={0: "a", 1: "b"}, connections={})
    nodes = ElasticNodes(tmp_path, 1.0, None, Elasticity(2), group, 1, "")  # type: ignore[arg-type]
    end = RankExit(0, "a", 1, False, make_rank_error(error, 0), None)
    lost = process(0, 0, failed=True, end=lambda *_: end)
    lost.exit_code = 1
    nodes.ranks, nodes._spares = [lost, process(1, 1)], [process(0, -1), process(1, -1)]
    if starts is not None:
        nodes._spares[starts].status = lambda: None
    nodes._replace([lost], "a loss")
    assert [(rank.node, rank.rank) for rank in nodes.ranks] == [(expected, 0), (1, 1)]
    assert [spare.node for spare in nodes._spares] == [1 - expected]
    nodes.ranks = nodes._spares = []
    nodes.shut_down()


def test_another_node_frees_what_has_ended_and_survives_a_failed_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    messages: list[Any] = []

    def tell(kind: str, **content: Any) -> None:
        told.append((kind, content))

    group = SimpleNamespace(
        node_rank=1,
        local_node=SimpleNamespace(host="b"),
        send=tell,
        receive=lambda: [messages.pop(0)] if messages else [],
        put_back=messages.extend,
    )
    (tmp_path / "logs").mkdir()
    agent = RankAgent(tmp_path, 1.0, None, group)  # type: ignore[arg-type]
    agent.start(lambda rank: [sys.executable, "-c", ""] if rank >= 0 else ["/no/such/file"], range(2, 4))
    descriptors = len(os.listdir("/proc/self/fd"))
    for number, rank in enumerate((2, -1)):
        messages.append((0, {"kind": "start process", "process": number, "rank": rank}))
    while sum(kind == "ended" for kind, _ in told) < 2:
        assert agent.poll()
        time.sleep(0.01)
    messages.append((0, {"kind": "word", "process": 0, "rank": 3, "word": ""}))  # sent before node 0 heard of the end
    messages.append((0, {"kind": "kill process", "process": 1, "killed": True}))
    for _ in range(2):
        assert agent.poll()
    assert agent.ranks == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    ends = {content["process"]: content["end"] for kind, content in told if kind == "ended"}
    assert ends[0]["code"] == 0
    assert ends[1]["code"] == 1
    assert ends[1]["observed"]["sentence"].startswith("has no process: could not start a spare (/no/such/file: ")
    (word,) = (content | {"kind": kind} for kind, content in told if kind == "no spare")
    nodes = ElasticNodes(tmp_path, 1.0, None, Elasticity(0), SimpleNamespace(nodes={1: "node 1 on b"}), 2, "")  # type: ignore[arg-type]
    nodes._handle(1, word)
    said = "no other process can be started on node 1 on b for now: could not start a spare (/no/such/file: "
    assert said in capfd.readouterr().out
    nodes.shut_down()
    messages.append((0, {"kind": "over", "code": 0, "reason": "finished"}))
    assert not agent.poll()
    agent.shut_down()
    assert agent.exit_status().code == 0


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert main(["train", "--preset", "tiny", "--train.elastic", "true"]) == 2
    assert "train.elastic needs Muster's launchers, as torchrun's ends all ranks" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------------
# Training, each node a network namespace with a host name and a memory of its own


@pytest.fixture
def nodes() -> Iterator[Network]:
    with network() as found:
        yield found


class Pair:
    """Launchers of two nodes, which train with the same words."""

    def __init__(self, nodes: Network, run: Path, *words: str, hold_after: tuple[int, ...] = ()) -> None:
        self._nodes, self._words = nodes, (*words, "--train.elastic", "true", "--run", str(run))
        self._places = [run.parent / name for name in HOSTS]
        for place in self._places:
            place.mkdir()
        self.first = self.start(0, hold_after)
        self.second = self.start(1)

    def start(self, node: int, hold_after: tuple[int, ...] = ()) -> Command:
        place = self._places[node]
        output = None if node else place
        own = {"own_memory": True, "cwd": place, "hold_after": hold_after, "output": output}
        return self._nodes.launcher(node, *self._words, **own)

    def wait_until_said(self, words: str) -> None:
        """Returns once the launcher of node 0 has said so."""
        while words not in self._places[0].with_name(f"{HOSTS[0]}.out").read_text():
            self.first.be_patient(f"nobody said '{words}'")

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.first, self.second):
            one.__exit__()


def assert_nearly_same(run: Path, whole: Path, exact: bool = False) -> None:
    for ours, theirs in zip(rows_of(run), rows_of(whole), strict=True):
        assert ours["step"] == theirs["step"]
        for key in ("train/loss", "train/grad_norm"):
            assert ours[key] == (theirs[key] if exact else pytest.approx(theirs[key], rel=1e-9)), (key, ours["step"])
    assert sample_hash(run) == sample_hash(whole)


@pytest.mark.soak
def test_a_run_on_two_nodes_loses_a_rank_and_a_node_and_has_the_same_losses(nodes: Network, tmp_path: Path) -> None:
    """The memory of the node that is lost is lost, too."""
    run = tmp_path / "run"
    words = (*SMALL, "--parallel", "dp4-z1-fp64", "--train.steps", "15", "--train.spares", "0")
    whole = whole_beside(run, list(words))
    with Pair(nodes, run, *words, hold_after=(3, 6, 9, 12)) as pair:
        first = pair.first
        first.wait_until_held(3)
        os.kill(pair.second.ranks()[2], signal.SIGKILL)
        first.go_on(3)
        pair.wait_until_said(": 4 ranks go on after this step (generation 2)")  # of a process that is ready
        first.go_on(6)
        first.wait_until_held(9)
        pair.second.kill()
        pair.second = pair.start(1)
        first.go_on(9)
        pair.wait_until_said(": 4 ranks go on after this step (generation 4)")
        first.go_on(12)
        ended = [first.wait(), pair.second.wait()]
    assert [(one.code, one.err) for one in ended] == [(0, ""), (0, "")], ended
    found = [(row["ranks"], row["causes"], row["world_size"]) for row in recoveries(run)]
    assert found == [([2], ["dead"], 3), ([], [], 4), ([2, 3], ["node lost"] * 2, 2), ([], [], 4)]
    assert "in the memory of 2 nodes, each with the part of the one before" in ended[0].out
    # The ranks that are left have finished step 10 by then, and may have copied it.
    assert re.search(rf"resuming {run} after step (9|10) from memory", ended[0].out), "others are done again, too"
    assert "node 1 on node-b is back" in ended[0].out
    assert_nearly_same(run, whole)


@pytest.mark.soak
def test_spares_take_the_places_of_a_node(nodes: Network, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (*SMALL, "--parallel", "pp2-dp2", "--train.steps", "9", "--train.spares", "2")
    whole = whole_beside(run, list(words))
    with Pair(nodes, run, *words, hold_after=(3,)) as pair:
        pair.first.wait_until_held(3)
        pair.second.kill()
        pair.first.go_on(3)
        ended = pair.first.wait()
    assert (ended.code, ended.err) == (0, ""), ended
    assert [(row["ranks"], row["world_size"]) for row in recoveries(run)] == [([2, 3], 4)]
    word = r": spares take the places of ranks 2 and 3(, once [a-z ]+)?, and the other ranks go on \(generation 1\)"
    assert re.search(word, ended.out)
    assert_nearly_same(run, whole, exact=True)


@pytest.mark.soak
def test_the_first_node_takes_the_store_with_it(nodes: Network, tmp_path: Path) -> None:
    """The others end, or wait for it, and go on from their memory."""
    run = tmp_path / "run"
    words = (*SMALL, "--parallel", "dp2", "--train.steps", "12", "--train.save_every", "2", "--train.restarts", "1")
    whole = whole_beside(run, list(words))
    with Pair(nodes, run, *words, hold_after=(5,)) as pair:
        pair.first.wait_until_held(5)
        ranks = list((pair.first.ranks() | pair.second.ranks()).values())
        pair.first.kill()
        said = pair.second.hear("restart 1 of 1, after step ")
        assert_gone(ranks)
        pair.first = pair.start(0)
        ended = [pair.first.wait(), pair.second.wait()]
    assert "after step 5: node 0 on node-a is gone, and with it the store in which ranks meet: " in said
    assert [(one.code, one.err) for one in ended] == [(0, ""), (0, "")], ended
    assert f"resuming {run} after step 5 from memory" in ended[0].out
    assert_nearly_same(run, whole, exact=True)


@pytest.mark.soak
def test_a_node_whose_network_is_cut_is_lost(nodes: Network, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (*SMALL, "--parallel", "dp4-z1-fp64", "--train.steps", "9", "--train.spares", "0")
    whole = whole_beside(run, list(words))
    with Pair(nodes, run, *words, hold_after=(3,)) as pair:
        pair.first.wait_until_held(3)
        nodes.cut(1)
        pair.first.go_on(3)
        ended = [pair.first.wait(), pair.second.wait()]
    silent = "its launcher has been silent for 15 s"
    assert (ended[0].code, ended[0].err) == (0, ""), ended[0]
    assert f"rank 2 on node-b is gone with node 1 on node-b: {silent}" in ended[0].out
    gone = "error: node 0 on node-a is gone, and with it the store in which ranks meet"
    assert_one_sentence(ended[1], 1, f"{gone}: {silent}")
    assert exit_of(run)["code"] == 0
    assert_nearly_same(run, whole)


@pytest.mark.soak
@pytest.mark.parametrize("gone", [2, 3])
def test_half_of_four_nodes_go_on_from_the_copies_of_all(gone: int, tmp_path: Path) -> None:
    """Each launcher has a memory of its own; the lost rank's is still there, but not for the others."""
    if os.geteuid():
        pytest.skip("a memory of its own is a mount, which needs root")
    run, port = tmp_path / "run", free_port()
    words = (*SMALL, "--train.global_batch_size", "4", "--parallel", "dp4-z1-fp64", "--train.steps", "9")
    whole = whole_beside(run, list(words))
    own = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")

    def start(node: int) -> Command:
        place = ("--nodes", "4", "--node-rank", str(node), "--rendezvous", f"127.0.0.1:{port}")
        (cwd := tmp_path / f"node-{node}").mkdir()
        more = ("--train.elastic", "true", "--train.spares", "0", "--run", str(run))
        held = (3, 6) if node == 0 else ()
        return Command(*words, *more, *place, before=own, cwd=cwd, output=cwd, hold_after=held)

    with contextlib.ExitStack() as stack:
        launchers = [stack.enter_context(start(node)) for node in range(4)]
        launchers[0].wait_until_held(3)
        os.kill(launchers[gone].ranks()[gone], signal.SIGKILL)
        launchers[0].go_on(3)
        while ": 4 ranks go on after this step (generation 2)" not in (tmp_path / "node-0.out").read_text():
            launchers[0].be_patient("nobody came back")
        launchers[0].go_on(6)
        ended = [one.wait() for one in launchers]
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 4, ended
    assert [(row["ranks"], row["world_size"]) for row in recoveries(run)] == [([gone], 2), ([], 4)]
    said = "".join(one.out for one in ended)  # whichever node rank 0 is on
    assert re.findall(r"resuming .* after step (\d+)", said)[0] in ("3", "4"), said
    assert "are repeated" not in said
    assert_nearly_same(run, whole)
