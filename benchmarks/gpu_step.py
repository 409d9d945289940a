"""One measurement of `benchmarks.gpu`, in a process of its own: a step of Muster or of a plain loop on one device.

`python -m benchmarks.gpu_step CASE` takes a case as JSON and prints its result as one line of JSON.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.other_models import OTHERS, NanochatModel, NotInstalledError, TorchtitanLlama
from benchmarks.plain_llama import PlainLlama
from muster.config.local_machine import catalog_device_name, cluster_by_name
from muster.config.named_model import load_model
from muster.config.optim_config import OptimConfig
from muster.config.run_config import DataConfig, RunConfig, TrainConfig
from muster.cost.flops import train_flops_per_token
from muster.data.dataset import Batch, SampleStream
from muster.parallel import stage as stage_module
from muster.parallel.device_clock import synchronize
from muster.parallel.world import open_world
from muster.schedule.build import build_program
from muster.simulate.predict import predict
from muster.spec.errors import MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.device_metrics import device_name, peak_flops_per_s
from muster.train.memory_check import CountedTrainer
from muster.train.prefetch import LocalBatch
from muster.train.step_state import StepState

WARM_UP_STEPS, STEPS = 4, 8


@dataclass(frozen=True)
class StepCase:
    """A step to measure."""

    name: str
    model: str
    plan: str
    seq_len: int
    micro_batches: int
    layers: int | None = None
    compile: bool = False
    mean_document: int = 0
    """Mean length of packed documents, which lie otherwise in every step; 0: each sequence is one document."""
    program: str = "muster"
    """muster, plain: a hand-written loop in plain PyTorch, or that loop with another trainer's model (`OTHERS`)."""
    profile: str = ""
    """File of this machine's profile, for a second prediction."""

    def spec(self) -> ModelSpec:
        found = load_model(self.model)
        return found if self.layers is None else found.model_copy(update={"num_layers": self.layers})

    def full_plan(self) -> Plan:
        return parse_plan_name(self.plan).model_copy(update={"compile": self.compile})

    def config(self) -> RunConfig:
        plan = self.full_plan()
        batch = self.micro_batches * plan.micro_batch_size
        return RunConfig(
            model=self.spec(),
            parallel=plan,
            data=DataConfig(source="none", packing="document_mask" if self.mean_document else "concatenate"),
            optim=OptimConfig(lr=1e-4),
            train=TrainConfig(steps=1, seq_len=self.seq_len, global_batch_size=batch),
        )


class RandomTrainer(CountedTrainer):
    """A trainer that runs steps over random tokens."""

    def positions(self, shape: tuple[int, int]) -> np.ndarray | None:
        """Return the place of each token in its document; None where each sequence is one."""
        return None

    def run_step(self) -> None:
        workload, rows = self.config.workload, self.plan.local_micro_batch_size(self.world.at.pp)
        shape = self.batch_loader.num_micro_batches * rows, workload.seq_len
        tokens = np.random.default_rng(0).integers(self.config.model.vocab_size, size=shape)
        count = workload.tokens_per_step
        self.updater.state = StepState(step=1, learning_rate=1e-4, num_valid=count, num_tokens=count)
        batch = Batch(tokens, tokens, tokens.size, self.positions(shape))
        self.batch_loader.feed_stages(LocalBatch(0, batch, count, count))
        self._executor.run()


class PackedTrainer(RandomTrainer):
    """A trainer that runs steps over packed documents, of other lengths in every step."""

    mean_document = 0
    steps_run = 0

    def positions(self, shape: tuple[int, int]) -> np.ndarray | None:
        draw = np.random.default_rng(self.steps_run)
        self.steps_run += 1
        begins = draw.random(shape) < 1 / self.mean_document
        begins[:, 0] = True
        places = np.broadcast_to(np.arange(shape[1]), shape)
        return (places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)).astype(np.int32)


def predictions(case: StepCase, gpu: str | None) -> dict[str, Any]:
    """Return the predicted seconds and bytes of a step, by the catalogue and by this machine's profile."""
    found: dict[str, Any] = {}
    config = case.config()
    for source, cluster in (("catalogue", f"1x{gpu}" if gpu else ""), ("profile", case.profile)):
        if not cluster:
            continue
        try:
            program = build_program(config.parallel, config.model, config.workload)
            said = predict(config.model, config.parallel, config.workload, cluster_by_name(cluster), program)
        except MusterError as error:
            found[source] = {"error": str(error)}
        else:
            found[source] = {"step_s": said.step_time_s, "memory_bytes": max(rank.total for rank in said.memory)}
    return found


def measure_muster(case: StepCase) -> dict[str, Any]:
    """Time steps of the trainer."""
    config, plan = case.config(), case.full_plan()
    # Values don't matter, and drawing a large model's on the host takes minutes.
    stage_module.fill_initial_parts = lambda spec, layouts, parameters, seed: [
        local.fill_(0.01) for local in parameters.values()
    ]
    with open_world(dist.HashStore(), 0, 1, plan) as world:
        kind = PackedTrainer if case.mean_document else RandomTrainer
        trainer = kind(config, plan, world, cast(SampleStream, None))
        if isinstance(trainer, PackedTrainer):
            trainer.mean_document = case.mean_document
        return _time_steps(trainer.run_step, world.device)


def measure_plain(case: StepCase) -> dict[str, Any]:
    """Time steps of a loop as one would write it by hand: fp32 weights, autocast to bf16, fused AdamW."""
    spec, config = case.spec(), case.config()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model: nn.Module = OTHERS.get(case.program, PlainLlama)(spec, case.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward: Any = model
    if case.compile and isinstance(model, TorchtitanLlama):
        model.compile_blocks()
    elif case.compile:
        forward = torch.compile(model)
    rows = case.full_plan().micro_batch_size
    tokens = torch.randint(spec.vocab_size, (case.micro_batches, rows, case.seq_len), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for micro_batch in tokens:
            with torch.autocast(device.type, torch.bfloat16, enabled=config.parallel.precision == "bf16"):
                loss = forward(micro_batch, F.pad(micro_batch[:, 1:], (0, 1)))
            (loss / case.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = _time_steps(step, device)
    return found | ({"flops_per_token": model.flops_per_token()} if isinstance(model, NanochatModel) else {})


def _time_steps(step: Any, device: torch.device) -> dict[str, Any]:
    begin_s = perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
    synchronize(device)
    warm_up_s = perf_counter() - begin_s
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(STEPS):
        begin_s = perf_counter()
        step()
        synchronize(device)
        times.append(perf_counter() - begin_s)
    found: dict[str, Any] = {"step_s": median(times), "fastest_s": min(times), "slowest_s": max(times)}
    found["warm_up_s"] = warm_up_s
    if device.type == "cuda":
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        found["allocator_retries"] = torch.cuda.memory_stats(device)["num_alloc_retries"]
    return found


def run(case: StepCase) -> dict[str, Any]:
    """Predict a case, then measure it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = device_name(device)
    found: dict[str, Any] = {"case": asdict(case), "device": name, "torch": torch.__version__}
    is_predicted = case.program == "muster" and not case.mean_document  # predictions know whole sequences alone
    found["predicted"] = predictions(case, catalog_device_name(name)) if is_predicted else {}
    try:
        found["measured"] = measure_muster(case) if case.program == "muster" else measure_plain(case)
    except NotInstalledError as error:
        return {"skipped": str(error)}
    tokens = case.config().workload.tokens_per_step
    found["tokens_per_s"] = tokens / found["measured"]["step_s"]
    if peak := peak_flops_per_s(name, case.full_plan()):
        flops = found["measured"].get("flops_per_token") or train_flops_per_token(case.spec(), case.seq_len)
        found["mfu"] = found["tokens_per_s"] * flops / peak
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(run(StepCase(**json.loads(Path(sys.argv[1]).read_text())))), flush=True)
