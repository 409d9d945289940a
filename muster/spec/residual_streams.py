"""Models whose layers read the residual stream otherwise, or have several streams: what they are known with."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.spec.model import ModelSpec


def check_other_stream(spec: "ModelSpec") -> None:
    """Raise ValueError where a ladder, or sub-layers side by side, of what the model has aren't known."""
    found = [
        field
        for field in ("architecture", "moe", "mla", "linear_attention", "mtp_layers", "adapter", "low_rank")
        if getattr(spec, field)
    ]
    found += [field for field in ("parallel_residual", "hidden_dropout") if getattr(spec, field)]
    found += [] if spec.norm_placement == "pre" else [f"norm_placement {spec.norm_placement}"]
    if found:
        raise ValueError(f"{spec.other_stream} with {found[0]} isn't known: leave one of them out")


def check_sublayers(spec: "ModelSpec") -> None:
    """Raise ValueError where a layer can't be divided into so many sub-layers side by side."""
    count = spec.parallel_sublayers
    check_other_stream(spec)
    if spec.residual != "standard":
        raise ValueError(f"parallel_sublayers {count} with residual {spec.residual} isn't known: leave one of them out")
    if spec.qk_norm_width != "head":
        raise ValueError(f"parallel_sublayers {count} needs qk_norm_width head, since each sub-layer has its own heads")
    for field in ("num_heads", "num_kv_heads", "intermediate_size"):
        if (size := getattr(spec, field)) % count:
            nearest = max(n for n in range(1, count) if size % n == 0)
            raise ValueError(
                f"parallel_sublayers {count} doesn't divide {field} {size}: take {nearest}, or another {field}"
            )
