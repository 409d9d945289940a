"""Optimizers against plain ones, in one process and, for Muon, under every sharding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.load import load
from muster.checkpoint.save import save, single_rank_exchange
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import (
    mean_state_bytes,
    mean_update_bytes,
    optimizer_state_bytes,
    optimizer_state_numel,
    skips_weight_decay,
    update_flops,
)
from muster.config.optimizers import OPTIMIZERS, is_layer_matrix
from muster.cost.comm_volume import step_comm_bytes
from muster.cost.memory.rank_memory import rank_memory
from muster.cost.time.update_bytes import optimizer_bytes_per_element
from muster.layout import matrix_owners
from muster.layout.matrix_owners import OwnedMatrix, assign_owners, sent_numel
from muster.layout.tensor_layout import Box, TensorLayout, rank_layouts
from muster.optim.base import Optimizer
from muster.optim.build import build_optimizer
from muster.optim.muon import orthogonalize
from muster.spec.errors import MusterError
from muster.spec.model import parameter_shapes
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from tests.optim_ranks import LR, SPEC, cut, draw, local_params, pieces, plain, run_members, walk, whole
from tests.ranks import run_ranks
from tests.toy_optimizer import ENTRY

CONFIGS = {
    "adamw": OptimConfig(lr=LR),
    "adamw, Nesterov": OptimConfig(lr=LR, nesterov=True),
    "sgd": OptimConfig(name="sgd", lr=LR),
    "sgd, Nesterov": OptimConfig(name="sgd", lr=LR, momentum=0.8, nesterov=True),
    "sgd, no momentum": OptimConfig(name="sgd", lr=LR, momentum=0.0),
    "lion": OptimConfig(name="lion", lr=LR, weight_decay=0.5),
    "muon": OptimConfig(name="muon", lr=LR),
    "muon, original": OptimConfig(
        name="muon", lr=LR, muon_scale="original", muon_lr_ratio=3.0, nesterov=False, momentum=0.7
    ),
}
AVERAGED = OptimConfig(lr=LR, ema_decay=0.9)
WHOLE = {name: whole(name, shape) for name, shape in parameter_shapes(SPEC)}


def make_whole(config: OptimConfig, layouts: dict[str, TensorLayout] = WHOLE) -> Optimizer:
    return build_optimizer(config, local_params(layouts), layouts)


# --- one process ---


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_an_optimizer_equals_its_plain_form(config):
    optimizer = make_whole(config)
    walk(optimizer, WHOLE, range(1, 5))
    assert optimizer.step_count == 4
    for name, param in optimizer.params.items():
        torch.testing.assert_close(param, plain(config, name, WHOLE[name].shape, 4), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["sgd, no momentum", "muon"])
def test_the_average_of_the_weights_follows_them(name):
    """The first average is the first step's weights, a late one keeps `ema_decay` of the one before."""
    config = CONFIGS[name].model_copy(update={"ema_decay": 0.15})
    optimizer, expected = make_whole(config), {}
    for step in range(1, 5):
        walk(optimizer, WHOLE, range(step, step + 1))
        decay = min(0.15, (step - 1) / (step + 8))
        for param_name, param in optimizer.params.items():
            before = expected.get(param_name, 0.0)
            expected[param_name] = decay * before + (1 - decay) * param
    averages = {of: tensor for key, (of, tensor) in optimizer.state().items() if key.endswith(".ema")}
    assert decay == 0.15
    assert averages.keys() == optimizer.params.keys()
    for param_name, average in averages.items():
        torch.testing.assert_close(average, expected[param_name], rtol=1e-12, atol=1e-14)
    assert optimizer_state_numel(config, WHOLE.values()) == sum(one.numel() for _, one in optimizer.state().values())


def test_what_decays_and_what_is_a_matrix_for_muon():
    names = dict(parameter_shapes(SPEC))
    outer = {name for name in names if "norm" in name or name == "embed.weight"}
    assert {name for name in names if skips_weight_decay(name)} == outer
    assert {name for name in names if is_layer_matrix(name, names[name])} == set(names) - outer - {"head.weight"}


@pytest.mark.parametrize("config", [*CONFIGS.values(), AVERAGED], ids=[*CONFIGS, "averaged"])
def test_an_optimizer_goes_on_from_a_checkpoint_bit_for_bit(config, tmp_path):
    first, other = make_whole(config), make_whole(config)
    walk(first, WHOLE, range(1, 3))
    info = {"plan": {}, "model": {}, "counters": {}}
    folder = save(tmp_path, 2, pieces(first, WHOLE), info, 0, 1, single_rank_exchange)
    other.step_count = load(folder, pieces(other, WHOLE)).step
    for optimizer in (first, other):
        walk(optimizer, WHOLE, range(3, 5))
    assert other.step_count == 4
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces(first, WHOLE), pieces(other, WHOLE), strict=True))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_state_that_begins_late_goes_on_as_from_the_first_step(config):
    first, late = make_whole(config), make_whole(config)
    late.step_count = 7
    late.begin_state(WHOLE.keys())
    for optimizer in (first, late):
        walk(optimizer, WHOLE, range(1, 4))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces(first, WHOLE), pieces(late, WHOLE), strict=True))


def test_a_step_count_alone_changes_the_step():
    first, other = make_whole(CONFIGS["muon"]), make_whole(CONFIGS["muon"])
    other.step_count = 7
    for optimizer in (first, other):
        walk(optimizer, WHOLE, range(1, 2))
    assert not torch.equal(first.params["norm.weight"], other.params["norm.weight"])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_is_what_the_memory_formula_counts(config, dtype):
    layouts = {one.name: one for one in rank_layouts(SPEC, parse_plan_name("dp4"), 2)} | {"": whole("", (0, 3))}
    if config.name == "muon":
        layouts = WHOLE  # one rank alone must hold whole matrices
    params = {name: param.to(dtype) for name, param in local_params(layouts).items()}
    state = build_optimizer(config, params, layouts).state()
    found = sum(tensor.numel() for _, tensor in state.values())
    assert found == optimizer_state_numel(config, layouts.values())
    numel = sum(param.numel() for param in params.values())
    inner = sum(param.numel() for name, param in params.items() if name.startswith("layers.") and param.ndim == 2)
    per_number = {"adamw": 2 * numel, "lion": numel, "muon": 2 * numel - inner}
    assert found == per_number.get(config.name, numel if config.momentum else 0)
    assert all(tensor.shape == params[name].shape and tensor.dtype == dtype for name, tensor in state.values())
    assert all(key.startswith(f"{name}.") for key, (name, _) in state.items())
    assert ({"norm.weight.exp_avg", "norm.weight.exp_avg_sq"} <= set(state)) is (config.name in ("adamw", "muon"))


def test_parameters_without_a_gradient_stay():
    for name in ("adamw", "sgd", "lion"):
        optimizer = make_whole(CONFIGS[name])
        optimizer.params["head.weight"].grad = torch.ones(11, 6, dtype=torch.float64)
        optimizer.step(LR)
        changed = [n for n, p in optimizer.params.items() if not torch.equal(p, draw(n, WHOLE[n].shape, 0))]
        assert changed == ["head.weight"]


def test_bf16_newton_schulz_equals_pytorch_bit_for_bit():
    config = OptimConfig(name="muon", lr=LR, muon_precision="bf16")
    names = [name for name, one in WHOLE.items() if is_layer_matrix(name, one.shape)]
    ours = {name: draw(name, WHOLE[name].shape, 0).float() for name in names}
    theirs = {name: param.clone() for name, param in ours.items()}
    optimizer = build_optimizer(config, ours, {name: WHOLE[name] for name in names})
    torchs = torch.optim.Muon(theirs.values(), lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 4):
        for params in (ours, theirs):
            for name, param in params.items():
                param.grad = draw(name, WHOLE[name].shape, step).float()
        optimizer.step(LR)
        torchs.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in names)


@pytest.mark.parametrize("shape", [(96, 32), (16, 48)])
def test_newton_schulz_turns_singular_values_to_about_one(shape):
    found = torch.linalg.svdvals(orthogonalize(draw("x", shape, 1)))
    assert found.min() > 0.6
    assert found.max() < 1.25
    assert not orthogonalize(torch.zeros(shape)).any()


# --- Muon over several ranks ---


def test_muon_under_real_plans_equals_one_process(tmp_path):
    folder = str(tmp_path / "checkpoints")
    cases = [
        {"plan": "dp4"},
        {"plan": "dp2x2-z1"},
        {"plan": "dp2-pp2"},
        {"plan": "dp4", "steps": (1, 3), "save_to": folder},
        {"plan": "dp2x2", "steps": (3, 4), "load_from": f"{folder}/step-00000002"},
        {"plan": "dp4", "fault": True},
    ]
    results = run_ranks(4, "tests.optim_ranks:on_rank", {"cases": cases})
    for index, case in enumerate(cases):
        error = max(result[index]["error"] for result in results)
        assert error > 1e-3 if case.get("fault") else error < 1e-10, (case, error)
    # Under dp4 rank 3 holds nothing of any matrix of the layers, but makes some of them orthogonal.
    assert results[3][0]["held"] == ["embed.weight", "head.weight"]
    peers = [[result[index]["peers"] for result in results] for index in range(3)]
    assert peers == [[[0, 1, 2, 3]] * 4, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 1], [0, 1], [2, 3], [2, 3]]]
    digests = [[result[index]["digest"] for result in results] for index in range(len(cases))]
    assert all(a == c and b == d != a for a, b, c, d in (digests[1], digests[4])), "replicas differ"


@st.composite
def member_layouts(draw_from) -> list[dict[str, TensorLayout]]:
    """Draw the layouts of three matrices on 1 to 5 members: cells of a grid, each on at least one of them."""
    size = draw_from(st.integers(1, 5))
    members: list[dict[str, TensorLayout]] = [{"norm.weight": whole("norm.weight", (4,))} for _ in range(size)]
    for index in range(3):
        shape = draw_from(st.tuples(st.integers(1, 7), st.integers(1, 7)))
        rows, cols = ([0, *sorted(draw_from(st.sets(st.integers(1, n - 1)))), n] if n > 1 else [0, 1] for n in shape)
        held: list[list[Box]] = [[] for _ in range(size)]
        for top, bottom in zip(rows, rows[1:], strict=False):
            for left, right in zip(cols, cols[1:], strict=False):
                for member in draw_from(st.sets(st.integers(0, size - 1), min_size=1)):
                    held[member].append(Box((top, left), (bottom - top, right - left)))
        name = f"layers.{index}.attn.q.weight"
        for member, boxes in zip(members, held, strict=True):
            member[name] = TensorLayout(name, shape, tuple(boxes))
    return members


@given(member_layouts(), st.booleans())
@settings(deadline=None, max_examples=40)
def test_muon_from_any_boxes_equals_whole_matrices(members, small_batches):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_owners, "BATCH_NUMEL", 1 if small_batches else 1 << 24)
        found, sent = run_members(CONFIGS["muon"], members, steps=2)
        assert sent == [2 * numel for numel in predicted_traffic(members)]
    wholes = {name: whole(name, one.shape) for name, one in members[0].items()}
    alone = make_whole(CONFIGS["muon"], wholes)
    walk(alone, wholes, range(1, 3))
    for optimizer, layouts in zip(found, members, strict=True):
        for name, param in optimizer.params.items():
            torch.testing.assert_close(param, cut(alone.params[name], layouts[name].boxes), rtol=0, atol=1e-11)


def predicted_traffic(members: list[dict[str, TensorLayout]]) -> list[int]:
    """Numbers that each member sends per step."""
    shapes = {name: one.shape for name, one in members[0].items() if len(one.shape) == 2}
    boxes = {name: tuple(member[name].boxes for member in members) for name in shapes}
    batches = [
        [OwnedMatrix(name, shapes[name], boxes[name], owner) for name, owner in batch.items()]
        for batch in assign_owners(shapes, len(members))
    ]
    return [sum(sent_numel(batch, member) for batch in batches) for member in range(len(members))]


def test_a_part_travels_there_once_and_back_to_all_who_hold_it():
    halves = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))
    matrix = OwnedMatrix("m", (4, 3), (halves[:1], halves[1:], halves[:1], halves[1:]), owner=3)
    assert [sent_numel([matrix], member) for member in range(4)] == [6, 6, 0, 18]


@pytest.mark.parametrize("rows", [2, 4])
def test_boxes_that_do_not_make_up_a_matrix_are_refused(rows):
    name = "layers.0.mlp.up.weight"
    members = [{name: TensorLayout(name, (4, 3), (Box((0, 0), (n, 3)),))} for n in (3, rows)]
    with pytest.raises(MusterError, match="layers.0.mlp.up.weight: expected ranks 0, 1 to hold every element once"):
        run_members(CONFIGS["muon"], members, steps=1)


@given(
    st.dictionaries(st.text("abc", min_size=1), st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=30),
    st.integers(1, 9),
)
def test_matrices_are_dealt_evenly(shapes, members):
    batches = assign_owners(shapes, members)
    assert sorted(name for batch in batches for name in batch) == sorted(shapes)
    assert len(batches) <= 1  # so few numbers travel at once
    load, largest = [0] * members, 0
    for name, owner in (item for batch in batches for item in batch.items()):
        short, long = sorted(shapes[name])
        load[owner] += short * short * (2 * long + short)
        largest = max(largest, short * short * (2 * long + short))
    assert max(load) - min(load) <= largest


def test_a_member_with_a_large_matrix_gets_no_small_ones():
    assert assign_owners({"large": (9, 9), "b": (2, 2), "a": (2, 2)}, 2) == [{"large": 0, "a": 1, "b": 1}]


# --- a new optimizer: one file and one registry entry ---


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "toy", ENTRY)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_new_optimizer_is_configured_and_resumes_by_its_entry_alone(toy, momentum, tmp_path):
    config = OptimConfig(name="toy", lr=LR, momentum=momentum)
    assert config.eps == 1e-10
    with pytest.raises(ValueError, match="beta1 0.8 is for adamw, muon, lion, .* and adamw_8bit, but toy is chosen"):
        OptimConfig(name="toy", lr=LR, beta1=0.8)
    first, other = make_whole(config), make_whole(config)
    walk(first, WHOLE, range(1, 3))
    folder = save(
        tmp_path, 2, pieces(first, WHOLE), {"plan": {}, "model": {}, "counters": {}}, 0, 1, single_rank_exchange
    )
    other.step_count = load(folder, pieces(other, WHOLE)).step
    for optimizer in (first, other):
        walk(optimizer, WHOLE, range(3, 5))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces(first, WHOLE), pieces(other, WHOLE), strict=True))


def test_a_new_optimizers_memory_and_traffic_follow_from_its_declared_state(toy):
    config = OptimConfig(name="toy", lr=LR, momentum=0.5)
    layouts = {layout.name: layout for layout in rank_layouts(SPEC, parse_plan_name("dp4"), 2)}
    params = {name: param.float() for name, param in local_params(layouts).items()}
    state = build_optimizer(config, params, layouts).state()
    stored = sum(tensor.nbytes for _, tensor in state.values())
    assert stored == optimizer_state_bytes(config, layouts.values(), master_bytes=4)
    assert stored == sum(param.numel() for param in params.values()) * (4 + 2)
    plan, workload = Plan(dp_shard=4), Workload(seq_len=8, global_batch_size=4)
    terms = rank_memory(SPEC, plan, workload, 2, 1, config)
    assert terms.optimizer == stored
    shapes = dict(parameter_shapes(SPEC))
    assert mean_state_bytes(config, shapes, 4) == 6
    assert mean_update_bytes(config, shapes, 4, 2) == 2 * (4 + 4 + 2) + 4 + 2
    assert not update_flops(config, shapes)
    assert "optimizer" not in step_comm_bytes(SPEC, plan, workload, 2, config)


def test_declared_costs_of_the_optimizers():
    """30 bytes an element for AdamW (arXiv:1711.05101, algorithm 2); Muon exchanges and multiplies whole matrices."""
    shapes = dict(parameter_shapes(SPEC))
    moved = {name: mean_update_bytes(config, shapes, 4, 2) for name, config in CONFIGS.items()}
    assert moved == {**moved, "adamw": 30, "sgd": 22, "sgd, no momentum": 14, "lion": 22}
    assert moved["lion"] < moved["muon"] < moved["adamw"]
    assert mean_update_bytes(None, shapes, 4, 2) == optimizer_bytes_per_element(SPEC, CONFIGS["adamw"]) == 30
    assert optimizer_bytes_per_element(SPEC, CONFIGS["adamw, Nesterov"]) == 50
    assert mean_state_bytes(None, shapes, 4) == 8
    matrices = [shape for name, shape in shapes.items() if is_layer_matrix(name, shape)]
    assert update_flops(CONFIGS["muon"], shapes) == sum(
        5 * 2 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in matrices
    )
