"""The memory forecast against PyTorch's own accounting of the trainer, on fake devices."""

import pytest

from muster.cost.forecast import forecast, walk
from muster.cost.memory import MemoryTerms
from muster.cost.own_memory import Kernels
from muster.cost.stage_memory import Moment, StageMemory
from muster.schedule.build import program_of
from muster.schedule.check import check
from muster.spec.cluster import single_device
from muster.spec.device import DeviceSpec
from muster.spec.layout import stages_of
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Strategy
from muster.spec.plan_name import parse_plan_name
from muster.spec.schedules import SCHEDULES
from muster.spec.workload import Workload
from muster.train.memory_check import account

TOLERANCE = 0.03
SHORT_LLAMA = ModelSpec(
    vocab_size=128256, hidden_size=4096, num_layers=4, num_heads=32, num_kv_heads=8, intermediate_size=14336
)
FAKE_CPU = single_device(DeviceSpec(name="fake", kind="cpu"))
FAKE_KERNELS = Kernels(fused_norm=False, loss_numbers=1 << 26)


def assert_forecast_is_accounting(spec: ModelSpec, name: str, seq_len: int, micro_batches: int) -> None:
    plan = parse_plan_name(name)
    batch = plan.mesh(0).data_ranks * plan.micro_batch_size * micro_batches
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    found = forecast(spec, plan, workload, FAKE_CPU, program_of(plan, spec, workload), kernels=FAKE_KERNELS)
    for rank in found.ranks:
        real = account(spec, plan, workload, rank.rank)
        assert rank.terms.total == pytest.approx(real.peak_bytes, rel=TOLERANCE), f"{name}, {rank.at}"


@pytest.mark.parametrize(
    ("name", "seq_len", "micro_batches"), [("dp4-tp2-sp-pp2-rsel", 2048, 3), ("dp2x4-rfull", 1024, 2)]
)
def test_forecast_is_what_pytorch_counts(name, seq_len, micro_batches):
    assert_forecast_is_accounting(SHORT_LLAMA, name, seq_len, micro_batches)


# ----------------------------------------------------------------------------------------------------------------------
# Moment by moment


@pytest.mark.parametrize("schedule", [name for name, entry in SCHEDULES.items() if not entry.searched])
def test_live_micro_batches_are_those_of_the_checker(schedule):
    """With nothing else to hold, the peak is the checker's count of activations."""
    entry = SCHEDULES[schedule]
    if entry.slow:
        return
    plan = Plan(pp=4, vpp=entry.default_chunks, schedule=schedule, default_strategy=Strategy(zero="z1"))
    model = SHORT_LLAMA.model_copy(update={"num_layers": 16})
    program = program_of(plan, model, Workload(seq_len=64, global_batch_size=8))
    one = MemoryTerms(activations=1)
    moments = {kind: (Moment("", MemoryTerms()),) for kind in ("F", "B", "I", "W")}
    stage = StageMemory(MemoryTerms(), 0, True, 0, one, one, MemoryTerms(), 0, moments)
    peaks = [walk(program, rank, dict.fromkeys(stages_of(plan, rank), stage))[1].total for rank in range(4)]
    assert peaks == list(check(program).peak_activations)
