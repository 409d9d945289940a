"""The memory forecast against PyTorch's own accounting of the trainer, on fake devices."""

import pytest

from muster.cost.forecast import forecast
from muster.cost.own_memory import Kernels
from muster.schedule.build import program_of
from muster.spec.cluster import single_device
from muster.spec.device import DeviceSpec
from muster.spec.model import ModelSpec
from muster.spec.plan_name import parse_plan_name
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
