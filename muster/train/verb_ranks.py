"""Ranks that a verb such as `muster generate` starts for one request, and their result."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from muster.launch.launcher import launch, rank_command
from muster.spec.base import Frozen
from muster.spec.errors import ConfigError, MusterError

REQUEST_FILE, RESULT_FILE = "request.json", "result.json"
"""Files in the folder of a launch: the request to its ranks, and what rank 0 found."""


def run_on_ranks(verb: str, module: str, request: Frozen, world_size: int) -> Any:
    """Run `module` as `world_size` ranks on this machine, and return what rank 0 wrote with `write_result`.

    Raises ConfigError under torchrun, MusterError when a rank failed; the launcher has then printed which and why.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(f"muster {verb} starts the processes of its plan itself: run it without torchrun")
    folder = Path(tempfile.mkdtemp(prefix=f"muster-{verb}-"))
    (folder / REQUEST_FILE).write_text(request.model_dump_json())
    if launch(rank_command(module, folder, world_size), world_size, folder).report() != 0:
        raise MusterError(f"the ranks of muster {verb} failed; their output is in {folder}")
    found = json.loads((folder / RESULT_FILE).read_text())
    shutil.rmtree(folder)
    return found


def write_result(folder: Path, result: Any) -> None:
    """Write the result of a request, as JSON."""
    (folder / RESULT_FILE).write_text(json.dumps(result))
