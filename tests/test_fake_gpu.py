"""Steps of every kind of plan on a GPU in name only: where tensors lie, what the host waits for, who meets whom."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors

from muster.data.dataset import SampleStream
from muster.layout.mesh import coordinates_of
from muster.optim import adamw
from muster.parallel import p2p
from muster.parallel.axis import PendingTensor
from muster.parallel.offload import ActivationOffload, HostBufferPool
from muster.parallel.process_groups import ProcessGroups
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.resolve import resolve_schedule
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.memory_check import FAKE_MODE, CountedTrainer, FakeStage
from muster.train.parameter_updater import ParameterUpdater
from tests.fake_gpu import DEVICE, Stream, Watch, order_problems
from tests.parity import small_run
from tests.stream_check import StreamCheck
from tests.test_parity import CASES

SomeWatch = TypeVar("SomeWatch", bound=Watch)

ONE_SYNC = ["parameter_updater.py:_read_sums"]


class HostPool(HostBufferPool):
    """Host memory without memory."""

    def acquire(self, size: int) -> torch.Tensor:
        with FAKE_MODE:
            return torch.empty(size, dtype=torch.uint8)


class StreamOffload(ActivationOffload):
    """Offload over a stream of its own, as on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pool = HostPool(pinned=False)


class OffloadStage(FakeStage):
    """A stage whose copies are those of a GPU."""

    offload_type = StreamOffload


class GpuTrainer(CountedTrainer):
    """A trainer whose stages have fake memory."""

    stage_type = OffloadStage


@pytest.fixture(autouse=True)
def fake_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors of the device be made fake wherever they are made."""
    monkeypatch.setattr(adamw, "FUSED_DEVICES", (DEVICE.type,))
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


def watch_step(case: dict[str, Any], rank: int, kind: type[SomeWatch] = Watch) -> SomeWatch:  # type: ignore[assignment]
    """Run two steps of a case of the parity tests in bf16, and return what was seen in the second."""
    given = {key: case[key] for key in ("tied", "layers", "z_loss", "optim", "family") if key in case}
    config = small_run(**given)
    if "batch" in case:
        config = config.model_copy(
            update={"train": config.train.model_copy(update={"global_batch_size": case["batch"]})}
        )
    base = Plan(precision=case.get("precision", "bf16"), micro_batch_size=1)
    plan = Plan.model_validate(parse_plan_name(case["plan"], base).model_dump() | case.get("changes", {}))
    plan = resolve_schedule(plan, config.model, config.workload)
    watch = kind(rank)
    with gpu_world(plan, rank) as world:
        trainer = GpuTrainer(config, plan, world, cast(SampleStream, None))
        with FAKE_MODE, watch:
            trainer.run_step()
            watch.begin_step()
            trainer.run_step()
    return watch


def check(case: dict[str, Any], num_ranks: int) -> None:
    watches = [watch_step(case, rank, StreamCheck) for rank in range(num_ranks)]
    for watch in watches:
        assert not watch.strays, case
        assert not watch.races, case
        assert watch.syncs == ONE_SYNC, case
    assert not order_problems(watches), case


SMALL = {"layers": 2, "batch": 4}
EXAMPLES = [
    ({"plan": "dp2-z3", **SMALL}, 2),
    ({"plan": "tp2-sp", "precision": "fp16", **SMALL}, 2),
    ({"plan": "pp2-szbh1", "tied": True, **SMALL}, 2),
    ({"plan": "pp2-vocab", "z_loss": 0.1, **SMALL}, 2),
    ({"plan": "pp2-sgpipe-oact", **SMALL}, 2),
]


@pytest.mark.parametrize(("case", "num_ranks"), EXAMPLES, ids=[str(case["plan"]) for case, _ in EXAMPLES])
def test_a_step_waits_once_its_streams_wait_for_each_other_and_all_ranks_meet(
    case: dict[str, Any], num_ranks: int
) -> None:
    check(case, num_ranks)


ALL = [(case, size) for size in (1, 2, 4) for case in CASES[size] if "sexact" not in case["plan"]]


@pytest.mark.soak
@pytest.mark.parametrize("case_and_size", ALL, ids=[f"{case['plan']}-{i}" for i, (case, _) in enumerate(ALL)])
def test_steps_of_all_plans_wait_once_and_all_ranks_meet(case_and_size: tuple[dict[str, Any], int]) -> None:
    check(*case_and_size)


# ----------------------------------------------------------------------------------------------------------------------
# What is wrong is found


def test_a_second_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    local_statistics = ParameterUpdater.local_statistics

    def read_twice(self: ParameterUpdater) -> torch.Tensor:
        sums = local_statistics(self)
        float(sums[1])
        return sums

    monkeypatch.setattr(ParameterUpdater, "local_statistics", read_twice)
    assert len(watch_step({"plan": "dp1", **SMALL}, 0).syncs) == 2


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
    watches = [watch_step({"plan": "tp2", **SMALL}, rank) for rank in range(2)]
    assert not order_problems(watches)
    calls = watches[1].calls
    pairs = list(pairwise(calls))
    swappable = [at for at, (one, other) in enumerate(pairs) if one.ranks == other.ranks and one != other]
    at = random.Random(0).choice(swappable)
    calls[at : at + 2] = calls[at : at + 2][::-1]
    assert order_problems(watches)


@pytest.mark.parametrize(
    ("plan", "rank", "owner", "name", "without"),
    [
        ("tp2-sp", 0, PendingTensor, "wait", lambda self: self.result()),
        ("pp2", 1, p2p.PendingReceive, "wait", lambda self: None),
        ("dp2-z3", 0, Stream, "wait_event", lambda self, event: None),
        ("pp2-sgpipe-oact", 0, Stream, "wait_stream", lambda self, other: None),
        ("pp2-sgpipe-oact", 0, Stream, "wait_event", lambda self, event: None),
    ],
    ids=["collective", "transfer", "gather of parameters", "begin of offload", "end of offload"],
)
def test_a_missing_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, plan: str, rank: int, owner: type, name: str, without: Any
) -> None:
    monkeypatch.setattr(owner, name, without)
    assert watch_step({"plan": plan, **SMALL}, rank, StreamCheck).races
