"""Pipeline stages at run time: the module, its parallelism, and the tensors that passes keep for later passes."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from muster.config.freezing import is_frozen, is_frozen_up_to
from muster.config.optim_config import OptimConfig
from muster.config.optimizer_state import is_zeroth_order
from muster.cost.perturbation import POINTS
from muster.layout.expert_placement import expert_order
from muster.layout.sequence_slices import num_offloaded_layers, sequence_slices
from muster.layout.tensor_layout import (
    chunk_bounds,
    computed_layers,
    has_vocab_shard,
    stage_layouts,
    stage_shards,
    tp_partial_grad_copies,
)
from muster.model.adapters import HdPissaLinear
from muster.model.decoder import Decoder
from muster.model.dtypes import DTYPES
from muster.model.experts import MoeMlp
from muster.model.float8 import apply_float8, has_float8
from muster.model.init import fill_initial_parts
from muster.model.kernels import soft_cap
from muster.model.loss import LossSums, loss_sums, plugin_loss_sums
from muster.model.perturbation import Part
from muster.model.recompute import apply_recompute
from muster.model.sliced_attention import SliceState, apply_slices
from muster.model.tiling import apply_tiles, compute_in_tiles, tile_rows
from muster.parallel import tensor_parallel
from muster.parallel.compile import compile_blocks, is_compiled
from muster.parallel.context_parallel import (
    apply_context_groups,
    apply_context_parallel,
    keep_group_positions,
    keep_positions,
)
from muster.parallel.disk_activations import LAYER_TYPES, activations_by_lane
from muster.parallel.expert_parallel import apply_expert_parallel
from muster.parallel.file_store import FileStore
from muster.parallel.fsdp import finish_backward, master_dtype, no_gradient_sync
from muster.parallel.master_weights import master_weights
from muster.parallel.offload import ActivationOffload
from muster.parallel.perturbed_passes import PerturbedPasses
from muster.parallel.projection_norms import apply_projection_norms
from muster.parallel.sharded_stage import ShardedStage
from muster.parallel.stage_inputs import StageInputs
from muster.parallel.tensor_parallel import apply_parallel_linears, apply_vocab_parallel_embedding
from muster.parallel.vocab_parallel import VocabShard, add_vocab_shard
from muster.parallel.weight_grad_store import WeightGradStore
from muster.parallel.weight_shards import shard_weights
from muster.parallel.world import World
from muster.schedule.action import Kind, Lane
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

NUM_LOSSES = 5
"""Losses that a stage sums: cross-entropy, z-loss, load-balancing loss of routers, their z-loss, weighted loss of
multi-token prediction."""


class DecoderStage(ShardedStage):
    """A contiguous run of the decoder's layers on this rank, sharded over its data-parallel ranks.

    It is built on the meta device and filled with the values that (seed, name, global index) give, so that every plan
    starts from the same bits. With `split_backward` a backward may be two passes, I and W. Parameters that `optim`
    freezes have no gradients.
    """

    offload_type = ActivationOffload
    layer_types = LAYER_TYPES

    def __init__(
        self,
        spec: ModelSpec,
        world: World,
        index: int,
        seq_len: int,
        seed: int,
        split_backward: bool = False,
        optim: OptimConfig | None = None,
        param_files: FileStore | None = None,
    ) -> None:
        plan = world.plan
        self.index, self.spec, self.world = index, spec, world
        self.is_first, self.is_last = plan.is_first(index), plan.is_last(index)
        self.reads_tokens = self.is_first and not plan.vocab_parallel
        self.computes_loss = self.is_last and not plan.vocab_parallel
        self.layers = plan.layers(index, spec.num_layers)
        strategy = plan.pass_strategy(self.layers.start)
        with torch.device("meta"):
            self.module = Decoder(spec, self.layers, self.is_first, self.is_last, has_vocab=not plan.vocab_parallel)
            if has_vocab_shard(plan, index):
                start, rows = chunk_bounds(spec.vocab_size, plan.pp, world.at.pp)
                add_vocab_shard(self.module, rows, spec.hidden_size, spec.tied_embeddings)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not is_frozen(optim, name))
        self._needs_input_gradient = not is_frozen_up_to(optim, spec, self.layers.start)
        """False where nothing before this stage is trained: the stage before is sent zeros, which it ignores."""
        self.module.caps_logits = False
        self.module.to(master_dtype(plan.precision))
        self.tp_axis = world.tensor_axis(strategy)
        self._routes_own_tokens = plan.routes_own_tokens(plan.mesh(index))
        self._vocab_start = 0
        if self.tp_axis is not None:
            self._vocab_start = shard_weights(self.module, spec, self.tp_axis, slices_experts=plan.mesh(index).etp > 1)
            apply_vocab_parallel_embedding(self.module, self.tp_axis, self._vocab_start, seq_len)
            apply_projection_norms(self.module, spec, self.tp_axis)
        self.context_axis = world.context_axis()
        if self.context_axis is not None:
            apply_context_parallel(self.module, self.context_axis, plan.context_ranks(plan.mesh(index)))
            apply_context_groups(self.module, world.context_blocks())
        self._slices = apply_slices(self.module) if plan.sequence_slices > 1 else None
        self._spread_experts(world)
        self._weight_grads = WeightGradStore()
        if self.tp_axis is not None or split_backward:
            apply_parallel_linears(self.module, self.tp_axis, self._weight_grads, self._routes_own_tokens)
        self._use_float8(plan)
        if is_compiled(plan, spec, world.device) and not is_zeroth_order(optim):
            compile_blocks(self.module, world.device)
        self._offload = self.offload_type(world.device)
        self.layer_activations = activations_by_lane(self.layer_types, world.device)
        self._save_less(plan)
        self.shard(strategy.zero, plan, index)
        self.parameters = self.allocate_parameters(plan, param_files)
        self.layouts = {layout.name: layout for layout in stage_layouts(spec, plan, index, world.at)}
        self._replicated = tp_partial_grad_copies(spec, self.layouts, plan.mesh(index), strategy.sp)
        self.param_offload.kept_gradients = frozenset(self._replicated)
        self.reset_parameters(seed)
        self._perturb(optim)
        self.micro_batch_shape = (plan.local_micro_batch_size(index), seq_len // plan.mesh(index).sequence_shards)
        """Shape of a micro-batch's tokens on this rank, (B, S); a micro-batch may be shorter."""
        self._sequence_shards = self.tp_axis.size if self.tp_axis and self.tp_axis.sequence_parallel else 1
        self.activation_dtype = DTYPES[plan.precision]
        self.inputs: StageInputs | None = None
        self._losses = torch.zeros(NUM_LOSSES, dtype=torch.float64, device=world.device)
        self.vocab: VocabShard | None = None
        if has_vocab_shard(plan, index):
            ends = plan.pp_rank(0), plan.pp_rank(plan.stages_per_replica - 1)
            finish = partial(finish_backward, self.module)
            self.vocab = VocabShard(self.module, world.pipeline_axis(), ends, start, self.receive_buffer, finish)
        self._saved: dict[int, tuple[Tensor | None, Tensor | GradientEdge | None]] = {}
        """Input of each micro-batch and the start of its backward: the loss, or the output's edge in the autograd
        graph, which doesn't keep the output alive; None where all that made it is frozen."""

    def _use_float8(self, plan: Plan) -> None:
        if plan.precision == "fp8" and has_float8(self.world.device, plan.fp8_recipe):
            for block in self.module.blocks():
                apply_float8(block, plan.fp8_recipe)

    def _spread_experts(self, world: World) -> None:
        plan, order_of = world.plan, partial(expert_order, self.spec, world.plan)
        apply_expert_parallel(self.module, world.expert_axis(), plan.expert_dispatch(plan.mesh(self.index)), order_of)

    def _save_less(self, plan: Plan) -> None:
        """Let layers save, recompute and offload what the plan says."""
        computed = computed_layers(self.spec, plan, self.index)
        for layer, block in zip(computed, self.module.blocks(), strict=True):
            apply_recompute(block, plan.strategy(layer).recompute)
            if plan.sequence_tiles > 1:
                apply_tiles(block, plan.sequence_tiles)
            tier = plan.strategy(layer).offload
            if tier == "activations" and not plan.offloads_by_layer:
                self._offload.track_layer(block)
            elif tier != "none":
                self.layer_activations["host_copy" if tier == "activations" else "disk"].track_layer(block)
        self.layer_activations["disk"].late_layers = len(plan.late_written_layers(self.index, self.spec.num_layers))

    def reset_parameters(self, seed: int) -> None:
        """Set every parameter to its initial value."""
        for parameters in self.param_offload.refill(self.parameters):
            fill_initial_parts(self.spec, {name: self.layouts[name] for name in parameters}, parameters, seed)

    def _perturb(self, optim: OptimConfig | None) -> None:
        """Let passes compute at perturbed parameters, where a step has no backward."""
        self.perturbed: PerturbedPasses | None = None
        self._loss_difference = torch.zeros((), dtype=torch.float64, device=self.world.device)
        if not is_zeroth_order(optim):
            return
        shards = stage_shards(self.spec, self.world.plan, self.index, self.world.at)
        parts = {name: Part(name, shape, box) for name, shape, box, *_ in shards if not is_frozen(optim, name)}
        self.perturbed = PerturbedPasses(self.module, parts, optim.zo_eps)

    # ------------------------------------------------------------------------------------------------------------------
    # Passes

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Run the forward: return hidden states (B, S, D), or on the last stage the micro-batch's term of the step's
        loss (a scalar). Under vocabulary parallelism the last stage returns hidden states, too."""
        if self._replays and torch.is_grad_enabled():
            return self.pass_graphs.forward(micro_batch, x)  # type: ignore[union-attr]
        return self.run_forward(micro_batch, x)

    @property
    def _replays(self) -> bool:
        return self.pass_graphs is not None and self.pass_graphs.is_captured

    def run_forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Run `forward` operator by operator."""
        assert self.inputs is not None
        if self.reads_tokens:
            x = self.inputs.tokens_M[micro_batch]
        elif torch.is_grad_enabled() and self._needs_input_gradient:
            assert x is not None
            x.requires_grad_(True)
        if self.tp_axis is not None:
            self.module.position_state.seq_len = self._seq_len(micro_batch)
        if self._slices is not None:
            self._enter_slice(self._slices, micro_batch)
        self._select_part(micro_batch)
        documents = None if self.inputs.documents_M is None else self.inputs.documents_M[micro_batch]
        if documents is not None and documents.num_shards is not None:
            keep_group_positions(self.module, documents, self._seq_len(micro_batch))
        elif self.context_axis is not None:
            keep_positions(self.module, self.context_axis, self._seq_len(micro_batch), self.world.device)
        self.module.position_state.documents = documents
        keys_M = self.inputs.dropout_keys_M if torch.is_grad_enabled() else None
        self.module.dropout_state.keys_B = None if keys_M is None else keys_M[micro_batch]
        further = self.inputs.further_M[micro_batch] if self._predicts_further else ()
        if torch.is_grad_enabled():
            for one in self.layer_activations.values():
                one.begin_forward(micro_batch)
        reduces = self.computes_loss and (self.world.plan.sequence_tiles > 1 or len(further) > 0)
        if reduces:
            labels_D = (self.inputs.labels_M[micro_batch], *(one.labels_BS for one in further))
            self.module.reduce_hidden = partial(self._losses_of_hidden, labels_D, self.inputs)
            self.module.further_tokens = [one._replace(counted_BS=self._routed_part(one.counted_BS)) for one in further]
        # Tensor-parallel ranks that route the same tokens each make a part of the gradients of routers, and so of those
        # of their losses.
        tp = 1 if self.tp_axis is None or self._routes_own_tokens else self.tp_axis.size
        self.module.router_state.loss_weight = self.inputs.loss_scale / self.inputs.num_valid_of(micro_batch) / tp
        counted_M = self.inputs.counted_M
        self.module.router_state.counted_BS = None if counted_M is None else self._routed_part(counted_M[micro_batch])
        if self._is_perturbed:
            return self._forward_at_points(micro_batch, x)
        y = self.module(x)
        if self.computes_loss:
            further_loss = None
            if reduces:
                self.module.reduce_hidden, self.module.further_tokens = None, ()
                sums_DL = y.view(-1, 3)
                losses = LossSums(sums_DL[0, 0], *sums_DL[0, 1:].detach())
                if further:
                    further_loss = sums_DL[1:, 0].mean() * self.spec.mtp_loss_scaling_factor
            else:
                loss_of = self._loss_function(self.inputs)
                losses = loss_of(y, self.inputs.labels_M[micro_batch])
            if self.world.at.tp == 0:  # the other tensor-parallel ranks have the same losses
                self._losses[:2] += torch.stack((losses.cross_entropy, losses.z_loss))
                self._losses[4] += 0 if further_loss is None else further_loss.detach()
            total = losses.total if further_loss is None else losses.total + further_loss
            y = total * (self.inputs.loss_scale / self.inputs.num_valid_of(micro_batch))
        if torch.is_grad_enabled():
            start = (y if self.computes_loss else get_gradient_edge(y)) if y.requires_grad else None
            self._saved[micro_batch] = (None if self.reads_tokens else x, start)
            self._offload.end_forward(micro_batch, y)
        elif self._slices is not None and self._slices.positions.stop == self._slices.length:
            self._slices.drop()
        return y

    @property
    def _is_perturbed(self) -> bool:
        return self.perturbed is not None and self.perturbed.is_active

    def _forward_at_points(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """Run `forward` at both points of a zeroth-order step; the last stage adds up its losses."""
        inputs, points = self.inputs, self.perturbed
        assert inputs is not None
        assert points is not None

        def add_losses(x_BSD: Tensor, _: int) -> Tensor:
            found, difference = points.losses(inputs.labels_M[micro_batch], self._loss_function(inputs), x_BSD)
            if self.world.at.tp == 0:  # the other tensor-parallel ranks have the same losses
                self._losses[:2] += found
                self._loss_difference += difference
            return difference

        self.module.reduce_hidden = add_losses if self.computes_loss else None
        y = self.module(x)
        self.module.reduce_hidden = None
        return y

    def pop_loss_difference(self) -> Tensor:
        """Return the sum of this rank's losses at the first point of a zeroth-order step, less that at the second,
        since the last call: a float64 scalar."""
        difference = self._loss_difference.clone()
        self._loss_difference.zero_()
        return difference

    @cached_property
    def _parted_adapters(self) -> list[HdPissaLinear]:
        return [part for part in self.module.modules() if isinstance(part, HdPissaLinear)]

    def _select_part(self, unit: int) -> None:
        """Let adapters of which each part of the batch has its own collect those of a pass."""
        if self.inputs is None or self.inputs.parts_M is None:
            return
        part = self.inputs.parts_M[unit // self.world.plan.sequence_slices]
        for module in self._parted_adapters:
            module.part = part

    def _enter_slice(self, state: SliceState, unit: int) -> None:
        """Tell the layers which slice the next pass is of."""
        state.micro_batch, part = divmod(unit, self.world.plan.sequence_slices)
        slices = self.default_slices
        self._offload.max_layers = self._offloaded_layers[part]
        if self.inputs is not None and self.inputs.tokens_M:
            first = unit - part
            lengths = [tokens.shape[1] for tokens in self.inputs.tokens_M[first : first + len(slices)]]
            ends = list(accumulate(lengths, initial=0))
            slices = tuple(range(*ends_of_slice) for ends_of_slice in pairwise(ends))
        state.positions, state.length = slices[part], slices[-1].stop
        positions = self.module.position_state
        positions.offset, positions.table_length = state.positions.start, state.length

    def _routed_part(self, x_BS: Tensor) -> Tensor:
        """Return the positions that this rank routes, of a tensor for all that its tensor-parallel ranks have."""
        if self.tp_axis is None or not self._routes_own_tokens:
            return x_BS
        return x_BS.unflatten(1, (self.tp_axis.size, -1))[:, self.tp_axis.index]

    @property
    def _predicts_further(self) -> bool:
        """True if the next forward trains layers for multi-token prediction."""
        return self.computes_loss and self.spec.mtp_layers > 0 and torch.is_grad_enabled()

    def _losses_of_hidden(self, labels_D: Sequence[Tensor], inputs: StageInputs, x_BSD: Tensor, depth: int) -> Tensor:
        """Return the sums of the losses (3) of the hidden states that the head reads at one depth; `labels_D`: the
        labels (B, S) of all."""
        if self.world.plan.sequence_tiles > 1:
            return self._tiled_losses(labels_D[depth], inputs, x_BSD)
        return torch.stack(self._loss_function(inputs)(self.module.logits(x_BSD), labels_D[depth]))

    def _tiled_losses(self, labels_BS: Tensor, inputs: StageInputs, x_BSD: Tensor) -> Tensor:
        """Return the sums of the losses (3) of hidden states after the last norm, from logits of a tile at a time."""
        tiles = self.world.plan.sequence_tiles
        # Under sequence parallelism a tile is gathered from all ranks: it has the labels of their positions.
        shards = self._sequence_shards
        labels_RN = labels_BS.unflatten(1, (shards, -1)).transpose(0, 1).flatten(1)
        rows = list(tile_rows(labels_RN.shape[1], tiles))
        loss_of = self._loss_function(inputs)

        def losses(x_nD: Tensor, index: int) -> Tensor:
            labels_1n = labels_RN[:, rows[index]].reshape(1, -1)
            found = loss_of(self.module.logits(x_nD.unsqueeze(0)), labels_1n)
            return torch.stack((found.total, found.cross_entropy, found.z_loss)).unsqueeze(0)

        return compute_in_tiles(losses, x_BSD, tiles, [self.module.head_weight]).sum(0)

    def _loss_function(self, inputs: StageInputs) -> Callable[[Tensor, Tensor], LossSums]:
        """Return the function of logits (B, S, V) and labels (B, S) that gives the losses; a plugin's is for training
        alone."""
        softcap, z_loss = self.spec.logit_softcap, inputs.z_loss_coefficient
        if inputs.plugin_loss is not None and torch.is_grad_enabled():
            plugin = inputs.plugin_loss
            return lambda logits_BSV, labels_BS: plugin_loss_sums(
                plugin, logits_BSV if softcap is None else soft_cap(logits_BSV, softcap), labels_BS
            )
        if self.tp_axis is None:
            return partial(loss_sums, z_loss_coefficient=z_loss, softcap=softcap)
        of_axis = partial(tensor_parallel.vocab_parallel_loss, self.tp_axis, self._vocab_start)
        return partial(of_axis, z_loss_coefficient=z_loss, softcap=softcap)

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Add to the parameters' gradients and return that of the input (B, S, D); None on the first stage."""
        self.last_backward.count()
        if self._replays:
            return self.pass_graphs.backward(micro_batch, gradient)  # type: ignore[union-attr]
        found = self.run_backward(micro_batch, gradient)
        if self.last_backward.is_under_way and not self.param_offload.groups:
            self.backward_updates.note_backward_over()
        return found

    def run_backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Run `backward` operator by operator."""
        x, start = self._saved.pop(micro_batch)
        self._offload.discard(micro_batch)
        self._select_part(micro_batch)
        for one in self.layer_activations.values():
            one.begin_backward(micro_batch)
        if self._slices is not None:
            self._enter_slice(self._slices, micro_batch)
        if start is not None:
            torch.autograd.backward(start, gradient)
        for one in self.layer_activations.values():
            one.end_backward(micro_batch)
        if self._slices is not None and self._slices.positions.start == 0:
            self._slices.drop()
        if start is None:
            return None if x is None else torch.zeros_like(x)
        if x is not None and x.grad is None and not self._needs_input_gradient:
            return torch.zeros_like(x)
        return None if x is None else x.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Run `backward` but for the gradients of matrices, which are left to `backward_weight`."""
        with self._weight_grads.deferring(micro_batch), no_gradient_sync(self.module, self.zero):
            return self.run_backward(micro_batch, gradient)

    def backward_weight(self, micro_batch: int) -> None:
        """Add the gradients that `backward_input` deferred."""
        self.last_backward.count()
        masters = master_weights(self.module)
        if masters is None:
            self._weight_grads.flush(micro_batch)
        else:
            self._weight_grads.flush(micro_batch, masters.take_gradient)
        finish_backward(self.module)

    def offload(self, micro_batch: int) -> Callable[[], None]:
        return self._offload.offload(micro_batch)

    def reload(self, micro_batch: int) -> Callable[[], None]:
        return self._offload.reload(micro_batch)

    def offloadable_bytes(self, micro_batch: int) -> int:
        """Return the bytes that `offload` would move."""
        return self._offload.available_bytes(micro_batch)

    def copy_layers(self, lane: Lane, kind: Kind, micro_batch: int) -> Callable[[], None]:
        return self.layer_activations[lane].start_copy(kind, micro_batch)

    def load_params(self, backward: bool) -> Callable[[], None]:
        """Start to load the parameters that a pass gathers first, from host memory or disk; the pass loads the others
        and waits for each. The returned function waits until its gradients have left the device."""
        self.param_offload.begin_pass(backward)
        return self.param_offload.finish_gradients

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to and from host memory so far."""
        links = self._offload.link, self.layer_activations["host_copy"].link, self.param_offload.link
        return sum(link.copied_bytes for link in links)

    @cached_property
    def default_slices(self) -> tuple[range, ...]:
        """Slices of sequences of full length."""
        return sequence_slices(self.spec, self.world.plan, self.micro_batch_shape[1])

    @cached_property
    def _offloaded_layers(self) -> list[int]:
        """Layers that offload what they save of each slice."""
        lengths = [*map(len, self.default_slices), 0]
        return [num_offloaded_layers(self._offload.num_layers, *pair) for pair in pairwise(lengths)]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values that are kept for later slices."""
        return 0 if self._slices is None else self._slices.num_bytes

    def receive_buffer(self, micro_batch: int) -> Tensor:
        length = self._seq_len(micro_batch) // self._sequence_shards
        rows = self.micro_batch_shape[0] * (POINTS if self._is_perturbed else 1)  # those of both points
        shape = (rows, length, self.spec.boundary_size(self.world.plan.mesh(self.index).tp))
        return torch.empty(shape, dtype=self.activation_dtype, device=self.world.device)

    @property
    def token_shape(self) -> tuple[int, int]:
        """Shape of the tokens of a micro-batch, (B, S): a rank with one point of a zeroth-order step has more of them
        than `micro_batch_shape` says."""
        rows, length = self.micro_batch_shape
        return (rows * POINTS // self.perturbed.num_points if self.perturbed and self._is_perturbed else rows), length

    def _seq_len(self, micro_batch: int) -> int:
        """Return the positions of a micro-batch's sequences, of which tensor-parallel ranks see all."""
        tokens_M = self.inputs.tokens_M if self.inputs is not None else ()
        if tokens_M:
            return tokens_M[micro_batch].shape[1]
        if self._slices is not None:
            return len(self.default_slices[micro_batch % len(self.default_slices)])
        return self.micro_batch_shape[1]

    def pop_router_load(self) -> Tensor | None:
        """Return the choices of each expert since the last call and the number of dropped ones, summed over this rank's
        tokens: float64 [layers with experts of the whole model, E + 1]; None in a model without experts."""
        if self.spec.moe is None:
            return None
        layers = self.spec.expert_layers
        total = torch.zeros(len(layers), self.spec.moe.num_experts + 1, dtype=torch.float64, device=self.world.device)
        numbers = (*self.layers, *self.spec.last_layers(self.is_last))
        for layer, block in zip(numbers, self.module.blocks(), strict=True):
            if isinstance(block.mlp, MoeMlp) and (load := block.mlp.router.pop_load()) is not None:
                total[layers.index(layer)] += load
        return total if self.world.at.tp == 0 or self._routes_own_tokens else torch.zeros_like(total)

    def pop_losses(self) -> Tensor:
        """Return the losses summed over this rank's tokens since the last call: float64 [NUM_LOSSES]. The first two
        and the last are zeros unless the stage is the last, the others unless it has experts."""
        if self.vocab is not None:
            for losses in self.vocab.pop_losses():
                self._losses[:2] += losses
        router_losses = self.module.router_state.pop_sums()
        if router_losses is not None and (self.world.at.tp == 0 or self._routes_own_tokens):
            self._losses[2:4] += router_losses
        losses = self._losses.clone()
        self._losses.zero_()  # graphs add to this very tensor
        return losses
