"""What is trained: the shape of a decoder."""

from collections.abc import Iterator

from pydantic import PositiveFloat, PositiveInt, model_validator

from muster.spec.base import Frozen


class ModelSpec(Frozen):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    `num_kv_heads` and `head_dim` default to `num_heads` and `hidden_size // num_heads`.
    """

    name: str = "custom"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt = 0  # type: ignore[assignment]  # filled in below
    head_dim: PositiveInt = 0  # type: ignore[assignment]
    intermediate_size: PositiveInt
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-5
    tied_embeddings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("num_heads"):
            data = {"num_kv_heads": data["num_heads"], **data}
            if data.get("hidden_size"):
                data = {"head_dim": int(data["hidden_size"]) // int(data["num_heads"]), **data}
        return data

    @model_validator(mode="after")
    def _check(self) -> "ModelSpec":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but rotary positions turn pairs of numbers")
        return self

    @property
    def num_parameters(self) -> int:
        """All trained numbers; a tied embedding counts once."""
        return sum(_size(shape) for _, shape in parameters(self))


def layer_parameters(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter of one decoder layer, in the order in which they are used."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "attn_norm.weight": (hidden,),
        "attn.q.weight": (q_width, hidden),
        "attn.k.weight": (kv_width, hidden),
        "attn.v.weight": (kv_width, hidden),
        "attn.o.weight": (hidden, q_width),
        "mlp_norm.weight": (hidden,),
        "mlp.gate.weight": (inner, hidden),
        "mlp.up.weight": (inner, hidden),
        "mlp.down.weight": (hidden, inner),
    }
    for name, shape in shapes.items():
        yield f"layers.{layer}.{name}", shape


def stage_parameters(spec: ModelSpec, layers: range, first: bool, last: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter that a stage holds.

    A tied embedding is called `embed.weight` wherever it lies: on the first stage, and again on the last one.
    """
    if first:
        yield "embed.weight", (spec.vocab_size, spec.hidden_size)
    for layer in layers:
        yield from layer_parameters(spec, layer)
    if last:
        yield "norm.weight", (spec.hidden_size,)
        if not spec.tied_embeddings:
            yield "head.weight", (spec.vocab_size, spec.hidden_size)
        elif not first:
            yield "embed.weight", (spec.vocab_size, spec.hidden_size)


def parameters(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter of the whole one-process model."""
    return stage_parameters(spec, range(spec.num_layers), first=True, last=True)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
