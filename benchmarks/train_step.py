"""Speed of a training step: Muster against hand-written PyTorch and other trainers, in turns within one run.

Every contestant trains the same model from the same weights on the same tokens, in fp32, in processes of its own with
one thread each. All start first; then they take turns of some steps each, while the others wait on a pipe.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.compare import Comparison, interleave, machine, print_comparison, write_results
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec

SEQ_LEN = 512
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0
SOURCE, SOURCE_BYTES = "python-stdlib", 4_000_000
WARM_UP_STEPS = 3
LOSS_TOLERANCE, MOE_LOSS_TOLERANCE = 1e-3, 1e-4
"""Largest relative difference between the losses of contestants that do the same work, after equally many steps."""


@dataclass(frozen=True)
class Size:
    """A model, and how much a turn is."""

    model: ModelSpec
    global_batch: int
    """Sequences per step, over all processes."""
    steps_per_turn: int
    words: str = ""
    """Further words of Muster's plan, where its peers offload, too."""

    @property
    def bars(self) -> dict[int, dict[str, float]]:
        if self.words:
            return OFFLOAD_BARS
        return MOE_BARS if self.model.moe else BARS

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * SEQ_LEN


SIZES = {
    "2m": Size(
        ModelSpec(vocab_size=257, hidden_size=192, num_layers=4, num_heads=6, intermediate_size=512),
        global_batch=4,
        steps_per_turn=10,
    ),
    "30m": Size(
        ModelSpec(vocab_size=8192, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=1376),
        global_batch=4,
        steps_per_turn=2,
    ),
    "moe-5m": Size(
        ModelSpec(
            vocab_size=257,
            hidden_size=192,
            num_layers=4,
            num_heads=6,
            num_kv_heads=2,
            intermediate_size=256,
            moe=MoeSpec(num_experts=8, top_k=2, expert_size=256, aux_loss_coef=0.0),
        ),
        global_batch=4,
        steps_per_turn=2,
    ),
    "100m-offload": Size(
        ModelSpec(vocab_size=8192, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=2048),
        global_batch=1,
        steps_per_turn=1,
        words="-oopt",
    ),
}

BARS = {
    1: {"plain": 1.05, "hugging-face": 1.15},
    2: {"plain": 1.15, "deepspeed": 1.2},
}
"""Peers and the ratio of tokens/s that Muster should reach, by number of processes."""
MOE_BARS = {
    1: {"transformers": 1.1, "deepspeed-moe": 1.0},
    2: {"transformers": 1.1, "deepspeed-moe": 1.0, "muster-ep": 0.0},
}
"""The same for models with experts. `muster-ep` is Muster's own plan with expert parallelism, which has no bar (0)."""
OFFLOAD_BARS = {1: {"deepspeed-offload": 1.0}, 2: {"deepspeed-offload": 1.0}}
"""The same with optimizer state in host memory, which the host's cores update."""
LIBRARIES = {
    "hugging-face": ("transformers", "accelerate"),
    "deepspeed": ("deepspeed",),
    "deepspeed-offload": ("deepspeed",),
    "transformers": ("transformers",),
    "deepspeed-moe": ("deepspeed",),
}
"""Libraries that contestants import, which extra `bench` installs."""


class Contestant:
    """The processes of one contestant, one per rank."""

    def __init__(self, name: str, size: str, world_size: int, work_dir: Path) -> None:
        self.name = name
        self.log = work_dir / f"{name}-{size}-{world_size}.log"
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "DS_ACCELERATOR": "cpu",
            "TMPDIR": str(work_dir),
        }
        command = [sys.executable, "-m", "benchmarks.contestant", name, size, str(work_dir / "data")]
        self.processes = []
        with self.log.open("w") as log:
            for rank in range(world_size):
                env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                self.processes.append(subprocess.Popen(command, env=env, text=True, **pipes))

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def run(self, steps: int) -> tuple[float, float]:
        """Runs some steps. Returns the seconds of the slowest rank and the last step's loss.

        Raises RuntimeError with the end of its log when it dies.
        """
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            raise RuntimeError(f"contestant {self.name} died; the end of its log:\n{tail}")
        answers = [json.loads(line) for line in lines]
        loss = sum(answer["loss"] for answer in answers) / len(answers)
        return max(answer["seconds"] for answer in answers), loss


def contest(names: list[str], size_name: str, world_size: int, rounds: int, work_dir: Path) -> Comparison:
    """Tokens per second of each contestant by round."""
    size = SIZES[size_name]
    losses: dict[str, float] = {}

    def turn(contestant: Contestant) -> Callable[[], float]:
        def run() -> float:
            seconds, losses[contestant.name] = contestant.run(size.steps_per_turn)
            return size.steps_per_turn * size.tokens_per_step / seconds

        return run

    with ExitStack() as stack:
        running = [stack.enter_context(Contestant(name, size_name, world_size, work_dir)) for name in names]
        for contestant in running:
            contestant.run(WARM_UP_STEPS)
        samples = interleave({contestant.name: turn(contestant) for contestant in running}, rounds)
    check_same_work(losses, MOE_LOSS_TOLERANCE if size.model.moe else LOSS_TOLERANCE)
    count = size.model.num_parameters
    title = f"{count / 1e6:.1f} M parameters, {world_size} process{'es' if world_size > 1 else ''}, {rounds} rounds"
    return Comparison(
        title, "tokens/s", "muster", samples, {peer: bar for peer, bar in size.bars[world_size].items() if bar}
    )


def check_same_work(losses: dict[str, float], tolerance: float = LOSS_TOLERANCE) -> None:
    """Raises RuntimeError when the contestants' losses after the same steps differ: then someone did other work."""
    print("  last losses: " + ", ".join(f"{name} {loss:.5f}" for name, loss in losses.items()))
    if max(losses.values()) - min(losses.values()) > tolerance * min(losses.values()):
        raise RuntimeError(f"the contestants did not do the same work: their losses are {losses}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def missing_libraries(contestants: Iterable[str]) -> list[str]:
    """Return the libraries that these contestants import and that aren't installed."""
    needed = sorted({library for name in contestants for library in LIBRARIES.get(name, ())})
    return [library for library in needed if find_spec(library) is None]


def main() -> None:
    """Runs the contests that the arguments name; prints tables and, on request, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_device = [name for name, size in SIZES.items() if not size.words]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=on_device)
    parser.add_argument("--processes", nargs="+", type=int, choices=BARS, default=list(BARS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="contestants to run, of muster and its peers")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    run = ["muster", *(peer for size in args.sizes for count in args.processes for peer in SIZES[size].bars[count])]
    if unknown := set(args.only or ()) - set(run):
        parser.error(f"--only {' '.join(sorted(unknown))}: expected of {', '.join(dict.fromkeys(run))}")
    if missing := missing_libraries(name for name in run if not args.only or name in args.only):
        parser.error(
            f"{', '.join(missing)} can't be imported: install extra 'bench' (make bench), or choose with --only"
        )
    print("on " + ", ".join(f"{key} {value}" for key, value in machine().items() if value))
    comparisons = []
    with tempfile.TemporaryDirectory() as work_dir:
        for world_size in args.processes:
            for size in args.sizes:
                peers = SIZES[size].bars[world_size]
                names = [name for name in ("muster", *peers) if not args.only or name in args.only]
                comparisons.append(contest(names, size, world_size, args.rounds, Path(work_dir)))
                print_comparison(comparisons[-1])
    if args.json:
        write_results(args.json, comparisons)


if __name__ == "__main__":
    main()
