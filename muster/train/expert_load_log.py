"""Record of the experts' load in the last steps, which `muster plan --expert-load` reads."""

from collections import deque
from contextlib import suppress
from pathlib import Path
from time import monotonic

from muster.config.routing_load_file import FILE_NAME, routing_load_json
from muster.spec.errors import MusterError
from muster.train.metrics import write_text
from muster.train.step_result import StepResult

WINDOW = 100
"""Steps whose choices are summed: routing changes as a model learns."""
LEAST_INTERVAL_S = 30.0
"""Seconds between two writes of the file."""


class ExpertLoadLog:
    """Sums of the choices of each expert over the last steps, in a file of the run's directory."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE_NAME
        self._steps: deque[StepResult] = deque(maxlen=WINDOW)
        self._written_at = monotonic()

    def add(self, result: StepResult) -> None:
        """Add a step, and write the file now and then."""
        if result.expert_load:
            self._steps.append(result)
            if monotonic() > self._written_at + LEAST_INTERVAL_S:
                self.write()

    def write(self) -> None:
        """Write the file, if there were steps with experts; metrics.jsonl, on the same disk, reports errors."""
        self._written_at = monotonic()
        if not self._steps:
            return
        layers = [[load.counts for load in step.expert_load] for step in self._steps]
        sums = {
            load.layer: [sum(counts) for counts in zip(*(step[at] for step in layers), strict=True)]
            for at, load in enumerate(self._steps[-1].expert_load)
        }
        if not all(sum(row) for row in sums.values()):
            return
        with suppress(MusterError):
            write_text(self.path, routing_load_json(sums, (self._steps[0].step, self._steps[-1].step)))
