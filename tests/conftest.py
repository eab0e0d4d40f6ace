"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# One thread per process: the tests start several of them on two cores. Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

# A busy machine makes one example slow; the timeout of the whole test bounds it.
settings.register_profile("relight", deadline=None, max_examples=60)
settings.load_profile("relight")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        return
    skip = pytest.mark.skip(reason="runs for minutes: pytest --soak")
    for item in items:
        if item.get_closest_marker("soak") is not None:
            item.add_marker(skip)
