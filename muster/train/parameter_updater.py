"""From complete gradients to new parameters: global norm, skipped steps, clipping and the optimizer, on one rank."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest
from muster.config.freezing import is_frozen, matches_freeze
from muster.config.optimizer_state import is_zeroth_order
from muster.config.run_config import RunConfig
from muster.layout.host_updates import device_updates, host_update_parts
from muster.layout.mesh import dp_index_of
from muster.layout.tensor_layout import TensorLayout
from muster.layout.update_buckets import bucket_of, update_buckets
from muster.model.perturbation import Direction
from muster.model.routing import update_expert_bias
from muster.optim.base import Optimizer, Slope, StateStarts
from muster.optim.build import build_optimizer
from muster.optim.hd_pissa import WeightChangingOptimizer, without_decay
from muster.optim.host_optimizer import PENDING_GRADIENT, FetchedPart, HostOptimizer, HostPart, PendingUpdate
from muster.optim.state_store import StateStore
from muster.parallel.backward_updates import watch_gradients
from muster.parallel.offload import HostLink
from muster.parallel.offloaded_group import OffloadedGroup
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import layer_prefix
from muster.spec.plan import Plan
from muster.train.gradients import find_tied_copies, layer_grad_norm, sum_of_squares
from muster.train.loss_scale import LossScale
from muster.train.step_skipper import StepSkipper
from muster.train.step_state import StepHooks, StepState, no_step


def _nothing() -> None: ...


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


NUM_STATISTICS = 10
"""Numbers that ranks sum in a step of any model."""


class ParameterUpdater:
    """This rank's parameters, their optimizer, and everything that decides how a step changes them.

    One all-reduce per step carries all that the ranks have to agree on: the squared gradient norm, the loss, a request
    to stop and the progress of saving. All ranks read the same sums, so all decide alike.
    """

    link_type = HostLink

    def __init__(
        self, config: RunConfig, plan: Plan, world: World, stages: Mapping[int, DecoderStage], hooks: StepHooks
    ) -> None:
        self.config = config
        self.world = world
        self.stages = stages
        self.hooks = hooks
        self.parameters: dict[str, Tensor] = {}
        """Local parts of the parameters, by name; a tied weight is here once."""
        self.layouts: dict[str, TensorLayout] = {}
        for stage in stages.values():
            for name, layout in stage.layouts.items():
                if self.layouts.setdefault(name, layout) is layout and layout.boxes:
                    self.parameters[name] = stage.parameters[name]
        self._tied_copies = find_tied_copies(stages.values(), self.parameters)
        # On different ranks the two copies of a tied embedding sum their gradients by an instruction of the program.
        self._sums_tied_copies = plan.pp_rank(0) == plan.pp_rank(plan.stages_per_replica - 1)
        self.layer_grad_norm = 1.0
        """Norm of the gradients of this rank's layers before clipping, in the last step, under `train.recovery`
        checkfree."""
        self.lr_scales: dict[int, float] = {}
        """Factors of the learning rate, by stage, of those that were lost and rebuilt; the same on all ranks."""
        self.num_stages = plan.num_stages
        self.is_zeroth_order = is_zeroth_order(config.optim)
        self._scales_loss = plan.precision == "fp16" and not self.is_zeroth_order
        self._host_parts = {
            (index, part): [name for name in names if self.layouts[name] is stage.layouts[name]]
            for index, stage in stages.items()
            for part, names in enumerate(host_update_parts(plan, config.model, index, stage.layouts))
        }
        """Names of the parameters whose optimizer state is off the device, by stage and part."""
        self._tiers = {index: plan.host_update_tiers(index, config.model.num_layers) for index in stages}
        on_device = {index: device_updates(plan, config.model.num_layers, index) for index in stages}
        self._fetched = [key for key in self._host_parts if on_device[key[0]] and on_device[key[0]][key[1]]]
        """Stage and part of the parameters that the device updates with state from host memory."""
        self._offloaded = {
            key: group
            for key, names in self._host_parts.items()
            if (group := stages[key[0]].param_offload.group_of(names)) is not None
        }
        """Groups of parameters off the device, by stage and part."""
        self._buckets = self._find_buckets(plan) if plan.overlap_param_gather_with_optimizer_step else {}
        """Names of the parameters of each bucket, by stage and number, where these are updated one after another."""
        self._store: StateStore | None = None
        for stage in stages.values():
            stage.param_offload.before_emptying = lambda: self.hooks.before_update()
        if config.train.update_in_backward:
            self._watch_gradients()
        self.reset()

    def _watch_gradients(self) -> None:
        """Let stages tell when the gradients of their layers are complete, which the host may then update."""
        plan, num_layers = self.world.plan, self.config.model.num_layers
        for index, stage in self.stages.items():
            layers = (
                part for part, layer in enumerate(plan.host_updated_layers(index, num_layers)) if layer is not None
            )
            watch_gradients(stage, [self._host_parts[index, part] for part in layers])

    def _find_buckets(self, plan: Plan) -> dict[tuple[int, int], list[str]]:
        model = self.config.model
        found = {
            (index, bucket): list[str]()
            for index in self.stages
            for bucket in range(len(update_buckets(plan, model, index)))
        }
        for index, stage in self.stages.items():
            for name, layout in stage.layouts.items():
                if self.layouts[name] is layout:  # a tied copy follows its original
                    found[index, bucket_of(plan, model, index, name)].append(name)
        return found

    def reset(self) -> None:
        """Make the optimizer, the skipped steps and the loss scale as new, for parameters that have been reset."""
        self.state = no_step()
        """The step under way."""
        optim = self.config.optim
        trained = {name: local for name, local in self.parameters.items() if not is_frozen(optim, name)}
        self.optimizer = self._build_host_optimizer(trained) if self._host_parts else self._build_optimizer(trained)
        self.step_skipper = StepSkipper(self.config.train)
        self.previous_norm: float | None = None
        """Gradient norm of the last step that was applied; None before any was."""
        self.loss_scale = LossScale() if self._scales_loss else None

    def _build_optimizer(self, trained: Mapping[str, Tensor]) -> Optimizer:
        optim, adapter = self.config.optim, self.config.model.adapter
        if adapter is None or not adapter.changes_weights:
            return build_optimizer(optim, trained, self.layouts, self.world)
        inner = build_optimizer(without_decay(optim), trained, self.layouts, self.world)
        return WeightChangingOptimizer(inner, self.parameters, self.layouts, self.world, adapter.scaling)

    def _build_host_optimizer(self, trained: Mapping[str, Tensor]) -> HostOptimizer:
        """Build the optimizer with state in host memory or on disk, in place of the one before."""
        if self._store is not None:
            self._store.close()
        on_disk = [key for key in self._host_parts if self._tiers[key[0]][key[1]] == "disk"]
        self._store = StateStore(self.hooks.state_folder) if on_disk else None
        link = self.link_type(self.world.device)
        own = self.config.optim, trained, self.layouts, self.world, self._host_parts
        return HostOptimizer(*own, link, on_disk, self._store, self._offloaded, self._fetched)

    # ------------------------------------------------------------------------------------------------------------------
    # Deciding

    def reduce_norm(self, decides: bool = True) -> None:
        """All-reduce the statistics of the step under way, and decide whether it is skipped.

        `decides` False: for further passes within a step, which has been decided on already.
        """
        sums = self.world.sum_over_island(self.local_statistics())
        if decides:
            self.decide_step(self.state, sums)
        else:
            self._read_sums(self.state, sums)

    def local_statistics(self, losses: Tensor | None = None) -> Tensor:
        """This rank's part of the statistics, from its complete gradients, which are unscaled on the way: float64 [10],
        or more in a model with experts.

        (squared gradient norm, or difference of the losses at the two points of a zeroth-order step; sums of the losses
        as `DecoderStage.pop_losses` has them; stop requested, leave requested, is saving, a save failed; what
        `DecoderStage.pop_router_load` has). `losses`: the second of these, where they and the gradients have been taken
        from the stages before.
        """
        sums = torch.zeros(NUM_STATISTICS, dtype=torch.float64, device=self.world.device)
        for stage in self.stages.values() if losses is None else ():
            stage.attach_local_gradients()
        if self._sums_tied_copies:
            for copy, original in self._tied_copies:
                if is_frozen(self.config.optim, "embed.weight"):
                    continue
                assert copy.grad is not None
                assert original.grad is not None
                original.grad += copy.grad
                copy.grad.copy_(original.grad)
        if self.loss_scale is not None:
            self._multiply_gradients(1 / self.loss_scale.value)
        for index, seen in self.state.valid_by_stage.items():
            if index in self.stages and seen:  # averaged over the micro-batches that the stage has seen
                self._multiply_gradients(self.state.num_valid / seen, (self.stages[index],))
        for stage in self.stages.values():
            sums[0] += stage.pop_loss_difference() if self.is_zeroth_order else sum_of_squares(stage)
            sums[1:6] += stage.pop_losses() if losses is None else 0
        sums[1:6] += 0 if losses is None else losses
        sums[6] = self.hooks.stop_requested()
        sums[7] = self.hooks.leave_requested()
        sums[8], sums[9] = self.hooks.save_status()
        loads = [load for stage in self.stages.values() if (load := stage.pop_router_load()) is not None]
        return torch.cat((sums, torch.stack(loads).sum(0).flatten())) if loads else sums

    def decide_step(self, state: StepState, sums: Tensor) -> None:
        """Complete the state of a step from the sums over all ranks, and decide whether it is skipped."""
        self._read_sums(state, sums)
        state.skip_reason = self.step_skipper.check(state.loss, state.grad_norm)
        if state.skip_reason is not None and any(stage.backward_updates.is_active for stage in self.stages.values()):
            raise MusterError(
                f"step {state.step} can't be skipped: {state.skip_reason}, and the host has updated layers within its"
                " backward (train.update_in_backward); the run goes on from its last checkpoint, and without that key"
                " it skips such steps"
            )
        if self.config.train.recovery == "checkfree" and state.skip_reason is None:
            self.layer_grad_norm = layer_grad_norm(self.stages.values())
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not math.isfinite(state.grad_norm))

    def _read_sums(self, state: StepState, sums: Tensor) -> None:
        """Read the sums over all ranks: the one moment of a step at which the host waits for its device."""
        self.world.heartbeat.wait()
        values = sums.tolist()
        squares, *losses, stop, leave, saving, save_failed = values[:NUM_STATISTICS]
        moe = self.config.model.moe
        if moe is not None and len(values) > NUM_STATISTICS:
            state.router_load = torch.tensor(values[NUM_STATISTICS:], dtype=torch.float64).view(-1, moe.num_experts + 1)
        state.loss, state.z_loss, state.load_balancing_loss, state.router_z_loss, state.mtp_loss = (
            loss / state.num_valid for loss in losses
        )
        state.grad_norm = math.sqrt(squares) if squares >= 0 else math.nan
        if self.is_zeroth_order:
            state.slope = squares / state.num_valid / (2 * self.config.optim.zo_eps)
            state.grad_norm = abs(state.slope)
        state.stop_requested |= stop > 0
        state.leave_requested |= leave > 0
        state.is_saving |= saving > 0
        state.save_failed |= save_failed > 0

    def clip_factor(self, state: StepState) -> float:
        """Return the factor of a step's gradients: below 1 where they are clipped."""
        optim, norm = self.config.optim, state.grad_norm
        if optim.clip_by_previous_norm and self.previous_norm is not None:
            norm = self.previous_norm
        return optim.clip_norm / (norm + 1e-6) if 0 < optim.clip_norm < norm else 1.0

    # ------------------------------------------------------------------------------------------------------------------
    # Updating

    def apply(self) -> None:
        """Clip the gradients and step the optimizer, unless the step is skipped; then drop the gradients."""
        if self.state.skip_reason is None:
            if not self._host_parts and not self._buckets:
                self.clip()
            self._defer_updates()
            self.optimizer_step()
            self.previous_norm = self.state.grad_norm
        for stage in self.stages.values():
            stage.backward_updates.end_step()
        self.drop_gradients()

    def prepare_host_updates(self) -> None:
        """Clip the gradients before the host takes them, unless the step is skipped.

        Either way state that a checkpoint has brought into memory goes back to the disk.
        """
        self.hooks.before_update()
        if self.state.skip_reason is None:
            self.clip()

    def fetch_part(self, stage: int, part: int) -> Callable[[], None]:
        """Start to copy gradients and parameters of a part to the host; the returned function waits for the end."""
        own, updates = self._host_part(stage, part), self.stages[stage].backward_updates
        if updates.has(part):
            updates.wait_complete(part)
        return _nothing if own is None else own.fetch(updates.has(part))

    def update_part(self, stage: int, part: int) -> None:
        """Update a part of the parameters in host memory."""
        if self._host_part(stage, part) is not None:
            assert isinstance(self.optimizer, HostOptimizer)
            self.optimizer.update((stage, part), self.state.learning_rate)
            if (offloaded := self._offloaded.get((stage, part))) is not None:
                offloaded.note_update()

    def fetch_state(self, stage: int, part: int) -> Callable[[], None]:
        """Start to copy the state of a part to the device; the returned function waits for the end."""
        own = self._fetched_part(stage, part)
        return _nothing if own is None else own.fetch_state()

    def update_part_on_device(self, stage: int, part: int) -> None:
        """Update a part of the parameters with state that has come from host memory."""
        if self._fetched_part(stage, part) is not None:
            assert isinstance(self.optimizer, HostOptimizer)
            self.optimizer.update_on_device((stage, part), self.state.learning_rate)

    def return_state(self, stage: int, part: int) -> Callable[[], None]:
        """Start to copy the state of a part back; the returned function waits for the end and frees its memory."""
        own = self._fetched_part(stage, part)
        return _nothing if own is None else own.return_state()

    def _fetched_part(self, stage: int, part: int) -> FetchedPart | None:
        """Return a part that the device updates in this step; None where the step is skipped."""
        if self.state.skip_reason is not None:
            return None
        assert isinstance(self.optimizer, HostOptimizer)
        return self.optimizer.fetched[stage, part]

    def begin_backward_updates(self) -> None:
        """Prepare a step whose layers the host updates within its last backward."""
        self.hooks.before_update()
        for stage in self.stages.values():
            stage.backward_updates.begin_step()

    def update_part_in_backward(self, stage: int, part: int) -> None:
        """Wait until the gradients of a part are complete, clip them by the norm of the step before, and update it."""
        assert isinstance(self.optimizer, HostOptimizer)
        updates, offloaded = self.stages[stage].backward_updates, self._offloaded.get((stage, part))
        updates.wait_complete(part)
        if offloaded is not None:
            offloaded.attach_complete()
        self.optimizer.parts[stage, part].scale_gradients(self.clip_factor(self.state))
        self.optimizer.update((stage, part), self.state.learning_rate)
        if offloaded is not None:
            offloaded.drop_complete()
            offloaded.note_update()
        updates.note_updated()

    def abandon_step(self, error: BaseException) -> None:
        """Let a pass and an update that wait for each other raise an error."""
        for stage in self.stages.values():
            stage.backward_updates.fail(error)

    def catch_up_part(self, stage: int, part: int) -> None:
        """Make the update of a part that the step before has deferred, unless a pass has."""
        self._offloaded[stage, part].catch_up()

    def _defer_updates(self) -> None:
        """Leave updates of parameters in host memory without gradients to the time before their next use."""
        optimizer, lr = self.optimizer, self.state.learning_rate
        if not self.is_zeroth_order or not isinstance(optimizer, HostOptimizer):
            return
        count, slope = optimizer.step_count, optimizer.slope

        def update(key: tuple[int, int], group: OffloadedGroup) -> None:
            own = optimizer.parts[key]
            own.optimizer.step_count, own.optimizer.starts, own.optimizer.slope = count, optimizer.starts, slope
            own.update(lr)
            group.note_update()

        for key, group in self._offloaded.items():
            if not group.on_disk:
                group.defer(partial(update, key, group))

    def return_part(self, stage: int, part: int) -> Callable[[], None]:
        """Start to copy a part of the parameters back to the device; the returned function waits for the end."""
        own = self._host_part(stage, part)
        return _nothing if own is None else own.give_back(self.stages[stage].backward_updates.has(part))

    def read_part(self, stage: int, part: int) -> Callable[[], None]:
        """Start to read the state of a part from disk; the returned function waits for the end."""
        assert isinstance(self.optimizer, HostOptimizer)
        stored, offloaded = self.optimizer.parts[stage, part].stored, self._offloaded.get((stage, part))
        waits = [] if stored is None else [stored.read()]
        if offloaded is not None and offloaded.on_disk and self.stages[stage].backward_updates.has(part):
            waits.append(offloaded.bring_in_backward())
        elif offloaded is not None and offloaded.on_disk:
            waits += offloaded.begin_update(self.stages[stage].param_offload.gradient_factor)
        return partial(_call_all, waits)

    def write_part(self, stage: int, part: int) -> Callable[[], None]:
        """Start to write the state of a part to disk; the returned function waits for the end and frees its memory."""
        assert isinstance(self.optimizer, HostOptimizer)
        stored, offloaded = self.optimizer.parts[stage, part].stored, self._offloaded.get((stage, part))
        waits = [] if stored is None else [stored.write()]
        if offloaded is not None and offloaded.on_disk:
            waits.append(offloaded.keep())
        return partial(_call_all, waits)

    def _host_part(self, stage: int, part: int) -> HostPart | None:
        """Return a part that the host updates in this step; None where the step is skipped."""
        if self.state.skip_reason is not None:
            return None
        assert isinstance(self.optimizer, HostOptimizer)
        return self.optimizer.parts[stage, part]

    def clip(self) -> None:
        """Scale the gradients, or the slope that a zeroth-order step goes by, down to the largest global norm allowed,
        `optim.clip_norm`, or by as much as the step before would have been."""
        factor = self.clip_factor(self.state)
        if self.is_zeroth_order:
            self.optimizer.slope = Slope(self.direction, self.state.slope * factor)
        elif factor != 1:
            self._multiply_gradients(factor)

    @property
    def direction(self) -> Direction:
        """Direction of the step under way, where it is a zeroth-order one."""
        return Direction(self.config.seed, self.state.step)

    @contextmanager
    def perturbing(self) -> Iterator[None]:
        """Run the passes in this context without a backward, at perturbed parameters, where steps are zeroth-order
        ones."""
        if not self.is_zeroth_order:
            yield
            return
        signs = (1, -1)
        if self.config.optim.perturbation_parallel:
            signs = (signs[dp_index_of(self.world.plan, self.world.at) % len(signs)],)
        with torch.no_grad():
            for stage in self.stages.values():
                assert stage.perturbed is not None
                stage.perturbed.begin(self.direction, signs)
            yield
            for stage in self.stages.values():
                assert stage.perturbed is not None
                stage.perturbed.end()

    def optimizer_step(self) -> None:
        """Step the optimizer with the gradients as they are."""
        self.hooks.before_update()
        if self._buckets:
            self.optimizer.end_step()
        else:
            self.optimizer.step(self.state.learning_rate * self._lr_scale)
        self.sync_tied_copies()
        self.balance_experts()

    @property
    def _lr_scale(self) -> float:
        return next((self.lr_scales[stage] for stage in self.stages if stage in self.lr_scales), 1.0)

    def step_bucket(self, stage: int, bucket: int) -> None:
        """Update a bucket of a stage's parameters with clipped gradients, unless the step is skipped."""
        if self.state.skip_reason is None:
            self.optimizer.step_part(self._buckets[stage, bucket], self.state.learning_rate * self._lr_scale)
            self.sync_tied_copies()

    def begin_delayed_step(self) -> None:
        """Prepare a step in which the host updates parameters with the gradients of the step before."""
        self.hooks.before_update()

    def update_pending_part(self, stage: int, part: int) -> None:
        """Update a part of the parameters in host memory with the gradients of the step before."""
        assert isinstance(self.optimizer, HostOptimizer)
        self.optimizer.update_pending((stage, part))

    def return_pending_part(self, stage: int, part: int) -> Callable[[], None]:
        """Start to copy what `update_pending_part` updated back to the device; the returned function waits for it."""
        assert isinstance(self.optimizer, HostOptimizer)
        return self.optimizer.parts[stage, part].give_back()

    def apply_delayed(self) -> None:
        """End a step whose gradients the host has taken: its own update is that of the next step."""
        assert isinstance(self.optimizer, HostOptimizer)
        before = self.optimizer.step_count
        self.apply()
        skipped = self.state.skip_reason is not None
        self.optimizer.pending = None if skipped else PendingUpdate(self.state.learning_rate, before)

    def balance_experts(self) -> None:
        """Move the biases that balance experts by the load of the whole step on all ranks."""
        model, load_LF = self.config.model, self.state.router_load
        if model.moe is None or not model.moe.has_expert_bias or load_LF is None:
            return
        for stage in self.stages.values():
            for load_F, layer in zip(load_LF, model.expert_layers, strict=True):
                name = f"{layer_prefix(model, layer)}mlp.router.expert_bias"
                layout = stage.layouts.get(name)
                if layout is None or not layout.boxes or matches_freeze(self.config.optim, name):
                    continue
                rate, (rows,) = model.moe.router_bias_update_rate, layout.boxes[0].slices
                update_expert_bias(stage.parameters[name], load_F[:-1], rows, rate)

    def drop_gradients(self) -> None:
        """Free the gradients and the gathered parameters, which are out of date after a step."""
        for stage in self.stages.values():
            stage.zero_grad()
            if not stage.is_gathered_ahead:
                stage.reshard()

    def sync_tied_copies(self) -> None:
        """Copy each updated weight to the last stage's copy of it on this rank."""
        for copy, original in self._tied_copies:
            copy.copy_(original)

    def _multiply_gradients(self, factor: float, stages: Collection[DecoderStage] | None = None) -> None:
        """Multiply the gradients of some stages, or of all."""
        stages = self.stages.values() if stages is None else stages
        locals_ = (
            local
            for stage in stages
            for name, local in stage.parameters.items()
            if name not in stage.backward_updates.names
        )
        if gradients := [local.grad for local in locals_ if local.grad is not None]:  # a rank may hold no part of any
            torch._foreach_mul_(gradients, factor)
        for stage in stages:
            stage.param_offload.gradient_factor *= factor

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def local_shards(self) -> list[LocalShard]:
        """Everything on this rank that a checkpoint holds; what is on disk is read, and written when it is used."""
        for stage in self.stages.values():
            stage.param_offload.bring()
        shards = [LocalShard(f"model/{name}", self.layouts[name], local) for name, local in self.parameters.items()]
        own_layouts = self.optimizer.state_layouts()
        for key, (name, tensor) in self.optimizer.state().items():
            shards.append(LocalShard(f"optim/{key}", own_layouts.get(key, self.layouts[name]), tensor))
        return shards

    def counters(self) -> dict[str, Any]:
        """Counters of a checkpoint's manifest that the next updates depend on."""
        counters: dict[str, Any] = {"skips": self.step_skipper.state()}
        if (starts := self.optimizer.starts) != StateStarts():
            counters["optimizer_starts"] = starts._asdict()
        if isinstance(self.optimizer, HostOptimizer) and self.optimizer.pending is not None:
            counters["delayed_update"] = self.optimizer.pending._asdict()
        if self.config.optim.clip_by_previous_norm and self.previous_norm is not None:
            counters["previous_norm"] = self.previous_norm
        if self.lr_scales:
            counters["lr_scales"] = {"num_stages": self.num_stages, "by_stage": list(self.lr_scales.items())}
        return counters if self.loss_scale is None else counters | {"loss_scale": self.loss_scale.state()}

    @property
    def has_pending_update(self) -> bool:
        """True if gradients of an earlier step wait for their update."""
        return isinstance(self.optimizer, HostOptimizer) and self.optimizer.pending is not None

    def prepare_to_load(self, manifest: Manifest) -> None:
        """Make room for the gradients of a delayed update that waits in a checkpoint.

        Raises ConfigError where this run updates its parameters on the device or without a delay.
        """
        pending = manifest.counters.get("delayed_update")
        hosted = {name for names in self._host_parts.values() for name in names}
        waiting = {name for name in self.parameters if f"optim/{name}.{PENDING_GRADIENT}" in manifest.tensors}
        if waiting and (not self.config.train.delayed_update or waiting - hosted):
            raise ConfigError(
                "the checkpoint has gradients whose update is delayed: go on with train.delayed_update, and with the"
                " optimizer state of the same layers in host memory or on disk, or begin another --run with --init-from"
                " this one, which takes the weights alone"
            )
        if isinstance(self.optimizer, HostOptimizer):
            self.optimizer.expect_pending(None if pending is None else PendingUpdate(**pending), waiting)

    def restore(self, step: int, counters: Mapping[str, Any]) -> None:
        """Take up the counters of a checkpoint after `step` steps, whose shards have been loaded."""
        self.sync_tied_copies()
        for stage in self.stages.values():
            if stage.is_gathered_ahead:  # what was there before
                stage.reshard()
        if isinstance(self.optimizer, HostOptimizer) and self.optimizer.pending is not None:
            self.optimizer.take_parameters()
        if "skips" in counters:
            self.step_skipper.load(counters["skips"])
        if self.loss_scale is not None and "loss_scale" in counters:
            self.loss_scale.load(counters["loss_scale"])
        self.optimizer.step_count = step - self.step_skipper.total
        self.optimizer.starts = StateStarts(**counters.get("optimizer_starts", {}))
        self.previous_norm = counters.get("previous_norm")
        scales = counters.get("lr_scales", {})
        # Under a plan with other stages their layers lie elsewhere.
        self.lr_scales = dict(scales["by_stage"]) if scales.get("num_stages") == self.num_stages else {}
