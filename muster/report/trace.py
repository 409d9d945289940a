"""Timelines for trace viewers."""

from typing import Any

from muster.simulate.timeline import Timeline


def chrome_trace(timeline: Timeline, name: str) -> dict[str, Any]:
    """Return a trace in the Trace Event Format of Perfetto (ui.perfetto.dev) and chrome://tracing: a thread for each
    rank and lane, times in microseconds."""
    lanes = sorted({(event.rank, event.lane) for event in timeline.events})
    threads = {place: number for number, place in enumerate(lanes, 1)}
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": name}}]
    for (rank, lane), thread in threads.items():
        title = f"rank {rank}" + ("" if lane == "compute" else f" {lane}")
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": title}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}})
    has_slices = any(event.action.slice for event in timeline.events)
    for event in timeline.events:
        action = event.action
        arguments = {key: value for key in ("stage", "micro_batch") if (value := getattr(action, key)) >= 0}
        if has_slices and action.micro_batch >= 0:
            arguments["slice"] = action.slice
        events.append(
            {
                "name": str(action),
                "cat": action.kind,
                "ph": "X",
                "ts": event.start_s * 1e6,
                "dur": event.duration_s * 1e6,
                "pid": 1,
                "tid": threads[event.rank, event.lane],
                "args": arguments,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
