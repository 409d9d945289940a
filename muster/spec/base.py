"""The base of every type that is read from a file, and constrained numbers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Immutable typed data; an unknown key is an error.

    pydantic makes `__hash__`, which type checkers don't see; classes whose values are keys declare it for them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
