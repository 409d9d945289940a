"""A model: a decoder whose attention is a running mean over the positions so far, scaled by a gate."""

import torch
from torch import Tensor, nn

import muster
from muster.model.decoder import project_in, project_out
from muster.spec.model import ModelSpec


class RunningMean(nn.Module):
    # Tensor parallelism replaces these two by linear layers with collectives around them.
    project_in = staticmethod(project_in)
    project_out = staticmethod(project_out)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.value = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)  # sharded by rows
        self.gate = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)
        self.down = nn.Linear(spec.hidden_size, spec.hidden_size, bias=False)  # sharded by columns

    def forward(self, x_BSD: Tensor, norm: nn.Module, *_: object) -> Tensor:
        value, gate = self.project_in(norm(x_BSD), self.value, self.gate)
        count_S1 = torch.arange(1, value.shape[1] + 1, device=value.device, dtype=value.dtype).unsqueeze(1)
        return self.project_out(value.cumsum(1) / count_S1 * gate.sigmoid(), self.down)


@muster.register_model("tiny-mixer", like="tiny", tensor_parallel=True)
class MixerLayer(muster.DecoderLayer):
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.attn = RunningMean(spec)
