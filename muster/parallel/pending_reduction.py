"""Reduction of a stage's gradients over its data-parallel ranks under z1, beside passes of other stages.

`fully_shard` starts a group's reduce-scatter once its gradients are complete, and waits for all of them at the end of a
step's last backward. Here a later call waits. Collectives of NCCL run in a stream of their own; those of gloo return at
their end unless they are asynchronous (`DeferrableReduceScatter`).
"""

from typing import Any

from torch.distributed.fsdp import FSDPModule

from muster.parallel.fsdp import process_gradients, wait_for_reductions
from muster.parallel.grad_reduce import DeferrableReduceScatter
from muster.spec.plan import Plan


class PendingReduction:
    """Reduction under way of the gradients that a stage's ranks have accumulated, but for those that its last backward
    has reduced. `has_streams`: collectives run in streams of the device."""

    def __init__(self, module: FSDPModule, plan: Plan, has_streams: bool) -> None:
        self._module = module
        self._reduce_scatter: DeferrableReduceScatter | None = None
        found: DeferrableReduceScatter | None = module.reduce_scatter  # type: ignore[assignment]
        if not has_streams and found is not None and _leaves_sums(plan):
            self._reduce_scatter = found
            found.pending = []
        module.set_requires_gradient_sync(True)
        for group in process_gradients(module):
            if has_streams:
                _leave_input(group.comm_ctx)

    def release(self) -> None:
        """Free what reductions that are over have sent."""
        if self._reduce_scatter is not None and self._reduce_scatter.pending:
            pending = self._reduce_scatter.pending
            while pending and all(work is None or work.is_completed() for work in pending[0].works):
                pending.pop(0).wait()

    def wait(self) -> None:
        """Wait for the reduced gradients."""
        if self._reduce_scatter is not None:
            for pending in self._reduce_scatter.pending or ():
                pending.wait()
            self._reduce_scatter.pending = None
        wait_for_reductions(self._module)
        self._module.set_requires_gradient_sync(False)


def _leaves_sums(plan: Plan) -> bool:
    """Return True if nothing but the optimizer reads what the reduce-scatters of a step return: neither an all-reduce
    over replicas, nor sums of several units of passes, nor copies to host memory."""
    replicas = max(plan.mesh(stage).dp_replicate for stage in range(plan.num_stages))
    return replicas == 1 and plan.max_active_stages is None and not plan.offloads_params


def _leave_input(context: Any) -> None:  # of a private type
    """Leave what a reduce-scatter under way reads to the allocator, which frees it at its end: the next group's needn't
    wait for that."""
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:  # before torch 2.13 one at most
        states = [] if context.reduce_scatter_state is None else [context.reduce_scatter_state]
        context.reduce_scatter_state = None
    for state in states:
        if state.reduce_scatter_input.device.type != "cpu":
            state.reduce_scatter_input.record_stream(context.reduce_scatter_stream)
    states.clear()
