"""A stage of the model on a peer of a swarm: its passes, the sum of its gradients, and its updates."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.config.run_config import RunConfig
from muster.config.swarm_rules import cut_into_stages
from muster.launch.peers.channel import Message
from muster.launch.peers.links import Ring
from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import stage_layouts
from muster.model.documents import Documents
from muster.optim.base import StateStarts
from muster.parallel.master_weights import master_weights
from muster.parallel.peer_ring import ring_sum
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.world import fake_world, pick_device
from muster.spec.plan import Plan
from muster.train.gradients import sum_of_squares
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_state import StepHooks, no_step

_HIDDEN = "hidden"


def stages_plan(config: RunConfig) -> Plan:
    """Return the plan whose Program a run's swarm executes."""
    assert config.swarm is not None
    return cut_into_stages(config.parallel, config.swarm.stages)


def make_stage(welcome: Message) -> "SwarmStage":
    """Return the worker for the run that a trainer's welcome describes, on this process's device."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    return SwarmStage(RunConfig.model_validate(welcome["config"]), pick_device(0, 1))


class SwarmStage:
    """One stage at a time, of any, with its optimizer. Peers know of no process group: the stage's world is a fake one.

    Gradients of a step lie in `pending` until the trainer has told that they count; then they are in the sum, once.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config, self.device, self.plan = config, device, stages_plan(config)
        self.step = -1
        self.pending: dict[int, Tensor] = {}
        """Gradient of all parameters, flat, by micro-batch; a second one takes the place of the first."""
        self.counted: set[int] = set()
        """Micro-batches in the sum."""

    def serve(self, stage: int) -> None:
        """Hold another stage, whose state is yet to be loaded."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=self.plan.world_size)
        self.stage, self.updater = None, None  # the former ones' memory
        world = replace(fake_world(self.plan, stage, FakeStore()), device=self.device)
        config = self.config
        self.stage = DecoderStage(config.model, world, stage, config.train.seq_len, config.seed, optim=config.optim)
        self.updater = ParameterUpdater(config, self.plan, world, {stage: self.stage}, StepHooks())
        self.step = -1
        self._begin_step()

    def _begin_step(self) -> None:
        stage = self._stage
        self.pending, self.counted = {}, set()
        self._total: Tensor | None = None
        self._sum: Tensor | None = None
        self._losses: dict[int, list[float]] = {}
        stage._saved.clear()
        by_micro_batch: dict[str, Any] = {"tokens_M": {}, "labels_M": {}}
        stage.inputs = StageInputs(**by_micro_batch, num_valid=1, z_loss_coefficient=self.config.train.z_loss)

    @property
    def _stage(self) -> DecoderStage:
        assert self.stage is not None, "no stage is served yet"
        return self.stage

    @property
    def _updater(self) -> ParameterUpdater:
        assert self.updater is not None, "no stage is served yet"
        return self.updater

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def forward(self, micro_batch: int, inputs: bytes, hidden: bytes) -> bytes:
        """Run a forward; returns the hidden states (B, S, D), nothing from the last stage."""
        stage = self._stage
        self._feed(micro_batch, load(inputs))
        x = load(hidden)[_HIDDEN].to(self.device) if hidden else None
        y = stage.forward(micro_batch, x)
        if not stage.computes_loss:
            return _to_bytes(y)
        self._losses[micro_batch] = stage.pop_losses().tolist()
        return b""

    def _feed(self, micro_batch: int, given: Mapping[str, Tensor]) -> None:
        """Give the stage the data of a micro-batch, as `pack_inputs` has packed them."""
        own = cast(Any, self._stage.inputs)
        own.num_valid = int(given["num_valid"])
        for field in ("tokens", "labels"):
            if field in given:
                getattr(own, f"{field}_M")[micro_batch] = given[field].to(self.device)
        if "positions" in given:
            own.documents_M = own.documents_M or {}
            own.documents_M[micro_batch] = Documents.from_positions(given["positions"], self.device)
        if "dropout_keys" in given:
            own.dropout_keys_M = own.dropout_keys_M or {}
            own.dropout_keys_M[micro_batch] = given["dropout_keys"].to(self.device)

    def backward(self, micro_batch: int, gradient: bytes) -> tuple[bytes, list[float]]:
        """Run a backward; returns the gradient of the hidden states that entered, nothing from the first stage, and the
        losses, on the last one."""
        d = load(gradient)[_HIDDEN].to(self.device) if gradient else None
        found = self._stage.backward(micro_batch, d)
        self.pending[micro_batch] = self._take_gradients()
        return b"" if found is None else _to_bytes(found), self._losses.get(micro_batch, [])

    def _take_gradients(self) -> Tensor:
        """Return the gradients that a backward has made, flat, and leave none."""
        stage = self._stage
        masters = master_weights(stage.module)
        holders = dict(stage.module.named_parameters()) if masters is None else stage.parameters
        found = []
        for name, local in self._updater.parameters.items():
            gradient = holders[name].grad
            found.append(torch.zeros_like(local).flatten() if gradient is None else gradient.flatten().to(local.dtype))
            holders[name].grad = None
        return torch.cat(found)

    # ------------------------------------------------------------------------------------------------------------------
    # Sums and updates

    def count(self, micro_batch: int) -> bool:
        """Add the gradient of a micro-batch to the step's sum, once; returns whether the sum has it."""
        if micro_batch not in self.counted and micro_batch in self.pending:
            gradient = self.pending.pop(micro_batch)
            self._total = gradient if self._total is None else self._total.add_(gradient)
            self.counted.add(micro_batch)
        return micro_batch in self.counted

    def reduce(self, ring: Ring) -> tuple[str, float]:
        """Sum the step's gradients over the peers of the stage, beside this peer's own; returns the hash of the sum and
        its sum of squares. Raises LinkError."""
        parameters = self._updater.parameters
        own = self._total
        if own is None:
            own = torch.cat([torch.zeros_like(local).flatten() for local in parameters.values()])
        self._sum = ring_sum(own, ring)
        self._attach(self._sum)
        squares = float(sum_of_squares(self._stage))
        return sha256(_raw(self._sum)).hexdigest(), squares

    def _attach(self, flat: Tensor) -> None:
        parameters = self._updater.parameters
        sizes = [local.numel() for local in parameters.values()]
        for local, gradient in zip(parameters.values(), flat.split(sizes), strict=True):
            local.grad = gradient.view_as(local)

    def update(self, message: Message) -> None:
        """Update from the sum as the trainer says, and begin the next step."""
        updater = self._updater
        assert self._sum is not None, "an update without a sum"
        if not message["is_skipped"]:
            factor = float(message["factor"])
            self._attach(self._sum if factor == 1 else self._sum * factor)
            updater.state = replace(no_step(), step=message["step"], learning_rate=float(message["learning_rate"]))
            updater.optimizer_step()
        updater.drop_gradients()
        self.step = int(message["step"])
        self._begin_step()

    # ------------------------------------------------------------------------------------------------------------------
    # State

    def snapshot(self) -> bytes:
        """Return the state of the stage after the present step."""
        return stage_state(self._updater, list(self._updater.parameters), self.step)

    def digest(self) -> str:
        """Return the SHA-256 of `snapshot`, part by part."""
        found = sha256()
        for part in _state_parts(self._updater, list(self._updater.parameters), self.step):
            found.update(part)
        return found.hexdigest()

    def load(self, content: bytes) -> None:
        """Take over the state of the stage. Raises ValueError where it is of other parameters."""
        step, count, starts = fill_stage_state(self._updater, list(self._updater.parameters), content)
        self._updater.optimizer.step_count, self._updater.optimizer.starts = count, starts
        self._updater.drop_gradients()
        self.step = step
        self._begin_step()


def pack_inputs(given: StageInputs, micro_batch: int, is_first: bool, is_last: bool) -> bytes:
    """Return what a stage needs for a micro-batch beside hidden states."""
    own = {"num_valid": torch.tensor(given.num_valid)}
    own |= {"tokens": given.tokens_M[micro_batch]} if is_first else {}
    own |= {"labels": given.labels_M[micro_batch]} if is_last else {}
    documents = None if given.documents_M is None else given.documents_M[micro_batch]
    if documents is not None:
        own["positions"] = documents.positions_BS
    if given.dropout_keys_M is not None:
        own["dropout_keys"] = given.dropout_keys_M[micro_batch]
    return save({name: x.cpu().contiguous() for name, x in own.items()})


def stage_parameters(config: RunConfig, stage: int) -> list[str]:
    """Return the names of a stage's parameters."""
    plan = stages_plan(config)
    return [one.name for one in stage_layouts(config.model, plan, stage, coordinates_of(plan, stage))]


def stage_state(updater: ParameterUpdater, names: list[str], step: int) -> bytes:
    """Return parameters, by name, with their optimizer state, as peers and the trainer exchange them."""
    return b"".join(_state_parts(updater, names, step))


def _state_parts(updater: ParameterUpdater, names: list[str], step: int) -> Iterator[bytes]:
    optimizer = updater.optimizer
    head = {"step": step, "updates": optimizer.step_count, "starts": optimizer.starts._asdict()}
    yield json.dumps(head).encode() + b"\n"
    yield from map(_raw, _state_tensors(updater, names))


def fill_stage_state(updater: ParameterUpdater, names: list[str], content: bytes) -> tuple[int, int, StateStarts]:
    """Fill parameters and optimizer state from what `stage_state` has returned; returns the step, the optimizer's count
    of updates and the beginnings of its state. Raises ValueError where it is of others."""
    head, _, rest = content.partition(b"\n")
    tensors = _state_tensors(updater, names)
    if len(rest) != (expected := sum(x.nbytes for x in tensors)):
        raise ValueError(f"{len(rest)} bytes of state: expected {expected}")
    start = 0
    with torch.no_grad():
        for x in tensors:
            part = torch.frombuffer(bytearray(rest[start : start + x.nbytes]), dtype=x.dtype) if x.nbytes else x
            x.copy_(part.view(x.shape))
            start += x.nbytes
    fields = json.loads(head)
    return int(fields["step"]), int(fields["updates"]), StateStarts(**fields["starts"])


def _state_tensors(updater: ParameterUpdater, names: list[str]) -> list[Tensor]:
    """Parameters and optimizer state, in an order that all have."""
    own = {f"model/{name}": updater.parameters[name] for name in names}
    state = updater.optimizer.state().items()
    own |= {f"optim/{key}": tensor for key, (name, tensor) in state if f"model/{name}" in own}
    return [own[key] for key in sorted(own)]


def _to_bytes(x: Tensor) -> bytes:
    return save({_HIDDEN: x.detach().cpu().contiguous()})


def _raw(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
