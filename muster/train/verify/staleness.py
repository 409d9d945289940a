"""Serial emulation of asynchronous pipelines: which version of the weights each pass uses, by explicit numbers."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from muster.layout.mesh import coordinates_of
from muster.layout.tensor_layout import stage_layouts
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan

VERSION_OF: dict[str, Callable[[int, int, int, int], int]] = {
    "pipedream-2bw": lambda step, micro_batch, per_step, stages_after: max(step - 1, 0),
    "pipedream": lambda step, micro_batch, per_step, stages_after: max(
        (step * per_step + micro_batch - stages_after) // per_step, 0
    ),
}
VERSION_OF["pipelined-backprop"] = VERSION_OF["pipedream"]  # of forwards; backwards use the newest
"""Schedule → (step since the last flush, micro-batch of the step, micro-batches of a step, stages behind the own one) →
version of the weights that the pass uses, where step t makes version t + 1."""


def segments(plan: Plan, num_steps: int) -> Iterator[int]:
    """Yield the numbers of steps between flushes in a verification: the first step stands alone, so that its gradients
    and its update are compared like those of any plan."""
    yield 1
    longest = plan.flush_every if plan.schedule_entry.is_asynchronous else 1
    done = 1
    while done < num_steps:
        size = min(longest, num_steps - done)
        yield size
        done += size


class StaleWeights:
    """Versions of a whole model's weights on one process, since the last flush."""

    def __init__(self, plan: Plan, model: ModelSpec, per_step: int, num_steps: int, predicts: bool = False) -> None:
        """`per_step`: micro-batches of a step, of all ranks with other data. `predicts`: passes use the weights that
        their gradients will be applied to, as the last update foretells."""
        self._predicts = predicts
        self._version_of, self._per_step = VERSION_OF[plan.schedule], per_step // plan.dp_replicate
        self._stages_after = {
            layout.name: plan.num_stages - 1 - stage
            for stage in range(plan.num_stages)
            for layout in stage_layouts(model, plan, stage, coordinates_of(plan, plan.pp_rank(stage)))
        }
        entry = plan.schedule_entry
        self._stashes = entry.stashes_weights
        self._delays = {
            name: entry.mean_delay(plan.num_stages - 1 - after, plan.pp, self._per_step)
            for name, after in self._stages_after.items()
        }
        sizes = list(segments(plan, num_steps))
        self._alone = {sum(sizes[:index]) for index, size in enumerate(sizes) if size == 1}
        """Steps between two flushes."""
        self._flushes = {sum(sizes[:index]) for index in range(len(sizes))}
        self._num_kept = plan.num_stages + 2
        self._versions: list[dict[str, Tensor]] = []
        self._step = -1

    def begin_step(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Note the newest version, that before a step, which begins after a flush or in the midst of others."""
        if step in self._flushes:
            self._versions, self._step = [], -1
        self._step += 1
        self._versions.append({name: tensor.detach().clone() for name, tensor in parameters.items()})
        if len(self._versions) > self._num_kept:
            self._versions[-self._num_kept - 1] = {}  # no pass uses it any more

    def delays_of(self, step: int) -> Mapping[str, float]:
        """Return the steps by which the gradients of a step come late, by parameter."""
        return {} if step in self._alone else self._delays

    def of_pass(self, name: str, parameter: Tensor, micro_batch: int) -> Tensor:
        """Return a parameter's values as a micro-batch uses them; its gradient goes to the parameter."""
        own = micro_batch % self._per_step  # ranks number their own from 0, and one after the other has its share
        version = self._version_of(self._step, own, self._per_step, self._stages_after[name])
        values = self._versions[version][name]
        if self._predicts and version:
            values = torch.add(values, values - self._versions[version - 1][name], alpha=self._delays[name])
        return _Version.apply(parameter, values)  # type: ignore[return-value]

    def enter_backward(self, used: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Put into the tensors that a forward has used what its backward uses: the newest weights, unless it uses the
        same ones."""
        for name, tensor in used.items() if not self._stashes else ():
            tensor.data.copy_(parameters[name].data)


class _Version(torch.autograd.Function):
    """Another version of a parameter in the forward, the parameter itself in the backward."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, version: Tensor) -> Tensor:
        return version.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
