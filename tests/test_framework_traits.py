"""Traits of Muster's own program, each counted in a step on a GPU in name only: what predictions say is what runs."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from muster.config.cluster_files import load_cluster
from muster.cost.time import param_communication
from muster.cost.time.attention import SINK_PASSES
from muster.cost.time.layer import LOGIT_BYTES
from muster.cost.time.mlp import CLAMPED_SWIGLU_PASSES
from muster.cost.time.pass_cost import OVERLAP_SLOWDOWN
from muster.cost.time.plan_times import plan_times
from muster.cost.time.sublayer import FP8_CAST_BYTES, FP8_LAYOUT_BYTES
from muster.model import norms
from muster.model.attention_sinks import add_sinks_, sink_gradients
from muster.model.kernels import clamped_swiglu
from muster.parallel import compile as compiling
from muster.parallel.axis import PendingTensor
from muster.schedule.action import Kind
from muster.schedule.resolve import resolve_schedule
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.frameworks import MUSTER
from muster.spec.plan_name import parse_plan_name
from tests.fake_gpu import Module, OperatorLog, Watch
from tests.parity import small_run
from tests.sampling import quick_sample
from tests.test_fake_gpu import fake_factories, watch_step

__all__ = ["fake_factories"]

LAYERS, MICRO_BATCHES, WORDS = 2, 2, 257
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
DOWN = (32, 48)
"""Shape of the weights that lead out of an MLP: no other tensor has it."""


@cache
def step(plan: str, rank: int = 0, **case: Any) -> OperatorLog:
    """One step of two layers on two micro-batches a rank."""
    batch = MICRO_BATCHES * {"dp2x2": 4, "dp2": 2}.get(plan.partition("-")[0], 1)
    return watch_step({"plan": plan, "layers": LAYERS, "batch": batch, **case}, rank, OperatorLog)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, plan: str, **case: Any) -> list[Any]:
    """Return the keyword arguments of each call of a function in two steps."""
    calls, original = [], getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return original(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, counted)
        step.__wrapped__(plan, **case)
    return calls


def before_last_matmul(log: OperatorLog, name: str) -> list[bool]:
    """Return for each operator with a name if it came before the step's last matmul."""
    return [at < log.where("mm")[-1] for at in log.where(name)]


# ----------------------------------------------------------------------------------------------------------------------
# What each trait of Muster is, by its program. Nearly all are counted in the second step, whose operators are logged.


def attention(patch: pytest.MonkeyPatch) -> str:
    calls = count_calls(patch, F, "scaled_dot_product_attention", "dp1")
    assert len(calls) == 2 * LAYERS * MICRO_BATCHES
    assert all(call["attn_mask"] is None and call["is_causal"] for call in calls)
    return "flash2"


def fused_soft_cap(patch: pytest.MonkeyPatch) -> bool:
    return bool(count_calls(patch, F, "scaled_dot_product_attention", "dp1", family="gemma2"))


def fused_swiglu_clamp(patch: pytest.MonkeyPatch) -> bool:
    """The bytes that its operations move, and those that sinks add, are those that predictions count."""

    def moved(work: Callable[[], Any]) -> float:
        with OperatorLog(0) as log:
            work()
        return sum(one.moved_bytes for one in log.operators)

    x, grad = torch.ones(2, 32, 64, 16, dtype=torch.bfloat16).requires_grad_(), torch.ones(1, dtype=torch.bfloat16)
    grad, size = grad.expand(x.shape).contiguous(), x.nbytes
    made: list[torch.Tensor] = []
    forward = moved(lambda: made.append(clamped_swiglu(x, x, 1.7, 7.0)))
    backward = moved(lambda: torch.autograd.grad(made[0], x, grad)) - 3 * size  # both inputs are one
    assert (forward / size, backward / size) == pytest.approx(CLAMPED_SWIGLU_PASSES, rel=0.05)
    lse, sinks = torch.ones(x.shape[:3]), torch.ones(32, dtype=torch.bfloat16)
    with torch.no_grad():
        added = moved(lambda: add_sinks_(x, lse, sinks))
        back = moved(lambda: sink_gradients(grad, x, lse, sinks))
    assert (added / size, back / size) == pytest.approx(SINK_PASSES, rel=0.4)
    return False


def fused_elementwise(patch: pytest.MonkeyPatch) -> bool | None:
    """As the plan's compile says: each block is compiled then, and nothing else is."""
    patch.setattr(compiling.torch, "compile", lambda function: function)
    eager = count_calls(patch, compiling.torch, "compile", "dp1")
    compiled = count_calls(patch, compiling.torch, "compile", "dp1", changes={"compile": True})
    assert (len(eager), len(compiled)) == (0, LAYERS)
    return None


def compiles_by_default(patch: pytest.MonkeyPatch) -> bool:
    """On a GPU with Triton, in plans that the compiler can follow, and in no others."""
    patch.setattr(compiling.torch, "compile", lambda function: function)
    patch.setattr(compiling, "has_triton", lambda: True)
    patch.setattr(compiling, "device_kind", lambda device: "gpu")
    eager = count_calls(patch, compiling.torch, "compile", "dp1-relem")
    said = count_calls(patch, compiling.torch, "compile", "dp1", changes={"compile": False})
    assert (len(eager), len(said)) == (0, 0)
    by_default = len(count_calls(patch, compiling.torch, "compile", "dp1"))
    patch.setattr(compiling, "has_triton", lambda: False)
    assert not count_calls(patch, compiling.torch, "compile", "dp1")
    return by_default == LAYERS


def fused_norms(patch: pytest.MonkeyPatch) -> bool:
    return len(count_calls(patch, F, "rms_norm", "dp1")) == 2 * MICRO_BATCHES * (2 * LAYERS + 1)


def norm_casts(patch: pytest.MonkeyPatch) -> bool:
    dtypes: list[torch.dtype] = []
    original = norms.rms_norm
    with patch.context() as patched:
        patched.setattr(norms, "rms_norm", lambda x, *rest: dtypes.append(x.dtype) or original(x, *rest))
        step.__wrapped__("dp1")
    return torch.float32 in dtypes


def fused_loss(patch: pytest.MonkeyPatch) -> bool:
    log = step("dp1")
    wide = [one for one in log.operators if (16, WORDS) in one.shapes and torch.float32 in one.dtypes]
    return not wide


def loss_keeps_gradient(patch: pytest.MonkeyPatch) -> bool:
    """The bytes that operators on all logits move are those that predictions count."""
    not_all = ("mm", "_unsafe_view", "gather", "scatter_add_", "empty_like", "ones_like", "_log_softmax_backward_data")
    for plan, words in (("dp1", WORDS), ("tp2", 129)):
        log, logits = step(plan), (16, words)
        passes = [
            one
            for one in log.operators
            if logits in (*one.shapes, *one.operand_shapes) and one.name not in not_all and one.moved_bytes
        ]
        per_logit = sum(one.moved_bytes for one in passes) / (16 * words * MICRO_BATCHES)
        assert per_logit == pytest.approx(sum(LOGIT_BYTES[plan != "dp1"]), rel=0.03), (plan, passes)
        assert "_log_softmax_backward_data" not in {one.name for one in log.operators}
    return True


def early_stop_recompute(patch: pytest.MonkeyPatch) -> bool:
    """A layer has 7 matmuls; 6 of them are repeated."""
    repeated = len(step("dp1-rfull").where("mm")) - len(step("dp1").where("mm"))
    return repeated == 6 * LAYERS * MICRO_BATCHES


def repeats_last_tp_matmul(patch: pytest.MonkeyPatch) -> bool:
    repeated = len(step("tp2-rfull").where("mm")) - len(step("tp2").where("mm"))
    return repeated == 7 * LAYERS * MICRO_BATCHES


def gathered_logits(patch: pytest.MonkeyPatch) -> bool:
    return bool(step("tp2").where(GATHER))


def dropout(patch: pytest.MonkeyPatch) -> bool:
    return any("dropout" in one.name or "bernoulli" in one.name for one in step("dp1").operators)


def fused_grad_accumulation(patch: pytest.MonkeyPatch) -> bool:
    """Whether the matmul itself writes the sum in float32; else it writes bf16, which a pass casts or adds."""
    log = step("dp2-z1")
    made = [one for at in log.where("mm") if DOWN in (one := log.operators[at]).shapes]
    assert len(made) == LAYERS * MICRO_BATCHES
    return any(torch.bfloat16 not in one.dtypes for one in made)


def grad_bytes(patch: pytest.MonkeyPatch) -> int:
    sizes = {
        dtype.itemsize
        for plan in ("dp2-z1", "dp2-z2", "dp2-z3")
        for at in step(plan).where(SCATTER)
        for dtype in step(plan).operators[at].dtypes
    }
    (size,) = sizes
    return size


def all_reduce_grads(patch: pytest.MonkeyPatch) -> bool:
    """One all-reduce is the step's report of sums."""
    return len(step("dp2-z1").where(REDUCE)) > 1 or not step("dp2-z1").where(SCATTER)


def replica_reduce_once(patch: pytest.MonkeyPatch) -> bool:
    """The blocks, and the rest, in one of the micro-batches; and the step's report of sums."""
    return len(step("dp2x2-z3").where(REDUCE)) == LAYERS + 1 + 1


def overlap_grad_reduce(patch: pytest.MonkeyPatch) -> bool:
    return any(before_last_matmul(step("dp2-z1"), SCATTER))


def overlap_param_gather(patch: pytest.MonkeyPatch) -> bool:
    """All gathers begin before the first pass, which waits for each where it needs it."""
    log = step("dp2-z1")
    assert log.where(GATHER)[-1] < log.where("mm")[0]
    return waits_within_passes(patch, "dp2-z1")


def waits_within_passes(patch: pytest.MonkeyPatch, plan: str) -> bool:
    """Whether a bucket of parameters is waited for after the first layer of a step, the first."""
    order, wait, attend = list[str](), FSDPParamGroup.wait_for_unshard, F.scaled_dot_product_attention

    def waiting(group: FSDPParamGroup) -> None:
        order.extend(["wait"] * (group._all_gather_result is not None))
        wait(group)

    def attending(*args: Any, **options: Any) -> Any:
        order.append("attention")
        return attend(*args, **options)

    with patch.context() as patched:
        patched.setattr(FSDPParamGroup, "wait_for_unshard", waiting)
        patched.setattr(F, "scaled_dot_product_attention", attending)
        step.__wrapped__(plan)
    assert order.count("wait") >= 2 * LAYERS
    return order[order.index("attention") + 1] == "wait"


def overlaps_whole_passes_only(patch: pytest.MonkeyPatch) -> bool:
    split = "dp2-pp2-szbh1-z1"
    reduces_within_halves = any(hidden_collectives(f"szbh1-{zero}")[1] for zero in ("z2", "z3"))
    return not (
        waits_within_passes(patch, split) or any(before_last_matmul(step(split), SCATTER)) or reduces_within_halves
    )


def joint_ends(patch: pytest.MonkeyPatch) -> bool:
    """One bucket for each layer, and one for all else, which is gathered first and reduced last: beside no matmul."""
    log = step("dp2-z1")
    assert not before_last_matmul(log, SCATTER)[-1]
    sizes = watched("z3", 1).hidden_sizes
    assert sizes, "those of layers"
    assert watched("z3", 0).hidden_sizes == watched("z3", 2).hidden_sizes == sizes
    return len(log.where(GATHER)) == len(log.where(SCATTER)) == LAYERS + 1


class CollectiveWatch(Watch):
    """A watch that finds the gathers and reductions beside which a matmul runs: its stream hasn't waited for them."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._launched: list[tuple[str, int, int, int]] = []
        """Collective, its stream, its number in this, and its elements."""
        self._hidden: set[tuple[str, int, int, int]] = set()

    def begin_step(self) -> None:
        super().begin_step()
        self._launched, self._hidden = [], set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name, stream = func.overloadpacket.__name__, Module.current_stream()
        if name in (GATHER, SCATTER):
            self._launched.append((name, stream.id, stream.launch(), max(x.numel() for x in args[:2])))
        elif name == "mm":
            self._hidden.update(one for one in self._launched if stream.known.get(one[1], 0) < one[2])
        return result

    def num_hidden(self, name: str) -> int:
        """Return the collectives of a kind that a matmul runs beside, for each micro-batch."""
        return sum(one[0] == name for one in self._hidden) // MICRO_BATCHES

    @property
    def hidden_sizes(self) -> set[int]:
        """Elements of the collectives that a matmul runs beside."""
        return {one[3] for one in self._hidden}


@cache
def watched(words: str, stage: int) -> CollectiveWatch:
    """Return a step of one of three pipeline ranks with two layers each."""
    case = {"plan": f"dp2-pp3-{words}", "layers": 6, "batch": 2 * MICRO_BATCHES}
    return watch_step(case, 2 * stage, CollectiveWatch)


@cache
def hidden_collectives(words: str) -> tuple[int, int]:
    """Return the gathers and the reductions of each micro-batch that matmuls run beside, on a stage of layers alone."""
    seen = watched(words, 1)
    return seen.num_hidden(GATHER), seen.num_hidden(SCATTER)


def overlap_fsdp(patch: pytest.MonkeyPatch) -> bool:
    """Those of all layers but one, in each pass."""
    return (hidden_collectives("z2"), hidden_collectives("z3")) == ((0, 1), (2, 1))


def per_parameter_collectives(patch: pytest.MonkeyPatch) -> bool:
    """The blocks, and the rest: gathered in each forward and backward, but for the rest, which stays between them."""
    log = step("dp2-z3")
    gathers, scatters = MICRO_BATCHES * (2 * LAYERS + 1), MICRO_BATCHES * (LAYERS + 1)
    return (len(log.where(GATHER)), len(log.where(SCATTER))) != (gathers, scatters)


def broadcast_updates(patch: pytest.MonkeyPatch) -> bool:
    return any("broadcast" in one.name for plan in ("dp2-z1", "dp2-z3") for one in step(plan).operators)


def overlap_p2p(patch: pytest.MonkeyPatch) -> bool:
    """The second rank starts to receive the second micro-batch before it computes the first one."""
    log = step("pp2-sgpipe", rank=1)
    return log.where("recv_")[1] < log.where("mm")[0]


def scatter_gather_p2p(patch: pytest.MonkeyPatch) -> bool:
    log = step("tp2-pp2-sgpipe")
    hidden = 1 * 16 * 32
    assert log.where("send")
    return any(call.numel != hidden for call in log.calls if call.name == "send")


def joint_input_grad_reduce(patch: pytest.MonkeyPatch) -> bool:
    """Two all-reduces a layer in the forward and two in the backward; one of the embedding, one before the head."""
    hidden = [at for at in step("tp2").where(REDUCE) if step("tp2").operators[at].shapes == ((1, 16, 32),)]
    return len(hidden) == MICRO_BATCHES * (4 * LAYERS + 2)


def overlap_tp_grad_reduce(patch: pytest.MonkeyPatch) -> bool:
    """Matmuls are launched between the start of an all-reduce and the wait for it, in the backward alone."""
    log: list[str] = []
    wait, mm = PendingTensor.wait, torch.mm

    class Counting(OperatorLog):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name in (REDUCE, "mm"):
                log.append(name)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with patch.context() as patched:
        patched.setattr(PendingTensor, "wait", lambda self: log.append("wait") or wait(self))
        watch_step({"plan": "tp2", "layers": LAYERS, "batch": MICRO_BATCHES}, 0, Counting)
    assert mm is torch.mm
    overlapped = sum(log[at : at + 2] == [REDUCE, "mm"] for at in range(len(log)))
    return overlapped == 2 * MICRO_BATCHES * (2 * LAYERS + 1)


def symmetric_memory(patch: pytest.MonkeyPatch) -> bool:
    """A gather before each of a layer's two groups of columns and before the head, a reduce-scatter after each of its
    two rows, whose gradient is gathered in the backward; where PyTorch has no such kernels, as many transfers."""
    plan = {"plan": "tp2", "changes": {"default_strategy": {"sp": True, "tp_overlap": "async_tp"}}}
    ring, counts = Counter(call.name for call in step.__wrapped__(**plan).calls), MICRO_BATCHES * LAYERS
    with patch.context() as patched:
        patched.setattr("muster.parallel.symmetric_memory.has_fused_operators", lambda device: True)
        copied = Counter(call.name for call in step.__wrapped__(**plan).calls)
    assert ring["send"] == ring["recv_"] == 6 * counts + MICRO_BATCHES
    assert copied["fused_all_gather_matmul"] == 4 * counts + MICRO_BATCHES
    assert copied["fused_matmul_reduce_scatter"] == 2 * counts
    assert ring[GATHER] == copied[GATHER]
    return "send" not in copied


def blocking_launches(patch: pytest.MonkeyPatch) -> bool:
    return len(step("dp1").syncs) > 1


def recasts_fp8(patch: pytest.MonkeyPatch) -> bool:
    """The bytes that casts move beside a step in bf16 are those that predictions count of each linear layer."""

    def moved(**case: Any) -> int:
        others = ("mm", "_scaled_mm", "_unsafe_view")
        return sum(one.moved_bytes for one in step("dp1", **case).operators if one.name not in others)

    cast, laid, expected = FP8_CAST_BYTES[False], FP8_LAYOUT_BYTES, 0
    for size_in, size_out in ((32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)):
        x, y, weight = 16 * size_in, 16 * size_out, size_in * size_out
        expected += cast * (2 * x + y + 2 * weight) + laid * (x + y + weight)
    counted = (moved(precision="fp8") - moved()) / (LAYERS * MICRO_BATCHES)
    assert counted == pytest.approx(expected, rel=0.03)
    return True


NOT_RUN = {
    "all of one kind": ("name", "storage"),
    "expert parallelism": ("overlap_expert_comm", "dispatch_once_per_node", "experts_in_tp_region"),
    "latent attention, whose saved bytes are counted in test_latent_attention.py": ("padded_values",),
    "a model's dropout, whose bytes are counted in test_dropout.py": ("counted_dropout",),
    "context parallelism, whose work and bytes have tests of their own": (
        "balanced_cp",
        "fused_cp_merge",
        "cp_grad_bytes",
    ),
    "fp8": ("fp8_activations",),
    "what the plan decides (tp_overlap)": ("async_tp",),
    "moments of another storage": ("moment_bytes",),
    "turns of two passes, which tests/test_pass_pairs.py holds to those predicted": ("overlap_pairs",),
    "graphs of kernels, which nothing in Muster makes": ("cuda_graphs", "graphed"),
    "other programs' experts, dispatchers and modules": (
        "dispatch_once_per_rank",
        "sorts_received_rows",
        "expert_bias_apart",
        "weights_inside_experts",
        "grouped_streams",
        "fused_expert_epilogues",
        "operator_host_s",
    ),
    "attention in fp8, which Muster doesn't compute": ("fp8_attention",),
}
"""Traits that no step can show, by reason."""
CHECKS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    check.__name__: check
    for check in (
        attention, fused_soft_cap, fused_swiglu_clamp, compiles_by_default, fused_elementwise, fused_norms, norm_casts,
        fused_loss, loss_keeps_gradient, early_stop_recompute, repeats_last_tp_matmul, gathered_logits, dropout,
        fused_grad_accumulation,
        grad_bytes, all_reduce_grads, replica_reduce_once,
        overlap_grad_reduce, overlap_param_gather, overlaps_whole_passes_only, joint_ends, overlap_fsdp,
        per_parameter_collectives, broadcast_updates, overlap_p2p,
        scatter_gather_p2p, joint_input_grad_reduce, overlap_tp_grad_reduce, symmetric_memory, blocking_launches,
        recasts_fp8,
    )
}  # fmt: skip


OWN_STEPS = (
    "attention",
    "fused_soft_cap",
    "norm_casts",
    "fused_elementwise",
    "compiles_by_default",
    "grad_bytes",
    "early_stop_recompute",
    "repeats_last_tp_matmul",
    "recasts_fp8",
    "overlaps_whole_passes_only",
    "joint_ends",
    "symmetric_memory",
)
"""Traits whose check runs more steps than others need."""


@pytest.mark.parametrize(
    "trait", [pytest.param(name, marks=pytest.mark.soak if name in OWN_STEPS else ()) for name in CHECKS]
)
def test_a_trait_is_what_the_program_does(trait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(MUSTER, trait) == CHECKS[trait](monkeypatch)


@pytest.mark.parametrize("words", quick_sample(["z2", "z3", "szbh1-z2", "szbh1-z3"], 0, 1))
def test_passes_run_beside_as_many_gathers_and_reductions_as_predictions_hide(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of collectives that are predicted to be much shorter than passes. W hides none, since it reduces when its matmuls
    are over."""
    each_s, run = 1e-9, small_run(layers=6)
    for collective in ("all_gather_s", "reduce_scatter_s"):
        monkeypatch.setattr(param_communication, collective, lambda group, size: each_s)
    plan = resolve_schedule(parse_plan_name(f"dp2-pp3-{words}-bf16"), run.model, run.workload)
    exposed_s = plan_times(run.model, plan, run.workload, load_cluster("6xh100")).exposed_s
    gathers, reductions = 2 * ("z3" in words), 2
    by_pass = {"I": gathers, "W": reductions} if plan.split_backward else {"B": gathers + reductions}
    by_pass["F"] = gathers
    hidden_s = sum(number * each_s - exposed_s[kind, 1].get("dp", 0.0) for kind, number in by_pass.items())
    expected = hidden_s / (1 - OVERLAP_SLOWDOWN) / each_s
    assert sum(hidden_collectives(words)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("plan", "stage", "tied"),
    quick_sample(
        [
            ("dp2-z2", 0, False),
            ("dp2-z3", 0, True),
            ("dp2-pp3-z3", 0, False),
            ("dp2-pp3-z3", 1, False),
            ("dp2-pp3-z3", 2, True),
            ("dp2-pp3-szbh1-z2", 2, False),
            ("dp2-pp2-vocab-z2", 0, False),
            ("dp2-pp2-vocab-z2", 1, True),
        ],
        *(0, 3, 4, 7),
    ),
)
def test_passes_of_one_layer_are_predicted_to_wait_for_all_that_they_gather_and_reduce(
    plan: str, stage: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer, and the embedding and the head that the stage has."""
    parsed = parse_plan_name(f"{plan}-bf16")
    log = step(plan, rank=2 * stage, layers=parsed.pp, tied=tied)
    counted = sum(4 * max(map(prod, log.operators[at].operand_shapes)) for at in log.where(SCATTER))
    if "z3" in plan:  # else a step gathers once
        counted += sum(2 * max(map(prod, log.operators[at].operand_shapes)) for at in log.where(GATHER))
    run, byte_s = small_run(layers=parsed.pp, tied=tied), 1e-18
    for collective in ("all_gather_s", "reduce_scatter_s"):
        monkeypatch.setattr(param_communication, collective, lambda group, size: size * byte_s)
    resolved = resolve_schedule(parsed, run.model, run.workload)
    exposed_s = plan_times(run.model, resolved, run.workload, load_cluster("6xh100")).exposed_s
    kinds = "FIW" if resolved.split_backward else "FB"
    waited_s = sum(exposed_s.get((kind, stage), {}).get("dp", 0.0) for kind in (*kinds, Kind.T, Kind.EMB_W))
    assert waited_s / byte_s == pytest.approx(counted / MICRO_BATCHES, rel=0.01)


def test_every_trait_is_counted_or_has_a_reason_why_not() -> None:
    assert {*CHECKS, *(name for names in NOT_RUN.values() for name in names)} == set(FrameworkTraits.model_fields)


def test_one_rank_adds_each_gradient_to_its_sum_in_one_pass_and_copies_nothing_else() -> None:
    log = step("dp1")
    names = Counter(one.name for one in log.operators if DOWN in one.shapes)
    # The first gradient of a step is cast, the others are added.
    assert (names["_to_copy"], names["add_"]) == (LAYERS, LAYERS * (MICRO_BATCHES - 1))
    assert set(names) <= {"mm", "_to_copy", "add_"}
    assert not [call for call in log.calls if call.name != REDUCE]
