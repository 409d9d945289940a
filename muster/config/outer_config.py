"""The section `outer` of a run file: how and how often the islands of a plan meet."""

from math import prod
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from muster.layout.island_bytes import Compression
from muster.spec.base import Fraction, Frozen, Positive
from muster.spec.endpoint import MAX_CONNECTIONS, parse_endpoint
from muster.spec.units import pluralize

OuterMethodName = Literal["diloco", "streaming", "dilocox", "co2", "dipaco"]
OUTER_METHODS: tuple[OuterMethodName, ...] = get_args(OuterMethodName)

_ONLY: dict[OuterMethodName, dict[str, Any]] = {
    "streaming": {"fragments": 1, "mixing": 0.0},
    "co2": {"staleness_penalty": 1.0, "momentum_clip": None},
    "dipaco": {
        "modules": (1,),
        "route_tokens": 32,
        "route_top": 1,
        "router": "kmeans",
        "reshard_at": (),
        "scored_samples": 1024,
        "reroute_every": 128,
    },
}
"""Keys that only one method reads, with the values that stand for DiLoCo."""
DELAYED: tuple[OuterMethodName, ...] = ("dilocox", "co2")
"""Methods whose exchanges run beside the whole next round."""


class OuterConfig(Frozen):
    """Outer steps of islands. What a method doesn't use can't be given another value."""

    method: OuterMethodName = "diloco"
    """diloco: all parameters are exchanged after the last step of a round, and islands wait for them
    (arXiv:2311.08105). streaming: fragments of the layers are exchanged one after another, beside later steps
    (arXiv:2501.18512). dilocox: all parameters, beside the whole next round, after which the outer optimizer uses the
    result (arXiv:2506.21263). co2: as dilocox, with plain momentum towards the islands' mean parameters of the round
    before (arXiv:2401.16265). dipaco: as diloco, but islands train paths through shared modules, each on the part of
    the data that a router sends there (arXiv:2403.10616)."""
    every: PositiveInt = 100
    """Steps of a round, in which each parameter is exchanged once. The last step of the training ends a round, too."""
    warmup_steps: NonNegativeInt = 0
    """First steps, after each of which islands exchange all parameters and continue with their mean; rounds begin after
    them. Islands that part early drift apart most: DiLoCo's trainings begin from models of 24,000 steps
    (arXiv:2311.08105 §3), local SGD after a synchronous beginning is that of arXiv:1808.07217."""
    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """Outer optimizer: SGD with Nesterov momentum, or plain SGD (with heavy-ball momentum where that is given)."""
    learning_rate: Positive = 0.7
    """Outer learning rate, by which the mean of the islands' parameter changes is multiplied. 1 with plain sgd averages
    parameters. co2: 1 if not given."""
    momentum: Fraction = 0.9
    """Momentum of the outer optimizer; sgd: 0 if not given, co2: 0.5, dilocox: 0.3, since changes that are a round late
    diverge under 0.9."""
    compression: Compression = "none"
    """Precision in which parameter changes travel. none: that of the parameters. bf16. int8: with one scale for each
    1024 elements. int4: with one for each 64. Sums are always in the parameters' precision."""
    low_rank: PositiveInt | None = None
    """Rank of the two factors as which changes of matrices travel, where these are smaller (PowerSGD,
    arXiv:1905.13727); not given: changes travel whole. `compression` is then that of the factors."""
    rank_window: PositiveInt | None = None
    """Mean changes of a matrix whose mean numerical rank is the rank of its next factors (adaptive compression of
    arXiv:2506.21263): beginning with `low_rank`, ranks fall as changes lose rank; not given: `low_rank` throughout."""
    rank_tolerance: Fraction = 0.05
    """rank_window: share of a mean change's largest singular value, above which singular values count as its rank."""
    error_feedback: bool = False
    """Add to each change what compression and low rank lost of the island's change before (arXiv:1901.09847), which
    takes a copy of the parameters. true if not given under low_rank, and under dilocox with compression."""
    fragments: PositiveInt = 1
    """streaming, 2 if not given, or 1 for odd rounds: parts of the layers that are exchanged at different steps of a
    round."""
    delay: NonNegativeInt = 0
    """Steps beside which an exchange runs before its result is used. streaming: 1 if not given. dilocox and co2: a
    round, `every`, or none, with which dilocox is diloco."""
    mixing: Fraction = 0.0
    """streaming, 0.5 if not given: share of an island's own parameters in what it continues with."""
    staleness_penalty: Positive = 1.0
    """co2: divisor of the distance to the mean parameters of the round before (its program's `co2_gap_penalty`)."""
    momentum_clip: Positive | None = None
    """co2: largest magnitude of an element of the momentum; not given: not clipped."""
    modules: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1,)
    """dipaco, [1, 2] if not given: modules of each level, of which a level is a group of consecutive layers; a path has
    one of each, so that there are as many paths as their product. Islands are as many, or a multiple."""
    route_tokens: PositiveInt = 32
    """dipaco: first tokens of a sample by which it is sent to a path."""
    route_top: PositiveInt = 1
    """dipaco: nearest paths that train each sample, fewer than there are; validation takes the nearest alone."""
    router: Literal["kmeans", "discriminative"] = "kmeans"
    """dipaco: how samples are routed. kmeans: to the nearest of the clusters of their first tokens. discriminative: so
    at first, and after the steps `reshard_at` by a linear classifier of the same features, which has learnt the path of
    the lowest loss (arXiv:2403.10616 §2.4.2)."""
    reshard_at: tuple[PositiveInt, ...] = ()
    """discriminative: steps, each the end of a round, after which the router learns anew, and samples go where it sends
    them."""
    scored_samples: PositiveInt = 1024
    """discriminative: training samples whose loss on each path the router learns from."""
    reroute_every: PositiveInt = 128
    """dipaco: positions of a validation sample after which its path is chosen anew, by the last `route_tokens`."""
    coordinator: str | None = None
    """Address HOST:PORT of `muster coordinator`, through which runs that come and go are each other's islands; not
    given: islands are those of the plan."""
    secret_file: str | None = None
    """File with the secret of the coordinator and its peers, which `muster coordinator` makes."""
    announce: str | None = None
    """Address HOST:PORT at which other peers reach this one; not given: that of its connection to the coordinator, with
    any free port."""

    connections: Annotated[PositiveInt, Field(le=MAX_CONNECTIONS)] = 1
    """TCP connections by which this peer sends to the next one in the ring, each an equal share: several, where a
    single one is slower than the line (PCCL, arXiv:2505.14065)."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        own: dict[str, Any] = {"momentum": 0.3} if data.get("method") == "dilocox" and data.get("delay") != 0 else {}
        own |= {"momentum": 0.0} if data.get("optimizer") == "sgd" else {}
        if data.get("method") == "streaming":
            is_odd = str(every := data.get("every", 100)).isdecimal() and int(every) % 2
            own |= {"fragments": 1 if is_odd else 2, "delay": 1, "mixing": 0.5}
        if data.get("method") in DELAYED:
            own |= {"delay": data.get("every", 100)}
        if data.get("low_rank") or (data.get("method") == "dilocox" and data.get("compression", "none") != "none"):
            own |= {"error_feedback": True}
        if data.get("method") == "co2":
            own |= {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.5}
        if data.get("method") == "dipaco":
            own |= {"modules": (1, 2)}
        return {**own, **data}

    @model_validator(mode="after")
    def _check(self) -> "OuterConfig":
        for method, keys in _ONLY.items():
            for key, none in keys.items():
                if self.method != method and getattr(self, key) != none:
                    raise ValueError(f"{key} {getattr(self, key)} is for method {method}, not for {self.method}")
        if self.method in ("diloco", "dipaco") and self.delay:
            raise ValueError(f"delay {self.delay} is for methods streaming, dilocox and co2, not for {self.method}")
        if self.method in DELAYED and self.delay not in (0, self.every):
            raise ValueError(
                f"delay {self.delay} is neither a round nor nothing: expected {self.every} (every) or 0 for"
                f" {self.method}"
            )
        if self.coordinator is not None or self.method == "dipaco":
            self._check_plain_exchange()
        if self.error_feedback and self.compression == "none" and self.low_rank is None:
            raise ValueError("error_feedback has nothing to add: expected a compression or a low_rank beside it")
        if self.rank_window is not None and self.low_rank is None:
            raise ValueError("rank_window has no rank to begin with: expected low_rank beside it")
        if self.rank_window is None and self.rank_tolerance != 0.05:
            raise ValueError(
                f"rank_tolerance {self.rank_tolerance} is for ranks that adapt: expected rank_window beside it"
            )
        self._check_peers()
        self._check_modules()
        if self.method == "co2" and self.optimizer != "sgd":
            raise ValueError(f"optimizer {self.optimizer} is not CO2's: expected sgd, with or without momentum")
        if self.every % self.fragments:
            raise ValueError(
                f"every {self.every} is not a multiple of fragments {self.fragments}, which meet at equal distances:"
                f" expected {self.every - self.every % self.fragments or self.fragments} or another multiple"
            )
        if self.method == "streaming" and self.delay >= self.steps_between:
            raise ValueError(
                f"delay {self.delay} is not shorter than the {pluralize(self.steps_between, 'step')} from one fragment"
                f" to the next (every {self.every} / fragments {self.fragments})"
            )
        return self

    def _check_plain_exchange(self) -> None:
        user = "peers of a coordinator" if self.coordinator is not None else "dipaco"
        if self.low_rank is not None:
            raise ValueError(f"low_rank {self.low_rank} isn't built for {user}: leave it out")
        if self.error_feedback:
            raise ValueError(f"error_feedback isn't built for {user}: leave it out")

    def _check_modules(self) -> None:
        if self.method == "dipaco" and 1 < self.route_top >= prod(self.modules):
            raise ValueError(
                f"route_top {self.route_top} sends each sample to all {prod(self.modules)} paths, which would then be"
                " the same: expected fewer"
            )
        if (self.router == "discriminative") != bool(self.reshard_at):
            raise ValueError(
                "router discriminative and reshard_at, the steps at which it learns, go together: give both"
            )
        if self.router == "kmeans" and self.scored_samples != 1024:
            raise ValueError(
                f"scored_samples {self.scored_samples} is for router discriminative: a k-means router learns from no"
                " losses"
            )
        if list(self.reshard_at) != sorted({*self.reshard_at}):
            raise ValueError(
                f"reshard_at {list(self.reshard_at)} is in no order or has a step twice: expected ascending steps"
            )
        for step in self.reshard_at:
            if step <= self.warmup_steps or (step - self.warmup_steps) % self.every:
                raise ValueError(
                    f"reshard_at {step} is not the end of a round: expected warmup_steps {self.warmup_steps} and a"
                    f" multiple of every {self.every}"
                )
        if self.reroute_every < self.route_tokens:
            raise ValueError(
                f"reroute_every {self.reroute_every} is shorter than the route_tokens {self.route_tokens} by which a"
                f" new path is chosen: expected {self.route_tokens} or more"
            )

    def _check_peers(self) -> None:
        if self.coordinator is None:
            for key in ("secret_file", "announce"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is for peers of a coordinator: expected outer.coordinator beside it")
            if self.connections > 1:
                raise ValueError("connections are for peers of a coordinator: expected outer.coordinator beside them")
            return
        for key in ("coordinator", "announce"):
            if (value := getattr(self, key)) is not None:
                try:
                    parse_endpoint(value)
                except ValueError:
                    raise ValueError(f"{key} '{value}' is no address with a port: expected HOST:PORT") from None
        if self.secret_file is None:
            raise ValueError("coordinator needs secret_file, the file with the secret that muster coordinator has made")
        if self.method != "diloco":
            raise ValueError(f"method {self.method} isn't built for peers of a coordinator: expected diloco")
        if self.warmup_steps:
            raise ValueError("warmup_steps aren't built for peers of a coordinator: begin from train.init_from instead")

    @property
    def is_delayed_by_a_round(self) -> bool:
        """True where an exchange ends when that of the next round begins."""
        return self.delay == self.every

    @property
    def num_exchanges(self) -> int:
        """Exchanges that differ by number: fragments, or where one ends as the next begins, odd and even rounds."""
        return 2 if self.is_delayed_by_a_round else self.fragments

    @property
    def steps_between(self) -> int:
        """Steps from the exchange of one fragment to that of the next."""
        return self.every // self.fragments
