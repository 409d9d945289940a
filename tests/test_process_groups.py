"""Process groups that a rank makes, by PyTorch's fake process group."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.layout.mesh import coordinates_of
from muster.parallel import process_groups
from muster.parallel.process_groups import ProcessGroups, ranks_along
from muster.spec.plan_name import parse_plan_name


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("dp8-tp8-pp8", 77, {"dp_shard": range(69, 128, 8), "tp": range(72, 80)}),
        ("dp2x4-z1-pp2", 3, {"dp_replicate": (3, 7), "dp_shard": range(4)}),
        ("tp4", 2, {"tp": range(4)}),
        ("pp4", 2, {}),
    ],
)
def test_a_rank_makes_its_own_groups_only(name: str, rank: int, expected: dict, monkeypatch) -> None:
    plan, made = parse_plan_name(name), []
    make = dist.new_group
    monkeypatch.setattr(
        process_groups.dist, "new_group", lambda ranks, **options: made.append(ranks) or make(ranks, **options)
    )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        groups = ProcessGroups(plan, coordinates_of(plan, rank), torch.device("cpu"))
        found = {axis: dist.get_process_group_ranks(group) for axis, group in groups.by_axis.items()}
        mesh = groups.data_mesh()
        assert found == {axis: list(ranks) for axis, ranks in expected.items()}
        assert len(made) <= 4
        assert (None if mesh is None else mesh.shape) == {"dp2x4-z1-pp2": (2, 4), "dp8-tp8-pp8": (8,)}.get(name)
    finally:
        dist.destroy_process_group()


def test_ranks_along_two_axes_are_in_their_order() -> None:
    plan = parse_plan_name("dp2x2-z1-tp2")
    assert ranks_along(plan, coordinates_of(plan, 3), ("dp_replicate", "dp_shard")) == [1, 3, 5, 7]
