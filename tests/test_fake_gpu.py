"""Steps of every kind of plan on a GPU in name only: where tensors lie, what the host waits for, who meets whom."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any, ClassVar, TypeVar, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors

from muster.data.dataset import SampleStream
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import stage_layouts, stages_on
from muster.model import positions, varlen_attention
from muster.model.documents import Documents
from muster.model.host_copies import to_device
from muster.optim import adamw
from muster.optim.peer_exchange import PeerGroup
from muster.parallel import compile as compile_module
from muster.parallel import p2p
from muster.parallel.axis import PendingTensor
from muster.parallel.layer_activations import HostActivations
from muster.parallel.offload import ActivationOffload, HostBufferPool
from muster.parallel.process_groups import ProcessGroups
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.resolve import resolve_schedule
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES
from muster.train.memory_check import FAKE_MODE, CountedTrainer, FakeStage
from muster.train.parameter_updater import ParameterUpdater
from muster.train.prefetch import LocalBatch
from tests.fake_gpu import DEVICE, Stream, Watch, order_problems, pin
from tests.fake_gpu_plans import KINDS, SYNCHRONOUS, case_of, num_ranks, plan_of, random_cases
from tests.parity import small_run
from tests.sampling import quick_sample
from tests.stream_check import StreamCheck
from tests.test_parity import CASES

SomeWatch = TypeVar("SomeWatch", bound=Watch)

ONE_SYNC = ["parameter_updater.py:_read_sums"]


class HostPool(HostBufferPool):
    """Host memory without memory."""

    def acquire(self, size: int) -> torch.Tensor:
        with FAKE_MODE:
            return pin(torch.empty(size, dtype=torch.uint8))


class StreamOffload(ActivationOffload):
    """Offload over a stream of its own, as on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pool = HostPool(pinned=False)


class OffloadStage(FakeStage):
    """A stage whose copies are those of a GPU."""

    offload_type = StreamOffload
    layer_types: ClassVar = FakeStage.layer_types | {"host_copy": HostActivations}


class GpuTrainer(CountedTrainer):
    """A trainer whose stages have fake memory."""

    stage_type = OffloadStage

    def run_step(self) -> None:
        """Run one step, of packed documents where the run packs."""
        if self.config.data.packing == "concatenate":
            super().run_step()
            return
        feed = self.batch_loader.feed_stages

        def feed_packed(share: LocalBatch, loss_scale: float = 1.0) -> None:
            batch = share.batch
            assert batch is not None
            feed(replace(share, batch=replace(batch, positions_BS=batch.tokens_BS)), loss_scale)

        with patch.object(self.batch_loader, "feed_stages", feed_packed):
            super().run_step()


def two_documents(positions_BS: torch.Tensor, device: torch.device) -> Documents:
    """`Documents.from_positions` of sequences that consist of two documents each: fake positions have no values."""
    batch, length = positions_BS.shape
    lengths = (5, length - 5) * batch
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return Documents(to_device(positions_BS, device), lengths, to_device(starts, device))


def variable_lengths(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, *options: object
) -> torch.Tensor:
    """A kernel that reads what variable-length attention reads."""
    return q * (k.mean() + v.mean()) + starts.sum()


@pytest.fixture(autouse=True)
def fake_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of the device be made fake wherever they are made."""
    monkeypatch.setattr(adamw, "FUSED_DEVICES", (DEVICE.type,))
    monkeypatch.setattr(FakeStage, "overlapping_devices", frozenset({DEVICE.type}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(Documents, "from_positions", staticmethod(two_documents))
    monkeypatch.setattr(varlen_attention, "gpu_kernel", lambda: variable_lengths)
    for module in (varlen_attention, positions):
        monkeypatch.setattr(module, "has_varlen_attention", lambda x, head_dim: x.device.type == DEVICE.type)
    monkeypatch.setattr(compile_module.torch, "compile", lambda function: function)
    _device_constructors()  # remembers the functions of PyTorch itself
    for name in ("empty", "zeros", "ones", "full", "arange", "tensor", "randint", "as_tensor"):
        monkeypatch.setattr(torch, name, fake_on_device(getattr(torch, name)))


def fake_on_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is None or torch.device(device).type != DEVICE.type or active_fake_mode() is not None:
            return make(*args, **options)
        with FAKE_MODE:
            return make(*args, **options)

    return made


@contextmanager
def gpu_world(plan: Plan, rank: int) -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        at = coordinates_of(plan, rank)
        yield World(0, rank, plan.world_size, plan, at, DEVICE, FakeStore(), ProcessGroups(plan, at, DEVICE))
    finally:
        dist.destroy_process_group()


def boxes_of_members(plan: Plan, model: ModelSpec) -> Callable[[PeerGroup, Any], list[Any]]:
    """Return `PeerGroup.all_gather_object` of boxes: a group in name only brings nobody else's."""

    def gather(peers: PeerGroup, value: Any) -> list[Any]:
        if not isinstance(value, dict):
            return [value] * len(peers.ranks)
        found = []
        for rank in peers.ranks:
            at = coordinates_of(plan, rank)
            layouts = [one for stage in stages_on(plan, at.pp) for one in stage_layouts(model, plan, stage, at)]
            found.append({one.name: one.boxes for one in reversed(layouts) if one.name in value})
        return found

    return gather


def watch_step(case: dict[str, Any], rank: int, kind: type[SomeWatch] = Watch) -> SomeWatch:  # type: ignore[assignment]
    """Run two steps of a case of the parity tests in bf16, and return what was seen in the second."""
    given = {key: case[key] for key in ("tied", "layers", "z_loss", "optim", "family", "packing") if key in case}
    config = small_run(**given)
    if "batch" in case:
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"global_batch_size": case["batch"]})}
        )
    plan = resolve_schedule(plan_of(case), config.model, config.workload)
    watch = kind(rank)
    gather = patch.object(PeerGroup, "all_gather_object", boxes_of_members(plan, config.model))
    with gpu_world(plan, rank) as world, gather:
        trainer = GpuTrainer(config, plan, world, cast(SampleStream, None))
        with FAKE_MODE, watch:
            trainer.run_step()
            watch.begin_step()
            trainer.run_step()
    return watch


def check(case: dict[str, Any]) -> None:
    watches = [watch_step(case, rank, StreamCheck) for rank in range(num_ranks(case))]
    for watch in watches:
        assert not watch.strays, case
        assert not watch.races, case
        assert watch.syncs == ONE_SYNC, case
    assert not order_problems(watches), case


SMALL, TINY = {"layers": 2, "batch": 4}, {"layers": 1, "batch": 2}
EXAMPLES = [
    {"plan": "dp2-z3", "packing": "document_mask", "precision": "fp8", **SMALL},
    {"plan": "tp2-sp", "precision": "fp16", "family": "qwen3", "changes": {"compile": True}, "layers": 2, "batch": 2},
    {"plan": "pp2-szbh1", "tied": True, **SMALL},
    {"plan": "pp2-vocab", "z_loss": 0.1, **SMALL},
    {"plan": "pp2-sgpipe-oact", **SMALL},
    {"plan": "dp2-rfull-oact", "layers": 4, "batch": 4},
    {"plan": "dp2-z1", "layers": 3, "batch": 4},
    {"plan": "dp2-pp3-z3", "layers": 6, "batch": 12},  # whose middle stage must gather nothing after its step
    {"plan": "dp4-pp4-ep2-z3", "layers": 8, "batch": 32, "family": "experts"},
    {"plan": "dp2-pp2v2-sbreadthfirst-active1", "layers": 4, "batch": 8},
    {"plan": "dp2-pp2v2-szeropp-active1", "layers": 4, "batch": 8},
    {"plan": "dp2-pp2v4-sinterleaved-active2", "layers": 8, "batch": 8, "tied": True},
    {"plan": "dp2-pp3-z3", "layers": 3, "batch": 4},
]
SAMPLE = list(islice(random_cases(seed=0), 3))


def name_of(case: dict[str, Any]) -> str:
    """Return what makes a case, for people."""
    return "-".join(str(value) for key, value in case.items() if key not in ("layers", "batch", "changes"))


@pytest.mark.parametrize("case", quick_sample(EXAMPLES + SAMPLE, 1, 2, 4, 6, 12), ids=name_of)
def test_a_step_waits_once_its_streams_wait_for_each_other_and_all_ranks_meet(case: dict[str, Any]) -> None:
    check(case)


def test_every_kind_of_plan_is_stepped_under_all_schedules_that_can_run_it() -> None:
    """Splitting a backward, as a searched schedule may, stands against compile and fp8; two replicas against a
    vocabulary that is spread over pipeline ranks; skipped stages against that and offload."""
    missing = {(name, kind) for kind in KINDS for name in SYNCHRONOUS if case_of(name, [kind]) is None}
    split = {name for name, entry in SCHEDULES.items() if entry.split_backward or entry.searched}
    replicated = {name for name, entry in SCHEDULES.items() if entry.default_replicas > 1}
    assert missing == {
        *((name, kind) for name in split for kind in ("compile", "fp8")),
        *((name, "spread vocabulary") for name in replicated),
        *((name, kind) for name in ("skippipe", "checkfree-plus") for kind in ("spread vocabulary", "offload")),
    }


UP_TO_TWO_RANKS, FOUR_RANKS = (
    [case for size in sizes for case in CASES[size] if "sexact" not in case["plan"]] for sizes in ((1, 2), (4,))
)


@pytest.mark.soak
@pytest.mark.parametrize("case", UP_TO_TWO_RANKS, ids=name_of)
def test_steps_of_all_plans_of_one_and_two_ranks_wait_once_and_all_ranks_meet(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize("case", FOUR_RANKS, ids=name_of)
def test_steps_of_all_plans_of_four_ranks_wait_once_and_all_ranks_meet(case: dict[str, Any]) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_steps_of_every_schedule_with_each_kind_of_plan_wait_once_and_all_ranks_meet(schedule: str, kind: str) -> None:
    case = case_of(schedule, [kind])
    if case is None:
        pytest.skip("no such plan can be run")
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(20))
def test_steps_of_schedules_with_several_kinds_of_plans_wait_once_and_all_ranks_meet(number: int) -> None:
    check(next(random_cases(seed=number)))


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong is found


def test_a_second_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    local_statistics = ParameterUpdater.local_statistics

    def read_twice(self: ParameterUpdater) -> torch.Tensor:
        sums = local_statistics(self)
        float(sums[1])
        return sums

    monkeypatch.setattr(ParameterUpdater, "local_statistics", read_twice)
    assert len(watch_step({"plan": "dp1", **TINY}, 0).syncs) == 2


def test_a_copy_for_which_the_host_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    assert watch_step({"plan": "dp1", **TINY}, 0).syncs == ["host_copies.py:to_device", *ONE_SYNC]


def test_a_tensor_of_the_host_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecoderStage.forward

    def forward_with_host(self: DecoderStage, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor:
        y = forward(self, micro_batch, x)
        if y.dim() > 0:
            torch.add(y.detach(), torch.ones(y.shape[-1]))
        return y

    monkeypatch.setattr(DecoderStage, "forward", forward_with_host)
    with pytest.raises(RuntimeError, match="device"):
        watch_step({"plan": "pp2", **SMALL}, 0)


def test_swapped_collectives_are_found() -> None:
    watches = [watch_step({"plan": "tp2", **TINY}, rank) for rank in range(2)]
    assert not order_problems(watches)
    calls = watches[1].calls
    pairs = list(pairwise(calls))
    swappable = [at for at, (one, other) in enumerate(pairs) if one.ranks == other.ranks and one != other]
    at = random.Random(0).choice(swappable)
    calls[at : at + 2] = calls[at : at + 2][::-1]
    assert order_problems(watches)


@pytest.mark.parametrize(
    ("plan", "rank", "owner", "name", "without"),
    quick_sample(
        [
            ("tp2-sp", 0, PendingTensor, "wait", lambda self: self.result()),
            ("pp2", 1, p2p.PendingReceive, "wait", lambda self: None),
            ("dp2-z3", 0, Stream, "wait_event", lambda self, event: None),
            ("dp2-z1", 0, Stream, "wait_event", lambda self, event: None),
            ("pp2-sgpipe-oact", 0, Stream, "wait_stream", lambda self, other: None),
            ("pp2-sgpipe-oact", 0, Stream, "wait_event", lambda self, event: None),
            ("dp1-oact", 0, Stream, "wait_stream", lambda self, other: None),
            ("dp1-oact", 0, Stream, "wait_event", lambda self, event: None),
        ],
        *(0, 2, 5),
    ),
    ids=[
        "collective",
        "transfer",
        "gather of parameters",
        "gather under z1",
        *("begin of offload", "end of offload") * 2,
    ],
)
def test_a_missing_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, plan: str, rank: int, owner: type, name: str, without: Any
) -> None:
    monkeypatch.setattr(owner, name, without)
    assert watch_step({"plan": plan, **SMALL}, rank, StreamCheck).races
