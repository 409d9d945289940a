"""Findings of `muster doctor` about its ranks' devices and links, from what each rank has measured.

Wrong results are a problem. What is slow is a note: other programs may be the cause, and a second look costs little.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from muster.probe.check_result import CheckResult, note, ok, problem
from muster.simulate.stragglers import RankTimes, Straggler, find_stragglers


def check_rank_probes(
    rows: Sequence[Mapping[str, Any]], places: Sequence[str], machines: Sequence[int], shares_cores: bool = False
) -> Iterator[CheckResult]:
    """Yield what ranks found of their devices (`devices`) and of the links between them (`links`).

    `rows`: a `RankTimes` of each rank; `places`: words that follow its number, such as ` of node 1 on b`; `machines`:
    number of its machine; with `shares_cores` nothing is called slow, since ranks then slow each other down.
    """
    times = [RankTimes(**{**row, "link_s": tuple(row["link_s"])}) for row in rows]
    found = find_stragglers(times, [], [], machines=machines)
    if shares_cores:
        found = [one for one in found if one.kind == "result"]
    devices = [one for one in found if one.kind in ("compute", "result")]
    for one in devices:
        if one.kind == "result":
            yield problem("devices", _words(one, places))
        else:
            yield note("devices", f"{_words(one, places)}: see what else uses it, its clocks and its temperature")
    products_s = [one.product_s for one in times]
    if not devices:
        span = f"in {1e3 * min(products_s):.2f} to {1e3 * max(products_s):.2f} ms"
        yield ok("devices", f"{len(times)} ranks compute a product of matrices without an error, {span}")
    links = [one for one in found if one not in devices]
    for one in links:
        yield note("links", f"{_words(one, places)}: check cables, switches and drivers, and try again")
    seconds = [seconds for one in times for seconds in one.link_s if seconds is not None]
    if seconds and not links:
        span = f"{1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} ms"
        yield ok("links", f"a message of 1 MiB and its answer take {span} on {len(seconds)} links between ranks")


def _words(one: Straggler, places: Sequence[str]) -> str:
    """Return a straggler's sentence with the places of its ranks."""
    where = ", ".join(f"rank {rank}{places[rank]}" for rank in one.ranks if places[rank])
    return f"{one} ({where})" if where else str(one)
