"""Whether all ranks were told the same: with another plan or configuration a rank would wait for what never comes."""

import json
import socket
from importlib.metadata import version

import torch.distributed as dist

from muster.config.run_config import RunConfig
from muster.launch.nodes.handshake import config_differences
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name


def require_same_config(config: RunConfig, plan: Plan, data: str, store: dist.Store, rank: int) -> None:
    """Raises MusterError on a rank that has another plan, configuration, PyTorch or data (by their fingerprint) than
    rank 0. All ranks call it."""
    own = {
        "host": socket.gethostname(),
        "plan": plan.hash,
        "name": format_plan_name(plan),
        "config": config.model_dump(mode="json"),
        "torch": version("torch"),
        "data": data,
    }
    if rank == 0:
        store.set("rank 0 runs", json.dumps(own))
        return
    first = json.loads(store.get("rank 0 runs"))
    other = f"rank 0 on {first['host']}"
    if first["plan"] != own["plan"]:
        raise MusterError(
            f"has the plan {own['name']} ({own['plan']}), but {other} has {first['name']} ({first['plan']}):"
            " start all ranks with the same one"
        )
    if changed := list(config_differences(first["config"], own["config"])):
        raise MusterError(f"has another configuration than {other} ({'; '.join(changed)}): start all with the same one")
    if first["torch"] != own["torch"]:
        raise MusterError(f"has PyTorch {own['torch']}, but {other} has {first['torch']}: install the same one")
    if first["data"] != data:
        raise MusterError(f"reads the data {data}, but {other} reads {first['data']}: give all ranks the same files")
