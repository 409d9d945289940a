"""Cost of a whole training, part by part, for people, and as JSON beside the prediction that it is made from."""

from typing import Any

from muster.planner.training_cost import PUE, TrainingCost, energy_kwh
from muster.simulate.predict import Prediction
from muster.spec.cluster import ClusterSpec
from muster.spec.formatting import format_bytes, format_count, format_fraction, format_seconds

_PARTS = (
    ("steps", "steps_h"),
    ("ramp of the batch", "ramp_h"),
    ("waiting for data", "data_h"),
    ("checkpoints", "checkpoints_h"),
    ("work lost", "lost_h"),
    ("restarts", "restarts_h"),
    ("waiting for repair", "waiting_h"),
)
"""Name of each part of the time, and its field."""
_LONG_DAYS = 1e9
"""Days whose digits nobody reads."""
_INTERVAL = "Young and Daly, or as bandwidth allows"


def training_lines(cost: TrainingCost, cluster: ClusterSpec) -> list[str]:
    """Return the parts of a training's time, its failures and checkpoints, and what prices and energy are based on."""
    lines = [f"days      {format_days(cost.days)}, {format_fraction(cost.effective_share)} of them in steps that count"]
    for name, field in _PARTS:
        hours = getattr(cost, field)
        if hours or field == "steps_h":
            lines.append(f"          {name:18} {format_days(hours / 24):>8}  {format_fraction(hours / cost.hours):>7}")
    lines.append(f"failures  {format_count(cost.failures)} expected, one in {_mtbf(cost.mtbf_h)}")
    is_once = cost.checkpoint_interval_s >= 3600 * cost.hours
    often = "once, at the end" if is_once else f"every {format_seconds(cost.checkpoint_interval_s)}"
    lines.append(f"saves     {format_bytes(cost.checkpoint_bytes)} {often} ({_INTERVAL})")
    lines.append(f"cost      {format_usd(cost.usd)}{price_note(cluster)}")
    co2 = "" if cost.co2_kg is None else f", {format_count(cost.co2_kg)} kg of CO₂"
    lines.append(f"energy    {format_kwh(cost.kwh)}{co2}")
    return lines


def format_days(days: float) -> str:
    """Format days as `0.012`, `3.4` or `1,930`."""
    return f"{days:,.0f}" if days >= 99.5 else f"{days:.3g}" if days >= 0.01 else "< 0.01"


def _mtbf(hours: float) -> str:
    if hours / 24 >= _LONG_DAYS:
        return f"{hours / 24:.1e} days"
    return f"{hours:.3g} h" if hours < 100 else f"{format_days(hours / 24)} days"


def format_usd(usd: float | None) -> str:
    """Format dollars as `$1.25M`."""
    return "n/a" if usd is None else f"${format_count(usd)}"


def format_kwh(kwh: float | None) -> str:
    """Format energy with what it contains."""
    return "n/a" if kwh is None else f"{format_count(kwh)} kWh (power limits × {PUE:g} for the building)"


def price_note(cluster: ClusterSpec) -> str:
    """Return the dates of the devices' prices in brackets; empty where a price is unknown."""
    prices = [group.device.price for group in cluster.groups]
    dates = sorted({price.date for price in prices if price is not None})
    return "" if None in prices else f" (price of {', '.join(dates)})"


def price_json(cluster: ClusterSpec) -> list[dict[str, Any]]:
    """Return each device's price with its date and source."""
    devices = {group.device.name: group.device for group in cluster.groups}
    return [
        {"device": name, **one.price.model_dump(mode="json")} for name, one in devices.items() if one.price is not None
    ]


def training_json(cost: TrainingCost) -> dict[str, Any]:
    """Return every part as plain data; null where a value is unknown."""
    return {
        "steps": cost.steps,
        "days": cost.days,
        "effective_share": cost.effective_share,
        **{field: getattr(cost, field) for _, field in _PARTS},
        "failures": cost.failures,
        "mtbf_h": cost.mtbf_h,
        "checkpoint_interval_s": cost.checkpoint_interval_s,
        "checkpoint_bytes": cost.checkpoint_bytes,
        "usd": cost.usd,
        "kwh": cost.kwh,
        "co2_kg": cost.co2_kg,
    }


def prediction_json(prediction: Prediction, training: TrainingCost | None) -> dict[str, Any]:
    """Return the prediction as plain data, with prices and the cost of a whole training."""
    whole = None if training is None else training_json(training)
    return {
        **prediction.to_json(),
        "kwh_per_1b_tokens": energy_kwh(prediction, 1e9 / prediction.tokens_per_s),
        "prices": price_json(prediction.cluster),
        "training": whole,
    }
