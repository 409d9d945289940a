"""Activations on disk that are written while the next pass runs: program, prediction, memory, and the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import cast

import pytest
import torch.distributed as dist
from torch import Tensor

from muster.config.cluster_files import load_cluster
from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.time.op_times import OpTimes
from muster.data.dataset import SampleStream
from muster.parallel.disk_activations import DiskActivations
from muster.parallel.file_store import FileStore
from muster.parallel.stage import DecoderStage
from muster.parallel.world import open_world
from muster.probe.contention import RandomDataset
from muster.schedule.action import Action, Kind
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.simulate.predict import predict
from muster.simulate.simulator import simulate
from muster.spec.layer_strategy import LayerOverride
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer

MODEL = ModelSpec(vocab_size=257, hidden_size=16, num_layers=6, num_heads=2, intermediate_size=32)
SEQ_LEN = 8


def plan_of(words: str, kept: int, model: ModelSpec = MODEL) -> Plan:
    """A plan whose last layers keep their activations on the device."""
    plan = parse_plan_name(words)
    stays = plan.default_strategy.model_copy(update={"offload": "none"})
    last = LayerOverride(start=model.num_layers - kept, count=kept, strategy=stays)
    return plan.model_copy(update={"overrides": (last,)})


def config_of(plan: Plan) -> RunConfig:
    return RunConfig(
        model=MODEL,
        parallel=plan,
        data=DataConfig(source="none"),
        train=TrainConfig(steps=2, seq_len=SEQ_LEN, global_batch_size=2),
        optim=OptimConfig(lr=1e-2),
    )


def test_as_many_layers_as_stay_behind_them_are_written_late() -> None:
    assert plan_of("dp1-oactd", 2).late_written_layers(0, 6) == [2, 3]
    assert plan_of("dp1-oactd", 1).late_written_layers(0, 6) == [4]
    assert plan_of("dp1-oactd", 4).late_written_layers(0, 6) == [1]
    assert parse_plan_name("dp1-oactd").late_written_layers(0, 6) == []
    in_pipeline = plan_of("pp2-oactd", 1)
    assert [in_pipeline.late_written_layers(stage, 6) for stage in range(2)] == [[], [4]]


@pytest.mark.parametrize(
    "words", ["dp1-mb1-oactd", "dp1-mb1-ooptd-oparamd-oactd", "pp2-mb1-oactd", "pp2-mb1-sgpipe-oactd"]
)
def test_the_pass_after_the_next_waits_for_late_writes(words: str) -> None:
    config = config_of(plan_of(words, 1))
    program = build_program(config.parallel, MODEL, config.workload)
    check(program)
    lanes = program.ranks[-1]
    stage = program.num_stages - 1
    late = [n for n, item in enumerate(lanes["disk"]) if item.action.kind == Kind.WRITE_ACT_LATE]
    assert len(late) == 2
    passes = [item.action for item in lanes["compute"]]
    forward = passes.index(Action(Kind.F, stage, 0))
    at = [n for n, item in enumerate(lanes["compute"]) if any(w == ("disk", late[0]) for w in item.waits)]
    assert at == [forward + 2]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_disk_as_fast_as_the_passes_delays_neither(recompute: bool) -> None:
    """Where all layers are on disk, a forward waits for its writes, which take longer."""
    forward_s, backward_s = 0.8, 2.4 if recompute else 1.6
    model = MODEL.model_copy(update={"num_layers": 16})
    found = {}
    for kept in (0, 6):
        plan = plan_of("dp1-mb1-fp32-oactd", kept, model) if kept else parse_plan_name("dp1-mb1-fp32-oactd")
        program = build_program(plan, model, config_of(plan).workload)
        late = len(plan.late_written_layers(0, 16)) / (16 - kept)
        moved_s = (forward_s + backward_s) / 2  # each way
        times = {("F", 0): forward_s, ("B", 0): backward_s, ("WRITE_ACT", 0): moved_s * (1 - late)}
        times |= {("WRITE_ACT_LATE", 0): moved_s * late, ("READ_ACT", 0): moved_s}
        found[kept] = simulate(program, OpTimes(times)).makespan_s / 2 / (forward_s + backward_s)
    assert found[0] == pytest.approx((moved_s + backward_s) / (forward_s + backward_s))
    assert found[6] == pytest.approx(1.0, abs=0.01)


def test_their_buffers_and_bytes_are_counted() -> None:
    cluster = load_cluster("1xrtx4090")
    all_of_it = parse_plan_name("dp1-mb1-fp32-oactd")
    workload = config_of(all_of_it).workload
    whole, part = (predict(MODEL, plan, workload, cluster) for plan in (all_of_it, plan_of("dp1-mb1-fp32-oactd", 2)))
    layer = whole.forecast.ranks[0].disk_bytes // 6
    assert (whole.forecast.ranks[0].host_bytes, part.forecast.ranks[0].host_bytes) == (2 * layer, 4 * layer)
    assert part.forecast.ranks[0].disk_bytes == 4 * layer
    seconds = part.times.seconds
    assert seconds[Kind.WRITE_ACT_LATE, 0] == pytest.approx(seconds[Kind.WRITE_ACT, 0])


@contextmanager
def writes_until_backward(held: range) -> Iterator[list[bool]]:
    """Hold each forward's writes with the numbers `held`, counted from 1, until its backward begins."""
    begun, waited, place = Event(), list[bool](), [0]
    submit, run_forward, run_backward = FileStore.submit, DecoderStage.run_forward, DecoderStage.run_backward

    def forward(self: DecoderStage, *args: object) -> Tensor:
        begun.clear()
        place[0] = 0
        return run_forward(self, *args)  # type: ignore[arg-type]

    def backward(self: DecoderStage, *args: object) -> Tensor | None:
        begun.set()
        return run_backward(self, *args)  # type: ignore[arg-type]

    def late(self: FileStore, work: Callable[[], None]) -> Callable[[], None]:
        place[0] += 1

        def held_back() -> None:
            waited.append(begun.wait(30))
            work()

        return submit(self, held_back if place[0] in held and not begun.is_set() else work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "submit", late)
        patch.setattr(DecoderStage, "run_forward", forward)
        patch.setattr(DecoderStage, "run_backward", backward)
        yield waited


def test_a_backward_begins_before_late_writes_and_leaves_the_same_bits() -> None:
    found = []
    for words, kept in (("dp1-mb1-fp32", 2), ("dp1-mb1-fp32-oactd", 2)):
        config = config_of(plan_of(words, kept))
        data = cast(SampleStream, RandomDataset(MODEL.vocab_size, SEQ_LEN))
        with open_world(dist.HashStore(), 0, 1, config.parallel, 1900 + len(found)) as world:
            trainer = Trainer(config, config.parallel, world, data)
            with writes_until_backward(range(3, 5)) as waited:
                losses = [trainer.step().loss for _ in range(2)]
            stage = trainer.stages[0]
            found.append((losses, {name: one.clone() for name, one in stage.parameters.items()}))
            if "oactd" in words:
                own = cast(DiskActivations, stage.layer_activations["disk"])
                assert waited == [True] * 8, "two layers of each of two micro-batches in two steps"
                held_bytes, each = own.link.pool.num_bytes, own.moved_bytes // (2 * 4 * 4)
    (losses, params), (with_disk, on_disk) = found
    assert losses == with_disk
    assert all(params[name].equal(on_disk[name]) for name in params)
    assert 3 * each <= held_bytes <= 4 * each, "buffers of two late layers, and of two on their way"
