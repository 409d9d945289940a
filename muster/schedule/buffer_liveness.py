"""Buffer liveness for the checker: buffers that a rank holds during a Program, and complete gradients."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from muster.schedule.action import KINDS, OUTER_KINDS, Action, Kind
from muster.schedule.program import Program, ProgramError, stages_of_action
from muster.spec.schedules import SCHEDULES

PASSES = (Kind.F, Kind.B, Kind.I, Kind.W)

_BUFFER_NAMES = {
    "x": ("its input", Kind.RECV_F),
    "a": ("its saved activations", Kind.F),
    "y": ("the output", Kind.F),
    "g": ("the gradient of its output", Kind.RECV_B),
    "d": ("the gradient of the input", Kind.B),
    "w": ("the buffers saved by its backward for inputs", Kind.I),
    "p": ("the gathered parameters", Kind.UNSHARD),
    "e": ("its word embeddings", Kind.EMB_F),
    "h": ("the hidden state under the head", Kind.HIDDEN_BCAST),
    "s": ("its logit statistics", Kind.S),
    "l": ("the exponentials of its logits", Kind.S),
    "z": ("the logit statistics of all ranks", Kind.LOGIT_STATS),
    "q": ("the gradient of the word embeddings", Kind.EMB_GRAD_BCAST),
    "o": ("its saved activations in host memory", Kind.OFFLOAD),
    "j": ("its layers' saved activations in host memory", Kind.OFFLOAD_ACT),
    "k": ("its saved activations on disk", Kind.WRITE_ACT),
    "m": ("the gradients in host memory", Kind.OFFLOAD_GRAD),
    "v": ("the optimizer state", Kind.READ_STATE),
    "n": ("the updated parameters in host memory", Kind.UPDATE),
    "t": ("the optimizer state on the device", Kind.RELOAD_STATE),
    "u": ("the updated optimizer state on the device", Kind.DEVICE_UPDATE),
    "b": ("the updated parameters", Kind.STEP_BUCKET),
}
"""Description of each buffer, and the kind that makes it."""

_BOUNDARY_BUFFERS = {
    Kind.EMB_REDUCE: ("makes", "x"),
    Kind.HIDDEN_BCAST: ("frees", "y"),
    Kind.LOGIT_STATS: ("makes", "g"),
    Kind.EMB_GRAD_BCAST: ("frees", "d"),
}
"""Effect of a vocabulary collective on the rank of the first stage (x, d) or of the last one (y, g)."""

_GRADIENT_ORDER = {
    Kind.B: 0,
    Kind.W: 0,
    Kind.LOAD_B: 0,
    Kind.READ_B: 0,
    Kind.T: 0,
    Kind.EMB_W: 0,
    Kind.REDUCE_GRAD: 1,
    Kind.ALL_REDUCE_TP: 2,
    Kind.ALL_REDUCE_REPLICAS: 3,
    Kind.ALL_REDUCE_TIED: 4,
}
_GRADIENT_ORDER |= {Kind.GRAD_NORM: 5, Kind.GRAD_NORM_ASYNC: 5, Kind.GRAD_NORM_BESIDE: 5, Kind.CLIP: 6, Kind.STEP: 8}
_GRADIENT_ORDER[Kind.STEP_BUCKET] = 7
_GRADIENT_ORDER |= dict.fromkeys((Kind.MOVE_EXPERTS, *OUTER_KINDS), 9)
_GRADIENT_ORDER |= dict.fromkeys((Kind.OFFLOAD_GRAD, Kind.UPDATE, Kind.RELOAD_PARAM, Kind.WRITE_STATE), 7)
_GRADIENT_ORDER |= dict.fromkeys(
    (Kind.BACKWARD_UPDATE, Kind.HOST_UPDATE, Kind.RELOAD_STATE, Kind.DEVICE_UPDATE, Kind.OFFLOAD_STATE), 7
)
"""Order of instructions on gradients: each kind needs all the earlier ones to be over."""


_READ = Kind.READ_STATE
_UPDATES = (Kind.UPDATE, Kind.DELAYED_UPDATE, Kind.BACKWARD_UPDATE, Kind.HOST_UPDATE)

BufferKey = tuple[str, int]
"""Letter and stage of a buffer."""


class _BufferRule(NamedTuple):
    """Effect of a kind of instruction on a stage: buffers by letter, and its place in the order of gradients."""

    reads: tuple[tuple[str, BufferKey], ...]
    makes: tuple[tuple[str, BufferKey], ...]
    frees: tuple[tuple[str, BufferKey], ...]
    order: int
    """Place in the order of gradients; −1: none."""


class BufferLiveness:
    """Buffers of one rank during the run."""

    def __init__(self, program: Program, rank: int, max_activations: int | None) -> None:
        self.rank, self.program, self.placement = rank, program, program.placement
        self.max_activations = max_activations
        self.peak_activations = self.activations = 0
        stages = [stage for stage, holder in enumerate(program.placement) if holder == rank]
        self.peak_logits = self.logits = 0
        self.by_stage: dict[int, int] = dict.fromkeys(stages, 0)
        self.peak_by_stage = self.by_stage.copy()
        self.alive: dict[tuple[BufferKey, tuple | None], bool] = {}
        """Buffer and micro-batch (None for parameters) → True while the buffer exists."""
        self.rules: dict[tuple[Any, ...], _BufferRule] = {}
        """Rules by kind and stage, and by micro-batch where these have paths."""
        self.rule_fields = 3 if program.paths else 2
        actions = [action for items in program.ranks[rank].values() for action, _, _ in items]
        self.unsharded_stages = {action.stage for action in actions if action.kind == Kind.UNSHARD}
        self.resharded_stages = {action.stage for action in actions if action.kind == Kind.RESHARD}
        """Stages that are gathered, and whose gradients are reduced, for units of passes."""
        self.unreduced: dict[int, Action] = {}
        """Stages of these with gradients that are yet to be reduced → pass that has made the last of them."""
        read = Counter(item.action.stage for item in program.ranks[rank].get("disk", ()) if item.action.kind == _READ)
        updated = Counter(action.stage for action in actions if action.kind in _UPDATES)
        self.read_stages = {stage for stage, count in read.items() if count == updated[stage]}
        """Stages whose optimizer state is on disk, all of it."""
        fetched = Counter(action.stage for action in actions if action.kind == Kind.OFFLOAD_GRAD)
        self.fetched_stages = {stage for stage, count in fetched.items() if count == updated[stage]}
        """Stages of whose parts all gradients come to the host for the update."""
        self.pending_gradients = dict.fromkeys(action for action in actions if action.kind in _GRADIENT_ORDER)
        """Instructions on gradients that are not over yet."""
        self.kinds = KINDS
        in_backward = [action for action in actions if action.kind == Kind.BACKWARD_UPDATE]
        self.updated_in_backward = {action[1:] for action in in_backward}
        """Stage and part of the updates within the last backward of a stage."""
        self.last_in_backward = {action.stage: action for action in in_backward}
        """Stages with such updates, and the last of each."""
        entry = SCHEDULES.get(program.schedule)
        self.steps_alone = program.num_steps > 1 and entry is not None and entry.steps_alone
        self.delayed = [action for action in actions if action.kind == Kind.DELAYED_UPDATE]
        """Updates with gradients that the round before left in host memory, and this one leaves for the next."""
        for action in self.delayed:
            self.alive[("m", action.stage), action[2:4]] = True
        on_disk: dict[tuple[int, tuple], Kind] = {}
        for item in program.ranks[rank].get("disk", ()) if self.delayed else ():
            on_disk.setdefault((item.action.stage, item.action[2:4]), item.action.kind)
        self.carried_state = [place for place, kind in on_disk.items() if kind == Kind.WRITE_STATE]
        """Stage and part of the state that is in memory from one step to the next: written before it is read."""
        for stage, part in self.carried_state:
            self.alive[("v", stage), part] = True
        self.vocab_parallel = any(action.kind == Kind.EMB_REDUCE for action in actions)
        if not any(action.kind in (Kind.B, Kind.I, Kind.W) for action in actions):
            self.kinds = {**KINDS, Kind.F: replace(KINDS[Kind.F], makes="y", frees="x")}

    def record(self, action: Action, over: bool) -> None:
        """Record that `action` begins or is over. Raises ProgramError for a missing or freed buffer."""
        rule = self.rules.get(action[: self.rule_fields]) or self._add_rule(action)
        unit = action[2:4]
        alive = self.alive
        self._count_copy(action, over)
        if over:
            if rule.order >= 0:
                self.pending_gradients.pop(action, None)
            if action.stage in self.resharded_stages and action.kind in (Kind.B, Kind.I, Kind.W):
                self.unreduced[action.stage] = action
            for letter, place in rule.makes:
                alive[place, unit if letter != "p" else None] = True
                if letter == "a" and action.kind != Kind.RELOAD:
                    self._add_activations(action)
                if letter == "l":
                    self.logits += 1
                    self.peak_logits = max(self.peak_logits, self.logits)
            return
        if action[1:] in self.updated_in_backward:
            self._check_last_backward(action)
        elif rule.order > 0 and not (self.delayed and action.kind == Kind.WRITE_STATE):
            self._check_gradients(action)
        if self.resharded_stages:
            self._check_unit(action)
        for letter, place in rule.reads:
            if not alive.get((place, unit if letter != "p" else None)):
                was_freed = (place, unit if letter != "p" else None) in alive
                fault = (
                    ", already freed" if was_freed else f" before {self._producer(letter, action)} is known to be over"
                )
                raise ProgramError(f"{action} on rank {self.rank} reads {_BUFFER_NAMES[letter][0]}{fault}")
        for letter, place in rule.frees:
            buffer = (place, unit if letter != "p" else None)
            if not alive.get(buffer):
                fault = "twice" if buffer in alive else f"before {self._producer(letter, action)} has made it"
                raise ProgramError(f"{action} on rank {self.rank} frees {_BUFFER_NAMES[letter][0]} {fault}")
            alive[buffer] = False
            if letter == "a" and action.kind != Kind.OFFLOAD:
                self._free_activations(action)
            if letter == "l":
                self.logits -= 1

    def check_end(self) -> None:
        """Check what the next round finds. Raises ProgramError where a delayed update would lack its gradients or
        state, where state stays on the device, and where parameters stay gathered or gradients unreduced."""
        for (letter, stage), unit in (key for key, is_alive in self.alive.items() if is_alive and key[0][0] in "tu"):
            action = Action(_BUFFER_NAMES[letter][1], stage, slice=unit[1] if unit else 0)
            raise ProgramError(
                f"the state of {action} on rank {self.rank} is on the device at the end: no"
                f" {action._replace(kind=Kind.OFFLOAD_STATE)} takes it back to host memory"
            )
        for stage in sorted(self.resharded_stages):
            if self.alive.get((("p", stage), None)):
                raise ProgramError(f"the parameters of stage {stage} on rank {self.rank} are never dropped")
            if stage in self.unreduced:
                raise ProgramError(f"no REDUCE_GRAD comes behind {self.unreduced[stage]} on rank {self.rank}")
        for action in self.delayed:
            if not self.alive[("m", action.stage), action[2:4]]:
                fetch = action._replace(kind=Kind.OFFLOAD_GRAD)
                raise ProgramError(
                    f"{action} on rank {self.rank} of the next step has no gradients: no {fetch} is over"
                )
        for stage, part in self.carried_state:
            if not self.alive[("v", stage), part]:
                action = Action(Kind.DELAYED_UPDATE, stage, *part)
                raise ProgramError(f"the next step finds no state in memory for {action} on rank {self.rank}")

    def _add_rule(self, action: Action) -> _BufferRule:
        kind, stage, *_ = action
        own = self.kinds[kind]
        reads = own.reads + ("v" if kind in _UPDATES and stage in self.read_stages else "")
        needs_params = PASSES if stage not in self.resharded_stages else (Kind.F, Kind.B, Kind.I)
        reads += "p" if kind in needs_params and stage in self.unsharded_stages else ""
        frees = own.frees
        if (
            kind in (Kind.UPDATE, Kind.BACKWARD_UPDATE) and stage not in self.fetched_stages
        ):  # some gradients have come in the passes
            reads, frees = reads.replace("m", ""), frees.replace("m", "")
        read, made, freed = (tuple(self._buffer_keys(letters, action)) for letters in (reads, own.makes, frees))
        rule = _BufferRule(read, made, freed, _GRADIENT_ORDER.get(kind, -1))
        if kind in _BOUNDARY_BUFFERS:
            does, letter = _BOUNDARY_BUFFERS[kind]
            end = 0 if letter in "xd" else self.program.num_stages - 1
            if self.placement[end] == self.rank:
                rule = rule._replace(**{does: (*getattr(rule, does), (letter, (letter, end)))})
        self.rules[action[: self.rule_fields]] = rule
        return rule

    def _buffer_keys(self, letters: str, action: Action) -> Iterator[tuple[str, BufferKey]]:
        """Yield each letter with its buffer; an output to a stage on the same rank is that stage's input.

        Buffers that come from the data or go into the loss are skipped: nobody frees them, except under vocabulary
        parallelism.
        """
        stage = action.stage
        for letter in letters:
            if letter in "xygd":
                ahead = letter in "yg"
                if self.program.is_last(stage) if ahead else self.program.is_first(stage):
                    if self.vocab_parallel:
                        yield letter, (letter, stage)
                    continue
                neighbour = (self.program.next_stage if ahead else self.program.previous_stage)(stage, action)
                if letter in "yd" and self.placement[neighbour] == self.rank:
                    yield letter, ("x" if letter == "y" else "g", neighbour)
                    continue
            yield letter, (letter, stage)

    def _count_copy(self, action: Action, over: bool) -> None:
        """Count host copies: memory is taken when activations begin to return, and free once they have left."""
        if action.kind == Kind.RELOAD and not over:
            self._add_activations(action)
        if action.kind == Kind.OFFLOAD and over:
            self._free_activations(action)

    def _free_activations(self, action: Action) -> None:
        self.activations -= 1
        self.by_stage[action.stage] -= 1

    def _add_activations(self, action: Action) -> None:
        self.activations += 1
        self.by_stage[action.stage] += 1
        if self.activations > self.peak_activations:
            self.peak_activations = self.activations
            self.peak_by_stage = self.by_stage.copy()
        if self.max_activations is not None and self.activations > self.max_activations:
            raise ProgramError(
                f"after {action} rank {self.rank} keeps the activations of {self.activations} micro-batches,"
                f" more than the limit of {self.max_activations}"
            )

    def _producer(self, letter: str, action: Action) -> Action:
        producer = Action(_BUFFER_NAMES[letter][1], action.stage, *((-1,) if letter == "p" else action[2:4]))
        if letter in "xg" and (self.program.is_first if letter == "x" else self.program.is_last)(action.stage):
            return producer._replace(
                kind=Kind.EMB_REDUCE if letter == "x" else Kind.LOGIT_STATS, stage=self.placement.index(self.rank)
            )
        if letter in "xg":
            other = self.program.other_end(producer)
            if self.placement[other.stage] == self.rank:
                return Action(Kind.F if letter == "x" else Kind.B, other.stage, *action[2:4])
        return producer

    def _check_last_backward(self, action: Action) -> None:
        """Check that an update within a stage's last backward, or a copy of its gradients, begins with it, and the last
        of these updates once it is over."""
        if action.kind not in (Kind.BACKWARD_UPDATE, Kind.OFFLOAD_GRAD):
            return  # its buffers say when it may begin
        pending = [other for other in self.pending_gradients if other.stage == action.stage]
        backwards = [other for other in pending if other.kind == Kind.B]
        beside = [other for other in pending if other.kind in (Kind.LOAD_B, Kind.READ_B)]
        if action != self.last_in_backward[action.stage]:
            backwards, beside = backwards[1:], []
        for other in (*backwards, *beside):
            raise ProgramError(f"{action} on rank {self.rank} begins before {other} is known to be over")

    def _check_unit(self, action: Action) -> None:
        """Check an instruction where stages are gathered and reduced for units of passes: none is gathered twice, and
        what uses a step's gradients finds them reduced."""
        kind, stage = action.kind, action.stage
        if kind == Kind.UNSHARD and self.alive.get((("p", stage), None)):
            raise ProgramError(f"{action} on rank {self.rank} gathers parameters that haven't been dropped")
        if kind == Kind.REDUCE_GRAD and self.unreduced.pop(stage, None) is None:
            raise ProgramError(f"{action} on rank {self.rank} finds no gradients that are yet to be reduced")
        if _GRADIENT_ORDER.get(kind, 0) > _GRADIENT_ORDER[Kind.REDUCE_GRAD]:
            concerned = self.unreduced.keys() if stage < 0 else self.unreduced.keys() & {stage}
            for other in concerned:
                raise ProgramError(
                    f"{action} on rank {self.rank} begins before a REDUCE_GRAD behind {self.unreduced[other]} is over"
                )

    def _check_gradients(self, action: Action) -> None:
        returned = action._replace(kind=Kind.RELOAD_PARAM)
        if self.delayed and action.kind == Kind.OFFLOAD_GRAD and returned in self.pending_gradients:
            raise ProgramError(f"{action} on rank {self.rank} begins before {returned} is known to be over")
        if action.kind == Kind.REDUCE_GRAD and action.stage in self.resharded_stages:
            return  # behind a unit; later ones have their own
        concerned = set(stages_of_action(self.program, action.kind, action.stage))
        for other in self.pending_gradients:
            earlier = _GRADIENT_ORDER[other.kind] < _GRADIENT_ORDER[action.kind]
            theirs = stages_of_action(self.program, other.kind, other.stage)
            if self.program.num_steps > 1 and self.program.step_of(other) > self.program.step_of(action):
                continue  # of a later step
            if self.steps_alone and (other.kind, action.kind) == (Kind.GRAD_NORM_BESIDE, Kind.STEP):
                continue
            if earlier and (action.stage < 0 or concerned.intersection(theirs)):
                raise ProgramError(f"{action} on rank {self.rank} begins before {other} is known to be over")
