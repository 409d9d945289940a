"""Prediction of the moves of experts between steps, for the load that a prediction assumes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from muster.cost.expert_moves import moved_bytes, ranks_max_over_mean, rebalanced_placement
from muster.cost.time.expert_moves import expert_moves_s
from muster.cost.time.op_times import OpTimes
from muster.cost.time.rank_placement import PlacedPlan
from muster.layout.expert_moves import num_moved_experts
from muster.schedule.action import Kind
from muster.schedule.build import build_program
from muster.schedule.program import Program
from muster.simulate.simulator import simulate_step
from muster.spec.plan import Plan


@dataclass(frozen=True)
class PredictedMoves:
    """Moves after the first `every` steps; with the same load later, no further one pays."""

    every: int
    plan: Plan
    """The plan with the experts in their places afterwards."""
    program: Program
    """Program of a step after which experts move."""
    num_experts: int
    """Experts of all layers that move."""
    num_bytes: int
    """Bytes that all ranks together send for them."""
    time_s: float
    max_over_mean_before: float
    """Load of the fullest expert-parallel rank relative to the mean, on average over the layers."""
    max_over_mean_after: float
    moving_step_s: float
    """Seconds of the step after which they move."""
    later_step_s: float
    """Seconds of a step with the experts in their places afterwards."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data with every key."""
        return {
            "every": self.every,
            "experts": self.num_experts,
            "sent_bytes": self.num_bytes,
            "time_s": self.time_s,
            "ranks_max_over_mean": self.max_over_mean_before,
            "ranks_max_over_mean_moved": self.max_over_mean_after,
            "step_time_s": self.moving_step_s,
            "later_step_time_s": self.later_step_s,
        }


def predict_moves(
    setting: PlacedPlan, times: OpTimes, every: int, step_time_s: Callable[[Plan], float]
) -> PredictedMoves:
    """Return the moves that the load of a workload asks for, decided as a run decides them: none under an even load.

    `step_time_s` predicts the step of a plan with its experts in other places.
    """
    model, plan, workload, optim = setting.model, setting.plan, setting.workload, setting.optim
    assert model.moe is not None
    load, choices = workload.expert_load, every * workload.tokens_per_step * model.moe.top_k
    even = (1 / model.moe.num_experts,) * model.moe.num_experts
    shares = (even,) * len(model.expert_layers) if load is None else load.shares
    loads_LE = [[choices * share for share in shares_E] for shares_E in shares]
    after = plan.model_copy(update={"expert_placement": rebalanced_placement(model, plan, optim, loads_LE)})
    moved_s = expert_moves_s(setting, after) if after.expert_placement != plan.expert_placement else 0.0
    program = build_program(plan, model, workload, optim=optim, moves_experts=True)
    moving = replace(times, seconds={**times.seconds, (Kind.MOVE_EXPERTS, -1): moved_s})
    return PredictedMoves(
        every=every,
        plan=after,
        program=program,
        num_experts=num_moved_experts(model, plan, after),
        num_bytes=moved_bytes(model, plan, after, optim),
        time_s=moved_s,
        max_over_mean_before=ranks_max_over_mean(model, plan, loads_LE),
        max_over_mean_after=ranks_max_over_mean(model, after, loads_LE),
        moving_step_s=simulate_step(program, moving).duration_s + times.data_s,
        later_step_s=step_time_s(after),
    )
