"""Time that a training loses to failures: exact expectations for failures that come independently of each other.

Devices fail at a constant rate, so that the time to the next failure is exponential, with mean M. Segments of τ seconds
of work each end with δ seconds in which devices wait while the state is copied; the copy is complete w seconds later,
beside the next segment. A failure destroys what follows the last complete copy. A restart takes R seconds, and begins
again if a device fails meanwhile (J. T. Daly, Future Generation Computer Systems 22 (3), 2006, here with a copy that
is written in the background).
"""

from dataclasses import dataclass
from math import exp, expm1, sqrt

from muster.spec.errors import ConfigError
from muster.spec.formatting import format_seconds

MIN_EFFECTIVE_SHARE = 0.01
"""Share of the time in steps that count under which a training is said never to end."""

_NO_SHARE = 1e-12
"""Share of the time that is as good as none; more spares only make it smaller."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Rate of failures, and the times of saving and recovering, in seconds."""

    mtbf_s: float
    """Mean time between failures of the whole job (M)."""
    stall_s: float
    """Time for which devices wait for each copy (δ)."""
    write_s: float
    """Time from the end of that wait until the copy is complete (w)."""
    restart_s: float
    """Time from a failure to the first new step, loading included (R)."""


@dataclass(frozen=True, slots=True)
class ExpectedTimes:
    """Expected seconds that a training takes beside its work, and its failures."""

    checkpoints_s: float
    lost_s: float
    restarts_s: float
    failures: float


def best_interval_s(model: FailureModel) -> float:
    """Return the seconds of work between copies that lose least time: Daly's higher-order estimate (equation 37), which
    for rare failures is Young's √(2 δ M) (CACM 17 (9), 1974)."""
    stall, mtbf = model.stall_s, model.mtbf_s
    if stall >= 2 * mtbf:
        return mtbf
    root = sqrt(stall / (2 * mtbf))
    return sqrt(2 * stall * mtbf) * (1 + root / 3 + root * root / 9) - stall


def expected_times(work_s: float, interval_s: float, model: FailureModel) -> ExpectedTimes:
    """Return the expected times of a training of `work_s` seconds that copies its state every `interval_s`.

    Between two restarts it runs for an exponential time X with mean M, and completes n copies or more with the
    probability P(X ≥ n (τ + δ) + w), so that the mean of complete copies is e^(−w/M) / (e^((τ+δ)/M) − 1). A restart
    with its repetitions takes M (e^(R/M) − 1).

    Raises ConfigError where less than MIN_EFFECTIVE_SHARE of the time would be work that counts.
    """
    mtbf = model.mtbf_s
    exponents = (interval_s + model.stall_s) / mtbf, model.write_s / mtbf, model.restart_s / mtbf
    share = 0.0
    if sum(exponents) < 700:  # beyond, the exponentials overflow
        runs = work_s / interval_s * expm1(exponents[0]) * exp(exponents[1])
        total_s = runs * mtbf * exp(exponents[2])
        share = work_s / total_s
    if share < MIN_EFFECTIVE_SHARE:
        raise ConfigError(
            f"the job would fail every {format_seconds(mtbf)}, and a restart takes"
            f" {format_seconds(model.restart_s)}: the training would never end; give a larger --mtbf or a shorter"
            " --restart-time"
        )
    checkpoints_s = work_s / interval_s * model.stall_s
    restarts_s = runs * mtbf * expm1(exponents[2])
    return ExpectedTimes(checkpoints_s, runs * mtbf - work_s - checkpoints_s, restarts_s, total_s / mtbf)


def waiting_share(nodes_in_repair: float, spares: int) -> float:
    """Return the share of the time in which a job waits for a repaired node because more than its spares are away.

    `nodes_in_repair` is the rate of failures times the time of a repair. A waiting job doesn't fail, so the nodes in
    repair are those of a queue with spares + 1 servers that turns others away: Erlang's formula B (A. K. Erlang, 1917).
    """
    share = 1.0
    for servers in range(1, spares + 2):
        share = nodes_in_repair * share / (servers + nodes_in_repair * share)
        if share < _NO_SHARE:
            return 0.0
    return share
