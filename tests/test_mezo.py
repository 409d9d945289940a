"""Zeroth-order training: equal under all plans, with streamed parameters bit for bit; memory and bytes as predicted."""

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.main import main
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.cost.comm_volume import STEP_REPORT_BYTES, step_comm_bytes
from muster.cost.memory.forecast import forecast_memory
from muster.cost.time import param_communication
from muster.cost.time.plan_times import plan_times
from muster.layout.box import Box
from muster.model.perturbation import Direction, Part, move_, moved, rows_of, whole_numbers
from muster.planner.request import with_tier_sizes
from muster.schedule.action import Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.simulate.predict import predict
from muster.spec.model import stage_parameter_shapes
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload
from muster.train.memory_check import FAKE_KERNELS, measure_fake_rank
from tests.ranks import run_ranks
from tests.test_memory_forecast import FAKE_CPU, SHORT_LLAMA

CPU = torch.device("cpu")
OPTIM = OptimConfig(name="mezo", lr=1e-6)
PAIRS = {"optim": {"perturbation_parallel": True}}


def whole(name: str, *shape: int) -> Part:
    return Part(name, shape, Box((0,) * len(shape), shape))


@given(st.data())
def test_a_part_has_the_numbers_that_the_whole_has_there(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(data.draw(st.integers(1, n - first)) for n, first in zip(shape, start, strict=True))
    direction, box = Direction(data.draw(st.integers(0, 2**40)), data.draw(st.integers(1, 10**6))), Box(start, size)
    expected = whole_numbers(direction, whole("a", *shape), CPU)
    assert torch.equal(whole_numbers(direction, Part("a", shape, box), CPU), expected[box.slices])
    if len(shape) == 2:
        rows = torch.arange(start[0], start[0] + size[0])
        assert torch.equal(rows_of(direction, whole("a", *shape), rows), expected[rows])


def test_numbers_are_nearly_normal_and_independent() -> None:
    first = whole_numbers(Direction(3, 1), whole("a", 1000, 1000), CPU).double()
    others = [(Direction(3, 2), "a"), (Direction(4, 1), "a"), (Direction(3, 1), "b")]
    z = first / first.std()
    assert float(first.std()) == pytest.approx(43690**0.5, rel=2e-3)
    assert abs(float(z.mean())) < 4e-3
    assert float((z**4).mean()) == pytest.approx(3 - 0.15, abs=0.02)
    for direction, name in others:
        other = whole_numbers(direction, whole(name, 1000, 1000), CPU).double()
        assert abs(float((z * other).mean() / other.std())) < 4e-3
    for shifted in (z.roll(1, 0), z.roll(1, 1)):
        assert abs(float((z * shifted).mean())) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_point_is_the_same_in_place_and_as_a_copy(dtype: torch.dtype) -> None:
    direction, values = Direction(0, 5), torch.randn(70, 1001).to(dtype)
    numbers = whole_numbers(direction, whole("w", 70, 1001), CPU)
    copy = moved(values, numbers, 1e-3)
    assert float((copy.double() - values.double()).abs().max()) < 1e-2
    assert not torch.equal(copy, values)
    if dtype != torch.bfloat16:  # master weights are never of this dtype
        move_(values, direction, whole("w", 70, 1001), 1e-3)
        assert torch.equal(copy, values)


def same(group: str, *plans: str, **changes: Any) -> list[dict[str, Any]]:
    return [{"group": group, "plan": plan} | changes for plan in plans]


DOCUMENTS = {"family": "gpt2", "packing": "next_fit", "tied": True}


def cases(folder: str) -> list[dict[str, Any]]:
    """The first of a group is what the others are compared with."""
    step = f"{folder}/step-00000001"
    return [
        {"group": "plain", "plan": "dp1", "reference": True},
        *same("plain", "tp2-sp", "dp2-z1", "pp2v2-sinterleaved", reference=True),
        {"group": "plain", "plan": "dp2"} | PAIRS,
        {"group": "documents", "plan": "dp1", "reference": True} | DOCUMENTS,
        *same("documents", "pp2-mb2", "tp2", **DOCUMENTS),
        *same("documents", "dp2", **DOCUMENTS, **PAIRS),
        {"group": "begun", "plan": "dp2-oopt-oparam", "until": 1, "save": folder},
        *same("plain", "tp2", "dp1-oopt-oparam", load=step),
        {"group": "plain", "plan": "tp2-sp", "fault": "own numbers"},
        {"group": "plain", "plan": "dp2", "fault": "one point"} | PAIRS,
        {"group": "plain", "plan": "dp1-oopt-oparam", "fault": "lost update"},
    ]


STREAMED = [
    *same("bf16", "dp1", "dp1-oopt-oparam", "dp2-ooptd-oparamd", precision="bf16", tied=True),
    *same("pp", "pp2", "pp2-oopt0.5-oparam0.5", precision="fp32"),
]
MORE_STREAMED = [
    *same("tp", "tp2-sp", "tp2-sp-ooptd-oparamd", "tp2-sp-ooptd-oparam", precision="bf16"),
    *same("single", "dp1", "dp1-ooptd-oparamd", "dp2", "dp2-oopt-oparam", precision="fp16", family="gpt2"),
    *same("cut", "cp2", "cp2-oopt-oparam", precision="fp32"),
]


MORE: list[dict[str, Any]] = [
    {"group": "plain", "plan": "dp1", "reference": True},
    *same("plain", "dp1-mb4-rfull", "dp2-z2-mb2", "dp2-z3", "dp2x1", "pp2", "cp2", "cp2u", "tp2", reference=True),
    *same("documents", "dp1", "cp2a", "cp2", **DOCUMENTS),
    *(
        case
        for plans, family in (
            (("tp2-sp", "pp2", "dp2"), "qwen3"),
            (("tp2", "pp2", "dp2"), "gemma2"),
            (("tp2-sp", "cp2", "dp2"), "olmo2"),
            (("tp2", "cp2l", "dp2"), "gla"),
            (("tp2-sp", "pp2", "dp2"), "latent"),
            (("tp2", "pp2", "dp2-oopt-oparam"), "gpt_neox"),
        )
        for case in same(family, "dp1", *plans, family=family)
    ),
    *same("lora", "dp1", "tp2-sp", "dp2", "pp2", family="lora"),
    *same("dora", "dp1", "tp2", "dp2", family="dora"),
    *same("frozen", "dp1", "tp2", "dp2", "pp2", optim={"freeze": ("embed.*", "layers.1.*")}),
    *same("clipped", "dp1", "tp2", "dp2-ooptd-oparamd", optim={"clip_norm": 0.3}),
    *same("short", "dp1", "dp2", "pp2", packing="none"),
    *same("pairs of short", "dp2", "dp2-z1", packing="none", **PAIRS),
]


@pytest.mark.soak
def test_more_plans_and_models_equal_one_process(tmp_path: Any) -> None:
    payload = {"cases": [*MORE, *MORE_STREAMED], "cache": str(tmp_path)}
    found = run_ranks(2, "tests.mezo_ranks:train", payload, timeout_s=500)[0]
    for case, result in zip(MORE, found, strict=False):
        assert result["error"] < 1e-11, (case, result)
    for case, result in zip(MORE_STREAMED, found[len(MORE) :], strict=True):
        assert result["error"] == 0, (case, result)


ON_4_RANKS = [
    *same("plain", "dp1", "tp2-sp-cp2", "tp2-sp-pp2", "dp2-tp2-z3-oopt-oparam", "cp4"),
    *same("plain", "dp4", "dp2-tp2-sp", "dp2-pp2-oopt-oparam", "dp2-cp2", **PAIRS),
]
AVERAGED = same("averaged", "dp1", "dp1-oopt-oparam", "dp1-ooptd-oparamd", "pp2-oopt-oparam", optim={"ema_decay": 0.9})


@pytest.mark.soak
def test_plans_on_4_ranks_equal_one_process(tmp_path: Any) -> None:
    payload = {"cases": [*ON_4_RANKS, *AVERAGED], "cache": str(tmp_path)}
    found = run_ranks(4, "tests.mezo_ranks:train", payload, timeout_s=500)[0]
    for case, result in zip(ON_4_RANKS, found, strict=False):
        assert result["error"] < 1e-12, (case, result)
    for case, result in zip(AVERAGED, found[len(ON_4_RANKS) :], strict=True):
        assert (result["error"], bool(result["state"])) == (0, True), (case, result)


def test_every_plan_equals_one_process_and_streamed_parameters_those_in_memory(tmp_path: Any) -> None:
    """To 1e-12 in float64, and bit for bit; each seeded bug is found; what is saved goes on under other plans."""
    own = cases(str(tmp_path / "saved"))
    streamed = [case | {"profiles": number == 1} for number, case in enumerate(STREAMED)]
    payload = {"cases": [*own, *streamed], "cache": str(tmp_path), "micro_batch_size": 4}
    found = run_ranks(2, "tests.mezo_ranks:train", payload)[0]
    for case, result in zip(own, found, strict=False):
        if "fault" in case:
            assert result["error"] > 1e-4, case
        elif "save" not in case:
            assert result["error"] < 1e-12, (case, result)
            assert result.get("loss_error", 0.0) < 1e-12, (case, result)
        assert not result["state"]
        assert not result["gradients"]
    for case, result in zip(streamed, found[len(own) :], strict=True):
        assert result["error"] == 0, (case, result)


MEMORY = [("tp2-sp-bf16", 2048, 1), ("dp1-mb4-oopt-oparam-bf16", 1024, 1)]
MORE_MEMORY = [
    ("dp1-fp32", 2048, 1),
    ("dp2-z3-bf16 in pairs", 2048, 1),
    ("dp2-pp3-z1-mb2-fp32 in pairs", 2048, 2),
    ("dp1-bf16", 1024, 1),
    ("dp4-z3-bf16", 2048, 2),
    ("pp3-mb2-bf16", 2048, 4),
    ("dp2-ooptd-oparamd-bf16", 1024, 1),
]


@pytest.mark.parametrize(
    ("name", "seq_len", "micro_batches"),
    [*MEMORY, *(pytest.param(*one, marks=pytest.mark.soak) for one in MORE_MEMORY)],
)
def test_memory_is_what_pytorch_counts(name: str, seq_len: int, micro_batches: int) -> None:
    name, _, pairs = name.partition(" ")
    optim = OPTIM.model_copy(update={"perturbation_parallel": bool(pairs)})
    plan = parse_plan_name(name)
    spec = SHORT_LLAMA.model_copy(update={"vocab_size": 32000, "num_layers": 3})
    batch = plan.mesh(0).dp_size * plan.micro_batch_size * micro_batches
    workload = Workload(seq_len=seq_len, global_batch_size=batch)
    program = build_program(plan, spec, workload, optim=optim)
    check(program)
    own = spec, plan, workload, FAKE_CPU, program
    for rank in forecast_memory(*own, kernel_workspace=FAKE_KERNELS, optim=optim).ranks:
        real = measure_fake_rank(spec, plan, workload, rank.rank, optim)
        assert rank.terms.total == pytest.approx(real.peak_bytes, rel=0.01), rank.peak_instruction
        assert (rank.terms.gradients, rank.terms.optimizer) == (0, 0)


def test_data_parallel_ranks_send_scalars() -> None:
    workload = Workload(seq_len=64, global_batch_size=8)
    model = load_model("tiny")
    sent = step_comm_bytes(model, parse_plan_name("dp4x1-z1"), workload, 0, OPTIM)
    assert sent == {"world": {"all_reduce": STEP_REPORT_BYTES}}
    adamw = step_comm_bytes(model, parse_plan_name("dp4x1-z1"), workload, 0)
    assert sum(adamw["dp_replicate"].values()) == 4 * model.num_parameters


def test_a_step_is_predicted_as_two_forwards_and_the_drawing_of_numbers() -> None:
    cluster, workload = load_cluster("1xrtx4090"), Workload(seq_len=2048, global_batch_size=8)
    model = load_model("llama3-8b").model_copy(update={"num_layers": 8})
    plan = parse_plan_name("dp1-mb8-bf16")
    adamw, mezo = (predict(model, plan, workload, cluster, optim=optim) for optim in (None, OPTIM))
    kinds = {item.action.kind for lanes in mezo.program.ranks for lane in lanes.values() for item in lane}
    assert kinds == {Kind.F, Kind.GRAD_NORM, Kind.STEP}
    forward = adamw.times.seconds[Kind.F, 0]
    assert 2 * forward < mezo.times.seconds[Kind.F, 0] < 3 * forward
    assert mezo.forecast.fullest.terms.total < 0.6 * adamw.forecast.fullest.terms.total
    assert mezo.tflops_per_device < 2 / 3 * adamw.tflops_per_device * adamw.step_time_s / mezo.step_time_s * 1.01


def test_forwards_without_a_backward_gather_embedding_and_head_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of such plans are counted in `tests/test_comm_volume.py`."""
    model, plan, byte_s = load_model("tiny"), parse_plan_name("dp2-z3-mb1-bf16"), 1e-18
    monkeypatch.setattr(param_communication, "all_gather_s", lambda group, size: size * byte_s)

    def gathered(count: int) -> float:
        workload = Workload(seq_len=64, global_batch_size=2 * count)
        times = plan_times(model, plan, workload, load_cluster("2xh100"), optim=OPTIM)
        return count * times.exposed_s[Kind.F, 0]["dp"] / byte_s

    ends = sum(prod(shape) for _, shape in stage_parameter_shapes(model, range(0), True, True))
    assert 4 * gathered(1) - gathered(4) == pytest.approx(3 * 2 * ends)


def test_updates_in_host_memory_end_beside_the_passes_of_the_next_step() -> None:
    """Each part is updated ahead of its first use: a step takes little more than the longer of both, and one part."""
    cluster, workload = (
        with_tier_sizes(load_cluster("1xa100-80"), 10**12, 10**13),
        Workload(seq_len=2048, global_batch_size=64),
    )
    plan, model = parse_plan_name("dp1-mb16-oopt-oparam-bf16"), load_model("llama3-8b")
    found = predict(model, plan, workload, cluster, optim=OPTIM)
    check(found.program)
    passes = 4 * found.times.seconds[Kind.F, 0]
    update = found.times.seconds[Kind.UPDATE, 0]
    assert max(passes, 33 * update) < found.step_time_s < 1.1 * max(passes, 33 * update) + 2 * update
    on_disk = predict(model, parse_plan_name("dp1-mb16-ooptd-oparamd-bf16"), workload, cluster, optim=OPTIM)
    kinds = [item.action.kind for item in on_disk.program.ranks[0]["compute"]]
    assert kinds.count(Kind.UPDATE) == 33


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--parallel", "dp1-oopt"], "has no optimizer state to keep off the device: leave oopt out of the plan"),
        (["--parallel", "pp2-sgpipe-oact"], "has no activations to keep in host memory or on disk: leave oact out"),
        (["--parallel", "dp3", "--optim.perturbation_parallel", "true"], "but the plan has 3: take dp4, or"),
        (["--parallel", "auto"], "give a plan, such as dp1 or dp1-oopt-oparam"),
        (["--parallel", "dp2-pp2v2-sdualpipe"], "no backwards for which two replicas are: take another schedule"),
    ],
)
def test_what_has_no_meaning_without_a_backward_is_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "tiny", "--optim.name", "mezo", "--dry-run", *flags]) == 3
    assert sentence in capsys.readouterr().err
