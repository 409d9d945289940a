"""Times of a step on a device that the host runs ahead of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.parallel import op_profile
from muster.parallel.device_clock import DeviceClock, HostClock
from muster.parallel.executor import Executor
from muster.schedule.action import Action, Kind, Lane
from muster.schedule.program import Instruction, Program
from muster.spec.plan import Plan
from tests.simulated_gpu import SimulatedGpu

FORWARD_S, BACKWARD_S, NORM_S, UPDATE_S = 0.03, 0.06, 0.001, 0.01


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    found = SimulatedGpu()
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    return found


class SlowStage:
    """A stage whose passes take long on the device and no time on the host."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self.gpu = gpu

    def forward(self, micro_batch: int, x: object) -> torch.Tensor:
        self.gpu.launch(FORWARD_S)
        return torch.zeros(1)

    def backward(self, micro_batch: int, gradient: object) -> None:
        self.gpu.launch(BACKWARD_S)


def step_executor(gpu: SimulatedGpu, clock: Any) -> Executor:
    def read_norm(_: Action) -> None:
        gpu.launch(NORM_S)
        gpu.synchronize()

    actions = [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), Action(Kind.GRAD_NORM), Action(Kind.STEP)]
    lanes: dict[Lane, tuple[Instruction, ...]] = {"compute": tuple(Instruction(action) for action in actions)}
    program = Program("1f1b", (0,), 1, (lanes,))
    handlers = {Kind.GRAD_NORM: read_norm, Kind.STEP: lambda _: gpu.launch(UPDATE_S)}
    return Executor(program, 0, 0, {0: SlowStage(gpu)}, {}, handlers, clock)  # type: ignore[dict-item]


def test_the_times_of_a_step_are_the_devices_and_are_read_a_step_later(gpu: SimulatedGpu) -> None:
    executor = step_executor(gpu, DeviceClock(torch.device("cuda"), gpu.now_s))
    first = executor.run()
    assert gpu.syncs == 1, "only the norm is waited for"
    assert not first.is_complete(), "the device still updates the parameters"
    executor.run()
    assert gpu.syncs == 2
    assert first.is_complete()
    events = {event.action.kind: event for event in first.events()}
    durations = {kind: event.duration_s for kind, event in events.items()}
    expected = {Kind.F: FORWARD_S, Kind.B: BACKWARD_S, Kind.GRAD_NORM: NORM_S, Kind.STEP: UPDATE_S}
    assert durations == pytest.approx(expected, abs=5e-5)
    assert events[Kind.F].start_s == pytest.approx(100.0, abs=5e-5), "in seconds of the host's clock"
    assert gpu.syncs == 2


def test_the_hosts_clock_would_show_launches(gpu: SimulatedGpu) -> None:
    events = step_executor(gpu, HostClock(gpu.now_s)).run().events()
    assert events[0].duration_s < FORWARD_S / 100


def test_a_step_that_is_read_at_once_waits_for_its_device(gpu: SimulatedGpu) -> None:
    record = step_executor(gpu, DeviceClock(torch.device("cuda"), gpu.now_s)).run()
    assert record.events()[-1].duration_s == pytest.approx(UPDATE_S, abs=5e-5)


def test_a_transfer_between_devices_is_timed_to_its_end(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    hop_s = 0.02
    route = SimpleNamespace(
        send=lambda buffer: [(SimpleNamespace(wait=lambda: gpu.launch(hop_s)), buffer)],
        receive=lambda buffer: SimpleNamespace(wait=lambda: gpu.launch(hop_s)),
    )
    plan = Plan(pp=2)
    world: Any = SimpleNamespace(plan=plan, at=SimpleNamespace(pp=0), device=torch.device("cuda"), barrier=lambda: None)
    stages: Any = {0: SimpleNamespace(receive_buffer=lambda _: torch.ones(1))}
    routes: Any = {(0, 1): route}
    monkeypatch.setattr(op_profile, "perf_counter", gpu.now_s)
    assert op_profile._measure_p2p(stages, world, routes) == pytest.approx(hop_s, rel=0.01)
