"""Options and environment of all tests."""

from __future__ import annotations

import os

# More threads per test would compete for the cores with the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests do not use the network unless they say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import seeds
from chromium import browser as browser
from chromium import one_browser as one_browser
from plugin_packages import install as install


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("agentkit")
    group.addoption("--all-seeds", action="store_true", help=f"run tests marked seeds with all {seeds.SEEDS} seeds")
    group.addoption("--seeds-start", type=int, help="first seed of this run (default: changes daily)")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seeds_start is None:  # pytest-xdist passes the value to its workers
        config.option.seeds_start = seeds.start_of_today()


def pytest_report_header(config: pytest.Config) -> str:
    chosen = "all" if config.option.all_seeds else f"{seeds.SHARE} per test"
    return f"seeds: {chosen}; to repeat this run: --seeds-start {config.option.seeds_start}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        blocks = seeds.blocks(metafunc.config.option.seeds_start, metafunc.config.option.all_seeds)
        metafunc.parametrize("seeds", blocks, ids=lambda block: f"{block.start}-{block.stop - 1}")


@pytest.fixture
def seeds_start(request: pytest.FixtureRequest) -> int:
    """First seed of this run."""
    return request.config.option.seeds_start
