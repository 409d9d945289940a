"""A data set: sums, as prompts whose completions alone are trained on."""

from collections.abc import Iterator

import muster


@muster.register_dataset("sums")
def sums() -> Iterator[dict[str, str]]:
    for a in range(100):
        for b in range(100):
            yield {"prompt": f"{a} + {b} = ", "completion": str(a + b)}
