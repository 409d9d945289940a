"""Validation loss after pipeline stages were lost, by what takes their place: CheckFree beside other ways.

`python -m benchmarks.stage_loss [--preset demo] [--rates 33] [--stages inner|ends|all] [--seeds 1] [--steps N]
[--only NAME …]`.
Each layer is a stage. One process trains the whole model; after a step it replaces the layer of a stage that was lost,
as ranks under `train.recovery` do, with a new optimizer state and a higher learning rate. All ways lose the same stages
after the same steps. Rates are the paper's, in percent an hour, with the chance that its authors' program gives each
stage in each step (500M_config.json of github.com/gensyn-ai/CheckFree). Copies of the state lose nothing, so that they
have the loss of the undisturbed run. Under CheckFree+ every second micro-batch sees the first two and the last two
layers swapped, so that it has an undisturbed run of its own; of the other ways an end stage becomes a copy, too.
"""

import argparse
import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.load_config import load_run_config
from muster.model.decoder import Layer
from muster.model.init import initial_value
from muster.parallel.world import open_world
from muster.planner.auto import resolve_plan
from muster.schedule.checkfree_plus import swapped_paths
from muster.train.checkfree import mean_of_neighbours, neighbour_weights
from muster.train.data import open_dataset
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_state import StepState
from muster.train.trainer import Trainer
from muster.train.validation_loss import ALL_DATA, validation_losses

CHANCES = {5: 0.0009, 10: 0.002, 16: 0.004, 33: 0.01}
"""Chance that a stage is lost in a step, by failures in percent an hour."""
SWAPPING = "checkfree+"
WAYS = (SWAPPING, "checkfree", "checkfree, clipped norms", "copy of a neighbour", "random", "zero")
"""Ways to replace a stage; zero is a copy of a neighbour whose feed-forward output is zero, as in the authors' program.
"""
UNDISTURBED = "undisturbed"
LR_SCALE = 1.2
EVAL_BATCHES = 16
"""Global batches of the validation split that a loss is averaged over."""


class LosingUpdater(ParameterUpdater):
    """Updater that knows each layer's gradient norm, and takes larger steps in layers that were replaced."""

    def begin(self) -> None:
        """Prepare for the first step."""
        self.norms: dict[int, float] = {}
        self.replaced: set[int] = set()

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the parameters of a layer by their names in it."""
        prefix = f"layers.{layer}."
        return {name.removeprefix(prefix): one for name, one in self.parameters.items() if name.startswith(prefix)}

    def decide_step(self, state: StepState, sums: Tensor) -> None:
        """Note the norms of the layers' gradients, before they are clipped."""
        super().decide_step(state, sums)
        for layer in range(self.config.model.num_layers):
            grads = [one.grad for one in self.of_layer(layer).values() if one.grad is not None]
            self.norms[layer] = torch.nn.utils.get_total_norm(grads).item()

    def optimizer_step(self) -> None:
        """Step, and lengthen the steps of replaced layers, in which they are proportional to the learning rate."""
        replaced = [one for layer in self.replaced for one in self.of_layer(layer).values()]
        before = [one.detach().clone() for one in replaced]
        super().optimizer_step()
        with torch.no_grad():
            for one, old in zip(replaced, before, strict=True):
                one.copy_(old + LR_SCALE * (one - old))

    @torch.no_grad()
    def replace(self, layer: int, way: str, seed: int) -> None:
        """Replace a layer after a step."""
        last = self.config.model.num_layers - 1
        own, neighbours = self.of_layer(layer), [one for one in (layer - 1, layer + 1) if 0 <= one <= last]
        kind = "clipped_norm" if "clipped" in way else "squared_norm"
        weights: tuple[float, ...] = (1.0,)
        if way.startswith("checkfree") and len(neighbours) == 2:
            weights = neighbour_weights(self.norms[layer - 1], self.norms[layer + 1], kind)
        others = [self.of_layer(one) for one in neighbours[: len(weights)]]
        for name, one in own.items():
            if way == "random":
                shape = tuple(one.shape)
                one.copy_(initial_value(self.config.model, f"layers.{layer}.{name}", shape, seed))
            else:
                one.copy_(mean_of_neighbours([other[name] for other in others], weights))
                if way == "zero" and name == "mlp.down.weight":
                    one.zero_()
        names = [f"layers.{layer}.{name}" for name in own]
        for name, tensor in self.optimizer.state().values():
            if name in names:
                tensor.zero_()
        self.optimizer.begin_state(names)
        self.replaced.add(layer)


class LosingTrainer(Trainer):
    updater_type = LosingUpdater


class SwappingLayers:
    """Runs a model's layers in turn, and for every second micro-batch with the first two and the last two swapped."""

    def __init__(self, num_layers: int) -> None:
        # The paths' first and last stages are those of the embedding and the head.
        self._orders = [[stage - 1 for stage in path[1:-1]] for path in swapped_paths(num_layers + 2, 2)]
        self._count = 0

    def __call__(self, layers: Sequence[Layer], x_BSD: Tensor, constants: Iterable[tuple[Any, ...]]) -> Tensor:
        """Take hidden states through the layers; validation, which needs no gradients, takes them in turn."""
        is_trained = torch.is_grad_enabled()
        order = self._orders[self._count % 2 if is_trained else 0]
        self._count += is_trained
        shared = list(constants)
        for layer in order:
            x_BSD = layers[layer](x_BSD, *shared[layer])
        return x_BSD


def lost_stages(layers: Sequence[int], steps: int, chance: float, seed: int) -> dict[int, int]:
    """Return the stage, one of these layers, that is lost after each step that loses one."""
    draw = random.Random(f"{chance} {seed}")
    lost = {}
    for step in range(1, steps):
        if hit := [layer for layer in layers if draw.random() < chance]:
            lost[step] = hit[0]
    return lost


def train(args: argparse.Namespace, way: str, lost: dict[int, int], seed: int) -> float:
    """Train the whole preset in two micro-batches a step, and return the validation loss after it."""
    size = load_run_config(args.preset, None, []).config.train.global_batch_size // 2
    keys = [("parallel", f"dp1-mb{size}-fp32"), ("seed", seed), *([("train.steps", args.steps)] if args.steps else [])]
    resolved = load_run_config(args.preset, None, keys)
    config, plan = resolved.config, resolve_plan(resolved, 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with open_world(store, 0, 1, plan) as world:
        trainer = LosingTrainer(config, plan, world, open_dataset(config, args.folder / "run"))
        (stage,), updater = trainer.stages.values(), trainer.updater
        if way == SWAPPING:
            stage.module.run_layers = SwappingLayers(config.model.num_layers)  # type: ignore[method-assign]
        assert isinstance(updater, LosingUpdater)
        updater.begin()
        for step in range(1, config.train.num_steps + 1):
            trainer.step()
            if step in lost:
                updater.replace(lost[step], way, config.seed + step)
        return validation_losses(trainer, EVAL_BATCHES)[ALL_DATA]


def main(argv: Sequence[str] | None = None) -> None:
    """Train each way with each seed and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", nargs="+", type=int, choices=list(CHANCES), default=[33])
    parser.add_argument("--stages", choices=["inner", "ends", "all"], default="inner", help="stages that may be lost")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = load_run_config(args.preset, None, []).config
    steps, layers = args.steps or config.train.num_steps, range(config.model.num_layers)
    losable = {"inner": layers[1:-1], "ends": (layers[0], layers[-1]), "all": layers}[args.stages]
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        whole: dict[str, list[float]] = {}
        print(f"{args.preset}, {steps} steps, {len(layers)} stages, seeds {args.seeds}", flush=True)
        for way in args.only:
            kind = SWAPPING if way == SWAPPING else UNDISTURBED
            if kind not in whole:
                whole[kind] = [train(args, kind, {}, seed) for seed in args.seeds]
                print(f"{UNDISTURBED}{', swapping' * (kind == SWAPPING)}: {texts(whole[kind])}", flush=True)
            for rate in args.rates:
                lost = [lost_stages(losable, steps, CHANCES[rate], seed) for seed in args.seeds]
                found = [train(args, way, one, seed) for one, seed in zip(lost, args.seeds, strict=True)]
                over = mean(one / base - 1 for one, base in zip(found, whole[kind], strict=True))
                counts = ", ".join(str(len(one)) for one in lost)
                print(f"  {way:<26} {rate:>2} % an hour, {counts} lost: {texts(found)}  {over:+.1%}", flush=True)


def texts(losses: Sequence[float]) -> str:
    """Return losses and their mean as text."""
    each = f" ({', '.join(f'{one:.4f}' for one in losses)})" if len(losses) > 1 else ""
    return f"{mean(losses):.4f}{each}"


if __name__ == "__main__":
    main()
