"""What all tests share."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from muster.parallel.cpu_matmul import use_wide_matmuls
from tests.chromium import Browser, find_chromium
from tests.soak_parts import find_part, part_of
from tests.train_runs import whole_run

# The same examples on every machine: what `make test` proves on one, it proves on all. `make soak` draws new ones.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)

LONGEST = (
    "test_parity.py",
    "test_docs.py",
    "test_elastic.py",
    "test_islands.py",
    "test_train.py",
    "test_resume.py",
    "test_experts.py",
    "test_memory_forecast.py",
    "test_tiling.py",
    "test_verify.py",
    "test_mezo.py",
    "test_nodes.py",
    "test_linear_attention.py",
    "test_eager_reduction.py",
    "test_older_files.py",
    "test_train_faults.py",
    "test_hang.py",
    "test_restarts.py",
    "test_planner.py",
)
"""The files that take longest come first: one that a test process begins last would keep the others waiting."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _select_soak_part(config, items)
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def _select_soak_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the soak tests of the part that `--soak-part` names; an unlisted soak test is an error, so that none is
    forgotten."""
    parts = {item: part_of(f"{item.path.name}::{item.name}") for item in items if item.get_closest_marker("soak")}
    if missing := sorted({item.path.name for item, part in parts.items() if part is None}):
        raise pytest.UsageError(f"no part in tests/soak_parts.py has the soak tests of {', '.join(missing)}")
    if (wanted := config.getoption("--soak-part")) is None:
        return
    name = find_part(wanted)
    config.hook.pytest_deselected(items=[item for item in items if parts.get(item) != name])
    items[:] = [item for item in items if parts.get(item) == name]


def pytest_collection_finish() -> None:
    """Leave modules and test items out of the garbage collector's rounds, which would walk through all of them; and let
    no process of the tests write byte code, which those that fill a disk would cut short."""
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    use_wide_matmuls()  # as the ranks do, which tests compare with what they compute themselves
    settings.load_profile("drawn" if config.getoption("markexpr") == "soak" else "seeded")
    if (part := config.getoption("--soak-part")) is not None:
        try:
            find_part(part)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-chromium",
        action="store_true",
        help="fail, instead of skipping, the tests that open pages in a browser when Chromium is not installed",
    )
    parser.addoption("--faults", type=int, default=60, help="random faults of each run in the soak tests of faults")
    parser.addoption("--fault-seed", default="1", help="seed of these faults")
    parser.addoption("--soak-part", metavar="PART", help="run one part of the soak tests, by its name or number")


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `tiny`, not to be touched."""
    return whole_run(tmp_path_factory.getbasetemp())[0]


def require_chromium(config: pytest.Config) -> None:
    """Skip the test, or fail where the option says so, if Chromium is not installed."""
    if find_chromium() is None:
        message = "Chromium is not installed"
        pytest.fail(message) if config.getoption("--require-chromium") else pytest.skip(message)


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    require_chromium(request.config)
    with Browser() as browser:
        yield browser
