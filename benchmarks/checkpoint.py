"""Speed of checkpoints against dd, plain safetensors, torch.distributed.checkpoint, and of one way against another.

    python -m benchmarks.checkpoint [--megabytes 512] [--rounds 5] [--dir FOLDER] [--json FILE]

One process holds a model's tensors; all contestants take turns within each round. Before each read the files are
dropped from the page cache.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compare import Comparison, interleave, print_comparison, write_results
from muster.checkpoint.async_saver import AsyncSaver, SaveRequest
from muster.checkpoint.checkpoint_dir import RetentionPolicy
from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.save import save, single_rank_exchange, write_local_shards, write_manifest
from muster.layout.tensor_layout import Box, TensorLayout, chunk_bounds

INFO = {"plan": {}, "model": {}, "counters": {}}
WIDTH = 1024
MATRIX_SIZE, PASSES = 1024, 16
"""A step's passes are so many products of square matrices: about half a second on one core."""
MIN_TIME_S = 0.001
"""A shorter time can't be told from none, where two steps are compared."""
NUM_WRITERS = 4
"""Ranks that wrote the checkpoint of another plan."""


def tensors(megabytes: int) -> dict[str, Tensor]:
    """Return fp32 matrices and a few vectors of so many MB in all."""
    rows = 4096
    count = max(1, megabytes * 10**6 // (rows * WIDTH * 4))
    found = {f"model/layers.{i}.weight": torch.randn(rows, WIDTH) for i in range(count)}
    return found | {f"model/layers.{i}.norm": torch.randn(WIDTH) for i in range(count)}


def make_shards(values: dict[str, Tensor], part: int = 0, parts: int = 1, columns: bool = False) -> list[LocalShard]:
    """Return the local tensors of one of `parts` ranks: some rows of each tensor, or some columns of matrices in
    strips."""
    found = []
    for name, whole in values.items():
        dim = 1 if columns and whole.ndim == 2 else 0
        first, count = chunk_bounds(whole.shape[dim], parts, part)
        start, size = [0] * whole.ndim, list(whole.shape)
        start[dim], size[dim] = first, count
        box = Box(tuple(start), tuple(size))
        layout = TensorLayout(name, tuple(whole.shape), (box,), tp_dim=dim)
        found.append(LocalShard(name, layout, whole[box.slices].contiguous()))
    return found


def drop_cache(folder: Path) -> None:
    """Make the next read of the folder's files come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


class Bench:
    """The contestants. Those that write leave a folder of their own, which the next round replaces."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self.values = tensors(megabytes)
        self.nbytes = sum(value.nbytes for value in self.values.values())
        self.shards = make_shards(self.values)
        # What dd copies: the same numbers, in memory, since a virtual disk may take zeros faster.
        self.memory = Path(tempfile.mkstemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)[1])
        with self.memory.open("wb") as file:
            for value in self.values.values():
                file.write(value.numpy().data)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.saver = AsyncSaver(0, 1, self._store)
        self.saver.preallocate(self.shards)
        self.matrix, self.product = torch.randn(MATRIX_SIZE, MATRIX_SIZE), torch.empty(MATRIX_SIZE, MATRIX_SIZE)

    def close(self) -> None:
        self.saver.close()
        self.memory.unlink()

    def clean(self, name: str) -> Path:
        """Return an empty folder, after all earlier writes have reached the disk."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        os.sync()
        return self.folder / name

    def rate(self, seconds: float) -> float:
        return self.nbytes / seconds / 1e6

    # Writing

    def dd(self) -> float:
        place = self.clean("dd")
        place.mkdir()
        source = [f"if={self.memory}", f"of={place / 'file'}", "bs=1M", "conv=fsync"]
        return self.rate(timed(lambda: subprocess.run(["dd", *source], check=True, capture_output=True)))

    def save(self) -> float:
        root = self.clean("muster")
        return self.rate(timed(lambda: save(root, 1, self.shards, INFO, 0, 1, single_rank_exchange)))

    def save_async(self) -> float:
        """Until all is on disk."""
        root = self.clean("muster")

        def run() -> None:
            self.saver.start(SaveRequest(root, 1, INFO, RetentionPolicy()), self.shards)
            self.saver.wait()
            assert self.saver.error is None, self.saver.error

        return self.rate(timed(run))

    def blocked_time(self) -> float:
        """Return the extra time of a step that saves, including its wait for the copy."""
        root = self.clean("muster")
        without = timed(self.passes)

        def run() -> None:
            self.saver.start(SaveRequest(root, 1, INFO, RetentionPolicy()), self.shards)
            self.passes()
            self.saver.wait_staged()

        seconds = timed(run) - without
        self.saver.wait()
        return self.rate(max(seconds, MIN_TIME_S))

    def passes(self) -> None:
        """Run the passes of a step, before it changes anything."""
        for _ in range(PASSES):
            torch.mm(self.matrix, self.matrix, out=self.product)

    def blocked_at_once(self) -> float:
        """Measure a step without passes, which waits for all of the copy."""
        root = self.clean("muster")

        def run() -> None:
            self.saver.start(SaveRequest(root, 1, INFO, RetentionPolicy()), self.shards)
            self.saver.wait_staged()

        seconds = timed(run)
        self.saver.wait()
        return self.rate(seconds)

    def save_dcp(self) -> float:
        place = self.clean("dcp")
        return self.rate(timed(lambda: dcp.save(dict(self.values), checkpoint_id=place, no_dist=True)))

    # Reading

    def prepare_reads(self) -> None:
        """One checkpoint as one rank wrote it, one as four did, and the same for the peers."""
        save(self.folder / "same", 1, self.shards, INFO, 0, 1, single_rank_exchange)
        save(self.folder / "columns", 1, make_shards(self.values, columns=True), INFO, 0, 1, single_rank_exchange)
        other = self.folder / "other" / "step-00000001"
        other.mkdir(parents=True)
        for part in range(NUM_WRITERS):
            write_local_shards(other, part, make_shards(self.values, part, NUM_WRITERS))
        write_manifest(other, 1, INFO, NUM_WRITERS)
        save_file(self.values, self.folder / "plain.safetensors")
        self.save_dcp()
        self.wanted = {name: torch.empty_like(value) for name, value in self.values.items()}
        self.halves = [make_shards(self.wanted, part, 2, columns=True) for part in range(2)]
        self.right = [make_shards(self.values, part, 2, columns=True) for part in range(2)]
        self.goal = make_shards(self.wanted)
        for piece in self.goal:
            self.wanted[piece.name] = piece.tensor

    def read(self, name: str, run: Callable[[], object]) -> float:
        drop_cache(self.folder)
        for value in self.wanted.values():
            value.fill_(0)
        seconds = timed(run)
        for key, value in self.values.items():
            assert torch.equal(value, self.wanted[key]), f"{name} read {key} wrongly"
        return self.rate(seconds)

    def load(self, kind: str) -> float:
        return self.read(kind, lambda: load(self.folder / kind / "step-00000001", self.goal))

    def load_plain(self) -> float:
        def run() -> None:
            with safe_open(self.folder / "plain.safetensors", "pt") as file:
                for name, value in self.wanted.items():
                    value.copy_(file.get_tensor(name))

        return self.read("safetensors", run)

    def load_dcp(self) -> float:
        return self.read("dcp", lambda: dcp.load(self.wanted, checkpoint_id=self.folder / "dcp", no_dist=True))

    def load_columns(self) -> float:
        """Load as two ranks that each hold half of the columns of every matrix, one after the other."""
        drop_cache(self.folder)
        for half in self.halves:
            for piece in half:
                piece.tensor.fill_(0)
        seconds = timed(lambda: [load(self.folder / "columns" / "step-00000001", half) for half in self.halves])
        for half, right in zip(self.halves, self.right, strict=True):
            for piece, other in zip(half, right, strict=True):
                assert torch.equal(piece.tensor, other.tensor), f"read {piece.name} wrongly"
        return self.rate(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("write", "read"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="checkpoint-") as name:
        bench = Bench(Path(name), args.megabytes)
        if args.only in (None, "write"):
            found += writing(bench, args.rounds)
        if args.only in (None, "read"):
            found += reading(bench, args.rounds)
        bench.close()
    for comparison in found:
        print_comparison(comparison)
    if args.json:
        write_results(args.json, found)


def measure_in_turn(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """After one round that doesn't count; each round begins with another contestant, since a disk may be slow after
    one that was fast."""
    names = list(contestants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    interleave(contestants, 1)
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name, found in interleave({name: contestants[name] for name in order}, 1).items():
            samples[name] += found
    return samples


def writing(bench: Bench, rounds: int) -> list[Comparison]:
    """Compare synchronous and asynchronous saves."""
    contestants = {
        "dd": bench.dd,
        "muster": bench.save,
        "muster beside": bench.save_async,
        "muster, step blocked": bench.blocked_time,
        "muster, copy alone": bench.blocked_at_once,
        "dcp": bench.save_dcp,
    }
    samples = measure_in_turn(contestants, rounds)
    blocked = {
        name: samples[name] for name in ("muster, step blocked", "muster, copy alone", "muster", "muster beside")
    }
    written = {name: samples[name] for name in ("muster", "muster beside", "dd", "dcp")}
    title = f"{bench.nbytes / 1e6:.0f} MB"
    return [
        Comparison(f"saving {title}", "MB/s", "muster", written, {"dd": 0.7, "dcp": 1.0}),
        Comparison(f"a step that saves {title}", "MB/s", "muster, step blocked", blocked, {"muster": 1 / 0.15}),
    ]


def reading(bench: Bench, rounds: int) -> list[Comparison]:
    """Compare loads from the disk into existing memory."""
    bench.prepare_reads()
    contestants = {
        "muster": lambda: bench.load("same"),
        "safetensors": bench.load_plain,
        "muster, another plan": lambda: bench.load("other"),
        "muster, other columns": bench.load_columns,
        "muster, same columns": lambda: bench.load("columns"),
        "dcp": bench.load_dcp,
    }
    samples = measure_in_turn(contestants, rounds)
    title = f"loading {bench.nbytes / 1e6:.0f} MB"
    return [
        Comparison(title, "MB/s", "muster", samples, {"safetensors": 0.8, "dcp": 1.0}),
        Comparison(
            f"{title} under another plan",
            "MB/s",
            "muster, another plan",
            {name: samples[name] for name in ("muster, another plan", "muster")},
            {"muster": 1 / 1.3},
        ),
        Comparison(
            f"{title} as two ranks that have half of the columns each",
            "MB/s",
            "muster, other columns",
            {name: samples[name] for name in ("muster, other columns", "muster", "muster, same columns")},
            {"muster": 1 / 1.3, "muster, same columns": 1 / 1.3},
        ),
    ]


if __name__ == "__main__":
    main()
