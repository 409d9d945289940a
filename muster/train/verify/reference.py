"""Reference of plans: the same training on one process, by the plain decoder and PyTorch's own parts.

There is no program, no executor and nothing parallel in it; loss, clipping and token counts are PyTorch's. Only the
model, its initial values, the data and the optimizer are Muster's.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import copysign

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from muster.config.freezing import is_frozen, matches_freeze
from muster.config.optimizer_state import is_zeroth_order
from muster.config.run_config import RunConfig
from muster.data.dataset import IGNORE_INDEX, SampleStream
from muster.layout.tensor_layout import Box, TensorLayout
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.dropout import sample_keys
from muster.model.float8 import apply_float8, has_float8
from muster.model.further_tokens import shift_further
from muster.model.init import init_stage
from muster.model.kernels import accumulation_dtype
from muster.model.perturbation import Direction, Part, moved, whole_numbers
from muster.model.routing import Router, update_expert_bias
from muster.optim.base import Optimizer, Slope
from muster.optim.build import build_optimizer
from muster.optim.lr import lr_at_step
from muster.parallel.fsdp import DTYPES, master_dtype
from muster.parallel.world import pick_device
from muster.plugins.registry import get_component
from muster.spec.four_bit import has_four_bits, with_whole_weights
from muster.spec.model import parameter_shapes
from muster.spec.plan import Float8Recipe, Plan, Precision
from muster.train.verify.serial_paths import SerialPaths
from muster.train.verify.sketch import Sketches, hook_outputs
from muster.train.verify.staleness import StaleWeights
from muster.train.verify.trace import Trace


class Reference:
    """The steps of a run on one process.

    It has a plan's precision and micro-batches: in bf16, gradients lose digits when they are accumulated.
    """

    def __init__(
        self,
        config: RunConfig,
        precision: Precision,
        fp8_recipe: Float8Recipe,
        micro_batch_size: int,
        dataset: SampleStream,
        asynchronous: Plan | None = None,
        skipping: Plan | None = None,
    ) -> None:
        """`asynchronous`, `skipping`: the plan whose delays, or paths of micro-batches, the reference has, where that
        is one."""
        self.config = config
        self._paths = None if skipping is None else SerialPaths(skipping, config.model.num_layers)
        self._stale: StaleWeights | None = None
        if asynchronous is not None:
            per_step = config.train.global_batch_size // micro_batch_size
            self._stale = StaleWeights(
                asynchronous,
                config.model,
                per_step,
                config.train.num_steps,
                config.optim.delay_compensation == "predict",
            )
        self.precision: Precision = precision
        self._fp8_recipe: Float8Recipe = fp8_recipe
        self._micro_batch_size = micro_batch_size
        self._dataset = dataset
        self._device = pick_device(0, 1)
        self.gradients: dict[str, Tensor] = {}
        """Gradients of the first step, before clipping, on the CPU; zeros for `frozen` parameters."""
        self.frozen: set[str] = set()
        """Parameters that have no gradient, because they don't require one or no layer uses them."""
        self._first_load: dict[str, Tensor | None] = {}
        """Choices of each expert in the first step, by router."""
        self._is_zeroth_order = is_zeroth_order(config.optim)
        self._first_slope: Slope | None = None
        self.trace = self._run()

    def updated_parameters(self, gradients: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
        """Return the parameters after a first step with these gradients, which are clipped in place, or with a slope of
        this size in a zeroth-order run; on the CPU. Those that plans hold in 4 bits aren't among them."""
        model = self._new_model(torch.device("cpu"))
        for name, parameter in model.named_parameters():
            parameter.grad = None if name in self.frozen else gradients[name]
        optimizer = self._new_optimizer(model)
        if (first := self._first_slope) is not None:
            optimizer.slope = first._replace(slope=copysign(norm, first.slope))
        self._clip_and_step(model, optimizer, 0, None)
        self._balance_experts(model, self._first_load)
        spec, named = self.config.model, model.named_parameters()
        return {name: parameter.detach() for name, parameter in named if not has_four_bits(spec, name)}

    def _run(self) -> Trace:
        config = self.config
        model = self._new_model(self._device)
        hook_outputs(model, lambda part, output: self._on_output(part, output))
        optimizer = self._new_optimizer(model)
        losses, grad_norms, sketches = [], [], []
        for step in range(config.train.num_steps):
            step_sketches = Sketches(config.model, config.workload, self._device)
            if self._stale is not None:
                self._stale.begin_step(step, dict(model.named_parameters()))
                optimizer.delays = self._stale.delays_of(step)
            if self._is_zeroth_order:
                losses.append(self._slope_of(model, optimizer, step, step_sketches))
            else:
                losses.append(self._passes(model, step, step_sketches)[0])
            sketches.append(step_sketches.values.cpu())
            if step == 0:
                self.frozen = {name for name, parameter in model.named_parameters() if parameter.grad is None}
                self.gradients = {
                    name: torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.cpu().clone()
                    for name, parameter in model.named_parameters()
                    if not has_four_bits(self.config.model, name)
                }
            grad_norms.append(self._clip_and_step(model, optimizer, step, grad_norms[-1] if grad_norms else None))
            load = {name: part.pop_load() for name, part in model.named_modules() if isinstance(part, Router)}
            self._first_load = self._first_load or load
            self._balance_experts(model, load)
            model.zero_grad()
        return Trace(losses, grad_norms, torch.stack(sketches).numpy())

    def _new_model(self, device: torch.device) -> Decoder:
        spec = self.config.model
        model = Decoder(with_whole_weights(spec), range(spec.num_layers), first=True, last=True)
        init_stage(model, spec, self.config.seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not is_frozen(self.config.optim, name))
        if self.precision == "fp8" and has_float8(device, self._fp8_recipe):
            for block in model.blocks():
                apply_float8(block, self._fp8_recipe)
        return model.to(device, master_dtype(self.precision))

    def _new_optimizer(self, model: Decoder) -> Optimizer:
        shapes = dict(parameter_shapes(self.config.model))
        layouts = {n: TensorLayout(n, shape, (Box((0,) * len(shape), shape),)) for n, shape in shapes.items()}
        optim = self.config.optim
        trained = {name: one for name, one in model.named_parameters() if not is_frozen(optim, name)}
        return build_optimizer(optim, trained, layouts)

    @torch.no_grad()
    def _slope_of(self, model: Decoder, optimizer: Optimizer, step: int, sketches: Sketches) -> float:
        """Give the optimizer the slope of one step (arXiv:2305.17333, algorithm 1). Returns its loss."""
        direction, eps = Direction(self.config.seed, step + 1), self.config.optim.zo_eps
        shapes = dict(parameter_shapes(self.config.model))

        def move(length: float, name: str, values: Tensor) -> Tensor:
            if is_frozen(self.config.optim, name):
                return values
            whole = Part(name, shapes[name], Box((0,) * values.ndim, shapes[name]))
            return moved(values, whole_numbers(direction, whole, values.device), length)

        points = [self._passes(model, step, sketches, partial(move, sign * eps)) for sign in (1, -1)]
        optimizer.slope = Slope(direction, (points[0][1] - points[1][1]) / (2 * eps))
        self._first_slope = self._first_slope or optimizer.slope
        return sum(loss for loss, _ in points) / len(points)

    def _passes(
        self, model: Decoder, step: int, sketches: Sketches, move: Callable[[str, Tensor], Tensor] | None = None
    ) -> tuple[float, float]:
        """Accumulate the gradients of one step, or with `move` run its forwards alone, with parameters that this
        function of their names and values gives. Returns its loss, and what training minimizes."""
        config = self.config
        count, size = config.train.global_batch_size, self._micro_batch_size
        batch = self._dataset.train_batch(step * count, count)
        tokens_BS, labels_BS = (torch.from_numpy(a).to(self._device) for a in (batch.tokens_BS, batch.labels_BS))
        num_valid = int((labels_BS != IGNORE_INDEX).sum())
        lengths_B, is_text_BS = self._dataset.lengths(np.arange(step * count, (step + 1) * count)), None
        if lengths_B is not None:
            is_text_BS = torch.from_numpy(np.arange(tokens_BS.shape[1]) < lengths_B[:, None]).to(self._device)
        model.router_state.loss_weight = 1 / num_valid
        total, minimized = 0.0, 0.0
        for first in range(0, count, size):
            if self._paths is not None:
                num_here = int((labels_BS[first : first + size] != IGNORE_INDEX).sum())
                model.run_layers = self._paths.enter(first // size, num_here)  # type: ignore[method-assign]
            self._on_output = partial(sketches.add, sample=first)
            # Low precision is that of the compute: the parameters are cast, and their gradients added up as they are.
            used = dict(model.named_parameters())
            if (stale := self._stale) is not None:
                used = {name: stale.of_pass(name, parameter, first // size) for name, parameter in used.items()}
            cast = {name: parameter.to(DTYPES[self.precision]) for name, parameter in used.items()}
            if move is not None:
                cast = {name: move(name, value) for name, value in cast.items()}
            if batch.positions_BS is not None:
                positions_BS = torch.from_numpy(batch.positions_BS[first : first + size])
                model.position_state.documents = Documents.from_positions(positions_BS, self._device)
            samples = range(step * count + first, step * count + min(first + size, count))
            model.dropout_state.keys_B = None if move else sample_keys(self.config.seed, samples, self._device)
            rows = slice(first, first + size)
            positions_BS = None if batch.positions_BS is None else torch.from_numpy(batch.positions_BS[rows])
            whole = tokens_BS[rows], labels_BS[rows]
            depths = range(1, config.model.mtp_layers + 1)
            counted_BS = None if is_text_BS is None else is_text_BS[rows]
            further = [shift_further(*whole, depth, positions_BS, counted_BS) for depth in depths]
            found: list[tuple[Tensor, Tensor]] = []
            labels = [whole[1], *(one.labels_BS for one in further)]
            model.reduce_hidden = partial(self._add_losses, model, labels, found)
            model.further_tokens, model.router_state.counted_BS = further, counted_BS
            functional_call(model, cast, (whole[0],))
            model.reduce_hidden, model.further_tokens = None, ()
            objective, *deeper = (loss + config.train.z_loss * z_loss for loss, z_loss in found)
            if deeper:
                objective = objective + config.model.mtp_loss_scaling_factor * sum(deeper) / len(deeper)
            if stale is not None:
                stale.enter_backward(cast, dict(model.named_parameters()))
            if move is None:
                (objective / num_valid).backward()
            total += float(found[0][0].detach())
            minimized += float(objective.detach())
        if self._paths is not None:
            self._paths.average(dict(model.named_parameters()))
        return total / num_valid, minimized / num_valid

    def _add_losses(
        self, model: Decoder, labels: Sequence[Tensor], found: list[tuple[Tensor, Tensor]], x_BSD: Tensor, depth: int
    ) -> Tensor:
        """Append the loss and the z-loss at one depth of prediction (0: of the model itself)."""
        logits_BSV = model.logits(x_BSD)
        logits_NV = logits_BSV.flatten(0, 1).to(accumulation_dtype(logits_BSV.dtype))
        labels_N, own = labels[depth].flatten(), self.config.train.loss
        cross_entropy = partial(F.cross_entropy, ignore_index=IGNORE_INDEX, reduction="sum")
        loss = (get_component("loss", own) if own else cross_entropy)(logits_NV, labels_N)
        found.append((loss, logits_NV[labels_N != IGNORE_INDEX].logsumexp(1).square().sum()))
        return loss

    def _balance_experts(self, model: Decoder, load: Mapping[str, Tensor | None]) -> None:
        """Move the biases that balance experts, after a step with this load."""
        moe = self.config.model.moe
        for name, load_F in load.items():
            bias = model.get_submodule(name).expert_bias
            if moe is None or not isinstance(bias, Tensor) or load_F is None:
                continue
            if not matches_freeze(self.config.optim, f"{name}.expert_bias"):
                update_expert_bias(bias, load_F[:-1], slice(None), moe.router_bias_update_rate)

    def _clip_and_step(self, model: Decoder, optimizer: Optimizer, step: int, norm_before: float | None) -> float:
        """Clip, by the norm of the step before where that is asked for, and step. Returns the gradient norm before
        clipping."""
        optim = self.config.optim
        if optimizer.slope is not None:
            direction, slope = optimizer.slope
            factor = optim.clip_norm / (abs(slope) + 1e-6) if 0 < optim.clip_norm < abs(slope) else 1.0
            optimizer.slope = Slope(direction, slope * factor)
            optimizer.step(lr_at_step(optim, step, self.config.train.num_steps))
            return abs(slope)
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])  # type: ignore[misc]
        size = norm if norm_before is None or not optim.clip_by_previous_norm else torch.tensor(norm_before)
        torch.nn.utils.clip_grads_with_norm_(parameters, optim.clip_norm or float("inf"), size)
        optimizer.step(lr_at_step(optim, step, self.config.train.num_steps))
        return float(norm)
