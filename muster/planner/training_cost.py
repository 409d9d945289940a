"""Days, dollars, energy and CO₂ of a whole training."""

from dataclasses import dataclass

from muster.simulate.predict import Prediction

PUE = 1.2
"""Energy of a data centre over that of its computers, where nobody says another: between what large operators publish
for theirs (about 1.1) and the mean of all in the United States (1.4; Lawrence Berkeley National Laboratory, United
States Data Center Energy Usage Report, 2024)."""

CO2_G_PER_KWH = 473.0
"""The world's electricity in 2024 (Ember, Global Electricity Review 2025)."""


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Cost of all steps of a training; None where the devices' price or power is unknown."""

    steps: int
    days: float
    usd: float | None
    kwh: float | None
    """Energy of the devices at their power limits, times the data centre's overhead (PUE); without hosts."""
    co2_kg: float | None


def training_cost(
    prediction: Prediction, tokens: float, pue: float = PUE, co2_g_per_kwh: float = CO2_G_PER_KWH
) -> TrainingCost:
    """Return the cost of training on `tokens` tokens without a pause."""
    steps = -int(-tokens // prediction.workload.tokens_per_step)
    usd, joules = prediction.usd_per_step, prediction.joules_per_step
    kwh = None if joules is None else steps * joules / 3.6e6 * pue
    return TrainingCost(
        steps,
        steps * prediction.step_time_s / 86_400,
        None if usd is None else steps * usd,
        kwh,
        None if kwh is None else kwh * co2_g_per_kwh / 1000,
    )
