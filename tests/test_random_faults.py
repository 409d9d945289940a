"""Jobs that lose ranks and nodes all the time: every loss is that of an undisturbed run.

`make soak` makes 1,000 faults happen in them; with `PYTEST_ARGS="--faults 5 --fault-seed 2"` five others of each run.
"""

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.nodes import HOSTS, Network, network
from tests.random_faults import HANG_S, Faults, FaultsOfNodes, last_step
from tests.soak_parts import FAULT_PLANS
from tests.train_runs import QUICK, Command, Ended, rows_of

FORKING = (sys.executable, "-m", "tests.forking_launcher")
SMALL = ("--preset", "tiny", *QUICK, "--train.seq_len", "32", "--train.global_batch_size", "12", "--optim.lr", "1e-4")
"""At 3e-3 training is chaotic: other orders of additions differ by 1e-16 at first, by 1e-10 after 45 steps, and wholly
after 70."""
ENDLESS = ("--train.steps", "1000000", "--train.save_every", "3")
STOPPED = 75
RUNS = [(plan, spares) for spares in (2, 0) for plan in FAULT_PLANS]
RUNS_OF_NODES = [("dp4-z1", 0), ("pp2-dp2-z1", 0), ("dp4-z3", 2)]


def words(plan: str, spares: int) -> list[str]:
    elastic = ("--train.elastic", "true", "--train.hang_timeout_s", str(HANG_S), "--train.spares", str(spares))
    return [*SMALL, *ENDLESS, "--parallel", f"{plan}-fp64", *elastic]


def stop(first: Command, *others: Command) -> list[Ended]:
    first.process.send_signal(signal.SIGTERM)
    ended = [one.wait() for one in (first, *others)]
    assert [one.code for one in ended] == [STOPPED] * len(ended), ended  # ranks that crash say so in their errors
    return ended


def undisturbed(plan: str, last: int, folder: Path) -> list[dict]:
    """The rows up to the step `last` of a run that nothing disturbs, which is made once for all tests, in `folder`."""
    run = folder / plan
    if last_step(run) < last:
        words = [*SMALL, *ENDLESS, "--parallel", f"{plan}-fp64", "--run", str(run)]
        with Command(*words, before=FORKING, output=run) as job:
            while last_step(run) < last:
                job.be_patient(f"no step {last}")
            stop(job)
    return rows_of(run)[:last]


def assert_same_losses(run: Path, plan: str, exactly: bool, folder: Path) -> None:
    """Each step's loss and gradient norm are those of a run that nothing disturbs, `exactly` those of the same plan;
    and at most the step that was under way at each loss was done again."""
    last = last_step(run)
    ours, theirs = rows_of(run), undisturbed(plan if exactly else "dp1", last, folder)
    assert [row["step"] for row in ours] == list(range(1, last + 1))
    for own, other in zip(ours, theirs, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert own[key] == (other[key] if exactly else pytest.approx(other[key], rel=1e-10)), (key, own["step"])
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert all(one["lost_steps"] <= 1 for one in attempts), attempts


def tell(request: pytest.FixtureRequest, name: str, seed: str, caused: Sequence[str], run: Path) -> None:
    """Prints how many faults of each kind there were, and how many steps and recoveries."""
    attempts = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    redone = sum(one["lost_steps"] for one in attempts)
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(
            f"\nfaults {name} (seed {seed}): {len(caused)} in {last_step(run)} steps, {redone} done again,"
            f" {len(attempts)} generations and attempts: {dict(Counter(caused))}"
        )


@pytest.fixture(scope="session")
def undisturbed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "spares"), RUNS)
def test_runs_under_random_faults_have_every_loss_of_an_undisturbed_one(
    plan: str, spares: int, tmp_path: Path, undisturbed_runs: Path, request: pytest.FixtureRequest
) -> None:
    """With spares to the bit; without, fewer ranks go on, and others come back."""
    run, seed = tmp_path / "run", f"{plan} {spares} {request.config.option.fault_seed}"
    with Command(*words(plan, spares), "--run", run, before=FORKING, output=run) as job:
        faults = Faults(job, run, 4, seed)
        faults.cause_many(request.config.option.faults)
        stop(job)
    assert_same_losses(run, plan, spares > 0, undisturbed_runs)
    tell(request, f"{plan} {spares}", seed, faults.caused, run)


@pytest.fixture
def nodes() -> Iterator[Network]:
    with network() as found:
        yield found


@pytest.mark.soak
@pytest.mark.parametrize(("plan", "spares"), RUNS_OF_NODES)
def test_runs_on_two_nodes_under_random_faults_have_every_loss_of_an_undisturbed_one(
    plan: str, spares: int, nodes: Network, tmp_path: Path, undisturbed_runs: Path, request: pytest.FixtureRequest
) -> None:
    """The memory of a node is lost with its launcher. Where that is node 0's, the other one's copies are all there
    is."""
    run, seed = tmp_path / "run", f"{plan} {spares} nodes {request.config.option.fault_seed}"

    def start(node: int) -> Command:
        place = tmp_path / HOSTS[node]
        place.mkdir(exist_ok=True)
        own = words(plan, spares)
        own += ["--run", str(run), "--train.restarts", "3"]
        return nodes.launcher(node, *own, own_memory=True, cwd=place, before=FORKING, output=place)

    def set_cable(is_in: bool) -> None:
        nodes.mend(1) if is_in else nodes.cut(1)

    launchers = [start(0), start(1)]
    try:
        said = tuple(tmp_path / f"{host}.out" for host in HOSTS)
        faults = FaultsOfNodes(launchers, start, set_cable, run, said, 4, seed)
        faults.cause_many(request.config.option.faults)
        stop(*launchers)
    finally:
        for one in launchers:
            one.__exit__()
    assert_same_losses(run, plan, False, undisturbed_runs)
    tell(request, f"{plan} {spares} on two nodes", seed, faults.caused, run)
