"""The base of every type that is read from a file."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable typed data; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
