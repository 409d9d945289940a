"""A stage in Muster's own storage: `fully_shard` around a plain decoder (`muster.parallel.shard`), float32 master
weights, gradients and moments.

Follows the runtime buffer by buffer; `muster memory-check` holds it against PyTorch's accounting of that runtime.
"""

from dataclasses import dataclass

from muster.cost.activations import (
    PassSizes,
    layer_bytes,
    loss_saved_bytes,
    mlp_bytes,
    norm_saved_bytes,
    offloaded_bytes,
    pass_sizes,
    product_bytes,
    word_bytes,
)
from muster.cost.holdings import Held, StageHoldings, stage_holdings
from muster.cost.memory import MemoryTerms, compute_bytes, wide_bytes
from muster.cost.stage_memory import Moment, StageMemory
from muster.spec.layout import has_words, shard_rows
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan, Recompute
from muster.spec.workload import Workload

_GATHERING = "gathering embedding and head"


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the runtime's kernels need for a while on a kind of device."""

    fused_norm: bool
    """Without float32 copies of a norm's input."""
    loss_numbers: int
    """Logits that the loss works on at once (`muster.model.loss`)."""
    copies_whole: bool = False
    """What is gathered or reduced over ranks is in one more buffer while that lasts (gloo's)."""


GPU_LOSS_NUMBERS, CPU_LOSS_NUMBERS = 1 << 26, 1 << 17
KERNELS = {"cpu": Kernels(fused_norm=False, loss_numbers=CPU_LOSS_NUMBERS, copies_whole=True)}
OTHER_KERNELS = Kernels(fused_norm=True, loss_numbers=GPU_LOSS_NUMBERS)


def own_stage(
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, kernels: Kernels, state_numbers: float = 2.0
) -> StageMemory:
    """A stage in Muster's own storage. `state_numbers`: what the optimizer keeps of each parameter."""
    return _Own(spec, plan, workload, stage, kernels, state_numbers).memory()


def own_kept(spec: ModelSpec, plan: Plan, workload: Workload, stage: int) -> MemoryTerms:
    """Of `own_stage` what each micro-batch keeps from F to B alone."""
    return _Own(spec, plan, workload, stage, OTHER_KERNELS, 2.0).kept()


@dataclass(frozen=True, slots=True)
class Least:
    """What a stage holds at some moment of every step, whatever the order of its passes. Bytes."""

    state: int
    """Parameters, the optimizer's state, gradients, and parameters as the passes use them where they stay; when a
    second micro-batch goes backward."""
    first_state: int
    """The same when the only one does: gradients of embedding and head may come after the others were used."""
    resident: int
    """Of the state what is always there: parameters, and the optimizer's state."""
    layer: int
    """What its first layer keeps of a micro-batch beside these, when the micro-batch goes backward."""
    layer_state: int
    """Of the state, what belongs to the layer that has least of it."""
    deferred: int
    """What a layer keeps of a micro-batch from I to W, whatever it computes again: of the layer that keeps least."""


def least_held(spec: ModelSpec, plan: Plan, workload: Workload) -> Least:
    """Of `own_stage`, where all layers are on one stage."""
    own = _Own(spec, plan, workload, 0, OTHER_KERNELS, 2.0)
    state, root = own.state(own.held.all), own.held.root.whole if own.zero == "z1" else own.held.root.shard
    return Least(
        state,
        state - root * own.wide,
        own.parameters + own.optimizer,
        own._layer(0),
        min(map(own.state, set(own.held.layers))),
        min(map(own.deferred_layer, dict(zip(own.held.layers, own.layers, strict=True)).values())),
    )


class _Own:
    """Works out one stage; every quantity in bytes."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, workload: Workload, stage: int, kernels: Kernels, state_numbers: float
    ) -> None:
        self.spec, self.plan, self.stage, self.kernels = spec, plan, stage, kernels
        self.workload = workload
        self.state_numbers = state_numbers
        self.size, self.wide = compute_bytes(plan.precision), wide_bytes(plan.precision)
        self.sizes: PassSizes = pass_sizes(spec, plan, workload, stage)
        self.held: StageHoldings = stage_holdings(spec, plan, stage)
        self.layers = list(plan.layers(stage, spec.num_layers))
        mesh = plan.mesh(stage)
        self.alone = mesh.data_ranks * mesh.cp == 1
        self.plain = self.alone and self.size == self.wide
        """Not sharded at all: gradients are added up where they are made."""
        self.zero = "z2" if self.alone else plan.strategy(self.layers[0] if self.layers else 0).zero
        self.reads, self.scores = (end and not plan.spread_vocab for end in (plan.is_first(stage), plan.is_last(stage)))

    def memory(self) -> StageMemory:
        whole, shards = self.held.all, self.parameters
        neighbours = sum(not end for end in self._ends())
        resident = MemoryTerms(
            parameters=shards,
            optimizer=self.optimizer,
            # Each receive is posted ahead of its use, and one gradient is on its way to the stage before.
            communication=(neighbours + (not self._ends()[0])) * self.sizes.hidden_bytes,
        )
        kept = self.kept()
        gathered = 0 if self.plain else (self.held.root if self.zero == "z3" else whole).whole * self.size
        return StageMemory(
            resident,
            gathered,
            self.zero != "z3",
            self.gradients,
            kept,
            MemoryTerms(activations=offloaded_bytes(self.spec, self.plan, self.workload, self.stage)),
            self._deferred(kept),
            MemoryTerms(logits=self._word_bytes()),
            {
                "F": tuple(self._forward(kept)),
                "B": tuple(self._backward(kept, weights=True)),
                "I": tuple(self._backward(kept, weights=False)),
                "W": (self._weights(),),
                **self._word_passes(),
                "gather F": (self._gather(kept),),
                "gather B": (self._gather(None),),
                "UNSHARD": (self._unshard(),),
                "REDUCE": (self._reduce(),),
                "MERGE": (Moment("copies swapped", MemoryTerms(communication=2 * shards)),),
            },
        )

    @property
    def parameters(self) -> int:
        return self.held.all.shard * self.wide

    @property
    def optimizer(self) -> int:
        """Of its state; none where that lies in the host's memory (arXiv:2101.06840)."""
        offloaded = self.plan.default_strategy.offload in ("optimizer", "all")
        return 0 if offloaded else int(self.parameters * self.state_numbers)

    @property
    def gradients(self) -> int:
        return self.held.all.whole * self.wide if self.zero == "z1" else self.parameters

    def state(self, held: Held) -> int:
        """Of some of the stage's parameters, what is there while a backward runs: themselves, the optimizer's state,
        gradients, and what passes use of them where that stays."""
        sharded = held.shard * self.wide * (1 + (self.optimizer > 0) * self.state_numbers)
        gradients = (held.whole if self.zero == "z1" else held.shard) * self.wide
        return int(sharded) + gradients + (0 if self.plain or self.zero == "z3" else held.whole * self.size)

    def _ends(self) -> tuple[bool, bool]:
        """Whether nothing comes from another rank before the stage, and after it."""
        plan, stage = self.plan, self.stage
        own = plan.pp_rank(stage)
        return (
            plan.is_first(stage) or plan.pp_rank(stage - 1) == own,
            plan.is_last(stage) or plan.pp_rank(stage + 1) == own,
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Kept by micro-batch

    def _layer(self, layer: int, how: Recompute | None = None) -> int:
        """Of one layer; `how`: if it were recomputed so, not as the plan says."""
        strategy = self.plan.strategy(layer)
        return layer_bytes(self.sizes, layer, how or strategy.recompute, strategy.attention)

    def kept(self) -> MemoryTerms:
        total = sum(self._layer(layer) for layer in self.layers)
        sizes, logits = self.sizes, 0
        if self.reads:
            total += sizes.tokens * (8 + (sizes.mesh.tp > 1))  # tokens, and with tp which words are the rank's
        if self.plan.is_last(self.stage):
            total += norm_saved_bytes(self.spec, sizes.hidden_tokens, self.plan.precision)
            if self.scores:
                logits = loss_saved_bytes(sizes.own, sizes.tokens, self.plan.precision) * (1 + self.spec.mtp_layers)
                total += self.spec.mtp_layers * (self._layer(self.spec.num_layers - 1) + 4 * sizes.hidden_bytes)
            else:
                total -= sizes.hidden_bytes
        elif not self._ends()[1]:
            total += sizes.hidden_bytes  # the output, until it is known to be gone: at the latest with its gradient
        return MemoryTerms(activations=total, logits=logits)

    def _deferred(self, kept: MemoryTerms) -> MemoryTerms:
        """Inputs and output gradients of all linear layers."""
        logits = kept.logits + (self.sizes.whole_hidden_bytes if self.scores else 0)
        return MemoryTerms(activations=sum(map(self.deferred_layer, self.layers)), logits=logits)

    def deferred_layer(self, layer: int) -> int:
        """Of one layer."""
        own, sizes = self.sizes.own, self.sizes
        width = (2 * own.num_heads + 2 * own.num_kv_heads) * own.head_dim
        linear = 4 * sizes.whole_hidden_bytes + sizes.tokens * width * self.size
        return linear + (2 + own.gated) * product_bytes(sizes, layer)

    # ------------------------------------------------------------------------------------------------------------------
    # Moments

    def _buckets(self, count: int) -> int:
        """Whole parameters of that many buckets of layers, gathered within a pass."""
        if self.zero != "z3" or self.plain:
            return 0
        largest = sorted((held.whole for held in self.held.layers), reverse=True)
        return sum(largest[: count * self.plan.bucket_layers]) * self.size

    def _buckets_ahead(self) -> int:
        """Those of a layer, and of the ones that are gathered meanwhile."""
        here, ahead = self._buckets(1), self._buckets(1 + self.plan.prefetch_buckets)
        return ahead + (ahead - here) * self.kernels.copies_whole

    def _forward(self, kept: MemoryTerms) -> list[Moment]:
        moments = []
        if self.layers:
            last = self._layer(self.layers[-1])
            work, logits = self._forward_work(self.layers[-1]), -kept.logits
            after = MemoryTerms(gathered_parameters=self._buckets(1), workspace=work, logits=logits)
            before = MemoryTerms(
                gathered_parameters=self._buckets_ahead(), activations=-last, workspace=work, logits=logits
            )
            moments += [Moment("last layer", after), Moment("layer before the last", before)]
        if self.scores:
            moments.append(Moment("loss", self._loss_work(kept)))
        return moments

    def _forward_work(self, layer: int) -> int:
        """Of a layer at its end: what it has made and doesn't keep, and its output."""
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = product_bytes(sizes, layer)
        made = {"none": 0, "attention": 0, "selective": product}.get(how, (2 + sizes.own.gated) * product)
        moved = sizes.hidden_bytes if sizes.mesh.tp > 1 else 0
        return made + sizes.whole_hidden_bytes + moved

    def _loss_work(self, kept: MemoryTerms) -> MemoryTerms:
        """Logits beside their gradient, which is kept, and float32 copies: of some of them, or with tp of all twice."""
        sizes = self.sizes
        numbers = sizes.tokens * sizes.own.vocab_size
        if sizes.mesh.tp > 1:
            return MemoryTerms(logits=numbers * (self.size + 2 * self.wide) - kept.logits)
        at_once = max(1, self.kernels.loss_numbers // sizes.own.vocab_size) * sizes.own.vocab_size
        copies = 2 * numbers if at_once >= numbers else 3 * at_once  # those of the part before are dropped last
        return MemoryTerms(logits=numbers * self.size, workspace=copies * self.wide)

    def _backward(self, kept: MemoryTerms, weights: bool) -> list[Moment]:
        """`weights`: their gradients are made here, not in W."""
        sizes, size = self.sizes, self.size
        head = self.held.words.whole * size if self.scores and weights else 0
        if self.scores and self.reads and not self.spec.tied_embeddings:
            head //= 2
        reduces = weights and not self.plain and self.zero != "z1"
        replicated = reduces and self.plan.mesh(self.stage).dp_replicate > 1
        """Sums over replicas live until the backward ends; in a step's first they are the gradients themselves."""
        moments = []
        if self.scores:
            extra = MemoryTerms(
                gathered_parameters=self._buckets(1), workspace=head + (1 + self._cut) * sizes.whole_hidden_bytes
            )
            moments.append(Moment("head", extra))
        head = 0 if self.plain else head
        for index in sorted({0, 1, len(self.layers) - 1} & set(range(len(self.layers)))):
            moments += self._layer_backward(index, MemoryTerms(logits=-kept.logits, workspace=head), reduces, weights)
        if weights:
            moments.append(self._root_end(kept, reduces, replicated))
        else:
            words = self.held.words.whole * size // (1 + self.scores) if self.reads else 0
            left = self._deferred(kept) + kept.times(-1) + MemoryTerms(workspace=sizes.hidden_bytes + words)
            moments.append(Moment("inputs", left))
        return moments

    def _layer_backward(self, index: int, base: MemoryTerms, reduces: bool, weights: bool) -> list[Moment]:
        """Where the backward has come to the `index`-th layer from the end: in its MLP, at its end, and where its
        gradients are copied into what is reduced. `base`: what of the stage's ends is there, or no more."""
        layer, held = self.layers[-1 - index], self.held.layers[-1 - index]
        after, wide = self.layers[len(self.layers) - index :], self.wide
        done = sum(self._layer(other) for other in after)
        made = sum(other.whole if self.zero == "z1" else other.shard for other in self.held.layers[-index:] if index)
        replicated = reduces and self.plan.mesh(self.stage).dp_replicate > 1
        reducing = held_before(self.held.layers, index, self.plan.bucket_layers) * wide if reduces else 0
        summing, first = (made * wide, 0) if replicated else (0, made * wide)
        base += MemoryTerms(communication=summing, activations=-done)
        gathered = self._buckets(1) if layer == self.layers[0] else self._buckets_ahead()
        inside = MemoryTerms(gathered_parameters=gathered, communication=reducing)
        work = MemoryTerms(workspace=self._backward_work(layer, weights))
        moments = [Moment(_from_the_end(index), base + inside + work, first)]
        if weights:
            base += MemoryTerms(activations=-self._layer(layer))
            gradients = 0 if self.plain else held.whole * self.size
            complete = MemoryTerms(workspace=self._norm_work + gradients)
            moments.append(Moment("end of a layer", base + inside + complete, first))
            buffers, gradients = self._reducing(held, reduces)
            reduced = MemoryTerms(
                gathered_parameters=self._buckets(1),
                communication=buffers,
                workspace=gradients + self.sizes.hidden_bytes,
            )
            moments.append(Moment("gradients of a layer", base + reduced, first))
        return moments

    @property
    def _cut(self) -> int:
        """Whole hidden states that sequence parallelism gathers within a backward."""
        return 1 if self.sizes.hidden_tokens < self.sizes.tokens else 0

    def _backward_work(self, layer: int, weights: bool) -> int:
        """Of a layer where its gated unit goes backward: the gradient of the output, of the product, of gate and up,
        one more of the same size, and the last matrix's gradient; and what is made again."""
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = product_bytes(sizes, layer)
        again = {"none": 0, "attention": 0, "selective": product}.get(how, -1)
        if again < 0:
            again = self._layer(layer, "none") - self._layer(layer)
        inner = 3 * product if sizes.own.gated else 2 * product
        own = sizes.own
        matrix = own.intermediate_size * own.hidden_size * self.size if weights else 0
        mlp = again + inner + matrix + sizes.hidden_bytes
        return max(mlp, self._norm_work - mlp_bytes(sizes, layer))

    @property
    def _norm_work(self) -> int:
        """A norm's backward: the gradients of its output and of its input, and float32 copies where it isn't fused."""
        sizes = self.sizes
        copies = 0 if self.kernels.fused_norm else 4 * sizes.hidden_tokens * sizes.own.hidden_size * self.wide
        return copies + 2 * sizes.hidden_bytes

    def _reducing(self, held: Held, reduces: bool) -> tuple[int, int]:
        """(buffers, gradients) where gradients that are complete are reduced: they are copied into one buffer, then
        dropped, all but the last (a loop's variable in `foreach_reduce` holds it); the result has another buffer. A
        rank alone divides by 1 on the way, which takes a third."""
        gradients = 0 if self.plain else held.whole * self.size
        if not reduces:
            return 0, gradients
        source, result = held.whole * self.wide, held.shard * self.wide * (1 + self.alone)
        source += source * (self.kernels.copies_whole and not self.alone)
        dropped = gradients if self.alone else gradients - held.last * self.size
        return source + max(0, result - dropped), gradients

    def _root_end(self, kept: MemoryTerms, reduces: bool, replicated: bool) -> Moment:
        """The gradients of embedding and head are reduced last, together; under z3 they are no longer gathered then."""
        root, layers = self.held.root, sum(held.shard for held in self.held.layers)
        if self.zero == "z1":
            layers = sum(held.whole for held in self.held.layers)
        gone = root.whole * self.size if self.zero == "z3" and not self.plain else 0
        communication, gradients = self._reducing(root, reduces)
        extra = MemoryTerms(
            gathered_parameters=-gone,
            activations=-kept.activations,
            logits=-kept.logits,
            communication=communication + (layers * self.wide if replicated else 0),
            workspace=gradients + self.sizes.hidden_bytes,
        )
        return Moment("embedding and head", extra, 0 if replicated else layers * self.wide)

    def _word_bytes(self) -> int:
        plan, stage = self.plan, self.stage
        return word_bytes(self.spec, plan, self.workload, plan.pp_rank(stage)) if has_words(plan, stage) else 0

    def _word_passes(self) -> dict[str, tuple[Moment, ...]]:
        """S: logits, and two float32 copies of them, one of which is kept. T: a copy of the softmax as products take
        it, and the head's gradient."""
        if not has_words(self.plan, self.stage):
            return {}
        rows = shard_rows(self.spec.vocab_size, self.plan.pp, self.plan.pp_rank(self.stage))[1]
        numbers = rows * self.sizes.tokens
        head = rows * self.spec.hidden_size * self.size
        return {
            "S": (Moment("scores", MemoryTerms(logits=numbers * (self.size + self.wide))),),
            "T": (Moment("head", MemoryTerms(logits=numbers * self.size, workspace=head)),),
        }

    def _weights(self) -> Moment:
        """W: the gradients of all the stage's layers, before they are reduced one by one."""
        layers = sum(held.whole for held in self.held.layers)
        reducing = 0 if self.plain or self.zero == "z1" else max((h.whole for h in self.held.layers), default=0)
        made = MemoryTerms(communication=reducing * self.wide, workspace=0 if self.plain else layers * self.size)
        return Moment("weights", made)

    def _gather(self, kept: MemoryTerms | None) -> Moment:
        """z3: embedding and head are copied from the gather's buffer to their places, before a forward, of which
        nothing is kept yet, or before a backward, when the last layers are there already."""
        root = self.held.root.whole * self.size if self.zero == "z3" and not self.plain else 0
        if kept is None:
            return Moment(_GATHERING, MemoryTerms(gathered_parameters=root + self._buckets_ahead()))
        return Moment(
            _GATHERING, MemoryTerms(gathered_parameters=root, activations=-kept.activations, logits=-kept.logits)
        )

    def _unshard(self) -> Moment:
        """All groups' gathers are under way, and the first one is copied to its place."""
        largest = max([self.held.root.whole, *(held.whole for held in self.held.layers)])
        return Moment(
            "gathering", MemoryTerms(gathered_parameters=largest * self.size * (1 + self.kernels.copies_whole))
        )

    def _reduce(self) -> Moment:
        largest = max([self.held.root.whole, *(held.whole for held in self.held.layers)])
        return Moment("reducing", MemoryTerms(communication=largest * self.wide * (1 + self.kernels.copies_whole)))


def _from_the_end(index: int) -> str:
    return ("last layer", "layer before the last")[index] if index < 2 else "first layer"


def held_before(layers: tuple[Held, ...], index: int, bucket: int) -> int:
    """Numbers of the bucket of layers whose gradients were reduced just before, and whose buffer lives on."""
    if index == 0:
        return 0
    return sum(held.whole for held in layers[-min(bucket, len(layers)) :]) if bucket == 1 else 0
