"""Parallel degrees of a row: those that it states, or choices where its table has no columns for them."""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.spec.device import DeviceSpec
from muster.spec.mesh_cuts import divisors
from muster.spec.model import ModelSpec
from muster.validate.errors import UnpredictableRowError
from muster.validate.table import MeasurementRow

_STATE_SHARE = 0.6
"""Largest share of a device's memory that parameters, gradients and optimizer state take in a usual layout."""
_REPLICATED_BYTES, _SHARDED_BYTES = 6, 12
"""Bytes of a parameter that each data-parallel rank holds under ZeRO-1 (bf16, with gradients in fp32), and that all of
them share (arXiv:1910.02054 §5)."""


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a layout."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int


def degrees_of_row(row: MeasurementRow, model: ModelSpec, device: DeviceSpec) -> list[Degrees]:
    """Return the degrees that a row may mean, the likeliest first.

    An empty cp or ep is 1, an empty dp follows from the others, and an empty tp or pp is 1 where the others fill the
    devices. In a table without columns for tp and pp the likeliest layout is the smallest whose parameters, gradients
    and optimizer state take at most 60 % of the memory; the ones with twice its tp or pp may be meant, too. Raises
    UnpredictableRowError.
    """
    if row.n_gpus is None:
        raise UnpredictableRowError("n_gpus is empty: expected the number of devices")
    cp = row.cp or 1
    if row.open_degrees and cp * (row.dp or 1) != row.n_gpus:
        if model.moe is not None and not row.ep:
            raise UnpredictableRowError("tp, pp and ep are unknown: expected the degrees of a model with experts")
        return _choices(row, model, device)
    tp, pp = row.tp or 1, row.pp or 1
    if (row.tp is None or row.pp is None) and tp * pp * cp * (row.dp or 1) != row.n_gpus:
        raise UnpredictableRowError(f"{'tp' if row.tp is None else 'pp'} is empty: expected a degree, 1 for none")
    dp = row.dp or max(1, row.n_gpus // (tp * pp * cp))
    if tp * pp * cp * dp != row.n_gpus:
        given = f"tp {tp} × pp {pp} × cp {cp} × dp {dp}"
        raise UnpredictableRowError(f"{given} is {tp * pp * cp * dp}, but n_gpus is {row.n_gpus}")
    return [_degrees(row, tp, pp)]


def _degrees(row: MeasurementRow, tp: int, pp: int) -> Degrees:
    """Return the degrees of a row with these of tensor and pipeline parallelism."""
    assert row.n_gpus is not None
    cp = row.cp or 1
    return Degrees(tp, pp, cp, row.ep or 1, _expert_tensor_parallel(row.etp, tp), row.n_gpus // (tp * pp * cp))


def _expert_tensor_parallel(text: str, tp: int) -> int:
    """Return the tensor-parallel ranks of each expert, 1 where the cell is empty. Raises UnpredictableRowError."""
    if text.lower() == "tp":
        return tp
    if text and not (text.isdecimal() and int(text)):
        raise UnpredictableRowError(f"etp '{text}' is neither a number above 0 nor 'tp'")
    return int(text or 1)


def _choices(row: MeasurementRow, model: ModelSpec, device: DeviceSpec) -> list[Degrees]:
    """Return the likeliest layout of a table without columns for tp and pp, and its neighbours."""
    layouts = sorted(_layouts(row, model, device), key=lambda one: (one.tp * one.pp, one.pp))
    if not layouts:
        raise UnpredictableRowError("tp and pp are unknown, and no layout of the model fills n_gpus: expected degrees")
    most = _STATE_SHARE * (device.memory_bytes or float("inf"))

    def state_bytes(one: Degrees) -> float:
        per_parameter = _REPLICATED_BYTES + _SHARDED_BYTES / one.dp
        return per_parameter * model.num_parameters / (one.tp * one.pp)

    likeliest = next((one for one in layouts if state_bytes(one) <= most), None)
    if likeliest is None:
        raise UnpredictableRowError(
            "tp and pp are unknown, and no layout with layers evenly on stages holds parameters, gradients and"
            " optimizer state: expected degrees"
        )
    if row.dp:
        return [likeliest, *(one for one in layouts if one != likeliest)]
    twice = ((2 * likeliest.tp, likeliest.pp), (likeliest.tp, 2 * likeliest.pp))
    return [likeliest, *(one for one in layouts if (one.tp, one.pp) in twice)]


def _layouts(row: MeasurementRow, model: ModelSpec, device: DeviceSpec) -> Iterator[Degrees]:
    """Yield the layouts that fill the devices, whose tensor parallelism stays in a node and cuts heads evenly."""
    assert row.n_gpus is not None
    rest, over = divmod(row.n_gpus, (row.cp or 1) * (row.dp or 1))
    per_node = row.gpus_per_node or (device.node.devices if device.node else 8)
    for tp in () if over else divisors(rest):
        if tp > per_node or model.num_heads % tp:
            continue
        for pp in divisors(rest // tp):
            if model.num_layers % pp == 0 and (not row.dp or tp * pp == rest):
                yield _degrees(row, tp, pp)
