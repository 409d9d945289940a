"""Consistency of plan, configuration and data over all ranks and nodes: with another plan a rank would wait for
ever."""

import json
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from muster.config.load_config import ResolvedConfig
from muster.config.local_machine import nvidia_gpu_names
from muster.config.run_config import RunConfig
from muster.config.run_paths import without_data_locations
from muster.launch.nodes.handshake import config_differences, software_versions
from muster.spec.errors import InfeasibleError, MusterError
from muster.spec.legality import required_world_size
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.spec.units import pluralize

if TYPE_CHECKING:
    import torch.distributed as dist


def training_facts(resolved: ResolvedConfig, ranks: int) -> dict[str, Any]:
    """Return the facts that a launcher that trains gives about itself."""
    config, plan = resolved.config, resolved.config.parallel
    return {
        **software_versions(),
        "job": "train",
        "ranks": pluralize(ranks, "rank"),
        "plan": f"auto ({plan.hash})" if resolved.plan_is_auto else f"{format_plan_name(plan)} ({plan.hash})",
        "config": config.model_dump(mode="json"),
    }


def ranks_per_node(resolved: ResolvedConfig, nproc: int | None, nodes: int) -> int:
    """Return the number of processes per node: `nproc`, or an equal share of the plan's ranks; for `auto` one per GPU,
    or one.

    Raises InfeasibleError for a plan whose ranks the nodes can't share equally.
    """
    if nproc is not None:
        return nproc
    if resolved.plan_is_auto:
        return max(1, len(nvidia_gpu_names()))
    size = required_world_size(resolved.config.parallel)
    if size % nodes:
        name = format_plan_name(resolved.config.parallel)
        raise InfeasibleError(
            f"{name} has {pluralize(size, 'rank')}, which {nodes} nodes can't share equally: expected a plan with a"
            f" multiple of {nodes} ranks, such as {nodes * max(1, size // nodes)}"
        )
    return size // nodes


def require_same_config(config: RunConfig, plan: Plan, data: str, store: "dist.Store", rank: int) -> None:
    """Raise MusterError on a rank whose plan, configuration, PyTorch or data (by fingerprint) differ from rank 0's.

    All ranks call it.
    """
    own = {
        "host": socket.gethostname(),
        "plan": plan.hash,
        "name": format_plan_name(plan),
        "config": without_data_locations(config).model_dump(mode="json"),
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
