"""Checkpoints: written under one plan, opened under any; whole or not at all; every fault is one sentence."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from muster.checkpoint import rank_file
from muster.checkpoint.checkpoint_dir import (
    LATEST,
    RetentionPolicy,
    checkpoint_path,
    find_damage,
    find_latest,
    list_checkpoints,
    step_of,
)
from muster.checkpoint.formats.native import NativeTensors
from muster.checkpoint.load import load, read_box, read_full
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.checkpoint.read_plan import coalesce_reads, plan_reads
from muster.checkpoint.save import save, single_rank_exchange
from muster.layout.tensor_layout import Box, TensorLayout, chunk_bounds, rank_layouts
from muster.spec.errors import ConfigError, MusterError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan, StageSpec

INFO = {"plan": Plan().model_dump(mode="json"), "model": {"name": "test"}, "counters": {"samples_consumed": 12}}
SPEC = ModelSpec(
    vocab_size=19, hidden_size=12, num_layers=3, num_heads=3, num_kv_heads=1, intermediate_size=10, tied_embeddings=True
)
KINDS = ("model/{}", "optim/{}.exp_avg", "optim/{}.exp_avg_sq")


class Ranks:
    """Ranks that are threads of this process, and their exchange."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._texts: list[str | None] = [None] * count
        self._barrier = threading.Barrier(count, timeout=120)

    def each(self, action: Callable[[int], Any]) -> list[Any]:
        """Run `action` on every rank at once; return its results or exceptions."""

        def run(rank: int) -> Any:
            try:
                return action(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run, range(self.count)))

    def exchange(self, rank: int, text: str | None) -> list[str | None]:
        self._texts[rank] = text
        self._barrier.wait()
        texts = list(self._texts)
        self._barrier.wait()
        return texts

    def save(self, root: Path, step: int, shards: Callable[[int], Sequence[LocalShard]], **options: Any) -> list[Any]:
        def action(rank: int) -> Path:
            return save(
                root, step, shards(rank), INFO, rank, self.count, lambda text: self.exchange(rank, text), **options
            )

        return self.each(action)


def full_tensor(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return elements that differ by tensor and index."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + math.prod(shape))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def shards_of(plan: Plan, rank: int, fill: bool) -> list[LocalShard]:
    """Return parameters and optimizer state of one rank: the true elements, or NaN to be filled."""
    shards = []
    for layout in rank_layouts(SPEC, plan, rank):
        for kind in KINDS:
            name = kind.format(layout.name)
            whole = full_tensor(name, layout.shape)
            parts = [whole[box.slices] for box in layout.boxes]
            local = torch.cat(parts) if parts else whole[:0]
            shards.append(LocalShard(name, layout, local if fill else torch.full_like(local, torch.nan)))
    return shards


def one_shard(
    name: str = "model/w", rows: int = 8, dtype: torch.dtype = torch.float32, value: float = 1.0
) -> LocalShard:
    box = Box((0, 0), (rows, 4))
    return LocalShard(name, TensorLayout(name, (rows, 4), (box,)), torch.full((rows, 4), value, dtype=dtype))


def save_one(root: Path, step: int, value: float | None = None, **options: Any) -> Path:
    shard = one_shard(value=step if value is None else value)
    return save(root, step, [shard], INFO, 0, 1, single_rank_exchange, **options)


def stored_value(folder: Path) -> float:
    return read_full(folder, "model/w").unique().item()


# ----------------------------------------------------------------------------------------------------------------------
# Any plan to any plan

PLANS = {
    "one rank": Plan(),
    "shard 2": Plan(dp_shard=2),
    "shard 4": Plan(dp_shard=4),
    "shard 8": Plan(dp_shard=8),
    "replicate 2 × shard 2": Plan(dp_replicate=2, dp_shard=2),
    "stages 2 × shard 2": Plan(pp=2, dp_shard=2),
    "stages 3 × replicate 2": Plan(pp=3, dp_replicate=2),
    "words on 3 stages": Plan(pp=3, vocab_parallel=True),
    "words on 2 stages × shard 2": Plan(
        pp=2, vpp=1, dp_shard=2, vocab_parallel=True, default_strategy=LayerStrategy(zero="z1")
    ),
    "unequal stages": Plan(
        pp=2,
        stages=(StageSpec(layers=SPEC.num_layers - 1, mesh=Mesh(tp=2)), StageSpec(layers=1, mesh=Mesh(dp_shard=2))),
    ),
    "tied, unequal": Plan(
        pp=2,
        stages=(
            StageSpec(layers=1, mesh=Mesh(dp_replicate=2)),
            StageSpec(layers=SPEC.num_layers - 1, mesh=Mesh(dp_replicate=4)),
        ),
    ),
}


@pytest.mark.parametrize("written", ["shard 4", "stages 2 × shard 2", "words on 2 stages × shard 2", "unequal stages"])
def test_a_checkpoint_opens_under_every_plan(written: str, tmp_path: Path) -> None:
    plan = PLANS[written]
    results = Ranks(plan.world_size).save(tmp_path, 20, lambda rank: shards_of(plan, rank, fill=True))
    assert results == [tmp_path / "step-00000020"] * plan.world_size
    for read in PLANS.values():
        for rank in range(read.world_size):
            found = shards_of(read, rank, fill=False)
            load(tmp_path / "step-00000020", found)
            for got, true in zip(found, shards_of(read, rank, fill=True), strict=True):
                assert torch.equal(got.tensor, true.tensor), (written, read, got.name)
    for name, shape in parameter_shapes(SPEC):
        assert torch.equal(read_full(results[0], f"model/{name}"), full_tensor(f"model/{name}", shape))


@pytest.mark.parametrize("plan", [Plan(pp=2, dp_replicate=2), Plan(dp_replicate=3, tp=2), PLANS["tied, unequal"]])
def test_copies_share_the_writing_and_each_number_is_written_once(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_file, "MIN_SPLIT_BYTES", 200)
    ranks = plan.world_size
    results = Ranks(ranks).save(tmp_path, 1, lambda rank: shards_of(plan, rank, fill=True))
    assert results == [checkpoint_path(tmp_path, 1)] * ranks
    manifest = read_manifest(results[0])
    written = [shard for name in manifest.tensors for shard in manifest.chunks(name)]
    assert sum(shard.nbytes for shard in written) == SPEC.num_parameters * 4 * len(KINDS)
    assert len(manifest.files) == ranks, "every copy writes its share"
    assert (manifest.plan, manifest.counters) == (INFO["plan"], INFO["counters"])
    for name, shape in parameter_shapes(SPEC):
        assert torch.equal(read_full(results[0], f"model/{name}"), full_tensor(f"model/{name}", shape))


def test_large_boxes_are_checked_in_pieces_and_only_those_that_are_needed_are_read(tmp_path: Path) -> None:
    rows = 3 * rank_file.MAX_CHUNK_BYTES // 16 + 5
    folder = save(tmp_path, 1, [one_shard(rows=rows, value=2)], INFO, 0, 1, single_rank_exchange)
    manifest = read_manifest(folder)
    shards = manifest.chunks("model/w")
    assert [shard.nbytes for shard in shards] == [rank_file.MAX_CHUNK_BYTES] * 3 + [80]
    assert load_file(folder / shards[0].file)["model/w"].shape == (rows, 4), "one tensor in the file all the same"
    reads = plan_reads(manifest, [("model/w", Box((10, 0), (100, 4))), ("model/w", Box((rows - 9, 1), (9, 2)))])
    assert [(read.offset - shards[0].offset, read.target_index) for read in reads] == [
        (0, 0),
        (2 * rank_file.MAX_CHUNK_BYTES, 1),
        (3 * rank_file.MAX_CHUNK_BYTES, 1),
    ]
    assert [len(run) for run in coalesce_reads(reads)] == [1, 2], "neighbours are read at once"
    with open(folder / shards[1].file, "r+b") as file:
        file.seek(shards[1].offset + 3)
        file.write(b"!")
    assert (read_box(folder, manifest, "model/w", Box((0, 0), (5, 4))) == 2).all()
    with pytest.raises(MusterError, match="the checksum of model/w is wrong"):
        read_box(folder, manifest, "model/w", Box((rank_file.MAX_CHUNK_BYTES // 16, 0), (1, 1)))


def test_a_matrix_that_is_cut_by_columns_lies_in_strips_of_them(tmp_path: Path) -> None:
    rows, columns = 3000, 1024
    numbers = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    layout = TensorLayout("o.weight", (rows, columns), (Box((0, 0), (rows, columns)),), tp_dim=1)
    folder = save(tmp_path, 1, [LocalShard("model/o.weight", layout, numbers)], INFO, 0, 1, single_rank_exchange)
    manifest = read_manifest(folder)
    for parts in (2, 3, 8):
        reads = plan_reads(manifest, [("model/o.weight", Box((0, 0), (rows, columns // parts)))])
        read = sum(read.nbytes for read in reads)
        assert numbers.nbytes // parts <= read <= numbers.nbytes * (1 / parts + 1 / rank_file.NUM_COLUMN_STRIPS), (
            "others are left out"
        )
    assert torch.equal(read_full(folder, "model/o.weight"), numbers)
    assert torch.equal(NativeTensors(folder).read("model/o.weight", Box((7, 5), (2000, 900))), numbers[7:2007, 5:905])
    box = Box((1000, 100), (1100, 777))
    assert torch.equal(read_box(folder, manifest, "model/o.weight", box), numbers[1000:2100, 100:877])


def test_the_layouts_say_which_matrices_are_cut_by_columns() -> None:
    layouts = {layout.name: layout for layout in rank_layouts(SPEC, Plan(), 0)}
    by_columns = {name for name, layout in layouts.items() if layout.tp_dim == 1}
    assert by_columns == {name for name in layouts if name.endswith((".o.weight", ".down.weight"))}


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float64, torch.bool, torch.float32, torch.int64, torch.float8_e4m3fn]
    shards = [one_shard(f"model/{dtype}", rows=3, dtype=dtype) for dtype in dtypes]
    step = torch.tensor(7)
    shards.append(LocalShard("optim/step", TensorLayout("step", (), (Box((), ()),)), step))
    folder = save(tmp_path, 1, shards, INFO, 0, 1, single_rank_exchange)
    content = load_file(folder / "rank-00000.safetensors")
    for shard in shards:
        assert torch.equal(content[shard.name].double(), shard.tensor.double())
        assert content[shard.name].dtype == read_full(folder, shard.name).dtype == shard.tensor.dtype
    assert {path.name for path in folder.iterdir()} == {MANIFEST, "rank-00000.safetensors"}


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.dtype, list[list[Box]], list[list[Box]]]:
    """Draw a shape, a dtype, and two assignments of its boxes to ranks."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))

    def deal() -> list[list[Box]]:
        boxes: list[tuple[tuple[int, int], ...]] = [()]
        for length in shape:
            cuts = [0, *sorted(draw(st.sets(st.integers(1, length - 1)))), length] if length > 1 else [0, length]
            spans = [(a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
            boxes = [(*box, span) for box in boxes for span in spans]
        ranks: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 3)))]
        for spans in boxes:
            box = Box(tuple(start for start, _ in spans), tuple(size for _, size in spans))
            ranks[draw(st.integers(0, len(ranks) - 1))].append(box)
        return ranks

    return shape, dtype, deal(), deal()


@settings(max_examples=40, deadline=None)
@given(cut_tensors())
def test_any_cut_opens_under_any_other(tmp_path_factory: pytest.TempPathFactory, case: tuple) -> None:
    shape, dtype, written, read = case
    whole = full_tensor("x", shape).mul(9).to(dtype)

    def shard(boxes: list[Box], filled: bool) -> LocalShard:
        parts = [whole[box.slices].reshape(-1) for box in boxes]
        local = torch.cat(parts) if parts else whole.new_empty(0)
        local = local.reshape(boxes[0].size) if len(boxes) == 1 else local
        layout = TensorLayout("x", shape, tuple(boxes), tp_dim=min(1, len(shape) - 1))
        return LocalShard("x", layout, local if filled else torch.zeros_like(local))

    root = tmp_path_factory.mktemp("cut")
    with patch.object(rank_file, "MIN_STRIP_BYTES", 4):  # matrices lie in strips of columns
        results = Ranks(len(written)).save(root, 1, lambda rank: [shard(written[rank], True)])
    assert results == [checkpoint_path(root, 1)] * len(written)
    for boxes in read:
        wanted = shard(boxes, False)
        load(results[0], [wanted])
        assert torch.equal(wanted.tensor, shard(boxes, True).tensor)
    assert torch.equal(read_full(results[0], "x"), whole)
    shutil.rmtree(root)


def test_a_dtype_is_converted_only_on_request(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1, value=1.5)
    wanted = one_shard(dtype=torch.bfloat16, value=0)
    with pytest.raises(ConfigError, match=r"model/w is float32 in .*, but bfloat16 is wanted"):
        load(folder, [wanted])
    load(folder, [wanted], convert=True)
    assert (wanted.tensor == 1.5).all()


def test_parameters_that_require_gradients_can_be_filled(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 3)
    parameter = torch.nn.Parameter(torch.zeros(8, 4))
    load(folder, [LocalShard("model/w", one_shard().layout, parameter)])
    assert (parameter == 3).all()
    assert parameter.requires_grad


# ----------------------------------------------------------------------------------------------------------------------
# Entirely or not at all


def test_old_checkpoints_go_and_the_latest_stays(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_one(tmp_path, step, retention=RetentionPolicy(2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]
    save_one(tmp_path, 5, retention=RetentionPolicy(1))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000005"], (
        "the one just written is never removed"
    )
    for step in (6, 7, 8):
        save_one(tmp_path, step, retention=RetentionPolicy(0))
    assert len(list_checkpoints(tmp_path)) == 4
    assert (tmp_path / LATEST).read_text() == "step-00000008\n"


def test_permanent_ones_stay_and_ephemeral_ones_go(tmp_path: Path) -> None:
    """Saved every 2 steps, of which every 4th is regular and every 8th stays for good."""
    keep = RetentionPolicy(last=2, permanent_every=8, regular_every=4)
    seen = {}
    for step in range(2, 23, 2):
        save_one(tmp_path, step, retention=keep)
        seen[step] = [step_of(path) for path in list_checkpoints(tmp_path)]
    assert seen[4] == [2, 4], "where all others are ephemeral, one stays to fall back to"
    assert seen[6] == [4, 6]
    assert seen[10] == [4, 8, 10]
    assert seen[14] == [8, 12, 14]
    assert seen[22] == [8, 16, 20, 22]


def test_the_latest_is_the_last_written_unless_it_is_damaged(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "none") is None
    save_one(tmp_path, 20)
    save_one(tmp_path, 10)
    assert find_latest(tmp_path) == tmp_path / "step-00000010"
    (tmp_path / "step-00000010/rank-00000.safetensors").unlink()
    told: list[str] = []
    assert find_latest(tmp_path, told.append) == tmp_path / "step-00000020"
    assert len(told) == 1
    assert "step-00000010/rank-00000.safetensors can't be opened" in told[0]
    (tmp_path / LATEST).write_bytes(b"\xff\xff")
    assert find_latest(tmp_path) == tmp_path / "step-00000020"
    (tmp_path / "step-00000020" / MANIFEST).write_text("{")
    assert find_latest(tmp_path) is None


def test_a_repeated_step_replaces_the_checkpoint(tmp_path: Path) -> None:
    save_one(tmp_path, 10, value=1)
    assert stored_value(save_one(tmp_path, 10, value=2)) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000010"]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


KILL_POINTS = ("fsync", "replace", "rename", "unlink", "mkdir")


def test_a_kill_at_any_moment_of_a_save_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the save before each of its changes to the disk in turn."""
    calls_left = [0]

    def cutting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls_left[0] -= 1
            if calls_left[0] < 0:
                raise Killed
            return real(*args, **options)

        return call

    survived, moment = False, 0
    while not survived:
        root = tmp_path / str(moment)
        calls_left[0] = 10**9
        for step in (10, 20):
            save_one(root, step)
        calls_left[0] = moment
        with monkeypatch.context() as patched:
            for name in KILL_POINTS:
                patched.setattr(os, name, cutting(getattr(os, name)))
            try:
                save_one(root, 30)
                survived = True
            except Killed:
                pass
        found = find_latest(root)
        assert found is not None
        assert (found.name, stored_value(found)) in [("step-00000020", 20), ("step-00000030", 30)], moment
        assert all(find_damage(folder) is None for folder in list_checkpoints(root)), (
            "half a checkpoint under a good name"
        )
        save_one(root, 40)
        assert find_latest(root) == checkpoint_path(root, 40)
        assert not list(root.glob("*.tmp")), "the next save removes what the killed one left"
        moment += 1
    assert moment > 10, "the save was really cut at many moments"


SAVER = """
import sys
from pathlib import Path
from tests.test_checkpoint import one_shard
from muster.checkpoint.checkpoint_dir import RetentionPolicy
from muster.checkpoint.save import save, single_rank_exchange
for step in range(1, 100000):
    shards = [one_shard(f"model/{i}", rows=5000, value=step) for i in range(4)]
    info = {"plan": {}, "model": {}, "counters": {}}
    save(Path(sys.argv[1]), step, shards, info, 0, 1, single_rank_exchange, retention=RetentionPolicy(1))
"""


def test_a_saver_that_is_really_killed_loses_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], cwd=Path(__file__).parents[1])
    try:
        limit = time.monotonic() + 300
        while max(map(step_of, list_checkpoints(tmp_path)), default=0) < 9:  # only the last is kept, so no single step
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.001)
        time.sleep(0.0137)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = find_latest(tmp_path)
    assert found is not None
    step = read_manifest(found).step
    assert step >= 9
    for index in range(4):
        assert (read_full(found, f"model/{index}") == step).all()


# ----------------------------------------------------------------------------------------------------------------------
# Faults


def test_a_failing_rank_fails_the_save_on_all_and_nothing_good_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(dp_shard=4)
    ranks = Ranks(4)
    ranks.save(tmp_path, 10, lambda rank: shards_of(plan, rank, fill=True))
    real = os.fsync

    def full(handle: int) -> None:
        if "rank-00002.safetensors" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    results = ranks.save(tmp_path, 20, lambda rank: shards_of(plan, rank, fill=True))
    for result in results:
        assert isinstance(result, MusterError)
        assert str(result).startswith("the checkpoint of step 20 was not saved: could not write ")
        assert str(result).endswith(": No space left on device (rank 2)")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000010"]
    assert find_latest(tmp_path) == tmp_path / "step-00000010"
    monkeypatch.undo()
    assert (
        ranks.save(tmp_path, 20, lambda rank: shards_of(plan, rank, fill=True)) == [checkpoint_path(tmp_path, 20)] * 4
    )


def test_a_file_that_may_not_grow_is_one_sentence(tmp_path: Path) -> None:
    """The kernel itself refuses the write here."""
    save_one(tmp_path, 10)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(MusterError, match=r"step 20 was not saved: could not write .*: File too large \(rank 0\)"):
            save(tmp_path, 20, [one_shard(rows=100_000)], INFO, 0, 1, single_rank_exchange)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert find_latest(tmp_path) == tmp_path / "step-00000010"


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MusterError, match=r"could not write .*file/checkpoints: Not a directory \(rank 0\)"):
        save_one(tmp_path / "file" / "checkpoints", 1)

    def refuse(path: Any, *_: Any) -> None:
        raise PermissionError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    results = Ranks(2).save(tmp_path / "new", 1, lambda rank: [one_shard()] if rank == 0 else [])
    for result in results:
        assert isinstance(result, MusterError)
        assert str(result).endswith("Read-only file system (rank 0)")


def test_ranks_that_leave_a_gap_or_disagree_are_found_when_saving(tmp_path: Path) -> None:
    def rows(rank: int, parts: int = 3) -> list[LocalShard]:
        start, count = chunk_bounds(8, parts, rank)
        box = Box((start, 0), (count, 4))
        return [LocalShard("w", TensorLayout("w", (8, 4), (box,)), torch.zeros(count, 4))]

    for result in Ranks(2).save(tmp_path, 1, rows):
        assert "the ranks' boxes of w hold 24 elements instead of 32" in str(result)
    for result in Ranks(2).save(tmp_path, 1, lambda rank: rows(0, 1)):
        assert "the ranks' boxes of w hold 64 elements instead of 32" in str(result)
    for result in Ranks(2).save(tmp_path, 1, lambda rank: [one_shard(rows=8 + rank)]):
        assert "ranks disagree about model/w: float32 [8, 4] on one, float32 [9, 4] on another" in str(result)
    assert list_checkpoints(tmp_path) == []


def flip(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    os.truncate(folder / "rank-00000.safetensors", 100)


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def lose_piece(folder: Path) -> None:
    nothing = {"files": [], "offsets": [], "crc32": [], "starts": [[], []], "sizes": [[], []]}
    edit_manifest(tensors={"model/w": {"shape": [8, 4], "dtype": "float32", **nothing}})(folder)


def lose_a_column(folder: Path) -> None:
    tensors = json.loads((folder / MANIFEST).read_text())["tensors"]
    tensors["model/w"]["crc32"] = []
    edit_manifest(tensors=tensors)(folder)


def lose_a_file(folder: Path) -> None:
    edit_manifest(files={})(folder)


DAMAGE = {
    "flipped byte": (flip, MusterError, r"rank-00000.safetensors is damaged: the checksum of model/w is wrong"),
    "truncated": (truncate, MusterError, r"read model/w from .*rank-00000.safetensors: .* 100 bytes instead of \d+"),
    "missing file": (
        lambda folder: (folder / "rank-00000.safetensors").unlink(),
        MusterError,
        r"could not read model/w from .*rank-00000.safetensors",
    ),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), ConfigError, r"no checkpoint at .*manifest.json"),
    "not JSON": (lambda folder: (folder / MANIFEST).write_text("{"), MusterError, r"manifest.json is damaged"),
    "not a manifest": (edit_manifest(tensors=3), MusterError, r"manifest.json is damaged: tensors: "),
    "unequal columns": (lose_a_column, MusterError, r"damaged: the columns of model/w have unequal lengths"),
    "unlisted file": (lose_a_file, MusterError, r"damaged: model/w lies in a file that is not listed"),
    "no description": (edit_manifest(version=1), MusterError, r"its schema is 1, but a chunk of a tensor is not desc"),
    "later schema": (edit_manifest(version=9), ConfigError, r"schema 9, but this Muster reads schemas up to 2"),
    "lost piece": (lose_piece, MusterError, r"holds only 0 of 32 wanted elements of model/w"),
    "other tensors": (edit_manifest(tensors={}), ConfigError, r"holds no tensor model/w"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_sentence(kind: str, tmp_path: Path) -> None:
    damage, error, pattern = DAMAGE[kind]
    folder = save_one(tmp_path, 1)
    damage(folder)
    with pytest.raises(error, match=pattern) as raised:
        load(folder, [one_shard()])
    assert "\n" not in str(raised.value)
    if kind == "later schema":
        assert find_latest(tmp_path) == folder, "it must not fall back silently"


def test_a_checkpoint_of_schema_1_opens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = save(
        tmp_path, 1, [one_shard(value=3), one_shard("model/v", rows=5, value=4)], INFO, 0, 1, single_rank_exchange
    )
    content = json.loads((folder / MANIFEST).read_text())
    for name, tensor in content["tensors"].items():
        place = {"file": next(iter(content["files"])), "key": name, "start": [0, 0], "size": tensor["shape"]}
        shard = {**place, "crc32": tensor["crc32"][0], "nbytes": 16 * tensor["shape"][0]}
        content["tensors"][name] = {"shape": tensor["shape"], "dtype": tensor["dtype"], "pieces": [shard]}
    (folder / MANIFEST).write_text(json.dumps(content | {"version": 1}))
    assert (read_full(folder, "model/w") == 3).all()
    assert (read_full(folder, "model/v") == 4).all()
    assert f"{folder / MANIFEST} has schema 1: read as schema 2" in capsys.readouterr().out


def test_what_was_not_saved_is_named(tmp_path: Path) -> None:
    folder = save_one(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"holds no tensor model/v; the nearest name there is model/w"):
        load(folder, [one_shard("model/v")])
    with pytest.raises(ConfigError, match=r"model/w has shape \[8, 4\] in .*, but \[9, 4\] is wanted"):
        load(folder, [one_shard(rows=9)])
