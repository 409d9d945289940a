"""Stages served by swarms of peers: gradients under retries and deaths, wiring, moves between stages, and runs as a
person starts them."""

import contextlib
import json
import random
import socket
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from muster.cli.main import main
from muster.config.load_config import load_run_config
from muster.config.swarm_config import SwarmConfig
from muster.launch.peers.channel import create_secret
from muster.launch.swarm.connections import PeerConnections
from muster.launch.swarm.peer import SwarmPeer
from muster.report.swarm import draw_swarm, swarm_note
from muster.schedule.swarm.step_passes import Pass, StepPasses
from muster.schedule.swarm.wiring import Method, PeerTimes, StageWiring, choose_move, stage_for
from muster.simulate.swarm import ANSWER_BYTES, SimulatedPeer, SwarmPasses, SwarmSimulator, settled_step
from muster.spec.errors import MusterError
from muster.train.resume_check import config_changes
from muster.train.swarm_check import require_swarm
from tests.ranks import run_ranks
from tests.toy_peers import free_ports
from tests.train_runs import QUICK, Command, assert_one_sentence, train

EQUAL = 1e-10
FOUR: dict[str, dict[str, Any]] = {name: {} for name in "abcd"}
FAULTY = {"die": 0.06, "die_in_sum": 0.1, "drop": 0.05}


def _run(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    (found,) = run_ranks(1, "tests.swarm_ranks:train_in_swarm", {"cases": cases, "cache": str(folder)})
    return found


def _is_equal(found: dict[str, Any], limit: float = EQUAL) -> bool:
    return max(found["gradient"], found["loss"], found["norm"]) < limit


def _peers(seed: int, count: int, **faults: Any) -> dict[str, dict[str, Any]]:
    """Peers whose names seed their faults."""
    return {f"{seed}-{n}": faults for n in range(count)}


def test_gradients_of_a_swarm_are_those_of_one_process_whatever_is_lost(tmp_path: Path) -> None:
    (found,) = _run([{"steps": 2, "peers": _peers(1, 4, **FAULTY), "deaths": 4}], tmp_path)
    assert found["size"] > 1e-3
    assert _is_equal(found), found
    assert found["deaths"] > 0, found
    assert found["retried"] > found["deaths"], found
    assert not [line for line in found["said"] if "differ" in line]


@pytest.mark.soak
def test_gradients_are_equal_under_many_random_faults(tmp_path: Path) -> None:
    chance = random.Random(5)
    cases: list[dict[str, Any]] = [{"steps": 3, "peers": FOUR}]
    for seed in range(8):
        faults = {"die": chance.uniform(0, 0.1), "die_in_sum": chance.uniform(0, 0.3), "drop": chance.uniform(0, 0.1)}
        faults["late_s"] = chance.choice([0.0, 0.6])
        own = {"stages": chance.choice([1, 2, 3, 4])}
        case = {"steps": 3, "peers": _peers(10 + seed, own["stages"] + 2, **faults), "deaths": 12, "swarm": own}
        cases.append(case | {"packing": chance.choice(["concatenate", "document_mask", "next_fit", "none"])})
    # Joins, kills from outside, moves between stages, clipping, larger micro-batches.
    cases.append({"steps": 5, "peers": FOUR, "events": {1: ["kill", "a"], 2: ["start", "e"], 3: ["start", "f"]}})
    moving = {"rebalance_every": 1}
    cases.append({"steps": 6, "peers": FOUR | {"e": {}, "f": {}}, "events": {1: ["kill", "a"], 2: ["kill", "c"]}})
    cases[-1]["swarm"] = moving
    cases.append({"steps": 3, "peers": FOUR, "clip_norm": 0.01, "plan": "mb2-rfull-fp64"})
    cases.append({"steps": 3, "peers": _peers(20, 4, **FAULTY), "deaths": 4, "plan": "mb1-bf16"})
    for case, found in zip(cases, _run(cases, tmp_path), strict=True):
        # In bf16 sums of micro-batches in fp32, which are added up in another order, round.
        limit = 1e-4 if "bf16" in case.get("plan", "") else EQUAL
        assert _is_equal(found, limit), (case, found)
        assert not [line for line in found["said"] if "differ" in line], (case, found)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("bug", "peers"),
    [
        # Late answers come while others are asked: both count.
        ("counted twice", _peers(2, 4, late_s=0.8)),
        ("lost", _peers(1, 4, **FAULTY)),
        ("", FOUR | {"d": {"skips_updates": True}}),
    ],
)
def test_seeded_bugs_are_found(bug: str, peers: dict[str, Any], tmp_path: Path) -> None:
    case = {"steps": 2, "peers": peers, "deaths": 4, "bug": bug, "swarm": {"in_flight": 2}}
    (found,) = _run([case], tmp_path)
    differs = [line for line in found["said"] if "differ" in line]
    assert not _is_equal(found) or (not bug and differs), found


# ----------------------------------------------------------------------------------------------------------------------
# The account of a step


def _order(stages: int, micro_batches: int) -> dict[Pass, int]:
    return {
        Pass(kind, stage, n): 2 * n + (kind == "F")
        for kind in ("F", "B")
        for stage in range(stages)
        for n in range(micro_batches)
    }


def test_passes_of_a_step_count_once_in_any_order_of_answers_losses_and_retries() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        stages, micro_batches = chance.randint(1, 4), chance.randint(1, 6)
        passes = StepPasses(_order(stages, micro_batches), in_flight=chance.randint(1, 4))
        names = {stage: [f"{stage}{n}" for n in range(3)] for stage in range(stages)}
        sums: Counter[tuple[str, int, int]] = Counter()
        sent: list[tuple[Pass, str]] = []
        while not all(passes.ledger.is_complete(stage) for stage in range(stages)):
            for stage in range(stages):
                sent += [(one, chance.choice(names[stage])) for one in passes.ready(stage)]
            one, peer = sent.pop(chance.randrange(len(sent)))
            fate = chance.random()
            if fate < 0.1:
                passes.repeat(one)  # its answer is lost
                continue
            if fate < 0.2:
                passes.repeat(one)  # its answer is late: another peer is asked, and both answer
                sent.append((one, peer))
                continue
            if fate < 0.25:
                lost = [pair for pair in sent if pair[1] == peer]
                sent = [pair for pair in sent if pair[1] != peer]
                passes.lose(peer, [one, *(pair[0] for pair in lost)], is_summed=False)
                sums = Counter({key: count for key, count in sums.items() if key[0] != peer})
                continue
            if one.kind == "F":
                passes.answer_forward(one, peer, b"hidden")
            elif passes.answer_backward(one, peer, b"gradient", [1.0]):
                sums[peer, *one.unit] += 1
        counts = Counter(unit for (_, *unit), count in sums.items() for unit in [tuple(unit)] * count)
        assert counts == {(stage, n): 1 for stage in range(stages) for n in range(micro_batches)}, seed
        assert passes.total_losses == [micro_batches]
        held = [passes.ledger.micro_batches(peer, stage) for stage in names for peer in names[stage]]
        assert sum(map(len, held)) == stages * micro_batches


def test_a_late_pass_of_the_step_before_says_nothing_of_this_one() -> None:
    class Worker(Mock):
        step = 5

    peer = SwarmPeer(("127.0.0.1", 1), bytes(32), "a", lambda welcome: Worker())
    peer.worker, peer.stage = Worker(), 0
    late = {"do": "F", "step": 4, "stage": 0, "micro_batch": 7, "has_kept": False, "accepted": [3]}
    peer._obey(Mock(), late, [b"", b""])
    peer._obey(Mock(), late | {"step": 5, "stage": 1}, [b"", b""])
    peer.worker.count.assert_not_called()
    peer.worker.forward.assert_not_called()
    with pytest.raises(MusterError, match="a pass of step 7 came to a peer with the state after step 5"):
        peer._obey(Mock(), late | {"step": 6}, [b"", b""])
    peer._obey(Mock(), late | {"step": 5}, [b"", b""])
    peer.worker.count.assert_called_once_with(3)
    peer.worker.forward.assert_called_once_with(7, b"", b"")
    peer.close()


def _wiring(method: Any, **times_s: float) -> StageWiring:
    wiring = StageWiring(method, random.Random(0))
    for name, time_s in times_s.items():
        wiring.add(name)
        wiring.times[name] = PeerTimes({"F": time_s / 3, "B": 2 * time_s / 3})
    return wiring


def test_micro_batches_are_shared_by_measured_times_or_in_turns() -> None:
    by_speed = _wiring("throughput", slow=4.0, middle=2.0, fast=1.0)
    assert Counter(by_speed.choose(["slow", "middle", "fast"]) for _ in range(70)) == {
        "slow": 10,
        "middle": 20,
        "fast": 40,
    }
    in_turns = _wiring("round_robin", slow=4.0, middle=2.0, fast=1.0)
    assert set(Counter(in_turns.choose(["slow", "middle", "fast"]) for _ in range(30)).values()) == {10}


def test_peers_get_the_stage_that_needs_them_and_move_where_that_pays() -> None:
    assert stage_for({0: 1, 1: 0, 2: 2}, {0: 1.0, 1: 0.0, 2: 2.0}) == 1
    assert stage_for({0: 2, 1: 1}, {0: 1.0, 1: 3.0}) == 0
    wirings = {0: _wiring("throughput", a=1.0), 1: _wiring("throughput", b=1.0, c=1.0, d=4.0)}
    queues = {0: 9.0, 1: 1.0}
    # The slowest that helps: d raises the first stage by a quarter.
    assert choose_move(wirings, queues, lambda name: True) == ("d", 0)
    assert choose_move(wirings, queues, lambda name: name != "d") == ("b", 0)
    assert choose_move(wirings, {0: 1.0, 1: 9.0}, lambda name: True) is None  # a stage keeps a peer
    even = {0: _wiring("throughput", a=1.0, b=1.0), 1: _wiring("throughput", c=1.0, d=1.0)}
    assert choose_move(even, queues, lambda name: True) is None


def test_a_report_says_how_many_micro_batches_each_peer_did() -> None:
    def did(name: str, stage: int, counted: int) -> dict[str, Any]:
        return {"name": name, "stage": stage, "forwards": counted + 1, "backwards": counted, "counted": counted}

    rows = [
        {"step": 1, "retried": 2, "peers": [did("a", 0, 3), did("b", 1, 8), did("c", 0, 5)]},
        {"step": 2, "retried": 0, "peers": [did("a", 1, 4), did("b", 1, 4), did("c", 0, 8)]},
    ]
    assert swarm_note(rows) == (
        "micro-batches of 3 peers: c 13 (stage 0), b 12 (stage 1), a 7 (stage 0, 1); 2 passes sent again"
    )
    table = str(draw_swarm(rows))
    assert "<td>0, 1</td><td>2</td><td>9</td><td>7</td><td>7</td>" in table
    assert swarm_note([]) is draw_swarm([]) is None


# ----------------------------------------------------------------------------------------------------------------------
# As a person runs it


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str | Path, ...]:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    own = "--swarm.listen", address, "--swarm.secret_file", tmp_path / "run.secret", "--swarm.stages", "2"
    return "--preset", "tiny", "--model.num_layers", "2", "--parallel", "mb4-fp32", "--nproc", "1", *own, *QUICK


def _serve(flags: tuple[str | Path, ...], tmp_path: Path) -> Command:
    address = str(flags[flags.index("--swarm.listen") + 1])
    return Command(address, "--secret-file", tmp_path / "run.secret", verb="swarm", forked=True)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (("--parallel", "pp2-mb4-fp32", "--nproc", "2"), 3, ("it has 2 ranks", "swarm.stages in the place of pp")),
        (("--swarm.stages", "3"), 3, ("swarm.stages 3 are more than the model's 2 layers", "at most 2")),
        (("--model.tied_embeddings", "true"), 3, ("its embedding is on two stages",)),
        (("--optim.freeze", "embed.*"), 2, ("optim.freeze isn't built for swarms", "leave it out")),
        (("--swarm.listen", "host:a"), 2, ("listen 'host:a' is no address with a port", "HOST:PORT")),
    ],
)
def test_what_a_swarm_can_not_train_is_refused(
    more: tuple[str, ...], code: int, words: tuple[str, ...], flags: tuple[str | Path, ...], tmp_path: Path
) -> None:
    ended = train(*flags, "--train.steps", "2", "--run", tmp_path / "run", *more)
    assert_one_sentence(ended, code, *words)


def test_a_peer_without_address_or_secret_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm", "nowhere:port"]) == 2
    assert "nowhere:port is no address with a port: expected HOST:PORT, such as host-a:29700" in capsys.readouterr().err
    assert main(["swarm", "host-a", "--secret-file", str(tmp_path / "none")]) == 2
    assert "copy the one that muster coordinator, or the trainer of a swarm, has made" in capsys.readouterr().err


def test_a_run_goes_on_with_a_swarm_or_without() -> None:
    alone = load_run_config("tiny", None, []).config
    with_swarm = alone.model_copy(update={"swarm": SwarmConfig(stages=4)})
    assert config_changes(alone, with_swarm) == config_changes(with_swarm, alone) == []


def test_who_does_not_know_the_secret_is_refused_both_ways(flags: tuple[str | Path, ...], tmp_path: Path) -> None:
    host, _, port = str(flags[flags.index("--swarm.listen") + 1]).partition(":")
    create_secret(tmp_path / "run.secret")
    said: list[str] = []
    with socket.create_server((host, int(port))) as listener:
        connections = PeerConnections(listener, bytes(32), {}, 1.0, 5.0, said.append)
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n" * 4)
            with contextlib.suppress(ConnectionResetError):
                garbage.recv(1)
        with _serve(flags, tmp_path) as peer:
            ended = peer.wait()
        connections.close()
    assert_one_sentence(ended, 2, "has another secret: give all peers a copy of its secret file")
    assert any("it is no peer of Muster" in line for line in said), said
    assert any("it doesn't know the run's secret" in line for line in said), said


@pytest.mark.soak
def test_a_run_and_its_peers_end_resume_and_report(flags: tuple[str | Path, ...], tmp_path: Path) -> None:
    swarm, alone = tmp_path / "swarm", tmp_path / "alone"
    length = "--train.steps", "6", "--train.save_every", "2"
    with Command(*flags, *length, "--run", swarm) as trainer:
        while not (tmp_path / "run.secret").exists():
            assert trainer.process.poll() is None
        with _serve(flags, tmp_path) as one, _serve(flags, tmp_path) as other:
            trainer.wait_for_step(3)
            trainer.kill()  # peers look for it
            with Command(*flags, *length, "--run", swarm) as again:
                ended = again.wait()
                assert ended.code == 0, ended
            peers = [one.wait(), other.wait()]
    assert [peer.code for peer in peers] == [0, 0]
    assert all("the training is over" in peer.out for peer in peers), peers
    assert "micro-batches of" in ended.out
    page = (swarm / "report.html").read_text()
    assert "Peers of the swarm" in page
    rows = [json.loads(line) for line in (swarm / "swarm.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(sum(one["counted"] for one in row["peers"]) == 2 * 6 for row in rows)  # 24 samples, by 4, on 2 stages
    plain = [word for word in flags if not str(word).startswith("--swarm")]
    place = plain.index("--nproc") + 2
    ended = train(*plain[:place], *QUICK, *length, "--run", alone)
    assert ended.code == 0, ended
    losses = [
        [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (swarm, alone)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    goes_on = train(*plain[:place], *QUICK, *length, "--train.steps", "8", "--run", swarm)
    assert goes_on.code == 0, goes_on
    assert len((swarm / "metrics.jsonl").read_text().splitlines()) == 8


# ----------------------------------------------------------------------------------------------------------------------
# Predictions

RUN_FILE = """
model: {preset: llama3.2-1b, tied_embeddings: false}
parallel: mb1
train: {seq_len: 2048, global_batch_size: 64}
swarm: {stages: 2}
"""


def _simulated(method: Method = "throughput", **line: Any) -> tuple[float, SwarmPasses]:
    """Return the micro-batches a second of peers of speed 1, 2 and 4 on each of two stages, and what became of them."""
    order = {Pass(kind, stage, n): 2 * n + (kind == "F") for stage in (0, 1) for n in range(56) for kind in ("F", "B")}
    peers = [SimulatedPeer(f"{n}-{speed}", n, 1 / speed, 2 / speed, **line) for n in (0, 1) for speed in (1, 2, 4)]
    carried = {(kind, stage): (10_000, 10_000) for kind in ("F", "B") for stage in (0, 1)}
    found = settled_step(SwarmSimulator(order, peers, carried, method=method))
    assert sum(sum(done.values()) for done in found.done.values()) == 4 * 56
    return 56 / max(found.stage_s.values()), found


def test_a_simulated_step_gives_peers_work_by_their_speed_and_is_bound_by_lines() -> None:
    bound = 7 / 3
    rate, found = _simulated()
    assert 0.85 * bound < rate < bound
    assert [found.done[f"0-{speed}"]["B"] for speed in (1, 2, 4)] == [8, 16, 32]
    in_turn, _ = _simulated("round_robin")
    assert in_turn < rate / 2
    slow, found = _simulated(bytes_per_s=20_000.0, uses_trainer_line=True)
    assert slow < 20_000 * 56 / max(found.trainer_bytes.values()) < rate
    assert set(found.trainer_bytes.values()) == {4 * 56 * (10_000 + ANSWER_BYTES)}


def test_a_swarm_is_predicted_with_what_binds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE)
    asked = ["predict", "--plan", str(file), "--cluster"]
    assert main([*asked, "6xh100"]) == 0
    shown = capsys.readouterr().out
    assert "llama3.2-1b in 2 stages on 6 peers, trainer's plan dp1-mb1-bf16: 64 micro-batches a step" in shown
    assert "binds     the peers of stage 1" in shown
    assert main([*asked, "6xh100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == pytest.approx(found["passes_s"] + found["sums_s"] + found["update_s"])
    assert sum(peer["micro_batches"] for peer in found["peers"]) == 2 * 64
    # Each micro-batch's hidden states and their gradients, (1, 2048, 2048) in 2 bytes, once on each stage's lines.
    carried = sum(peer["pass_bytes"] for peer in found["peers"] if peer["stage"] == 0)
    assert carried == pytest.approx(64 * 2 * 2048 * 2048 * 2, rel=0.01)
    assert main([*asked, "8xh100+8xa100", "--json"]) == 0
    unequal = json.loads(capsys.readouterr().out)
    (h100,) = {peer["forward_s"] for peer in unequal["peers"] if peer["stage"] == 0 and "h100" in peer["device"]}
    (a100,) = {peer["forward_s"] for peer in unequal["peers"] if peer["stage"] == 0 and "a100" in peer["device"]}
    assert h100 < a100
    assert main([*asked, "2xh100", "--global-batch", "1"]) == 0
    assert "dp1-mb1-bf16: 1 micro-batch a step" in capsys.readouterr().out
    for flags, code, words in (
        ("1xh100", 3, "the cluster has 1 device, fewer than the 2 stages"),
        ("6xh100 --compile", 2, "--compile isn't built for predictions of swarms"),
        ("6xh100 --mtbf 5", 2, "--mtbf isn't"),
        ("6xh100 --restart-time 5", 2, "--restart-time isn't"),
        ("6xh100 --spares 0", 2, "--spares isn't"),
        ("6xh100 --outer.every 50", 2, "--outer.every isn't"),
    ):
        assert main([*asked, *flags.split()]) == code
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "more", "words"),
    [
        ("mb1-l16", "", "swarm.stages cuts the model"),
        ("pp1v2-szbv", "", "swarm.stages cuts the model"),
        ("pp1v2-sinterleaved", "", "swarm.stages cuts the model"),
        ("mb1-szbh1", "", "leave out schedule zb-h1"),
        ("mb1-s2bp1f1b", "", "leave out schedule 2bp-1f1b"),
        ("mb1-sgpipe", "", "leave out schedule gpipe"),
        ("mb1-spipedream", "", "leave out schedule pipedream"),
        ("mb1-sauto", "", "leave out schedule auto"),
        ("mb1-vocab", "", "vocab needs collectives"),
        ("mb1-tf32", "", "precision tf32 isn't built for swarms"),
        ("mb1", "optim: {name: mezo}", "optim.name mezo isn't built for swarms"),
        ("mb1", "outer: {every: 50}", "outer isn't built for swarms"),
        ("mb1", "train.update_in_backward: true", "train.update_in_backward isn't"),
        ("mb1", "train.elastic: true", "train.elastic isn't"),
        ("mb1", "train.in_memory_checkpoint_every: 5", "train.in_memory_checkpoint_every isn't"),
    ],
)
def test_a_swarm_is_predicted_only_where_it_trains(
    plan: str, more: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE.replace("mb1", plan if plan == "mb1-tf32" else f"{plan}-bf16") + more)
    config = load_run_config("tiny", file, []).config
    with pytest.raises(MusterError) as found:
        require_swarm(config, config.parallel, False)
    assert words in str(found.value)
    assert main(["predict", "--plan", str(file), "--cluster", "4xh100"]) == found.value.exit_code
    assert capsys.readouterr().err.splitlines() == [f"muster: {found.value}"]
