"""Compilation of the decoder blocks, one by one: what one block's compilation gives serves all that are alike."""

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from muster.model.decoder import Decoder
from muster.model.plugin_layer import PROJECT_IN, PROJECT_OUT
from muster.spec.errors import MusterError


def compile_blocks(module: Decoder, device: torch.device) -> None:
    """Compiles each block at its first pass. What tensor parallelism and split backwards put around the linear layers
    runs as it is, between compiled pieces: collectives, and gradients that wait, are no business of a compiler.

    Raises MusterError where there is nothing to compile with.
    """
    if device.type == "cpu":
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
            for seam in {*PROJECT_IN, *PROJECT_OUT} & vars(part).keys():
                # One wrapper for all blocks: each of its own would be a reason to compile each block anew.
                do = getattr(part, seam)
                setattr(part, seam, opaque.setdefault(do, torch.compiler.disable(do)))
        block.forward = torch.compile(block.forward)
