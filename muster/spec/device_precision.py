"""Precisions of matmuls that a device lacks, and those that it computes in instead."""

from muster.spec.cluster import ClusterSpec
from muster.spec.device import DeviceSpec
from muster.spec.plan import Float8Recipe, Precision


def has_precision(device: DeviceSpec, precision: Precision, recipe: Float8Recipe = "tensorwise") -> bool:
    """Return True if a device is known to have matmuls in a precision, in fp8 with the scales of the recipe."""
    lacks_scales = precision == "fp8" and recipe == "mxfp8" and not device.block_scaled_fp8
    return device.peak_precision(precision) == precision and not lacks_scales


def matmul_precision(device: DeviceSpec, precision: Precision, recipe: Float8Recipe, recasts_fp8: bool) -> Precision:
    """Return the precision of a layer's matmuls: Muster's are in bf16 (`recasts_fp8`) on devices without fp8, or
    without the recipe's scales, and no program's are in nvfp4 where its device lacks it."""
    if precision == "nvfp4" and not has_precision(device, "nvfp4"):
        return "fp8" if has_precision(device, "fp8") else "bf16"
    return "bf16" if precision == "fp8" and recasts_fp8 and not has_precision(device, "fp8", recipe) else precision


def substitutions(
    cluster: ClusterSpec, precision: Precision, recipe: Float8Recipe = "tensorwise", recasts_fp8: bool = True
) -> list[str]:
    """Return a sentence for each device that lacks a precision, with the precision whose rate stands for it."""
    lines = []
    for device in {group.device.name: group.device for group in cluster.groups}.values():
        other = device.peak_precision(matmul_precision(device, precision, recipe, recasts_fp8))
        if other is None or has_precision(device, precision, recipe):
            continue
        lacked = recipe if precision == "fp8" and recipe == "mxfp8" else precision
        lines.append(f"{device.name} is not known to compute in {lacked}: times are those of {other}")
    return lines
