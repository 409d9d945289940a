"""Share of a step in which devices, host cores and links work, and the one of them that binds."""

from collections import defaultdict
from collections.abc import Mapping

from muster.schedule.action import HOST_LANE_UPDATES, Kind
from muster.simulate.timeline import Timeline

COMPUTE, HOST_CORES, HOST_LINK, DISK = "compute", "host cores", "host link", "disk link"


def busy_seconds(timeline: Timeline) -> dict[str, float]:
    """Return resource → seconds in which it works in a step, on the rank where that is longest. Resources that nothing
    uses are left out."""
    lanes: Mapping[str, str] = {"host_copy": HOST_LINK, "disk": DISK}
    found: defaultdict[tuple[str, int], float] = defaultdict(float)
    for event in timeline.events:
        own = HOST_CORES if event.action.kind in (Kind.UPDATE, *HOST_LANE_UPDATES) else COMPUTE
        resource = own if event.lane in ("compute", "host") else lanes.get(event.lane)
        if resource is not None:
            found[resource, event.rank] += event.duration_s
    longest: defaultdict[str, float] = defaultdict(float)
    for (resource, _), seconds in found.items():
        longest[resource] = max(longest[resource], seconds)
    return {name: longest[name] for name in (COMPUTE, HOST_CORES, HOST_LINK, DISK) if longest[name] > 0}
