"""Linear attention: chunks against the recurrence, states that are handed on, generation, and refusals."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.interop.hf_config import hf_config_from_spec
from muster.model.chunked_recurrence import Operands, read_segment
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.init import init_stage
from muster.model.kv_cache import KvCache
from muster.model.linear_attention import chunked_recurrence
from muster.planner.context_choice import context_fields
from muster.planner.request import PlanRequest
from muster.spec.errors import InfeasibleError
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.model_components import LinearAttentionSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import parse_plan_name
from muster.spec.supported import require_supported_model
from muster.spec.workload import Workload
from tests.sampling import quick_sample
from tests.test_context_parallel import in_float64
from tests.test_memory_forecast import assert_forecast_is_accounting
from tests.test_parity import GRADIENT_TOLERANCE, cache, check_parity, run  # noqa: F401
from tests.train_runs import AT_ONCE, QUICK, rows_of, train

STATE_KINDS = ("l", "z")
PACKINGS = ("document_mask", "next_fit", "none")
FAMILY_NAMES = ("linear", "simple_gla", "gla", "only gla")
CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"plan": f"dp1{how}", "family": family} for family in FAMILY_NAMES for how in ("", "-relem", "-rfull")],
    2: [
        *({"plan": plan, "family": "gla"} for plan in ("dp2-z1", "dp2-z2", "dp2-z3", "pp2-l3.1-sgpipe-oact")),
        *({"plan": "tp2-sp", "family": family, "profile": True} for family in FAMILY_NAMES),
        {"plan": "tp2-rfull", "family": "gla", "kv_heads": 1, "profile": True},
        {
            "plan": "tp2",
            "family": "simple_gla",
            "changes": {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}},
        },
        {"plan": "pp2v2-szbv", "family": "gla"},
        {"plan": "tp2-sp-relem", "family": "gla", "packing": "next_fit"},
        {"plan": "dp2", "family": "gla", "optim": "muon"},
        *(
            {"plan": f"cp2{kind}-mb2", "family": family, "packing": packing}
            for kind in STATE_KINDS
            for family in FAMILY_NAMES
            for packing in PACKINGS
        ),
        *(
            {"plan": f"cp2{kind}-{how}", "family": "gla", "profile": True}
            for kind in STATE_KINDS
            for how in ("rfull", "relem")
        ),
    ],
    4: [
        {"plan": "tp2-sp-pp2v2-szbv", "family": "gla", "tied": True},
        {"plan": "tp4", "family": "simple_gla"},
        {"plan": "dp2-pp2-z1-vocab", "family": "linear"},
        *(
            {"plan": f"cp4{kind}", "family": family, "packing": packing}
            for kind in STATE_KINDS
            for family in FAMILY_NAMES
            for packing in ("concatenate", "document_mask")
        ),
        *({"plan": f"tp2-sp-cp2{kind}", "family": "gla", "profile": True} for kind in STATE_KINDS),
        *(
            {"plan": f"pp2v2-cp2{kind}-szbv", "family": "simple_gla", "packing": "document_mask"}
            for kind in STATE_KINDS
        ),
        *({"plan": f"dp2-cp2{kind}-{zero}", "family": "gla"} for kind in STATE_KINDS for zero in ("z1", "z3")),
    ],
    8: [
        {"plan": f"cp8{kind}", "family": "gla", "packing": packing}
        for kind in STATE_KINDS
        for packing in ("concatenate", "document_mask")
    ],
}
"""Plans that train models with linear attention."""
LOGIT_WIDTHS = {"linear_attn": None, "simple_gla": 1, "gla": 6}


def recurrence(q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None, begins_BS: Tensor | None) -> Tensor:
    """The definition, position by position."""
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[2]):
        if begins_BS is not None:
            state = state * (~begins_BS[:, t]).view(-1, 1, 1, 1)
        if logits is not None:
            state = state * (torch.sigmoid(logits[:, :, t]) ** (1 / 16)).unsqueeze(-1)
        state = state + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outputs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2) * q.shape[3] ** -0.5)
    return torch.stack(outputs, 2)


def random_operands(length: int, width: int | None, seed: int = 0) -> list[Tensor | None]:
    draw = torch.Generator().manual_seed(seed)
    sizes = (6, 6, 5, width)
    return [
        None if size is None else torch.randn(2, 3, length, size, generator=draw, dtype=torch.float64).requires_grad_()
        for size in sizes
    ]


def random_documents(length: int, seed: int) -> Documents:
    rng = random.Random(seed)
    positions = []
    for _ in range(2):
        bounds = sorted({0, *rng.sample(range(1, length), min(4, length - 1))})
        positions.append([at - max(bound for bound in bounds if bound <= at) for at in range(length)])
    found = Documents.from_positions(torch.tensor(positions), torch.device("cpu"))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", LOGIT_WIDTHS)
@pytest.mark.parametrize("length", [7, 150])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunks_equal_the_recurrence(kind: str, length: int, is_packed: bool) -> None:
    """Outputs and gradients, in float64; of documents, one begins in the middle of a chunk, or several do."""
    operands = random_operands(length, LOGIT_WIDTHS[kind])
    documents = random_documents(length, length) if is_packed else None
    begins_BS = None if documents is None else documents.positions_BS == 0
    *qkv, logits = operands
    found = chunked_recurrence(None, tuple(qkv), logits, documents)  # type: ignore[arg-type]
    expected = recurrence(*qkv, logits, begins_BS)  # type: ignore[arg-type]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = [x for x in operands if x is not None]
    for own, other in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((expected * weights).sum(), given),
        strict=True,
    ):
        assert torch.allclose(own, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", LOGIT_WIDTHS)
def test_segments_follow_each_other(kind: str) -> None:
    """Read in three pieces, of which one is a single position, as a cache does."""
    *qkv, logits = random_operands(60, LOGIT_WIDTHS[kind])
    state, parts = None, []
    for piece in (slice(0, 41), slice(41, 42), slice(42, 60)):
        own = Operands(*(x[:, :, piece] for x in qkv), logits if logits is None else logits[:, :, piece], None)  # type: ignore[index,arg-type]
        out, state = read_segment(own, state)
        parts.append(out)
    assert torch.allclose(torch.cat(parts, 2), recurrence(*qkv, logits, None), rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def test_long_decays_stay_finite() -> None:
    """A logit of −80 leaves nothing within a few positions, and its inverse over a chunk is near float32's limit."""
    q, k, v = (torch.randn(1, 1, 64, 4) for _ in range(3))
    logits = torch.full((1, 1, 64, 4), -80.0, requires_grad=True)
    out = chunked_recurrence(None, (q, k, v), logits, None)
    out.sum().backward()
    assert out.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def linear_model(kind: str, **fields: Any) -> ModelSpec:
    linear = LinearAttentionSpec(
        kind=kind,  # type: ignore[arg-type]
        layers=(0, 2),
        num_key_heads=4,
        num_value_heads=4,
        key_head_dim=6,
        value_head_dim=10,
    )
    shape = {"vocab_size": 50, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "intermediate_size": 48}
    return ModelSpec(**shape | {"linear_attention": linear, "num_kv_heads": 2} | fields)


@pytest.mark.parametrize("kind", LOGIT_WIDTHS)
def test_modules_have_the_parameters_of_the_spec(kind: str) -> None:
    spec = linear_model(kind)
    module = Decoder(spec, range(3), first=True, last=True)
    found = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    assert found == list(parameter_shapes(spec))


@pytest.mark.parametrize("kind", LOGIT_WIDTHS)
def test_a_cache_continues_states(kind: str) -> None:
    """Texts of two lengths, padded on the left, read at once and then token by token."""
    spec = linear_model(kind)
    model = Decoder(spec, range(3), first=True, last=True).double()
    init_stage(model, spec, 0)
    texts = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 3])
    with KvCache(model, starts, 12) as texts_cache:
        found = [texts_cache.read(texts[:, :8]), *(texts_cache.read(texts[:, at : at + 1]) for at in range(8, 12))]
    with torch.no_grad():
        for row, start in enumerate(starts.tolist()):
            whole = model(texts[row : row + 1, start:])[0, 7 - start :]
            assert torch.allclose(torch.stack([logits[row] for logits in found]), whole, rtol=1e-9, atol=1e-9)


def test_the_catalog_has_a_small_hybrid() -> None:
    spec = load_model("tiny-linear")
    assert [layer for layer in range(spec.num_layers) if not spec.has_linear_attention(layer)] == [3, 7]


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def sample_of(num_ranks: int) -> list[dict[str, Any]]:
    """Return a few cases of a number of ranks: under context parallelism with each kind, and others."""
    draw, cases = random.Random(num_ranks), CASES[num_ranks]
    states = [[case for case in cases if f"cp{num_ranks}{kind}" in case["plan"]] for kind in STATE_KINDS]
    others = [case for case in cases if f"cp{num_ranks}" not in case["plan"]]
    return [*(draw.choice(of_kind) for of_kind in states if of_kind), *draw.sample(others, 1)]


@pytest.mark.parametrize("num_ranks", quick_sample([2, 4], 1))
def test_gradients_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(sample_of(num_ranks)), cache)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", CASES)
def test_gradients_of_every_plan_equal_one_process(num_ranks: int, cache: Path) -> None:  # noqa: F811
    check_parity(num_ranks, in_float64(CASES[num_ranks]), cache)


def test_sown_bugs_are_caught(cache: Path) -> None:  # noqa: F811
    bugs = [
        {"plan": "cp4l", "family": "gla", "fault": "forgotten decay"},
        {"plan": "cp4z", "family": "gla", "fault": "blocks out of order"},
    ]
    for case, found in zip(bugs, run(4, in_float64(bugs), cache), strict=True):
        assert max(rank["gradient_error"] for rank in found) > 1e4 * GRADIENT_TOLERANCE, case


@pytest.mark.parametrize(
    ("name", "sentence", "nearest"),
    [
        ("cp2", "cp_comm_type p2p has no exchange for the states of linear attention: lasp2 and zeco have one", "cp2l"),
        ("cp4z", "seq_len 18 is not a multiple of 4 (one for each rank of cp 4), as 16 or 20 would be", "cp2z"),
        ("tp8", "tp 8 doesn't divide the 4 key heads and 4 value heads of linear attention", "dp2x2-pp2"),
    ],
)
def test_plans_that_cannot_run_are_refused_with_the_nearest(name: str, sentence: str, nearest: str) -> None:
    plan, model = parse_plan_name(name), linear_model("gla", num_heads=8, num_kv_heads=8, hidden_size=32)
    with pytest.raises(InfeasibleError) as refusal:
        require_runnable(plan, model, Workload(seq_len=18, global_batch_size=8), plan.world_size)
    assert sentence in str(refusal.value)
    assert nearest in str(refusal.value)


def test_states_are_of_linear_attention_alone() -> None:
    plan, model = parse_plan_name("cp2l"), linear_model("gla", linear_attention=None)
    with pytest.raises(InfeasibleError, match="which the model hasn't: p2p, all_gather and a2a.*nearest: cp2a-"):
        require_runnable(plan, model, Workload(seq_len=16, global_batch_size=8), 2)


def test_models_that_cannot_be_are_refused() -> None:
    uneven = {"layers": (0,), "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 4, "value_head_dim": 4}
    with pytest.raises(ValidationError, match="kind gla has as many heads of values as of keys, got num_value_heads 4"):
        LinearAttentionSpec(kind="gla", **uneven)
    with pytest.raises(ValidationError, match="names layer 2, but the last of num_layers 2 is 1"):
        linear_model("gla", num_layers=2)
    with pytest.raises(InfeasibleError, match="the gated delta rule"):
        require_supported_model(linear_model("gated_deltanet"))
    with pytest.raises(InfeasibleError):
        hf_config_from_spec(linear_model("gla"))


@pytest.mark.parametrize(
    ("kind", "name", "seq_len"),
    quick_sample(
        [
            ("gla", "dp1-fp32", 4096),
            ("simple_gla", "tp2-sp-relem", 4096),
            ("gla", "cp4l", 16384),
            ("gla", "cp4z", 8192),
            ("simple_gla", "tp2-sp-relem", 1024),
        ],
        4,
    ),
)
def test_forecast_is_what_pytorch_counts(kind: str, name: str, seq_len: int) -> None:
    spec = linear_model(kind, hidden_size=4096, vocab_size=32000, num_heads=32, intermediate_size=14336)
    wide = spec.linear_attention
    assert wide is not None
    wide = wide.model_copy(
        update={"num_key_heads": 16, "num_value_heads": 16, "key_head_dim": 128, "value_head_dim": 256}
    )
    assert_forecast_is_accounting(spec.model_copy(update={"linear_attention": wide}), name, seq_len, 2, only_ends=True)


@pytest.mark.soak
def test_a_run_resumes_under_any_other_plan(tmp_path: Path) -> None:
    usual = ("--preset", "tiny-linear", *QUICK, *AT_ONCE, "--train.save_every", "1", "--allow-changes")
    first = tmp_path / "first"
    assert train(*usual, "--train.steps", "2", "--parallel", "tp2-sp-cp2l", "--run", first).code == 0
    losses = {}
    for name in ("dp1", "tp2-sp", "cp4z", "dp2-cp2l-z1", "pp2-rfull"):
        run_dir = Path(shutil.copytree(first, tmp_path / name))
        ended = train(*usual, "--train.steps", "4", "--parallel", name, "--run", run_dir)
        assert ended.code == 0, ended.out + ended.err
        losses[name] = [row["train/loss"] for row in rows_of(run_dir)]
    assert all(len(one) == 4 for one in losses.values())
    for name, one in losses.items():
        assert one == pytest.approx(losses["dp1"], rel=1e-5), name


def test_the_planner_exchanges_states() -> None:
    """Of a sequence that one device can't hold."""
    request = PlanRequest(
        load_model("gla-1.3b-hybrid"), load_cluster("8xh100"), Workload(seq_len=1 << 19, global_batch_size=2)
    )
    fields = context_fields(request, tp=1, cp=8)
    assert fields["cp_comm_type"] in ("lasp2", "zeco")
