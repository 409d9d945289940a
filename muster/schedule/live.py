"""How many micro-batches' activations each rank keeps at most, from the order of its passes alone."""

from muster.schedule.program import Program


def live_at_peak(program: Program) -> list[dict[int, int]]:
    """Per rank, stage → micro-batches between their forward and the end of their backward when the rank keeps most.

    As `check` finds it, without its proof.
    """
    return [_of_rank(program, rank) for rank in range(program.num_ranks)]


def _of_rank(program: Program, rank: int) -> dict[int, int]:
    live = {stage: 0 for stage, holder in enumerate(program.placement) if holder == rank}
    compute = program.ranks[rank].get("compute", ())
    last = "W" if any(item[0][0] == "W" for item in compute) else "B"
    total = most = 0
    at_peak = dict(live)
    for (kind, stage, *_), _, _ in compute:
        if kind == "F":
            live[stage] += 1
            total += 1
            if total > most:
                most, at_peak = total, dict(live)
        elif kind in (last, "B"):
            live[stage] -= 1
            total -= 1
    return at_peak


def live_words(program: Program) -> list[int]:
    """Per rank, the most micro-batches between S and T, where the vocabulary is spread."""
    peaks = []
    for lanes in program.ranks:
        live = most = 0
        for (kind, *_), _, _ in lanes.get("compute", ()):
            live += (kind == "S") - (kind == "T")
            most = max(most, live)
        peaks.append(most)
    return peaks
