"""Order of sharding levels, as predicted and as executed: steps on a GPU in name only, in logical time."""

import pytest
from torch import Tensor

from muster.api.verbs import predict
from muster.config.cluster_files import load_cluster
from muster.cost.time import param_communication
from muster.cost.time.param_communication import exposed_beside_pass_s
from muster.spec.cluster import ClusterSpec
from muster.train.memory_check import FakeStage
from tests.fake_gpu import Stream
from tests.stream_check import StreamCheck
from tests.test_fake_gpu import fake_factories, watch_step

__all__ = ["fake_factories"]

LAYERS, MICRO_BATCHES = 12, 2
LAYER_NUMEL = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
LAYER_FLOPS = 2 * 16 * LAYER_NUMEL
LAYER_BYTES = LAYER_FLOPS / 16
"""FLOPs of a layer's forward on 16 positions, and bytes of its weights in bf16."""


class TimedStreams(StreamCheck):
    """A watch in whose time a layer's forward takes a second, its gather `gather_s`, and anything else nothing.

    An operator begins when all operators are over that its stream is known to have waited for.
    """

    gather_s = 0.0

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._ends_s: dict[tuple[int, int], float] = {}
        self._begin_s = 0.0

    def begin_step(self) -> None:
        super().begin_step()
        self._begin_s = max(self._ends_s.values())

    @property
    def step_s(self) -> float:
        return max(self._ends_s.values()) - self._begin_s

    def _use(self, stream: Stream, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        super()._use(stream, name, reads, writes)
        number = stream.known[stream.id]
        before = (stream.known | {stream.id: number - 1}).items()
        start_s = max((self._ends_s.get(known, 0.0) for known in before), default=0.0)
        self._ends_s[stream.id, number] = start_s + self._duration_s(name, reads, writes)

    def _duration_s(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> float:
        if name == "mm":
            return 2 * writes[0].numel() * reads[0].shape[1] / LAYER_FLOPS
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            sent = max((x.numel() * x.element_size() for x in (*reads, *writes)), default=0)
            return self.gather_s * sent / LAYER_BYTES
        return 0.0


def executed_s(level: str, gather_s: float) -> float:
    kind = type("Timed", (TimedStreams,), {"gather_s": gather_s})
    case = {"plan": f"dp2-{level}", "layers": LAYERS, "batch": 2 * MICRO_BATCHES}
    return watch_step(case, 0, kind).step_s


def predicted_s(level: str, cluster: ClusterSpec) -> float:
    return predict("llama3-8b", cluster, f"dp8-mb1-{level}", global_batch=8 * MICRO_BATCHES).step_time_s


def with_slower_links(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    groups = []
    for group in cluster.groups:
        slow = group.intra.model_copy(update={"bandwidth_bytes_per_s": group.intra.bandwidth_bytes_per_s / factor})
        groups.append(group.model_copy(update={"intra": slow}))
    return cluster.model_copy(update={"groups": tuple(groups)})


@pytest.mark.soak
@pytest.mark.parametrize(("gather_s", "factor", "first"), [(0.2, 1, "z1"), (4.0, 60, "z1")])
def test_z1_and_z3_are_predicted_in_the_order_in_which_they_are_executed(
    gather_s: float, factor: float, first: str
) -> None:
    """Over slow links z3 pays for a gather in each pass."""
    cluster = with_slower_links(load_cluster("8xh100"), factor)
    for seconds in (
        {level: executed_s(level, gather_s) for level in ("z1", "z3")},
        {level: predicted_s(level, cluster) for level in ("z1", "z3")},
    ):
        assert min(seconds, key=seconds.__getitem__) == first, seconds


@pytest.mark.soak
@pytest.mark.parametrize("gather_s", [0.2, 1.0, 4.0])
def test_a_step_hides_as_much_of_z1s_communication_as_predicted(
    gather_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hidden part of the communication, in logical time, and by the formula for the same times."""
    alone_s, beside_s = executed_s("z1", 0.0), executed_s("z1", gather_s)
    monkeypatch.setattr(FakeStage, "overlapping_devices", frozenset())
    travels_s = executed_s("z1", gather_s) - alone_s
    hidden = 1 - (beside_s - alone_s) / travels_s
    monkeypatch.setattr(param_communication, "OVERLAP_SLOWDOWN", 0.0)
    ends = 2 * 257 * 32 / LAYER_NUMEL
    first = (ends + 1) / (ends + LAYERS)
    pass_s = alone_s / MICRO_BATCHES / 3
    exposed_s = sum(exposed_beside_pass_s(part * travels_s / 3, part * pass_s, first, 1 / LAYERS) for part in (1, 2))
    assert hidden == pytest.approx(1 - exposed_s / travels_s, abs=0.05)
    assert hidden > 0.7 or gather_s > 1
