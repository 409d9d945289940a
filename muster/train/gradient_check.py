"""Comparison of gradients that data-parallel ranks compute of one and the same micro-batch, which names devices that
compute wrongly without a word (silent data corruption).

Between two steps each rank runs a forward and a backward of its stages on a micro-batch of random tokens, or hidden
states, that is the same on all of them, and drops the gradients before anything is summed. Their checksums have to be
equal to the bit on all ranks with the same layers: these hold the same parameters and run the same kernels.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from muster.checkpoint.save import host_bytes
from muster.layout.mesh import coordinates_of
from muster.model.dropout import sample_keys
from muster.model.init import keyed_generator
from muster.parallel.fsdp import drop_unreduced_gradients, no_gradient_sync, unreduced_gradients
from muster.parallel.stage import DecoderStage
from muster.parallel.stage_inputs import StageInputs
from muster.simulate.stragglers import Straggler, StragglerDetector
from muster.spec.checksum import crc32
from muster.spec.plan import Plan
from muster.train.straggler_monitor import StragglerCheck
from muster.train.trainer import Trainer


class GradientCheck:
    """This rank's part in the comparisons of its run; all ranks call it alike."""

    def __init__(self, trainer: Trainer, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.detector = StragglerDetector()
        self._groups = ranks_with_the_same_layers(trainer.plan)

    def after_step(self, step: int) -> StragglerCheck | None:
        """Compare the gradients of all ranks every few steps; None where that isn't due."""
        if step % self.every:
            return None
        seed = self.trainer.config.seed
        own = [gradient_checksum(stage, seed, step) for _, stage in sorted(self.trainer.stages.items())]
        checksums = self.trainer.world.all_gather_object(own)
        new, over = self.detector.update(find_wrong_gradients(checksums, self._groups))
        told = [f"step {step}: {one}" for one in new]
        told += [f"step {step}: no difference any more: {one.subject}" for one in over]
        found = [{"kind": one.kind, "ranks": one.ranks, "text": str(one)} for one in self.detector.confirmed.values()]
        row = {"step": step, "expected_s": [], "ranks": [], "stragglers": found, "gradient_crc32": checksums}
        return StragglerCheck(row, told, new)


def gradient_checksum(stage: DecoderStage, seed: int, step: int) -> int:
    """Return the crc32 of the gradients of a micro-batch that (seed, step, stage) give, which leaves no trace."""
    device = stage.world.device
    generator = keyed_generator(seed, f"gradient check/{step}/{stage.index}")
    tokens_BS = torch.randint(stage.spec.vocab_size, stage.token_shape, generator=generator).to(device)
    keys_B = sample_keys(seed, range(len(tokens_BS)), device)
    inputs = StageInputs((tokens_BS,), (tokens_BS,), tokens_BS.numel(), dropout_keys_M=(keys_B,))

    def fill(x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD.copy_(torch.randn(x_BSD.shape, generator=generator))

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    before, stage.inputs = stage.inputs, inputs
    try:
        stage.unshard()
        with no_gradient_sync(stage.module, stage.zero):
            stage.forward(0, None if stage.reads_tokens else fill(stage.receive_buffer(0)))
            stage.run_backward(0, None if stage.computes_loss else fill(stage.receive_buffer(0)))
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    checksum = 0
    for gradient in unreduced_gradients(stage.module):
        checksum = crc32(host_bytes(gradient), checksum)
    drop_unreduced_gradients(stage.module)
    stage.zero_grad()
    stage.reshard()
    stage.pop_losses()
    stage.pop_router_load()
    stage.inputs = before
    return checksum


def ranks_with_the_same_layers(plan: Plan) -> list[tuple[int, ...]]:
    """Return the groups of ranks that compute the same parts of the same layers, for other samples."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.world_size):
        at = coordinates_of(plan, rank)
        groups.setdefault((at.pp, at.cp, at.tp), []).append(rank)
    return list(map(tuple, groups.values()))


def find_wrong_gradients(checksums: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> list[Straggler]:
    """Return each rank whose checksums aren't those of more than half of its group; where there are no such, as among
    two, the whole group."""
    found = []
    for group in groups:
        counts = Counter(tuple(checksums[rank]) for rank in group)
        usual, count = counts.most_common(1)[0]
        if len(counts) == 1:
            continue
        if 2 * count <= len(group):
            found.append(Straggler("gradient", tuple(group), 1.0))
            continue
        wrong = [rank for rank in group if tuple(checksums[rank]) != usual]
        found += [Straggler("gradient", (rank,), count / len(group)) for rank in wrong]
    return found
