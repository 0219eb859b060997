"""Tests find official data through ``AGENTKIT_DATA`` alone; without it they skip with the command that fetches it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEED_DATA = {
    "alfworld": "tests/envs/test_alfworld.py::test_the_official_training_games",
    "boxoban-test": "tests/envs/test_sokoban.py::test_boxoban_levels_are_read_and_solved",
    "swebench-lite-dev": "tests/envs/test_swebench.py::test_the_official_file_loads_with_its_images_and_tests",
    "webshop-small": "tests/envs/test_webshop.py::test_the_official_small_set_has_its_official_counts",
}


def test_without_official_data_tests_skip_with_the_command(tmp_path: Path) -> None:
    ours = {name: value for name, value in os.environ.items() if name not in ("CI", "AGENTKIT_DATA")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "", *NEED_DATA.values()]
    environment = {**ours, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "400"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout.splitlines()[-1].startswith(f"{len(NEED_DATA)} skipped"), result.stdout
    for name in NEED_DATA:
        assert f"run `agentkit data fetch {name}`" in result.stdout


@pytest.mark.parametrize("name", NEED_DATA)
def test_the_printed_command_fetches_the_data_set(name: str) -> None:
    from agentkit import data

    assert data.dataset(name).files
