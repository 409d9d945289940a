"""Memory of one rank of a plan by PyTorch's own accounting, without allocating it: the trainer on fake tensors.

One process stands for one rank of a world of any size: the process group is PyTorch's fake one, whose collectives do
nothing, and fake tensors have a shape and a dtype but no memory. Stages, sharding, executor and optimizer are those of
training. `MemTracker` counts the bytes of every storage while it lives.

The losses' chunks are those of a GPU: a CPU's are so small that following them would take minutes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.memory.kernel_workspace import GPU_LOSS_CHUNK_LOGITS, KernelWorkspace
from muster.cost.perturbation import POINTS
from muster.data.dataset import Batch, SampleStream
from muster.launch.launcher import launch, rank_command
from muster.launch.rank_process import exit_process, rank_main
from muster.model.chunk_sizes import large_chunks
from muster.optim.host_optimizer import HostOptimizer
from muster.parallel.disk_activations import DiskActivations
from muster.parallel.layer_activations import HostActivations
from muster.parallel.offload import ActivationOffload, HostBufferPool, HostLink, OffloadedStorages
from muster.parallel.param_offload import ParamOffload
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World, fake_world, open_world
from muster.schedule.action import Action
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.workload import Workload
from muster.train.parameter_updater import ParameterUpdater
from muster.train.prefetch import LocalBatch
from muster.train.step_state import StepState
from muster.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Memory that PyTorch counted on one rank."""

    rank: int
    resident_bytes: int
    """Bytes before the step: parameters and optimizer state."""
    peak_bytes: int
    """Largest number of bytes during a step."""


FAKE_KERNELS = KernelWorkspace(fused_norm=False, loss_chunk_logits=GPU_LOSS_CHUNK_LOGITS, fused_bands=False)
"""Kernels that the forecast has to assume to be comparable with `measure_fake_rank`."""


def measure_fake_rank(
    model: ModelSpec, plan: Plan, workload: Workload, rank: int, optim: OptimConfig | None = None
) -> MeasuredMemory:
    """Build one of the plan's ranks and run one step of it, on fake tensors on the CPU; `optim`: AdamW if None."""
    with _fake_group(plan, rank) as world, large_chunks():
        trainer = _FakeTrainer(_run_config(model, plan, workload, optim), plan, world, cast(SampleStream, None))
        with FAKE_MODE:
            return _count(trainer)


def measure_real_ranks(
    model: ModelSpec, plan: Plan, workload: Workload, optim: OptimConfig | None = None
) -> list[MeasuredMemory]:
    """Measure all ranks with real tensors, as processes on this machine; `optim`: AdamW if None. Raises MusterError
    when one fails."""
    if any(strategy.offload != "none" or strategy.offload_optimizer != "none" for strategy in plan.strategies):
        raise InfeasibleError(
            "processes of this machine keep what is offloaded in the same memory, where it would be counted:"
            " leave out --on-device"
        )
    config = _run_config(model, plan, workload, optim)
    with TemporaryDirectory(prefix="memory-check-") as place:
        folder = Path(place)
        (folder / _REQUEST_FILE).write_text(config.model_dump_json())
        command = rank_command("muster.train.memory_check", folder, plan.world_size)
        if launch(command, plan.world_size, folder).report():
            raise MusterError(f"the ranks of plan {format_plan_name(plan)} failed; see the messages above")
        found = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(plan.world_size))
        return [MeasuredMemory(**one) for one in found]


def _count_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Measure one rank as one of the processes."""
    torch.set_num_threads(1)
    config = RunConfig.model_validate_json((folder / _REQUEST_FILE).read_text())
    with open_world(store, rank, world_size, config.parallel) as world:
        trainer = CountedTrainer(config, config.parallel, world, cast(SampleStream, None))
        found = _count(trainer)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(found)))
    return 0


_REQUEST_FILE = "request.json"


def _run_config(model: ModelSpec, plan: Plan, workload: Workload, optim: OptimConfig | None = None) -> RunConfig:
    return RunConfig(
        model=model,
        parallel=plan,
        data=DataConfig(source="none"),
        optim=optim or OptimConfig(lr=1e-3),
        train=TrainConfig(steps=1, seq_len=workload.seq_len, global_batch_size=workload.global_batch_size),
    )


def _count(trainer: "CountedTrainer") -> MeasuredMemory:
    tracker = _make_tracker()
    tracker.track_external(*trainer.tensors())
    with tracker:
        resident = _total(tracker, "current")
        trainer.run_step()
    return MeasuredMemory(trainer.world.rank, resident, _total(tracker, "peak"))


FAKE_MODE = FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _fake_group(plan: Plan, rank: int) -> Iterator[World]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        yield fake_world(plan, rank, FakeStore())
    finally:
        dist.destroy_process_group()


class _FakeHost(HostBufferPool):
    """Host memory that isn't counted with the device's."""

    def acquire(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=_HOST)


_HOST = torch.device("meta")


class _FakeLink(HostLink):
    """Link that copies nothing, to host memory that isn't counted with the device's."""

    host_device = _HOST

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.pool = _FakeHost(pinned=False)

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], host_waits: bool = False, after_device: bool = True
    ) -> Callable[[], None]:
        return lambda: None


class _FakeOffload(ActivationOffload):
    """Offload that takes and frees memory, but copies nothing."""

    link_type = _FakeLink

    def _copy(self, away: OffloadedStorages, to_host: bool) -> Callable[[], None]:
        return lambda: None


class _FakeHostActivations(HostActivations):
    """Host memory that isn't counted."""

    link_type = _FakeLink

    def _send(self, own: object) -> Callable[[], None]:
        return lambda: None

    def _fetch(self, own: object) -> Callable[[], None]:
        return lambda: None


class _FakeDisk(DiskActivations):
    """Disk to which nothing is written."""

    link_type = _FakeLink

    def _send(self, own: object) -> Callable[[], None]:
        return lambda: None

    def _fetch(self, own: object) -> Callable[[], None]:
        return lambda: None


class _FakeFiles:
    """Files that hold nothing."""

    def take(self, size: int) -> "_FakeFiles":
        return self

    def read(self, tensors: object) -> None: ...

    def submit(self, work: object) -> Callable[[], None]:
        return lambda: None


class _FakeParamOffload(ParamOffload):
    """Host memory and disk that aren't counted."""

    link_type = _FakeLink

    @property
    def files(self) -> Any:
        return _FakeFiles()

    def materialize(self) -> dict[str, Tensor]:
        with FAKE_MODE:
            return super().materialize()


class _FakeUpdater(ParameterUpdater):
    link_type = _FakeLink

    def _build_host_optimizer(self, trained: Mapping[str, Tensor]) -> HostOptimizer:
        """Build it without files: host memory isn't counted."""
        own = self.config.optim, trained, self.layouts, self.world, self._host_parts
        return HostOptimizer(*own, self.link_type(self.world.device), at_home=self._offloaded)

    def update_part(self, stage: int, part: int) -> None:
        """Leave out the update in host memory, whose tensors have no values and aren't counted."""


class FakeStage(DecoderStage):
    """Stage with fake memory, whose values therefore don't matter."""

    overlapping_devices = frozenset({"cpu"})  # as on a GPU
    offload_type = _FakeOffload
    layer_types: ClassVar = {"host_copy": _FakeHostActivations, "disk": _FakeDisk}
    param_offload_type = _FakeParamOffload

    def _materialize(self) -> None:
        with FAKE_MODE:
            super()._materialize()

    def reset_parameters(self, seed: int) -> None:
        pass


class CountedTrainer(Trainer):
    """Trainer that runs a step over arbitrary tokens."""

    def tensors(self) -> list[Any]:
        """Return everything that takes memory before a step."""
        states = [tensor for _, tensor in self.updater.optimizer.state().values()]
        locals_ = [local for stage in self.stages.values() for local in stage.parameters.values()]
        return [*(stage.module for stage in self.stages.values()), *states, *locals_]

    def run_step(self) -> None:
        """Run one step."""
        workload, rows = self.config.workload, self.plan.local_micro_batch_size(self.world.at.pp)
        rows *= POINTS if self.config.optim.perturbation_parallel else 1  # of both ranks of a pair
        tokens = np.zeros((self.batch_loader.num_micro_batches * rows, workload.seq_len), np.int64)
        count = workload.tokens_per_step
        self.updater.state = StepState(step=1, learning_rate=0.0, num_valid=count, num_tokens=count)
        batch = Batch(tokens, tokens, tokens.size) if self.batch_loader.needs_data else None
        self.batch_loader.feed_stages(LocalBatch(0, batch, count, count))
        self.run_instructions(self._executor)


class _FakeTrainer(CountedTrainer):
    stage_type = FakeStage
    updater_type = _FakeUpdater

    def _reduce_norm(self, action: Action) -> None:
        """Skip reading the values, which fake tensors don't have, and clip in any case."""
        for stage in self.stages.values():
            stage.attach_local_gradients()
            stage.pop_losses()
            stage.pop_loss_difference()
            stage.pop_router_load()
        self.updater.state.grad_norm, self.updater.state.slope = 2 * self.config.optim.clip_norm, 1.0


class _NoModuleTracker:
    """Replacement of `MemTracker`'s view by module, which can't follow several micro-batches and keeps their inputs
    alive."""

    is_bw = False

    def register_user_hooks(self, *hooks: Any) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _make_tracker() -> MemTracker:
    tracker = MemTracker()
    tracker._mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    return tracker


def _total(tracker: MemTracker, which: str) -> int:
    snapshot = tracker.get_tracker_snapshot(which)
    return sum(by_kind.get("Total", 0) for device, by_kind in snapshot.items() if device != _HOST)


if __name__ == "__main__":
    exit_process(rank_main(_count_rank))
