"""PyTorch's flight recorder: collectives that this rank has launched, for the diagnosis of a hang."""

import json
import os
from collections.abc import Callable

import torch

from muster.launch.flight_records import format_records, parse_dump

NUM_ENTRIES = "2000"
"""Collectives that are kept; a step of a large plan launches some hundreds."""
_SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Size of the recorder, which has no other switch."""
_OLD_SIZE_VARIABLE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Its name before PyTorch 2.9; still read, with a warning."""
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def enable_flight_recorder() -> None:
    """Let NCCL's collectives be recorded, unless the environment says how many; before groups are made."""
    if _OLD_SIZE_VARIABLE not in os.environ:
        os.environ.setdefault(_SIZE_VARIABLE, NUM_ENTRIES)


def flight_record() -> str:
    """Return what the recorder knows, as lines behind a rank's stacks; empty where PyTorch has none."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dump: Callable[[], str | bytes] | None = next(
        (found for name in _DUMPS if (found := getattr(module, name, None)) is not None), None
    )
    if dump is None:
        return ""
    try:
        return format_records(parse_dump(json.loads(dump())))
    except (RuntimeError, ValueError, KeyError) as error:
        return f"\nno flight record: {type(error).__name__}: {error}\n"
