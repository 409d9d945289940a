"""Swarm of a run: peers that serve its stages, and come and go."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from muster.spec.base import Frozen, Positive
from muster.spec.endpoint import SWARM_PORT, parse_endpoint


class SwarmConfig(Frozen):
    """Stages of the model that swarms of peers serve."""

    stages: Annotated[int, Field(ge=1)] = 2
    """Stages that the model is cut into, as by `ppN`; each is served by any number of peers (`muster swarm`)."""
    listen: str = f"0.0.0.0:{SWARM_PORT}"
    """Address HOST:PORT at which the trainer listens for peers."""
    secret_file: str = "muster.secret"
    """File with the secret of the trainer and its peers, which the trainer makes where it isn't there."""
    wiring: Literal["throughput", "round_robin"] = "throughput"
    """Choice of the peer that gets a micro-batch. throughput: by measured times (interleaved weighted round-robin,
    SWARM, arXiv:2301.11913 §3.2). round_robin: one after another, however fast they are, to compare with."""
    in_flight: PositiveInt | None = None
    """Micro-batches that are under way at once; not given: four times the peers."""
    timeout_s: Positive = 60.0
    """Seconds without an answer after which a pass is sent to another peer."""
    silence_s: Positive = 10.0
    """Seconds of silence after which a peer is taken for dead."""
    rebalance_every: NonNegativeInt = 10
    """Steps after which a peer may move from the stage with the shortest queue to the one with the longest; 0: never.
    """

    @model_validator(mode="after")
    def _check(self) -> "SwarmConfig":
        try:
            parse_endpoint(self.listen, SWARM_PORT)
        except ValueError:
            raise ValueError(f"listen '{self.listen}' is no address with a port: expected HOST:PORT") from None
        return self
