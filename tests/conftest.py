"""What all tests share."""

import pytest
from hypothesis import settings

# The same examples on every machine: what `make test` proves on one, it proves on all. `make soak` draws new ones.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("drawn" if config.getoption("markexpr") == "soak" else "seeded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-chromium",
        action="store_true",
        help="fail, instead of skipping, the tests that open pages in a browser when Chromium is not installed",
    )
