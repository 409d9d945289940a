"""Cost of islands in loss, by published trainings: the relative increase of the loss, and the tokens that make up for
it."""

from math import inf, log, log2

from muster.config.outer_config import OuterConfig

_LOSSES: tuple[tuple[float, float, dict[int, float]], ...] = (
    (35e6, 3.485, {2: 3.508, 4: 3.554, 8: 3.621}),
    (90e6, 3.167, {2: 3.182, 4: 3.213, 8: 3.265}),
    (180e6, 2.950, {2: 2.957, 4: 2.981, 8: 3.019}),
    (335e6, 2.784, {2: 2.788, 4: 2.808, 8: 2.841}),
    (550e6, 2.653, {2: 2.657, 4: 2.673, 8: 2.698}),
    (1.3e9, 2.460, {2: 2.464, 4: 2.472, 8: 2.493}),
    (2.4e9, 2.326, {2: 2.323, 4: 2.332, 8: 2.351}),
    (4e9, 2.224, {2: 2.220, 4: 2.230}),
    (10e9, 2.090, {2: 2.086, 4: 2.096}),
)
"""Parameters, evaluation loss of data parallelism, and of DiLoCo by its number of islands, which exchange every 30
steps: 20 tokens a parameter of C4, each tuned (arXiv:2503.09799 tables 4 and 5)."""

_LOSSES_EVERY: dict[int, tuple[tuple[float, float], ...]] = {
    2: ((3.53, 3.56), (3.21, 3.22), (2.98, 3.00), (2.81, 2.83), (2.67, 2.69), (2.48, 2.50)),
    4: ((3.60, 3.64), (3.25, 3.29), (3.02, 3.05), (2.84, 2.87), (2.70, 2.73), (2.50, 2.53)),
}
"""Evaluation losses of Streaming DiLoCo by number of islands, with exchanges every 30 and every 100 steps, of models
of 35 M to 1 B parameters, which don't differ in it (arXiv:2501.18512 table 6)."""

TABLE_EVERY = 30
"""Steps of a round in `_LOSSES`."""
LONGEST_EVERY = 100
"""Longest round of which losses are known in numbers."""
MOST_ISLANDS = 8
"""Most islands of which losses are known."""

LOSS_SOURCE = "arXiv:2503.09799 tables 4 and 5, arXiv:2501.18512 table 6"
TOKENS_SOURCE = "arXiv:2203.15556"

TOKENS_PER_PARAMETER = 20
"""Tokens of a training of unknown length, for each parameter (arXiv:2203.15556)."""
_E, _A, _B, _ALPHA, _BETA = 1.69, 406.4, 410.7, 0.34, 0.28
"""L(N, D) = E + A / N^α + B / D^β of N parameters and D tokens (arXiv:2203.15556 §3.3, equation 10)."""


def loss_increase(parameters: float, islands: int, every: int) -> float:
    """Return the relative increase of the loss by islands at equal tokens, by published trainings; 0 where these found
    none, or a lower loss.

    Table values are interpolated between sizes and numbers of islands, both by logarithm; larger models have the value
    of the largest. A round longer than 30 steps adds what one of 100 steps does, by logarithm; a shorter one gains
    nothing. So more islands than 8 and rounds longer than 100 steps are extrapolated.

    Example: 8 B parameters on 2 islands lose -0.19 % every 30 steps and 0.68 % more every 100: 0.5 %.
    """
    sizes = log2(islands)
    found = _interpolate(sizes, [(log2(n), _size_increase(parameters, n)) for n in (2, 4, 8)])
    growth = _interpolate(sizes, [(log2(n), _growth(n)) for n in (2, 4)])
    longer = max(0.0, log(every / TABLE_EVERY)) / log(LONGEST_EVERY / TABLE_EVERY)
    return max(0.0, found + growth * longer)


def tokens_factor(parameters: float, tokens: float, increase: float) -> float:
    """Return how many times the tokens a training needs to reach the loss that it would have without a relative
    `increase`; infinite where no number of tokens is enough.

    By L(N, D) of Hoffmann et al.: (1 + increase) · L(N, D') = L(N, D), solved for D' / D.
    """
    floor, of_tokens = _E + _A / parameters**_ALPHA, _B / tokens**_BETA
    left = (floor + of_tokens) / (1 + increase) - floor
    return inf if left <= 0 else (of_tokens / left) ** (1 / _BETA)


def loss_notes(parameters: float, islands: int, outer: OuterConfig) -> list[str]:
    """Return what was assumed for want of published losses."""
    notes: list[str] = []
    if parameters > _LOSSES[-1][0]:
        notes.append(f"the loss of {_LOSSES[-1][0] / 1e9:.0f}B parameters stands for larger models")
    if islands > MOST_ISLANDS:
        notes.append(f"more islands than {MOST_ISLANDS} are extrapolated")
    if outer.every > LONGEST_EVERY:
        notes.append(f"rounds longer than {LONGEST_EVERY} steps are extrapolated")
    if outer.method not in ("diloco", "streaming"):
        notes.append(f"{outer.method} is taken for diloco")
    if outer.compression != "none":
        notes.append(f"{outer.compression} is taken to lose nothing, as fp4 does there")
    if outer.low_rank is not None:
        notes.append("low rank is taken to lose nothing, of which no such figures are published")
    return notes


def _size_increase(parameters: float, islands: int) -> float:
    """Return the relative increase for one of the tables' numbers of islands, every 30 steps."""
    rows = [(log(size), losses[islands] / base - 1) for size, base, losses in _LOSSES if islands in losses]
    at = min(max(log(parameters), rows[0][0]), rows[-1][0])
    return _interpolate(at, rows)


def _growth(islands: int) -> float:
    """Return the mean relative increase from rounds of 30 to rounds of 100 steps."""
    pairs = _LOSSES_EVERY[islands]
    return sum(longer / shorter - 1 for shorter, longer in pairs) / len(pairs)


def _interpolate(at: float, points: list[tuple[float, float]]) -> float:
    """Return the value on the lines between points, continued beyond the last."""
    number = next((number for number, (x, _) in enumerate(points[1:-1], 1) if at <= x), len(points) - 1)
    (x, y), (next_x, next_y) = points[number - 1 : number + 1]
    return y + (next_y - y) * (at - x) / (next_x - x)
