"""Work of each rank in the tests of passes that run as one: parity cases, with the order of exchanges and turns."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from muster.parallel.axis import ExpertAxis, PendingTensor
from muster.parallel.executor import Executor
from muster.parallel.turns import Turns
from muster.schedule.program import Instruction
from tests.parity import run_cases


def waits_at_once(axis: ExpertAxis, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sown bug: the other pass has its turn after the exchange, not beside it."""
    rows = axis.start_all_to_all(x, sent, received).wait()
    assert axis.turns is not None
    axis.turns.hand_over()
    return rows


def hands_over_forward_alone(axis: ExpertAxis, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Sown bug: a backward keeps its turn."""
    pending = axis.start_all_to_all(x, sent, received)
    assert axis.turns is not None
    if axis.turns._running == 0:
        axis.turns.hand_over()
    return pending.wait()


FAULTS = {"waits at once": waits_at_once, "forwards alone hand over": hands_over_forward_alone}


def run_pairs(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Each case in turn; what `run_case` found, and under `pairs`, for each pair that ran in it, the names of its two
    actions and its log: (event, number of the pass) of each exchange that starts and ends, and of each turn that ends.
    """
    found = []
    for case in payload["cases"]:
        log = PairLog()
        with (
            patch.object(Executor, "_run_pair", log.watched_pair(Executor._run_pair)),
            patch.object(Turns, "run", log.watched_run(Turns.run)),
            patch.object(ExpertAxis, "start_all_to_all", log.watched_start(ExpertAxis.start_all_to_all)),
            patch.object(
                ExpertAxis, "exchange", log.watched_exchange(FAULTS.get(case.get("fault"), ExpertAxis.exchange))
            ),
        ):
            own = {key: value for key, value in case.items() if key != "fault"}
            result = run_cases(rank, world_size, dist.PrefixStore(str(case), store), payload | {"cases": [own]})[0]
        found.append(result | {"pairs": log.pairs})
    return found


class PairLog:
    """Order of what happens in the pairs of a rank."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str, list[tuple[str, int]]]] = []
        self._events: list[tuple[str, int]] | None = None
        self._exchanging: set[int | None] = set()
        """Passes within an exchange of rows."""

    def watched_pair(self, original: Callable[..., None]) -> Callable[..., None]:
        def watched(executor: Executor, forward: Instruction, backward: Instruction) -> None:
            self._events = []
            self.pairs.append((str(forward.action), str(backward.action), self._events))
            original(executor, forward, backward)
            self._events = None

        return watched

    def watched_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(turns: Turns, first: Any, second: Any, on_turn: Any = None) -> Any:
            def ended(index: int) -> None:
                self._note("turn", index)
                if on_turn is not None:
                    on_turn(index)

            return original(turns, first, second, ended)

        return watched

    def watched_exchange(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watched(axis: ExpertAxis, *arguments: Any) -> Tensor:
            own = None if axis.turns is None else axis.turns._running
            self._exchanging.add(own)
            rows = original(axis, *arguments)
            self._exchanging.remove(own)
            return rows

        return watched

    def watched_start(self, original: Callable[..., PendingTensor]) -> Callable[..., PendingTensor]:
        def watched(axis: ExpertAxis, *arguments: Any) -> PendingTensor:
            own = None if axis.turns is None else axis.turns._running
            pending = original(axis, *arguments)
            if own not in self._exchanging:  # numbers of rows
                return pending
            self._note("start", own)

            def arrived() -> Tensor:
                self._note("wait", own)
                return pending.wait()

            return PendingTensor([], arrived)

        return watched

    def _note(self, event: str, index: int | None) -> None:
        if self._events is not None and index is not None:
            self._events.append((event, index))
