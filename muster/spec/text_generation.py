"""Sampling parameters of text generation."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from muster.spec.base import Frozen


class SamplingParams(Frozen):
    """Parameters for drawing the next token."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.7
    """Divisor of the logits; 0: the likeliest token is taken."""
    top_k: NonNegativeInt = 40
    """Number of the likeliest tokens to draw from; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the likeliest tokens to draw from."""
    seed: NonNegativeInt = 0
