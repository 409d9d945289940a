"""Plans that can't hold a model's weights in 4 bits."""

from collections.abc import Iterator
from math import ceil

from muster.spec.four_bit import BLOCK
from muster.spec.model import ModelSpec
from muster.spec.rules import Rule, setting


def four_bit_rules_of(model: ModelSpec) -> Iterator[Rule]:
    """Yield the rules for a model's own widths."""
    if model.adapter is None or not model.adapter.load_in_4bit:
        return
    widths = model.num_heads * model.head_dim, model.intermediate_size
    yield Rule(
        lambda plan: any(ceil(width / mesh.tp) % BLOCK for mesh in plan.distinct_meshes for width in widths),
        f"adapter.load_in_4bit with tensor parallelism that doesn't cut the {widths[0]} columns of o and the"
        f" {widths[1]} of down into multiples of {BLOCK} (as wide as blocks with a scale are)",
        setting(tp=1),
    )
