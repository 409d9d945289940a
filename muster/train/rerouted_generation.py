"""Generation on several paths: after every so many positions of a text its path is chosen anew."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from muster.data.path_stream import SampleRouter

if TYPE_CHECKING:
    from muster.train.text_generation import GenerationRequest, TextGenerator


def generate_rerouted(
    request: "GenerationRequest",
    router: SampleRouter,
    prompts: Sequence[Sequence[int]],
    open_path: Callable[[int], "TextGenerator"],
) -> list[str]:
    """Return the continuation of each prompt, given as ids.

    As in validation, each part of a text, of `router.reroute_every` positions, is predicted on a path of its own. The
    parameters of one path are in memory at a time; it reads the text before, as much of it as the context holds.
    """
    texts, lengths, ended = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts], set[int]()
    context, most = request.trained_model.context_length, request.max_new_tokens
    generator: TextGenerator | None = None
    while len(ended) < len(texts):
        parts: dict[tuple[int, int], list[int]] = {}
        for row, text in enumerate(texts):
            if row not in ended:
                path, count = router.next_part(text)
                parts.setdefault((path, min(count, lengths[row] + most - len(text))), []).append(row)
        for path, count in sorted(parts):
            rows = parts[path, count]
            if generator is None or generator.path != path:
                generator = None  # its parameters make room
                generator = open_path(path)
            begins = [max(0, min(len(texts[row]) - 1, len(texts[row]) + count - 1 - context)) for row in rows]
            windows = [texts[row][begin:] for row, begin in zip(rows, begins, strict=True)]
            for row, new in zip(rows, generator.continue_ids(windows, count, begins), strict=True):
                texts[row] += new
                made = texts[row][lengths[row] :]
                if len(new) < count or len(made) == most or generator.is_complete(made):
                    ended.add(row)
    assert generator is not None
    return [generator.text_of(text[length:]) for text, length in zip(texts, lengths, strict=True)]
