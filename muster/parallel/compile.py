"""Compilation of decoder blocks with torch.compile, one by one: blocks with equal code share the compiled result."""

import torch
from torch.utils._triton import has_triton

from muster.model.attention import Attention, core_attention
from muster.model.decoder import Decoder
from muster.model.plugin_layer import PROJECT_IN, PROJECT_OUT
from muster.model.varlen_attention import varlen_attention
from muster.parallel.tensor_parallel_ops import traceable_seam
from muster.spec.compilation import compiles
from muster.spec.errors import MusterError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan


def device_kind(device: torch.device) -> str:
    """Return the kind of a device in plans and predictions."""
    return "gpu" if device.type == "cuda" else device.type


def is_compiled(plan: Plan, model: ModelSpec, device: torch.device) -> bool:
    """Return True if blocks are compiled on a device: as the plan says, or by default where Triton is installed, which
    compilation for a GPU needs."""
    return compiles(plan, model, device_kind(device)) and (plan.compile is True or has_triton())


def eager_note(plan: Plan, model: ModelSpec, device: torch.device) -> str | None:
    """Return one sentence where blocks that would be compiled by default run eagerly, and so slower than predicted."""
    if is_compiled(plan, model, device) or not compiles(plan, model, device_kind(device)):
        return None
    return "blocks run eagerly, slower than predicted: compiling them for this GPU needs Triton (pip install triton)"


def compile_blocks(module: Decoder, device: torch.device) -> None:
    """Compile each block at its first pass.

    What tensor parallelism puts around linear layers becomes operators within a block's graph
    (`tensor_parallel_ops.py`); a function that the compiler can't follow stays uncompiled, between compiled pieces.

    Raises MusterError if the machine lacks what compilation needs: Triton for a GPU, a C++ compiler for a CPU.
    """
    if device_kind(device) == "gpu" and not has_triton():
        raise MusterError(
            "the plan's compile needs Triton, which isn't installed for this GPU: install it (pip install triton), or"
            " set compile to false"
        )
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # a second of imports that only compilation needs
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise MusterError(
                "the plan's compile needs a C++ compiler, and there is none on this machine:"
                " install g++ or set compile to false"
            ) from None
    opaque = {}
    for block in module.blocks():
        for part in block.modules():
            if isinstance(part, Attention):  # one call on a GPU, else pieces in a loop, which would be unrolled
                part.varlen_attention = opaque.setdefault(varlen_attention, torch.compiler.disable(varlen_attention))
            for seam in ("drop_hidden", "attend_with_dropout"):  # which draw piece by piece, too
                if module.dropout_state.is_used and (drop := getattr(part, seam, None)) is not None:
                    setattr(part, seam, opaque.setdefault(drop, torch.compiler.disable(drop)))
            if getattr(part, "softcap", None) is not None:  # likewise
                part.core_attention = opaque.setdefault(core_attention, torch.compiler.disable(core_attention))
            for seam in {*PROJECT_IN, *PROJECT_OUT, "normalize_projections", "local_linears", "enter_latents"} & vars(
                part
            ).keys():
                # All blocks share one wrapper: with wrappers of their own each block would be compiled again.
                linear = getattr(part, seam)
                setattr(part, seam, opaque.setdefault(linear, traceable_seam(linear) or torch.compiler.disable(linear)))
        block.forward = torch.compile(block.forward)
