"""A pipeline schedule: 1F1B whose first rank starts one micro-batch less ahead, and so keeps less."""

from collections.abc import Iterator

import muster


@muster.register_schedule("shallow-1f1b", explanation="1F1B with a warm-up one forward shorter")
def shallow(rank: int, spec: muster.ScheduleSpec) -> Iterator[str]:
    ahead = min(max(1, spec.num_ranks - rank - 1), spec.num_micro_batches)
    for micro_batch in range(ahead):
        yield f"{rank}F{micro_batch}"
    for micro_batch in range(spec.num_micro_batches):
        yield f"{rank}B{micro_batch}"
        if ahead + micro_batch < spec.num_micro_batches:
            yield f"{rank}F{ahead + micro_batch}"
