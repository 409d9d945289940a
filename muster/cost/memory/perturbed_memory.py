"""Memory of a stage whose steps have no backward (`muster.parallel.perturbed_passes`), in native storage.

Nothing is saved, there are no gradients and no optimizer state. A pass holds the hidden states of both points; of one
layer at a time a perturbed copy of its parameters and the random numbers that it follows from; and what the layer
computes at one point.
"""

from muster.cost.activations import mlp_inner_bytes
from muster.cost.memory.kernel_workspace import KernelWorkspace
from muster.cost.memory.native_backward import BackwardPeaks
from muster.cost.memory.native_storage import NativeStorage
from muster.cost.memory.param_shards import ParamShard
from muster.cost.memory.stage_memory import PeakCandidate
from muster.cost.memory.terms import MemoryTerms
from muster.cost.perturbation import WIDE_BYTES

NUMBER_BYTES = 2
"""Bytes of a random number that waits for the other point."""
DRAWING_BYTES = 32
"""Bytes of the numbers that one element is drawn with: four of 64 bits."""


class PerturbedPeaks(BackwardPeaks):
    """Moments of a stage's passes at perturbed parameters; all quantities in bytes."""

    def __init__(self, stage: NativeStorage, kernels: KernelWorkspace, points: int) -> None:
        super().__init__(stage, kernels)
        self.hidden_bytes = points * self.sizes.hidden_bytes

    def forward(self) -> list[PeakCandidate]:
        """Return the moments of F: a layer's parameters are perturbed, or it computes; and the loss."""
        own, shards = self.sizes.local_model, self.param_shards.layers
        held = max(shards, key=lambda one: one.unsharded_numel)
        last = own.intermediate_size * own.hidden_size  # but for a bias the last parameter
        gathered, perturbed = self._prefetched_bucket_bytes(), self._perturbed_bytes(_trained(held))
        moments = []
        for name, work in (
            ("perturbing a layer", self._drawing_bytes(min(last, _trained(held)))),
            ("layer", max(map(self._computing_bytes, self.layers))),
        ):
            within = MemoryTerms(gathered_parameters=gathered, workspace=self.hidden_bytes + perturbed + work)
            moments.append(PeakCandidate(name, within))
        return moments + (self._head_moments() if self.stage.has_head else [])

    def _head_moments(self) -> list[PeakCandidate]:
        """Return the moments of the head, whose copy is dropped before the loss."""
        numel, vocab = self._head_bytes // self.compute_size, self.param_shards.vocab
        numel *= vocab.frozen_unsharded_numel < vocab.unsharded_numel
        logits = self.sizes.tokens * self.sizes.local_model.vocab_size * self.compute_size
        held = MemoryTerms(workspace=self.hidden_bytes + NUMBER_BYTES * numel)
        copy = MemoryTerms(workspace=self.compute_size * numel)
        return [
            PeakCandidate("perturbing the head", held + copy + MemoryTerms(workspace=self._drawing_bytes(numel))),
            PeakCandidate("head", held + copy + MemoryTerms(logits=logits)),
            PeakCandidate("loss", held + self._loss_workspace()),
        ]

    def gather(self) -> PeakCandidate:
        """Return the moment under z3, before a forward, when embedding and head are copied out of the gather buffer."""
        return PeakCandidate("gathering embedding and head", MemoryTerms(gathered_parameters=self._root_bytes()))

    def unshard(self) -> PeakCandidate:
        """Return the moment when all groups' gathers are under way, and the first one is copied out."""
        buffers = self._largest_unit_numel() * self.compute_size * (1 + self.kernel_workspace.stages_collectives)
        return PeakCandidate("gathering", MemoryTerms(gathered_parameters=buffers))

    def _perturbed_bytes(self, numel: int) -> int:
        """Return the bytes of a perturbed copy of so many elements and of its random numbers."""
        return numel * (self.compute_size + NUMBER_BYTES)

    def _drawing_bytes(self, last: int) -> int:
        """Return the bytes in which the last parameter, of so many elements, is drawn and perturbed, beside its
        copy."""
        drawn = DRAWING_BYTES * min(self.kernel_workspace.dropout_chunk_numbers, last) - last * self.compute_size
        wide = last * WIDE_BYTES * (self.compute_size < WIDE_BYTES)
        return max(0, drawn, wide)

    def _computing_bytes(self, layer: int) -> int:
        """Return the most temporary bytes of a layer at one point: in its MLP the sum of residual and attention, the
        inner tensors and the output; in its attention queries, keys and values, before and after they are rotated."""
        sizes, own = self.sizes, self.sizes.local_model
        product = mlp_inner_bytes(sizes, layer)
        moved = sizes.hidden_bytes if sizes.mesh.tp > 1 else 0
        mlp = sizes.hidden_bytes + (2 + own.gated) * product + sizes.full_hidden_bytes + moved
        heads = (2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim * sizes.tokens * self.compute_size
        return max(mlp, 2 * heads + self._attention_workspace(layer, backward=False))


def _trained(held: ParamShard) -> int:
    return held.unsharded_numel - held.frozen_unsharded_numel
