"""Peaks of a stage's backwards and reductions in native storage.

In a backward the candidates are, from the last layer to the first: the gated unit's backward, when recomputed tensors
and gradients of activations coexist; the layer's end, when its parameters' gradients are complete; and their reduction,
when they are copied into the buffer of the reduce-scatter. Only the layers of the last and the first bucket, and the
one before the last bucket, need be looked at: between them each further layer frees as much as the one before. I keeps
the operands of its weights' gradients, from which W computes them all before it reduces them, group by group.
"""

from dataclasses import replace

from muster.cost.activations import (
    attention_activation_bytes,
    dispatched_bytes,
    further_activation_bytes,
    mlp_inner_bytes,
    mlp_matrix_numels,
    saved_mlp_bytes,
)
from muster.cost.context_traffic import attention_workspace
from muster.cost.memory.band_pieces import band_workspace, has_bands
from muster.cost.memory.kernel_workspace import KernelWorkspace
from muster.cost.memory.linear_attention import recurrence_workspace
from muster.cost.memory.native_storage import NativeStorage
from muster.cost.memory.norm_backward import last_norm_workspace, mlp_norm_workspace
from muster.cost.memory.param_shards import NO_PARAMS, ParamShard
from muster.cost.memory.piecewise_attention import piece_workspace
from muster.cost.memory.stage_memory import PeakCandidate
from muster.cost.memory.terms import MemoryTerms
from muster.spec.model import layer_prefix


class BackwardPeaks:
    """Moments of one stage's backwards and reductions; all quantities in bytes."""

    def __init__(self, stage: NativeStorage, kernels: KernelWorkspace) -> None:
        self.stage, self.kernel_workspace, self.plan, self.sizes = stage, kernels, stage.plan, stage.sizes
        self.param_shards, self.trained = stage.param_shards, stage.param_shards.trained
        self.layers, self.compute_size, self.master_size = stage.layers, stage.compute_size, stage.master_size
        self._dense_bytes = stage.dense_bytes(kernels.dequantized_numbers)
        self.saved = stage.saved_per_micro_batch()
        self.root = self.trained.other if stage.plan.vocab_parallel else self.trained.root
        """Parameters outside layers whose gradients the stage's own backwards compute."""
        has_replicas = stage.plan.mesh(stage.index).dp_replicate > 1
        self.holds_replica_sums = stage.reduces_in_passes and has_replicas and not stage.plan.reduces_replicas_once
        """True if sums over replicas live until a backward ends; in a step's first backward they are the gradients, and
        those of a step's only reduction are, too."""

    @property
    def _is_tiled(self) -> bool:
        """True if MLP and loss process one tile after another."""
        return self.sizes.sequence_tiles > 1

    def _left(self, count: int) -> MemoryTerms:
        """Return the change by what has left of the first `count` layers' activations while later layers run."""
        return MemoryTerms(activations=-self.stage.left_bytes(max(0, count)))

    def _of_tile(self, num_bytes: int) -> int:
        """Return a tile's part of the bytes of a tensor of all tokens."""
        return -(-num_bytes * self.sizes.tile_tokens // self.sizes.tokens)

    def _loss_workspace(self, gradient: bool = True) -> MemoryTerms:
        """Return the bytes of the loss beside those that are saved: logits, their gradient, float32 copies.

        Without tiles the gradient is what is saved. The copies are of one chunk, or under tp two of all logits of a
        tile. `gradient`: False where a forward computes the loss of tiles alone.
        """
        sizes = self.sizes
        num_logits = sizes.tile_tokens * sizes.local_model.vocab_size
        made = num_logits * self.compute_size * (1 + (self._is_tiled and gradient))
        # A softmax reads the logits as they are, unless they are of another dtype or have to be capped.
        converted = self.compute_size != self.master_size or self.stage.spec.logit_softcap is not None
        if sizes.mesh.tp > 1:
            copies = (1 + converted) * self.master_size
            return MemoryTerms(logits=num_logits * (self.compute_size + copies) - self.saved.logits)
        rows = max(1, self.kernel_workspace.loss_chunk_logits // sizes.local_model.vocab_size)
        first, second = min(sizes.tile_tokens, rows), min(max(sizes.tile_tokens - rows, 0), rows)
        # The converted logits of a chunk, their softmax, and beside a later chunk the softmax of the one before.
        copies = max((1 + converted) * first, first + (1 + converted) * second) * sizes.local_model.vocab_size
        return MemoryTerms(logits=made, workspace=copies * self.master_size)

    def _bucket_bytes(self, count: int) -> int:
        """Return the bytes of `count` buckets of layers, gathered within a pass."""
        if not self.stage.gathers_in_passes:
            return 0
        largest = sorted((held.unsharded_numel for held in self.param_shards.blocks), reverse=True)
        experts = max((held.unsharded_numel for held in self.param_shards.experts), default=0)
        return (sum(largest[: count * self.plan.bucket_layers]) + experts) * self.compute_size

    def _prefetched_bucket_bytes(self) -> int:
        """Return the bytes of a layer's bucket and of those that are prefetched meanwhile; a single shard is not."""
        current = self._bucket_bytes(1)
        if self.stage.is_single_shard:
            return current + self._loaded_bytes
        with_prefetched = self._bucket_bytes(1 + self.plan.prefetch_buckets)
        staged = (with_prefetched - current) * self.kernel_workspace.stages_collectives
        return with_prefetched + staged + self._loaded_bytes

    @property
    def _loaded_bytes(self) -> int:
        """Bytes of the copy of the next layer's shard that has come from host memory; one from disk comes as it is
        gathered."""
        away = self.stage.offloaded_params
        return max((held.shard_numel for tier, held in away.layers if tier == "host"), default=0) * self.compute_size

    def _leaving_bytes(self, layer: int) -> int:
        """Bytes of the reduced gradients of a layer, of which this is the number on the stage, on their way to host
        memory; they have left the device when the next layer's are reduced."""
        away = self.stage.offloaded_params.layers[layer : layer + 1]
        return sum(held.shard_numel for tier, held in away if tier != "none") * self.master_size

    def _root_bytes(self) -> int:
        """Return the bytes of embedding and head, gathered."""
        return self.param_shards.root.unsharded_numel * self.compute_size if self.stage.gathers_in_passes else 0

    def _largest_unit_numel(self) -> int:
        """Return the elements of the largest group that is gathered at once."""
        units = self.param_shards.root, *self.param_shards.buckets(self.plan.bucket_layers)
        return max(held.unsharded_numel for held in units)

    @property
    def _head_bytes(self) -> int:
        """Bytes of the head's trained weights in the compute dtype; 0 on a stage without a head."""
        spec = self.stage.spec
        if not self.stage.has_head or self.stage.freezes("embed.weight" if spec.tied_embeddings else "head.weight"):
            return 0
        both = (self.stage.has_embedding or self.stage.mtp_layers > 0) and not spec.tied_embeddings
        return self.param_shards.vocab.unsharded_numel * self.compute_size // (1 + both)

    @property
    def _adds_head_at_once(self) -> bool:
        """True if the gradient of the head's weight is added where it is accumulated before those of the layers are
        computed. A tied weight's waits for that of the embedding."""
        tied = self.stage.has_embedding and self.stage.spec.tied_embeddings
        return self.stage.is_single_rank and not tied

    @property
    def _head_sum_bytes(self) -> int:
        """Bytes of the head's accumulated gradient, which layers' backwards come after in a step's first backward."""
        return self._head_bytes // self.compute_size * self.master_size if self._adds_head_at_once else 0

    @property
    def pending_gradients(self) -> int:
        """Bytes of gradients that I computes: of all parameters outside layers but the head, in the master dtype."""
        embeds = self.stage.mtp_layers > 0 and self.stage.spec.tied_embeddings
        apart = self._head_bytes // self.compute_size * (not embeds)
        return max(0, self.root.unsharded_numel - apart) * self.master_size

    def backward(self) -> list[PeakCandidate]:
        """Return the moments of B."""
        head = 0 if self._adds_head_at_once else self._head_bytes
        moments = [self._head_backward(self._head_bytes)] if self.stage.has_head else self._hidden_gradient()
        moments += self._tile_of_head() if self.stage.has_head and self._is_tiled else []
        if self.stage.has_head and not self._is_tiled and not self.stage.mtp_layers:
            normed = MemoryTerms(workspace=last_norm_workspace(self.stage, self._norm_workspace) + head)
            normed += self._after_heads(0) + MemoryTerms(gathered_parameters=self._bucket_bytes(1))
            moments.append(PeakCandidate("last norm", normed + self._left(len(self.layers)), self._head_sum_bytes))
        for index in self._indices_of_interest():
            # The head's gradient of further tokens waits for that of the model itself.
            is_further = index < self.stage.mtp_layers
            base = self._after_heads(index) + MemoryTerms(workspace=self._head_bytes if is_further else head)
            if not is_further and not self.stage.freezes("norm.weight"):  # these have freed what they saved
                base += MemoryTerms(activations=-self.stage.last_norm_bytes)
            summed = 0 if is_further else self._head_sum_bytes
            for moment in self._layer_backward(index, base, weights=True):
                moments.append(replace(moment, first_gradients=moment.first_gradients + summed))
        return [*moments, self._embedding_gradient(), self._root_reduction()]

    def _after_heads(self, index: int) -> MemoryTerms:
        """Return the change by the heads that come before the backward of the `index`-th layer from the end: logits,
        which each head frees, and the embedding's gradients of further tokens, which wait for the model's own."""
        further = self.stage.mtp_layers
        heads = 1 + further
        freed = self.saved.logits * min(index + 1, heads) // heads
        waits = self.stage.has_embedding and index > 0 and further > 0 and not self.stage.spec.tied_embeddings
        embedding = self.param_shards.vocab.unsharded_numel // 2 * waits
        return MemoryTerms(logits=-freed, workspace=embedding * self.compute_size)

    def backward_input(self) -> list[PeakCandidate]:
        """Return the moments of I."""
        deferred = self.stage.deferred()
        base = MemoryTerms(activations=-self.stage.last_norm_bytes, logits=deferred.logits)
        moments = [self._head_backward(0)] if self.stage.has_head else self._hidden_gradient()
        for index in self._indices_of_interest():
            done = sum(map(self.stage.deferred_layer_bytes, self.layers[len(self.layers) - index :]))
            before = base + self._after_heads(index) + MemoryTerms(activations=done)
            if index < self.stage.mtp_layers:  # whose heads' inputs wait for W with the rest
                before += MemoryTerms(activations=self.stage.last_norm_bytes)
            moments += self._layer_backward(index, before, weights=False)
        embedding = self.pending_gradients // self.master_size * self.compute_size * self.stage.has_embedding
        left = deferred + self.saved.scaled(-1) + MemoryTerms(workspace=self.sizes.hidden_bytes + embedding)
        return [*moments, PeakCandidate("inputs", left)]

    def pending(self, inputs: PeakCandidate) -> list[PeakCandidate]:
        """Return the moment in I when its gradients are converted to the master dtype, if none are pending.

        z3 has dropped the gathered parameters before. `inputs`: the last moment of I.
        """
        converted = MemoryTerms(
            gathered_parameters=-self._root_bytes(),
            workspace=self.pending_gradients * (self.compute_size != self.master_size),
        )
        return [PeakCandidate(inputs.name, inputs.extra + converted)]

    def _head_backward(self, gradient_bytes: int) -> PeakCandidate:
        """Return the moment when the head's gradients have been computed; `gradient_bytes`: those of its weight."""
        extra = MemoryTerms(
            gathered_parameters=self._bucket_bytes(1),
            workspace=gradient_bytes + (1 + self._gathered_hidden_states) * self.sizes.full_hidden_bytes,
        )
        return PeakCandidate("head", extra + self._left(len(self.layers)))

    def _tile_of_head(self) -> list[PeakCandidate]:
        """Return the moments of the last tile of head and loss: when its logits have a gradient, and when the head's
        gradient is computed, which is then added to that of the tiles before."""
        summed = self._head_bytes + self.sizes.hidden_bytes
        base = MemoryTerms(gathered_parameters=self._bucket_bytes(1), workspace=summed)
        base += self._left(len(self.layers))
        logits = self.sizes.tile_tokens * self.sizes.local_model.vocab_size * self.compute_size
        hidden = self._of_tile((1 + self._gathered_hidden_states) * self.sizes.full_hidden_bytes)
        made = MemoryTerms(logits=logits, workspace=self._head_bytes + hidden)
        return [PeakCandidate("loss", base + self._loss_workspace()), PeakCandidate("head", base + made)]

    def _hidden_gradient(self) -> list[PeakCandidate]:
        """Return the moment on a last stage without head when the gradient of its output is summed from the terms of
        all pipeline ranks, two each, beside the sum and one term in the master dtype."""
        if not self.plan.is_last(self.stage.index):
            return []
        terms = (1 + 2 * self.plan.pp) * self.sizes.hidden_bytes
        wide = 2 * self.sizes.hidden_bytes // self.compute_size * self.master_size
        left = self._left(len(self.layers))
        return [PeakCandidate("hidden gradient", MemoryTerms(communication=terms + wide) + left)]

    def _indices_of_interest(self) -> list[int]:
        """Return the layers, counted from the end, whose backward may need most: those of the last bucket, the first of
        the bucket before, and those of the first bucket. Where activations leave layer by layer, no later layer needs
        less than one before it: then one of each that differs, or has other neighbours, is among them."""
        count, size = len(self.layers), self.plan.bucket_layers
        first, last = min(size, count), (count - 1) % size + 1 if count else 0
        found = {*range(min(last + 1, count)), *range(count - first, count)}
        if self.stage.left_bytes(count):
            saved = [0, *map(self.stage.layer_activation_bytes, self.layers), 0]
            places = {around: place for place, around in enumerate(zip(saved, saved[1:], saved[2:], strict=False))}
            found |= {count - 1 - place for place in places.values()}
        return sorted(found)

    def _layer_backward(self, index: int, base: MemoryTerms, weights: bool) -> list[PeakCandidate]:
        """Return the moments of the backward of the `index`-th layer from the end.

        They are in its MLP, at its end, and for the first layer of a bucket, when the bucket's gradients are copied to
        the buffer of their reduction. `base`: change by the stage's head, which comes before.
        """
        position, shards = len(self.layers) - 1 - index, self.trained.layers
        layer, held = self.layers[position], shards[position]
        begin = position - position % self.plan.bucket_layers
        end = min(begin + self.plan.bucket_layers, len(shards))
        done = sum(map(self.stage.layer_activation_bytes, self.layers[position + 1 :]))
        made = sum(map(self.stage.gradients_of, self.stage.held_shards.layers[end:]))
        waiting = sum(one.unsharded_numel for one in shards[position + 1 : end])
        blocks = self.trained.blocks
        pending = sum(one.unsharded_numel for one in blocks[end : end + self.plan.bucket_layers])
        reducing = pending * self.master_size * (weights and self.stage.reduces_in_passes) + self._leaving_bytes(end)
        summing, first = (made, 0) if weights and self.holds_replica_sums else (0, made)
        if not self.stage.reduces_in_passes:
            first += sum(map(self.stage.gradients_of, self.stage.held_shards.layers[position + 1 : end]))
            waiting = 0
        stream = self.sizes.hidden_bytes * (self.stage.spec.residual == "ladder")  # whose gradient waits, too
        waiting = waiting * weights * self.compute_size + stream
        base += MemoryTerms(communication=summing, activations=-done)
        base += self._left(position)  # those of the layer before are on their way back
        gathered = self._bucket_bytes(1) if begin == 0 else self._prefetched_bucket_bytes()
        inside = MemoryTerms(gathered_parameters=gathered, communication=reducing, workspace=waiting)
        # The gradient of the stage's output lies in the buffer of its receive.
        received = self.sizes.message_bytes * (index == 0 and self.plan.sends_activations(self.stage.index))
        again = 0
        if index < self.stage.mtp_layers:
            again = further_activation_bytes(self.sizes, "none") - self.stage.further_bytes
        work = MemoryTerms(workspace=self._backward_workspace(layer, weights) + again - received)
        moments = [PeakCandidate(_layer_position(index), base + inside + work, first)]
        is_frozen = self.stage.freezes(f"{layer_prefix(self.stage.spec, layer)}mlp.down.weight")
        if weights and not is_frozen and not self._is_tiled and self._norm_workspace > 2 * self.sizes.hidden_bytes:
            normed, own = mlp_norm_workspace(self.stage, layer, self._norm_workspace, self._adds_in_place)
            norm_work = MemoryTerms(workspace=normed - received)
            moments.append(PeakCandidate("norm before an MLP", base + inside + norm_work, first + own))
        if not weights:
            kept = self.stage.deferred_layer_bytes(layer) - self.stage.layer_activation_bytes(layer)
            norm = MemoryTerms(activations=kept, workspace=self._norm_workspace)
            return [*moments, PeakCandidate("end of a layer", base + inside + norm, first)]
        if self.trained.experts[position].unsharded_numel and self.stage.reduces_in_passes:
            reduction = self._experts_reduction(layer, self.trained.experts[position])
            moments.append(PeakCandidate("gradients of experts", base + inside + reduction, first))
        base += MemoryTerms(activations=-self.stage.layer_activation_bytes(layer))
        gradients = (held.last_param_numel if self._adds_in_place else held.unsharded_numel) * self.compute_size
        complete = MemoryTerms(workspace=self._norm_workspace + gradients * (not self.stage.is_unsharded))
        first_own = self.stage.gradients_of(held) if self._adds_in_place and not self.stage.is_unsharded else 0
        moments.append(PeakCandidate("end of a layer", base + inside + complete, first + first_own))
        if position == begin:
            buffers, gradients = self._reduction_bytes(sum(blocks[begin:end], start=NO_PARAMS))
            reduced = MemoryTerms(
                gathered_parameters=self._bucket_bytes(1) * (not self.stage.is_single_shard)
                + self._loaded_bytes * (begin > 0),
                communication=buffers,
                workspace=gradients + self.sizes.hidden_bytes,
            )
            moments.append(PeakCandidate("gradients of a layer", base + reduced, first))
        return moments

    @property
    def _gathered_hidden_states(self) -> int:
        """Number of whole hidden states that sequence parallelism gathers within a backward."""
        return 1 if self.sizes.hidden_tokens < self.sizes.tokens else 0

    def _backward_workspace(self, layer: int, weights: bool) -> int:
        """Return the temporary bytes in the backward of a layer's gated unit.

        Gradients of the output, of the product, of gate and up, one more of the same size, the gradient of the last
        matrix; and recomputed tensors.
        """
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = mlp_inner_bytes(sizes, layer)
        again = {"none": 0, "core_attention": 0, "elementwise": 0 if self._is_tiled else product}.get(how, -1)
        if again < 0:
            again = self.stage.layer_activation_bytes(layer, "none") - self.stage.layer_activation_bytes(layer)
        inner = 3 * product if sizes.local_model.gated else 2 * product
        matrix = (numels := mlp_matrix_numels(sizes))["down"] * self.compute_size * weights
        matrix *= not self._adds_in_place or self.stage.has_master_copies
        # Of frozen ones a rank that gathers was counted to hold more than its shards, by about as much.
        frozen = self.stage.freezes(f"{layer_prefix(self.stage.spec, layer)}mlp.down.weight")
        matrix *= not frozen or (self.stage.gathers_in_passes and not any(self._dense_bytes))
        kept = 0 if weights else product  # I keeps the input of the last matrix, which B frees
        if sizes.local_model.has_experts(layer):
            rows = sizes.routed_row_bytes
            inner, matrix, kept = self._experts_workspace(product, weights), 0, kept + rows * (not weights)
            if how == "full":  # rows that were sent, beside those that come back
                inner = max(inner, 2 * dispatched_bytes(sizes))
        dense, temporary = self._dense_bytes  # of the last matrix, before the gated unit's gradients
        inner = max(inner, (dense > 0) * (dense + max(temporary, product)))
        inner = max(inner, self._adapter_dropout_workspace(product))
        mlp = again + inner + matrix + kept + sizes.hidden_bytes
        if self._is_tiled:
            mlp = again + self._tiled_mlp_workspace(product, inner, matrix)
        attention = self._attention_workspace(layer, backward=True)
        attention += again * (attention > 0 and how == "full")
        if attention and not sizes.local_model.has_linear_attention(layer):
            # Gradients of the MLP's matrices, which come before; linear attention's workspace was measured with them.
            attention += sum(numels.values()) * matrix // numels["down"]
        norm_is_tiled = self._is_tiled and not sizes.local_model.has_post_norms
        before = max(0 if norm_is_tiled else self._norm_workspace, attention)
        before = max(before, self._attention_linears_workspace(layer))
        return max(mlp, before - saved_mlp_bytes(sizes, layer))

    def _attention_linears_workspace(self, layer: int) -> int:
        """Return the temporary bytes in the backward of attention's first linear layers under sequence parallelism,
        when their inputs' gradient is summed: the gathered input, the sum and a term of it, the gradients of queries,
        keys and values, and that of the layer's output, beside what the norm has saved; nothing else is left of what
        attention saves. 0 where sequences aren't sharded, or these layers are others."""
        sizes, own = self.sizes, self.sizes.local_model
        if not self._gathered_hidden_states or own.mla is not None or own.has_linear_attention(layer):
            return 0
        made = (sizes.attention.queries + sizes.attention.keys_and_values) * self.compute_size
        how = self.plan.strategy(layer).recompute
        left = sizes.hidden_bytes * (how != "none") - attention_activation_bytes(sizes, layer) * (how != "full")
        return 3 * sizes.full_hidden_bytes + made + sizes.hidden_bytes + left

    def _adapter_dropout_workspace(self, product: int) -> int:
        """Return the temporary bytes in the backward of an MLP's adapters that drop elements of their input: gradients
        of the product, or of gate and up and their input; and of a piece of the input a copy, a mask of a byte an
        element, and twice the random numbers, of two bytes an element."""
        sizes, adapter = self.sizes, self.sizes.model.adapter
        if adapter is None or not adapter.lora_dropout:
            return 0
        most, size = 4 * self.kernel_workspace.dropout_chunk_numbers, self.compute_size
        found = [0]
        if "down" in adapter.target_modules:
            found.append(product + min(most, product // size) * (size + 5))
        if {"gate", "up"} & {*adapter.target_modules}:
            hidden = sizes.full_hidden_bytes
            found.append((1 + sizes.local_model.gated) * product + hidden + min(most, hidden // size) * (size + 5))
        return max(found)

    def _tiled_mlp_workspace(self, product: int, inner: int, matrix: int) -> int:
        """Return the temporary bytes in the backward of the last tile of an MLP.

        The gradients of output and input, and those of the matrices from the tiles before; then, of the tile, what it
        computes again and the gradients within, or, later, its gradients of all matrices.
        """
        sizes, matrices = self.sizes, 2 + self.sizes.local_model.gated
        summed = matrices * sizes.local_model.intermediate_size * sizes.local_model.hidden_size * self.compute_size
        norm = self._of_tile(self._norm_workspace)
        computed = self._of_tile(matrices * product + inner + 2 * sizes.full_hidden_bytes) + max(matrix, norm)
        return 2 * sizes.hidden_bytes + summed + max(computed, summed + self._of_tile(2 * sizes.full_hidden_bytes))

    def _experts_reduction(self, layer: int, held: ParamShard) -> MemoryTerms:
        """Return the bytes of the reduction of a layer's experts, a group of their own: beside the gradient of their
        rows, when all that they saved is freed, and under z3 their matrices."""
        sizes, is_single = self.sizes, self.plan.mesh(self.stage.index).expert_state_shards == 1
        buffers, gradients = self._reduction_bytes(held, is_single=is_single)
        freed = 2 * sizes.routed_row_bytes + (2 + sizes.local_model.gated) * mlp_inner_bytes(sizes, layer)
        again = self.stage.layer_activation_bytes(layer, "none") - self.stage.layer_activation_bytes(layer)
        gathered = held.unsharded_numel * self.compute_size * self.stage.gathers_in_passes
        return MemoryTerms(
            gathered_parameters=-gathered,
            activations=again - freed,
            communication=buffers,
            workspace=gradients + sizes.routed_row_bytes + sizes.hidden_bytes,
        )

    def _experts_workspace(self, product: int, weights: bool) -> int:
        """Return the most temporary bytes in the backward of experts, beside the gradient of their output.

        One after another: gradients of rows; of the inner activations and of the last matrices; of activation, gate and
        up, when the rows that were combined are freed; of the first matrices of all experts together.
        """
        moe, mesh, rows = self.sizes.local_model.moe, self.sizes.mesh, self.sizes.routed_row_bytes
        assert moe is not None
        numel = moe.num_experts // mesh.ep * moe.expert_size // mesh.etp * self.sizes.local_model.hidden_size
        matrices = weights * numel * self.compute_size
        gated = self.sizes.local_model.gated
        waiting = 0 if self._adds_in_place else matrices
        return max(
            rows,
            product + matrices,
            (2 + gated) * product - rows + waiting,
            (1 + gated) * matrices - product + waiting,
        )

    def _attention_workspace(self, layer: int, backward: bool) -> int:
        """Return the temporary bytes of attention over several ranks, with soft caps or dropout, or without softmax.
        A fused kernel has none."""
        sizes = self.sizes
        if sizes.model.has_linear_attention(layer):
            return recurrence_workspace(sizes, self.compute_size, self.master_size, backward)
        shape = sizes.attention._replace(window=sizes.model.attention_window(layer))
        elements = self.compute_size, self.master_size
        is_piecewise = sizes.local_model.attention_softcap is not None or sizes.local_model.attention_dropout
        exchanged = attention_workspace(sizes.context, shape, *elements, backward)
        if has_bands(sizes.context, shape) and not is_piecewise:
            exchanged = band_workspace(sizes.context, shape, self.kernel_workspace, *elements, backward)
        if sizes.is_sliced:
            exchanged = self._sliced_attention_workspace(backward)
        if exchanged and backward:  # the gradient of its output
            exchanged += sizes.attention.queries * self.compute_size
            if (mla := sizes.local_model.mla) is not None:  # beside that of its values without padding
                exchanged += sizes.tokens * sizes.local_model.num_heads * mla.v_head_dim * self.compute_size
        return exchanged + (piece_workspace(sizes, self.kernel_workspace, *elements, backward) if is_piecewise else 0)

    def _sliced_attention_workspace(self, backward: bool) -> int:
        """Return the temporary bytes of a slice's attention: the output, or the gradient of the queries, summed in the
        master dtype and of one block of keys, and as it is returned; in the backward also the gradients of the keys and
        values of the slices before."""
        shape = self.sizes.attention
        summed = shape.queries * (self.master_size + 2 * self.compute_size)
        earlier = self.sizes.earlier_positions * self.sizes.tokens // self.sizes.seq_len
        keys = shape.keys_and_values * (earlier + self.sizes.tokens) // self.sizes.tokens
        return summed + keys * self.compute_size * backward

    @property
    def _norm_workspace(self) -> int:
        """Temporary bytes of a norm's backward: gradients of its output and input, and if not fused two products in the
        master dtype, with copies of input and gradient where these are in another."""
        sizes, tensors = self.sizes, 4 if self.compute_size < self.master_size else 2
        copies = (
            0
            if self.kernel_workspace.fused_norm and not sizes.local_model.norm_unit_offset
            else tensors * sizes.hidden_tokens * sizes.local_model.hidden_size * self.master_size
        )
        return copies + 2 * sizes.hidden_bytes

    @property
    def _adds_in_place(self) -> bool:
        """True if a layer's gradients are added where they are accumulated as soon as they are computed."""
        same = self.compute_size == self.master_size or self.stage.has_master_copies
        return not self.stage.reduces_in_passes and same

    def _reduction_bytes(
        self, held: ParamShard, gradient_size: int | None = None, is_single: bool | None = None
    ) -> tuple[int, int]:
        """Return (buffers, gradients) at the time when complete gradients are reduced.

        They are copied into one buffer and then freed, except the last, which a loop variable in torch's
        `foreach_reduce` keeps alive; the result has another buffer. Where a single rank holds them, there is no such
        loop, and it divides by 1 meanwhile, which takes a third buffer. `gradient_size`: bytes of an element of the
        gradients, those of the compute dtype if not given. `is_single`: a single rank holds them, as the stage's where
        not given.
        """
        size = gradient_size or self.compute_size
        is_single = self.stage.is_single_shard if is_single is None else is_single
        gradients = 0 if self.stage.is_single_rank else held.unsharded_numel * size
        if not self.stage.reduces_in_passes:
            return 0, gradients
        source, result = (
            held.unsharded_numel * self.master_size,
            held.shard_numel * self.master_size * (1 + (is_single and not self.stage.is_alone)),
        )
        # Over fewer ranks than share optimizer state: in the order of these, and the sums that they share.
        reduced = int(held.shard_numel * self.stage.reduced_share) * self.master_size
        source, result = source * (1 + (reduced > 0)), result + reduced
        source += source * self.stage.copies_reduced(is_single, self.kernel_workspace)
        dropped = gradients if is_single else gradients - held.last_param_numel * size
        return source + max(0, result - dropped), gradients

    def _embedding_gradient(self) -> PeakCandidate:
        """Return the moment when the embedding's gradient is computed. That of a tied head waits for it, and autograd
        makes a third tensor of both."""
        stage = self.stage
        embedding = self.param_shards.vocab.unsharded_numel * stage.has_embedding * (not stage.freezes("embed.weight"))
        if stage.has_head:
            embedding = 3 * embedding if stage.spec.tied_embeddings else embedding // 2
            embedding *= 1 if stage.spec.tied_embeddings or not stage.mtp_layers else 3
        layers = sum(map(stage.gradients_of, stage.held_shards.layers))
        # The buffer of the last reduction, of the first layers' bucket, lives until the next one.
        first = sum(self.trained.layers[: self.plan.bucket_layers], start=NO_PARAMS)
        reducing = first.unsharded_numel * self.master_size * (stage.has_embedding and stage.reduces_in_passes)
        extra = MemoryTerms(
            activations=-self.saved.activations,
            logits=-self.saved.logits,
            communication=layers * self.holds_replica_sums + reducing + self._leaving_bytes(0),
            workspace=embedding * self.compute_size + self.sizes.hidden_bytes,
        )
        # With master copies the gradient in the compute dtype is beside its sum.
        added = embedding * self.master_size * (stage.has_master_copies and not stage.spec.tied_embeddings)
        return PeakCandidate(
            "embedding", extra, 0 if self.holds_replica_sums else layers + self._head_sum_bytes + added
        )

    def tied_exchange(self) -> PeakCandidate:
        """Return the moment when the gradients of a tied embedding's copies on two ranks are exchanged.

        The stage's gathered parameters are dropped before.
        """
        copies = 2 * self.param_shards.vocab.shard_numel * self.master_size
        gathered = 0 if self.stage.is_unsharded or self.stage.zero == "z3" else self.param_shards.total.unsharded_numel
        extra = MemoryTerms(gathered_parameters=-gathered * self.compute_size, communication=copies)
        return PeakCandidate("tied gradients", extra)

    def _root_reduction(self) -> PeakCandidate:
        """Return the moment of the last reduction, of embedding and head; under z3 these are not gathered any more."""
        layers = sum(map(self.stage.gradients_of, self.stage.held_shards.layers))
        communication, gradients = self._reduction_bytes(self.root)
        extra = MemoryTerms(
            gathered_parameters=-self._root_bytes(),
            activations=-self.saved.activations,
            logits=-self.saved.logits,
            communication=communication + layers * self.holds_replica_sums,
            workspace=gradients + self.sizes.hidden_bytes,
        )
        return PeakCandidate("embedding and head", extra, 0 if self.holds_replica_sums else layers)

    @property
    def _own_gradients(self) -> int:
        """Bytes of accumulated gradients without those of a vocabulary shard, which other passes compute."""
        vocab = self.stage.gradients_of(self.param_shards.vocab) if self.plan.vocab_parallel else 0
        return self.stage.gradients - vocab

    def weights(self) -> list[PeakCandidate]:
        """Return the moments of W: the head's gradient beside all operands; the gradients of all matrices; then, where
        they are reduced, the reductions from the last bucket of layers to embedding and head."""
        deferred = self.stage.deferred().scaled(-1)
        layers, head = self.trained.layers, self._head_bytes
        if self._adds_in_place:
            # The first W makes the gradients while it frees the operands, later ones add to them.
            matrix = max((held.last_param_numel for held in layers), default=0) * self.compute_size
            made = max(head, matrix)
            # With master copies a gradient in the compute dtype is beside its sum.
            beside = MemoryTerms(workspace=made * self.stage.has_master_copies)
            begin = PeakCandidate("head", beside, self.pending_gradients + made // self.compute_size * self.master_size)
            return [begin, PeakCandidate("weights", deferred, self._own_gradients)]
        made = sum(held.unsharded_numel for held in layers) * self.compute_size
        # In a step's first W the gradients that I made are pending, later on they are part of accumulated gradients.
        first, pending = self.pending_gradients, MemoryTerms(workspace=self.pending_gradients)
        first, pending = (0, pending) if self.stage.reduces_in_passes else (first, MemoryTerms())
        moments = [
            PeakCandidate("head", MemoryTerms(workspace=head) + pending, first),
            PeakCandidate("weights", deferred + MemoryTerms(workspace=made + head) + pending, first),
        ]
        if not self.stage.reduces_in_passes:  # converted or added one by one
            last = max((held.unsharded_numel for held in layers), default=0) * self.compute_size
            rest = deferred + MemoryTerms(workspace=max(head, last))
            return [*moments, PeakCandidate("accumulating", rest, self._own_gradients)]
        summed = 0
        buckets = self.trained.buckets(self.plan.bucket_layers)
        for held in (*reversed(buckets), self.root):
            is_root = held is self.root
            buffers, gradients = self._reduction_bytes(held, self.master_size)
            made -= 0 if is_root else held.unsharded_numel * self.compute_size
            others = made + (0 if is_root else head + self.pending_gradients)
            extra = MemoryTerms(communication=buffers + summed * self.holds_replica_sums, workspace=others + gradients)
            moments.append(PeakCandidate("reducing", deferred + extra, 0 if self.holds_replica_sums else summed))
            summed += self.stage.gradients_of(held)
        return moments


def _layer_position(index: int) -> str:
    return ("last layer", "layer before the last")[index] if index < 2 else "first layer"
