"""How much do gradients lose that travel in bf16: sent to all and summed in float32, or added up around a ring?

    .venv/bin/python -m benchmarks.grad_reduce [--elements 100000]

Draws the gradients of P ranks, each element from a normal distribution, and compares both sums, and the one in float32,
with that in float64: root mean square of the errors, relative to that of the sums. Both ways send half the bytes of a
reduce-scatter in float32.
"""

import argparse

import torch
from torch import Tensor

from muster.parallel.grad_reduce import sum_in_rank_order

RANKS = (2, 8, 64, 512)


def ring_sum(gradients_PN: Tensor) -> Tensor:
    """Return the sum that a ring makes of gradients in their dtype: each rank adds its own to what has arrived."""
    total_N = gradients_PN[0]
    for gradient_N in gradients_PN[1:]:
        total_N = total_N + gradient_N
    return total_N


def errors(num_ranks: int, elements: int) -> tuple[float, float, float]:
    """Return the relative errors of an all-to-all in bf16, of a ring in bf16, and of one in float32."""
    generator = torch.Generator().manual_seed(num_ranks)
    gradients_PN = torch.randn(num_ranks, elements, generator=generator)
    exact_N = gradients_PN.double().sum(0)
    summed_N = torch.empty(elements)
    sum_in_rank_order(gradients_PN.bfloat16(), summed_N)
    made = (summed_N, ring_sum(gradients_PN.bfloat16()), ring_sum(gradients_PN))
    first, second, third = (float((one.double() - exact_N).norm() / exact_N.norm()) for one in made)
    return first, second, third


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000)
    elements = parser.parse_args().elements
    print(f"{'ranks':>5} {'all-to-all, bf16':>17} {'ring, bf16':>11} {'ratio':>6} {'ring, fp32':>11}")
    for num_ranks in RANKS:
        all_to_all, ring, exact = errors(num_ranks, elements)
        print(f"{num_ranks:5} {all_to_all:17.2e} {ring:11.2e} {ring / all_to_all:6.1f} {exact:11.1e}")


if __name__ == "__main__":
    main()
