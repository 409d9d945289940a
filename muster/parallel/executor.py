"""The executor: interprets a Program on one rank and records what it did when."""

from collections.abc import Callable, Mapping
from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import Pending
from muster.parallel.route import Arrival, Route
from muster.parallel.stage import Stage
from muster.parallel.whereabouts import PAGE, Whereabouts
from muster.parallel.words import Words
from muster.schedule.action import KINDS, LANES, Action, Lane, other_end
from muster.schedule.gone import gone_by
from muster.schedule.program import Instruction, Program, Wait
from muster.simulate.timeline import Event

Handler = Callable[[Action], None]


class Executor:
    """Runs one pipeline rank's part of a Program, round after round.

    One thread walks the compute lane. Before each compute instruction it begins, in the order of their lanes, the
    sends, receives and collectives whose waits are over; sends and receives then run beside the compute. Nothing
    communicates but the instructions (and, within a pass, the stage itself).

    `handlers` do the kinds that are not a stage's own: NORM, STEP, TIE, MERGE. `routes` lead from a stage on
    this pipeline rank to a neighbouring stage on another. `clock` gives the seconds of the events. `where` is told
    what begins.
    """

    def __init__(
        self,
        program: Program,
        pp_rank: int,
        world_rank: int,
        stages: Mapping[int, Stage],
        routes: Mapping[tuple[int, int], Route],
        handlers: Mapping[str, Handler],
        clock: Callable[[], float] = perf_counter,
        words: Words | None = None,
        where: Whereabouts | None = None,
    ) -> None:
        self._begins = (where or Whereabouts(bytearray(PAGE))).begin
        self.program, self._clock, self._spreads_words = program, clock, words is not None
        self.lanes: dict[Lane, tuple[Instruction, ...]] = {lane: program.ranks[pp_rank].get(lane, ()) for lane in LANES}
        self.pp_rank, self.world_rank, self.stages, self.routes = pp_rank, world_rank, stages, routes
        self._gone = gone_by(program, pp_rank)
        self._do: dict[str, Callable[[Instruction], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": lambda instruction: self.stages[instruction.action.stage].backward_weight(
                instruction.action.micro_batch
            ),
            "SF": self._send,
            "SB": self._send,
            "RF": self._receive,
            "RB": self._receive,
            "OFFLOAD": self._copy,
            "RELOAD": self._copy,
            "UNSHARD": lambda instruction: self.stages[instruction.action.stage].unshard(),
            "SYNC": lambda instruction: self.stages[instruction.action.stage].synchronise(),
            "REDUCE": lambda instruction: self.stages[instruction.action.stage].reduce(),
        }
        if words is not None:
            for kind, do in words.passes.items():
                self._do[kind] = lambda instruction, do=do: do(instruction.action.micro_batch)
            for kind, begin in words.meetings.items():
                self._do[kind] = lambda instruction, begin=begin: self._meet(instruction, begin)
        for kind, handler in handlers.items():
            self._do[kind] = lambda instruction, handler=handler: handler(instruction.action)

    def run(self) -> list[Event]:
        """One round. Returns this rank's events, in seconds of the machine's monotonic clock."""
        self._cursor: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._arriving: dict[Wait, Arrival | Pending] = {}
        """What has begun and runs beside the compute."""
        self._copying: dict[Wait, Callable[[], None]] = {}
        self._sending: dict[int, list[tuple[dist.Work, Tensor]]] = {}
        """By place in the p2p lane, what has been sent and isn't known to be gone."""
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._output_gradients: dict[tuple[int, int], Tensor] = {}
        self._input_gradients: dict[tuple[int, int], Tensor] = {}
        self._events: list[Event] = []
        for _ in self.lanes["compute"]:
            self._begin_what_can()
            self._begin_next("compute")
        for lane in LANES:
            while self._cursor[lane] < len(self.lanes[lane]):
                self._begin_next(lane)
        for wait in list(self._arriving):
            self._finish(wait)
        assert not self._copying, "a copy that no pass waits for: the checker refuses it"
        for place in list(self._sending):
            self._let_go(place)
        return self._events

    # ------------------------------------------------------------------------------------------------------------------
    # Order

    def _begin_what_can(self) -> None:
        for lane in LANES[1:]:
            instructions = self.lanes[lane]
            while self._cursor[lane] < len(instructions):
                if not all(self._is_over(wait) for wait in instructions[self._cursor[lane]].waits):
                    break
                self._begin_next(lane)

    def _begin_next(self, lane: Lane) -> None:
        index = self._cursor[lane]
        instruction = self.lanes[lane][index]
        for wait in instruction.waits:
            self._make_over(wait)
        self._cursor[lane] = index + 1
        start_s = self._clock()
        self._begins(instruction.action)
        self._do[instruction.action.kind](instruction)
        if instruction.action.kind not in ("RF", "RB") and not KINDS[instruction.action.kind].beside:
            self._events.append(Event(self.world_rank, lane, instruction.action, start_s, self._clock()))

    def _is_over(self, wait: Wait) -> bool:
        begun = self._cursor[wait.lane] > wait.index
        return begun and wait not in self._arriving and wait not in self._copying

    def _make_over(self, wait: Wait) -> None:
        while self._cursor[wait.lane] <= wait.index:
            self._begin_next(wait.lane)
        if wait in self._arriving:
            self._finish(wait)
        if wait in self._copying:
            self._copying.pop(wait)()

    def _finish(self, wait: Wait) -> None:
        start_s = self._clock()
        action = self.lanes[wait.lane][wait.index].action
        self._begins(action, True)
        arrived = self._arriving.pop(wait).wait()
        if arrived is not None:
            self._take_from_words(action, arrived)
        if wait.lane == "p2p":
            for place in self._gone.get(wait.index, ()):
                self._let_go(place)
        # What runs beside the compute costs nothing; what is recorded is how long the rank stood still for it.
        self._events.append(Event(self.world_rank, wait.lane, action, start_s, self._clock()))

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def _forward(self, instruction: Instruction) -> None:
        _, stage, micro_batch, *_ = instruction.action
        y = self.stages[stage].forward(micro_batch, self._inputs.pop((stage, micro_batch), None))
        if self.program.is_last(stage):
            if self._spreads_words:
                self._outputs[stage, micro_batch] = y.detach()
            return
        if self.program.placement[stage + 1] == self.pp_rank:
            self._inputs[stage + 1, micro_batch] = y.detach()
        else:
            self._outputs[stage, micro_batch] = y.detach()

    def _backward(self, instruction: Instruction) -> None:
        kind, stage, micro_batch, *_ = instruction.action
        backward = self.stages[stage].backward if kind == "B" else self.stages[stage].backward_input
        d = backward(micro_batch, self._output_gradients.pop((stage, micro_batch), None))
        if d is None:
            return
        if self.program.is_first(stage):
            self._input_gradients[stage, micro_batch] = d
            return
        if self.program.placement[stage - 1] == self.pp_rank:
            self._output_gradients[stage - 1, micro_batch] = d
        else:
            self._input_gradients[stage, micro_batch] = d

    def _copy(self, instruction: Instruction) -> None:
        kind, stage, micro_batch, *_ = instruction.action
        copy = self.stages[stage].offload if kind == "OFFLOAD" else self.stages[stage].reload
        self._copying[Wait("copy", self._cursor["copy"] - 1)] = copy(micro_batch)

    # ------------------------------------------------------------------------------------------------------------------
    # Transfers

    def _send(self, instruction: Instruction) -> None:
        kind, stage, micro_batch, *_ = instruction.action
        buffers = self._outputs if kind == "SF" else self._input_gradients
        tensor = buffers.pop((stage, micro_batch))
        receiver = other_end(instruction.action).stage
        route = self.routes[stage, receiver]
        self._sending[self._cursor["p2p"] - 1] = route.send(tensor, self._tag(kind[1], receiver, micro_batch))

    def _let_go(self, place: int) -> None:
        """Frees the memory of a send that is over, or of which the rank waits for the end."""
        for work, _ in self._sending.pop(place):
            work.wait()

    def _receive(self, instruction: Instruction) -> None:
        kind, stage, micro_batch, *_ = instruction.action
        tensor = self.stages[stage].receive_buffer(micro_batch)
        route = self.routes[stage, other_end(instruction.action).stage]
        wait = Wait("p2p", self._cursor["p2p"] - 1)
        self._arriving[wait] = route.receive(tensor, self._tag(kind[1], stage, micro_batch))
        (self._inputs if kind == "RF" else self._output_gradients)[stage, micro_batch] = tensor

    # ------------------------------------------------------------------------------------------------------------------
    # Words that are spread over the pipeline ranks

    def _meet(self, instruction: Instruction, begin: Callable[[int, Tensor | None], Pending]) -> None:
        kind, _, micro_batch, *_ = instruction.action
        end = (0 if kind == "DC" else self.program.num_stages - 1, micro_batch)
        given = {"HC": self._outputs, "DC": self._input_gradients}.get(kind, {}).pop(end, None)
        self._arriving[Wait("collective", self._cursor["collective"] - 1)] = begin(micro_batch, given)

    def _take_from_words(self, action: Action, tensor: Tensor) -> None:
        """Gives the first stage its input, the last one the gradient of its output."""
        if action.kind == "EC" and 0 in self.stages:
            self._inputs[0, action.micro_batch] = tensor
        elif action.kind == "SC" and self.program.num_stages - 1 in self.stages:
            self._output_gradients[self.program.num_stages - 1, action.micro_batch] = tensor

    def _tag(self, direction: str, stage: int, micro_batch: int) -> int:
        """Differs for all transfers of a round (gloo matches by tag; NCCL by the order, which the checker proves)."""
        return (micro_batch * self.program.num_stages + stage) * 2 + (direction == "B")
