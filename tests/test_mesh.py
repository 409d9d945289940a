"""Ranks and coordinates in any order of axes, unequal stages, and who sends what over their boundaries."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.data.dataset import Batch
from muster.data.dp_slice import read_dp_slice, samples_of_micro_batch
from muster.layout.mesh import MeshCoordinates, coordinates_of, dp_index_of, rank_at, ranks_of_pp_rank
from muster.layout.stage_resharding import box_transfers, hidden_state_box, stage_transfers, tied_grad_transfers
from muster.layout.tensor_layout import Box, rank_layouts
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh import Mesh
from muster.spec.mesh_axes import DEGREE_FIELDS, MESH_AXES
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan, StageSpec
from muster.spec.workload import Workload

MODEL = ModelSpec(vocab_size=37, hidden_size=8, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=12)
TIED = MODEL.model_copy(update={"tied_embeddings": True})
SEQ_LEN = 8
ROOT = Path(__file__).resolve().parents[1]

degree = st.sampled_from([1, 2, 4])
meshes = st.builds(Mesh, dp_replicate=st.sampled_from([1, 2]), dp_shard=st.sampled_from([1, 2]), tp=degree)
equal_plans = st.builds(
    Plan,
    pp=degree,
    dp_replicate=degree,
    dp_shard=degree,
    tp=degree,
    micro_batch_size=degree,
    default_strategy=st.builds(LayerStrategy, sp=st.booleans()),
    axis_order=st.permutations(MESH_AXES).map(tuple),
)


@st.composite
def unequal_plans(draw: st.DrawFn) -> Plan:
    """Two pipeline ranks with one or two stages each, on meshes of their own."""
    pair, vpp = [draw(meshes), draw(meshes)], draw(st.sampled_from([1, 2]))
    stages = tuple(StageSpec(layers=2 // vpp, mesh=mesh) for mesh in pair * vpp)
    return Plan(
        pp=2, vpp=vpp, micro_batch_size=4, stages=stages, default_strategy=LayerStrategy(sp=draw(st.booleans()))
    )


plans = equal_plans | unequal_plans()


@settings(deadline=None)
@given(plans)
def test_every_rank_has_a_place_of_its_own(plan: Plan):
    places = [coordinates_of(plan, rank) for rank in range(plan.world_size)]
    assert [rank_at(plan, at) for at in places] == list(range(plan.world_size))
    assert {place for pp in range(plan.pp) for place in ranks_of_pp_rank(plan, pp)} == set(enumerate(places))


def test_the_last_axis_is_the_nearest():
    plan = Plan(pp=2, dp_shard=2, tp=2, axis_order=("tp", "cp", "dp_shard", "dp_replicate", "pp"))
    assert [(at.tp, at.dp_shard, at.pp) for at in (coordinates_of(plan, rank) for rank in (1, 2, 4))] == [
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
    ]
    unequal = Plan(pp=2, stages=(StageSpec(layers=2, mesh=Mesh(tp=2)), StageSpec(layers=2)))
    assert [coordinates_of(unequal, rank).pp for rank in range(unequal.world_size)] == [0, 0, 1]


@settings(deadline=None)
@given(plans, st.sampled_from([MODEL, TIED]))
def test_the_copies_of_every_number_are_known(plan: Plan, model: ModelSpec):
    """Copies divide a gradient's norm, and checkpoints write each element once."""
    held, written = Counter(), Counter()
    for rank in range(plan.world_size):
        for layout in rank_layouts(model, plan, rank):
            held[layout.name] += Fraction(layout.numel, layout.num_copies)
            written[layout.name] += layout.numel if layout.copy_index == 0 else 0
    assert held == written == {name: int(np.prod(shape)) for name, shape in parameter_shapes(model)}


# ----------------------------------------------------------------------------------------------------------------------
# Boundaries


def filled(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """Return the number of boxes that hold each element."""
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices] += 1
    return count


@settings(deadline=None)
@given(plans)
def test_over_a_boundary_every_rank_gets_its_part_once_from_those_who_have_it(plan: Plan):
    shape = plan.micro_batch_size * plan.mesh(0).dp_size, SEQ_LEN, MODEL.hidden_size
    for source in range(plan.num_stages):
        for target in {source - 1, source + 1} & set(range(plan.num_stages)):
            sent = stage_transfers(MODEL, plan, SEQ_LEN, source, target)
            if plan.pp_rank(source) == plan.pp_rank(target):
                assert not sent
                continue
            for message in sent:
                own = hidden_state_box(MODEL, plan, SEQ_LEN, source, coordinates_of(plan, message.source))
                assert (filled(shape, [own])[message.box.slices] == 1).all()
            for rank, at in ranks_of_pp_rank(plan, plan.pp_rank(target)):
                wanted = filled(shape, [hidden_state_box(MODEL, plan, SEQ_LEN, target, at)])
                came = filled(shape, [message.box for message in sent if message.target == rank])
                assert (came == wanted).all()
            assert len({message[:2] for message in sent}) == len(sent)


@settings(deadline=None)
@given(equal_plans)
def test_between_equal_stages_each_rank_has_one_partner(plan: Plan):
    for source, target, _ in stage_transfers(MODEL, plan, SEQ_LEN, 0, 1) if plan.pp > 1 else ():
        here, there = coordinates_of(plan, source), coordinates_of(plan, target)
        assert (here.dp_replicate, here.dp_shard, here.tp) == (there.dp_replicate, there.dp_shard, there.tp)


@settings(deadline=None)
@given(unequal_plans())
def test_a_tied_weight_comes_whole_from_the_other_stage(plan: Plan):
    last = plan.num_stages - 1
    for source, target in ((0, last), (last, 0)):
        sent = tied_grad_transfers(TIED, plan, source, target)
        came = filled((37, 8), [message.box for message in sent])
        mesh = plan.mesh(target)
        assert (came == mesh.dp_replicate).all(), "each replica gets each number once"


def test_those_who_want_the_same_are_served_in_turn():
    half, whole = Box((0,), (2,)), Box((0,), (4,))
    held = {0: half, 1: half, 2: Box((2,), (2,))}
    assert [message[:2] for message in box_transfers(held, {3: whole, 4: whole})] == [(0, 3), (1, 4), (2, 3), (2, 4)]


# ----------------------------------------------------------------------------------------------------------------------
# Data


def read(first: int, count: int) -> Batch:
    tokens = np.arange(first, first + count)[:, None].repeat(2, axis=1)
    return Batch(tokens, np.where(tokens % 3, tokens, -100), -1)


@settings(deadline=None)
@given(equal_plans, st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_shares_cut_the_same_samples_in_the_same_order(plan: Plan, shares: list[int]):
    """Each rank as many as its share says, one after the other: the step's samples stay the same."""
    ranks = plan.mesh(0).dp_size
    shares = (shares * ranks)[:ranks]
    plan = Plan.model_validate(plan.model_dump() | {"uneven_micro_batches": shares})
    workload = Workload(seq_len=2, global_batch_size=2 * plan.micro_batch_size * sum(shares))
    count = workload.global_batch_size
    found, counts = {}, {}
    for _, at in ranks_of_pp_rank(plan, plan.pp - 1):
        index = dp_index_of(plan, at)
        batch = read_dp_slice(read, plan, at, 5, count)
        counts[index], found[index] = plan.num_micro_batches(workload, index), batch.tokens_BS[:, 0].tolist()
        runs = [samples_of_micro_batch(plan, at, number, count) for number in range(counts[index])]
        samples = [sample + row for run in runs for rows, sample in run for row in range(rows.stop - rows.start)]
        assert [5 + sample for sample in samples] == found[index]
        assert len(found[index]) == counts[index] * plan.micro_batch_size
    assert sum((found[index] for index in range(ranks)), []) == list(range(5, 5 + count))
    assert all(counts[index] * sum(shares) == sum(counts.values()) * shares[index] for index in range(ranks))
    assert plan.num_micro_batches(workload) == max(counts.values())


@settings(deadline=None)
@given(plans)
def test_all_stages_cut_the_same_micro_batches(plan: Plan):
    count, found = 2 * plan.micro_batch_size * plan.mesh(0).dp_size, []
    for pp_rank in range(plan.pp):
        shares = {}
        for _, at in ranks_of_pp_rank(plan, pp_rank):
            batch = read_dp_slice(read, plan, at, 5, count)
            assert batch.num_valid_tokens == 2 * np.count_nonzero(batch.tokens_BS[:, 0] % 3)
            shares[dp_index_of(plan, at)] = batch.tokens_BS[:, 0].reshape(2, -1)
        found.append(np.concatenate([shares[index] for index in sorted(shares)], axis=1))
    assert sorted(found[0].flatten()) == list(range(5, 5 + count))
    assert all((order == found[0]).all() for order in found)


# --- the table of axes ---


def test_every_axis_of_the_table_is_a_field_of_mesh_plan_and_coordinates():
    assert set(DEGREE_FIELDS) == {"pp", *Mesh.model_fields}
    assert set(DEGREE_FIELDS) <= set(Plan.model_fields)
    assert {field.name for field in fields(MeshCoordinates)} == {*MESH_AXES, "island"}
    mesh = Mesh(dp_replicate=2, dp_shard=3, cp=5, tp=7, ep=3)
    assert (mesh.num_ranks, mesh.dp_size, mesh.sequence_shards) == (210, 6, 5)
    assert (mesh.grad_sum_size, mesh.state_shards) == (30, 15)


TOY_ROW = """    MeshAxis(
        "uly",
        "sequence parallelism by heads",
        ("sequence",),
        sums_grads=True,
        shards_state=True,
        sends="all-to-all of heads against positions, around every attention",
        source="arXiv:2309.14509",
        supported=False,
    ),
"""
TOY_AXIS = {
    "spec/mesh_axes.py": ('    MeshAxis(\n        "tp",', TOY_ROW + '    MeshAxis(\n        "tp",'),
    "spec/mesh.py": ("    cp: PositiveInt = 1\n", "    cp: PositiveInt = 1\n    uly: PositiveInt = 1\n"),
    "spec/plan.py": ("    cp: PositiveInt = 1\n", "    cp: PositiveInt = 1\n    uly: PositiveInt = 1\n"),
    "layout/mesh.py": ("    cp: int\n", "    cp: int\n    uly: int\n"),
}
"""Changes of a new axis: file → (text, text in its place)."""
TOY_CHECKS = """
from muster.layout.mesh import coordinates_of, rank_at
from muster.spec.legality import plan_violations
from muster.spec.model import ModelSpec
from muster.spec.nearest_plans import nearest_plans
from muster.spec.plan_name import format_plan_name, parse_plan_name
from muster.spec.supported import unsupported_features
from muster.spec.workload import Workload

model = ModelSpec(vocab_size=37, hidden_size=8, num_layers=4, num_heads=4, intermediate_size=12)
plan = parse_plan_name("dp2-uly2-cp2-mb1")
mesh = plan.mesh(0)
assert format_plan_name(plan) == "dp2-cp2-uly2-mb1-bf16", format_plan_name(plan)
assert (plan.world_size, mesh.sequence_shards, mesh.grad_sum_size, mesh.dp_size) == (8, 4, 8, 2)
assert [rank_at(plan, coordinates_of(plan, rank)) for rank in range(8)] == list(range(8))
assert coordinates_of(plan, 1).uly == 1
assert "is not a multiple of 8" in plan_violations(plan, model, Workload(seq_len=12, global_batch_size=2), 8)[0]
assert not plan_violations(plan, model, Workload(seq_len=16, global_batch_size=2), 8)
assert "sequence parallelism by heads (uly > 1) can't be run yet" in unsupported_features(plan)
near = nearest_plans(plan, model, Workload(seq_len=16, global_batch_size=8), 8)
assert near and not any(one.uly > 1 for one in near)
"""


def test_a_new_axis_touches_four_files(tmp_path):
    shutil.copytree(ROOT / "muster", tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (old, new) in TOY_AXIS.items():
        path = tmp_path / "muster" / name
        text = path.read_text()
        assert old in text, name
        path.write_text(text.replace(old, new))
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TOY_CHECKS], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
