"""One rank of a plan under verification: trains a few steps and saves what is compared with the reference."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from muster.checkpoint.local_shard import LocalShard
from muster.checkpoint.save import save
from muster.config.load_config import load_plan, load_run_config
from muster.config.run_config import RunConfig
from muster.data.dataset import SampleStream
from muster.data.dp_slice import samples_of_micro_batch
from muster.launch.rank_process import exit_process, rank_main
from muster.layout.context_parallel import kept_positions
from muster.layout.sequence_slices import sequence_slices
from muster.layout.tensor_layout import tp_shard
from muster.parallel.stage import DecoderStage
from muster.parallel.world import World, open_world
from muster.schedule.action import Action
from muster.spec.plan import Plan
from muster.spec.tp_overlap_rules import has_domino
from muster.train.async_pipeline import AsyncPipeline
from muster.train.data import open_dataset
from muster.train.trainer import Trainer
from muster.train.verify.padded import PaddedDataset
from muster.train.verify.sketch import Sketches, hook_outputs
from muster.train.verify.staleness import segments
from muster.train.verify.trace import GRADIENTS_FOLDER, UPDATED_FOLDER, Trace


def verify_rank(folder: Path, store: dist.Store, rank: int, world_size: int) -> int:
    """Train the run in `folder` as one rank of `world_size`, and write its trace there. Returns 0."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    config, plan = load_run_config(None, folder / "config.yaml", []).config, load_plan(folder / "plan.yaml")
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    dataset = PaddedDataset(open_dataset(config, folder))
    with open_world(store, rank, world_size, plan) as world:
        trainer = TracingTrainer(config, plan, world, dataset)
        pipeline = AsyncPipeline(trainer) if plan.schedule_entry.is_asynchronous else None
        losses, grad_norms, sketches = [], [], []
        for size in segments(plan, config.train.num_steps):
            trainer.sketches = [Sketches(config.model, config.workload, world.device) for _ in range(size)]
            for result in [trainer.step()] if pipeline is None else pipeline.run(size):
                losses.append(result.loss)
                grad_norms.append(result.grad_norm)
            sketches += [world.all_reduce(one.values).cpu() for one in trainer.sketches]
            if len(losses) == 1:
                trainer.save_tensors(folder / GRADIENTS_FOLDER, trainer.first_gradients)
                trainer.updater.local_shards()  # completes updates that the next step would make
                trainer.save_tensors(folder / UPDATED_FOLDER, trainer.updater.parameters)
                trainer.first_gradients = {}
        if rank == 0:
            # No rank has their outputs as a whole or as a stage's: the loss and the gradients speak for them.
            unwatched = ("embed", "head") if plan.vocab_parallel else ()
            Trace(losses, grad_norms, torch.stack(sketches).numpy(), unwatched).write(folder)
    return 0


class TracingTrainer(Trainer):
    """Trainer that sketches its hidden states and keeps its first gradients."""

    def __init__(self, config: RunConfig, plan: Plan, world: World, dataset: SampleStream) -> None:
        super().__init__(config, plan, world, dataset)
        self.sketches: list[Sketches] = []
        """One for each step that comes next without a flush."""
        self.first_gradients: dict[str, Tensor] | None = None
        self._micro_batch: int | None = None
        self._leading: dict[str, Tensor] = {}
        """Outputs of the leading slice of a pass that have no other half yet, by part."""
        for stage in self.stages.values():
            hook_outputs(stage.module, partial(self._sketch_output, stage))
            stage.forward = partial(self._forward, stage.forward)  # type: ignore[method-assign]

    def _forward(self, forward: Callable[..., Tensor], micro_batch: int, x: Tensor | None) -> Tensor:
        self._micro_batch = micro_batch
        try:
            return forward(micro_batch, x)
        finally:
            self._micro_batch = None

    def _sketch_output(self, stage: DecoderStage, part: str, output: Tensor) -> None:
        if self._micro_batch is None or torch._C._current_graph_task_id() >= 0:
            return  # a backward computes this part of the forward again, beside another one's forward in a fused pair
        at, plan, spec = self.world.at, self.plan, self.config.model
        if has_domino(plan) and len(output) < plan.local_micro_batch_size(at.pp):  # the leading slice comes first
            leading = self._leading.pop(part, None)
            if leading is None:
                self._leading[part] = output.detach().clone()  # the residual is added to it in place
                return
            output = torch.cat((leading, output))
        tp, cp = plan.mesh(at.pp).tp, plan.mesh(at.pp).cp
        is_contiguous = plan.context_ranks(plan.mesh(at.pp)).is_contiguous
        micro_batch, index = divmod(self._micro_batch, plan.sequence_slices)
        step, micro_batch = divmod(micro_batch, self.batch_loader.num_fed_micro_batches)
        sketches = self.sketches[step]
        positions, width = sketches.whole_shape(part)
        runs: Sequence[range] = kept_positions(positions, cp, at.cp, is_contiguous)
        if plan.sequence_slices > 1:
            runs = sequence_slices(spec, plan, positions)[index : index + 1]
        cut_along_sequence, cut_along_width = output.shape[1] < sum(map(len, runs)), output.shape[2] < width
        cut_along_sequence &= not plan.dynamic_context_parallel
        if at.tp and not cut_along_sequence and not cut_along_width:
            return  # its neighbours have the same
        words, *_ = tp_shard(spec, "head.weight", (spec.vocab_size, spec.hidden_size), tp, at.tp)
        column = (words.start[0] if part == "head" else at.tp * output.shape[2]) if cut_along_width else 0
        first = at.tp * output.shape[1] if cut_along_sequence else 0
        held = range(first, first + output.shape[1])
        if (groups := self.batch_loader.fed_groups) is not None:
            for sample, start, run in groups.micro_batches[self._micro_batch].held_positions():
                parts = output[:, start : start + len(run)]
                sketches.add(part, parts, sample, position=run.start, column=column)
            return
        # An output has the rows of one rank, this one's, several times where they are those of several points of a
        # zeroth-order step, or those of a pair.
        shares = output.split(plan.local_micro_batch_size(at.pp))
        for share, reader in zip(shares, cycle(self.batch_loader.ranks_to_read()), strict=False):
            for rows, sample in samples_of_micro_batch(plan, reader, micro_batch, self.config.train.global_batch_size):
                start = 0
                for run in runs:
                    begin, end = max(held.start, start), min(held.stop, start + len(run))
                    if begin < end:
                        parts = share[rows, begin - first : end - first]
                        sketches.add(part, parts, sample, position=run.start + begin - start, column=column)
                    start += len(run)

    def _reduce_norm(self, action: Action) -> None:
        super()._reduce_norm(action)
        if self.first_gradients is None:  # now, since updates by the host clip before STEP
            on_disk = {name: sum_ for s in self.stages.values() for name, sum_ in s.param_offload.read_sums().items()}
            self.first_gradients = {
                name: torch.zeros_like(local) if local.grad is None else local.grad.clone()
                for name, local in self.updater.parameters.items()
                if name not in on_disk
            } | on_disk

    def save_tensors(self, folder: Path, tensors: dict[str, Tensor] | None) -> None:
        """Write this rank's part of each parameter or gradient.

        Every copy gets a name of its own: `0/embed.weight` and `1/embed.weight`.
        """
        pieces = [
            LocalShard(
                f"{layout.copy_index}/{name}", replace(layout, num_copies=1, copy_index=0, num_writers=1), tensors[name]
            )
            for name, layout in self.updater.layouts.items()
            if tensors and name in tensors
        ]
        info = {"plan": {}, "model": {}, "counters": {}}
        save(folder, 1, pieces, info, self.world.rank, self.world.size, self.world.all_gather_object)


if __name__ == "__main__":
    exit_process(rank_main(verify_rank))
