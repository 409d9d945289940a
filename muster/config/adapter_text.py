"""Adapters as a command line names them: `lora`, `dora:r=16,target_modules=q+v`."""

from pydantic import ValidationError

from muster.config.freezing import freeze_for_adapter
from muster.config.optim_config import OptimConfig
from muster.spec.adapters import AdapterSpec
from muster.spec.config_errors import ConfigSchema, error_sentence
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec


def parse_adapter(text: str) -> AdapterSpec:
    """Return the adapter of a kind, with keys of a run file's `adapter` behind a colon. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    keys: dict[str, object] = {"kind": kind}
    for pair in filter(None, rest.split(",")):
        key, found, value = pair.partition("=")
        if not found:
            raise ConfigError(f"--adapter {text}: expected key=value behind the colon, as in lora:r=16, got '{pair}'")
        keys[key.strip()] = value.split("+") if key.strip() == "target_modules" else value.strip()
    try:
        return AdapterSpec.model_validate(keys)
    except ValidationError as error:
        raise ConfigError(
            f"--adapter {text}: {error_sentence(error.errors()[0], ConfigSchema(AdapterSpec), {})}"
        ) from None


def with_adapter(model: ModelSpec, text: str, optim: OptimConfig | None = None) -> tuple[ModelSpec, OptimConfig]:
    """Return a model with adapters, and the optimizer (AdamW if None) that trains these alone. Raises ConfigError."""
    adapter = parse_adapter(text)
    try:
        adapted = ModelSpec.model_validate({**model.model_dump(), "adapter": adapter})
    except ValidationError as error:
        raise ConfigError(
            f"--adapter {text}: {error_sentence(error.errors()[0], ConfigSchema(ModelSpec), {})}"
        ) from None
    return adapted, freeze_for_adapter(optim or OptimConfig(lr=1.0))
