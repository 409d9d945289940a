"""Time of a round of islands: its steps, and the exchanges that islands wait for."""

from dataclasses import dataclass
from math import prod
from typing import Any

from muster.config.freezing import is_frozen
from muster.config.optim_config import OptimConfig
from muster.config.outer_config import OuterConfig
from muster.cost.precision_bytes import master_bytes
from muster.cost.time.collectives import all_reduce_s, make_comm_group
from muster.cost.time.plan_times import place_plan
from muster.layout.host_updates import layer_of
from muster.layout.island_bytes import exchanged_numels, exchanged_shape, island_reduce_bytes
from muster.layout.mesh import ranks_of_pp_rank
from muster.layout.module_paths import ModulePaths
from muster.layout.tensor_layout import rank_layouts
from muster.schedule.outer_steps import fragment_of
from muster.spec.cluster import ClusterSpec
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.workload import Workload


@dataclass(frozen=True)
class IslandRound:
    """A round: `every` steps and an exchange of each fragment."""

    outer: OuterConfig
    step_s: float
    transfers_s: tuple[float, ...]
    """Seconds of the exchange of each fragment, of the pipeline rank that takes longest."""
    sent_bytes: int
    """Bytes that the rank that sends most sends in a round; with ranks that adapt, in a first one, with `low_rank`."""

    @property
    def exposed_s(self) -> float:
        """Seconds of a round in which islands wait for exchanges: what the steps of the delay don't hide."""
        hidden_s = self.outer.delay * self.step_s
        return sum(max(0.0, transfer_s - hidden_s) for transfer_s in self.transfers_s)

    @property
    def round_s(self) -> float:
        """Seconds of a round."""
        return self.outer.every * self.step_s + self.exposed_s

    @property
    def warmup_step_s(self) -> float:
        """Seconds of a step of the warm-up, with an exchange of all fragments."""
        return self.step_s + sum(self.transfers_s)

    def to_json(self) -> dict[str, Any]:
        """Return plain data with every key."""
        return {
            "method": self.outer.method,
            "every": self.outer.every,
            "round_s": self.round_s,
            "exposed_s": self.exposed_s,
            "transfers_s": list(self.transfers_s),
            "sent_bytes": self.sent_bytes,
            "ranks_adapt": self.outer.rank_window is not None,
            "warmup_steps": self.outer.warmup_steps,
            "warmup_step_s": self.warmup_step_s if self.outer.warmup_steps else None,
        }


def island_round(
    model: ModelSpec,
    plan: Plan,
    workload: Workload,
    cluster: ClusterSpec,
    outer: OuterConfig,
    step_s: float,
    optim: OptimConfig | None = None,
) -> IslandRound:
    """Return the round of a plan with islands whose step takes `step_s`.

    Ranks of the same place in all islands exchange `island_reduce_bytes` over the slowest link between them, as an
    all-reduce of compressed elements takes them; all ranks of an island do at once.
    """
    placed = place_plan(model, plan, workload, cluster, optim=optim)
    paths = ModulePaths(outer.modules, plan.islands, model.num_layers)
    element = master_bytes(plan.precision)
    transfers_s = [0.0] * outer.fragments
    most_bytes = 0
    for pp_rank in range(plan.pp):
        rank = min(rank for rank, _ in ranks_of_pp_rank(plan, pp_rank))
        group = placed.group(rank, ((plan.island_size, plan.islands),))
        shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(outer.fragments)]
        for layout in rank_layouts(model, plan, rank):
            if not is_frozen(optim, layout.name):  # a tied weight is exchanged once
                shapes[fragment_of(outer, layer_of(layout.name))].setdefault(layout.name, exchanged_shape(layout))
        sent = [
            [
                island_reduce_bytes(numel, plan.islands, outer.compression, element)
                for names in paths.exchanged(list(part))
                for numel in exchanged_numels(((part[name], outer.low_rank) for name in names), outer.compression)
            ]
            for part in shapes
        ]
        for fragment, all_reduces in enumerate(sent):
            # An all-reduce of `size` bytes sends 2 · (N − 1) / N times as many.
            sizes = [one * plan.islands / (2 * (plan.islands - 1)) for one in all_reduces if one]
            transfer_s = sum(all_reduce_s(group, size) for size in sizes)
            transfers_s[fragment] = max(transfers_s[fragment], transfer_s)
        most_bytes = max(most_bytes, sum(map(sum, sent)))
    return IslandRound(outer, step_s, tuple(transfers_s), most_bytes)


def least_round(
    model: ModelSpec,
    plan: Plan,
    cluster: ClusterSpec,
    outer: OuterConfig,
    island_devices: int,
    optim: OptimConfig | None = None,
) -> IslandRound:
    """Return a round of no steps whose exchanges take no longer than those of any plan with as many islands of so many
    devices: each device exchanges an equal part of the parameters, over the fastest of the links between islands."""
    numel = [0] * outer.fragments
    paths = ModulePaths(outer.modules, plan.islands, model.num_layers)
    for name, shape in parameter_shapes(model) if outer.low_rank is None else ():
        if not is_frozen(optim, name) and len(paths.members(0, name)) > 1:
            numel[fragment_of(outer, layer_of(name))] += prod(shape)
    element = master_bytes(plan.precision)
    sent = [island_reduce_bytes(part // island_devices, plan.islands, outer.compression, element) for part in numel]
    firsts = range(0, island_devices, cluster.groups[0].devices_per_node)
    ranks = ([first + island * island_devices for island in range(plan.islands)] for first in firsts)
    groups = [make_comm_group(cluster, one) for one in ranks]
    transfers_s = [
        min(all_reduce_s(group, size * plan.islands / (2 * (plan.islands - 1))) for group in groups) for size in sent
    ]
    return IslandRound(outer, 0.0, tuple(transfers_s), sum(sent))
