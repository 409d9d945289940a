"""Methods of outer steps by name."""

from muster.config.outer_config import OuterConfig, OuterMethodName
from muster.optim.outer.base import OuterMethod
from muster.optim.outer.co2 import CO2
from muster.optim.outer.diloco import DiLoCo
from muster.optim.outer.dipaco import DiPaCo
from muster.optim.outer.streaming import StreamingDiLoCo

_METHODS: dict[OuterMethodName, type[OuterMethod]] = {
    "diloco": DiLoCo,
    "streaming": StreamingDiLoCo,
    "dilocox": DiLoCo,
    "co2": CO2,
    "dipaco": DiPaCo,
}


def build_outer_method(config: OuterConfig) -> OuterMethod:
    """Return the method of a run's outer steps."""
    return _METHODS[config.method](config)
