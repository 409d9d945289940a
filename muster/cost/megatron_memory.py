"""A stage in the storage of Megatron-LM and its kin: half-precision weights, whole gradients in one buffer, and float32
master weights and moments, which ZeRO-1 shards over the data-parallel ranks (arXiv:1909.08053, arXiv:1910.02054 §5.1,
Megatron-LM docs/source/api-guide/dist_optimizer.md).

Of activations the layers keep what arXiv:2205.05198 §4 counts: for a GPT layer s·b·h·(34 + 5·a·s/h) bytes.
"""

from muster.cost.activations import (
    PassSizes,
    mixing_bytes,
    mlp_bytes,
    pass_sizes,
    product_bytes,
    score_bytes,
)
from muster.cost.compact_memory import compact_layer_bytes
from muster.cost.holdings import stage_holdings
from muster.cost.memory import MemoryTerms, compute_bytes
from muster.cost.stage_memory import Moment, StageMemory
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Recompute
from muster.spec.software import Software
from muster.spec.workload import Workload

_WIDE = 4


def megatron_stage(spec: ModelSpec, plan: Plan, workload: Workload, stage: int, software: Software) -> StageMemory:
    """What a stage holds, and its moments."""
    return _Megatron(spec, plan, workload, stage, software).memory()


class _Megatron:
    """Works out one stage; every quantity in bytes."""

    def __init__(self, spec: ModelSpec, plan: Plan, workload: Workload, stage: int, software: Software) -> None:
        self.spec, self.plan, self.stage, self.software = spec, plan, stage, software
        self.size = compute_bytes(plan.precision)
        self.sizes: PassSizes = pass_sizes(spec, plan, workload, stage)
        self.held = stage_holdings(spec, plan, stage)
        self.layers = list(plan.layers(stage, spec.num_layers))
        self.mesh = plan.mesh(stage)
        self.zero = plan.default_strategy.zero
        self.reads, self.scores = plan.is_first(stage), plan.is_last(stage)

    def memory(self) -> StageMemory:
        kept = self._kept()
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
                "F": tuple(self._forward(kept)),
                "B": tuple(self._backward(kept)),
                "I": tuple(self._backward(kept)),
                "W": (Moment("weights", MemoryTerms(workspace=self._matrix())),),
                "STEP": (Moment("step", MemoryTerms()),),
            },
        )

    def _resident(self) -> MemoryTerms:
        """Where data-parallel ranks share a stage's optimizer (z1), each has its part; z3 shards weights and gradients
        too (Megatron-LM's FSDP)."""
        whole, shard = self.held.all.whole, self.held.all.shard
        stored = shard if self.zero == "z3" else whole
        summed = whole if self.zero == "z1" else shard
        weights = stored * self.size if self.size < _WIDE else 0
        buffers = self.plan.receives(self.stage) + self.plan.sends(self.stage)
        return MemoryTerms(
            parameters=weights + shard * _WIDE,
            gradients=summed * self.software.gradient_bytes,
            optimizer=shard * 2 * self.software.moment_bytes,
            communication=buffers * self.sizes.hidden_bytes,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Kept by micro-batch

    def layer(self, layer: int, recompute: Recompute) -> int:
        """What a layer keeps."""
        sizes, size = self.sizes, self.size
        if recompute == "full":
            return sizes.hidden_bytes
        if recompute == "selective" and self.software.compact:
            return compact_layer_bytes(sizes, layer)
        total = 2 * self._norm() + mixing_bytes(sizes, layer) + mlp_bytes(sizes, layer)
        if not self.software.fused:
            total += self._unfused(layer)
        if self.software.dropout:
            total += 2 * sizes.hidden_bytes // size  # a mask of a byte after attention and MLP each
        written = self.plan.strategy(layer).attention != "flash"
        if written:
            total -= sizes.tokens * sizes.own.num_heads * _WIDE  # flash attention's log-sum-exp
            if recompute != "attention":
                total += self._scores()
        if recompute == "selective":
            total -= 2 * sizes.hidden_bytes + product_bytes(sizes, layer)
        return total

    def _unfused(self, layer: int) -> int:
        """What operations keep that are kernels of their own: the gate's activation beside the gate; queries and keys
        before they are turned, which stay because values are a view of the same product; and, of several sequences, the
        output of attention a second time in the order that the next product reads (Aleph Alpha's scaling: rotary.py,
        attention.py)."""
        sizes = self.sizes
        total = product_bytes(sizes, layer) if sizes.own.gated else 0
        if self.spec.mla is None and not self.spec.has_linear_attention(layer):
            heads = sizes.own.num_heads
            turned = heads + sizes.own.num_kv_heads if self.spec.position == "rope" else 0
            again = heads if self.plan.rows(self.stage) > 1 else 0
            total += sizes.tokens * (turned + again) * self.spec.head_dim * self.size
        return total

    def _scores(self) -> int:
        """What attention keeps of its scores: what multiplies the values, in the compute dtype, and what softmax and
        dropout need. Fused, the softmax's output is that factor; unfused it is in float32, and cast. Dropout keeps a
        mask of a byte; its output is the factor then, and the cast isn't kept (arXiv:2205.05198 §4.1)."""
        numbers = score_bytes(self.sizes) // self.size
        softmax = _WIDE if self.software.attention == "unfused" else 0 if not self.software.dropout else self.size
        return numbers * (self.size + softmax + self.software.dropout)

    def _norm(self) -> int:
        """A norm's input and output. An unfused RMSNorm, as in Meta's Llama, keeps its input in float32 instead, and
        what it has normalised, for the gradient of its weight."""
        sizes = self.sizes
        software = self.software
        fused = software.fused if software.fused_norms is None else software.fused_norms
        if fused or self.spec.norm == "layer":
            return 2 * sizes.hidden_bytes
        return 2 * sizes.hidden_bytes + sizes.hidden_bytes // self.size * _WIDE

    def _kept(self) -> MemoryTerms:
        total = sum(self.layer(layer, self.plan.strategy(layer).recompute) for layer in self.layers)
        sizes, logits = self.sizes, 0
        if self.reads:
            total += sizes.tokens * 8
            if self.software.dropout:
                total += sizes.hidden_bytes // self.size
        if self.scores:
            total += self._norm()
            each = self.size if self.software.fused_loss else _WIDE
            logits = self._logit_numbers() * (self.size + 2 * _WIDE if self.software.whole_logits else each)
        return MemoryTerms(activations=total, logits=logits)

    def _logit_numbers(self) -> int:
        words = self.spec if self.software.whole_logits else self.sizes.own
        return self.sizes.tokens * words.vocab_size * (1 + self.spec.mtp_layers)

    # ------------------------------------------------------------------------------------------------------------------
    # Moments

    def _forward(self, kept: MemoryTerms) -> list[Moment]:
        sizes = self.sizes
        moments = []
        if self.layers:
            work = sizes.whole_hidden_bytes + self._score_work(self.layers[-1]) + self._again(self.layers[-1])
            moments.append(Moment("last layer", MemoryTerms(workspace=work, logits=-kept.logits)))
        if self.scores:
            moments.append(Moment("loss", MemoryTerms(logits=self._loss_work())))
        return moments

    def _backward(self, kept: MemoryTerms) -> list[Moment]:
        sizes = self.sizes
        moments = []
        if self.scores:
            head = 0 if self.software.fused_gradients else self.held.words.whole // (1 + self.reads) * self.size
            logits = self._logit_numbers() * self.size  # their gradient, as the product takes it
            if self.software.whole_logits:
                logits = self._gathered() + 2 * self._logit_numbers() * _WIDE
            moments.append(Moment("head", MemoryTerms(logits=logits, workspace=head + 2 * sizes.whole_hidden_bytes)))
        if self.layers:
            last = self.layers[-1]
            inner = (3 if sizes.own.gated else 2) * product_bytes(sizes, last)
            if not self.software.fused:
                inner += product_bytes(sizes, last)
            work = self._again(last) + max(inner, self._score_work(last)) + 2 * sizes.whole_hidden_bytes
            extra = MemoryTerms(workspace=work + self._matrix(), logits=-kept.logits)
            moments.append(Moment("last layer", extra))
        return moments

    def _loss_work(self) -> int:
        """Beside what is kept: the logits, and a float32 copy before it becomes the softmax. Composed: kept are logits,
        copy and log-softmax; in the backward come the gradients of the last two."""
        if self.software.whole_logits:
            return self._gathered()
        return self._logit_numbers() * (self.size if self.software.fused_loss else self.size + _WIDE)

    def _gathered(self) -> int:
        """Logits before they are put together: the rank's own, and those of all ranks."""
        if self.mesh.tp == 1:
            return 0
        return (self._logit_numbers() + self._logit_numbers() // self.mesh.tp) * self.size

    def _again(self, layer: int) -> int:
        """What a layer's recompute brings back."""
        how = self.plan.strategy(layer).recompute
        return 0 if how == "none" else self.layer(layer, "none") - self.layer(layer, how)

    def _score_work(self, layer: int) -> int:
        """Scores while they are worked on, beside what is kept of them. Fused: before their softmax, or the gradients
        on both of its sides. Unfused: the scores and a float32 copy of them beside softmax and cast; backward, where
        autograd drops what an operation kept once it has run, the float32 gradients on both sides of the softmax beside
        its output."""
        if self.plan.strategy(layer).attention == "flash":
            return 0
        numbers = score_bytes(self.sizes) // self.size
        if self.software.attention != "unfused":
            return numbers * (1 if self.software.dropout else 2) * self.size
        return numbers * 3 * _WIDE - self._scores()

    def _matrix(self) -> int:
        """A matrix's gradient before it is added to the buffer."""
        if self.software.fused_gradients:
            return 0
        return self.sizes.own.intermediate_size * self.spec.hidden_size * self.size
