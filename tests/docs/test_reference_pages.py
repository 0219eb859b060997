"""The reference pages agree with the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentkit.config_io import parse_config, valid_keys
from agentkit.trainers.algorithms.advantages import ESTIMATORS
from agentkit.trainers.algorithms.losses import POLICY_LOSSES

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_is_up_to_date() -> None:
    path = ROOT / "docs" / "generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.page(), "run: python docs/generate_configuration.py"
    for key in valid_keys():
        assert f"`{'.'.join(key)}`" in page


def test_every_algorithm_has_a_row_with_its_source() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for heading, names in (("## Advantages", ESTIMATORS), ("## Losses", POLICY_LOSSES)):
        section = page.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", section, re.MULTILINE))
        assert rows.keys() >= set(names), f"{heading}: {set(names) - rows.keys()}"
        assert all(re.search(r"\d{4}|the same", rows[name]) for name in names), "a source has a year or an arXiv number"


@pytest.mark.parametrize("command", ["run", "plan", "eval", "serve", "show", "doctor"])
def test_the_command_page_names_every_option(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "agentkit", command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = page.partition(f"## `agentkit {command}`")[2].partition("\n## ")[0]
    for option in set(re.findall(r"--[a-z-]+", result.stdout)) - {"--help"}:
        assert f"`{option}" in section, f"docs/cli.md says nothing of {command} {option}"


def test_examples_are_valid_and_the_smallest_is_small() -> None:
    for path in (ROOT / "examples").glob("*.yaml"):
        parse_config(path.read_text(encoding="utf-8"), source=str(path))
    assert len((ROOT / "examples" / "minimal.yaml").read_text().splitlines()) < 20
