"""Memory of a stage in the storage of Megatron-LM and similar frameworks.

Half-precision weights, whole gradients in one buffer, and float32 master weights and moments, which ZeRO-1 shards over
the data-parallel ranks (arXiv:1909.08053, arXiv:1910.02054 §5.1, Megatron-LM
docs/source/api-guide/dist_optimizer.md). Layers save the activations that arXiv:2205.05198 §4 counts: for a GPT layer
s·b·h·(34 + 5·a·s/h) bytes.
"""

from muster.cost.activations import (
    PassSizes,
    attention_activation_bytes,
    attention_score_bytes,
    combined_row_bytes,
    latent_elements_per_token,
    mlp_activation_bytes,
    mlp_inner_bytes,
    pass_sizes,
)
from muster.cost.memory.fp8_activations import fp8_layer_activation_bytes
from muster.cost.memory.param_shards import stage_param_shards
from muster.cost.memory.stage_memory import PeakCandidate, StageMemory
from muster.cost.memory.terms import MemoryTerms
from muster.cost.precision_bytes import NVFP4_BYTES, compute_bytes
from muster.schedule.action import Kind
from muster.spec.framework_traits import FrameworkTraits
from muster.spec.layer_strategy import Recompute
from muster.spec.model import ModelSpec
from muster.spec.plan import SCALED_PRECISIONS, Plan
from muster.spec.workload import Workload

_FP32_BYTES = 4


def megatron_stage_memory(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, framework: FrameworkTraits
) -> StageMemory:
    """Return the memory of a stage, and its moments."""
    return _MegatronStage(spec, plan, workload, stage, framework).memory()


class _MegatronStage:
    """Computation for one stage; all quantities in bytes."""

    def __init__(self, spec: ModelSpec, plan: Plan, workload: Workload, stage: int, software: FrameworkTraits) -> None:
        self.spec, self.plan, self.stage, self.framework = spec, plan, stage, software
        self.size = compute_bytes(plan.precision)
        self.sizes: PassSizes = pass_sizes(spec, plan, workload, stage)
        self.param_shards = stage_param_shards(spec, plan, stage)
        self.layers = list(plan.layers(stage, spec.num_layers))
        self.mesh = plan.mesh(stage)
        self.zero = plan.default_strategy.zero
        self.has_embedding, self.has_head = plan.is_first(stage), plan.is_last(stage)

    def memory(self) -> StageMemory:
        kept = self._saved_activations()
        none = MemoryTerms()
        return StageMemory(
            self._resident(),
            0,
            True,
            0,
            kept,
            none,
            kept,
            none,
            {
                Kind.F: tuple(self._forward_peaks(kept)),
                Kind.B: tuple(self._backward_peaks(kept)),
                Kind.I: tuple(self._backward_peaks(kept)),
                Kind.W: (PeakCandidate("weights", MemoryTerms(workspace=self._weight_grad_bytes())),),
                Kind.STEP: (PeakCandidate("step", MemoryTerms()),),
            },
        )

    def _resident(self) -> MemoryTerms:
        """Return the bytes that are always held.

        Under z1 data-parallel ranks shard the optimizer; z3 shards weights and gradients too (Megatron-LM's FSDP).
        """
        whole, shard = self.param_shards.total.unsharded_numel, self.param_shards.total.shard_numel
        stored = shard if self.zero == "z3" else whole
        summed = whole if self.zero == "z1" else shard
        weights = stored * self.size if self.size < _FP32_BYTES else 0
        buffers = self.plan.receives_activations(self.stage) + self.plan.sends_activations(self.stage)
        return MemoryTerms(
            parameters=weights + shard * _FP32_BYTES,
            gradients=summed * self.framework.grad_bytes,
            optimizer=shard * 2 * self.framework.moment_bytes,
            communication=buffers * self.sizes.hidden_bytes,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Saved per micro-batch

    def layer_activation_bytes(self, layer: int, recompute: Recompute) -> int:
        """Return the bytes that a layer saves."""
        sizes, size = self.sizes, self.size
        if recompute == "full":
            return sizes.hidden_bytes
        if recompute == "elementwise" and self.framework.fp8_activations:
            return fp8_layer_activation_bytes(sizes, layer)
        total = self._layer_norm_bytes() + self._attention_bytes(layer) + mlp_activation_bytes(sizes, layer)
        if self.framework.weights_inside_experts and sizes.local_model.has_experts(layer):
            total -= combined_row_bytes(sizes)
        if not self.framework.fused_elementwise:
            total += self._unfused_bytes(layer)
        if self.framework.dropout:
            total += 2 * sizes.hidden_bytes // size  # a mask of a byte after attention and MLP each
        written = self.plan.strategy(layer).attention != "flash"
        if written:
            total -= sizes.tokens * sizes.local_model.num_heads * _FP32_BYTES  # flash attention's log-sum-exp
            if recompute != "core_attention":
                total += self._saved_score_bytes()
        if recompute == "elementwise":
            total -= 2 * self.spec.has_pre_norms * sizes.hidden_bytes + mlp_inner_bytes(sizes, layer)
        return total - (self._cast_saving(layer, recompute) if self.plan.precision in SCALED_PRECISIONS else 0)

    def _cast_saving(self, layer: int, recompute: Recompute) -> int:
        """Return the bytes that a layer saves less because its linear layers save their inputs in fp8 or nvfp4.

        In fp8 half of the inputs of the projections of queries, keys and values, of a dense MLP and of its last matmul,
        and of both of an expert (Transformer Engine, pytorch/module/linear.py, grouped_linear.py). Attention keeps its
        output for its own backward, so that the output projection's input comes on top; so is that of latent attention,
        of which only this is counted. What is recomputed isn't saved in either form.
        """
        sizes, own = self.sizes, self.sizes.local_model
        heads = own.num_heads * (own.head_dim if own.mla is None else own.mla.v_head_dim)
        kept = NVFP4_BYTES if self.plan.precision == "nvfp4" else 1
        attended, saving = sizes.tokens * heads, 0
        normed = sizes.hidden_tokens * own.hidden_size if recompute != "elementwise" and self.spec.has_pre_norms else 0
        if own.mla is None:
            saving += normed
        inner = 0 if recompute == "elementwise" else mlp_inner_bytes(sizes, layer) // self.size
        saving += inner + (sizes.expert_tokens * own.hidden_size if own.has_experts(layer) else normed)
        return int(saving * (self.size - kept) - attended * kept)

    def _attention_bytes(self, layer: int) -> int:
        """Return the bytes that attention saves, without its norm. Values of latent attention aren't padded."""
        own, sizes = self.sizes.local_model, self.sizes
        if own.mla is None or own.has_linear_attention(layer):
            return attention_activation_bytes(sizes, layer)
        return sizes.tokens * (latent_elements_per_token(own) * self.size + own.num_heads * _FP32_BYTES)

    def _layer_norm_bytes(self) -> int:
        """Return the bytes that a layer's norms save, and those of the inputs of attention and MLP."""
        norms = 2 * (self.spec.has_pre_norms + self.spec.has_post_norms)
        added = 2 * self.spec.has_post_norms * self.sizes.hidden_bytes  # a post-norm's output isn't saved
        inputs = 0 if self.spec.has_pre_norms else 2 * self.sizes.hidden_bytes
        shared = self.spec.parallel_residual * self.sizes.hidden_bytes
        return norms * self._norm_bytes() - added + inputs - shared

    def _unfused_bytes(self, layer: int) -> int:
        """Return the bytes that unfused operations save in addition.

        The gate's activation beside the gate; queries and keys before their rotation, which stay alive because values
        are a view of the same matmul's output; and, for several sequences, attention's output a second time in the
        order that the next matmul reads (Aleph Alpha's scaling: rotary.py, attention.py).
        """
        sizes = self.sizes
        total = mlp_inner_bytes(sizes, layer) if sizes.local_model.gated else 0
        if self.spec.mla is None and not self.spec.has_linear_attention(layer):
            heads = sizes.local_model.num_heads
            turned = heads + sizes.local_model.num_kv_heads if self.spec.position == "rope" else 0
            again = heads if self.plan.local_micro_batch_size(self.stage) > 1 else 0
            total += sizes.tokens * (turned + again) * self.spec.head_dim * self.size
        return total

    def _saved_score_bytes(self) -> int:
        """Return the bytes that attention saves of its scores (arXiv:2205.05198 §4.1).

        The factor of the values, in the compute dtype, and the inputs of softmax's and dropout's derivatives. Fused,
        the softmax's output is that factor; unfused it is in float32, and cast. Dropout saves a mask of one byte; its
        output is then the factor, and the cast isn't saved.
        """
        num_scores = attention_score_bytes(self.sizes) // self.size
        softmax = (
            _FP32_BYTES if self.framework.attention == "unfused" else 0 if not self.framework.dropout else self.size
        )
        return num_scores * (self.size + softmax + self.framework.dropout)

    def _norm_bytes(self) -> int:
        """Return the bytes that a norm saves: input and output.

        An unfused RMSNorm, as in Meta's Llama, saves its input in float32 instead, and the normalized input for its
        weight's gradient.
        """
        sizes = self.sizes
        software = self.framework
        fused = software.fused_elementwise if software.fused_norms is None else software.fused_norms
        if fused or self.spec.norm == "layer":
            return 2 * sizes.hidden_bytes
        return 2 * sizes.hidden_bytes + sizes.hidden_bytes // self.size * _FP32_BYTES

    def _saved_activations(self) -> MemoryTerms:
        total = sum(self.layer_activation_bytes(layer, self.plan.strategy(layer).recompute) for layer in self.layers)
        sizes, logits = self.sizes, 0
        if self.has_embedding:
            total += sizes.tokens * 8
            if self.framework.dropout:
                total += sizes.hidden_bytes // self.size
        if self.has_head:
            total += self._norm_bytes()
            each = self.size if self.framework.fused_loss else _FP32_BYTES
            logits = self._logit_elements() * (self.size + 2 * _FP32_BYTES if self.framework.gathered_logits else each)
        return MemoryTerms(activations=total, logits=logits)

    def _logit_elements(self) -> int:
        words = self.spec if self.framework.gathered_logits else self.sizes.local_model
        return self.sizes.tokens * words.vocab_size * (1 + self.spec.mtp_layers)

    # ------------------------------------------------------------------------------------------------------------------
    # Moments

    def _forward_peaks(self, kept: MemoryTerms) -> list[PeakCandidate]:
        sizes = self.sizes
        moments = []
        if self.layers:
            work = (
                sizes.full_hidden_bytes
                + self._score_workspace(self.layers[-1])
                + self._recomputed_bytes(self.layers[-1])
            )
            moments.append(PeakCandidate("last layer", MemoryTerms(workspace=work, logits=-kept.logits)))
        if self.has_head:
            moments.append(PeakCandidate("loss", MemoryTerms(logits=self._loss_workspace())))
        return moments

    def _backward_peaks(self, kept: MemoryTerms) -> list[PeakCandidate]:
        sizes = self.sizes
        moments = []
        if self.has_head:
            head = (
                0
                if self.framework.fused_grad_accumulation
                else self.param_shards.vocab.unsharded_numel // (1 + self.has_embedding) * self.size
            )
            logits = self._logit_elements() * self.size  # their gradient, as the product takes it
            if self.framework.gathered_logits:
                logits = self._gathered_logit_bytes() + 2 * self._logit_elements() * _FP32_BYTES
            moments.append(
                PeakCandidate("head", MemoryTerms(logits=logits, workspace=head + 2 * sizes.full_hidden_bytes))
            )
        if self.layers:
            last = self.layers[-1]
            inner = (3 if sizes.local_model.gated else 2) * mlp_inner_bytes(sizes, last)
            if not self.framework.fused_elementwise:
                inner += mlp_inner_bytes(sizes, last)
            work = self._recomputed_bytes(last) + max(inner, self._score_workspace(last)) + 2 * sizes.full_hidden_bytes
            extra = MemoryTerms(workspace=work + self._weight_grad_bytes(), logits=-kept.logits)
            moments.append(PeakCandidate("last layer", extra))
        return moments

    def _loss_workspace(self) -> int:
        """Return the temporary bytes of the loss: the logits, and a float32 copy before it becomes the softmax.

        Unfused, logits, copy and log-softmax are saved, and the backward adds the gradients of the last two.
        """
        if self.framework.gathered_logits:
            return self._gathered_logit_bytes()
        return self._logit_elements() * (self.size if self.framework.fused_loss else self.size + _FP32_BYTES)

    def _gathered_logit_bytes(self) -> int:
        """Return the bytes of logits while they are gathered: the rank's own, and those of all ranks."""
        if self.mesh.tp == 1:
            return 0
        return (self._logit_elements() + self._logit_elements() // self.mesh.tp) * self.size

    def _recomputed_bytes(self, layer: int) -> int:
        """Return the bytes that a layer's recompute restores."""
        how = self.plan.strategy(layer).recompute
        return (
            0 if how == "none" else self.layer_activation_bytes(layer, "none") - self.layer_activation_bytes(layer, how)
        )

    def _score_workspace(self, layer: int) -> int:
        """Return the temporary bytes of scores, in addition to saved ones.

        Fused: the scores before their softmax, or the gradients of its input and output. Unfused: the scores and a
        float32 copy in addition to softmax and cast; in the backward, where autograd frees saved tensors as it goes,
        the float32 gradients of the softmax's input and output in addition to its output.
        """
        if self.plan.strategy(layer).attention == "flash":
            return 0
        num_scores = attention_score_bytes(self.sizes) // self.size
        if self.framework.attention != "unfused":
            return num_scores * (1 if self.framework.dropout else 2) * self.size
        return num_scores * 3 * _FP32_BYTES - self._saved_score_bytes()

    def _weight_grad_bytes(self) -> int:
        """Return the bytes of a matrix's gradient before it is added to the buffer."""
        if self.framework.fused_grad_accumulation:
            return 0
        return self.sizes.local_model.intermediate_size * self.spec.hidden_size * self.size
