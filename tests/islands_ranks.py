"""Ranks of the tests of islands: a run beside an emulator that trains the islands one after another."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from muster.checkpoint.checkpoint_dir import KEEP_LAST_TWO
from muster.checkpoint.load import load
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.save import save
from muster.config.outer_config import OuterConfig
from muster.config.run_config import RunConfig
from muster.data.dataset import Batch, Dataset
from muster.data.path_stream import PathStream, SampleRouter, fit_sample_router, route_samples
from muster.data.prefix_router import fit_classifier
from muster.data.sample_order import positions_at
from muster.layout.island_bytes import BLOCKS, Compression, island_exchange_bytes, island_reduce_bytes
from muster.layout.module_paths import ModulePaths
from muster.optim.outer.factor_ranks import FactorRanks
from muster.parallel import change_exchange, island_exchange
from muster.parallel.axis import IslandAxis
from muster.parallel.change_exchange import right_start
from muster.parallel.inference import build_inference_decoder
from muster.parallel.island_exchange import decode, encode, mean_over_islands
from muster.parallel.world import open_world
from muster.schedule.outer_steps import OuterEvents
from muster.schedule.outer_steps import outer_events as real_events
from muster.spec.errors import ConfigError
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train import outer_updater, path_routing
from muster.train.path_routing import PathRouting
from muster.train.path_scores import PathScores
from muster.train.step_state import StepHooks
from muster.train.trainer import Trainer
from tests.parity import open_data, small_run

STEPS = 7


class SerialIslands:
    """The islands of a plan, trained one after another by the ranks of one, and their outer steps in plain PyTorch."""

    def __init__(self, config: RunConfig, inner: Plan, islands: int, world: Any, cache: str) -> None:
        self.outer = config.outer or OuterConfig()
        self.batch = config.train.global_batch_size
        self.share = self.batch // islands
        own = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": self.share})})
        self.trainers = [Trainer(own, inner, world, open_data(config, cache)) for _ in range(islands)]
        self.global_ = {name: x.detach().clone() for name, x in self.trainers[0].updater.parameters.items()}
        self.optimizer = torch.optim.SGD(
            self.global_.values(),
            lr=self.outer.learning_rate,
            momentum=self.outer.momentum,
            nesterov=self.outer.optimizer == "nesterov",
            foreach=False,
        )
        self.arrived: dict[str, Tensor] | None = None
        self.co2_momentum = {name: torch.zeros_like(x) for name, x in self.global_.items()}
        self.changes: dict[int, dict[str, Tensor]] = {}
        self.errors = [{name: torch.zeros_like(x) for name, x in self.global_.items()} for _ in range(islands)]
        self.world = world
        self.spec = config.model
        self.measured: dict[str, list[float]] = {}
        self.used_ranks: list[dict[str, int]] = []
        """Ranks of the factors of each matrix' part on this rank, by exchange."""
        self.losses: list[list[float]] = []
        self.distances: list[float] = []

    def run(self, steps: int) -> None:
        for step in range(1, steps + 1):
            for island, trainer in enumerate(self.trainers):
                trainer.samples_consumed = (step - 1) * self.batch + island * self.share
            self.losses.append([trainer.step().loss for trainer in self.trainers])
            after = step - self.outer.warmup_steps
            if after <= 0:
                self._average()
            elif self.outer.method in ("dilocox", "co2"):
                self._end_round(after, steps - self.outer.warmup_steps)
            else:
                self._meet(after, steps - self.outer.warmup_steps)

    def _average(self) -> None:
        """Local SGD with an average after every step."""
        with torch.no_grad():
            for name, x in self.global_.items():
                x.sub_(_mean([x - trainer.updater.parameters[name] for trainer in self.trainers]))
        self._take_global()

    def _take_global(self) -> None:
        with torch.no_grad():
            for trainer in self.trainers:
                for name, x in self.global_.items():
                    trainer.updater.parameters[name].copy_(x)
                trainer.updater.sync_tied_copies()
                for stage in trainer.stages.values():
                    stage.reshard()

    def _end_round(self, step: int, last: int) -> None:
        """DiLoCoX and CO2 as their papers have them: what the islands send after a round, which for CO2 is parameters,
        is used after the next one."""
        if step % self.outer.every and step != last:
            return
        sent = self.arrived
        if self.outer.method == "co2":
            locals_ = [trainer.updater.parameters for trainer in self.trainers]
            with torch.no_grad():
                self.arrived = {n: torch.stack([x[n] for x in locals_]).mean(0) for n in self.global_}
        else:
            self._begin(0)
            self.arrived = self.changes.pop(0)
        for use in [sent, self.arrived] if step == last else [sent]:
            if use is None:
                continue
            if self.outer.method == "co2":
                self._step_co2(use)
            else:
                self.changes[0] = use
                self._end(0)
        if step == last:
            self.arrived = None

    def _step_co2(self, mean: dict[str, Tensor]) -> None:
        outer = self.outer
        with torch.no_grad():
            for name, x in self.global_.items():
                m = self.co2_momentum[name]
                m.mul_(outer.momentum).add_((x - mean[name]) / outer.staleness_penalty)
                if outer.momentum_clip:
                    m.clamp_(-outer.momentum_clip, outer.momentum_clip)
                x.sub_(outer.learning_rate * m)
        self._take_global()

    def _meet(self, step: int, last: int) -> None:
        """Streaming DiLoCo's algorithm as its paper has it; with one fragment and no delay that of DiLoCo."""
        outer = self.outer
        distance = outer.every // outer.fragments
        for fragment in range(outer.fragments):
            due = [n for n in range(1, last) if n % outer.every == (fragment + 1) * distance % outer.every]
            begins = [n - outer.delay for n in due] if outer.delay else due
            if step in begins and step + outer.delay < last or step == last:
                self._begin(fragment)
            if step in due or step == last:
                self._end(fragment)

    @property
    def momentum(self) -> dict[str, Tensor]:
        if self.outer.method == "co2":
            return self.co2_momentum
        states = {name: self.optimizer.state[x] for name, x in self.global_.items()}
        return {name: state.get("momentum_buffer", torch.zeros(())) for name, state in states.items()}

    def _names(self, fragment: int) -> list[str]:
        def fragment_of(name: str) -> int:
            parts = name.split(".")
            return int(parts[1]) % self.outer.fragments if parts[0] == "layers" else self.outer.fragments - 1

        return [name for name in self.global_ if fragment_of(name) == fragment]

    def _begin(self, fragment: int) -> None:
        with torch.no_grad():
            mean = {}
            self.used_ranks.append({})
            for name in self._names(fragment):
                found = [self.global_[name] - trainer.updater.parameters[name] for trainer in self.trainers]
                mean[name] = self._low_rank_mean(name, found) if self.outer.low_rank else _mean(found)
            self.changes[fragment] = mean

    def _low_rank_mean(self, name: str, changes: list[Tensor]) -> Tensor:
        """PowerSGD with error feedback as its paper has it (arXiv:1905.13727, algorithms 1 and 2), but for the matrix
        that it begins with."""
        rank = self._rank(name)
        if changes[0].dim() == 2:
            self.used_ranks[-1][name] = rank
        if changes[0].dim() != 2 or rank * sum(changes[0].shape) >= changes[0].numel():
            return _mean(changes)
        errors = [own[name] for own in self.errors]
        matrices = [change + error for change, error in zip(changes, errors, strict=True)]
        updater = self.trainers[0].updater
        momentum = self.momentum[name].to(changes[0]).expand(changes[0].shape)
        q = right_start(name, updater.state.step, updater.layouts[name].boxes[0].start, rank, momentum)
        p = torch.linalg.qr(_mean([matrix @ q for matrix in matrices])).Q
        own = [matrix.mT @ p for matrix in matrices]
        for error, matrix, q in zip(errors, matrices, own, strict=True):
            error.copy_(matrix - p @ q.mT)
        return p @ _mean(own).mT

    def _rank(self, name: str) -> int:
        """Mean of the ranks of the last mean changes, as DiLoCoX has it (arXiv:2506.21263 §2.4)."""
        assert self.outer.low_rank is not None
        window = self.outer.rank_window
        last = self.measured.get(name, [])[-window:] if window else []
        return self.outer.low_rank if not window or len(last) < window else max(1, math.ceil(sum(last) / window))

    def _measure(self, changes: dict[str, Tensor]) -> None:
        """Measure the numerical ranks of mean changes: of a matrix' parts the mean, by elements."""
        parts = {
            name: (int(torch.linalg.matrix_rank(x, rtol=self.outer.rank_tolerance)), x.numel())
            for name, x in changes.items()
            if x.dim() == 2 and self.outer.low_rank and self.outer.low_rank * sum(x.shape) < x.numel()
        }
        everyone = self.world.all_gather_object(parts)
        for name in {name for one in everyone for name in one}:
            found = [one[name] for one in everyone if name in one]
            mean = sum(rank * numel for rank, numel in found) / sum(numel for _, numel in found)
            self.measured.setdefault(name, []).append(mean)

    def _end(self, fragment: int) -> None:
        outer = self.outer
        with torch.no_grad():
            changes = self.changes.pop(fragment)
            if outer.rank_window:
                self._measure(changes)
            for name, gradient in changes.items():
                self.global_[name].grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad()
            for name in changes:
                for trainer in self.trainers:
                    local = trainer.updater.parameters[name]
                    local.copy_(outer.mixing * local + (1 - outer.mixing) * self.global_[name])
            for trainer in self.trainers:
                trainer.updater.sync_tied_copies()
                for stage in trainer.stages.values():
                    stage.reshard()


class SerialPaths(SerialIslands):
    """DiPaCo as its paper has it: each island trains a path, and has outer copies of its own of that path's modules."""

    def __init__(self, config: RunConfig, inner: Plan, islands: int, world: Any, cache: str) -> None:
        super().__init__(config, inner, islands, world, cache)
        modules = self.outer.modules
        self.chosen = list(itertools.product(*(range(n) for n in reversed(modules))))
        self.chosen = [path[::-1] for path in self.chosen]
        """Module of each level on each path; the first level changes fastest."""
        data = open_data(config, cache)
        own = len(self.chosen), config.model.vocab_size, config.seed, self.outer.route_tokens
        router = fit_sample_router(data, *own, self.outer.reroute_every)
        self.route(router, data)
        self.copies = [{name: x.clone() for name, x in self.global_.items()} for _ in range(islands)]
        self.optimizers = [
            torch.optim.SGD(
                own.values(), lr=self.outer.learning_rate, momentum=self.outer.momentum, nesterov=True, foreach=False
            )
            for own in self.copies
        ]
        self.global_, self.optimizer = self.copies[0], self.optimizers[0]

    def route(self, router: SampleRouter, data: Dataset) -> None:
        """Give each path its samples, in the order of the whole stream."""
        self.routing = route_samples(data, router, self.outer.route_top)
        count = data.num_train_samples
        routed = self.routing.paths_NT[positions_at(np.arange(count), count, data.seed)]
        self.shards = [np.flatnonzero((routed == n).any(1)) for n in range(len(self.chosen))]
        for island, trainer in enumerate(self.trainers):
            trainer.batch_loader.use_dataset(_Listed(data, self.shards[island % len(self.chosen)]))

    def reshard(self) -> None:
        """Let the router learn from the losses of one sample after another on one whole path after another."""
        dataset = self.trainers[0].dataset
        assert isinstance(dataset, Dataset)
        count, total = self.outer.scored_samples, dataset.num_train_samples
        batch = dataset.rows(np.arange(total - count, total))
        tokens, labels = (torch.from_numpy(array) for array in (batch.tokens_BS, batch.labels_BS))
        prefix, losses = self.outer.route_tokens, torch.zeros(len(self.chosen), count, dtype=torch.float64)
        plan = self.world.plan
        for path in range(len(self.chosen)):
            model, _ = build_inference_decoder(self.spec, plan.precision, torch.device("cpu"), None)
            layouts = self.trainers[0].updater.layouts
            own = [
                (name, box, view)
                for name, x in self.copies[path].items()
                for box, view in LocalShard(name, layouts[name], x).box_views()
            ]
            whole = dict(model.named_parameters())
            for name, box, view in itertools.chain(*self.world.all_gather_object(own)):
                whole[name].data[box.slices] = view
            for row in range(count):
                with torch.no_grad():
                    logits = model(tokens[row : row + 1])[0, prefix:]
                losses[path, row] = cross_entropy(logits, labels[row, prefix:], reduction="sum")
        best = torch.stack([own - own.mean() for own in losses]).argmin(0).numpy()
        router = fit_classifier(self.routing.router, batch.tokens_BS[:, :prefix], best)
        with suppress(ConfigError):  # a path without samples: the router stays
            self.route(replace(self.routing, router=router), dataset)

    def run(self, steps: int) -> None:
        paths = len(self.chosen)
        replicas = len(self.trainers) // paths
        for step in range(1, steps + 1):
            for island, trainer in enumerate(self.trainers):
                trainer.samples_consumed = ((step - 1) * replicas + island // paths) * self.share
            self.losses.append([trainer.step().loss for trainer in self.trainers])
            if step % self.outer.every == 0 or step == steps:
                self._meet_by_module()
            if step in self.outer.reshard_at:
                self.reshard()

    def validation_loss(self, samples: int) -> float:
        """Mean loss of the labels of some validation samples, each on the path that was chosen for it."""
        total = count = 0.0
        for path in range(len(self.chosen)):
            trainer = self.trainers[path]
            trainer.batch_loader.dataset = stream = PathStream(trainer.dataset, self.routing, path)
            valid = stream.rows(np.arange(samples), validation=True).num_valid_tokens
            total += valid * (trainer.evaluator.mean_loss(samples // self.share) or 0.0)
            count += valid
        return total / count

    def _meet_by_module(self) -> None:
        num_layers, paths = self.trainers[0].config.model.num_layers, self.chosen
        locals_ = [trainer.updater.parameters for trainer in self.trainers]
        with torch.no_grad():
            for island, own in enumerate(self.copies):
                for name, x in own.items():
                    parts = name.split(".")
                    level = int(parts[1]) * len(self.outer.modules) // num_layers if parts[0] == "layers" else None

                    def module(n: int, at: int | None = level) -> int:
                        return 0 if at is None else paths[n % len(paths)][at]

                    members = [n for n in range(len(self.copies)) if module(n) == module(island)]
                    sizes = [len(self.shards[n % len(paths)]) for n in members]
                    changes = [self.copies[n][name] - locals_[n][name] for n in members]
                    if len(set(sizes)) == 1:
                        mean = _mean(changes)
                    else:
                        total = changes[0] * sizes[0]
                        for change, size in zip(changes[1:], sizes[1:], strict=True):
                            total = total + change * size
                        mean = total / sum(sizes)
                    x.grad = mean * len({n % len(paths) for n in members}) ** 0.5
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for trainer, own in zip(self.trainers, self.copies, strict=True):
                for name, x in own.items():
                    trainer.updater.parameters[name].copy_(x)
                trainer.updater.sync_tied_copies()
                for stage in trainer.stages.values():
                    stage.reshard()


class _Listed(Dataset):
    """Some samples of a dataset, in an order."""

    def __init__(self, dataset: Dataset, samples: np.ndarray) -> None:
        self.__dict__ |= dataset.__dict__
        self.samples = samples

    def rows(self, index: np.ndarray, validation: bool = False) -> Batch:
        return super().rows(self.samples[index], validation)


def _mean(values: list[Tensor]) -> Tensor:
    total = values[0].clone()
    for one in values[1:]:
        total = total + one
    return total / len(values)


def _config(case: dict[str, Any]) -> RunConfig:
    config = small_run(steps=case.get("steps", STEPS), tied=case.get("tied", False))
    return config.model_copy(update={"outer": OuterConfig.model_validate(case["outer"])})


def _plan(case: dict[str, Any], name: str) -> Plan:
    return parse_plan_name(
        name, Plan(micro_batch_size=case["micro_batch_size"], precision=case.get("precision", "fp32"))
    )


def _largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).abs().max().item() for name in one if one[name].numel()), default=0.0)


@contextmanager
def _bug(kind: str | None) -> Iterator[None]:
    """Seed a fault that the comparison has to find."""
    if kind is None:
        yield
    elif kind == "sum for mean":
        real = mean_over_islands
        with patch.object(
            change_exchange, "mean_over_islands", lambda x, axis, *more: real(x, axis, *more) * axis.size
        ):
            yield
    elif kind == "momentum lost":
        real_step = outer_updater.OuterUpdater.step

        def step(self: Any, action: Any) -> None:
            for one in self.parameters.values():
                one.momentum.zero_()
            real_step(self, action)

        with patch.object(outer_updater.OuterUpdater, "step", step):
            yield
    elif kind == "warm-up skipped":

        def late(config: OuterConfig, step: int, last: int) -> OuterEvents:
            return real_events(config, step, last) if step > config.warmup_steps else OuterEvents()

        with patch.object(outer_updater, "outer_events", late):
            yield
    elif kind == "modules mixed":
        with patch.object(ModulePaths, "members", lambda self, island, name: tuple(range(self.islands))):
            yield
    elif kind == "paths share data":
        with patch.object(PathStream, "global_samples", lambda self, index: index):
            yield
    elif kind == "labels of another path":
        real_losses = PathScores.losses
        with patch.object(PathScores, "losses", lambda *arguments: real_losses(*arguments)[::-1]):
            yield
    elif kind == "stale router":
        with patch.object(PathRouting, "reshard", lambda self, losses_of: None):
            yield
    elif kind == "one path a sample":
        real_route = path_routing.route_samples
        with patch.object(path_routing, "route_samples", lambda data, router, top: real_route(data, router)):
            yield
    elif kind == "router lost":
        with patch.object(PathRouting, "restore", lambda self, counters: None):
            yield
    elif kind == "ranks stay":
        with patch.object(FactorRanks, "rank_of", lambda self, name: self.config.low_rank):
            yield
    elif kind == "error lost":
        with patch.object(change_exchange.ChangeExchange, "_remember", lambda self, lost: None):
            yield
    else:
        raise AssertionError(kind)


@contextmanager
def _other_router() -> Iterator[None]:
    """Fit a router whose paths are those of the true one, the other way round."""
    real = path_routing.fit_run_router

    def fit(config: RunConfig, dataset: Dataset) -> SampleRouter:
        found = real(config, dataset)
        router = replace(found.router, weights_KD=found.router.weights_KD[::-1], bias_K=found.router.bias_K[::-1])
        return replace(found, router=router)

    with patch.object(path_routing, "fit_run_router", fit):
        yield


def compare_with_emulator(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """Return for each case the largest differences between this rank and the emulator's: None where it has no part."""
    cache, results = payload["cache"], []
    for generation, case in enumerate(payload["cases"]):
        plan, config = _plan(case, case["plan"]), _config(case)
        inner = plan.model_copy(update={"islands": 1})
        found: dict[str, Any] = {}
        if rank < plan.world_size:
            with open_world(store, rank, plan.world_size, plan, 2 * generation) as world:
                with _bug(case.get("bug")):
                    trainer = Trainer(config, plan, world, open_data(config, cache))
                    sent = [0]
                    assert world.groups.islands is not None
                    with _counted(sent, world.groups.islands):
                        losses = [trainer.step().loss for _ in range(config.train.num_steps)]
                assert trainer.outer is not None
                validation = trainer.evaluator.mean_loss(2) or 0.0
                ours = {name: x.detach().clone() for name, x in trainer.updater.parameters.items()}
                state = {name: one.value.clone() for name, one in trainer.outer.parameters.items()}
                momentum = {name: one.momentum.clone() for name, one in trainer.outer.parameters.items()}
                meetings = trainer.outer.pop_meetings()
                everyone = world.all_gather_object({name: x.tolist() for name, x in ours.items()})
                found = {
                    "meetings": [(one.step, one.fragment) for one in meetings],
                    "distance": meetings[0].distance,
                    "sent_bytes": meetings[0].sent_bytes,
                    "sent_by_meeting": [one.sent_bytes for one in meetings],
                    "counted_bytes": sent[0],
                    "ranks": [dict(one.ranks) for one in meetings],
                    "numel": sum(state[name].numel() for name in trainer.outer.names[meetings[0].fragment]),
                }
        if rank < inner.world_size:
            with open_world(store, rank, inner.world_size, inner, 2 * generation + 1) as world:
                emulator = SerialPaths if config.outer and config.outer.method == "dipaco" else SerialIslands
                serial = emulator(config, inner, plan.islands, world, cache)
                serial.run(config.train.num_steps)
                found["loss"] = max(abs(a - b[0]) for a, b in zip(losses, serial.losses, strict=True))
                found["outer"] = _largest_difference(state, serial.global_)
                found["momentum"] = _largest_difference(momentum, serial.momentum)
                if isinstance(serial, SerialPaths):
                    found["validation"] = abs(validation - serial.validation_loss(2 * config.train.global_batch_size))
                found["used_ranks"] = serial.used_ranks
                found["islands"] = 0.0
                for island, other in enumerate(serial.trainers):
                    theirs = everyone[island * inner.world_size + rank]
                    dtype = next(iter(ours.values())).dtype
                    tensors = {name: torch.tensor(values, dtype=dtype) for name, values in theirs.items()}
                    tensors = {name: x.view_as(ours[name]) for name, x in tensors.items()}
                    found["islands"] = max(
                        found["islands"], _largest_difference(tensors, dict(other.updater.parameters))
                    )
        results.append(found)
    return results


def resume(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """Return for each case whether a run that is resumed within a round continues to the bit, or how far it is off
    under another inner plan."""
    cache, results = payload["cache"], []
    for number, case in enumerate(payload["cases"]):
        config, folder = _config(case), Path(payload["folder"]) / str(number)
        first, second = _plan(case, case["plan"]), _plan(case, case.get("then", case["plan"]))
        whole: dict[str, Tensor] = {}
        if rank < first.world_size:
            with open_world(store, rank, first.world_size, first, 2 * number) as world:
                stopping = StepHooks(stop_requested=lambda: True)  # which the run that goes on must not remember
                trainer = Trainer(config, first, world, open_data(config, cache), stopping)
                for _ in range(case["at"]):
                    trainer.step()
                info = {"plan": first.model_dump(mode="json"), "model": config.model.model_dump(mode="json")}
                shards = trainer.local_shards()
                exchange = world.all_gather_object
                save(
                    folder,
                    case["at"],
                    shards,
                    info | {"counters": trainer.counters()},
                    rank,
                    world.size,
                    exchange,
                    KEEP_LAST_TWO,
                )
                losses = [trainer.step().loss for _ in range(config.train.num_steps - case["at"])]
                assert trainer.outer is not None
                whole = {name: one.value.clone() for name, one in trainer.outer.parameters.items()}
        if rank < second.world_size:
            with open_world(store, rank, second.world_size, second, 2 * number + 1) as world:
                with _other_router() if case.get("fits_anew") else nullcontext():
                    trainer = Trainer(config, second, world, open_data(config, cache))
                (place,) = folder.glob("step-*")
                manifest = load(place, trainer.shards_to_load(case["at"]))
                with _bug(case.get("bug")):
                    trainer.restore(case["at"], manifest.counters)
                again = [trainer.step().loss for _ in range(config.train.num_steps - case["at"])]
                assert trainer.outer is not None
                assert not trainer.outer.stop_requested
                found: dict[str, Any] = {}
                if rank == 0 or first == second:
                    found["loss"] = max(abs(a - b) for a, b in zip(losses, again, strict=True))
                if first == second:
                    now = {name: one.value for name, one in trainer.outer.parameters.items()}
                    found["outer"] = _largest_difference(whole, now)
                results.append(found)
        else:
            results.append({})
    return results


FACTORED = {"matrix": (40, 24), "low rank": (30, 50), "narrow": (6, 4), "vector": (17,)}
"""Shapes of changes: the first two travel as factors of rank 4."""


def exchange_factors(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """Return for each compression what an exchange in factors of rank 4 lost, and the bytes that were handed over."""
    results = []
    plan = Plan(islands=world_size, precision="fp64", micro_batch_size=1)
    with open_world(store, rank, world_size, plan) as world:
        axis = world.groups.islands
        assert axis is not None
        for how in payload["cases"]:
            config = OuterConfig.model_validate({"compression": how, "low_rank": 4})
            everyone = [_changes(island) for island in range(world_size)]
            momenta = {name: torch.zeros_like(change) for name, change in everyone[0].items()}
            exchanged = change_exchange.ChangeExchange(config, axis, momenta)
            starts = change_exchange.start_matrices(lambda name: 4, 3, dict.fromkeys(momenta, (0, 0)), momenta)
            sent = [0]
            with _counted(sent, axis):
                means = exchanged.mean(everyone[rank], starts)
            formula = island_exchange_bytes(((shape, 4) for shape in FACTORED.values()), world_size, how, 8)
            results.append({"sent": sent[0], "formula": formula})
            for name, mean in means.items():
                total = exchanged.errors[name].clone()
                dist.all_reduce(total, group=axis.group)
                exact = _mean([one[name] for one in everyone])
                kept = (exact - mean - total / world_size).abs().max().item()
                results[-1][name] = {"lost": ((exact - mean).norm() / exact.norm()).item(), "unaccounted": kept}
    return results


def _changes(island: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(island)
    found = {name: torch.randn(*size, generator=generator, dtype=torch.float64) for name, size in FACTORED.items()}
    left = torch.randn(30, 3, generator=torch.Generator().manual_seed(50), dtype=torch.float64)
    found["low rank"] = left @ torch.randn(3, 50, generator=generator, dtype=torch.float64)
    return found


def exchange(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> list[Any]:
    """Return for each tensor and compression the mean that this rank gets, and the bytes that it handed over."""
    results = []
    plan = Plan(islands=world_size, precision="fp32", micro_batch_size=1)
    with open_world(store, rank, world_size, plan) as world:
        axis = world.groups.islands
        assert axis is not None
        for numel, kind, how in payload["cases"]:
            everyone = [_values(numel, kind, island) for island in range(world_size)]
            values, before = everyone[rank].clone(), everyone[rank].clone()
            sent, lost = [0], torch.full_like(values, torch.nan)
            with _counted(sent, axis):
                mean = mean_over_islands(values, axis, how, lost)
            exact = torch.stack([one.double() for one in everyone]).mean(0)
            digest = mean.nan_to_num(7.0, 8.0, 9.0).double()
            error = (mean.double() - exact).norm() / exact.norm() if torch.isfinite(exact).all() else torch.zeros(())
            results.append(
                {
                    "digest": [digest.sum().item(), digest.square().sum().item(), *digest[:3].tolist()],
                    "error": error.nan_to_num(0.0).item(),
                    "lost": lost.double().nan_to_num(0.0).tolist() if kind in ("normal", "heavy") else [],
                    "missing": (exact - mean.double()).nan_to_num(0.0).tolist() if kind in ("normal", "heavy") else [],
                    "nan": int(mean.isnan().sum()),
                    "intact": torch.equal(values, before) or kind == "inf",
                    "sent": sent[0],
                    "formula": island_reduce_bytes(numel, world_size, how),
                }
            )
    return results


@contextmanager
def _counted(sent: list[int], axis: IslandAxis) -> Iterator[None]:
    """Count the bytes that a rank hands to the transport for other ranks."""
    all_to_all, all_gather = dist.all_to_all_single, island_exchange.all_gather_into_tensor

    def count_all_to_all(into: Tensor, out: Tensor, **kwargs: Any) -> Any:
        sent[0] += out.nbytes // axis.size * (axis.size - 1)
        return all_to_all(into, out, **kwargs)

    def count_all_gather(into: Tensor, out: Tensor, **kwargs: Any) -> Any:
        sent[0] += out.nbytes * (axis.size - 1)
        return all_gather(into, out, **kwargs)

    with (
        patch.object(island_exchange.dist, "all_to_all_single", count_all_to_all),
        patch.object(island_exchange, "all_gather_into_tensor", count_all_gather),
    ):
        yield


def _values(numel: int, kind: str, island: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + island)
    values = torch.randn(numel, generator=generator)
    if kind == "heavy":  # Student's t with 3 degrees of freedom
        chi = torch.randn(3, numel, generator=generator).square().sum(0)
        return values / (chi / 3).sqrt()
    if kind == "zero":
        return torch.zeros(numel)
    if kind == "inf":
        values[5] = torch.inf
    return values


def round_trip_errors(numel: int, kind: str, compression: Compression) -> tuple[float, float]:
    """Return the largest error of an element over half the scale of its block, and the relative error."""
    values, block = _values(numel, kind, 0), BLOCKS[compression]
    again = decode(encode(values, compression), compression, values.dtype)
    levels = 127 if compression == "int8" else 7
    bound = (values.view(-1, block).abs().amax(1) / levels / 2).repeat_interleave(block)
    return ((again - values).abs() / bound).max().item(), ((again - values).norm() / values.norm()).item()


def train_both(rank: int, world_size: int, store: dist.Store, payload: dict[str, Any]) -> float:
    """Return the largest difference between the parameters of runs with each of two cases."""
    found = []
    for generation, case in enumerate(payload["cases"]):
        plan, config = _plan(case, case["plan"]), _config(case)
        with open_world(store, rank, world_size, plan, generation) as world:
            trainer = Trainer(config, plan, world, open_data(config, payload["cache"]))
            losses = [trainer.step().loss for _ in range(config.train.num_steps)]
            losses.append(trainer.evaluator.mean_loss(2) or 0.0)
            values = {name: x.detach().clone() for name, x in trainer.updater.parameters.items()}
            found.append(values | {"losses": torch.tensor(losses, dtype=torch.float64)})
    return _largest_difference(*found)
