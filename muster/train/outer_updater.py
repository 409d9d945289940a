"""Outer steps of one rank: parameters that all islands share, and exchanges that run beside the passes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.config.freezing import is_frozen
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.layout.host_updates import layer_of
from muster.layout.island_bytes import exchanged_shape, island_exchange_bytes
from muster.optim.outer.base import OuterParameter
from muster.optim.outer.build import build_outer_method
from muster.optim.outer.factor_ranks import FactorRanks
from muster.parallel.axis import IslandAxis
from muster.parallel.change_exchange import ChangeExchange, start_matrices
from muster.parallel.module_exchange import ModuleExchange
from muster.parallel.world import World
from muster.schedule.action import Action, Kind
from muster.schedule.outer_steps import OuterEvents, fragment_of, outer_events, pending_fragments
from muster.spec.errors import MusterError
from muster.spec.model import parameter_shapes
from muster.train.parameter_updater import ParameterUpdater
from muster.train.path_routing import module_paths


@dataclass(frozen=True)
class Meeting:
    """One exchange of a fragment between the islands, as all ranks know it."""

    step: int
    """Step after which the fragment was updated."""
    fragment: int
    distance: float
    """Root mean square over the islands of the Euclidean distance between the fragment's parameters and their mean,
    when the exchange began."""
    change: float
    """Length of the islands' mean change of the fragment since they last met."""
    norm: float
    """Length of the fragment's outer parameters then."""
    losses: tuple[float, ...]
    """Loss of each island in the step in which the exchange began."""
    sent_bytes: int
    """Bytes that this rank has sent."""
    transfer_s: float
    """Seconds of the exchange on this rank."""
    wait_s: float
    """Seconds of it in which this rank waited."""
    peers: int
    """Islands whose changes were averaged."""
    path_samples: tuple[int, ...] = ()
    """Training samples of each path (dipaco)."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Rank of the factors of each matrix' change (rank_window)."""


@dataclass
class OuterExchange:
    """Result of an exchange."""

    change: Tensor
    """Mean change of this rank's part of the fragment, flat."""
    sums: list[float]
    """(squared distances, squared change, squared norm, stop requested, loss of each island), over all ranks; with
    rank_window then for each matrix the numerical rank of its mean change, times elements, and the elements."""
    transfer_s: float = 0.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Rank of the factors of each matrix (rank_window)."""


class OuterUpdater:
    """Outer copies of this rank's parameters with their momentum; between meetings they don't change. With modules
    (dipaco) they are those of this island's path.

    Exchanges run in a thread of their own, one after another in the same order on all ranks, over groups that nothing
    else uses.
    """

    def __init__(
        self, config: RunConfig, world: World, updater: ParameterUpdater, shard_sizes: Sequence[int] = (1,)
    ) -> None:
        """`shard_sizes`: training samples of each path (dipaco)."""
        self.paths = module_paths(config, world.plan)
        self.shard_sizes = shard_sizes
        self.config: OuterConfig = config.outer or OuterConfig()
        self.last_step = config.train.num_steps
        self.world = world
        self.axis = self._open_axis(world)
        self.updater = updater
        self.method = build_outer_method(self.config)
        self.names = [
            [
                name
                for name in updater.parameters
                if not is_frozen(config.optim, name)
                and fragment_of(self.config, layer_of(name)) == exchange % self.config.fragments
            ]
            for exchange in range(self.config.num_exchanges)
        ]
        """Parameters of each exchange's fragment of which this rank holds a part, the same on all islands."""
        self.matrices = self._matrices(config) if self.config.rank_window is not None else []
        """Matrices of each exchange's fragment in the whole model."""
        self._thread = ThreadPoolExecutor(1, "outer")
        self._pending: dict[int, Future[OuterExchange]] = {}
        self._arrived: dict[int, tuple[OuterExchange, float]] = {}
        """Exchanges that have been waited for, with the seconds of that."""
        self.stop_requested = False
        """True once a rank of any island was asked to stop before the last meeting."""
        self._meetings: list[Meeting] = []
        self.reset()

    def _open_axis(self, world: World) -> IslandAxis:
        """Return the ranks with which this one exchanges."""
        assert world.groups.islands is not None, "the plan has no islands"
        return world.groups.islands

    def _matrices(self, config: RunConfig) -> list[list[str]]:
        shapes = {name: shape for name, shape in parameter_shapes(config.model) if not is_frozen(config.optim, name)}
        names = [name for name, shape in shapes.items() if len(shape) == 2]
        by_fragment = [
            [name for name in names if fragment_of(self.config, layer_of(name)) == fragment]
            for fragment in range(self.config.fragments)
        ]
        return [by_fragment[exchange % self.config.fragments] for exchange in range(self.config.num_exchanges)]

    def reset(self) -> None:
        """Begin anew from the islands' present parameters, which are equal."""
        self.ranks = FactorRanks(self.config)
        self.parameters = {
            name: OuterParameter(
                self.updater.parameters[name].detach().clone(),
                torch.zeros_like(self.updater.parameters[name]),
                self.paths.paths_through(name),
            )
            for names in self.names
            for name in names
        }
        own = self.config, self.axis, {n: one.value for n, one in self.parameters.items()}
        has_paths = self.config.method == "dipaco"
        self.exchange = ModuleExchange(*own, self.paths, self.shard_sizes) if has_paths else ChangeExchange(*own)
        self._pending, self._arrived, self._meetings = {}, {}, []

    def use_shard_sizes(self, sizes: Sequence[int]) -> None:
        """Weight the exchanges to come by other numbers of training samples of the paths."""
        self.shard_sizes = sizes
        if isinstance(self.exchange, ModuleExchange):
            self.exchange.sizes = sizes

    def events_after(self, step: int) -> OuterEvents:
        """Return the exchanges after a step."""
        return outer_events(self.config, step, self.last_step)

    def pop_meetings(self) -> list[Meeting]:
        """Return the meetings since the last call."""
        found, self._meetings = self._meetings, []
        return found

    @property
    def state_bytes(self) -> int:
        """Bytes of the outer copies, their momentum and what exchanges lost."""
        shared = sum(one.value.nbytes + one.momentum.nbytes for one in self.parameters.values())
        return shared + self.exchange.state_bytes

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions

    @property
    def handlers(self) -> dict[Kind, Callable[[Action], None]]:
        """Instructions between islands."""
        return {Kind.OUTER_REDUCE: self.start, Kind.OUTER_WAIT: self.wait, Kind.OUTER_STEP: self.step}

    def start(self, action: Action) -> None:
        """Start to exchange the changes of a fragment."""
        names, state, layouts = self.names[action.slice], self.updater.state, self.updater.layouts
        with torch.no_grad():
            changes = {name: self.parameters[name].value - self.updater.parameters[name] for name in names}
            momenta = {name: self.parameters[name].momentum for name in names if len(layouts[name].boxes) == 1}
            offsets = {name: layouts[name].boxes[0].start for name in momenta}
            starts = start_matrices(self.ranks.rank_of, state.step, offsets, momenta)
        is_first = self.world.rank % self.world.plan.island_size == 0
        losses = [state.loss if is_first and n == self.axis.index else 0.0 for n in range(self.axis.size)]
        squares = sum(
            float(self.parameters[name].value.double().square().sum()) / layouts[name].num_copies for name in names
        )
        told = [squares / self.axis.size, float(is_first and state.stop_requested), *losses]
        ranks = self.ranks.ranks_of(self.matrices[action.slice]) if self.matrices else {}
        self._pending[action.slice] = self._thread.submit(self._exchange, changes, starts, told, ranks)

    def _exchange(
        self, changes: Mapping[str, Tensor], starts: Mapping[str, Tensor], told: list[float], ranks: Mapping[str, int]
    ) -> OuterExchange:
        start_s = perf_counter()
        device = self.world.device
        self._synchronize()
        sums = [0.0, 0.0]
        mean = torch.empty(0)
        if changes:
            means = self.exchange.mean(changes, starts)
            for name, change in changes.items():
                copies = self.updater.layouts[name].num_copies
                sums[0] += float((change - means[name]).double().square().sum()) / copies
                sums[1] += float(means[name].double().square().sum()) / copies / self.axis.size
            mean = torch.cat([means[name].flatten() for name in changes])
        sizes = [changes[name].numel() if name in starts else 0 for name in ranks]
        measured = [
            value
            for name, size in zip(ranks, sizes, strict=True)
            for value in (self.exchange.measured_ranks[name] * size if size else 0.0, size)
        ]
        everyone = torch.tensor([*sums, *told, *measured], dtype=torch.float64, device=device)
        dist.all_reduce(everyone, group=self.axis.everyone)
        return OuterExchange(mean, everyone.tolist(), perf_counter() - start_s, ranks)

    def _synchronize(self) -> None:
        """Let the thread of the exchanges see what another stream has computed."""
        if (device := self.world.device).type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)

    def wait(self, action: Action) -> None:
        """Wait for the exchange of a fragment."""
        start_s = perf_counter()
        self.world.heartbeat.wait()
        exchange = self._pending.pop(action.slice).result()
        self._arrived[action.slice] = exchange, perf_counter() - start_s

    def step(self, action: Action) -> None:
        """Step the outer optimizer of a fragment, and continue from its result.

        Raises MusterError on all ranks where an island's parameters are no longer finite.
        """
        exchange, wait_s = self._arrived.pop(action.slice)
        meeting = self._meeting(action.slice, exchange, wait_s)
        if not math.isfinite(meeting.distance) or not math.isfinite(meeting.change):
            raise MusterError(
                f"parameters of an island are no longer finite after step {meeting.step} (losses of the islands:"
                f" {', '.join(f'{loss:.4g}' for loss in meeting.losses)}): resume from an earlier checkpoint with a"
                " lower optim.lr or outer.learning_rate"
            )
        names = self.names[action.slice]
        sizes = [self.parameters[name].value.numel() for name in names]
        with torch.no_grad():
            for name, change in zip(names, exchange.change.split(sizes) if names else (), strict=True):
                outer, local = self.parameters[name], self.updater.parameters[name]
                self.updater.hooks.before_update()
                if meeting.step <= self.config.warmup_steps:
                    self.method.average(outer, local, change.view_as(outer.value))
                    continue
                self.method.update(outer, change.view_as(outer.value))
                self.method.merge(local, outer.value)
            self._refresh()
        if exchange.ranks and meeting.step > self.config.warmup_steps:
            self._record_ranks(self.matrices[action.slice], exchange.sums[4 + self.axis.size :])
        self.stop_requested |= exchange.sums[3] > 0
        self._meetings.append(meeting)

    def _record_ranks(self, names: Sequence[str], measured: Sequence[float]) -> None:
        """Remember the numerical ranks of matrices: of the parts of one their mean, by elements."""
        for name, total, numel in zip(names, measured[::2], measured[1::2], strict=True):
            if numel:
                self.ranks.record(name, total / numel)

    def _refresh(self) -> None:
        """Let what was made of parameters be made anew: copies of tied weights, and gathered parameters."""
        self.updater.sync_tied_copies()
        for stage in self.updater.stages.values():
            stage.reshard()

    def _meeting(self, fragment: int, exchange: OuterExchange, wait_s: float) -> Meeting:
        distances, change, norm = exchange.sums[:3]
        losses = exchange.sums[4 : 4 + self.axis.size]
        names = self.names[fragment]
        element = self.parameters[names[0]].value.element_size() if names else 0
        shapes = {name: exchanged_shape(self.updater.layouts[name]) for name in names}
        ranks = exchange.ranks if self.matrices else dict.fromkeys(names, self.config.low_rank)
        return Meeting(
            step=self.updater.state.step,
            fragment=fragment % self.config.fragments,
            distance=math.sqrt(distances / self.axis.size) if distances >= 0 else math.nan,
            change=math.sqrt(change) if change >= 0 else math.nan,
            norm=math.sqrt(norm),
            losses=tuple(losses),
            sent_bytes=sum(
                island_exchange_bytes(
                    ((shapes[name], ranks.get(name)) for name in part), self.axis.size, self.config.compression, element
                )
                for part in self.paths.exchanged(names)
            ),
            transfer_s=exchange.transfer_s,
            wait_s=wait_s,
            peers=self.axis.size,
            path_samples=tuple(self.shard_sizes) if self.paths.num_paths > 1 else (),
            ranks=exchange.ranks,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # The model that the islands share

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Compute with the outer parameters, the run's model, within the context; all ranks enter it."""
        own = {name: self.updater.parameters[name].detach().clone() for name in self.parameters}
        self._fill({name: one.value for name, one in self.parameters.items()})
        try:
            yield
        finally:
            self._fill(own)

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.updater.parameters[name].copy_(value)
            self._refresh()

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def shards_to_save(self) -> list[LocalShard]:
        """Everything on this rank that a checkpoint holds: state of its island, and what several share on the first of
        these. Exchanges under way are waited for; their results are saved, not yet used."""
        self._settle()
        index = self.axis.index
        names = [name for name in self.updater.parameters if self.paths.members(index, name)[0] == index]
        return [*self._island_shards(), *self._shared_shards(names, self._pending_changes())]

    def weights_to_load(self) -> list[LocalShard]:
        """Outer parameters on this rank, which initial weights fill: those of all modules alike."""
        layouts = self.updater.layouts
        return [
            LocalShard(f"model/{name}", layouts[name], self._shared_value(name)) for name in self.updater.parameters
        ]

    def shards_to_load(self, step: int) -> list[LocalShard]:
        """Everything on this rank that the checkpoint of a step has to hold."""
        self._pending = {}
        for fragment in pending_fragments(self.config, step, self.last_step):
            names = self.names[fragment]
            sizes = [self.updater.parameters[name] for name in names]
            change = torch.cat([one.new_zeros(one.numel()) for one in sizes]) if names else torch.empty(0)
            self._pending[fragment] = _completed(OuterExchange(change, []))
        return [*self._island_shards(), *self._shared_shards(self.updater.parameters, self._pending_changes())]

    def _island_shards(self) -> list[LocalShard]:
        prefix = f"islands/{self.axis.index}"
        found = [LocalShard(f"{prefix}/{one.name}", one.layout, one.tensor) for one in self.updater.local_shards()]
        layouts, errors = self.updater.layouts, self.exchange.errors
        return found + [LocalShard(f"{prefix}/outer/{name}.error", layouts[name], errors[name]) for name in errors]

    def _shared_shards(self, names: Iterable[str], pending: Mapping[str, Tensor]) -> Iterator[LocalShard]:
        """Yield what several islands share of some parameters; that of modules other than the first of their level,
        which make up the checkpoint's model, is beside it (`modules/N/model/…`)."""
        for name in names:
            layout, module = self.updater.layouts[name], self.paths.module_of(self.axis.index, name)
            prefix = f"modules/{module}/" if module else ""
            yield LocalShard(f"{prefix}model/{name}", layout, self._shared_value(name))
            if (outer := self.parameters.get(name)) is not None:
                yield LocalShard(f"{prefix}outer/{name}.momentum", layout, outer.momentum)
            if (change := pending.get(name)) is not None:
                yield LocalShard(f"{prefix}outer/{name}.change", layout, change)

    def _shared_value(self, name: str) -> Tensor:
        """Return the outer copy of a parameter; of a frozen one itself."""
        return self.parameters[name].value if name in self.parameters else self.updater.parameters[name]

    def _settle(self) -> None:
        for future in self._pending.values():
            future.result()

    def _pending_changes(self) -> dict[str, Tensor]:
        """Return the mean change of each parameter whose exchange is over and not yet used."""
        found: dict[str, Tensor] = {}
        for fragment, future in self._pending.items():
            names = self.names[fragment]
            sizes = [self.parameters[name].value.numel() for name in names]
            parts = future.result().change.split(sizes) if names else ()
            found |= {name: part.view_as(self.parameters[name].value) for name, part in zip(names, parts, strict=True)}
        return found

    def counters(self) -> dict[str, Any]:
        """Counters of a checkpoint's manifest: the sums of exchanges that are over and not yet used, and the ranks of
        factors."""
        self._settle()
        pending = {str(fragment): future.result() for fragment, future in self._pending.items()}
        found: dict[str, Any] = {"pending": {fragment: exchange.sums for fragment, exchange in pending.items()}}
        if self.matrices:
            found["measured_ranks"] = dict(self.ranks.measured)
            found["pending_ranks"] = {fragment: dict(exchange.ranks) for fragment, exchange in pending.items()}
        return found

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Take up the counters of a checkpoint whose shards have been loaded."""
        for fragment, sums in counters["pending"].items():
            exchange = self._pending[int(fragment)].result()
            exchange.sums = [*sums[:3], 0.0, *sums[4:]]  # a stop that was requested of the former processes is over
            exchange.ranks = counters.get("pending_ranks", {}).get(fragment, {})
        self.ranks.restore(counters.get("measured_ranks", {}))
        self.stop_requested = False
        with torch.no_grad():
            self._refresh()

    def begin_from(self) -> None:
        """Begin from the outer parameters, into which initial weights were loaded."""
        self._fill({name: one.value for name, one in self.parameters.items()})


def _completed(exchange: OuterExchange) -> Future[OuterExchange]:
    future: Future[OuterExchange] = Future()
    future.set_result(exchange)
    return future
