"""A stage at run time: its module, and what its passes keep for later passes."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muster.model.decoder import Decoder
from muster.model.init import initial_value
from muster.model.loss import LossSums, loss_sums, own_loss_sums
from muster.model.recompute import apply_recompute
from muster.parallel import tensor
from muster.parallel.axis import TensorAxis
from muster.parallel.compile import compile_blocks
from muster.parallel.deferred import WeightWork
from muster.parallel.feed import Feed
from muster.parallel.offload import Offload
from muster.parallel.shard import (
    DTYPES,
    finish_backward,
    local_parameters,
    materialise,
    parameter_dtype,
    reduce_gradients,
    reshard,
    shard_stage,
    take_gradients,
    unshard,
    without_reduction,
)
from muster.parallel.tensor import add_up_copies, apply_products, apply_words
from muster.parallel.words import Words, give_words
from muster.parallel.world import World
from muster.spec.layout import TensorLayout, has_words, partial_copies, shard_rows, stage_layouts, tensor_slice
from muster.spec.model import ModelSpec
from muster.spec.plan import Zero


class Stage(Protocol):
    """What the executor asks of a stage."""

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """The stage's output for one micro-batch; the first stage reads its own input and gets None."""
        ...

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the stage's input; the last stage starts from its own loss and gets None."""

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, with the weights' gradients left to `backward_weight`."""

    def backward_weight(self, micro_batch: int) -> None:
        """The rest of `backward_input`."""

    def offload(self, micro_batch: int) -> Callable[[], None]:
        """Begins to move what the micro-batch's forward keeps to the host; what is returned frees it here."""
        ...

    def reload(self, micro_batch: int) -> Callable[[], None]:
        """Begins to bring it back; what is returned waits until it is there."""
        ...

    def receive_buffer(self, micro_batch: int) -> Tensor:
        """Uninitialised memory for one micro-batch's activation or its gradient, as neighbours send them."""
        ...

    def unshard(self) -> None:
        """Gathers the parameters."""

    def reduce(self) -> None:
        """Reduces the gradients over the data-parallel ranks."""

    def synchronise(self) -> None:
        """Adds up the gradients of weights that tensor-parallel ranks have copies of."""


class DecoderStage:
    """A contiguous run of the decoder's layers on this rank, sharded over its data-parallel ranks.

    Built on the meta device and filled with the values that (seed, name, global index) give, so that every plan
    starts from the same bits. `split_backward`: a backward may be in two passes, I and W.
    """

    offload_type = Offload

    def __init__(
        self, spec: ModelSpec, world: World, index: int, seq_len: int, seed: int, split_backward: bool = False
    ) -> None:
        plan = world.plan
        self.index, self.spec, self.world = index, spec, world
        self.is_first, self.is_last = plan.is_first(index), plan.is_last(index)
        self.reads_tokens, self.makes_loss = (end and not plan.spread_vocab for end in (self.is_first, self.is_last))
        self.layers = plan.layers(index, spec.num_layers)
        strategy = plan.strategy(self.layers.start)
        with torch.device("meta"):
            self.module = Decoder(spec, self.layers, self.is_first, self.is_last, words=not plan.spread_vocab)
            if has_words(plan, index):
                start, rows = shard_rows(spec.vocab_size, plan.pp, world.at.pp)
                give_words(self.module, rows, spec.hidden_size, spec.tied_embeddings)
        self.module.to(parameter_dtype(plan.precision))
        self.axis = world.tensor_axis(strategy)
        self._first_word = 0
        if self.axis is not None:
            self._first_word = cut_weights(self.module, spec, self.axis)
            apply_words(self.module, self.axis, self._first_word, seq_len)
        self._work = WeightWork()
        self._zero: Zero = strategy.zero
        if self.axis is not None or split_backward:
            apply_products(self.module, self.axis, self._work)
        if plan.compile:
            compile_blocks(self.module, world.device)
        self._offload = self.offload_type(world.device)
        for layer, block in zip(self.layers, self.module.blocks(), strict=True):
            apply_recompute(block, plan.strategy(layer).recompute)
            if plan.strategy(layer).offload in ("activations", "all"):
                self._offload.watch(block)
        self.is_sharded = shard_stage(self.module, world, strategy.zero, plan)
        self._materialise()
        self.parameters: dict[str, Tensor] = local_parameters(self.module)
        self.layouts: dict[str, TensorLayout] = {
            layout.name: layout for layout in stage_layouts(spec, plan, index, world.at)
        }
        self._copies = partial_copies(spec, self.layouts, plan.mesh(index).tp, strategy.sp)
        self.reset_values(seed)
        self.micro_batch_shape = (plan.rows(index), seq_len)
        """Of tokens; a micro-batch may be shorter."""
        self._parts = self.axis.size if self.axis and self.axis.sequence else 1
        self.activation_dtype = DTYPES[plan.precision]
        self.feed: Feed | None = None
        self._losses = torch.zeros(2, dtype=torch.float64, device=world.device)
        self.words: Words | None = None
        if has_words(plan, index):
            ends = plan.pp_rank(0), plan.pp_rank(plan.depth - 1)
            finish = partial(finish_backward, self.module)
            self.words = Words(self.module, world.pipe_axis(), ends, start, self.receive_buffer, finish)
        self._saved: dict[int, tuple[Tensor | None, Tensor | GradientEdge]] = {}
        """By micro-batch, the input and where a backward begins: an output's place in the graph, not its memory."""

    def _materialise(self) -> None:
        materialise(self.module, self.world.device)

    def reset_values(self, seed: int) -> None:
        """Sets every parameter to its initial value."""
        for name, local in self.parameters.items():
            layout = self.layouts[name]
            if layout.boxes:
                full = initial_value(self.spec, name, layout.shape, seed)
                local.copy_(full[layout.boxes[0].slices])

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Hidden states (B, S, D), or on the last stage the micro-batch's share of the step's loss (a scalar), unless
        the vocabulary is spread."""
        assert self.feed is not None
        if self.reads_tokens:
            x = self.feed.tokens_M[micro_batch]
        elif torch.is_grad_enabled():
            assert x is not None
            x.requires_grad_(True)
        if self.axis is not None:
            self.module.where.seq_len = self._length(micro_batch)
        self.module.where.documents = None if self.feed.documents_M is None else self.feed.documents_M[micro_batch]
        y = self.module(x)
        if self.makes_loss:
            losses = self._losses_of(y, self.feed.labels_M[micro_batch], self.feed)
            if self.world.at.tp == 0:  # the others have the same
                self._losses += torch.stack((losses.cross_entropy, losses.z_loss))
            y = losses.total * (self.feed.loss_scale / self.feed.num_valid)
        if torch.is_grad_enabled():
            begin = y if self.makes_loss else get_gradient_edge(y)
            self._saved[micro_batch] = (None if self.reads_tokens else x, begin)
            self._offload.keep(micro_batch, y)
        return y

    def _losses_of(self, logits_BSV: Tensor, labels_BS: Tensor, feed: Feed) -> LossSums:
        if feed.loss is not None and torch.is_grad_enabled():
            return own_loss_sums(feed.loss, logits_BSV, labels_BS)
        if self.axis is None:
            return loss_sums(logits_BSV, labels_BS, feed.z_coefficient)
        return tensor.loss_sums(self.axis, self._first_word, logits_BSV, labels_BS, feed.z_coefficient)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Adds to the parameters' gradients; the gradient of the input (B, S, D), None on the first stage."""
        x, begin = self._saved.pop(micro_batch)
        self._offload.forget(micro_batch)
        torch.autograd.backward(begin, gradient)
        return None if x is None else x.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, but leaves the gradients of matrices to `backward_weight`."""
        with self._work.keeping(micro_batch), without_reduction(self.module, self._zero):
            return self.backward(micro_batch, gradient)

    def backward_weight(self, micro_batch: int) -> None:
        """Adds the gradients that `backward_input` left."""
        self._work.do(micro_batch)
        finish_backward(self.module)

    def offload(self, micro_batch: int) -> Callable[[], None]:
        return self._offload.send(micro_batch)

    def reload(self, micro_batch: int) -> Callable[[], None]:
        return self._offload.fetch(micro_batch)

    @property
    def moved_bytes(self) -> int:
        """Copied to and from the host's memory so far."""
        return self._offload.moved_bytes

    def receive_buffer(self, micro_batch: int) -> Tensor:
        rows, length = self.micro_batch_shape[0], self._length(micro_batch) // self._parts
        shape = (rows, length, self.spec.hidden_size)
        return torch.empty(shape, dtype=self.activation_dtype, device=self.world.device)

    def _length(self, micro_batch: int) -> int:
        """Positions of the whole sequences of a micro-batch."""
        tokens_M = self.feed.tokens_M if self.feed is not None else ()
        return tokens_M[micro_batch].shape[1] if tokens_M else self.micro_batch_shape[1]

    def unshard(self) -> None:
        unshard(self.module)

    def reshard(self) -> None:
        reshard(self.module)

    def reduce(self) -> None:
        reduce_gradients(self.module)

    # ------------------------------------------------------------------------------------------------------------------
    # Gradients

    def synchronise(self) -> None:
        """Adds up, over the tensor-parallel ranks, the gradients of parameters of which several hold a copy and each
        has seen a part of the data only."""
        if self.axis is not None:
            self.take_gradients()
            add_up_copies(self.axis, self.parameters, self._copies)

    def take_gradients(self) -> None:
        """Makes `.grad` of each local parameter this rank's part of the reduced gradient."""
        take_gradients(self.module, self.parameters)

    def drop_gradients(self) -> None:
        """Forgets the step's gradients."""
        self.module.zero_grad(set_to_none=True)
        for local in self.parameters.values():
            local.grad = None

    def take_losses(self) -> Tensor:
        """The cross-entropy and the z-loss summed since the last call, over this rank's tokens: float64 [2]; zeros
        where the stage is not the last."""
        if self.words is not None:
            for losses in self.words.take_losses():
                self._losses += losses
        losses, self._losses = self._losses, torch.zeros_like(self._losses)
        return losses


def cut_weights(module: Decoder, spec: ModelSpec, axis: TensorAxis) -> int:
    """Gives the parameters of a whole stage on the meta device this rank's shapes. Returns its first word."""
    first_word = 0
    for name, parameter in list(module.named_parameters()):
        box, *_ = tensor_slice(spec, name, tuple(parameter.shape), axis.size, axis.index)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(parameter.new_empty(box.size)))
        if name in ("embed.weight", "head.weight"):
            first_word = box.start[0]
    return first_word
