"""Registry of Muster's optimizers: one entry each, which declares everything that other rooms need to know.

To add an optimizer, write `muster/optim/NAME.py` and an entry here. The entry gives the run file its keys and defaults,
the forecasts of memory, time and communication their figures, checkpoints the names of the state tensors, and the
runtime the class to import. This module needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from muster.layout.matrix_owners import newton_schulz_work

StateDtype = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPE_BYTES: Mapping[StateDtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor that an optimizer stores for each parameter, with the parameter's shape and layout.

    In a checkpoint it is called `optim/PARAMETER.NAME`.
    """

    name: str
    dtype: StateDtype | None = None
    """None: the dtype of the master weights."""
    required_key: str | None = None
    """A key of the section `optim`; the tensor exists only where that key is not 0."""

    def element_bytes(self, master_bytes: int) -> int:
        """Return the bytes of one element; `master_bytes` is the size of an element of the master weights."""
        return master_bytes if self.dtype is None else DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Update of the parameters of one kind."""

    state: tuple[StateTensor, ...]
    matrix_flops: Callable[[tuple[int, ...]], float] | None = None
    """FLOPs of an update of one matrix, by shape, for an update that needs the whole matrix on one rank: ranks that
    share a matrix send its parts to one of them and get the parts of the result back. None: an elementwise update,
    which each rank does for the elements that it holds and which is bound by memory traffic."""
    matrix_precision_key: str | None = None
    """The key of the section `optim` that says in which precision whole matrices are exchanged and computed on; fp32
    stands for the master weights' dtype. None: always the master weights' dtype."""

    def bytes_per_element(self, state: tuple[StateTensor, ...], master_bytes: int, compute_bytes: int) -> int:
        """Return the memory traffic of an update for each element of a parameter.

        The master weight and every state tensor are read and written, the gradient is read, and the weight that the
        next passes use is written. With fp32 master weights and bf16 passes AdamW moves 3 · 8 + 4 + 2 = 30 bytes
        (arXiv:1711.05101, algorithm 2).
        """
        stored = master_bytes + sum(tensor.element_bytes(master_bytes) for tensor in state)
        return 2 * stored + master_bytes + compute_bytes


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


def _newton_schulz_flops(shape: tuple[int, ...]) -> float:
    """Return the FLOPs of Muon's Newton–Schulz steps on a matrix, a multiplication and an addition counting 2."""
    return NEWTON_SCHULZ_STEPS * 2 * newton_schulz_work(shape)


ADAMW_UPDATE = UpdateRule(state=(StateTensor("exp_avg"), StateTensor("exp_avg_sq")))
_ADAMW_KEYS = frozenset({"beta1", "beta2", "eps"})
_MOMENTUM_KEYS = frozenset({"momentum", "nesterov"})

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw": OptimizerEntry("muster.optim.adamw:AdamW", ADAMW_UPDATE, keys=_ADAMW_KEYS),
    "sgd": OptimizerEntry(
        "muster.optim.sgd:SGD",
        UpdateRule(state=(StateTensor("momentum", required_key="momentum"),)),
        keys=_MOMENTUM_KEYS,
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
        keys=frozenset({"beta1", "beta2"}),
        defaults={"beta2": 0.99},
    ),
}
"""Muster's optimizers by their name in run files."""
