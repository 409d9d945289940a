"""Tokens per second of islands on a slow line between two sites, beside those of a plan that communicates in each step.

`python -m benchmarks.islands [--mbit RATE] [--rounds N]`, as root. Two sites of two machines each, network namespaces
of this machine; links between the sites are shaped by `tc tbf`. Islands that meet every 20 steps and data parallelism
over all machines are trained in turn by `muster train` over gloo, on fast and on slow lines. Printed are the tokens per
second on slow lines over those on fast ones, measured, and predicted from the measured step on fast lines: of islands
by `muster predict`'s round, of data parallelism by its predicted communication.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.unequal_measured import NEAR, SETTINGS, Case, Contestant, cluster_of, network, step_seconds
from muster.config.load_config import load_run_config
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.cost.time.island_round import island_round
from muster.simulate.predict import predict
from muster.spec.plan_name import parse_plan_name

EVERY = 20
METHODS: dict[str, dict[str, str]] = {
    "diloco": {"method": "diloco", "compression": "int8"},
    "streaming": {"method": "streaming", "delay": "8", "compression": "int8"},
    "dilocox": {"method": "dilocox", "compression": "int8"},
    "co2": {"method": "co2", "compression": "int8"},
}
PLAN, ISLANDS = "dp4-mb2-z1-fp32", "isl2-dp2-mb2-z1-fp32"


def settings_of(method: str | None) -> list[tuple[str, str]]:
    """Return the keys of a run file of one method, or of data parallelism."""
    outer = {} if method is None else METHODS[method] | {"every": str(EVERY)}
    return [*SETTINGS, *((f"outer.{key}", value) for key, value in outer.items())]


def slow_share(method: str | None, mbit: float, step_s: float) -> float:
    """Return the predicted tokens per second on slow lines over those on fast ones, where a step takes `step_s`."""
    name = PLAN if method is None else ISLANDS
    config: RunConfig = load_run_config("tiny", None, [*settings_of(method), ("parallel", name)]).config
    plan, slow, fast = parse_plan_name(name), cluster_of(case_of(mbit)), cluster_of(case_of(NEAR))
    if method is None:
        times = [predict(config.model, plan, config.workload, one).step_time_s for one in (fast, slow)]
        return step_s / (step_s + times[1] - times[0])
    outer = config.outer or OuterConfig()
    rounds = [island_round(config.model, plan, config.workload, one, outer, step_s) for one in (fast, slow)]
    return rounds[0].round_s / rounds[1].round_s


def case_of(mbit: float) -> Case:
    """Return two sites of two machines with a line of a rate between them."""
    return Case(f"{mbit:g}", "EEWW", mbit)


def measured_s(method: str | None, mbit: float, rounds: int) -> list[float]:
    """Return the seconds of a step: of islands the mean of each whole round, of data parallelism those of each."""
    name = PLAN if method is None else ISLANDS
    one = Contestant(method or name, parse_plan_name(name), (0, 1, 2, 3), 0.0)
    steps = 6 if method is None else (rounds + 1) * EVERY + 2
    case = case_of(mbit)
    with network(case) as names, tempfile.TemporaryDirectory() as place:
        found = step_seconds(one, names, Path(place), steps, settings_of(method))
    if method is None:
        return found
    # The first round starts the network, and one with a delay hasn't waited before its end; of the last steps those
    # after the last meeting of a round are left out.
    return [mean(found[EVERY * n - 2 : EVERY * (n + 1) - 2]) for n in range(1, rounds + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what each method keeps of its speed on the slow line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=20.0, help="rate of the links between the sites")
    parser.add_argument("--rounds", type=int, default=2, help="rounds that are measured in each run")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    print(f"lines of {args.mbit:g} Mbit/s between two sites of two machines; on fast lines {NEAR:g} Mbit/s")
    for method in (None, *METHODS):
        fast = measured_s(method, NEAR, args.rounds)
        slow = measured_s(method, args.mbit, args.rounds)
        again = measured_s(method, NEAR, args.rounds)
        step_s = median([*fast, *again])
        share, predicted = step_s / median(slow), slow_share(method, args.mbit, step_s)
        print(
            f"{method or 'none':10} {ISLANDS if method else PLAN:20} step {step_s:.3f} s"
            f" ({min(fast + again):.3f}-{max(fast + again):.3f}), slow {median(slow):.3f} s"
            f" ({min(slow):.3f}-{max(slow):.3f}): keeps {share:.0%}, predicted {predicted:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
