"""Ranks of the communication volume test, which count what they give to their collectives and sends in a step."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from muster.cost import comm_volume
from muster.cost.shard_traffic import SHARD_LEVELS
from muster.parallel.world import World, open_world
from muster.schedule.action import Kind
from muster.schedule.offload import LAYER_COPIES
from muster.schedule.program import Instruction
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.trainer import Trainer
from tests.parity import FAULTS, open_data, small_run

_CALLS = {"_allgather_base_": (1, "all_gather"), "_reduce_scatter_base_": (1, "reduce_scatter")}
_CALLS |= {"allreduce_": (0, "all_reduce"), "send": (0, "send")}
_CALLS |= {
    "alltoall_base_": (1, "all_to_all"),
    "reduce_": (0, "reduce"),
    "broadcast_": (0, "broadcast"),
    "gather_": (1, "gather"),
}
"""By operator: which argument is given away, and what it counts as."""
_AXES = {"GRAD_NORM": "world", "SEND_F": "pp", "SEND_B": "pp", "ALL_REDUCE_TIED": "pp", "STEP": "optimizer"}
_AXES |= dict.fromkeys(("EMB_REDUCE", "HIDDEN_BCAST", "LOGIT_STATS", "EMB_GRAD_BCAST"), "pp")
"""Of the instructions that reach across the axes of the mesh."""
_RECEIVES = {"recv_", "barrier"}


class Count(TorchDispatchMode):
    """Bytes of what every operator of torch.distributed is given, by axis and kind, whoever calls it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.axes = {group.group_name: axis for axis, group in world.groups.by_axis.items()}
        if world.groups.state_shards is not None:
            self.axes[world.groups.state_shards.group_name] = "dp_shard"
        if (levels := world.groups.shard_levels) is not None:
            groups = {level: getattr(levels, level) for level in SHARD_LEVELS}
            self.axes |= {group.group_name: level for level, group in groups.items() if group is not None}
        for group in (world.groups.ulysses, world.groups.second_ring):
            if group is not None:
                self.axes[group.group_name] = "cp"
        if (experts := world.groups.experts) is not None:
            for axis in (experts, experts.inner, experts.outer):
                if axis is not None:
                    self.axes[axis.group.group_name] = "ep"
        if (edp := world.groups.expert_data_mesh()) is not None and edp.size(edp.ndim - 1) > 1:
            self.axes[edp.get_group(edp.ndim - 1).group_name] = "edp"
        self.sent: dict[str, Counter[str]] = defaultdict(Counter)
        self.calls: Counter[str] = Counter()
        self.gathers: Counter[str] = Counter()
        """All-gathers by kind of the instruction that makes them."""
        self.expert_messages = 0
        self.instruction = ""

    def label(self, do: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        """`do`, with what it sends known to be that instruction's."""

        def labelled(instruction: Instruction) -> None:
            self.instruction = instruction.action.kind
            do(instruction)

        return labelled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and (name := func.overloadpacket.__name__) not in _RECEIVES:
            index, kind = _CALLS[name]
            given = args[index] if isinstance(args[index], list) else [args[index]]
            if kind == "broadcast" and args[2] != dist.ProcessGroup.unbox(args[1]).rank():  # type: ignore[attr-defined]
                return func(*args, **(kwargs or {}))
            axis = _AXES.get(self.instruction) or self._axis(args)
            if axis == "ep":
                self.expert_messages += self._group(args).size() - 1
            kind = self.instruction if axis == "pp" else kind
            self.calls[kind] += 1
            self.gathers[self.instruction] += kind == "all_gather"
            self.sent[axis][kind] += sum(tensor.nbytes for tensor in given)
        return func(*args, **(kwargs or {}))

    def _axis(self, args: Any) -> str:
        return self.axes[self._group(args).group_name]

    def _group(self, args: Any) -> dist.ProcessGroup:
        groups = (arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        return dist.ProcessGroup.unbox(next(groups))  # type: ignore[attr-defined]


def count(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Per plan, the bytes predicted and counted, by axis and kind."""
    found = []
    for index, (name, tied, *changes) in enumerate(payload["cases"]):
        fields = {key: value for one in changes for key, value in one.items()}
        config = small_run(
            tied,
            optim=fields.pop("optim", "adamw"),
            family=fields.pop("family", "llama"),
            kv_heads=fields.pop("kv_heads", 2),
            layers=fields.pop("layers", 4),
        )
        optim = config.optim.model_copy(update={"freeze": tuple(fields.pop("freeze", config.optim.freeze))})
        config = config.model_copy(update={"optim": optim})
        fault = FAULTS[fields.pop("fault", None)]
        plan = parse_plan_name(name, Plan(precision="fp32", micro_batch_size=1))
        plan = Plan.model_validate(plan.model_dump() | fields)
        with open_world(store, rank, world_size, plan, index) as world, fault():
            trainer = Trainer(config, plan, world, open_data(config, payload["cache"]))
            counter = Count(world)
            begun: list[int] = []  # gathers, when each layer began
            for stage in trainer.stages.values():
                for layer in stage.module.layers.values():
                    layer.register_forward_pre_hook(lambda *_: begun.append(counter.calls["all_gather"]))  # noqa: B023
            do = trainer._executor._handlers
            with counter, patch.dict(do, {kind: counter.label(handler) for kind, handler in do.items()}):
                trainer.step()
            if moved := sum(stage.offloaded_bytes for stage in trainer.stages.values()):
                kinds = LAYER_COPIES["host_copy"] if plan.offloads_by_layer else (Kind.OFFLOAD, Kind.RELOAD)
                counter.sent["host"] = Counter(dict.fromkeys(kinds, moved // 2))
            predicted = comm_volume.step_comm_bytes(config.model, plan, config.workload, rank, config.optim)
            if plan.offloads_params and moved == sum(predicted["host"].values()):
                counter.sent["host"] = Counter(predicted["host"])
            found.append(
                {
                    "plan": name,
                    "counted": counter.sent,
                    "predicted": predicted,
                    "calls": counter.calls,
                    "gathers": +counter.gathers,
                    "begun": begun,
                    "messages": counter.expert_messages,
                    "predicted messages": sum(
                        comm_volume.expert_axis_messages(config.model, plan, config.workload, stage, world.at)
                        for stage in trainer.stages
                    ),
                }
            )
    return found
