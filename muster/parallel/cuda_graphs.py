"""CUDA graphs of a stage's passes: captured once, then replayed by one launch, without host time between kernels.

A graph remembers kernels and the addresses that they read and write, nothing of what the host computed on the way
(docs.pytorch.org/docs/stable/notes/cuda.html, CUDA Graphs). So a pass is captured on tensors of its own, into which
each micro-batch is copied, and what it returns is copied out. What a forward saves is at fixed addresses until its
backward has read it: there is one pair of graphs for each micro-batch that is in flight at a time, and each pair has a
memory pool of its own, since pairs take turns in another order than they were captured in (as Megatron-LM captures a
graph for each micro-batch of its schedule).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from muster.parallel.fsdp import master_dtype
from muster.parallel.master_weights import master_weights
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.spec.errors import MusterError
from muster.spec.plan import Plan


class Graph(Protocol):
    """Operators of a device that are recorded once and then run again on the same tensors."""

    def capture(self, run: Callable[[], None]) -> None:
        """Record what `run` asks of the device, which does nothing yet."""

    def replay(self) -> None:
        """Run what was recorded."""


class _DeviceGraph:
    """A CUDA graph with a memory pool of its own, or of another graph."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture(self, run: Callable[[], None]) -> None:
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        self._graph.replay()


def device_graphs() -> tuple[Graph, Graph]:
    """Return graphs of a forward and of its backward, which share a memory pool."""
    pool = torch.cuda.graph_pool_handle()
    return _DeviceGraph(pool), _DeviceGraph(pool)


@dataclass
class _PassPair:
    """Graphs of a forward and its backward, and the tensors that they read and write."""

    forward: Graph
    backward: Graph
    tokens: Tensor | None
    labels: Tensor | None
    hidden: Tensor | None
    """Input of the forward on a stage that reads no tokens."""
    output_gradient: Tensor | None
    output: Tensor | None = None
    input_gradient: Tensor | None = None


class PassGraphs:
    """Graphs of a stage's passes, for as many micro-batches as its schedule has in flight.

    The first step runs as without graphs: it compiles, lets libraries choose their kernels, and makes all gradients,
    which stay at their addresses from then on. `begin_step` captures before the second.
    """

    def __init__(
        self, stage: DecoderStage, in_flight: int, make_graphs: Callable[[], tuple[Graph, Graph]] | None = None
    ) -> None:
        self._stage, self._in_flight, self._make_graphs = stage, in_flight, make_graphs or device_graphs
        self._pairs: list[_PassPair] = []
        self._free: list[int] = []
        self._pair_of: dict[int, int] = {}
        """Index of the pair that holds a micro-batch, from its forward to its backward."""
        self._read: list[Tensor] = []
        """Constants at addresses that the graphs read."""
        self._loss_weight: Tensor | None = None
        """Factor of the sum of a micro-batch's losses, which differs from step to step."""
        self._steps = 0
        stage.pass_graphs = self
        if (masters := master_weights(stage.module)) is not None:
            masters.keeps_copies = True

    @property
    def is_captured(self) -> bool:
        return bool(self._pairs)

    @property
    def keeps_gradients(self) -> bool:
        """True from the end of the first step on: gradients are set to zero between steps, and keep their memory."""
        return self._steps > 0

    def begin_step(self) -> None:
        """Capture the passes before the second step, and take the step's factor of the loss."""
        stage = self._stage
        stage.unshard()
        if self._steps == 1:
            try:
                self._capture()
            except RuntimeError as error:
                raise MusterError(
                    f"the passes of stage {stage.index} can't be captured as CUDA graphs ({error}):"
                    " leave cuda_graphs out"
                ) from error
        self._steps += 1
        if self._loss_weight is not None and stage.inputs is not None:
            self._loss_weight.fill_(stage.inputs.loss_scale / stage.inputs.num_valid)

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Replay the forward of a micro-batch; arguments and result are those of `DecoderStage.forward`."""
        inputs, index = self._stage.inputs, self._free.pop()
        assert inputs is not None
        pair = self._pairs[index]
        self._pair_of[micro_batch] = index
        with torch.no_grad():
            _fill(pair.tokens, inputs.tokens_M[micro_batch] if pair.tokens is not None else None)
            _fill(pair.labels, inputs.labels_M[micro_batch] if pair.labels is not None else None)
            _fill(pair.hidden, x)
            pair.forward.replay()
            assert pair.output is not None
            return pair.output.clone()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Replay the backward of a micro-batch; arguments and result are those of `DecoderStage.backward`."""
        index = self._pair_of.pop(micro_batch)
        pair = self._pairs[index]
        self._free.append(index)
        with torch.no_grad():
            _fill(pair.output_gradient, gradient)
            pair.backward.replay()
            return None if pair.input_gradient is None else pair.input_gradient.clone()

    def _capture(self) -> None:
        stage, inputs = self._stage, self._stage.inputs
        assert inputs is not None
        if stage.world.device.type == "cuda":
            torch.cuda.empty_cache()  # of which the graphs' own pools can't take any
        pairs = [self._make_pair(inputs) for _ in range(self._in_flight)]
        if stage.computes_loss:
            self._loss_weight = torch.ones(
                (), dtype=master_dtype(stage.world.plan.precision), device=stage.world.device
            )
        stage.inputs = replace(
            inputs,
            tokens_M=_present([pair.tokens for pair in pairs]),
            labels_M=_present([pair.labels for pair in pairs]),
            num_valid=1,
            loss_scale=1.0 if self._loss_weight is None else self._loss_weight,
        )
        for index, pair in enumerate(pairs):
            self._capture_pair(index, pair)
        stage.inputs = inputs
        self._read = stage.module.position_state.tables()
        self._pairs, self._free = pairs, list(range(self._in_flight))

    def _make_pair(self, inputs: StageInputs) -> _PassPair:
        stage = self._stage
        tokens = torch.zeros_like(inputs.tokens_M[0]) if stage.reads_tokens else None
        labels = torch.zeros_like(inputs.labels_M[0]) if stage.computes_loss else None
        hidden = None if stage.reads_tokens else torch.zeros_like(stage.receive_buffer(0))
        gradient = None if stage.computes_loss else torch.zeros_like(stage.receive_buffer(0))
        return _PassPair(*self._make_graphs(), tokens, labels, hidden, gradient)

    def _capture_pair(self, index: int, pair: _PassPair) -> None:
        def forward() -> None:
            pair.output = self._stage.run_forward(index, pair.hidden)

        def backward() -> None:
            pair.input_gradient = self._stage.run_backward(index, pair.output_gradient)

        pair.forward.capture(forward)
        pair.backward.capture(backward)
        assert pair.output is not None
        pair.output = pair.output.detach()
        if pair.hidden is not None:
            pair.hidden = pair.hidden.detach()  # the same memory, into which micro-batches are copied


def _fill(place: Tensor | None, value: Tensor | None) -> None:
    if place is not None and value is not None:
        place.copy_(value)


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def has_cuda_graphs(device: torch.device) -> bool:
    """Return True if a device replays CUDA graphs."""
    return device.type == "cuda"


def graphs_note(plan: Plan, device: torch.device) -> str | None:
    """Return one sentence where a plan with CUDA graphs runs without them."""
    if not plan.cuda_graphs or has_cuda_graphs(device):
        return None
    return f"passes run without CUDA graphs, which a {device.type.upper()} doesn't have; results are the same"
