"""Rows of `benchmarks.overlap` for data parallelism, in logical time: what the runtime hides, and what is predicted."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import overlap_data_parallel, sleeping_layers
from benchmarks.overlap import LINKS, MECHANISMS
from benchmarks.sleeping_layers import Case
from muster.parallel.fsdp import LastBackward
from muster.parallel.grad_reduce import DeferrableReduceScatter
from tests.sampling import quick_sample

NAMES = ("z1", "many-layers", "stages", "2bw", "z3", "step")


@pytest.fixture(autouse=True)
def logical_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let sleeping take no time, and the clock show what has been slept."""
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(sleep=sleep, perf_counter=lambda: now_s[0])
    for module in (sleeping_layers, overlap_data_parallel):
        monkeypatch.setattr(module, "time", clock)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def seconds_of(case: Case) -> tuple[float, float, float]:
    """Return the seconds of compute alone, without overlap, and with it."""
    alone_s, apart_s, together_s = (case.run(replace(link)) for link in LINKS)
    return alone_s, apart_s, together_s


CASES = [(ratio, name) for ratio in (0.5, 1.0, 2.0) for name in NAMES]
QUICK = (("z1", 2.0), ("many-layers", 0.5), ("stages", 1.0), ("2bw", 1.0), ("z3", 0.5), ("step", 1.0))


@pytest.mark.parametrize(("ratio", "name"), quick_sample(CASES, *(CASES.index((ratio, name)) for name, ratio in QUICK)))
def test_as_much_is_hidden_as_predicted(name: str, ratio: float) -> None:
    """Of many layers' messages a tenth at most is exposed, where they are no longer than the compute."""
    for case in MECHANISMS[name](ratio):
        alone_s, apart_s, together_s = seconds_of(case)
        assert alone_s == pytest.approx(case.compute_s), case.name
        assert apart_s == pytest.approx(case.compute_s + case.messages_s), case.name
        most_s = min(case.compute_s, case.messages_s)
        assert (apart_s - together_s) / most_s == pytest.approx((apart_s - case.predicted_s) / most_s, abs=0.01), (
            case.name
        )
        assert name != "many-layers" or ratio > 1 or together_s - alone_s <= 0.1 * case.messages_s, case.name


def test_reductions_that_are_awaited_at_once_or_late_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """z1's last backward without its hook, and the reductions of stages that are done with calls that wait."""
    (_, backward), (reductions, _) = MECHANISMS["z1"](0.5), MECHANISMS["stages"](0.5)
    call = DeferrableReduceScatter.__call__

    def waits(self: DeferrableReduceScatter, *given: object, **options: object) -> None:
        pending, self.pending = self.pending, None
        call(self, *given, **options)  # type: ignore[arg-type]
        self.pending = pending

    monkeypatch.setattr(LastBackward, "count", lambda self: None)
    monkeypatch.setattr(DeferrableReduceScatter, "__call__", waits)
    for case in (backward, reductions):
        _, apart_s, together_s = seconds_of(case)
        assert together_s == pytest.approx(apart_s), case.name
