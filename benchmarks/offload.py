"""Optimizer state off the device: the host's update beside DeepSpeed's CPUAdam, and the store on disk beside the disk.

    python -m benchmarks.offload [--elements 32M] [--rounds 7] [--dir FOLDER] [--deepspeed FOLDER] [--json FILE]

One process, all its cores, the contestants in turns. An update is AdamW over float32 parameters, gradients and moments
in host memory. DeepSpeed's operator is built by a compiler at its first use; `--deepspeed` names a folder that
`pip install --target FOLDER --no-deps deepspeed py-cpuinfo hjson` has filled. Every write to the disk ends when the
data are on it, and before each read they are dropped from the page cache.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.compare import Comparison, interleave, print_comparison, write_results
from muster.config.optim_config import OptimConfig
from muster.layout.tensor_layout import Box, TensorLayout
from muster.optim.host_optimizer import HostOptimizer
from muster.optim.state_store import StateStore
from muster.parallel.offload import HostLink
from muster.probe.disk_rates import measure_disk
from muster.spec.units import parse_count

PART_ELEMENTS = 1 << 22
"""Elements of one tensor, about those of a matrix of a small layer."""
LR = 1e-3


def layout_of(name: str, tensor: Tensor) -> TensorLayout:
    """Return the layout of a tensor that is whole on this rank."""
    shape = tuple(tensor.shape)
    return TensorLayout(name, shape, (Box((0,) * len(shape), shape),))


def make_params(elements: int) -> dict[str, Tensor]:
    """Return parameters with gradients, of so many elements together."""
    generator = torch.Generator().manual_seed(0)
    width = 1024
    params = {}
    for number in range(max(1, elements // PART_ELEMENTS)):
        one = torch.randn(PART_ELEMENTS // width, width, generator=generator)
        one.grad = torch.randn(one.shape, generator=generator)
        params[f"layers.{number}.weight"] = one
    return params


class HostSteps:
    """Muster's update in host memory, part by part; with a store, from and to disk."""

    def __init__(self, elements: int, store: StateStore | None = None) -> None:
        self.params = make_params(elements)
        layouts = {name: layout_of(name, one) for name, one in self.params.items()}
        parts = {(0, number): [name] for number, name in enumerate(self.params)}
        config = OptimConfig(lr=LR, weight_decay=0.1)
        link = HostLink(torch.device("cpu"))
        on_disk = parts if store is not None else ()
        self.optimizer = HostOptimizer(config, self.params, layouts, None, parts, link, on_disk, store)
        self.numel = sum(one.numel() for one in self.params.values())
        self.update_s = 0.0

    def update(self) -> float:
        """Take a step; return the elements that are updated in a second of the updates alone."""
        spent_s = 0.0
        for key, part in self.optimizer.parts.items():
            part.fetch()()
            begin_s = perf_counter()
            self.optimizer.update(key, LR)
            spent_s += perf_counter() - begin_s
            part.give_back()()
        self.optimizer.step(LR)
        return self.numel / spent_s


def deepspeed_steps(elements: int) -> tuple[Callable[[], float], dict[str, Tensor]]:
    """Return a step of DeepSpeed's CPUAdam over the same tensors, and these; ImportError or a build's error where it
    can't be had."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

    params = make_params(elements)
    own = [torch.nn.Parameter(one.detach().clone()) for one in params.values()]
    for mine, one in zip(own, params.values(), strict=True):
        mine.grad = one.grad
    optimizer = DeepSpeedCPUAdam(own, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
    numel = sum(one.numel() for one in own)

    def step() -> float:
        begin_s = perf_counter()
        optimizer.step()
        return numel / (perf_counter() - begin_s)

    return step, dict(zip(params, own, strict=True))


def compare_updates(elements: int, rounds: int) -> Comparison:
    """Time updates of the same parameters; their results must agree."""
    host = HostSteps(elements)
    plain = make_params(elements)
    fused = torch.optim.AdamW(list(plain.values()), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def torch_step() -> float:
        begin_s = perf_counter()
        fused.step()
        return host.numel / (perf_counter() - begin_s)

    contestants: dict[str, Callable[[], float]] = {"muster": host.update, "torch fused AdamW": torch_step}
    results = {"torch fused AdamW": plain}
    try:
        contestants["deepspeed CPUAdam"], results["deepspeed CPUAdam"] = deepspeed_steps(elements)
    except Exception as error:  # whatever a missing package or a failed build raises
        print(f"DeepSpeed's CPUAdam can't be had here: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    interleave(contestants, 1)  # allocations, and the build
    samples = interleave(contestants, rounds)
    for name, other in results.items():
        for key, one in host.params.items():
            difference = float((one.detach() - other[key].detach()).abs().max())
            if difference > 1e-5:
                raise SystemExit(f"{name} made another update: {key} differs by {difference:g}")
    millions = {name: [value / 1e6 for value in values] for name, values in samples.items()}
    title = f"AdamW of {host.numel / 1e6:,.0f}M elements in host memory, {torch.get_num_threads()} threads"
    return Comparison(title, "M elements/s", "muster", millions, {"deepspeed CPUAdam": 1.0})


def compare_disk(elements: int, rounds: int, folder: Path) -> list[Comparison]:
    """Time what the store reads and writes for an update beside long reads and writes of one file."""
    store = StateStore(folder)
    parts = list(HostSteps(elements, store).optimizer.parts.values())
    total = store.num_bytes

    def read() -> float:
        os.posix_fadvise(store._fd, 0, total, os.POSIX_FADV_DONTNEED)
        begin_s = perf_counter()
        for part in parts:
            assert part.stored is not None
            part.stored.read()()
        return total / (perf_counter() - begin_s) / 1e6

    def write() -> float:
        for part in parts:
            assert part.stored is not None
            part.stored.is_changed = True
        begin_s = perf_counter()
        for part in parts:
            assert part.stored is not None
            part.stored.write()()
        os.fdatasync(store._fd)
        return total / (perf_counter() - begin_s) / 1e6

    def disk(place: int) -> float:
        found = measure_disk(folder, total)
        assert found is not None
        return found[place] / 1e6

    samples = interleave(
        {"read": read, "disk read": lambda: disk(0), "write": write, "disk write": lambda: disk(1)}, rounds
    )
    title = f"optimizer state of {total / 1e6:,.0f} MB on disk, CRC-32 of each part included: "
    return [
        Comparison(
            title + way, "MB/s", "muster", {"muster": samples[way], "disk": samples[f"disk {way}"]}, {"disk": 0.8}
        )
        for way in ("read", "write")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", default="32M")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path, help="folder of the disk that is measured (default: a temporary one)")
    parser.add_argument("--deepspeed", type=Path, help="folder with DeepSpeed's package, where it isn't installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.deepspeed:
        sys.path.append(str(args.deepspeed))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    elements = int(parse_count(args.elements, "--elements"))
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        found = [compare_updates(elements, args.rounds), *compare_disk(elements, args.rounds, Path(place))]
    for comparison in found:
        print_comparison(comparison)
    if args.json:
        write_results(args.json, found)


if __name__ == "__main__":
    main()
