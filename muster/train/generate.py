"""Text from the model of a run: made in this process, or on several ranks of its own."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from muster.launch.launcher import launch, rank_command
from muster.launch.rank_process import exit_process, rank_main
from muster.parallel.world import open_world, pick_device
from muster.spec.errors import ConfigError, MusterError
from muster.train.text_generation import GenerationRequest, generate_texts

REQUEST_FILE, TEXTS_FILE = "request.json", "texts.json"
"""What a launch's folder holds: what the ranks are to do, and what came of it."""


def run_generation(request: GenerationRequest) -> Sequence[str]:
    """The texts, made by this process or, under a plan for several, by ranks of its own.

    Raises MusterError when a rank failed; the launcher has then said which and why.
    """
    if request.plan.world_size == 1:
        return generate_texts(request, pick_device(0, 1))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("muster generate starts the processes of its plan itself: run it without torchrun")
    folder = Path(tempfile.mkdtemp(prefix="muster-generate-"))
    (folder / REQUEST_FILE).write_text(request.model_dump_json())
    size = request.plan.world_size
    command = rank_command("muster.train.generate", folder, size)
    if launch(command, size, folder).report() != 0:
        raise MusterError(f"no text was made; what the ranks said is in {folder}")
    texts = json.loads((folder / TEXTS_FILE).read_text())
    shutil.rmtree(folder)
    return texts


def generate_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Makes the texts of the request in `folder` as one rank of `world_size`. Returns 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    request = GenerationRequest.model_validate_json((folder / REQUEST_FILE).read_bytes())
    with open_world(store, rank, world_size, request.plan) as world:
        texts = generate_texts(request, world.device, world.tensor_axis(request.plan.default_strategy))
    if rank == 0:
        (folder / TEXTS_FILE).write_text(json.dumps(texts))
    return 0


if __name__ == "__main__":
    exit_process(rank_main(generate_rank))
