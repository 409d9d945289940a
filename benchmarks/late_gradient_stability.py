"""Steepest loss that gradient descent with momentum still goes down when its gradients come late.

`python -m benchmarks.late_gradient_stability [--delays 0 1 2 5] [--beta1 0.9 0.95 0.99]`. On a quadratic loss of
curvature h, steps by the mean m = β m + (1 − β) g, as those of AdamW but for the division by the mean square, are a
linear recurrence of the weights. They converge as long as all roots of its characteristic polynomial lie within the
unit circle. The table has the highest h · learning rate for which they do: without compensation, with weight prediction
(`optim.delay_compensation` predict), with Nesterov's form (`optim.nesterov`), and with both.
"""

import argparse
from collections.abc import Sequence

import numpy as np


def steepest(beta: float, delay: int, predicts: bool, nesterov: bool) -> float:
    """Return the highest curvature times learning rate at which gradients that are `delay` steps late don't diverge."""
    low, high = 0.0, 4 * (1 + beta) / (1 - beta)
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _largest_root(beta, delay, predicts, nesterov, middle) < 1 else (low, middle)
    return low


def _largest_root(beta: float, delay: int, predicts: bool, nesterov: bool, steepness: float) -> float:
    """Return the largest magnitude of a root z of (z − 1) (z − β) zᴰ⁺² + (1 − β) h lr · lead · ahead.

    The first factor is that of w(t + 1) − w(t) = β (w(t) − w(t − 1)) − lr (1 − β) g; Nesterov's form puts
    g(t) + β (g(t) − g(t − 1)) in place of g(t), and prediction w + D (w − its predecessor) in place of the late w.
    """
    momentum = np.polymul([1, -1], [1, -beta])
    lead = [1 + beta, -beta] if nesterov else [1, 0]
    ahead = [1 + delay, -delay] if predicts else [1, 0]
    gradients = steepness * (1 - beta) * np.polymul(np.polymul(lead, ahead), [1, 0])
    roots = np.roots(np.polyadd(np.polymul(momentum, [1] + [0] * (delay + 2)), gradients))
    return float(np.abs(roots).max())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=int, nargs="+", default=[0, 1, 2, 5])
    parser.add_argument("--beta1", type=float, nargs="+", default=[0.9, 0.95, 0.99])
    args = parser.parse_args(argv)
    print(f"{'delay':>5}  {'beta1':>5}  {'late':>6}  {'predict':>7}  {'nesterov':>8}  {'both':>6}")
    for delay in args.delays:
        for beta in args.beta1:
            ways = ((False, False), (True, False), (False, True), (True, True))
            late, predict, nesterov, both = (steepest(beta, delay, *way) for way in ways)
            print(f"{delay:>5}  {beta:>5}  {late:>6.2f}  {predict:>7.2f}  {nesterov:>8.2f}  {both:>6.2f}")


if __name__ == "__main__":
    main()
