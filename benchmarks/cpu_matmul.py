"""Float32 matmuls of a training step by oneDNN beside those of PyTorch's own choice, in turns on one core.

    python -m benchmarks.cpu_matmul [--rounds 15]

GFLOP/s of a linear layer's forward, of its input's gradient and of its weight's gradient, medians, and their ratio:
above 1, oneDNN is faster. Muster lets oneDNN compute them where MKL doesn't use the processor's AVX-512
(muster/parallel/cpu_matmul.py); the last line says if it does here.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from muster.parallel.cpu_matmul import multiply, use_wide_matmuls

SHAPES = ((2048, 192, 512), (2048, 512, 512), (2048, 512, 1376), (2048, 1376, 512), (2048, 512, 8192))
"""Rows, width of the input and width of the output."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("rows × in × out      matmul     PyTorch  oneDNN  GFLOP/s, ratio")
    for rows, width, outer in SHAPES:
        x, weight, grad = torch.randn(rows, width), torch.randn(outer, width), torch.randn(rows, outer)
        operands = {"forward": (x, weight.t()), "dX": (grad, weight), "dW": (grad.t(), x)}
        for name, (left, right) in operands.items():
            times_s = {"PyTorch": list[float](), "oneDNN": list[float]()}
            for _ in range(rounds):
                times_s["PyTorch"].append(seconds(left, right, torch.mm))
                times_s["oneDNN"].append(seconds(left, right, multiply))
            gflops = {kind: 2e-9 * rows * width * outer / median(found) for kind, found in times_s.items()}
            shape = f"{rows} × {width} × {outer}"
            ratio = gflops["oneDNN"] / gflops["PyTorch"]
            print(f"{shape:20} {name:8} {gflops['PyTorch']:8.0f} {gflops['oneDNN']:8.0f} {ratio:10.2f}", flush=True)
    print(f"Muster takes {'oneDNN' if use_wide_matmuls() else 'PyTorch'}'s here")


def seconds(left: Tensor, right: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> float:
    begin_s = perf_counter()
    product(left, right)
    return perf_counter() - begin_s


if __name__ == "__main__":
    main()
