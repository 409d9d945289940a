"""Low-rank adapters beside the linear layers of a frozen model: which layers have one, its parameters and their
shapes.

LoRA (E. Hu et al., arXiv:2106.09685 §4.1) adds scaling · B A x to a frozen W x, where A is (r, input width) and B
(output width, r); B begins at 0. Keys and names of parameters are those of PEFT (github:huggingface/peft).
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, PositiveInt, field_validator, model_validator

from muster.spec.base import Fraction, Frozen, Positive
from muster.spec.suggest import did_you_mean

ROW_PARALLEL = ("o", "down", "conjunction")
"""Linear layers that lead back to the hidden state: tensor parallelism cuts their columns, and those of their A."""
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a decoder layer that may have an adapter."""
_PEFT_NAMES = {f"{name}_proj": name for name in TARGETS}
ADAPTER_FREEZE = ("*", "!*.lora_*")
"""Patterns of `optim.freeze` that leave adapters alone trained."""
MAGNITUDE = "lora_magnitude_vector"
"""Module of the lengths of rows, in DoRA."""


def _read_targets(names: object) -> object:
    """Return names of linear layers in Muster's words and order, of a list or one text; others come last."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        return names
    found = {_PEFT_NAMES.get(name, name) for name in names}
    return tuple(name for name in TARGETS if name in found or "all-linear" in found) + tuple(
        sorted(found - {*TARGETS, "all-linear"})
    )


def _check_targets(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError(f"no linear layer is named, expected some of {', '.join(TARGETS)}")
    for name in names:
        if name not in TARGETS:
            hint = did_you_mean(name, (*TARGETS, *_PEFT_NAMES, "all-linear"))
            raise ValueError(
                f"no linear layer is called {name!r}, expected some of {', '.join(TARGETS)} or all-linear{hint}"
            )
    return names


Targets = Annotated[tuple[str, ...], BeforeValidator(_read_targets), AfterValidator(_check_targets)]
"""Names of linear layers of a decoder layer."""


class AdapterSpec(Frozen):
    """Adapters of a model, the only parameters that a run with them trains. Keys are PEFT's `LoraConfig`'s."""

    kind: Literal["lora", "pissa", "dora", "hd_pissa"] = "lora"
    """Kind of adapter. lora: scaling · B A x is added to W x (arXiv:2106.09685 §4.1). pissa: likewise, but scaling · B
    A begins as the part of W that belongs to its `r` largest singular values, and W without it is frozen
    (arXiv:2404.02948 §3). dora: as lora, and each row of the sum is scaled to a trained length (arXiv:2402.09353
    §4). hd_pissa: each of `parts` parts of the batch trains its own `r` singular values of W, and all of their updates
    are added to W in each step (arXiv:2505.18777)."""
    r: PositiveInt = 8
    """Rank: rows of A and columns of B; at most the shorter side of each weight."""
    lora_alpha: Positive = 8.0
    """The scaling of B A is lora_alpha / r."""
    parts: PositiveInt = 1
    """hd_pissa: equal parts of the global batch, each with adapters of its own; published with one for each device."""
    use_rslora: bool = False
    """The scaling is lora_alpha / √r, which keeps outputs as large at any rank (arXiv:2312.03732)."""
    lora_dropout: Fraction = 0.0
    """lora, pissa: rate at which training drops elements of the input of A, by masks that all plans share."""
    load_in_4bit: bool = False
    """lora, pissa, dora: hold the frozen weights of all linear layers of the decoder layers in 4 bits, NF4 with double
    quantization (QLoRA, arXiv:2305.14314 §3; bitsandbytes' name)."""
    target_modules: Targets = ("q", "v")
    """Linear layers with an adapter, in every decoder layer: q, k, v, o, gate, up, down, or PEFT's names (q_proj), or
    all-linear for all of these. One text holds several, with commas between them."""

    @field_validator("kind", mode="before")
    @classmethod
    def _check_kind(cls, kind: object) -> object:
        if kind == "qlora":
            raise ValueError("qlora is kind lora with load_in_4bit true: give these")
        return kind

    @model_validator(mode="after")
    def _check_parts(self) -> "AdapterSpec":
        if self.parts > 1 and self.kind != "hd_pissa":
            raise ValueError(f"parts {self.parts} is for kind hd_pissa, but {self.kind} is chosen; leave it out")
        if self.lora_dropout and self.kind not in ("lora", "pissa"):
            raise ValueError(
                f"lora_dropout {self.lora_dropout:g} is for kinds lora and pissa, but {self.kind} is chosen;"
                " leave it out"
            )
        if self.load_in_4bit and self.changes_weights:
            raise ValueError(f"load_in_4bit is for frozen weights, which {self.kind} changes; take kind pissa or lora")
        return self

    @property
    def width(self) -> int:
        """Rows of A and columns of B, of all parts together."""
        return self.r * self.parts

    def is_continued_by(self, other: "AdapterSpec") -> bool:
        """Return True if a run with `other` goes on with these adapters."""
        free = {"lora_dropout", "load_in_4bit"}
        return self.model_dump(exclude=free) == other.model_dump(exclude=free)

    @property
    def changes_weights(self) -> bool:
        """True if steps add what adapters learn to the weights beside them."""
        return self.kind == "hd_pissa"

    @property
    def needs_whole_rows(self) -> bool:
        """True if a layer whose columns tensor parallelism cuts trains the lengths of its rows."""
        return self.kind == "dora" and any(name in ROW_PARALLEL for name in self.target_modules)

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


def with_adapters(
    adapter: AdapterSpec, shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a decoder layer, each adapter's behind its linear layer's own."""
    waiting: tuple[str, tuple[int, ...]] | None = None
    for name, shape in shapes:
        module, _, leaf = name.rpartition(".")
        if waiting is not None and waiting[0] != module:
            yield from adapter_shapes(adapter, *waiting)
            waiting = None
        if leaf == "weight" and module.rpartition(".")[2] in adapter.target_modules:
            waiting = module, shape
        yield name, shape
    if waiting is not None:
        yield from adapter_shapes(adapter, *waiting)


def adapter_shapes(adapter: AdapterSpec, module: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of the adapter of a linear layer whose weight has this shape."""
    yield f"{module}.lora_A.weight", (adapter.width, shape[1])
    yield f"{module}.lora_B.weight", (shape[0], adapter.width)
    if adapter.kind == "dora":
        yield f"{module}.{MAGNITUDE}.weight", (shape[0],)


def is_adapter(name: str) -> bool:
    """Return True for a parameter of an adapter."""
    return ".lora_" in name


def adapted_module(name: str) -> tuple[str, str]:
    """Return the linear layer that a parameter of an adapter belongs to, and its place there: lora_A, lora_B or
    lora_magnitude_vector."""
    module, _, rest = name.partition(".lora_")
    return module, "lora_" + rest.partition(".")[0]
