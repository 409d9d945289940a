"""Gains of the planner on an unequal network: ranks in network namespaces of this machine, links shaped by rate.

`python -m benchmarks.unequal_measured [--case NAME] [--rounds N] [--steps N]`, as root. Each rank has a machine of its
own, a namespace, and a link to each other one, which `tc tbf` shapes: links are what a measurement pair by pair shows.
The best plan for the machines as they are listed, with equal stages, and the plan and order of machines that the
planner finds are trained in turn by `muster train` over gloo; printed are the medians of their steps and the ratio,
measured and predicted.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

from muster.config.cluster_files import load_device, load_link
from muster.config.load_config import load_run_config, plan_yaml
from muster.planner.heterogeneous import find_best_plans
from muster.planner.request import PlanRequest
from muster.planner.search import search
from muster.spec.cluster import ClusterSpec, NodeGroup
from muster.spec.device import Nics
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name

SETTINGS = [
    ("model.hidden_size", "256"),
    ("model.intermediate_size", "768"),
    ("model.num_layers", "8"),
    ("train.seq_len", "32"),
    ("train.global_batch_size", "16"),
    ("eval.batches", "0"),
    ("train.sample_tokens", "0"),
    ("train.log_every", "1"),
]
"""A model whose gradients and hidden states outweigh its arithmetic on these links."""

WARM_STEPS = 2
PORT = 29517


@dataclass(frozen=True)
class Case:
    """Machines as they are listed, by the letter of their site, and rates in Mbit/s from one to another."""

    name: str
    machines: str
    far: float
    """Between machines of two sites."""
    slow: tuple[int, ...] = ()
    """Machines whose links are all as slow."""

    def rate(self, one: int, other: int) -> float:
        """From one machine to another."""
        near = self.machines[one] == self.machines[other] and not {one, other} & set(self.slow)
        return NEAR if near else self.far


NEAR = 400.0
CASES = (Case("two-sites", "EWWE", 2.5), Case("slow-card", "EEEE", 2.5, (1,)))


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def cluster_of(case: Case) -> ClusterSpec:
    """The case as the planner sees it: a core for every two machines, as four share two here."""
    cpu = load_device("cpu")
    peaks = {precision: peak / 2 for precision, peak in cpu.peak_flops_per_s.items()}
    device = cpu.model_copy(update={"shared_cores": None, "peak_flops_per_s": peaks})
    nics = Nics(link=load_link("eth-25g"))
    memory = cpu.node.intra  # type: ignore[union-attr]
    count = range(len(case.machines))

    def rate(one: int, other: int) -> float:
        return memory.bandwidth_bytes_per_s if one == other else case.rate(one, other) * 1e6 / 8

    group = NodeGroup(num_nodes=len(case.machines), devices_per_node=1, device=device, intra=memory, nics=nics)
    matrix = tuple(tuple(rate(one, other) for other in count) for one in count)
    return ClusterSpec(name=case.name, groups=(group,), node_bandwidth_bytes_per_s=matrix)


@dataclass(frozen=True)
class Contestant:
    """A plan, on which machine each rank runs, and the step that is predicted."""

    name: str
    plan: Plan
    order: tuple[int, ...]
    predicted_s: float


def contestants(case: Case) -> list[Contestant]:
    """The best plan for the machines as listed with equal stages, and what the planner finds."""
    config = load_run_config("tiny", None, [*SETTINGS, ("parallel", "dp4-fp32")]).config
    request = PlanRequest(config.model, cluster_of(case), config.workload, precision="fp32", runnable=True)
    naive = search(replace(request, fixed={"stages": ()}), 1).best[0]
    found = find_best_plans(request, 1)
    best = found.result.best[0]
    listed = tuple(range(len(case.machines)))
    return [
        Contestant("as listed", naive.plan, listed, naive.prediction.step_time_s),
        Contestant("found", best.plan, found.node_order or listed, best.prediction.step_time_s),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# The network


def command(*words: str) -> None:
    """Runs one command; its error ends the benchmark."""
    subprocess.run(words, check=True)


@contextmanager
def network(case: Case) -> Iterator[list[str]]:
    """The namespaces of the machines, in the order in which they are listed, with a link between every two."""
    names = [f"mu{os.getpid()}n{index}" for index in range(len(case.machines))]
    try:
        for index, name in enumerate(names):
            command("ip", "netns", "add", name)
            command("ip", "-n", name, "link", "set", "lo", "up")
            # An interface that only holds the machine's one address, by which gloo knows it.
            command("ip", "-n", name, "link", "add", "net0", "type", "veth", "peer", "name", "stub0")
            command("ip", "-n", name, "addr", "add", f"{address(index)}/32", "dev", "net0")
            for device in ("net0", "stub0"):
                command("ip", "-n", name, "link", "set", device, "up")
        for one, other in combinations(range(len(names)), 2):
            first, second = names[one], names[other]
            ends = ("netns", first, "type", "veth", "peer", "name", f"to{one}", "netns", second)
            command("ip", "link", "add", f"to{other}", *ends)
            join(case, one, other, first)
            join(case, other, one, second)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def address(machine: int) -> str:
    return f"10.77.0.{machine + 1}"


def join(case: Case, machine: int, other: int, namespace: str) -> None:
    """One end of a link: what leaves by it is limited."""
    device = f"to{other}"
    mbit = case.rate(machine, other)
    burst = max(8_000, int(mbit * 1e6 / 8 / 100))  # what may pass at once: a hundredth of a second's
    rate = ("rate", f"{mbit:g}mbit", "burst", f"{burst}b", "latency", "400ms")
    command("ip", "-n", namespace, "link", "set", device, "up")
    command("ip", "-n", namespace, "route", "add", f"{address(other)}/32", "dev", device, "src", address(machine))
    command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate)


# ----------------------------------------------------------------------------------------------------------------------
# Training


def step_seconds(
    one: Contestant,
    names: Sequence[str],
    folder: Path,
    steps: int,
    settings: Sequence[tuple[str, str]] = tuple(SETTINGS),
) -> list[float]:
    """Seconds of each step after the first few, with each rank in its machine's namespace."""
    (folder / "plan.yaml").write_text(plan_yaml(one.plan))
    run = folder / "run"
    words = [sys.executable, "-m", "muster", "train", "--preset", "tiny", "--parallel", str(folder / "plan.yaml")]
    words += ["--run", str(run), "--fresh", "--train.steps", str(steps)]
    words += [word for key, value in settings for word in (f"--{key}", value)]
    ranks = []
    for rank, machine in enumerate(one.order):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(one.order)),
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": address(one.order[0]),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": "unequal",
            "GLOO_SOCKET_IFNAME": "net0",
            "OMP_NUM_THREADS": "1",
        }
        log = (folder / f"rank-{rank}.txt").open("w")
        inside = ["ip", "netns", "exec", names[machine], *words]
        ranks.append(subprocess.Popen(inside, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}:\n{(folder / 'rank-0.txt').read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step"] for row in rows if row["step"] > WARM_STEPS]


def main() -> None:
    """Prints what each case takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan, in turn")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plans-only", action="store_true", help="print the plans and their predicted steps")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    for case in CASES:
        if args.case not in (None, case.name):
            continue
        pair = contestants(case)
        taken: dict[str, list[float]] = {one.name: [] for one in pair}
        if not args.plans_only:
            with network(case) as names, tempfile.TemporaryDirectory() as place:
                for _ in range(args.rounds):
                    for one in pair:
                        taken[one.name] += step_seconds(one, names, Path(place), args.steps)
        for one in pair:
            order = "".join(case.machines[machine] for machine in one.order)
            order += f" ({' '.join(map(str, one.order))})"
            times = taken[one.name]
            shown = f"{median(times):.3f} s ({min(times):.3f}-{max(times):.3f})" if times else ""
            print(
                f"{case.name:10} {one.name:10} {order:16} {format_plan_name(one.plan)}: {shown},"
                f" predicted {one.predicted_s:.3f} s"
            )
        naive, found = pair
        predicted = f"predicted {naive.predicted_s / found.predicted_s:.2f}"
        if not args.plans_only:
            print(f"{case.name:10} gain {median(taken[naive.name]) / median(taken[found.name]):.2f}, {predicted}")
        else:
            print(f"{case.name:10} gain {predicted}")


if __name__ == "__main__":
    main()
