"""One table of attention: recurrences and scores × masks × kinds of context parallelism × lengths.

    python -m benchmarks.attention [--nproc 4] [--lengths 512 2048] [--out build/attention] [--device cpu]

Each case is one layer's attention alone, forward and backward, on one process and on `--nproc` of them under every kind
that can compute it: the slowest rank's seconds, the least of `--repeats`. A rank on a CPU has one thread, so that cases
on more processes than cores share them. Results are lines in `--out`; the same command leaves out what is there, and
tries again what failed. On a GPU only what runs on one process is measured, or as many processes as there are GPUs.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from benchmarks.compare import machine
from muster.cost.comm_volume import context_axis_bytes
from muster.layout.context_parallel import kept_positions
from muster.layout.mesh import coordinates_of
from muster.model.attention import Attention
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.linear_attention import LinearAttention
from muster.parallel.context_parallel import apply_context_parallel
from muster.parallel.world import World, open_world
from muster.spec.context_rules import context_violations
from muster.spec.model import ModelSpec
from muster.spec.model_components import LinearAttentionSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

ATTENTIONS = ("softmax", "soft-capped", "linear_attn", "simple_gla", "gla")
MASKS = ("causal", "window", "documents")
WORDS = ("", "a", "u", "u2", "w2", "b", "t", "s", "l", "z")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    attention: str
    mask: str
    plan: str
    """Plan's name: `dp1`, or one of the words of context parallelism."""
    length: int

    @property
    def ranks(self) -> int:
        return parse_plan_name(self.plan).world_size

    @property
    def model(self) -> ModelSpec:
        """Return a model of one layer with this attention."""
        linear = None
        if self.attention not in ("softmax", "soft-capped"):
            linear = LinearAttentionSpec(
                kind=self.attention,  # type: ignore[arg-type]
                layers=(0,),
                num_key_heads=HEADS,
                num_value_heads=HEADS,
                key_head_dim=HEAD_DIM,
                value_head_dim=HEAD_DIM,
            )
        return ModelSpec(
            vocab_size=8,
            hidden_size=HEADS * HEAD_DIM,
            num_layers=1,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            intermediate_size=8,
            sliding_window=max(1, self.length // 8) if self.mask == "window" else None,
            attention_softcap=50.0 if self.attention == "soft-capped" else None,
            linear_attention=linear,
        )

    @property
    def is_possible(self) -> bool:
        """Return True for a mask that the attention has, and a kind that can compute it."""
        plan, model = self.full_plan, self.model
        is_linear = model.linear_attention is not None
        too_short = self.length % (2 * plan.cp)
        return not (
            is_linear and self.mask == "window" or too_short or list(context_violations(plan, plan.mesh(0), model))
        )

    @property
    def full_plan(self) -> Plan:
        return parse_plan_name(self.plan, Plan(precision="fp32", micro_batch_size=1))

    @property
    def flops(self) -> float:
        """Return the FLOPs of visible scores, or of states, forward and backward."""
        if self.model.linear_attention is not None:
            return 3 * 4.0 * self.length * HEADS * HEAD_DIM**2
        documents = document_lengths(self.length) if self.mask == "documents" else [self.length]
        window = self.model.sliding_window or self.length
        seen = sum(sum(min(at + 1, window) for at in range(length)) for length in documents)
        return 3 * 4.0 * seen * HEADS * HEAD_DIM

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a rank passes to its calls, by the formula."""
        plan = self.full_plan
        workload = Workload(seq_len=self.length, global_batch_size=1)
        return sum(context_axis_bytes(self.model, plan, workload, 0, coordinates_of(plan, 0)).values())


@lru_cache
def document_lengths(length: int) -> list[int]:
    """Return lengths of documents that fill a sequence: a half, a quarter and so on, then eighths of what is left."""
    found, left = [], length
    while left > 8:
        found.append(left // 2)
        left -= left // 2
    return [*found, left]


def cases(nproc: int, lengths: Sequence[int]) -> Iterator[Case]:
    """Yield the cases, those of one process first."""
    plans = ["dp1", *(f"cp{nproc}{word}" for word in WORDS)] if nproc > 1 else ["dp1"]
    for plan in plans:
        if plan[-2:] in ("u2", "w2") and nproc % 2 + (nproc <= 2):
            continue
        for length in lengths:
            for attention in ATTENTIONS:
                found = (Case(attention, mask, plan, length) for mask in MASKS)
                yield from (case for case in found if case.is_possible)


# ----------------------------------------------------------------------------------------------------------------------
# Ranks


def on_rank(rank: int, case_list: list[Case], port: int, repeats: int, out: Path, device: str) -> None:
    """Run cases of as many ranks, each in a world of its own; rank 0 writes what is found."""
    torch.set_num_threads(1)
    size = case_list[0].ranks
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    for index, case in enumerate(case_list):
        with open_world(store, rank, size, case.full_plan, index, where) as world:
            try:
                found: dict[str, Any] = measure(case, world, repeats)
            except Exception:
                if size > 1:
                    raise  # the other ranks would wait
                found = {"error": traceback.format_exc(limit=-2).strip().splitlines()[-1]}
        if rank == 0:
            with out.open("a") as lines:
                lines.write(json.dumps(asdict(case) | {"device": device} | found) + "\n")


def measure(case: Case, world: World, repeats: int) -> dict[str, float]:
    """Return the seconds of forward and backward of the slowest rank."""
    spec, context = case.model, case.full_plan.context_ranks(case.full_plan.mesh(0))
    module = Decoder(spec, range(1), first=False, last=False, has_vocab=False).to(world.device)
    axis = world.context_axis()
    if axis is not None:
        apply_context_parallel(module, axis, context)
    own = list(range(case.length))
    if axis is not None:
        runs = kept_positions(case.length, axis.size, axis.index, axis.is_contiguous)
        own = [position for run in runs for position in run]
    attention = module.blocks()[0].attn
    inputs, documents = random_inputs(case, attention, len(own), world.device), None
    if case.mask == "documents":
        positions = [at for length in document_lengths(case.length) for at in range(length)]
        whole = Documents.from_positions(torch.tensor([positions]), world.device)
        assert whole is not None
        documents = Documents(whole.positions_BS[:, own], whole.lengths, whole.starts)
    module.position_state.whole_length = case.length
    mask = module.position_state.mask(spec.sliding_window, torch.empty(1, case.length, 1, device=world.device))
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        world.barrier()
        begin_s = now(world)
        if isinstance(attention, LinearAttention):
            out = attention.attend(attention, inputs[:3], inputs[3] if len(inputs) > 3 else None, documents)
        else:
            assert isinstance(attention, Attention)
            out = attention.attend(attention, inputs, mask, documents)
        middle_s = now(world)
        torch.autograd.grad(out.sum(), inputs)
        seconds.append((middle_s - begin_s, now(world) - middle_s))
    slowest = torch.tensor(seconds[1:])
    if world.size > 1:
        slowest = slowest.to(world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    forward_s, backward_s = slowest.amin(0).tolist()
    return {"forward_s": forward_s, "backward_s": backward_s}


def random_inputs(
    case: Case, attention: Attention | LinearAttention, length: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return queries, keys, values, and logits of decays where there are some."""
    kv_heads = HEADS if isinstance(attention, LinearAttention) else KV_HEADS
    sizes = [(HEADS, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, HEAD_DIM)]
    linear = case.model.linear_attention
    if linear is not None and linear.decay_width:
        sizes.append((HEADS, linear.decay_width // HEADS))
    return tuple(torch.randn(1, heads, length, width, device=device, requires_grad=True) for heads, width in sizes)


def now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


# ----------------------------------------------------------------------------------------------------------------------
# Table


def read(out: Path) -> dict[Case, dict[str, Any]]:
    """Return what is known of each case; of one that ran twice the later."""
    found = {}
    for line in out.read_text().splitlines() if out.exists() else ():
        fields = json.loads(line)
        found[Case(*(fields.pop(name) for name in ("attention", "mask", "plan", "length")))] = fields
    return found


def table(found: dict[Case, dict[str, Any]]) -> str:
    """Return the rows of the cases that are known."""
    lines = [
        "| attention | mask | plan | length | forward | backward | GFLOP/s a rank | sent by a rank |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for case, result in found.items():
        row = f"| {case.attention} | {case.mask} | `{case.plan}` | {case.length:,} |"
        if "error" in result:
            lines.append(f"{row} {result['error']} | | | |")
            continue
        seconds = result["forward_s"] + result["backward_s"]
        lines.append(
            f"{row} {result['forward_s'] * 1e3:.1f} ms | {result['backward_s'] * 1e3:.1f} ms |"
            f" {case.flops / case.ranks / seconds / 1e9:.1f} | {case.sent_bytes / 2**20:.2f} MiB |"
        )
    return "\n".join(lines)


def run_missing(wanted: list[Case], out: Path, repeats: int, device: str) -> None:
    """Run the cases that have no result, all of a number of ranks in one launch."""
    known = read(out)
    missing = [case for case in wanted if "forward_s" not in known.get(case, {})]
    for ranks in sorted({case.ranks for case in missing}):
        own = [case for case in missing if case.ranks == ranks]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(on_rank, (own, store.port, repeats, out, device), nprocs=ranks)


def main() -> None:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument("--nproc", type=int, default=gpus or 4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/attention"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    args = parser.parse_args()
    if args.device == "cuda" and args.nproc > gpus:
        sys.exit(f"--nproc {args.nproc} needs as many GPUs, this machine has {gpus}: --device cpu shares its cores")
    args.out.mkdir(parents=True, exist_ok=True)
    results, wanted = args.out / f"{args.device}.jsonl", list(cases(args.nproc, args.lengths))
    run_missing(wanted, results, args.repeats, args.device)
    print(f"{machine()}\n")
    found = read(results)
    print(table({case: found[case] for case in wanted if case in found}))


if __name__ == "__main__":
    main()
