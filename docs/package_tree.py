"""MkDocs hook: lay out the package as it is installed, so that mkdocstrings finds all its modules.

The folders of the repository become one package only through ``package_dir`` in setup.cfg, which static analysis does
not read. The hook copies them into a temporary folder and points mkdocstrings there.
"""

from __future__ import annotations

import configparser
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
_tree: Path | None = None


@event_priority(100)  # before mkdocstrings reads its configuration
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copy the package and set ``paths`` of mkdocstrings' Python handler."""
    global _tree
    if _tree is None:
        _tree = Path(tempfile.mkdtemp(prefix="agentkit-docs-"))
        for package, folder in _package_dir().items():
            target = _tree.joinpath(*package.split("."))
            shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(_tree)]
    return config


def on_shutdown() -> None:
    """Remove the copy."""
    if _tree is not None:
        shutil.rmtree(_tree, ignore_errors=True)


def _package_dir() -> dict[str, str]:
    """Return ``package_dir`` of setup.cfg, parents first."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["package_dir"].strip().splitlines()
    pairs = dict(line.replace(" ", "").split("=") for line in lines)
    return dict(sorted(pairs.items()))
