"""Rates of experts' matmuls in a run: those that `muster profile` has written, which the run keeps.

A resumed run so chooses as its first attempt did, whatever was measured since, and has the same bits.
"""

from pathlib import Path

from pydantic import TypeAdapter

from muster.config.file_writer import write_atomically
from muster.config.local_machine import profiled_machine
from muster.spec.errors import ConfigError
from muster.spec.machine_rates import GroupedMatmuls
from muster.spec.model import ModelSpec
from muster.spec.plan import Precision

FILE_NAME = "grouped-matmuls.json"

DeviceRates = dict[str, dict[Precision, GroupedMatmuls]]
"""Device type → rates of its grouped matmuls in each precision."""
_FORMAT = TypeAdapter(DeviceRates)


def keep_grouped_rates(model: ModelSpec, run_dir: Path, resumes: bool) -> None:
    """Write the rates of this machine's profile, if there is one, into the directory of a run that begins."""
    if resumes or model.moe is None:
        return
    try:
        device = profiled_machine().device
    except ConfigError:  # not measured, or not readable, which is no reason not to train
        return
    if device.rates is None:
        return
    kernels = device.rates.kernels.items()
    found: dict[Precision, GroupedMatmuls] = {precision: one.grouped_matmuls for precision, one in kernels}
    kind = "cpu" if device.shared_cores else "cuda"
    write_atomically(run_dir / FILE_NAME, _FORMAT.dump_json({kind: found}).decode())


def read_grouped_rates(run_dir: Path, device_type: str) -> dict[Precision, GroupedMatmuls]:
    """Return the rates that a run has kept of such devices, by precision; none where there are none."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return {}
    try:
        return _FORMAT.validate_json(path.read_text(encoding="utf-8")).get(device_type, {})
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't what a run has written"
        raise ConfigError(
            f"could not read {path} ({reason}): remove it, and the run takes the kernels of an unmeasured machine"
        ) from error
