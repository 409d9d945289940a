"""When a stage in Muster's own storage holds most within its passes: what `fully_shard` gathers and reduces, what
layers work with, and what they make again.

Follows the runtime buffer by buffer, as `muster.cost.own_storage` does.
"""

from dataclasses import dataclass

from muster.cost.activations import mlp_bytes, offloaded_bytes, product_bytes, word_bytes
from muster.cost.holdings import Held
from muster.cost.memory import MemoryTerms
from muster.cost.own_storage import MOMENTS, OwnStorage
from muster.cost.stage_memory import Moment, StageMemory
from muster.spec.layout import has_words, shard_rows
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
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
    spec: ModelSpec, plan: Plan, workload: Workload, stage: int, kernels: Kernels, state_numbers: float = MOMENTS
) -> StageMemory:
    """A stage in Muster's own storage. `state_numbers`: what the optimizer keeps of each parameter."""
    own = OwnStorage(spec, plan, workload, stage, state_numbers)
    moments = _Moments(own, kernels)
    # Each receive is posted ahead of its use, and one gradient is on its way to the stage before.
    buffers = 2 * plan.receives(stage) + plan.sends(stage)
    gathered = own.held.root if own.zero == "z3" else own.held.all
    words = word_bytes(spec, plan, workload, plan.pp_rank(stage)) if has_words(plan, stage) else 0
    return StageMemory(
        resident=MemoryTerms(
            parameters=own.parameters, optimizer=own.optimizer, communication=buffers * own.sizes.hidden_bytes
        ),
        gathered=0 if own.plain else gathered.whole * own.size,
        stays=own.zero != "z3",
        gradients=own.gradients,
        kept=moments.kept,
        offloaded=MemoryTerms(activations=offloaded_bytes(spec, plan, workload, stage)),
        deferred=own.deferred(),
        words=MemoryTerms(logits=words),
        moments={
            "F": tuple(moments.forward()),
            "B": tuple(moments.backward(weights=True)),
            "I": tuple(moments.backward(weights=False)),
            "W": (moments.weights(),),
            **moments.word_passes(),
            "gather F": (moments.gather_before_forward(),),
            "gather B": (moments.gather_before_backward(),),
            "UNSHARD": (moments.unshard(),),
            "REDUCE": (moments.reduce(),),
            "MERGE": (Moment("copies swapped", MemoryTerms(communication=2 * own.parameters)),),
        },
    )


class _Moments:
    """The moments of one stage's passes and collectives; every quantity in bytes."""

    def __init__(self, stage: OwnStorage, kernels: Kernels) -> None:
        self.stage, self.kernels, self.plan, self.sizes = stage, kernels, stage.plan, stage.sizes
        self.held, self.layers, self.size, self.wide = stage.held, stage.layers, stage.size, stage.wide
        self.kept = stage.kept()
        self.sums_replicas = stage.reduces_in_passes and stage.plan.mesh(stage.index).dp_replicate > 1
        """Whether sums over replicas live until a backward ends; in a step's first they are the gradients."""

    def _buckets(self, count: int) -> int:
        """Whole parameters of that many buckets of layers, gathered within a pass."""
        if not self.stage.gathers_in_passes:
            return 0
        largest = sorted((held.whole for held in self.held.layers), reverse=True)
        return sum(largest[: count * self.plan.bucket_layers]) * self.size

    def _buckets_ahead(self) -> int:
        """Those of a layer, and of the ones that are gathered meanwhile."""
        here, ahead = self._buckets(1), self._buckets(1 + self.plan.prefetch_buckets)
        return ahead + (ahead - here) * self.kernels.copies_whole

    def forward(self) -> list[Moment]:
        moments = []
        if self.layers:
            last = self.stage.layer_bytes(self.layers[-1])
            work, logits = self._forward_work(self.layers[-1]), -self.kept.logits
            after = MemoryTerms(gathered_parameters=self._buckets(1), workspace=work, logits=logits)
            before = MemoryTerms(
                gathered_parameters=self._buckets_ahead(), activations=-last, workspace=work, logits=logits
            )
            moments += [Moment("last layer", after), Moment("layer before the last", before)]
        if self.stage.scores:
            moments.append(Moment("loss", self._loss_work()))
        return moments

    def _forward_work(self, layer: int) -> int:
        """Of a layer at its end: what it has made and doesn't keep, and its output."""
        sizes, how = self.sizes, self.plan.strategy(layer).recompute
        product = product_bytes(sizes, layer)
        made = {"none": 0, "attention": 0, "selective": product}.get(how, (2 + sizes.own.gated) * product)
        moved = sizes.hidden_bytes if sizes.mesh.tp > 1 else 0
        return made + sizes.whole_hidden_bytes + moved

    def _loss_work(self) -> MemoryTerms:
        """Logits beside their gradient, which is kept, and float32 copies: of some of them, or with tp of all twice."""
        sizes = self.sizes
        numbers = sizes.tokens * sizes.own.vocab_size
        if sizes.mesh.tp > 1:
            return MemoryTerms(logits=numbers * (self.size + 2 * self.wide) - self.kept.logits)
        at_once = max(1, self.kernels.loss_numbers // sizes.own.vocab_size) * sizes.own.vocab_size
        copies = 2 * numbers if at_once >= numbers else 3 * at_once  # those of the part before are dropped last
        return MemoryTerms(logits=numbers * self.size, workspace=copies * self.wide)

    def backward(self, weights: bool) -> list[Moment]:
        """`weights`: their gradients are made here, not in W."""
        sizes, size = self.sizes, self.size
        head = self.held.words.whole * size if self.stage.scores and weights else 0
        if self.stage.scores and self.stage.reads and not self.stage.spec.tied_embeddings:
            head //= 2
        moments = []
        if self.stage.scores:
            extra = MemoryTerms(
                gathered_parameters=self._buckets(1), workspace=head + (1 + self._cut) * sizes.whole_hidden_bytes
            )
            moments.append(Moment("head", extra))
        head = 0 if self.stage.plain else head
        for index in sorted({0, 1, len(self.layers) - 1} & set(range(len(self.layers)))):
            moments += self._layer_backward(index, MemoryTerms(logits=-self.kept.logits, workspace=head), weights)
        if weights:
            moments.append(self._root_end())
        else:
            words = self.held.words.whole * size // (1 + self.stage.scores) if self.stage.reads else 0
            left = self.stage.deferred() + self.kept.times(-1) + MemoryTerms(workspace=sizes.hidden_bytes + words)
            moments.append(Moment("inputs", left))
        return moments

    def _layer_backward(self, index: int, base: MemoryTerms, weights: bool) -> list[Moment]:
        """Where the backward has come to the `index`-th layer from the end: in its MLP, at its end, and where its
        gradients are copied into what is reduced. `base`: what of the stage's ends is there, or no more."""
        layer, held = self.layers[-1 - index], self.held.layers[-1 - index]
        done = sum(map(self.stage.layer_bytes, self.layers[len(self.layers) - index :]))
        made = sum(map(self.stage.gradients_of, self.held.layers[len(self.layers) - index :]))
        reducing = held_before(self.held.layers, index, self.plan.bucket_layers) * self.wide
        reducing *= weights and self.stage.reduces_in_passes
        summing, first = (made, 0) if weights and self.sums_replicas else (0, made)
        base += MemoryTerms(communication=summing, activations=-done)
        gathered = self._buckets(1) if layer == self.layers[0] else self._buckets_ahead()
        inside = MemoryTerms(gathered_parameters=gathered, communication=reducing)
        work = MemoryTerms(workspace=self._backward_work(layer, weights))
        moments = [Moment(_from_the_end(index), base + inside + work, first)]
        if weights:
            base += MemoryTerms(activations=-self.stage.layer_bytes(layer))
            gradients = 0 if self.stage.plain else held.whole * self.size
            complete = MemoryTerms(workspace=self._norm_work + gradients)
            moments.append(Moment("end of a layer", base + inside + complete, first))
            buffers, gradients = self._reducing(held)
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
            again = self.stage.layer_bytes(layer, "none") - self.stage.layer_bytes(layer)
        inner = 3 * product if sizes.own.gated else 2 * product
        matrix = sizes.own.intermediate_size * sizes.own.hidden_size * self.size if weights else 0
        mlp = again + inner + matrix + sizes.hidden_bytes
        return max(mlp, self._norm_work - mlp_bytes(sizes, layer))

    @property
    def _norm_work(self) -> int:
        """A norm's backward: the gradients of its output and of its input, and float32 copies where it isn't fused."""
        sizes = self.sizes
        copies = 0 if self.kernels.fused_norm else 4 * sizes.hidden_tokens * sizes.own.hidden_size * self.wide
        return copies + 2 * sizes.hidden_bytes

    def _reducing(self, held: Held) -> tuple[int, int]:
        """(buffers, gradients) where gradients that are complete are reduced: they are copied into one buffer, then
        dropped, all but the last (a loop's variable in `foreach_reduce` holds it); the result has another buffer. A
        rank alone divides by 1 on the way, which takes a third."""
        gradients = 0 if self.stage.plain else held.whole * self.size
        if not self.stage.reduces_in_passes:
            return 0, gradients
        source, result = held.whole * self.wide, held.shard * self.wide * (1 + self.stage.alone)
        source += source * (self.kernels.copies_whole and not self.stage.alone)
        dropped = gradients if self.stage.alone else gradients - held.last * self.size
        return source + max(0, result - dropped), gradients

    def _root_end(self) -> Moment:
        """The gradients of embedding and head are reduced last, together; under z3 they are no longer gathered then."""
        root, layers = self.held.root, sum(map(self.stage.gradients_of, self.held.layers))
        communication, gradients = self._reducing(root)
        extra = MemoryTerms(
            gathered_parameters=-self._root_buffer(),
            activations=-self.kept.activations,
            logits=-self.kept.logits,
            communication=communication + layers * self.sums_replicas,
            workspace=gradients + self.sizes.hidden_bytes,
        )
        return Moment("embedding and head", extra, 0 if self.sums_replicas else layers)

    def word_passes(self) -> dict[str, tuple[Moment, ...]]:
        """S: logits, and two float32 copies of them, one of which is kept. T: a copy of the softmax as products take
        it, and the head's gradient."""
        if not has_words(self.plan, self.stage.index):
            return {}
        rows = shard_rows(self.stage.spec.vocab_size, self.plan.pp, self.plan.pp_rank(self.stage.index))[1]
        numbers = rows * self.sizes.tokens
        head = rows * self.stage.spec.hidden_size * self.size
        return {
            "S": (Moment("scores", MemoryTerms(logits=numbers * (self.size + self.wide))),),
            "T": (Moment("head", MemoryTerms(logits=numbers * self.size, workspace=head)),),
        }

    def weights(self) -> Moment:
        """W: the gradients of all the stage's layers, before they are reduced one by one."""
        layers = sum(held.whole for held in self.held.layers)
        reducing = max((held.whole for held in self.held.layers), default=0) * self.stage.reduces_in_passes
        made = MemoryTerms(communication=reducing * self.wide, workspace=0 if self.stage.plain else layers * self.size)
        return Moment("weights", made)

    def gather_before_forward(self) -> Moment:
        """z3: embedding and head are copied from the gather's buffer to their places, when nothing is kept yet."""
        extra = MemoryTerms(
            gathered_parameters=self._root_buffer(),
            activations=-self.kept.activations,
            logits=-self.kept.logits,
        )
        return Moment(_GATHERING, extra)

    def gather_before_backward(self) -> Moment:
        """The same when the last layers are there already."""
        return Moment(_GATHERING, MemoryTerms(gathered_parameters=self._root_buffer() + self._buckets_ahead()))

    def _root_buffer(self) -> int:
        """Embedding and head as passes gather them."""
        return self.held.root.whole * self.size if self.stage.gathers_in_passes else 0

    def unshard(self) -> Moment:
        """All groups' gathers are under way, and the first one is copied to its place."""
        buffers = self._largest() * self.size * (1 + self.kernels.copies_whole)
        return Moment("gathering", MemoryTerms(gathered_parameters=buffers))

    def reduce(self) -> Moment:
        """Groups are reduced one after the other."""
        buffers = self._largest() * self.wide * (1 + self.kernels.copies_whole)
        return Moment("reducing", MemoryTerms(communication=buffers))

    def _largest(self) -> int:
        """Numbers of the largest group that is gathered or reduced at once."""
        return max([self.held.root.whole, *(held.whole for held in self.held.layers)])


def _from_the_end(index: int) -> str:
    return ("last layer", "layer before the last")[index] if index < 2 else "first layer"


def held_before(layers: tuple[Held, ...], index: int, bucket: int) -> int:
    """Numbers of the bucket of layers whose gradients were reduced just before, and whose buffer lives on."""
    if index == 0:
        return 0
    return sum(held.whole for held in layers[-min(bucket, len(layers)) :]) if bucket == 1 else 0
