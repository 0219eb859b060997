"""The reference pages agree with the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentkit.config_io import parse_config, valid_keys

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


@pytest.mark.parametrize("command", ["run", "plan", "eval", "show", "doctor"])
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
