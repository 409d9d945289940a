"""State from which a run goes on: what its ranks hold, a checkpoint in memory or on disk, or initial weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.checkpoint.checkpoint_dir import find_latest, list_checkpoints, step_of
from muster.checkpoint.in_memory.checkpointer import InMemoryCheckpointer
from muster.checkpoint.initial_weights import load_initial_weights
from muster.checkpoint.load import fill_shards
from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.manifest import Manifest, read_manifest
from muster.config.run_config import RunConfig
from muster.parallel.allocation_meter import host_memory
from muster.parallel.world import World
from muster.report.approximation import Approximation
from muster.spec.errors import ConfigError, MusterError
from muster.train.checkfree import KeptState, RecoveredState, begin_rebuilt_stages, recover_state, recovery_lines
from muster.train.checkpoint_manager import CHECKPOINTS_FOLDER
from muster.train.in_memory_checkpoint import LOAD_TIMEOUT, load_in_memory_checkpoint
from muster.train.new_state import find_new_state
from muster.train.resume_point import no_checkpoint_sentence
from muster.train.trainer import Trainer


class LoadedState(NamedTuple):
    """Companions of the state that a trainer has taken up."""

    counters: Mapping[str, Any] | None
    """Counters after the trainer's step; None at the beginning of a run."""
    approximation: Approximation
    """In what the state differs from that before a loss, under `train.recovery` checkfree."""
    origin: int
    """Generation in which all ranks last went back to a checkpoint, or to the beginning."""
    is_from_disk: bool = False
    """True where a checkpoint on disk has this state."""


class StateLoader:
    """Loader of the newest state that there is into one rank's trainer; all ranks go the same way."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        world: World,
        run_dir: Path,
        in_memory_checkpoint: InMemoryCheckpointer | None,
    ) -> None:
        self._config, self._trainer, self._world, self._run_dir = config, trainer, world, run_dir
        self._in_memory_checkpoint = in_memory_checkpoint
        self._is_main = world.rank == 0

    def load(self, kept: Sequence[KeptState]) -> LoadedState:
        """Load the state into the trainer; `kept`: what this rank holds of the generation before, its own stage first.

        Raises MusterError where no checkpoint can be read, or the initial weights can't.
        """
        if (recovered := self._recover_from_ranks(kept)) is not None:
            self._trainer.restore(recovered.step, recovered.counters)
            begin_rebuilt_stages(self._trainer.updater, recovered, self._config.train.checkfree_lr_scale)
            return LoadedState(recovered.counters, recovered.approximation, recovered.origin)
        counters = None
        in_memory = self._load_in_memory_checkpoint()
        if (manifest := in_memory or self._load_latest()) is not None:
            counters = manifest.counters
            self._trainer.restore(manifest.step, counters)
            new = find_new_state(manifest, self._config)
            self._trainer.updater.optimizer.begin_state(new.parameters, new.average)
            if self._is_main and (lines := new.lines(manifest.step)):
                print(*lines, sep="\n", flush=True)
        elif (place := self._config.train.init_from) is not None:
            load_initial_weights(Path(place), self._config.model, self._trainer.weights_to_load())
            self._trainer.restore(0, {"samples_consumed": 0})
        return LoadedState(
            counters, Approximation(went_back_to=self._trainer.step_count), self._world.generation, not in_memory
        )

    def _recover_from_ranks(self, kept: Sequence[KeptState]) -> RecoveredState | None:
        """Go on with what the ranks hold of the generation before, where they keep no copies; None where they can't."""
        train, generation = self._config.train, self._world.generation
        if train.recovery != "checkfree" or not generation:
            return None
        self._world.heartbeat.update("load")
        tensors = {shard.name: shard.tensor.detach() for shard in self._trainer.local_shards()}
        own = self._config.model.num_layers, train.checkfree_weights
        recovered = recover_state(self._world, kept, tensors, *own)
        if kept and recovered is not None:
            self._trainer.updater.layer_grad_norm = kept[0].grad_norm
        if self._is_main:
            print(*recovery_lines(recovered, train.checkfree_lr_scale), sep="\n", flush=True)
        return recovered

    @host_memory()
    def _load_in_memory_checkpoint(self) -> Manifest | None:
        """Load the in-memory checkpoint if it is the newest."""
        if self._in_memory_checkpoint is None:
            return None
        max_step = self._config.train.num_steps
        return load_in_memory_checkpoint(
            self._world, self._in_memory_checkpoint, self._run_dir, self._stored_shards, max_step
        )

    def _stored_shards(self, manifest: Manifest) -> list[LocalShard]:
        """Return this rank's shards that a checkpoint has to hold."""
        self._trainer.take_expert_placement(manifest)
        self._trainer.updater.prepare_to_load(manifest)
        return find_new_state(manifest, self._config).stored(self._trainer.shards_to_load(manifest.step))

    def _load_latest(self) -> Manifest | None:
        """Load the last checkpoint on disk; a damaged one is reported, and the one before it is taken."""
        root = self._run_dir / CHECKPOINTS_FOLDER
        damaged: list[Path] = []
        last_problem = ""
        while (latest := self._world.broadcast_object(find_latest(root, excluded=damaged))) is not None:
            manifest, problem = self._try_load(latest)
            everyone = self._world.all_gather_object_via_store(f"load {latest.name}", problem, LOAD_TIMEOUT)
            problem = next((text for text in everyone if text), None)
            if problem is None:
                if damaged and self._is_main:
                    step = step_of(latest)
                    lost = f"steps {step + 1} to {step_of(damaged[0])} are repeated"
                    print(f"resuming {self._run_dir} after step {step}: {lost}", flush=True)
                return manifest
            damaged.append(latest)
            last_problem = problem
            if self._is_main:
                print(f"skipped a damaged checkpoint: {problem}", flush=True)
        # The launcher counted on memory, which has lost what it held: beginning anew would overwrite what is left.
        if damaged or self._world.broadcast_object(list_checkpoints(root)):
            raise MusterError(no_checkpoint_sentence(self._run_dir, [last_problem or "all are damaged"]))
        return None

    @host_memory()
    def _try_load(self, folder: Path) -> tuple[Manifest | None, str | None]:
        """Load a checkpoint; returns its manifest, or the reason why this rank could not load it."""
        self._world.heartbeat.update("load")
        try:
            manifest = read_manifest(folder)
            fill_shards(folder, manifest, self._stored_shards(manifest))
            return manifest, None
        except ConfigError:
            raise
        except MusterError as error:
            return None, str(error)
