"""Validation loss after pipeline stages were lost, by what takes their place: CheckFree beside other ways.

`python -m benchmarks.stage_loss [--preset demo] [--rates 33] [--seeds 1] [--steps N] [--only NAME …]`.
Each layer is a stage. One process trains the whole model; after a step it replaces the layer of a stage that was lost,
as ranks under `train.recovery` do, with a new optimizer state and a higher learning rate. All ways lose the same stages
after the same steps, inner ones only. Rates are the paper's, in percent an hour, with the chance that its authors'
program gives each stage in each step (500M_config.json of github.com/gensyn-ai/CheckFree). Copies lose nothing, so that
they have the loss of the undisturbed run.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from torch import Tensor

from muster.config.load_config import load_run_config
from muster.model.init import initial_value
from muster.parallel.world import open_world
from muster.planner.auto import resolve_plan
from muster.train.checkfree import mean_of_neighbours, neighbour_weights
from muster.train.data import open_dataset
from muster.train.parameter_updater import ParameterUpdater
from muster.train.step_state import StepState
from muster.train.trainer import Trainer
from muster.train.validation_loss import ALL_DATA, validation_losses

CHANCES = {5: 0.0009, 10: 0.002, 16: 0.004, 33: 0.01}
"""Chance that a stage is lost in a step, by failures in percent an hour."""
WAYS = ("checkfree", "checkfree, clipped norms", "copy of a neighbour", "random", "zero")
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
        own, before, after = (self.of_layer(index) for index in (layer, layer - 1, layer + 1))
        kind = "clipped_norm" if "clipped" in way else "squared_norm"
        weights = neighbour_weights(self.norms[layer - 1], self.norms[layer + 1], kind)
        for name, one in own.items():
            if way.startswith("checkfree"):
                one.copy_(mean_of_neighbours(before[name], after[name], weights))
            elif way == "random":
                shape = tuple(one.shape)
                one.copy_(initial_value(self.config.model, f"layers.{layer}.{name}", shape, seed))
            else:
                one.copy_(before[name])
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


def lost_stages(num_layers: int, steps: int, chance: float, seed: int) -> dict[int, int]:
    """Return the inner stage that is lost after each step that loses one."""
    draw = random.Random(f"{chance} {seed}")
    lost = {}
    for step in range(1, steps):
        if hit := [layer for layer in range(1, num_layers - 1) if draw.random() < chance]:
            lost[step] = hit[0]
    return lost


def train(args: argparse.Namespace, way: str, lost: dict[int, int], seed: int) -> float:
    """Train the whole preset, and return the validation loss after it."""
    keys = [("parallel", "dp1-fp32"), ("seed", seed), *([("train.steps", args.steps)] if args.steps else [])]
    resolved = load_run_config(args.preset, None, keys)
    config, plan = resolved.config, resolve_plan(resolved, 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with open_world(store, 0, 1, plan) as world:
        trainer = LosingTrainer(config, plan, world, open_dataset(config, args.folder / "run"))
        updater = trainer.updater
        assert isinstance(updater, LosingUpdater)
        updater.begin()
        for step in range(1, config.train.num_steps + 1):
            trainer.step()
            if way != UNDISTURBED and step in lost:
                updater.replace(lost[step], way, config.seed + step)
        return validation_losses(trainer, EVAL_BATCHES)[ALL_DATA]


def main(argv: Sequence[str] | None = None) -> None:
    """Train each way with each seed and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", nargs="+", type=int, choices=list(CHANCES), default=[33])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = load_run_config(args.preset, None, []).config
    steps = args.steps or config.train.num_steps
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        whole = [train(args, UNDISTURBED, {}, seed) for seed in range(args.seeds)]
        print(
            f"{args.preset}, {steps} steps, {config.model.num_layers} stages: {UNDISTURBED} {mean(whole):.4f}",
            flush=True,
        )
        for rate in args.rates:
            losses = [lost_stages(config.model.num_layers, steps, CHANCES[rate], seed) for seed in range(args.seeds)]
            print(f"{rate} % an hour: {', '.join(str(len(one)) for one in losses)} stages lost", flush=True)
            for way in args.only:
                found = [train(args, way, losses[seed], seed) for seed in range(args.seeds)]
                over = mean(one / base - 1 for one, base in zip(found, whole, strict=True))
                print(f"  {way:<26} {mean(found):.4f}  {over:+.1%}", flush=True)


if __name__ == "__main__":
    main()
