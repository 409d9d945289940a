"""Executor of a Program on one rank, which also records what the rank did when."""

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from muster.launch.heartbeat import PAGE_BYTES, Heartbeat
from muster.parallel.axis import PendingTensor
from muster.parallel.device_clock import HostClock, Mark, RecordBesideHost, StepClock, StepRecord, TimedInstruction
from muster.parallel.flight_recorder import flight_record
from muster.parallel.host_lane import HostLane
from muster.parallel.p2p import P2PRoute, PendingReceive
from muster.parallel.pending_reduction import PendingReduction
from muster.parallel.stage_interface import Stage
from muster.parallel.turns import Turns
from muster.parallel.vocab_parallel import VocabShard
from muster.parallel.weight_versions import WeightVersions
from muster.schedule.action import (
    ACTIVATION_COPIES,
    COPY_LANES,
    KINDS,
    LANES,
    RECEIVES,
    Action,
    Kind,
    Lane,
)
from muster.schedule.program import Instruction, Program, Wait
from muster.schedule.send_completion import completed_sends

Handler = Callable[[Action], PendingTensor | PendingReduction | None]
"""Executes one instruction that is not a stage's own; what it returns is still under way."""


class Executor:
    """Runs one pipeline rank's part of a Program, step after step.

    One thread walks the compute lane. Before each compute instruction it starts, in the order of their lanes, all
    sends, receives, collectives and copies whose waits are over; these then overlap with compute. Only instructions
    communicate (and, within a pass, the stage itself). Where the host's cores have a lane, another thread walks it.

    `handlers` execute the kinds that no single stage can: gradient norm, optimizer step, tied embeddings, replicas.
    `copies` start the other copies; the functions that they return wait for the end.
    `routes` lead from a stage on this pipeline rank to a neighbouring stage on another one. `clock` takes
    the moments at which instructions start and end. `heartbeat` is told of each instruction as it starts. Passes that
    run as one take `turns`. `on_failure` is told of errors in that thread, and of those of the rank's own that it is
    to end with.
    """

    def __init__(
        self,
        program: Program,
        pp_rank: int,
        world_rank: int,
        stages: Mapping[int, Stage],
        routes: Mapping[tuple[int, int], P2PRoute],
        handlers: Mapping[Kind, Handler],
        clock: StepClock | None = None,
        vocab: VocabShard | None = None,
        heartbeat: Heartbeat | None = None,
        copies: Mapping[Kind, Callable[[Action], Callable[[], None]]] | None = None,
        turns: Turns | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._tells_launcher = heartbeat is not None
        self._heartbeat = heartbeat or Heartbeat(bytearray(PAGE_BYTES))
        self._report_start = self._heartbeat.begin
        self.program = program
        self._turns = turns
        self._clock = clock or HostClock()
        self._vocab_parallel = vocab is not None
        self.lanes: dict[Lane, tuple[Instruction, ...]] = {lane: program.ranks[pp_rank].get(lane, ()) for lane in LANES}
        self.pp_rank = pp_rank
        self.world_rank = world_rank
        self.stages = stages
        self.versions: Mapping[int, WeightVersions] = {}
        """Versions of the stages' weights; to be set before an asynchronous Program runs."""
        self.on_backward: Callable[[Action], None] = lambda action: None
        """Function that is told of each backward of such a Program that is over."""
        self.routes = routes
        self._sends_completed_by = completed_sends(program, pp_rank)
        self._handlers: dict[Kind, Callable[[Instruction], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: lambda instruction: self.stages[instruction.action.stage].backward_weight(
                program.unit(instruction.action)
            ),
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            **dict.fromkeys(ACTIVATION_COPIES, self._copy),
            **dict.fromkeys((Kind.LOAD_F, Kind.LOAD_B, Kind.READ_F, Kind.READ_B), self._load_params),
            Kind.UNSHARD: lambda instruction: self.stages[instruction.action.stage].unshard(),
            Kind.RESHARD: lambda instruction: self.stages[instruction.action.stage].reshard(),
            Kind.ALL_REDUCE_TP: lambda instruction: self.stages[instruction.action.stage].all_reduce_replicated_grads(),
            Kind.REDUCE_GRAD: lambda instruction: self._run_handler(
                instruction, lambda action: self.stages[action.stage].reduce_gradients()
            ),
        }
        if vocab is not None:
            for kind, run_pass in vocab.passes.items():
                self._handlers[kind] = lambda instruction, run_pass=run_pass: run_pass(instruction.action.micro_batch)
            for kind, start in vocab.collectives.items():
                self._handlers[kind] = lambda instruction, start=start: self._start_vocab_collective(instruction, start)
        for kind, handler in handlers.items():
            self._handlers[kind] = lambda instruction, handler=handler: self._run_handler(instruction, handler)
        for kind, start in (copies or {}).items():
            self._handlers[kind] = lambda instruction, start=start: self._start_copy(
                start(instruction.action), instruction.lane
            )

        self._host_lane: HostLane | None = None
        if self.lanes["host"]:
            self._host_lane = HostLane(self.lanes, handlers, copies or {}, on_failure)
            self.lanes |= {lane: self.lanes[lane][:first] for lane, first in self._host_lane.first.items()}

    def run(self) -> StepRecord:
        """Run one step and return the record of this rank's instructions."""
        if self._host_lane is None:
            return self._run()
        self._host_lane.start()
        try:
            return RecordBesideHost(self._run(), self._host_lane.finish(self.world_rank))
        except BaseException as error:
            self._host_lane.abandon(error)
            raise

    def _run(self) -> StepRecord:
        self._cursor: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._pending: dict[Wait, PendingReceive | PendingTensor | PendingReduction] = {}
        """Communication that has started and overlaps with compute."""
        self._begun: dict[Wait, Mark] = {}
        """Reductions of gradients that have begun since the last pass, with the moment."""
        self._pending_copies: dict[Wait, Callable[[], None]] = {}
        self._pending_sends: dict[int, list[tuple[dist.Work, Tensor]]] = {}
        """Sends that are not known to be complete, by their index in the p2p lane."""
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._output_gradients: dict[tuple[int, int], Tensor] = {}
        self._input_gradients: dict[tuple[int, int], Tensor] = {}
        self._timed = timed = list[TimedInstruction]()
        if self._tells_launcher and not isinstance(self._clock, HostClock):
            self._heartbeat.follow_device(lambda: self._clock.device_action(timed), flight_record)
        while self._cursor["compute"] < len(self.lanes["compute"]):
            self._start_ready()
            self._start_next("compute")
        for lane in LANES:
            while self._cursor[lane] < len(self.lanes[lane]):
                self._start_next(lane)
        for wait in list(self._pending):
            self._complete(wait)
        assert not self._pending_copies, "no pass waits for a copy, which the checker should have refused"
        for index in list(self._pending_sends):
            self._release_send(index)
        return self._clock.take_record(self.world_rank, self._timed)

    # ------------------------------------------------------------------------------------------------------------------
    # Order

    def _start_ready(self) -> None:
        for pending in self._pending.values():
            if isinstance(pending, PendingReduction):
                pending.release()
        if self.program.num_steps > 1:
            self._complete_over()
        for lane in LANES[1:]:
            instructions = self.lanes[lane]
            while self._cursor[lane] < len(instructions):
                if not all(self._is_complete(wait) for wait in instructions[self._cursor[lane]].waits):
                    break
                self._start_next(lane)

    def _start_next(self, lane: Lane) -> None:
        index = self._cursor[lane]
        instruction = self.lanes[lane][index]
        for wait in instruction.waits:
            self._wait_for(wait)
        if lane == "compute" and any(wait.lane in COPY_LANES for wait in instruction.waits):
            self._start_ready()  # copies back that waited for the same ones away
        self._cursor[lane] = index + 1
        self._report_start(instruction.action)
        if lane == "compute":
            self._begun.clear()
        if lane == "compute" and instruction.action in self.program.pairs:
            self._run_pair(instruction, self.lanes[lane][index + 1])
            return
        start, own = self._clock.mark(), Wait(lane, index)
        self._handlers[instruction.action.kind](instruction)
        if instruction.action.kind == Kind.GRAD_NORM:  # whose result the host has read
            self._clock.mark_idle()
        if own in self._pending and instruction.action.kind in (Kind.REDUCE_GRAD, Kind.ALL_REDUCE_REPLICAS):
            self._begun[own] = start
        elif instruction.action.kind not in RECEIVES and not KINDS[instruction.action.kind].overlapped:
            self._timed.append((lane, instruction.action, start, self._clock.mark()))
        if self._host_lane is not None and lane == "compute":
            self._host_lane.note_over(own)

    def _complete_over(self) -> None:
        """Complete the collectives that are over, in their order, so that what waits for them may begin: the sum of
        norms, which waits for reduced gradients."""
        for wait, pending in list(self._pending.items()):
            if isinstance(pending, PendingTensor) and wait.lane == "collective":
                if not all(work is None or work.is_completed() for work in pending.works):
                    return
                self._complete(wait)

    def _is_complete(self, wait: Wait) -> bool:
        if self._host_lane is not None and self._host_lane.walks(wait):
            return self._host_lane.is_over(wait)
        has_started = self._cursor[wait.lane] > wait.index
        return has_started and wait not in self._pending and wait not in self._pending_copies

    def _wait_for(self, wait: Wait) -> None:
        if self._host_lane is not None and self._host_lane.walks(wait):
            self._host_lane.wait(wait)
            return
        while self._cursor[wait.lane] <= wait.index:
            self._start_next(wait.lane)
        if wait in self._pending:
            self._complete(wait)
        if wait in self._pending_copies:
            self._pending_copies.pop(wait)()
            if self._host_lane is not None:
                self._host_lane.note_over(wait)

    def _complete(self, wait: Wait) -> None:
        if wait.lane == "collective":
            # Those started before it end before it: their tensors are freed, which nothing on this rank may wait for.
            for earlier in [one for one in self._pending if one.lane == wait.lane and one.index < wait.index]:
                self._complete_one(earlier)
        self._complete_one(wait)

    def _complete_one(self, wait: Wait) -> None:
        start = self._begun.pop(wait) if wait in self._begun else self._clock.mark()
        action = self.lanes[wait.lane][wait.index].action
        self._report_start(action, True)
        result = self._pending.pop(wait).wait()
        if result is not None:
            self._deliver_vocab_result(action, result)
        if wait.lane == "p2p":
            for index in self._sends_completed_by.get(wait.index, ()):
                self._release_send(index)
        # Overlapped communication costs nothing: its event is the time for which the rank stalled.
        self._timed.append((wait.lane, action, start, self._clock.mark()))

    def _run_handler(self, instruction: Instruction, handler: Handler) -> None:
        """Run an instruction that is no stage's own; what it leaves under way is awaited by those who need it."""
        pending = handler(instruction.action)
        if pending is not None:
            self._pending[Wait(instruction.lane, self._cursor[instruction.lane] - 1)] = pending

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def _forward(self, instruction: Instruction) -> None:
        stage, micro_batch = instruction.action.stage, self.program.unit(instruction.action)
        if self.program.num_steps > 1:
            self.versions[stage].enter(micro_batch, instruction.action.version)
        y = self.stages[stage].forward(micro_batch, self._inputs.pop((stage, micro_batch), None))
        if self.program.is_last(stage):
            if self._vocab_parallel:
                self._outputs[stage, micro_batch] = y.detach()
            return
        following = self.program.next_stage(stage, instruction.action)
        if self.program.placement[following] == self.pp_rank:
            self._inputs[following, micro_batch] = y.detach()
        else:
            self._outputs[stage, micro_batch] = y.detach()

    def _backward(self, instruction: Instruction) -> None:
        kind, stage, *_ = instruction.action
        micro_batch = self.program.unit(instruction.action)
        backward = self.stages[stage].backward if kind == Kind.B else self.stages[stage].backward_input
        if self.program.num_steps > 1:
            self.versions[stage].enter(micro_batch, instruction.action.version)
        d = backward(micro_batch, self._output_gradients.pop((stage, micro_batch), None))
        if self.program.num_steps > 1:
            self.versions[stage].leave(micro_batch)
            self.on_backward(instruction.action)
        if d is None:
            return
        if self.program.is_first(stage):
            self._input_gradients[stage, micro_batch] = d
            return
        before = self.program.previous_stage(stage, instruction.action)
        if self.program.placement[before] == self.pp_rank:
            self._output_gradients[before, micro_batch] = d
        else:
            self._input_gradients[stage, micro_batch] = d

    def _run_pair(self, forward: Instruction, backward: Instruction) -> None:
        """Run a forward and the backward after it in turns, each while the other's exchange is under way."""
        start = self._clock.mark()

        def record(index: int) -> None:
            nonlocal start
            end = self._clock.mark()
            self._timed.append(("compute", (forward, backward)[index].action, start, end))
            start = end

        assert self._turns is not None, "the program has pairs, which need a rank's turns"
        self._cursor["compute"] += 1
        self._turns.run(lambda: self._forward(forward), lambda: self._backward(backward), record)

    def _copy(self, instruction: Instruction) -> None:
        kind, stage, *_ = instruction.action
        own, unit = self.stages[stage], self.program.unit(instruction.action)
        if kind == Kind.OFFLOAD:
            copied = own.offload(unit)
        elif kind == Kind.RELOAD:
            copied = own.reload(unit)
        else:
            copied = own.copy_layers(instruction.lane, kind, unit)
        self._start_copy(copied, instruction.lane)

    def _load_params(self, instruction: Instruction) -> None:
        kind, stage, *_ = instruction.action
        loaded = self.stages[stage].load_params(backward=kind in (Kind.LOAD_B, Kind.READ_B))
        self._start_copy(loaded, instruction.lane)

    def _start_copy(self, copied: Callable[[], None], lane: Lane) -> None:
        self._pending_copies[Wait(lane, self._cursor[lane] - 1)] = copied

    # ------------------------------------------------------------------------------------------------------------------
    # Transfers

    def _send(self, instruction: Instruction) -> None:
        kind, stage, *_ = instruction.action
        micro_batch = self.program.unit(instruction.action)
        buffers = self._outputs if kind == Kind.SEND_F else self._input_gradients
        tensor = buffers.pop((stage, micro_batch))
        receiver = self.program.other_end(instruction.action).stage
        route = self.routes[stage, receiver]
        self._pending_sends[self._cursor["p2p"] - 1] = route.send(
            tensor, self._tag(kind == Kind.SEND_B, receiver, micro_batch)
        )

    def _release_send(self, index: int) -> None:
        """Free the memory of a send that has completed, or wait for its end first."""
        for work, _ in self._pending_sends.pop(index):
            work.wait()

    def _receive(self, instruction: Instruction) -> None:
        kind, stage, *_ = instruction.action
        micro_batch = self.program.unit(instruction.action)
        tensor = self.stages[stage].receive_buffer(micro_batch)
        route = self.routes[stage, self.program.other_end(instruction.action).stage]
        wait = Wait("p2p", self._cursor["p2p"] - 1)
        self._pending[wait] = route.receive(tensor, self._tag(kind == Kind.RECV_B, stage, micro_batch))
        (self._inputs if kind == Kind.RECV_F else self._output_gradients)[stage, micro_batch] = tensor

    # ------------------------------------------------------------------------------------------------------------------
    # Vocabulary parallelism over the pipeline ranks

    def _start_vocab_collective(
        self, instruction: Instruction, start: Callable[[int, Tensor | None], PendingTensor]
    ) -> None:
        kind, _, micro_batch, *_ = instruction.action
        end = (0 if kind == Kind.EMB_GRAD_BCAST else self.program.num_stages - 1, micro_batch)
        contribution = {Kind.HIDDEN_BCAST: self._outputs, Kind.EMB_GRAD_BCAST: self._input_gradients}.get(kind, {}).pop(
            end, None
        )
        self._pending[Wait("collective", self._cursor["collective"] - 1)] = start(micro_batch, contribution)

    def _deliver_vocab_result(self, action: Action, tensor: Tensor) -> None:
        """Pass the result on: the embeddings to the first stage, the gradient of its output to the last one."""
        if action.kind == Kind.EMB_REDUCE and 0 in self.stages:
            self._inputs[0, action.micro_batch] = tensor
        elif action.kind == Kind.LOGIT_STATS and self.program.num_stages - 1 in self.stages:
            self._output_gradients[self.program.num_stages - 1, action.micro_batch] = tensor

    def _tag(self, backward: bool, stage: int, micro_batch: int) -> int:
        """Return a tag that differs for all transfers of a step.

        gloo matches transfers by tag; NCCL by their order, which the checker of Programs proves.
        """
        return (micro_batch * self.program.num_stages + stage) * 2 + backward
