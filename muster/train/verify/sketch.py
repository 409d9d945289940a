"""Sketches of hidden states: a few numbers that compare outputs which no process holds whole.

A sketch of a matrix X (S, W) is aᵀXb for vectors a, b of random signs. It is linear in X, so the sketches of parts sum
to that of the whole, and its mean square over the draws is the sum of squares of X, so the sketches of two outputs
differ by about as much as the outputs do (Alon, Matias, Szegedy 1996, "The space complexity of approximating the
frequency moments", in its tensor form).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from muster.model.decoder import Decoder
from muster.model.init import keyed_generator
from muster.spec.model import ModelSpec, layer_prefix
from muster.spec.workload import Workload

NUM_DRAWS = 8
"""Sketches of each output of each sample."""
_CHUNK_POSITIONS = 256
"""Positions per chunk: float64 copies of all logits would be large."""


def traced_parts(spec: ModelSpec) -> list[str]:
    """Return the parts of a model whose outputs are sketched, in the order of the forward."""
    layers = [
        f"{layer_prefix(spec, layer)}{kind}" for layer in range(spec.last_layers().stop) for kind in ("attn", "mlp")
    ]
    return ["embed", *layers, "norm", "head"]


def hook_outputs(module: Decoder, on_output: Callable[[str, Tensor], None]) -> None:
    """Call `on_output(part, output)` in every forward of the traced parts; a layer's output is what it adds to the
    residual."""

    def seen(part: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Tensor) -> Tensor:
            output = function(*arguments)
            on_output(part, output)
            return output

        return call

    module.embed_tokens = seen("embed", module.embed_tokens)  # type: ignore[assignment]
    module.project_logits = seen("head", module.project_logits)  # type: ignore[assignment]

    def on_sublayer(name: str, output: Tensor) -> None:
        module.ladder.settle()
        on_output(name, output)

    named = {name: part for name, part in module.named_modules() if name.endswith((".attn", ".mlp")) or name == "norm"}
    for name, part in named.items():
        part.register_forward_hook(lambda _module, _inputs, output, name=name: on_sublayer(name, output))


class Sketches:
    """Sketches of one step: of every part's output, for every sample of the global batch."""

    def __init__(self, spec: ModelSpec, workload: Workload, device: torch.device) -> None:
        self._parts, self._workload = traced_parts(spec), workload
        self._vocab_size = spec.vocab_size
        self._hidden_size, self._streams_size = spec.hidden_size, spec.hidden_size * spec.parallel_sublayers
        shape = (len(self._parts), workload.global_batch_size, NUM_DRAWS)
        self.values = torch.zeros(shape, dtype=torch.float64, device=device)

    def whole_shape(self, part: str) -> tuple[int, int]:
        """Return positions and width of a part's output on one process."""
        in_streams = part.endswith((".attn", ".mlp"))
        width = self._vocab_size if part == "head" else self._streams_size if in_streams else self._hidden_size
        return self._workload.seq_len, width

    @torch.no_grad()
    def add(self, part: str, x_BSW: Tensor, sample: int, position: int = 0, column: int = 0) -> None:
        """Add an output, or a part of it that begins at `sample` of the global batch, `position` and `column`."""
        positions, width = self.whole_shape(part)
        a_SK = _signs(f"{part}/positions", positions, x_BSW.device)[position : position + x_BSW.shape[1]]
        b_WK = _signs(f"{part}/columns", width, x_BSW.device)[column : column + x_BSW.shape[2]]
        rows = self.values[self._parts.index(part), sample : sample + len(x_BSW)]
        for x_BRW, a_RK in zip(x_BSW.detach().split(_CHUNK_POSITIONS, 1), a_SK.split(_CHUNK_POSITIONS), strict=True):
            rows += (x_BRW.to(torch.float64) @ b_WK * a_RK).sum(1)


def _signs(key: str, count: int, device: torch.device) -> Tensor:
    """Return random signs (count, NUM_DRAWS), the same on every process."""
    bits = torch.randint(2, (count, NUM_DRAWS), generator=keyed_generator(0, f"verify/{key}"), dtype=torch.float64)
    return (2 * bits - 1).to(device)
