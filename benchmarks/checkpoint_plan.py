"""CPU seconds to plan the reading of a large checkpoint; the bar is 2 s for 10,000 ranks.

    python -m benchmarks.checkpoint_plan [ROUNDS]

The checkpoint is Llama-3-70B with AdamW, as 10,000 ranks would write it; only its manifest is made.
"""

import sys
import tempfile
from pathlib import Path
from time import process_time

from muster.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, dump_manifest, read_manifest
from muster.checkpoint.read_plan import coalesce_reads, plan_reads
from muster.config.named_model import load_model
from muster.layout.tensor_layout import Box, rank_layouts
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name

KINDS = ("model/{}", "optim/{}.exp_avg", "optim/{}.exp_avg_sq")


def large_manifest(folder: Path) -> int:
    """Write the manifest of Llama-3-70B's weights and AdamW state under 10,000 ranks; return its number of chunks."""
    spec, plan = load_model("llama3-70b"), parse_plan_name("dp125-tp8-pp10")
    columns: dict[str, list[tuple[int, int, int, Box]]] = {}
    shapes = {}
    for rank in range(plan.world_size):
        offset = 0
        for layout in rank_layouts(spec, plan, rank):
            if layout.copy_index:
                continue
            for box in layout.boxes:
                for kind in KINDS:
                    shapes[kind.format(layout.name)] = layout.shape
                    columns.setdefault(kind.format(layout.name), []).append((rank, offset, 2**31 + offset % 2**30, box))
                    offset += box.numel * 4
    stored = {}
    for name, rows in columns.items():
        shape = shapes[name]
        stored[name] = StoredTensor(
            shape=shape,
            dtype="float32",
            files=tuple(row[0] for row in rows),
            offsets=tuple(row[1] for row in rows),
            crc32=tuple(row[2] for row in rows),
            starts=tuple(tuple(row[3].start[dim] for row in rows) for dim in range(len(shape))),
            sizes=tuple(tuple(row[3].size[dim] for row in rows) for dim in range(len(shape))),
        )
    files = {f"rank-{rank:05}.safetensors": 10**9 for rank in range(plan.world_size)}
    manifest = Manifest(step=1, muster="0", torch="0", plan={}, model={}, counters={}, files=files, tensors=stored)
    (folder / MANIFEST).write_text(dump_manifest(manifest))
    return sum(one.num_pieces for one in stored.values())


def plan_of_large(folder: Path, plan: Plan, rank: int) -> tuple[float, float, int]:
    """CPU seconds to read the manifest and to derive what one rank of another plan reads; in how many reads."""
    spec = load_model("llama3-70b")
    layouts = rank_layouts(spec, plan, rank)
    wanted = [(kind.format(one.name), box) for one in layouts for box in one.boxes for kind in KINDS]
    start = process_time()
    manifest = read_manifest(folder)
    middle = process_time()
    found = coalesce_reads(plan_reads(manifest, wanted))
    return middle - start, process_time() - middle, len(found)


def print_large(folder: Path, rounds: int) -> None:
    """Median times for a rank of each of two other plans."""
    count = large_manifest(folder)
    size = (folder / MANIFEST).stat().st_size
    print(
        f"Llama-3-70B with AdamW under dp125-tp8-pp10: 10,000 ranks, {count:,} pieces, manifest of {size / 1e6:.0f} MB"
    )
    for name, rank in (("dp160-tp4-pp16", 5000), ("dp256-tp8", 0)):
        times = sorted(plan_of_large(folder, parse_plan_name(name), rank) for _ in range(rounds))
        reading_s, planning_s, reads = times[len(times) // 2]
        total = reading_s + planning_s
        print(f"rank {rank} of {name}: manifest read in {reading_s:.2f} s, planned in {planning_s:.2f} s;")
        print(f"    {reads:,} reads, {total:.2f} s in all, to be under 2 s: {'met' if total < 2 else 'missed'}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print_large(Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 5)
