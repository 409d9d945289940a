"""The trainer: one rank's part of training, step by step. It knows steps, not micro-batches."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import Any

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest
from muster.config.freezing import is_frozen
from muster.config.load_config import plan_from_tree
from muster.config.optim_config import UpdateTime
from muster.config.run_config import RunConfig
from muster.data.dataset import SampleStream
from muster.layout.mesh import dp_index_of
from muster.layout.tensor_layout import stages_on
from muster.layout.update_buckets import update_buckets
from muster.optim.lr import lr_at_step
from muster.parallel.axis import PendingTensor
from muster.parallel.cuda_graphs import PassGraphs, has_cuda_graphs
from muster.parallel.device_clock import StepRecord, step_clock
from muster.parallel.disk_activations import DiskActivations, activation_store
from muster.parallel.executor import Executor, Handler
from muster.parallel.op_profile import StageProfile, profile_stages
from muster.parallel.p2p import stage_routes, tied_embedding_routes, variable_length_routes
from muster.parallel.param_offload import param_store
from muster.parallel.rank_probes import waited_for_core_s
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World
from muster.schedule.action import Action, Kind, most_in_flight
from muster.schedule.active_stages import backwards_before_reductions
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.outer_steps import NO_EXCHANGE, OuterEvents
from muster.schedule.program import Program, has_split_backward
from muster.simulate.timeline import Event
from muster.spec.plan import PinnedSchedule, Plan
from muster.train.batch_loader import BatchLoader
from muster.train.custom_step import CustomStep
from muster.train.evaluator import Evaluator
from muster.train.expert_mover import ExpertMover
from muster.train.gradients import add_replica_gradients
from muster.train.outer_updater import OuterUpdater
from muster.train.parameter_updater import ParameterUpdater
from muster.train.path_routing import PathRouting
from muster.train.path_scores import PathScores
from muster.train.peer_updater import PeerUpdater
from muster.train.step_result import ExpertLoad, ExpertMoves, StepResult, expert_load
from muster.train.step_state import StepHooks, StepState, no_step
from muster.train.swarm_trainer import Swarm

COUNTERS_TIMEOUT = timedelta(minutes=30)
"""Time for which islands wait for one another before they save."""
KEPT_STEPS = 64
"""Last steps whose events are kept, for the measured timeline."""

Copy = Callable[[Action], Callable[[], None]]
"""Starts a copy; the function that it returns waits for the end."""


class Trainer:
    """This rank's stages, their updater, and the position in the data.

    The executor runs the instructions of a step; those that are not a stage's own are handlers here. `hooks` connect
    the steps with the run around them. Subclasses may replace `stage_type` and `updater_type`.
    """

    stage_type = DecoderStage
    updater_type = ParameterUpdater

    def __init__(
        self, config: RunConfig, plan: Plan, world: World, dataset: SampleStream, hooks: StepHooks | None = None
    ) -> None:
        self.config = config
        self.plan = plan
        self.world = world
        self.dataset = dataset
        self._read_plan()
        split_backward = has_split_backward(self.program) or plan.split_backward
        hooks = hooks or StepHooks()
        has_params_on_disk = any(strategy.offload_param == "disk" for strategy in plan.strategies)
        files = param_store(hooks.state_folder) if has_params_on_disk else None
        own = config.workload.seq_len, config.seed, split_backward, config.optim, files
        self.stages = {
            index: self.stage_type(config.model, world, index, *own) for index in stages_on(plan, world.at.pp)
        }
        self._open_activation_store(hooks)
        self.updater = self.updater_type(config, plan, world, self.stages, hooks)
        self.path_routing = PathRouting(config, plan, world, dataset)
        self._open_others(self.path_routing.sizes)
        moves = config.train.rebalance_experts_every and config.model.moe is not None
        self.expert_mover = ExpertMover(config, world, self.updater) if moves else None
        self._expert_moves: ExpertMoves | None = None
        """Moves after the last step."""
        self._moving_executor: Executor | None = None
        """Executor of the steps after which experts may move to other ranks."""
        self._outer_executors: dict[OuterEvents, Executor] = {}
        """Executors of the steps after which islands exchange fragments, by these."""
        self.handlers: dict[Kind, Handler] = {
            Kind.GRAD_NORM: self._reduce_norm,
            Kind.CLIP: lambda action: self.updater.prepare_host_updates(),
            Kind.UPDATE: lambda action: self.updater.update_part(action.stage, action.slice),
            Kind.DELAYED_UPDATE: lambda action: self.updater.update_pending_part(action.stage, action.slice),
            Kind.BACKWARD_UPDATE: lambda action: self.updater.update_part_in_backward(action.stage, action.slice),
            Kind.HOST_UPDATE: lambda action: self.updater.update_part(action.stage, action.slice),
            Kind.DEVICE_UPDATE: lambda action: self.updater.update_part_on_device(action.stage, action.slice),
            Kind.LATE_UPDATE: lambda action: self.updater.catch_up_part(action.stage, action.slice),
            Kind.STEP_BUCKET: lambda action: self.updater.step_bucket(action.stage, action.slice),
            Kind.UNSHARD_BUCKET: self._gather_bucket,
            Kind.STEP: self._update_parameters,
            Kind.MOVE_EXPERTS: self._move_experts,
            Kind.ALL_REDUCE_TIED: self._reduce_tied_gradients,
            Kind.ALL_REDUCE_REPLICAS: self._reduce_replica_gradients,
        }
        if self.outer is not None:
            self.handlers |= self.outer.handlers
        self.copies: dict[Kind, Copy] = {
            Kind.OFFLOAD_GRAD: lambda action: self.updater.fetch_part(action.stage, action.slice),
            Kind.RELOAD_PARAM: lambda action: self.updater.return_part(action.stage, action.slice),
            Kind.RELOAD_STATE: lambda action: self.updater.fetch_state(action.stage, action.slice),
            Kind.OFFLOAD_STATE: lambda action: self.updater.return_state(action.stage, action.slice),
            Kind.READ_STATE: lambda action: self.updater.read_part(action.stage, action.slice),
            Kind.WRITE_STATE: lambda action: self.updater.write_part(action.stage, action.slice),
        }
        step = config.train.training_step
        self._custom_step = None if step is None else CustomStep(self.updater, step)
        has_lengths = config.data.packing == "none" or plan.sequence_slices > 1
        make_routes = variable_length_routes if has_lengths else stage_routes
        self._routes = make_routes(config.model, world, config.workload.seq_len, self.stages)
        self._tied_routes = tied_embedding_routes(config.model, world, self.stages)
        self._executor = self._make_step_executor()
        self._pass_graphs = self._make_pass_graphs()
        self._group_executors: dict[int, Executor] = {}
        """Executors by micro-batches, where each step has its own number."""
        self._update_executors: dict[UpdateTime, Executor] = {}
        """Executors of steps in which the host updates parameters beside passes, by the time of that."""
        self._set_backwards_per_step()
        self.batch_loader = BatchLoader(config, plan, world, self.path_routing.stream, self.stages)
        self.evaluator = Evaluator(
            self.batch_loader,
            lambda has_heartbeat, count: self.make_executor(
                self._program_of(plan, count, train=False), has_heartbeat=has_heartbeat
            ),
        )
        self.step_count = 0
        """Completed steps, skipped ones included."""
        self.samples_consumed = 0
        self._step_events: deque[tuple[int, list[Event]]] = deque(maxlen=KEPT_STEPS)
        self._unread_steps: deque[tuple[int, StepRecord]] = deque()
        """Steps whose events a device may not have reached yet."""

    def _open_others(self, shard_sizes: Sequence[int]) -> None:
        """Prepare to exchange with islands or peers, or to let peers serve the stages, where the run says so."""
        self.peers: PeerUpdater | None = None
        """Outer steps with the peers of a coordinator, where the run is one."""
        self.outer: OuterUpdater | None = None
        if self.config.outer is not None and self.config.outer.coordinator is not None:
            self.outer = self.peers = PeerUpdater(self.config, self.world, self.updater, self.dataset)
        elif self.plan.islands > 1:
            self.outer = OuterUpdater(self.config, self.world, self.updater, shard_sizes)
        self.swarm: Swarm | None = None
        """Peers that serve the stages, where the run has a section swarm."""
        if self.config.swarm is not None:
            self.swarm = Swarm(self.config, self.world, self.stages[0], self.updater)

    def _open_activation_store(self, hooks: StepHooks) -> None:
        """Open the rank's file for activations on disk, where it has any."""
        away = [stage.layer_activations["disk"] for stage in self.stages.values()]
        own = [one for one in away if isinstance(one, DiskActivations) and one.has_layers]
        store = activation_store(hooks.state_folder) if own else None
        for one in own:
            one.store = store

    def _read_plan(self) -> None:
        self.program = self._program_of(self.plan, num_steps=None)
        report = check(self.program)
        self.peak_by_stage = report.peak_by_stage[self.world.at.pp]
        self.peak_logits = report.peak_logits[self.world.at.pp]

    def _program_of(
        self,
        plan: Plan,
        count: int | None = None,
        train: bool = True,
        outer: OuterEvents = NO_EXCHANGE,
        update_time: UpdateTime = "after_passes",
        moves_experts: bool = False,
        num_steps: int | None = 1,
    ) -> Program:
        """Build the program of a plan with the number of micro-batches of this rank's data-parallel index; `count` is
        another number under `cpdyn`, where each step has its own; `num_steps` of an asynchronous one, None: the
        plan's."""
        dp_index, workload = dp_index_of(plan, self.world.at), self.config.workload
        if plan.dynamic_context_parallel and count is not None:
            workload = workload.model_copy(update={"global_batch_size": count * plan.micro_batch_size})
        own = plan, self.config.model, workload
        after = {"outer": outer, "update_time": update_time, "moves_experts": moves_experts}
        after["num_steps"] = num_steps
        return build_program(*own, train=train, data_rank=dp_index, optim=self.config.optim, **after)

    def program_of_steps(self, num_steps: int) -> Program:
        """Return the program of so many steps of an asynchronous schedule, without a flush between them."""
        return self._program_of(self.plan, num_steps=num_steps)

    def use_order(self, order: PinnedSchedule) -> None:
        """Continue with another order of the plan's schedule, which leaves the stages on their ranks."""
        self.plan = self.plan.model_copy(update={"pinned_schedule": order})
        self._read_plan()
        self._executor = self._make_step_executor()
        self._outer_executors.clear()
        self._update_executors.clear()
        self._moving_executor = None
        self._pass_graphs = self._make_pass_graphs()

    def _make_pass_graphs(self) -> list[PassGraphs]:
        if not self.plan.cuda_graphs or not has_cuda_graphs(self.world.device):
            return []
        in_flight = most_in_flight(item.action for item in self.program.ranks[self.world.at.pp]["compute"])
        return [PassGraphs(stage, in_flight[index]) for index, stage in self.stages.items()]

    def _make_step_executor(self) -> Executor:
        """Make the executor whose steps wait for the gradient norm of all ranks, as every plan's first steps do."""
        waiting = self.plan.model_copy(update={"post_validation": False})
        handlers = {} if self._custom_step is None else self._custom_step.handlers
        return self.make_executor(self._program_of(waiting), handlers)

    def _executor_of_step(self) -> Executor:
        """Return the executor of a step with as many micro-batches as its batch has, and its exchanges between
        islands."""
        if self.outer is not None and any(events := self.outer.events_after(self.step_count + 1)):
            if events not in self._outer_executors:
                check(program := self._program_of(self.plan, outer=events))
                self._outer_executors[events] = self.make_executor(program)
            return self._outer_executors[events]
        if self.delays_update:
            if "delayed" not in self._update_executors:
                self._update_executors["delayed"] = self._make_delayed_executor()
            self.updater.begin_delayed_step()
            return self._update_executors["delayed"]
        if self.updates_in_backward:
            if "in_backward" not in self._update_executors:
                check(program := self._program_of(self.plan, update_time="in_backward"))
                self._update_executors["in_backward"] = self.make_executor(program)
            self.updater.begin_backward_updates()
            return self._update_executors["in_backward"]
        if self.expert_mover is not None and self.expert_mover.is_due(self.step_count + 1):
            if self._moving_executor is None:
                check(program := self._program_of(self.plan, moves_experts=True))
                self._moving_executor = self.make_executor(program)
            return self._moving_executor
        count = self.batch_loader.num_fed_micro_batches
        if not self.plan.dynamic_context_parallel:
            return self._executor
        if count not in self._group_executors:
            check(program := self._program_of(self.plan, count))
            handlers = {} if self._custom_step is None else self._custom_step.handlers
            self._group_executors[count] = self.make_executor(program, handlers)
        return self._group_executors[count]

    @property
    def delays_update(self) -> bool:
        """True if the update of the step to come takes place beside the passes of the one after it."""
        train = self.config.train
        is_warm = self.step_count >= train.delayed_update_warmup_steps
        return train.delayed_update and (is_warm or self.updater.has_pending_update)

    @property
    def updates_in_backward(self) -> bool:
        """True if the host updates layers within the last backward of the step to come: where the norm that clips their
        gradients is known, which it isn't before a first step."""
        return self.config.train.update_in_backward and self.updater.previous_norm is not None

    def _make_delayed_executor(self) -> Executor:
        check(program := self._program_of(self.plan, update_time="delayed"))
        handlers: dict[Kind, Handler] = {Kind.STEP: lambda action: self.updater.apply_delayed()}
        copies = {Kind.RELOAD_PARAM: lambda action: self.updater.return_pending_part(action.stage, action.slice)}
        return self.make_executor(program, handlers, copies=copies)

    def make_executor(
        self,
        program: Program,
        handlers: Mapping[Kind, Handler] | None = None,
        has_heartbeat: bool = True,
        copies: Mapping[Kind, Copy] | None = None,
    ) -> Executor:
        """Make an executor of a program over this rank's stages.

        `handlers` and `copies` replace those of this trainer; without a heartbeat the launcher takes no long
        instruction for a hang.
        """
        world = self.world
        return Executor(
            program,
            world.at.pp,
            world.rank,
            self.stages,
            self._routes,
            self.handlers | dict(handlers or {}),
            clock=step_clock(world.device),
            vocab=next((stage.vocab for stage in self.stages.values() if stage.vocab), None),
            heartbeat=world.heartbeat if has_heartbeat else None,
            copies=self.copies | dict(copies or {}),
            turns=world.turns,
            on_failure=self.updater.abandon_step,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Training

    def step(self) -> StepResult:
        """Run one optimizer step over the next global batch. The batch of a skipped step is not tried again."""
        start_s, waited_s = perf_counter(), waited_for_core_s()
        state = self.load_batch()
        data_s = perf_counter() - start_s
        executor = self._executor_of_step()
        for graphs in self._pass_graphs:
            graphs.begin_step()
        self._expert_moves = None
        record = self.run_instructions(executor) if self.swarm is None else self.swarm.run()
        if self.expert_mover is not None:
            self.expert_mover.add(state)
        if self._custom_step is not None:
            self._custom_step.run(executor.run)
        self.count_finished_step(record)
        if self.path_routing.reshards_after(self.step_count):
            self._reshard_paths()
        core_wait_s = waited_for_core_s() - waited_s if self.world.device.type == "cpu" else 0.0
        return replace(self.result(state, perf_counter() - start_s, data_s), core_wait_s=core_wait_s)

    def run_instructions(self, executor: Executor) -> StepRecord:
        """Run the instructions of a step whose batch is loaded."""
        with self.updater.perturbing():
            return executor.run()

    def load_batch(self, ahead: int = 0) -> StepState:
        """Give the stages the next global batch, or the one that is `ahead` steps later; returns the state of its step,
        which the updater has, too."""
        step = self.step_count + ahead
        self.world.heartbeat.step = step
        self.world.heartbeat.update("data")
        first = self.samples_consumed + ahead * self.config.train.global_batch_size
        batch = self.batch_loader.next_batch(first, self.peers.stride if self.peers else None)
        loss_scale = self.updater.loss_scale
        self.batch_loader.feed_stages(batch, loss_scale.value if loss_scale else 1.0)
        self.updater.state = StepState(
            step=step + 1,
            learning_rate=lr_at_step(self.config.optim, step, self.config.train.num_steps),
            num_valid=batch.num_valid,
            num_tokens=batch.num_tokens,
            valid_by_stage=batch.valid_by_stage,
        )
        return self.updater.state

    def count_finished_step(self, record: StepRecord, num_steps: int = 1) -> None:
        """Advance to the next batch after a step, or several, with these instructions."""
        self.step_count += num_steps
        self.samples_consumed += num_steps * self.config.train.global_batch_size
        self._follow_peers()
        self._unread_steps.append((self.step_count, record))
        while self._unread_steps and self._unread_steps[0][1].is_complete():  # on a GPU, up to the step before
            self._read_first_record()

    def join_peers(self) -> bool:
        """Join the peers of a coordinator, where the run is one, or wait for those of its swarm. Returns False where it
        was asked to stop before."""
        if self.peers is not None and not self.peers.join(self.step_count):
            return False
        if self.swarm is not None and not self.swarm.join(self.step_count):
            return False
        self._follow_peers()
        return True

    def _follow_peers(self) -> None:
        """Go on at the step and the samples that are this peer's."""
        if self.peers is not None:
            step = self.peers.pop_placed_step()
            self.step_count = self.step_count if step is None else step
            self.samples_consumed = self.peers.first_sample(self.step_count)

    @property
    def is_done(self) -> bool:
        """True after the last step, and the exchange after it."""
        is_waiting = self.peers is not None and self.peers.awaits_exchange
        return self.step_count == self.config.train.num_steps and not is_waiting

    def _read_first_record(self) -> None:
        step, record = self._unread_steps.popleft()
        self._step_events.append((step, record.events()))

    def step_events(self) -> dict[int, list[Event]]:
        """Return the events of the last steps by step, in seconds of this machine's monotonic clock."""
        while self._unread_steps:
            self._read_first_record()
        return dict(self._step_events)

    def result(self, state: StepState, time_s: float, data_s: float, **skips: int) -> StepResult:
        """Return the result of the step that was decided on last, or of another with its own counts of `skips`."""
        skipper = self.updater.step_skipper
        skips = {"total_skips": skipper.total, "consecutive_skips": skipper.consecutive} | skips
        return StepResult(
            step=state.step,
            loss=state.loss,
            z_loss=state.z_loss,
            load_balancing_loss=state.load_balancing_loss,
            router_z_loss=state.router_z_loss,
            mtp_loss=state.mtp_loss,
            expert_load=self._expert_load(state),
            grad_norm=state.grad_norm,
            learning_rate=state.learning_rate,
            num_tokens=state.num_tokens,
            time_s=time_s,
            data_s=data_s,
            skip_reason=state.skip_reason,
            **skips,
            stop_requested=self._stop_requested(state),
            leave_requested=state.leave_requested,
            is_saving=state.is_saving,
            save_failed=state.save_failed,
            expert_moves=self._expert_moves,
        )

    def _stop_requested(self, state: StepState) -> bool:
        """Return whether this step is the last by request; islands of a plan stop together."""
        if self.outer is None:
            return state.stop_requested
        return self.outer.stop_requested or (self.peers is not None and state.stop_requested)

    def _expert_load(self, state: StepState) -> tuple[ExpertLoad, ...]:
        if state.router_load is None:
            return ()
        rows = zip(self.config.model.expert_layers, state.router_load.tolist(), strict=True)
        return tuple(expert_load(layer, row[:-1], row[-1]) for layer, row in rows)

    def profile(self) -> StageProfile:
        """Time every instruction and count bytes; afterwards parameters and optimizer are as new."""
        self.updater.state = no_step()
        self.world.heartbeat.update("profile")
        self._set_backwards_per_step(known=False)
        with self.updater.perturbing():
            profile = profile_stages(self.program, self.stages, self.world, self.handlers, self._routes, self.copies)
        if self.expert_mover is not None:
            self.expert_mover.profile(self.plan)
        for stage in self.stages.values():
            stage.zero_grad()
            stage.reshard()
            stage.reset_parameters(self.config.seed)
        self.updater.reset()
        if self.outer is not None:
            self.outer.reset()
        self._set_backwards_per_step()
        return profile

    def _set_backwards_per_step(self, known: bool = True) -> None:
        """Tell the stages how many backwards a step has, or that single ones will run."""
        dp_index = dp_index_of(self.plan, self.world.at)
        ends = backwards_before_reductions(self.program, self.world.at.pp)
        for stage in self.stages.values():
            stage.last_backward.ends_of_units = ends.get(stage.index, frozenset()) if known else frozenset()
            count = self.plan.num_stage_micro_batches(stage.index, self.config.workload, dp_index)
            stage.last_backward.backwards_per_step = count * self.plan.sequence_slices if known else None

    # ------------------------------------------------------------------------------------------------------------------
    # Instructions that are no stage's own

    def _reduce_tied_gradients(self, action: Action) -> None:
        """Add the other copy's gradient to that of this copy of the tied embedding; both end with the same bits."""
        stage = self.stages[action.stage]
        stage.attach_local_gradients()
        gradient = stage.parameters["embed.weight"].grad
        if gradient is None and is_frozen(self.config.optim, "embed.weight"):
            return
        assert gradient is not None
        theirs = self._tied_routes[action.stage].exchange(gradient.to(self.world.device))
        gradient += theirs.to(gradient.device)

    def _reduce_replica_gradients(self, action: Action) -> PendingTensor | None:
        """Start to add the gradients of the same layers in the other replica."""
        stage = self.stages.get(action.stage) or self.stages[action.stage + self.plan.stages_per_replica]
        pair = self.world.groups.pipeline_replicas
        assert pair is not None
        return add_replica_gradients(stage, pair)

    def _reduce_norm(self, action: Action) -> None:
        self.updater.reduce_norm()

    def _update_parameters(self, action: Action) -> None:
        self.updater.apply()

    def _gather_bucket(self, action: Action) -> None:
        layers = update_buckets(self.plan, self.config.model, action.stage)[action.slice]
        self.stages[action.stage].unshard_bucket(layers)

    def _move_experts(self, action: Action) -> None:
        assert self.expert_mover is not None
        self.plan, self._expert_moves = self.expert_mover.move(self.plan, self.updater.state)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def take_expert_placement(self, manifest: Manifest) -> None:
        """Go on with experts where they were when a checkpoint was saved, if they may move and as many ranks share
        them; its shards are yet to be loaded."""
        if self.expert_mover is None:
            return
        saved = plan_from_tree(manifest.plan, "the checkpoint's plan")
        degrees = [[plan.mesh(stage).ep for stage in range(plan.num_stages)] for plan in (saved, self.plan)]
        if saved.expert_placement and {*degrees[0]} == {*degrees[1]}:
            self.plan = self.plan.model_copy(update={"expert_placement": saved.expert_placement})
            self.expert_mover.place(self.plan)

    def local_shards(self) -> list[LocalShard]:
        """Everything on this rank that a checkpoint holds."""
        if self.swarm is not None:
            self.swarm.pull()
        return self.updater.local_shards() if self.outer is None else self.outer.shards_to_save()

    def shards_to_load(self, step: int) -> list[LocalShard]:
        """Everything on this rank that the checkpoint of a step has to hold."""
        return self.updater.local_shards() if self.outer is None else self.outer.shards_to_load(step)

    def weights_to_load(self) -> list[LocalShard]:
        """Parameters on this rank that initial weights fill: with modules, all of them are filled alike."""
        return self.shards_to_load(0) if self.outer is None else self.outer.weights_to_load()

    def counters(self) -> dict[str, Any]:
        """Position of the training beside the step, for a checkpoint's manifest; with islands, all ranks call it."""
        own = self.updater.counters()
        if self.outer is not None:
            everyone = self.world.all_gather_object_via_store(f"counters {self.step_count}", own, COUNTERS_TIMEOUT)
            own |= {"islands": everyone[:: self.plan.island_size], "outer": self.outer.counters()}
            own |= self.path_routing.counters()
        if self.expert_mover is not None:
            own |= self.expert_mover.counters()
        return {"samples_consumed": self.samples_consumed} | own

    def restore(self, step: int, counters: Mapping[str, Any]) -> None:
        """Take up the position of a checkpoint whose shards have been loaded."""
        self.step_count = step
        self.samples_consumed = counters["samples_consumed"]
        if self.outer is not None and "outer" in counters:
            counters = {**counters, **counters["islands"][self.world.at.island]}
            self.outer.restore(counters["outer"])
            self.path_routing.restore(counters)
            self._use_routing()
        elif self.outer is not None:
            self.outer.begin_from()
        if self.expert_mover is not None:
            self.expert_mover.restore(counters)
        self.updater.restore(step, counters)

    def _reshard_paths(self) -> None:
        """Share the samples out among the paths anew, by the paths' losses."""
        assert self.outer is not None

        def make_executor(program: Program) -> Executor:
            return self.make_executor(program, has_heartbeat=False)

        scores = PathScores(self.config, self.plan, self.world, self.stages, make_executor)
        with self.outer.shared_parameters():
            self.path_routing.reshard(scores.losses)
        self._use_routing()

    def _use_routing(self) -> None:
        """Go on with the samples that the router sends to this rank's path."""
        assert self.outer is not None
        self.outer.use_shard_sizes(self.path_routing.sizes)
        self.batch_loader.use_dataset(self.path_routing.stream)

    def rewind(self, steps: int) -> None:
        """Count back over the last steps, which were skipped, so that the state is still that before them."""
        self.step_count -= steps
        self.samples_consumed -= steps * self.config.train.global_batch_size
