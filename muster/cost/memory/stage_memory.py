"""Memory of a stage and candidates for the peak within its passes: the input of the liveness walk."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster.cost.memory.terms import MemoryTerms


@dataclass(frozen=True, slots=True)
class PeakCandidate:
    """Moment within an instruction at which the rank may hold most."""

    name: str
    extra: MemoryTerms
    """Memory besides what the rank holds anyway.

    The activations of the instruction's micro-batch are counted as held in full; the part that isn't saved yet or is
    freed already is subtracted here. Example: at the last layer of a forward the logits don't exist yet, so
    `logits` is minus their saved bytes.
    """
    first_gradients: int = 0
    """Bytes of gradients that exist at this moment of the stage's first backward of a step."""


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """Memory of one stage on one rank, in bytes, with the lifetime of each part. Equal only to itself."""

    resident: MemoryTerms
    """Memory held throughout the step."""
    gathered_params: int
    """Unsharded parameters, held from the first forward to the next backward's end, or to the optimizer step."""
    keeps_gathered: bool
    """True if unsharded parameters stay until the optimizer step."""
    gradients: int
    """Gradients, held from the first backward on."""
    saved: MemoryTerms
    """Saved activations of each micro-batch, held from F to B or I."""
    offloaded: MemoryTerms
    """Part of `saved` that can be offloaded to host memory."""
    deferred: MemoryTerms
    """Inputs and output gradients of each micro-batch, held from I to W."""
    vocab_parallel: MemoryTerms
    """Saved tensors of each micro-batch, held from S to T under a vocabulary-parallel head."""
    peak_candidates: Mapping[str, tuple[PeakCandidate, ...]]
    """Kind of instruction → candidates; `gather F` and `gather B`: more candidates if the pass gathers parameters,
    `pending`: if it makes pending gradients, `first T`: at a step's first T, `last B`: in the last B before a
    reduction; `later last B` and `later REDUCE_GRAD`: behind a step's first reduction."""
    host_state: int = 0
    """Optimizer state in host memory."""
    disk_state: int = 0
    """Optimizer state on disk."""
    host_activations: int = 0
    """Part of `saved` that is in host memory between the passes, where it leaves layer by layer."""
    disk_activations: int = 0
    """Part of `saved` that is on disk between the passes."""
    host_buffers: int = 0
    """Buffers in host memory through which gradients and parameters of an update by the host pass."""
    delayed_buffers: int = 0
    """The same where updates are delayed: gradients and parameters wait in host memory from one step to the next."""
    backward_buffers: int = 0
    """The same where layers are updated within the last backward, whose own buffers are there, too."""
    activation_buffers: int = 0
    """Buffers in host memory through which activations pass on their way to the disk."""
    freed_by_reduction: int = 0
    """Part of `gradients` that REDUCE_GRAD frees, since each rank keeps its shard only."""
    pending_gradients: int = 0
    """Gradients that I computes, of embedding and norms: held until the next W, or B, reduces or accumulates them."""
    accumulates_gradients: bool = False
    """True if backwards accumulate gradients unreduced until the end of the step."""
    message_bytes: int = 0
    """Bytes of a buffer that is sent or received (`AllocationOrder.messages` has their number)."""
    head_gradients: int = 0
    """Gradients of a vocabulary shard's head, or tied embedding, held from the first T on."""
    embedding_gradients: int = 0
    """Gradients of its embedding, held from the first EMB_W on."""
    slices: tuple["StageMemory", ...] = ()
    """Memory of each slice where sequences are cut, for its passes; `saved` of the first has the keys and values that
    all keep. Empty: there are none."""
    kept_gradients: int = 0
    """Gradients of the kept keys and values, held from the backward of a sequence's last slice to that of the first."""
    makes_kept_gradients: bool = False
    """True for the last slice."""
    frees_kept_gradients: bool = False
    """True for the first slice."""

    @property
    def away(self) -> MemoryTerms:
        """Part of `saved` that isn't on the device between the passes, and returns within them."""
        return MemoryTerms(activations=self.host_activations + self.disk_activations)

    def of_slice(self, part: int) -> "StageMemory":
        """Return the memory of the passes of a slice."""
        return self.slices[part] if self.slices else self
