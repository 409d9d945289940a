"""Loss after training with skipped stages (SkipPipe) beside that of whole training, at equal tokens.

`python -m benchmarks.skip_losses [--preset demo] [--steps 100]` trains the preset's model on one process, by the serial
emulator that `muster verify` holds such pipelines to: with all stages, and with a share of them skipped by each
micro-batch. Printed is the mean loss of samples that come after those of the training, through all layers, and through
the layers of the paths that micro-batches had.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.config.load_config import load_run_config
from muster.config.run_config import RunConfig
from muster.model.decoder import Decoder
from muster.schedule.resolve import resolve_schedule
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.train.data import open_dataset
from muster.train.verify.padded import PaddedDataset
from muster.train.verify.reference import Reference
from muster.train.verify.serial_paths import SerialPaths

PLANS = ("pp4-mb1-skip0-fp32", "pp4-mb1-skip0.25-fp32", "pp6-mb1-skip0.333-fp32", "pp6-mb1-skip0.5-fp32")
SAMPLES = 64
"""Samples of the loss that is printed."""


class KeepingReference(Reference):
    """Reference that keeps its trained model."""

    model: Decoder

    def _new_model(self, device: torch.device) -> Decoder:
        self.model = super()._new_model(device)
        return self.model


@torch.no_grad()
def loss_after(model: Decoder, dataset: PaddedDataset, first: int, paths: SerialPaths | None) -> float:
    """Return the mean loss of samples from `first` on, each through all layers or through those of its path."""
    batch = dataset.train_batch(first, SAMPLES)
    tokens_BS, labels_BS = torch.from_numpy(batch.tokens_BS), torch.from_numpy(batch.labels_BS)
    whole, total = model.run_layers, 0.0
    for row in range(SAMPLES):
        model.run_layers = whole if paths is None else paths.enter(row, 0)  # type: ignore[method-assign]
        total += float(_loss(model, tokens_BS[row : row + 1], labels_BS[row : row + 1]))
    model.run_layers = whole  # type: ignore[method-assign]
    return total / SAMPLES


def _loss(model: nn.Module, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BS).flatten(0, 1), labels_BS.flatten())


def train(config: RunConfig, plan: Plan, folder: Path) -> tuple[float, float]:
    """Train under a plan; return the losses after it, through all layers and by the plan's paths."""
    dataset = PaddedDataset(open_dataset(config, folder))
    reference = KeepingReference(config, "fp32", "tensorwise", plan.micro_batch_size, dataset, None, plan)
    model, first = reference.model, config.train.num_steps * config.train.global_batch_size
    model.run_layers = Decoder.run_layers  # type: ignore[method-assign]
    paths = SerialPaths(plan, config.model.num_layers)
    return loss_after(model, dataset, first, None), loss_after(model, dataset, first, paths)


def main() -> None:
    """Train under each plan and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=PLANS, default=PLANS)
    parser.add_argument("--folder", type=Path, default=Path("runs/skip-losses"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_run_config(args.preset, None, [("train.steps", args.steps)]).config
    whole: float | None = None
    print(f"{'':<26}{'all stages':>11}{'over whole':>12}{'paths':>9}")
    for name in args.only:
        plan = resolve_schedule(parse_plan_name(name), config.model, config.workload)
        full, by_path = train(config, plan, args.folder)
        whole = whole or full
        print(f"{name:<26}{full:11.4f}{full / whole - 1:+12.1%}{by_path:9.4f}", flush=True)


if __name__ == "__main__":
    main()
