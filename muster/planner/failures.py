"""Time that a training loses to failures: exact expectations for failures that come independently of each other.

Devices fail at a constant rate, so that the time to the next failure is exponential, with mean M. Segments of τ seconds
of work each end with δ seconds in which devices wait while the state is copied; the copy is complete w seconds later,
beside the next segment. A failure destroys what follows the last complete copy. A restart takes R seconds, and begins
again if a device fails meanwhile (J. T. Daly, Future Generation Computer Systems 22 (3), 2006, here with a copy that
is written in the background).
"""

from dataclasses import dataclass
from math import ceil, exp, expm1, isfinite, log2, sqrt

import numpy as np

from muster.spec.errors import ConfigError
from muster.spec.formatting import format_seconds

MIN_EFFECTIVE_SHARE = 0.01
"""Share of the time in steps that count under which a training is said never to end."""

_STEP = 0.1
"""Largest number of changes in a step whose probabilities are a power series."""
_MOST_DOUBLINGS = 50
"""Doublings of such steps up to which errors of rounding stay small; a training that long has the usual share."""
_MOST_STATES = 300
"""Spares from which the usual share of the time is taken for that of any training."""
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


def waiting_s(running_s: float, mtbf_s: float, repair_s: float, spares: int) -> float:
    """Return the expected time that a job waits for repaired nodes until it has run for `running_s`, in seconds, if all
    its spares are there at the beginning.

    A repair takes an exponential time. While the job runs, nodes in repair grow by failures and shrink by repairs; a
    failure while all spares are away lets it wait for the first of spares + 1 repairs. The nodes in repair are a
    birth-death process, whose transient is followed here: for most trainings their number is never the usual one
    (`waiting_share`) that it takes several repairs to reach.
    """
    in_repair = repair_s / mtbf_s
    share = waiting_share(in_repair, spares)
    usual_s = running_s * share / (1 - share)  # of a job that has run for long
    most_steps = running_s * (in_repair + spares) / repair_s / _STEP
    if not usual_s or not isfinite(most_steps) or spares >= _MOST_STATES:
        return usual_s
    doublings = max(0, ceil(log2(most_steps)))
    if doublings > _MOST_DOUBLINGS:
        return usual_s
    all_away_s = _time_in_last_state(running_s, doublings, 1 / mtbf_s, 1 / repair_s, spares)
    return min(usual_s, in_repair / (spares + 1) * all_away_s)


def _time_in_last_state(time_s: float, doublings: int, births: float, deaths: float, last: int) -> float:
    """Return the seconds of `time_s` that a birth-death process of states 0 to `last` spends in the last one, if it
    begins in state 0.

    `births` is the rate of going up from each state but the last; `deaths` that of each of k to go down from state k.
    exp(Qh) and its integral of a short step h, of their power series, are doubled until the step is the whole time:
    exp(2Qh) = exp(Qh)², and the integral of 2h is that of h times (1 + exp(Qh)). None of these numbers is negative.
    """
    states = np.arange(last + 1)
    rates = np.diag(np.full(last, births), 1) + np.diag(deaths * states[1:], -1)
    rates -= np.diag(rates.sum(axis=1))
    step_s = time_s / 2**doublings
    chance, stay_s = np.eye(last + 1), np.eye(last + 1)[0] * step_s
    term, of_first = np.eye(last + 1), np.eye(last + 1)[0]
    for power in range(1, 6):
        term = term @ rates * (step_s / power)
        chance = chance + term
        of_first = of_first @ rates * (step_s / (power + 1))
        stay_s = stay_s + of_first * step_s
    for _ in range(doublings):
        stay_s = stay_s + stay_s @ chance
        chance = chance @ chance
    return float(stay_s[last])


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
