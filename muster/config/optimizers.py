"""Registry of Muster's optimizers: one entry each, which declares everything that other rooms need to know.

To add an optimizer, write `muster/optim/NAME.py` and an entry here. The entry gives the run file its keys and defaults,
the forecasts of memory, time and communication their figures, checkpoints the names of the state tensors, and the
runtime the class to import. This module needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any, Literal

from muster.layout.matrix_owners import newton_schulz_work

StateDtype = Literal["fp64", "fp32", "bf16", "fp16", "uint8"]
DTYPE_BYTES: Mapping[StateDtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that an optimizer stores for each parameter, with the parameter's shape and layout, or with a shape
    of its own, whole on the rank that updates the matrix.

    In a checkpoint it is called `optim/PARAMETER.NAME`.
    """

    name: str
    dtype: StateDtype | None = None
    """None: the dtype of the master weights."""
    required_key: str | None = None
    """A key of the section `optim`; the tensor exists only where that key is not 0."""
    owned_shape: Callable[[Shape, Any], Shape] | None = None
    """Shape of the state of a whole matrix of some shape, under the section `optim`, which the matrix's owner alone
    stores. None: each rank stores elements for those of the parameter that it holds."""

    def element_bytes(self, master_bytes: int) -> int:
        """Return the bytes of one element; `master_bytes` is the size of an element of the master weights."""
        return master_bytes if self.dtype is None else DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Update of the parameters of one kind."""

    state: tuple[StateTensor, ...]
    matrix_flops: Callable[[Shape, Any], float] | None = None
    """FLOPs of an update of one matrix, by shape and section `optim`, for an update that needs the whole matrix on one
    rank: ranks that share a matrix send its parts to one of them and get the parts of the result back. None: an
    elementwise update, which each rank does for the elements that it holds and which is bound by memory traffic."""
    matrix_precision_key: str | None = None
    """The key of the section `optim` that says in which precision whole matrices are exchanged and computed on; fp32
    stands for the master weights' dtype. None: always the master weights' dtype."""
    reads_gradient: bool = True
    """False if an update needs no gradient of each element."""
    drawn_bytes: int = 0
    """Bytes that drawing an update's random numbers moves for each element."""

    @property
    def has_owned_state(self) -> bool:
        """True if matrices' owners store states of their own shapes."""
        return any(tensor.owned_shape is not None for tensor in self.state)

    def bytes_per_element(self, state_bytes: float, master_bytes: int, compute_bytes: int) -> float:
        """Return the memory traffic of an update for each element of a parameter with so many bytes of state.

        The master weight and every state tensor are read and written, the gradient is read, and the weight that the
        next passes use is written. With fp32 master weights and bf16 passes AdamW moves 3 · 8 + 4 + 2 = 30 bytes
        (arXiv:1711.05101, algorithm 2).
        """
        gradient = master_bytes * self.reads_gradient
        return 2 * (master_bytes + state_bytes) + gradient + compute_bytes + self.drawn_bytes


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """Declaration of one optimizer."""

    implementation: str
    """`module:Class` of a subclass of `muster.optim.base.Optimizer`."""
    rule: UpdateRule
    """Update of all parameters, or of all but the decoder layers' matrices where `matrix_rule` is given."""
    matrix_rule: UpdateRule | None = None
    """Update of the decoder layers' matrices (neither embeddings nor the head)."""
    keys: frozenset[str] = frozenset()
    """Keys of the section `optim` that only some optimizers read, and this one does."""
    defaults: Mapping[str, float | bool] = field(default_factory=dict)
    """Published values that differ from the section's own defaults."""
    is_zeroth_order: bool = False
    """True if a step compares the losses at two perturbations of the parameters: it has no backward and no
    gradients."""

    def rule_of(self, name: str, shape: tuple[int, ...]) -> UpdateRule:
        """Return the rule for one parameter, by its name and global shape."""
        return self.matrix_rule if self.matrix_rule is not None and is_layer_matrix(name, shape) else self.rule


def is_layer_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Tell if a parameter is a matrix of a decoder layer: it has two dimensions and is no embedding, position table,
    output head, or the biases of several experts. `shape` is the global one."""
    module, _, leaf = name.rpartition(".")
    return len(shape) == 2 and leaf != "bias" and module.rpartition(".")[2] not in ("embed", "positions", "head")


NEWTON_SCHULZ_STEPS = 5
"""Steps by which Muon makes a matrix orthogonal (https://kellerjordan.github.io/posts/muon/)."""


def _newton_schulz_flops(shape: Shape, _: Any) -> float:
    """Return the FLOPs of Muon's Newton–Schulz steps on a matrix, a multiplication and an addition counting 2."""
    return NEWTON_SCHULZ_STEPS * 2 * newton_schulz_work(shape)


ADAMW_UPDATE = UpdateRule(state=(StateTensor("exp_avg"), StateTensor("exp_avg_sq")))
_ADAMW_KEYS = frozenset({"beta1", "beta2", "eps"})
_MOMENTUM_KEYS = frozenset({"momentum", "nesterov"})


def _low_rank(shape: Shape, optim: Any) -> int:
    return min(optim.rank, *shape)


def _projected(shape: Shape, optim: Any) -> Shape:
    """Return the shape of a gradient whose shorter side is projected to `rank` elements."""
    rows, cols = shape
    return (rows, _low_rank(shape, optim)) if rows >= cols else (_low_rank(shape, optim), cols)


def _projector(shape: Shape, optim: Any) -> Shape:
    """Return the shape of the matrix that projects it: rows of it on the right, columns on the left."""
    rows, cols = shape
    return (_low_rank(shape, optim), cols) if rows >= cols else (rows, _low_rank(shape, optim))


def _projection_flops(shape: Shape, optim: Any) -> float:
    return 2.0 * prod(shape) * _low_rank(shape, optim)


SVD_FLOPS = 22
"""FLOPs of a full singular value decomposition, divided by long · short² (Golub and Van Loan, Matrix Computations,
§8.6)."""


def _galore_flops(shape: Shape, optim: Any) -> float:
    """Return the FLOPs of projecting there and back, and the step's share of finding the projector."""
    svd = SVD_FLOPS * max(shape) * min(shape) ** 2 / optim.update_proj_gap
    return 2 * _projection_flops(shape, optim) + svd


def _history(shape: Shape, optim: Any) -> Shape:
    """Return the shape of the last projected gradients."""
    return (optim.gradient_history, *_projected(shape, optim))


def _natural_galore_flops(shape: Shape, optim: Any) -> float:
    """Return GaLore's FLOPs, and those of the products of the last gradients and of their weighted sum."""
    last = optim.gradient_history
    return _galore_flops(shape, optim) + 2.0 * (last + 1) * prod(_history(shape, optim))


def _passes_flops(shape: Shape, _: Any) -> float:
    """Return the FLOPs of an update that passes a few times over the elements of a whole matrix."""
    return 10.0 * prod(shape)


QUANTIZED_BLOCK = 256
"""Elements of a state in 8 bits that share a scale (T. Dettmers et al., arXiv:2110.02861 §2.1 has 2048, bitsandbytes
256)."""


def _blocks(shape: Shape, _: Any) -> Shape:
    return (ceil(prod(shape) / QUANTIZED_BLOCK),)


_PROJECTED_MOMENTS = tuple(StateTensor(name, owned_shape=_projected) for name in ("exp_avg", "exp_avg_sq"))
_PROJECTION_KEYS = _ADAMW_KEYS | {"rank", "update_proj_gap", "scale"}
_APOLLO_RULE = UpdateRule(
    state=(*_PROJECTED_MOMENTS, StateTensor("update_norm", owned_shape=lambda *_: (1,))),
    matrix_flops=_projection_flops,
)

PERTURBATION_BYTES = 100
"""Bytes of memory traffic for which drawing one element of a perturbation counts (`muster.model.perturbation`): its 20
operators on 8-byte integers move four times as many, but between a core and its cache. It is 11 ns on a core that
streams 9 GB/s; on a GPU it is an assumption."""

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        "muster.optim.adamw:AdamW", ADAMW_UPDATE, keys=_ADAMW_KEYS | {"nesterov", "delay_compensation"}
    ),
    "sgd": OptimizerEntry(
        "muster.optim.sgd:SGD",
        UpdateRule(state=(StateTensor("momentum", required_key="momentum"),)),
        keys=_MOMENTUM_KEYS | {"delay_compensation"},
        defaults={"momentum": 0.9},
    ),
    "muon": OptimizerEntry(
        "muster.optim.muon:Muon",
        ADAMW_UPDATE,
        matrix_rule=UpdateRule(
            state=(StateTensor("momentum"),),
            matrix_flops=_newton_schulz_flops,
            matrix_precision_key="muon_precision",
        ),
        keys=_ADAMW_KEYS | _MOMENTUM_KEYS | {"muon_scale", "muon_lr_ratio", "muon_precision"},
        defaults={"momentum": 0.95, "nesterov": True},
    ),
    "lion": OptimizerEntry(
        "muster.optim.lion:Lion",
        UpdateRule(state=(StateTensor("exp_avg"),)),
        keys=frozenset({"beta1", "beta2", "delay_compensation"}),
        defaults={"beta2": 0.99},
    ),
    "galore": OptimizerEntry(
        "muster.optim.galore:GaLore",
        ADAMW_UPDATE,
        matrix_rule=UpdateRule(
            state=(*_PROJECTED_MOMENTS, StateTensor("projector", owned_shape=_projector)), matrix_flops=_galore_flops
        ),
        keys=_PROJECTION_KEYS,
    ),
    "natural_galore": OptimizerEntry(
        "muster.optim.natural_galore:NaturalGaLore",
        ADAMW_UPDATE,
        matrix_rule=UpdateRule(
            state=(
                *_PROJECTED_MOMENTS,
                StateTensor("projector", owned_shape=_projector),
                StateTensor("last_gradients", owned_shape=_history),
            ),
            matrix_flops=_natural_galore_flops,
        ),
        keys=_PROJECTION_KEYS | {"gradient_history", "damping"},
    ),
    "apollo": OptimizerEntry(
        "muster.optim.apollo:Apollo",
        ADAMW_UPDATE,
        matrix_rule=_APOLLO_RULE,
        keys=_PROJECTION_KEYS,
        defaults={"scale": 1.0},
    ),
    "apollo_mini": OptimizerEntry(
        "muster.optim.apollo:ApolloMini",
        ADAMW_UPDATE,
        matrix_rule=_APOLLO_RULE,
        keys=_PROJECTION_KEYS,
        defaults={"rank": 1, "scale": 128.0},
    ),
    "adafactor": OptimizerEntry(
        "muster.optim.adafactor:Adafactor",
        ADAMW_UPDATE,
        matrix_rule=UpdateRule(
            state=(
                StateTensor("exp_avg_sq_row", owned_shape=lambda shape, _: shape[:1]),
                StateTensor("exp_avg_sq_col", owned_shape=lambda shape, _: shape[1:]),
            ),
            matrix_flops=_passes_flops,
        ),
        keys=_ADAMW_KEYS,
    ),
    "mezo": OptimizerEntry(
        "muster.optim.mezo:MeZO",
        UpdateRule(state=(), reads_gradient=False, drawn_bytes=PERTURBATION_BYTES),
        keys=frozenset({"zo_eps", "perturbation_parallel"}),
        defaults={"weight_decay": 0.0, "clip_norm": 0.0},
        is_zeroth_order=True,
    ),
    "adamw_8bit": OptimizerEntry(
        "muster.optim.adamw_8bit:AdamW8bit",
        ADAMW_UPDATE,
        matrix_rule=UpdateRule(
            state=tuple(
                tensor
                for name in ("exp_avg", "exp_avg_sq")
                for tensor in (
                    StateTensor(name, "uint8", owned_shape=lambda shape, _: shape),
                    StateTensor(f"{name}_scale", "fp32", owned_shape=_blocks),
                )
            ),
            matrix_flops=_passes_flops,
        ),
        keys=_ADAMW_KEYS,
    ),
}
"""Muster's optimizers by their name in run files."""
