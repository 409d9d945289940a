"""The table of mesh axes: what each cuts, which of them gradients are summed over, what it sends.

The one place that knows this. Everything else asks `Mesh.product` for the ranks along the axes of a kind, or one of the
properties made of it, so that a new axis is a row here, a field of `Mesh` and `Plan` (`muster.spec.plan`), a field of
`MeshCoordinates` (`muster.layout.mesh`), and the files of its kinds.
"""

from dataclasses import dataclass
from typing import Literal

Cut = Literal["batch", "sequence", "width", "layers", "experts", "expert width"]
"""Dimension of the work that an axis divides."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis of the mesh."""

    name: str
    """Field of `Mesh` and `Plan`, and part of a plan's short name."""
    title: str
    """Usual name of the technique."""
    cuts: tuple[Cut, ...]
    """Dimensions that its ranks divide among them."""
    sums_grads: bool
    """Its ranks hold the same parameters and see different tokens, so gradients are summed over it."""
    shards_state: bool
    """Its ranks share optimizer state, and by the ZeRO level gradients and parameters (`fully_shard`)."""
    sends: str
    """Collectives or messages along it, and when."""
    source: str
    """Paper that introduced it."""
    folded: bool = False
    """An axis of the experts' mesh: its ranks are those of other axes, so it adds none to a stage."""
    supported: bool = True
    """The runtime can train with more than one rank on it; without, it is planned and predicted only."""


MESH_AXIS_TABLE = (
    MeshAxis(
        "pp",
        "pipeline parallelism",
        ("layers",),
        sums_grads=False,
        shards_state=False,
        sends="hidden states forward and their gradients backward, once per micro-batch and stage boundary; the"
        " gradient of a tied embedding, once per step",
        source="arXiv:1811.06965",
    ),
    MeshAxis(
        "dp_replicate",
        "replicated data parallelism (DDP, the outer axis of HSDP)",
        ("batch",),
        sums_grads=True,
        shards_state=False,
        sends="all-reduce of gradients, once per step",
        source="arXiv:2006.15704",
    ),
    MeshAxis(
        "dp_shard",
        "sharded data parallelism (ZeRO, FSDP)",
        ("batch",),
        sums_grads=True,
        shards_state=True,
        sends="all-gather of parameters and reduce-scatter of gradients: per step (z1), per backward (z2), per pass and"
        " block (z3)",
        source="arXiv:1910.02054",
    ),
    MeshAxis(
        "cp",
        "context parallelism",
        ("sequence",),
        sums_grads=True,
        shards_state=True,
        sends="in every attention: keys and values around a ring, or queries, and gradients; or"
        " all-gathers of keys and values and reduce-scatters of their gradients; or all-to-alls of queries, keys,"
        " values and outputs, also around a ring of groups",
        source="arXiv:2310.01889",
    ),
    MeshAxis(
        "tp",
        "tensor parallelism",
        ("width",),
        sums_grads=False,
        shards_state=False,
        sends="all-reduce of each sublayer's output, or under sp all-gather and reduce-scatter; gradients of replicated"
        " weights, once per step",
        source="arXiv:1909.08053",
    ),
    MeshAxis(
        "ep",
        "expert parallelism",
        ("experts",),
        sums_grads=False,
        shards_state=False,
        sends="all-to-all of tokens to their experts and back, in every layer with experts",
        source="arXiv:2006.16668",
        folded=True,
    ),
    MeshAxis(
        "etp",
        "tensor parallelism of experts",
        ("expert width",),
        sums_grads=False,
        shards_state=False,
        sends="all-gather of an expert's tokens and reduce-scatter of its outputs",
        source="arXiv:2504.14960",
        folded=True,
    ),
)
"""All axes; those that hold ranks of their own stand outermost first, in a plan's usual `axis_order`."""

MESH_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if not axis.folded)
"""Axes that ranks are numbered by, outermost first: neighbours on the last axis are neighbouring ranks."""
STAGE_AXES = tuple(name for name in MESH_AXES if name != "pp")
"""Axes within one pipeline stage."""
DEGREE_FIELDS = tuple(axis.name for axis in MESH_AXIS_TABLE)
"""Every axis, those of the experts' mesh included."""
SUPPORTED_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if axis.supported)
"""Axes that the runtime can train with."""
BATCH_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if "batch" in axis.cuts)
"""Axes whose ranks read different sequences."""
SEQUENCE_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if "sequence" in axis.cuts)
"""Axes whose ranks read different positions of the same sequences."""
GRAD_SUM_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if axis.sums_grads)
"""Axes that every parameter's gradient is summed over."""
STATE_SHARD_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if axis.shards_state)
"""Axes that optimizer state is sharded over."""
REPLICA_AXES = tuple(axis.name for axis in MESH_AXIS_TABLE if axis.sums_grads and not axis.shards_state)
"""Axes each of whose ranks stands for a group with a complete copy of a stage's parameters."""
EXPERT_RANK_AXES = tuple(name for name in STAGE_AXES if name not in REPLICA_AXES)
"""Axes that the experts' mesh folds into: their ranks share one copy of a stage's experts."""
