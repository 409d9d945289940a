"""Memory limit of a request for texts: its forecast, and the limit while they are generated."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from muster.cost.memory.generation import GenerationMemory, generation_memory
from muster.spec.errors import InfeasibleError
from muster.spec.formatting import format_bytes
from muster.spec.plan import Plan
from muster.spec.plan_name import format_plan_name
from muster.train.memory_limit import MemoryLimit

if TYPE_CHECKING:
    from muster.train.text_generation import GenerationRequest


def forecast(request: "GenerationRequest", texts: int = 1, prompt_positions: int = 1) -> GenerationMemory:
    """Return the memory forecast of a request, for prompts of so many tokens at most."""
    source, plan = request.trained_model, request.plan
    positions = min(source.context_length, prompt_positions + request.max_new_tokens)
    return generation_memory(source.model, plan, texts, prompt_positions, positions, request.window)


def require_memory(request: "GenerationRequest", texts: int = 1, prompt_positions: int = 1) -> None:
    """Raise InfeasibleError where the forecast exceeds the request's limit."""
    limit_bytes = request.memory_limit_bytes
    if limit_bytes is None or (needed := forecast(request, texts, prompt_positions)).device <= limit_bytes:
        return
    raise InfeasibleError(
        f"plan {format_plan_name(request.plan)} needs {format_bytes(needed.device)} of a device"
        f" ({format_bytes(needed.weights)} of weights, {format_bytes(needed.window)} of layers that come and go,"
        f" {format_bytes(needed.cache)} of cache, {format_bytes(needed.work)} of work), more than --memory-limit"
        f" {format_bytes(limit_bytes)}: {_advice(request, texts, prompt_positions)}"
    )


def limit_of_request(request: "GenerationRequest", device: torch.device) -> MemoryLimit:
    """Return the limit of a rank that generates the texts of a request."""
    return MemoryLimit(request.memory_limit_bytes, device, partial(_excess, request))


def _advice(request: "GenerationRequest", texts: int, prompt_positions: int) -> str:
    """Return what to change: the nearest plan and window that fit, if there are any."""
    strategy = request.plan.default_strategy
    tier = "host" if strategy.offload_param == "none" else strategy.offload_param
    for window in (2, 1):
        away = strategy.model_copy(update={"offload_param": tier, "offload_param_ratio": 1.0})
        plan: Plan = request.plan.model_copy(update={"default_strategy": away})
        found = request.model_copy(update={"plan": plan, "window": window})
        if forecast(found, texts, prompt_positions).device <= (request.memory_limit_bytes or 0):
            return f"--plan {format_plan_name(plan)} --window {window} fits"
    return "even one layer at a time doesn't fit; give fewer --tokens or prompts, or a plan with more tp"


def _excess(request: "GenerationRequest", held_bytes: int | None) -> InfeasibleError:
    held = "more" if held_bytes is None else f"{held_bytes:,} bytes of tensors, more"
    return InfeasibleError(
        f"plan {format_plan_name(request.plan)} holds {held} than its memory limit of {request.memory_limit_bytes:,}"
        f" bytes (forecast: at least {forecast(request).device:,}): give --plan oparam, a smaller --window or a higher"
        " --memory-limit"
    )
